"""Bulk jobs on Spark's executors give what threads of one process give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import CorruptData, CursorExpired, InvalidInput, Unsupported, UnsupportedVersion
from strandline.spark.executor_pool import ExecutorPool, FrameJobs, _failed
from tests.bulk.test_export import exported
from tests.matrix_cases import some
from tests.spark.helpers import append, new_log, numbered


@pytest.fixture
def log(tmp_path: Path) -> sl.log.ObjectLog:
    log = new_log(tmp_path)
    for first in range(0, 100, 10):
        append(log, numbered(first, 10))
    return log


def test_an_export_by_executors_has_the_same_records(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path
) -> None:
    there = sl.bulk.export(log, tmp_path / "there", pool=sl.spark.executors(spark), part_bytes=1)
    here = sl.bulk.export(log, tmp_path / "here", part_bytes=1)
    assert there == here
    assert exported(tmp_path / "there").equals(exported(tmp_path / "here"))


def test_a_verification_by_executors_finds_the_same(spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path) -> None:
    (tmp_path / "log" / log.head().tail[3].location).write_bytes(b"damaged")
    there, here = (sl.bulk.verify(log, pool=pool) for pool in (sl.spark.executors(spark), None))
    assert there.damage == here.damage
    assert [damage.offsets for damage in there.damage] == [(30, 40)]
    assert there.examined["records"] == here.examined["records"] == 90


@pytest.mark.matrix
def test_a_snapshot_by_executors_has_the_same_state(spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path) -> None:
    there, here = (
        sl.bulk.build_snapshot(log, tmp_path / name, pool=pool, scratch=tmp_path / f"{name}-scratch", group_bytes=400)
        for name, pool in (("there", sl.spark.executors(spark)), ("here", None))
    )
    assert there.cursor == here.cursor == log.end()
    states = []
    for snapshot in (there, here):
        with sl.followers.AppendLogStore.import_from(snapshot.folder, f"{snapshot.folder}-store") as store:
            states.append(list(store.range()))
    assert states[0] == states[1] != []


def test_files_are_loaded_by_executors_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strandline.bulk.loading.PART_BYTES", 1)
    (tmp_path / "in").mkdir()
    for number in range(4):
        lines = [f'{{"id": {row}}}\n' for row in range(number * 10, number * 10 + 10)]
        (tmp_path / "in" / f"{number}.jsonl").write_text("".join(lines))
    log = new_log(tmp_path)
    for _ in range(2):
        done = sl.bulk.load(tmp_path / "in", log, job="a", key="id", pool=sl.spark.executors(spark))
        assert (done.records, done.first) == (40, 0)
    keys = [key for batch in log.read() for key in batch.column("key").to_pylist()]
    assert keys == [b"%d" % row for row in range(40)]


def test_a_table_is_compared_by_executors(spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path) -> None:
    for mode in ("latest", "append", "history"):
        sink = sl.DeltaSink(tmp_path / mode, mode=mode)  # type: ignore[arg-type]
        sl.follow(log, sink, upto="end")
        check = sl.tables.verify(sink, log, pool=sl.spark.executors(spark))
        assert (check.is_clean, check.rows, check.cursor.next) == (True, sink.rows().num_rows, 100)


@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_a_table_is_rebuilt_by_executors_and_followed_from_there(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path, mode: Any
) -> None:
    place = tmp_path / "table"
    sl.follow(log, sl.DeltaSink(place, mode=mode), upto="end")
    DeltaTable(place).delete()  # damaged by another writer
    append(log, numbered(100, 10))
    cursor = sl.spark.rebuild(spark, log, sl.DeltaSink(place, mode=mode), place="executors")
    assert cursor.next == 110
    assert sl.tables.verify(sl.DeltaSink(place, mode=mode), log).is_clean
    append(log, numbered(110, 10))
    following = sl.spark.follow(spark, log, sl.DeltaSink(place, mode=mode), trigger={"availableNow": True})
    following.await_termination(600)
    done = sl.tables.verify(sl.DeltaSink(place, mode=mode), log)
    assert (done.is_clean, sl.DeltaSink(place, mode=mode).cursor(log.log_id)) == (True, log.end())


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["latest", "append", pytest.param("history", marks=pytest.mark.matrix)])
def test_a_new_table_is_built_from_an_offset_of_both_tiers_and_followed_from_there(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path, mode: Any
) -> None:
    sl.tier.attach(log)
    with sl.tier.tiering(log, target=1) as tierer:
        tierer.run_once(everything=True)
    log.trim(grace=0)
    append(log, numbered(100, 10))

    def sink(name: str = "table") -> sl.DeltaSink:
        return sl.DeltaSink(tmp_path / name, mode=mode)

    cursor = sl.spark.rebuild(spark, log.url, sink(), start=33, place="executors")
    assert (cursor.next, sink().start()) == (110, 33)
    append(log, numbered(110, 10))
    sl.spark.follow(spark, log.url, sink(), trigger={"availableNow": True}).await_termination(600)
    with sl.open(log.url) as both:
        check = sl.tables.verify(sink(), both)
        assert (check.is_clean, check.cursor.next) == (True, 120)
        sl.follow(both, sink("twin"), start=33, upto="end")
    by = [(name, "ascending") for name in sink().rows().column_names if "offset" in name]
    assert sink().rows().sort_by(by).equals(sink("twin").rows().sort_by(by))


class Forgets:
    """A transform that loses a row in the first call that finds the mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __call__(self, rows: pa.Table) -> pa.Table:
        import os

        if not rows.num_rows or not os.path.exists(self.mark):
            return rows
        os.unlink(self.mark)
        return rows.slice(1)


