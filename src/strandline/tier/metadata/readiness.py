"""Readiness of one metadata partition, as values: unknown is not absent.

A partition answers nothing, whatever its cache holds, until it is assigned and has applied all events below the
high-water mark of its assignment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from strandline.errors import NotReady
from strandline.model.cursor import Bounds

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unassigned:
    """This node does not follow the metadata partition; another node may."""

    partition: int


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """This node follows the metadata partition and has not caught up."""

    partition: int
    why: str


@dataclass(frozen=True, slots=True)
class Ready(Generic[T_co]):
    """The answer, from at least all events published before the partition was assigned."""

    answer: T_co


Readiness = Unassigned | CatchingUp | Ready[T]
"""The outcome of a lookup."""

READY: Final = Ready(None)


def not_ready(readiness: Unassigned | CatchingUp) -> NotReady:
    """The readiness as a retryable error."""
    match readiness:
        case Unassigned(partition):
            return NotReady(
                f"Metadata partition {partition} is not assigned to this node, which is no answer: ask a node that "
                "follows it, or try again when reconcile_assignment() has added it."
            )
        case CatchingUp(partition, why):
            return NotReady(f"Metadata partition {partition} is not ready: {why}.")


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """Position and assignment of one metadata partition, immutable."""

    next: int = 0
    """All events below it are applied to the cache."""
    assigned: bool = False
    target: int | None = None
    """The high-water mark to reach before the partition answers; None while unknown."""
    trouble: str = ""
    """Why following stopped, if it did. Dropping and adding the partition, or a restart, clears it."""

    def readiness(self, partition: int) -> Readiness[None]:
        """Whether the partition answers."""
        if not self.assigned:
            return Unassigned(partition)
        if self.trouble:
            return CatchingUp(partition, self.trouble)
        if self.target is None:
            return CatchingUp(partition, "its high-water mark could not be fetched yet; ask again in a moment")
        if self.next < self.target:
            return CatchingUp(
                partition, f"it has applied {self.next} events of {self.target}; ask again when it has caught up"
            )
        return READY

    @property
    def is_waiting(self) -> bool:
        """Whether it is assigned and following has to (re)start."""
        return self.assigned and self.target is None and not self.trouble

    @property
    def is_followed(self) -> bool:
        """Whether events are applied."""
        return self.assigned and not self.trouble

    def assign(self) -> PartitionProgress:
        """Assigned; the target is unknown, since events may have been published meanwhile."""
        return PartitionProgress(self.next, assigned=True)

    def drop(self) -> PartitionProgress:
        """No longer followed; the position stays for a later assignment."""
        return PartitionProgress(self.next)

    def set_target(self, target: int) -> PartitionProgress:
        """The high-water mark is known."""
        return replace(self, target=target)

    def clear_target(self) -> PartitionProgress:
        """Following has to restart; nothing is answered until then."""
        return replace(self, target=None)

    def advance(self, upto: int) -> PartitionProgress:
        """All events below ``upto`` are applied. Called after they were applied, never before."""
        return replace(self, next=upto)

    def stop(self, why: str) -> PartitionProgress:
        """Following stopped."""
        return replace(self, trouble=why)

    def forget(self) -> PartitionProgress:
        """The cache was emptied: all events are replayed."""
        return replace(self, next=0, target=None)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where following starts. With a reason to replay, the cache is discarded first."""

    start: int
    replay: str = ""


def plan_resume_point(position: int, bounds: Bounds) -> ResumePoint:
    """Resume at the applied position if the topic still has it; otherwise replay the whole topic.

    >>> plan_resume_point(7, Bounds(3, 9)), plan_resume_point(0, Bounds(3, 9))
    (ResumePoint(start=7, replay=''), ResumePoint(start=3, replay=''))
    """
    if position > bounds.next:
        # Waiting for the end to reach the position would apply new events on top of those of another topic.
        return ResumePoint(bounds.first, f"events up to {position} are applied and there are only {bounds.next}")
    if 0 < position < bounds.first:
        why = f"events up to {position} are applied and those below {bounds.first} are deleted"
        return ResumePoint(bounds.first, why)
    return ResumePoint(max(position, bounds.first))
