"""The location of a queue under test, with helpers to fill and inspect it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from strandline.followers.consumer.consumer import Consumer
from strandline.log.queue.contract import Queue
from strandline.storage.store import ObjectStore
from strandline.testing.faulty import Call, FaultyStore


class QueuePlace(ABC):
    """A place where a queue is, and what tests need of its owner."""

    store: ObjectStore
    """What it is stored in."""

    letters: str
    """Below this path dead letters are kept."""

    @abstractmethod
    def queue(self, store: ObjectStore | None = None) -> Queue:
        """The queue as one more process sees it, over ``store`` if that is given: another line to the same place."""

    @abstractmethod
    def produce(self, *entries: bytes, metadata: bytes = b"") -> None:
        """List one batch, with one metadata range."""

    @abstractmethod
    def forget(self, count: int) -> None:
        """Let all have acknowledged the first batches long ago, so that they are no longer listed."""

    def open(self, store: ObjectStore | None = None, **options: Any) -> Consumer:
        """A consumer; nothing is collected behind a test's back."""
        return Consumer(self.queue(store), **{"trim_every": None, **options})


def first_to_come(place: QueuePlace) -> int:
    """Where the next consumer starts."""
    return place.open().next_to_ack


def values(consumer: Consumer) -> list[list[bytes | None]]:
    """What is left, read one by one."""
    found = []
    while (batch := consumer.next_batch()) is not None:
        found.append(batch.values)
    return found


def at_once(line: FaultyStore, path: str, then: Callable[[], object], *, stage: str = "after") -> None:
    """Do something once, when the next conditional write of this object is about to be done or was just done."""
    left = [then]

    def callback(call: Call) -> None:
        if call.name == "put_if" and call.path.startswith(path) and call.stage == stage and left:
            left.pop()()

    line.hook(callback)


class QueueFixtures:
    """What the parts of the contract share; a subclass defines the fixture ``place``, an empty queue."""

    picklable: ClassVar[bool] = True
    """Whether batches can be read in another process."""

    lossy: ClassVar[bool] = False
    """Whether the place's own store loses answers, so that a lost race may go unheard."""

    @pytest.fixture
    def five(self, place: QueuePlace) -> QueuePlace:
        """The place with five batches: 0 (two entries), 1, 2, 3 and 4."""
        place.produce(b"0a", b"0b", metadata=b"zero")
        for number in range(1, 5):
            place.produce(b"%d" % number, metadata=b"meta %d" % number)
        return place

    @pytest.fixture
    def line(self, five: QueuePlace) -> FaultyStore:
        """A line to the five batches that a test may cut."""
        return FaultyStore(five.store)

    def locations(self, place: QueuePlace) -> list[str]:
        """Where the batches are that are listed now; whoever consumes them is fenced by looking."""
        return [descriptor.location for descriptor in place.open().next_descriptors(99)]
