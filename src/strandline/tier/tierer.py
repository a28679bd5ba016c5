"""The tierer: copies closed ranges of a log to the cold tier, tidies up after crashes, and lets old segments go.

The order of its steps is what makes it safe. A copy is told of before its object is put, so that no object is unknown
for good. It is finished only if the slot is still held after it was told of: whoever takes the slot over looks at the
events after that, and so either has fenced the copy, or sees it and removes it, and then it cannot be finished. The
slot moves after the finished copy is visible, so that the log keeps what is in no segment.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from strandline.formats.segment_file import LARGEST_SEGMENT
from strandline.formats.segment_writer import EncodedSegment, SegmentWriter
from strandline.log.contract import Log, Slot
from strandline.log.fetch import fetch_in_order
from strandline.log.object.span import ObjectSpan
from strandline.log.planning import Termed, behind
from strandline.log.wal.span import WalSpan
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.errors import AlreadyExists, InvalidInput, NotFound, StrandlineError
from strandline.model.retention import FOREVER, Retention, parse_retention
from strandline.model.segments import PartitionDeleteState, SegmentId, SegmentMetadata, SegmentState, TopicPartition
from strandline.model.slots import TIER_SLOT
from strandline.storage.ambient import CHANCE, CLOCK, Chance, Clock
from strandline.storage.process import Origin, bound_to_process
from strandline.storage.store import ObjectStore
from strandline.tier import planning
from strandline.tier.expiry import Announced, Expiry
from strandline.tier.ledger import Ledger, Progress, Registry
from strandline.tier.planning import Uncopied
from strandline.tier.segment_files import put_segment, segment_path, verify_segment

TARGET_BYTES: Final = 256 << 20
LINGER: Final = 3600.0
GRACE: Final = 24 * 3600.0

_LOGGER = logging.getLogger(__name__)
_PLANNED: Final = 4096
_MOST_SPANS: Final = 1 << 16
_SWEEP_EVERY: Final = 3600.0
_FIRST_PAUSE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did."""

    copied: tuple[SegmentMetadata, ...] = ()
    removed: tuple[SegmentMetadata, ...] = ()
    """What was left over."""
    expired: tuple[SegmentMetadata, ...] = ()
    swept: tuple[str, ...] = ()
    """Objects that no event knew."""


