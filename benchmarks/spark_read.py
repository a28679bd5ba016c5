"""Reading a log with Spark, beside Spark reading the same rows from Parquet; and what a trigger costs.

The two sides of a ratio alternate within one run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import strandline as sl
from benchmarks.harness import Result, seconds
from strandline.model.records import RECORD_SCHEMA, no_headers

RECORDS = 10_000_000
PER_BATCH = 250_000
ROUNDS = 7
GOAL = ">= 0.9"
MEMORY_GOAL = "<= 3"
FOLLOWED = 1_000_000

# What a Spark task does, in a process of its own, so that its peak is its own.
TASK = """
import re, sys
import pyarrow as pa
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.datasource.source import StrandlineDataSource

reader = StrandlineDataSource({"path": sys.argv[1], "partitions": "1"}).reader(SPARK_SCHEMA)
parts = reader.partitions()
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
with open("/dev/null", "wb") as out, pa.ipc.new_stream(out, reader._at.columns) as writer:
    for part in parts:
        for batch in reader.read(part):
            writer.write_batch(batch)
print(peak() - before)
"""


def rows(first: int, count: int) -> pa.Table:
    """Records of a 12-byte key and an 88-byte value, such as a small JSON document."""
    numbers = pa.arange(first, first + count)
    text = numbers.cast(pa.string())
    mixed = pc.bit_wise_and(pc.multiply(numbers, 2_654_435_761), (1 << 40) - 1).cast(pa.string())
    keys = pc.utf8_lpad(text, 12, "0").cast(pa.binary())
    json = pc.binary_join_element_wise(
        '{"customer":"', mixed, '","order":', text, ',"state":"shipped","sum":', mixed, "}", ""
    )
    values = pc.utf8_rpad(json, 88, " ")
    stamps = pc.add(numbers, 1_750_000_000_000_000).view(RECORD_SCHEMA.field("timestamp").type)
    ops = pa.repeat(pa.scalar(0, pa.int8()), count)
    return pa.table([stamps, ops, keys, values.cast(pa.binary()), no_headers(count)], schema=RECORD_SCHEMA)


def noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def fill(folder: Path, records: int) -> tuple[str, str]:
    """The same rows as a log and as Parquet files, as many of the one as of the other."""
    log = sl.open(f"file://{folder}/log", create=True)
    (folder / "parquet").mkdir()
    with log.producer() as producer:
        for first in range(0, records, PER_BATCH):
            table = rows(first, min(PER_BATCH, records - first))
            producer.append_batch(table)
            producer.flush()
            offsets = pa.arange(first, first + table.num_rows)
            pq.write_table(table.add_column(0, "offset", offsets), folder / "parquet" / f"{first:012d}.parquet")
    return log.url, f"{folder}/parquet"


def run(records: int = RECORDS, rounds: int = ROUNDS) -> list[Result]:
    """Batch and stream reads, triggers, following, and a task's memory."""
    often = {"spark.sql.streaming.noDataProgressEventInterval": "100"}
    spark = sl.spark.local_session("benchmark", memory="4g", **often)
    with tempfile.TemporaryDirectory(prefix="strandline-bench-") as folder:
        url, parquet = fill(Path(folder), records)
        results = _batch_reads(spark, url, parquet, records, rounds)
        results += _stream_reads(spark, url, records)
        results += _triggers(spark, Path(folder))
        results += _follows(spark, Path(folder), url)
        results += _task_memory(Path(folder))
    spark.stop()
    return results


