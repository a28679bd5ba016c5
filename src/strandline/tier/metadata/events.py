"""Segment events of one node: the follower applies those of the assigned metadata partitions, in rounds of its threads;
checks of new events.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from strandline.errors import CorruptData, CursorExpired, StrandlineError, UnsupportedVersion
from strandline.formats.segment.events import decode_event
from strandline.log.topic.contract import Assignment, Message, Topic, TopicSubscription
from strandline.model.segments import (
    PartitionDelete,
    SegmentEvent,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.storage.clock import Clock
from strandline.storage.metrics import SEGMENT_EVENTS
from strandline.storage.worker_thread import WorkerThread
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.lifecycle import add_segment, update_segment
from strandline.tier.metadata.snapshot import MetadataSnapshots
from strandline.tier.metadata.state import Decoded, MetadataPartition, PartitionCopy, PositionWaiter

_LOGGER = logging.getLogger(__name__)
_REPLAYED: Final = "All events of metadata partition %d are replayed: %s."
_ATTEMPTS: Final = 3
"""How often to restart at once a partition that is trimmed meanwhile; then the timer retries."""
_APPLIED, _REFUSED, _UNDECODABLE = (SEGMENT_EVENTS.labels(name) for name in ("applied", "refused", "undecodable"))
_BLOCK: Final = 256
"""How many events are applied under one lock: readers wait a few milliseconds at most."""
_ROUND: Final = 1.0
"""Seconds between retries; also how long the follower waits for events."""
_BREATH: Final = 0.0005
"""Pause in seconds between two partitions of a snapshot, for the follower and readers."""
_PAUSE: Final = 0.01
"""Pause in seconds of a manager without threads that waits for events."""


@dataclass(slots=True)
class EventFollower:
    """Applies the published events of the assigned partitions to their caches.

    One thread takes and applies events (:meth:`step`). Any thread may assign partitions, one call at a time: that
    blocks on the topic, never on a reader's lock. A partition that cannot be started stays assigned and is not ready;
    :meth:`retry` starts it again.
    """

    events: Topic
    partitions: Sequence[MetadataPartition]
    subscription: TopicSubscription
    assignment: Assignment
    known: Mapping[bytes, SegmentEvent]
    """Events in flight by their bytes: they are not decoded again."""
    _serial: threading.Lock = field(default_factory=threading.Lock)

    def reconcile(self, wanted: Collection[int]) -> None:
        """Follow exactly these partitions: drop and add the difference, and retry those that could not be started."""
        with self._serial:
            for each in self.partitions:
                if each.assigned and each.number not in wanted:
                    # It must stop answering before its events stop.
                    each.drop()
                    self.assignment.remove(each.number)
                elif each.number in wanted and not each.assigned:
                    each.assign()
            self._start_waiting()

    def retry(self) -> None:
        """Start the partitions that could not be started, or that the subscription dropped at a deleted event."""
        with self._serial:
            left = set(self.assignment.partitions())
            for each in self.partitions:
                if each.is_followed and each.number not in left:
                    each.set_target(None)
            self._start_waiting()

    def replay(self, partition: int, why: str) -> None:
        """Discard the cache of a partition and replay all its events."""
        with self._serial:
            if self.partitions[partition].is_followed:
                _LOGGER.warning(_REPLAYED, partition, why)
                self.partitions[partition].forget()
                self._start_waiting()

    def _leave(self, partition: int) -> None:
        """Unsubscribe a partition that stopped, or that :meth:`retry` has to restart at its position."""
        with self._serial:
            self.partitions[partition].set_target(None)
            self.assignment.remove(partition)

    def _start_waiting(self) -> None:
        for each in self.partitions:
            if each.is_waiting:
                try:
                    self._start(each)
                except Exception as error:  # noqa: BLE001 - it stays not ready, and the others continue
                    _LOGGER.warning(
                        "Metadata partition %d cannot be started and is tried again: %s", each.number, error
                    )

    def _start(self, partition: MetadataPartition) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            self.assignment.remove(partition.number)  # it may be subscribed at another position
            bounds = self.events.bounds(partition.number)
            start, replay = partition.resume(bounds)
            if replay:
                _LOGGER.warning(_REPLAYED, partition.number, replay)
            try:
                self.assignment.add(partition.number, start)
            except CursorExpired:
                if attempt == _ATTEMPTS:
                    raise
                continue  # trimmed since the bounds were fetched
            # Only now: a partition at its target is ready, and must be subscribed by then.
            partition.set_target(bounds.next)
            return

    def step(self, timeout: float) -> bool:
        """Take and apply the next events, waiting up to ``timeout`` seconds. False if none arrived.

        Raises what the subscription raises, except for deleted events: their partition is restarted.
        """
        try:
            messages = self.subscription.take(timeout)
        except CursorExpired as error:
            _LOGGER.warning("Segment events were deleted before they were followed: %s", error)
            self.retry()
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
            done = self.partitions[partition].absorb(decoded)
        except Exception:
            _LOGGER.exception("Metadata partition %d could not be applied and is not ready.", partition)
            self._leave(partition)
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
            self._leave(partition)
            return False
        if newer is not None:
            offset, unknown = newer
            if self.partitions[partition].stop(offset, str(unknown).rstrip(".")):
                _LOGGER.error("Metadata partition %d is not ready: %s", partition, unknown)
                self._leave(partition)
            return False
        return True


@dataclass(slots=True, eq=False)
class MetadataRounds:
    """The work of a manager, in two threads or step by step; refers to no manager, so that one can be dropped."""

    follower: EventFollower
    snapshots: MetadataSnapshots | None
    interval: float
    """Seconds between two snapshots."""
    clock: Clock
    is_background: bool
    closed: threading.Event = field(default_factory=threading.Event)
    """Set it to end the threads."""
    failure: str = ""
    """Why the last events could not be taken; empty if they could."""
    _due: float = field(init=False)
    _saving: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[WorkerThread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._due = self.clock.monotonic() + self.interval

    def start(self) -> None:
        """Start the threads, if it has any."""
        if self.is_background:
            self._threads = [
                WorkerThread(target, name=f"strandline-metadata-{name}")
                for name, target in (("follower", self._follow), ("maintenance", self._maintain))
            ]
            for thread in self._threads:
                thread.start()

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()
        self._threads = []

    def step(self) -> bool:
        """One round without waiting: take, apply, retry, save if it is time. False if no event arrived."""
        came = self._taken(0.0)
        self.tick()
        return came

    def wait(self, waiter: PositionWaiter, deadline: float) -> bool:
        """Block until the waiter is woken (True) or the time is over; raises the waiter's error."""
        if self.is_background:
            self.clock.wait(waiter.woken, max(0.0, deadline - self.clock.monotonic()))
        else:
            while not waiter.woken.is_set() and self.clock.monotonic() < deadline:
                if not self.step() and not waiter.woken.is_set():
                    self.clock.sleep(_PAUSE)
        if waiter.error is not None:
            raise waiter.error
        return waiter.woken.is_set()

    def tick(self) -> None:
        """Retry assignments, and save if it is time."""
        self.follower.retry()
        if self.clock.monotonic() >= self._due:
            self.save()
            self._due = self.clock.monotonic() + self.interval

    def save(self) -> None:
        """Take a snapshot if events were applied since the last; a failure is logged, and the next one retries."""
        with self._saving:
            if self.snapshots is None or not self.is_unsaved:
                return
            try:
                taken = self._take()
                self.snapshots.save(taken)
            except Exception as error:  # noqa: BLE001 - the events are durable, and a snapshot only saves time
                _LOGGER.warning("The snapshot of the segment cache failed, and is repeated: %s", error)
            else:
                for each in self.follower.partitions:
                    each.saved = taken[each.number].next if each.number in taken else 0

    @property
    def is_unsaved(self) -> bool:
        """Whether any position moved since the last snapshot."""
        return any(each.next != each.saved for each in self.follower.partitions)

    def _take(self) -> dict[int, PartitionCopy]:
        """One partition after another, so that the follower waits for one copy at most."""
        taken = {}
        for each in self.follower.partitions:
            if (copy := each.take()) is not None:
                taken[each.number] = copy
                self.clock.sleep(_BREATH)  # a lock that is retaken at once starves the waiting threads
        return taken

    def _taken(self, timeout: float) -> bool:
        try:
            came = self.follower.step(timeout)
        except StrandlineError as error:
            self.failure = str(error)
            _LOGGER.warning("Segment events cannot be taken now, and are tried again: %s", error)
            if self.is_background:
                self.clock.wait(self.closed, _ROUND)
            return False
        self.failure = ""
        return came

    def _follow(self) -> None:
        while not self.closed.is_set():
            try:
                self._taken(_ROUND)
            except Exception:
                _LOGGER.exception("Following segment events failed; it is retried.")
                self.clock.wait(self.closed, _ROUND)
        self.follower.subscription.close()  # idempotent: of a manager that was dropped, nothing else closes it

    def _maintain(self) -> None:
        while not self.clock.wait(self.closed, min(_ROUND, self.interval)):
            try:
                self.tick()
            except Exception:
                _LOGGER.exception("A round of the metadata manager failed; the next one follows.")


def checking(events: Sequence[SegmentEvent]) -> Callable[[SegmentCache], None]:
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
