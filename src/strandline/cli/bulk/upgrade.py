"""``strandline upgrade``: copy a shared queue of version 1 into a log of this project."""

from __future__ import annotations

from typing import Annotated

from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import object_log_at, open_shared
from strandline.cli.shared.common import QueueFormatOption, confirm, guarded, retention_option
from strandline.cli.shared.options import argument, flag
from strandline.compat.v1.log import QueueFormat
from strandline.compat.v1.upgrade import UpgradeProgress
from strandline.compat.v1.upgrade import upgrade as copy


@guarded
def upgrade(
    queue_url: Annotated[str, argument("QUEUE_URL", "The store that holds the queue.")],
    target_url: Annotated[str, argument("TARGET_URL", "The log to copy into; made if there is none.")],
    *,
    format: QueueFormatOption = None,  # noqa: A002
    retention: Annotated[str | None, retention_option("What a log that is made")] = None,
    acknowledge: Annotated[
        bool, flag("In the end take what was copied out of the queue, which fences its consumer.", "--acknowledge")
    ] = False,
    yes: Annotated[bool, flag("With --acknowledge: do not ask.", "--yes", "-y")] = False,
) -> None:
    """Copy a queue of version 1 into a log, each batch once.

    Every batch that it lists now is copied, in order and with its metadata. Killed at any moment and started again it
    continues: its progress is in the target. Producers may append to both meanwhile; run it again for later batches of
    the queue. The queue is not changed, unless --acknowledge is given.

    Example: strandline upgrade s3://bucket s3://bucket/orders
    """
    queue = open_shared(queue_url, format or QueueFormat())
    if acknowledge:
        confirm(f"Fence the consumer of {queue.url}/{queue.manifest_path} and acknowledge all that is copied?", yes=yes)
    target = object_log_at(target_url, create=True, retention=retention)
    bounds = queue.bounds()
    with show.meter("copying batches", total=bounds.count) as work:
        done = copy(
            queue,
            target,
            acknowledge=acknowledge,
            on_progress=lambda progress: work.upto(max(0, progress.next - bounds.first)),
        )
    end = target.bounds().next
    fields = {
        "batches": done.copied,
        "records": done.records,
        "missed": done.missed,
        "empty": done.empty,
        "next_sequence": done.next,
        "next": end,
        "acknowledged": acknowledge,
    }
    show.answer(fields, sentence(done, end, acknowledged=acknowledge))
    if done.missed and not show.for_programs():
        batches = show.counted(done.missed, "batch", "batches")
        show.warning(f"{batches} had been acknowledged by the queue's consumer before they could be copied.")


def sentence(done: UpgradeProgress, end: int, *, acknowledged: bool) -> str:
    """One sentence about the copy."""
    what = "There was nothing to copy"
    if done.copied:
        batches = show.counted(done.copied, "batch", "batches")
        what = f"{batches} with {show.counted(done.records, 'record')} copied"
    empty = f", {done.empty:,} empty ones passed over" if done.empty else ""
    then = "; the queue is acknowledged up to there" if acknowledged else "; the queue is as it was"
    return f"{what}{empty}: everything before batch {done.next:,} is in the log, which ends at offset {end:,}{then}."
