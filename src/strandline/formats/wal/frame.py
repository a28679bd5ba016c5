"""Write-ahead frames (``RDLW``), version 4: one batch with its offset; a checksum covers every byte.

A frame has a checksum of its header and one of the whole. With the first, a reader can trust the length before it
reads the payload, or allocates memory for it; when only the payload is damaged, it gives the position of the next
frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from strandline.errors import CorruptData, InvalidInput
from strandline.formats.arrow.block import Compression, Parts, frame_pages, read_block
from strandline.formats.arrow.stream import ArrowStream
from strandline.formats.checksum import crc32c

MAGIC: Final = b"RDLW"
VERSION: Final = 4
MAX_PAYLOAD: Final = 256 << 20
"""Largest payload; a header with a larger one is damaged, even if its checksum is right."""

# Header and trailer make 64 bytes, and Arrow's messages are multiples of 8: so every payload is aligned to 8 bytes
# in its file, and its columns can be used without a copy.
_HEADER = struct.Struct("<4sBQQIQQHBII")
_CHECKSUM = struct.Struct("<I")
_TRAILER = struct.Struct("<II")
HEADER_SIZE: Final = _HEADER.size + _CHECKSUM.size
TRAILER_SIZE: Final = _TRAILER.size
_LEAD: Final = MAGIC + bytes([VERSION])
_SMALL: Final = 32 << 10
"""A frame with a payload up to this size is one piece: a copy costs less than handling its parts."""
_COMPRESSIONS: Final = frozenset(Compression)


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """The header of a frame."""

    term: int
    first: int
    """The lsn of its first record."""
    count: int
    timestamp: int
    """Time of writing, in milliseconds since the epoch."""
    durable: int
    """The highest lsn known to be durable when it was written; 0 if none."""
    flags: int = 0
    pages: int = 1
    compression: Compression = Compression.NONE


class Frame(NamedTuple):
    """A whole frame: its header, a view of its block, and its position in the bytes."""

    info: FrameInfo
    block: memoryview
    start: int
    end: int


class FrameHead(NamedTuple):
    """A valid header of a frame, and the bounds of the frame."""

    info: FrameInfo
    start: int
    end: int


class Ending(Enum):
    """Why no further frame was found."""

    CLEAN = "clean"
    """The bytes end with a frame."""
    TORN = "torn"
    """The bytes end within a frame, and are valid so far."""
    DAMAGED = "damaged"
    """There are bytes that are no frame."""
    UNSUPPORTED = "unsupported"
    """There is a frame of another version."""


class Stop(NamedTuple):
    """End of the last whole frame, and what follows it."""

    ending: Ending
    at: int
    why: str
    needs: int = 0
    """For ``TORN``: how many bytes from ``at`` on are needed. Never more than a frame can have."""


def encode_frame(info: FrameInfo, pages: Sequence[Parts], metadata: Mapping[str, str] | None = None) -> Parts:
    """The frame's buffers, to be written one after another. ``InvalidInput`` if the payload is over 256 MiB."""
    block = frame_pages(pages, metadata)
    length = sum(map(len, block))
    if length > MAX_PAYLOAD:
        raise InvalidInput(
            f"A frame may hold {MAX_PAYLOAD:,} bytes and this one would have {length:,}: write it in parts."
        )
    header = _HEADER.pack(
        MAGIC, VERSION, info.term, info.first, info.count, info.timestamp, info.durable, info.flags, info.compression,
        info.pages, length,
    )  # fmt: skip
    checksum = crc32c(header[len(MAGIC) :])
    sealed = _CHECKSUM.pack(checksum)
    checksum = crc32c(sealed, checksum)
    if length <= _SMALL:
        payload = b"".join(block)
        return [b"".join((header, sealed, payload, _TRAILER.pack(crc32c(payload, checksum), length)))]
    for part in block:
        checksum = crc32c(part, checksum)
    return [header + sealed, *block, _TRAILER.pack(checksum, length)]


