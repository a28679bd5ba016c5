"""Repair on request: crash recovery, plus old indexes and unreadable slots."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from strandline.errors import CorruptData, NotFound
from strandline.formats.wal.folder import SlotsFile
from strandline.log.findings import Finding, FindingKind
from strandline.log.folders import FolderKind, contents, refuse_others
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import IDENTITY, SLOTS_FILE, TORN, firsts_in, hold_lock, index_name
from strandline.log.wal.recover.repair import rebuild_index, set_aside
from strandline.log.wal.recover.rewind import finish_rewind
from strandline.log.wal.recover.scan_tail import Torn, examine_files, read_identity, read_slots_file
from strandline.log.wal.recover.verify import OnProgress, WalVerification, verify
from strandline.log.wal.slots import write_slots_file
from strandline.storage.disk import Disk
from strandline.storage.env import SYSTEM, Env


class Rewritten(NamedTuple):
    """Bytes that are written again unchanged, since they may never have reached the disk."""

    first: int
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The actions of a repair, or of a dry run."""

    folder: str
    start: int
    """The log's first offset afterwards."""
    next: int
    """The log's end."""
    forgotten: str | None
    """Why ``slots.json`` is replaced by one without slots; None if it stays."""
    torn: tuple[Torn, ...]
    """Torn tails that are cut, and set aside."""
    rewritten: Rewritten | None
    dropped: tuple[int, ...]
    """Files that are removed, since nothing in them is retained."""
    indexes: tuple[int, ...]
    """Files whose index is rebuilt."""

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.forgotten or self.torn or self.rewritten or self.dropped or self.indexes)


def plan_repair(
    folder: str, *, forget_slots: bool, env: Env = SYSTEM, on_progress: OnProgress | None = None
) -> RepairPlan:
    """Read the whole log and plan its repair. Changes nothing.

    ``CorruptData``, naming the first place, if acknowledged records are damaged: no repair restores those.
    With ``forget_slots`` a missing or damaged ``slots.json`` is no reason to refuse.
    """
    found = verify(folder, env=env, on_progress=on_progress)
    forgotten = _unreadable(folder, found, disk=env.disk) if forget_slots else None
    _refuse([finding for finding in found.damage if forgotten is None or finding.kind is not FindingKind.SLOT], folder)
    log_id = read_identity(folder, disk=env.disk)
    if forgotten is None:
        kept = read_slots_file(folder, log_id, disk=env.disk)
    else:
        kept = SlotsFile(log_id, min(firsts_in(env.disk.scan(folder))))
    examined = examine_files(folder, kept, disk=env.disk, without=found.indexes)
    place, start = examined.place, examined.kept.start
    unsure = place.size - examined.sure
    dropped = tuple(first for first, following in pairwise(examined.firsts) if following <= start)
    return RepairPlan(
        folder=folder,
        start=start,
        next=max(start, place.next),
        forgotten=forgotten,
        torn=tuple(examined.torn),
        rewritten=Rewritten(place.first, examined.sure, unsure) if unsure > 0 else None,
        dropped=dropped,
        indexes=tuple(first for first in found.indexes if first in examined.firsts and first not in dropped),
    )


def _unreadable(folder: str, found: WalVerification, *, disk: Disk) -> str | None:
    """Why the slots cannot be read; None if they can."""
    try:
        if found.log_id is not None:
            read_slots_file(folder, found.log_id, disk=disk)
    except CorruptData as error:
        return str(error).partition(". ")[0].partition(", which says")[0]
    return None


def _refuse(damage: Sequence[Finding], folder: str) -> None:
    if damage and all(finding.kind is FindingKind.SLOT for finding in damage):
        raise CorruptData(f"{damage[0].message} Nothing was changed.")
    if damage:
        places = "" if len(damage) == 1 else f" in {len(damage)} places, of which this is the first"
        raise CorruptData(
            f"The log in {folder} is damaged{places}, and a repair cannot restore acknowledged records; nothing "
            f"was changed. {damage[0].message}"
        )


def repair_log(
    folder: str,
    *,
    forget_slots: bool,
    env: Env = SYSTEM,
    on_progress: OnProgress | None = None,
) -> RepairPlan:
    """Execute :func:`plan_repair`, and leave the log closed and whole; returns the executed plan.

    Nothing is changed if acknowledged records are damaged. ``Fenced`` while another process has the log open.
    """
    there = contents(folder, disk=env.disk)
    if not there.is_free() and FolderKind.OTHER not in there.kinds:
        refuse_others(there, FolderKind.WAL)  # before the lock, whose file would stay
    if not any(row.name == IDENTITY for row in env.disk.scan(folder)):
        # Raises if a repair is impossible.
        plan_repair(folder, forget_slots=forget_slots, env=env, on_progress=on_progress)
    with contextlib.ExitStack() as held:
        hold_lock(held, folder, disk=env.disk)
        finish_rewind(folder, disk=env.disk)
        plan = plan_repair(folder, forget_slots=forget_slots, env=env, on_progress=on_progress)
        log_id = read_identity(folder, disk=env.disk)
        last = max(firsts_in(env.disk.scan(folder)))
        for first in plan.indexes:
            if first == last:  # opening rebuilds it from the frames
                env.disk.remove(f"{folder}/{index_name(first)}")
            else:
                rebuild_index(folder, log_id, first, disk=env.disk)
        if plan.forgotten is not None:
            with contextlib.suppress(NotFound):
                data = env.disk.read(f"{folder}/{SLOTS_FILE}")
                set_aside(folder, data, lambda number: f"{SLOTS_FILE}.{number}{TORN}", disk=env.disk)
            write_slots_file(folder, SlotsFile(log_id, plan.start), disk=env.disk)
    # Opening cuts the torn tail, and publishes the log's end; closing marks it as clean.
    WalLog.open(folder, create=False, background=False, env=env).close()
    return plan
