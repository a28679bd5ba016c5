"""Subscription to a Kafka topic: tracks the next offset of each partition itself."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, final

from strandline.errors import ConsumerClosed, CursorExpired, Diverged, Gap, StrandlineError, TransientStorageError
from strandline.log.topic.contract import MAX_TAKEN, Message, check_partition, check_start, offset_expired
from strandline.log.topic.kafka_client import client, refusal
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import Bounds
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, bound_to_process

_POLL_SECONDS: Final = 0.1
"""Seconds of one poll of the library: closing waits no longer for the taking thread."""

_GRACE: Final = 10.0
"""Seconds that closing waits for a running take."""

_QUERY_SECONDS: Final = 1.0
"""Seconds for which a take queries a stalled partition, before it continues with the others."""

_OUT_OF_RANGE: Final = ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE", "_LOG_TRUNCATION")
"""The library's errors when the partition does not have the requested offset."""


@dataclass(slots=True)
class Track:
    """Position of a subscription in a partition."""

    next: int
    """The next offset to deliver: a lower one is dropped, a higher one is not delivered."""

    end: int
    """The highest known end of the partition: if it ends earlier, messages were lost."""

    checked: int = -1
    """The offset that was requested again because another arrived in its place."""


def resume(partition: int, track: Track, bounds: Bounds) -> int | CursorExpired | Diverged:
    """The offset to fetch from, or the error, by the bounds of the partition.

    A position past the end is fetched from the end on, since Kafka refuses more; lower offsets are dropped.

    >>> resume(0, Track(next=7, end=5), Bounds(0, 5))
    5
    >>> resume(0, Track(next=7, end=9), Bounds(8, 9))
    CursorExpired('Partition 0 begins at offset 8, and 7 is no longer retained: bootstrap again, ...
    """
    if track.next < bounds.first:
        return offset_expired(partition, track.next, bounds.first)
    if bounds.next < track.end:
        return Diverged(
            f"Partition {partition} ends at offset {bounds.next} and had reached {track.end}: Kafka lost messages, or "
            "the topic was created again. Bootstrap from its current content."
        )
    return min(track.next, bounds.next)


