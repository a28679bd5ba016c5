"""The contract of every topic, and the checks that all share. ``strandline.testing.topics.TopicContract`` tests it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeVar, runtime_checkable
from uuid import UUID

from strandline.errors import CursorExpired, InvalidInput
from strandline.model.cursor import Bounds

NO_TOPIC: Final = UUID(int=0)
"""The id of a topic whose server does not tell."""


class Message(NamedTuple):
    """What was published, and where."""

    partition: int
    offset: int
    payload: bytes


class Assignment(Protocol):
    """The partitions of one subscription. Safe in threads."""

    def add(self, partition: int, start: int) -> None:
        """Deliver this partition, too, from an offset on (inclusive): its backlog first, then what is published.

        One that is assigned already stays as it is. ``InvalidInput`` if there is no such partition or offset,
        ``CursorExpired`` if the offset is no longer retained; one past the end waits for it. ``ConsumerClosed`` after
        the subscription was closed.
        """

    def remove(self, partition: int) -> None:
        """Deliver nothing more of a partition: a take that begins after this has none of it. Unknown is fine."""

    def partitions(self) -> list[int]:
        """What is assigned, ascending."""


class TopicSubscription(Protocol):
    """The messages of the assigned partitions: each exactly once, in the order of their offsets within a partition.

    One thread takes; any thread closes. Memory is bounded however slow that is: what was not taken stays in the log.
    """

    def take(self, timeout: float) -> list[Message]:
        """What comes next, some thousands of messages at most; waits for the first no longer than ``timeout`` seconds.

        Empty if nothing came, and at once after it was closed. ``CursorExpired``, naming the partition, if what comes
        next in one was deleted meanwhile: that partition is no longer assigned then, and the others go on. What was
        fetched before it was deleted may come first.
        """

    def close(self) -> None:
        """Free what it holds, and wake who takes; closing twice is fine."""


@runtime_checkable
class Topic(Protocol):
    """A fixed number of logs, each numbered densely from 0. Safe in threads. Calls may raise ``StorageError``."""

    @property
    def topic_id(self) -> UUID:
        """Tells it from every other topic, also from one that was made anew in its place; 0 where nobody can tell."""

    @property
    def partition_count(self) -> int:
        """How many partitions there are."""

    def publish(self, partition: int, payload: bytes) -> int:
        """Append a message and return its offset when it is durable. ``InvalidInput`` if there is no such partition."""

    def publish_all(self, partition: int, values: Sequence[bytes]) -> list[int]:
        """The same for many, in their order; others may publish in between."""

    def bounds(self, partition: int) -> Bounds:
        """The first retained offset and the high-water mark: the offset after the last durable message; 0 if empty."""

    def subscribe(self, starts: Sequence[tuple[int, int]] = ()) -> tuple[TopicSubscription, Assignment]:
        """Follow partitions, each from an offset on (inclusive); raises as adding them does, and then nothing is left.

        More can be added later, and others removed, without disturbing those that are there.
        """

    def close(self) -> None:
        """End all subscriptions and let go of what it holds; closing twice is fine. Later calls are ``LogClosed``."""


def check_count(partition_count: int) -> int:
    """A number of partitions; ``InvalidInput`` unless it is positive."""
    if partition_count < 1:
        raise InvalidInput(f"A topic has at least one partition, not {partition_count}.")
    return partition_count


def check_partition(partition: int, partition_count: int) -> int:
    """A partition of a topic; ``InvalidInput`` unless it has that one."""
    if not 0 <= partition < partition_count:
        raise InvalidInput(
            f"There is no partition {partition}: the topic has {partition_count}, numbered from 0 to "
            f"{partition_count - 1}."
        )
    return partition


def check_start(start: int) -> int:
    """An offset to start from; ``InvalidInput`` if it is negative. Whether it is retained is not looked at."""
    if start < 0:
        raise InvalidInput(f"There is no offset {start}: those of a partition begin at 0.")
    return start


def expired(partition: int, position: int, first: int) -> CursorExpired:
    """What is said to who wants an offset that is gone."""
    return CursorExpired(
        f"Partition {partition} begins at offset {first}, and {position} is no longer retained: bootstrap again, and "
        "follow it from there."
    )


class Assigned(TopicSubscription, Assignment, Protocol):
    """A subscription that is its own assignment."""


S = TypeVar("S", bound=Assigned)


def begun(subscription: S, starts: Sequence[tuple[int, int]]) -> tuple[S, S]:
    """The subscription with its first partitions, as subscribing answers it; closed, if one cannot be followed."""
    try:
        for partition, start in starts:
            subscription.add(partition, start)
    except BaseException:
        subscription.close()
        raise
    return subscription, subscription
