"""The metadata manager: events published and visible, and starting again beside replaying everything."""

from __future__ import annotations

import logging
import os
import time
from statistics import median
from uuid import UUID

from benchmarks.harness import Result, scratch, seconds
from strandline.formats.segment.events import encode_event
from strandline.log.topic.memory import MemoryTopic
from strandline.model.segments import (
    SegmentEvent,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.tier.metadata.manager import MetadataManager

_PARTITIONS = 50
_LOGS = 200
_BULK = 40_000
_AT_ONCE = 1_000
_ROUNDS = 5
_SEGMENTS = 1_000_000
_MISSED = 1_000


def _place(number: int) -> TopicPartition:
    return TopicPartition(f"orders-{number}", UUID(int=(number + 1) << 70), 0)


def _copied(places: list[TopicPartition], begin: int, end: int) -> list[SegmentEvent]:
    """The two events of each segment; the segments of all logs in turn."""
    events: list[SegmentEvent] = []
    for number in range(begin, end):
        where, start = places[number % len(places)], 100 * (number // len(places))
        name = SegmentId(where, UUID(bytes=os.urandom(16), version=4))
        told = {"segment": name, "broker": 1, "event_timestamp": 1_700_000_000_000 + number}
        events.append(
            SegmentMetadata(
                **told, start=start, end=start + 99, max_timestamp=1_700_000_000_000, terms=((3, start),), size=1 << 20
            )
        )
        events.append(SegmentUpdate(**told, state=SegmentState.COPY_FINISHED))
    return events


def _published() -> Result:
    places = [_place(number) for number in range(_LOGS)]
    rates = []
    for turn in range(_ROUNDS):
        events = _copied(places, turn * _BULK // 2, (turn + 1) * _BULK // 2)
        with MetadataManager.start(MemoryTopic(_PARTITIONS)) as manager:
            manager.reconcile_assignment(range(_PARTITIONS))

            def publish(events: list[SegmentEvent] = events, manager: MetadataManager = manager) -> None:
                for at in range(0, len(events), _AT_ONCE):
                    manager.publish_all(events[at : at + _AT_ONCE])

            rates.append(len(events) / seconds(publish))
            if sum(len(manager.segments(where)) for where in places) != len(events) // 2:
                raise AssertionError("what returned is not visible")
    beside = f"{_AT_ONCE:,} in one go, each waited for until it can be read; {_PARTITIONS} partitions"
    return Result("metadata_published_and_visible", median(rates), "events/s", ">= 20000", beside)


def _caught_up(manager: MetadataManager, places: list[TopicPartition]) -> None:
    manager.reconcile_assignment(range(_PARTITIONS))
    for where in places:
        if manager.current(where, lambda cache, where=where: cache.segment_for(where, 3, 50), timeout=600) is None:
            raise AssertionError("a segment is not there")


def _restarted(folder: str) -> list[Result]:
    places = [_place(number) for number in range(_LOGS)]
    topic = MemoryTopic(_PARTITIONS)
    asking = MetadataManager.start(topic)

    def tell(begin: int, end: int) -> None:
        for event in _copied(places, begin, end):
            topic.publish(asking.metadata_partition(event.segment.partition), encode_event(event))

    for begin in range(0, _SEGMENTS, 10_000):
        tell(begin, begin + 10_000)

    full = MetadataManager.start(topic)
    replay = seconds(lambda: _caught_up(full, places))
    full.close()

    manager = MetadataManager.start(topic, folder, snapshot_interval=3600)
    _caught_up(manager, places)
    # What the follower waits for: one partition after the other is taken, and it may go on between them.
    held = max(seconds(lambda number=number: manager._partitions[number].take()) for number in range(_PARTITIONS))  # noqa: SLF001
    write = seconds(manager.close)

    lookups = []
    for number in range(20_000):
        where, offset = places[number % _LOGS], (number * 7919) % (100 * _SEGMENTS // _LOGS)
        began = time.perf_counter()
        manager.segment_for(where, 3, offset)
        lookups.append(time.perf_counter() - began)

    tell(_SEGMENTS, _SEGMENTS + _MISSED // 2)
    started: list[MetadataManager] = []
    load = seconds(lambda: started.append(MetadataManager.start(topic, folder, snapshot_interval=3600)))
    rest = seconds(lambda: _caught_up(started[0], places))
    if len(started[0].segments(places[0])) != (_SEGMENTS + _MISSED // 2 + _LOGS - 1) // _LOGS:
        raise AssertionError("segments are missing")
    started[0].close()
    asking.close()
    beside = f"{_SEGMENTS:,} segments of {_LOGS} logs"
    restart = f"{_MISSED:,} new events in {load + rest:.2f} s, everything in {replay:.1f} s"
    return [
        Result(
            "metadata_snapshot_write", write, "s", "<= 5", f"{beside}; the follower waits {held * 1e3:.0f} ms at most"
        ),
        Result("metadata_snapshot_load", load, "s", "<= 5", beside),
        Result("metadata_restart", replay / (load + rest), "times faster", ">= 50", restart),
        Result("metadata_lookup", median(lookups) * 1e6, "µs", "<= 10", f"{beside}, through the manager, a value each"),
    ]


def run() -> list[Result]:
    logging.getLogger("strandline").setLevel(logging.ERROR)
    with scratch() as folder:
        return [_published(), *_restarted(f"{folder}/metadata")]
