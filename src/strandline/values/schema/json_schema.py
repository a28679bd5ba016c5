"""JSON Schema as Arrow fields: the part that defines columns. Constraints are found, and not enforced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa

from strandline.errors import SchemaRefused

_MAX_REFERENCES: Final = 64
_INTEGERS: Final = {
    f"{prefix}int{bits}": getattr(pa, f"{prefix}int{bits}")() for prefix in ("", "u") for bits in (8, 16, 32, 64)
}
_NUMBERS: Final = {"float": pa.float32(), "double": pa.float64()}
_TEXTS: Final = {"date-time": pa.timestamp("us", tz="UTC"), "date": pa.date32(), "time": pa.time64("us")}
_NAMES: Final = {bool: "boolean", int: "integer", float: "number", str: "string"}


_CONSTRAINTS: Final = frozenset(
    (
        *("enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems", "contains", "minContains"),
        *("maxContains", "prefixItems", "additionalItems", "unevaluatedItems", "required", "minProperties"),
        *("maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "dependentRequired"),
        *("dependentSchemas", "dependencies", "allOf", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that no codec enforces. Other keywords define columns, or are annotations, as unknown ones are."""
_OFF: Final = ("uniqueItems", "required")
"""Those that allow everything when they are false or empty."""
_DEFINING: Final = ("$ref", "anyOf", "oneOf", "properties", "items", "additionalProperties")


def unenforced_keyword(schema: Any) -> str | None:
    """The first keyword of a JSON Schema that a codec does not enforce, with its place; None if there is none.

    Any schema may be given: what is no JSON Schema has no such keyword.

    >>> unenforced_keyword({"type": "object", "properties": {"id": {"type": "integer", "minimum": 0}}})
    "'minimum' of the field 'id'"
    """
    with suppress(ValueError, RecursionError):
        schema = json.loads(schema) if isinstance(schema, str | bytes) else schema
    if not isinstance(schema, Mapping) or schema.get("type") == "record" or "fields" in schema:
        return None
    reader = _JsonSchemaReader(schema)
    reader.type_of("", schema, 0)
    return reader.unenforced


def json_schema_fields(schema: Mapping[str, Any]) -> list[pa.Field]:
    """The fields of a JSON Schema of an object.

    ``format`` chooses among types: ``date-time``, ``date`` and ``time`` for strings, ``int32`` and its kin for
    integers, ``float`` for numbers; ``contentEncoding: base64`` is binary. An object without ``properties`` whose
    ``additionalProperties`` have a schema is a map.
    """
    kind = _JsonSchemaReader(schema).type_of("", schema, 0)
    if not isinstance(kind, pa.StructType):
        raise SchemaRefused("The JSON Schema of a value must be of type object, with properties.")
    return list(kind)


class _JsonSchemaReader:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.unenforced: str | None = None
        """The first keyword that was found and is not enforced."""

    def _note(self, name: str, schema: Mapping[str, Any]) -> None:
        """Remember a keyword that constrains, or that another one hides."""
        found = [word for word in schema if word in _CONSTRAINTS and (schema[word] or word not in _OFF)]
        defining = [word for word in _DEFINING if word in schema]
        rest = schema.get("additionalProperties", True)
        if "properties" in schema and rest is not True and rest != {}:
            found.append("additionalProperties")
        elif len(defining) > 1 and defining != ["properties", "additionalProperties"]:
            found += defining[1:]
        if found and self.unenforced is None:
            self.unenforced = f"{found[0]!r} of the {name}"

    def type_of(self, path: str, schema: Any, depth: int) -> pa.DataType:
        """The Arrow type of a part of the schema."""
        name = f"field '{path[:100]}'" if path else "value"
        if depth > _MAX_REFERENCES:
            raise SchemaRefused(f"The {name} of the JSON Schema is recursive: a column cannot be.")
        if not isinstance(schema, Mapping):
            raise SchemaRefused(f"The {name} of the JSON Schema is not an object: {schema!r:.50}.")
        self._note(name, schema)
        if "$ref" in schema:
            return self.type_of(path, self._referenced(name, schema["$ref"]), depth + 1)
        for word in ("anyOf", "oneOf"):
            choices = schema.get(word)
            if isinstance(choices, list):
                rest = [choice for choice in choices if choice != {"type": "null"}]
                if len(rest) != 1:
                    raise SchemaRefused(f"The {name} has several types in the JSON Schema: a column has one.")
                return self.type_of(path, rest[0], depth + 1)
        kind = _type_name(name, schema)
        if kind == "object":
            return self._object(path, name, schema, depth)
        if kind == "array":
            return pa.list_(self.type_of(f"{path}[]", schema.get("items", {}), depth + 1))
        return _scalar(name, kind, schema)

    def _object(self, path: str, name: str, schema: Mapping[str, Any], depth: int) -> pa.DataType:
        properties, rest = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, Mapping) and properties:
            inside = f"{path}." if path else ""
            return pa.struct(
                [pa.field(key, self.type_of(inside + key, part, depth + 1)) for key, part in properties.items()]
            )
        if isinstance(rest, Mapping):
            return pa.map_(pa.string(), self.type_of(path + "{}", rest, depth + 1))
        raise SchemaRefused(f"The {name} of the JSON Schema has no properties.")

    def _referenced(self, name: str, reference: Any) -> Any:
        place: Any = self._root
        if isinstance(reference, str) and reference.startswith("#"):
            for step in reference[1:].strip("/").split("/") if reference != "#" else ():
                place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
            if place is not None:
                return place
        raise SchemaRefused(f"The {name} refers to {reference!r:.100}, which is not in the JSON Schema.")


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
            return _TEXTS.get(str(form), pa.string())
    raise SchemaRefused(f"The {name} is of the unknown type {kind!r:.50} in the JSON Schema.")
