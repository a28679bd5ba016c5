"""The contract of every topic, and the checks that all share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast, runtime_checkable
from uuid import UUID

from strandline.errors import CursorExpired, InvalidInput
from strandline.model.arguments import shown
from strandline.model.cursor import Bounds

MAX_TAKEN: Final = 4096
"""Largest number of messages of one take."""

NO_TOPIC: Final = UUID(int=0)
"""The id of a topic whose server reports none."""


class Message(NamedTuple):
    """A published message, its partition and offset."""

    partition: int
    offset: int
    payload: bytes


class Assignment(Protocol):
    """The partitions of one subscription. Safe in threads."""

    def add(self, partition: int, start: int) -> None:
        """Deliver this partition, too, from an offset on (inclusive): its backlog first, then new messages.

        An assigned partition stays as it is. ``InvalidInput`` if there is no such partition or offset,
        ``CursorExpired`` if the offset is no longer retained; an offset past the end waits for it. ``ConsumerClosed``
        after the subscription was closed.
        """

    def remove(self, partition: int) -> None:
        """Deliver nothing more of a partition: a later take has none of it. An unknown partition is fine."""

    def partitions(self) -> list[int]:
        """The assigned partitions, ascending."""


class TopicSubscription(Protocol):
    """The messages of the assigned partitions: each exactly once, in the order of their offsets within a partition.

    One thread takes; any thread closes. Memory is bounded, also for a slow taker: untaken messages stay in the log.
    """

    def take(self, timeout: float) -> list[Message]:
        """The next messages, some thousands at most; waits up to ``timeout`` seconds for the first.

        Empty if none arrived, and at once after it was closed. ``CursorExpired``, naming the partition, if its next
        message was deleted meanwhile: that partition is unassigned then, and the others continue. Messages that were
        fetched before may be delivered first.
        """

    def close(self) -> None:
        """Release its resources, and wake the taking thread. Idempotent."""


@runtime_checkable
class Topic(Protocol):
    """A fixed number of logs, each numbered densely from 0. Safe in threads. Calls may raise ``StorageError``."""

    @property
    def topic_id(self) -> UUID:
        """Identifies the topic, also against a topic recreated under the same name; 0 if unknown."""

    @property
    def partition_count(self) -> int:
        """Number of partitions."""

    def publish(self, partition: int, payload: bytes) -> int:
        """Append a message and return its offset when it is durable. ``InvalidInput`` if there is no such partition."""

    def publish_all(self, partition: int, values: Sequence[bytes]) -> list[int]:
        """Append messages in their order, and return their offsets when all are durable.

        Messages of other publishers may be in between.
        """

    def bounds(self, partition: int) -> Bounds:
        """The first retained offset and the high-water mark: the offset after the last durable message; 0 if empty."""

    def subscribe(self, starts: Sequence[tuple[int, int]] = ()) -> tuple[TopicSubscription, Assignment]:
        """Follow partitions, each from an offset on (inclusive); raises as adding them does, and then leaves nothing
        open.

        Partitions can be added and removed later, without disturbing the others.
        """

    def close(self) -> None:
        """End all subscriptions and release resources. Idempotent. Later calls raise ``LogClosed``."""


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
    """An offset to start from; ``InvalidInput`` if it is negative. Does not check whether it is retained."""
    if start < 0:
        raise InvalidInput(f"There is no offset {start}: those of a partition begin at 0.")
    return start


def offset_expired(partition: int, position: int, first: int) -> CursorExpired:
    """The error for an offset that is no longer retained."""
    return CursorExpired(
        f"Partition {partition} begins at offset {first}, and {position} is no longer retained: bootstrap again, and "
        "follow it from there."
    )


S = TypeVar("S", bound=TopicSubscription)


def begun(subscription: S, starts: Sequence[tuple[int, int]]) -> tuple[S, S]:
    """A subscription with its first partitions, as ``subscribe`` returns it; closed if one cannot be followed."""
    try:
        for pair in starts:
            cast("Assignment", subscription).add(*_checked_pair(pair))
    except BaseException:
        subscription.close()
        raise
    return subscription, subscription


def _checked_pair(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004 - partition and offset
        raise InvalidInput(f"subscribe: starts has pairs of a partition and an offset, not {shown(pair)}.")
    return pair[0], pair[1]
