"""Deletion of segments by a tierer that may have been replaced: none that its successor relies on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, final
from uuid import UUID

from strandline.log.contract import Log, Slot
from strandline.model.segments import SegmentMetadata, SegmentState
from strandline.storage.env import Env
from strandline.storage.objects.store import cautious_now
from strandline.tier.copy import planning
from strandline.tier.copy.ledger import Ledger
from strandline.tier.copy.planning import KnownSegments
from strandline.tier.read.tiered_slots import TierableSlots

_NOTED: Final = 1000
"""How many segments are noted at a time."""


@final
@dataclass(frozen=True, slots=True)
class Retirement:
    """Deletes segments that a round finds left over or diverged.

    The tierers of a replicated log have logs of their own, and a segment that diverges from one of them may be the only
    copy of another one's records. There a deletion is noted durably before it is published, in the cell that the next
    tierer claims first. A tierer that was replaced cannot write the note. A tierer that takes over after the note does
    not rely on the noted segments, and deletes them. That holds for pauses of any length between the steps.
    """

    log: Log
    ledger: Ledger
    grace: float
    """For how many seconds the objects of replaced segments stay, for readers that planned with them."""
    env: Env

    def clean_up(self, slot: Slot, known: KnownSegments) -> tuple[list[SegmentMetadata], list[SegmentMetadata]]:
        """Remove what is left over; returns the segments not to rely on, and those of them that were deleted.

        To be called after the slot was claimed, and touched since the segments were read.
        """
        slots = self.log.slots
        noted = slots.retired() if isinstance(slots, TierableSlots) else ()
        left = planning.left_over(known, noted)
        return left, self.remove(slot, left, "removed", noted=noted, kept=self._replaced(known, left))

    def _replaced(self, known: KnownSegments, left: Sequence[SegmentMetadata]) -> list[SegmentMetadata]:
        """The left over segments whose objects readers may still need."""
        held, own = planning.replaced(known, left), self.env.clock.now()
        kept = planning.within_grace(held, self.grace, now=own, own=own)
        if len(kept) == len(held):
            return kept
        # Only if some are due, since it takes requests: a single clock that is ahead deletes nothing early.
        now = cautious_now(self.ledger.store, "clock/now", clock=self.env.clock)
        return planning.within_grace(held, self.grace, now=now, own=own)

    def remove(
        self,
        slot: Slot,
        segments: Sequence[SegmentMetadata],
        what: str,
        *,
        noted: Collection[UUID] = (),
        kept: Collection[SegmentMetadata] = (),
    ) -> list[SegmentMetadata]:
        """Delete segments, the noted ones first; ``Fenced`` if another tierer has taken over. Returns the deleted ones.

        The ``kept`` ones are only withdrawn: readers that planned with them read their objects for some time.
        """
        stay = {each.segment for each in kept}
        slots = self.log.slots
        in_order = sorted(segments, key=lambda segment: segment.segment.id not in noted)
        for first in range(0, len(in_order), _NOTED):
            some = in_order[first : first + _NOTED]
            # Also copies that did not finish: the event that finishes one may still arrive.
            new = {each.segment.id for each in some if each.state is not SegmentState.DELETE_STARTED}.difference(noted)
            if new and isinstance(slots, TierableSlots):
                slots.retire(slot, [each.segment.id for each in some])
            elif new:
                slot.touch()
            for each in some:
                if each.segment in stay and each.state is not SegmentState.DELETE_STARTED:
                    self.ledger.report("replaced", self.ledger.withdraw(each))
            self.ledger.remove_all([each for each in some if each.segment not in stay], what)
        return [each for each in in_order if each.segment not in stay]
