"""A log that is tiered, trimmed and compacted while Spark reads it: each record is read once."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import strandline as sl
from strandline.log.object import ObjectLog
from strandline.spark.datasource.opened import OpenedLog
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.datasource.source import StrandlineDataSource
from strandline.tier.copy.segment_files import forget_tails
from tests.spark.helpers import append, numbered, until_its_source_starts

BATCHES = 60


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    assert isinstance(log, ObjectLog)
    sl.tier.attach(log)
    for first in range(0, BATCHES * 10, 10):
        append(log, numbered(first, 10))
    return log


@contextmanager
def moving(log: ObjectLog, did: list[str] | None = None) -> Iterator[list[str]]:
    """A keeper that copies each batch, trims the hot tier at once, and merges segments; what it did."""
    did = [] if did is None else did
    stop, failures = threading.Event(), []

    def keep() -> None:
        try:
            while not stop.is_set():
                with sl.tier.tiering(log, target=1, linger=0) as tierer:
                    did.extend("copied" for _ in tierer.run_once(everything=True).copied)
                log.trim(grace=0)
                did.append("trimmed")
                with sl.tier.tiering(log) as tierer:
                    did.extend("merged" for _ in tierer.compact(everything=True).made)
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield did
    finally:
        stop.set()
        thread.join(300)
    assert not failures


@pytest.fixture
def cold(log: ObjectLog) -> ObjectLog:
    """The log, all of whose records are in small segments alone."""
    with sl.tier.tiering(log, target=1, linger=0) as tierer:
        tierer.run_once(everything=True)
    log.trim(grace=0)
    assert log.bounds().first == BATCHES * 10
    return log


def compact(log: ObjectLog) -> None:
    with sl.tier.tiering(log) as tierer:
        assert len(tierer.compact(everything=True).replaced) == BATCHES


@pytest.mark.matrix
def test_tasks_that_were_planned_before_a_compaction_read_what_they_planned(
    cold: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = StrandlineDataSource({"path": cold.url, "partitions": "4"}).reader(SPARK_SCHEMA)
    tasks = pickle.dumps(reader.partitions())
    compact(cold)
    forget_tails()
    monkeypatch.delattr(OpenedLog, "_moved")  # a task need not plan again
    found = [batch.column("offset").to_pylist() for task in pickle.loads(tasks) for batch in reader.read(task)]
    assert sorted(offset for some in found for offset in some) == list(range(BATCHES * 10))


@pytest.mark.matrix
def test_frames_that_were_planned_before_a_compaction_find_each_record(spark: SparkSession, cold: ObjectLog) -> None:
    """Spark's own reader of Parquet cannot plan again: it knows only the objects."""
    frame = sl.spark.read(spark, cold.url, columns=["offset"])
    with moving(cold) as did:
        while "merged" not in did:
            assert sorted(row.offset for row in frame.collect()) == list(range(BATCHES * 10))
        assert sorted(row.offset for row in frame.collect()) == list(range(BATCHES * 10))


def reads(spark: SparkSession, log: ObjectLog) -> list[int]:
    frame = spark.read.format("strandline").option("partitions", "4").schema("offset LONG").load(log.url)
    return sorted(row.offset for row in frame.collect())


def test_batch_reads_find_each_record_wherever_it_moves(spark: SparkSession, log: ObjectLog) -> None:
    with moving(log) as did:
        turns = 0
        while turns < 4 or not {"copied", "trimmed", "merged"} <= set(did):
            end = log.bounds().next
            assert reads(spark, log) == list(range(end)), turns
            append(log, numbered(end, 10))
            turns += 1
        assert log.bounds().first > 0, "nothing was trimmed"


@pytest.mark.matrix
def test_a_stream_finds_each_record_wherever_it_moves(spark: SparkSession, log: ObjectLog, tmp_path: Path) -> None:
    found: list[int] = []
    seen: set[int] = set()
    did: list[str] = []

    def take(frame, number: int) -> None:
        rows = [row.offset for row in frame.collect()]
        while "trimmed" not in did:  # else a busy machine could end the stream before anything moves
            threading.Event().wait(0.05)
        if number not in seen:
            seen.add(number)
            found.extend(sorted(rows))

    source = spark.readStream.format("strandline").schema("offset LONG").option("maxBatchesPerTrigger", "10")
    writer = source.load(log.url).writeStream.foreachBatch(take).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    with moving(log, did):
        until_its_source_starts(lambda: writer.start().awaitTermination())
        assert log.bounds().first > 0, "nothing was trimmed"
    assert found == list(range(BATCHES * 10))
