"""The batch objects of a version 1 queue, as bytes: a format shared with other implementations."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.compat.v1.plain_page import read_values
from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.arrow.block import Compression, Parts
from strandline.formats.arrow.header import check_unpacked, unpacked_limit
from strandline.model.head import MetadataRange
from strandline.model.records import (
    MAX_BATCH_BYTES,
    MAX_BATCH_RECORDS,
    RECORD_SCHEMA,
    RECORD_WIDTH,
    TIMESTAMP,
    Op,
    no_headers,
)

VERSION: Final = 1

PLAUSIBLE_VERSION: Final = 255
"""A higher version counts as damage, since there is no checksum."""

_TAIL = struct.Struct("<BIH")
_PREFIX: Final = 4
"""The bytes of a length before each record."""

_WIDE: Final = pa.large_binary()
MAX_INT64: Final = (1 << 63) - 1

_ZSTD: Final = pa.Codec("zstd", compression_level=1)
_STEP: Final = 1 << 20
"""Bytes decompressed at a time when a frame has no size."""

_DENSEST: Final = 1 << 15
"""A zstd block takes at least 4 bytes and expands to at most 128 KiB: the largest possible growth."""


def encode_values(values: pa.Array) -> memoryview:
    """Values in the layout of a block: each after its length. No Python loop over records."""
    if values.null_count:
        raise InvalidInput("A queue of version 1 stores values, and no nulls: give each record a value.")
    lengths = pc.binary_length(values)
    prefixes = pa.Array.from_buffers(pa.binary(_PREFIX), len(lengths), lengths.buffers(), offset=lengths.offset)
    # 64-bit offsets: the lengths of very many short values may exceed 2 GiB in a batch.
    joined = pc.binary_join_element_wise(prefixes.cast(_WIDE), values.cast(_WIDE), pa.scalar(b"", _WIDE))
    _, offsets, data = joined.buffers()
    end = memoryview(offsets).cast("B").cast("q")[len(joined)] if len(joined) else 0
    return memoryview(data).cast("B")[:end] if end else memoryview(b"")


def encode_queue_batch(blocks: Iterable[memoryview], count: int, compression: Compression) -> Parts:
    """The object's buffers, to be written one after another; ``blocks`` together hold ``count`` encoded values."""
    if compression not in (Compression.NONE, Compression.ZSTD):
        raise InvalidInput(f"A queue of version 1 is compressed by 'zstd' or 'none', not {compression.name.lower()!r}.")
    parts: Parts = list(blocks)
    size = sum(map(len, parts))
    if count > MAX_BATCH_RECORDS or size > MAX_BATCH_BYTES:
        raise InvalidInput(
            f"A batch of {count:,} records and {size:,} bytes is over the limit of {MAX_BATCH_RECORDS:,} records and "
            f"{MAX_BATCH_BYTES:,} bytes: append it in parts."
        )
    if compression is Compression.ZSTD:
        # One frame with its size: some readers require that.
        parts = [memoryview(_ZSTD.compress(pa.py_buffer(b"".join(parts)))).cast("B")]
    return [*parts, _TAIL.pack(compression, count, VERSION)]


def decode_values(data: bytes | memoryview, where: str) -> pa.Array:
    """The values of a batch object, checked whole; ``CorruptData`` or ``UnsupportedVersion`` naming ``where``.

    Never takes more memory than a batch may hold, whatever the bytes say.
    """
    view = memoryview(data).cast("B")
    if len(view) < _TAIL.size:
        raise CorruptData(f"{where} is damaged: {len(view)} bytes cannot be a batch. Restore the object.")
    block = view[: -_TAIL.size]
    compression, count, version = _TAIL.unpack_from(view, len(block))
    if VERSION < version <= PLAUSIBLE_VERSION:
        raise UnsupportedVersion(
            f"{where} is a batch of version {version}, and a queue of version {VERSION} holds batches of version "
            f"{VERSION}: upgrade strandline, or restore the object."
        )
    if version != VERSION:
        raise CorruptData(f"{where} is damaged: there is no batch of version {version}. Restore the object.")
    # Memory of a record besides its stored value and length.
    beside = count * (RECORD_WIDTH - _PREFIX)
    check_unpacked(beside, len(view), where)
    if compression == Compression.ZSTD:
        block = _decompressed(block, where, unpacked_limit(len(view)) - beside)
    elif compression != Compression.NONE:
        raise CorruptData(f"{where} is damaged: it names the unknown compression {compression}.")
    check_unpacked(beside + len(block), len(view), where)
    if count * _PREFIX > len(block):
        raise CorruptData(
            f"{where} is damaged: it announces {count:,} records, more than its {len(block):,} bytes can hold."
        )
    try:
        values = read_values(block, count)
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise CorruptData(
            f"{where} is damaged: its {len(block):,} bytes are not the {count:,} records that it announces. Restore "
            "the object; retrying does not help."
        ) from error
    used = _PREFIX * count + (pc.sum(pc.binary_length(values).cast(pa.int64())).as_py() or 0)
    if used != len(block):
        raise CorruptData(f"{where} is damaged: {len(block) - used:,} bytes are left over after its last record.")
    return values


