"""The metadata manager: follows segment events and finds the segment that holds an offset in a term."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Final, Self, TypeVar

from strandline.errors import CommitTimedOut, InvalidInput, LogClosed, NotReady, StrandlineError
from strandline.formats.segment.events import encode_event, metadata_partition
from strandline.log.topic.contract import Topic, check_partition
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import Duration, Timeout, checked
from strandline.model.segments import (
    PartitionDelete,
    SegmentEvent,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process, call_in_child
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.events import EventFollower, MetadataRounds, checking
from strandline.tier.metadata.snapshot import MetadataSnapshots
from strandline.tier.metadata.state import (
    CatchingUp,
    MetadataPartition,
    PositionWaiter,
    Readiness,
    Ready,
    Unassigned,
    not_ready,
)

T = TypeVar("T")

PATIENCE: Final = 30.0
"""Seconds that a write waits until this node has applied it."""

_ROUTES: Final = 1 << 16


@bound_to_process()
@checked
class MetadataManager(Closing):
    """Follows the segment events of the assigned metadata partitions, and answers from all of them or not at all.

    Thread-safe. Reads block for milliseconds at most; a read that this node cannot answer yet raises ``NotReady``,
    which is not "none". Writes return when the next read of this node sees them.
    """

    def __init__(
        self,
        events: Topic,
        snapshots: MetadataSnapshots | None,
        interval: float,
        patience: float,
        env: Env,
        *,
        background: bool,
    ) -> None:
        """Use :meth:`start`."""
        self.events = events
        """The topic of the events."""
        self._count = events.partition_count
        self._routes: dict[tuple[int, int], int] = {}
        """Metadata partition by log partition: hashing costs half a lookup."""
        held = {} if snapshots is None else snapshots.load()
        self._partitions = [MetadataPartition(number, *held.get(number, ())) for number in range(self._count)]
        self._subscription, assignment = events.subscribe()
        self._sent: dict[bytes, SegmentEvent] = {}
        """Events in flight by their bytes: the follower need not decode them again."""
        self._follower = EventFollower(events, self._partitions, self._subscription, assignment, self._sent)
        self._rounds = MetadataRounds(self._follower, snapshots, interval, env.clock, background)
        self._patience, self._monotonic = patience, env.clock.monotonic
        self._closing = threading.Lock()
        self._origin = Origin("The metadata manager", self)
        # Its threads do not refer to the manager: one that is dropped unclosed is garbage-collected, and ends them.
        dropped = weakref.finalize(self, self._rounds.closed.set)
        call_in_child(self, lambda _: dropped.detach())
        self._rounds.start()

    @classmethod
    def start(
        cls,
        events: Topic,
        snapshot_dir: Address | None = None,
        snapshot_interval: Duration = 60.0,
        *,
        patience: float = PATIENCE,
        background: bool = True,
        env: Env = SYSTEM,
    ) -> Self:
        """Start a manager: loads its snapshot, if there is a usable one, and follows nothing yet.

        The caller closes the topic of the events. ``snapshot_dir`` is this node's own folder for snapshots, one each
        ``snapshot_interval`` seconds if events were applied meanwhile; without it each start replays all events. Writes
        wait up to ``patience`` seconds until this node has applied them. Without ``background`` no threads follow and
        save, only :meth:`step` and calls that wait do: for tests, and for single-threaded use.
        """
        snapshots = None
        if snapshot_dir is not None:
            folder = as_address(snapshot_dir)
            snapshots = MetadataSnapshots(folder, events.partition_count, events.topic_id, env)
        return cls(events, snapshots, snapshot_interval, patience, env, background=background)

    def reconcile_assignment(self, partitions: Iterable[int]) -> None:
        """Follow exactly these metadata partitions; calls are serialised.

        A new partition resumes at its position, and is ready when it has applied all events published before this call.
        If the topic cannot be reached, the partition is assigned, not ready, and retried by a timer and by the next
        call. ``InvalidInput``, and no change, if there is no such partition.
        """
        wanted = {check_partition(partition, self._count) for partition in partitions}
        if self._rounds.closed.is_set():
            raise LogClosed("The metadata manager is closed: no partition was assigned. Start another one.")
        self._follower.reconcile(wanted)

    def assigned_partitions(self) -> list[int]:
        """The metadata partitions that this node follows, ascending."""
        return [each.number for each in self._partitions if each.assigned]

    def committed_offset(self, partition: int) -> int:
        """The offset of the last applied event of a metadata partition; -1 without any."""
        return self._partitions[check_partition(partition, self._count)].next - 1

    def metadata_partition(self, partition: TopicPartition) -> int:
        """The metadata partition that has the events of a log partition."""
        key = partition.topic_id.int, partition.partition
        number = self._routes.get(key)
        if number is None:
            number = metadata_partition(partition.topic_id, partition.partition, self._count)
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            self._routes[key] = number
        return number

    def ask(self, partition: TopicPartition, question: Callable[[SegmentCache], T]) -> Readiness[T]:
        """Run a lookup on the cache of a partition; the answer, or why this node has none.

        The lookup holds the follower's lock: it must be quick, return values (a list rather than an iterator), and not
        call the manager.
        """
        return self._partitions[self.metadata_partition(partition)].ask(question)

    def current(
        self, partition: TopicPartition, question: Callable[[SegmentCache], T], *, timeout: Timeout = PATIENCE
    ) -> T:
        """Run a lookup that sees every event published before this call (a linearizable read).

        Tiering, deletion and readers use it. ``NotReady``, which is retryable, if the partition is not assigned or
        was not applied in time; ``LogClosed`` after closing.
        """
        known = self._partitions[self.metadata_partition(partition)]
        with known.expecting() as waiter:
            try:
                end = self.events.bounds(known.number).next
            except StrandlineError as error:
                raise NotReady(
                    f"The high-water mark of metadata partition {known.number} cannot be fetched; try again: {error}"
                ) from error
            if end < waiter.since:
                why = f"{waiter.since} events are applied and there are only {end}"
                raise self._created_again(known, why, "ask again in a moment")
            known.wake_at(waiter, end)
            if not self._rounds.wait(waiter, self._monotonic() + timeout):
                why = f": {self._rounds.failure.rstrip('.')}" if self._rounds.failure else ""
                late = f"it was not applied up to {end} in {timeout} s{why}; ask again"
                raise not_ready(CatchingUp(known.number, late))
        match known.ask(question):
            case Ready(answer):
                return answer
            case readiness:
                raise not_ready(readiness)

    def _created_again(self, partition: MetadataPartition, why: str, then: str) -> NotReady:
        """Another topic than the one that was followed: the cache does not belong to it."""
        self._follower.replay(partition.number, why)
        return not_ready(CatchingUp(partition.number, f"its topic was created again and is replayed; {then}"))

    def segment_for(self, partition: TopicPartition, term: int, offset: int) -> SegmentMetadata | None:
        """The segment with an offset in a term; None without one, or if this node does not follow the partition."""
        return self._known(partition, lambda cache: cache.segment_for(partition, term, offset), None)

    def highest_offset(self, partition: TopicPartition, term: int) -> int | None:
        """The highest copied offset of a term; None without any, or if this node does not follow the partition."""
        return self._known(partition, lambda cache: cache.highest_offset(partition, term), None)

    def segments(self, partition: TopicPartition, term: int | None = None) -> list[SegmentMetadata]:
        """All segments, or those of a term, by first offset; empty if this node does not follow the partition."""
        return self._known(partition, lambda cache: list(cache.segments(partition, term)), [])

    def unreferenced(self, partition: TopicPartition) -> list[SegmentMetadata]:
        """The segments that no lookup finds: being copied, being deleted, or superseded by others."""
        return self._known(partition, lambda cache: list(cache.unreferenced(partition)), [])

    def size(self, partition: TopicPartition, term: int) -> int:
        """Total bytes of the segments of a term; 0 if this node does not follow the partition."""
        return self._known(partition, lambda cache: cache.size(partition, term), 0)

    def deletion(self, partition: TopicPartition) -> PartitionDelete | None:
        """State of the partition's deletion; None without one, or if this node does not follow the partition."""
        return self._known(partition, lambda cache: cache.deletion(partition), None)

    def get(self, segment: SegmentId) -> SegmentMetadata | None:
        """One segment; None if unknown, or if this node does not follow its partition."""
        return self._known(segment.partition, lambda cache: cache.get(segment), None)

    def _known(self, partition: TopicPartition, question: Callable[[SegmentCache], T], none: T) -> T:
        match self.ask(partition, question):
            case Ready(answer):
                return answer
            case Unassigned():
                return none
            case CatchingUp() as readiness:
                raise not_ready(readiness)

    def add(self, segment: SegmentMetadata) -> None:
        """Publish a segment whose copy starts; the next read of this node sees it.

        Raises:
            InvalidInput: its state is not copy started, or the event is not a valid step. Either nothing was published,
                or another node was faster and the event changed nothing.
            NotReady: the metadata partition is not assigned, or was unassigned during the wait.
            CommitTimedOut: the event is published, and this node did not apply it in time. Publishing it again is
                harmless.
            LogClosed, OutcomeUnknown: the manager is closed, or was closed during the wait.
        """
        self.publish_all((segment,))

    def update(self, update: SegmentUpdate) -> None:
        """Publish a segment's next state; the next read of this node sees it. Raises as :meth:`add`."""
        self.publish_all((update,))

    def put_partition_delete(self, delete: PartitionDelete) -> None:
        """Publish the state of a partition's deletion; the next read of this node sees it. Raises as :meth:`add`."""
        self.publish_all((delete,))

    def publish_all(self, events: Sequence[SegmentEvent]) -> None:
        """Publish many events and wait once; the events of one partition stay in order.

        If one is refused before publishing, nothing is published. If some are refused when applied, the first such
        error is raised, and the others took effect. Raises as :meth:`add`.
        """
        for event in events:
            if isinstance(event, SegmentMetadata) and event.state is not SegmentState.COPY_STARTED:
                raise InvalidInput(
                    f"Segment {event.segment} cannot be added as {event.state}: add it as copy started, then update it."
                )
        rows: dict[int, list[SegmentEvent]] = {}
        for event in events:
            place = event.partition if isinstance(event, PartitionDelete) else event.segment.partition
            rows.setdefault(self.metadata_partition(place), []).append(event)
        waiting: list[tuple[MetadataPartition, PositionWaiter, list[bytes]]] = []
        with ExitStack() as stack:
            for number, row in rows.items():
                # Before publishing: the follower may apply the event before this thread knows its offset.
                waiter = stack.enter_context(self._partitions[number].expecting(checking(row)))
                payloads = [encode_event(event) for event in row]
                stack.callback(lambda payloads: [self._sent.pop(each, None) for each in payloads], payloads)
                self._sent.update(zip(payloads, row, strict=True))
                waiting.append((self._partitions[number], waiter, payloads))
            published = [(*each[:2], self._published(*each)) for each in waiting]
            deadline = self._monotonic() + self._patience
            refused = [error for each in published for error in self._applied(*each, deadline)]
        if refused:
            if len(events) > 1:
                refused[0].add_note(f"{len(refused)} of {len(events)} events were refused; the others took effect.")
            raise refused[0]

    def _published(
        self, partition: MetadataPartition, waiter: PositionWaiter, payloads: Sequence[bytes]
    ) -> Sequence[int]:
        offsets = self.events.publish_all(partition.number, payloads)
        if offsets[0] < waiter.since:
            why = f"{waiter.since} events are applied, and a new one is at {offsets[0]}"
            raise self._created_again(partition, why, "publish the event again")
        partition.wake_at(waiter, offsets[-1] + 1)
        return offsets

    def _applied(
        self, partition: MetadataPartition, waiter: PositionWaiter, offsets: Sequence[int], deadline: float
    ) -> list[InvalidInput]:
        """The errors of the refused ones among these events, when all are applied."""
        if not self._rounds.wait(waiter, deadline):
            raise CommitTimedOut(
                f"Event {offsets[-1]} of metadata partition {partition.number} is published, but this node had not "
                f"applied it after {self._patience} s: look it up later, or publish the same again, which does no harm."
            )
        return partition.refusals(offsets)

    def step(self) -> bool:
        """One round without waiting: take, apply, retry, save if it is time. False if no event arrived.

        For a manager without threads, used by one thread.
        """
        return self._rounds.step()

    def close(self) -> None:
        """Stop following and take a last snapshot. Idempotent.

        Reads still answer from the applied events; writes fail, also those that wait. Does nothing while the
        interpreter shuts down: its threads are frozen by then, perhaps with a lock that this needs.
        """
        if sys.is_finalizing():
            return
        with self._closing:
            self._rounds.closed.set()
            for each in self._partitions:
                each.close()
            self._subscription.close()
            self._rounds.join()
            self._rounds.save()
