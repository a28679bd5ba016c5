"""Code of your own for each micro-batch (``foreachBatch``): sums per city in SQLite, exact by the offsets of the log.

Run it with ``python examples/foreach_batch_on_spark.py [folder]``; it needs the extra ``spark``, and Java 17 or 21.

Exact: sums that are committed together with the offset that they reach. A micro-batch that comes again, after a crash
or because the checkpoint is gone, adds only what is behind that offset; two drivers are kept apart by the database.
Not exact: sums without the offset. Spark promises that a batch comes at least once, and numbers batches by the
checkpoint: when that is lost, batch 0 is another batch, and all records are counted again.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import strandline as sl

ORDER = sl.values.Json(pa.schema({"id": pa.int64(), "city": pa.string(), "amount": pa.int64()}))
TABLES = """
    CREATE TABLE IF NOT EXISTS reached (next INTEGER NOT NULL);
    INSERT INTO reached SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM reached);
    CREATE TABLE IF NOT EXISTS exact (city TEXT PRIMARY KEY, total INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS doubled (city TEXT PRIMARY KEY, total INTEGER NOT NULL);
"""
ADD = "INSERT INTO {} VALUES (?, ?) ON CONFLICT (city) DO UPDATE SET total = total + excluded.total"


def append(log: sl.Log, count: int) -> None:
    first = log.bounds().next
    with log.producer() as producer:
        for number in range(first, first + count):
            order = {"id": number, "city": ("Oslo", "Rome")[number % 2], "amount": number % 10}
            producer.append(key=b"%d" % number, value=order)


def add_up(file: Path, batch: DataFrame) -> None:
    """Add a micro-batch: the sums and the offset that they reach are one transaction."""
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")  # another driver waits here, and then sees the new offset
        [(reached,)] = database.execute("SELECT next FROM reached")
        batch.persist()  # each action would read the log again
        sums = f.sum("amount").alias("total")
        new = batch.where(f.col("_offset") >= reached)
        database.executemany(ADD.format("exact"), map(tuple, new.groupBy("city").agg(sums).collect()))
        database.executemany(ADD.format("doubled"), map(tuple, batch.groupBy("city").agg(sums).collect()))
        last = batch.agg(f.max("_offset")).first()
        if last is not None and last[0] is not None:
            database.execute("UPDATE reached SET next = max(next, ?)", (last[0] + 1,))
        batch.unpersist()
        database.execute("COMMIT")


def run(spark: SparkSession, folder: Path) -> None:
    orders = spark.readStream.format("strandline").option("decode", "true").load(f"file://{folder}/orders")
    writer = orders.writeStream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    sl.spark.start(writer.foreachBatch(lambda batch, _: add_up(folder / "sums.db", batch))).awaitTermination()


def main(folder: Path) -> None:
    spark = sl.spark.local_session("sums")
    with sl.open(f"file://{folder}/orders", create=True, value=ORDER) as log:
        with closing(sqlite3.connect(folder / "sums.db")) as database:
            database.executescript(TABLES)
        for what in ("1,000 orders", "1,000 more", "the checkpoint is lost"):
            if what.endswith("lost"):
                shutil.rmtree(folder / "checkpoint")
            else:
                append(log, 1000)
            run(spark, folder)
            with closing(sqlite3.connect(folder / "sums.db")) as database:
                exact = dict(database.execute("SELECT * FROM exact ORDER BY city"))
                doubled = dict(database.execute("SELECT * FROM doubled ORDER BY city"))
            print(f"{what}: {exact}; without the offset: {doubled}")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="strandline-sums-")).resolve())
