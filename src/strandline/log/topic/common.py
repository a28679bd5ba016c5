"""Checks, error texts and start positions shared by all topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from strandline.errors import CursorExpired, InvalidInput
from strandline.log.topic.contract import Assignment, TopicSubscription


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
