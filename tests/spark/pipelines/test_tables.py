"""Tables that executors write: all kinds, typed values, dead letters, several versions of the package."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import BadRecord, InvalidInput, TransformFailed, UnsupportedVersion
from strandline.spark import follow
from strandline.spark.executor_pool import FrameJobs
from strandline.spark.pipelines.workers import SparkWorkers
from tests.spark.helpers import append, new_log, put

NOW = {"availableNow": True}
ORDER = pa.schema({"id": pa.int64(), "city": pa.string()})


def order(number: int) -> bytes:
    return json.dumps({"id": number, "city": f"city-{number % 5}"}).encode()


@pytest.fixture
def log(tmp_path):
    log = new_log(tmp_path)
    for first in range(0, 300, 100):
        append(log, [put(b"k%d" % (n % 40), b"bad" if n == 117 else order(n)) for n in range(first, first + 100)])
    return log


def rows_of(place: Path) -> list[tuple[object, ...]]:
    return sorted((tuple(row.values()) for row in table_of(place).to_pylist()), key=str)


def table_of(place: Path) -> pa.Table:
    """The rows of a table; letters without the address of their table."""
    table = DeltaTable(str(place)).to_pyarrow_table()
    return table.drop_columns("of_table") if "of_table" in table.column_names else table


def sink_at(place: Path, mode: str) -> sl.DeltaSink:
    """``latest by id`` is a table of the latest values whose key is a field."""
    mode, _, field = mode.partition(" by ")
    more = {"key": field} if field else {}
    return sl.DeltaSink(str(place), mode=mode, value=sl.values.Json(ORDER), dead_letters=f"{place}-letters", **more)


@pytest.mark.parametrize(
    "mode", ["history", pytest.param("latest", marks=pytest.mark.matrix), "append", "latest by id"]
)
def test_executors_write_the_table_that_one_process_would(spark, log, tmp_path, mode):
    sl.follow(log, sink_at(tmp_path / "here", mode), upto="end")
    following = follow(spark, log, sink_at(tmp_path / "there", mode), slot="s", trigger=NOW, place="executors")
    assert following.await_termination(600)
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")
    assert rows_of(tmp_path / "there-letters") == rows_of(tmp_path / "here-letters")
    progress = following.progress()
    assert (progress.records, progress.bad_records, progress.lag) == (300, 1, 0)
    assert progress.jobs == progress.commits == 1
    assert progress.cursor == log.end()


def test_a_bad_record_on_an_executor_ends_the_pipeline_with_its_offset(spark, log, tmp_path):
    sink = sl.DeltaSink(str(tmp_path / "table"), value=sl.values.Json(ORDER))
    following = follow(spark, log, sink, slot="s", trigger=NOW, place="executors")
    with pytest.raises(BadRecord, match="offset 117"):
        following.await_termination(600)
    assert log.slots.list() == []
    assert not (tmp_path / "table").exists()


@pytest.mark.matrix
def test_frames_do_the_same_as_jobs_on_rdds(spark, log, tmp_path):
    """As Spark Connect needs them, which has no RDDs."""
    workers = SparkWorkers(spark, "executors")
    workers._pool._jobs = FrameJobs(spark)
    sink = sink_at(tmp_path / "table", "latest")
    transaction = sink.begin(since=log.start(), upto=log.end(), tasks=2)
    written = workers.run(transaction.parts, log.plan(log.start()), "a test")
    transaction.commit(written)
    sl.follow(log, sink_at(tmp_path / "here", "latest"), upto="end")
    assert rows_of(tmp_path / "table") == rows_of(tmp_path / "here")


def test_an_executor_with_another_version_of_the_package_is_refused(spark, log, tmp_path, monkeypatch):
    monkeypatch.setattr("strandline.spark.task_payload.version", lambda _: "0.0.1")
    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append")
    following = follow(spark, log, sink, trigger=NOW, place="executors")
    with pytest.raises(UnsupportedVersion, match=r"version 0\.0\.1 of strandline and an executor has"):
        following.await_termination(600)


def test_a_small_range_is_written_in_the_driver(spark, log, tmp_path):
    following = follow(spark, log, sl.DeltaSink(str(tmp_path / "table"), mode="append"), trigger=NOW)
    assert following.await_termination(600)
    assert following.progress().jobs == 0


def test_a_transform_that_raises_ends_the_pipeline_at_once_with_its_traceback(spark, log, tmp_path):
    def hopeless(rows: pa.Table) -> pa.Table:
        if rows.num_rows:
            raise RuntimeError("a fault of the user's own function")
        return rows

    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append", transform=hopeless)
    following = follow(spark, log, sink, slot="s", trigger=NOW, place="executors")
    with pytest.raises(TransformFailed, match="a fault of the user's own function") as failed:
        following.await_termination(600)
    assert any("in hopeless" in note for note in failed.value.__notes__)
    assert following.progress().jobs == 1
    assert log.slots.list() == []


def test_a_transform_that_cannot_be_pickled_is_one_sentence(spark, log, tmp_path):
    held = threading.Lock()

    def locked(rows: pa.Table) -> pa.Table:
        with held:
            return rows

    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append", transform=locked)
    following = follow(spark, log, sink, slot="s", trigger=NOW, place="executors")
    with pytest.raises(InvalidInput, match=r"cannot be sent to Spark's executors .*lock.* inside of the function"):
        following.await_termination(600)
