"""A table is moved to a copy of its log: it continues exactly, and followers of the former log are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import Conflict, CursorExpired, Diverged, NotFound, NotReady, StrandlineError, Unsupported
from strandline.followers.committer import SinkCommitter, begin
from strandline.log.memory import MemoryLog
from strandline.model.head import Head, WriterId
from strandline.model.records import record_batch
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.tables.sql.postgres_transaction import PostgresTransaction
from strandline.tables.sql.sqlite_transaction import SqliteTransaction
from tests.tables.maintain.test_maintenance_formats import Delta, Iceberg, opened_place

WRITER = WriterId(UUID(int=1))
FORMATS = ["delta", "sqlite", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("iceberg", "postgres"))]
FILES = ["delta", pytest.param("iceberg", marks=pytest.mark.matrix)]


@pytest.fixture(params=FORMATS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with opened_place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


def produce(log: MemoryLog, count: int, *, text: bytes = b"value") -> None:
    """Some changes of a few keys, deletes among them."""
    first = log.end().next
    rows = range(first, first + count)
    batch = record_batch(
        timestamps=list(rows),
        ops=[1 if n % 7 == 6 else 0 for n in rows],
        keys=[b"k%d" % (n % 5) for n in rows],
        values=[None if n % 7 == 6 else b"%s %d" % (text, n) for n in rows],
    )
    with log.producer() as producer:
        producer.append_batch(pa.Table.from_batches([batch]))


@pytest.fixture
def old() -> MemoryLog:
    log = MemoryLog()
    for _ in range(3):
        produce(log, 10)
    return log


@pytest.fixture
def new(old: MemoryLog) -> MemoryLog:
    copy = MemoryLog()
    sl.ingest(old, copy)
    return copy


def state_of(place: Any, log: MemoryLog, **options: Any) -> tuple[Any, ...]:
    """What a table says of itself, its version and cursor among it."""
    found = sl.tables.describe(place.sink(**options), log)
    return found.version, found.rows, found.cursor, found.start


def check(place: Any, log: MemoryLog, **options: Any) -> None:
    """Follow to the end, and compare each row."""
    assert sl.follow(log, place.sink(**options), upto="end") == log.end()
    found = sl.tables.verify(place.sink(**options), log)
    assert found.is_clean, found.first
    assert found.cursor == log.end()


def check_move(place: Any, old: MemoryLog, new: MemoryLog, **options: Any) -> None:
    sl.follow(old, place.sink(**options), upto=17)
    rows = sl.tables.describe(place.sink(**options), old).rows
    moved = sl.bulk.move_table(place.sink(**options), old, new)
    assert (moved.cursor, moved.was_there) == (new.cursor_at(17), False)
    assert state_of(place, new, **options)[1:] == (rows, new.cursor_at(17), 0)
    assert sl.tables.verify(place.sink(**options), new).is_clean
    produce(new, 10, text=b"another")
    check(place, new, **options)
    with pytest.raises(Diverged, match=f"does not follow log {old.log_id}.* but log {new.log_id}"):
        sl.tables.verify(place.sink(**options), old)


@pytest.mark.parametrize("options", [{"mode": "append"}, {"mode": "marked"}], ids=str)
def test_a_moved_table_goes_on_exactly(place, old, new, options):
    check_move(place, old, new, **options)


@pytest.mark.parametrize("kind", FILES)
def test_a_moved_history_goes_on_exactly(kind, old, new, request, tmp_path, monkeypatch):
    with opened_place(kind, request, tmp_path, monkeypatch) as place:
        check_move(place, old, new, mode="history")


def started(log: MemoryLog, place: Any) -> SinkCommitter:
    return begin(log, place.sink(mode="append"), "orders", start="beginning", holder="it")


def store(follower: SinkCommitter, log: MemoryLog, first: int, end: int) -> None:
    records = pa.Table.from_batches(log.read(first, upto=end))
    follower.apply(records, since=log.cursor_at(first), upto=log.cursor_at(end))


def test_a_follower_of_the_former_log_is_refused_while_it_runs_and_whenever_it_starts(place, old, new):
    running = started(old, place)
    store(running, old, 0, 10)
    sl.bulk.move_table(place.sink(mode="append"), old, new)
    for _ in range(2):
        with pytest.raises(Diverged, match=f"but log {new.log_id}"):
            store(running, old, 10, 20)
    for repair in (False, True):
        with pytest.raises(Diverged, match=f"but log {new.log_id}"):
            sl.follow(old, place.sink(mode="append"), "orders", upto="end", repair=repair)
    with pytest.raises(StrandlineError):
        place.sink(mode="append").adopt(old.log_id)
    with pytest.raises(Diverged):
        sl.tables.rebuild(place.sink(mode="append"), old)
    assert state_of(place, new, mode="append")[1:] == (10, new.cursor_at(10), 0)
    check(place, new, mode="append")
    with pytest.raises(Diverged):  # also behind commits of the other follower
        store(running, old, 10, 20)
    check(place, new, mode="append")


def test_a_commit_of_the_former_log_that_is_under_way_is_refused(place, old, new):
    sink: Any = place.sink(mode="append")
    running = begin(old, sink, None, start="beginning", holder="it")
    store(running, old, 0, 10)
    if isinstance(place, Delta | Iceberg):
        transaction = sink.begin(since=old.cursor_at(10), upto=old.cursor_at(20), tasks=1)
        written = [part.write(old.read(10, upto=20)) for part in transaction.parts]
        sl.bulk.move_table(place.sink(mode="append"), old, new)
        with pytest.raises(StrandlineError):
            transaction.commit(written)
    else:
        real = sink._commit

        def late(*arguments: Any) -> Any:
            sl.bulk.move_table(place.sink(mode="append"), old, new)
            return real(*arguments)

        sink._commit = late
        with pytest.raises(Diverged):
            store(running, old, 10, 20)
    assert state_of(place, new, mode="append")[1:] == (10, new.cursor_at(10), 0)
    check(place, new, mode="append")


def test_a_repeated_move_says_so_and_commits_nothing(place, old, new):
    sl.follow(old, place.sink(), upto=17)
    first = sl.bulk.move_table(place.sink(), old, new)
    before = state_of(place, new)
    again = sl.bulk.move_table(place.sink(), old, new)
    assert (again.cursor, again.was_there) == (first.cursor, True)
    assert state_of(place, new) == before


class Crash(BaseException):
    """The end of a process."""


def test_a_move_that_crashed_behind_its_commit_is_found_by_the_next(place, old, new, monkeypatch):
    sl.follow(old, place.sink(), upto=17)
    before = state_of(place, old)

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    with monkeypatch.context() as patch:
        for owner in (SqliteTransaction, PostgresTransaction):  # rolled back: nothing happened
            patch.setattr(owner, "store", crash)
        patch.setattr(DeltaCommits, "_settle", crash)
        patch.setattr(FollowedIceberg, "make_durable", crash)
        sink = place.sink()
        if isinstance(place, Iceberg):  # the proof of the table is made durable, too
            patch.setattr(FollowedIceberg, "make_durable", lambda *_, is_own=False: crash() if is_own else None)
        with pytest.raises(Crash):
            sl.bulk.move_table(sink, old, new)
    is_rolled_back = not isinstance(place, Delta | Iceberg)
    if is_rolled_back:
        assert state_of(place, old) == before
    assert sl.bulk.move_table(place.sink(), old, new).was_there is not is_rolled_back
    check(place, new)


def test_a_copy_with_other_offsets_is_refused_and_nothing_changes(place, old):
    sl.follow(old, place.sink(), upto=17)
    before = state_of(place, old)
    other = MemoryLog()
    produce(other, 2)
    sl.ingest(old, other)
    with pytest.raises(Unsupported, match=r"has other records at some of these offsets.*Build the table again"):
        sl.bulk.move_table(place.sink(), old, other)
    assert state_of(place, old) == before
    check(place, old)


@pytest.mark.parametrize("start", [0, 10])
def test_a_copy_that_began_later_has_other_offsets_though_nobody_else_wrote_to_it(place, old, start):
    sl.follow(old, place.sink(mode="append"), start=start, upto=20)
    before, other = state_of(place, old, mode="append"), MemoryLog()
    old.trim(10)
    sl.ingest(old, other, start="retained")
    with pytest.raises(Unsupported, match=r"has other records at some of these offsets.*Build the table again"):
        sl.bulk.move_table(place.sink(mode="append"), old, other)
    assert state_of(place, old, mode="append") == before


def test_a_table_without_rows_is_moved_to_the_same_offset_and_refused_by_a_copy_that_has_another_one(place, old, new):
    sl.follow(old, place.sink(), start=20, upto=20)
    later = MemoryLog()
    sl.ingest(old, later, start=10)
    with pytest.raises(Unsupported):
        sl.bulk.move_table(place.sink(), old, later)
    sl.bulk.move_table(place.sink(), old, new)
    check(place, new)


def test_records_of_another_writer_behind_what_a_table_holds_do_not_hinder_its_move(place, old, new):
    """Though a translated cursor skips them: it is for consumers that applied the same records elsewhere."""
    sl.follow(old, place.sink(), upto="end")
    produce(new, 3, text=b"of another writer")
    produce(old, 5)
    sl.ingest(old, new)
    assert sl.bulk.move_table(place.sink(), old, new).cursor.next == 30
    check(place, new)


def test_a_log_that_could_not_serve_the_table_any_more_is_refused(place, old, new):
    sl.follow(old, place.sink(), upto=17)
    sl.bulk.move_table(place.sink(), old, new)
    before = state_of(place, new)
    old.trim(20)
    with pytest.raises(CursorExpired, match="could not continue"):
        sl.bulk.move_table(place.sink(), new, old)
    assert state_of(place, new) == before
    check(place, new)


def test_a_repeated_move_to_a_log_that_was_restored_since_is_refused(place, old, new):
    sl.follow(old, place.sink(), upto=17)
    sl.bulk.move_table(place.sink(), old, new)
    with pytest.raises(Diverged):
        sl.bulk.move_table(place.sink(), old, restored_from(new))


def test_a_cursor_that_the_former_log_no_longer_proves_is_refused(place, old, new):
    sl.follow(old, place.sink(), upto=17)
    before = state_of(place, old)
    old.trim(20)
    with pytest.raises(CursorExpired):
        sl.bulk.move_table(place.sink(), old, new)
    assert state_of(place, old) == before


def test_a_copy_whose_offsets_agree_at_both_ends_only_is_refused(place):
    """It skipped what the source had trimmed, and another writer's records are at those offsets."""
    old, copy = MemoryLog(), MemoryLog()
    for _ in range(2):
        produce(old, 5)
    sl.ingest(old, copy)
    for _ in range(4):
        produce(old, 5)
    sl.follow(old, place.sink(mode="append"), upto="end")
    before = state_of(place, old, mode="append")
    old.trim(15)
    produce(copy, 5, text=b"of another writer")
    sl.ingest(old, copy, skip_trimmed=True)
    assert sl.bulk.translate_cursor(old.end(), source=old, target=copy).next == old.end().next
    with pytest.raises(Unsupported, match="has other records at some of these offsets"):
        sl.bulk.move_table(place.sink(mode="append"), old, copy)
    assert state_of(place, old, mode="append") == before