def decode_queue_batch(
    data: bytes | memoryview, where: str, *, metadata: Sequence[MetadataRange] = (), uncovered: int = 0
) -> pa.RecordBatch:
    """The records of a batch object: puts without key and headers, each at the ingestion time of its range.

    A record belongs to the last range that begins at or before it; a record before the first range, or without
    any, has the time ``uncovered``. Times outside the range of Arrow timestamps become the nearest valid one.
    """
    values = decode_values(data, where)
    count = len(values)
    columns = [
        _times(metadata, count, uncovered),
        pa.repeat(pa.scalar(int(Op.PUT), pa.int8()), count),
        pa.nulls(count, pa.binary()),
        values,
        no_headers(count),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


def _times(metadata: Sequence[MetadataRange], count: int, uncovered: int) -> pa.Array:
    ranges = sorted((item for item in metadata if item.start < count), key=lambda item: item.start)
    starts = [0, *(item.start for item in ranges), count]
    times = [uncovered, *(item.ingested for item in ranges)]
    runs = [
        pa.repeat(pa.scalar(max(-MAX_INT64 - 1, min(time, MAX_INT64)), pa.int64()), end - start)
        for time, start, end in zip(times, starts, starts[1:], strict=False)
        if end > start
    ]
    return pa.concat_arrays(runs).view(TIMESTAMP) if runs else pa.nulls(0, TIMESTAMP)


def _decompressed(block: memoryview, where: str, limit: int) -> memoryview:
    """The content of a zstd block, within a limit; its announced size is used only if it is possible."""
    announced = _content_size(block)
    if announced is not None and announced > min(limit, len(block) * _DENSEST):
        raise CorruptData(
            f"{where} is damaged: its {len(block):,} compressed bytes announce {announced:,}, but a batch with its "
            f"number of records holds at most {limit:,}."
        )
    try:
        if announced is not None:
            with contextlib.suppress(OSError):  # several frames, of which this is the first; or damage
                return _expanded(block, announced)
        return _expanded(block, _counted(block, where, limit))
    except OSError as error:
        raise CorruptData(f"{where} is damaged: it cannot be decompressed ({error}). Restore the object.") from error


def _expanded(block: memoryview, size: int) -> memoryview:
    return memoryview(_ZSTD.decompress(pa.py_buffer(block), decompressed_size=size)).cast("B")


def _counted(block: memoryview, where: str, limit: int) -> int:
    """Decompressed size of a block, found by decompressing it piece by piece."""
    size = 0
    with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(block)), "zstd") as stream:
        # Not read(): if that fails, as on damage, pyarrow never frees its result.
        while (piece := stream.read_buffer(_STEP)).size:
            size += piece.size
            if size > limit:
                raise CorruptData(f"{where} is damaged: it decompresses to more than {limit:,} bytes.")
    return size


_FRAME: Final = b"\x28\xb5\x2f\xfd"
_SINGLE_SEGMENT: Final = 0x20


def _content_size(block: memoryview) -> int | None:
    """Content size of the first zstd frame; None if it has none, or is no such frame."""
    header = bytes(block[:18])
    if header[:4] != _FRAME or len(header) < 18:  # noqa: PLR2004 - shorter ones are not worth a guess
        return None
    descriptor = header[4]
    single = bool(descriptor & _SINGLE_SEGMENT)
    width = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    if not width:
        return None
    size = int.from_bytes(header[at : at + width], "little")
    return size + 256 if width == 2 else size  # noqa: PLR2004 - the format's own quirk
