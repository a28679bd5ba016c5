"""The driver of the storm: five pipelines and a writer on one cluster, until all have reached a given offset.

It is killed at any moment and started again, and remembers nothing but how many jobs of its writer have succeeded.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

import strandline as sl

CODEC = sl.values.Json(pa.schema({"n": pa.int64()}))
TRANSFORM = "SELECT n * 2 AS twice, _key, _offset, _timestamp, _op FROM changes WHERE n % 3 = 0 OR _op > 0"
PIPELINES = ("append", "latest", "history", "transform", "many")
JOB_ROWS = 400


def catalog_of(folder: Path) -> SqlCatalog:
    """The catalog of the Iceberg tables."""
    place = f"sqlite:///{folder}/catalog.db"
    return SqlCatalog("storm", uri=place, warehouse=f"file://{folder}/warehouse")


def is_iceberg(name: str) -> bool:
    """Whether a table of the route is one of Iceberg."""
    return int(name.removeprefix("t")) % 2 == 1


def sinks(folder: Path) -> dict[str, Any]:
    """The sink of each pipeline; of many tables the rule."""
    catalog = catalog_of(folder)
    with contextlib.suppress(Exception):
        catalog.create_namespace("storm")

    def table(name: str) -> Any:
        if is_iceberg(name):
            return sl.IcebergSink(catalog, f"storm.{name}", value=CODEC)
        return sl.DeltaSink(str(folder / "many" / name), value=CODEC)

    return {
        "append": sl.IcebergSink(catalog, "storm.append", mode="append", value=CODEC),
        "latest": sl.DeltaSink(str(folder / "latest"), value=CODEC),
        "history": sl.DeltaSink(str(folder / "history"), mode="history", value=CODEC),
        "transform": sl.DeltaSink(str(folder / "transform"), value=CODEC),
        "many": sl.tables.by(key_until=b"/", sink=table, names=str(folder / "many")),
    }


def failing(number: int) -> str:
    """The value of a row; the first attempt of some tasks fails instead."""
    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0 and number % 97 == 5:
        raise OSError("this attempt of the task fails")
    return f"v{number}"


def write_job(spark: SparkSession, target: str, done: Path) -> None:
    """Write the next numbered job, whose tasks fail now and then; note it if it succeeded."""
    number = 1 + (int(done.read_text()) if done.exists() else 0)
    first = number * JOB_ROWS
    frame = spark.range(first, first + JOB_ROWS, numPartitions=4)
    rows = frame.select(frame.id.cast("string").alias("key"), udf(failing, "string")(frame.id).alias("value"))
    writer = rows.write.format("strandline").mode("append").option("job", "storm").option("number", str(number))
    try:
        writer.option("create", "true").save(target)
    except Exception as error:  # noqa: BLE001 - a job may lose its executors; it is repeated under its number
        print(time.strftime("%X"), "job", number, "failed:", " ".join(str(error).split())[:400], flush=True)
    else:
        partial = done.with_suffix(".new")
        partial.write_text(str(number))
        partial.replace(done)


def main() -> int:
    given = json.load(sys.stdin)
    folder = Path(given["folder"])
    builder = SparkSession.builder
    for name, value in given["settings"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    log = sl.open(given["log"])
    pipelines = {
        name: sl.spark.follow(
            spark, log, sink, slot=name, place="executors", transform=TRANSFORM if name == "transform" else None,
        )
        for name, sink in sinks(folder).items()
    }  # fmt: skip
    print("started", flush=True)
    finish = folder / "finish"
    status = 0
    while True:
        if not finish.exists():
            write_job(spark, given["target"], folder / "jobs")
        time.sleep(0.5)
        ended = {name: one for name, one in pipelines.items() if not one.active}
        if ended:
            for name, one in ended.items():
                print(f"{name} ended: {one.exception()!r} {getattr(one.exception(), '__notes__', '')}", flush=True)
            status = 3
            break
        if finish.exists():
            end = int(finish.read_text())
            cursors = {name: one.cursor() for name, one in pipelines.items()}
            if all(one is not None and one.next >= end for one in cursors.values()):
                break
    for one in pipelines.values():
        one.stop()
    for name, one in pipelines.items():
        print(name, one.progress().line(), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
