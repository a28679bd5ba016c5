"""Bulk jobs beside their floors.

Verify and a plain read, a snapshot and a follower's fold, a load and an append; export, copies to the cold tier and
compaction beside reading the same records and writing them as one Parquet file.

Each in threads and on Spark's executors on the same two cores. Time is the processor time of all processes, which a
busy machine changes least; the wall time is beside it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import strandline as sl
from benchmarks.harness import Result, scratch
from benchmarks.spark_tables import spent
from strandline.model.records import READ_SCHEMA

SIZES = (100_000, 2_000_000)
ROUNDS = 3
FILES = 8
_BATCH = 50_000


def _table(rows: int) -> pa.Table:
    """Records with random values of 100 bytes; each key is written twice."""
    data = pa.py_buffer(os.urandom(100 * rows))
    ends = pa.py_buffer(memoryview(pa.array(range(0, 100 * rows + 1, 100), pa.int32()).buffers()[1]))
    values = pa.Array.from_buffers(pa.binary(), rows, [None, ends, data])
    keys = pa.array([b"%012d" % (row % (rows // 2)) for row in range(rows)], pa.binary())
    return pa.table({"key": keys, "value": values})


def _filled(folder: str, table: pa.Table) -> Any:
    log = sl.open(folder, create=True)
    with log.producer() as producer:
        for first in range(0, table.num_rows, _BATCH):
            producer.append_batch(table.slice(first, _BATCH))
    return log


class _Jobs:
    """The three jobs and their floors over one log."""

    def __init__(self, folder: str, rows: int) -> None:
        self.folder, self.rows, self.numbers = folder, rows, itertools.count()
        table = _table(rows)
        self.log = self.at = _filled(f"{folder}/log", table)
        Path(f"{folder}/files").mkdir()
        share = -(-rows // FILES)
        for number in range(FILES):
            pq.write_table(table.slice(number * share, share), f"{folder}/files/{number}.parquet", compression="lz4")

    def new(self, name: str) -> str:
        return f"{self.folder}/{name}-{next(self.numbers)}"

    def read(self) -> None:
        if sum(batch.num_rows for batch in self.log.read()) != self.rows:
            raise AssertionError("records are missing")

    def verify(self, pool: Any) -> None:
        if sl.bulk.verify(self.log, pool=pool).examined["records"] != self.rows:
            raise AssertionError("records are missing")

    def fold(self) -> None:
        with sl.followers.AppendLogStore.open(self.new("store"), sync=False) as store:
            sl.follow(self.log, store, upto="end")
            store.export_to(self.new("exported"))

    def snapshot(self, pool: Any) -> None:
        if sl.bulk.build_snapshot(self.log, self.new("snapshot"), pool=pool).cursor.next != self.rows:
            raise AssertionError("records are missing")

    def append(self) -> None:
        _filled(self.new("appended"), pq.read_table(f"{self.folder}/files"))

    def load(self, pool: Any) -> None:
        log = sl.open(self.new("loaded"), create=True)
        if sl.bulk.load(f"{self.folder}/files", log, job="bench", pool=pool).records != self.rows:
            raise AssertionError("records are missing")

    def write(self) -> None:
        with pq.ParquetWriter(self.new("floor"), READ_SCHEMA, compression="zstd", use_dictionary=False) as writer:
            for batch in self.at.read():
                writer.write_batch(batch)

    def export(self, pool: Any) -> None:
        if sl.bulk.export(self.log, self.new("export"), pool=pool, part_bytes=16 << 20).upto != self.rows:
            raise AssertionError("records are missing")

    def copied(self) -> None:
        """Unmeasured: a copy of the log, with an empty cold tier."""
        self.drop()
        self.at = sl.open(shutil.copytree(f"{self.folder}/log", self.new("copy")))
        sl.tier.attach(self.at)

    def tier(self, pool: Any) -> None:
        with sl.tier.tiering(self.at, pool=pool, target=16 << 20) as tierer:
            if tierer.run_once(everything=True).copied[-1].end + 1 != self.rows:
                raise AssertionError("records are missing")

    def tiered(self) -> None:
        """Unmeasured: a copy of the log in small segments."""
        self.copied()
        with sl.tier.tiering(self.at, pool=sl.bulk.ThreadPool(2), target=4 << 20) as tierer:
            tierer.run_once(everything=True)

    def compact(self, pool: Any) -> None:
        with sl.tier.tiering(self.at, pool=pool) as tierer:
            if sum(each.end + 1 - each.start for each in tierer.compact(everything=True).made) < self.rows // 2:
                raise AssertionError("hardly anything was merged")

    def drop(self) -> None:
        """Remove the last copy."""
        if self.at is not self.log:
            self.at.close()
            shutil.rmtree(self.at.url.removeprefix("file://"))
            self.at = self.log


def _measured(sides: dict[str, Callable[[], object]], prepare: Callable[[], object]) -> dict[str, tuple[float, float]]:
    """Median processor and wall time of each side, which take turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, action in sides.items():
            prepare()
            began = time.perf_counter()
            used = spent(action)
            found[name].append((used, time.perf_counter() - began))
    return {name: (median(cpu for cpu, _ in some), median(wall for _, wall in some)) for name, some in found.items()}


def run(only: str = "") -> list[Result]:
    """Measure; some minutes. ``only``: the jobs whose titles have this text."""
    spark = sl.spark.local_session("bench-bulk", cores=2, memory="2g")
    pools = {"threads": sl.bulk.ThreadPool(2), "Spark local[2]": sl.spark.executors(spark)}
    results: list[Result] = []
    for rows in SIZES:
        with scratch() as folder:
            jobs = _Jobs(folder, rows)
            for title, floor, job, prepare in (
                ("verify / plain read", jobs.read, jobs.verify, jobs.drop),
                ("snapshot / fold and export", jobs.fold, jobs.snapshot, jobs.drop),
                ("load / read_table and append_batch", jobs.append, jobs.load, jobs.drop),
                ("export / read and write Parquet", jobs.write, jobs.export, jobs.drop),
                ("copy to the cold tier / read and write Parquet", jobs.write, jobs.tier, jobs.copied),
                ("compaction / read and write Parquet", jobs.write, jobs.compact, jobs.tiered),
            ):
                if only not in title or (job == jobs.compact and rows < max(SIZES)):  # a small log is one segment
                    continue
                prepare()
                job(pools["Spark local[2]"])  # starts the workers
                sides: dict[str, Callable[[], object]] = {"floor": floor}
                sides |= {name: (lambda pool=pool, job=job: job(pool)) for name, pool in pools.items()}
                times = _measured(sides, prepare)
                cpu, wall = times["floor"]
                for name in pools:
                    ours, long = times[name]
                    beside = f"CPU {ours:.2f} s beside {cpu:.2f} s; wall {long:.2f} s beside {wall:.2f} s"
                    label = f"bulk: {title}, {rows / 1e6:g} M records, {name}, by CPU time"
                    results.append(Result(label, ours / cpu, "times", "", beside))
    return results
