"""A rebuild from the beginning, an offset or a time: verified before it is shown, all or nothing, and followed on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import (
    BadRecord,
    Conflict,
    CorruptData,
    CursorExpired,
    Diverged,
    InvalidInput,
    NotReady,
    Unsupported,
)
from strandline.log.memory import MemoryLog
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Span
from strandline.model.retention import NEWCOMER_SECONDS
from strandline.storage.env import Env
from strandline.storage.task_pool import ThreadPool
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.files import DeltaFiles
from strandline.tables.files import data_files
from strandline.tables.files.letters import LetterBox
from strandline.tables.files.part import TablePart
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.tables.maintain import comparison
from strandline.tables.maintain.comparison import RowDifferences
from strandline.tables.maintain.opening import existing
from strandline.tables.maintain.operations import rebuild, verify
from strandline.tables.maintain.rebuilding import rebuild_table
from strandline.tables.sql import expected
from strandline.tables.sql.postgres_transaction import PostgresTransaction
from strandline.tables.sql.sqlite_transaction import SqliteTransaction
from strandline.tables.work import IN_PROCESS, Rebuild
from strandline.tables.written import Written
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Crash
from tests.matrix_cases import some
from tests.tables.maintain.test_maintenance_formats import (
    ORDER,
    Delta,
    Iceberg,
    Postgres,
    Sqlite,
    extend,
    modes,
    opened_place,
)

VALUE = sl.values.Json(ORDER)


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    for _ in range(3):
        extend(log, 10)
    return log


@pytest.fixture(params=some(["delta", "iceberg", "sqlite", "postgres"], 2))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with opened_place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


def is_sql(place: Any) -> bool:
    return isinstance(place, (Sqlite, Postgres))


def beside(place: Any, folder: Path) -> Any:
    """Another place of the same format."""
    folder.mkdir()
    return type(place)(place.server, f"{place.name}_2") if isinstance(place, Postgres) else type(place)(folder)


def content(sink: Any) -> list[Any]:
    """The rows of a table, comparable."""
    if isinstance(sink, sl.SqliteSink):
        with closing(sqlite3.connect(sink.path)) as connection:
            return sorted(map(str, connection.execute("SELECT * FROM orders")))
    if isinstance(sink, sl.PostgresSink):
        with sink._postgres.reading() as transaction:
            return sorted(map(str, transaction.run(f"SELECT * FROM {transaction.named()}")))
    rows = sink.rows()
    names = [field.name for field in rows.schema if not pa.types.is_map(field.type)]
    return sorted(map(str, rows.select(names).to_pylist()))


def followed(place: Any, log: MemoryLog, mode: str, **options: Any) -> Any:
    sink = place.sink(mode=mode, value=VALUE)
    sl.follow(log, sink, upto="end", **options)
    return place.sink(mode=mode, value=VALUE)


@pytest.mark.parametrize("mode", some(["latest", "append", "history"], 2))
def test_a_table_is_built_again_from_an_offset_and_followed_without_gap_or_overlap(
    place: Any, log: MemoryLog, mode: str, tmp_path: Path
) -> None:
    if mode not in modes(place) and not isinstance(place, Delta):
        return
    sink = followed(place, log, mode)
    assert rebuild(sink, log, start=13) == log.end()
    extend(log, 10)
    sl.follow(log, place.sink(mode=mode, value=VALUE), upto="end")
    check = verify(place.sink(mode=mode, value=VALUE), log)
    assert (check.is_clean, check.cursor) == (True, log.end()), check.first
    twin = beside(place, tmp_path / "twin")
    assert content(place.sink(mode=mode, value=VALUE)) == content(followed(twin, log, mode, start=13))
    twin.close()
    assert place.sink(mode=mode, value=VALUE).start() == 13
    rebuild(place.sink(mode=mode, value=VALUE), log, start="beginning")
    assert place.sink(mode=mode, value=VALUE).start() == 0
    assert verify(place.sink(mode=mode, value=VALUE), log).is_clean


def test_a_description_tells_where_the_rows_begin(place: Any, log: MemoryLog) -> None:
    sink = followed(place, log, "append")
    assert sl.tables.describe(sink, log).start == 0
    rebuild(sink, log, start=20)
    assert (sl.tables.describe(sink, log).start, sl.tables.describe(sink).start) == (20, None)


def test_a_latest_table_from_an_offset_has_the_keys_that_were_written_since(place: Any, log: MemoryLog) -> None:
    with log.producer() as producer:
        producer.append(key=b"k0", value=b'{"id": 30}').result()
    sink = followed(place, log, "latest")
    assert len(content(sink)) > 1
    rebuild(sink, log, start=30)
    (row,) = content(sink)
    assert "30" in row


def test_a_table_is_built_again_from_a_time_up_to_an_offset(place: Any) -> None:
    clock = ManualClock()
    log = MemoryLog(env=Env(clock=clock))
    extend(log, 10)
    clock.advance(60)
    moment = datetime.fromtimestamp(clock.now() / 1_000_000, UTC)
    extend(log, 10)
    extend(log, 10)
    sink = followed(place, log, "append")
    assert rebuild(sink, log, start=moment, upto=25).next == 25
    assert (sink.start(), len(content(sink))) == (10, 15)
    sl.follow(log, place.sink(mode="append", value=VALUE), upto="end")
    assert len(content(place.sink(mode="append", value=VALUE))) == 20
    with pytest.raises(InvalidInput, match="cannot be built up to offset 5"):
        rebuild(sink, log, upto=5)


def test_a_table_that_is_absent_is_built_from_a_start(place: Any, log: MemoryLog) -> None:
    with pytest.raises(Diverged, match="past the end of the log"):
        rebuild(place.sink(mode="append", value=VALUE), log, start=100, upto=100)
    assert place.sink(mode="append", value=VALUE).cursor(log.log_id) is None
    assert rebuild(place.sink(mode="append", value=VALUE), log, start=20) == log.end()
    extend(log, 5)
    sl.follow(log, place.sink(mode="append", value=VALUE), upto="end")
    assert len(content(place.sink(mode="append", value=VALUE))) == 15
    assert verify(place.sink(mode="append", value=VALUE), log).is_clean


@pytest.mark.matrix
def test_a_start_that_was_trimmed_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    assert isinstance(log, sl.log.ObjectLog)
    with log.producer() as producer:
        for number in range(20):
            producer.append(key=b"%d" % number, value=b"x").result()
    log.slots.create("reader", 10)
    log.trim(grace=0)
    sink = sl.DeltaSink(tmp_path / "table", mode="append")
    for start in (None, 5):
        with pytest.raises(CursorExpired):
            rebuild(sink, log, start=start)
    assert not (tmp_path / "table").exists()
    assert rebuild(sink, log, start="retained").next == 20
    assert sink.rows().num_rows == 20 - log.bounds().first


# --- verified before the swap ----------------------------------------------------------------------------------------


def lossy(monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    """Break the writing of rows so that each commit loses one."""
    if isinstance(place, Postgres):
        stage = PostgresTransaction.stage

        def less(self: Any, changes: Any) -> None:
            stage(self, replace(changes, puts=changes.puts.slice(1)))

        monkeypatch.setattr(PostgresTransaction, "stage", less)
        return
    if isinstance(place, Sqlite):
        inserted = SqliteTransaction._inserted

        def fewer(self: Any, table: str, rows: pa.Table, key: str | None) -> None:
            inserted(self, table, rows.slice(1) if table == '"orders"' else rows, key)

        monkeypatch.setattr(SqliteTransaction, "_inserted", fewer)
        return
    write = data_files.write_file
    monkeypatch.setattr(data_files, "write_file", lambda at, name, rows, *more: write(at, name, rows.slice(1), *more))


@pytest.mark.matrix
@pytest.mark.parametrize("mode", some(["latest", "append"], 1))
def test_rows_that_are_not_those_of_the_log_never_become_visible(
    place: Any, log: MemoryLog, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = followed(place, log, mode)
    before = content(sink)
    extend(log, 10)
    with monkeypatch.context() as broken:
        lossy(broken, place)
        with pytest.raises(CorruptData, match=r"not those of its log \([1-9]\d* missing, 0 too many.*stays as it was"):
            rebuild(place.sink(mode=mode, value=VALUE), log)
        assert content(place.sink(mode=mode, value=VALUE)) == before
        rebuild(place.sink(mode=mode, value=VALUE), log, verify=False)  # the broken twin without the comparison
    assert not verify(place.sink(mode=mode, value=VALUE), log).is_clean
    rebuild(place.sink(mode=mode, value=VALUE), log)
    assert verify(place.sink(mode=mode, value=VALUE), log).is_clean


def test_a_transform_that_gives_other_rows_each_time_is_refused_unless_it_is_not_compared(
    place: Any, log: MemoryLog
) -> None:
    numbers = iter(range(1_000_000))

    def restless(rows: pa.Table) -> pa.Table:
        return rows.append_column("n", pa.array([next(numbers) for _ in range(rows.num_rows)], pa.int64()))

    options = {"mode": "append", "value": VALUE, "transform": restless}
    sl.follow(log, place.sink(**options), upto="end")
    with pytest.raises(CorruptData, match="--no-verify"):
        rebuild(place.sink(**options), log)
    assert rebuild(place.sink(**options), log, verify=False) == log.end()


# --- crashes ---------------------------------------------------------------------------------------------------------

_SQL = ("clear", "merge", "put_dead_letters", "compared", "store")
STEPS: dict[type, Sequence[tuple[Any, str]]] = {
    Delta: [
        (data_files, "write_file"),
        (DeltaFiles, "read"),  # of the comparison
        (LetterBox, "commit"),
        (DeltaCommits, "commit"),
        (DeltaCommits, "_properties"),
        (DeltaCommits, "_settle"),
    ],
    Iceberg: [
        (data_files, "write_file"),
        (FollowedIceberg, "commit"),
        (FollowedIceberg, "_committed"),
        (FollowedIceberg, "make_durable"),
    ],
    Sqlite: [(SqliteTransaction, step) for step in _SQL],
    Postgres: [(PostgresTransaction, step) for step in _SQL],
}


def letters(place: Any, tmp_path: Path) -> Any:
    return {Delta: f"{tmp_path}/letters", Iceberg: "shop.letters", Sqlite: True, Postgres: True}[type(place)]


@pytest.mark.parametrize("is_new", some([False, True], 1), ids=["replaced", "new"])
def test_a_crash_at_any_step_leaves_the_old_rows_or_all_new_ones(
    place: Any, log: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    with log.producer() as producer:
        producer.append(key=b"bad", value=b"no JSON").result()
    options = {"mode": "append", "value": VALUE, "dead_letters": letters(place, tmp_path)}
    if not is_new:
        sl.follow(log, place.sink(**options), upto="end")
    starts = iter([5, 0] * 10)
    start = None if is_new else 0
    for owner, name in STEPS[type(place)]:
        before, start = start, next(starts)
        happened = []
        with monkeypatch.context() as patch:

            def crash(*_: Any, name: str = name, happened: list[str] = happened, **__: Any) -> Any:
                happened.append(name)
                raise Crash

            patch.setattr(owner, name, crash)
            with pytest.raises(Crash):
                rebuild(place.sink(**options), log, start=start)
        assert happened == [name]
        found = place.sink(**options)
        if before is None and (found.cursor(log.log_id) is None or not content(found)):
            assert is_new, name  # there is no table yet, or an empty one
        else:
            assert (found.start(), len(content(found))) in {(before, 30 - (before or 0)), (start, 30 - start)}, name
            assert verify(place.sink(**options), log).is_clean
        rebuild(place.sink(**options), log, start=start)
        found = place.sink(**options)
        assert (found.start(), len(content(found))) == (start, 30 - start)
        assert verify(found, log).is_clean
    extend(log, 4)
    sl.follow(log, place.sink(**options), upto="end")
    assert verify(place.sink(**options), log).is_clean


def test_a_follower_that_commits_meanwhile_makes_a_rebuild_a_conflict(place: Any, log: MemoryLog) -> None:
    if is_sql(place):
        return  # its follower waits for the transaction
    sink = followed(place, log, "append")
    extend(log, 10)

    class Overtaken:
        def tasks(self, spans: Sequence[Span]) -> int:
            return 2

        def run(self, parts: Sequence[TablePart], spans: Sequence[Span], title: str) -> Sequence[Written]:
            done = IN_PROCESS.run(parts, spans, title)
            sl.follow(log, place.sink(mode="append", value=VALUE), upto="end")
            return done

    with pytest.raises(Conflict):
        rebuild_table(sink, log, start=5, upto=None, workers=Overtaken(), is_verified=True)
    found = place.sink(mode="append", value=VALUE)
    assert (found.start(), len(content(found))) == (0, 40)
    assert verify(found, log).is_clean


def test_a_table_that_goes_back_before_a_rebuild_has_its_former_start_again(place: Any, log: MemoryLog) -> None:
    if is_sql(place):
        return  # it has no earlier versions
    sink = followed(place, log, "append")
    extend(log, 10)
    rebuild(sink, log, start=20)
    place.lose()
    fresh = place.sink(mode="append", value=VALUE)
    with pytest.raises(Diverged):
        fresh.cursor(log.log_id)
    found = fresh.repair(log.log_id, lambda cursor: cursor.next <= 30)
    assert found is not None
    assert (found.next, place.sink(mode="append", value=VALUE).start()) == (30, 0)
    assert verify(place.sink(mode="append", value=VALUE), log).is_clean
    sl.follow(log, place.sink(mode="append", value=VALUE), upto="end")
    assert len(content(place.sink(mode="append", value=VALUE))) == 40


def test_a_follower_that_commits_before_the_range_is_planned_is_never_taken_back(
    place: Any, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is at its cursor: what a rebuild took back could be trimmed before it is followed again."""
    sink = followed(place, log, "append")
    events: list[Callable[[], object]] = [lambda: sl.follow(log, place.sink(mode="append", value=VALUE), upto="end")]

    def commit() -> None:
        while events:
            event = events.pop()
            extend(log, 10)
            event()

    if is_sql(place):
        owner = STEPS[type(place)][0][0]
        lock = owner.lock
        monkeypatch.setattr(owner, "lock", lambda self: (commit(), lock(self)))
        assert rebuild(sink, log).next == 40
    else:
        end = MemoryLog.end

        def moving(self: MemoryLog) -> Any:
            found = end(self)
            commit()
            return found

        monkeypatch.setattr(MemoryLog, "end", moving)
        with pytest.raises(Conflict):
            rebuild(sink, log)
    found = verify(place.sink(mode="append", value=VALUE), log)
    assert (found.is_clean, found.cursor.next, found.rows) == (True, 40, 40)


