"""Compaction of the cold tier: small segments are merged, and the values of purged keys are erased for good.

A segment that replaces others is readable before they are withdrawn. After a crash in between both are there; the next
round withdraws the replaced ones. See :meth:`~strandline.tier.copy.tierer.Tierer.compact`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from strandline.log.contract import Slot
from strandline.log.read.planning import divided
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.segments import SegmentMetadata, SegmentState
from strandline.tier.copy import planning
from strandline.tier.copy.backlog import Backlog
from strandline.tier.copy.erasure import PurgedKeys, latest_purges, purges_in
from strandline.tier.copy.rounds import Compacted
from strandline.tier.copy.segment_files import plan_segment
from strandline.tier.copy.segment_tasks import RewriteTask, StoredSegment, may_have_hits


@final
@dataclass(frozen=True, slots=True)
class Compaction:
    """Rewrites segments of one log by the tasks of a pool. Used by one thread, which holds the slot."""

    backlog: Backlog

    def run(
        self,
        slot: Slot,
        segments: Sequence[SegmentMetadata],
        *,
        purge: bool,
        everything: bool,
        stopping: Callable[[], bool],
    ) -> Compacted:
        """Merge small segments, and with ``purge`` erase values; ``everything`` merges any two that fit."""
        hot = self.backlog.ledger.log.bounds().first  # before the purges are read: it only grows
        purged = self._purges(segments) if purge else PurgedKeys()
        waiting, held_back = self._tasks(segments, hot, purged, everything=everything)
        done = Compacted(held_back=held_back)
        while waiting and not stopping():
            some, waiting = waiting[: self.backlog.wanted], waiting[self.backlog.wanted :]
            smaller: list[RewriteTask] = []
            title = f"compaction of offsets {some[0].sources[0].start:,} to {some[-1].sources[-1].end:,}"
            with contextlib.closing(self.backlog.in_order(slot, some, title)) as results:
                for number, made in results:
                    if made is not None:
                        done = self._replaced(slot, some[number], made, done)
                    else:
                        smaller += self._halves(some[number])
            waiting = smaller + waiting
        if len(purged):
            self._erase_replaced(purged)
        return done

    def _erase_replaced(self, purged: PurgedKeys) -> None:
        """Delete replaced segments that have values of purged keys: of this compaction, and of earlier ones."""
        ledger = self.backlog.ledger
        replaced = [each for each in ledger.known().segments if each.state is SegmentState.DELETE_STARTED]
        scans = [partial(may_have_hits, ledger.store, each, purged) for each in replaced]
        for number, has_hits in self.backlog.pool.run(scans, "search of replaced segments for purged keys"):
            if has_hits:
                ledger.remove_all([replaced[number]], "removed")

    def _halves(self, task: RewriteTask) -> list[RewriteTask]:
        """The two halves of a run that cannot become one segment: values are erased in each all the same."""
        middle = len(task.sources) // 2
        return [self._task(half, task.purged) for half in (task.sources[:middle], task.sources[middle:]) if middle]

    def _replaced(self, slot: Slot, task: RewriteTask, made: StoredSegment, done: Compacted) -> Compacted:
        """Publish a new segment, and then withdraw the segments that it replaces."""
        new = self.backlog.copier.list_stored(slot, made, follows=False)
        self.backlog.ledger.report("merged" if len(task.sources) > 1 else "erased", new)
        self.backlog.ledger.retire(slot, task.sources, "replaced", kept=task.sources)
        old = (*done.replaced, *task.sources)
        return replace(done, made=(*done.made, new), replaced=old, erased=done.erased + made.erased)

    def _tasks(
        self, segments: Sequence[SegmentMetadata], hot: int, purged: PurgedKeys, *, everything: bool
    ) -> tuple[list[RewriteTask], int]:
        """The rewrites, in order; and how many segments keep values of purged keys for now."""
        # Segments that can be erased now are not merged with others.
        sides = [[each for each in segments if (each.end < hot) is is_cold] for is_cold in (True, False)]
        groups = sides if len(purged) else [segments]
        runs = [
            run for group in groups for run in planning.merges(group, self.backlog.copier.target, everything=everything)
        ]
        if len(purged):
            merged = {each.segment for run in runs for each in run}
            runs += [[each] for each in segments if each.segment not in merged and each.end < hot]
        tasks = [
            self._task(run, purged if run[-1].end < hot else PurgedKeys())
            for run in sorted(runs, key=lambda run: run[0].start)
        ]
        return tasks, sum(each.end >= hot for each in segments) if len(purged) else 0

    def _task(self, run: Sequence[SegmentMetadata], purged: PurgedKeys) -> RewriteTask:
        ledger = self.backlog.ledger
        return RewriteTask(ledger.store, ledger.new_id(), tuple(run), purged)

    def _purges(self, segments: Sequence[SegmentMetadata]) -> PurgedKeys:
        """All purges in both tiers."""
        store, log = self.backlog.ledger.store, self.backlog.ledger.log
        spans: list[Span] = [span for each in segments for span in plan_segment(store, each, each.start)]
        behind = max((each.end + 1 for each in segments), default=0)
        bounds = log.bounds()
        if bounds.next > max(behind, bounds.first):
            spans += log.plan(Cursor(log.log_id, max(behind, bounds.first)), Limit(upto=bounds.next))
        pool = self.backlog.pool
        scans = [partial(purges_in, group) for group in divided(spans, 4 * pool.count) if group]
        return latest_purges([found for _, found in pool.run(scans, "search for purged keys")])
