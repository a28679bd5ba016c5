"""Slot lag: records, bytes and time behind, retained bytes, and distance to the slot limits."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from strandline.log.object.head.index import Chunks, bytes_from, entries_from, entries_listed_since, start_of_newest
from strandline.log.slots.rules import put_at
from strandline.log.slots.trimming import consumed_floor, pending_positions, retention_start, trim_floor, trim_to
from strandline.log.slots.trimming import floor as lowest
from strandline.model.cursor import SECOND, Bounds
from strandline.model.head import Head
from strandline.model.retention import Retention, SlotLimits, SlotState


@dataclass(frozen=True, slots=True)
class SlotLag:
    """Lag of one slot.

    ``seconds_behind`` is the age of the oldest batch that it has not passed. ``retained`` are the bytes that the next
    trim would delete if this slot alone were up to date. ``bytes_left`` and ``seconds_left`` are the distance to
    its limits (None: no such limit, or it pins nothing; below zero: the next trim invalidates it), and
    ``expires_in`` the remaining time of a hold. ``pending`` is the position of an unfinished move.
    """

    state: SlotState
    records_behind: int
    bytes_behind: int
    seconds_behind: float
    seconds_since_seen: float
    pins_floor: bool
    retained: int
    bytes_left: int | None
    seconds_left: float | None
    expires_in: float | None
    pending: int | None


def slot_lags(
    head: Head, states: Sequence[SlotState], chunks: Chunks, *, retention: Retention, limits: SlotLimits, now: int
) -> list[SlotLag]:
    """The lag of each slot at ``now`` (microseconds); reads at most one chunk of each level per slot."""
    floor = lowest(states, pending_positions(head.slots.values()))
    kept = bytes_from(head, trim_end(head, states, chunks, retention=retention, now=now), chunks)

    def lag(state: SlotState) -> SlotLag:
        position, pin = max(state.position, head.floor), head.slots.get(state.name)
        behind = bytes_from(head, position, chunks)
        oldest = next(entries_from(head, position, chunks), None)
        idle = _seconds(now - state.last_seen)
        needs = lowest([state], pending_positions([pin]))
        pins_floor = needs is not None and needs == floor
        without = kept
        if pins_floor:
            ahead = frozenset({state.name})
            end = trim_end(head, states, chunks, retention=retention, now=now, up_to_date=ahead)
            without = bytes_from(head, end, chunks)
        return SlotLag(
            state=state,
            records_behind=max(0, head.next_offset - state.position),
            bytes_behind=behind,
            seconds_behind=0.0 if oldest is None else max(0.0, _seconds(now - oldest.listed)),
            seconds_since_seen=max(0.0, idle),
            pins_floor=pins_floor,
            retained=max(0, kept - without),
            bytes_left=limits.lag_bytes - behind if limits.lag_bytes and state.pins else None,
            seconds_left=limits.idle_seconds - idle if limits.idle_seconds and state.pins else None,
            expires_in=None if state.expires is None else _seconds(state.expires - now),
            pending=None if pin is None else pin.position,
        )

    return [lag(state) for state in states]


def trim_end(
    head: Head,
    states: Sequence[SlotState],
    chunks: Chunks,
    *,
    retention: Retention,
    now: int,
    up_to_date: AbstractSet[str] = frozenset(),
) -> int:
    """The offset up to which the next trim may go, if the slots of these names were up to date.

    The batch that holds the offset stays; slots that will break a limit by then count as they are now.
    """
    moved = [put_at(state, head.next_offset) if state.name in up_to_date else state for state in states]
    pins = [pin for name, pin in head.slots.items() if name not in up_to_date]
    floor = trim_floor(moved, pending_positions(pins))
    return max(head.floor, trim_to(policy_start(head, retention, consumed_floor(moved), chunks, now), floor))


def policy_start(head: Head, retention: Retention, consumed: int | None, chunks: Chunks, now: int) -> int:
    """The first offset that a policy retains, given the consumers' floor; a batch that begins below may hold it."""

    def listed_since(time: int) -> int | None:
        entry = next(entries_listed_since(head, time, chunks), None)
        return None if entry is None else entry.first

    def newest(size: int) -> int:
        return start_of_newest(head, size, chunks)

    bounds = Bounds(head.floor, head.next_offset)
    return retention_start(retention, bounds, consumed, written_since=listed_since, newest=newest, now=now)


def _seconds(microseconds: int) -> float:
    return microseconds / SECOND
