"""Spark writes into a log: batch jobs and streams, each row once, whatever is repeated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's custom

import strandline as sl
from strandline.bulk.verifying import verify as verify_log
from strandline.log.object import ObjectLog
from strandline.spark.failures import unwrapped
from tests.matrix_cases import some
from tests.spark.helpers import all_records, append, new_log, numbered

NOW = {"availableNow": True}


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    return new_log(tmp_path, "target")


def save(frame: DataFrame, log: ObjectLog, **options: object) -> None:
    writer = frame.write.format("strandline").mode("append")
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.save(log.url)


def numbers(spark: SparkSession, first: int, end: int, partitions: int = 3) -> DataFrame:
    frame = spark.range(first, end, numPartitions=partitions)
    return frame.select(F.col("id").cast("string").alias("key"), F.col("id").cast("string").alias("value"))


def values(log: ObjectLog) -> list[bytes]:
    return [value for value in all_records(log).column("value").to_pylist() if value is not None]


def text(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def refused(action: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        action()
    return unwrapped(caught.value)


def check(log: ObjectLog) -> None:
    assert verify_log(log).findings == []
    assert not list(log.store.list("staged/"))


def test_the_rows_of_a_job_are_records_in_the_order_of_its_partitions(spark: SparkSession, log: ObjectLog) -> None:
    save(numbers(spark, 0, 1000, partitions=4), log)
    save(numbers(spark, 1000, 1500, partitions=1), log)
    assert values(log) == text(0, 1500)
    check(log)


def test_all_columns_of_a_record_can_be_written_and_read_again(spark: SparkSession, log: ObjectLog) -> None:
    rows = (
        "select binary('k') key, binary('v') value, cast(1 as tinyint) op, timestamp '2026-01-02 03:04:05' timestamp, "
    )
    save(
        spark.sql(rows + "map('h', binary('x')) headers union all select null, null, 0, timestamp_seconds(1), null"),
        log,
    )
    found = spark.read.format("strandline").load(log.url)
    copy = new_log(Path(log.url.removeprefix("file://")).parent, "copy")
    save(found, copy)  # its offsets are not written: the target numbers the records itself
    for records in (all_records(log), all_records(copy)):
        first, second = records.sort_by("op").to_pylist()[::-1]
        assert (first["key"], first["value"], first["op"], first["headers"]) == (b"k", b"v", 1, [("h", b"x")])
        assert first["timestamp"].isoformat() == "2026-01-02T03:04:05+00:00"
        assert (second["key"], second["value"], second["headers"]) == (None, None, None)


@pytest.mark.matrix
def test_a_typed_log_takes_the_fields_of_its_values_as_columns(spark: SparkSession, tmp_path: Path) -> None:
    schema = pa.schema({"id": pa.int64(), "name": pa.string()})
    log = sl.open(f"file://{tmp_path}/typed", create=True, value=sl.values.Json(schema))
    assert isinstance(log, ObjectLog)
    save(spark.sql("select 'k' _key, id, concat('n', id) name from range(3)"), log)
    found = spark.read.format("strandline").option("decode", "true").load(log.url)
    rows = [(bytes(row._key), row.id, row.name) for row in found.orderBy("id").collect()]
    assert rows == [(b"k", 0, "n0"), (b"k", 1, "n1"), (b"k", 2, "n2")]
    error = refused(lambda: save(spark.sql("select 'x' id"), log))
    assert "id" in str(error)


@pytest.mark.matrix
def test_a_job_with_a_name_is_in_the_log_once(spark: SparkSession, log: ObjectLog) -> None:
    save(numbers(spark, 0, 10), log, job="load")
    save(numbers(spark, 0, 10, partitions=7), log, job="load")
    save(numbers(spark, 10, 20), log, job="other")
    assert values(log) == text(0, 20)
    error = refused(lambda: save(numbers(spark, 0, 11), log, job="load"))
    assert isinstance(error, sl.errors.Diverged)
    assert "10 rows, and now it has 11" in str(error)
    save(numbers(spark, 0, 11), log, job="load", repeated="accept")
    assert values(log) == text(0, 20)
    check(log)


@pytest.mark.matrix
def test_the_numbers_of_a_series_of_jobs_grow(spark: SparkSession, log: ObjectLog) -> None:
    save(numbers(spark, 0, 5), log, job="nightly", number=20261116)
    save(numbers(spark, 5, 9), log, job="nightly", number=20261118)
    save(numbers(spark, 5, 9), log, job="nightly", number=20261118)
    assert values(log) == text(0, 9)
    error = refused(lambda: save(numbers(spark, 5, 9), log, job="nightly", number=20261117))
    assert isinstance(error, sl.errors.OutOfOrder)
    assert values(log) == text(0, 9)


@pytest.mark.matrix
def test_the_number_of_a_job_may_be_a_time(spark: SparkSession, log: ObjectLog) -> None:
    for number in (1_794_900_000_000_000, 1_794_900_000_000_001, 1_794_900_000_000_001):
        save(numbers(spark, 0, 2), log, job="nightly", number=number)
    assert values(log) == [*text(0, 2), *text(0, 2)]
    error = refused(lambda: save(numbers(spark, 0, 2), log, job="other", number=(1 << 63) - 1))
    assert "number is at most" in str(error)


@pytest.mark.matrix
def test_a_conditional_job_is_written_only_at_the_expected_end(spark: SparkSession, log: ObjectLog) -> None:
    save(numbers(spark, 0, 4), log, expectedOffset=0)
    error = refused(lambda: save(numbers(spark, 4, 6), log, expectedOffset=3))
    assert isinstance(error, sl.errors.ExpectationFailed)
    save(numbers(spark, 4, 6), log, expectedOffset=4)
    assert values(log) == text(0, 6)


@pytest.mark.matrix
def test_a_job_that_fails_writes_nothing_and_can_be_repeated(spark: SparkSession, log: ObjectLog) -> None:
    def broken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if b"17" in batch.column("value").cast(pa.binary()).to_pylist():
                raise ValueError("broken on purpose")

    frame = numbers(spark, 0, 20, partitions=2)
    with pytest.raises(Exception, match="broken on purpose"):
        save(frame.mapInArrow(broken, frame.schema), log, job="load")
    assert values(log) == []
    save(frame, log, job="load")
    assert values(log) == text(0, 20)
    assert verify_log(log).findings == []


def test_an_empty_job_writes_nothing(spark: SparkSession, log: ObjectLog) -> None:
    save(numbers(spark, 0, 0), log, job="empty")
    assert values(log) == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("write", "says"),
    some(
        [
            (lambda f, u: f.write.format("strandline").mode("overwrite").save(u), "A log only grows"),
            (lambda f, u: f.write.format("strandline").mode("append").save(f"{u}-none"), "There is no log at"),
            (
                lambda f, u: f.write.format("strandline").mode("append").option("jobs", "a").save(u),
                "did you mean 'job'?",
            ),
            (lambda f, u: f.write.format("strandline").mode("append").option("number", "1").save(u), "option job"),
            (
                lambda f, u: f.write.format("strandline").mode("append").option("writer", "a").save(u),
                "option of streams",
            ),
            (lambda f, _: f.write.format("strandline").mode("append").save("memory://x"), "one process's memory"),
            (lambda f, _: f.write.format("strandline").mode("append").save("wal:///tmp/x"), "outbox"),
            (lambda f, _: f.write.format("strandline").mode("append").save("grpc://localhost:1"), "outbox"),
            (
                lambda f, u: f.withColumn("x", F.lit(1)).write.format("strandline").mode("append").save(u),
                "DataFrame has x",
            ),
            (lambda f, u: f.select("value", "value").write.format("strandline").mode("append").save(u), "value"),
        ],
        4,
    ),
)
def test_what_cannot_be_written_is_refused_with_one_sentence(
    spark: SparkSession, log: ObjectLog, write: Callable[[DataFrame, str], None], says: str
) -> None:
    error = refused(lambda: write(numbers(spark, 0, 2), log.url))
    assert says in str(error)
    assert values(log) == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    "time", some(["1763392000123L", "timestamp_ntz '2026-01-02 03:04:05'", "date '2026-01-02'"], 1)
)
def test_times_of_an_unknown_unit_or_zone_are_refused(spark: SparkSession, tmp_path: Path, time: str) -> None:
    plain = new_log(tmp_path, "plain")
    typed = sl.open(f"file://{tmp_path}/typed", create=True, value=sl.values.Json(pa.schema({"timestamp": pa.int64()})))
    assert isinstance(typed, ObjectLog)
    for log, name in ((plain, "timestamp"), (typed, "_timestamp")):
        error = refused(lambda log=log, name=name: save(spark.sql(f"select 'k' key, {time} {name}"), log))
        assert f"The column {name} is of type" in str(error)
        assert values(log) == []
    save(spark.sql("select 1763392000123L timestamp"), typed)  # a field of its values
    assert len(values(typed)) == 1


def test_a_log_is_created_if_that_is_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/new"
    numbers(spark, 0, 3).write.format("strandline").mode("append").option("create", "true").save(url)
    assert sl.open(url).bounds().next == 3


# --- streams -----------------------------------------------------------------------------------------------------


def stream(spark: SparkSession, source: ObjectLog, log: ObjectLog, checkpoint: Path, **options: Any) -> None:
    """Copy a log into another one until its end, two source batches at a time."""
    records = spark.readStream.format("strandline").option("maxBatchesPerTrigger", "2").load(source.url)
    writer = records.selectExpr("key", "value").writeStream.format("strandline").trigger(**NOW)
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.option("checkpointLocation", str(checkpoint)).start(log.url).awaitTermination(600)


@pytest.fixture
def source(tmp_path: Path) -> ObjectLog:
    log = new_log(tmp_path, "source")
    for first in range(0, 50, 10):
        append(log, numbered(first, 10))
    return log


def same(source: ObjectLog, log: ObjectLog) -> None:
    columns = ["key", "value"]
    assert all_records(log).select(columns).equals(all_records(source).select(columns))
    check(log)


@pytest.mark.matrix
def test_a_stream_from_log_to_log_is_exact_over_restarts(
    spark: SparkSession, source: ObjectLog, log: ObjectLog, tmp_path: Path
) -> None:
    stream(spark, source, log, tmp_path / "checkpoint")
    same(source, log)
    append(source, numbered(50, 5))
    stream(spark, source, log, tmp_path / "checkpoint")
    same(source, log)


@pytest.mark.matrix
def test_a_micro_batch_that_spark_repeats_after_a_crash_is_written_once(
    spark: SparkSession, source: ObjectLog, log: ObjectLog, tmp_path: Path
) -> None:
    """As if the driver died after the records were listed, and before Spark noted that."""
    checkpoint = tmp_path / "checkpoint"
    stream(spark, source, log, checkpoint)
    commits = sorted(path for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())
    commits[-1].unlink()
    (checkpoint / "commits" / f".{commits[-1].name}.crc").unlink(missing_ok=True)
    append(source, numbered(50, 5))
    stream(spark, source, log, checkpoint)
    same(source, log)


@pytest.mark.matrix
def test_a_checkpoint_that_is_older_than_the_log_ends_the_stream_and_loses_nothing(
    spark: SparkSession, source: ObjectLog, log: ObjectLog, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    stream(spark, source, log, checkpoint, writer="copy")
    same(source, log)
    shutil.rmtree(checkpoint)
    error = refused(lambda: stream(spark, source, log, checkpoint, writer="copy"))
    assert isinstance(error, sl.errors.OutOfOrder)
    assert "older than the log" in str(error)
    same(source, log)


@pytest.mark.matrix
def test_two_streams_with_one_name_lose_nothing_silently(spark: SparkSession, log: ObjectLog, tmp_path: Path) -> None:
    """Both are at the same micro-batch, with the same number of rows."""
    other = new_log(tmp_path, "other")
    append(other, numbered(200, 50))
    small = new_log(tmp_path, "small")
    append(small, numbered(100, 50))
    stream(spark, small, log, tmp_path / "one", writer="copy")
    error = refused(lambda: stream(spark, other, log, tmp_path / "two", writer="copy"))
    assert isinstance(error, sl.errors.Diverged)
    assert "each query needs a writer of its own" in str(error)
    stream(spark, small, log, tmp_path / "one", writer="copy")
    same(small, log)


@pytest.mark.matrix
def test_two_streams_write_into_one_log(spark: SparkSession, source: ObjectLog, log: ObjectLog, tmp_path: Path) -> None:
    for name in ("one", "two"):
        stream(spark, source, log, tmp_path / name)
    assert sorted(values(log)) == sorted(2 * values(source))
    check(log)


def test_the_options_of_batch_jobs_are_refused_in_streams(
    spark: SparkSession, source: ObjectLog, log: ObjectLog, tmp_path: Path
) -> None:
    error = refused(lambda: stream(spark, source, log, tmp_path / "checkpoint", job="a"))
    assert "option of batch jobs" in str(error)
