"""Killed at every step, checkpoints lost, stale and torn: the table is right, and broken twins are caught."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import Diverged
from strandline.log.object import ObjectLog
from strandline.model.cursor import Cursor
from strandline.spark import follow, pipeline
from tests.spark.helpers import (
    RowsSink,
    append,
    appended_rows,
    expected_rows,
    latest_rows,
    new_log,
    numbered,
    truth,
    until_its_source_starts,
)

NOW = {"availableNow": True}
STEPS = ("planned", "fetched", "committed", "advanced")
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


def run(spark, log, sink, *, at: str | None = None, time: int = 1, **options) -> None:
    """A run to the end, or to its death."""

    def once() -> None:
        hook = None if at is None else killed_at(at, time)
        follow(spark, log, sink, trigger=NOW, options=TWO_BATCHES, on_step=hook, **options).await_termination(600)

    with nullcontext() if at is None else pytest.raises(Killed):
        until_its_source_starts(once)


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
    ("mode", "kept"),
    [
        pytest.param("latest", True, id="latest-checkpoint-kept", marks=pytest.mark.matrix),
        pytest.param("append", False, id="append-checkpoint-lost"),
        pytest.param("latest", False, id="latest-checkpoint-lost", marks=pytest.mark.slow),
        pytest.param("append", True, id="append-checkpoint-kept", marks=pytest.mark.slow),
    ],
)
def test_a_driver_killed_at_every_step_leaves_a_right_table(spark, log, table, tmp_path, mode, kept):
    sink = sl.DeltaSink(str(table), mode=mode)
    options = {"slot": "s", "checkpoint": str(tmp_path / "point") if kept else None}
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


# --- checkpoints that tell stories -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def followed(spark, tmp_path_factory) -> tuple[ObjectLog, Path]:
    """A log with a table and a checkpoint that have followed it to offset 50, in one folder."""
    folder = tmp_path_factory.mktemp("followed")
    log = new_log(tmp_path_factory.mktemp("log"))
    for first in range(0, 50, 10):
        append(log, numbered(first, 10))
    run(spark, log, sl.DeltaSink(str(folder / "table"), mode="append"), checkpoint=str(folder / "point"))
    append(log, numbered(50, 10))
    return log, folder


def harm_last_commit(point: Path) -> None:
    for file in (point / "commits").glob("*2*"):  # the file and its checksum
        file.unlink()


def harm_everything(point: Path) -> None:
    shutil.rmtree(point)


def harm_commits(point: Path) -> None:
    shutil.rmtree(point / "commits")


def harm_offsets(point: Path) -> None:
    shutil.rmtree(point / "offsets")


def harm_text(point: Path) -> None:
    (point / "offsets" / ".2.crc").unlink(missing_ok=True)
    (point / "offsets" / "2").write_text("v1\n{}\n{torn")


def harm_checksum(point: Path) -> None:
    (point / "offsets" / "2").write_text("v1\nnot what it was\n")


@pytest.mark.parametrize(
    "harm",
    [
        harm_last_commit,
        harm_everything,
        harm_offsets,
        harm_text,
        pytest.param(harm_commits, marks=pytest.mark.slow),
        pytest.param(harm_checksum, marks=pytest.mark.slow),
    ],
)
def test_a_harmed_checkpoint_neither_loses_nor_doubles(spark, followed, tmp_path, harm):
    log, folder = followed
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    point, table = tmp_path / "point", tmp_path / "table"
    assert (point / "commits" / "2").exists()
    harm(point)
    run(spark, log, sl.DeltaSink(str(table), mode="append"), checkpoint=str(point))
    assert appended_rows(table) == expected_rows(numbered(0, 60))


def test_a_checkpoint_ahead_of_the_table_is_set_aside(spark, log, table, tmp_path):
    point = tmp_path / "point"
    sink = sl.DeltaSink(str(table))
    run(spark, log, sink, at="fetched", time=2, checkpoint=str(point))  # the table is at 20
    shutil.copytree(table, tmp_path / "backup")
    run(spark, log, sink, checkpoint=str(point))
    shutil.rmtree(table)
    shutil.move(tmp_path / "backup", table)
    with pytest.raises(Diverged, match="an older copy was put in its place"):
        sink.cursor(log.log_id)
    assert sl.DeltaSink(str(table)).cursor(log.log_id).next == 20
    run(spark, log, sink, checkpoint=str(point))
    assert latest_rows(table) == truth(numbered(0, 50))
    assert len(list(tmp_path.glob("point.aside-*"))) == 1


def test_a_table_that_was_removed_is_built_again_whatever_the_checkpoint_says(spark, log, table, tmp_path):
    point = tmp_path / "point"
    run(spark, log, sl.DeltaSink(str(table)), checkpoint=str(point))
    shutil.rmtree(table)
    run(spark, log, sl.DeltaSink(str(table)), checkpoint=str(point))
    assert latest_rows(table) == truth(numbered(0, 50))


def test_a_checkpoint_of_another_log_is_set_aside(spark, log, table, tmp_path):
    other = new_log(tmp_path, "other")
    append(other, numbered(0, 80))
    run(spark, other, RowsSink(), checkpoint=str(tmp_path / "point"))
    run(spark, log, sl.DeltaSink(str(table)), checkpoint=str(tmp_path / "point"))
    assert latest_rows(table) == truth(numbered(0, 50))


def test_a_checkpoint_that_agrees_is_used_again(spark, log, table, tmp_path):
    point = tmp_path / "point"
    for end in (50, 60):
        run(spark, log, sl.DeltaSink(str(table)), checkpoint=str(point))
        assert latest_rows(table) == truth(numbered(0, end))
        append(log, numbered(end, 10))
    assert not list(tmp_path.glob("point.aside-*"))


# --- broken twins ----------------------------------------------------------------------------------------------------


class AdvancesFirst(pipeline._Batches):
    """Broken: acknowledges before the table has committed."""

    def _commit(self, records, since: Cursor, upto: Cursor) -> None:
        self.committer.advance(upto)
        super()._commit(records, since, upto)


class DiesInApply(sl.DeltaSink):
    def apply(self, records, *, since, upto) -> None:
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
    monkeypatch.setattr(pipeline, "_Batches", AdvancesFirst)
    with pytest.raises(AssertionError, match="the slot is ahead of its sink"):
        check_a_death_before_the_commit(spark, log, table)


class KeyedByBatchId(pipeline._Batches):
    """Broken: what was applied is remembered by Spark's batch id."""

    def __call__(self, frame, batch_id: int) -> None:
        done = self.committer._sink.__dict__.setdefault("ids", set())
        if batch_id not in done:
            super().__call__(frame, batch_id)
            done.add(batch_id)


