"""A commit whose answer was lost: the follower recognises its own commit and goes on, on each kind of table."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

import strandline as sl
from strandline.errors import Contended, Fenced, TransientStorageError
from strandline.log.memory import MemoryLog
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.sql import sink as sql_sink
from strandline.testing.sinks import LOG, changes
from tests.matrix_cases import some


def filled(count: int) -> MemoryLog:
    log = MemoryLog()
    with log.producer() as producer:
        for n in range(count):
            producer.append(key=b"k%d" % (n % 3), value=b"%d" % n)
    return log


def apply(sink, first, *rows):
    upto = Cursor(LOG, first + len(rows))
    sink.apply(changes(first, *rows), since=upto.at(first), upto=upto)


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize(
    "error", some([CommitFailedError("Version exists."), OSError("The line broke.")], 1), ids=["taken", "io"]
)
def test_a_delta_commit_that_the_store_did_not_answer_is_the_followers_own(tmp_path, monkeypatch, error, landed):
    """The library repeats the request, and the store refuses it: the version exists."""
    log, sink = filled(9), sl.DeltaSink(str(tmp_path / "table"), mode="append")
    commit, create, lost = DeltaTable.create_write_transaction, DeltaTable.create, []

    def unanswered(call):
        def called(*arguments, **options):
            if landed:
                call(*arguments, **options)
            lost.append(call)
            raise error

        return called

    for end in (3, 6, 9):
        with monkeypatch.context() as patch:
            patch.setattr(DeltaTable, "create_write_transaction", unanswered(commit))
            patch.setattr(DeltaTable, "create", unanswered(create))
            if landed:
                assert sl.follow(log, sink, upto=end).next == end
                continue
            with pytest.raises((Contended, TransientStorageError)):
                sl.follow(log, sink, upto=end)
        assert sl.follow(log, sink, upto=end).next == end
    assert len(lost) >= 3
    assert sl.tables.verify(sink, log).is_clean


def test_a_delta_commit_of_another_follower_is_not_taken_for_the_own(tmp_path, monkeypatch):
    place = str(tmp_path / "table")
    sink = sl.DeltaSink(place)
    apply(sink, 0, (b"a", b"1"))
    commit = DeltaCommits.commit

    def overtaken(self, *arguments, **options):
        monkeypatch.undo()
        apply(sl.DeltaSink(place), 1, (b"b", b"2"))
        return commit(self, *arguments, **options)

    monkeypatch.setattr(DeltaCommits, "commit", overtaken)
    with pytest.raises(Fenced):
        apply(sink, 1, (b"b", b"2"), (b"c", b"3"))
    assert DeltaTable(place).version() == 2


@pytest.mark.parametrize("error", some([CommitStateUnknownException, CommitFailedException], 1))
@pytest.mark.parametrize("landed", [True, False])
def test_an_iceberg_commit_that_the_catalog_did_not_answer_is_found_by_its_snapshot(
    tmp_path, monkeypatch, error, landed
):
    catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    log, sink = filled(9), sl.IcebergSink(catalog, "shop.orders", mode="append")
    commit = SqlCatalog.commit_table
    for end in (3, 6, 9):
        with monkeypatch.context() as patch:

            def unanswered(*arguments, **options):
                if landed:
                    commit(*arguments, **options)
                raise error("The answer was lost.")

            patch.setattr(SqlCatalog, "commit_table", unanswered)
            if landed:
                assert sl.follow(log, sink, upto=end).next == end
                continue
            with pytest.raises((Contended, TransientStorageError)):
                sl.follow(log, sink, upto=end)
        assert sl.follow(log, sink, upto=end).next == end
    rows = catalog.load_table("shop.orders").scan().to_arrow()
    assert sorted(rows["offset"].to_pylist()) == list(range(9))
    catalog.close()


@contextmanager
def without_answers(sink, monkeypatch):
    """Commits of the database land, and the sink hears of an error."""
    writing = type(sink._database).writing

    @contextmanager
    def unanswered(self):
        with writing(self) as session:
            yield session
        raise TransientStorageError("The answer was lost.")

    with monkeypatch.context() as patch:
        patch.setattr(type(sink._database), "writing", unanswered)
        yield patch


def sqlite_offsets(path):
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute('SELECT "offset" FROM orders ORDER BY 1')]


def test_a_database_commit_that_had_no_answer_is_found_by_its_number(tmp_path, monkeypatch):
    log, sink = filled(9), sl.SqliteSink(str(tmp_path / "shop.db"), table="orders", mode="append")
    for end in (3, 6, 9):
        with without_answers(sink, monkeypatch):
            assert sl.follow(log, sink, upto=end).next == end
    assert sqlite_offsets(tmp_path / "shop.db") == list(range(9))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_database_commit_that_lands_while_it_is_repeated_is_the_followers_own(tmp_path, monkeypatch, is_first):
    """The line broke, the server went on: the first commit lands while the second one waits for its lock."""
    place = str(tmp_path / "shop.db")
    sink = sl.SqliteSink(place, table="orders", mode="append")
    first = 0 if is_first else 2
    if not is_first:
        apply(sink, 0, (b"a", b"1"), (b"b", b"2"))
    numbers = [CHANCE.uuid()]
    rows = [(b"c", b"3"), (b"d", b"4")]

    class Chance:
        def uuid(self):
            return numbers[0] if numbers else CHANCE.uuid()

    monkeypatch.setattr(sql_sink, "CHANCE", Chance())
    database = type(sink._database)
    writing = database.writing

    @contextmanager
    def broken(self):
        with writing(self) as session:
            yield session
            raise TransientStorageError("The line broke.")

    with monkeypatch.context() as patch:
        patch.setattr(database, "writing", broken)
        with pytest.raises(TransientStorageError):
            apply(sink, first, *rows)
    assert (sqlite_offsets(place) if not is_first else []) == list(range(first))

    lost, lands = numbers[0], []

    @contextmanager
    def landing(self):
        if not lands:
            lands.append(True)
            straggler = sl.SqliteSink(place, table="orders", mode="append")
            straggler._held = sink._held
            numbers[:] = [lost]
            apply(straggler, first, *rows)
            numbers.clear()
        with writing(self) as session:
            yield session

    numbers.clear()
    monkeypatch.setattr(database, "writing", landing)
    apply(sink, first, *rows, (b"e", b"5"))
    apply(sink, first + 3, (b"f", b"6"))
    assert sqlite_offsets(place) == list(range(first + 4))
