"""Drivers and workers killed at every step: the table is right, and broken twins are caught."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.followers.table_route import TableRoute
from strandline.log.object import ObjectLog
from strandline.spark import follow
from tests.spark.bulk.killed_pools import KilledOnce
from tests.spark.helpers import (
    RowsSink,
    append,
    appended_rows,
    expected_rows,
    latest_rows,
    new_log,
    numbered,
    truth,
)

NOW = {"availableNow": True}
STEPS = ("planned", "written", "committed", "advanced")
TWO_BATCHES = {"maxBatchesPerTrigger": "2"}


class Killed(Exception):
    """Stands for a driver that died: nothing of that run is used afterwards."""


def killed_at(step: str, time: int = 1) -> Callable[[str], None]:
    seen: list[str] = []

    def on_step(now: str) -> None:
        seen.append(now)
        if seen.count(step) == time:
            raise Killed(step)

    return on_step


def run(spark, log, sink, *, at: str | None = None, time: int = 1, hook=None, **options) -> None:
    """A run to the end, or to its death."""
    hook = hook if at is None else killed_at(at, time)
    with nullcontext() if at is None else pytest.raises(Killed):
        follow(spark, log, sink, trigger=NOW, options=TWO_BATCHES, on_step=hook, **options).await_termination(600)


@pytest.fixture
def log(tmp_path) -> ObjectLog:
    log = new_log(tmp_path)
    for first in range(0, 50, 10):
        append(log, numbered(first, 10))
    return log


@pytest.fixture
def table(tmp_path) -> Path:
    return tmp_path / "table"


def check_slot_is_not_ahead(log: ObjectLog, sink) -> None:
    """Invariant 1: what a slot says has been applied."""
    for slot in log.slots.list():
        assert slot.position <= stored_upto(log, sink), "the slot is ahead of its sink"


def stored_upto(log: ObjectLog, sink) -> int:
    stored = sink.cursor(log.log_id)
    return 0 if stored is None else stored.next


# --- a death at every step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        ("latest", "executors"),
        pytest.param("append", "executors", marks=pytest.mark.matrix),
        pytest.param("latest", "driver", marks=pytest.mark.matrix),
        pytest.param("append", "driver", marks=pytest.mark.matrix),
    ],
)
def test_a_driver_killed_at_every_step_leaves_a_right_table(spark, log, table, mode, place):
    sink = sl.DeltaSink(str(table), mode=mode)
    options = {"slot": "s", "place": place}
    for number, step in enumerate(STEPS):
        run(spark, log, sink, at=step, time=1 + (number > 0), **options)
        check_slot_is_not_ahead(log, sink)
        done = stored_upto(log, sink)
        if step == "planned":
            assert not table.exists(), "a newcomer that stored nothing leaves no table"
            assert log.slots.list() == [], "nor a slot"
        elif mode == "latest":
            assert latest_rows(table) == truth(numbered(0, done))
        else:
            assert appended_rows(table) == expected_rows(numbered(0, done))
        assert (done > 0) == (step != "planned")
        for _ in range(3):
            append(log, numbered(log.end().next, 10))
    run(spark, log, sink, **options)
    assert sink.cursor(log.log_id) == log.end()
    assert log.slots.get("s").position == log.end().next
    if mode == "latest":
        assert latest_rows(table) == truth(numbered(0, 170))
    else:
        assert appended_rows(table) == expected_rows(numbered(0, 170))


# --- workers that die, and jobs that fail ----------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", pytest.param("latest", marks=pytest.mark.matrix)])
def test_a_killed_python_worker_is_replaced_and_the_range_is_applied_once(spark, log, table, tmp_path, mode):
    sink = sl.DeltaSink(str(table), mode=mode, transform=KilledOnce(tmp_path / "killed"))
    seen = []
    run(spark, log, sink, slot="s", place="executors", hook=seen.append)
    assert (tmp_path / "killed").exists()
    rows = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    if mode == "latest":
        assert {row["_key"]: (row["_offset"], row["value"]) for row in rows} == truth(numbered(0, 50))
    else:
        assert sorted(row["_offset"] for row in rows) == list(range(50))
    assert log.slots.get("s").position == 50
    assert seen.count("planned") == seen.count("committed") + 1, "the job failed once, and was repeated by the loop"


def test_a_stop_during_a_job_ends_it_within_seconds_and_applies_nothing_of_it(spark, log, table, tmp_path):
    started = tmp_path / "started"

    def sleepy(rows):
        if rows.num_rows:
            started.touch()
            threading.Event().wait(300)
        return rows

    sink = sl.DeltaSink(str(table), mode="append", transform=sleepy)
    following = follow(spark, log, sink, slot="s", trigger=NOW, place="executors")
    while not started.exists():
        assert not following.await_termination(0.05)
    following.stop()
    assert not following.active
    assert following.exception() is None
    assert not (table / "_delta_log").exists()
    assert log.slots.list() == []


# --- broken twins ----------------------------------------------------------------------------------------------------


def advances_first(monkeypatch) -> None:
    """Broken: acknowledges before the table has committed."""
    store = TableRoute.store

    def first(self, chunks, since, upto):
        self.committer.advance(upto)
        store(self, chunks, since, upto)

    monkeypatch.setattr(TableRoute, "store", first)


class DiesInApply(sl.DeltaSink):
    def begin(self, *, since, upto, tasks):
        raise Killed("before anything was stored")


def check_a_death_before_the_commit(spark, log, table) -> None:
    run(spark, log, sl.DeltaSink(str(table)), slot="s")
    assert log.slots.get("s").position == 50
    append(log, numbered(50, 10))
    sink = DiesInApply(str(table))
    with pytest.raises(Killed):
        run(spark, log, sink, slot="s")
    assert stored_upto(log, sink) == 50
    check_slot_is_not_ahead(log, sink)


def test_a_slot_is_never_ahead_of_its_sink(spark, log, table):
    check_a_death_before_the_commit(spark, log, table)


@pytest.mark.matrix
def test_the_twin_that_advances_first_is_caught(spark, log, table, monkeypatch):
    advances_first(monkeypatch)
    with pytest.raises(AssertionError, match="the slot is ahead of its sink"):
        check_a_death_before_the_commit(spark, log, table)


def test_offsets_are_what_counts_from_run_to_run(spark, log):
    sink = RowsSink()
    run(spark, log, sink)
    append(log, numbered(50, 30))
    run(spark, log, sink)
    expected = [(n, change[1]) for n, change in enumerate(numbered(0, 80))]
    assert sink.found() == expected, f"{len(sink.rows)} of 80 records were applied"


# --- real deaths -----------------------------------------------------------------------------------------------------

DRIVER = """
import os, signal, sys
import strandline as sl
from strandline.spark import follow
from tests.spark.helpers import quick_session

