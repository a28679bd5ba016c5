"""Producing: what a ``produce`` call costs in processor time, with one entry and with a hundred."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import strandline as sl
from benchmarks.harness import Result, scratch
from strandline.log.v1.log import open_queue

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
    results = []
    with scratch() as folder:
        single = _single(sl.open(folder, create=True), 200_000)
    for name, opened in places.items():
        one, hundred = [], []
        for _ in range(_ROUNDS):
            with scratch() as folder:
                one.append(_microseconds(opened(f"{folder}/one"), 50_000, 1))
                hundred.append(_microseconds(opened(f"{folder}/hundred"), 5_000, 100) / 100)
        beside = f"processor time until durable and listed, 100 bytes each; an append and nothing else: {single:.2g} µs"
        results += [
            Result(f"produce_1_entry_{name}", median(one), "µs/call", "<= 8", beside),
            Result(f"produce_100_entries_{name}", median(hundred), "µs/entry", "<= 1", beside),
        ]
    return results
