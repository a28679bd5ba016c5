"""Format of version 1 queues, shared with other implementations: batch objects and the manifest, as bytes."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.arrow.block import Compression, Parts
from strandline.formats.arrow.header import check_unpacked, unpacked_limit
from strandline.model.head import MetadataRange, MetadataRanges, QueueEntry, QueueManifest
from strandline.model.records import (
    MAX_BATCH_BYTES,
    MAX_BATCH_RECORDS,
    RECORD_SCHEMA,
    RECORD_WIDTH,
    TIMESTAMP,
    Op,
    no_headers,
)
from strandline.model.stamp import Stamped

VERSION: Final = 1

_PLAUSIBLE: Final = 255
"""A higher version counts as damage, since there is no checksum."""

_TAIL = struct.Struct("<BIH")
_PREFIX: Final = 4
"""The bytes of a length before each record."""

_WIDE: Final = pa.large_binary()
_MAX_TIME: Final = (1 << 63) - 1
_MILLISECOND: Final = 1000
"""Milliseconds are stored; everything else here uses microseconds."""

_ZSTD: Final = pa.Codec("zstd", compression_level=1)
_STEP: Final = 1 << 20
"""Bytes decompressed at a time when a frame has no size."""

_DENSEST: Final = 1 << 15
"""A zstd block takes at least 4 bytes and expands to at most 128 KiB: the largest possible growth."""


# --- batch objects ---------------------------------------------------------------------------------------------


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
    if VERSION < version <= _PLAUSIBLE:
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
        pa.repeat(pa.scalar(max(-_MAX_TIME - 1, min(time, _MAX_TIME)), pa.int64()), end - start)
        for time, start, end in zip(times, starts, starts[1:], strict=False)
        if end > start
    ]
    return pa.concat_arrays(runs).view(TIMESTAMP) if runs else pa.nulls(0, TIMESTAMP)


def _decompressed(block: memoryview, where: str, limit: int) -> memoryview:
    """The content of a zstd block, within a limit; its announced size is used only if it is possible."""
    announced = _content_size(block)
    if announced is not None and announced > min(limit, len(block) * _DENSEST):
        raise CorruptData(
            f"{where} is damaged: its {len(block):,} compressed bytes announce {announced:,}, but a batch of so many "
            f"records holds at most {limit:,}."
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


# --- the manifest ----------------------------------------------------------------------------------------------

_FOOTER = struct.Struct("<IQQH")
_ENTRY = struct.Struct("<IQH")
_COUNT = struct.Struct("<I")
_RANGE = struct.Struct("<IqI")
_SMALLEST_ENTRY: Final = _ENTRY.size + _COUNT.size


def encode_manifest(manifest: QueueManifest) -> bytes:
    """Encode the whole manifest. Ingestion times are truncated to the millisecond."""
    return _joined(map(_pack_entry, manifest.entries), manifest)


def _joined(entries: Iterable[bytes], manifest: QueueManifest) -> bytes:
    try:
        footer = _FOOTER.pack(len(manifest.entries), manifest.next_sequence, manifest.epoch, VERSION)
    except struct.error as error:
        raise InvalidInput(
            f"A manifest of version {VERSION} has no room for {len(manifest.entries):,} entries up to sequence "
            f"{manifest.next_sequence:,} in epoch {manifest.epoch:,}: {error}."
        ) from error
    return b"".join((*entries, footer))


def decode_manifest(data: bytes | memoryview, where: str) -> QueueManifest:
    """The manifest in these bytes; ``CorruptData`` or ``UnsupportedVersion`` naming ``where``.

    Its sequences are dense and end just below the next one: readers may rely on that.
    """
    view = memoryview(data).cast("B")
    if len(view) < _FOOTER.size:
        raise _damaged(where, f"has {len(view)} bytes, too few for a manifest")
    body = view[: -_FOOTER.size]
    count, next_sequence, epoch, version = _FOOTER.unpack_from(view, len(body))
    if VERSION < version <= _PLAUSIBLE:
        raise UnsupportedVersion(
            f"{where} is a manifest of version {version}, and this program reads version {VERSION}: upgrade strandline."
        )
    if version != VERSION:
        raise CorruptData(f"{where} is damaged: there is no manifest of version {version}. Restore the object.")
    if count * _SMALLEST_ENTRY > len(body) or count > next_sequence:
        raise _damaged(where, f"announces {count:,} entries, more than it can hold")
    if next_sequence > _MAX_TIME:
        raise _damaged(where, f"has {next_sequence:,} as its next sequence, which no queue reaches")
    entries, at = [], 0
    for sequence in range(next_sequence - count, next_sequence):
        entry, at = _unpack_entry(body, at, sequence, where)
        entries.append(entry)
    if at != len(body):
        raise _damaged(where, f"has {len(body) - at} bytes too many behind its entries")
    return QueueManifest(tuple(entries), next_sequence, epoch)


def _damaged(where: str, what: str) -> CorruptData:
    return CorruptData(f"{where} is damaged: it {what}. Restore the object; retrying does not help.")


class ManifestCodec:
    """The manifest as a cell's content. The format has no room for a stamp: the cell remembers no operations.

    Encoded entries are cached: the next manifest has nearly the same ones.
    """

    def __init__(self) -> None:
        self.encoded = 0
        """Number of encoded states: one for each attempted write."""
        self._last: tuple[tuple[QueueEntry, ...], list[bytes]] = ((), [])

    def encode(self, state: Stamped[QueueManifest]) -> bytes:
        """The bytes of a state."""
        self.encoded += 1
        entries = state.value.entries
        known, packed = self._last
        skip = entries[0].sequence - known[0].sequence if entries and known else 0
        if skip >= 0:
            pairs = zip(entries, known[skip:], packed[skip:], strict=False)
            ready = [data if entry is same else _pack_entry(entry) for entry, same, data in pairs]
        else:
            ready = []
        ready += map(_pack_entry, entries[len(ready) :])
        self._last = entries, ready
        return _joined(ready, state.value)

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[QueueManifest]:
        """The state in these bytes."""
        return Stamped(decode_manifest(data, where))


def _pack_entry(entry: QueueEntry) -> bytes:
    try:
        location, ranges = entry.location.encode(), _pack_ranges(MetadataRanges.of(entry.metadata))
        length = _SMALLEST_ENTRY - 4 + len(location) + len(ranges)
        fixed = _ENTRY.pack(length, entry.sequence, len(location))
        return b"".join((fixed, location, _COUNT.pack(len(entry.metadata)), ranges))
    except struct.error as error:
        raise InvalidInput(f"A manifest of version {VERSION} has no room for {entry!r:.200}: {error}.") from error


def _pack_ranges(ranges: MetadataRanges) -> bytes:
    times = [time // _MILLISECOND for time in ranges.times]
    leads = map(_RANGE.pack, ranges.starts, times, map(len, ranges.payloads))
    return b"".join(chain.from_iterable(zip(leads, ranges.payloads, strict=True)))


def _unpack_entry(body: memoryview, at: int, expected: int, where: str) -> tuple[QueueEntry, int]:
    """The entry at a byte, and the position of the next one. Called for every entry of every manifest: kept simple."""
    if at + _SMALLEST_ENTRY > len(body):
        raise _damaged(where, f"ends within an entry at byte {at}")
    length, sequence, name = _ENTRY.unpack_from(body, at)
    end, middle = at + 4 + length, at + _ENTRY.size + name
    if end > len(body) or middle + 4 > end:
        raise _damaged(where, f"has an entry at byte {at} that does not fit into the manifest")
    if sequence != expected:
        raise _damaged(where, f"lists sequence {sequence} where {expected} should be")
    try:
        location = str(body[at + _ENTRY.size : middle], "utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(where, f"holds broken text at byte {at}") from error
    starts, times, payloads = [], [], []
    (count,) = _COUNT.unpack_from(body, middle)
    at = middle + 4
    for _ in range(count):
        start, time, size = _RANGE.unpack_from(body, at) if at + _RANGE.size <= end else (0, 0, end)
        payload = at + _RANGE.size
        at = payload + size
        if at > end:
            raise _damaged(where, f"has metadata before byte {payload} that runs past its entry")
        starts.append(start)
        times.append(time * _MILLISECOND)
        payloads.append(bytes(body[payload:at]))
    if at != end:
        raise _damaged(where, f"has {end - at} bytes too many in an entry")
    return QueueEntry(sequence, location, MetadataRanges(tuple(starts), tuple(times), tuple(payloads))), end


_MAGIC: Final = b"PAR1"
_LENGTH = struct.Struct("<I")

# Types of fields and of list items in Thrift's compact protocol.
_I32: Final = 5
_I64: Final = 6
_BINARY: Final = 8
_LIST: Final = 9
_STRUCT: Final = 12

# Numbers of Parquet's enumerations.
_BYTE_ARRAY: Final = 6
_REQUIRED: Final = 0
_PLAIN: Final = 0
_RLE: Final = 3
_UNCOMPRESSED: Final = 0
_DATA_PAGE: Final = 0

_NAME: Final = b"value"


def read_values(block: memoryview, count: int) -> pa.Array:
    """The first ``count`` values of a block; an ``ArrowException`` or ``OSError`` if it does not hold so many.

    The caller ensures that the block can hold the lengths, and that nothing is left over. Blocks end below 2 GiB.
    """
    import pyarrow.parquet as pq

    header = _MAGIC + _page_header(len(block), count)
    footer = _footer(len(header) - len(_MAGIC) + len(block), count)
    file = b"".join((header, block, footer, _LENGTH.pack(len(footer)), _MAGIC))
    column = pq.ParquetFile(pa.BufferReader(file)).read(use_threads=False).column(0)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([pa.nulls(0, pa.binary()), *column.chunks])


def _page_header(size: int, count: int) -> bytes:
    page = _struct({1: (_I32, count), 2: (_I32, _PLAIN), 3: (_I32, _RLE), 4: (_I32, _RLE)})
    return _struct({1: (_I32, _DATA_PAGE), 2: (_I32, size), 3: (_I32, size), 5: (_STRUCT, page)})


def _footer(size: int, count: int) -> bytes:
    """The metadata of a file with one row group of one column, whose only page begins behind the magic."""
    start = len(_MAGIC)
    column = _struct(
        {
            1: (_I32, _BYTE_ARRAY),
            2: (_LIST, _list(_I32, _zigzag(_PLAIN))),
            3: (_LIST, _list(_BINARY, _text(_NAME))),
            4: (_I32, _UNCOMPRESSED),
            5: (_I64, count),
            6: (_I64, size),
            7: (_I64, size),
            9: (_I64, start),
        }
    )
    chunk = _struct({2: (_I64, start), 3: (_STRUCT, column)})
    group = _struct({1: (_LIST, _list(_STRUCT, chunk)), 2: (_I64, size), 3: (_I64, count)})
    root = _struct({4: (_BINARY, _text(b"root")), 5: (_I32, 1)})
    leaf = _struct({1: (_I32, _BYTE_ARRAY), 3: (_I32, _REQUIRED), 4: (_BINARY, _text(_NAME))})
    return _struct(
        {
            1: (_I32, 1),
            2: (_LIST, _list(_STRUCT, root, leaf)),
            3: (_I64, count),
            4: (_LIST, _list(_STRUCT, group)),
        }
    )


def _struct(fields: dict[int, tuple[int, int | bytes]]) -> bytes:
    """A structure: each field after its distance to the one before, and its type."""
    parts, last = [], 0
    for number, (kind, value) in fields.items():
        parts.append(bytes([(number - last) << 4 | kind]))
        parts.append(_zigzag(value) if isinstance(value, int) else value)
        last = number
    return b"".join((*parts, b"\x00"))


def _list(kind: int, *items: bytes) -> bytes:
    return bytes([len(items) << 4 | kind]) + b"".join(items)


def _text(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _zigzag(number: int) -> bytes:
    """A non-negative number, in Thrift's encoding of signed ones."""
    return _varint(2 * number)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
