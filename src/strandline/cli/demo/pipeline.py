"""The demo's Spark process: ``python -m strandline.cli.demo.pipeline HOME RUN``. It is there to be killed.

Two streaming queries over the same log in one session: ours, and a naive twin as it is commonly written, with
``foreachBatch``, an append, Spark's own checkpoint, and the newest offset as the start when there is no checkpoint.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import pyarrow.compute as pc

import strandline as sl
from strandline.cli.demo.places import SLOT, Places, on_a_leash, tell

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_EVERY: Final = {"processingTime": "1 second"}
_LOOK: Final = 0.1


def follow_orders(spark: SparkSession, places: Places) -> sl.spark.Following:
    """Ours: the table keeps its own cursor; the checkpoint is a convenience."""

    def noticed(step: str) -> None:
        if step == "committed":  # the table has the batch; neither the slot nor Spark's checkpoint know it yet
            _hold(places, "orders")

    return sl.spark.follow(
        spark,
        places.log,
        sl.DeltaSink(places.orders, mode="latest"),
        slot=SLOT,
        trigger=_EVERY,
        checkpoint=str(places.checkpoints / "orders"),
        on_step=noticed,
    )


def naive_twin(spark: SparkSession, places: Places, called: threading.Event) -> StreamingQuery:
    """The twin: the same source, the same trigger, the same engine for the table; only no offsets in the table."""
    from deltalake import write_deltalake

    def append(batch: DataFrame, batch_id: int) -> None:  # noqa: ARG001 - Spark passes it
        rows = batch.toArrow()
        if rows.num_rows:
            write_deltalake(places.naive, rows, mode="append")
            tell(places.naive_status, pc.max(rows.column("offset")).as_py() + 1)
            _hold(places, "naive")
        called.set()

    return (
        spark.readStream.format("strandline")
        .option("startingOffset", "latest")  # asked only when there is no checkpoint
        .load(places.log)
        .select("offset", "op", "key", "value")
        .writeStream.foreachBatch(append)
        .option("checkpointLocation", str(places.checkpoints / "naive"))
        .trigger(processingTime="1 second")
        .start()
    )


def _exposed(query: StreamingQuery) -> float | None:
    """What part of the time of its batches a query spent recording one that was written, by Spark's own measure."""
    spent = [dict(progress.durationMs) for progress in query.recentProgress if progress.numInputRows]
    working = sum(times.get("triggerExecution", 0) for times in spent)
    return sum(times.get("commitOffsets", 0) for times in spent) / working if working else None


def _hold(places: Places, query: str) -> None:
    """If the orchestrator asked for it: say that this batch is written and not recorded, and wait to be killed."""
    if places.hold.exists():
        tell(places.held(query))
        _wait_for_the_end()


def _wait_for_the_end() -> NoReturn:
    while True:
        time.sleep(_LOOK)


def main(home: str, run: int) -> None:
    """Run both queries until they are killed, or until the orchestrator asks to stop."""
    on_a_leash()
    places = Places(Path(home))
    spark = sl.spark.local_session("strandline-demo", short_lived=True)
    called = threading.Event()
    orders = follow_orders(spark, places)
    naive = naive_twin(spark, places, called)
    # The twin has decided where it begins when it has had a batch; no change is made before that, in the first run.
    while orders.active and naive.isActive and not (called.is_set() or naive.lastProgress):
        time.sleep(_LOOK)
    tell(places.up(run))
    while orders.active and naive.isActive and not places.stop.exists():
        time.sleep(_LOOK)
    failure = orders.exception() or naive.exception()
    if failure is not None:
        raise failure
    tell(places.exposed, _exposed(naive))
    orders.stop()
    naive.stop()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
