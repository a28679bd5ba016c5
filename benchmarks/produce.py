"""Producing: what a ``produce`` call costs in processor time, with one entry and with a hundred.

Counted is the processor time of the whole process, from the first call until everything is durable and listed: of the
calls themselves, of the producer's threads (encoding, uploading, listing), and of collecting garbage. Opening and
closing are not counted. It is not how long a caller in a loop waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import strandline as sl
from benchmarks.harness import Result, scratch
from strandline.compat.v1.log import open_queue

_ROUNDS = 5


def _microseconds(log: Any, calls: int, entries: int) -> float:
    """Processor time of the whole process for each call, until all are durable and listed."""
    batch = [b"v" * 100] * entries
    with log.producer() as producer:
        began = time.process_time()
        for _ in range(calls):
            producer.produce(batch, metadata=b"meta")
        producer.flush()
        return (time.process_time() - began) / calls * 1e6


def _single(log: Any, records: int) -> float:
    """A yardstick for the machine: the processor time of one ``append``."""
    with log.producer() as producer:
        began = time.process_time()
        for _ in range(records):
            producer.append(value=b"v" * 100)
        producer.flush()
        return (time.process_time() - began) / records * 1e6


def calls() -> list[Result]:
    places: dict[str, Callable[[str], Any]] = {"own": lambda place: sl.open(place, create=True), "v1": open_queue}
    one: dict[str, list[float]] = {name: [] for name in places}
    hundred: dict[str, list[float]] = {name: [] for name in places}
    single = []
    with scratch() as folder:
        _single(sl.open(folder, create=True), 100)  # what is imported with the first record is imported once
    for _ in range(_ROUNDS):
        with scratch() as folder:
            single.append(_single(sl.open(f"{folder}/single", create=True), 50_000))
            for name, opened in places.items():
                one[name].append(_microseconds(opened(f"{folder}/one-{name}"), 50_000, 1))
                hundred[name].append(_microseconds(opened(f"{folder}/hundred-{name}"), 5_000, 100) / 100)
    beside = f"processor time until durable and listed, 100 bytes each; one append: {median(single):.2g} µs"
    return [
        result
        for name in places
        for result in (
            Result(f"produce_1_entry_{name}", median(one[name]), "µs/call", "<= 8", beside),
            Result(f"produce_100_entries_{name}", median(hundred[name]), "µs/entry", "<= 1", beside),
        )
    ]
