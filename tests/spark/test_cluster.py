"""Pipelines on a standalone cluster and over Spark Connect: nothing is shared but the object store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from tests.servers import S3Server
from tests.spark.cluster import Cluster, executor_killer, free_port
from tests.spark.helpers import append, delete, new_log, put

pytestmark = [pytest.mark.slow, pytest.mark.spark]
ORDER = pa.schema({"id": pa.int64(), "city": pa.string()})
MODES = ("latest", "append", "history")
COUNT = 3_000
QUERY = "SELECT id * 2 AS twice, city, _key, _offset, _timestamp, _op FROM changes WHERE city <> 'city-3' OR _op > 0"

DRIVER = """
import json, socket, sys, urllib.request
import pyarrow as pa
import strandline as sl
from pyspark.sql import SparkSession

given = json.load(sys.stdin)
codec = sl.values.Json(pa.schema({"id": pa.int64(), "city": pa.string()}))

class Gate:
    # Asks the test before it goes on, and says which process asks: a class of this script, pickled by value.
    def __init__(self, port):
        self.port = port
    def __call__(self, rows):
        import os, socket
        if rows.num_rows:
            with socket.create_connection(("127.0.0.1", self.port)) as line:
                line.sendall(f"{os.getpid()} append\\n".encode())
                line.recv(1)
        return rows

builder = SparkSession.builder
if given["remote"]:
    spark = builder.remote(given["remote"]).getOrCreate()
else:
    for name, value in given["settings"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
log = sl.open(given["log"], options=given["options"])
storage = {f"storage.{name}": value for name, value in given["options"].items()}
pipelines = []
for mode in ("latest", "append", "history"):
    gate = Gate(given["gate"]) if given["gate"] and mode == "append" else None
    table = f"{given['tables']}/{mode}"
    letters = f"{given['tables']}/{mode}-letters"
    sink = sl.DeltaSink(
        table, mode=mode, value=codec, dead_letters=letters, options=given["options"], transform=gate
    )
    pipelines.append(
        sl.spark.follow(
            spark, log, sink, slot=mode, trigger={"availableNow": True}, place="executors", options=storage,
            transform=given["transform"],
        )
    )
found = []
for pipeline in pipelines:
    assert pipeline.await_termination(500)
    found.append(pipeline.progress().jobs)
ui = given["ui"] or spark.sparkContext.uiWebUrl
shown = ""
(application,) = json.load(urllib.request.urlopen(f"{ui}/api/v1/applications"))
base = f"{ui}/api/v1/applications/{application['id']}"
for page in ("jobs", "stages", "sql?details=true&length=1000", "environment"):
    shown += urllib.request.urlopen(f"{base}/{page}").read().decode()
jobs = json.load(urllib.request.urlopen(f"{base}/jobs"))
print(json.dumps({"jobs": found, "shown": shown, "titles": [job.get("description", "") for job in jobs]}))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def changes() -> list[Any]:
    rows = []
    for number in range(COUNT):
        key = b"k%d" % (number % 400)
        value = json.dumps({"id": number, "city": f"city-{number % 5}"}).encode()
        rows.append(delete(key) if number % 17 == 16 else put(key, b"bad" if number == 1234 else value))
    return rows


@pytest.fixture
def given(s3_server: S3Server, s3_url: str) -> dict[str, Any]:
    log = sl.open(f"{s3_url}/orders", create=True, options=s3_server.options)
    for first in range(0, COUNT, 250):
        append(log, changes()[first : first + 250])
    options = s3_server.options
    return {"log": log.url, "tables": f"{s3_url}/tables", "options": options, "gate": 0, "transform": None}


def run_driver(cluster: Cluster, given: dict[str, Any]) -> dict[str, Any]:
    """A driver process in a folder of its own, whose environment has no credentials."""
    everything = {"remote": "", "ui": "", "settings": cluster.settings(), **given}
    found: dict[str, Any] = json.loads(cluster.run(["-c", DRIVER], everything).splitlines()[-1])
    return found


def check_tables(given: dict[str, Any], tmp_path: Path, transform=None) -> None:
    """The tables are those that one process builds from the same changes on its own disk."""
    log = new_log(tmp_path, "twin")
    append(log, changes())
    for mode in MODES:
        twin = str(tmp_path / mode)
        sink = sl.DeltaSink(
            twin, mode=mode, value=sl.values.Json(ORDER), dead_letters=f"{twin}-letters", transform=transform
        )
        sl.follow(log, sink, upto="end")
        for suffix in ("", "-letters"):
            table = DeltaTable(f"{given['tables']}/{mode}{suffix}", storage_options=given["options"])
            expected = DeltaTable(twin + suffix).to_pyarrow_table()
            names = expected.column_names
            places = ("_valid_from", "_valid_to", "of_table")  # times, and the address of a letter's own table
            times = [name for name in names if "timestamp" in name or name in places]
            by = [(name, "ascending") for name in names if "offset" in name or name == "_key"]
            found = table.to_pyarrow_table().select(names).cast(expected.schema).sort_by(by)
            assert found.drop_columns(times).equals(expected.sort_by(by).drop_columns(times)), (mode, suffix)


def check_nothing_is_shown(given: dict[str, Any], found: dict[str, Any]) -> None:
    assert given["options"]["secret_access_key"] not in found["shown"]


def test_an_executor_that_dies_in_a_task_costs_no_record_and_doubles_none(cluster, given, tmp_path):
    with executor_killer() as (port, killed):
        found = run_driver(cluster, {**given, "gate": port})
    assert list(killed) == ["append"]
    check_tables(given, tmp_path)
    assert min(found["jobs"]) >= 1
    check_nothing_is_shown(given, found)
    expected = {f"orders → {mode} ({mode}), offsets 0–{COUNT:,}" for mode in MODES}  # noqa: RUF001 - a range
    assert expected <= set(found["titles"])


def only_some(rows: pa.Table) -> pa.Table:
    """What the query does."""
    import pyarrow.compute as pc

    is_kept = pc.or_(pc.fill_null(pc.not_equal(rows["city"], "city-3"), False), pc.greater(rows["_op"], 0))
    kept = rows.filter(is_kept)
    return kept.set_column(0, "twice", pc.multiply(kept["id"], 2))


def test_spark_connect_runs_the_same_pipelines(cluster, given, tmp_path):
    ui = free_port()
    remote = {"remote": cluster.connect(free_port(), ui), "ui": f"http://127.0.0.1:{ui}"}
    found = run_driver(cluster, {**given, **remote})
    check_tables(given, tmp_path)
    assert min(found["jobs"]) >= 1
    again = {**given, **remote, "tables": f"{given['tables']}-transformed", "transform": QUERY, "log": given["log"]}
    log = sl.open(given["log"], options=given["options"])
    for mode in MODES:
        log.slots.drop(mode)
    found = run_driver(cluster, again)
    check_tables(again, tmp_path / "transformed", only_some)
    check_nothing_is_shown(given, found)
