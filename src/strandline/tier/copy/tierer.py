"""The tierer: copies closed ranges of a log to the cold tier, cleans up after crashes, and deletes expired segments.

The order of its steps makes it safe. A copy is published before its object is stored, so no object stays unlisted. It
is finished only if the slot is still held after it was published: a successor claims the slot, then reads the events,
so it either fences the copy, or sees and deletes it. The slot advances after the finished copy is visible, so the log
keeps every record that is in no segment.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Final

from strandline.errors import AlreadyExists, NotFound, StrandlineError
from strandline.formats.segment.file import SegmentFacts
from strandline.log.contract import Log, Slot
from strandline.log.read.planning import cursor_after
from strandline.model.arguments import checked, whole
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.retention import FOREVER, TIER_SLOT, Retention, as_retention
from strandline.model.segments import PartitionDeleteState, SegmentId, SegmentMetadata, TopicPartition
from strandline.storage.clock import SteadyTime
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.objects.store import ObjectStore
from strandline.storage.task_pool import TaskPool, ThreadPool
from strandline.tier.attachment import ColdCell
from strandline.tier.copy import planning
from strandline.tier.copy.backlog import Backlog
from strandline.tier.copy.compaction import Compaction
from strandline.tier.copy.copier import Copier
from strandline.tier.copy.expiry import Expiry
from strandline.tier.copy.ledger import Ledger
from strandline.tier.copy.rounds import Compacted, Round, TieringStep, run_rounds
from strandline.tier.copy.segment_tasks import listed_at
from strandline.tier.copy.truncation import Truncation
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.read.tiered_log import check_tierable
from strandline.tier.read.tiered_slots import TierableSlots

TARGET_BYTES: Final = 256 << 20
LINGER: Final = 3600.0
GRACE: Final = 24 * 3600.0

_LOGGER = logging.getLogger(__name__)
_PLANNED: Final = 4096
_MOST_SPANS: Final = 1 << 16


@bound_to_process(close=("close", "release"))
@checked
class Tierer:
    """Maintains the cold tier of one log. Used by one thread; of several tierers, one holds the slot."""

    def __init__(
        self,
        log: Log,
        registry: MetadataManager,
        store: ObjectStore,
        *,
        name: str = "",
        target: Annotated[int, whole(1, 1 << 30)] = TARGET_BYTES,
        linger: float = LINGER,
        retention: str | Retention = FOREVER,
        grace: float = GRACE,
        announced: ColdCell | None = None,
        pool: TaskPool | None = None,
        on_progress: Callable[[TieringStep], None] | None = None,
        env: Env = SYSTEM,
    ) -> None:
        """Tier the committed records of ``log`` into ``store``.

        ``name`` is that of the log in the events. A segment has about ``target`` bytes, or less when they have waited
        ``linger`` seconds. ``announced`` gets the expiry announcements, before slots are read.
        With a ``pool``, its tasks store several segments at once, such as those of a backlog; each task holds one.
        After ``grace`` seconds objects are deleted that no event names, or whose segment others have replaced: a plan
        is readable for that long after a compaction.
        """
        check_tierable(log)
        self.partition = TopicPartition(name, log.log_id, 0)
        self._log = log
        self._ledger = Ledger(registry, store, self.partition, log, grace, on_progress, env)
        steady = SteadyTime(env.clock, f"the cold tier of {self.partition}")
        self._expiry = Expiry(self._ledger, as_retention(retention), announced, steady)
        self._holder = f"tierer-{env.chance.uuid()}"
        self._target, self._linger = target, linger
        self._env = env
        self._copier = Copier(self._ledger, target)
        self._truncation = Truncation(self._ledger, self._copier)
        self._backlog = None if pool is None else self._by(pool)
        self._slot: Slot | None = None
        self._checked: SegmentId | None = None
        """The segment whose last record was compared with the log in this round."""
        self._began = False
        self._is_covered = False
        """Whether segments hold everything from the log's start on, or from before it: then the slot may advance."""
        self._stop: threading.Event | None = None
        self._waiting: tuple[int | None, float] | None = None
        self._origin = Origin(f"The tierer of {log!r}", self)

    def run_once(self, *, everything: bool = False, sweep: bool = True, stop: threading.Event | None = None) -> Round:
        """One round: clean up, truncate diverged segments, copy full segments (or ``everything``), delete expired ones.

        Setting ``stop`` ends a copy before anything of it is published or stored.

        ``Fenced`` if another tierer has taken over. ``NotReady`` if the events are not known yet, or if the log ends
        below its cold tier; ``Gap`` if the log no longer has the next offset. ``Diverged`` if the cold tier has a later
        term than the log, or other records in the same term: then nothing is copied. After any error the next round
        continues.
        """
        self._stop = stop
        slot = self._claimed()
        if slot is None:
            return Round()
        segments, removed = self._cleaned_up(slot)
        if self._delete_partition():
            return Round(removed=tuple(removed))
        slot, retired = self._truncate_diverged(slot, segments)
        self._is_covered = self._is_covered or self._covers_log(segments)
        copied: list[SegmentMetadata] = []
        while not self._stopping() and (some := self._copy_next(slot, everything=everything)):
            copied += some
        expired = self._expiry.run(slot)
        swept = self._ledger.sweep() if sweep else []
        return Round(tuple(copied), tuple(removed), tuple(expired), tuple(swept), tuple(retired))

    def run(
        self,
        stop: threading.Event,
        *,
        pause: float = 10.0,
        compact: bool = False,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        """Run rounds until ``stop`` is set, which ends a copy before anything of it is published or stored.

        ``on_round`` gets the result of each. With ``compact``, small segments are merged once an hour. Retryable errors
        are logged and retried with a back-off of up to ``pause`` seconds; others, such as ``Fenced``, are raised.
        """

        def made(*, sweep: bool) -> bool:
            done = self.run_once(sweep=sweep, stop=stop)
            if compact and sweep:
                self.compact(stop=stop)
            if on_round is not None:
                on_round(done)
            return True

        def failed(error: StrandlineError) -> None:
            if not error.retryable:
                raise error
            _LOGGER.warning("A round of the tierer of %s failed and is repeated: %s", self.partition, error)

        run_rounds(made, failed, stop, pause=pause, clock=self._env.clock)

    def _stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def _claimed(self) -> Slot | None:
        """The slot, held by this tierer. Claimed before anything is read, so a former holder is fenced.

        None if the cold tier was deleted and nothing is left to do.
        """
        if self._slot is None:
            if all(state.name != TIER_SLOT for state in self._log.slots.list()):
                deletion = self._ledger.deletion()
                if deletion is not None and deletion.state is PartitionDeleteState.FINISHED:
                    self._drop_slot()  # the tierer that dropped it may have crashed before that was durable
                    return None
                with contextlib.suppress(AlreadyExists):  # another tierer was faster
                    # Not at the end of the cold tier: whether that is of this log is checked later.
                    self._log.slots.create(TIER_SLOT, self._log.bounds().first)
            self._slot = self._log.slots.claim(TIER_SLOT, self._holder)
        state = self._slot.state()
        if state.invalid is not None and state.epoch == self._slot.epoch:
            tiered, bounds = self._ledger.reach(), self._log.bounds()
            start = planning.next_start(tiered, state.position, bounds, self.partition)
            start = start if tiered is None else bounds.first
            _LOGGER.warning(
                "Slot %r was invalidated (%s) and nothing is lost yet: reset to %d.", TIER_SLOT, state, start
            )
            self._log.slots.reset(TIER_SLOT, start)
            self._slot = self._log.slots.claim(TIER_SLOT, self._holder)
        return self._slot

    def _cleaned_up(self, slot: Slot) -> tuple[list[SegmentMetadata], list[SegmentMetadata]]:
        """Remove what crashed and replaced tierers left over; returns the segments to rely on, and the removed ones."""
        known = self._ledger.known()
        # After reading: a copy of a later successor was not seen. A copy that was seen could otherwise be finished,
        # and the log trimmed behind it, before its deletion is published.
        slot.touch()
        left, removed = self._ledger.clean_up(slot, known)
        gone = {each.segment for each in left}
        return [each for each in known.finished if each.segment not in gone], removed

    def _put_back(self, slot: Slot, position: int) -> Slot:
        """Move the slot back to ``position`` if it is higher: the log must keep records that no segment has."""
        if slot.state().position <= position:
            return slot
        slot.touch()  # only its holder may
        _LOGGER.warning(
            "Slot %r is moved back to offset %d, where the log diverges from its cold tier.", slot.name, position
        )
        self._log.slots.reset(TIER_SLOT, position)
        self._slot = self._log.slots.claim(TIER_SLOT, self._holder)
        return self._slot

    def _truncate_diverged(self, slot: Slot, segments: Sequence[SegmentMetadata]) -> tuple[Slot, list[SegmentMetadata]]:
        """Truncate segments that diverge from the log; returns the slot and the deleted segments."""
        self._checked = None
        diverged_at = self._truncation.term_divergence(segments)
        bounds = self._log.bounds()
        if diverged_at is None:
            return self._put_back(slot, bounds.next), []
        # Before anything is refused or deleted: the log must keep records that are in no segment of its own history.
        slot = self._put_back(slot, max(bounds.first, min(diverged_at, bounds.next)))
        cuts = self._truncation.plan(segments)
        diverged_at = self._truncation.record_divergence_before(cuts)
        if diverged_at is not None:
            self._put_back(slot, diverged_at)
            raise self._truncation.diverged(diverged_at)
        return slot, self._truncation.cut(slot, cuts)

    def _covers_log(self, segments: Sequence[SegmentMetadata]) -> bool:
        """Whether the log begins at its first segment or behind it; lets it begin there if no slot needs more.

        The log of a new primary may begin earlier: its former one had expired segments of records that this one has not
        trimmed yet. A slot may pin them meanwhile, and they are in no segment.
        """
        slots, cell = self._log.slots, self._expiry.announced
        if not segments or not isinstance(slots, TierableSlots):
            return True
        cold = None if cell is None else cell.read()
        # A former primary may still be deleting what it had announced before this one claimed the cold tier.
        first = max(min(segment.start for segment in segments), 0 if cold is None else cold.start)
        if self._log.bounds().first >= first:
            return True
        return slots.begin_at(first) >= first

    def truncate(self, since: int) -> list[SegmentMetadata]:
        """Truncate the cold tier: remove everything from ``since`` on, where the log diverges from it within a term.

        For a log that was restored from an older copy and stays as it is. Returns the deleted segments; their records
        below ``since`` are kept. The next round copies the log's own records. ``InvalidInput``, and no change, if the
        log does not have ``since``, or if the two diverge below it.
        """
        slot = self._claimed()
        if slot is None:
            return []
        segments, _ = self._cleaned_up(slot)
        cuts = self._truncation.plan_at(segments, since)
        return self._truncation.cut(self._put_back(slot, since), cuts)

    def compact(
        self, *, purge: bool = False, everything: bool = False, stop: threading.Event | None = None
    ) -> Compacted:
        """Merge small segments; with ``purge`` also erase the values of purged keys for good.

        A run of small segments is merged when it fills one, or is long; with ``everything`` any two that fit. A purge
        (``Op.PURGE``) erases value and headers of all earlier records with its key, which become purges themselves;
        offsets, times and keys stay. That is done below the start of the hot tier only. Killed at any moment, nothing
        is lost, and the next round continues. Errors are those of :meth:`run_once`.

        Replaced segments are not found by new plans, and a later round deletes their objects after the grace period,
        for readers that planned before. With ``purge``, those that have values of purged keys are deleted at once.
        """
        self._stop = stop
        slot = self._claimed()
        if slot is None or self._ledger.deletion() is not None:
            return Compacted()
        segments, _ = self._cleaned_up(slot)
        slot, retired = self._truncate_diverged(slot, segments)
        last = self._ledger.last()
        if last is not None:
            self._check_follows(slot, last)  # a purge of another history erases nothing
        compaction = Compaction(self._backlog or self._by(ThreadPool()))
        rest = self._ledger.known().finished if retired else segments
        try:
            return compaction.run(slot, rest, purge=purge, everything=everything, stopping=self._stopping)
        except NotFound:
            slot.touch()  # ``Fenced`` if another tierer has erased meanwhile what this one reads
            raise

    def _by(self, pool: TaskPool) -> Backlog:
        return Backlog(self._ledger, self._copier, pool)

    def _copy_next(self, slot: Slot, *, everything: bool) -> list[SegmentMetadata]:
        """Copy the next segment; with a pool, the next few. Empty if no segment is due."""
        last, position = self._ledger.last(), slot.state().position
        start = planning.next_start(
            None if last is None else last.end + 1, position, self._log.bounds(), self.partition
        )
        cursor = Cursor(self._log.log_id, start, 0 if last is None else last.terms[-1][0])
        wanted = self._target if self._backlog is None else self._backlog.log_bytes * self._backlog.wanted
        spans = self._spans(cursor, wanted)  # Diverged if the record before is of another term
        size = self._target if len(spans) >= _MOST_SPANS else sum(span.size for span in spans)
        watched, now = self._watched(cursor.next if spans else None), self._env.clock.now()
        is_due = bool(spans) and (
            everything
            or size >= self._target
            or planning.has_waited(listed_at(spans[0], now), self._linger, now, watched)
        )
        if last is not None and (is_due or position < start or not self._began):
            self._check_follows(slot, last)
            if self._is_covered:
                slot.advance(self._log.cursor_at(start))  # a tierer may have crashed between finishing a copy and this
        self._began = True
        if not is_due:
            return []
        copied: list[SegmentMetadata] = []
        began = self._env.clock.monotonic()
        with contextlib.closing(self._stored(slot, spans, size, everything=everything)) as stored:
            for segment, facts in stored:
                # Only now: earlier, the log might have deleted records that were in no segment yet.
                if self._is_covered:
                    slot.advance(Cursor(self._log.log_id, segment.end + 1, segment.terms[-1][0], facts.fingerprint))
                self._checked = segment.segment
                self._ledger.report("copied", segment, self._env.clock.monotonic() - began)
                copied.append(segment)
                if self._stopping():
                    break
                began = self._env.clock.monotonic()
        return copied

    def _stored(
        self, slot: Slot, spans: Sequence[Span], size: int, *, everything: bool
    ) -> Generator[tuple[SegmentMetadata, SegmentFacts]]:
        """Segments of the spans, as they become readable: one, or with a pool all of them."""
        if self._backlog is None:
            encoded = self._copier.encode(spans, size, self._stopping)
            if encoded is not None:
                yield self._copier.copy(slot, encoded, follows=True), encoded.facts
            return

        def is_due(listed: int) -> bool:
            return everything or planning.has_waited(listed, self._linger, self._env.clock.now())

        with contextlib.closing(self._backlog.copied(slot, spans, is_due)) as results:
            for segment, made in results:
                yield segment, made.facts

    def _watched(self, start: int | None) -> float:
        """For how many seconds this tierer has seen the batch at ``start`` wait."""
        now = self._env.clock.monotonic()
        if self._waiting is None or self._waiting[0] != start:
            self._waiting = (start, now)
        return now - self._waiting[1]

    def _check_follows(self, slot: Slot, last: SegmentMetadata) -> None:
        """``Diverged`` if the log has another record at the end of the cold tier; checked once per round."""
        if self._checked == last.segment:
            return
        diverged_at = self._truncation.record_divergence(last)
        if diverged_at is not None:
            self._put_back(slot, diverged_at)
            raise self._truncation.diverged(diverged_at)
        self._checked = last.segment

    def _spans(self, cursor: Cursor, wanted: int) -> list[Span]:
        """The next spans of the log, of about ``wanted`` bytes."""
        found: list[Span] = []
        size = 0
        while size < wanted and len(found) < _MOST_SPANS:
            spans = self._log.plan(cursor, Limit(bytes=wanted - size, batches=_PLANNED))
            if not spans:
                break
            found += spans
            size += sum(span.size for span in spans)
            cursor = cursor_after(cursor, spans[-1])
        return found

    def delete_partition(self, *, force: bool = False) -> None:
        """Delete the whole cold tier for good: nothing is copied afterwards. Repeat the call to resume after a failure.

        ``InvalidInput``, and no change, if a slot pins offsets that only segments have, unless forced.
        """
        slot = self._claimed() if self._ledger.deletion() is None else None
        if slot is not None:
            self._expiry.give_up(slot, self._ledger.reach() or 0, force=force)
            self._ledger.publish_deletion(PartitionDeleteState.MARKED)
        self._delete_partition()

    def _delete_partition(self) -> bool:
        """Continue the partition's deletion, if one was requested, and drop the slot; whether it was."""
        if not self._ledger.delete_partition():
            return False
        self._slot = None
        self._drop_slot()
        return True

    def _drop_slot(self) -> None:
        with contextlib.suppress(NotFound):
            self._log.slots.drop(TIER_SLOT)