@pytest.mark.matrix
def test_rows_that_executors_lost_are_never_committed(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    sink = sl.DeltaSink(tmp_path / "table", mode="append", transform=Forgets(mark))
    sl.follow(log, sink, upto="end")
    version = DeltaTable(tmp_path / "table").version()
    mark.touch()
    with pytest.raises(CorruptData, match="1 missing, 0 too many"):
        sl.spark.rebuild(spark, log, sink, place="executors")
    assert DeltaTable(tmp_path / "table").version() == version
    assert not mark.exists()
    assert sl.spark.rebuild(spark, log, sink, place="executors").next == 100


@pytest.mark.matrix
@pytest.mark.parametrize("mode", some(["append", "latest"], 1))
def test_a_table_of_a_transform_that_spark_runs_is_rebuilt_by_it(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path, mode: Any
) -> None:
    query = "SELECT *, length(value) AS size FROM changes WHERE _offset % 3 = 0"

    def sink(name: str = "table") -> sl.DeltaSink:
        return sl.DeltaSink(tmp_path / name, mode=mode)

    def sizes(name: str = "table") -> list[Any]:
        return sorted(
            sink(name).rows().select(["_offset", "size", "value"]).to_pylist(), key=lambda row: row["_offset"]
        )

    sl.spark.follow(spark, log, sink(), transform=query, trigger={"availableNow": True}).await_termination(600)
    before = sizes()
    for job in (
        lambda: sl.spark.rebuild(spark, log, sink(), verify=False),
        lambda: sl.tables.rebuild(sink(), log),
    ):
        with pytest.raises(InvalidInput, match="come from a transform"):
            job()
    with pytest.raises(Unsupported, match="verify=False"):
        sl.spark.rebuild(spark, log, sink(), transform=query)
    DeltaTable(tmp_path / "table").delete("_offset > 50")  # damaged by another writer
    assert sl.spark.rebuild(spark, log, sink(), transform=query, verify=False).next == 100
    assert sizes() == before
    append(log, numbered(100, 10))
    sl.spark.rebuild(spark, log, sink("other"), transform=query, start=40, verify=False)  # there is none yet
    sl.spark.rebuild(spark, log, sink(), transform=query, start=40, upto=100, verify=False)
    assert (sink().start(), min(row["_offset"] for row in sizes()) >= 40) == (40, True)
    sl.spark.follow(spark, log, sink(), transform=query, trigger={"availableNow": True}).await_termination(600)
    assert (sink().start(), sizes()) == (40, sizes("other"))
    assert {row["_offset"] % 3 for row in sizes()} == {0}


def test_a_table_in_a_database_is_not_rebuilt_by_executors(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path
) -> None:
    sink = sl.SqliteSink(tmp_path / "tables.db", table="orders")
    sl.follow(log, sink, upto="end")
    with pytest.raises(Unsupported, match="build it again without Spark"):
        sl.spark.rebuild(spark, log, sink)


def _raises() -> None:
    raise CursorExpired("gone on purpose")


def test_an_error_of_a_task_is_raised_as_it_is(spark: SparkSession) -> None:
    with pytest.raises(CursorExpired, match="gone on purpose"):
        list(ExecutorPool(spark).run([_raises], "a job"))
    assert list(ExecutorPool(spark).run([], "nothing")) == []


def test_another_version_of_the_package_on_executors_is_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strandline.spark.task_payload.version", lambda _: "0.0.1")
    with pytest.raises(UnsupportedVersion, match=r"The driver has version 0\.0\.1 of strandline and an executor has"):
        list(ExecutorPool(spark).run([dict], "a job"))


@pytest.mark.matrix
def test_executors_copy_a_backlog_and_compact_and_the_command_does_the_same(
    spark: SparkSession, log: sl.log.ObjectLog
) -> None:
    truth = list(log.read())
    sl.tier.attach(log)
    with sl.tier.tiering(log, pool=sl.spark.executors(spark), target=1) as tierer:
        done = tierer.run_once(everything=True)
    assert [(each.start, each.end + 1) for each in done.copied] == [(first, first + 10) for first in range(0, 100, 10)]
    result = CliRunner().invoke(app, ["spark", "compact", log.url, "--all", "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["made"]) == 1
    with sl.open(log.url) as both:
        assert list(both.read()) == truth
    assert not spark.sparkContext._jsc.sc().isStopped(), "a session that was there is not stopped"


def test_the_command_rebuilds_a_table_on_executors(spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path) -> None:
    sl.follow(log, sl.DeltaSink(tmp_path / "table"), upto="end")
    DeltaTable(tmp_path / "table").delete()
    result = CliRunner().invoke(app, ["spark", "rebuild", str(tmp_path / "table"), log.url, "--yes", "--json"])
    assert result.exit_code == 0, result.output
    assert sl.tables.verify(sl.DeltaSink(tmp_path / "table"), log).is_clean


def test_executors_ingest_a_log_and_the_command_goes_on(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path
) -> None:
    target = f"file://{tmp_path}/copy"
    assert sl.bulk.ingest(log.url, target, pool=sl.spark.executors(spark)).records == 100
    append(log, numbered(100, 10))
    result = CliRunner().invoke(app, ["spark", "ingest", log.url, target, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["records"] == 10
    with sl.open(target) as copy:
        assert pa.Table.from_batches(copy.read()) == pa.Table.from_batches(log.read())


def test_items_that_fit_into_no_single_request_are_run_in_several_jobs(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strandline.spark.executor_pool.FRAME_BYTES", 2500)
    items = [bytes([number]) * 1000 for number in range(5)]
    answers = dict(FrameJobs(spark).run(items, lambda item: item[:1]))
    assert answers == {number: bytes([number]) for number in range(5)}


def test_a_lost_connection_to_spark_connect_is_named_by_its_details() -> None:
    lost = "<_MultiThreadedRendezvous of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n\tdetails = "
    error = OSError(lost + '"Socket closed"\n\tdebug_error_string = "UNKNOWN:Error received"\n>')
    assert str(_failed("export", error)).endswith('(export): details = "Socket closed"')
