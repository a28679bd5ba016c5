"""Queues of object logs and of version 1, for the contract and for histories."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from strandline.compat.v1.log import open_queue
from strandline.compat.v1.queue import V1Queue
from strandline.log.object import open_log
from strandline.log.queue.contract import Queue
from strandline.log.queue.log_queue import ObjectLogQueue
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock
from strandline.testing.plain import PlainStore
from tests.contracts.queues import QueuePlace


class ObjectLogPlace(QueuePlace):
    """An object log that behaves as a queue."""

    letters = "dead-letter/default/"

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.log = open_log(store, create=True, retention="consumed")

    def queue(self, store: ObjectStore | None = None) -> Queue:
        return ObjectLogQueue(open_log(self.store if store is None else store, env=Env(clock=ManualClock())))

    def produce(self, *entries: bytes, metadata: bytes = b"") -> None:
        with self.log.producer() as producer:
            producer.produce(list(entries), metadata)

    def forget(self, count: int) -> None:
        entry = self.log.head().tail[count - 1]
        self.log.slots.create("passing", entry.next)
        self.log.trim()
        self.log.slots.drop("passing")
        assert self.log.bounds().first == entry.next


class V1Place(QueuePlace):
    """A queue of version 1."""

    letters = "ingest-dead/"

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.log = open_queue(store)

    def queue(self, store: ObjectStore | None = None) -> Queue:
        return V1Queue(open_queue(self.store if store is None else store, env=Env(clock=ManualClock())))

    def produce(self, *entries: bytes, metadata: bytes = b"") -> None:
        with self.log.producer() as producer:
            producer.produce(list(entries), metadata)

    def forget(self, count: int) -> None:
        queue = self.queue()
        queue.acknowledge(queue.peek(queue.claim("passing", None)).descriptors[count - 1])


PlaceKind = Callable[[ObjectStore], QueuePlace]


@cache
def _objects(kind: PlaceKind, batches: int) -> tuple[tuple[str, bytes], ...]:
    place = kind(PlainStore())
    for number in range(batches):
        place.produce(b"%d" % number)
    return tuple((item.path, bytes(place.store.get(item.path).data)) for item in place.store.list(""))


def filled(kind: PlaceKind, batches: int) -> QueuePlace:
    """A new queue with ``batches`` batches."""
    store = PlainStore()
    for path, data in _objects(kind, batches):
        store.put(path, data)
    return kind(store)