@bound_to_process()
@final
@checked
class KafkaSubscription:
    """The messages of the assigned partitions, each exactly once and in order. One thread takes, any thread closes.

    Waits for a broker that cannot be reached. The library fetches ahead, within limits: fetched messages are
    delivered even if the broker deleted them meanwhile; then ``CursorExpired`` follows.
    """

    def __init__(
        self,
        topic: str,
        partition_count: int,
        consumer: Any,
        *,
        bounds: Callable[[int, float], Bounds],
        timeout: float,
        env: Env,
        forget: Callable[[KafkaSubscription], None],
    ) -> None:
        """Use :meth:`KafkaTopic.subscribe`."""
        self._kafka = client()
        self._topic = topic
        self._partition_count = partition_count
        self._consumer = consumer
        self._bounds = bounds
        self._timeout = timeout
        self._clock = env.clock
        self._forget = forget
        self._taking = threading.Lock()
        # Protects everything below, and keeps the library's assignment and this one equal.
        self._lock = threading.Lock()
        self._tracks: dict[int, Track] = {}
        self._stalled: set[int] = set()
        self._lost: dict[int, StrandlineError] = {}
        self._errors: deque[StrandlineError] = deque()
        self._closed = False
        self._origin = Origin(f"A subscription of the topic {topic}", self)

    def take(self, timeout: Timeout) -> list[Message]:
        """The next messages; waits up to ``timeout`` seconds for the first."""
        deadline = self._clock.monotonic() + timeout
        with self._taking:
            while not self._closed:
                self._raise_pending()
                left = max(0.0, deadline - self._clock.monotonic())
                messages = self._deliverable(self._fetched(min(left, _POLL_SECONDS)))
                if messages:
                    return messages
                if not left and not self._lost and not self._errors:
                    break
        return []

    def _fetched(self, timeout: float) -> list[Any]:
        """The fetched messages, waiting for the first only: the library would wait for all."""
        first = self._consumer.poll(timeout)
        return [] if first is None else [first, *self._consumer.consume(MAX_TAKEN - 1, 0)]

    def _deliverable(self, fetched: Iterable[Any]) -> list[Message]:
        """The messages to deliver of those that were fetched; advances the positions."""
        messages: list[Message] = []
        with self._lock:
            for found in fetched:
                if (error := found.error()) is not None:
                    self._note(error, found.partition())
                    continue
                partition, offset = found.partition(), found.offset()
                track = self._tracks.get(partition)
                if track is None or offset < track.next or partition in self._lost:
                    continue
                if offset > track.next:
                    self._handle_gap(partition, track, offset)
                    continue
                messages.append(Message(partition, offset, found.value() or b""))
                track.next = offset + 1
                track.end = max(track.end, track.next)
        return messages

    def _handle_gap(self, partition: int, track: Track, offset: int) -> None:
        """Handle an offset above the next one. Under the lock.

        It may be of an earlier assignment, fetched before the partition was removed and added again. So the expected
        offset is requested once more; if another one arrives again, it is a gap.
        """
        if track.checked != track.next:
            track.checked = track.next
            self._stalled.add(partition)
        elif partition not in self._stalled:
            self._lost[partition] = Gap(
                f"Partition {partition} of topic {self._topic} has no offset {track.next}: {offset} comes in its "
                "place. Offsets are dense unless the topic is compacted or written in transactions: bootstrap again, "
                "from a topic that is neither."
            )

    def _note(self, error: Any, partition: int) -> None:
        """Keep an error of the library for the next take without messages. Under the lock."""
        if error.name() in _OUT_OF_RANGE and partition in self._tracks:
            self._stalled.add(partition)
            return
        reason = refusal(error, f"Following partition {partition} of topic {self._topic}")
        # The library retries transient errors by itself.
        if error.fatal() or (partition in self._tracks and not isinstance(reason, TransientStorageError)):
            self._errors.append(reason)

    def _raise_pending(self) -> None:
        """Check stalled partitions, and raise pending errors; no messages are pending then."""
        with self._lock:
            stalled = sorted(self._stalled)
        for partition in stalled:
            try:
                bounds = self._bounds(partition, min(self._timeout, _QUERY_SECONDS))
            except TransientStorageError:
                continue  # it stays stalled until the broker answers; the others continue
            with self._lock:
                if partition in self._stalled and (track := self._tracks.get(partition)) is not None:
                    self._stalled.discard(partition)
                    self._settle(partition, track, bounds)
        with self._lock:
            for partition, reason in self._lost.items():
                self._drop(partition)
                raise reason
            if self._errors:
                raise self._errors.popleft()

    def _settle(self, partition: int, track: Track, bounds: Bounds) -> None:
        match resume(partition, track, bounds):
            case int(position):
                track.end = bounds.next
                place = self._place(partition, position)
                self._consumer.incremental_unassign([place])
                self._consumer.incremental_assign([place])
            case reason:
                self._lost[partition] = reason

    def _place(self, partition: int, offset: int) -> Any:
        return self._kafka.TopicPartition(self._topic, partition, offset)

    def _drop(self, partition: int) -> None:
        """Unassign a partition. Under the lock."""
        if self._tracks.pop(partition, None) is not None:
            self._stalled.discard(partition)
            self._lost.pop(partition, None)
            self._consumer.incremental_unassign([self._place(partition, 0)])

    def close(self) -> None:
        """Release its resources, and wake the taking thread within a moment."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tracks.clear()
            self._lost.clear()
            self._stalled.clear()
        # The library must not be closed during a poll. If a poll takes too long, its client is garbage-collected.
        if self._taking.acquire(timeout=_GRACE):
            try:
                with contextlib.suppress(self._kafka.KafkaException):
                    self._consumer.close()
            finally:
                self._taking.release()
        self._forget(self)

    def add(self, partition: int, start: int) -> None:
        """Deliver a partition from an offset on, unless it is delivered already."""
        check_partition(partition, self._partition_count)
        check_start(start)
        with self._lock:
            self._check_open()
            if partition in self._tracks:
                return
        bounds = self._bounds(partition, self._timeout)
        track = Track(start, bounds.next)
        position = resume(partition, track, bounds)
        if not isinstance(position, int):
            raise position
        with self._lock:
            self._check_open()
            if partition not in self._tracks:
                self._consumer.incremental_assign([self._place(partition, position)])
                self._tracks[partition] = track

    def _check_open(self) -> None:
        if self._closed:
            raise ConsumerClosed("The subscription is closed: no partition was added.")

    def remove(self, partition: int) -> None:
        """Deliver nothing more of a partition."""
        with self._lock:
            self._drop(partition)

    def partitions(self) -> list[int]:
        """The assigned partitions, ascending."""
        with self._lock:
            return sorted(self._tracks)
