"""Writing a DataFrame into a log with Spark, beside Spark writing the same rows as Parquet."""

from __future__ import annotations

import itertools
from statistics import median
from typing import Final

import strandline as sl
from benchmarks.harness import Result, scratch
from benchmarks.spark_tables import spent

ROWS: Final = 4_000_000
ROUNDS: Final = 5


def run() -> list[Result]:
    """Measure; about two minutes."""
    spark = sl.spark.local_session("bench-write", cores=2, memory="3g")
    numbers = itertools.count()
    with scratch() as folder:
        source = f"{folder}/rows"
        value = "to_json(named_struct('customer', hash(id), 'order', id, 'state', 'shipped', 'sum', hash(-id)))"
        columns = "cast(lpad(id, 12, '0') as binary) key", f"cast({value} as binary) value"
        spark.range(ROWS, numPartitions=4).selectExpr(*columns).write.parquet(source)
        frame = spark.read.parquet(source)

        def parquet() -> None:
            frame.write.option("compression", "lz4").parquet(f"{folder}/parquet-{next(numbers)}")

        def log() -> None:
            target = f"file://{folder}/log-{next(numbers)}"
            frame.write.format("strandline").mode("append").option("create", "true").save(target)

        parquet()
        log()  # starts the workers
        times: dict[str, list[float]] = {"parquet": [], "log": []}
        for _ in range(ROUNDS):
            times["parquet"].append(spent(parquet))
            times["log"].append(spent(log))
    plain, ours = median(times["parquet"]), median(times["log"])
    millions = ROWS / 1e6
    return [
        Result("Spark writes Parquet, CPU-s per million rows", plain / millions, "s"),
        Result("Spark writes a log, CPU-s per million rows", ours / millions, "s"),
        Result(
            "Spark writes a log / Parquet, by CPU time",
            plain / ours,
            "times",
            ">= 0.7",
            f"{min(times['log']):.1f} to {max(times['log']):.1f} s beside {min(times['parquet']):.1f} to "
            f"{max(times['parquet']):.1f} s",
        ),
    ]
