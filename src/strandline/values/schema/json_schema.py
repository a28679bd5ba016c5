"""JSON Schema as Arrow fields with constraints, and the keywords that no codec enforces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import SchemaRefused
from strandline.values.schema.constraints import Constraints, constraining, constraints_of, place
from strandline.values.schema.limits import FieldCount
from strandline.values.schema.type_names import type_named

_MAX_REFERENCES: Final = 64
_INTEGERS: Final = {
    f"{prefix}int{bits}": getattr(pa, f"{prefix}int{bits}")() for prefix in ("", "u") for bits in (8, 16, 32, 64)
}
_NUMBERS: Final = {"float": pa.float32(), "double": pa.float64()}
_TEXTS: Final = {"date-time": pa.timestamp("us", tz="UTC"), "date": pa.date32(), "time": pa.time64("us")}
_NAMES: Final = {bool: "boolean", int: "integer", float: "number", str: "string"}
_DEFINING: Final = ("$ref", "anyOf", "oneOf", "properties", "items", "additionalProperties")


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a JSON Schema: its column, its constraints, and whether it may be null."""

    kind: pa.DataType
    constraints: Constraints = field(default_factory=dict)
    nullable: bool = False


def constraining_keyword(schema: Any) -> str | None:
    """The first keyword of a JSON Schema that constrains values, with its place; None if there is none.

    Any schema may be given: what is no JSON Schema has no such keyword.

    >>> constraining_keyword({"type": "object", "properties": {"id": {"type": "integer", "minimum": 0}}})
    "'minimum' of the field 'id'"
    """
    reader = json_schema_reader(schema)
    return None if reader is None else reader.constraining


def json_schema_reader(schema: Any) -> _JsonSchemaReader | None:
    """The parts of a JSON Schema; None for a schema of another notation."""
    with suppress(ValueError, RecursionError):
        schema = json.loads(schema) if isinstance(schema, str | bytes) else schema
    if not isinstance(schema, Mapping) or schema.get("type") == "record" or "fields" in schema:
        return None
    return _JsonSchemaReader(schema)


def json_schema_fields(schema: Mapping[str, Any]) -> list[pa.Field]:
    """The fields of a JSON Schema of an object.

    ``format`` chooses among types: ``date-time``, ``date`` and ``time`` for strings, ``int32`` and its kin for
    integers, ``float`` for numbers; ``contentEncoding: base64`` is binary. A string's ``format`` may also be a
    type with its settings, as a log records it: ``decimal128(12, 2)``, ``timestamp[ms]``. An object without
    ``properties`` whose ``additionalProperties`` have a schema is a map.
    """
    kind = _JsonSchemaReader(schema).part.kind
    if not isinstance(kind, pa.StructType):
        raise SchemaRefused("The JSON Schema of a value must be of type object, with properties.")
    return list(kind)


