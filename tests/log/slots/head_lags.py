"""Slot lag and trim end of an object log, from a head and its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from strandline.log.object.head.head_log import HeadListing
from strandline.log.object.head.index import Chunks
from strandline.log.slots import slot_lag
from strandline.log.slots.slot_lag import SlotLag
from strandline.model.head import Head
from strandline.model.retention import Retention, SlotLimits, SlotState


def slot_lags(
    head: Head, states: Sequence[SlotState], chunks: Chunks, *, retention: Retention, limits: SlotLimits, now: int
) -> list[SlotLag]:
    """The lag of each slot at ``now`` (microseconds)."""
    listing = HeadListing(head, chunks, now)
    return slot_lag.slot_lags(listing, states, pins=head.slots, retention=retention, limits=limits, now=now)


def trim_end(
    head: Head,
    states: Sequence[SlotState],
    chunks: Chunks,
    *,
    retention: Retention,
    now: int,
    up_to_date: AbstractSet[str] = frozenset(),
) -> int:
    """The offset up to which the next trim may go, if the slots of these names were up to date."""
    listing = HeadListing(head, chunks, now)
    return slot_lag.trim_end(listing, states, pins=head.slots, retention=retention, up_to_date=up_to_date)
