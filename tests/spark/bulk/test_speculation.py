"""Speculative execution: Spark runs a slow task twice at the same time, and nothing is there twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.bulk.verifying import verify as verify_log
from strandline.log.object import ObjectLog
from tests.bulk.test_export import exported
from tests.bulk.test_snapshot import content, followed
from tests.spark.cluster import Cluster
from tests.spark.helpers import append, numbered

pytestmark = [pytest.mark.slow, pytest.mark.spark]
BATCHES = 12
COUNT = BATCHES * 10
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.task.duration.threshold": "1s",
}

PRELUDE = """
import json, sys
import pyarrow as pa
import strandline as sl
from pyspark.sql import SparkSession

given = json.load(sys.stdin)
folder = given["folder"]

class Meets:
    # Two attempts of one task begin together, and neither ends before both have worked; pickled by value.
    def __init__(self, name):
        self.mark = f"{folder}/marks/{name}"
    def claimed(self):
        import os
        for attempt in ("first", "second"):
            try:
                os.close(os.open(f"{self.mark}-{attempt}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return attempt
        return None
    def reached(self, step, attempt):
        import pathlib, time
        pathlib.Path(f"{self.mark}-{attempt}-{step}").touch()
        limit = time.monotonic() + 600
        while not all(pathlib.Path(f"{self.mark}-{one}-{step}").exists() for one in ("first", "second")):
            if time.monotonic() > limit:
                raise TimeoutError(f"{self.mark}: the other attempt did not come")
            time.sleep(0.01)

class Twice(Meets):
    def __init__(self, task, name):
        super().__init__(name)
        self.task = task
    def __call__(self):
        attempt = self.claimed()
        if attempt is None:
            return self.task()
        self.reached("began", attempt)
        result = self.task()
        self.reached("worked", attempt)
        return result

class Pool:
    # The first task of each of its jobs is run twice.
    def __init__(self, job):
        self.pool, self.job, self.runs = sl.spark.executors(spark), job, 0
    @property
    def count(self):
        return self.pool.count
    def run(self, tasks, title):
        self.runs += 1
        name = f"{self.job}-{self.runs}"
        return self.pool.run([Twice(tasks[0], name), *tasks[1:]], title)

class TwiceRows(Meets):
    # A transform: the attempts of the task with the first record meet.
    def __call__(self, rows):
        name = "_offset" if "_offset" in rows.column_names else "offset"
        if rows.num_rows and rows.column(name)[0].as_py() == 0:
            attempt = self.claimed()
            if attempt is not None:
                self.reached("began", attempt)
        return rows

class TwiceBatches(Meets):
    # The rows of a DataFrame's first partition: its attempts write all of them, and end together.
    def __call__(self, batches):
        import pyspark
        is_first = pyspark.TaskContext.get().partitionId() == 0
        attempt = self.claimed() if is_first else None
        if attempt is not None:
            self.reached("began", attempt)
        yield from batches
        if attempt is not None:
            self.reached("worked", attempt)

builder = SparkSession.builder
for name, value in given["settings"].items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
log = sl.open(given["log"])
"""
BULK = """
sl.bulk.export(log, f"{folder}/export", pool=Pool("export"), part_bytes=1)
found = {"verified": sl.bulk.verify(log, pool=Pool("verify")).examined["records"]}
files = [f"{folder}/export/{part.path}" for part in sl.bulk.export(log, f"{folder}/export", part_bytes=1).parts]
with sl.open(f"{folder}/loaded", create=True) as target:
    sl.bulk.load(files, target, job="again", pool=Pool("load"))
sl.bulk.ingest(log.url, f"file://{folder}/ingested", pool=Pool("ingest"))
places = {"scratch": f"{folder}/scratch", "group_bytes": 1}
sl.bulk.build_snapshot(log, f"{folder}/snapshot", pool=Pool("snapshot"), **places)
sl.tier.attach(log)
with sl.tier.tiering(log, pool=Pool("tier"), target=1) as tierer:
    tierer.run_once(everything=True)
with sl.tier.tiering(log, pool=Pool("compact")) as tierer:
    found["made"] = len(tierer.compact(everything=True).made)

class Appends:
    # The broken twin: a task that appends by itself.
    def __init__(self, number):
        self.url, self.number = f"file://{folder}/naive", number
    def __call__(self):
        import strandline as sl
        with sl.open(self.url) as log, log.producer() as producer:
            producer.append(value=b"%d" % self.number).result()

with sl.open(f"file://{folder}/naive", create=True) as naive:
    list(Pool("naive").run([Appends(number) for number in range(6)], "naive"))
    found["naive"] = naive.bounds().next
print(json.dumps(found))
"""
ROWS = """
for mode in ("latest", "append", "history"):
    sink = sl.DeltaSink(f"{folder}/{mode}", mode=mode, transform=TwiceRows(f"follow-{mode}"))
    sl.spark.follow(spark, log, sink, trigger={"availableNow": True}, place="executors").await_termination()
    again = sl.DeltaSink(f"{folder}/{mode}-again", mode=mode, transform=TwiceRows(f"rebuild-{mode}"))
    sl.spark.rebuild(spark, log, again, place="executors")
read = spark.read.format("strandline").option("partitions", "4").load(log.url).select("key", "value")
rows = read.mapInArrow(TwiceBatches("write"), read.schema)
rows.write.format("strandline").mode("append").option("create", "true").save(f"file://{folder}/written")
stream = spark.readStream.format("strandline").load(log.url).select("key", "value")
writer = stream.mapInArrow(TwiceBatches("stream"), stream.schema).writeStream.format("strandline")
writer = writer.option("create", "true").option("checkpointLocation", f"{folder}/checkpoint")
sl.spark.start(writer.trigger(availableNow=True), f"file://{folder}/streamed").awaitTermination()
print("{}")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Spark runs a copy of a task on another host only.
    with Cluster(tmp_path_factory.mktemp("cluster"), hosts=("127.0.0.1", "127.0.0.2"), cores=1) as found:
        yield found


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    assert isinstance(log, ObjectLog)
    for first in range(0, COUNT, 10):
        append(log, numbered(first, 10))
    return log


def read(url: str) -> pa.Table:
    with sl.open(url) as both:
        return pa.Table.from_batches(list(both.read()))


def run(cluster: Cluster, script: str, log: ObjectLog, folder: Path) -> tuple[Any, set[str]]:
    """What a driver says, and the names of the tasks of which two attempts ran."""
    (folder / "marks").mkdir()
    given = {"settings": {**cluster.settings(), **SPECULATION}, "log": log.url, "folder": str(folder)}
    said = json.loads(cluster.run(["-c", PRELUDE + script], given).splitlines()[-1])
    return said, {path.name.removesuffix("-second-began") for path in (folder / "marks").glob("*-second-began")}


@pytest.mark.timeout(1800)
def test_bulk_jobs_whose_tasks_run_twice_at_once_give_each_record_once(
    cluster: Cluster, log: ObjectLog, tmp_path: Path
) -> None:
    truth = read(log.url)
    state = followed(log)
    said, doubled = run(cluster, BULK, log, tmp_path)
    jobs = ("export", "verify", "load", "ingest", "snapshot", "tier", "compact", "naive")
    assert {name.rpartition("-")[0] for name in doubled} == set(jobs)
    assert {"snapshot-1", "snapshot-2"} <= doubled
    assert said == {"verified": COUNT, "made": 1, "naive": 7}  # the broken twin has a record twice
    assert exported(tmp_path / "export").sort_by("offset").equals(truth.combine_chunks())
    for name in ("loaded", "ingested"):
        assert read(f"file://{tmp_path}/{name}").equals(truth), name
        with sl.open(f"file://{tmp_path}/{name}") as copy:
            assert verify_log(copy).findings == []
    assert content(tmp_path / "snapshot") == state
    with sl.tier.tiering(log) as tierer:
        tierer.run_once(everything=True)
    assert read(log.url).equals(truth)
    segments = list((tmp_path / "log").rglob("*.parquet"))
    assert len(segments) == 1, "a compacted tier, and no object beside it"


@pytest.mark.timeout(1800)
def test_tables_and_writes_whose_tasks_run_twice_at_once_have_each_row_once(
    cluster: Cluster, log: ObjectLog, tmp_path: Path
) -> None:
    truth = read(log.url)
    _, doubled = run(cluster, ROWS, log, tmp_path)
    modes = ("latest", "append", "history")
    assert doubled == {"write", "stream", *[f"{job}-{mode}" for job in ("follow", "rebuild") for mode in modes]}
    for mode in modes:
        for name in (mode, f"{mode}-again"):
            sink = sl.DeltaSink(tmp_path / name, mode=mode, transform=lambda rows: rows)  # type: ignore[arg-type]
            check = sl.tables.verify(sink, log)
            assert (check.is_clean, check.cursor) == (True, log.end()), (name, check.first)
    columns = ["key", "value"]
    for name in ("written", "streamed"):
        found = read(f"file://{tmp_path}/{name}")
        assert found.select(columns).combine_chunks().equals(truth.select(columns).combine_chunks()), name
        with sl.open(f"file://{tmp_path}/{name}") as copy:
            assert verify_log(copy).findings == []
