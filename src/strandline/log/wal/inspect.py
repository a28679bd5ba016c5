"""Inspection of a write-ahead log's folder: files, slots, mark, frames. Changes nothing, takes no lock."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar
from uuid import UUID

from strandline.errors import CorruptData, NotALog, NotFound, UnsupportedVersion
from strandline.formats.arrow.block import read_metadata
from strandline.formats.wal.folder import SlotsFile, append_of
from strandline.formats.wal.frame import Frame
from strandline.formats.wal.index import decode_index, new_chain
from strandline.formats.wal.mark import Mark
from strandline.log.wal.names import TORN, data_name, firsts_in, index_name, read_holder
from strandline.log.wal.read.watermark import MARK_READS, read_mark
from strandline.log.wal.recover.scan_tail import examine_files, read_log_json, read_slots_file
from strandline.log.wal.recover.walk import Hole, frames_of, walk
from strandline.storage.clock import boot_id
from strandline.storage.disk import Disk, FolderRow
from strandline.storage.env import SYSTEM, Env

T = TypeVar("T")

_HOLDER: Final = re.compile(r"process ([0-9]+) on (.*)")
_NO_LOG: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file of frames. ``records`` is None if its end is unknown, ``checkpoints`` without an index."""

    file: str
    first: int
    size: int
    records: int | None
    checkpoints: int | None


