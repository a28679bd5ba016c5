"""``spark.readStream.format("strandline")``: limits, restarts and losses as Spark itself drives them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from strandline.errors import CursorExpired, Diverged
from strandline.spark.failures import unwrapped
from tests.spark.helpers import append, move_floor, new_log, numbered, until_its_source_starts


class Run:
    """One availableNow run into a list; ``batches`` holds the offsets of each micro-batch."""

    def __init__(self, spark, log, checkpoint: Path | None = None, **options: str) -> None:
        self.batches: list[list[int]] = []
        frame = spark.readStream.format("strandline").options(**options).schema("offset LONG").load(log.url)
        writer = frame.writeStream.foreachBatch(self._take).trigger(availableNow=True)
        if checkpoint is not None:
            writer = writer.option("checkpointLocation", str(checkpoint))

        def once() -> None:
            self.query = writer.start()
            self.query.awaitTermination()

        until_its_source_starts(once)

    def _take(self, frame, batch_id: int) -> None:
        self.batches.append(sorted(row.offset for row in frame.collect()))

    @property
    def offsets(self) -> list[int]:
        return [offset for batch in self.batches for offset in batch]


@pytest.fixture
def log(tmp_path):
    log = new_log(tmp_path)
    for first in range(0, 50, 10):
        append(log, numbered(first, 10))
    return log


def test_available_now_reads_everything_in_batches_within_the_limit(spark, log):
    run = Run(spark, log, maxRecordsPerTrigger="25")
    assert run.offsets == list(range(50))
    assert [len(batch) for batch in run.batches] == [20, 20, 10]


def test_a_restart_goes_on_behind_its_checkpoint(spark, log, tmp_path):
    assert Run(spark, log, tmp_path / "point").offsets == list(range(50))
    append(log, numbered(50, 10))
    assert Run(spark, log, tmp_path / "point").offsets == list(range(50, 60))


@pytest.mark.matrix
def test_a_stream_from_now_on_sees_only_what_comes(spark, log, tmp_path):
    assert Run(spark, log, tmp_path / "point", startingOffset="latest").offsets == []
    append(log, numbered(50, 3))
    assert Run(spark, log, tmp_path / "point", startingOffset="latest").offsets == [50, 51, 52]


@pytest.mark.matrix
def test_a_stream_from_now_on_goes_on_after_its_first_batch_failed(spark, log, tmp_path, monkeypatch):
    def fail(run: Run, frame, batch_id: int) -> None:
        raise RuntimeError(f"batch {batch_id}")

    with monkeypatch.context() as patched:
        patched.setattr(Run, "_take", fail)
        with pytest.raises(StreamingQueryException, match="batch 0"):
            Run(spark, log, tmp_path / "point", startingOffset="latest")
    append(log, numbered(50, 3))
    assert Run(spark, log, tmp_path / "point", startingOffset="latest").offsets == [50, 51, 52]


@pytest.mark.matrix
def test_an_empty_log_is_an_empty_stream(spark, tmp_path):
    assert Run(spark, new_log(tmp_path, "empty")).offsets == []


def test_lost_records_end_the_query_or_are_skipped_as_asked(spark, log, tmp_path):
    point = tmp_path / "point"
    assert Run(spark, log, point, endingOffset="10").offsets == list(range(10))
    move_floor(log, 30)
    with pytest.raises(Exception) as caught:
        Run(spark, log, point)
    error = unwrapped(caught.value)
    assert isinstance(error, CursorExpired)
    assert "Offsets 10 to 29" in str(error)
    assert Run(spark, log, point, failOnDataLoss="false").offsets == list(range(30, 50))


@pytest.mark.matrix
def test_another_log_behind_an_old_checkpoint_is_diverged(spark, log, tmp_path):
    Run(spark, log, tmp_path / "point")
    other = new_log(tmp_path, "other")
    append(other, numbered(0, 60))
    with pytest.raises(Exception) as caught:
        Run(spark, other, tmp_path / "point")
    assert isinstance(unwrapped(caught.value), Diverged)


@pytest.mark.matrix
def test_a_log_restored_from_a_copy_behind_an_old_checkpoint_is_diverged(spark, log, tmp_path):
    place = Path(log.url.removeprefix("file://"))
    shutil.copytree(place, tmp_path / "backup")
    append(log, numbered(50, 10))
    Run(spark, log, tmp_path / "point")
    shutil.rmtree(place)
    shutil.move(tmp_path / "backup", place)
    append(log, numbered(50, 20))
    with pytest.raises(Exception) as caught:
        Run(spark, log, tmp_path / "point")
    assert isinstance(unwrapped(caught.value), Diverged)
    assert "restored from a copy" in str(unwrapped(caught.value))


@pytest.mark.matrix
def test_the_progress_shows_the_lag_of_the_query(spark, log):
    run = Run(spark, log, maxBatchesPerTrigger="2")
    source = run.query.recentProgress[0]["sources"][0]
    assert json.loads(source["endOffset"])["next"] == 20
    assert json.loads(source["latestOffset"])["next"] == 50
