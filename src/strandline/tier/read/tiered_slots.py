"""Slots of a log over both tiers: a slot may be at an offset that only the cold tier has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from uuid import UUID

from strandline.errors import CursorExpired
from strandline.log.contract import Log, Slot, Slots
from strandline.model.arguments import checked
from strandline.model.retention import SlotState
from strandline.tier.attachment import ColdCell

P = TypeVar("P")


class HotSlots(Slots, Protocol):
    """The slots of a log that can have a cold tier, which begins at ``retained_from``."""

    def create(
        self, name: str, position: int, *, lifetime: float | None = None, retained_from: int | None = None
    ) -> SlotState:
        """Create a slot."""

    def reset(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Move a slot."""


class TierableSlots:
    """Base class of the slots that a tierer can use, for packages above this one."""

    def begin_at(self, offset: int) -> int:
        """Let the log begin where its cold tier does, but not above a consumer's slot; returns where it begins."""
        return offset

    def retire(self, slot: Slot, segments: Collection[UUID]) -> None:
        """Durably note segments before they are deleted; ``Fenced``, and nothing is deleted, for a replaced tierer."""
        slot.touch()

    def retired(self) -> Collection[UUID]:
        """The segments that this tierer or a former one has noted, and may not have deleted yet."""
        return ()


class Hot(Log, Protocol):
    """A log that can have a cold tier."""

    @property
    def slots(self) -> HotSlots:
        """Its slots."""


@checked
@dataclass(frozen=True, slots=True)
class TieredSlots:
    """The slots of the hot log, which pin records in either tier, in step with the expiry of the cold one.

    Satisfies :class:`~strandline.log.contract.Slots`.
    """

    hot: HotSlots
    cold: ColdCell
    first: Callable[[], int]
    """The first offset retained in either tier."""

    def pin(self, position: int, pin: Callable[[int | None], P], undo: Callable[[P], None]) -> P:
        """Call ``pin`` with the start of the cold tier if the position is there; ``undo`` if it has just expired."""
        try:
            return pin(None)
        except CursorExpired:
            first = self.first()
        self._check_announced(position)
        pinned = pin(first)
        try:
            # After pinning: expiry either saw the pin, or had announced the deletion before.
            self._check_announced(position)
        except CursorExpired:
            undo(pinned)
            raise
        return pinned

    def _check_announced(self, position: int) -> None:
        cold = self.cold.read()
        if cold is not None and position < cold.start:
            raise CursorExpired(
                f"Offset {position} is about to be removed from the cold tier, which begins at {cold.start} then: "
                "begin there, or bootstrap."
            )

    def create(self, name: str, position: int, *, lifetime: float | None = None) -> SlotState:
        """Create a slot that pins all records from ``position`` on, in either tier.

        ``CursorExpired`` if the position is no longer retained, or is about to expire.
        """
        return self.pin(
            position,
            lambda first: self.hot.create(name, position, lifetime=lifetime, retained_from=first),
            lambda _: self.hot.drop(name),
        )

    def reset(self, name: str, position: int) -> SlotState:
        """Move a slot, back or ahead, and make it valid again; raises as :meth:`create` does.

        If the position is being expired at that moment, the slot is there all the same: it pins more than can be read,
        and has to be reset again.
        """
        return self.pin(position, lambda first: self.hot.reset(name, position, retained_from=first), lambda _: None)

    def claim(self, name: str, holder: str) -> Slot:
        """Become the slot's holder; a former holder is fenced."""
        return self.hot.claim(name, holder)

    def drop(self, name: str) -> None:
        """Remove a slot; records that only it pinned may be deleted."""
        self.hot.drop(name)

    def touch(self, name: str, epoch: int) -> None:
        """Keep an unclaimed slot alive."""
        self.hot.touch(name, epoch)

    def flush(self) -> None:
        """Write positions that are only in memory so far."""
        self.hot.flush()

    def get(self, name: str) -> SlotState:
        """One slot, or ``NotFound``."""
        return self.hot.get(name)

    def list(self) -> Sequence[SlotState]:
        """All slots, by name."""
        return self.hot.list()

    def floor(self) -> int | None:
        """The lowest position of a valid slot; None without any."""
        return self.hot.floor()
