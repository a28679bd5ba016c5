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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar, runtime_checkable

from strandline.formats.segment_file import LARGEST_SEGMENT
from strandline.formats.segment_writer import EncodedSegment, SegmentWriter
from strandline.log.contract import Log, Slot
from strandline.log.fetch import fetch_in_order
from strandline.log.object.span import ObjectSpan
from strandline.log.planning import Termed, behind
from strandline.log.wal.span import WalSpan
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.errors import (
    AlreadyExists,
    CorruptData,
    InvalidInput,
    StorageError,
    StrandlineError,
)
from strandline.model.retention import FOREVER, Forever, MaxAge, Retention
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.model.slots import TIER_SLOT
from strandline.storage.ambient import CHANCE, CLOCK, Chance, Clock
from strandline.storage.store import ObjectStore
from strandline.tier import planning
from strandline.tier.planning import Known, Uncopied
from strandline.tier.segment_files import list_segments, load_tail, put_segment, segment_path, verify_segment

T = TypeVar("T")

TARGET_BYTES: Final = 256 << 20
LINGER: Final = 3600.0
GRACE: Final = 24 * 3600.0

_LOGGER = logging.getLogger(__name__)
_PLANNED: Final = 4096
_MOST_SPANS: Final = 1 << 16
_SWEEP_EVERY: Final = 3600.0
_FIRST_PAUSE: Final = 0.1


class Segments(Protocol):
    """The part of the segment cache that the tierer asks."""

    def segments(self, partition: TopicPartition) -> Iterable[SegmentMetadata]:
        """All segments, by their first offset."""

    def unreferenced(self, partition: TopicPartition) -> Iterable[SegmentMetadata]:
        """The segments that no lookup finds: those that others have taken the place of are among them."""

    def deletion(self, partition: TopicPartition) -> PartitionDelete | None:
        """How far the partition's deletion is."""


class Registry(Protocol):
    """The part of the metadata manager that the tierer needs."""

    def current(self, partition: TopicPartition, question: Callable[[Segments], T]) -> T:
        """The answer from everything that was published before this call; ``NotReady`` if that is not known."""

    def add(self, segment: SegmentMetadata) -> None:
        """Tell of a segment whose copy starts."""

    def update(self, update: SegmentUpdate) -> None:
        """Tell that a segment went on."""

    def put_partition_delete(self, delete: PartitionDelete) -> None:
        """Tell how far a partition's deletion is."""


class Announced(Protocol):
    """Where it is told what expires, for those who are about to need it."""

    def announce(self, start: int) -> int:
        """Durably say that nothing below an offset is to be needed any more; returns the announcement's number."""

    def decide(self, number: int, start: int) -> bool:
        """Durably say that everything below goes, and the rest stays; False if somebody else has announced since."""

    def is_undecided(self) -> bool:
        """Whether something was announced that nobody has decided."""


