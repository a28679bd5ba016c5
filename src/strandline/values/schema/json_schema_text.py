"""Columns written as a JSON Schema: the inverse of reading one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.values.schema.evolution import is_list
from strandline.values.schema.schemas import as_schema
from strandline.values.schema.type_names import type_name


def json_schema_of(schema: pa.Schema) -> dict[str, Any]:
    """Columns as a JSON Schema, of which :func:`~strandline.values.as_schema` makes the same columns.

    >>> json_schema_of(pa.schema({"id": pa.int32(), "tags": pa.list_(pa.string())}))["properties"]
    {'id': {'type': 'integer', 'format': 'int32'}, 'tags': {'type': 'array', 'items': {'type': 'string'}}}
    """
    return _document(pa.struct(list(as_schema(schema))))


_PLAIN: Final[Mapping[pa.DataType, dict[str, Any]]] = {
    pa.bool_(): {"type": "boolean"},
    pa.int64(): {"type": "integer"},
    pa.float32(): {"type": "number", "format": "float"},
    pa.float64(): {"type": "number"},
    pa.string(): {"type": "string"},
    pa.large_string(): {"type": "string"},
    pa.binary(): {"type": "string", "contentEncoding": "base64"},
    pa.large_binary(): {"type": "string", "contentEncoding": "base64"},
    pa.timestamp("us", "UTC"): {"type": "string", "format": "date-time"},
    pa.date32(): {"type": "string", "format": "date"},
    pa.time64("us"): {"type": "string", "format": "time"},
}


def _document(kind: pa.DataType) -> dict[str, Any]:
    if pt.is_struct(kind):
        return {"type": "object", "properties": {field.name: _document(field.type) for field in kind}}
    if is_list(kind):
        return {"type": "array", "items": _document(kind.value_type)}
    if pt.is_map(kind):
        return {"type": "object", "additionalProperties": _document(kind.item_type)}
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    return {"type": "integer" if pt.is_integer(kind) else "string", "format": type_name(kind)}
