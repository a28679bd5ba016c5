"""Retention rules: pure functions that say which slots break a limit, and how far a log may be trimmed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from strandline.model.cursor import SECOND, Bounds
from strandline.model.retention import (
    TIER_SLOT,
    Consumed,
    Forever,
    Invalidation,
    InvalidReason,
    MaxAge,
    MaxBytes,
    Retention,
    SlotLimits,
    SlotState,
)
from strandline.model.times import TOLERANCE


def judge(
    state: SlotState, *, first: int, behind: int, limits: SlotLimits, is_idle: bool = False
) -> InvalidReason | None:
    """Why a slot may not go on pinning, or None: its position is gone, it is too far behind, or idle for too long.

    ``first`` is the first retained offset and ``behind`` the bytes listed from the slot's position on. Each limit is
    broken only strictly beyond it, and the reasons are looked at in this order. A tierer's slot has no limits.
    """
    if not state.pins:
        return None
    if state.position < first:
        return InvalidReason.WAL_REMOVED
    if state.name == TIER_SLOT:
        return None  # without it the hot tier would forget what is in no segment, and consumers of both need that
    if limits.lag_bytes and behind > limits.lag_bytes:
        return InvalidReason.HORIZON
    if limits.idle_seconds and is_idle:
        return InvalidReason.IDLE_TIMEOUT
    return None


def is_suspect(state: SlotState, limits: SlotLimits, now: int) -> bool:
    """Whether a slot's holder might be gone, so that a collector has to note when it began to watch the slot.

    It was not seen for half its limit, or was seen in the future, by a clock that was wrong. A hold is always watched:
    its reader may be gone at any time, and its time is counted from when collectors saw it first.
    """
    if not state.pins or (state.suspected is not None and state.suspected <= now):
        return False
    if state.expires is not None:
        return True
    silent = (now - state.last_seen) * 2 > limits.idle_seconds * SECOND
    return limits.idle_seconds > 0 and (silent or state.last_seen > now + TOLERANCE)


def is_idle(state: SlotState, limits: SlotLimits, now: int) -> bool:
    """Whether a slot's holder was silent for longer than the limit.

    A holder's clock and a collector's may differ by any amount. So what the two say does not suffice: the slot must
    also have stood still before collectors' eyes, for half the limit. A live holder is seen each third of it. A slot
    that they saw stand still for the whole limit is idle, whatever its holder's clock said.
    """
    if not limits.idle_seconds or state.suspected is None:
        return False
    limit, watched = limits.idle_seconds * SECOND, now - state.suspected
    return watched > limit or (now - state.last_seen > limit and watched * 2 > limit)


def suspect(state: SlotState, judged: SlotState, now: int) -> SlotState:
    """The slot with a note of when a collector began to watch it, if it is still as it was judged."""
    return replace(state, suspected=now) if state == judged else state


def invalidate(state: SlotState, judged: SlotState, reason: InvalidReason, now: int) -> SlotState:
    """The slot without its pin, if it is still as it was judged."""
    return replace(state, invalid=Invalidation(reason, now)) if state == judged else state


def kept_from(
    retention: Retention,
    bounds: Bounds,
    floor: int | None,
    *,
    written_since: Callable[[int], int | None],
    newest: Callable[[int], int],
    now: int,
) -> int:
    """From where on a policy keeps a log whose slots' floor is this; never above the end.

    ``written_since`` gives the first offset that was written at a time (microseconds) or later, ``newest`` the one from
    which on there are at most so many bytes.
    """
    match retention:
        case Forever():
            return bounds.first
        case Consumed():
            return bounds.first if floor is None else floor
        case MaxAge(seconds):
            kept = written_since(now - seconds * SECOND)
            return bounds.next if kept is None else kept
        case MaxBytes(size):
            return newest(size)


def trim_to(policy: int, floor: int | None) -> int:
    """How far to trim: as far as the policy asks for, and never above the floor of the valid slots."""
    return policy if floor is None else min(policy, floor)