def restored_by(how: str, address: str, version: int, moment: datetime | None = None) -> None:
    """Restore a table as another writer does; Spark names a time as text, in the zone of its session."""
    table = DeltaTable(address)
    table.restore(moment if moment is not None and how == "time" else version)
    if how == "time of Spark":
        commit = Path(address, "_delta_log", f"{DeltaTable(address).version():020d}.json")
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for action in actions:
            if "commitInfo" in action:
                action["commitInfo"]["operationParameters"] = {"version": None, "timestamp": "2026-02-03 04:05:06.007"}
        commit.write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["version", "time", "time of Spark"])
def test_a_delta_table_that_another_restores_has_the_start_of_its_rows(
    tmp_path: Path, log: MemoryLog, how: str
) -> None:
    place = Delta(tmp_path)
    followed(place, log, "append")
    before, moment = DeltaTable(place.address).version(), datetime.now(UTC)
    rebuild(place.sink(mode="append", value=VALUE), log, start=20)
    second, later = DeltaTable(place.address).version(), datetime.now(UTC)
    rebuild(place.sink(mode="append", value=VALUE), log, start=10)
    restored_by(how, place.address, before, moment)
    assert place.sink(mode="append", value=VALUE).start() == 0
    with pytest.raises(Diverged, match=r"RESTORE to (\d+|an earlier version|2026-02-03 04:05:06.007)\)"):
        place.sink(mode="append", value=VALUE).cursor(log.log_id)
    place.sink(mode="append", value=VALUE).adopt(log.log_id)
    found = verify(place.sink(mode="append", value=VALUE), log)
    assert (found.is_clean, found.rows) == (True, 30), found.first
    restored_by(how, place.address, second, later)
    assert place.sink(mode="append", value=VALUE).start() == 20
    rebuild(place.sink(mode="append", value=VALUE), log)
    assert (place.sink(mode="append", value=VALUE).start(), len(content(place.sink(mode="append")))) == (20, 10)
    rebuild(place.sink(mode="append", value=VALUE), log, start=10)
    assert place.sink(mode="append", value=VALUE).start() == 10


