"""Upkeep by a follower: small files are joined and old versions go; what readers may rely on stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import Diverged, Fenced, Gap, StorageError
from strandline.model.cursor import Cursor
from strandline.storage.env import Env
from strandline.tables.delta import commits as delta_commits
from strandline.tables.delta import trimming
from strandline.tables.delta.files import DeltaFiles
from strandline.tables.files import sink as file_sink
from strandline.tables.files.layout import HashRange, file_name, range_of
from strandline.tables.files.upkeep import LARGE, TrimCounts, UpkeepDone, to_join
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.testing.clock import ManualClock
from strandline.testing.crashing import interrupted
from strandline.testing.faulty import Crash
from strandline.testing.sinks import LOG
from tests.tables.upkeep.kept_table import (
    CHECKPOINT,
    FEW,
    KEPT,
    TRIM_EVERY,
    KeptDelta,
    KeptIceberg,
    KeptTable,
    later,
    looked_after_often,
)

KINDS = {"delta": KeptDelta, "iceberg": KeptIceberg}
UPTO = TRIM_EVERY + 3
"""Commits after which each kind of round has run."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_after_often(monkeypatch)


@pytest.fixture(params=["append", "latest", "history"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> KeptTable:
    return KINDS[request.param](tmp_path)


@pytest.fixture
def delta(tmp_path: Path) -> KeptDelta:
    return KeptDelta(tmp_path)


def test_every_kind_of_table_stays_exact_and_small(kept: KeptTable, mode: str) -> None:
    kept.mode = mode
    sink = kept.followed(UPTO, env=later())
    assert sink.upkeep.failures == 0, sink.upkeep.error
    assert (sink.upkeep.joins > 0) == (mode != "latest"), "each file of current rows covers keys of its own"
    assert sink.upkeep.files > 0
    assert sink.upkeep.entries > 0
    assert sink.size().files <= 2 * FEW
    assert len(kept.data_files()) <= 4 * TRIM_EVERY
    kept.check_versions()
    if mode != "history":
        kept.check(UPTO)


def test_a_history_is_what_its_log_gives(tmp_path: Path) -> None:
    log = sl.open(str(tmp_path / "log"), create=True)
    sink = sl.DeltaSink(str(tmp_path / "table"), mode="history", layout=KEPT, env=later())
    for number in range(UPTO):
        with log.producer() as producer:
            producer.append(key=b"%d" % (number % 7), value=b"%d" % number)
        sl.follow(log, sink, upto="end")
    assert sink.upkeep.joins
    assert sl.tables.verify(sink, log).is_clean


def test_without_upkeep_nothing_is_joined_or_removed(delta: KeptDelta) -> None:
    sink = delta.followed(UPTO, layout=None, env=later())
    assert sink.size().files == UPTO
    assert len(delta.data_files()) == UPTO
    assert 0 in delta.versions()


def test_upkeep_is_an_option_of_a_follower_that_no_table_records(kept: KeptTable) -> None:
    found = kept.followed(1).recorded()
    assert found is not None
    assert found.layout is None


def test_within_the_retention_every_version_stays_readable(delta: KeptDelta) -> None:
    sink = delta.followed(UPTO)
    assert sink.upkeep.joins
    assert delta.versions()[0] == 0
    delta.check_versions()
    assert [delta.rows_at(version) for version in (0, 1, CHECKPOINT)] == [0, 1, CHECKPOINT]


def test_of_an_iceberg_table_nothing_goes_within_the_retention(tmp_path: Path) -> None:
    kept = KeptIceberg(tmp_path)
    kept.followed(UPTO)
    assert sorted(kept.rows_at(version) for version in kept.versions())[:3] == [1, 2, 3]
    assert len([name for name in kept.entries() if name.endswith(".avro")]) > 2 * UPTO


def test_exactly_the_versions_that_were_current_within_the_retention_stay(delta: KeptDelta) -> None:
    delta.followed(UPTO, layout=None)
    table = delta.sink(layout=None)._followed
    times = {at: trimming._time_of(table, at, 0) for at in range(UPTO)}
    cut = times[TRIM_EVERY - 4]
    clock = ManualClock(now=(cut + 3_600_000) * 1000)
    sink = delta.followed(2 * TRIM_EVERY, env=Env(clock=clock))
    assert sink.upkeep.failures == 0
    newest = max(at for at, time in times.items() if time <= cut)
    oldest = delta.versions()[0]
    assert oldest <= newest, "it was current an hour ago"
    assert newest - oldest < CHECKPOINT, "one checkpoint before it"
    delta.check_versions()


def test_short_runs_have_their_turn(delta: KeptDelta) -> None:
    joins = 0
    for upto in range(1, FEW + 2):
        joins += delta.followed(upto).upkeep.joins
    assert joins == 1
    delta.check(FEW + 1)


STEPS: dict[str, tuple[Any, str, bool]] = {
    "rows were written again": (file_sink, "joined_files", True),
    "joined": (UpkeepDone, "with_join", False),
    "the floor is known": (delta_commits.DeltaCommits, "at_version", True),
    "the floor was raised": (delta_commits.DeltaCommits, "raise_floor", True),
    "the history was trimmed": (DeltaFiles, "listed", False),
}


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> tuple[Any, str, bool]:
    return STEPS[request.param]


def test_a_follower_that_is_killed_at_any_step_leaves_a_table_that_the_next_one_continues(
    delta: KeptDelta, step: tuple[Any, str, bool]
) -> None:
    owner, name, after = step

    def crash() -> None:
        raise Crash(name)

    sink = delta.sink(env=later())
    sink.resume(LOG)
    with interrupted(owner, name, crash, after=after) as reached, pytest.raises(Crash):
        delta.apply(sink, 2 * TRIM_EVERY)
    assert reached
    delta.check_versions()
    done = delta.followed(3 * TRIM_EVERY, env=later())
    assert done.upkeep.failures == 0
    delta.check(3 * TRIM_EVERY)
    delta.check_versions()
    assert len(delta.data_files()) <= 2 * TRIM_EVERY, "what the killed one left is gone, too"
    assert len(delta.entries()) <= 2 * TRIM_EVERY


def test_a_kill_between_two_removals_is_done_again(delta: KeptDelta, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    files = type(delta.sink()._followed.files)
    remove = files.remove

    def some(self: Any, path: str) -> None:
        if len(removed) == 10:
            raise Crash(path)
        removed.append(path)
        remove(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", some)
        with pytest.raises(Crash):
            delta.followed(2 * TRIM_EVERY, env=later())
    delta.check_versions()
    delta.followed(3 * TRIM_EVERY, env=later())
    delta.check(3 * TRIM_EVERY)
    delta.check_versions()
    assert len(delta.data_files()) <= 2 * TRIM_EVERY


def test_a_clock_that_is_ahead_takes_nothing_of_a_job_that_is_about_to_commit(tmp_path: Path) -> None:
    """All files are old by that clock, also the manifests of a snapshot that is not committed yet."""
    kept = KeptIceberg(tmp_path)
    follower, joining = kept.followed(FEW - 2, env=later()), kept.sink(layout=None)

    def trims() -> None:
        follower._trim(Cursor(LOG, FEW - 2), follower._claims[LOG], 3600)

    with interrupted(FollowedIceberg, "_committed", trims) as reached:
        assert sl.tables.optimize(joining) == FEW - 3
    assert reached
    kept.check(FEW - 2)
    kept.check_versions()


def test_a_failure_is_counted_and_tried_again_and_stops_nothing(kept: KeptTable, monkeypatch: Any) -> None:
    def full(*_: Any) -> Any:
        raise StorageError("The disk is full.")

    sink = kept.sink(env=later())
    sink.resume(LOG)
    with monkeypatch.context() as patch:
        patch.setattr(file_sink, "joined_files", full)
        kept.apply(sink, FEW + 1)
    assert (sink.upkeep.failures, sink.upkeep.joins) == (1, 0)
    assert "The disk is full." in sink.upkeep.error
    kept.apply(sink, UPTO)
    assert sink.upkeep.joins == 1
    assert sink.upkeep.error == ""
    kept.check(UPTO)


def test_a_join_gives_way_to_another_writer_of_the_same_table(delta: KeptDelta) -> None:
    sink = delta.sink()
    sink.resume(LOG)
    delta.apply(sink, FEW - 1)

    def optimizes() -> None:
        DeltaTable(str(delta.folder / "table")).optimize.compact()

    with interrupted(file_sink, "joined_files", optimizes, after=True) as reached:
        delta.apply(sink, FEW + 1)
    assert reached
    assert (sink.upkeep.failures, sink.upkeep.joins) == (1, 0)
    delta.apply(sink, 3 * FEW)
    assert sink.upkeep.joins
    delta.check(3 * FEW)


def test_a_fenced_follower_joins_and_removes_nothing(kept: KeptTable) -> None:
    first = kept.followed(FEW - 2, env=later())
    second = kept.sink(layout=None)

    def takes_over() -> None:
        second.resume(LOG)
        kept.apply(second, FEW + 5)

    # The first one has committed, and is paused before its upkeep.
    with interrupted(file_sink.FileTableSink, "_held", takes_over) as reached:
        kept.apply(first, FEW)
    before = kept.data_files()
    assert reached
    assert (first.upkeep.joins, first.upkeep.files) == (0, 0)
    with pytest.raises(Fenced):
        kept.apply(first, FEW + 20)
    assert kept.data_files() >= before
    kept.check(FEW + 5)


def test_a_paused_follower_removes_nothing_of_what_its_successor_restored(delta: KeptDelta) -> None:
    """Between its decision and its removals: the floor that it commits first is refused by then."""
    first = delta.followed(TRIM_EVERY - 4, env=later())
    second = delta.sink(layout=None)

    def repairs() -> None:
        newest = DeltaTable(str(delta.folder / "table"))
        newest.delete()
        second.repair(LOG, lambda cursor: cursor.next <= 3)

    with interrupted(delta_commits.DeltaCommits, "raise_floor", repairs) as reached, pytest.raises(Gap):
        delta.apply(first, TRIM_EVERY)
    assert reached
    assert first.upkeep.failures == 1
    assert first.upkeep.files == 0
    delta.check(3)


def test_a_repair_goes_back_to_no_version_whose_files_may_be_gone(delta: KeptDelta) -> None:
    delta.followed(3 * TRIM_EVERY, env=later())
    oldest = delta.versions()[0]
    assert oldest > 0
    DeltaTable(str(delta.folder / "table")).delete()
    asked: list[int] = []
    sink = delta.sink(layout=None)
    cursor = sink.repair(LOG, lambda cursor: bool(asked.append(cursor.next)) or cursor.next < 3 * TRIM_EVERY)
    assert cursor is not None
    delta.check(cursor.next)
    DeltaTable(str(delta.folder / "table")).delete()
    with pytest.raises(Diverged):
        delta.sink(layout=None).repair(LOG, lambda cursor: cursor.next <= 5)


def test_a_repair_goes_below_no_floor_though_nothing_was_removed_yet(delta: KeptDelta) -> None:
    """The follower was killed, or is paused, between its floor and its removals."""

    def crash() -> None:
        raise Crash

    sink = delta.sink(env=later())
    sink.resume(LOG)
    with interrupted(delta_commits.DeltaCommits, "raise_floor", crash, after=True), pytest.raises(Crash):
        delta.apply(sink, 2 * TRIM_EVERY)
    assert delta.versions()[0] == 0
    DeltaTable(str(delta.folder / "table")).delete()
    with pytest.raises(Diverged):
        delta.sink(layout=None).repair(LOG, lambda cursor: cursor.next <= 5)


def test_after_a_repair_nothing_is_removed_until_it_is_older_than_the_retention(delta: KeptDelta) -> None:
    """A restored version names files again that later versions had removed."""
    delta.followed(TRIM_EVERY - 4)
    DeltaTable(str(delta.folder / "table")).delete()
    delta.sink().repair(LOG, lambda cursor: cursor.next <= 4)
    reset = DeltaTable(str(delta.folder / "table")).version()
    kept = delta.data_files()
    table = delta.sink()._followed
    clock = ManualClock(now=(trimming._time_of(table, reset, 0) - 1 + 3_600_000) * 1000)
    sink = delta.followed(2 * TRIM_EVERY, env=Env(clock=clock))
    assert sink.upkeep.joins
    assert sink.upkeep.files == 0
    assert delta.data_files() >= kept
    delta.check_versions()
    done = delta.followed(4 * TRIM_EVERY, env=later())
    assert done.upkeep.files
    delta.check(4 * TRIM_EVERY)
    delta.check_versions()


def test_files_of_failed_jobs_go_and_those_of_running_jobs_and_of_others_stay(delta: KeptDelta) -> None:
    sink = delta.followed(5, env=later())
    place = delta.folder / "table"
    job = sink._followed.open()
    assert job is not None
    lost = f"part-{6:016x}-{'a' * 8}-aaaa-aaaa-aaaa-{'a' * 12}-{'b' * 8}-bbbb-bbbb-bbbb-{'b' * 12}.parquet"
    running = lost.replace(f"{6:016x}", f"{900:016x}")
    for name in (lost, running, "other.parquet"):
        (place / name).write_bytes(b"nobody's")
    delta.followed(2 * TRIM_EVERY, env=later())
    assert delta.data_files() & {lost, running, "other.parquet"} == {running, "other.parquet"}


def test_a_table_that_only_takes_new_rows_is_joined_all_the_same(delta: KeptDelta) -> None:
    delta.followed(1)
    DeltaTable(str(delta.folder / "table")).alter.set_table_properties({"delta.appendOnly": "true"})
    assert delta.followed(2 * FEW).upkeep.joins == 1
    delta.check(2 * FEW)


def test_files_that_a_join_leaves_as_many_are_not_joined_again(delta: KeptDelta, monkeypatch: Any) -> None:
    monkeypatch.setattr("strandline.tables.files.joining.FILE_ROWS", 1)
    sink = delta.followed(3 * FEW)
    assert 2 * FEW <= sink.upkeep.joined <= 3 * FEW, "each file was written again once"
    delta.check(3 * FEW)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_partition_are_joined_with_those_of_the_same_one(kind: str, tmp_path: Path) -> None:
    codec = sl.values.Json(pa.schema({"city": pa.string(), "number": pa.int64()}))
    log = sl.open(str(tmp_path / "log"), create=True)
    options: dict[str, Any] = {"mode": "append", "value": codec, "layout": sl.tables.Layout("city", upkeep="auto")}
    kept = KINDS[kind](tmp_path)
    sink: Any = (
        sl.DeltaSink(str(tmp_path / "table"), **options)
        if kind == "delta"
        else sl.IcebergSink(kept.catalog, "shop.orders", **options)
    )
    for number in range(2 * FEW):
        with log.producer() as producer:
            for city in ("Oslo", "Rome"):
                producer.append(key=b"", value=json.dumps({"city": city, "number": number}).encode())
        sl.follow(log, sink, upto="end")
    assert sink.upkeep.failures == 0, sink.upkeep.error
    assert sink.upkeep.joined >= 2 * (FEW - 2)
    partitions = sink._followed.file_partitions(sink._followed.open())
    assert len(set(partitions.values())) == 2
    assert sl.tables.verify(sink, log).is_clean
    rows = sink.rows()
    assert sorted(rows["number"].to_pylist()) == sorted([*range(2 * FEW)] * 2)


def test_each_table_of_a_route_is_looked_after(tmp_path: Path) -> None:
    log = sl.open(str(tmp_path / "log"), create=True)
    sinks: dict[str, sl.DeltaSink] = {}
    for number in range(FEW + 1):
        with log.producer() as producer:
            for name in ("a", "b"):
                producer.append(key=b"%s/%d" % (name.encode(), number), value=b"")
        for name in ("a", "b"):
            kept = sl.DeltaSink(str(tmp_path / name), mode="append", layout=KEPT)
            sinks[name] = kept.taking(sl.tables.where(key_until=b"/", equals=name))
        sl.follow(log, sl.tables.route(list(sinks.values())), upto="end")
        if number == FEW - 1:
            assert [sink.upkeep.joined for sink in sinks.values()] == [FEW, FEW]
    for sink in sinks.values():
        assert sink.size().files == 2
        assert sl.tables.verify(sink, log).is_clean
    cut = sl.tables.cut(sinks.values())
    assert cut.next == log.end().next


def test_a_table_that_keeps_everything_for_ever_is_joined_all_the_same(tmp_path: Path) -> None:
    """``hours`` of more years than dates have."""
    kept = KeptIceberg(tmp_path)
    sink = kept.followed(2, layout=sl.tables.Layout(upkeep=sl.tables.Upkeep(hours=1e9)))
    assert sink._trim(Cursor(LOG, 2), sink._claims[LOG], sl.tables.Upkeep(hours=1e9).seconds) == TrimCounts()
    kept.check_versions()


def test_joins_take_whole_classes_and_no_more_than_a_large_file() -> None:
    assert to_join({f"{at}": 20 << 20 for at in range(5)}, "append") == ["0", "1", "2", "3"]
    assert to_join({f"{at}": LARGE for at in range(100)}, "append") == []
    assert len(to_join({f"{at:05}": 10 for at in range(5000)}, "append")) == 1024
    assert to_join({f"{at}": 10 for at in range(FEW)}, "latest") == []
    assert to_join({f"{at}": 10 for at in range(FEW)}, "append", {"3"}) == []
    closed = {file_name("closed", HashRange(1, at % 2), f"{at:068x}"): 10 for at in range(2 * FEW)}
    assert {range_of(path) for path in to_join(closed, "history")} == {HashRange(1, 0)}, "of the same keys"
