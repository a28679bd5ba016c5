"""Two followers of one table, each with a slot of its own or with none: the newer one takes the table over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import Fenced
from strandline.followers.committer import SinkCommitter, begin
from strandline.log.memory import MemoryLog
from strandline.tables.maintain.operations import optimize, verify
from tests.tables.maintain.test_maintenance_formats import extend, opened_place

FORMATS = ["delta", "iceberg", "sqlite", pytest.param("postgres", marks=pytest.mark.matrix)]


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    extend(log, 50)
    return log


@pytest.fixture(params=FORMATS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with opened_place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


def started(log: MemoryLog, place: Any, slot: str | None) -> SinkCommitter:
    return begin(log, place.sink(mode="append"), slot, start="beginning", holder=f"of {slot}")


def store(follower: SinkCommitter, log: MemoryLog, first: int, end: int) -> None:
    records = pa.Table.from_batches(log.read(first, upto=end))
    follower.apply(records, since=log.cursor_at(first), upto=log.cursor_at(end))


@pytest.mark.parametrize("slots", [("a", "b"), (None, None)], ids=["slots", "none"])
def test_the_older_follower_is_fenced_at_its_next_commit(log, place, slots):
    older = started(log, place, slots[0])
    store(older, log, 0, 10)
    newer = started(log, place, slots[1])
    store(older, log, 10, 20)
    store(newer, log, 10, 30)
    for first in (20, 30):
        with pytest.raises(Fenced, match="one follower per table"):
            store(older, log, first, 40)
    store(newer, log, 30, 50)
    assert verify(place.sink(mode="append"), log).is_clean


def test_the_newer_follower_takes_over_though_the_older_commits_each_range_first(log, place):
    older = started(log, place, "a")
    store(older, log, 0, 10)
    newer = started(log, place, "b")
    store(older, log, 10, 20)
    store(newer, log, 10, 20)
    with pytest.raises(Fenced):
        store(older, log, 20, 30)
    store(newer, log, 20, 50)
    assert verify(place.sink(mode="append"), log).is_clean


@pytest.mark.parametrize(
    "slots", [("a", None), pytest.param(("a", "b"), marks=pytest.mark.matrix)], ids=["none", "slots"]
)
def test_a_newer_follower_whose_first_commit_comes_second_takes_over_all_the_same(log, place, slots):
    older = started(log, place, slots[0])
    store(older, log, 0, 10)
    sink = place.sink(mode="append")
    newer = begin(log, sink, slots[1], start="beginning", holder="newer")
    planning = "_parts" if hasattr(sink, "_parts") else "_planner"  # between its look at the table and its commit
    plan = getattr(sink, planning)
    own = pytest.MonkeyPatch()  # the fixture's has the settings of the server, too

    def planned(*arguments: Any) -> Any:
        own.undo()
        store(older, log, 10, 20)
        return plan(*arguments)

    own.setattr(sink, planning, planned)
    store(newer, log, 10, 20)
    with pytest.raises(Fenced):
        store(older, log, 20, 30)
    store(newer, log, 20, 50)
    assert verify(place.sink(mode="append"), log).is_clean


def test_a_follower_that_looks_again_takes_over_though_the_range_is_stored_by_then(log, place):
    """Another follower, that started before it, commits first, and has the same range."""
    store(started(log, place, "a"), log, 0, 10)
    other = started(log, place, "b")
    newest = started(log, place, "c")
    store(other, log, 10, 20)
    store(newest, log, 10, 20)
    with pytest.raises(Fenced):
        store(other, log, 20, 30)
    store(newest, log, 20, 50)
    assert verify(place.sink(mode="append"), log).is_clean


def test_of_two_newcomers_one_goes_on_whichever_commits_first(log, place):
    one, other = started(log, place, "a"), started(log, place, "b")
    store(one, log, 0, 10)
    store(other, log, 0, 10)
    store(other, log, 10, 20)
    with pytest.raises(Fenced):
        store(one, log, 20, 30)
    store(other, log, 20, 50)
    assert verify(place.sink(mode="append"), log).is_clean


def test_a_follower_that_has_nothing_to_store_leaves_the_table_to_the_one_that_has(log, place):
    older = started(log, place, "a")
    store(older, log, 0, 10)
    started(log, place, "b")
    store(older, log, 10, 50)
    store(older, log, 10, 50)
    assert verify(place.sink(mode="append"), log).is_clean


def test_maintenance_leaves_the_table_to_its_follower(log, tmp_path):
    sink = sl.DeltaSink(tmp_path / "table", mode="append", dead_letters=tmp_path / "letters")
    follower = begin(log, sink, "a", start="beginning", holder="a")
    for first in range(0, 40, 10):
        store(follower, log, first, first + 10)
    other = sl.DeltaSink(tmp_path / "table", mode="append", dead_letters=tmp_path / "letters")
    optimize(other)
    sl.tables.replay_letters(other, log)
    store(follower, log, 40, 50)
    assert verify(sink, log).is_clean


def test_a_start_changes_nothing(log, tmp_path):
    for _ in range(3):
        sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="append"), "a", upto="end")
    assert DeltaTable(tmp_path / "table").version() == 1  # created, and committed to once


@pytest.mark.matrix
def test_two_running_followers_with_slots_of_their_own_become_one(tmp_path):
    log, stop, ended = MemoryLog(), threading.Event(), threading.Event()
    extend(log, 1)
    outcomes: list[str] = []

    def run(slot: str) -> None:
        try:
            sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="append"), slot, stop=stop)
            outcomes.append("ok")
        except Fenced:
            outcomes.append("Fenced")
        finally:
            ended.set()

    followers = [threading.Thread(target=run, args=(slot,)) for slot in ("a", "b")]
    for follower in followers:
        follower.start()
    for _ in range(2000):
        extend(log, 1)
        if ended.wait(0.005):
            break
    stop.set()
    for follower in followers:
        follower.join(60)
    assert sorted(outcomes) == ["Fenced", "ok"]
    sink = sl.DeltaSink(tmp_path / "table", mode="append")
    sl.follow(log, sink, upto="end")
    assert verify(sink, log).is_clean
