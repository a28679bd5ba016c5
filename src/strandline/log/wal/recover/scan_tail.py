"""Scans of a log's files: of all frames, past damage too, and on opening of the tail, to find the valid prefix.

Reads only. Opening reads the last file, from its last index entry on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from strandline.errors import CorruptData, NotALog, NotFound, UnsupportedVersion
from strandline.formats.arrow.block import read_metadata
from strandline.formats.json.value_versions import ValueVersion
from strandline.formats.wal.folder import SlotsFile, append_of, decode_slots_file, decode_wal_values, lead_of
from strandline.formats.wal.frame import (
    HEADER_SIZE,
    MAGIC,
    READS_PER_BYTE,
    VERSION,
    Ending,
    Frame,
    FrameHead,
    FrameInfo,
    FrameScanner,
    Stop,
    decode_frame,
    frame_head,
    frames_beyond,
)
from strandline.formats.wal.index import Index, decode_index, new_chain
from strandline.formats.wal.mark import Mark
from strandline.log.folders import FolderKind, check_missing
from strandline.log.wal.names import IDENTITY, LEAD, SLOTS_FILE, data_name, firsts_in, index_name, salt_of
from strandline.log.wal.read.catalog import Located, damaged_file
from strandline.log.wal.read.watermark import read_mark
from strandline.log.wal.write.journal import JournalPosition
from strandline.log.writers.numbered import forget_silent
from strandline.log.writers.source import remembered
from strandline.model.head import WriterId, WriterState, proof_of
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


def located(path: str, frame: Frame) -> tuple[Located, dict[WriterId, WriterState]]:
    """Position of a whole frame of a file, and its writer."""
    info, first = frame.info, frame.info.first - 1
    where = f"{path} at byte {frame.start}"
    append = append_of(read_metadata(frame.block, where), where)
    size, end = frame.end - frame.start, first + info.count
    found = Located(path, frame.start, size, first, end, info.term, info.timestamp)
    if append is None:
        return found, {}
    writer, number = remembered(*append)
    return found, {writer: WriterState(number, first, first, info.count, info.timestamp * 1000, proof_of(append[0]))}


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


class Torn(NamedTuple):
    """Bytes at the end of a file that a crash left, and that were never acknowledged."""

    first: int
    """First offset of the file."""
    at: int
    """First torn byte; 0 for a file that was never finished, and is removed as a whole."""
    size: int
    why: str


@dataclass(slots=True)
class Examined:
    """A log as it is on the disk, before anything is repaired."""

    log_id: UUID
    kept: SlotsFile
    firsts: list[int]
    """The remaining files."""
    place: JournalPosition
    """End of the valid part of the last file, where the next frame is written."""
    index: Index
    """The valid entries of its index."""
    indexed: int
    """The byte up to which the index covers the file."""
    unindexed: list[tuple[Located, Mapping[WriterId, WriterState]]]
    """The frames after that, and their writers."""
    sure: int
    """The byte of the last file up to which a sync is known to have succeeded."""
    mark: int
    """Everything below this offset is known to be durable, by mark, index or frames."""
    torn: list[Torn] = field(default_factory=list)


@dataclass(slots=True)
class _ScannedFile:
    """Scan result of one file."""

    place: JournalPosition
    index: Index
    indexed: int
    unindexed: list[tuple[Located, Mapping[WriterId, WriterState]]]
    mark: int
    size: int
    stop: Stop


def read_identity(folder: str, *, disk: Disk) -> UUID:
    """The identity of the log in this folder, or ``NotALog``."""
    return read_log_json(folder, disk=disk)[0]


def read_log_json(folder: str, *, disk: Disk) -> tuple[UUID, tuple[ValueVersion, ...]]:
    """The identity of the log in this folder, and the versions of its value format; or ``NotALog``."""
    path = f"{folder}/{IDENTITY}"
    try:
        return decode_wal_values(disk.read(path), path)
    except NotFound as error:
        check_missing(folder, FolderKind.WAL, disk=disk)
        raise NotALog(f"There is no write-ahead log in {folder}: name another folder, or create one.") from error


def read_slots_file(folder: str, log_id: UUID, *, disk: Disk) -> SlotsFile:
    """The log's start and its slots. A missing or damaged file is an error, never "no slots"."""
    path = f"{folder}/{SLOTS_FILE}"
    try:
        kept = decode_slots_file(disk.read(path), path)
    except NotFound as error:
        raise CorruptData(
            f"{path} is missing, which holds the start of the log and its slots: restore it from a backup, or "
            "run 'strandline wal repair --forget-slots', and create the slots again."
        ) from error
    if kept.log_id != log_id:
        raise CorruptData(f"{path} belongs to log {kept.log_id}, not to {log_id}: restore the right one.")
    return kept


