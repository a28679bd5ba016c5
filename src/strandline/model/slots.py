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

    ``position`` is the next offset its consumer needs; ``epoch`` grows with each new holder and each reset, and is 0
    while nobody has claimed the slot. A *hold* is a slot that ``expires``, for readers that store nothing. A dropped
    slot pins nothing and is no longer listed; its cell stays, so that the epochs of its name go on growing.
    ``born`` is the mark of the pin by which the slot got to its place: it tells a slot from an older one of its name.
    """

    name: str
    position: int
    holder: str | None
    epoch: int
    last_seen: int
    invalid: Invalidation | None = None
    expires: int | None = None
    dropped: bool = False
    born: int = 0

    @property
    def pins(self) -> bool:
        """Whether nothing from its position on may be deleted."""
        return self.invalid is None and not self.dropped
