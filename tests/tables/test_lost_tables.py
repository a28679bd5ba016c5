"""A table that is removed, replaced or cannot be read, at each moment of a commit; and data files that are gone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

import strandline as sl
from strandline.errors import CorruptData, Diverged, TransientStorageError
from strandline.log.memory import MemoryLog
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.files import DeltaFiles
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.maintain.operations import verify
from tests.tables.test_maintenance_formats import Delta, Iceberg, extend

TOUCHES = [
    (DeltaTable, "__init__"),
    (DeltaTable, "transaction_version"),
    (DeltaTable, "create_write_transaction"),
    (DeltaCommits, "_settle"),
    (DeltaFiles, "read"),
    (DeltaFiles, "put"),
    (FollowedDelta, "read_commit"),
    (FollowedDelta, "make_durable"),
]


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    extend(log, 20)
    return log


@contextmanager
def at_touch(number: int, do: Callable[[], object], touches: list[tuple[type, str]]) -> Any:
    """Call ``do`` right before the n-th look at the table's files; yields a list with an entry per look."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in touches:
            real = getattr(owner, name)

            def counted(*arguments: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
                seen.append(_name)
                if len(seen) == number + 1:
                    do()
                return _real(*arguments, **options)

            patch.setattr(owner, name, counted)
        yield seen


def running(log: MemoryLog, table: Path) -> sl.DeltaSink:
    """The sink of a follower that has started, and has committed nothing yet."""
    sl.follow(log, sl.DeltaSink(table), upto=10)
    sink = sl.DeltaSink(table)
    sink.resume(log.log_id)
    return sink


def store(sink: Any, log: MemoryLog, first: int = 10, end: int = 20) -> None:
    records = pa.Table.from_batches(log.read(first, upto=end))
    sink.apply(records, since=log.cursor_at(first), upto=log.cursor_at(end))
    sink.cursor(log.log_id)


def moments(log: MemoryLog, table: Path, touches: list[tuple[type, str]]) -> int:
    sink = running(log, table)
    with at_touch(-1, lambda: None, touches) as seen:
        store(sink, log)
    shutil.rmtree(table)
    return len(seen)


def test_a_table_that_is_removed_at_any_moment_of_a_commit_is_diverged(log, tmp_path):
    table = tmp_path / "table"
    count = moments(log, table, TOUCHES)
    assert count > 8
    for number in range(count):
        sink = running(log, table)
        with at_touch(number, lambda: shutil.rmtree(table), TOUCHES) as seen, pytest.raises(Diverged):
            store(sink, log)
        assert len(seen) > number
        assert not (table / "_delta_log").exists(), seen
        shutil.rmtree(table, ignore_errors=True)


def test_a_table_that_is_replaced_at_any_moment_of_a_commit_is_diverged(log, tmp_path):
    table, other = tmp_path / "table", tmp_path / "other"
    sl.follow(log, sl.DeltaSink(other), upto=10)

    def replace() -> None:
        shutil.rmtree(table)
        shutil.copytree(other, table)

    for number in range(moments(log, table, TOUCHES)):
        sink = running(log, table)
        with at_touch(number, replace, TOUCHES), pytest.raises(Diverged):
            store(sink, log)
        shutil.rmtree(table)


def test_a_failed_look_at_any_moment_of_a_commit_is_an_error_that_may_be_retried(log, tmp_path):
    table = tmp_path / "table"
    touches = [(DeltaTable, name) for name in ("__init__", "transaction_version", "create_write_transaction")]

    def fail() -> None:
        raise DeltaError("Generic S3 error: 403 Forbidden")

    for number in range(moments(log, table, touches)):
        sink = running(log, table)
        with at_touch(number, fail, touches) as seen, suppress(TransientStorageError):
            store(sink, log)
        store(sink, log)
        assert verify(sl.DeltaSink(table), log).is_clean, seen
        shutil.rmtree(table)


def test_a_commit_that_is_no_json_for_the_library_is_damage(log, tmp_path):
    table = tmp_path / "table"
    running(log, table)
    newest = max((table / "_delta_log").glob("*.json"))
    newest.write_text(newest.read_text().replace('"version":10', '"version":1180591620717411303424'))
    with pytest.raises(CorruptData, match=r"A commit file of the table .* is damaged"):
        sl.DeltaSink(table).resume(log.log_id)


def files_of(place: Any) -> list[str]:
    if isinstance(place, Delta):
        return DeltaTable(place.address).file_uris()
    return [
        task.file.file_path.removeprefix("file://")
        for task in place.catalog.load_table("shop.orders").scan().plan_files()
    ]


@pytest.fixture(params=[Delta, Iceberg])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    found = request.param(tmp_path)
    yield found
    found.close()


def test_a_data_file_that_is_gone_is_damage_and_repair_goes_back_before_it(log, place):
    for end in (5, 10, 15):
        sl.follow(log, place.sink(), upto=end)
    (lost,) = files_of(place)
    os.remove(lost)
    for job in (lambda: sl.follow(log, place.sink(), upto="end"), lambda: verify(place.sink(), log)):
        with pytest.raises(CorruptData, match="is gone, though the table names it"):
            job()
    sl.follow(log, place.sink(), upto="end", repair=True)
    assert verify(place.sink(), log).is_clean


def test_a_table_whose_data_files_are_all_gone_cannot_be_repaired(log, place):
    sl.follow(log, place.sink(), upto=10)
    sink = place.sink()
    for lost in files_of(place):
        os.remove(lost)
    if isinstance(place, Delta):  # its version before the first range has no files
        sl.follow(log, sink, upto="end", repair=True)
        assert verify(place.sink(), log).is_clean
        return
    with pytest.raises(Diverged, match="cannot be repaired"):
        sl.follow(log, sink, upto="end", repair=True)


def test_files_that_a_vacuum_took_while_they_were_read_are_looked_for_again(log, place, monkeypatch):
    """Another job joins the files and removes the old ones, between a follower's look and its workers."""
    sl.follow(log, place.sink(), upto=10)
    sink, begin = place.sink(), type(place.sink()).begin

    def begun(self: Any, **options: Any) -> Any:
        found = begin(self, **options)
        if self is sink:
            monkeypatch.undo()
            old = files_of(place)
            sl.tables.rebuild(place.sink(), log, upto=10)
            for path in old:
                os.remove(path)
        return found

    monkeypatch.setattr(type(sink), "begin", begun)
    sl.follow(log, sink, upto="end")
    assert verify(place.sink(), log).is_clean


def test_an_iceberg_table_that_is_dropped_or_replaced_while_it_is_followed_is_diverged(log, tmp_path):
    place = Iceberg(tmp_path)
    sl.follow(log, place.sink(), upto=10)
    for replaced in (False, True):
        sink = place.sink()
        sink.resume(log.log_id)
        transaction = sink.begin(since=log.cursor_at(10), upto=log.cursor_at(20), tasks=1)
        written = [part.write(log.read(10, upto=20)) for part in transaction.parts]
        place.catalog.drop_table("shop.orders")
        if replaced:
            sl.follow(log, place.sink(), upto=10)
        with pytest.raises(Diverged):
            transaction.commit(written)
        with pytest.raises(Diverged):
            store(sink, log)
        with pytest.raises(Diverged):
            sink.cursor(log.log_id)
        if not replaced:
            sl.follow(log, place.sink(), upto=10)
    place.close()


def test_a_transient_error_of_a_present_table_stays_one(log, tmp_path, monkeypatch):
    sink = running(log, tmp_path / "table")

    def busy(*_: Any) -> Any:
        raise OSError("the store is busy")

    monkeypatch.setattr(DeltaTable, "transaction_version", busy)
    with pytest.raises(TransientStorageError, match="the store is busy"):
        sl.DeltaSink(sink.url).resume(log.log_id)
