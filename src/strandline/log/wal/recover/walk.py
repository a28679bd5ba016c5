"""The frames of a file, and the holes between them: read in order, past damage too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from uuid import UUID

from strandline.formats.wal.frame import (
    HEADER_SIZE,
    MAGIC,
    VERSION,
    Ending,
    Frame,
    FrameHead,
    FrameInfo,
    FrameScanner,
    Stop,
    frame_head,
)
from strandline.log.wal.names import LEAD, salt_of
from strandline.storage.disk import Disk

WINDOW: Final = 8 << 20
"""Bytes read at a time; a larger frame is read as a whole."""

_READS_PER_BYTE: Final = 4
"""Average number of reads of a byte while searching frames past damage; bounds the work on hostile bytes."""

IsOwn = Callable[[FrameInfo], bool]
"""Whether a frame with this header may have been written to the file that is read."""

_BEGINNING: Final = re.compile(re.escape(MAGIC + bytes([VERSION])))


class Hole(NamedTuple):
    """Bytes that are no frame: from ``at`` up to ``upto``, where the next frame begins or the file ends."""

    at: int
    upto: int
    why: str
    ending: Ending


def frames_of(log_id: UUID) -> IsOwn:
    """Recognises the frames of a log."""
    salt = salt_of(log_id)
    return lambda info: info.flags & ~LEAD == salt and info.durable < info.first


def walk(
    path: str, size: int, *, is_own: IsOwn, disk: Disk, start: int = 0, window: int = WINDOW
) -> Iterator[Frame | Hole]:
    """The frames and holes in the first ``size`` bytes of a file from byte ``start`` on, in order, each byte once.

    Checksums of frames are checked, their continuity is not. After damage it continues with the next frame for which
    ``is_own``: a value may contain bytes that look like a frame. Holds about ``window`` bytes, or one frame.
    ``NotFound`` if the file is removed.
    """
    position, wanted, budget = start, window, _READS_PER_BYTE * size
    while position < size:
        length = min(wanted, size - position)
        data = disk.read(path, position, length)
        if len(data) < length:
            size = position + len(data)  # truncated meanwhile: those bytes were never acknowledged
        scanner = FrameScanner(memoryview(data), origin=position)
        yield from scanner
        stop, wanted = scanner.stop, window
        position = stop.at
        if stop.ending is Ending.CLEAN:
            continue
        if stop.ending is Ending.TORN and stop.at + stop.needs <= size:
            wanted = max(window, stop.needs)
            continue
        resumed, budget = _next_frame(path, stop, size, budget, is_own=is_own, disk=disk, window=window)
        yield Hole(stop.at, resumed, stop.why, stop.ending)
        position = resumed


def _next_frame(
    path: str, stop: Stop, size: int, budget: int, *, is_own: IsOwn, disk: Disk, window: int
) -> tuple[int, int]:
    """Position of the next whole frame of its own, or the end of the file; and the remaining read budget."""
    head = frame_head(memoryview(disk.read(path, stop.at, HEADER_SIZE)), origin=stop.at)
    if isinstance(head, FrameHead) and head.end < size:
        # Only the payload is damaged; it may contain bytes that look like a frame, since values are arbitrary.
        after = frame_head(memoryview(disk.read(path, head.end, HEADER_SIZE)), origin=head.end)
        if isinstance(after, FrameHead) and is_own(after.info):
            return head.end, budget
    for at in _beginnings(path, stop.at + 1, size, disk=disk, window=window):
        found = frame_head(memoryview(disk.read(path, at, HEADER_SIZE)), origin=at)
        if not isinstance(found, FrameHead) or not is_own(found.info) or found.end > size:
            continue
        budget -= found.end - at
        if budget < 0:
            break
        data = memoryview(disk.read(path, at, found.end - at))
        if next(iter(FrameScanner(data, origin=at)), None) is not None:
            return at, budget
    return size, budget


def _beginnings(path: str, at: int, size: int, *, disk: Disk, window: int) -> Iterator[int]:
    """Positions of bytes with which a frame could begin."""
    while at < size:
        data = disk.read(path, at, min(window, size - at))
        for match in _BEGINNING.finditer(data):
            yield at + match.start()
        if len(data) <= len(MAGIC):
            return
        at += len(data) - len(MAGIC)  # a frame may begin across two windows
