"""Trimming costs what was written or trimmed since the last round, not what is there."""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from uuid import uuid4

from benchmarks.backlog import filled
from benchmarks.harness import Result, scratch
from strandline.log.object import ObjectLog, open_log
from strandline.model.head import WriterId
from strandline.model.records import record_batch
from strandline.model.retention import Consumed
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import ObjectStore

_FEW = 1_000
_MANY = 100_000
_WRITTEN = 300
_ROUNDS = 5


class Counted:
    """A store that counts what it is asked for."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str):
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def counted(*args, **options):
            self.asked[name] += 1
            return value(*args, **options)

        return counted


class Side:
    """A log with so many entries, of which the same number is written and trimmed in each round."""

    def __init__(self, folder: str, entries: int) -> None:
        filled(folder, entries)
        self.store = Counted(LocalStore(folder))
        self.log: ObjectLog = open_log(self.store)
        self.log.set_retention(Consumed())
        self.position = self.log.bounds().first
        self.log.slots.create("reader", self.position)
        self.seconds: list[float] = []
        self.asked: list[int] = []
        for _ in range(3):
            self.log.trim(grace=0)

    def round(self, *, trim: bool) -> None:
        row = record_batch(timestamps=[1], ops=[0], keys=[b"k"], values=[b"v" * 100])
        writer = WriterId(uuid4())
        for number in range(_WRITTEN):
            self.log.append(row, writer=writer, number=number).result()
        if trim:
            self.position += 100 * _WRITTEN // 4
            slot = self.log.slots.claim("reader", "bench")
            slot.advance(self.log.start().at(self.position))
        self.store.asked.clear()
        began = time.perf_counter()
        self.log.trim(grace=0)
        self.seconds.append(time.perf_counter() - began)
        self.asked.append(self.store.asked.total())


def _compare(folder: str, *, trim: bool) -> list[Result]:
    small, large = Side(f"{folder}/small", _FEW), Side(f"{folder}/large", _MANY)
    for _ in range(_ROUNDS):
        small.round(trim=trim)
        large.round(trim=trim)
    what = "trim" if trim else "sweep"
    done = f"{_WRITTEN} batches written" + (f", {_WRITTEN // 4} trimmed" if trim else "") + " since the last round"
    beside = f"{_FEW:,} listed, {median(small.seconds) * 1e3:.0f} ms; {done}"
    calls = f"{median(small.asked):.0f} store calls"
    return [
        Result(f"{what}_100k_listed", median(large.seconds) / median(small.seconds), "ratio", "<= 1.5", beside),
        Result(f"{what}_100k_listed_calls", median(large.asked) / median(small.asked), "ratio", "<= 1.3", calls),
    ]


def run() -> list[Result]:
    with scratch() as folder:
        return [*_compare(f"{folder}/sweep", trim=False), *_compare(f"{folder}/trim", trim=True)]
