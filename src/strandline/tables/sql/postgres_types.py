"""Types of PostgreSQL for Arrow's, how columns are sent to the server, and values that it cannot store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.tables.sql.columns import as_json, refused

_PLAIN: Final[dict[str, tuple[Callable[[Any], bool], ...]]] = {
    "boolean": (pt.is_boolean,),
    "smallint": (pt.is_int8, pt.is_uint8, pt.is_int16),
    "integer": (pt.is_uint16, pt.is_int32),
    "bigint": (pt.is_uint32, pt.is_int64),
    "numeric(20,0)": (pt.is_uint64,),
    "real": (pt.is_float16, pt.is_float32),
    "double precision": (pt.is_float64,),
    "text": (pt.is_string, pt.is_large_string),
    "bytea": (pt.is_binary, pt.is_large_binary),
    "date": (pt.is_date,),
    "time without time zone": (pt.is_time,),
    "jsonb": (pt.is_nested,),
}

LONGEST_ROW: Final = 8_160 - 224 - 64
"""Bytes of a row's columns: it has to fit into one page, behind its header, with a bit for each of 1,600 columns. The
rest is for gaps, which depend on the order of the columns."""
_INLINE: Final = 24
"""Bytes up to which the server keeps a text or another value of changing length within its row."""
_ELSEWHERE: Final = 18
"""What a longer one takes there: it is stored elsewhere."""
_WIDTHS: Final = {"boolean": 1, "smallint": 2, "integer": 4, "bigint": 8, "real": 4, "double precision": 8, "date": 4}

_NUL_IN_JSON: Final = r"(^|[^\\])(\\\\)*\\u0000"
_JSON_TEXTS: Final = r'"(?:[^"\\]|\\.)*"'
_NO_JSON: Final = "[NI]"  # NaN and Infinity


def postgres_type(field: pa.Field) -> str:
    """The type of a column, as PostgreSQL spells it."""
    kind = field.type
    if pt.is_timestamp(kind):
        return f"timestamp {'with' if kind.tz else 'without'} time zone"
    if pt.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    for name, kinds in _PLAIN.items():
        if any(is_it(kind) for is_it in kinds):
            return name
    raise refused(field, "PostgreSQL")


def letter_type(field: pa.Field) -> str:
    """Headers of dead letters stay text: PostgreSQL's JSON refuses what they may hold."""
    return "text" if pt.is_nested(field.type) else postgres_type(field)


def _is_text_staged(kind: pa.DataType) -> bool:
    return bool(pt.is_nested(kind) or pt.is_decimal(kind) or pt.is_uint64(kind))


def staged_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column that binary COPY takes: what has no simple binary form is text, and converted by the server."""
    kind = column.type
    if pt.is_nested(kind):
        return as_json(column)
    if _is_text_staged(kind):
        return column.cast(pa.string())
    return column.cast(pa.float32()) if pt.is_float16(kind) else column


def server_cast(field: pa.Field, *, is_plain: bool) -> str:
    """How the server converts a staged column to its type."""
    return f"::{postgres_type(field)}" if _is_text_staged(field.type) and not is_plain else ""


def has_no_json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    r"""Which nested values have no JSON that PostgreSQL takes: with a NUL in a text, NaN or an infinity.

    >>> has_no_json(pa.chunked_array([[["NaN", "\0"], ["NaN"]]])).to_pylist()
    [True, False]
    >>> has_no_json(pa.chunked_array([[[1.5], [float("nan")]]])).to_pylist()
    [False, True]
    """
    texts = as_json(column)
    numbers = pc.replace_substring_regex(texts, pattern=_JSON_TEXTS, replacement="")
    return pc.or_(pc.match_substring_regex(texts, _NUL_IN_JSON), pc.match_substring_regex(numbers, _NO_JSON))


def are_too_long(rows: pa.Table) -> pa.Array | None:
    """Which rows are longer than a page, whatever the server stores elsewhere; None if they are too narrow for that."""
    import numpy as np

    if rows.num_columns * _INLINE <= LONGEST_ROW:
        return None
    sizes = np.zeros(rows.num_rows, np.int64)
    for field, column in zip(rows.schema, rows.columns, strict=True):
        kind, is_there = postgres_type(field), column.is_valid().to_numpy()
        if kind in ("text", "bytea"):
            lengths = pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64) + 1
            sizes += np.where(is_there, np.where(lengths > _INLINE, _ELSEWHERE, lengths), 0)
        elif _is_text_staged(field.type):
            sizes += np.where(is_there, _INLINE, 0)
        else:
            width = _WIDTHS.get(kind, 8)
            sizes = np.where(is_there, -(-sizes // width) * width + width, sizes)
    return pa.array(sizes > LONGEST_ROW)