def decode_frame(frame: Frame, where: str) -> ArrowStream:
    """The records and the metadata of a whole frame, fully validated."""
    block = read_block(frame.block, where, frame.info.compression)
    rows = sum(batch.num_rows for batch in block.batches)
    if rows != frame.info.count or len(block.batches) != frame.info.pages:
        raise CorruptData(
            f"{where} is damaged: it holds {rows} records in {len(block.batches)} pages, its header says "
            f"{frame.info.count} in {frame.info.pages}."
        )
    return block


class FrameScanner:
    """Reads frames one after another, as views of the given bytes; nothing is copied.

    Iterate over it; then :attr:`stop` says where and why it ended. ``origin`` is the position of the bytes in their
    file: all reported positions count from the beginning of the file.

    >>> frame = b"".join(encode_frame(FrameInfo(1, 1, 0, 0, 0, pages=0), []))
    >>> scanner = FrameScanner(memoryview(frame + frame[:70]))
    >>> [(found.start, found.end) for found in scanner]
    [(0, 552)]
    >>> scanner.stop.ending, scanner.stop.at, scanner.stop.needs
    (<Ending.TORN: 'torn'>, 552, 552)
    """

    def __init__(self, data: memoryview, *, origin: int = 0) -> None:
        """Begin at the first of these bytes."""
        self._data = data
        self._origin = origin
        self.stop = Stop(Ending.CLEAN, origin, "nothing was read yet")

    def __iter__(self) -> Iterator[Frame]:
        at = 0
        while True:
            found = _frame_at(self._data, at, self._origin)
            if isinstance(found, Stop):
                self.stop = found
                return
            at = found.end - self._origin
            yield found


def frame_head(data: memoryview, at: int = 0, *, origin: int = 0) -> FrameHead | Stop:
    """The valid header at byte ``at`` of these bytes, whatever follows it, or why there is none."""
    found = _header_at(data, at, origin + at)
    if isinstance(found, Stop):
        return found
    return FrameHead(found[0], origin + at, origin + at + HEADER_SIZE + found[1] + TRAILER_SIZE)


def _frame_at(data: memoryview, at: int, origin: int) -> Frame | Stop:
    start = origin + at
    if at == len(data):
        return Stop(Ending.CLEAN, start, "the bytes end")
    header = _header_at(data, at, start)
    if isinstance(header, Stop):
        return header
    info, length = header
    body = at + HEADER_SIZE
    end = body + length + TRAILER_SIZE
    if end > len(data):
        return Stop(Ending.TORN, start, "the bytes end within a frame", end - at)
    checksum, again = _TRAILER.unpack_from(data, body + length)
    if again != length or checksum != crc32c(data[at + len(MAGIC) : body + length]):
        return Stop(Ending.DAMAGED, start, "the checksum of a frame is wrong")
    return Frame(info, data[body : body + length], start, origin + end)


def _header_at(data: memoryview, at: int, start: int) -> tuple[FrameInfo, int] | Stop:
    """A valid header, and the length of its payload."""
    lead = bytes(data[at : at + len(_LEAD)])
    if not _LEAD.startswith(lead):
        other = lead.startswith(MAGIC) and lead[-1]  # version 0 is left by a crash
        return Stop(
            Ending.UNSUPPORTED if other else Ending.DAMAGED,
            start,
            f"a frame is of version {other}" if other else f"no frame begins with {lead.hex(' ')}",
        )
    body = at + HEADER_SIZE
    if body > len(data):
        return Stop(Ending.TORN, start, "the bytes end within a header", HEADER_SIZE)
    (sealed,) = _CHECKSUM.unpack_from(data, body - _CHECKSUM.size)
    if crc32c(data[at + len(MAGIC) : body - _CHECKSUM.size]) != sealed:
        return Stop(Ending.DAMAGED, start, "the checksum of a header is wrong")
    _, _, term, first, count, timestamp, durable, flags, compression, pages, length = _HEADER.unpack_from(data, at)
    if length > MAX_PAYLOAD or compression not in _COMPRESSIONS:
        return Stop(Ending.DAMAGED, start, f"a header is impossible: {length:,} bytes, compression {compression}")
    return FrameInfo(term, first, count, timestamp, durable, flags, pages, Compression(compression)), length
