"""Rules of slots, retention and resume: pure functions over values, the same for every kind of log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Final, TypeAlias
from uuid import UUID

from strandline.errors import CursorExpired, Diverged, Fenced, InvalidInput, SlotInvalid
from strandline.model.addresses import BOOTSTRAP_SUFFIX, CONSUMER_SUFFIX, check_plain_name
from strandline.model.arguments import text, whole
from strandline.model.cursor import SECOND, Bounds, Cursor, Start, microseconds
from strandline.model.head import Pin
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


def check_name(name: str) -> str:
    """The name, if a slot may be called so; a suffix that a node adds does not count."""
    check_plain_name(name.removesuffix(BOOTSTRAP_SUFFIX).removesuffix(CONSUMER_SUFFIX), "slot")
    return name


def check_position(position: int, bounds: Bounds, retained_from: int | None = None) -> int:
    """The position; an error if a new or moved slot cannot be there. ``retained_from``: start of the cold tier."""
    whole().check(position, "A slot's position")
    first = bounds.first if retained_from is None else min(bounds.first, retained_from)
    if position < first:
        raise CursorExpired(
            f"Offset {position} is no longer retained (the log begins at {first}): start there, or bootstrap."
        )
    if position > bounds.next:
        raise Diverged(f"Offset {position} is past the end of the log ({bounds.next}).")
    return position


def claim(state: SlotState, holder: str, now: int, *, hot: bool = False) -> SlotState:
    """The slot of this holder: idempotent for the same holder, one epoch higher for a new one. It expires no more.

    ``hot``: this holder cannot read the cold tier.
    """
    text(1).check(holder, "A slot's holder, unique to one running consumer,")
    _check_listed(state)
    if state.holder == holder:
        return state if state.hot is hot else replace(state, hot=hot)
    return replace(_alive_at(state, now), holder=holder, epoch=state.epoch + 1, hot=hot, expires=None)


def advance(
    state: SlotState, *, holder: str, epoch: int, to: int, now: int, fingerprint: int | None = None
) -> SlotState:
    """The slot moved up; never down, never by a fenced holder, never when invalid.

    Epochs only grow, but in a log that was restored from a copy they continue from the copy: so the holder is compared,
    too.

    ``fingerprint`` is that of the batch with the record before ``to``; None if unknown.
    """
    check_held(state, holder=holder, epoch=epoch)
    if to < state.position or (to == state.position and fingerprint in (None, state.fingerprint)):
        return state
    return replace(_alive_at(state, now), position=to, fingerprint=fingerprint)


def check_held(state: SlotState, *, holder: str | None, epoch: int) -> None:
    """Refuse a holder that is fenced, or whose slot is dropped or invalid."""
    if (state.epoch, state.holder) != (epoch, holder):
        raise Fenced(
            f"Slot {state.name!r} is held by {state.holder!r} (epoch {state.epoch}) since; this holder had epoch "
            f"{epoch} and must stop."
        )
    _check_listed(state)
    check_valid(state)


def seen(state: SlotState, *, epoch: int, now: int) -> SlotState:
    """The slot after a heartbeat of its holder; a fenced holder changes nothing.

    An unclaimed slot has no holder: only its epoch is compared.
    """
    check_held(state, holder=state.holder, epoch=epoch)
    return _alive_at(state, now)


def _alive_at(state: SlotState, now: int) -> SlotState:
    """The slot after an action of its holder now, by its own clock; an earlier time ahead of it is forgotten."""
    return replace(state, last_seen=now, suspected=None, expires=_until(state, now))


def _until(state: SlotState, now: int) -> int | None:
    """When an expiring slot expires, if its time begins now."""
    return None if state.expires is None else now + max(0, state.expires - state.last_seen)


def check_valid(state: SlotState) -> None:
    """Refuse a slot that was invalidated."""
    if state.invalid is not None:
        raise SlotInvalid(
            f"Slot {state.name!r} was invalidated ({state.invalid.reason}) and pins nothing: records that it needs may "
            "be deleted: bootstrap its consumer again, and reset the slot to the consumer's new position."
        )


def _check_listed(state: SlotState) -> None:
    if state.dropped:
        raise SlotInvalid(f"Slot {state.name!r} was dropped and pins nothing: create it again.")


def reset(
    state: SlotState, before: SlotState, position: int, now: int, born: int = 0, *, expires: int | None = None
) -> SlotState:
    """The slot moved, back or ahead, valid again and without a holder; refused if it moved since ``before``.

    The epoch grows: its holder, or another process that was about to move it, is fenced. ``born`` marks the pin behind
    it; ``expires`` is the expiry of a slot that is created again. Until it is claimed, it pins the hot tier if it did.
    """
    if (state.epoch, state.position, state.dropped) != (before.epoch, before.position, before.dropped):
        raise Fenced(f"Slot {state.name!r} was moved by another process while it was being reset.")
    expires = _until(state, now) if expires is None else expires
    return SlotState(state.name, position, None, state.epoch + 1, now, expires=expires, born=born, hot=state.hot)


EPOCHS_PER_TERM: Final = 1 << 24
"""Claims and resets of one slot in one term; more cannot be told from those of the next term."""

_LAST_TERM: Final = 1 << 38


def taken_over(state: SlotState, term: int, end: int) -> SlotState:
    """The slot as the primary of a new term begins with it: no claim of an earlier term is valid any more.

    The former primary may have given it to another holder, which this node never heard of. The epoch is above all that
    were given in earlier terms; the holder is the last known one. ``end`` is where the log ends now.
    """
    epoch = max(state.epoch + 1, min(term, _LAST_TERM) * EPOCHS_PER_TERM)
    return replace(put_at(state, min(state.position, end)), epoch=epoch, suspected=None)


def resumed(state: SlotState, holder: str, now: int, *, former: int, known: int | None) -> SlotState:
    """The slot of a holder that goes on after a failover with its claim of an earlier term.

    ``former`` is the epoch of that claim, ``known`` the highest such epoch that is known of, None for unknown. Of two
    claims the later one counts, whenever it is presented. ``Fenced`` for an earlier one.
    """
    is_last = state.holder == holder if known is None or former == known else former > known
    if not is_last or former >= state.epoch:
        raise Fenced(
            f"Slot {state.name!r} is held by {state.holder!r} (epoch {state.epoch}) since; this holder had epoch "
            f"{former} and must stop."
        )
    _check_listed(state)
    check_valid(state)
    return replace(_alive_at(state, now), holder=holder, epoch=state.epoch + 1, expires=None)


def put_at(state: SlotState, position: int) -> SlotState:
    """The slot at a position that its holder did not choose: without a fingerprint."""
    return state if position == state.position else replace(state, position=position, fingerprint=None)


def drop(state: SlotState, epoch: int) -> SlotState:
    """The slot as dropped; unchanged if its name was used again since."""
    return replace(state, dropped=True) if state.epoch == epoch else state


def renew(state: SlotState, *, position: int, expires: int, now: int) -> SlotState:
    """The hold with a later expiry, and perhaps a higher position; ``SlotInvalid`` once it was released."""
    _check_listed(state)
    check_valid(state)
    return replace(put_at(_alive_at(state, now), max(state.position, position)), expires=expires)


def has_expired(state: SlotState, now: int) -> bool:
    """Whether a hold, or an unclaimed slot, has outlasted its time since a collector first saw it in this state.

    The reader's own time stamp is of another clock, and not used; the duration is measured by the collector's clock.
    """
    if state.expires is None or state.suspected is None:
        return False
    return now - state.suspected >= max(0, state.expires - state.last_seen)


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


@dataclass(frozen=True, slots=True)
class Copied:
    """What a log must know of its cold tier before a trim, besides the tierer's slot.

    ``attached()``: whether the log has a cold tier that was not given up. ``fingerprint_at(offset)``: the
    fingerprint of the log's own cursor at an offset, None if the record before it is not retained.
    """

    bounds: Bounds
    attached: Callable[[], bool]
    fingerprint_at: Callable[[int], int | None]


def proven(states: Iterable[SlotState], copied: Copied) -> list[SlotState]:
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


def _is_of(slot: SlotState, copied: Copied) -> bool:
    """Whether a slot's position is in the log, and in the same history as when the slot moved there."""
    if slot.position > copied.bounds.next:
        return False
    own = copied.fingerprint_at(slot.position)
    return slot.fingerprint is None or own is None or own == slot.fingerprint


