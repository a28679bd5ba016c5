"""The Arrow block: records as an IPC stream, in batch objects and in write-ahead frames."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from strandline.errors import CorruptData, InvalidInput
from strandline.formats.arrow.header import check_message
from strandline.formats.arrow.stream import END, ArrowStream, StreamLayout, damaged_arrow, read_stream
from strandline.formats.checksum import crc32c
from strandline.model.records import RECORD_SCHEMA, Op, are_operations


class Compression(IntEnum):
    """Storage of a block's buffers. The number is the compression byte of the format."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2

    @classmethod
    def named(cls, name: str) -> Compression:
        """From ``"none"``, ``"zstd"`` or ``"lz4"``."""
        try:
            return cls[name.upper()]
        except KeyError as error:
            raise InvalidInput(f"Compression is 'none', 'lz4' or 'zstd', not {name!r}.") from error


_SMALL: Final = 64 << 10
"""Plain pages of up to this size are copied: that takes a sixth of the time of passing on their buffers."""

_SINGLE_THREADED: Final = 4 << 20
"""A page of up to this size is compressed in the calling thread, and copied: Arrow would wake a thread for each
column, which takes longer than compressing a page of a thousand records."""

_HEAD = struct.Struct("<II")
"""The beginning of an Arrow message: a marker, and the length of its header."""

_SCHEMA_MESSAGE: Final = RECORD_SCHEMA.serialize()
_LAYOUT: Final = StreamLayout.of(RECORD_SCHEMA)
_PLAIN_SCHEMA: Final = bytes(_SCHEMA_MESSAGE)
_OPTIONS: Final = {
    Compression.NONE: pa.ipc.IpcWriteOptions(),
    Compression.ZSTD: pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1)),
    Compression.LZ4: pa.ipc.IpcWriteOptions(compression="lz4"),
}

_IN_THIS_THREAD: Final = {
    Compression.ZSTD: pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1), use_threads=False),
    Compression.LZ4: pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False),
}

Parts = list[bytes | memoryview]
"""Bytes in pieces, written one after another without joining them in memory."""


class _Gatherer(io.RawIOBase):
    """A file that collects Arrow's output: plain buffers are the record batch's own, not copies."""

    def __init__(self) -> None:
        self.parts: Parts = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.parts.append(data if isinstance(data, bytes) else memoryview(data).cast("B"))
        return len(data)


def encode_page(batch: pa.RecordBatch, compression: Compression) -> Parts:
    """One record batch as an IPC message, without schema and end marker."""
    if compression is Compression.NONE and _is_small(batch) and batch.schema.equals(RECORD_SCHEMA):
        return [memoryview(batch.serialize()).cast("B")]
    if compression is not Compression.NONE and batch.nbytes <= _SINGLE_THREADED:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, RECORD_SCHEMA, options=_IN_THIS_THREAD[compression]) as writer:
            writer.write_batch(batch)
        # A copy: Arrow's own buffer is up to twice as long as its content, and pages wait for their upload.
        return [bytes(memoryview(sink.getvalue())[len(_SCHEMA_MESSAGE) : -len(END)])]
    target = _Gatherer()
    with pa.ipc.new_stream(pa.PythonFile(target, mode="w"), RECORD_SCHEMA, options=_OPTIONS[compression]) as writer:
        writer.write_batch(batch)
    return _without(_without(target.parts, len(_SCHEMA_MESSAGE), 0), len(END), -1)


def page_checksum(page: Parts) -> int:
    """The CRC32C of a page's records: of the body of its message if that is plain, so that it does not depend on the
    encoder.

    The message's header is excluded: it may differ between versions of Arrow.
    """
    lead = page[0] if len(page[0]) >= _HEAD.size else b"".join(page[:2])
    head = _HEAD.size + _HEAD.unpack_from(lead)[1]
    checksum = 0
    for part in page:
        if head < len(part):
            checksum = crc32c(part[head:] if head else part, checksum)
        head = max(0, head - len(part))
    return checksum


def _is_small(batch: pa.RecordBatch) -> bool:
    # The first is quick but counts the whole parent of a slice; the second counts the written bytes.
    return bool(batch.get_total_buffer_size() <= _SMALL or batch.nbytes <= _SMALL)


def _without(parts: Parts, length: int, end: int) -> Parts:
    """The parts without the ``length`` bytes at one end, which are whole parts."""
    kept = list(parts)
    while length > 0:
        length -= len(kept.pop(end))
    if length:
        raise AssertionError("this version of Arrow frames its stream differently")
    return kept


def frame_pages(pages: Iterable[Parts], metadata: Mapping[str, str] | None = None) -> Parts:
    """The block of encoded pages; metadata goes into its schema message."""
    schema = memoryview(_schema_message(metadata)).cast("B") if metadata else _PLAIN_SCHEMA
    return [schema, *chain.from_iterable(pages), END]


def _schema_message(metadata: Mapping[str, str]) -> bytes | bytearray:
    """The schema with metadata. Texts of known lengths are patched into a template, a tenth of the work."""
    values = [value.encode() for value in metadata.values()]
    blank, places = _template(tuple(metadata), tuple(map(len, values)))
    message = bytearray(blank)
    for place, value in zip(places, values, strict=True):
        message[place : place + len(value)] = value
    return message


@lru_cache(maxsize=64)
def _template(names: tuple[str, ...], lengths: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
    """The schema with blank texts of these lengths, and the position of each."""
    blank = _serialized(names, [b" " * length for length in lengths])
    places = []
    for index, length in enumerate(lengths):
        marked = _serialized(names, [(b"#" if at == index else b" ") * length for at, length in enumerate(lengths)])
        places.append(next((at for at, pair in enumerate(zip(blank, marked, strict=True)) if len({*pair}) > 1), 0))
        if marked[places[-1] :][:length] != b"#" * length:
            raise AssertionError("this version of Arrow writes the metadata of a schema differently")
    return blank, tuple(places)


def _serialized(names: Sequence[str], values: Sequence[bytes]) -> bytes:
    return bytes(RECORD_SCHEMA.with_metadata(dict(zip(names, values, strict=True))).serialize().to_pybytes())


def decode_block(block: memoryview, where: str, compression: Compression) -> list[pa.RecordBatch]:
    """The record batches of a block, fully validated; zero-copy where the buffers are plain.

    Never takes more memory than a batch may hold, whatever the bytes say.
    """
    return read_block(block, where, compression).batches


def read_block(block: memoryview, where: str, compression: Compression) -> ArrowStream:
    """The record batches of a block, validated, and its metadata, whose names and values may be any bytes."""
    found = read_stream(block, _LAYOUT, where, compressed=compression is not Compression.NONE)
    for batch in found.batches:
        _check_values(batch, where)
    return found


def read_metadata(block: memoryview, where: str) -> Mapping[bytes, bytes]:
    """The metadata of a block, without its records."""
    if block[: len(_SCHEMA_MESSAGE)] == _PLAIN_SCHEMA:  # fast path: most blocks have no metadata
        return {}
    try:
        check_message(block)
        schema = pa.ipc.read_schema(pa.BufferReader(pa.py_buffer(block)))
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged_arrow(error, where) from error
    return dict(schema.metadata or {})


def _check_values(batch: pa.RecordBatch, where: str) -> None:
    timestamps, ops = batch.column(0), batch.column(1)
    if timestamps.null_count or ops.null_count:
        raise CorruptData(f"{where} is damaged: it holds records without timestamp or operation.")
    if batch.num_rows and not are_operations(ops):
        raise CorruptData(f"{where} is damaged: it holds operations outside {Op.PUT:d} to {Op.PURGE:d}.")
