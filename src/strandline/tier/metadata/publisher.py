"""Event publisher: publishes segment events and waits until this node has applied them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from strandline.errors import CommitTimedOut, InvalidInput
from strandline.formats.segment.events import encode_event
from strandline.log.topic.contract import Topic
from strandline.model.segments import (
    PartitionDelete,
    SegmentEvent,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.tier.metadata.assignment import Assigner
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.lifecycle import add_segment, update_segment
from strandline.tier.metadata.state import CatchingUp, MetadataState, PositionWaiter, not_ready


class EventPublisher:
    """Writes to the event topic of one manager. Thread-safe."""

    def __init__(
        self,
        events: Topic,
        state: MetadataState,
        assigner: Assigner,
        *,
        wait: Callable[[PositionWaiter, float], None],
        monotonic: Callable[[], float],
        patience: float,
    ) -> None:
        """Publish to ``events``; ``wait`` blocks until a waiter is woken or the time is over."""
        self._events = events
        self._state = state
        self._assigner = assigner
        self._wait = wait
        self._monotonic = monotonic
        self._patience = patience
        self.sent: dict[bytes, SegmentEvent] = {}
        """Events in flight by their bytes: the follower need not decode them again."""

    def publish(self, rows: Mapping[int, Sequence[SegmentEvent]]) -> None:
        """Publish the events of each metadata partition in order; returns when all are applied.

        All partitions are checked before anything is published.
        """
        with ExitStack() as stack:
            waiting: list[tuple[PositionWaiter, list[bytes]]] = []
            for partition, events in rows.items():
                # Before publishing: the follower may apply the event before this thread knows its offset.
                waiter = self._state.expect(partition, _checking(events))
                stack.callback(self._state.release, waiter)
                payloads = [encode_event(event) for event in events]
                stack.callback(self._forget, payloads)
                self.sent.update(zip(payloads, events, strict=True))
                waiting.append((waiter, payloads))
            published = [(waiter, self._published(waiter, payloads)) for waiter, payloads in waiting]
            deadline = self._monotonic() + self._patience
            refused: list[InvalidInput] = []
            for waiter, offsets in published:
                self._applied(waiter, offsets, deadline)
                refused += self._state.refusals(waiter, offsets)
        if refused:
            count = sum(map(len, rows.values()))
            if count > 1:
                refused[0].add_note(f"{len(refused)} of {count} events were refused; the others took effect.")
            raise refused[0]

    def _forget(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self.sent.pop(payload, None)

    def _published(self, waiter: PositionWaiter, payloads: Sequence[bytes]) -> Sequence[int]:
        offsets = self._events.publish_all(waiter.partition, payloads)
        if offsets[0] < waiter.since:
            # Another topic than the one that was followed: the cache does not belong to it.
            why = f"{waiter.since} events are applied, and a new one is at {offsets[0]}"
            self._assigner.replay(waiter.partition, why)
            again = "its topic was made anew and is replayed; publish the event again"
            raise not_ready(CatchingUp(waiter.partition, again))
        self._state.wake_at(waiter, offsets[-1] + 1)
        return offsets

    def _applied(self, waiter: PositionWaiter, offsets: Sequence[int], deadline: float) -> None:
        if not waiter.woken.is_set():
            self._wait(waiter, max(0.0, deadline - self._monotonic()))
        if waiter.error is not None:
            raise waiter.error
        if not waiter.woken.is_set():
            raise CommitTimedOut(
                f"Event {offsets[-1]} of metadata partition {waiter.partition} is published, and this node had not "
                f"applied it after {self._patience} s: look it up later, or publish the same again, which does no harm."
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
