"""Scale in the driver: plans of a million batches and of 100,000 segments, jobs of 10,000 tasks, 64 slots."""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Final
from uuid import UUID

import strandline as sl
from benchmarks.backlog import filled
from benchmarks.harness import Result, scratch
from benchmarks.spark_tables import spent
from strandline.formats.segment.writer import SegmentWriter
from strandline.log.read.planning import pack
from strandline.log.topic.memory import MemoryTopic
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.records import record_batch, with_offsets
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState, SegmentUpdate, TopicPartition
from strandline.storage.objects.local import LocalStore
from strandline.tier.copy.segment_files import segment_path
from strandline.tier.copy.segment_tasks import finished
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.read.cold_reader import ColdReader, HotStart

BATCHES: Final = 1_000_000
SEGMENTS: Final = 100_000
STORED: Final = 5_000
"""Segments that have an object: a plan reads the tails of the first 4,096."""
TASKS: Final = 10_000
SLOTS: Final = (2, 8, 16, 32, 64)
PAUSE: Final = 0.25


def run() -> list[Result]:
    """Measure; about ten minutes, of which most builds the logs."""
    return [*_batches(), *_segments(), *_tasks(), *_slots()]


# --- plans -------------------------------------------------------------------------------------------------------


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _measured(plan: Callable[[], list[Span]]) -> tuple[int, float, float, float, float]:
    """Spans, processor time and wall time of a plan, of packing and pickling it for 64 cores, and the memory added."""
    before, began, clock = _peak(), time.process_time(), time.monotonic()
    spans = plan()
    planned, wall = time.process_time() - began, time.monotonic() - clock
    sent = sum(len(pickle.dumps(part)) for part in pack(spans, 64))
    return len(spans), planned, time.process_time() - began, wall, _peak() - before + sent / (1 << 20)


def _plan_batches(folder: str) -> tuple[int, float, float, float, float]:
    log = sl.open(folder)
    log.bounds()
    return _measured(lambda: list(log.plan(log.start())))


def _in_a_process(work: Callable[[], tuple[int, float, float, float, float]]) -> tuple[int, float, float, float, float]:
    """In a process of its own, whose peak of memory is that of the work."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


def _results(what: str, found: tuple[int, float, float, float, float], spans: str) -> list[Result]:
    count, planned, sent, wall, memory = found
    beside = f"{count:,} {spans}; {wall:.1f} s of wall time, {sent:.1f} s with pickling for 64 cores"
    return [
        Result(f"plan_{what}", planned, "CPU-s", "<= 10", beside),
        Result(f"plan_{what}_memory", memory, "MiB", "<= 1024", "added to the driver, with the pickled partitions"),
    ]


def _batches() -> list[Result]:
    with scratch() as folder:
        filled(f"{folder}/log", BATCHES)
        found = _in_a_process(partial(_plan_batches, f"{folder}/log"))
    return _results("million_batches", found, "spans")


def _plan_segments(folder: str) -> tuple[int, float, float, float, float]:
    where = TopicPartition("", UUID(int=1), 0)
    row = record_batch(timestamps=[1], ops=[0], keys=[b"k"], values=[b"v"])
    store = LocalStore(folder)
    with MetadataManager.start(MemoryTopic(1)) as manager:
        manager.reconcile_assignment([0])
        events: list[SegmentMetadata | SegmentUpdate] = []
        for number in range(SEGMENTS):
            segment = SegmentId(where, UUID(int=number + 2))
            writer = SegmentWriter(number)
            seal = b""
            size = 1 << 20
            if number < STORED:
                writer.add(with_offsets([row], number), term=1, listed=1)
                encoded = finished(writer, segment, None)
                store.put(segment_path(segment, number), encoded.parts)
                seal, size = encoded.seal.encode(), encoded.seal.size
            events.append(
                SegmentMetadata(
                    segment=segment, start=number, end=number, broker=0, max_timestamp=0, event_timestamp=1,
                    terms=((1, number),), size=size, custom_metadata=seal, no_transaction_index=True,
                )
            )  # fmt: skip
            events.append(
                SegmentUpdate(
                    segment=segment, broker=0, event_timestamp=1, state=SegmentState.COPY_FINISHED, custom_metadata=seal
                )
            )
        for first in range(0, len(events), 1000):
            manager.publish_all(events[first : first + 1000])
        reader = ColdReader(manager, store, where)
        hot = HotStart(SEGMENTS, 1)
        return _measured(lambda: list(reader.plan(Cursor(where.topic_id, 0), Limit(upto=SEGMENTS), hot)))


def _segments() -> list[Result]:
    with scratch() as folder:
        found = _in_a_process(partial(_plan_segments, folder))
    return _results("100k_segments", found, "spans, the first 4,096 by reading their segments' tails")


# --- jobs --------------------------------------------------------------------------------------------------------


def _small() -> bytes:
    return b"x" * 200


def _paused() -> int:
    time.sleep(PAUSE)
    return 1


def _tasks() -> list[Result]:
    spark = sl.spark.local_session("bench-scale", cores=2, memory="1g")
    pool = sl.spark.executors(spark)
    list(pool.run([_small] * 10, "warm"))
    before, began = _peak(), time.monotonic()
    answers: list[tuple[int, bytes]] = []
    used = spent(lambda: answers.extend(pool.run([_small] * TASKS, "ten thousand tasks")))
    took = time.monotonic() - began
    spark.stop()
    if len(answers) != TASKS:
        raise AssertionError("some tasks did not answer")
    return [
        Result(
            "tasks_10k", used, "CPU-s", "", f"of all processes; {took:.0f} s of wall time, driver with 1 GiB of heap"
        ),
        Result("tasks_10k_memory", _peak() - before, "MiB", "<= 256", "added to the driver's Python process"),
    ]


def _slots() -> list[Result]:
    """Tasks that wait, as those do that read from a distant store: how many slots one driver keeps busy."""
    rates = {}
    for slots in SLOTS:
        spark = sl.spark.local_session("bench-slots", cores=slots, memory="2g")
        pool = sl.spark.executors(spark)
        list(pool.run([_paused] * slots, "warm"))
        began = time.monotonic()
        list(pool.run([_paused] * (slots * 8), "tasks that wait"))
        rates[slots] = slots * 8 / (time.monotonic() - began)
        spark.stop()
    ideal = 1 / PAUSE
    shares = ", ".join(f"{slots}: {rate / (slots * ideal):.2f}" for slots, rate in rates.items())
    most = max(SLOTS)
    return [
        Result(
            "slots_64",
            rates[most] / (most * ideal),
            "of ideal",
            "",
            f"tasks of {PAUSE:g} s that only wait, on two cores; slots: {shares}",
        )
    ]
