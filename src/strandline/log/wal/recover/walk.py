"""The frames of a file, and the holes between them: read in order, past damage too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from strandline.formats.wal.frame import (
    HEADER_SIZE,
    MAGIC,
    READS_PER_BYTE,
    VERSION,
    Ending,
    Frame,
    FrameHead,
    FrameScanner,
    Stop,
    frame_head,
)
from strandline.log.wal.names import LEAD
from strandline.storage.disk import Disk

WINDOW: Final = 8 << 20
"""Bytes read at a time; a larger frame is read as a whole."""

_BEGINNING: Final = re.compile(re.escape(MAGIC + bytes([VERSION])))


class Hole(NamedTuple):
    """Bytes that are no frame: from ``at`` up to ``upto``, where the next frame begins or the file ends."""

    at: int
    upto: int
    why: str
    ending: Ending


def walk(
    path: str, size: int, *, salt: int, disk: Disk, start: int = 0, window: int = WINDOW
) -> Iterator[Frame | Hole]:
    """The frames and holes in the first ``size`` bytes of a file from byte ``start`` on, in order, each byte once.

    Checksums of frames are checked, their continuity is not. After damage it continues with the
    next frame of this log (``salt``). Holds about ``window`` bytes, or one frame. ``NotFound`` if the file is removed.
    """
    position, wanted, budget = start, window, READS_PER_BYTE * size
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
        resumed, budget = _next_frame(path, stop, size, budget, salt=salt, disk=disk, window=window)
        yield Hole(stop.at, resumed, stop.why, stop.ending)
        position = resumed


def _next_frame(
    path: str, stop: Stop, size: int, budget: int, *, salt: int, disk: Disk, window: int
) -> tuple[int, int]:
    """Position of the next whole frame of this log, or the end of the file; and the remaining read budget."""
    head = frame_head(memoryview(disk.read(path, stop.at, HEADER_SIZE)), origin=stop.at)
    if isinstance(head, FrameHead) and head.end < size:
        # Only the payload is damaged; it may contain bytes that look like a frame, since values are arbitrary.
        after = frame_head(memoryview(disk.read(path, head.end, HEADER_SIZE)), origin=head.end)
        if _is_own(after, salt):
            return head.end, budget
    for at in _beginnings(path, stop.at + 1, size, disk=disk, window=window):
        found = frame_head(memoryview(disk.read(path, at, HEADER_SIZE)), origin=at)
        if not isinstance(found, FrameHead) or not _is_own(found, salt) or found.end > size:
            continue
        budget -= found.end - at
        if budget < 0:
            break
        data = memoryview(disk.read(path, at, found.end - at))
        if next(iter(FrameScanner(data, origin=at)), None) is not None:
            return at, budget
    return size, budget


def _is_own(head: FrameHead | Stop, salt: int) -> bool:
    return isinstance(head, FrameHead) and head.info.flags & ~LEAD == salt and head.info.durable < head.info.first


def _beginnings(path: str, at: int, size: int, *, disk: Disk, window: int) -> Iterator[int]:
    """Positions of bytes with which a frame could begin."""
    while at < size:
        data = disk.read(path, at, min(window, size - at))
        for match in _BEGINNING.finditer(data):
            yield at + match.start()
        if len(data) <= len(MAGIC):
            return
        at += len(data) - len(MAGIC)  # a frame may begin across two windows
