"""A join of two streams: orders and their payments, each from a log; what is exact about it, and what is not.

Run it with ``python examples/join_on_spark.py [folder]``; it needs the extras ``spark`` and ``delta``, and Java 17
or 21.

Exact: the table at the end. The join writes pairs into a log, with the order's id as key, and ``sl.follow`` folds that
log into one row per order: a pair that is written again changes nothing. So is a join of two tables that follow the
logs: it misses nothing, however late it came.
Not exact: the log of pairs. The join's state is in the checkpoint alone: when that is lost, all pairs are written
again. And a payment that comes when the watermark has passed its order by more than an hour finds no order, unless both
are read in one micro-batch.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import strandline as sl

ORDER = sl.values.Json(pa.schema({"id": pa.int64(), "city": pa.string()}))
PAYMENT = sl.values.Json(pa.schema({"order": pa.int64(), "amount": pa.int64()}))
PAIR = sl.values.Json(pa.schema({"id": pa.int64(), "city": pa.string(), "amount": pa.int64()}))
MORNING = datetime(2026, 1, 31, 8, tzinfo=UTC)


def appended(log: sl.Log, hour: int, values: list[dict[str, Any]]) -> None:
    with log.producer() as producer:
        for value in values:
            key = next(iter(value.values()))
            producer.append(key=b"%d" % key, value=value, timestamp=MORNING + timedelta(hours=hour))


def joined(spark: SparkSession, orders: str, payments: str) -> DataFrame:
    """Each payment beside its order, if that was made in the hour before."""
    streams = spark.readStream.format("strandline").option("decode", "true")
    made = streams.load(orders).select("id", "city", f.col("_timestamp").alias("made"))
    paid = streams.load(payments).select("order", "amount", f.col("_timestamp").alias("paid"))
    pairs = made.withWatermark("made", "0 seconds").join(
        paid.withWatermark("paid", "0 seconds"),
        f.expr("id = order AND paid BETWEEN made AND made + INTERVAL 1 HOUR"),
    )
    return pairs.select(f.col("id").cast("string").alias("_key"), "id", "city", "amount")


def run(spark: SparkSession, folder: Path) -> None:
    writer = joined(spark, f"file://{folder}/orders", f"file://{folder}/payments").writeStream.format("strandline")
    writer = writer.option("path", f"file://{folder}/pairs").option("checkpointLocation", f"{folder}/checkpoint")
    sl.spark.start(writer.trigger(availableNow=True)).awaitTermination()


def main(folder: Path) -> None:
    spark = sl.spark.local_session("join")
    spark.conf.set("spark.sql.shuffle.partitions", 2)  # a join keeps four files of state in each
    orders = sl.open(f"file://{folder}/orders", create=True, value=ORDER)
    payments = sl.open(f"file://{folder}/payments", create=True, value=PAYMENT)
    pairs = sl.open(f"file://{folder}/pairs", create=True, value=PAIR)
    if not pairs.bounds().next:
        appended(orders, 0, [{"id": number, "city": ("Oslo", "Rome")[number % 2]} for number in range(100)])
        appended(payments, 0, [{"order": number, "amount": number} for number in range(90)])
        run(spark, folder)
        appended(orders, 9, [{"id": 100, "city": "Rome"}])  # nine hours later: the state of the morning is dropped
        appended(payments, 9, [{"order": 100, "amount": 100}])
        run(spark, folder)
        appended(payments, 0, [{"order": number, "amount": number} for number in range(90, 95)])  # too late
        run(spark, folder)
    print(f"{pairs.bounds().next} pairs in the log")
    shutil.rmtree(folder / "checkpoint")
    run(spark, folder)
    print(f"{pairs.bounds().next} pairs in the log, after the checkpoint was lost")

    table = sl.DeltaSink(f"{folder}/paid", value="log")
    sl.follow(pairs, table, upto="end")
    print(f"{table.size().rows} orders in the table of the pairs; clean: {sl.tables.verify(table, pairs).is_clean}")

    tables = [
        sl.DeltaSink(f"{folder}/orders-table", value="log", key="id"),
        sl.DeltaSink(f"{folder}/payments-table", value="log", key="order"),
    ]
    for log, sink in zip((orders, payments), tables, strict=True):
        sl.follow(log, sink, upto="end")
    made, paid = (sink.rows() for sink in tables)
    both = made.select(["id"]).join(paid.select(["order"]), "id", "order", join_type="inner")
    print(f"{both.num_rows} orders in a join of the tables")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="strandline-join-")).resolve())
