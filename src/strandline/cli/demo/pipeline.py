"""The demo's Spark process: ``python -m strandline.cli.demo.pipeline FOLDER RUN``. The demo kills it.

Three queries read the same log in one session: our two, which keep the latest orders and all their versions as typed
tables, and a naive one as it is commonly written, with ``foreachBatch``, an append, Spark's own checkpoint, and,
when that is lost, the newest offset as its start.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

import strandline as sl
from strandline.cli.demo.changes import ORDER
from strandline.cli.demo.processes import HISTORY_SLOT, SLOT, DemoFolder, exit_with_parent, write_marker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_EVERY: Final = {"processingTime": "1 second"}
_POLL: Final = 0.1


def follow_orders(spark: SparkSession, folder: DemoFolder) -> list[sl.spark.Following]:
    """Our pipelines: each table stores its own cursor, so that there is no checkpoint to lose."""
    value = sl.values.Json(ORDER)
    tables = {
        SLOT: sl.DeltaSink(folder.orders, mode="latest", value=value),
        HISTORY_SLOT: sl.DeltaSink(folder.history, mode="history", value=value),
    }

    def following(slot: str, sink: sl.DeltaSink) -> sl.spark.Following:
        def on_step(step: str) -> None:
            if step == "committed":  # the batch is in the table, but not in the slot
                _hold(folder, slot)

        return sl.spark.follow(spark, folder.log, sink, slot=slot, trigger=_EVERY, on_step=on_step)

    return [following(slot, sink) for slot, sink in tables.items()]


def naive_twin(spark: SparkSession, folder: DemoFolder, run: int, called: threading.Event) -> StreamingQuery:
    """The naive query: same source, trigger and table engine, but no offsets in the table.

    Its first run begins with the oldest record. Without a checkpoint, a later one begins at the end: from the beginning
    it would double every row that it has.
    """
    from deltalake import write_deltalake

    def append(batch: DataFrame, batch_id: int) -> None:  # noqa: ARG001 - Spark passes it
        rows = batch.toArrow()
        if rows.num_rows:
            write_deltalake(folder.naive, rows, mode="append")
            write_marker(folder.naive_position, pc.max(rows.column("offset")).as_py() + 1)
            _hold(folder, "naive")
        called.set()

    return (
        spark.readStream.format("strandline")
        .option("startingOffset", "earliest" if run == 1 else "latest")  # used only without a checkpoint
        .load(folder.log)
        .select("offset", "op", "key", "value")
        .writeStream.foreachBatch(append)
        .option("checkpointLocation", str(folder.checkpoints / "naive"))
        .trigger(processingTime="1 second")
        .start()
    )


def _exposed(query: StreamingQuery) -> float | None:
    """The share of its batch time that a query spent between write and checkpoint, as Spark measures it."""
    spent = [dict(progress.durationMs) for progress in query.recentProgress if progress.numInputRows]
    working = sum(times.get("triggerExecution", 0) for times in spent)
    return sum(times.get("commitOffsets", 0) for times in spent) / working if working else None


def _hold(folder: DemoFolder, query: str) -> None:
    """If the demo requested it: mark that this batch is written but not recorded, and wait to be killed."""
    if folder.hold.exists():
        write_marker(folder.held(query))
        threading.Event().wait()


def bring_up(spark: SparkSession, folder: DemoFolder, run: int) -> tuple[list[sl.spark.Following], StreamingQuery]:
    """Start all queries, and mark that they are up; raises what ended one of them before that."""
    called = threading.Event()
    ours = follow_orders(spark, folder)
    naive = naive_twin(spark, folder, run, called)
    # The naive query has chosen its start once it got a batch.
    while _are_active(ours, naive) and not (called.is_set() or naive.lastProgress):
        time.sleep(_POLL)
    _check(ours, naive)
    write_marker(folder.up(run))
    return ours, naive


def _are_active(ours: list[sl.spark.Following], naive: StreamingQuery) -> bool:
    return naive.isActive and all(one.active for one in ours)


def _check(ours: list[sl.spark.Following], naive: StreamingQuery) -> None:
    failures = [*(one.exception() for one in ours), naive.exception()]
    for failure in failures:
        if failure is not None:
            raise failure


def main(path: str, run: int) -> None:
    """Run all queries until they are killed or asked to stop."""
    exit_with_parent()
    folder = DemoFolder(Path(path))
    spark = sl.spark.local_session("strandline-demo", short_lived=True)
    ours, naive = bring_up(spark, folder, run)
    while _are_active(ours, naive) and not folder.stop.exists():
        time.sleep(_POLL)
    _check(ours, naive)
    write_marker(folder.exposed, _exposed(naive))
    for one in ours:
        one.stop()
    naive.stop()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
