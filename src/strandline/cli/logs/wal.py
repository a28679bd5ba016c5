"""``strandline wal``: inspect, repair, export and migrate a write-ahead log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final

from strandline.cli.logs.wal_inspection import show_log, show_spool
from strandline.cli.shared import output as show
from strandline.cli.shared.common import DryRun, guarded
from strandline.cli.shared.groups import group
from strandline.cli.shared.options import argument, flag
from strandline.cli.shared.targets import contents_at
from strandline.compat.spool.export import export_spool
from strandline.compat.spool.format import SPOOL
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.compat.spool.migrate import migrate_spool
from strandline.compat.spool.renumbering import OLD_LSN, Renumbering
from strandline.errors import AlreadyExists, InvalidInput
from strandline.log.folders import Contents, FolderKind, refuse_others
from strandline.log.wal.names import data_name, index_name
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.recover.manual_repair import RepairPlan, plan_repair, repair_log
from strandline.log.wal.recover.verify import data_bytes
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM

wal = group("Inspect, repair, export and migrate a write-ahead log.")

Folder = Annotated[str, argument("FOLDER", "The log's folder.")]
_SHOWN: Final = 50


@wal.command()
@guarded
def inspect(
    folder: Annotated[str, argument("FOLDER", "The log's folder, or an older spool NAME.logical.wal.")],
    *,
    list_frames: Annotated[bool, flag("List and check every frame.", "--frames")] = False,
) -> None:
    """Show the files of a log: its identity, bounds, files, slots and mark, and which process has it open.

    Changes nothing and takes no lock; the log may be open, or damaged. With **--json** and **--frames** the first line
    is the log, and each further one a frame.

    Example: strandline wal inspect /var/lib/orders
    """
    there = contents_at(folder)
    if (spool := there.spool) is not None:
        show_spool(spool, list_frames=list_frames)
        return
    refuse_others(there, FolderKind.WAL)
    show_log(folder, list_frames=list_frames)


# --- repairing -----------------------------------------------------------------------------------------------------


def need_wal(folder: str) -> None:
    """Refuse a path that is not a write-ahead log."""
    refuse_others(contents_at(folder), FolderKind.WAL)


@wal.command()
@guarded
def repair(
    folder: Folder,
    *,
    dry_run: DryRun = False,
    forget_slots: Annotated[
        bool,
        flag(
            "If slots.json is missing or damaged, make one without slots. Trimmed records may be seen again.",
            "--forget-slots",
        ),
    ] = False,
) -> None:
    """Repair a log: cut a torn tail above the durable mark (and set it aside), and rebuild wrong indexes.

    Reads every byte first. If anything acknowledged is damaged it refuses and changes nothing: then restore the log.
    Opening a log does the same by itself, except for indexes of older files, and slots that cannot be read.

    Example: strandline wal repair /var/lib/orders --dry-run
    """
    need_wal(folder)
    with show.meter("reading bytes", total=data_bytes(folder, disk=DISK)) as work:
        if dry_run:
            plan = plan_repair(folder, forget_slots=forget_slots, on_progress=work.add)
        else:
            plan = repair_log(folder, forget_slots=forget_slots, on_progress=work.add)
    show.answer(fields(plan, dry_run=dry_run), *lines(plan, dry_run=dry_run))


def fields(plan: RepairPlan, *, dry_run: bool) -> dict[str, Any]:
    """The fields of ``--json``."""
    return {
        "folder": plan.folder,
        "dry_run": dry_run,
        "needed": plan.is_needed,
        "start": plan.start,
        "next": plan.next,
        "cut": [
            {"file": data_name(torn.first), "byte": torn.at, "size": torn.size, "why": torn.why} for torn in plan.torn
        ],
        "rewritten": None
        if plan.rewritten is None
        else {"file": data_name(plan.rewritten.first), "byte": plan.rewritten.at, "size": plan.rewritten.size},
        "removed": [data_name(first) for first in plan.dropped],
        "indexes": [index_name(first) for first in plan.indexes],
        "slots_forgotten": plan.forgotten,
    }


def lines(plan: RepairPlan, *, dry_run: bool) -> Iterator[str]:
    """One line for each action."""
    is_ = "would be" if dry_run else "was"
    are = "would be" if dry_run else "were"
    for torn in plan.torn:
        from_ = "as a whole" if not torn.at else f"from byte {torn.at:,} on"
        size = show.counted(torn.size, "byte")
        yield f"{data_name(torn.first)}: {size} {are} cut, {from_}, and set aside: {torn.why}."
    if plan.rewritten is not None:
        first, at, length = plan.rewritten
        yield (
            f"{data_name(first)}: {show.counted(length, 'byte')} from byte {at:,} on {are} written again unchanged: "
            "they may never have reached the disk."
        )
    for first in plan.dropped:
        yield f"{data_name(first)}: {is_} removed, since nothing in it is retained."
    for first in plan.indexes:
        yield f"{index_name(first)}: {is_} rebuilt."
    if plan.forgotten is not None:
        yield (
            f"slots.json: {is_} replaced by one without slots ({plan.forgotten}). The log begins at offset "
            f"{plan.start:,}, with the oldest file: records that were trimmed before may be seen again. "
            "Create the slots again."
        )
    if not plan.is_needed:
        yield "There is nothing to repair."
    done = "Nothing was changed." if dry_run else "The log is whole and closed."
    yield f"{done} {'It would hold' if dry_run else 'It holds'} offsets {plan.start:,} up to {plan.next:,}."


# --- spools of older versions ------------------------------------------------------------------------------------


@wal.command()
@guarded
def export(
    folder: Folder,
    target: Annotated[str, argument("TARGET", "The spool to write: NAME.logical.wal.")],
) -> None:
    """Write everything that is retained as a spool for older programs, with the slots beside it.

    Changes nothing in the log, which may be open. The spool appears only when it is whole, and replaces nothing.

    Example: strandline wal export /var/lib/orders ./orders.logical.wal
    """
    need_wal(folder)
    log = WalReader(folder)
    with show.meter("exporting", total=log.bounds().count) as work:
        done = export_spool(log, target, on_progress=work.upto)
    said = (
        f"{done.path} holds {show.counted(done.records, 'record')} (lsns {done.first:,} to {done.last:,}, "
        f"{show.size(done.size)}), and {done.slots_path} {show.counted(done.slots, 'slot')}."
    )
    show.answer(asdict(done), said)


@wal.command()
@guarded
def migrate(
    path: Annotated[str, argument("PATH", "The spool NAME.logical.wal, or NAME, the folder that is made.")],
    *,
    renumber: Annotated[
        bool,
        flag(
            "Give records whose lsns leave gaps or go back new ones; the header spool-lsn keeps the old.", "--renumber"
        ),
    ] = False,
    valid_prefix: Annotated[
        bool, flag("Of a damaged spool, copy the records before the damage; drop the rest.", "--valid-prefix")
    ] = False,
) -> None:
    """Copy a spool of an older version, with its slots, into a folder beside it. The spool is not changed.

    A torn tail, which a crash leaves, is not copied. Damage with records behind it is refused, unless
    **--valid-prefix** accepts that they are lost.

    Example: strandline wal migrate /var/lib/orders.logical.wal
    """
    there = contents_at(path)
    spool = there.spool
    if spool is None or not spool.endswith(SPOOL):
        refuse_others(there, FolderKind.SPOOL, nothing=f"a spool is called NAME{SPOOL}; check the path.")
        raise InvalidInput(f"{spool or path} is not called NAME{SPOOL}: name the spool itself, by a name like that.")
    folder = spool.removesuffix(SPOOL)
    refuse_taken(contents_at(folder))
    done = migrate_spool(folder, env=SYSTEM, renumber=renumber, valid_prefix=valid_prefix)
    with WriteAheadLog.open(folder, create=False) as wal:
        oldest, current, slots = wal.oldest, wal.current, len(wal.log.slots.list())
    size = DISK.size(folder + SPOOL)
    fields = {"folder": folder, "oldest": oldest, "current": current, "slots": slots, "spool_bytes": size}
    said = (
        f"{folder} holds {show.counted(current - oldest + 1, 'record')} (lsns {oldest:,} to {current:,}) and "
        f"{show.counted(slots, 'slot')}; {folder}{SPOOL} ({show.size(size)}) is as it was."
    )
    gaps = () if done is None else _gap_lines(done)
    show.answer({**fields, **_renumbered(done)}, said, *gaps)


def _renumbered(done: Renumbering | None) -> dict[str, Any]:
    """The fields of ``--json`` about a renumbering."""
    gaps = () if done is None else done.gaps
    return {
        "renumbered": done is not None,
        "missing": 0 if done is None else done.missing,
        "gaps": [{"index": gap.index, "after": gap.after, "found": gap.found, "missing": gap.missing} for gap in gaps],
    }


def _gap_lines(done: Renumbering) -> Iterator[str]:
    """A line on the renumbering, and one for each gap."""
    gaps, lsns = show.counted(len(done.gaps), "gap"), show.counted(done.missing, "lsn")
    yield f"Its records were renumbered, for {gaps} with {lsns} missing; the header {OLD_LSN} keeps the old ones."
    for gap in done.gaps[:_SHOWN]:
        yield f"  before record {gap.index:,}: {'missing' if gap.missing else 'goes back,'} {gap}"
    if len(done.gaps) > _SHOWN:
        yield f"  … and {len(done.gaps) - _SHOWN:,} more; --json lists all"


def refuse_taken(there: Contents) -> None:
    """Refuse to migrate to a path that has a log or other content already."""
    if not there.kinds <= {FolderKind.SPOOL, FolderKind.EMPTY, FolderKind.ABSENT}:
        raise AlreadyExists(f"{there.path} exists already, and is {there}: nothing was moved.")
