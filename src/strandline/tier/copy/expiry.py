"""Retention of the cold tier: deletes the oldest segments, none that a slot pins or the log itself still has."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import final

from strandline.errors import CorruptData, Fenced, InvalidInput, StorageError
from strandline.log.contract import Slot
from strandline.model.retention import Forever, MaxAge, Retention
from strandline.model.segments import SegmentMetadata
from strandline.storage.clock import SteadyTime
from strandline.storage.objects.store import cautious_now
from strandline.tier.attachment import ColdCell
from strandline.tier.copy import planning
from strandline.tier.copy.ledger import Ledger
from strandline.tier.copy.segment_files import load_tail

_LOGGER = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Expiry:
    """Deletes the segments that the retention policy no longer keeps."""

    ledger: Ledger
    retention: Retention
    announced: ColdCell | None
    """Gets the announcements of expiry before slots are read; creators of slots read them."""
    steady: SteadyTime

    def run(self, slot: Slot) -> list[SegmentMetadata]:
        """Delete expired segments; returns them. Even a fenced tierer deletes nothing that a slot pins.

        ``slot`` is the tierer's own. ``Fenced`` if another tierer has claimed it since.
        """
        # Before the slots: a slot created in the hot tier meanwhile is seen, or not below this.
        hot = self.ledger.log.bounds().first
        now = min(self.ledger.env.clock.now(), self.steady.now())
        wanted = self._expired(hot, now)
        if wanted and isinstance(self.retention, MaxAge):
            # Only now, since it takes requests: a single clock that is ahead expires nothing.
            now = min(now, cautious_now(self.ledger.store, "clock/now", clock=self.ledger.env.clock))
            wanted = self._expired(hot, now)
        if self.announced is None:
            self.ledger.log.slots.flush()  # after a crash no slot points to deleted offsets
            return self.ledger.remove_all(wanted, "expired")
        if not wanted and not self.announced.is_undecided():
            return []
        # The creator of a slot in the cold tier sees this announcement, or the next read sees the slot.
        number = self.announced.announce(wanted[-1].end + 1 if wanted else 0)
        gone = self._expired(hot, now)[: len(wanted)]
        self.ledger.log.slots.flush()
        # After the announcement: a node that no longer leads has not seen the slots of its successor. The successor
        # claimed the cold tier before it created one below the hot tier: it is found here, or finds the announcement.
        slot.touch()
        if not self.announced.decide(number, gone[-1].end + 1 if gone else 0):
            return []  # another tierer took over, and may have accepted a slot that this one has not seen
        return self.ledger.remove_all(gone, "expired")

    def _expired(self, hot: int, now: int) -> list[SegmentMetadata]:
        """The segments that may be deleted now: none that a slot pins, none that the log itself still has."""
        if isinstance(self.retention, Forever):
            return []
        # The slots before the segments: segments copied meanwhile stay for this round.
        slots, floor = self.ledger.log.slots.list(), self.ledger.log.slots.floor()
        pinned = planning.pinned_from(slots, floor)
        return planning.expired(
            self.ledger.known(),
            self.retention,
            hot if pinned is None else min(hot, pinned),
            is_consumed=planning.has_consumers(slots),
            listed=self._last_listed,
            now=now,
        )

    def _last_listed(self, segment: SegmentMetadata) -> int:
        try:
            tail = load_tail(self.ledger.store, segment)
        except (CorruptData, StorageError) as error:
            if error.retryable:
                raise
            # The copy time is later: an unreadable segment is kept a little longer, not forever.
            _LOGGER.warning("The age of segment %s is that of its copy: %s", segment.segment, error)
            return segment.event_timestamp * 1000
        return tail.group(len(tail) - 1).listed

    def give_up(self, slot: Slot, upto: int, *, force: bool) -> None:
        """Announce the deletion of all segments up to ``upto``; ``InvalidInput`` if a slot pins them, unless forced."""
        hot = self.ledger.log.bounds().first
        number = None if self.announced is None else self.announced.announce(upto)
        pinned = planning.pinned_from(self.ledger.log.slots.list(), self.ledger.log.slots.floor())
        slot.touch()
        is_needed = pinned is not None and pinned < min(hot, upto) and not force
        decided = 0 if is_needed else upto
        if self.announced is not None and number is not None and not self.announced.decide(number, decided):
            raise Fenced("Another tierer has announced a deletion since: this one must stop.")
        if is_needed:
            raise InvalidInput(
                f"A slot needs offset {pinned}, but the log itself begins at {hot}: nothing was removed. Let its "
                "consumer continue, drop the slot, or remove the cold tier by force."
            )
