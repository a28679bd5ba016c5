"""Spark reads queues of version 1 as it reads own logs; offsets count batches, and nothing is acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline.compat.v1.log import QueueFormat, QueueLog, open_queue
from strandline.errors import CursorExpired, InvalidInput, NotFound
from strandline.spark.failures import unwrapped
from strandline.spark.options import parse_options
from strandline.storage.objects.local import LocalStore
from tests.compat.v1.filled_queues import append, fill

QUEUE = {"logFormat": "queue-v1"}


@pytest.fixture
def queue(tmp_path) -> QueueLog:
    """Batches 5, 6 and 7 of another implementation, and one of our own."""
    store = LocalStore(str(tmp_path / "queue"))
    fill(store, (b"a", b"b"), (b"c",), (b"d", b""), first=5)
    log = open_queue(str(tmp_path / "queue"))
    append(log, b"ours", number=0)
    return log


def load(spark, log: QueueLog, **options: str):
    return spark.read.format("strandline").options(**QUEUE, **options).load(log.url)


def test_a_batch_query_reads_every_record_at_its_batch_s_sequence(spark, queue):
    table = load(spark, queue).toArrow().sort_by([("offset", "ascending")])
    assert list(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True)) == [
        (5, b"a"),
        (5, b"b"),
        (6, b"c"),
        (7, b"d"),
        (7, b""),
        (8, b"ours"),
    ]
    assert [int(stamp.timestamp()) for stamp in table["timestamp"].to_pylist()[:5]] == [5, 5, 6, 7, 7]
    assert table["key"].null_count == table.num_rows
    assert table["op"].to_pylist() == [0] * 6
    assert load(spark, queue, startingOffset="6", endingOffset="8").count() == 3
    assert queue.slots.list()[0].epoch == 0, "reading claims nothing"
    assert queue.bounds().first == 5, "and acknowledges nothing"


def test_a_damaged_or_missing_batch_is_named_and_an_empty_queue_is_an_empty_table(spark, queue, tmp_path):
    (tmp_path / "queue/ingest/part-6.batch").unlink()
    with pytest.raises(Exception) as caught:
        load(spark, queue).collect()
    assert isinstance(unwrapped(caught.value), NotFound)
    assert "part-6.batch" in str(unwrapped(caught.value))
    assert load(spark, open_queue(str(tmp_path / "nothing"))).collect() == []


@pytest.mark.matrix
def test_a_stream_reads_batch_by_batch_goes_on_behind_its_checkpoint_and_notices_a_loss(spark, queue, tmp_path):
    runs: list[list[int]] = []

    def run(**options: str) -> list[list[int]]:
        runs.clear()
        frame = spark.readStream.format("strandline").options(**QUEUE, **options).schema("offset LONG").load(queue.url)
        query = (
            frame.writeStream.foreachBatch(lambda rows, _: runs.append(sorted(row.offset for row in rows.collect())))
            .trigger(availableNow=True)
            .option("checkpointLocation", str(tmp_path / "point"))
            .start()
        )
        query.awaitTermination()
        return list(runs)

    assert run(maxBatchesPerTrigger="2") == [[5, 5, 6], [7, 7, 8]]
    append(queue, b"x", b"y", number=1)
    assert run() == [[9, 9]]
    append(queue, b"z", number=2)
    append(queue, b"z", number=3)
    queue.slots.claim("queue", "me").advance(queue.start().at(11))
    with pytest.raises(Exception) as caught:
        run()
    assert isinstance(unwrapped(caught.value), CursorExpired)
    assert run(failOnDataLoss="false") == [[11]]


def test_the_options_of_a_queue_are_named_and_checked():
    assert parse_options({"path": "s3://b", "logFormat": "queue-v1"}).queue == QueueFormat("ingest/manifest", "ingest")
    given = parse_options({"path": "s3://b", "logFormat": "Queue-V1", "manifest": "x/list", "data": "x/data"})
    assert given.queue == QueueFormat("x/list", "x/data")
    assert parse_options({"path": "s3://b"}).queue is None
    with pytest.raises(InvalidInput, match="'queue-v1', 'topic' or, for a log, left out; not 'parquet'"):
        parse_options({"path": "s3://b", "logFormat": "parquet"})
    with pytest.raises(InvalidInput, match=r"'manifest' is for queues.*logFormat"):
        parse_options({"path": "s3://b", "manifest": "x"})


def test_other_paths_than_the_usual_ones_are_options(spark, tmp_path: Path):
    log = open_queue(str(tmp_path / "queue"), manifest="x/list", data="x/data")
    append(log, b"a", number=0)
    assert load(spark, log, manifest="x/list", data="x/data").count() == 1
