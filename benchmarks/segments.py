"""The segment cache: lookups among a million segments, events applied, and its tables written and loaded."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from uuid import UUID

from benchmarks.harness import Result, seconds
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState, SegmentUpdate, TopicPartition
from strandline.tier.metadata.cache import SegmentCache

_SEGMENTS = 1_000_000
_TERMS = 5
_LENGTH = 100
_LOOKUPS = 20_000
_BATCH = 10_000
_ROUNDS = 5


def _events(partitions: list[TopicPartition], chance: random.Random) -> Iterator[list[SegmentMetadata | SegmentUpdate]]:
    """A copy started and finished for each segment, in batches."""
    each = _SEGMENTS // len(partitions)
    for at in range(0, _SEGMENTS, _BATCH):
        batch: list[SegmentMetadata | SegmentUpdate] = []
        for number in range(at, at + _BATCH):
            partition, place = partitions[number % len(partitions)], number // len(partitions)
            segment, start = SegmentId(partition, UUID(int=chance.getrandbits(128))), place * _LENGTH
            batch += (
                SegmentMetadata(
                    segment=segment,
                    start=start,
                    end=start + _LENGTH - 1,
                    broker=1,
                    max_timestamp=number,
                    event_timestamp=number,
                    terms=((place * _TERMS // each, start),),
                    size=1 << 20,
                ),
                SegmentUpdate(
                    segment=segment,
                    broker=1,
                    event_timestamp=number,
                    state=SegmentState.COPY_FINISHED,
                    custom_metadata=b"a place of its own",
                ),
            )
        yield batch


def _apply(cache: SegmentCache, partitions: list[TopicPartition], chance: random.Random) -> float:
    """Events per second, without what it takes to make them."""
    took = 0.0
    for batch in _events(partitions, chance):
        began = time.perf_counter()
        for event in batch:
            cache.apply(event)
        took += time.perf_counter() - began
    return 2 * _SEGMENTS / took


def _lookup(cache: SegmentCache, partitions: list[TopicPartition], chance: random.Random) -> float:
    """Microseconds of the middle one."""
    each, took = _SEGMENTS // len(partitions), []
    for _ in range(_LOOKUPS):
        partition, place = chance.choice(partitions), chance.randrange(each)
        term, offset = place * _TERMS // each, place * _LENGTH + chance.randrange(_LENGTH)
        began = time.perf_counter_ns()
        found = cache.segment_for(partition, term, offset)
        took.append(time.perf_counter_ns() - began)
        if found is None or not found.start <= offset <= found.end:
            raise AssertionError(f"{offset} was answered with {found}")
    return median(took) / 1e3


def _value() -> float:
    """Microseconds of making a checked value and nothing else: how the machine does right now."""
    made, took = next(_events([TopicPartition("orders", UUID(int=1), 0)], random.Random(1)))[0], []
    for _ in range(_LOOKUPS):
        began = time.perf_counter_ns()
        replace(made)
        took.append(time.perf_counter_ns() - began)
    return median(took) / 1e3


def _lookups(
    caches: dict[str, SegmentCache], partitions: list[TopicPartition], chance: random.Random, beside: str
) -> list[Result]:
    """In turns, so that a slow spell of the machine hits all of them; the first turn also makes what is made lazily."""
    took: dict[str, list[float]] = {name: [] for name in ("value", *caches)}
    for _ in range(_ROUNDS):
        took["value"].append(_value())
        for name, cache in caches.items():
            took[name].append(_lookup(cache, partitions, chance))
    beside = f"{beside}; a value alone, checked, {median(took['value']):.1f} µs"
    return [Result(name, median(took[name]), "µs", "<= 10", beside) for name in caches]


def _of(partitions: int, name: str) -> list[Result]:
    chance = random.Random(1)
    among = [TopicPartition("orders", UUID(int=chance.getrandbits(128)), at) for at in range(partitions)]
    cache = SegmentCache()
    rate = _apply(cache, among, chance)
    tables = cache.to_tables()
    loaded = SegmentCache.from_tables(tables)
    beside = f"1 M segments in {partitions:,} partitions"
    written = median(seconds(cache.to_tables) for _ in range(_ROUNDS))
    read = median(seconds(lambda: SegmentCache.from_tables(tables)) for _ in range(_ROUNDS))
    return [
        Result(f"segments_apply{name}", rate, "events/s", ">= 60000", beside),
        *_lookups({f"segments_lookup{name}": cache, f"segments_lookup_loaded{name}": loaded}, among, chance, beside),
        Result(f"segments_to_tables{name}", written, "s", "<= 2", beside),
        Result(f"segments_from_tables{name}", read, "s", "<= 2", beside),
    ]


def run() -> list[Result]:
    return [*_of(1, ""), *_of(1_000, "_spread")]
