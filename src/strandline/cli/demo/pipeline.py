"""The demo's Spark process: ``python -m strandline.cli.demo.pipeline FOLDER RUN``. The demo kills it.

Two queries read the same log in one session: ours, which keeps the latest orders as a typed table, and a naive one as
it is commonly written, with ``foreachBatch``, an append, Spark's own checkpoint, and, when that is lost, the newest
offset as its start.
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
from strandline.cli.demo.processes import SLOT, DemoFolder, exit_with_parent, write_marker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_EVERY: Final = {"processingTime": "1 second"}
_POLL: Final = 0.1


def follow_orders(spark: SparkSession, folder: DemoFolder) -> sl.spark.Following:
    """Our pipeline: the table stores its own cursor, so that there is no checkpoint to lose."""

    def on_step(step: str) -> None:
        if step == "committed":  # the batch is in the table, but not in the slot
            _hold(folder, SLOT)

    sink = sl.DeltaSink(folder.orders, mode="latest", value=sl.values.Json(ORDER))
    return sl.spark.follow(spark, folder.log, sink, slot=SLOT, trigger=_EVERY, on_step=on_step)


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


def _hold(folder: DemoFolder, query: str) -> None:
    """If the demo requested it: mark that this batch is written but not recorded, and wait to be killed."""
    if folder.hold.exists():
        write_marker(folder.held(query))
        threading.Event().wait()


def bring_up(spark: SparkSession, folder: DemoFolder, run: int) -> tuple[sl.spark.Following, StreamingQuery]:
    """Start both queries, and mark that they are up; raises what ended one of them before that."""
    called = threading.Event()
    ours = follow_orders(spark, folder)
    naive = naive_twin(spark, folder, run, called)
    # The naive query has chosen its start once it got a batch.
    while _are_active(ours, naive) and not (called.is_set() or naive.lastProgress):
        time.sleep(_POLL)
    _check(ours, naive)
    write_marker(folder.up(run))
    return ours, naive


def _are_active(ours: sl.spark.Following, naive: StreamingQuery) -> bool:
    return naive.isActive and ours.active


def _check(ours: sl.spark.Following, naive: StreamingQuery) -> None:
    for failure in (ours.exception(), naive.exception()):
        if failure is not None:
            raise failure


def main(path: str, run: int) -> None:
    """Run both queries until they are killed or asked to stop."""
    exit_with_parent()
    folder = DemoFolder(Path(path))
    spark = sl.spark.local_session("strandline-demo", short_lived=True)
    ours, naive = bring_up(spark, folder, run)
    while _are_active(ours, naive) and not folder.stop.exists():
        time.sleep(_POLL)
    _check(ours, naive)
    ours.stop()
    naive.stop()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