@runtime_checkable
class Lazy(Protocol):
    """A log that writes the positions of slots before it forgets something, and not before."""

    def flush_slots(self) -> None:
        """Durably write the positions that were only noted."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did."""

    copied: tuple[SegmentMetadata, ...] = ()
    removed: tuple[SegmentMetadata, ...] = ()
    """What was left over."""
    expired: tuple[SegmentMetadata, ...] = ()
    swept: tuple[str, ...] = ()
    """Objects that no event knew."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One step: ``what`` is copied, removed, expired or swept."""

    what: str
    path: str
    first: int
    last: int
    size: int
    seconds: float = field(default=0.0, compare=False)
    """How long a copy took."""


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
        retention: Retention = FOREVER,
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
        self._log, self._registry, self._store = log, registry, store
        self._broker = broker
        self._name = slot
        self._holder = holder or f"tierer-{chance.uuid()}"
        self._target, self._linger, self._grace = target, linger, grace
        self._retention = retention
        self._announced = announced
        self._progress = on_progress
        self._clock, self._chance = clock, chance
        self._slot: Slot | None = None
        self._stop: threading.Event | None = None

    # --- rounds ------------------------------------------------------------------------------------------------

    def run_once(self, *, everything: bool = False, sweep: bool = True, stop: threading.Event | None = None) -> Round:
        """One round: tidy up, copy all that fills segments (or ``everything``), and let go of what expired.

        Setting ``stop`` ends a copy before anything of it was told or stored.

        ``Fenced`` if another tierer has taken over: this one is done. ``NotReady`` if the events are not known yet,
        ``Gap`` if the log no longer has what comes next. Whatever is raised, the next round goes on from there.
        """
        self._stop = stop
        slot = self._claimed()
        known = self._known()
        # After the look: a copy of somebody who takes over from here on was not seen. One that was could be finished,
        # and the log trimmed behind it, before its removal is told.
        slot.touch()
        removed = self._remove_all(planning.left_over(known), "removed")
        if self._delete_partition():
            return Round(removed=tuple(removed))
        copied = []
        while not self._stopping() and (segment := self._copy_next(slot, everything=everything)) is not None:
            copied.append(segment)
        expired = self._expire()
        swept = self._sweep() if sweep else []
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

    def _claimed(self) -> Slot:
        """The slot, held by this tierer; before anything is looked at, so that a former holder is fenced."""
        if self._slot is None:
            if all(state.name != self._name for state in self._log.slots()):
                tiered = self._known().tiered
                bounds = self._log.bounds()
                position = bounds.first if tiered is None else min(max(tiered, bounds.first), bounds.next)
                with contextlib.suppress(AlreadyExists):  # another was faster: then it is there
                    self._log.create_slot(self._name, position)
            self._slot = self._log.claim_slot(self._name, self._holder)
        state = self._slot.state()
        if state.invalid is not None and state.epoch == self._slot.epoch:
            start = planning.next_start(self._known(), state.position, self._log.bounds(), self.partition)
            _LOGGER.warning(
                "Slot %r was invalidated (%s) and nothing is lost yet: reset to %d.", self._name, state, start
            )
            self._log.reset_slot(self._name, start)
            self._slot = self._log.claim_slot(self._name, self._holder)
        return self._slot

    def _known(self) -> Known:
        partition = self.partition

        def ask(cache: Segments) -> Known:
            return Known(
                tuple(cache.segments(partition)), tuple(cache.unreferenced(partition)), cache.deletion(partition)
            )

        return self._registry.current(partition, ask)

    # --- copying -----------------------------------------------------------------------------------------------

    def _copy_next(self, slot: Slot, *, everything: bool) -> SegmentMetadata | None:
        began = self._clock.monotonic()
        known = self._known()
        start = planning.next_start(known, slot.state().position, self._log.bounds(), self.partition)
        if known.tiered is not None:
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
        self._tell("copied", segment, self._clock.monotonic() - began)
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
            broker=self._broker,
            max_timestamp=facts.max_timestamp,
            event_timestamp=self._now(),
            terms=facts.terms,
            size=encoded.seal.size,
            custom_metadata=encoded.seal.encode(),
            no_transaction_index=True,
        )
        try:
            self._registry.add(segment)
            put_segment(self._store, segment_path(segment.segment, segment.start), encoded)
            verify_segment(self._store, segment)
            # After the add is visible and before it is finished: whoever takes over from here on sees the copy.
            slot.touch()
            planning.check_follows(self._known(), segment)
            return self._went_on(segment, SegmentState.COPY_FINISHED)
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
            known = {found.segment: found for found in self._known().segments}.get(segment.segment)
            if known is not None and known.state is SegmentState.COPY_FINISHED:
                return known
            if known is not None:
                self._remove(known)
            else:  # it may not have been told of; its object is not there then
                self._store.delete(segment_path(segment.segment, segment.start))
        except StrandlineError as error:
            _LOGGER.warning("Segment %s failed (%s) and is removed later: %s", segment.segment, why, error)
        return None

    # --- removing ----------------------------------------------------------------------------------------------

    def _remove_all(self, segments: Sequence[SegmentMetadata], what: str) -> list[SegmentMetadata]:
        for segment in segments:
            self._remove(segment)
            self._tell(what, segment)
        return list(segments)

    def _remove(self, segment: SegmentMetadata) -> None:
        """Delete a segment: first its readers are told, then the object goes, then it is forgotten."""
        with self._unless_done(segment):
            if segment.state is not SegmentState.DELETE_STARTED:
                segment = self._went_on(segment, SegmentState.DELETE_STARTED)
        self._store.delete(segment_path(segment.segment, segment.start))
        with self._unless_done(segment):
            self._went_on(segment, SegmentState.DELETE_FINISHED)

    @contextlib.contextmanager
    def _unless_done(self, segment: SegmentMetadata) -> Iterator[None]:
        """Let it pass that somebody else removes the same segment."""
        try:
            yield
        except InvalidInput:
            known = {found.segment: found for found in self._known().segments}.get(segment.segment)
            if known is not None and known.state is not SegmentState.DELETE_STARTED:
                raise

    def _went_on(self, segment: SegmentMetadata, state: SegmentState) -> SegmentMetadata:
        now = self._now()
        self._registry.update(
            SegmentUpdate(
                segment=segment.segment,
                broker=self._broker,
                event_timestamp=now,
                state=state,
                custom_metadata=segment.custom_metadata,  # what an update does not repeat is forgotten
            )
        )
        return replace(segment, broker=self._broker, event_timestamp=now, state=state)

    def _expire(self) -> list[SegmentMetadata]:
        # Before the slots: one that is put on what the log itself has is seen then, or not below this.
        hot = self._log.bounds().first
        wanted = self._expired(hot)
        if self._announced is None:
            self._flush_slots()
            return self._remove_all(wanted, "expired")
        if not wanted and not self._announced.is_undecided():
            return []
        # Whoever puts a slot on what only segments have sees this, or is seen by the next look.
        number = self._announced.announce(wanted[-1].end + 1 if wanted else 0)
        gone = self._expired(hot)[: len(wanted)]
        self._flush_slots()
        if not self._announced.decide(number, gone[-1].end + 1 if gone else 0):
            return []  # another tierer took over, which may have promised to somebody what this one has not seen
        return self._remove_all(gone, "expired")

    def _expired(self, hot: int) -> list[SegmentMetadata]:
        """What may go now: nothing that a slot needs, or that the log itself still has."""
        if isinstance(self._retention, Forever):
            return []
        # The slots before the segments: what is tiered meanwhile stays for this round.
        slots, floor = self._log.slots(), self._log.floor()
        pinned = planning.pinned_from(slots, self._name, floor)
        return planning.expired(
            self._known(),
            self._retention,
            hot if pinned is None else min(hot, pinned),
            is_pinned=pinned is not None,
            listed=self._last_listed if isinstance(self._retention, MaxAge) else (lambda _: 0),
            now=self._clock.now(),
        )

    def _flush_slots(self) -> None:
        """Let the positions that this went by be durable: after a crash no slot stands on what is gone."""
        if isinstance(self._log, Lazy):
            self._log.flush_slots()

    def _last_listed(self, segment: SegmentMetadata) -> int:
        try:
            tail = load_tail(self._store, segment)
        except (CorruptData, StorageError) as error:
            if error.retryable:
                raise
            # When it was copied, which is later: what cannot be read is kept a little longer, and not forever.
            _LOGGER.warning("The age of segment %s is that of its copy: %s", segment.segment, error)
            return segment.event_timestamp * 1000
        return tail.group(len(tail) - 1).listed

    def _sweep(self) -> list[str]:
        """Delete objects that no event knows."""
        # Listed before the events are read: see planning.orphans.
        found = list(list_segments(self._store, self.partition.topic_id, self.partition.partition))
        known = {segment.segment.id for segment in self._known().segments}
        gone = planning.orphans(found, known, grace=self._grace, now=self._clock.now())
        for path in gone:
            self._store.delete(path)
            if self._progress is not None:
                self._progress(Progress("swept", path, 0, 0, 0))
        return gone

    # --- deleting the partition --------------------------------------------------------------------------------

    def delete_partition(self) -> None:
        """Remove the whole cold tier of the log, for good: nothing is copied afterwards. Repeating goes on with it."""
        self._claimed()
        if self._known().deletion is None:
            self._tell_deletion(PartitionDeleteState.MARKED)
        self._delete_partition()

    def _delete_partition(self) -> bool:
        """Go on with the partition's deletion, if it was asked for."""
        deletion = self._known().deletion
        if deletion is None:
            return False
        if deletion.state is PartitionDeleteState.MARKED:
            self._tell_deletion(PartitionDeleteState.STARTED)
        if deletion.state is not PartitionDeleteState.FINISHED:
            self._remove_all(self._known().segments, "removed")
            for found in list(list_segments(self._store, self.partition.topic_id, self.partition.partition)):
                self._store.delete(found.info.path)
            self._tell_deletion(PartitionDeleteState.FINISHED)
        return True

    def _tell_deletion(self, state: PartitionDeleteState) -> None:
        self._registry.put_partition_delete(
            PartitionDelete(partition=self.partition, broker=self._broker, event_timestamp=self._now(), state=state)
        )

    # --- inside ------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        return self._clock.now() // 1000

    def _tell(self, what: str, segment: SegmentMetadata, seconds: float = 0.0) -> None:
        if self._progress is not None:
            path = segment_path(segment.segment, segment.start)
            self._progress(Progress(what, path, segment.start, segment.end, segment.size, seconds))


def _listed(span: Span, now: int) -> int:
    """When a span's batch was listed, in microseconds; a log that does not tell lists it now."""
    if isinstance(span, ObjectSpan):
        return span.entry.listed
    if isinstance(span, WalSpan):
        # Such a log counts milliseconds, and seeks by them: all of its last one is not later than itself.
        return span.frame.timestamp * 1000 + 999
    return now
