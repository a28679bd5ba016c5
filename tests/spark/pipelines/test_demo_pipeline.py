"""The demo's queries: a run is marked as up only if all of them are."""

from __future__ import annotations

import threading

import pytest
from pyspark.errors import StreamingQueryException

import strandline as sl
from strandline.cli.demo import pipeline
from strandline.cli.demo.processes import DemoFolder


@pytest.mark.matrix
def test_a_run_whose_query_dies_at_once_is_not_marked_as_up(spark, tmp_path, monkeypatch):
    def dying(spark, folder: DemoFolder, run: int, called: threading.Event):
        def fail(*_: object) -> None:
            raise OSError("Python worker failed to connect back")

        return spark.readStream.format("strandline").load(folder.log).writeStream.foreachBatch(fail).start()

    monkeypatch.setattr(pipeline, "naive_twin", dying)
    folder = DemoFolder(tmp_path)
    folder.prepare()
    log = sl.open(folder.log, create=True)
    with log.producer() as producer:
        producer.append(key=b"order", op=sl.Op.DELETE)
    with pytest.raises(StreamingQueryException, match="failed to connect back"):
        pipeline.bring_up(spark, folder, 1)
    assert not folder.up(1).exists()
    for query in spark.streams.active:
        query.stop()
