"""Slot lag: records, bytes and time behind, retained bytes, and distance to the slot limits; for every kind of log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from strandline.log.slots.rules import put_at
from strandline.log.slots.trimming import consumed_floor, pending_positions, trim_floor, trim_to
from strandline.log.slots.trimming import floor as lowest
from strandline.model.cursor import SECOND, Bounds
from strandline.model.head import Pin
from strandline.model.retention import FOREVER, Retention, SlotLimits, SlotState


@dataclass(frozen=True, slots=True)
class SlotLag:
    """Lag of one slot.

    ``seconds_behind`` is the age of the oldest batch that it has not passed. ``retained`` are the bytes that the next
    trim would delete if this slot alone were up to date; None if the retention policy is not known. ``bytes_left`` and
    ``seconds_left`` are the distance to its limits (None: no such limit, or it pins nothing; below zero: the next trim
    invalidates it), and ``expires_in`` the remaining time of a hold. ``pending`` is the position of an unfinished move.
    """

    state: SlotState
    records_behind: int
    bytes_behind: int
    seconds_behind: float
    seconds_since_seen: float
    pins_floor: bool
    retained: int | None
    bytes_left: int | None
    seconds_left: float | None
    expires_in: float | None
    pending: int | None


class Listing(Protocol):
    """A log's batches at one moment, as far as the lag of slots needs them."""

    @property
    def bounds(self) -> Bounds:
        """The retained offsets."""

    def bytes_from(self, position: int) -> int:
        """Stored bytes of the batches from a position on."""

    def written_at(self, position: int) -> int | None:
        """When the batch with this offset was listed or written, in microseconds; None at the end."""

    def policy_start(self, retention: Retention, consumed: int | None) -> int:
        """The first offset that a policy retains, given the consumers' floor."""


def slot_lags(
    listing: Listing,
    states: Sequence[SlotState],
    *,
    pins: Mapping[str, Pin | None],
    retention: Retention | None,
    limits: SlotLimits,
    now: int,
) -> list[SlotLag]:
    """The lag of each slot at ``now`` (microseconds). ``pins`` are slots that are being created or moved."""
    bounds = listing.bounds
    floor = lowest(states, pending_positions(pins.values()))

    def kept(up_to_date: AbstractSet[str] = frozenset()) -> int:
        if retention is None:
            return 0
        return listing.bytes_from(trim_end(listing, states, pins=pins, retention=retention, up_to_date=up_to_date))

    with_all = kept()

    def lag(state: SlotState) -> SlotLag:
        position, pin = max(state.position, bounds.first), pins.get(state.name)
        behind = listing.bytes_from(position)
        oldest = listing.written_at(position) if position < bounds.next else None
        idle = _seconds(now - state.last_seen)
        needs = lowest([state], pending_positions([pin]))
        pins_floor = needs is not None and needs == floor
        without = kept(frozenset({state.name})) if pins_floor else with_all
        return SlotLag(
            state=state,
            records_behind=max(0, bounds.next - state.position),
            bytes_behind=behind,
            seconds_behind=0.0 if oldest is None else max(0.0, _seconds(now - oldest)),
            seconds_since_seen=max(0.0, idle),
            pins_floor=pins_floor,
            retained=None if retention is None else max(0, with_all - without),
            bytes_left=limits.lag_bytes - behind if limits.lag_bytes and state.pins else None,
            seconds_left=limits.idle_seconds - idle if limits.idle_seconds and state.pins else None,
            expires_in=None if state.expires is None else _seconds(state.expires - now),
            pending=None if pin is None else pin.position,
        )

    return [lag(state) for state in states]


def records_kept(
    listing: Listing,
    lags: Sequence[SlotLag],
    *,
    pins: Mapping[str, Pin | None],
    retention: Retention,
) -> int | None:
    """Records that the next trim would delete if the slots that pin the floor were up to date; None if none ever is."""
    if retention == FOREVER:
        return None
    pinning = frozenset(each.state.name for each in lags if each.pins_floor)
    now_at, then_at = (
        trim_end(listing, [each.state for each in lags], pins=pins, retention=retention, up_to_date=names)
        for names in (frozenset[str](), pinning)
    )
    return then_at - now_at


def trim_end(
    listing: Listing,
    states: Sequence[SlotState],
    *,
    pins: Mapping[str, Pin | None],
    retention: Retention,
    up_to_date: AbstractSet[str] = frozenset(),
) -> int:
    """The offset up to which the next trim may go, if the slots of these names were up to date.

    The batch that holds the offset stays; slots that will break a limit by then count as they are now.
    """
    bounds = listing.bounds
    moved = [put_at(state, bounds.next) if state.name in up_to_date else state for state in states]
    floor = trim_floor(moved, pending_positions(pin for name, pin in pins.items() if name not in up_to_date))
    return max(bounds.first, trim_to(listing.policy_start(retention, consumed_floor(moved)), floor))


def _seconds(microseconds: int) -> float:
    return microseconds / SECOND