@dataclass(slots=True)
class WalFolder:
    """A log on the disk. None means unknown."""

    folder: str
    log_id: str | None
    start: int | None
    next: int | None
    term: int | None
    published: bool
    """Whether the end was published by the writer; otherwise it was found in the last file."""
    state: str
    """``closed``, ``open``, ``died`` (the process did), ``crashed`` (the machine did) or ``unknown``."""
    holder: str | None
    """The process that last opened it for writing."""
    mark: dict[str, Any] | None
    values: str | None = None
    """Name and version of the format of its values; None: plain bytes."""
    files: list[FileRow] = field(default_factory=list)
    slots: list[dict[str, Any]] = field(default_factory=list)
    torn: list[dict[str, Any]] = field(default_factory=list)
    """Torn tails that were cut off a file and set aside."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, and why."""


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One frame, or bytes that are no frame: then ``problem`` says why, and only ``byte`` and ``size`` are known."""

    file: str
    byte: int
    size: int
    first: int | None = None
    next: int | None = None
    term: int | None = None
    timestamp: int | None = None
    """Milliseconds since the epoch."""
    durable: int | None = None
    """Everything below this offset was known to be durable when it was written."""
    writer: str | None = None
    number: int | None = None
    lead: bool = False
    problem: str | None = None


def inspect_wal(folder: str, *, env: Env = SYSTEM) -> WalFolder:
    """Everything except the frames. ``NotALog`` if the folder has no file of a log."""
    rows = env.disk.scan(folder)
    firsts = firsts_in(rows)
    problems: list[str] = []
    try:
        identity = _readable(problems, lambda: read_log_json(folder, disk=env.disk))
        log_id, versions = (None, ()) if identity is None else (identity.log_id, identity.values)
    except NotALog as error:
        if not firsts:
            raise
        log_id, versions = None, ()
        problems.append(str(error))
    kept = None if log_id is None else _readable(problems, lambda: read_slots_file(folder, log_id, disk=env.disk))
    mark = None if log_id is None else read_mark(folder, log_id, disk=env.disk, tries=MARK_READS)
    holder = read_holder(folder, disk=env.disk) or None
    state = _state(mark, holder)
    start = mark.start if mark is not None else None if kept is None else kept.start
    end, term, published = None, None, mark is not None and state not in {"crashed", "unknown"}
    if mark is not None and published:
        end, term = mark.next, mark.term
    elif log_id is not None:
        assumed = kept or SlotsFile(log_id, firsts[0] if firsts else 0)
        found = _readable(problems, lambda: examine_files(folder, assumed, disk=env.disk))
        if found is not None:
            end, term = max(assumed.start, found.place.next), found.place.term
    return WalFolder(
        folder=folder,
        log_id=None if log_id is None else str(log_id),
        start=start,
        next=end,
        term=term,
        published=published,
        state=state,
        holder=holder,
        mark=None if mark is None else {**asdict(mark), "log_id": str(mark.log_id), "boot": str(mark.boot)},
        values=f"{versions[-1].format}, version {versions[-1].number}" if versions else None,
        files=list(_files(folder, log_id, rows, firsts, end, disk=env.disk)),
        slots=[] if kept is None else _slots(kept),
        torn=[{"file": row.name, "size": row.size} for row in rows if row.name.endswith(TORN)],
        problems=problems,
    )


def _readable(problems: list[str], read: Callable[[], T]) -> T | None:
    """The result of ``read``; None if it is damaged, and then the error is added to ``problems``."""
    try:
        return read()
    except (CorruptData, UnsupportedVersion) as error:
        problems.append(str(error))
        return None


def _state(mark: Mark | None, holder: str | None) -> str:
    if mark is None:
        return "unknown"
    if mark.clean:
        return "closed"
    if mark.boot != boot_id():
        return "crashed"
    found = _HOLDER.fullmatch(holder or "")
    if found is not None and found[2] == platform.node():
        try:
            os.kill(int(found[1]), 0)  # only checks that the process exists
        except ProcessLookupError:
            return "died"
        except OSError:
            pass  # it exists, and belongs to another user
    return "open"


def _files(
    folder: str, log_id: UUID | None, rows: list[FolderRow], firsts: list[int], end: int | None, *, disk: Disk
) -> Iterator[FileRow]:
    sizes = {row.name: row.size for row in rows}
    for first, following in zip(firsts, [*firsts[1:], end], strict=True):
        records = None if following is None else max(0, following - first)
        checkpoints = None
        if index_name(first) in sizes:
            try:
                data = disk.read(f"{folder}/{index_name(first)}")
            except NotFound:
                data = b""  # trimmed meanwhile
            checkpoints = len(decode_index(data, new_chain(log_id or _NO_LOG, first)).entries)
        yield FileRow(data_name(first), first, sizes[data_name(first)], records, checkpoints)


def _slots(kept: SlotsFile) -> list[dict[str, Any]]:
    listed = sorted((slot for slot in kept.slots if not slot.dropped), key=lambda slot: slot.name)
    return [
        {
            "slot": slot.name, "position": slot.position, "holder": slot.holder, "epoch": slot.epoch,
            "invalid": None if slot.invalid is None else str(slot.invalid.reason),
        }
        for slot in listed
    ]  # fmt: skip


def frames(found: WalFolder, *, env: Env = SYSTEM) -> Iterator[FrameRow]:
    """Every frame of every file, in order, fully checked."""
    is_own = frames_of(_NO_LOG if found.log_id is None else UUID(found.log_id))
    for file in found.files:
        path = f"{found.folder}/{file.file}"
        try:
            for piece in walk(path, env.disk.size(path), is_own=is_own, disk=env.disk):
                if isinstance(piece, Hole):
                    yield FrameRow(file.file, piece.at, piece.upto - piece.at, problem=piece.why)
                else:
                    yield _frame(file.file, piece)
        except NotFound:
            continue  # trimmed meanwhile


def _frame(file: str, frame: Frame) -> FrameRow:
    info, problem, append = frame.info, None, None
    try:
        append = append_of(read_metadata(frame.block, file), file)
    except CorruptData as error:
        problem = str(error)
    return FrameRow(
        file=file,
        byte=frame.start,
        size=frame.end - frame.start,
        first=info.first - 1,
        next=info.first - 1 + info.count,
        term=info.term,
        timestamp=info.timestamp,
        durable=info.durable,
        writer=None if append is None else str(append[0]),
        number=None if append is None else append[1],
        lead=bool(info.flags & 1),
        problem=problem,
    )
