"""What a pipeline says of itself: lag, rate, metrics, progress bars; and the listener for streams."""

from __future__ import annotations

import io
import logging
import math
import threading
from datetime import UTC, datetime

import pytest
from prometheus_client import REGISTRY

import strandline as sl
from strandline.errors import InvalidInput
from strandline.log.lag import lag_of
from strandline.model.cursor import Cursor
from strandline.spark import follow, listen
from strandline.spark.pipelines.display import displayed
from strandline.spark.pipelines.progress import PipelineProgress
from tests.spark.helpers import append, delete, move_floor, new_log, numbered, put, until_its_source_starts

NOW = {"availableNow": True}


@pytest.fixture
def log(tmp_path):
    log = new_log(tmp_path, "orders")
    for first in range(0, 100, 50):
        append(log, numbered(first, 50))
    return log


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_a_pipeline_tells_rate_lag_and_its_last_commit(spark, log, tmp_path):
    table = str(tmp_path / "table")
    sink = sl.DeltaSink(table, mode="append")
    began = datetime.now(UTC)
    following = follow(spark, log, sink, trigger=NOW)
    assert following.await_termination(600)
    found = following.progress()
    assert (found.lag, found.lag_bytes, found.lag_seconds) == (0, 0, 0.0)
    assert found.rate is not None
    assert found.rate > 0
    assert began <= found.last_commit <= datetime.now(UTC)
    labels = {"log": log.url, "table": table}
    assert sample("strandline_pipeline_records_total", **labels) == 100
    assert sample("strandline_pipeline_commits_total", **labels) == found.commits
    assert sample("strandline_pipeline_lag_records", **labels) == 0
    assert sample("strandline_pipeline_commit_seconds_count", **labels) == found.commits
    assert "<td>100</td>" in following._repr_html_()
    assert "100 records in" in repr(following)


def test_a_pipeline_that_is_behind_says_by_how_much(spark, log, tmp_path):
    seen: list[PipelineProgress] = []
    ready = threading.Event()

    def look(step: str) -> None:
        if step == "written" and not seen:
            assert ready.wait(60)
            seen.append(following.progress())

    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append")
    following = follow(spark, log, sink, trigger=NOW, on_step=look)
    ready.set()
    assert following.await_termination(600)
    (found,) = seen
    assert found.lag == 100
    assert found.lag_bytes == sum(span.size for span in log.plan(log.start()))
    assert found.lag_seconds >= 0
    assert found.rate is None
    assert found.last_commit is None


def test_lag_counts_from_the_listing_of_the_oldest_batch_that_is_missing(log):
    entries = log.head().tail
    now = entries[1].listed + 5_000_000
    assert lag_of(log, 50, now).seconds == 5.0
    assert lag_of(log, 70, now).bytes == entries[1].size
    assert lag_of(log, 0, now).bytes == entries[0].size + entries[1].size
    assert lag_of(log, 100, now) == lag_of(log, 120, now)
    assert lag_of(log, 0, 0).seconds == 0.0  # a clock that is behind
    move_floor(log, 50)
    unknown = lag_of(log, 10, now)
    assert (unknown.records, unknown.bytes, unknown.seconds) == (90, None, None)


def test_a_log_that_tells_no_sizes_has_an_unknown_lag_and_never_none_at_all():
    memory = sl.log.MemoryLog()
    append(memory, [put(b"a", b"1"), delete(b"a")])
    found = lag_of(memory, 0, 0)
    assert (found.records, found.bytes, found.seconds) == (2, None, None)
    assert lag_of(memory, 2, 0).bytes == 0


def at(records: int, lag: int | None) -> PipelineProgress:
    return PipelineProgress(None, 1, records, 1, 1, 0, 0, 0.1, lag)


def test_lines_are_shown_where_there_is_no_terminal():
    out = io.StringIO()
    with displayed("orders → latest", lambda: at(5, None), out):
        pass
    assert out.getvalue() == "orders → latest: 5 records in 1 commits, lag unknown\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_in_a_terminal_and_a_failing_look_ends_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    out = Terminal()
    answers = iter([at(5, 5)])
    with displayed("orders → latest", lambda: next(answers), out):
        pass
    assert "━" in out.getvalue()
    assert "5 records behind" in out.getvalue()
    with displayed("x", lambda: next(answers), io.StringIO()):
        pass


def test_values_in_a_notebook_are_escaped_and_unknown_ones_say_so():
    shown = PipelineProgress(Cursor(sl.log.MemoryLog().log_id, 1234), 1, 2, 3, 4, 5, 6, 7.0, None)._repr_html_()
    assert "<th>cursor</th><td>1,234</td>" in shown
    assert "<th>lag</th><td>unknown</td>" in shown


def test_progress_bars_are_asked_for(spark, log, tmp_path, capfd):
    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append")
    assert follow(spark, log, sink, trigger=NOW, progress=True).await_termination(600)


@pytest.mark.matrix
def test_a_listener_reports_lag_and_rates_of_streams(spark, log, tmp_path, caplog):
    heard: list[float] = []
    listener = listen(spark)
    inner = listener.onQueryProgress
    done = threading.Event()

    def hear(event) -> None:
        inner(event)
        heard.append(sample("strandline_stream_lag_records", query="mine"))
        done.set()

    listener.onQueryProgress = hear

    def run() -> None:
        stream = spark.readStream.format("strandline").option("maxBatchesPerTrigger", "1").load(log.url)
        writer = stream.writeStream.format("noop").queryName("mine").trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()

    ended = threading.Event()
    finish = listener.onQueryTerminated
    listener.onQueryTerminated = lambda event: (finish(event), ended.set())
    try:
        with caplog.at_level(logging.INFO, logger="strandline.spark.listener"):
            until_its_source_starts(run)
            assert ended.wait(60)
    finally:
        spark.streams.removeListener(listener)
    assert [one for one in heard if not math.isnan(one)][:1] == [50]
    assert sample("strandline_stream_records_total", query="mine") == 100
    assert sample("strandline_stream_lag_records", query="mine") is None
    assert "mine: micro-batch 0, 50 rows" in caplog.text
    assert "50 records behind" in caplog.text


def test_only_a_session_can_be_listened_to():
    with pytest.raises(InvalidInput, match="a SparkSession"):
        listen("spark")
