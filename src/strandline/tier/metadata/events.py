"""Segment events of one node: assignment of metadata partitions, the follower that applies events, the publisher."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from strandline.errors import CommitTimedOut, CorruptData, CursorExpired, InvalidInput, UnsupportedVersion
from strandline.formats.segment.events import decode_event, encode_event
from strandline.log.topic.contract import Assignment, Message, Topic, TopicSubscription
from strandline.model.segments import (
    PartitionDelete,
    SegmentEvent,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.storage.metrics import SEGMENT_EVENTS
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.lifecycle import add_segment, update_segment
from strandline.tier.metadata.state import CatchingUp, Decoded, MetadataState, PositionWaiter, not_ready

_LOGGER = logging.getLogger(__name__)
_REPLAYED: Final = "All events of metadata partition %d are replayed: %s."
_ATTEMPTS: Final = 3
"""How often to restart at once a partition that is trimmed meanwhile; then the timer retries."""


@dataclass(slots=True)
class Assigner:
    """Adds and removes partitions, one call at a time, from any thread. Blocks on the topic, never on a reader's lock.

    A partition that cannot be started stays assigned and is not ready; :meth:`retry` starts it again.
    """

    events: Topic
    assignment: Assignment
    state: MetadataState
    _serial: threading.Lock = field(default_factory=threading.Lock)

    def reconcile(self, wanted: Collection[int]) -> None:
        """Follow exactly these partitions: drop and add the difference, and retry those that could not be started."""
        with self._serial:
            for partition in self.state.partitions_where(lambda progress: progress.assigned):
                if partition not in wanted:
                    # It must stop answering before its events stop.
                    self.state.drop(partition)
                    self.assignment.remove(partition)
            for partition in sorted(wanted):
                if not self.state.progress(partition).assigned:
                    self.state.assign(partition)
            self._start_waiting()

    def retry(self) -> None:
        """Start the partitions that could not be started before."""
        with self._serial:
            self._start_waiting()

    def recover(self) -> None:
        """Restart the partitions that the subscription dropped because their next event is deleted."""
        with self._serial:
            left = set(self.assignment.partitions())
            for partition in self.state.partitions_where(lambda progress: progress.is_followed):
                if partition not in left:
                    self.state.set_target(partition, None)
            self._start_waiting()

    def pause(self, partition: int) -> None:
        """Unsubscribe a partition, not ready, until :meth:`retry` restarts it at its position."""
        with self._serial:
            if self.state.progress(partition).is_followed:
                self.state.set_target(partition, None)
                self.assignment.remove(partition)

    def replay(self, partition: int, why: str) -> None:
        """Discard the cache of a partition and replay all its events."""
        with self._serial:
            if self.state.progress(partition).is_followed:
                _LOGGER.warning(_REPLAYED, partition, why)
                self.state.forget(partition)
                self._start_waiting()

    def leave(self, partition: int) -> None:
        """Unsubscribe a stopped partition; it stays assigned."""
        with self._serial:
            if self.state.progress(partition).trouble:
                self.assignment.remove(partition)

    def _start_waiting(self) -> None:
        for partition in self.state.partitions_where(lambda progress: progress.is_waiting):
            try:
                self._start(partition)
            except Exception as error:  # noqa: BLE001 - the partition stays not ready, and the others continue
                _LOGGER.warning("Metadata partition %d cannot be started and is tried again: %s", partition, error)

    def _start(self, partition: int) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            self.assignment.remove(partition)  # it may be subscribed at another position
            bounds = self.events.bounds(partition)
            start, replay = self.state.resume(partition, bounds)
            if replay:
                _LOGGER.warning(_REPLAYED, partition, replay)
            try:
                self.assignment.add(partition, start)
            except CursorExpired:
                if attempt == _ATTEMPTS:
                    raise
                continue  # trimmed since the bounds were fetched
            # Only now: a partition at its target is ready, and must be subscribed by then.
            self.state.set_target(partition, bounds.next)
            return


_APPLIED, _REFUSED, _UNDECODABLE = (SEGMENT_EVENTS.labels(name) for name in ("applied", "refused", "undecodable"))
_BLOCK: Final = 256
"""How many events are applied under one lock: readers wait a few milliseconds at most."""


@dataclass(frozen=True, slots=True)
class EventFollower:
    """Applies published events to the caches, one round per call. Used by one thread."""

    subscription: TopicSubscription
    assigner: Assigner
    state: MetadataState
    known: Mapping[bytes, SegmentEvent]
    """Events in flight by their bytes: they are not decoded again."""

    def step(self, timeout: float) -> bool:
        """Take and apply the next events, waiting up to ``timeout`` seconds. False if none arrived.

        Raises what the subscription raises, except for deleted events: their partition is restarted.
        """
        try:
            messages = self.subscription.take(timeout)
        except CursorExpired as error:
            _LOGGER.warning("Segment events were deleted before they were followed: %s", error)
            self.assigner.recover()
            return True
        rows: dict[int, list[Message]] = {}
        for message in messages:
            rows.setdefault(message.partition, []).append(message)
        for partition, row in rows.items():
            for begin in range(0, len(row), _BLOCK):
                if not self._apply(partition, row[begin : begin + _BLOCK]):
                    break
        return bool(messages)

    def _apply(self, partition: int, messages: Sequence[Message]) -> bool:
        """Apply messages of one partition; False if the messages after them must not be applied."""
        decoded: list[Decoded] = []
        newer: tuple[int, UnsupportedVersion] | None = None
        for _, offset, payload in messages:
            event = self.known.get(payload)
            try:
                if event is None:
                    event = decode_event(payload, f"Event {offset} of metadata partition {partition}")
                decoded.append((offset, event))
            except CorruptData as error:
                decoded.append((offset, error))
            except UnsupportedVersion as error:
                newer = offset, error
                break
        try:
            done = self.state.absorb(partition, decoded)
        except Exception:
            _LOGGER.exception("Metadata partition %d could not be applied and is not ready.", partition)
            self.assigner.leave(partition)
            return False
        _APPLIED.inc(done.applied)
        _REFUSED.inc(len(done.refused))
        _UNDECODABLE.inc(len(done.skipped))
        for offset, refusal in done.refused:
            _LOGGER.info("Event %d of metadata partition %d is refused: %s", offset, partition, refusal)
        for offset, reason in done.skipped:
            _LOGGER.warning("Event %d of metadata partition %d is skipped: %s", offset, partition, reason)
        if done.gap:
            # Taken before the partition was restarted from an earlier position, or offsets are missing. Nothing
            # skips a gap: delivery restarts at the position.
            _LOGGER.warning("Events of metadata partition %d arrived out of order and are taken again.", partition)
            self.assigner.pause(partition)
            return False
        if newer is not None:
            offset, unknown = newer
            if self.state.stop(partition, offset, str(unknown).rstrip(".")):
                _LOGGER.error("Metadata partition %d is not ready: %s", partition, unknown)
                self.assigner.leave(partition)
            return False
        return True


@dataclass(frozen=True, slots=True)
class EventPublisher:
    """Writes to the event topic of one manager. Thread-safe."""

    events: Topic
    state: MetadataState
    assigner: Assigner
    wait: Callable[[PositionWaiter, float], None]
    """Blocks until a waiter is woken or the time is over."""
    monotonic: Callable[[], float]
    patience: float
    sent: dict[bytes, SegmentEvent] = field(default_factory=dict)
    """Events in flight by their bytes: the follower need not decode them again."""

    def publish(self, rows: Mapping[int, Sequence[SegmentEvent]]) -> None:
        """Publish the events of each metadata partition in order; returns when all are applied.

        All partitions are checked before anything is published.
        """
        with ExitStack() as stack:
            waiting: list[tuple[PositionWaiter, list[bytes]]] = []
            for partition, events in rows.items():
                # Before publishing: the follower may apply the event before this thread knows its offset.
                waiter = self.state.expect(partition, _checking(events))
                stack.callback(self.state.release, waiter)
                payloads = [encode_event(event) for event in events]
                stack.callback(self._forget, payloads)
                self.sent.update(zip(payloads, events, strict=True))
                waiting.append((waiter, payloads))
            published = [(waiter, self._published(waiter, payloads)) for waiter, payloads in waiting]
            deadline = self.monotonic() + self.patience
            refused: list[InvalidInput] = []
            for waiter, offsets in published:
                self._applied(waiter, offsets, deadline)
                refused += self.state.refusals(waiter, offsets)
        if refused:
            count = sum(map(len, rows.values()))
            if count > 1:
                refused[0].add_note(f"{len(refused)} of {count} events were refused; the others took effect.")
            raise refused[0]

    def _forget(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self.sent.pop(payload, None)

    def _published(self, waiter: PositionWaiter, payloads: Sequence[bytes]) -> Sequence[int]:
        offsets = self.events.publish_all(waiter.partition, payloads)
        if offsets[0] < waiter.since:
            # Another topic than the one that was followed: the cache does not belong to it.
            why = f"{waiter.since} events are applied, and a new one is at {offsets[0]}"
            self.assigner.replay(waiter.partition, why)
            again = "its topic was created again and is replayed; publish the event again"
            raise not_ready(CatchingUp(waiter.partition, again))
        self.state.wake_at(waiter, offsets[-1] + 1)
        return offsets

    def _applied(self, waiter: PositionWaiter, offsets: Sequence[int], deadline: float) -> None:
        if not waiter.woken.is_set():
            self.wait(waiter, max(0.0, deadline - self.monotonic()))
        if waiter.error is not None:
            raise waiter.error
        if not waiter.woken.is_set():
            raise CommitTimedOut(
                f"Event {offsets[-1]} of metadata partition {waiter.partition} is published, but this node had not "
                f"applied it after {self.patience} s: look it up later, or publish the same again, which does no harm."
            )


def _checking(events: Sequence[SegmentEvent]) -> Callable[[SegmentCache], None]:
    """A check that refuses what the cache would refuse, as far as that is known before the events are applied.

    Events after a partition's deletion or a segment's removal in the same call are only checked when applied.
    """

    def check(cache: SegmentCache) -> None:
        # By numbers, whose hash costs a tenth of that of a segment's id.
        made: dict[tuple[int, int, int], SegmentMetadata | None] = {}
        deleting: set[TopicPartition] = set()
        for event in events:
            if isinstance(event, PartitionDelete):
                if event.partition not in deleting:
                    cache.check(event)
                    deleting.add(event.partition)
            elif not deleting or event.segment.partition not in deleting:
                where = event.segment.partition
                key = event.segment.id.int, where.topic_id.int, where.partition
                if key not in made:
                    cache.check(event)
                    if len(events) > 1:
                        made[key] = _after(cache.get(event.segment), event)
                elif (current := made[key]) is not None:
                    made[key] = _after(current, event)

    return check


def _after(current: SegmentMetadata | None, event: SegmentMetadata | SegmentUpdate) -> SegmentMetadata | None:
    """The segment after an event; None if that is not known before it is applied."""
    if isinstance(event, SegmentMetadata):
        return add_segment(current, event)
    after = None if current is None else update_segment(current, event)
    return None if after is None or after.state is SegmentState.DELETE_FINISHED else after
