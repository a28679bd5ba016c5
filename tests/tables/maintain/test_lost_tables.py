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
from tests.matrix_cases import some
from tests.tables.maintain.test_maintenance_formats import Delta, Iceberg, extend

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


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_commit_files_that_are_gone_though_later_ones_need_them_are_damage(log, tmp_path, lost):
    table = tmp_path / "table"
    for end in (5, 10, 15):
        sl.follow(log, sl.DeltaSink(table), upto=end)
    os.remove(table / "_delta_log" / f"{lost:020d}.json")
    for repair in (False, True):
        with pytest.raises(CorruptData, match=r"Commit files of the table .* are gone"):
            sl.follow(log, sl.DeltaSink(table), upto="end", repair=repair)


def test_commits_that_are_cleaned_up_while_a_table_is_opened_are_no_damage(log, tmp_path):
    running(log, tmp_path / "table")

    def cleaned() -> None:
        raise DeltaError("Kernel error: Expected contiguous commit files, but found gap")

    with at_touch(0, cleaned, [(DeltaTable, "__init__")]) as seen:
        assert sl.DeltaSink(tmp_path / "table").resume(log.log_id) == log.cursor_at(10)
    assert len(seen) > 1


def damaged(log: MemoryLog, table: Path) -> sl.DeltaSink:
    shutil.rmtree(table, ignore_errors=True)
    for end in (10, 20):
        sl.follow(log, sl.DeltaSink(table), upto=end)
    DeltaTable(table).delete("offset > 3")
    return sl.DeltaSink(table)


def test_a_failed_look_at_any_moment_of_a_repair_is_retried_and_loses_no_version(log, tmp_path):
    """It was taken for a version that is gone: the table went further back, or was called beyond repair."""
    table = tmp_path / "table"
    touches = [*TOUCHES[:3], (DeltaTable, "restore"), (DeltaFiles, "present")]

    def repaired(sink: sl.DeltaSink) -> int:
        cursor = sink.repair(log.log_id, lambda _: True)
        assert cursor is not None
        return cursor.next

    def fail() -> None:
        raise TransientStorageError("403") if seen[-1] == "present" else OSError("Generic S3 error: 403 Forbidden")

    sink = damaged(log, table)
    with at_touch(-1, lambda: None, touches) as seen:
        assert repaired(sink) == 20
    count = len(seen)
    assert "restore" in seen
    for number in range(count):
        sink = damaged(log, table)
        with at_touch(number, fail, touches) as seen, suppress(TransientStorageError):
            assert repaired(sink) == 20
        assert repaired(sl.DeltaSink(table)) == 20, seen
    assert verify(sl.DeltaSink(table), log).is_clean


def test_a_restore_whose_answer_was_lost_is_found(log, tmp_path, monkeypatch):
    sink, restore = damaged(log, tmp_path / "table"), DeltaTable.restore

    def unanswered(*arguments: Any, **options: Any) -> Any:
        restore(*arguments, **options)
        raise DeltaError("Generic S3 error: no answer")

    monkeypatch.setattr(DeltaTable, "restore", unanswered)
    assert sl.follow(log, sink, upto="end", repair=True).next == 20
    assert DeltaTable(sink.url).version() == 4
    assert verify(sl.DeltaSink(sink.url), log).is_clean


def test_a_failed_look_at_a_restored_version_is_no_other_start(log, tmp_path):
    table = tmp_path / "table"
    sl.follow(log, sl.DeltaSink(table, mode="append"), upto="end")
    version = DeltaTable(table).version()
    sl.tables.rebuild(sl.DeltaSink(table, mode="append"), log, start=15)
    DeltaTable(table).restore(version)
    sink = sl.DeltaSink(table, mode="append")
    assert sink.start() == 0

    def fail() -> None:
        raise OSError("Generic S3 error: 403 Forbidden")

    with at_touch(1, fail, [(DeltaTable, "__init__")]) as seen, pytest.raises(TransientStorageError):
        sl.DeltaSink(table, mode="append").start()
    assert len(seen) == 2


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


def metadata_file(place: Iceberg, number: int) -> str:
    """The manifest list of the newest snapshot, or one of its manifests."""
    table = place.catalog.load_table("shop.orders")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    found = [snapshot.manifest_list, *[one.manifest_path for one in snapshot.manifests(table.io)]]
    return found[number].removeprefix("file://")


@pytest.mark.parametrize("number", some([1, 0], 1))
def test_a_metadata_file_that_is_gone_is_damage_and_repair_goes_back_before_it(log, tmp_path, number):
    place = Iceberg(tmp_path)
    for end in (5, 10, 15):
        sl.follow(log, place.sink(), upto=end)
    os.remove(metadata_file(place, number))
    for job in (lambda: sl.follow(log, place.sink(), upto="end"), lambda: verify(place.sink(), log)):
        with pytest.raises(CorruptData, match="is gone, though the table"):
            job()
    sl.follow(log, place.sink(), upto="end", repair=True)
    assert verify(place.sink(), log).is_clean
    place.close()


def test_a_transient_error_of_a_present_table_stays_one(log, tmp_path, monkeypatch):
    sink = running(log, tmp_path / "table")

    def busy(*_: Any) -> Any:
        raise OSError("the store is busy")

    monkeypatch.setattr(DeltaTable, "transaction_version", busy)
    with pytest.raises(TransientStorageError, match="the store is busy"):
        sl.DeltaSink(sink.url).resume(log.log_id)
