"""Avro schemas as Arrow fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import SchemaRefused
from strandline.values.schema.evolution import is_list
from strandline.values.schema.limits import MAX_FIELDS, FieldCount

_MAX_DEPTH: Final = 64
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_DIGITS: Final = 76
_MAX_DIGITS_128: Final = 38
_PRIMITIVES: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL: Final = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", tz="UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", tz="UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}


def avro_fields(schema: Mapping[str, Any]) -> list[pa.Field]:
    """The fields of an Avro schema of a record: all of them become nullable columns.

    An enum is a string; a union with null is its other branch, and other unions are refused.
    """
    kind = _AvroSchemaReader().type_of("", schema, "", 0)
    if not isinstance(kind, pa.StructType):
        raise SchemaRefused("The Avro schema of a value must be a record.")
    return list(kind)


class _AvroSchemaReader:
    def __init__(self) -> None:
        self._named: dict[str, tuple[pa.DataType | None, int]] = {}
        """Types by their names, with the count of their fields; None for one that is being read."""
        self._count = FieldCount()

    def type_of(self, path: str, schema: Any, space: str, depth: int) -> pa.DataType:  # noqa: PLR0911 - one per kind
        """The Arrow type of a part of the schema, inside the namespace ``space``."""
        name = f"field '{path[:100]}'" if path else "value"
        if depth > _MAX_DEPTH:
            raise SchemaRefused(f"The {name} of the Avro schema is too deep.")
        if isinstance(schema, str):
            return _PRIMITIVES[schema] if schema in _PRIMITIVES else self._reference(name, schema, space)
        if isinstance(schema, list):
            rest = [branch for branch in schema if branch not in ("null", {"type": "null"})]
            if len(rest) != 1:
                raise SchemaRefused(f"The {name} has several types in the Avro schema: a column has one.")
            return self.type_of(path, rest[0], space, depth + 1)
        if not isinstance(schema, Mapping):
            raise SchemaRefused(f"The {name} of the Avro schema is not a schema: {schema!r:.50}.")
        match schema.get("type"):
            case "record" | "error":
                return self._record(path, name, schema, space, depth)
            case "enum":
                return self._name(schema, space, pa.string())
            case "array":
                return pa.list_(self.type_of(f"{path}[]", schema.get("items"), space, depth + 1))
            case "map":
                return pa.map_(pa.string(), self.type_of(path + "{}", schema.get("values"), space, depth + 1))
            case "fixed":
                return self._name(schema, space, _fixed(name, schema))
            case str() as kind:
                return _logical(name, kind, schema) or self.type_of(path, kind, space, depth + 1)
            case kind:
                return self.type_of(path, kind, space, depth + 1)

    def _record(self, path: str, name: str, schema: Mapping[str, Any], space: str, depth: int) -> pa.DataType:
        full = _full_name(schema, space)
        self._named[full] = None, 0
        before = self._count.fields
        inside, space = f"{path}." if path else "", full.rpartition(".")[0]
        fields = schema.get("fields")
        if not isinstance(fields, list) or not all(isinstance(field, Mapping) and "name" in field for field in fields):
            raise SchemaRefused(f"The {name} of the Avro schema has no fields.")
        named = [(str(field["name"]), field.get("type")) for field in fields]
        self._count.add(len(named))
        kind = pa.struct([pa.field(name, self.type_of(inside + name, part, space, depth + 1)) for name, part in named])
        self._named[full] = kind, self._count.fields - before
        return kind

    def _name(self, schema: Mapping[str, Any], space: str, kind: pa.DataType) -> pa.DataType:
        self._named[_full_name(schema, space)] = kind, 0
        return kind

    def _reference(self, name: str, referred: str, space: str) -> pa.DataType:
        full = referred if "." in referred or not space else f"{space}.{referred}"
        full = full if full in self._named else referred
        if full not in self._named:
            raise SchemaRefused(f"The {name} is of the type {referred!r:.100}, which the Avro schema lacks.")
        kind, fields = self._named[full]
        if kind is None:
            raise SchemaRefused(f"The {name} of the Avro schema is recursive: a column cannot be.")
        self._count.add(fields)
        return kind


def _full_name(schema: Mapping[str, Any], space: str) -> str:
    name = str(schema.get("name", ""))
    space = str(schema.get("namespace", space) or "")
    return name if "." in name or not space else f"{space}.{name}"


def _fixed(name: str, schema: Mapping[str, Any]) -> pa.DataType:
    if schema.get("logicalType") == "decimal":
        return _decimal(name, schema)
    size = schema.get("size")
    if not isinstance(size, int) or not 0 < size <= 1 << 20:
        raise SchemaRefused(f"The {name} of the Avro schema is fixed of the size {size!r:.50}.")
    return pa.binary(size)


def _logical(name: str, kind: str, schema: Mapping[str, Any]) -> pa.DataType | None:
    logical = schema.get("logicalType")
    if (kind, logical) == ("bytes", "decimal"):
        return _decimal(name, schema)
    return _LOGICAL.get((kind, str(logical)))


def _decimal(name: str, schema: Mapping[str, Any]) -> pa.DataType:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision <= _MAX_DIGITS:
        raise SchemaRefused(f"The {name} of the Avro schema is a decimal of {precision!r}, {scale!r} digits.")
    return (pa.decimal128 if precision <= _MAX_DIGITS_128 else pa.decimal256)(precision, scale)


def to_avro(fields: Iterable[pa.Field], name: str = "Value") -> dict[str, Any]:
    """An Avro schema with the columns of an Arrow schema, each of which may be null."""
    parts = []
    for field in fields:
        if not _NAME.fullmatch(field.name):
            raise SchemaRefused(f"The field {field.name!r:.100} has a name that Avro does not allow: rename it.")
        parts.append(
            {"name": field.name, "type": ["null", _avro_type(f"{name}_{field.name}", field.type)], "default": None}
        )
    return {"type": "record", "name": name, "fields": parts}


def _avro_type(name: str, kind: pa.DataType) -> Any:  # noqa: PLR0911 - one answer for each kind of type
    if pt.is_struct(kind):
        return to_avro(kind, name)
    if is_list(kind):
        return {"type": "array", "items": ["null", _avro_type(name, kind.value_type)]}
    if pt.is_map(kind):
        return {"type": "map", "values": ["null", _avro_type(name, kind.item_type)]}
    if pt.is_decimal(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if pt.is_fixed_size_binary(kind):
        return {"type": "fixed", "name": name, "size": kind.byte_width}
    for (base, logical), same in _LOGICAL.items():
        if same == kind:
            return {"type": base, "logicalType": logical}
    for base, same in _PRIMITIVES.items():
        if same == kind:
            return base
    raise SchemaRefused(f"The field '{name.partition('_')[2]}' is of type {kind}, which Avro does not have: cast it.")


def plain_schema(schema: Any) -> Any:
    """The schema without logical types, so that numbers stay numbers and bytes stay bytes."""
    if isinstance(schema, list):
        return [plain_schema(branch) for branch in schema]
    if isinstance(schema, Mapping):
        return {
            key: [{**field, "type": plain_schema(field.get("type"))} for field in part]
            if key == "fields" and isinstance(part, list)
            else plain_schema(part)
            if key in ("type", "items", "values")
            else part
            for key, part in schema.items()
            if key != "logicalType"
        }
    return schema


def check_writer(written: Any, own: Any) -> None:
    """``ValueError`` for a schema whose records could take memory without bytes, or whose times mean something else."""
    _WriterSizes().check(written, frozenset(), 0)
    for name, logical in _logical_types(own).items():
        other = _logical_types(written).get(name, logical)
        if other != logical:
            raise ValueError(f"The field '{name}' was written as {other or 'a plain number'}, not as {logical}")


class _WriterSizes:
    def __init__(self) -> None:
        self._named: dict[str, tuple[bool, int]] = {}
        """Of each named type: whether a value takes bytes, and how many parts it has."""
        self._parts = 0

    def check(self, schema: Any, open_names: frozenset[str], depth: int) -> bool:
        """Whether a value takes at least a byte. Without that, or with recursion, few bytes could be a huge value."""
        if depth > _MAX_DEPTH:
            raise ValueError("The schema is too deep")
        self._parts += 1
        if isinstance(schema, str):
            return self._reference(schema, open_names)
        if isinstance(schema, list):
            for branch in schema:
                self.check(branch, open_names, depth + 1)
            return True
        if not isinstance(schema, Mapping):
            raise TypeError("The schema is not valid")
        kind = schema.get("type")
        if kind in ("record", "error"):
            inside, before = open_names | {_last_name(schema.get("name"))}, self._parts
            # A list: each field is checked, also behind the first that has bytes.
            found = any([self.check(field.get("type"), inside, depth + 1) for field in schema.get("fields", [])])  # noqa: C419
            return self._name(schema, has_bytes=found, parts=self._parts - before)
        if kind in ("array", "map"):
            item = schema.get("items" if kind == "array" else "values")
            if not self.check(item, open_names, depth + 1) and kind == "array":
                raise ValueError("The schema has an array of values without bytes")
            return True
        if kind == "fixed":
            return self._name(schema, has_bytes=isinstance(size := schema.get("size"), int) and size > 0, parts=0)
        return kind == "enum" or self.check(kind, open_names, depth + 1)

    def _name(self, schema: Mapping[str, Any], *, has_bytes: bool, parts: int) -> bool:
        name = _last_name(schema.get("name"))
        others = self._named.get(name, (True, 0))  # of another namespace
        self._named[name] = has_bytes and others[0], max(parts, others[1])
        return has_bytes

    def _reference(self, name: str, open_names: frozenset[str]) -> bool:
        last = _last_name(name)
        if last in open_names:
            raise ValueError("The schema is recursive")
        has_bytes, parts = self._named.get(last, (name != "null", 0))
        self._parts += parts
        if self._parts > MAX_FIELDS:
            raise ValueError(f"The schema has more than {MAX_FIELDS:,} parts")
        return has_bytes


def _last_name(name: Any) -> str:
    return str(name).rpartition(".")[2]


def _logical_types(schema: Any, path: str = "") -> dict[str, str]:
    """The logical type of each number and of each decimal, by its path; empty text for none."""
    found: dict[str, str] = {}
    for branch in schema if isinstance(schema, list) else [schema]:
        if isinstance(branch, str):
            if branch in ("int", "long", "bytes"):
                found[path] = ""
            continue
        if not isinstance(branch, Mapping):
            continue
        kind = branch.get("type")
        if kind == "record":
            for field in branch.get("fields", []):
                found |= _logical_types(field.get("type"), f"{path}.{field['name']}" if path else str(field["name"]))
        elif kind in ("array", "map"):
            found |= _logical_types(branch.get("items" if kind == "array" else "values"), f"{path}[]")
        elif kind in ("int", "long", "bytes", "fixed"):
            logical = str(branch.get("logicalType", ""))
            found[path] = f"{logical}({branch.get('scale', 0)})" if logical == "decimal" else logical
        elif not isinstance(kind, str):
            found |= _logical_types(kind, path)
    return found


def missing_default(old: Any, new: Any, path: str = "") -> str | None:
    """The first field that only the new schema has, and that has no default there; None if there is none."""
    old, new = _only_branch(old), _only_branch(new)
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return None
    kind = new.get("type")
    if kind in ("array", "map"):
        inside = "items" if kind == "array" else "values"
        return missing_default(old.get(inside), new.get(inside), path)
    if kind != "record" or not isinstance(new.get("fields"), list):
        return None
    known = {str(field["name"]): field for field in old.get("fields", [])}
    for field in new["fields"]:
        name = f"{path}{field['name']}"
        before = known.get(str(field["name"]))
        if before is None:
            found = None if "default" in field else name
        else:
            found = missing_default(before.get("type"), field.get("type"), f"{name}.")
        if found is not None:
            return found
    return None


def _only_branch(schema: Any) -> Any:
    """The schema itself, or its branch beside null."""
    if isinstance(schema, list):
        schema = next((branch for branch in schema if branch not in ("null", {"type": "null"})), None)
    if isinstance(schema, Mapping) and isinstance(schema.get("type"), Mapping | list):
        return _only_branch(schema["type"])
    return schema
