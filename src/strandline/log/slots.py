"""Slot rules, as pure functions over values: the same for every kind of log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from strandline.model.cursor import Bounds, Cursor
from strandline.model.errors import CursorExpired, Diverged, Fenced, InvalidInput, SlotInvalid
from strandline.model.slots import SlotState

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def check_name(name: str) -> str:
    """The name, if a slot may be called so."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} cannot name a slot: use up to 128 letters, digits, '.', '_' and '-', beginning with a letter or "
            "digit."
        )
    return name


def check_position(position: int, bounds: Bounds) -> int:
    """The position, if a new or rewound slot may stand there."""
    if position < bounds.first:
        raise CursorExpired(
            f"Offset {position} is no longer retained (the log begins at {bounds.first}): start there, or bootstrap."
        )
    if position > bounds.next:
        raise Diverged(f"Offset {position} is past the end of the log ({bounds.next}).")
    return position


def claim(state: SlotState, holder: str, now: int) -> SlotState:
    """The holder's slot: idempotent for the same holder, one epoch higher for a new one."""
    if not holder:
        raise InvalidInput("A slot's holder needs a name that is unique to one running consumer.")
    if state.holder == holder:
        return state
    return replace(state, holder=holder, epoch=state.epoch + 1, last_seen=max(state.last_seen, now))


def advance(state: SlotState, *, epoch: int, to: int, now: int) -> SlotState:
    """The slot moved up; never down, never by a fenced holder, never when invalid."""
    if state.epoch != epoch:
        raise Fenced(
            f"Slot {state.name!r} is held by {state.holder!r} (epoch {state.epoch}) since; this holder had epoch "
            f"{epoch} and must stop."
        )
    if state.invalid is not None:
        raise SlotInvalid(
            f"Slot {state.name!r} was invalidated ({state.invalid.reason}) and pins nothing: bootstrap again."
        )
    if to <= state.position:
        return state
    return replace(state, position=to, last_seen=max(state.last_seen, now))


def floor(states: Iterable[SlotState], pending: Iterable[int] = ()) -> int | None:
    """The lowest position of the valid slots and of those being created; None if nothing is pinned."""
    pins = [state.position for state in states if state.invalid is None]
    return min([*pins, *pending], default=None)


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
