"""Rewind: truncates a log to an offset and quarantines the tail in a folder of its own.

Removing files does not suffice: mark, indexes, later files and frames all record that the tail was durable. So the
rewind first writes its plan as one small file. Before that file exists nothing has changed; afterwards every opening
of the log finishes the plan, however often that is interrupted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from strandline.errors import AlreadyExists, CorruptData, InvalidInput, NotFound
from strandline.formats.arrow.block import Compression, Parts, encode_page
from strandline.formats.wal.folder import Rewinding, decode_rewinding, encode_rewinding
from strandline.formats.wal.frame import Frame, FrameInfo, decode_frame, encode_frame
from strandline.formats.wal.mark import NO_BOOT, Mark, encode_mark
from strandline.log.slots.rules import put_at
from strandline.log.wal.names import (
    DATA,
    INDEX,
    MARK,
    NEW,
    REWIND,
    TORN,
    data_name,
    firsts_in,
    hold_lock,
    index_name,
    salt_of,
)
from strandline.log.wal.read.catalog import damaged_file
from strandline.log.wal.recover.checks import FileCheck
from strandline.log.wal.recover.repair import copy_range, describe_copy, rebuild_index, remove_files, repair
from strandline.log.wal.recover.scan_tail import Examined, examine, read_identity, read_log_json, read_slots_file
from strandline.log.wal.recover.walk import frames_of, walk
from strandline.log.wal.slots import write_slots_file
from strandline.log.wal.write.journal import JournalPosition, encode_lead
from strandline.log.writers.numbered import forget_silent
from strandline.model.cursor import Cursor
from strandline.storage.disk import Disk, make_own_folder, replace_file, sync_name
from strandline.storage.env import SYSTEM, Env

_READ_BYTES: Final = 8 << 20
"""Bytes copied at a time."""


@dataclass(frozen=True, slots=True)
class Rewound:
    """Result of a rewind."""

    folder: str
    quarantine: str | None
    """The folder of the removed tail; None if there was none."""
    cursor: Cursor
    """The log's new end, with the term of its last record."""
    end: int
    """The log's former end."""

    @property
    def count(self) -> int:
        """Number of removed records."""
        return self.end - self.cursor.next


def rewind(folder: str, to: int, *, quarantine: str, env: Env = SYSTEM) -> Rewound:
    """Durably move everything from an offset on out of a closed log, so that it ends there.

    ``quarantine``, a folder that is absent or empty, becomes a write-ahead log of the same identity that begins at
    ``to`` and holds the removed tail, frame by frame unchanged. The log then is in the term of its last record, and
    remembers its writers as of then. If ``to`` is within a batch, the records below stay, but belong to no
    numbered append any more, since the batch was not kept whole. Slots above are moved back to ``to``; nothing else
    of them changes.

    If it was interrupted, nothing has changed, or opening the log or calling this again finishes it; nothing below
    ``to`` is touched in any case. If the log ends at ``to``, there is nothing to do. Processes that read the log
    meanwhile should open it again.

    ``InvalidInput`` below the log's start or past its end, ``AlreadyExists`` if there is something else in
    ``quarantine``, ``CorruptData`` for damage: nothing was changed. ``Fenced`` while a process has it open.
    """
    with contextlib.ExitStack() as held:
        hold_lock(held, folder, disk=env.disk)
        log_id = read_identity(folder, disk=env.disk)
        finished = finish_rewind(folder, disk=env.disk)
        found = examine(folder, disk=env.disk)
        repair(folder, found, disk=env.disk)
        start, end = found.kept.start, max(found.kept.start, found.place.next)
        if not start <= to <= end:
            raise InvalidInput(
                f"The log in {folder} cannot be rewound to offset {to}: it holds the offsets {start} up to {end}."
            )
        if to == end:
            cursor = Cursor(log_id, to, found.place.term)
            if finished is not None and finished.to == to:
                return Rewound(folder, finished.quarantine, cursor, finished.end)
            return Rewound(folder, None, cursor, end)
        cut = _find_cut(folder, found, to, disk=env.disk)
        _set_aside(folder, found, cut, to, quarantine, disk=env.disk)
        decided = _decide(folder, found, cut, to, quarantine, disk=env.disk)
        finish_rewind(folder, disk=env.disk)
        return Rewound(folder, quarantine, Cursor(log_id, to, decided.term), end)