def test_a_copy_that_lags_behind_the_table_is_not_ready(place):
    old, copy = MemoryLog(), MemoryLog()
    produce(old, 10)
    sl.follow(old, place.sink(), upto="end")
    with pytest.raises(NotReady, match="ingest it first"):
        sl.bulk.move_table(place.sink(), old, copy)
    sl.ingest(old, copy)
    produce(old, 10)
    sl.follow(old, place.sink(), upto="end")
    before = state_of(place, old)
    with pytest.raises(NotReady, match="up to position 10, and not up to 20"):
        sl.bulk.move_table(place.sink(), old, copy)
    assert state_of(place, old) == before
    sl.ingest(old, copy)
    sl.bulk.move_table(place.sink(), old, copy)
    check(place, copy)


def test_a_copy_that_deleted_what_the_table_holds_is_refused(place, old, new):
    sl.follow(old, place.sink(), upto="end")
    before = state_of(place, old)
    new.trim(10)
    with pytest.raises(CursorExpired, match="no longer has all of these records"):
        sl.bulk.move_table(place.sink(), old, new)
    assert state_of(place, old) == before


def restored_from(log: MemoryLog) -> MemoryLog:
    """The same log, which was restored from an empty copy and grew differently."""
    found = MemoryLog()
    found._head = Head(log.log_id)
    for _ in range(4):
        produce(found, 10, text=b"of another history")
    return found


