"""What tests of the metadata manager are made of: segments, and a topic that fails, counts and holds back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from uuid import UUID

from strandline.errors import InvalidInput, TransientStorageError
from strandline.formats.segment.events import encode_event, metadata_partition
from strandline.log.topic.contract import NO_TOPIC, Assignment, Message, TopicSubscription
from strandline.log.topic.memory import MemoryTopic
from strandline.model.cursor import Bounds
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentEvent,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.storage.disk import Disk
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.simdisk import SimulatedDisk
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.manager import MetadataManager

PARTITIONS = 4
FOLDER = "/node/metadata"
TERM = 3


def place(metadata: int, number: int = 0, partitions: int = PARTITIONS) -> TopicPartition:
    """A topic partition (another one for each number) of which a given metadata partition tells."""
    topic = UUID(int=0xC0FFEE + number)
    found = next(index for index in count() if metadata_partition(topic, index, partitions) == metadata)
    return TopicPartition(f"orders-{number}", topic, found)


def segment(where: TopicPartition, number: int, **changes) -> SegmentMetadata:
    """The start of the copy of the offsets 100 * number and the 99 that follow."""
    fields = {
        "segment": SegmentId(where, UUID(int=number + 1)),
        "start": 100 * number,
        "end": 100 * number + 99,
        "broker": 1,
        "max_timestamp": 1000 + number,
        "event_timestamp": 2000 + number,
        "terms": ((TERM, 100 * number),),
        "size": 10,
    }
    return SegmentMetadata(**(fields | changes))


def update(
    told: SegmentMetadata, state: SegmentState = SegmentState.COPY_FINISHED, *, broker: int = 1
) -> SegmentUpdate:
    return SegmentUpdate(segment=told.segment, broker=broker, event_timestamp=3000, state=state)


def delete(
    where: TopicPartition, state: PartitionDeleteState = PartitionDeleteState.MARKED, *, broker: int = 1
) -> PartitionDelete:
    return PartitionDelete(partition=where, broker=broker, event_timestamp=4000, state=state)


def copied(where: TopicPartition, number: int) -> list[SegmentEvent]:
    """The two events of a segment that can be found."""
    told = segment(where, number)
    return [told, update(told)]


class Events:
    """A memory topic whose high-water marks fail, whose messages are held back, and that counts what it delivers."""

    def __init__(self, partition_count: int = PARTITIONS) -> None:
        self.inner = MemoryTopic(partition_count)
        self.topic_id = NO_TOPIC
        self.unknown: set[int] = set()
        """Partitions whose bounds cannot be fetched."""
        self.held = False
        """Whether nothing is delivered."""
        self.broken = False
        """Whether taking fails."""
        self.delivered: Counter[int] = Counter()
        self.asked: Counter[int] = Counter()
        self.published = 0
        self.before_publish: Callable[[], None] = lambda: None
        self.after_publish: Callable[[], None] = lambda: None
        self.after_bounds: Callable[[], None] = lambda: None

    @property
    def partition_count(self) -> int:
        return self.inner.partition_count

    def publish(self, partition: int, payload: bytes) -> int:
        return self.publish_all(partition, [payload])[0]

    def publish_all(self, partition: int, payloads: Sequence[bytes]) -> list[int]:
        hook, self.before_publish = self.before_publish, lambda: None
        hook()
        offsets = self.inner.publish_all(partition, payloads)
        self.published += len(payloads)
        hook, self.after_publish = self.after_publish, lambda: None
        hook()
        return offsets

    def bounds(self, partition: int) -> Bounds:
        self.asked[partition] += 1
        if partition in self.unknown:
            raise TransientStorageError("The broker does not answer.")
        bounds = self.inner.bounds(partition)
        hook, self.after_bounds = self.after_bounds, lambda: None
        hook()
        return bounds

    def subscribe(self, starts: Sequence[tuple[int, int]] = ()) -> tuple[TopicSubscription, Assignment]:
        subscription, assignment = self.inner.subscribe(starts)
        return Stream(self, subscription), assignment

    def close(self) -> None:
        self.inner.close()

    def trim(self, partition: int, upto: int) -> None:
        self.inner.trim(partition, upto)

    def tell(self, *events: SegmentEvent) -> None:
        """Publish as another node does."""
        for event in events:
            self.inner.publish(self.home(event), encode_event(event))

    def home(self, event: SegmentEvent) -> int:
        where = event.partition if isinstance(event, PartitionDelete) else event.segment.partition
        return metadata_partition(where.topic_id, where.partition, self.partition_count)


class Stream:
    """A subscription of such a topic."""

    def __init__(self, events: Events, inner: TopicSubscription) -> None:
        self._events = events
        self._inner = inner

    def take(self, timeout: float) -> list[Message]:
        if self._events.broken:
            self._events.broken = False
            raise TransientStorageError("The broker went away.")
        if self._events.held:
            return []
        messages = self._inner.take(timeout)
        self._events.delivered.update(message.partition for message in messages)
        return messages

    def close(self) -> None:
        self._inner.close()


def managed(events: Events, disk: Disk | None = None, clock: ManualClock | None = None, **options) -> MetadataManager:
    """A manager without threads, in manual time; with a disk it takes snapshots."""
    return MetadataManager.start(
        events,
        None if disk is None else FOLDER,
        env=Env(disk=disk or SimulatedDisk(), clock=clock or ManualClock(), chance=SeededChance(7)),
        **({"background": False} | options),
    )


def settled(manager: MetadataManager) -> MetadataManager:
    """The manager after it has applied all there is."""
    while manager.step():
        pass
    return manager


def story(where: TopicPartition) -> Callable[[SegmentCache], tuple[object, ...]]:
    """The question for everything that a cache answers of a partition."""
    return lambda cache: (
        list(cache.segments(where)),
        list(cache.segments(where, TERM)),
        list(cache.unreferenced(where)),
        [cache.segment_for(where, TERM, offset) for offset in range(0, 1000, 50)],
        cache.highest_offset(where, TERM),
        cache.size(where, TERM),
        cache.deletion(where),
    )


def replayed(events: Sequence[SegmentEvent]) -> SegmentCache:
    """What the events make of an empty cache."""
    cache = SegmentCache()
    for event in events:
        try:
            cache.apply(event)
        except InvalidInput:
            continue
    return cache
