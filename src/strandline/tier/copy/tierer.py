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
from typing import Annotated, Final

from strandline.errors import AlreadyExists, NotFound, StrandlineError
from strandline.log.contract import Log, Slot
from strandline.log.planning import behind
from strandline.model.arguments import anything, checked, whole
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.retention import FOREVER, Retention, as_retention
from strandline.model.segments import PartitionDeleteState, SegmentId, SegmentMetadata, TopicPartition
from strandline.model.slots import TIER_SLOT
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.store import ObjectStore
from strandline.tier.copy import planning
from strandline.tier.copy.copier import Copier, listed_at
from strandline.tier.copy.expiry import Announced, Expiry
from strandline.tier.copy.ledger import Ledger, Progress, Registry
from strandline.tier.copy.planning import Uncopied
from strandline.tier.copy.truncation import Truncation
from strandline.tier.supported import check_tierable

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
    retired: tuple[SegmentMetadata, ...] = ()
    """Segments of another history than the log's; what they had of that is in other segments."""


@bound_to_process(close=("close", "release"))
@checked
class Tierer:
    """Keeps the cold tier of one log in step with it. One thread uses it; of several tierers, one holds the slot."""

    def __init__(
        self,
        log: Annotated[Log, anything("a log")],
        registry: Registry,
        store: ObjectStore,
        *,
        name: str = "",
        partition: int = 0,
        broker: int = 0,
        slot: str = TIER_SLOT,
        holder: str | None = None,
        target: Annotated[int, whole(1, 1 << 30)] = TARGET_BYTES,
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
        check_tierable(log)
        self.partition = TopicPartition(name, log.log_id, partition)
        self._log = log
        self._ledger = Ledger(registry, store, self.partition, broker=broker, on_progress=on_progress, clock=clock)
        policy = as_retention(retention)
        self._expiry = Expiry(log, self._ledger, policy, slot=slot, announced=announced, clock=clock)
        self._name = slot
        self._holder = holder or f"tierer-{chance.uuid()}"
        self._target, self._linger, self._grace = target, linger, grace
        self._clock = clock
        self._copier = Copier(self._ledger, target=target, clock=clock, chance=chance)
        self._truncation = Truncation(log, self._ledger, self._copier)
        self._slot: Slot | None = None
        self._checked: SegmentId | None = None
        """The segment whose last record was found to be the log's, in this round."""
        self._began = False
        self._stop: threading.Event | None = None
        self._waiting: tuple[int | None, float] | None = None
        self._origin = Origin(f"The tierer of {log!r}", self)

    # --- rounds ------------------------------------------------------------------------------------------------

    def run_once(self, *, everything: bool = False, sweep: bool = True, stop: threading.Event | None = None) -> Round:
        """One round: tidy up, copy all that fills segments (or ``everything``), and let go of what expired.

        Setting ``stop`` ends a copy before anything of it was told or stored.

        Segments of another history than the log's, which went on in a later term, are cut first.

        ``Fenced`` if another tierer has taken over: this one is done. ``NotReady`` if the events are not known yet, or
        if the log ends before its cold tier does; ``Gap`` if the log no longer has what comes next. ``Diverged`` if the
        cold tier is of a later term than the log, or has other records in the same term: nothing is copied then.
        Whatever is raised, the next round goes on from there.
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
        slot, retired = self._agreed(slot, planning.without(known, removed))
        copied = []
        while not self._stopping() and (segment := self._copy_next(slot, everything=everything)) is not None:
            copied.append(segment)
        expired = self._expiry.run()
        swept = self._ledger.sweep(self._grace) if sweep else []
        return Round(tuple(copied), tuple(removed), tuple(expired), tuple(swept), tuple(retired))

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
                    with contextlib.suppress(NotFound):  # whoever dropped the slot may have died before it was done
                        self._log.drop_slot(self._name)
                    return None
                with contextlib.suppress(AlreadyExists):  # another was faster: then it is there
                    # Not behind what is tiered: whether that is the log's own is looked at later.
                    self._log.create_slot(self._name, self._log.bounds().first)
            self._slot = self._log.claim_slot(self._name, self._holder)
        state = self._slot.state()
        if state.invalid is not None and state.epoch == self._slot.epoch:
            tiered, bounds = self._ledger.reach(), self._log.bounds()
            start = planning.next_start(tiered, state.position, bounds, self.partition)
            start = start if tiered is None else bounds.first
            _LOGGER.warning(
                "Slot %r was invalidated (%s) and nothing is lost yet: reset to %d.", self._name, state, start
            )
            self._log.reset_slot(self._name, start)
            self._slot = self._log.claim_slot(self._name, self._holder)
        return self._slot

    def _put_back(self, slot: Slot, position: int) -> Slot:
        """The slot, put back if it stands higher: the log must keep from there on what segments do not have."""
        if slot.state().position <= position:
            return slot
        slot.touch()  # only who holds it may
        _LOGGER.warning(
            "Slot %r is put back to offset %d, from where on the log went on differently.", slot.name, position
        )
        self._log.reset_slot(self._name, position)
        self._slot = self._log.claim_slot(self._name, self._holder)
        return self._slot

    # --- the log's history -------------------------------------------------------------------------------------

    def _agreed(self, slot: Slot, segments: Sequence[SegmentMetadata]) -> tuple[Slot, list[SegmentMetadata]]:
        """Let the cold tier hold nothing but the log's own history; the slot, and the segments that had to go."""
        self._checked = None
        parting = self._truncation.parting(segments)
        bounds = self._log.bounds()
        if parting is None:
            return self._put_back(slot, bounds.next), []
        # Before anything is refused or removed: the log must keep what is in no segment of its own history.
        slot = self._put_back(slot, max(bounds.first, min(parting, bounds.next)))
        cuts = self._truncation.plan(segments)
        parted = self._truncation.parted_before(cuts)
        if parted is not None:
            self._put_back(slot, parted)
            raise self._truncation.diverged(parted)
        return slot, self._truncation.cut(slot, cuts)

    def truncate(self, to: int) -> list[SegmentMetadata]:
        """Remove everything from an offset on from the cold tier: the log went on differently there, within a term.

        For a log that was restored from an older copy and is to stay as it is. Returns the segments that went; what
        they held below ``to`` stays. The log's own records are copied by the next round. ``InvalidInput``, and nothing
        was changed, if the log does not begin before ``to``, or if the two part before.
        """
        slot = self._claimed()
        if slot is None:
            return []
        known = self._ledger.known()
        slot.touch()
        segments = planning.without(known, self._ledger.remove_all(planning.left_over(known), "removed"))
        cuts = self._truncation.plan_at(segments, to)
        return self._truncation.cut(self._put_back(slot, to), cuts)

    # --- copying -----------------------------------------------------------------------------------------------

    def _copy_next(self, slot: Slot, *, everything: bool) -> SegmentMetadata | None:
        began = self._clock.monotonic()
        last, position = self._ledger.last(), slot.state().position
        start = planning.next_start(
            None if last is None else last.end + 1, position, self._log.bounds(), self.partition
        )
        cursor = Cursor(self._log.log_id, start, 0 if last is None else last.terms[-1][0])
        spans = self._spans(cursor)  # refused if the record before is of another term
        uncopied = Uncopied(
            self._target if len(spans) >= _MOST_SPANS else sum(span.size for span in spans),
            listed_at(spans[0], self._clock.now()) if spans else None,
            self._watched(cursor.next if spans else None),
        )
        now = self._clock.now()
        is_due = planning.is_due(uncopied, target=self._target, linger=self._linger, now=now, everything=everything)
        if last is not None and (is_due or position < start or not self._began):
            self._check_follows(slot, last)
            slot.advance(self._log.cursor_at(start))  # somebody may have died between finishing a copy and this
        self._began = True
        if not is_due:
            return None
        encoded = self._copier.encode(start, spans, uncopied.size, self._stopping)
        if encoded is None:
            return None
        segment = self._copier.copy(slot, encoded, follows=True)
        # Only now: had the slot moved before, the log might have deleted what was in no segment yet.
        slot.advance(Cursor(self._log.log_id, segment.end + 1, segment.terms[-1][0], encoded.facts.fingerprint))
        self._checked = segment.segment
        self._ledger.tell("copied", segment, self._clock.monotonic() - began)
        return segment

    def _watched(self, start: int | None) -> float:
        """For how many seconds this tierer has seen a batch wait that begins there; None if none does."""
        now = self._clock.monotonic()
        if self._waiting is None or self._waiting[0] != start:
            self._waiting = (start, now)
        return now - self._waiting[1]

    def _check_follows(self, slot: Slot, last: SegmentMetadata) -> None:
        """Refuse a log that has another record where the cold tier ends; looked at once a round."""
        if self._checked == last.segment:
            return
        parted = self._truncation.parted(last)
        if parted is not None:
            self._put_back(slot, parted)
            raise self._truncation.diverged(parted)
        self._checked = last.segment

    def _spans(self, cursor: Cursor) -> list[Span]:
        """What comes next in the log, enough for a segment."""
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