def test_a_log_with_another_history_than_the_table_or_the_copy_is_refused(place, old, new):
    sl.follow(old, place.sink(), upto=17)
    before, restored, copy = state_of(place, old), restored_from(old), MemoryLog()
    with pytest.raises(Diverged):
        sl.bulk.move_table(place.sink(), restored, new)
    sl.ingest(restored, copy)
    with pytest.raises(Diverged):
        sl.bulk.move_table(place.sink(), restored, copy)
    with pytest.raises(Diverged):
        sl.bulk.move_table(place.sink(), old, copy)
    with pytest.raises(Diverged):
        sl.bulk.move_table(place.sink(), MemoryLog(), new)
    assert state_of(place, old) == before
    check(place, old)


def test_without_a_table_there_is_nothing_to_move(place, old, new):
    with pytest.raises(NotFound):
        sl.bulk.move_table(place.sink(), old, new)


def test_a_commit_of_the_follower_meanwhile_is_a_conflict_and_keeps_its_rows(place, old, new, monkeypatch):
    sink: Any = place.sink()
    sl.follow(old, place.sink(), upto=10)
    real = sink.move

    def late(*arguments: Any) -> None:
        sl.follow(old, place.sink(), upto=20)
        real(*arguments)

    monkeypatch.setattr(sink, "move", late, raising=False)
    with pytest.raises(Conflict, match=r"up to offset 20.*Stop its follower"):
        sl.bulk.move_table(sink, old, new)
    assert state_of(place, old)[1:] == (5, old.cursor_at(20), 0)
    assert sl.bulk.move_table(place.sink(), old, new).cursor == new.cursor_at(20)
    check(place, new)


