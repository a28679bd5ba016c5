"""Records as Arrow: the one schema that producers, objects, frames, sinks and Spark share.

A record is a timestamp, an operation, a key, a value and headers. Readers see an ``offset`` before these columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput

MAX_RECORD_BYTES: Final = 256 << 20
"""Limit of a single key or value, and of a record that is appended by itself."""

MAX_BATCH_BYTES: Final = MAX_RECORD_BYTES + MAX_RECORD_BYTES // 8
"""Limit of a batch, uncompressed: the largest record, and room for Arrow's structures."""

MAX_BATCH_RECORDS: Final = 1 << 24
"""Limit on the records of a batch, even if they are empty."""

RECORD_WIDTH: Final = 21
"""Bytes of any record in memory: its timestamp, its operation, and the end offsets of its key, value and headers."""


class Op(IntEnum):
    """What a record does to its key. Stored as one byte."""

    PUT = 0
    DELETE = 1
    PURGE = 2


_OPS: Final = bytes(Op)
_FEW_ROWS: Final = 8

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
HEADERS: Final = pa.map_(pa.string(), pa.binary())

# Not pa.array([]): converting a Python list imports pandas, half a second in every Spark worker.
_NO_ENTRIES: Final = pa.nulls(0, pa.struct([HEADERS.key_field, HEADERS.item_field]))