@bound_to_process(close=("close", "release"))
class Tierer:
    """Keeps the cold tier of one log in step with it. One thread uses it; of several tierers, one holds the slot."""

    def __init__(
        self,
        log: Log,
        registry: Registry,
        store: ObjectStore,
        *,
        name: str = "",
        partition: int = 0,
        broker: int = 0,
        slot: str = TIER_SLOT,
        holder: str | None = None,
        target: int = TARGET_BYTES,
        linger: float = LINGER,
        retention: str | Retention = FOREVER,
        grace: float = GRACE,
        announced: Announced | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """Tier ``log``, which every reader sees so far as it is committed, into ``store``.

        A segment is made of about ``target`` bytes, or of less when they have waited ``linger`` seconds. ``holder``
        names this one tierer, and no other that ever runs; it is made up if it is not given. ``announced`` is told what
        expires before anybody is asked whether he needs it.
        """
        if not 1 <= target <= 1 << 30:
            raise InvalidInput(f"Segments of {target} bytes cannot be made: use 1 to {1 << 30}.")
        if min(linger, grace) < 0:
            raise InvalidInput("Neither the time that records wait nor the grace of objects can be negative.")
        self.partition = TopicPartition(name, log.log_id, partition)
        self._log = log
        self._ledger = Ledger(registry, store, self.partition, broker=broker, on_progress=on_progress, clock=clock)
        policy = parse_retention(retention) if isinstance(retention, str) else retention
        self._expiry = Expiry(log, self._ledger, policy, slot=slot, announced=announced, clock=clock)
        self._name = slot
        self._holder = holder or f"tierer-{chance.uuid()}"
        self._target, self._linger, self._grace = target, linger, grace
        self._clock, self._chance = clock, chance
        self._slot: Slot | None = None
        self._stop: threading.Event | None = None
        self._origin = Origin(f"The tierer of {log!r}", self)

    # --- rounds ------------------------------------------------------------------------------------------------

    def run_once(self, *, everything: bool = False, sweep: bool = True, stop: threading.Event | None = None) -> Round:
        """One round: tidy up, copy all that fills segments (or ``everything``), and let go of what expired.

        Setting ``stop`` ends a copy before anything of it was told or stored.

        ``Fenced`` if another tierer has taken over: this one is done. ``NotReady`` if the events are not known yet,
        ``Gap`` if the log no longer has what comes next. Whatever is raised, the next round goes on from there.
        """
        self._stop = stop
        slot = self._claimed()
        if slot is None:
            return Round()
        known = self._ledger.known()
        # After the look: a copy of somebody who takes over from here on was not seen. One that was could be finished,
        # and the log trimmed behind it, before its removal is told.
        slot.touch()
        removed = self._ledger.remove_all(planning.left_over(known), "removed")
        if self._delete_partition():
            return Round(removed=tuple(removed))
        copied = []
        while not self._stopping() and (segment := self._copy_next(slot, everything=everything)) is not None:
            copied.append(segment)
        expired = self._expiry.run()
        swept = self._ledger.sweep(self._grace) if sweep else []
        return Round(tuple(copied), tuple(removed), tuple(expired), tuple(swept))

    def run(
        self, stop: threading.Event, *, pause: float = 10.0, on_round: Callable[[Round], None] | None = None
    ) -> None:
        """Round after round until ``stop`` is set, which ends a copy before anything of it was told or stored.

        ``on_round`` is told what each of them did. What may pass is logged and tried again after a pause that grows up
        to ``pause`` seconds. ``Fenced`` and what retrying does not help are raised.
        """
        swept: float | None = None
        failures = 0
        while not stop.is_set():
            now = self._clock.monotonic()
            sweep = swept is None or now - swept >= _SWEEP_EVERY
            try:
                done = self.run_once(sweep=sweep, stop=stop)
            except StrandlineError as error:
                if not error.retryable:
                    raise
                _LOGGER.warning("A round of the tierer of %s failed and is repeated: %s", self.partition, error)
                failures += 1
                self._clock.wait(stop, min(pause, _FIRST_PAUSE * 2.0 ** min(failures, 20)))
                continue
            failures = 0
            swept = now if sweep else swept
            if on_round is not None:
                on_round(done)
            self._clock.wait(stop, pause)

    def _stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    # --- the slot ----------------------------------------------------------------------------------------------

    def _claimed(self) -> Slot | None:
        """The slot, held by this tierer; before anything is looked at, so that a former holder is fenced.

        None if there is none any more, and nothing left to do: the cold tier was deleted.
        """
        if self._slot is None:
            if all(state.name != self._name for state in self._log.slots()):
                deletion = self._ledger.deletion()
                if deletion is not None and deletion.state is PartitionDeleteState.FINISHED:
                    return None
                tiered = self._ledger.reach()
                bounds = self._log.bounds()
                position = bounds.first if tiered is None else min(max(tiered, bounds.first), bounds.next)
                with contextlib.suppress(AlreadyExists):  # another was faster: then it is there
                    self._log.create_slot(self._name, position)
            self._slot = self._log.claim_slot(self._name, self._holder)
        state = self._slot.state()
        if state.invalid is not None and state.epoch == self._slot.epoch:
            start = planning.next_start(self._ledger.reach(), state.position, self._log.bounds(), self.partition)
            _LOGGER.warning(
                "Slot %r was invalidated (%s) and nothing is lost yet: reset to %d.", self._name, state, start
            )
            self._log.reset_slot(self._name, start)
            self._slot = self._log.claim_slot(self._name, self._holder)
        return self._slot

    # --- copying -----------------------------------------------------------------------------------------------

    def _copy_next(self, slot: Slot, *, everything: bool) -> SegmentMetadata | None:
        began = self._clock.monotonic()
        tiered = self._ledger.reach()
        start = planning.next_start(tiered, slot.state().position, self._log.bounds(), self.partition)
        if tiered is not None:
            slot.advance(Cursor(self._log.log_id, start))  # somebody died between finishing a copy and this
        spans = self._spans(start)
        uncopied = Uncopied(
            self._target if len(spans) >= _MOST_SPANS else sum(span.size for span in spans),
            _listed(spans[0], self._clock.now()) if spans else None,
        )
        now = self._clock.now()
        if not planning.is_due(uncopied, target=self._target, linger=self._linger, now=now, everything=everything):
            return None
        encoded = self._encoded(start, spans, uncopied.size)
        if encoded is None:
            return None
        segment = self._copied(slot, encoded)
        # Only now: had the slot moved before, the log might have deleted what was in no segment yet.
        slot.advance(Cursor(self._log.log_id, segment.end + 1, segment.terms[-1][0]))
        self._ledger.tell("copied", segment, self._clock.monotonic() - began)
        return segment

    def _spans(self, start: int) -> list[Span]:
        """What comes next in the log, enough for a segment."""
        cursor = self._log.start().at(start)
        found: list[Span] = []
        size = 0
        while size < self._target and len(found) < _MOST_SPANS:
            spans = self._log.plan(cursor, Limit(bytes=self._target - size, batches=_PLANNED))
            if not spans:
                break
            found += spans
            size += sum(span.size for span in spans)
            cursor = behind(cursor, spans[-1])
        return found

    def _encoded(self, start: int, spans: Sequence[Span], expected: int) -> EncodedSegment | None:
        """A segment of as many of these spans as it should have; None if it was stopped."""
        writer = SegmentWriter(start, expected=min(expected, self._target))
        for span, batches in fetch_in_order(spans):
            if self._stopping():
                return None
            size = sum(batch.nbytes for batch in batches)
            # Compressed it may be less, and is hardly more: an event cannot tell of a larger one.
            if writer.next > start and writer.size + size + (size >> 3) > LARGEST_SEGMENT - (64 << 20):
                break
            term = span.term if isinstance(span, Termed) else 0
            writer.add(batches, term=term, listed=_listed(span, self._clock.now()))
            if writer.size >= self._target:
                break
        partition = self.partition
        return writer.finish(log_id=partition.topic_id, partition=partition.partition, segment=self._chance.uuid())

    def _copied(self, slot: Slot, encoded: EncodedSegment) -> SegmentMetadata:
        facts = encoded.facts
        segment = SegmentMetadata(
            segment=SegmentId(self.partition, facts.segment),
            start=facts.start,
            end=facts.end,
            broker=0,
            max_timestamp=facts.max_timestamp,
            event_timestamp=0,  # both are told by the ledger
            terms=facts.terms,
            size=encoded.seal.size,
            custom_metadata=encoded.seal.encode(),
            no_transaction_index=True,
        )
        try:
            segment = self._ledger.add(segment)
            put_segment(self._ledger.store, segment_path(segment.segment, segment.start), encoded)
            verify_segment(self._ledger.store, segment)
            # After the add is visible and before it is finished: whoever takes over from here on sees the copy.
            slot.touch()
            planning.check_follows(self._ledger.reach(), segment)
            return self._ledger.went_on(segment, SegmentState.COPY_FINISHED)
        except StrandlineError as error:
            finished = self._given_up(segment, error)
            if finished is not None:
                return finished
            if not error.retryable:
                slot.touch()  # if somebody has taken over, that is why it failed, and what is said
            raise

    def _given_up(self, segment: SegmentMetadata, why: StrandlineError) -> SegmentMetadata | None:
        """Take back a copy that failed; the segment if it turns out to be finished, only its answer having been lost.

        What cannot be taken back now is left over, for the next round.
        """
        try:
            known = self._ledger.get(segment.segment)
            if known is not None and known.state is SegmentState.COPY_FINISHED:
                return known
            if known is not None:
                self._ledger.remove(known)
            else:  # it may not have been told of; its object is not there then
                self._ledger.forget_object(segment)
        except StrandlineError as error:
            _LOGGER.warning("Segment %s failed (%s) and is removed later: %s", segment.segment, why, error)
        return None

    # --- deleting the partition --------------------------------------------------------------------------------

    def delete_partition(self, *, force: bool = False) -> None:
        """Remove the whole cold tier of the log, for good: nothing is copied afterwards. Repeating goes on with it.

        ``InvalidInput``, and nothing is removed, if a slot needs what only segments have; ``force`` removes that, too.
        """
        if self._ledger.deletion() is None:
            self._claimed()
            self._expiry.give_up(self._ledger.reach() or 0, force=force)
            self._ledger.tell_deletion(PartitionDeleteState.MARKED)
        self._delete_partition()

    def _delete_partition(self) -> bool:
        """Go on with the partition's deletion, if it was asked for, and pin nothing any more; whether it was."""
        if not self._ledger.delete_partition():
            return False
        self._slot = None
        with contextlib.suppress(NotFound):
            self._log.drop_slot(self._name)
        return True


def _listed(span: Span, now: int) -> int:
    """When a span's batch was listed, in microseconds; a log that does not tell lists it now."""
    if isinstance(span, ObjectSpan):
        return span.entry.listed
    if isinstance(span, WalSpan):
        # Such a log counts milliseconds, and seeks by them: all of its last one is not later than itself.
        return span.frame.timestamp * 1000 + 999
    return now
