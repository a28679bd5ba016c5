"""Bulk jobs whose executors and drivers are killed, as real processes: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.log.object import ObjectLog
from tests.bulk.test_export import exported
from tests.bulk.test_snapshot import content, followed
from tests.spark.cluster import Cluster, executor_killer, free_port
from tests.spark.helpers import append, numbered

pytestmark = [pytest.mark.slow, pytest.mark.spark]
BATCHES = 12


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    assert isinstance(log, ObjectLog)
    for first in range(0, BATCHES * 10, 10):
        append(log, numbered(first, 10))
    return log


def read(log: ObjectLog) -> pa.Table:
    with sl.open(log.url) as both:
        return pa.Table.from_batches(list(both.read()))


# --- executors -------------------------------------------------------------------------------------------------------

JOBS = """
import json, sys
import strandline as sl
from pyspark.sql import SparkSession

given = json.load(sys.stdin)

class Asks:
    # A task that names its process before it works, and waits for the answer; pickled by value.
    def __init__(self, task, job):
        self.task, self.job, self.port = task, job, given["port"]
    def __call__(self, *rows):
        import os, socket
        if rows and not rows[0].num_rows:  # the driver asks for the columns
            return self.task(*rows)
        with socket.create_connection(("127.0.0.1", self.port)) as line:
            line.sendall(f"{os.getpid()} {self.job}\\n".encode())
            line.recv(1)
        return self.task(*rows)

class Asking:
    def __init__(self, job):
        self.pool, self.job = sl.spark.executors(spark), job
    @property
    def count(self):
        return self.pool.count
    def run(self, tasks, title):
        return self.pool.run([Asks(task, self.job) for task in tasks], title)

builder = SparkSession.builder
for name, value in given["settings"].items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
log, folder = sl.open(given["log"]), given["folder"]
found = {}
class AskingEachTime(Asking):
    def run(self, tasks, title):
        self.times = getattr(self, "times", 0) + 1
        return self.pool.run([Asks(task, f"{self.job}-{self.times}") for task in tasks], title)

found["export"] = sl.bulk.export(log, f"{folder}/export", pool=Asking("export"), part_bytes=1).upto
found["verify"] = sl.bulk.verify(log, pool=Asking("verify")).examined["records"]
sink = sl.DeltaSink(f"{folder}/table", mode="append", transform=Asks(lambda rows: rows, "rebuild"))
found["rebuild"] = sl.spark.rebuild(spark, log, sink, place="executors").next
files = [f"{folder}/export/{part.path}" for part in sl.bulk.export(log, f"{folder}/export", part_bytes=1).parts]
with sl.open(f"{folder}/loaded", create=True) as target:
    found["load"] = sl.bulk.load(files, target, job="again", pool=Asking("load")).records
pool = AskingEachTime("snapshot")
places = {"scratch": f"{folder}/scratch", "group_bytes": 1}
found["snapshot"] = sl.bulk.build_snapshot(log, f"{folder}/snapshot", pool=pool, **places).cursor.next
found["ingest"] = sl.bulk.ingest(log.url, f"file://{folder}/ingested", pool=Asking("ingest")).records
sl.tier.attach(log)
with sl.tier.tiering(log, pool=Asking("tier"), target=1) as tierer:
    found["tier"] = tierer.run_once(everything=True).copied[-1].end + 1
with sl.tier.tiering(log, pool=Asking("compact")) as tierer:
    found["compact"] = tierer.compact(everything=True).made[-1].end + 1
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.mark.timeout(1800)
def test_jobs_whose_executors_die_within_a_task_are_whole(cluster: Cluster, log: ObjectLog, tmp_path: Path) -> None:
    truth = read(log)
    sink = sl.DeltaSink(tmp_path / "table", mode="append", transform=lambda rows: rows)
    sl.follow(log, sink, upto="end")
    DeltaTable(tmp_path / "table").delete()  # damaged by another writer
    with executor_killer() as (port, killed):
        given = {"port": port, "settings": cluster.settings(), "log": log.url, "folder": str(tmp_path)}
        done = json.loads(cluster.run(["-c", JOBS], given).splitlines()[-1])
    jobs = ("export", "verify", "rebuild", "load", "ingest", "tier", "compact")
    assert done == dict.fromkeys((*jobs, "snapshot"), BATCHES * 10)
    assert set(killed) == {*jobs, "snapshot-1", "snapshot-2"}
    assert exported(tmp_path / "export").sort_by("offset").equals(truth.combine_chunks())
    assert sl.tables.verify(sink, log).is_clean
    assert read(log).equals(truth)
    for name in ("loaded", "ingested"):
        with sl.open(f"file://{tmp_path}/{name}") as copy:
            assert pa.Table.from_batches(list(copy.read())).equals(truth), name
    assert content(tmp_path / "snapshot") == followed(log)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["master", "remote"])
