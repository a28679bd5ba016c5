"""Sessions in other time zones, times before 1970, and records without keys: all that Spark does keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import strandline as sl
from strandline.log.object import ObjectLog
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, Op, record_batch
from tests.spark.helpers import all_records, new_log

HOUR = 3_600_000_000
TIMES = [
    -2_208_988_800_000_000,  # 1900, when St. John's was at -3:30:52
    -86_400_000_001,
    -1,
    0,
    1_762_061_400_000_000 - HOUR,  # 2025-11-02 04:30 and 05:30 UTC: the same wall time twice
    1_762_061_400_000_000,
    1_750_000_000_123_456,
]
KEYS = [None, b"", b"k", None, b"k", b"\xff", None]
ZONES = ["America/St_Johns", pytest.param("Asia/Kathmandu", marks=pytest.mark.matrix)]


@pytest.fixture(params=ZONES)
def zoned(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield spark
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    log = new_log(tmp_path)
    for number, (time, key) in enumerate(zip(TIMES, KEYS, strict=True)):
        batch = record_batch(timestamps=[time], ops=[Op.PUT], keys=[key], values=[b"%d" % number])
        log.append(batch, writer=WriterId(uuid4()), number=0).result(timeout=120)
    return log


def seen(frame: DataFrame, time: str = "timestamp", key: str = "key") -> list[tuple[int, bytes | None]]:
    """Times and keys as Spark has them, in the order of the values."""
    rows = frame.selectExpr(f"unix_micros({time}) AS time", f"{key} AS key", "value").orderBy("value").collect()
    return [(row.time, None if row.key is None else bytes(row.key)) for row in rows]


def stored(table: pa.Table, time: str, key: str) -> list[tuple[int, bytes | None]]:
    table = table.sort_by("value")
    return list(zip(table[time].cast(pa.int64()).to_pylist(), table[key].to_pylist(), strict=True))


EXPECTED = list(zip(TIMES, KEYS, strict=True))


@pytest.mark.matrix
def test_reads_and_writes_keep_times_and_null_keys(zoned: SparkSession, log: ObjectLog, tmp_path: Path) -> None:
    frame = zoned.read.format("strandline").load(log.url)
    assert seen(frame) == EXPECTED
    target = new_log(tmp_path, "target")
    frame.drop("offset").coalesce(1).write.format("strandline").mode("append").save(target.url)
    assert stored(all_records(target), "timestamp", "key") == EXPECTED


@pytest.mark.matrix
def test_bounds_are_moments_and_not_wall_times(zoned: SparkSession, log: ObjectLog) -> None:
    def within(**options: str) -> list[int]:
        frame = zoned.read.format("strandline").options(**options).load(log.url)
        return [time for time, _ in seen(frame)]

    assert within(timestampBefore="1970-01-01T00:00:00Z") == TIMES[:3]
    assert within(timestampFrom="1969-12-31T23:59:59.999999Z", timestampBefore="1970-01-01T00:00:00Z") == [-1]
    assert within(timestampFrom="2025-11-02T02:00:00-03:30", timestampBefore="2025-11-02T02:30:00-03:30") == [TIMES[5]]
    assert within(startingTimestamp="1969-12-31T00:00:00Z") == TIMES


@pytest.mark.matrix
@pytest.mark.parametrize("transform", [None, "SELECT * FROM changes"])
def test_tables_keep_times_and_null_keys(
    zoned: SparkSession, log: ObjectLog, tmp_path: Path, transform: str | None
) -> None:
    sink = sl.DeltaSink(tmp_path / "table", mode="append")
    now = {"availableNow": True}
    following = sl.spark.follow(zoned, log, sink, trigger=now, place="executors", transform=transform)
    assert following.await_termination(600)
    rows = sink.rows()
    time, key = ("timestamp", "key") if "timestamp" in rows.column_names else ("_timestamp", "_key")
    assert stored(rows, time, key) == EXPECTED
    if transform is None:
        assert sl.tables.verify(sink, log).is_clean


@pytest.mark.matrix
def test_bulk_jobs_keep_times_and_null_keys(zoned: SparkSession, log: ObjectLog, tmp_path: Path) -> None:
    pool = sl.spark.executors(zoned)
    sl.bulk.export(log, tmp_path / "export", pool=pool)
    files = sorted((tmp_path / "export").glob("part-*"))
    exported = pa.concat_tables([pq.read_table(file) for file in files])
    assert stored(exported, "timestamp", "key") == EXPECTED
    sl.tier.attach(log)
    with sl.tier.tiering(log, pool=pool, target=1) as tierer:
        tierer.run_once(everything=True)
        tierer.compact(everything=True)
    with sl.open(log.url) as both:
        assert stored(pa.Table.from_batches(both.read(), READ_SCHEMA), "timestamp", "key") == EXPECTED
    assert seen(sl.spark.read(zoned, log.url)) == EXPECTED