RECORD_SCHEMA: Final = pa.schema(
    [
        pa.field("timestamp", TIMESTAMP, nullable=False),
        pa.field("op", pa.int8(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS),
    ]
)
"""The stored schema. Timestamps are microseconds since the epoch, UTC."""

READ_SCHEMA: Final = pa.schema([pa.field("offset", pa.int64(), nullable=False), *RECORD_SCHEMA])
"""The schema for readers: the stored columns after their offset."""

EMPTY_BATCH: Final = "A batch must hold at least one record."
"""The error for a table without rows."""

RecordSource: TypeAlias = pa.Table | pa.RecordBatch
"""A batch from a caller."""


def record_batch(
    *,
    timestamps: Sequence[int] | pa.Array,
    ops: Sequence[int] | pa.Array,
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    headers: Sequence[object] | None = None,
) -> pa.RecordBatch:
    """Build one record batch from columns of Python values, without a Python loop.

    ``timestamps`` are microseconds.
    """
    count = len(keys)
    columns = [
        (timestamps if isinstance(timestamps, pa.Array) else pa.array(timestamps, pa.int64())).view(TIMESTAMP),
        ops if isinstance(ops, pa.Array) else pa.array(ops, pa.int8()),
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        no_headers(count) if headers is None else pa.array(headers, HEADERS),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


_PLAIN_BYTES: Final = frozenset((bytes,))


def value_bytes(value: object) -> bytes:
    """A value as immutable bytes: a copy of a ``bytearray`` or a ``memoryview``, whose owner may change it.

    ``InvalidInput`` for anything else, and for more than a record may hold.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput(f"A value is bytes, not {type(value).__name__}; nothing was appended.")
    plain = value if type(value) is bytes else bytes(value)
    if len(plain) > MAX_RECORD_BYTES:
        raise InvalidInput(f"A value of {len(plain):,} bytes is over the limit of {MAX_RECORD_BYTES:,}.")
    return plain


def values_bytes(values: Iterable[object]) -> tuple[bytes, ...]:
    """The values, each as :func:`value_bytes` takes a single one; without a Python loop if all are plain bytes."""
    given = tuple(values)
    if _PLAIN_BYTES.issuperset(map(type, given)) and max(map(len, given), default=0) <= MAX_RECORD_BYTES:  # type: ignore[arg-type]
        return given  # type: ignore[return-value]
    return tuple(map(value_bytes, given))


def no_headers(count: int) -> pa.Array:
    """A column of null headers. ``pa.nulls`` would allocate children buffers as long as the column."""
    buffers = [pa.py_buffer(bytes((count + 7) // 8)), pa.py_buffer(bytes(4 * (count + 1)))]
    return pa.Array.from_buffers(HEADERS, count, buffers, null_count=count, children=[_NO_ENTRIES])


def conform(source: RecordSource, *, now: int) -> list[pa.RecordBatch]:
    """Convert a caller's table to :data:`RECORD_SCHEMA`, or raise :class:`InvalidInput` saying what is wrong.

    Missing ``timestamp`` is ``now`` (microseconds), missing ``op`` is ``put``, missing key, value and headers are
    null. Columns that are not part of a record are refused rather than dropped.
    """
    table = pa.Table.from_batches([source]) if isinstance(source, pa.RecordBatch) else source
    if not isinstance(table, pa.Table):
        raise InvalidInput(f"A batch must be a pyarrow Table or RecordBatch, not {type(source).__name__}.")
    unknown = [name for name in table.column_names if RECORD_SCHEMA.get_field_index(name) < 0]
    if unknown:
        raise InvalidInput(
            f"A batch may hold the columns {RECORD_SCHEMA.names}; it also has {unknown}: drop or rename them."
        )
    if table.num_rows == 0:
        raise InvalidInput(EMPTY_BATCH)
    if table.num_rows > MAX_BATCH_RECORDS:
        raise InvalidInput(
            f"A batch of {table.num_rows:,} records is over the limit of {MAX_BATCH_RECORDS:,}: append it in parts."
        )
    if not table.schema.equals(RECORD_SCHEMA):
        table = _cast(table, now)
    _check_values(table)
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    # Each batch is stored as a page, with a header and padding, which would dominate in pages of a few records.
    return table.combine_chunks().to_batches() if table.num_rows < _FEW_ROWS * (len(batches) - 1) else batches


def are_operations(ops: pa.Array) -> bool:
    """Whether a column without nulls holds only known operations.

    Checks the bytes directly: a call of the compute library takes longer than all other checks.
    """
    return not memoryview(ops.buffers()[1])[ops.offset : ops.offset + len(ops)].tobytes().translate(None, _OPS)


def _check_values(table: pa.Table) -> None:
    for name in ("timestamp", "op"):
        if table.column(name).null_count:
            raise InvalidInput(f"The column {name!r} of a batch may not hold nulls.")
    if not all(are_operations(ops) for ops in table.column("op").chunks if len(ops)):
        ops = pc.min_max(table.column("op")).as_py()
        raise InvalidInput(f"Operations are {Op.PUT:d} to {Op.PURGE:d} (put, delete, purge), not {ops}.")
    check_header_names(table.column("headers"))
    if table.get_total_buffer_size() <= MAX_RECORD_BYTES:
        return  # no value can be larger than the table
    for name in ("key", "value"):
        longest = pc.max(pc.binary_length(table.column(name))).as_py() or 0
        if longest > MAX_RECORD_BYTES:
            raise InvalidInput(f"A {name} of {longest:,} bytes is over the limit of {MAX_RECORD_BYTES:,}.")
    check_batch_bytes(table.nbytes)


def check_batch_bytes(size: int) -> None:
    """``InvalidInput`` if ``size`` is above the limit of a batch."""
    if size > MAX_BATCH_BYTES:
        raise InvalidInput(f"A batch of {size:,} bytes is over the limit of {MAX_BATCH_BYTES:,}: append it in parts.")


def _shared_bytes(column: pa.ChunkedArray | pa.Array) -> int:
    """Bytes of a column's values that are stored once and used by many rows, with a copy for each row."""
    if isinstance(column, pa.ChunkedArray):
        return sum(map(_shared_bytes, column.chunks))
    kind = column.type
    if pa.types.is_dictionary(kind):
        if not _is_text(kind.value_type):
            return 0
        lengths = pc.binary_length(column.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(column.indices)).as_py() or 0
    if pa.types.is_binary_view(kind) or pa.types.is_string_view(kind):
        # A view is 16 bytes, of which the first four are its length.
        views = memoryview(column.buffers()[1] or b"").cast("B").cast("i")
        return sum(views[4 * column.offset : 4 * (column.offset + len(column)) : 4])
    if pa.types.is_map(kind):
        ends = column.offsets
        first, count = ends[0].as_py(), ends[-1].as_py() - ends[0].as_py()
        return sum(_shared_bytes(part.slice(first, count)) for part in (column.keys, column.items))
    return 0


def _is_text(kind: pa.DataType) -> bool:
    is_narrow = pa.types.is_binary(kind) or pa.types.is_string(kind)
    return bool(is_narrow or pa.types.is_large_binary(kind) or pa.types.is_large_string(kind))


def _cast(table: pa.Table, now: int) -> pa.Table:
    defaults = {"timestamp": pa.scalar(now, TIMESTAMP), "op": pa.scalar(int(Op.PUT), pa.int8())}
    columns = []
    # Before the cast: each use of a shared value would become a copy.
    check_batch_bytes(table.num_rows * RECORD_WIDTH + sum(map(_shared_bytes, table.columns)))
    for field in RECORD_SCHEMA:
        if field.name in table.column_names:
            try:
                columns.append(table.column(field.name).cast(field.type))
            except pa.ArrowException as error:
                raise InvalidInput(f"The column {field.name!r} cannot be read as {field.type}: {error}") from error
        else:
            columns.append(_filled(field, table.num_rows, defaults.get(field.name)))
    return pa.table(columns, schema=RECORD_SCHEMA)


def _filled(field: pa.Field, rows: int, value: pa.Scalar | None) -> pa.Array:
    if value is not None:
        return pa.repeat(value, rows)
    return no_headers(rows) if field.name == "headers" else pa.nulls(rows, field.type)


def with_offsets(batches: Iterable[pa.RecordBatch], first: int) -> list[pa.RecordBatch]:
    """Add the ``offset`` column to stored batches, counting from ``first``; copies no record bytes."""
    numbered = []
    for batch in batches:
        offsets = pa.arange(first, first + batch.num_rows)
        numbered.append(pa.RecordBatch.from_arrays([offsets, *batch.columns], schema=READ_SCHEMA))
        first += batch.num_rows
    return numbered


def check_header_names(headers: pa.ChunkedArray) -> None:
    """``InvalidInput`` if a name is no UTF-8: a batch with it could be stored, and never read again."""
    if headers.null_count == len(headers):  # mostly
        return
    for chunk in headers.chunks:
        try:
            _names_of(chunk).validate(full=True)
        except pa.ArrowInvalid as error:
            raise InvalidInput(
                "A batch has a header whose name is no UTF-8: decode its bytes, or give them as the header's value."
            ) from error


def with_readable_names(batch: pa.RecordBatch) -> pa.RecordBatch:
    r"""A stored batch with text in place of header names that are no UTF-8, which earlier versions accepted.

    >>> names = pa.array([b"ok", b"\xffx"]).view(pa.string())
    >>> headers = pa.MapArray.from_arrays(pa.array([0, 2], pa.int32()), names, pa.array([b"1", b"2"]))
    >>> with_readable_names(pa.record_batch({"headers": headers})).to_pylist()
    [{'headers': [('ok', b'1'), ('\\xffx', b'2')]}]
    """
    at = batch.schema.get_field_index("headers")
    if at < 0 or not pa.types.is_map(batch.schema.field(at).type):
        return batch
    column = batch.column(at)
    names = column.keys.view(pa.binary())
    _with_names(column, names).validate(full=True)  # before one is looked at: the offsets may be anything
    texts = [name.decode(errors="backslashreplace") for name in names.to_pylist()]
    return batch.set_column(at, batch.schema.field(at), _with_names(column, pa.array(texts, pa.string())))


def _with_names(headers: pa.MapArray, names: pa.Array) -> pa.MapArray:
    kind = pa.map_(names.type, headers.type.item_type)
    entries = pa.StructArray.from_arrays([names, headers.items], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(headers), headers.buffers()[:2], offset=headers.offset, children=[entries])


def _names_of(headers: pa.MapArray) -> pa.Array:
    """The names of these rows; without those of others, of which they may be a slice."""
    if not len(headers):
        return headers.keys.slice(0, 0)
    ends = headers.offsets
    first = ends[0].as_py()
    return headers.keys.slice(first, ends[-1].as_py() - first)


def halved(batch: pa.RecordBatch, size: int, rows: int = 1 << 62) -> Iterator[pa.RecordBatch]:
    """A batch in parts of at most ``size`` bytes and ``rows`` rows, or of one row; nothing of an empty one.

    By halves, not by an average: a single huge value must not affect its neighbours.
    """
    if batch.num_rows <= 1 or (batch.num_rows <= rows and batch.nbytes <= size):
        if batch.num_rows:
            yield batch
        return
    half = batch.num_rows // 2
    yield from halved(batch.slice(0, half), size, rows)
    yield from halved(batch.slice(half), size, rows)