class _JsonSchemaReader:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._count = FieldCount()
        self.constraining: str | None = None
        """The first keyword that constrains values."""
        self.unenforced: str | None = None
        """The first of them that cannot be enforced."""
        self.part = self._part_of("", root, 0)

    def _part_of(self, path: str, schema: Any, depth: int) -> _Part:
        """The column of a part of the schema, with its constraints."""
        name = place(path)
        self._count.add()
        if depth > _MAX_REFERENCES:
            raise SchemaRefused(f"The {name} of the JSON Schema is recursive: a column cannot be.")
        if not isinstance(schema, Mapping):
            raise SchemaRefused(f"The {name} of the JSON Schema is not an object: {schema!r:.50}.")
        self._note(name, [*constraining(schema), *_hidden(schema)], _hidden(schema))
        if "$ref" in schema:
            self._note(name, constraining(schema), constraining(schema))
            return self._part_of(path, self._referenced(name, schema["$ref"]), depth + 1)
        for word in ("anyOf", "oneOf"):
            choices = schema.get(word)
            if isinstance(choices, list):
                self._note(name, constraining(schema), constraining(schema))
                rest = [choice for choice in choices if choice != {"type": "null"}]
                if len(rest) != 1:
                    raise SchemaRefused(f"The {name} has several types in the JSON Schema: a column has one.")
                part = self._part_of(path, rest[0], depth + 1)
                return replace(part, nullable=part.nullable or len(rest) < len(choices))
        kind = _type_name(name, schema)
        if kind == "object":
            part = self._object(path, name, schema, depth)
        elif kind == "array":
            item = self._part_of(f"{path}[]", schema.get("items", {}), depth + 1)
            part = _Part(pa.list_(item.kind), {"items": item.constraints} if item.constraints else {})
        else:
            part = _Part(_scalar(name, kind, schema))
        done = ("required", "additionalProperties") if pt.is_struct(part.kind) else ()
        own = {word: value for word, value in schema.items() if word not in done}
        constraints, unenforced = constraints_of(part.kind, own)
        self._note(name, [], [] if unenforced is None else [unenforced])
        return _Part(part.kind, {**part.constraints, **constraints}, _is_nullable(schema))

    def _note(self, name: str, found: list[str], unenforced: list[str]) -> None:
        """Remember keywords that constrain, and those that cannot be enforced."""
        if found and self.constraining is None:
            self.constraining = f"{found[0]!r} of the {name}"
        if unenforced and self.unenforced is None:
            self.unenforced = f"{unenforced[0]!r} of the {name}"

    def _object(self, path: str, name: str, schema: Mapping[str, Any], depth: int) -> _Part:
        properties, rest = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, Mapping) and properties:
            inside = f"{path}." if path else ""
            parts = {key: self._part_of(inside + key, part, depth + 1) for key, part in properties.items()}
            kind = pa.struct([pa.field(key, part.kind) for key, part in parts.items()])
            required = schema.get("required", [])
            if not isinstance(required, list) or not all(isinstance(key, str) and key in parts for key in required):
                self._note(name, [], ["required"])
                required = []
            constraints: dict[str, Any] = {
                "required": sorted(set(required)),
                "nullable": sorted(key for key in set(required) if parts[key].nullable),
                "properties": {key: part.constraints for key, part in parts.items() if part.constraints},
            }
            constraints = {word: value for word, value in constraints.items() if value}
            return _Part(kind, {**constraints, "additionalProperties": False} if rest is False else constraints)
        if isinstance(rest, Mapping):
            item = self._part_of(path + "{}", rest, depth + 1)
            return _Part(pa.map_(pa.string(), item.kind), {"items": item.constraints} if item.constraints else {})
        raise SchemaRefused(f"The {name} of the JSON Schema has no properties.")

    def _referenced(self, name: str, reference: Any) -> Any:
        found: Any = self._root
        if isinstance(reference, str) and reference.startswith("#"):
            for step in reference[1:].strip("/").split("/") if reference != "#" else ():
                found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        raise SchemaRefused(f"The {name} refers to {reference!r:.100}, which is not in the JSON Schema.")


def _hidden(schema: Mapping[str, Any]) -> list[str]:
    """Keywords that another one of the same part hides, or makes a constraint that nothing enforces."""
    defining = [word for word in _DEFINING if word in schema]
    rest = schema.get("additionalProperties", True)
    if "properties" in schema and rest not in (True, False) and rest != {}:
        return ["additionalProperties"]
    return [] if defining == ["properties", "additionalProperties"] else defining[1:]


def _is_nullable(schema: Mapping[str, Any]) -> bool:
    kind, members = schema.get("type"), [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(members, list) and None not in members:
        return False
    return schema.get("nullable") is True or kind is None or (isinstance(kind, list) and "null" in kind)


def _type_name(name: str, schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    names = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    if not names:
        members = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(members, list):
            names = {_NAMES.get(type(each), "") for each in members if each is not None}
        elif "properties" in schema:
            names = {"object"}
        elif "items" in schema:
            names = {"array"}
    names -= {"null"}
    if names == {"integer", "number"}:
        names = {"number"}
    if not names:
        raise SchemaRefused(f"The {name} has no type in the JSON Schema: give it one.")
    if len(names) > 1:
        raise SchemaRefused(f"The {name} has several types in the JSON Schema: a column has one.")
    return names.pop()


def _scalar(name: str, kind: str, schema: Mapping[str, Any]) -> pa.DataType:
    form = schema.get("format")
    match kind:
        case "boolean":
            return pa.bool_()
        case "integer":
            return _INTEGERS.get(str(form), pa.int64())
        case "number":
            return _NUMBERS.get(str(form), pa.float64())
        case "string" if schema.get("contentEncoding") == "base64":
            return pa.binary()
        case "string":
            return _TEXTS.get(str(form)) or _named(name, str(form)) or pa.string()
    raise SchemaRefused(f"The {name} is of the unknown type {kind!r:.50} in the JSON Schema.")


def _named(name: str, form: str) -> pa.DataType | None:
    """The type that a format names with its settings. Plain names mean something else elsewhere: OpenAPI's binary."""
    try:
        return type_named(form) if form.endswith((")", "]")) else None
    except ValueError as error:
        raise SchemaRefused(f"The {name} has the format {form:.50} in the JSON Schema: {error}.") from error
