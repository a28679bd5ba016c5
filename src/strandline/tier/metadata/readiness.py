"""What a node may answer from one metadata partition, as values: unknown is not absent.

A partition that is not followed, or not yet up to what was there when it was assigned, has no answer at all, whatever
its cache holds from before.
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
    """This node does not follow the metadata partition: another one may know."""

    partition: int


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """This node follows the metadata partition, and does not know enough yet."""

    partition: int
    why: str


@dataclass(frozen=True, slots=True)
class Ready(Generic[T_co]):
    """The answer, from all that was published before the partition was assigned, at least."""

    answer: T_co


Gate = Unassigned | CatchingUp | Ready[T]
"""What becomes of a question."""

OPEN: Final = Ready(None)


def not_ready(gate: Unassigned | CatchingUp) -> NotReady:
    """The retryable error for those who need to know."""
    match gate:
        case Unassigned(partition):
            return NotReady(
                f"Metadata partition {partition} is not assigned to this node, which is no answer: ask a node that "
                "follows it, or try again when reconcile_assignment() has added it."
            )
        case CatchingUp(partition, why):
            return NotReady(f"Metadata partition {partition} is not ready: {why}.")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one metadata partition stands. Every step makes another value."""

    next: int = 0
    """Everything below it has been applied to the cache."""
    assigned: bool = False
    target: int | None = None
    """What has to be applied before anything is answered; None while that is not known."""
    trouble: str = ""
    """Why it cannot go on, if it cannot; only dropping it and adding it again, or a restart, ends that."""

    def gate(self, partition: int) -> Gate[None]:
        """Whether there is an answer."""
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
        return OPEN

    @property
    def is_waiting(self) -> bool:
        """Whether it is assigned and has to be begun, or begun again."""
        return self.assigned and self.target is None and not self.trouble

    @property
    def is_followed(self) -> bool:
        """Whether its events are applied."""
        return self.assigned and not self.trouble

    def assign(self) -> Standing:
        """Added: a new target is needed, for much may have been published while it was not followed."""
        return Standing(self.next, assigned=True)

    def drop(self) -> Standing:
        """No longer followed; what was applied is where it goes on if it is added again."""
        return Standing(self.next)

    def aim(self, target: int) -> Standing:
        """The high-water mark is known."""
        return replace(self, target=target)

    def unaim(self) -> Standing:
        """It has to be begun again, and answers nothing until then."""
        return replace(self, target=None)

    def advance(self, upto: int) -> Standing:
        """Everything below ``upto`` has been applied; called after it was, never before."""
        return replace(self, next=upto)

    def stop(self, why: str) -> Standing:
        """It cannot go on."""
        return replace(self, trouble=why)

    def forget(self) -> Standing:
        """Nothing is applied any more: everything is replayed."""
        return replace(self, next=0, target=None)


@dataclass(frozen=True, slots=True)
class Begin:
    """Where following begins; with a reason, what was applied before is worth nothing and is replayed."""

    start: int
    replay: str = ""


def plan_begin(position: int, bounds: Bounds) -> Begin:
    """Go on where it was applied, if the topic can have that position; otherwise replay all that it has.

    >>> plan_begin(7, Bounds(3, 9)), plan_begin(0, Bounds(3, 9))
    (Begin(start=7, replay=''), Begin(start=3, replay=''))
    """
    if position > bounds.next:
        # To wait there for the end to come by would put new events on top of what another topic once told.
        return Begin(bounds.first, f"events up to {position} are applied and there are only {bounds.next}")
    if 0 < position < bounds.first:
        return Begin(bounds.first, f"events up to {position} are applied and those below {bounds.first} are deleted")
    return Begin(max(position, bounds.first))
