"""Stamps of a shared value, by which a writer whose answer was lost finds out whether its write landed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, NewType, TypeVar
from uuid import UUID

from strandline.model.arguments import Natural

T = TypeVar("T")

OpId = NewType("OpId", UUID)
"""Identifies one intended change, however often its write is tried."""

REMEMBERED: Final = 32
"""Number of operations that a value remembers. After more writes than that, an outcome is unknown."""


@dataclass(frozen=True, slots=True)
class Stamped(Generic[T]):
    """A value with its number of writes, and the latest operations."""

    value: T
    revision: Natural = 0
    recent: tuple[OpId, ...] = ()

    def stamp(self, value: T, op: OpId) -> Stamped[T]:
        """The next state after ``op`` changed the value."""
        return Stamped(value, self.revision + 1, (*self.recent, op)[-REMEMBERED:])
