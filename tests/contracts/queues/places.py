"""The location of a queue under test, with helpers to fill and inspect it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import pytest

from strandline.followers.consumer.consumer import Consumer
from strandline.log.queue.contract import Queue
from strandline.storage.objects.store import ObjectStore
from strandline.testing.faulty import Call, FaultyStore


class QueuePlace(ABC):
    """The location of a queue, and operations of its owner for tests."""

    store: ObjectStore
    """The store of the queue."""

    letters: str
    """Path prefix of dead letters."""

    @abstractmethod
    def queue(self, store: ObjectStore | None = None) -> Queue:
        """The queue as one more process sees it, through ``store`` if given: another connection to the same queue."""

    @abstractmethod
    def produce(self, *entries: bytes, metadata: bytes = b"") -> None:
        """List one batch, with one metadata range."""

    @abstractmethod
    def forget(self, count: int) -> None:
        """Make the first batches unlisted, as if they were acknowledged long ago."""

    def open(self, store: ObjectStore | None = None, **options: Any) -> Consumer:
        """A consumer without trimming in the background."""
        return Consumer(self.queue(store), **{"trim_every": None, **options})


def first_to_come(place: QueuePlace) -> int:
    """Where the next consumer starts."""
    return place.open().next_to_ack


def values(consumer: Consumer) -> list[list[bytes | None]]:
    """The remaining batches, read one by one."""
    found = []
    while (batch := consumer.next_batch()) is not None:
        found.append(batch.values)
    return found


def at_once(line: FaultyStore, path: str, then: Callable[[], object], *, stage: str = "after") -> None:
    """Call ``then`` once, before or after the next conditional write of this object."""
    left = [then]

    def callback(call: Call) -> None:
        if call.name == "put_if" and call.path.startswith(path) and call.stage == stage and left:
            left.pop()()

    line.hook(callback)


class QueueFixtures:
    """Shared parts of the contract; a subclass defines the fixture ``place``, an empty queue."""

    picklable: ClassVar[bool] = True
    """Whether batches can be read in another process."""

    lossy: ClassVar[bool] = False
    """Whether the queue's own store loses answers, so that a lost race may go unnoticed."""

    zero: ClassVar[Sequence[bytes]] = (b"0a", b"0b")
    """The entries of the first batch: one, where batches are numbered by their records."""

    @pytest.fixture
    def five(self, place: QueuePlace) -> QueuePlace:
        """The place with five batches: 0, 1, 2, 3 and 4."""
        place.produce(*self.zero, metadata=b"zero")
        for number in range(1, 5):
            place.produce(b"%d" % number, metadata=b"meta %d" % number)
        return place

    @pytest.fixture
    def line(self, five: QueuePlace) -> FaultyStore:
        """A connection to the five batches that a test may cut."""
        return FaultyStore(five.store)

    def locations(self, place: QueuePlace) -> list[str]:
        """The locations of the listed batches; fences their consumer."""
        return [descriptor.location for descriptor in place.open().next_descriptors(99)]


C = TypeVar("C", bound=type)


def without_store(suite: C) -> C:
    """The suite without the tests that cut the connection to an object store, or look at objects and metadata there.

    For logs that have no such store: what they do when they fail is tested with them.
    """
    for name in dir(suite):
        test = getattr(suite, name)
        if name.startswith("test_") and test is not None:
            needs = set(inspect.signature(test).parameters) & {"line"}
            source = inspect.getsource(test)
            if needs or any(f".{part}" in source for part in ("store", "damage(", "metadata", "lag")):
                setattr(suite, name, None)
    return suite
