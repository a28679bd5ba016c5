"""In-memory topic: the contract in its simplest form, for one process and for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, final

from strandline.errors import ConsumerClosed, InvalidInput, LogClosed
from strandline.log.topic.contract import (
    MAX_TAKEN,
    Message,
    begun,
    check_count,
    check_partition,
    check_start,
    offset_expired,
)
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import Bounds
from strandline.model.records import value_bytes, values_bytes
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process


@dataclass(slots=True)
class _RetainedMessages:
    """The retained messages of a partition; ``first`` is the offset of the first one."""

    first: int = 0
    values: list[bytes] = field(default_factory=list)

    @property
    def next(self) -> int:
        return self.first + len(self.values)


@bound_to_process()
@final
@checked
class MemoryTopic:
    """A topic that ends with its process. Satisfies :class:`~strandline.log.topic.contract.Topic`; safe in threads.

    >>> topic = MemoryTopic(2)
    >>> stream, assignment = topic.subscribe([(1, 0)])
    >>> topic.publish(1, b"hello")
    0
    >>> stream.take(timeout=1.0)
    [Message(partition=1, offset=0, payload=b'hello')]
    """

    def __init__(self, partition_count: int, *, env: Env = SYSTEM) -> None:
        """An empty topic of ``partition_count`` partitions, at least one."""
        self.topic_id: Final = env.chance.uuid()
        """Identifies the topic."""
        self.partition_count = check_count(partition_count)
        self._partitions = tuple(_RetainedMessages() for _ in range(partition_count))
        # One lock for all: only references are moved under it.
        self._lock = threading.Lock()
        self._subscriptions: set[MemoryTopicSubscription] = set()
        self._closed = False
        self._origin = Origin("A topic in memory", self)

    def publish(self, partition: int, payload: bytes) -> int:
        """Append a message and return its offset."""
        return self._append(partition, (value_bytes(payload),))

    def publish_all(self, partition: int, values: Sequence[bytes]) -> list[int]:
        """Append messages, contiguously, and return their offsets."""
        values = values_bytes(values)
        first = self._append(partition, values)
        return list(range(first, first + len(values)))

    def _append(self, partition: int, values: Sequence[bytes]) -> int:
        log = self._partition(partition)
        with self._lock:
            if self._closed:
                raise LogClosed("The topic is closed: nothing was published.")
            first = log.next
            log.values += values
            for subscription in self._subscriptions:
                subscription.published(partition)
        return first

    def bounds(self, partition: int) -> Bounds:
        """The first retained offset and the high-water mark."""
        log = self._partition(partition)
        with self._lock:
            return Bounds(log.first, log.next)

    def trim(self, partition: int, upto: int) -> None:
        """Delete all messages of a partition below an offset, even if subscriptions need them."""
        log = self._partition(partition)
        with self._lock:
            if upto > log.next:
                raise InvalidInput(f"Partition {partition} ends at offset {log.next}: it cannot begin at {upto}.")
            if upto > log.first:
                del log.values[: upto - log.first]
                log.first = upto
                for subscription in self._subscriptions:
                    subscription.published(partition)  # its next message may be gone, which it must raise

    def subscribe(
        self, starts: Sequence[tuple[int, int]] = ()
    ) -> tuple[MemoryTopicSubscription, MemoryTopicSubscription]:
        """Follow partitions, each from an offset on."""
        subscription = MemoryTopicSubscription(self._partitions, self._lock, self._subscriptions)
        with self._lock:
            if self._closed:
                raise LogClosed("The topic is closed: there is nothing to follow.")
            self._subscriptions.add(subscription)
        return begun(subscription, starts)

    def close(self) -> None:
        """End all subscriptions; the messages cannot be read any more."""
        with self._lock:
            self._closed = True
            subscriptions = tuple(self._subscriptions)
        for subscription in subscriptions:
            subscription.close()

    def _partition(self, partition: int) -> _RetainedMessages:
        return self._partitions[check_partition(partition, len(self._partitions))]


@bound_to_process()
@final
@checked
class MemoryTopicSubscription:
    """Positions in a memory topic: it holds no messages. One thread takes, any thread closes."""

    def __init__(
        self,
        partitions: tuple[_RetainedMessages, ...],
        lock: threading.Lock,
        subscriptions: set[MemoryTopicSubscription],
    ) -> None:
        """Use :meth:`MemoryTopic.subscribe`."""
        self._partitions = partitions
        self._subscriptions = subscriptions
        self._ready = threading.Condition(lock)
        # In the order of their turns: a partition that delivered messages moves to the end, so that a busy one
        # does not starve the others.
        self._positions: dict[int, int] = {}
        self._closed = False
        self._origin = Origin("A subscription of a topic in memory", self)

    def take(self, timeout: Timeout) -> list[Message]:
        """The next messages; waits up to ``timeout`` seconds for the first."""
        with self._ready:
            self._ready.wait_for(self._is_due, min(timeout, threading.TIMEOUT_MAX))
            # Before any position is moved: a take that raises must not skip a message.
            for partition, position in self._positions.items():
                if position < (first := self._partitions[partition].first):
                    del self._positions[partition]
                    raise offset_expired(partition, position, first)
            pieces = self._advance()
        messages: list[Message] = []
        for partition, position, values in pieces:
            messages += map(Message, repeat(partition), range(position, position + len(values)), values)
        return messages

    def _advance(self) -> list[tuple[int, int, list[bytes]]]:
        """The next messages by partition and offset; advances the positions. Under the lock."""
        pieces, room = [], MAX_TAKEN
        for partition, position in list(self._positions.items()):
            if not room:
                break
            log = self._partitions[partition]
            if position < log.next:
                at = position - log.first
                values = log.values[at : at + room]
                room -= len(values)
                pieces.append((partition, position, values))
                del self._positions[partition]
                self._positions[partition] = position + len(values)
        return pieces

    def _is_due(self) -> bool:
        """Whether there are messages or errors to return. Under the lock."""
        if self._closed:
            return True
        return any(
            position < log.next or position < log.first
            for log, position in ((self._partitions[partition], at) for partition, at in self._positions.items())
        )

    def published(self, partition: int) -> None:
        """Wake the taking thread if this concerns it. Under the lock."""
        if partition in self._positions:
            self._ready.notify_all()

    def close(self) -> None:
        """Release everything, and wake the taking thread."""
        with self._ready:
            self._closed = True
            self._positions.clear()
            self._subscriptions.discard(self)
            self._ready.notify_all()

    def add(self, partition: int, start: int) -> None:
        """Deliver a partition from an offset on, unless it is delivered already."""
        log = self._partitions[check_partition(partition, len(self._partitions))]
        check_start(start)
        with self._ready:
            if self._closed:
                raise ConsumerClosed("The subscription is closed: no partition was added.")
            if partition in self._positions:
                return
            if start < log.first:
                raise offset_expired(partition, start, log.first)
            self._positions[partition] = start
            self._ready.notify_all()

    def remove(self, partition: int) -> None:
        """Deliver nothing more of a partition."""
        with self._ready:
            self._positions.pop(partition, None)

    def partitions(self) -> list[int]:
        """The assigned partitions, ascending."""
        with self._ready:
            return sorted(self._positions)
