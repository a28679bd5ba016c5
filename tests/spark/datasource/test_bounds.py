"""Reading by time and key: where a query begins, which batches it skips, which rows it gives."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

import strandline as sl
from strandline.errors import Fenced, InvalidInput, SlotInvalid
from strandline.log.object import ObjectLog
from strandline.spark.datasource.opened import SpanPartition
from strandline.spark.datasource.planning import encode_offset
from strandline.spark.datasource.readers import StreamSlot
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.datasource.source import StrandlineDataSource
from strandline.spark.failures import unwrapped
from strandline.spark.options import parse_options
from tests.spark.datasource.test_tiered import copy, forget, new_tiered
from tests.spark.helpers import NOW, append, new_log, put

SECOND = 1_000_000


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    """Five batches of two records, with keys a0 to e1, in steps of an hour."""
    log = new_log(tmp_path)
    with log.producer(linger=0) as producer:
        for number, letter in enumerate("abcde"):
            for place in (0, 1):
                at = NOW + (3600 * number + 60 * place) * SECOND
                producer.append(key=f"{letter}{place}".encode(), value=b"v", timestamp=at)
            producer.flush()
    return log


def spans(log: Any, **options: str) -> int:
    """How many spans a query reads."""
    source = StrandlineDataSource({"path": log.url, **options})
    parts = source.reader(source.schema()).partitions()
    return sum(len(part.spans) for part in parts if isinstance(part, SpanPartition))


def keys(spark: SparkSession, log: Any, **options: str) -> list[str]:
    frame = spark.read.format("strandline").options(**options).load(log.url)
    return sorted(bytes(row.key).decode() for row in frame.select("key").collect())


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(NOW / SECOND + seconds, UTC).isoformat()


@pytest.mark.matrix
def test_batches_without_a_record_of_these_times_are_not_read(spark: SparkSession, log: ObjectLog) -> None:
    bounds = {"timestampFrom": iso(3630), "timestampBefore": iso(3 * 3600)}
    assert keys(spark, log, **bounds) == ["b1", "c0", "c1"]
    assert spans(log) == 5
    assert spans(log, **bounds) == 2
    assert keys(spark, log, timestampFrom=iso(10**6)) == []


def test_only_keys_with_a_prefix_are_given(spark: SparkSession, log: ObjectLog) -> None:
    append(log, [put(None, b"no key"), put(b"", b"empty key")])
    assert keys(spark, log, keyPrefix="c") == ["c0", "c1"]
    assert keys(spark, log, keyPrefixHex=b"d1".hex()) == ["d1"]
    assert keys(spark, log, keyPrefix="c", timestampFrom=iso(2 * 3600 + 30)) == ["c1"]
    offsets = spark.read.format("strandline").option("keyPrefix", "c").schema("offset LONG").load(log.url)
    assert sorted(row.offset for row in offsets.collect()) == [4, 5]


def test_times_outside_the_calendar_do_not_end_a_query_of_the_cold_tier(tmp_path: Path) -> None:
    log = new_tiered(tmp_path)
    with log.producer(linger=0) as producer:
        times = pa.array([2**62, -(2**62), NOW]).view(pa.timestamp("us", tz="UTC"))
        producer.append_batch(pa.table({"key": pa.array([b"far", b"old", b"now"], pa.binary()), "timestamp": times}))
    copy(log)
    forget(log)
    for options in ({"timestampFrom": iso(0)}, {"keyPrefix": "n"}):
        source = StrandlineDataSource({"path": log.url, **options})
        reader = source.reader(source.schema())
        found = [key for part in reader.partitions() for batch in reader.read(part) for key in batch["key"].to_pylist()]
        assert found == ([b"far", b"now"] if "timestampFrom" in options else [b"now"])


@pytest.mark.matrix
def test_row_groups_of_the_cold_tier_are_skipped_by_their_statistics(spark: SparkSession, tmp_path: Path) -> None:
    log = new_tiered(tmp_path)
    with log.producer(linger=0) as producer:
        for number in range(6):
            for place in range(50):
                at = NOW + 3600 * number * SECOND + place
                producer.append(key=f"{'abcdef'[number]}{place:02d}".encode(), value=b"v", timestamp=at)
            producer.flush()
    assert len(copy(log, target=1_000)) > 2
    forget(log)
    found = sl.open(log.url)
    assert keys(spark, found, keyPrefix="c1") == [f"c1{digit}" for digit in range(10)]
    assert spans(found, keyPrefix="c1") < spans(found)
    assert spans(found, timestampFrom=iso(5 * 3600)) < spans(found)
    assert len(keys(spark, found, timestampFrom=iso(5 * 3600))) == 50


@pytest.mark.matrix
def test_a_query_begins_and_ends_at_times_of_listing(spark: SparkSession, log: ObjectLog) -> None:
    between = datetime.now(UTC)
    while datetime.now(UTC) <= between:
        time.sleep(0.001)
    append(log, [put(b"late", b"v")])
    assert keys(spark, log, startingTimestamp=between.isoformat()) == ["late"]
    assert len(keys(spark, log, endingTimestamp=between.isoformat())) == 10
    assert keys(spark, log, startingTimestamp=str(int(time.time() * 1000) + 3_600_000)) == []
    stream = spark.readStream.format("strandline").option("startingTimestamp", between.isoformat()).load(log.url)
    query = stream.writeStream.format("memory").queryName("by_time").trigger(availableNow=True).start()
    query.awaitTermination(600)
    assert [bytes(row.key) for row in spark.table("by_time").collect()] == [b"late"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timestampFrom": "yesterday"}, "a time with its zone"),
        ({"timestampFrom": "2026-01-01T00:00:00"}, "a time with its zone"),
        ({"startingTimestamp": "2026-01-01T00:00:00Z", "startingOffset": "1"}, "not both"),
        ({"keyPrefix": "a", "keyPrefixHex": "61"}, "not both"),
        ({"keyPrefixHex": "6"}, "not in hexadecimal"),
        ({"resetSlot": "true"}, "name that with the option slot"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse_options({"path": "file:///log", **options})


# --- the slot of a stream -----------------------------------------------------------------------------------------


def started(spark: SparkSession, log: ObjectLog, checkpoint: Path, **options: str) -> Any:
    stream = spark.readStream.format("strandline").options(slot="query", maxBatchesPerTrigger="1", **options)
    writer = stream.load(log.url).writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    return writer.trigger(processingTime="0 seconds").start()


def position(log: ObjectLog) -> int:
    return log.slots.get("query").position


def until(condition: Any) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(query: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        query.awaitTermination(600)
    return unwrapped(caught.value)


def test_the_slot_of_a_stream_pins_what_it_needs_and_follows_its_commits(
    spark: SparkSession, log: ObjectLog, tmp_path: Path
) -> None:
    query = started(spark, log, tmp_path / "checkpoint")
    try:
        until(lambda: query.lastProgress is not None and query.lastProgress["sources"][0]["endOffset"] is not None)
        until(lambda: position(log) >= 8)  # one micro-batch behind the last one, which has the end
        assert position(log) <= 10
        log.set_retention("consumed")
        log.trim(grace=0)
        assert log.bounds().first <= position(log)
        append(log, [put(b"f0", b"v")])
        until(lambda: position(log) >= 10)
    finally:
        query.stop()
    again = started(spark, log, tmp_path / "checkpoint")
    try:
        append(log, [put(b"g0", b"v")])
        until(lambda: position(log) >= 11)
    finally:
        again.stop()


@pytest.mark.matrix
def test_a_run_moves_its_slot_behind_the_last_run_also_without_new_records(
    spark: SparkSession, log: ObjectLog, tmp_path: Path
) -> None:
    """Spark ends a run of ``availableNow`` before it reports its last commit to the source."""
    source = spark.readStream.format("strandline").option("slot", "query").load(log.url)
    for _ in range(2):
        writer = source.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        sl.spark.start(writer.trigger(availableNow=True)).awaitTermination(600)
    assert log.slots.get("query").position == 10


def test_a_restart_with_an_unfinished_micro_batch_does_not_move_the_slot_behind_it(log: ObjectLog) -> None:
    start, end = (encode_offset(log.cursor_at(offset)) for offset in (0, 10))
    query = StrandlineDataSource({"path": log.url, "slot": "query"}).streamReader(SPARK_SCHEMA)
    query.partitions(start, end)  # what a restarted query does first, if the micro-batch was not committed
    assert query.latestOffset(end, ReadAllAvailable()) == end
    assert log.slots.get("query").position == 0
    query.commit(end)
    assert log.slots.get("query").position == 10


@pytest.mark.matrix
def test_a_stream_whose_slot_another_one_claims_ends(spark: SparkSession, log: ObjectLog, tmp_path: Path) -> None:
    first = started(spark, log, tmp_path / "one")
    until(lambda: any(state.name == "query" and state.holder for state in log.slots.list()))
    second = started(spark, log, tmp_path / "two")
    try:
        filling = threading.Event()

        def fill() -> None:
            while not filling.wait(0.1):
                append(log, [put(b"more", b"v")])

        writer = threading.Thread(target=fill)
        writer.start()
        try:
            assert isinstance(ended(first), Fenced)
        finally:
            filling.set()
            writer.join()
        assert second.isActive
    finally:
        second.stop()


@pytest.mark.matrix
def test_an_invalidated_slot_ends_the_stream_with_the_remedy_which_helps(
    spark: SparkSession, log: ObjectLog, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    query = started(spark, log, checkpoint)
    until(lambda: query.lastProgress is not None and query.lastProgress["sources"][0]["endOffset"] is not None)
    query.stop()
    log.set_retention("forever", sl.log.SlotLimits(lag_bytes=1))
    append(log, [put(b"f0", b"v" * 1000)] * 3)
    log.trim(grace=0)
    assert log.slots.get("query").invalid is not None
    error = ended(started(spark, log, checkpoint))
    assert isinstance(error, SlotInvalid)
    assert "resetSlot=true" in str(error)
    log.set_retention("forever", sl.log.SlotLimits())
    again = started(spark, log, checkpoint, resetSlot="true")
    try:
        append(log, [put(b"g0", b"v")])
        until(lambda: position(log) >= 13)
    finally:
        again.stop()
    assert log.slots.get("query").invalid is None


def test_a_slot_that_was_dropped_while_the_stream_was_stopped_is_created_again(log: ObjectLog) -> None:
    since = log.start().at(2)
    StreamSlot("orders", resets=False).hold(log, since)
    log.slots.drop("orders")
    again = StreamSlot("orders", resets=False)
    again.hold(log, since)
    again.check()
    assert log.slots.get("orders").position == 2


def test_a_slot_is_for_streams_on_logs_that_have_slots(log: ObjectLog) -> None:
    source = StrandlineDataSource({"path": log.url, "slot": "query"})
    with pytest.raises(InvalidInput, match="slot is for streams"):
        source.reader(source.schema())
