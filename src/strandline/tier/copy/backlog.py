"""Copies a backlog: the tasks of a pool store many segments at once, and the driver publishes them in order.

A task stores its object before an event names it: only then are its size and checksum known. So an object that is never
published, because the driver died, has no event: a sweep deletes it once it is older than the grace period. No segment
is published whose object might be as old as that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, final

from strandline.errors import InvalidInput, NotReady
from strandline.log.contract import Slot
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import Span
from strandline.model.segments import SegmentMetadata
from strandline.storage.task_pool import TaskPool
from strandline.tier.copy import planning
from strandline.tier.copy.copier import Copier
from strandline.tier.copy.ledger import Ledger
from strandline.tier.copy.segment_tasks import CopyTask, StoredSegment, listed_at

R = TypeVar("R")

LEAST_GRACE: Final = 600.0
"""Shortest grace period of objects without an event, in seconds, if tasks store segments."""
WAVE: Final = 2
"""Segments per task of the pool in one wave: they are published when all before them are."""


@final
@dataclass(slots=True)
class Backlog:
    """Makes segments by the tasks of a pool. Used by one thread."""

    ledger: Ledger
    copier: Copier
    pool: TaskPool
    ratio: float = 1.0
    """Bytes of a segment for each stored byte of the log, as seen last."""

    def __post_init__(self) -> None:
        if self.ledger.grace < LEAST_GRACE:
            raise InvalidInput(
                f"Objects without an event would be deleted after {self.ledger.grace:g} seconds, while tasks may still "
                f"store them: set grace to {LEAST_GRACE:g} seconds or more, or copy without a pool."
            )

    @property
    def wanted(self) -> int:
        """How many segments are worth one wave."""
        return WAVE * self.pool.count

    @property
    def log_bytes(self) -> int:
        """About how many stored bytes of the log fill one segment."""
        return max(1, int(self.copier.target / self.ratio))

    def copied(
        self, slot: Slot, spans: Sequence[Span], is_due: Callable[[int], bool]
    ) -> Generator[tuple[SegmentMetadata, StoredSegment]]:
        """Copy the spans as segments of about the target size, in order; each when it is readable.

        The last one, if it is not full, is copied only if it ``is_due`` by the listing time of its first batch.
        """
        now = self.ledger.env.clock.now()
        groups = _cut(spans, self.log_bytes, now)
        is_full = sum(span.size for span in groups[-1]) >= self.log_bytes
        if len(groups) > 1 and not is_full and not is_due(listed_at(groups[-1][0], now)):
            groups.pop()
        tasks = [CopyTask(self.ledger.store, self.ledger.new_id(), tuple(group), now) for group in groups]
        title = f"copy of offsets {spans[0].first:,} to {groups[-1][-1].next - 1:,} to the cold tier"
        with contextlib.closing(self.in_order(slot, tasks, title)) as results:
            for number, made in results:
                segment = self.copier.list_stored(slot, made, follows=True)
                self.ratio = max(0.01, segment.size / max(1, sum(span.size for span in tasks[number].spans)))
                yield segment, made
                if segment.end + 1 < tasks[number].spans[-1].next:
                    return  # it was full before its spans were: the segments after it do not follow

    def in_order(self, slot: Slot, tasks: Sequence[Callable[[], R]], title: str) -> Generator[tuple[int, R]]:
        """The results of the tasks, in order; what is not taken is deleted. The slot is kept alive meanwhile."""
        began = self.ledger.env.clock.monotonic()
        waiting: dict[int, R] = {}
        with contextlib.ExitStack() as held:
            held.enter_context(SlotHeartbeat(slot, self.ledger.log, env=self.ledger.env))
            held.callback(self._discard, waiting)
            done = 0
            for number, made in self.pool.run(tasks, title):
                waiting[number] = made
                while done in waiting:
                    if self.ledger.env.clock.monotonic() - began >= self.ledger.grace / 2:
                        raise NotReady(
                            f"The {title} took longer than half of the grace period of {self.ledger.grace:g} seconds: "
                            "nothing of the rest was published. Copy less at once, or use more workers."
                        )
                    yield done, waiting.pop(done)
                    done += 1

    def _discard(self, waiting: dict[int, R]) -> None:
        for made in waiting.values():
            if isinstance(made, StoredSegment):
                self.copier.discard(made)


def _cut(spans: Sequence[Span], size: int, now: int) -> list[list[Span]]:
    """Groups of spans of about ``size`` bytes; within a group listing times never decrease."""
    groups: list[list[Span]] = []
    rest = list(spans)
    while rest:
        run = rest[: planning.first_fall([listed_at(span, now) for span in rest])]
        rest = rest[len(run) :]
        held = 0
        group: list[Span] = []
        for span in run:
            group.append(span)
            held += span.size
            if held >= size:
                groups.append(group)
                group, held = [], 0
        if group:
            groups.append(group)
    return groups
