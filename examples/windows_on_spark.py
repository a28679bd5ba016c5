"""Orders per ten minutes by Spark's watermark: what is exact about it, and what depends on when records were read.

Run it with ``python examples/windows_on_spark.py [folder]``; it needs the extra ``spark``, and Java 17 or 21.

Exact: each record enters the aggregation once as long as the checkpoint lives, and each window is written into the
log of results once. A query over the log itself, with the same windows, counts every record, whenever it is run.
Not exact: which records are too late. The watermark follows the records that a micro-batch has seen before, so that a
late record is dropped in one division into micro-batches and counted in another. A stream whose checkpoint is lost
reads all of the log in one go: it writes its windows again, and with other counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import strandline as sl

ORDER = sl.values.Json(pa.schema({"id": pa.int64()}))


def append(log: sl.Log, *times: str) -> None:
    """One order at each of these times of a day."""
    with log.producer() as producer:
        for time in times:
            at = datetime.fromisoformat(f"2026-01-31T{time}:00").replace(tzinfo=UTC)
            producer.append(key=time.encode(), value={"id": 1}, timestamp=at)


def counted(orders: DataFrame) -> DataFrame:
    """Orders per window, as records of a log."""
    windows = orders.groupBy(f.window("_timestamp", "10 minutes")).count()
    begin = f.date_format("window.start", "HH:mm")
    return windows.select(begin.alias("key"), f.to_json(f.struct(begin.alias("from"), "count")).alias("value"))


def run(spark: SparkSession, folder: Path, name: str) -> None:
    """Count what is new, and write each window that is closed by now."""
    orders = spark.readStream.format("strandline").option("decode", "true").load(f"file://{folder}/orders")
    writer = counted(orders.withWatermark("_timestamp", "5 minutes")).writeStream.format("strandline")
    writer = writer.option("create", "true").option("checkpointLocation", f"{folder}/checkpoint-{name}")
    sl.spark.start(writer.option("path", f"file://{folder}/{name}").trigger(availableNow=True)).awaitTermination()


def written(folder: Path, name: str) -> dict[str, int]:
    with sl.open(f"file://{folder}/{name}") as results:
        rows = [json.loads(value) for batch in results.read() for value in batch.column("value").to_pylist()]
    return {row["from"]: row["count"] for row in sorted(rows, key=lambda row: row["from"])}


def main(folder: Path) -> None:
    spark = sl.spark.local_session("windows")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    with sl.open(f"file://{folder}/orders", create=True, value=ORDER) as log:
        if not log.bounds().next:
            append(log, "10:01", "10:02", "10:12")
            run(spark, folder, "as-they-came")
            append(log, "10:21", "10:31")  # the watermark is 10:26 now: the windows before it are closed
            run(spark, folder, "as-they-came")
            append(log, "10:03", "10:45")  # too late
            run(spark, folder, "as-they-came")
            run(spark, folder, "checkpoint-lost")  # the same query, which does not know what was read before
        print(f"as they came:    {written(folder, 'as-they-came')}")
        print(f"checkpoint lost: {written(folder, 'checkpoint-lost')}")
        everything = counted(spark.read.format("strandline").option("decode", "true").load(log.url))
        exact = [json.loads(row["value"]) for row in everything.orderBy("key").collect()]
        print(f"over the log:    { {row['from']: row['count'] for row in exact} }")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="strandline-windows-")).resolve())