url, table, mode, step = sys.argv[1:]
seen = []

def die(now):
    seen.append(now)
    if seen.count(step) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

spark = quick_session("driver")
follow(
    spark, url, sl.DeltaSink(table, mode=mode), slot="s", trigger={"availableNow": True},
    options={"maxBatchesPerTrigger": "2"}, on_step=die, place="executors",
).await_termination()
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mode", "step"),
    [
        ("append", "committed"),
        pytest.param("latest", "written", marks=pytest.mark.slow),
        pytest.param("latest", "advanced", marks=pytest.mark.slow),
        pytest.param("append", "planned", marks=pytest.mark.slow),
    ],
)
def test_a_driver_killed_by_signal_is_continued_by_the_next(spark, log, table, mode, step):
    arguments = [log.url, str(table), mode, step]
    done = subprocess.run([sys.executable, "-c", DRIVER, *arguments], capture_output=True, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    sink = sl.DeltaSink(str(table), mode=mode)
    check_slot_is_not_ahead(log, sink)
    assert sink.cursor(log.log_id).next == (40 if step in ("committed", "advanced") else 20)
    run(spark, log, sink, slot="s")
    assert log.slots.get("s").position == 50
    if mode == "latest":
        assert latest_rows(table) == truth(numbered(0, 50))
    else:
        assert appended_rows(table) == expected_rows(numbered(0, 50))
    assert DeltaTable(str(table)).version() >= 3
