"""A log that is tiered, trimmed and compacted while Spark reads it: each record is read once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import strandline as sl
from strandline.log.object import ObjectLog
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
def moving(log: ObjectLog) -> Iterator[list[str]]:
    """A keeper that copies each batch, trims the hot tier at once, and merges segments; what it did."""
    stop, did, failures = threading.Event(), [], []

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

    def take(frame, number: int) -> None:
        rows = [row.offset for row in frame.collect()]
        if number not in seen:
            seen.add(number)
            found.extend(sorted(rows))

    source = spark.readStream.format("strandline").schema("offset LONG").option("maxBatchesPerTrigger", "10")
    writer = source.load(log.url).writeStream.foreachBatch(take).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    with moving(log):
        until_its_source_starts(lambda: writer.start().awaitTermination())
        assert log.bounds().first > 0, "nothing was trimmed"
    assert found == list(range(BATCHES * 10))
