"""``strandline delete``: delete a whole log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt
from strandline.cli.shared.common import DryRun, Yes, confirm, connecting
from strandline.cli.shared.options import flag


@connecting
def delete(
    place: AnyLogAt,
    *,
    dry_run: DryRun = False,
    force: Annotated[bool, flag("Also a log that valid slots pin: their consumers lose it.", "--force")] = False,
    yes: Yes = False,
) -> None:
    """Delete a log: its records, slots, dead letters, and the cold tier beside it.

    Names first what goes. Refuses while valid slots pin the log, while a process writes the write-ahead log, and for
    the log of a node. If it is killed, the log is still whole, or says that its deletion has begun: repeat the
    command. Other files at the address stay, and so does a cold tier at an address of its own.

    Example: strandline delete s3://bucket/orders --dry-run
    """
    told = sl.bulk.delete(place.url, force=force, dry_run=True)
    done = told
    if not dry_run:
        confirm(f"{_summary(told)} are deleted for good. Continue?", yes=yes)
        with show.meter("deleting", total=told.objects) as work:
            done = sl.bulk.delete(place.url, force=force, on_progress=work.upto)
    fields = {**asdict(done), "log_id": str(done.log_id), "dry_run": dry_run}
    show.answer(fields, *_lines(told, dry_run=dry_run))


def _summary(told: sl.bulk.Deletion) -> str:
    slots = f", with the slots {', '.join(told.slots)}" if told.slots else ""
    return f"{told.objects:,} objects ({show.size(told.bytes)}) of the log {told.log_id} at {told.url}{slots}"


def _lines(told: sl.bulk.Deletion, *, dry_run: bool) -> Iterator[str]:
    yield f"{_summary(told)} {'would be' if dry_run else 'are'} deleted."
    if told.cold_tier is not None and told.keeps_cold_tier:
        yield f"Its cold tier at {told.cold_tier} stays, with its events: other logs may have theirs there."
