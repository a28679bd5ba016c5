"""Examination of a log's files on opening: reads the last file, from its last index entry on, and changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from strandline.errors import CorruptData, NotALog, NotFound, UnsupportedVersion
from strandline.formats.object.identity import deletion_begun
from strandline.formats.wal.folder import SlotsFile, WalIdentity, decode_slots_file, decode_wal_identity
from strandline.formats.wal.index import Index, decode_index, new_chain
from strandline.log.findings import FindingKind
from strandline.log.folders import FolderKind, check_missing
from strandline.log.wal.names import IDENTITY, SLOTS_FILE, data_name, firsts_in, index_name
from strandline.log.wal.read.catalog import Located, damaged_file
from strandline.log.wal.read.watermark import read_mark
from strandline.log.wal.recover.checks import FileCheck, tail_problems
from strandline.log.wal.recover.walk import frames_of, walk
from strandline.log.wal.write.journal import JournalPosition
from strandline.log.writers.numbered import forget_silent
from strandline.model.head import WriterId, WriterState
from strandline.storage.disk import Disk

_LEAD_WINDOW = 64 << 10
"""Bytes read for the first frame of a file, which is small."""


LocatedFrame = tuple[Located, Mapping[WriterId, WriterState]]
"""A frame and its writers."""


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
    unindexed: list[LocatedFrame]
    """The frames after that, and their writers."""
    sure: int
    """The byte of the last file up to which a sync is known to have succeeded."""
    mark: int
    """Everything below this offset is known to be durable, by mark, index or frames."""
    torn: list[Torn] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The end of the log."""
        return max(self.kept.start, self.place.next)


def read_identity(folder: str, *, disk: Disk) -> UUID:
    """The identity of the log in this folder, or ``NotALog``."""
    return read_log_json(folder, disk=disk).log_id


def read_log_json(folder: str, *, disk: Disk, deleting: bool = False) -> WalIdentity:
    """The identity of the log in this folder, or ``NotALog``; also that of one that is being deleted, if asked for."""
    path = f"{folder}/{IDENTITY}"
    try:
        data = disk.read(path)
    except NotFound as error:
        check_missing(folder, FolderKind.WAL, disk=disk)
        raise NotALog(f"There is no write-ahead log in {folder}: name another folder, or create one.") from error
    found = decode_wal_identity(data, path)
    if found.deleting and not deleting:
        raise NotALog(deletion_begun(f"the log in {folder}"))
    return found


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


def examine_files(folder: str, kept: SlotsFile, *, disk: Disk, without: Collection[int] = ()) -> Examined:
    """Scan the log's files, with a start and slots that were read already; raises as :func:`examine` does.

    The indexes of the files ``without`` are wrong, and not used.
    """
    side = read_mark(folder, kept.log_id, disk=disk)
    firsts = firsts_in(disk.scan(folder))
    torn: list[Torn] = []
    mark = 0 if side is None else side.next
    while firsts:
        first = firsts[-1]
        check, index, unindexed = _scan_tail(folder, kept.log_id, first, use_index=first not in without, disk=disk)
        # A file begins only when all before it is durable.
        mark = max(mark, first, check.durable)
        is_active = side is not None and side.active == first
        # Records below the start are trimmed anyway: the start may just have been moved.
        durable = mark if mark > kept.start or not check.is_begun else 0
        for problem, is_torn in tail_problems(check, durable, is_active=is_active):
            if problem.kind is FindingKind.VERSION:
                raise UnsupportedVersion(
                    f"{check.path} cannot be read from byte {problem.at} on: {problem.why}; nothing was changed."
                )
            if not is_torn:
                raise damaged_file(check.path, problem.at, problem.why)
            torn.append(Torn(first, problem.at, check.size - problem.at, problem.why))
        if not check.is_begun:
            firsts.pop()
            continue
        place, indexed = check.place, index.entries[-1].position if index.entries else check.begins
        forget_silent(place.writers)
        if side is not None:
            place.term = max(place.term, side.term)
        # A sync is known to have succeeded by an index entry, by a later frame, or by the mark.
        sure = indexed if index.entries or is_active else 0
        for frame, _ in unindexed:
            if frame.next <= mark:
                sure = frame.position + frame.size
        return Examined(kept.log_id, kept, firsts, place, index, indexed, unindexed, sure, mark, torn)
    raise CorruptData(f"{folder} has no files of frames, although there is a log: restore them.")


def _scan_tail(
    folder: str, log_id: UUID, first: int, *, use_index: bool, disk: Disk
) -> tuple[FileCheck, Index, list[LocatedFrame]]:
    """A file's first frame, its index, and the frames after the last entry of that."""
    path = f"{folder}/{data_name(first)}"
    size, is_own = disk.size(path), frames_of(log_id)
    check = FileCheck(path, first, size, log_id=log_id)
    for piece in walk(path, size, is_own=is_own, disk=disk, window=_LEAD_WINDOW):
        check.take(piece)
        break
    index = read_index(folder, log_id, first, disk=disk) if use_index else Index([], 0, new_chain(log_id, first))
    if check.is_begun and index.entries:
        check.skip(index.entries)
        if check.at > size:
            raise damaged_file(path, size, f"it ends there, and was durable up to byte {check.at}")
    pieces = walk(path, size, is_own=is_own, disk=disk, start=check.at)
    unindexed = [found for piece in pieces if (found := check.take(piece)) is not None]
    check.done()
    return check, index, unindexed


def read_index(folder: str, log_id: UUID, first: int, *, disk: Disk) -> Index:
    """The valid entries of the index of a file; none if it is missing."""
    try:
        data = disk.read(f"{folder}/{index_name(first)}")
    except NotFound:
        data = b""
    return decode_index(data, new_chain(log_id, first))