def _batch_reads(spark: Any, url: str, parquet: str, records: int, rounds: int) -> list[Result]:
    sides: dict[str, Callable[[], Any]] = {
        "strandline": lambda: spark.read.format("strandline").load(url),
        "parquet": lambda: spark.read.parquet(parquet),
        "strandline, offset and key": lambda: (
            spark.read.format("strandline").schema("offset LONG, key BINARY").load(url)
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, read in list(sides.items())[:: 1 if turn % 2 else -1]:
            taken = seconds(lambda read=read: noop(read()))
            if turn:  # the first round warms both sides up
                times[name].append(taken)
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = [b / a for a, b in zip(times["strandline"], times["parquet"], strict=True)]
    beside = f"spark.read.parquet of the same rows at {records / medians['parquet']:,.0f} records/s, no-op sink"
    return [
        Result("spark_batch_read", statistics.median(ratios), "ratio", GOAL, beside),
        Result("spark_batch_read_rate", records / medians["strandline"], "records/s"),
        Result("spark_batch_read_two_columns", records / medians["strandline, offset and key"], "records/s"),
    ]


def _stream_reads(spark: Any, url: str, records: int) -> list[Result]:
    results: list[Result] = []
    for name, options in {"unlimited": {}, "64MiB_per_trigger": {"maxBytesPerTrigger": str(64 << 20)}}.items():

        def stream(options: dict[str, str] = options) -> None:
            frame = spark.readStream.format("strandline").options(**options).load(url)
            query = frame.writeStream.format("noop").trigger(availableNow=True).start()
            query.awaitTermination()

        stream()
        taken = statistics.median(seconds(stream) for _ in range(3))
        results.append(Result(f"spark_available_now_{name}", records / taken, "records/s", "", "no-op sink"))
    return results


def _triggers(spark: Any, folder: Path) -> list[Result]:
    """What a trigger costs with nothing to do, and with a single record to read."""
    log = sl.open(f"file://{folder}/small", create=True)
    with log.producer(linger=0.0) as producer:
        producer.append(key=b"k", value=b"v").result()
        frame = spark.readStream.format("strandline").load(log.url)
        query = frame.writeStream.format("noop").trigger(processingTime="0 seconds").start()
        try:
            query.processAllAvailable()
            for _ in range(20):
                producer.append(key=b"k", value=b"v").result()
                query.processAllAvailable()
            progress = [p for p in query.recentProgress if p["numInputRows"]][5:]
            tiny = statistics.median(p["durationMs"]["triggerExecution"] for p in progress)
            time.sleep(3)
            idle = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if not p["numInputRows"]]
        finally:
            query.stop()
    return [
        Result("spark_tiny_trigger", tiny, "ms", "", "one record, no-op sink"),
        Result("spark_idle_trigger", statistics.median(idle) if idle else float("nan"), "ms"),
    ]


def _follows(spark: Any, folder: Path, url: str) -> list[Result]:
    """Into a Delta table, the first time: each key is new, which is the dearest case for the newest per key."""
    results: list[Result] = []
    for mode in ("append", "latest"):
        sink = sl.DeltaSink(f"{folder}/{mode}", mode=mode)
        options = {"endingOffset": str(FOLLOWED)}
        taken = seconds(
            lambda sink=sink, options=options: sl.spark.follow(
                spark, url, sink, trigger={"availableNow": True}, options=options
            ).await_termination()
        )
        results.append(
            Result(f"spark_follow_{mode}", FOLLOWED / taken, "records/s", "", "new Delta table, all keys new")
        )
    return results


def _task_memory(folder: Path) -> list[Result]:
    """The peak of a task that reads three large batches one after another, relative to one of them decoded."""
    log = sl.open(f"{folder}/large", create=True)
    count, size = 200_000, 1000
    table = pa.table({"key": [b"%d" % n for n in range(count)], "value": [os.urandom(size) for _ in range(count)]})
    for _ in range(3):
        with log.producer(batch_bytes=256 << 20) as producer:
            producer.append_batch(table)
    done = subprocess.run([sys.executable, "-c", TASK, log.url], capture_output=True, text=True, check=True)
    value = int(done.stdout) / table.nbytes
    return [Result("spark_task_memory", value, "of a batch", MEMORY_GOAL, "the largest batch, decoded (200 MB)")]