@pytest.mark.parametrize("kind", FILES)
def test_a_commit_between_the_proof_of_a_table_and_the_move_is_a_conflict(
    kind, old, new, request, tmp_path, monkeypatch
):
    with opened_place(kind, request, tmp_path, monkeypatch) as place:
        sl.follow(old, place.sink(), upto=10)
        sink: Any = place.sink()
        monkeypatch.setattr(sink, "_refuse_letters", lambda _: sl.follow(old, place.sink(), upto=20))
        with pytest.raises(Conflict):
            sl.bulk.move_table(sink, old, new)
        check(place, old)


def test_a_table_is_moved_back_as_well(place, old, new):
    sl.follow(old, place.sink(), upto=17)
    sl.bulk.move_table(place.sink(), old, new)
    sl.follow(new, place.sink(), upto=25)
    assert sl.bulk.move_table(place.sink(), new, old).cursor == old.cursor_at(25)
    with pytest.raises(Diverged, match=f"but log {old.log_id}"):
        sl.follow(new, place.sink(), upto="end")
    sl.follow(old, place.sink(), upto=28)
    assert sl.bulk.move_table(place.sink(), old, new).cursor == new.cursor_at(28)
    check(place, new)


def test_a_table_that_begins_later_and_was_built_again_keeps_its_start(place, old, new):
    sl.follow(old, place.sink(mode="append"), start=10, upto=20)
    sl.tables.rebuild(place.sink(mode="append"), old, start=20)
    sl.bulk.move_table(place.sink(mode="append"), old, new)
    assert state_of(place, new, mode="append")[1:] == (10, new.cursor_at(30), 20)
    produce(new, 5)
    check(place, new, mode="append")


def test_a_moved_table_is_repaired_and_adopted_in_its_new_log(tmp_path, old, new):
    place = Delta(tmp_path)
    sl.follow(old, place.sink(), upto=17)
    sl.bulk.move_table(place.sink(), old, new)
    sl.follow(new, place.sink(), upto=25)
    table = DeltaTable(place.address)
    assert "instead of" in str(table.history()[1])
    table.delete("key = 'k1'")
    with pytest.raises(Diverged):
        sl.follow(new, place.sink(), upto="end")
    with pytest.raises(Diverged, match=f"but log {new.log_id}"):
        sl.follow(old, place.sink(), upto="end", repair=True)
    sl.follow(new, place.sink(), upto=26, repair=True)
    DeltaTable(place.address).delete("key = 'none of them'")
    assert place.sink().adopt(new.log_id).next == 26
    check(place, new)


NARROW = sl.values.Json(pa.schema({"id": pa.int8()}))
WIDE = sl.values.Json(pa.schema({"id": pa.int64()}))


def bad(log: MemoryLog) -> None:
    with log.producer() as producer:
        for number in (1, 1000, 2, 3):
            producer.append(key=b"k%d" % (number % 3), value=b'{"id": %d}' % number).result(60)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.matrix)])
