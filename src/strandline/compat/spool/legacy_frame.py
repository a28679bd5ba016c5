"""Write-ahead frames (``RDLW``) of versions 1, 2 and 3: one record each. All are read, version 3 is also written.

Unlike those of version 4 their headers have no checksum of their own, and version 1 has none at all: a length is
believed only up to the largest payload there may be, and nothing is ever allocated for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple
from zlib import crc32

from strandline.errors import InvalidInput
from strandline.formats.arrow.block import Parts
from strandline.formats.wal.frame import MAGIC, MAX_PAYLOAD

UNCHECKED_VERSION: Final = 1
TERMLESS_VERSION: Final = 2
RECORD_VERSION: Final = 3
"""The version that a log writes on request: one record a frame, with its term."""

_LEAD: Final = len(MAGIC) + 1
_CHECKSUM = struct.Struct("<I")
_V1 = struct.Struct("<QQ")
_V2 = struct.Struct("<QQI")
_V3 = struct.Struct("<QQQI")
_HEADERS: Final = {UNCHECKED_VERSION: _V1, TERMLESS_VERSION: _V2, RECORD_VERSION: _V3}
RECORD_OVERHEAD: Final = _LEAD + _V3.size + _CHECKSUM.size
"""What a frame of version 3 takes beside its payload."""


class LegacyFrame(NamedTuple):
    """A frame that was found whole: what it says, a view of its payload, and where in the file it stands."""

    version: int
    term: int | None
    """None for versions 1 and 2, which do not say."""
    lsn: int
    timestamp: int
    """Milliseconds since the epoch; 0 for version 1, which does not say."""
    payload: memoryview
    start: int
    end: int


class LegacyEnding(Enum):
    """Why no further frame was found."""

    CLEAN = "clean"
    """The bytes end where a frame does."""
    TORN = "torn"
    """The bytes end within a frame; fewer than four of them are torn whatever they are."""
    BAD_MAGIC = "bad magic"
    BAD_CHECKSUM = "bad checksum"
    UNKNOWN_VERSION = "unknown version"
    IMPLAUSIBLE_LENGTH = "implausible length"


class LegacyStop(NamedTuple):
    """Where the last good frame ends, and what is there instead of another."""

    ending: LegacyEnding
    at: int
    why: str
    needs: int = 0
    """For ``TORN``: how many bytes from ``at`` on would tell more. Never more than a frame can have."""


def encode_record_frame(term: int, lsn: int, timestamp: int, payload: bytes | memoryview) -> Parts:
    """A frame of version 3 as buffers to be written one after another; the payload is not copied.

    ``timestamp`` is in milliseconds. ``InvalidInput`` if the payload is over 256 MiB or a number has no 64 bits.

    >>> b"".join(encode_record_frame(2, 7, 11, b"hello")).hex()
    '52444c5703020000000000000007000000000000000b000000000000000500000068656c6c6ff0426d80'
    """
    length = memoryview(payload).nbytes
    if length > MAX_PAYLOAD:
        raise InvalidInput(
            f"A frame may hold {MAX_PAYLOAD:,} bytes and this record has {length:,}: write it as several records."
        )
    try:
        covered = bytes([RECORD_VERSION]) + _V3.pack(term, lsn, timestamp, length)
    except struct.error as error:
        raise InvalidInput(
            f"A frame cannot hold term {term}, lsn {lsn} and timestamp {timestamp}: each is a whole number of 64 bits "
            f"that is not negative."
        ) from error
    return [MAGIC + covered, payload, _CHECKSUM.pack(crc32(payload, crc32(covered)))]


def legacy_frame_at(data: memoryview, at: int, *, origin: int = 0) -> LegacyFrame | LegacyStop:
    """The frame that begins at byte ``at`` of these bytes, or why there is none; it costs no more than that frame.

    ``origin`` is where the bytes begin in their file: positions that are told count from the beginning of the file.
    """
    start = origin + at
    if at == len(data):
        return LegacyStop(LegacyEnding.CLEAN, start, "the bytes end")
    header = _header_at(data, at, start)
    if isinstance(header, LegacyStop):
        return header
    version, numbers, body, rest = header
    end = rest if version == UNCHECKED_VERSION else rest + _CHECKSUM.size
    if end > len(data):
        return LegacyStop(LegacyEnding.TORN, start, "the bytes end within a frame", end - at)
    payload = data[body:rest]
    if version == UNCHECKED_VERSION:
        return LegacyFrame(version, None, numbers[0], 0, payload, start, origin + end)
    if crc32(data[at + len(MAGIC) : rest]) != _CHECKSUM.unpack_from(data, rest)[0]:
        return LegacyStop(LegacyEnding.BAD_CHECKSUM, start, "the checksum of a frame is wrong")
    term = numbers[0] if version == RECORD_VERSION else None
    return LegacyFrame(version, term, numbers[-2], numbers[-1], payload, start, origin + end)


def _header_at(data: memoryview, at: int, start: int) -> tuple[int, list[int], int, int] | LegacyStop:
    """The version, the numbers before the length, and where the payload begins and ends if it is all there."""
    lead = bytes(data[at : at + _LEAD])
    # Fewer bytes than a magic has are what a crash left of one, whatever they are: a disk may keep a length and lose
    # what was written there.
    if len(lead) >= len(MAGIC) and not lead.startswith(MAGIC):
        return LegacyStop(LegacyEnding.BAD_MAGIC, start, f"no frame begins with {lead.hex(' ')}")
    if len(lead) < _LEAD:
        return LegacyStop(LegacyEnding.TORN, start, "the bytes end within a header", _LEAD)
    version = lead[-1]
    header = _HEADERS.get(version)
    if header is None:
        return LegacyStop(LegacyEnding.UNKNOWN_VERSION, start, f"a frame is of version {version}")
    body = at + _LEAD + header.size
    if body > len(data):
        return LegacyStop(LegacyEnding.TORN, start, "the bytes end within a header", body - at)
    *numbers, length = header.unpack_from(data, at + _LEAD)
    if length > MAX_PAYLOAD:
        # Before anyone looks whether so many bytes are there: a length that no frame has is damage, not a torn tail.
        return LegacyStop(LegacyEnding.IMPLAUSIBLE_LENGTH, start, f"a frame says that it holds {length:,} bytes")
    return version, numbers, body, body + length


class LegacyScanner:
    """Reads frames of versions 1 to 3 one after another, as views of the bytes that it is given; nothing is copied.

    Iterate over it; when that is over, :attr:`stop` says where and why. Payloads are given as they were written.

    >>> frame = b"".join(encode_record_frame(2, 7, 11, b"hello"))
    >>> scanner = LegacyScanner(memoryview(frame + frame[:3]))
    >>> [(found.term, found.lsn, bytes(found.payload)) for found in scanner]
    [(2, 7, b'hello')]
    >>> scanner.stop.ending, scanner.stop.at
    (<LegacyEnding.TORN: 'torn'>, 42)
    """

    def __init__(self, data: memoryview, *, origin: int = 0) -> None:
        """Begin at the first of these bytes."""
        self._data = data
        self._origin = origin
        self.stop = LegacyStop(LegacyEnding.CLEAN, origin, "nothing was read yet")

    def __iter__(self) -> Iterator[LegacyFrame]:
        at = 0
        while True:
            found = legacy_frame_at(self._data, at, origin=self._origin)
            if isinstance(found, LegacyStop):
                self.stop = found
                return
            at = found.end - self._origin
            yield found
