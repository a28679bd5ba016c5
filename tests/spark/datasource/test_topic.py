"""A topic as one table: the records of all its partitions, each once, in batch and streaming queries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import strandline as sl
from strandline.errors import InvalidInput, NotALog
from strandline.log.topic.logs import LogTopic, open_object_topic, open_wal_topic
from strandline.spark.failures import unwrapped

PARTITIONS = 3


@pytest.fixture
def topic(tmp_path: Path) -> LogTopic:
    return filled(open_object_topic(f"file://{tmp_path}/topic", PARTITIONS, create=True))


def filled(topic: LogTopic, first: int = 0, count: int = 10) -> LogTopic:
    for number in range(first, first + count):
        topic.publish(number % PARTITIONS, b"%d" % number)
    return topic


def loaded(spark: SparkSession, place: Path, **options: str) -> DataFrame:
    return spark.read.format("strandline").options(logFormat="topic", **options).load(f"file://{place}")


def found(frame: DataFrame) -> list[tuple[int, int, bytes]]:
    return sorted((row.partition, row.offset, bytes(row.value)) for row in frame.collect())


def truth(count: int, first: int = 0) -> list[tuple[int, int, bytes]]:
    return sorted((number % PARTITIONS, number // PARTITIONS, b"%d" % number) for number in range(first, count))


def test_a_batch_query_has_all_partitions(spark: SparkSession, topic: LogTopic, tmp_path: Path) -> None:
    frame = loaded(spark, tmp_path / "topic")
    assert frame.columns == ["partition", "offset", "timestamp", "op", "key", "value", "headers"]
    assert found(frame) == truth(10)
    counts = frame.groupBy("partition").count().collect()
    assert {row["partition"]: row["count"] for row in counts} == {0: 4, 1: 3, 2: 3}
    only = spark.read.format("strandline").option("logFormat", "topic").schema("partition INT")
    assert (
        sorted(row.partition for row in only.load(f"file://{tmp_path}/topic").collect()) == [0] * 4 + [1] * 3 + [2] * 3
    )


@pytest.mark.matrix
def test_positions_are_a_word_or_json_by_partition(spark: SparkSession, topic: LogTopic, tmp_path: Path) -> None:
    some = loaded(spark, tmp_path / "topic", startingOffset='{"0": 2, "1": "latest"}', endingOffset='{"2": 1}')
    assert found(some) == [(0, 2, b"6"), (0, 3, b"9"), (2, 0, b"2")]
    assert found(loaded(spark, tmp_path / "topic", startingOffset="latest")) == []
    for wrong, said in {"7": "JSON by partition", '{"9": 1}': "partition 9", "{": "JSON such as"}.items():
        with pytest.raises(Exception) as caught:
            loaded(spark, tmp_path / "topic", startingOffset=wrong).collect()
        error = unwrapped(caught.value)
        assert isinstance(error, InvalidInput)
        assert said in str(error)


def test_what_is_no_topic_is_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    sl.open(f"file://{tmp_path}/log", create=True)
    with pytest.raises(Exception) as caught:
        loaded(spark, tmp_path / "log").collect()
    assert isinstance(unwrapped(caught.value), NotALog)


@pytest.mark.matrix
def test_a_topic_of_write_ahead_logs_is_read_where_the_disk_is_shared(spark: SparkSession, tmp_path: Path) -> None:
    with filled(open_wal_topic(tmp_path / "topic", PARTITIONS, create=True)):
        frame = spark.read.format("strandline").option("logFormat", "topic").load(f"wal://{tmp_path}/topic")
        assert found(frame) == truth(10)


def run_stream(spark: SparkSession, place: Path, target: Path, **options: str) -> list[Mapping[str, Any]]:
    stream = spark.readStream.format("strandline").options(logFormat="topic", **options).load(f"file://{place}")
    query = (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", f"{target}-checkpoint")
        .trigger(availableNow=True)
        .start(str(target))
    )
    query.awaitTermination(600)
    return [json.loads(progress.json) for progress in query.recentProgress]


@pytest.mark.matrix
def test_a_stream_reads_each_record_of_each_partition_once_over_restarts(
    spark: SparkSession, topic: LogTopic, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    run_stream(spark, tmp_path / "topic", target, maxRecordsPerTrigger="3", slot="stream")
    assert found(spark.read.parquet(str(target))) == truth(10)
    filled(topic, 10, 20)
    run_stream(spark, tmp_path / "topic", target, maxRecordsPerTrigger="6", slot="stream")
    assert found(spark.read.parquet(str(target))) == truth(30)
    for log in topic.logs:
        (slot,) = log.slots.list()
        assert (slot.name, slot.position <= log.bounds().next) == ("stream", True)
