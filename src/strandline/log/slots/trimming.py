"""Rules of trimming: what slots pin, and what a retention policy keeps, as pure functions, for every kind of log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from strandline.log.slots.rules import put_at
from strandline.model.cursor import SECOND, Bounds
from strandline.model.head import Pin
from strandline.model.retention import TIER_SLOT, Consumed, Forever, MaxAge, MaxBytes, Retention, SlotState


def floor(states: Iterable[SlotState], pending: Iterable[int] = ()) -> int | None:
    """The lowest position of the valid slots and of those being created; None if nothing is pinned."""
    pins = [state.position for state in states if state.pins]
    return min([*pins, *pending], default=None)


def trim_floor(states: Iterable[SlotState], pending: Iterable[int] = ()) -> int | None:
    """The offset up to which a log may be trimmed: its floor; with a cold tier, the tierer's position.

    Consumers' slots pin the log as a whole, in either tier. The hot tier is pinned only by the tierer's slot, and by
    holders that cannot read the cold tier.
    """
    known = list(states)
    if any(state.name == TIER_SLOT and state.pins for state in known):
        known = [state for state in known if state.name == TIER_SLOT or state.hot]
    return floor(known, pending)


def consumed_floor(states: Iterable[SlotState]) -> int | None:
    """The offset below which every consumer has passed, as :func:`trim_floor` has it; None without a consumer.

    A hold, and the slot of a newcomer that has stored nothing yet, pin records and consume none: without this
    difference a reader that is gone in a minute would be the only consumer, and all below it would be deleted.
    """
    return trim_floor(state for state in states if state.expires is None)


@dataclass(frozen=True, slots=True)
class ColdTierProof:
    """Proof that the cold tier has what a trim deletes, besides the tierer's slot.

    ``attached()``: whether the log has a cold tier that was not given up. ``fingerprint_at(offset)``: the
    fingerprint of the log's own cursor at an offset, None if the record before it is not retained.
    """

    bounds: Bounds
    attached: Callable[[], bool]
    fingerprint_at: Callable[[int], int | None]


def proven(states: Iterable[SlotState], copied: ColdTierProof) -> list[SlotState]:
    """The slots, with the tierer's moved back to the log's beginning unless it proves what was copied of this history.

    A log that was restored from a copy may lack the slot although it has a cold tier, or have one from its former
    history. Then nothing proves which of its own records are in segments, and it must not be trimmed
    before a tierer has compared the two. A slot that was dropped or invalidated stays as it is: that was an operator's
    decision.
    """
    known = list(states)
    tier = next((state for state in known if state.name == TIER_SLOT), None)
    first = copied.bounds.first
    if tier is None:
        return [*known, SlotState(TIER_SLOT, first, None, 0, 0)] if copied.attached() else known
    if not tier.pins or tier.position <= first or _is_of(tier, copied):
        return known
    return [put_at(state, first) if state is tier else state for state in known]


def _is_of(slot: SlotState, copied: ColdTierProof) -> bool:
    """Whether a slot's position is in the log, and in the same history as when the slot moved there."""
    if slot.position > copied.bounds.next:
        return False
    own = copied.fingerprint_at(slot.position)
    return slot.fingerprint is None or own is None or own == slot.fingerprint


def outrun(states: Iterable[SlotState], start: int) -> list[SlotState]:
    """The slots that lose records if a log is trimmed up to ``start`` regardless of pins.

    Records in the cold tier are lost only for holders that cannot read it.
    """
    known = [state for state in states if state.pins]
    is_copied = any(state.name == TIER_SLOT and state.position >= start for state in known)
    return [state for state in known if state.position < start and (state.hot or not is_copied)]


def retained_first(states: Iterable[SlotState], first: int) -> int:
    """The lowest valid position of a slot: the log's first offset, or 0 if the records below are in a cold tier."""
    return 0 if any(state.name == TIER_SLOT and not state.dropped for state in states) else first


def pending_positions(pins: Iterable[Pin | None]) -> list[int]:
    """The positions of slots that are being created or moved, which count as pinned."""
    return [pin.position for pin in pins if pin is not None]


def retention_start(
    retention: Retention,
    bounds: Bounds,
    consumed: int | None,
    *,
    written_since: Callable[[int], int | None],
    newest: Callable[[int], int],
    now: int,
) -> int:
    """The first offset that a policy retains in a log; never above the end.

    ``consumed`` is the floor of its consumers (:func:`consumed_floor`). ``written_since`` returns the first offset that
    was written at a time (microseconds) or later, ``newest`` the first offset of the newest bytes of a given number.
    """
    match retention:
        case Forever():
            return bounds.first
        case Consumed():
            return bounds.first if consumed is None else consumed
        case MaxAge(seconds):
            kept = written_since(now - seconds * SECOND)
            return bounds.next if kept is None else kept
        case MaxBytes(size):
            return newest(size)


def trim_to(policy: int, floor: int | None) -> int:
    """The trim target: the policy's, but never above the floor of the valid slots."""
    return policy if floor is None else min(policy, floor)