def test_the_command_runs_jobs_on_a_cluster(cluster: Cluster, log: ObjectLog, tmp_path: Path, where: str) -> None:
    if where == "remote":
        options = ["--remote", cluster.connect(free_port(), free_port())]
    else:
        settings = cluster.settings()
        options = ["--master", settings.pop("spark.master")]
        options += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]

    def said(*words: str) -> Any:
        return json.loads(cluster.run(["-m", "strandline.cli", "spark", *options, *words, "--json"]))

    truth = read(log)
    assert said("export", log.url, f"{tmp_path}/export")["records"] == BATCHES * 10
    assert exported(tmp_path / "export").sort_by("offset").equals(truth.combine_chunks())
    assert said("verify", log.url)["findings"] == []
    sink = sl.DeltaSink(tmp_path / "table", mode="append")
    sl.follow(log, sink, upto="end")
    said("rebuild", sink.url, log.url, "--from", "30", "--yes")
    assert sl.DeltaSink(tmp_path / "table", mode="append").rows().num_rows == BATCHES * 10 - 30


# --- drivers ---------------------------------------------------------------------------------------------------------

DRIVER = """
import sys
import strandline as sl
from tests.spark.helpers import quick_session
from tests.spark.bulk.killed_pools import die_at

url, job, function, time = sys.argv[1:]
spark = quick_session("driver")
log = sl.open(url)
size = {"target": 1} if job == "tier" else {}
with sl.tier.tiering(getattr(log, "hot", log), pool=sl.spark.executors(spark), **size) as tierer:
    die_at(function, int(time))
    tierer.run_once(everything=True) if job == "tier" else tierer.compact(everything=True)
"""
STEPS = [
    ("tier", "list_stored", 1),  # all objects of the first wave are stored, and none is published
    ("tier", "list_stored", 2),
    ("tier", "report", 2),  # published, and the slot has moved
    ("tier", "advance", 2),  # published, and the slot has not moved
    ("compact", "list_stored", 1),
    ("compact", "report", 1),  # the new segment is readable beside the old ones
    ("compact", "withdraw", 3),
]


@pytest.mark.parametrize(("job", "function", "time"), STEPS)
def test_a_driver_that_is_killed_between_two_steps_is_continued(
    log: ObjectLog, job: str, function: str, time: int
) -> None:
    truth = read(log)
    sl.tier.attach(log)
    if job == "compact":
        with sl.tier.tiering(log, target=1) as tierer:
            tierer.run_once(everything=True)
    command = [sys.executable, "-c", DRIVER, log.url, job, function, str(time)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert read(log).equals(truth)
    with sl.tier.tiering(log, target=1) as tierer:
        tierer.run_once(everything=True)
    with sl.tier.tiering(log) as tierer:
        tierer.compact(everything=True)
    log.trim(grace=0)
    assert log.bounds().first == BATCHES * 10, "everything is in the cold tier"
    assert read(log).equals(truth)


REBUILD = """
import sys
import strandline as sl
from tests.spark.helpers import quick_session
from tests.spark.bulk.killed_pools import die_at

url, table, function = sys.argv[1:]
spark = quick_session("driver")
die_at(function, 1)
sl.spark.rebuild(spark, url, sl.DeltaSink(table, mode="append"), start=30, place="executors")
"""


@pytest.mark.parametrize(
    "function",
    [
        "check_coverage",  # executors have written the new rows, and compared them
        "create_write_transaction",
        "_settle",  # committed, and not durable yet
    ],
)
def test_a_driver_that_is_killed_in_a_rebuild_leaves_the_old_rows_or_the_new_ones(
    log: ObjectLog, tmp_path: Path, function: str
) -> None:
    def sink() -> sl.DeltaSink:
        return sl.DeltaSink(tmp_path / "table", mode="append")

    sl.follow(log, sink(), upto="end")
    command = [sys.executable, "-c", REBUILD, log.url, str(tmp_path / "table"), function]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert sink().start() == (30 if function == "_settle" else 0)
    assert sl.tables.verify(sink(), log).is_clean
    assert sl.tables.rebuild(sink(), log, start=40).next == BATCHES * 10
    append(log, numbered(BATCHES * 10, 10))
    sl.follow(log, sink(), upto="end")
    assert sorted(sink().rows().column("offset").to_pylist()) == list(range(40, BATCHES * 10 + 10))