def outrun(states: Iterable[SlotState], start: int) -> list[SlotState]:
    """The slots that lose records if a log is trimmed up to ``start``, whatever they pin.

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


def position_of(start: Start, log_id: UUID, bounds: Bounds, listed_since: Callable[[int], int | None]) -> int:
    """The offset at which a new consumer with this ``start`` begins.

    ``listed_since`` returns the first offset that was listed at a time (microseconds) or later.
    """
    match start:
        case "beginning":
            return 0  # even if it was trimmed: then it is refused
        case "retained":
            return bounds.first
        case "now":
            return bounds.next
        case datetime():
            if start.tzinfo is None:
                raise InvalidInput(f"The time {start} has no time zone: add one, such as datetime.now(UTC).")
            found = listed_since(microseconds(start))
            return bounds.next if found is None else max(bounds.first, found)
        case Cursor():
            if start.log_id != log_id:
                raise Diverged(f"{start} belongs to another log than {log_id}: the consumer has to bootstrap again.")
            return start.next
        case int() if start is not True and start >= 0:
            return start
    raise InvalidInput(
        f"A new consumer starts at 'beginning', 'retained', 'now', an offset, a time or a cursor, not at {start!r}."
    )


def check_cursor(cursor: Cursor, log: Cursor, bounds: Bounds) -> None:
    """Refuse a cursor that this log cannot serve: of another log, past its end, or below what it retains."""
    if cursor.log_id != log.log_id:
        raise Diverged(
            f"The cursor belongs to log {cursor.log_id}, not to {log.log_id}: the consumer has to bootstrap again."
        )
    if cursor.next > bounds.next:
        raise Diverged(
            f"The cursor is at {cursor.next}, past the log's end at {bounds.next}: the log was restored or replaced."
        )
    if cursor.next < bounds.first:
        raise CursorExpired(
            f"The cursor is at {cursor.next} and the log begins at {bounds.first}: bootstrap the consumer again."
        )


class Cause(StrEnum):
    """Why a consumer has to rebuild its state."""

    WAL_REMOVED = "wal-removed"
    HORIZON = "horizon"
    IDLE_TIMEOUT = "idle-timeout"
    NEW = "new"
    """It has no position of its own."""


@dataclass(frozen=True, slots=True)
class PartialResync:
    """The consumer resumes at its own position, which is still retained."""

    resume: Cursor


@dataclass(frozen=True, slots=True)
class FullRebootstrap:
    """The consumer needs a snapshot first, and its slot a reset to the snapshot's cursor."""

    cause: Cause