def test_a_delta_table_that_is_repaired_after_a_restore_to_a_time_has_the_start_of_its_rows(
    tmp_path: Path, log: MemoryLog
) -> None:
    place = Delta(tmp_path)
    followed(place, log, "append")
    before = DeltaTable(place.address).version()
    rebuild(place.sink(mode="append", value=VALUE), log, start=20)
    restored_by("time of Spark", place.address, before)
    place.sink(mode="append", value=VALUE).repair(log.log_id, lambda _: True)
    assert place.sink(mode="append", value=VALUE).start() == 20
    found = verify(place.sink(mode="append", value=VALUE), log)
    assert (found.is_clean, found.rows) == (True, 10)


def test_the_start_of_rows_that_no_known_version_has_is_that_of_the_last_rebuild(
    tmp_path: Path, log: MemoryLog
) -> None:
    place = Delta(tmp_path)
    followed(place, log, "append")
    before = DeltaTable(place.address).version()
    rebuild(place.sink(mode="append", value=VALUE), log, start=20)
    restored_by("time of Spark", place.address, before)
    DeltaTable(place.address).create_checkpoint()
    for version in range(before + 2):
        Path(place.address, "_delta_log", f"{version:020d}.json").unlink()
    assert place.sink(mode="append", value=VALUE).start() == 20


