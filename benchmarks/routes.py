"""One log into a hundred tables, beside one table with all rows: processor seconds of steady following.

A few records for each table arrive every second. Both sides follow the same log at the same time, each in a process of
its own, so that the machine is the same for both; creating the tables is not counted.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

import strandline as sl
from benchmarks.harness import Result, scratch
from benchmarks.spark_tables import processor_seconds
from strandline.model.records import RECORD_SCHEMA, no_headers

TABLES: Final = 100
ROWS: Final = 5
"""Records of each table and second."""
SECONDS: Final = 180
VALUES: Final = sl.values.Json(pa.schema({"id": pa.int64(), "state": pa.string()}))


def second(number: int) -> pa.Table:
    """The records of one second, of all tables in turns."""
    count = TABLES * ROWS
    keys = [f"t{one % TABLES:03d}/{number * ROWS + one // TABLES}".encode() for one in range(count)]
    values = [b'{"id":%d,"state":"shipped"}' % (number * count + one) for one in range(count)]
    stamps = pa.array([1_750_000_000_000_000 + number] * count, RECORD_SCHEMA.field("timestamp").type)
    return pa.table([stamps, pa.repeat(pa.scalar(0, pa.int8()), count), keys, values, no_headers(count)], RECORD_SCHEMA)


def tables_of(side: str, folder: str) -> Any:
    """The sink of one table with all rows, or the rule that makes one for each."""
    if side == "one":
        return sl.DeltaSink(f"{folder}/one", value=VALUES)
    return sl.tables.by(
        key_until=b"/",
        sink=lambda name: sl.DeltaSink(f"{folder}/many/{name}", value=VALUES),
        names=f"{folder}/names",
    )


def side(engine: str, which: str, url: str, folder: str) -> None:
    """One side, in its process: says when it is warm, and what it has spent when it is told to end."""
    stop = threading.Event()
    if engine == "spark":
        spark = sl.spark.local_session("bench-routes", cores=2, memory="1g")
        sl.spark.follow(spark, url, tables_of(which, folder), trigger={"availableNow": True}).await_termination()
    with sl.open(url) as log:
        sl.follow(log, tables_of(which, folder), upto="end")
        print("ready", flush=True)
        sys.stdin.readline()
        before = processor_seconds()
        if engine == "spark":
            with sl.spark.follow(spark, log, tables_of(which, folder)) as following:
                sys.stdin.readline()
                spent, line = processor_seconds() - before, following.progress().line()
        else:
            follower = threading.Thread(target=sl.follow, args=(log, tables_of(which, folder)), kwargs={"stop": stop})
            follower.start()
            sys.stdin.readline()
            spent, line = processor_seconds() - before, ""
            stop.set()
            follower.join()
    print(spent, line, flush=True)


def compared(engine: str, seconds: int = SECONDS) -> tuple[float, float]:
    """Processor seconds of one table, and of many."""
    with scratch() as folder:
        url = f"file://{folder}/log"
        with sl.open(url, create=True) as log, log.producer() as producer:
            producer.append_batch(second(0))
            producer.flush()
            command = [sys.executable, "-m", "benchmarks.routes", engine]
            sides = [
                subprocess.Popen(
                    [*command, which, url, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                for which in ("one", "many")
            ]
            for one in sides:
                if _line(one) != "ready":
                    raise RuntimeError(f"A side of the benchmark of routes did not start: {one.args}.")
            _tell(sides)
            began = time.monotonic()
            for number in range(1, seconds):
                producer.append_batch(second(number))
                producer.flush()
                time.sleep(max(0.0, began + number - time.monotonic()))
            _tell(sides)
            spent = [_line(one) for one in sides]
            for one in sides:
                one.wait()
        print(f"{engine}: {spent}", file=sys.stderr)
        few, many = (float(one.partition(" ")[0]) for one in spent)
        return few, many


def _line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip() if process.stdout is not None else ""


def _tell(processes: list[subprocess.Popen[str]]) -> None:
    for one in processes:
        if one.stdin is not None:
            one.stdin.write("go on\n")
            one.stdin.flush()


def run() -> list[Result]:
    """Measure; about seven minutes."""
    results = []
    engines: dict[str, Callable[[], tuple[float, float]]] = {
        one: lambda one=one: compared(one) for one in ("here", "spark")
    }
    for engine, measured in engines.items():
        few, many = measured()
        where = "one process" if engine == "here" else "Spark"
        beside = f"{many:.1f} and {few:.1f} CPU-s in {SECONDS} s"
        results.append(
            Result(f"{TABLES} tables with {ROWS} rows a second each, {where}", many / few, "x", "<= 3", beside)
        )
    return results


if __name__ == "__main__":
    side(*sys.argv[1:])
