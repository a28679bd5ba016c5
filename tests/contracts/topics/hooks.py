"""How a topic under test is created and filled, and helpers that take messages from a subscription."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import ClassVar

import pytest

from strandline.log.topic.contract import Message, Topic, TopicSubscription
from strandline.storage.clock import CLOCK

SOON = 120.0
"""Real seconds as a generous time limit."""

FOREVER = 3600.0
"""Longer than a test may run: a wait that returns earlier was woken."""


def collect(subscription: TopicSubscription, count: int, *, seconds: float = SOON) -> list[Message]:
    """The next ``count`` messages of a subscription; fails with their number if fewer arrive in time."""
    messages: list[Message] = []
    deadline = CLOCK.monotonic() + seconds
    while len(messages) < count and (left := deadline - CLOCK.monotonic()) > 0:
        messages += subscription.take(left)
    assert len(messages) == count, f"{len(messages)} messages came instead of {count}"
    return messages


def by_partition(messages: Iterable[Message]) -> dict[int, list[tuple[int, bytes]]]:
    """Offset and payload of each message, in order of arrival, by partition."""
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for message in messages:
        found[message.partition].append((message.offset, message.payload))
    return dict(found)


def numbered(first: int, stop: int) -> list[tuple[int, bytes]]:
    """The messages of :meth:`TopicContract.fill` at these offsets."""
    return [(offset, b"m%d" % offset) for offset in range(first, stop)]


class TopicOwner(ABC):
    """Operations that the contract leaves to the topic's owner."""

    quiet: ClassVar[float] = 0.02
    """Seconds that a test waits to see that nothing arrives. Too short a time may miss a failure, but never
    causes one."""

    publishes: ClassVar[int] = 40
    """Number of publishes of each of several threads; fewer where each costs a round trip or an fsync."""

    @abstractmethod
    def make_topic(self, partition_count: int) -> Topic:
        """A new, empty topic. The suite closes it; the subclass cleans up the rest."""

    @pytest.fixture
    def topic(self) -> Iterator[Topic]:
        """A topic of three partitions."""
        topic = self.make_topic(3)
        yield topic
        topic.close()

    def fill(self, topic: Topic, partition: int, count: int) -> None:
        """Publish messages that contain their offsets, after the existing ones, each by itself."""
        first = topic.bounds(partition).next
        for offset, payload in numbered(first, first + count):
            assert topic.publish(partition, payload) == offset

    def fill_at_once(self, topic: Topic, partition: int, count: int) -> None:
        """The same in one call."""
        first = topic.bounds(partition).next
        offsets = topic.publish_all(partition, [payload for _, payload in numbered(first, first + count)])
        assert offsets == list(range(first, first + count))

    def receives_nothing(self, subscription: TopicSubscription) -> bool:
        """Whether nothing arrives for a moment."""
        return subscription.take(self.quiet) == []