def test_an_iceberg_table_whose_snapshots_expired_keeps_its_start(tmp_path: Path, log: MemoryLog) -> None:
    place = Iceberg(tmp_path)
    sink = followed(place, log, "append")
    rebuild(sink, log, start=20)
    place.lose()
    table = place.catalog.load_table("shop.orders")
    current = table.metadata.current_snapshot_id
    old = [one.snapshot_id for one in table.metadata.snapshots if one.snapshot_id != current]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    place.sink(mode="append", value=VALUE).adopt(log.log_id)
    assert place.sink(mode="append", value=VALUE).start() == 20
    rebuild(place.sink(mode="append", value=VALUE), log)
    assert len(content(place.sink(mode="append", value=VALUE))) == 10
    place.close()


def test_a_restore_that_names_itself_is_no_endless_search(tmp_path: Path, log: MemoryLog) -> None:
    place = Delta(tmp_path)
    followed(place, log, "append")
    version = DeltaTable(place.address).version() + 1
    info = {"operation": "RESTORE", "operationParameters": {"version": str(version)}, "timestamp": 1}
    (Path(place.address) / "_delta_log" / f"{version:020d}.json").write_text(json.dumps({"commitInfo": info}))
    assert place.sink(mode="append", value=VALUE).start() == 0


# --- SQL: rows in pieces ---------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("options", some([{}, {"mode": "marked"}, {"key": "city"}, {"mode": "append"}], 1), ids=str)
@pytest.mark.parametrize("place", some(["sqlite", "postgres"], 1), indirect=True)
def test_a_database_compares_rows_that_arrive_in_pieces(
    place: Any, log: MemoryLog, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected, "PIECE", 2048)
    monkeypatch.setattr(comparison, "_MERGED", 1)
    for _ in range(5):
        extend(log, 10)
    shape = {"value": VALUE, **options}
    sl.follow(log, place.sink(**shape), upto="end")
    assert verify(place.sink(**shape), log).is_clean
    rebuild(place.sink(**shape), log, start=9)
    found = verify(place.sink(**shape), log)
    assert (found.is_clean, found.rows) == (True, len(content(place.sink(**shape))))
    owner = STEPS[type(place)][0][0]
    monkeypatch.setattr(owner, "compared", lambda _, rows, __: RowDifferences(len(list(rows)), 0, 0))
    assert verify(place.sink(**shape), log).rows > 1  # pieces
    monkeypatch.undo()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_many_differences_are_counted_and_the_first_are_shown(place: Any, log: MemoryLog) -> None:
    followed(place, log, "append")
    with closing(sqlite3.connect(place.path)) as connection, connection:
        connection.execute("UPDATE orders SET city = 'nowhere' WHERE id > 5")
    found = verify(place.sink(mode="append", value=VALUE), log)
    assert (found.rows, found.missing, found.extra, len(found.first)) == (30, 24, 24, 10)


