"""State of a log's cold tier: which offsets each tier has, the tierer's slot, and what is in no segment yet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from strandline.errors import StrandlineError
from strandline.log.object.head.index import bytes_from
from strandline.log.object.log import ObjectLog
from strandline.model.cursor import Bounds
from strandline.model.retention import TIER_SLOT, SlotState
from strandline.model.segments import ColdTier, SegmentState
from strandline.storage.env import SYSTEM, Env
from strandline.tier.opening import cold_tier, follow_events, log_address
from strandline.tier.verify import HotLog, TierView, look_at


class Untiered(NamedTuple):
    """Records of the hot tier that are in no segment yet."""

    records: int
    size: int
    """Their bytes, as stored."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A log and its cold tier at one moment. Without ``seen``, ``why`` says why the segments are unknown."""

    url: str
    cold: ColdTier
    hot: Bounds
    slot: SlotState | None
    """The tierer's slot; None if no tierer has run."""
    seen: TierView | None
    why: str | None
    left: Untiered
    now: int
    """Microseconds."""


def tier_status(log: HotLog, *, env: Env = SYSTEM) -> TierStatus:
    """The current state of the log's cold tier; ``NotFound`` if it has none."""
    cold = cold_tier(log)
    seen, why = None, None
    try:
        with follow_events(cold) as manager:
            seen = look_at(log, cold, manager)
    except StrandlineError as error:
        why = str(error)
    slot, hot = _tierers_slot(log), log.bounds()
    position = _untiered_from(slot, hot) if seen is None or seen.tiered is None else seen.tiered
    return TierStatus(log_address(log), cold, hot, slot, seen, why, _from(log, position), env.clock.now())


def untiered(log: HotLog) -> Untiered:
    """The part of a log that is in no segment yet, by the tierer's slot."""
    return _from(log, _untiered_from(_tierers_slot(log), log.bounds()))


def segment_states(seen: TierView) -> Counter[SegmentState]:
    """Number of segments in each state."""
    return Counter(segment.state for segment in seen.known.segments)


def superseded(seen: TierView) -> int:
    """Number of finished segments that no lookup finds any more: the next round removes them."""
    return segment_states(seen)[SegmentState.COPY_FINISHED] - len(seen.known.answering)


def _tierers_slot(log: HotLog) -> SlotState | None:
    return next((state for state in log.slots.list() if state.name == TIER_SLOT), None)


def _untiered_from(slot: SlotState | None, hot: Bounds) -> int:
    return hot.first if slot is None else slot.position


def _from(log: HotLog, position: int) -> Untiered:
    end = log.bounds().next
    if position >= end:
        return Untiered(0, 0)
    if not isinstance(log, ObjectLog):
        return Untiered(end - position, log.bytes_behind(position))
    head = log.head()
    return Untiered(end - position, bytes_from(head, max(position, head.floor), log.chunks))
