"""Scan of all frames of a file in bounded memory, continuing past damage. Reads only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from strandline.formats.arrow.block import read_metadata
from strandline.formats.wal.folder import append_of
from strandline.formats.wal.frame import (
    HEADER_SIZE,
    MAGIC,
    VERSION,
    Ending,
    Frame,
    FrameHead,
    FrameScanner,
    Stop,
    frame_head,
)
from strandline.log.wal.names import LEAD
from strandline.log.wal.read.catalog import Located
from strandline.model.head import WriterId, WriterState
from strandline.storage.disk import Disk

WINDOW: Final = 8 << 20
"""How many bytes are read at a time; a frame that is larger is read as a whole."""

_BEGINNING: Final = re.compile(re.escape(MAGIC + bytes([VERSION])))
_PATIENCE: Final = 4
"""How often, on average, a byte is read to find a frame past damage; hostile bytes could ask for any number."""


class Hole(NamedTuple):
    """Bytes that are no frame: from ``at`` up to ``upto``, where the next one begins or the file ends."""

    at: int
    upto: int
    why: str
    ending: Ending


def located(path: str, frame: Frame) -> tuple[Located, dict[WriterId, WriterState]]:
    """Where a whole frame of a file stands, and whose append it is."""
    info, first = frame.info, frame.info.first - 1
    where = f"{path} at byte {frame.start}"
    append = append_of(read_metadata(frame.block, where), where)
    size, end = frame.end - frame.start, first + info.count
    found = Located(path, frame.start, size, first, end, info.term, info.timestamp)
    if append is None:
        return found, {}
    return found, {append[0]: WriterState(append[1], first, first, info.count, info.timestamp * 1000)}


def walk(
    path: str, size: int, *, salt: int, disk: Disk, start: int = 0, window: int = WINDOW
) -> Iterator[Frame | Hole]:
    """What the first ``size`` bytes of a file hold from byte ``start`` on, in order, each byte of it once.

    Frames are whole by their checksums; that they follow each other is not looked at. Behind damage it goes on with the
    next frame of this log (``salt``). Holds about ``window`` bytes, or one frame. ``NotFound`` if the file goes away.
    """
    position, wanted, patience = start, window, _PATIENCE * size
    while position < size:
        length = min(wanted, size - position)
        data = disk.read(path, position, length)
        if len(data) < length:
            size = position + len(data)  # it was cut meanwhile: what was there was never acknowledged
        scanner = FrameScanner(memoryview(data), origin=position)
        yield from scanner
        stop, wanted = scanner.stop, window
        position = stop.at
        if stop.ending is Ending.CLEAN:
            continue
        if stop.ending is Ending.TORN and stop.at + stop.needs <= size:
            wanted = max(window, stop.needs)
            continue
        resumed, patience = _next_frame(path, stop, size, patience, salt=salt, disk=disk, window=window)
        yield Hole(stop.at, resumed, stop.why, stop.ending)
        position = resumed


def _next_frame(
    path: str, stop: Stop, size: int, patience: int, *, salt: int, disk: Disk, window: int
) -> tuple[int, int]:
    """Where the next whole frame of this log begins, or the end of the file; and how much patience is left."""
    head = frame_head(memoryview(disk.read(path, stop.at, HEADER_SIZE)), origin=stop.at)
    if isinstance(head, FrameHead) and head.end < size:
        # Only the payload is damaged, and what is in it may look like a frame: a value may be anything.
        behind = frame_head(memoryview(disk.read(path, head.end, HEADER_SIZE)), origin=head.end)
        if _is_own(behind, salt):
            return head.end, patience
    for at in _beginnings(path, stop.at + 1, size, disk=disk, window=window):
        found = frame_head(memoryview(disk.read(path, at, HEADER_SIZE)), origin=at)
        if not isinstance(found, FrameHead) or not _is_own(found, salt) or found.end > size:
            continue
        patience -= found.end - at
        if patience < 0:
            break
        data = memoryview(disk.read(path, at, found.end - at))
        if next(iter(FrameScanner(data, origin=at)), None) is not None:
            return at, patience
    return size, patience


def _is_own(head: FrameHead | Stop, salt: int) -> bool:
    return isinstance(head, FrameHead) and head.info.flags & ~LEAD == salt and head.info.durable < head.info.first


def _beginnings(path: str, at: int, size: int, *, disk: Disk, window: int) -> Iterator[int]:
    """Where the file has bytes with which a frame could begin."""
    while at < size:
        data = disk.read(path, at, min(window, size - at))
        for match in _BEGINNING.finditer(data):
            yield at + match.start()
        if len(data) <= len(MAGIC):
            return
        at += len(data) - len(MAGIC)  # a beginning may lie across two windows