@pytest.mark.matrix
def test_the_share_of_bad_records_is_that_of_the_whole_rebuild(place: Any, tmp_path: Path) -> None:
    log = sl.open(f"{tmp_path}/log", create=True)
    for value in (b"bad", b'{"id": 1}', b'{"id": 2}'):
        with log.producer() as producer:
            producer.append(key=b"k", value=value).result()
    options = {"mode": "append", "value": VALUE, "dead_letters": letters(place, tmp_path)}
    rebuild(place.sink(**options, max_bad_share=0.4), log)
    assert len(content(place.sink(**options))) == 2
    with pytest.raises(BadRecord, match="1 of 3 records"):
        rebuild(place.sink(**options, max_bad_share=0.3), log)


# --- both tiers ------------------------------------------------------------------------------------------------------


def tiered(tmp_path: Path) -> sl.log.ObjectLog:
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    assert isinstance(log, sl.log.ObjectLog)
    with log.producer() as producer:
        for number in range(40):
            producer.append(key=b"k%d" % (number % 7), value=b"%d" % number).result()
    sl.tier.attach(log)
    return log


def to_cold(log: sl.log.ObjectLog) -> None:
    with sl.tier.tiering(log, target=1) as tierer:
        tierer.run_once(everything=True)
    log.trim(grace=0)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", some(["latest", "append"], 1))
def test_a_table_is_built_from_both_tiers(tmp_path: Path, mode: Any) -> None:
    log = tiered(tmp_path)
    to_cold(log)
    with log.producer() as producer:
        for number in range(40, 50):
            producer.append(key=b"k%d" % (number % 7), value=b"%d" % number).result()
    with sl.open(log.url) as both:
        sink = sl.DeltaSink(tmp_path / "table", mode=mode)
        assert rebuild(sink, both, start=17, pool=ThreadPool(3)).next == 50
        assert verify(sink, both).is_clean
        if mode == "append":
            assert sorted(sink.rows().column("offset").to_pylist()) == list(range(17, 50))


