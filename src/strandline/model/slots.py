"""Slots: a consumer's durable claim on a log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class InvalidReason(StrEnum):
    """Why a slot stopped pinning."""

    WAL_REMOVED = "wal-removed"
    HORIZON = "horizon"
    IDLE_TIMEOUT = "idle-timeout"


@dataclass(frozen=True, slots=True)
class Invalidation:
    """A slot's end as a pin: why, and when (microseconds)."""

    reason: InvalidReason
    at: int


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot's cell holds.

    ``position`` is the next offset its consumer needs; ``epoch`` grows with each new holder, and is 0 while nobody
    has claimed the slot.
    """

    name: str
    position: int
    holder: str | None
    epoch: int
    last_seen: int
    invalid: Invalidation | None = None