def examine(folder: str, *, disk: Disk) -> Examined:
    """Scan the log. ``NotALog``, ``UnsupportedVersion``, or ``CorruptData`` with file and byte."""
    log_id = read_identity(folder, disk=disk)
    kept = read_slots_file(folder, log_id, disk=disk)
    return examine_files(folder, kept, disk=disk)


def examine_files(folder: str, kept: SlotsFile, *, disk: Disk) -> Examined:
    """Scan the log's files, with a start and slots that were read already; raises as :func:`examine` does."""
    log_id = kept.log_id
    side = read_mark(folder, log_id, disk=disk)
    firsts = firsts_in(disk.scan(folder))
    torn: list[Torn] = []
    mark = 0 if side is None else side.next
    while firsts:
        first = firsts[-1]
        mark = max(mark, first)  # a file begins only when all before it is durable
        path = f"{folder}/{data_name(first)}"
        found = _examine_file(folder, log_id, first, disk=disk)
        if isinstance(found, Stop):
            _refuse_unfinished(path, first, found, mark, side)
            torn.append(Torn(first, 0, disk.size(path), found.why))
            firsts.pop()
            continue
        mark = max(mark, found.mark)
        # Records below the start are trimmed anyway: the start may just have been moved.
        _refuse(path, found, mark if mark > kept.start else 0)
        if found.stop.ending is not Ending.CLEAN:
            torn.append(Torn(first, found.stop.at, found.size - found.stop.at, found.stop.why))
        if side is not None:
            found.place.term = max(found.place.term, side.term)
        sure = _sure(found, mark, is_begun=side is not None and side.active == first)
        return Examined(
            log_id, kept, firsts, found.place, found.index, found.indexed, found.unindexed, sure, mark, torn
        )
    raise CorruptData(f"{folder} has no files of frames, although there is a log: restore them.")


def _refuse_unfinished(path: str, first: int, stop: Stop, mark: int, side: Mark | None) -> None:
    """Refuse a file without its first frame, unless a crash may have caused that: nothing in it was acknowledged."""
    if stop.ending is Ending.UNSUPPORTED:
        raise _unsupported(path, stop)
    if mark > first or (side is not None and side.active == first):
        raise damaged_file(path, 0, stop.why)


def _refuse(path: str, found: _ScannedFile, mark: int) -> None:
    """Refuse damage at or below the mark; everything above it is a torn tail."""
    if found.stop.ending is Ending.UNSUPPORTED:
        raise _unsupported(path, found.stop)
    if found.place.next < mark:
        raise damaged_file(path, found.stop.at, f"{found.stop.why}, and everything below offset {mark} was durable")


def _unsupported(path: str, stop: Stop) -> UnsupportedVersion:
    return UnsupportedVersion(f"{path} cannot be read from byte {stop.at} on: {stop.why}; nothing was changed.")


def _sure(found: _ScannedFile, mark: int, *, is_begun: bool) -> int:
    """The byte up to which a sync is known to have succeeded: by an index entry, by a later frame, or by the mark."""
    sure = 0
    if found.index.entries:
        sure = found.index.entries[-1].position
    for frame, _ in found.unindexed:
        if frame.next <= mark:
            sure = frame.position + frame.size
    if not sure and is_begun:
        sure = found.indexed
    return sure


