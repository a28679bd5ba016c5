"""Rules of resuming, as pure functions: where a consumer starts, and whether it can continue or has to bootstrap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias
from uuid import UUID

from strandline.errors import CursorExpired, Diverged, InvalidInput
from strandline.model.cursor import Bounds, Cursor, Start, microseconds
from strandline.model.retention import SlotState


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
            f"The cursor is at {cursor.next}, past the log's end at {bounds.next}: the log was restored or replaced, "
            "or has never had that offset."
        )
    if cursor.next < bounds.first:
        raise CursorExpired(
            f"Offset {cursor.next} was trimmed, and the log begins at {bounds.first}: begin there, or "
            "bootstrap the consumer again; a table that was there has to be built again."
        )


class Cause(StrEnum):
    """Why a consumer has to rebuild its state: the reasons for which a slot is invalidated, and one more."""

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


def plan_resume(slot: SlotState | None, since: Cursor | None, log: Cursor, bounds: Bounds) -> ResumeMode:
    """How the consumer with this slot, which has applied everything below ``since``, resumes.

    At its own position, never at the slot's: that may be ahead of the consumer's stored state, or behind it. An
    invalid slot pins nothing, so that even a retained position may be trimmed at any moment. A consumer
    without a position is new, whatever its slot says. ``Diverged`` for a cursor that was never in this log; ``log`` is
    any cursor of it.
    """
    if slot is not None and slot.invalid is not None:
        return FullRebootstrap(Cause(slot.invalid.reason))
    if since is None:
        return FullRebootstrap(Cause.NEW)
    if since.log_id == log.log_id and since.next < bounds.first:
        return FullRebootstrap(Cause.WAL_REMOVED)
    check_cursor(since, log, bounds)
    return PartialResync(since)