@pytest.mark.matrix
def test_records_that_move_to_the_cold_tier_while_they_are_read_are_found_there(tmp_path: Path) -> None:
    log = tiered(tmp_path)
    moves: list[Callable[[], None]] = [lambda: to_cold(log)]

    class Late:
        """Records move between the plan and the work."""

        def tasks(self, spans: Sequence[Span]) -> int:
            return 2

        def run(self, parts: Sequence[TablePart], spans: Sequence[Span], title: str) -> Sequence[Written]:
            while moves:
                moves.pop()()
            return IN_PROCESS.run(parts, spans, title)

    with sl.open(log.url) as both:
        sink = sl.DeltaSink(tmp_path / "table", mode="append")
        rebuild_table(sink, both, start=3, upto=None, workers=Late(), is_verified=True)
        assert log.bounds().first == 40
        assert sorted(sink.rows().column("offset").to_pylist()) == list(range(3, 40))


@pytest.mark.matrix
@pytest.mark.parametrize("step", some(["compared", "clear"], 1))
def test_records_that_move_to_the_cold_tier_while_a_database_is_filled_are_found_there(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tiered(tmp_path)
    moves: list[Callable[[], None]] = [lambda: to_cold(log)]
    real = getattr(SqliteTransaction, step)

    def late(self: SqliteTransaction, *arguments: Any) -> Any:
        while moves:
            moves.pop()()
        return real(self, *arguments)

    monkeypatch.setattr(SqliteTransaction, step, late)
    with sl.open(log.url) as both:
        sink = sl.SqliteSink(tmp_path / "shop.db", table="orders", mode="append")
        rebuild(sink, both, start=3)
        assert log.bounds().first == 40
        assert len(content(sink)) == 37


# --- retention -------------------------------------------------------------------------------------------------------


def consumed_log(tmp_path: Path) -> sl.log.ObjectLog:
    """Twenty batches, all of which the slot of a follower has passed: the next trim deletes them."""
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    assert isinstance(log, sl.log.ObjectLog)
    with log.producer() as producer:
        for number in range(20):
            producer.append(key=b"k%d" % number, value=b'{"id": %d}' % number).result()
    log.slots.create("orders", 20)
    return log


def trimmed_at(step: str, log: sl.log.ObjectLog, monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    """Trim the log when a rebuild has planned its range, and as often as it is planned; note the slots there are."""
    planned = getattr(Rebuild, step)

    def late(self: Rebuild, began: int) -> Any:
        found = planned(self, began)
        seen.extend(state for state in log.slots.list() if state.name != "orders")
        log.trim(grace=0)
        return found

    monkeypatch.setattr(Rebuild, step, late)


@pytest.mark.matrix
def test_what_a_rebuild_reads_is_not_trimmed_meanwhile_and_its_pin_ends_with_it(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, seen = consumed_log(tmp_path), list[Any]()
    sl.follow(log, place.sink(mode="append", value=VALUE), upto="end")
    trimmed_at("planned", log, monkeypatch, seen)
    rebuild(place.sink(mode="append", value=VALUE), log, start=5)
    assert len(content(place.sink(mode="append", value=VALUE))) == 15
    assert log.bounds().first == 5
    assert [(state.position, state.holder) for state in seen] == [(5, None)]
    assert seen[0].expires is not None  # if the process is killed, it ends by itself
    assert [state.name for state in log.slots.list()] == ["orders"]
    assert [one.name for one in Path(tmp_path, "log", "slots").glob("[!.]*")] == ["orders.json"]
    log.trim(grace=0)
    assert log.bounds().first == 20


@pytest.mark.matrix
def test_a_rebuild_that_fails_ends_its_pin_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = consumed_log(tmp_path)
    with monkeypatch.context() as broken:
        lossy(broken, Delta(tmp_path))
        with pytest.raises(CorruptData):
            rebuild(Delta(tmp_path).sink(mode="append", value=VALUE), log, slot="new")
    assert [state.name for state in log.slots.list()] == ["orders"]


@pytest.mark.matrix
def test_the_slot_of_the_follower_pins_what_comes_behind_a_rebuild_before_that_is_committed(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = consumed_log(tmp_path)
    rebuild(place.sink(mode="append", value=VALUE), log, upto=12, slot="new")
    assert (log.slots.get("new").position, log.slots.get("new").expires) == (12, None)
    sl.follow(log, place.sink(mode="append", value=VALUE), "new", upto="end")
    assert log.slots.get("new").position == 20
    owner, name = STEPS[type(place)][-1]
    with monkeypatch.context() as crash:
        crash.setattr(owner, name, lambda *_, **__: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            rebuild(place.sink(mode="append", value=VALUE), log, upto=15, slot="new")
    assert log.slots.get("new").position == 15
    log.trim(grace=0)
    found = place.sink(mode="append", value=VALUE)
    sl.follow(log, found, "new", upto="end")
    assert len(content(found)) == 20


@pytest.mark.matrix
def test_a_follower_that_starts_during_a_rebuild_does_not_move_its_slot_past_the_new_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = consumed_log(tmp_path)
    sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="append"), "new", upto="end")
    planned = Rebuild.planned

    def late(self: Rebuild, began: int) -> Any:
        found = planned(self, began)
        sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="append"), "new", upto="end")  # has nothing to apply
        assert log.slots.get("new").position == 20
        return found

    monkeypatch.setattr(Rebuild, "planned", late)
    rebuild(sl.DeltaSink(tmp_path / "table", mode="append"), log, upto=15, slot="new")
    assert log.slots.get("new").position == 15
    log.trim(grace=0)
    assert sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="append"), "new", upto="end").next == 20


