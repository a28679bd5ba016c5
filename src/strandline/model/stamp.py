"""What a shared value carries so that a writer whose answer was lost can find out whether its write landed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, NewType, TypeVar
from uuid import UUID

T = TypeVar("T")

OpId = NewType("OpId", UUID)
"""Names one intended change, however often its write is tried."""

REMEMBERED: Final = 32
"""How many operations a value remembers. More writes than that between a try and the look for it: outcome unknown."""


@dataclass(frozen=True, slots=True)
class Stamped(Generic[T]):
    """A value with how many writes it has seen, and which were the latest."""

    value: T
    revision: int = 0
    recent: tuple[OpId, ...] = ()

    def stamp(self, value: T, op: OpId) -> Stamped[T]:
        """The next state after ``op`` changed the value."""
        return Stamped(value, self.revision + 1, (*self.recent, op)[-REMEMBERED:])
