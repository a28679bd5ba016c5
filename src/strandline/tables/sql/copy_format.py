"""PostgreSQL's binary COPY format, made of Arrow columns all at once: no Python for each row. No I/O.

A row is its number of fields (16 bits), then each field behind its length (32 bits, -1 for null), all big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.model.records import halved

HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER: Final = b"\xff\xff"
PIECE_BYTES: Final = 32 << 20
"""Approximate bytes of a piece of rows that is encoded at once."""
EPOCH_DAYS: Final = 10_957
"""Days from 1970 to 2000, where PostgreSQL counts from."""
EPOCH_MICROSECONDS: Final = EPOCH_DAYS * 86_400_000_000
TIMES: Final = range(-211_813_488_000_000_000 + EPOCH_MICROSECONDS, 1 << 63)
"""The times of PostgreSQL's calendar, from 4714 BC on, in microseconds since 1970."""

_NULL: Final = b"\xff\xff\xff\xff"


def copy_data(rows: pa.Table) -> Iterator[bytes | memoryview]:
    """The rows in binary COPY format. Columns are numbers, texts, bytes, dates and times; see :func:`_field`.

    >>> b"".join(copy_data(pa.table({"a": pa.array([7, None], pa.int16())})))[19:].hex()
    '00010000000200070001ffffffffffff'
    """
    yield HEADER
    for batch in rows.to_batches():
        for piece in halved(batch, PIECE_BYTES):
            yield _encoded(piece)
    yield TRAILER


def _encoded(batch: pa.RecordBatch) -> memoryview:
    count = pa.scalar(struct.pack(">h", batch.num_columns), pa.large_binary())
    fields = [_field(column) for column in batch.columns]
    rows = pc.binary_join_element_wise(count, *fields, pa.scalar(b"", pa.large_binary()))
    _, offsets, data = rows.buffers()
    ends = memoryview(offsets).cast("q")
    return memoryview(data)[ends[rows.offset] : ends[rows.offset + len(rows)]]


def _field(column: pa.Array) -> pa.Array:
    """Each value behind its length."""
    kind = column.type
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind):
        data = column.cast(pa.large_binary())
        sizes = pc.binary_length(data).fill_null(0).to_numpy(zero_copy_only=False)
        size = _packed(sizes.astype(">i4"))
        joined = pc.binary_join_element_wise(size, data, pa.scalar(b"", pa.large_binary()))
    else:
        joined = _packed(_behind_size(_numbers(column)))
    return pc.if_else(column.is_valid(), joined, pa.scalar(_NULL, pa.large_binary())) if column.null_count else joined


def _numbers(column: pa.Array) -> Any:
    """Values as an array of numpy, as PostgreSQL counts them; anything for nulls."""
    kind = column.type
    if pt.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz), safe=False).view(pa.int64())
        return _filled(column) - EPOCH_MICROSECONDS
    if pt.is_date(kind):
        return _filled(column.cast(pa.date32()).view(pa.int32())) - EPOCH_DAYS
    if pt.is_time(kind):
        return _filled(column.cast(pa.time64("us"), safe=False).view(pa.int64()))
    return _filled(column)


def _filled(column: pa.Array) -> Any:
    zero = pa.scalar(False) if pt.is_boolean(column.type) else pa.scalar(0).cast(column.type)
    return (column.fill_null(zero) if column.null_count else column).to_numpy(zero_copy_only=False)


_WIDTHS: Final = {"b1": "?", "i1": ">i2", "u1": ">i2", "i2": ">i2", "u2": ">i4", "i4": ">i4", "u4": ">i8", "i8": ">i8"}


def _behind_size(values: Any) -> Any:
    import numpy as np

    wide = _WIDTHS.get(f"{values.dtype.kind}{values.dtype.itemsize}") or (
        ">f8" if values.dtype.itemsize > 4 else ">f4"  # noqa: PLR2004 - bytes of a single
    )
    packed = np.empty(len(values), np.dtype([("size", ">i4"), ("value", wide)]))
    packed["size"], packed["value"] = np.dtype(wide).itemsize, values
    return packed


def _packed(values: Any) -> pa.Array:
    """The bytes of each element of an array of numpy."""
    data = pa.py_buffer(values.tobytes())
    fixed = pa.Array.from_buffers(pa.binary(values.dtype.itemsize), len(values), [None, data])
    return fixed.cast(pa.large_binary())
