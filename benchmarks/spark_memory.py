"""Executors with 1 GiB of heap, on data that is stored in a seventieth of its size: what their processes take.

A standalone cluster of real processes, two executors with one core each. The limit is that of a container: the heap,
and the overhead that Spark adds to it by default (384 MiB), in which the Python worker lives. All else is the default.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa

import strandline as sl
from benchmarks.harness import Result, scratch
from strandline.model.records import RECORD_SCHEMA, no_headers

MIB: Final = 1 << 20
HEAP: Final = 1024
OVERHEAD: Final = 384
"""MiB that Spark asks for beside a heap of 1 GiB, if nothing is said."""
KEYS: Final = 10_000_000
FEW: Final = 2_000_000
VALUE: Final = b"GET /index.html HTTP/1.1 200 " + b"-" * 391
PER_BATCH: Final = 131_072
EVERY: Final = 0.1
_DRIVER: Final = """
import json, sys
import strandline as sl
from pyspark.sql import SparkSession

given = json.load(sys.stdin)
builder = SparkSession.builder
for name, value in given["settings"].items():
    builder = builder.config(name, value)
sink = sl.DeltaSink(given["table"], mode=given["kind"])
following = sl.spark.follow(builder.getOrCreate(), given["log"], sink, trigger={"availableNow": True})
following.await_termination()
progress = following.progress()
print(json.dumps({"commits": progress.commits, "jobs": progress.jobs}))
"""


def records(first: int, count: int, keys: int) -> pa.Table:
    """Repetitive lines of 420 bytes; keys in order, which the hash spreads over the table."""
    names = [b"%08d" % (number % keys) for number in range(first, first + count)]
    stamps = pa.repeat(pa.scalar(1_750_000_000_000_000 + first), count).view(RECORD_SCHEMA.field("timestamp").type)
    ops, values = pa.repeat(pa.scalar(0, pa.int8()), count), pa.repeat(pa.scalar(VALUE, pa.binary()), count)
    return pa.table([stamps, ops, pa.array(names, pa.binary()), values, no_headers(count)], schema=RECORD_SCHEMA)


def filled(folder: str, count: int) -> tuple[Any, float]:
    """A log of so many keys, and how many bytes in memory are one stored byte."""
    log = sl.open(f"file://{folder}/log-{count}", create=True)
    size = 0
    with log.producer(compression="zstd") as producer:
        for first in range(0, count, PER_BATCH):
            some = records(first, min(PER_BATCH, count - first), count)
            size += some.nbytes
            producer.append_batch(some)
            producer.flush()
    return log, size / sum(span.size for span in log.plan(log.start()))


class Peaks:
    """The highest resident memory of an executor with its Python workers, and of one Python worker, in MiB."""

    def __init__(self) -> None:
        self.executor = self.worker = 0.0

    @contextmanager
    def watched(self) -> Iterator[Peaks]:
        """Look at this process's descendants until the block ends."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(EVERY):
                self._look()

        watching = threading.Thread(target=look, daemon=True)
        watching.start()
        try:
            yield self
        finally:
            done.set()
            watching.join()

    def _look(self) -> None:
        for one in psutil.Process().children(recursive=True):
            try:
                if "CoarseGrainedExecutorBackend" not in " ".join(one.cmdline()):
                    continue
                workers = [worker.memory_info().rss / MIB for worker in one.children(recursive=True)]
                self.worker = max(self.worker, *workers, 0.0)
                self.executor = max(self.executor, one.memory_info().rss / MIB + sum(workers))
            except psutil.Error:
                continue


def run(keys: int = KEYS, few: int = FEW) -> list[Result]:
    """Measure; about a quarter of an hour on two quiet cores."""
    results = []
    with scratch() as folder:
        for count, kinds in ((few, ("append", "history", "latest")), (keys, ("latest",))):
            log, dense = filled(folder, count)
            results += [_measured(f"{folder}/{kind}-{count}", log.url, kind, count, dense) for kind in kinds]
    return results


def _measured(place: str, url: str, kind: str, count: int, dense: float) -> Result:
    from tests.spark.cluster import Cluster

    peaks = Peaks()
    began = time.monotonic()
    with Cluster(Path(place)) as cluster, peaks.watched():
        settings = {**cluster.settings(), "spark.executor.memory": f"{HEAP}m"}
        del settings["spark.executor.extraJavaOptions"]  # as it is by default
        given = {"settings": settings, "log": url, "table": f"{place}-table", "kind": kind}
        found = json.loads(cluster.run(["-c", _DRIVER], given, limit=7200).splitlines()[-1])
    beside = (
        f"the worker alone {peaks.worker:.0f} MiB; {dense:.0f} to 1, {found['commits']} commits, "
        f"{time.monotonic() - began:.0f} s"
    )
    name = f"executor of 1 GiB, {kind}, {count:,} keys"
    return Result(name, peaks.executor, "MiB", f"<= {HEAP + OVERHEAD}", beside)
