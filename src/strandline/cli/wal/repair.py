"""``strandline wal repair``: crash recovery on request, or a dry run of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.wal.shared import Folder, data_bytes, need_wal
from strandline.log.wal.names import data_name, index_name
from strandline.log.wal.recover.manual_repair import RepairPlan, plan_repair, repair_log


@guarded
def repair(
    folder: Folder,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")] = False,
    forget_slots: Annotated[
        bool,
        typer.Option(
            "--forget-slots",
            help="If slots.json is missing or damaged, make one without slots. Pruned records may be seen again.",
        ),
    ] = False,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Repair a log: cut what a crash left above the durable mark (and keep it aside), and make wrong indexes again.

    Reads every byte first. If anything acknowledged is damaged it refuses and changes nothing: then restore the log.
    Opening a log does the same by itself, but for indexes of older files, and slots that cannot be read.
    """
    need_wal(folder)
    with show.meter("reading bytes", total=data_bytes(folder), quiet=json) as advance:
        if dry_run:
            plan = plan_repair(folder, forget_slots=forget_slots, told=advance)
        else:
            plan = repair_log(folder, forget_slots=forget_slots, told=advance)
    if json:
        show.document(fields(plan, dry_run=dry_run))
        return
    out = show.out()
    for line in lines(plan, dry_run=dry_run):
        out.print(line, soft_wrap=True, markup=False)


def fields(plan: RepairPlan, *, dry_run: bool) -> dict[str, Any]:
    """What ``--json`` prints."""
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
    """What was done, or would be, a line each."""
    is_ = "would be" if dry_run else "was"
    are = "would be" if dry_run else "were"
    for torn in plan.torn:
        from_ = "as a whole" if not torn.at else f"from byte {torn.at:,} on"
        size = show.counted(torn.size, "byte")
        yield f"{data_name(torn.first)}: {size} {are} cut, {from_}, and kept aside: {torn.why}."
    if plan.rewritten is not None:
        first, at, length = plan.rewritten
        yield (
            f"{data_name(first)}: {show.counted(length, 'byte')} from byte {at:,} on {are} written again as they are: "
            "it is not known whether they ever reached the disk."
        )
    for first in plan.dropped:
        yield f"{data_name(first)}: {is_} removed, since it holds nothing that is retained."
    for first in plan.indexes:
        yield f"{index_name(first)}: {is_} made again."
    if plan.forgotten is not None:
        yield (
            f"slots.json: {is_} made anew without slots ({plan.forgotten}). The log begins at offset {plan.start:,}, "
            "with the oldest file: records that were pruned before may be seen again. Create the slots again."
        )
    if not plan.is_needed:
        yield "There is nothing to repair."
    done = "Nothing was changed." if dry_run else "The log is whole and closed."
    yield f"{done} {'It would hold' if dry_run else 'It holds'} offsets {plan.start:,} up to {plan.next:,}."