ResumeMode: TypeAlias = PartialResync | FullRebootstrap

_CAUSES = {
    InvalidReason.WAL_REMOVED: Cause.WAL_REMOVED,
    InvalidReason.HORIZON: Cause.HORIZON,
    InvalidReason.IDLE_TIMEOUT: Cause.IDLE_TIMEOUT,
}


def plan_resume(slot: SlotState | None, since: Cursor | None, log: Cursor, bounds: Bounds) -> ResumeMode:
    """How the consumer with this slot, which has applied everything below ``since``, resumes.

    At its own position, never at the slot's: that may be ahead of the consumer's stored state, or behind it. An
    invalid slot pins nothing, so that even a retained position may be trimmed at any moment. A consumer
    without a position is new, whatever its slot says. ``Diverged`` for a cursor that was never in this log; ``log`` is
    any cursor of it.
    """
    if slot is not None and slot.invalid is not None:
        return FullRebootstrap(_CAUSES[slot.invalid.reason])
    if since is None:
        return FullRebootstrap(Cause.NEW)
    if since.log_id == log.log_id and since.next < bounds.first:
        return FullRebootstrap(Cause.WAL_REMOVED)
    check_cursor(since, log, bounds)
    return PartialResync(since)


def judge(
    state: SlotState, *, first: int, behind: int, limits: SlotLimits, is_idle: bool = False
) -> InvalidReason | None:
    """Why a slot must be invalidated, or None: its position is trimmed, it is too far behind, or idle for too long.

    ``first`` is the first retained offset and ``behind`` the bytes listed from the slot's position on. Each limit is
    broken only strictly beyond it, and the reasons are checked in this order. A tierer's slot has no limits.
    """
    if not state.pins:
        return None
    if state.position < first:
        return InvalidReason.WAL_REMOVED
    if state.name == TIER_SLOT:
        return None  # else the hot tier would lose records that are in no segment
    if limits.lag_bytes and behind > limits.lag_bytes:
        return InvalidReason.HORIZON
    if limits.idle_seconds and is_idle:
        return InvalidReason.IDLE_TIMEOUT
    return None


def is_suspect(state: SlotState, limits: SlotLimits, now: int) -> bool:
    """Whether a slot's holder might be gone, so that a collector must note when it began to watch the slot.

    Its last heartbeat is older than half the limit, or in the future, by a wrong clock. A hold is always watched:
    its reader may be gone at any time, and its time counts from when a collector first saw it.
    """
    if not state.pins or (state.suspected is not None and state.suspected <= now):
        return False
    if state.expires is not None:
        return True
    silent = (now - state.last_seen) * 2 > limits.idle_seconds * SECOND
    return limits.idle_seconds > 0 and (silent or state.last_seen > now + TOLERANCE)


def is_idle(state: SlotState, limits: SlotLimits, now: int) -> bool:
    """Whether a slot's holder was silent for longer than the limit.

    The clocks of holder and collector may differ by any amount. So comparing them does not suffice: collectors must
    also have seen the slot unchanged for half the limit; a live holder sends a heartbeat each third of it. A slot
    that they saw unchanged for the whole limit is idle, whatever its holder's clock said.
    """
    if not limits.idle_seconds or state.suspected is None:
        return False
    limit, watched = limits.idle_seconds * SECOND, now - state.suspected
    return watched > limit or (now - state.last_seen > limit and watched * 2 > limit)


def suspect(state: SlotState, judged: SlotState, now: int) -> SlotState:
    """The slot with the time at which a collector began to watch it, if it is unchanged since it was judged."""
    return replace(state, suspected=now) if state == judged else state


def invalidate(state: SlotState, judged: SlotState, reason: InvalidReason, now: int) -> SlotState:
    """The slot without its pin, if it is unchanged since it was judged."""
    return replace(state, invalid=Invalidation(reason, now)) if state == judged else state


def retention_start(
    retention: Retention,
    bounds: Bounds,
    floor: int | None,
    *,
    written_since: Callable[[int], int | None],
    newest: Callable[[int], int],
    now: int,
) -> int:
    """The first offset that a policy retains in a log with this slots' floor; never above the end.

    ``written_since`` returns the first offset that was written at a time (microseconds) or later, ``newest`` the first
    offset of the newest so many bytes.
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
    """The trim target: the policy's, but never above the floor of the valid slots."""
    return policy if floor is None else min(policy, floor)