def copy_tail(folder: str, first: int, *, quarantine: str, env: Env = SYSTEM) -> None:
    """Durably copy everything from an offset on out of a closed log, as :func:`rewind` does; the log stays as it is.

    ``InvalidInput`` if the log does not have that offset; raises as :func:`rewind` otherwise.
    """
    with contextlib.ExitStack() as held:
        hold_lock(held, folder, disk=env.disk)
        finish_rewind(folder, disk=env.disk)
        found = examine(folder, disk=env.disk)
        repair(folder, found, disk=env.disk)
        if not found.kept.start <= first < found.place.next:
            raise InvalidInput(f"The log in {folder} does not have offset {first}: nothing was copied.")
        _set_aside(folder, found, _find_cut(folder, found, first, disk=env.disk), first, quarantine, disk=env.disk)


class _RewindCut(NamedTuple):
    """The point at which a log is truncated: the file, the last frame that stays, and the first that goes."""

    path: str
    place: JournalPosition
    """Position after the last unchanged frame, with the writers and the term as of then."""
    size: int
    """Bytes of the file."""
    frame: Frame
    """The frame that holds the offset."""


def _find_cut(folder: str, found: Examined, to: int, *, disk: Disk) -> _RewindCut:
    """Read the file with an offset up to there, and check all of it."""
    log_id = found.log_id
    first = max(first for first in found.firsts if first <= to)
    path = f"{folder}/{data_name(first)}"
    size = disk.size(path)
    check = FileCheck(path, first, size, log_id=log_id)
    for piece in walk(path, size, is_own=frames_of(log_id), disk=disk):
        holds = isinstance(piece, Frame) and piece.info.first + piece.info.count > to + 1
        place = replace(check.place, writers=dict(check.place.writers)) if holds else check.place
        check.take(piece)
        check.refuse()
        if isinstance(piece, Frame) and holds:
            forget_silent(place.writers)
            return _RewindCut(path, place, size, piece)
    raise damaged_file(path, size, f"it ends there, and offset {to} should be in it")


def _set_aside(folder: str, found: Examined, cut: _RewindCut, to: int, quarantine: str, *, disk: Disk) -> None:
    """Durably copy everything from the cut on into a log of its own; an existing copy is reused."""
    parent = str(Path(quarantine).absolute().parent)
    make_own_folder(parent, disk=disk)
    hidden = f"{quarantine}{NEW}"
    disk.remove_folder(hidden)
    disk.make_folders(hidden)
    _copy_tail(folder, found, cut, to, hidden, disk=disk)
    disk.sync_folder(hidden)
    there = disk.scan(quarantine)
    if not there:
        disk.rename(hidden, quarantine)
    elif not _is_same(hidden, quarantine, disk=disk):
        disk.remove_folder(hidden)
        raise AlreadyExists(f"{quarantine} is not empty: name another folder for the tail of {folder}.")
    else:
        disk.remove_folder(hidden)  # left by an interrupted call
    sync_name(quarantine, disk=disk)


def _copy_tail(folder: str, found: Examined, cut: _RewindCut, to: int, target: str, *, disk: Disk) -> None:
    """The frames from the cut on, unchanged: if ``to`` lies within the first of them, the log begins there."""
    log_id, first = found.log_id, cut.place.next
    lead = encode_lead(log_id, first, cut.place)
    copy_range(cut.path, cut.place.size, cut.size, f"{target}/{data_name(first)}", lead=lead, disk=disk)
    rebuild_index(target, log_id, first, disk=disk)
    later = [known for known in found.firsts if known > first]
    for known in later:
        disk.copy(f"{folder}/{data_name(known)}", f"{target}/{data_name(known)}")
        with contextlib.suppress(NotFound):
            disk.copy(f"{folder}/{index_name(known)}", f"{target}/{index_name(known)}")
    gone = {data_name(known).removesuffix(DATA) for known in later}
    for row in disk.scan(folder):
        if row.name.endswith(TORN) and row.name.partition(".")[0] in gone:
            disk.copy(f"{folder}/{row.name}", f"{target}/{row.name}")
    place = found.place
    identity = read_log_json(folder, disk=disk)
    mark = Mark(
        log_id, to, place.next, max([first, *later]), place.term, NO_BOOT, clean=True,
        sealed=identity.sealed == place.next,
    )  # fmt: skip
    describe_copy(target, mark, identity, disk=disk)


