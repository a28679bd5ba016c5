"""A driver that copies a log into another one by a stream, whose tasks die now and then; a test kills it, too."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from strandline.spark import local_session


def main(source: str, target: str, checkpoint: str, deaths: str) -> None:
    spark = local_session("stream-writer", short_lived=True, **{"spark.master": "local[2,4]"})

    def deadly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        name = Path(deaths, f"{context.getLocalProperty('streaming.sql.batchId')}-{context.partitionId()}")
        for batch in batches:
            yield batch
            if not name.exists() and not context.attemptNumber():
                name.touch()
                os.kill(os.getpid(), signal.SIGKILL)  # in the middle of its rows: the task is repeated

    records = spark.readStream.format("strandline").option("maxBatchesPerTrigger", "2").load(source)
    rows = records.selectExpr("key", "value").mapInArrow(deadly, "key BINARY, value BINARY")
    writer = rows.writeStream.format("strandline").option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start(target).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