def test_dead_letters_of_a_database_are_replayed_from_the_log_that_the_table_follows_now(
    kind, request, tmp_path, monkeypatch
):
    old, new = MemoryLog(), MemoryLog()
    bad(old)
    sl.ingest(old, new)
    with opened_place(kind, request, tmp_path, monkeypatch) as place:
        narrow, wide = {"value": NARROW, "dead_letters": True}, {"value": WIDE, "dead_letters": True}
        sl.follow(old, place.sink(**narrow), upto="end")
        sl.bulk.move_table(place.sink(**narrow), old, new)
        letters = sl.tables.letters(place.sink(**narrow), new)
        assert letters.column("offset").to_pylist() == [1]
        assert sl.tables.replay_letters(place.sink(**wide), new).applied == 1
        bad(new)
        check(place, new, **wide)


@pytest.mark.parametrize("kind", FILES)
def test_a_table_of_files_is_moved_once_its_dead_letters_are_replayed(kind, request, tmp_path, monkeypatch):
    old, new = MemoryLog(), MemoryLog()
    bad(old)
    sl.ingest(old, new)
    with opened_place(kind, request, tmp_path, monkeypatch) as place:
        letters = str(tmp_path / "letters") if kind == "delta" else "shop.letters"
        further = f"{letters}2"
        sl.follow(old, place.sink(value=NARROW, dead_letters=letters), upto="end")
        before = state_of(place, old, value=NARROW)
        with pytest.raises(Unsupported, match=r"has dead letters of log .* \(1\).*Replay"):
            sl.bulk.move_table(place.sink(value=NARROW, dead_letters=letters), old, new)
        assert state_of(place, old, value=NARROW) == before
        assert sl.tables.replay_letters(place.sink(value=WIDE, dead_letters=letters), old).applied == 1
        sl.bulk.move_table(place.sink(value=WIDE, dead_letters=letters), old, new)
        bad(new)
        with new.producer() as producer:
            producer.append(key=b"x", value=b"no JSON").result(60)
        sl.follow(new, place.sink(value=WIDE, dead_letters=further), upto="end")
        found = sl.tables.letters(place.sink(value=WIDE, dead_letters=further), new)
        assert found.column("offset").to_pylist() == [8]
        check(place, new, value=WIDE, dead_letters=further)


def test_a_table_is_moved_by_addresses(tmp_path):
    old = sl.open(tmp_path / "old", create=True)
    with old.producer() as producer:
        producer.append(key=b"a", value=b"1")
    sl.follow(old, sl.DeltaSink(tmp_path / "table"), upto="end")
    sl.ingest(old, f"wal://{tmp_path}/new")
    moved = sl.bulk.move_table(tmp_path / "table", str(tmp_path / "old"), f"wal://{tmp_path}/new")
    assert (moved.cursor.next, moved.was_there) == (1, False)
    with sl.open(f"wal://{tmp_path}/new") as new:
        assert sl.tables.describe(tmp_path / "table", new).cursor == new.end()


def test_a_table_is_moved_back_from_a_write_ahead_log_at_an_address(tmp_path):
    """A reader beside the writer does not know that the log is a copy: 'ingest it first' would double its records."""
    first, copy = str(tmp_path / "first"), f"wal://{tmp_path}/copy"
    with sl.open(first, create=True) as log, log.producer() as producer:
        producer.append(key=b"a", value=b"1")
    sl.follow(first, sl.DeltaSink(tmp_path / "table"), upto="end")
    sl.ingest(first, copy)
    for old, new in ((first, copy), (copy, first)):
        for was_there in (False, True):
            assert sl.bulk.move_table(tmp_path / "table", old, new).was_there is was_there
    with sl.open(copy, read_only=True) as reader:
        sl.bulk.move_table(tmp_path / "table", first, copy)
        with pytest.raises(Unsupported, match="WalReader cannot be moved from"):
            sl.bulk.move_table(tmp_path / "table", reader, first)


def test_a_table_is_moved_from_a_write_ahead_log_that_is_being_written(tmp_path):
    with sl.open(f"wal://{tmp_path}/old", create=True) as old:
        old.append(record_batch(timestamps=[1], ops=[0], keys=[b"a"], values=[b"1"]), writer=WRITER, number=0).result()
        sl.follow(old, sl.DeltaSink(tmp_path / "table"), upto="end")
        sl.ingest(old, tmp_path / "new")
        arguments = [str(tmp_path / "table"), f"wal://{tmp_path}/old", str(tmp_path / "new")]
        done = CliRunner().invoke(app, ["table", "move", *arguments])
        assert (done.exit_code, done.stdout.startswith("The table follows that log now")) == (0, True), done.output
