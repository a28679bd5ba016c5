"""Schemas of values: as Arrow, a dataclass, a ``msgspec.Struct``, JSON Schema or Avro, all to one Arrow schema."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import types
import uuid
from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import SchemaRefused
from strandline.values.schema.avro_schema import avro_fields
from strandline.values.schema.constraints import Constrained
from strandline.values.schema.evolution import is_list
from strandline.values.schema.json_schema import json_schema_fields, json_schema_reader
from strandline.values.schema.limits import MAX_DEPTH
from strandline.values.schema.type_names import TYPE_NAMES

_SCALARS: Final[dict[Any, pa.DataType]] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    dt.datetime: pa.timestamp("us", tz="UTC"),
    dt.date: pa.date32(),
    dt.time: pa.time64("us"),
    uuid.UUID: pa.string(),
}
_OTHER_LEAVES: Final = (pt.is_timestamp, pt.is_decimal128, pt.is_decimal256, pt.is_fixed_size_binary)
"""Those that have settings of their own, such as a time zone."""
_SEQUENCES: Final = (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Set)


def as_schema(schema: Any) -> pa.Schema:
    """The columns of a value, as an Arrow schema whose fields are all nullable.

    Takes a ``pyarrow.Schema``, a dataclass, a ``msgspec.Struct``, a JSON Schema or an Avro schema (as text or as a
    mapping). ``SchemaRefused`` names the field that has no columnar type.

    >>> as_schema({"type": "object", "properties": {"id": {"type": "integer"}, "tags": {"type": "array", "items": {}}}})
    Traceback (most recent call last):
    strandline.errors.SchemaRefused: The field 'tags[]' has no type in the JSON Schema: give it one.
    >>> as_schema(pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    id: int64
    """
    schema = parsed(schema)
    if isinstance(schema, Mapping):
        if schema.get("type") == "record" or "fields" in schema:
            return _checked(avro_fields(schema))
        return _checked(json_schema_fields(schema))
    if isinstance(schema, pa.Schema):
        return _checked(schema)
    if isinstance(schema, pa.StructType):
        return _checked(list(schema))
    if isinstance(schema, type) and is_record_class(schema):
        return _checked(_class_fields("", schema, 0))
    raise SchemaRefused(
        "A schema must be a pyarrow.Schema, a dataclass, a msgspec.Struct, or a JSON Schema or Avro schema as text or "
        f"mapping, not {schema!r:.100}."
    )


def constrained(schema: Any) -> Constrained:
    """The columns of any schema, with the constraints that a JSON Schema has.

    >>> constrained({"properties": {"id": {"type": "integer", "minimum": 0}}, "required": ["id"]}).constraints
    {'required': ['id'], 'properties': {'id': {'minimum': 0}}}
    """
    if isinstance(schema, Constrained):
        return schema
    columns, reader = as_schema(schema), json_schema_reader(schema)
    return Constrained(columns) if reader is None else Constrained(columns, reader.part.constraints, reader.unenforced)


def parsed(schema: Any) -> Any:
    """A schema as it is given, or what its text holds; ``SchemaRefused`` if that is not JSON."""
    try:
        return json.loads(schema) if isinstance(schema, str | bytes) else schema
    except (ValueError, RecursionError) as error:
        raise SchemaRefused(f"The text of the schema is not JSON: {error}.") from error


def _checked(fields: Iterable[pa.Field]) -> pa.Schema:
    schema = pa.schema(nullable_fields("", fields, 0))
    if not len(schema):
        raise SchemaRefused("A schema must have at least one field.")
    return schema


def nullable_fields(path: str, fields: Iterable[pa.Field], depth: int) -> list[pa.Field]:
    """The fields, nullable throughout and without metadata; ``SchemaRefused`` for names that are there twice."""
    if depth > MAX_DEPTH:
        raise SchemaRefused(f"The field '{path[:100]}' is more than {MAX_DEPTH} levels deep: flatten the schema.")
    result: list[pa.Field] = []
    seen: dict[str, str] = {}
    for field in fields:
        twin = seen.setdefault(field.name.casefold(), field.name)
        if not field.name or len(seen) == len(result):
            raise SchemaRefused(
                f"The field '{path}{field.name}' has no name, or its name is there twice ('{twin}'; upper and lower "
                "case are the same in tables): rename it."
            )
        result.append(pa.field(field.name, _nullable(path + field.name, field.type, depth)))
    return result


def _nullable(path: str, kind: pa.DataType, depth: int) -> pa.DataType:
    if pt.is_struct(kind):
        fields = nullable_fields(f"{path}.", kind, depth + 1)
        if not fields:
            raise SchemaRefused(f"The field '{path}' is a struct without fields: give it one, or leave it out.")
        return pa.struct(fields)
    if is_list(kind):
        [item] = nullable_fields(path, [kind.value_field.with_name("[]")], depth + 1)
        return (pa.list_ if pt.is_list(kind) else pa.large_list)(item.with_name("item"))
    if pt.is_map(kind):
        if not pt.is_string(kind.key_type):
            raise SchemaRefused(f"The field '{path}' is a map with keys of type {kind.key_type}: only string works.")
        [item] = nullable_fields(path, [kind.item_field.with_name("{}")], depth + 1)
        return pa.map_(pa.string(), item.type)
    if kind not in TYPE_NAMES and not any(is_kind(kind) for is_kind in _OTHER_LEAVES):
        raise SchemaRefused(f"The field '{path}' is of type {kind}, which no codec takes: cast it to a plain type.")
    if pt.is_timestamp(kind) and not is_known_zone(kind.tz):
        raise SchemaRefused(
            f"The field '{path}' has the time zone {kind.tz[:100]!r}, which is not known here: name UTC, an offset "
            "such as +01:00, or a zone of the IANA time zone database, and have that installed."
        )
    return kind


@lru_cache(maxsize=256)
def is_known_zone(name: str | None) -> bool:
    """Whether Arrow knows the time zone; None is no zone at all.

    >>> is_known_zone("UTC"), is_known_zone("+05:30"), is_known_zone("Mars/Olympus")
    (True, True, False)
    """
    try:
        return name is None or bool(pc.hour(pa.array([0], pa.timestamp("s", tz=name))))
    except pa.ArrowInvalid:
        return False


def leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The types of single values inside a type."""
    if pt.is_struct(kind):
        for field in kind:
            yield from leaves(field.type)
    elif is_list(kind):
        yield from leaves(kind.value_type)
    elif pt.is_map(kind):
        yield from leaves(kind.item_type)
    else:
        yield kind


def is_record_class(kind: Any) -> bool:
    """Whether this is a dataclass or a ``msgspec.Struct``."""
    return dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__")


def _class_fields(path: str, kind: Any, depth: int) -> list[pa.Field]:
    if depth > MAX_DEPTH:
        raise SchemaRefused(f"The field '{path[:100]}' is over {MAX_DEPTH} levels deep: {kind.__name__} is recursive.")
    try:
        hints = get_type_hints(kind, include_extras=True)
    except (NameError, TypeError) as error:
        raise SchemaRefused(f"The types of {kind.__name__} cannot be found: {error}.") from error
    if hasattr(kind, "__struct_fields__"):
        names = list(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    else:
        names = [(field.name, field.name) for field in dataclasses.fields(kind)]
    return [pa.field(stored, _hint_type(path + stored, hints[name], depth)) for name, stored in names]


def _hint_type(path: str, hint: Any, depth: int) -> pa.DataType:  # noqa: PLR0911 - one per kind of hint
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        named = [extra for extra in hint.__metadata__ if isinstance(extra, pa.DataType)]
        return named[0] if named else _hint_type(path, arguments[0], depth)
    if origin in (Union, types.UnionType):
        rest = [each for each in arguments if each is not type(None)]
        if len(rest) == 1:
            return _hint_type(path, rest[0], depth)
    elif origin in _SEQUENCES and len([each for each in arguments if each is not ...]) == 1:
        return pa.list_(_hint_type(f"{path}[]", arguments[0], depth + 1))
    elif origin in (dict, abc.Mapping) and arguments[0] is str:
        return pa.map_(pa.string(), _hint_type(path + "{}", arguments[1], depth + 1))
    elif origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        members = arguments if origin is Literal else [member.value for member in hint]
        kinds = {type(member) for member in members}
        if len(kinds) == 1 and (scalar := _SCALARS.get(kinds.pop())) is not None:
            return scalar
    elif isinstance(hint, type) and is_record_class(hint):
        return pa.struct(_class_fields(f"{path}.", hint, depth + 1))
    elif hint in _SCALARS:
        return _SCALARS[hint]
    if hint is Decimal:
        raise SchemaRefused(
            f"The field '{path}' is a Decimal of unknown size: write Annotated[Decimal, pyarrow.decimal128(12, 2)]."
        )
    raise SchemaRefused(
        f"The field '{path}' is of type {hint!r}, which has no columnar type: write Annotated[..., an Arrow type]."
    )