@pytest.mark.matrix
def test_a_follower_that_claims_its_slot_during_a_rebuild_cannot_move_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the former cursor, and was suspended before it moves its slot there."""
    log = consumed_log(tmp_path)
    sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="append"), "new", upto="end")
    planned, claimed = Rebuild.planned, list[Any]()

    def late(self: Rebuild, began: int) -> Any:
        found = planned(self, began)
        claimed.append(log.slots.claim("new", "suspended"))
        return found

    monkeypatch.setattr(Rebuild, "planned", late)
    rebuild(sl.DeltaSink(tmp_path / "table", mode="append"), log, upto=15, slot="new")
    with pytest.raises(sl.errors.Fenced):
        claimed[0].advance(log.end())
    assert log.slots.get("new").position == 15


@pytest.mark.matrix
def test_the_slot_of_a_rebuild_that_was_killed_is_kept_by_the_next_one(tmp_path: Path) -> None:
    log = consumed_log(tmp_path)
    log.slots.create("new", 12, lifetime=NEWCOMER_SECONDS)
    rebuild(sl.DeltaSink(tmp_path / "table", mode="append"), log, upto=12, slot="new")
    assert (log.slots.get("new").position, log.slots.get("new").expires) == (12, None)


def test_a_time_that_no_record_is_behind_empties_no_table(place: Any, log: MemoryLog) -> None:
    sink = followed(place, log, "append")
    with pytest.raises(InvalidInput, match=r"no record since 2999-01-01 00:00:00\+00:00, and the table .* be empty"):
        rebuild(sink, log, start=datetime(2999, 1, 1, tzinfo=UTC))
    assert len(content(place.sink(mode="append", value=VALUE))) == 30
    assert rebuild(place.sink(mode="append", value=VALUE), log, start=30) == log.end()
    assert content(place.sink(mode="append", value=VALUE)) == []


def test_a_log_without_slots_is_read_unpinned_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with WalLog.open(f"{tmp_path}/wal") as wal:
        wal.append_value(b"one").result()
        reader = sl.open(f"wal://{tmp_path}/wal", read_only=True)
        sink = sl.DeltaSink(tmp_path / "table", mode="append")
        assert rebuild(sink, reader).next == 1
        assert "is not pinned, and could be trimmed" in caplog.text
        with pytest.raises(Unsupported):
            rebuild(sink, reader, slot="orders")


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_table_like_another_is_opened_elsewhere(tmp_path: Path, log: MemoryLog) -> None:
    sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="history", value=VALUE, key="id"), upto="end")
    other = existing(tmp_path / "table", value=VALUE, key="id", into=tmp_path / "other")
    assert rebuild(other, log, start=10) == log.end()
    assert (other.mode, other.where) == ("history", str(tmp_path / "other"))
    assert verify(other, log).is_clean
    assert sl.DeltaSink(tmp_path / "table", mode="history", value=VALUE, key="id").start() == 0


def test_a_table_is_no_copy_of_itself(tmp_path: Path, log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    sl.follow(log, sl.DeltaSink(tmp_path / "table", value=VALUE), upto="end")
    sl.follow(log, sl.SqliteSink(tmp_path / "shop.db", table="orders", value=VALUE), upto="end")
    (tmp_path / "link").symlink_to(tmp_path / "table")
    monkeypatch.chdir(tmp_path)
    for one, other in (
        (f"{tmp_path}/table", "./table"),
        (f"{tmp_path}/table", f"file://{tmp_path}/table/"),
        (f"{tmp_path}/table", "link"),
        ("sqlite:shop.db#orders", f"sqlite://{tmp_path}/shop.db#Orders"),
    ):
        with pytest.raises(InvalidInput, match="is the table itself"):
            existing(one, value=VALUE, into=other)


@pytest.mark.matrix
@pytest.mark.parametrize("is_into_sql", [False, True])
def test_a_table_like_another_may_have_another_format(tmp_path: Path, log: MemoryLog, is_into_sql: bool) -> None:
    with log.producer() as producer:
        producer.append(key=b"bad", value=b"no JSON").result()
    delta, sqlite = f"{tmp_path}/table", f"sqlite:{tmp_path}/shop.db#orders"
    one, other = (delta, sqlite) if is_into_sql else (sqlite, delta)
    first: Any = sl.SqliteSink(tmp_path / "shop.db", table="orders", value=VALUE, dead_letters=True)
    if is_into_sql:
        first = sl.DeltaSink(delta, value=VALUE, dead_letters=tmp_path / "letters")
    sl.follow(log, first, upto="end")
    with pytest.raises(BadRecord, match="offset 30"):
        rebuild(existing(one, value=VALUE, into=other), log)
    letters = True if is_into_sql else f"{tmp_path}/others"
    built = existing(one, value=VALUE, into=other, dead_letters=letters)
    assert rebuild(built, log) == log.end()
    assert verify(built, log).rows == verify(first, log).rows


def _only_c1(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.equal(rows.column("city"), "c1"))


@pytest.mark.matrix
@pytest.mark.parametrize("mode", some(["latest", "append"], 1))
def test_a_table_of_a_transform_is_neither_written_nor_compared_without_one(
    place: Any, log: MemoryLog, mode: str, tmp_path: Path
) -> None:
    options = {"mode": mode, "value": VALUE, "dead_letters": letters(place, tmp_path)}
    sl.follow(log, place.sink(**options, transform=_only_c1), upto="end")
    before = content(place.sink(**options))
    extend(log, 5)
    for job in (
        lambda: rebuild(place.sink(**options), log),
        lambda: verify(place.sink(**options), log),
        lambda: sl.follow(log, place.sink(**options), upto="end"),
        lambda: sl.tables.replay_letters(place.sink(**options), log),
    ):
        with pytest.raises(InvalidInput, match="come from a transform"):
            job()
    assert content(place.sink(**options)) == before
    assert sl.tables.describe(place.sink(**options), log).cursor is not None
    sl.follow(log, place.sink(**options, transform=_only_c1), upto="end")
    rebuild(place.sink(**options, transform=_only_c1), log)
    assert verify(place.sink(**options, transform=_only_c1), log).is_clean
    with pytest.raises(InvalidInput, match="come from a transform"):
        verify(place.sink(**options), log)
    if hasattr(place, "address"):
        with pytest.raises(InvalidInput, match="come from a transform"):
            existing(place.address, value=VALUE, into=tmp_path / "other")


def test_an_end_behind_the_log_is_refused_with_the_logs_end(place: Any, log: MemoryLog) -> None:
    sink = followed(place, log, "append")
    with pytest.raises(NotReady, match="ends at offset 30, before 31"):
        rebuild(sink, log, upto=31)


def test_a_value_that_cannot_be_decoded_is_not_called_a_missing_key(tmp_path: Path, log: MemoryLog) -> None:
    with log.producer() as producer:
        producer.append(value=b"no JSON").result()
    with pytest.raises(BadRecord, match="JSON is malformed"):
        sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="append", value=VALUE), upto="end")


@pytest.mark.matrix
def test_a_log_whose_schema_evolves_while_a_rebuild_begins_is_decoded_by_the_newest_version(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sl.open(f"{tmp_path}/log", create=True, value=sl.values.Json(pa.schema({"id": pa.int32()})))
    with log.producer() as producer:
        producer.append(key=b"a", value={"id": 1}).result()
    sl.follow(log, place.sink(mode="append", value="log"), upto="end")
    end = type(log).end
    once = ["evolve"]

    def evolving(self: Any) -> Any:
        while once:
            once.pop()
            newer: Any = sl.open(f"{tmp_path}/log")
            newer.evolve_value(sl.values.Json(pa.schema({"id": pa.int32(), "city": pa.string()})))
            with newer.producer() as producer:
                producer.append(key=b"b", value={"id": 2, "city": "Oslo"}).result()
        return end(self)

    monkeypatch.setattr(type(log), "end", evolving)
    assert rebuild(place.sink(mode="append", value="log"), log).next == 2
    assert "Oslo" in str(content(place.sink(mode="append", value="log")))
    assert verify(place.sink(mode="append", value="log"), log).is_clean
