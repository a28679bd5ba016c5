"""What the cold tier lets go of: the oldest segments, none that a slot needs, and none that the log itself has."""

from __future__ import annotations

import logging
from typing import Protocol, final, runtime_checkable

from strandline.errors import CorruptData, Fenced, InvalidInput, StorageError
from strandline.log.contract import Log
from strandline.model.retention import Forever, MaxAge, Retention
from strandline.model.segments import SegmentMetadata
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.steady_clock import SteadyTime
from strandline.tier.copy import planning
from strandline.tier.copy.ledger import Ledger
from strandline.tier.copy.segment_files import load_tail

_LOGGER = logging.getLogger(__name__)


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


@final
class Expiry:
    """Removes the segments of a log that its policy no longer keeps."""

    def __init__(
        self,
        log: Log,
        ledger: Ledger,
        retention: Retention,
        *,
        slot: str,
        announced: Announced | None,
        clock: Clock = CLOCK,
    ) -> None:
        """``slot`` is the tierer's, which pins nothing here; ``announced`` is told before anybody is asked."""
        self.announced = announced
        self._log = log
        self._ledger = ledger
        self._retention = retention
        self._name = slot
        self._clock = clock
        self._steady = SteadyTime(clock, f"the cold tier of {ledger.partition}")

    def run(self) -> list[SegmentMetadata]:
        """Remove what the policy no longer keeps; returns it. ``Fenced`` or not, nothing goes that somebody needs."""
        # Before the slots: one that is put on what the log itself has is seen then, or not below this.
        hot = self._log.bounds().first
        wanted = self._expired(hot)
        if self.announced is None:
            self._flush_slots()
            return self._ledger.remove_all(wanted, "expired")
        if not wanted and not self.announced.is_undecided():
            return []
        # Whoever puts a slot on what only segments have sees this, or is seen by the next look.
        number = self.announced.announce(wanted[-1].end + 1 if wanted else 0)
        gone = self._expired(hot)[: len(wanted)]
        self._flush_slots()
        if not self.announced.decide(number, gone[-1].end + 1 if gone else 0):
            return []  # another tierer took over, which may have promised to somebody what this one has not seen
        return self._ledger.remove_all(gone, "expired")

    def _expired(self, hot: int) -> list[SegmentMetadata]:
        """What may go now: nothing that a slot needs, or that the log itself still has."""
        if isinstance(self._retention, Forever):
            return []
        # The slots before the segments: what is tiered meanwhile stays for this round.
        slots, floor = self._log.slots(), self._log.floor()
        pinned = planning.pinned_from(slots, self._name, floor)
        return planning.expired(
            self._ledger.known(),
            self._retention,
            hot if pinned is None else min(hot, pinned),
            is_pinned=pinned is not None,
            listed=self._last_listed if isinstance(self._retention, MaxAge) else (lambda _: 0),
            now=min(self._clock.now(), self._steady.now()),
        )

    def _flush_slots(self) -> None:
        """Let the positions that this went by be durable: after a crash no slot stands on what is gone."""
        if isinstance(self._log, Lazy):
            self._log.flush_slots()

    def _last_listed(self, segment: SegmentMetadata) -> int:
        try:
            tail = load_tail(self._ledger.store, segment)
        except (CorruptData, StorageError) as error:
            if error.retryable:
                raise
            # When it was copied, which is later: what cannot be read is kept a little longer, and not forever.
            _LOGGER.warning("The age of segment %s is that of its copy: %s", segment.segment, error)
            return segment.event_timestamp * 1000
        return tail.group(len(tail) - 1).listed

    def give_up(self, upto: int, *, force: bool) -> None:
        """Let all segments go, which end at ``upto``; ``InvalidInput`` if a slot needs them, unless by force."""
        hot = self._log.bounds().first
        number = None if self.announced is None else self.announced.announce(upto)
        pinned = planning.pinned_from(self._log.slots(), self._name, self._log.floor())
        is_needed = pinned is not None and pinned < min(hot, upto) and not force
        if self.announced is not None and number is not None:
            is_decided = self.announced.decide(number, 0 if is_needed else upto)
            if not is_decided:
                raise Fenced("Another tierer has announced since what it removes: this one must stop.")
        if is_needed:
            raise InvalidInput(
                f"A slot needs offset {pinned}, and the log itself begins at {hot}: nothing was removed. Let its "
                "consumer go on, drop the slot, or remove the cold tier by force."
            )
