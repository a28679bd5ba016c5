"""Bulk jobs whose Python workers are killed within their tasks: the result is that of a quiet run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import strandline as sl
from strandline.errors import JobFailed
from strandline.model.records import Op
from strandline.model.segments import SegmentState
from strandline.spark.executor_pool import ExecutorPool
from strandline.tier.copy.segment_files import segment_path
from tests.bulk.test_export import exported
from tests.bulk.test_snapshot import content, followed
from tests.spark.bulk.killed_pools import KilledOnce, KillingPool
from tests.spark.helpers import append, new_log, numbered


@pytest.fixture
def log(tmp_path: Path) -> sl.log.ObjectLog:
    log = new_log(tmp_path)
    for first in range(0, 100, 10):
        append(log, numbered(first, 10))
    return log


@pytest.fixture
def pool(spark: SparkSession, request: Any, tmp_path: Path) -> KillingPool:
    return KillingPool(sl.spark.executors(spark), tmp_path, request.param)


def read(log: sl.log.ObjectLog) -> pa.Table:
    with sl.open(log.url) as both:
        return pa.Table.from_batches(list(both.read()))


@pytest.mark.matrix
@pytest.mark.parametrize("pool", ["put"], indirect=True)
def test_an_export_that_loses_a_worker_is_whole(pool: KillingPool, log: sl.log.ObjectLog, tmp_path: Path) -> None:
    done = sl.bulk.export(log, tmp_path / "there", pool=pool, part_bytes=1)
    assert pool.killed() == {"PartTask"}
    assert done == sl.bulk.export(log, tmp_path / "here", part_bytes=1)
    assert exported(tmp_path / "there").equals(exported(tmp_path / "here"))


@pytest.mark.matrix
@pytest.mark.parametrize("pool", ["fetch"], indirect=True)
def test_a_verification_that_loses_a_worker_counts_each_record_once(pool: KillingPool, log: sl.log.ObjectLog) -> None:
    done = sl.bulk.verify(log, pool=pool)
    assert pool.killed()
    assert done.examined["records"] == 100
    assert done.examined == sl.bulk.verify(log).examined


@pytest.mark.matrix
@pytest.mark.parametrize("pool", ["put"], indirect=True)
def test_a_load_that_loses_a_worker_has_each_row_once(pool: KillingPool, log: sl.log.ObjectLog, tmp_path: Path) -> None:
    sl.bulk.export(log, tmp_path / "export", part_bytes=1)
    with new_log(tmp_path, "loaded") as target:
        files = sorted((tmp_path / "export").glob("part-*"))
        assert sl.bulk.load(files, target, job="again", pool=pool).records == 100
        assert pool.killed() == {"LoadTask"}
        assert sl.bulk.load(files, target, job="again", pool=pool.pool).records == 100, "it is in the log"
        assert read(target).equals(read(log))


@pytest.mark.matrix
@pytest.mark.parametrize("pool", ["put"], indirect=True)
def test_a_snapshot_that_loses_workers_is_that_of_a_follower(
    pool: KillingPool, log: sl.log.ObjectLog, tmp_path: Path
) -> None:
    done = sl.bulk.build_snapshot(log, tmp_path / "snapshot", pool=pool, group_bytes=1)
    assert pool.killed() == {"ReduceTask", "MergeTask"}
    assert content(done.folder) == followed(log)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", pytest.param("latest", marks=pytest.mark.matrix)])
def test_a_rebuild_that_loses_a_worker_is_right(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path, mode: Any
) -> None:
    mark = tmp_path / "killed"
    sink = sl.DeltaSink(tmp_path / "table", mode=mode, transform=KilledOnce(mark))
    mark.touch()
    sl.follow(log, sink, upto="end")
    DeltaTable(tmp_path / "table").delete()  # damaged by another writer
    mark.unlink()
    assert sl.spark.rebuild(spark, log, sink, place="executors").next == 100
    assert mark.exists()
    assert sl.tables.verify(sink, log).is_clean


@pytest.mark.matrix
@pytest.mark.parametrize("pool", ["put"], indirect=True)
def test_a_backlog_whose_copies_lose_workers_is_copied_once(pool: KillingPool, log: sl.log.ObjectLog) -> None:
    truth = read(log)
    sl.tier.attach(log)
    with sl.tier.tiering(log, pool=pool, target=1) as tierer:
        done = tierer.run_once(everything=True)
    assert pool.killed() == {"CopyTask"}
    assert [(each.start, each.end + 1) for each in done.copied] == [(first, first + 10) for first in range(0, 100, 10)]
    check_cold(log, done.copied)
    assert read(log).equals(truth)


@pytest.mark.parametrize("pool", ["listed_batches"], indirect=True)
def test_a_compaction_that_loses_a_worker_replaces_each_segment_once(pool: KillingPool, log: sl.log.ObjectLog) -> None:
    append(log, [(b"k3", None, Op.PURGE)])
    sl.tier.attach(log)
    with sl.tier.tiering(log, target=1) as tierer:
        tierer.run_once(everything=True)
    truth = read(log)
    with sl.tier.tiering(log, pool=pool) as tierer:
        done = tierer.compact(everything=True)
    assert pool.killed() == {"RewriteTask"}
    assert (len(done.made), len(done.replaced)) == (1, 11)
    with sl.tier.tiering(log, grace=0) as tierer:
        tierer.run_once()  # deletes the replaced ones
    check_cold(log, done.made)
    assert read(log).equals(truth)


def check_cold(log: sl.log.ObjectLog, segments: Any) -> None:
    """The segments are readable, and nothing else is stored beside them."""
    root = Path(log.url.removeprefix("file://"))
    files = {path.name for path in root.rglob("*.parquet")}
    assert {segment.state for segment in segments} == {SegmentState.COPY_FINISHED}
    assert files == {Path(segment_path(segment.segment, segment.start)).name for segment in segments}


class Fails:
    """A task with an error of its own, which counts how often it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self) -> None:
        with open(f"{self.folder}/runs", "a") as file:
            file.write("x")
        raise ZeroDivisionError("on purpose")


def test_a_job_is_not_run_again_for_an_error_of_a_task(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="on purpose"):
        list(ExecutorPool(spark).run([Fails(tmp_path)], "a job"))
    assert (tmp_path / "runs").read_text() == "x"