def _is_same(one: str, other: str, *, disk: Disk) -> bool:
    """Whether two folders hold equal files, except for indexes, which opening may have rebuilt."""
    names, others = (
        [(row.name, row.size) for row in disk.scan(folder) if not row.name.endswith(INDEX)] for folder in (one, other)
    )
    if names != others:
        return False
    return all(
        disk.read(f"{one}/{name}", at, _READ_BYTES) == disk.read(f"{other}/{name}", at, _READ_BYTES)
        for name, size in names
        for at in range(0, size, _READ_BYTES)
    )


def _decide(folder: str, found: Examined, cut: _RewindCut, to: int, quarantine: str, *, disk: Disk) -> Rewinding:
    """Durably write the plan, after the file that replaces the removed frames."""
    log_id, place = found.log_id, cut.place
    begins, is_split = place.next, to > place.next
    path = f"{folder}/{data_name(begins)}{NEW}"
    disk.remove(path)
    parts = encode_lead(log_id, begins, place)
    if is_split:
        parts = [*parts, *_below(cut, to, salt_of(log_id))]
    disk.write_new(path, parts)
    disk.sync_folder(folder)  # before the plan refers to it
    decided = Rewinding(
        log_id=log_id,
        to=to,
        end=found.place.next,
        term=cut.frame.info.term if is_split else place.term,
        file=place.first,
        size=place.size,
        index_size=0,
        begins=begins,
        quarantine=quarantine,
    )
    replace_file(disk, f"{folder}/{REWIND}", encode_rewinding(decided), temporary=f"{folder}/{REWIND}{NEW}")
    return decided


def _below(cut: _RewindCut, to: int, salt: int) -> Parts:
    """The records below an offset of the frame that holds it, as a frame without a writer."""
    info, left = cut.frame.info, to - cut.place.next
    batches: list[pa.RecordBatch] = []
    for batch in decode_frame(cut.frame, f"{cut.path} at byte {cut.frame.start}").batches:
        if left > 0:
            batches.append(batch.slice(0, left))
        left -= batch.num_rows
    pages = [encode_page(batch, Compression.NONE) for batch in batches]
    split = FrameInfo(
        info.term, info.first, to - cut.place.next, info.timestamp, cut.place.next, salt, len(pages)
    )  # fmt: skip
    return encode_frame(split, pages)


def finish_rewind(folder: str, *, disk: Disk) -> Rewinding | None:
    """Finish a planned rewind; the caller has the lock. Returns it, None if there is none.

    Each step keeps the state that readers see consistent, and can be repeated.
    """
    try:
        decided = decode_rewinding(disk.read(f"{folder}/{REWIND}"), f"{folder}/{REWIND}")
    except NotFound:
        for row in disk.scan(folder):  # left by a rewind that was never planned
            if row.name.endswith(f"{DATA}{NEW}"):
                disk.remove(f"{folder}/{row.name}")
        return None
    if decided.log_id != read_identity(folder, disk=disk):
        raise CorruptData(f"{folder}/{REWIND} belongs to log {decided.log_id}: move it away.")
    kept = read_slots_file(folder, decided.log_id, disk=disk)
    slots = tuple(put_at(slot, min(slot.position, decided.to)) for slot in kept.slots)
    if slots != kept.slots:
        write_slots_file(folder, replace(kept, slots=slots), disk=disk)
    mark = Mark(decided.log_id, kept.start, decided.to, decided.begins, decided.term, NO_BOOT, clean=True)
    with contextlib.closing(disk.open_append(f"{folder}/{MARK}")) as file:
        file.rewrite(0, [encode_mark(mark)])
        file.sync()
    if decided.begins == decided.file:
        disk.remove(f"{folder}/{index_name(decided.file)}")
    name = data_name(decided.begins)
    if any(row.name == f"{name}{NEW}" for row in disk.scan(folder)):
        disk.rename(f"{folder}/{name}{NEW}", f"{folder}/{name}")
    # The new file gets its name before the old one loses the records that are in both.
    disk.sync_folder(folder)
    if decided.begins != decided.file:
        with contextlib.closing(disk.open_append(f"{folder}/{data_name(decided.file)}")) as file:
            if file.size() > decided.size:
                file.cut(decided.size)
            file.sync()
        rebuild_index(folder, decided.log_id, decided.file, disk=disk)
    later = [first for first in firsts_in(disk.scan(folder)) if first > decided.begins]
    remove_files(folder, later[::-1], disk=disk)
    disk.sync_folder(folder)  # all of it, before the plan is removed
    disk.remove(f"{folder}/{REWIND}")
    disk.sync_folder(folder)
    return decided
