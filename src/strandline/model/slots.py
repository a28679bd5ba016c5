"""Slots: a consumer's durable claim on a log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

NEWCOMER_SECONDS: Final = 600.0
"""How long the slot of a newcomer pins unless it is claimed or its consumer is seen: then it died before it began."""

TIER_SLOT: Final = "strandline-tier"
"""The slot of a log's tierer: everything below it is in the cold tier too, so that the hot one may forget it."""


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
    while nobody has claimed the slot. A *hold* is a slot that ``expires``, for readers that store nothing; so does that
    of a newcomer that has stored nothing yet, until it is claimed. A dropped
    slot pins nothing and is no longer listed; its cell stays, so that the epochs of its name go on growing.
    A *hot* one is held by a consumer that cannot read the cold tier: it pins the hot one.
    ``born`` is the mark of the pin by which the slot got to its place: it tells a slot from an older one of its name.
    ``suspected`` is when a collector found that its holder might be gone; whatever the holder does takes that away.
    ``fingerprint`` tells which batch held the record before ``position`` when the slot was advanced to it, as that of a
    :class:`~strandline.model.cursor.Cursor` does; None if that is not known.
    Times are microseconds: ``last_seen`` and ``expires`` by the holder's clock, ``suspected`` by a collector's.
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
    hot: bool = False
    suspected: int | None = None
    fingerprint: int | None = None

    @property
    def pins(self) -> bool:
        """Whether nothing from its position on may be deleted."""
        return self.invalid is None and not self.dropped