def check_runs_without_a_common_checkpoint(spark, log) -> None:
    sink = RowsSink()
    run(spark, log, sink)
    append(log, numbered(50, 30))
    run(spark, log, sink)
    expected = [(n, change[1]) for n, change in enumerate(numbered(0, 80))]
    assert sink.found() == expected, f"{len(sink.rows)} of 80 records were applied"


def test_offsets_are_what_counts_from_run_to_run(spark, log):
    check_runs_without_a_common_checkpoint(spark, log)


def test_the_twin_that_counts_batch_ids_is_caught(spark, log, monkeypatch):
    monkeypatch.setattr(pipeline, "_Batches", KeyedByBatchId)
    with pytest.raises(AssertionError, match="50 of 80 records were applied"):
        check_runs_without_a_common_checkpoint(spark, log)


# --- real deaths -----------------------------------------------------------------------------------------------------

DRIVER = """
import os, signal, sys
import strandline as sl
from strandline.spark import follow
from tests.spark.helpers import quick_session

url, table, mode, point, step = sys.argv[1:]
seen = []

def die(now):
    seen.append(now)
    if seen.count(step) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

spark = quick_session("driver")
follow(
    spark, url, sl.DeltaSink(table, mode=mode), slot="s", trigger={"availableNow": True},
    checkpoint=point, options={"maxBatchesPerTrigger": "2"}, on_step=die,
).await_termination()
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mode", "step"),
    [
        ("append", "committed"),
        pytest.param("latest", "fetched", marks=pytest.mark.slow),
        pytest.param("latest", "advanced", marks=pytest.mark.slow),
        pytest.param("append", "planned", marks=pytest.mark.slow),
    ],
)
def test_a_driver_killed_by_signal_is_continued_by_the_next(spark, log, table, tmp_path, mode, step):
    point = tmp_path / "point"
    arguments = [log.url, str(table), mode, str(point), step]
    done = subprocess.run([sys.executable, "-c", DRIVER, *arguments], capture_output=True, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    sink = sl.DeltaSink(str(table), mode=mode)
    check_slot_is_not_ahead(log, sink)
    assert sink.cursor(log.log_id).next == (40 if step in ("committed", "advanced") else 20)
    run(spark, log, sink, slot="s", checkpoint=str(point))
    assert log.slots.get("s").position == 50
    if mode == "latest":
        assert latest_rows(table) == truth(numbered(0, 50))
    else:
        assert appended_rows(table) == expected_rows(numbered(0, 50))
    assert DeltaTable(str(table)).version() >= 3
    assert os.path.isdir(point)
