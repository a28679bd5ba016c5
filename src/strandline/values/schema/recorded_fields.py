"""Arrow schemas of values as plain JSON, and back: how a log records its columns.

A field is ``{"name": …, "type": …}``. The type of a single value is its name (``"int64"``, ``"timestamp[us, UTC]"``,
``"decimal128(12, 2)"``); lists, maps and structs are ``{"list": type}``, ``{"map": type}``, ``{"struct": [fields]}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.values.schema.limits import MAX_DEPTH
from strandline.values.schema.schemas import PLAIN_TYPES, TYPE_NAMES, as_schema, is_known_zone

_TIMESTAMP: Final = re.compile(r"timestamp\[(s|ms|us|ns)(?:, ([^\[\]\s,]{1,64}))?\]")
_DECIMAL: Final = re.compile(r"(decimal128|decimal256)\(([0-9]{1,2}), (-?[0-9]{1,2})\)")
_FIXED: Final = re.compile(r"binary\[([0-9]{1,7})\]")


def encode_schema(fields: Iterable[pa.Field]) -> list[dict[str, Any]]:
    """The fields as JSON.

    >>> encode_schema(pa.schema({"id": pa.int64(), "tags": pa.list_(pa.string())}))
    [{'name': 'id', 'type': 'int64'}, {'name': 'tags', 'type': {'list': 'string'}}]
    """
    return [{"name": field.name, "type": _type_json(field.type)} for field in fields]


def decode_schema(fields: Any) -> pa.Schema:
    """The schema of recorded fields; ``ValueError`` if they are damaged, ``LookupError`` for a type that is unknown.

    >>> decode_schema([{"name": "at", "type": "timestamp[us, UTC]"}])
    at: timestamp[us, tz=UTC]
    """
    found = _fields(fields, 0)
    return as_schema(pa.schema(found)) if found else pa.schema([])


def _type_json(kind: pa.DataType) -> Any:  # noqa: PLR0911 - one for each kind of type
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if pt.is_struct(kind):
        return {"struct": encode_schema(kind)}
    if pt.is_map(kind):
        return {"map": _type_json(kind.item_type)}
    if pt.is_list(kind):
        return {"list": _type_json(kind.value_type)}
    if pt.is_large_list(kind):
        return {"large_list": _type_json(kind.value_type)}
    if pt.is_timestamp(kind):
        return f"timestamp[{kind.unit}]" if kind.tz is None else f"timestamp[{kind.unit}, {kind.tz}]"
    if pt.is_decimal(kind):
        return f"decimal{kind.bit_width}({kind.precision}, {kind.scale})"
    return f"binary[{kind.byte_width}]"


def _fields(found: Any, depth: int) -> list[pa.Field]:
    if not isinstance(found, list) or depth > MAX_DEPTH:
        raise ValueError("the fields of a schema are no list, or nest too deep")
    fields = []
    for one in found:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise ValueError("a field of the schema has no name")  # noqa: TRY004 - the bytes are wrong
        fields.append(pa.field(one["name"], _type(one.get("type"), depth)))
    return fields


_NESTED: Final[dict[str, Callable[[pa.DataType], pa.DataType]]] = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "map": lambda item: pa.map_(pa.string(), item),
}


def _type(found: Any, depth: int) -> pa.DataType:
    if depth > MAX_DEPTH:
        raise ValueError("the schema nests too deep")
    if isinstance(found, dict) and len(found) == 1:
        [(name, inside)] = found.items()
        if name == "struct":
            return pa.struct(_fields(inside, depth + 1))
        if name in _NESTED:
            return _NESTED[name](_type(inside, depth + 1))
    elif isinstance(found, str):
        if found in PLAIN_TYPES:
            return PLAIN_TYPES[found]
        if match := _TIMESTAMP.fullmatch(found):
            if not is_known_zone(match[2]):
                raise LookupError(f"the time zone {match[2]!r} is not known here")
            return pa.timestamp(match[1], match[2])
        if match := _DECIMAL.fullmatch(found):
            return getattr(pa, match[1])(int(match[2]), int(match[3]))
        if match := _FIXED.fullmatch(found):
            return pa.binary(int(match[1]))
    raise LookupError(f"the type {str(found)[:80]!r} is unknown")
