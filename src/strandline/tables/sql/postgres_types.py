"""Types of PostgreSQL for Arrow's, and how columns are sent to the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.tables.sql.columns import as_json, is_nested, refused

_PLAIN: Final[tuple[tuple[Callable[[Any], bool], str], ...]] = (
    (pt.is_boolean, "boolean"),
    (pt.is_int8, "smallint"),
    (pt.is_uint8, "smallint"),
    (pt.is_int16, "smallint"),
    (pt.is_uint16, "integer"),
    (pt.is_int32, "integer"),
    (pt.is_uint32, "bigint"),
    (pt.is_int64, "bigint"),
    (pt.is_uint64, "numeric(20,0)"),
    (pt.is_float16, "real"),
    (pt.is_float32, "real"),
    (pt.is_float64, "double precision"),
    (pt.is_string, "text"),
    (pt.is_large_string, "text"),
    (pt.is_binary, "bytea"),
    (pt.is_large_binary, "bytea"),
    (pt.is_date, "date"),
    (pt.is_time, "time without time zone"),
    (is_nested, "jsonb"),
)


def postgres_type(field: pa.Field) -> str:
    """The type of a column, as PostgreSQL spells it."""
    kind = field.type
    if pt.is_timestamp(kind):
        return f"timestamp {'with' if kind.tz else 'without'} time zone"
    if pt.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    for is_it, name in _PLAIN:
        if is_it(kind):
            return name
    raise refused(field, "PostgreSQL")


def letter_type(field: pa.Field) -> str:
    """Headers of dead letters stay text: PostgreSQL's JSON refuses what they may hold."""
    return "text" if is_nested(field.type) else postgres_type(field)


def _is_text_staged(kind: pa.DataType) -> bool:
    return bool(is_nested(kind) or pt.is_decimal(kind) or pt.is_uint64(kind))


def staged_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column that binary COPY takes: what has no simple binary form is text, and converted by the server."""
    kind = column.type
    if is_nested(kind):
        return as_json(column)
    if _is_text_staged(kind):
        return column.cast(pa.string())
    return column.cast(pa.float32()) if pt.is_float16(kind) else column


def server_cast(field: pa.Field, *, is_plain: bool) -> str:
    """How the server converts a staged column to its type."""
    return f"::{postgres_type(field)}" if _is_text_staged(field.type) and not is_plain else ""
