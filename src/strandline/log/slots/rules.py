"""Rules of slots: how they are created, claimed, moved and invalidated, as pure functions, for every kind of log."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from strandline.errors import CursorExpired, Diverged, Fenced, SlotInvalid
from strandline.model.addresses import BOOTSTRAP_SUFFIX, CONSUMER_SUFFIX, check_plain_name
from strandline.model.arguments import text, whole
from strandline.model.cursor import SECOND, Bounds
from strandline.model.retention import TIER_SLOT, Invalidation, InvalidReason, SlotLimits, SlotState
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
            f"Offset {position} is no longer retained (the log begins at {first}): begin there, or bootstrap."
        )
    if position > bounds.next:
        raise Diverged(f"Offset {position} is past the end of the log ({bounds.next}): name one up to that.")
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
        raise _held_since(state, epoch)
    _check_listed(state)
    check_valid(state)


def _held_since(state: SlotState, epoch: int) -> Fenced:
    held = f"Slot {state.name!r} is held by {state.holder!r} (epoch {state.epoch}) since"
    return Fenced(f"{held}; this holder had epoch {epoch} and must stop.")


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
            f"Slot {state.name!r} was invalidated ({state.invalid.reason}) and pins nothing. Records that it needs may "
            "be deleted: bootstrap its consumer again, and reset the slot to the consumer's new position."
        )


def _check_listed(state: SlotState) -> None:
    if state.dropped:
        raise SlotInvalid(f"Slot {state.name!r} was dropped and pins nothing: create it again.")


def reset(
    state: SlotState, before: SlotState, position: int, now: int, born: int = 0, *, expires: int | None = None
) -> SlotState:
    """The slot moved, back or ahead, valid again and without a holder; refused if it moved since ``before``.

    The epoch grows: its holder, or another process that was about to move it, is fenced. ``born`` is the mark of its
    pin; ``expires`` is the expiry of a slot that is created again. Until it is claimed, it pins the hot tier if it did.
    """
    if (state.epoch, state.position, state.dropped) != (before.epoch, before.position, before.dropped):
        raise Fenced(f"Slot {state.name!r} was moved by another process while it was being reset.")
    expires = _until(state, now) if expires is None else expires
    return SlotState(state.name, position, None, state.epoch + 1, now, expires=expires, born=born, hot=state.hot)


EPOCHS_PER_TERM: Final = 1 << 24
"""Most claims and resets of one slot in one term: further epochs would overlap those of the next term."""

_LAST_TERM: Final = 1 << 38


def taken_over(state: SlotState, term: int, end: int) -> SlotState:
    """The slot as the primary of a new term begins with it: no claim of an earlier term is valid any more.

    The former primary may have given it to another holder, which this node does not know. The epoch is above all that
    were given in earlier terms; the holder is the last known one. ``end`` is where the log ends now; a slot that is
    moved back there is not compared with the position that its consumer had confirmed.
    """
    epoch = max(state.epoch + 1, min(term, _LAST_TERM) * EPOCHS_PER_TERM)
    born = state.born if state.position <= end else 0
    return replace(put_at(state, min(state.position, end)), epoch=epoch, suspected=None, born=born)


def is_outdated(state: SlotState, known: SlotState) -> bool:
    """Whether ``state`` is an older one than ``known`` of the same slot, which was neither created nor reset between.

    Until then a position only moves up: its consumer has confirmed everything below the higher one.
    """
    return 0 < state.born == known.born and state.position < known.position


def resumed(state: SlotState, holder: str, now: int, *, former: int, known: int | None) -> SlotState:
    """The slot of a holder that continues after a failover with its claim of an earlier term.

    ``former`` is the epoch of that claim, ``known`` the highest known epoch of such a claim, or None. Of two claims the
    later one counts, whenever it is presented. ``Fenced`` for an earlier one.
    """
    is_last = state.holder == holder if known is None or former == known else former > known
    if not is_last or former >= state.epoch:
        raise _held_since(state, former)
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
    """Whether a hold, or an unclaimed slot, has outlasted its time since a trimmer first saw it in this state.

    The reader's own time stamp is of another clock, and not used; the duration is measured by the trimmer's clock.
    """
    if state.expires is None or state.suspected is None:
        return False
    return now - state.suspected >= max(0, state.expires - state.last_seen)


def reason_to_invalidate(
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
    """Whether a slot's holder might be gone, so that a trimmer must note when it began to watch the slot.

    Its last heartbeat is older than half the limit, or in the future, by a wrong clock. A hold is always watched:
    its reader may be gone at any time, and its time counts from when a trimmer first saw it.
    """
    if not state.pins or (state.suspected is not None and state.suspected <= now):
        return False
    if state.expires is not None:
        return True
    silent = (now - state.last_seen) * 2 > limits.idle_seconds * SECOND
    return limits.idle_seconds > 0 and (silent or state.last_seen > now + TOLERANCE)


def is_idle(state: SlotState, limits: SlotLimits, now: int) -> bool:
    """Whether a slot's holder was silent for longer than the limit.

    The clocks of holder and trimmer may differ by any amount. So comparing them does not suffice: trimmers must
    also have seen the slot unchanged for half the limit; a live holder sends a heartbeat each third of it. A slot
    that they saw unchanged for the whole limit is idle, whatever its holder's clock said.
    """
    if not limits.idle_seconds or state.suspected is None:
        return False
    limit, watched = limits.idle_seconds * SECOND, now - state.suspected
    return watched > limit or (now - state.last_seen > limit and watched * 2 > limit)


def suspect(state: SlotState, judged: SlotState, now: int) -> SlotState:
    """The slot with the time at which a trimmer began to watch it, if it is unchanged since it was judged."""
    return replace(state, suspected=now) if state == judged else state


def invalidate(state: SlotState, judged: SlotState, reason: InvalidReason, now: int) -> SlotState:
    """The slot without its pin, if it is unchanged since it was judged."""
    return replace(state, invalid=Invalidation(reason, now)) if state == judged else state
