"""Validating decoder of Arrow IPC streams; all stored Arrow data is read by it.

The header of each message is checked before Arrow uses it: the number of rows, the unpacked bytes, the
compression. Arrow's result is fully validated before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from strandline.errors import CorruptData
from strandline.formats.arrow.header import (
    MESSAGE_HEADER,
    check_message,
    find_field,
    read_number,
    target_of,
    unpacked_limit,
)
from strandline.model.records import with_readable_names

END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""End marker of a stream."""

_BITS: Final = 8
_PLAIN_MARK: Final = -1
"""In place of the length of a compressed buffer: this one is not compressed."""

# Positions of fields in the flatbuffer tables of Arrow's Message.fbs.
_BATCH_LENGTH: Final = 0
_BATCH_BUFFERS: Final = 2
_BATCH_COMPRESSION: Final = 3


class StreamLayout(NamedTuple):
    """Expected columns of a stream, and the least bits per row."""

    schema: pa.Schema
    row_bits: int

    @classmethod
    def of(cls, schema: pa.Schema) -> StreamLayout:
        """The layout of these columns. Each must take some bits in every row: only that bounds the rows.

        >>> StreamLayout.of(pa.schema([("when", pa.int64()), ("what", pa.binary()), ("good", pa.bool_())])).row_bits
        97
        """
        return cls(schema, sum(_value_bits(field.type) for field in schema))


class ArrowStream(NamedTuple):
    """The content of a stream: its record batches, and the metadata of its schema, which may be any bytes."""

    batches: list[pa.RecordBatch]
    metadata: dict[bytes, bytes]
    messages: list[memoryview]
    """The stored bytes of each of ``batches``, header and body; none if they are compressed, or were not readable."""


def read_stream(data: memoryview, layout: StreamLayout, where: str, *, compressed: bool = False) -> ArrowStream:
    """The record batches of a stream of this layout, fully validated; zero-copy where the buffers are plain.

    Raises:
        CorruptData: for anything but such a stream, or one that unpacks to more than the limit.
    """
    source = pa.BufferReader(pa.py_buffer(data))
    batches: list[pa.RecordBatch] = []
    messages: list[memoryview] = []
    # Uncompressed data takes no more than the bytes that are in memory already.
    limit = budget = unpacked_limit(len(data)) if compressed else len(data)
    schema, width = layout
    try:
        check_message(data)
        found = pa.ipc.read_schema(source)
        if not found.equals(schema):
            raise CorruptData(f"{where} is damaged: it does not hold {schema.names} but {str(found.names)[:200]}.")
        while source.tell() < len(data) - len(END):
            start = source.tell()
            check_message(data[start:])
            message = pa.ipc.read_message(source)
            if message.type != "record batch":
                raise CorruptData(f"{where} is damaged: it holds a {message.type} message among its records.")
            rows, size = _size(message, where, compressed=compressed)
            budget -= size
            if budget < 0:
                raise CorruptData(
                    f"{where} is damaged: its {len(data):,} bytes announce more than {limit:,} unpacked, which no "
                    "batch may hold."
                )
            if rows * width > size * _BITS:
                raise CorruptData(
                    f"{where} is damaged: it announces {rows:,} records, more than {size:,} bytes can hold."
                )
            batch = pa.ipc.read_record_batch(message, schema)
            try:
                batch.validate(full=True)
                messages.append(data[start : source.tell()])
            except pa.ArrowInvalid:
                batch = with_readable_names(batch)
                batch.validate(full=True)
            batches.append(batch)
        rest = bytes(data[source.tell() :])
    except pa.ArrowMemoryError:  # within the limits: the machine lacks memory, and the bytes may be valid
        raise
    except (pa.ArrowException, OSError, ValueError, EOFError, struct.error, OverflowError) as error:
        raise damaged_arrow(error, where) from error
    if rest != END:
        raise CorruptData(f"{where} is damaged: it does not end where it should.")
    are_as_stored = not compressed and len(messages) == len(batches)
    return ArrowStream(batches, dict(found.metadata or {}), messages if are_as_stored else [])


def damaged_arrow(error: Exception, where: str) -> CorruptData:
    """The error for Arrow's error about stored bytes."""
    return CorruptData(f"{where} is damaged: {(str(error).splitlines() or [repr(error)])[0][:200]}.")


class BatchHeader(NamedTuple):
    """The header of a record batch."""

    rows: int
    is_compressed: bool


def batch_header(message: pa.Message, where: str) -> BatchHeader:
    """The header of a record batch; ``CorruptData`` if it is inconsistent. Reads the header only."""
    try:
        return _read_header(message, where)[0]
    except (ValueError, struct.error) as error:
        raise damaged_arrow(error, where) from error


def _read_header(message: pa.Message, where: str) -> tuple[BatchHeader, memoryview, int]:
    """The header of a record batch, and where it is: the flatbuffer, and the position of its table."""
    table = memoryview(message.metadata).cast("B")
    batch = target_of(table, find_field(table, read_number(table, 0, "I"), MESSAGE_HEADER))
    length = find_field(table, batch, _BATCH_LENGTH)
    rows = 0 if length is None else read_number(table, length, "q")
    if rows < 0:
        raise CorruptData(f"{where} is damaged: it announces {rows} records.")
    return BatchHeader(rows, find_field(table, batch, _BATCH_COMPRESSION) is not None), table, batch


def _size(message: pa.Message, where: str, *, compressed: bool) -> tuple[int, int]:
    """Number of rows of a message, and the memory to decode it, according to its header."""
    (rows, is_compressed), table, batch = _read_header(message, where)
    if compressed != is_compressed:
        raise CorruptData(f"{where} is damaged: its buffers do not have the announced compression.")
    body = memoryview(message.body or b"").cast("B")
    if not compressed:
        return rows, len(body)
    return rows, sum(_unpacked(body, start, length, where) for start, length in _buffers(table, batch))


def _unpacked(body: memoryview, start: int, length: int, where: str) -> int:
    """The announced unpacked size of a compressed buffer."""
    if length == 0:
        return 0
    if length < 0 or start < 0 or start + length > len(body):
        raise CorruptData(f"{where} is damaged: a buffer of {length} bytes at {start} is not within its message.")
    plain = read_number(body, start, "q")
    if plain < _PLAIN_MARK:
        raise CorruptData(f"{where} is damaged: a buffer announces {plain} bytes.")
    return length if plain == _PLAIN_MARK else plain


def _value_bits(kind: pa.DataType) -> int:
    if pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_list(kind) or pa.types.is_map(kind):
        return 32
    if pa.types.is_large_binary(kind):
        return 64
    return int(kind.bit_width)


def _buffers(table: memoryview, batch: int) -> Iterator[tuple[int, int]]:
    start = target_of(table, find_field(table, batch, _BATCH_BUFFERS))
    for index in range(read_number(table, start, "I")):
        yield struct.unpack_from("<qq", table, start + 4 + 16 * index)