def _examine_file(folder: str, log_id: UUID, first: int, *, disk: Disk) -> _ScannedFile | Stop:
    """Scan a file; a ``Stop`` if its first frame is invalid."""
    path = f"{folder}/{data_name(first)}"
    size = disk.size(path)
    lead = read_lead(path, log_id, first, disk=disk)
    salt = salt_of(log_id)
    if isinstance(lead, Stop):
        # A later frame may prove that the file was begun.
        data = memoryview(disk.read(path))
        beyond = max((frame.info.durable for frame in _own(frames_beyond(data), salt)), default=0)
        if beyond > first and lead.ending is not Ending.UNSUPPORTED:
            raise damaged_file(path, 0, lead.why)
        return lead
    place = JournalPosition(first, lead.end, first, lead.info.term, lead.info.timestamp, lead.writers)
    index = _read_index(folder, log_id, first, disk=disk)
    mark = first
    for entry in index.entries:
        place.writers.update(entry.writers)
    if index.entries:
        entry = index.entries[-1]
        place.size, place.next, place.term, place.timestamp = entry.position, entry.offset, entry.term, entry.timestamp
        mark = entry.offset
        if entry.position > size:
            raise damaged_file(path, size, f"it ends there, and was durable up to byte {entry.position}")
    indexed = place.size
    data = memoryview(disk.read(path, indexed))
    scan = TailScan(path, place, salt)
    scanner = FrameScanner(data, origin=indexed)
    stop = None
    for frame in scanner:
        stop = scan.take(frame)
        if stop is not None:
            break
    stop = scanner.stop if stop is None else stop
    if stop.ending in (Ending.DAMAGED, Ending.TORN):
        for frame in _own(frames_beyond(data[stop.at - indexed :], origin=stop.at), salt):
            mark = max(mark, frame.info.durable)
    forget_silent(place.writers)
    return _ScannedFile(place, index, indexed, scan.unindexed, max(mark, scan.mark), size, stop)


class TailScan:
    """Accepts frames in order, as long as each one continues the one before."""

    def __init__(self, path: str, place: JournalPosition, salt: int) -> None:
        self.unindexed: list[tuple[Located, Mapping[WriterId, WriterState]]] = []
        self.mark = 0
        self._path = path
        self._place = place
        self._salt = salt

    def take(self, frame: Frame) -> Stop | None:
        """Accept the next frame; a ``Stop`` if it does not follow the one before."""
        place, info = self._place, frame.info
        if info.flags != self._salt or info.first != place.next + 1 or info.term < place.term or not info.count:
            return Stop(Ending.DAMAGED, frame.start, f"the frame there does not follow offset {place.next - 1}")
        frames = located(self._path, frame)
        self.unindexed.append(frames)
        self.mark = max(self.mark, info.durable)
        place.writers.update(frames[1])
        place.size, place.next, place.term = frame.end, frames[0].next, info.term
        place.timestamp = info.timestamp
        return None


class Lead(NamedTuple):
    """The first frame of a file."""

    info: FrameInfo
    end: int
    writers: dict[WriterId, WriterState]


def read_lead(path: str, log_id: UUID, first: int, *, disk: Disk) -> Lead | Stop:
    """The first frame of a file; a ``Stop`` if it is not whole. ``CorruptData`` for a file of another log."""
    head = frame_head(memoryview(disk.read(path, 0, HEADER_SIZE)))
    if isinstance(head, Stop):
        return head
    scanner = FrameScanner(memoryview(disk.read(path, 0, head.end)))
    frame = next(iter(scanner), None)
    if frame is None:
        return scanner.stop
    owner, writers = lead_of(decode_frame(frame, path).metadata, path)
    if owner != log_id or frame.info.first != first + 1 or not frame.info.flags & LEAD:
        raise CorruptData(
            f"{path} is a file of log {owner} that begins at offset {frame.info.first - 1}, and does not belong here: "
            "move it away, and restore the right one."
        )
    return Lead(frame.info, frame.end, writers)


def _read_index(folder: str, log_id: UUID, first: int, *, disk: Disk) -> Index:
    try:
        data = disk.read(f"{folder}/{index_name(first)}")
    except NotFound:
        data = b""
    return decode_index(data, new_chain(log_id, first))


def _own(frames: Iterable[Frame], salt: int) -> Iterator[Frame]:
    """The frames that this log may have written: a value may contain bytes that look like a frame."""
    return (frame for frame in frames if frame.info.flags & ~LEAD == salt and frame.info.durable < frame.info.first)
