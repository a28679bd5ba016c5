"""Resume decision for a returning consumer: a pure function, the same for every log with slots."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from strandline.log.slots import check_cursor
from strandline.model.cursor import Bounds, Cursor
from strandline.model.retention import InvalidReason, SlotState


class Cause(StrEnum):
    """Why a consumer has to build its state again."""

    WAL_REMOVED = "wal-removed"
    HORIZON = "horizon"
    IDLE_TIMEOUT = "idle-timeout"
    NEW = "new"
    """It has no position of its own."""


@dataclass(frozen=True, slots=True)
class PartialResync:
    """The consumer goes on at its own position, which is still retained."""

    resume: Cursor


@dataclass(frozen=True, slots=True)
class FullRebootstrap:
    """The consumer needs a snapshot first, and its slot a reset to where that stands."""

    cause: Cause


ResumeMode: TypeAlias = PartialResync | FullRebootstrap

_CAUSES = {
    InvalidReason.WAL_REMOVED: Cause.WAL_REMOVED,
    InvalidReason.HORIZON: Cause.HORIZON,
    InvalidReason.IDLE_TIMEOUT: Cause.IDLE_TIMEOUT,
}


def plan_resume(slot: SlotState | None, since: Cursor | None, log: Cursor, bounds: Bounds) -> ResumeMode:
    """How the consumer with this slot, which has applied everything below ``since``, goes on.

    At its own position, never at the slot's: that may be further than what the consumer has stored, or behind it. An
    invalid slot pins nothing, so that even a position which happens to be retained may be gone at any moment. One
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
