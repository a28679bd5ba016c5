"""Deletion of segments by a tierer that may have been replaced: none that its successor relies on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, final
from uuid import UUID

from strandline.log.contract import Log, Slot
from strandline.model.segments import SegmentMetadata, SegmentState
from strandline.tier.copy.ledger import Ledger
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

    def noted(self) -> Collection[UUID]:
        """The segments that this tierer or a former one may be deleting. To be asked after the slot was claimed."""
        slots = self.log.slots
        return slots.retired() if isinstance(slots, TierableSlots) else ()

    def remove(
        self, slot: Slot, segments: Sequence[SegmentMetadata], what: str, *, noted: Collection[UUID] = ()
    ) -> list[SegmentMetadata]:
        """Delete segments, the noted ones first; ``Fenced`` if another tierer has taken over. Returns them."""
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
            self.ledger.remove_all(some, what)
        return in_order
