"""Cold data in Spark: by Spark's own Parquet reader, beside the same records by the data source's spans.

Both sides alternate within one run.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import strandline as sl
from benchmarks.harness import Result, seconds
from benchmarks.spark_read import PER_BATCH, noop, rows

RECORDS = 5_000_000
ROUNDS = 5
BYTES_GOAL = "<= 0.1"


def fill(folder: Path, records: int) -> sl.log.ObjectLog:
    """A log of which only segments are left."""
    log = sl.open(f"file://{folder}/log", create=True, retention="consumed")
    assert isinstance(log, sl.log.ObjectLog)
    with log.producer() as producer:
        for first in range(0, records, PER_BATCH):
            producer.append_batch(rows(first, min(PER_BATCH, records - first)))
            producer.flush()
    sl.tier.attach(log)
    with sl.tier.tiering(log, linger=0) as tierer:
        tierer.run_once(everything=True)
    log.trim(grace=0)
    assert log.bounds().first == records
    return log


def run(records: int = RECORDS, rounds: int = ROUNDS) -> list[Result]:
    """Everything, two columns, and a hundredth."""
    spark = sl.spark.local_session("benchmark", memory="4g")
    with tempfile.TemporaryDirectory(prefix="strandline-bench-") as folder:
        log = fill(Path(folder), records)
        results = _reads(spark, log.url, records, rounds)
        results += _hundredth(spark, log, records)
    spark.stop()
    return results


def _by_source(spark: Any, url: str, columns: list[str], first: int, end: int) -> Any:
    frame = spark.read.format("strandline").options(startingOffset=str(first), endingOffset=str(end))
    return frame.schema(sl.spark.read(spark, url, columns=columns, upto=0).schema).load(url)


def _reads(spark: Any, url: str, records: int, rounds: int) -> list[Result]:
    results = []
    for name, columns in {"": sl.log.READ_SCHEMA.names, "_two_columns": ["offset", "key"]}.items():
        sides: dict[str, Callable[[], Any]] = {
            "parquet": lambda columns=columns: sl.spark.read(spark, url, columns=columns),
            "spans": lambda columns=columns: _by_source(spark, url, columns, 0, records),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(rounds + 1):
            for side, read in list(sides.items())[:: 1 if turn % 2 else -1]:
                taken = seconds(lambda read=read: noop(read()))
                if turn:  # the first round warms both sides up
                    times[side].append(taken)
        rate = {side: records / median(found) for side, found in times.items()}
        ratios = [b / a for a, b in zip(times["parquet"], times["spans"], strict=True)]
        beside = f"the data source's spans of the same segments at {rate['spans']:,.0f} records/s, no-op sink"
        results += [
            Result(f"spark_cold_read{name}", median(ratios), "ratio", "", beside),
            Result(f"spark_cold_read{name}_rate", rate["parquet"], "records/s"),
        ]
    return results


def _hundredth(spark: Any, log: sl.log.ObjectLog, records: int) -> list[Result]:
    """One percent of the offsets: how much of the segments is read, and how long it takes."""
    first, end = records // 2 + 123, records // 2 + 123 + records // 100
    stored = sum(file.stat().st_size for file in Path(log.url.removeprefix("file://")).glob("cold/*/0/*.parquet"))

    def read() -> None:
        noop(sl.spark.read(spark, log, since=first, upto=end))

    for _ in range(3):
        read()
    before = _read_bytes(spark)
    taken = seconds(read)
    share = (_read_bytes(spark) - before) / stored
    return [
        Result("spark_cold_hundredth_bytes", share, "of the bytes", BYTES_GOAL, "all segments of the log"),
        Result("spark_cold_hundredth_time", taken, "s"),
    ]


def _read_bytes(spark: Any) -> int:
    """What Spark's process has read by system calls, from whatever file or socket."""
    process = spark._jvm.java.lang.ProcessHandle.current().pid()  # noqa: SLF001 - Spark has no other way to it
    found = re.search(r"rchar: (\d+)", Path(f"/proc/{process}/io").read_text())
    assert found is not None
    return int(found[1])
