"""Orphan data files of Delta tables: removed once no commit can name them any more, and no other file ever."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.storage.env import Env
from strandline.tables.delta import orphans
from strandline.tables.delta.orphans import OrphanSweeper
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.layout import version_in
from strandline.testing.clock import ManualClock

DAY = 86_400


class Place:
    """A log and a table that follows it."""

    def __init__(self, folder: Path, mode: Any) -> None:
        self.folder, self.mode = folder / "table", mode
        self.log: Any = sl.log.MemoryLog()

    def sink(self, **options: Any) -> sl.DeltaSink:
        return sl.DeltaSink(str(self.folder), mode=self.mode, **options)

    def extend(self) -> None:
        with self.log.producer() as producer:
            for key in (b"a", b"b"):
                producer.append(key=key, value=b"%d" % self.log.end().next)

    def follow(self, **options: Any) -> sl.DeltaSink:
        self.extend()
        sink = self.sink(**options)
        sl.follow(self.log, sink, upto="end")
        return sink

    def begun(self) -> tuple[Any, Any]:
        """A job that has written its files, and has not committed yet."""
        self.extend()
        sink = self.sink()
        at = sink.cursor(self.log.log_id) or self.log.start()
        transaction = sink.begin(since=at, upto=self.log.end(), tasks=1)
        assert transaction is not None
        return transaction, [part.write(self.log.read(at)) for part in transaction.parts]

    def files(self) -> set[str]:
        return {file.name for file in self.folder.glob("*.parquet")}

    def age(self, days: float = 8) -> None:
        for file in self.folder.glob("*.parquet"):
            found = file.stat()
            os.utime(file, (found.st_atime, found.st_mtime - days * DAY))

    def swept(self, hours: int = 168) -> int:
        return OrphanSweeper(self.sink()._followed, hours).removed()

    def check(self) -> None:
        assert sl.tables.verify(self.sink(), self.log).is_clean


@pytest.fixture(params=["append", "latest", "history"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.param)


def test_files_of_a_job_that_lost_its_version_are_removed_after_the_grace_period(place: Place) -> None:
    place.follow()
    before = place.files()
    _, written = place.begun()
    mine = {file.path for one in written for file in one.added}
    assert mine
    place.follow()
    assert place.swept() == 0, "they are young"
    place.age()
    assert place.swept() == len(mine)
    assert mine.isdisjoint(place.files())
    assert before <= place.files(), "earlier versions need them"
    place.check()


def test_files_that_a_slow_job_may_still_commit_stay_however_old_they_are(place: Place) -> None:
    place.follow()
    transaction, written = place.begun()
    place.age(days=400)
    assert place.swept() == 0
    transaction.commit(written)
    place.check()


def test_files_that_were_committed_and_replaced_since_stay_for_earlier_versions(place: Place) -> None:
    for _ in range(3):
        place.follow()
    known, versions = place.files(), DeltaTable(str(place.folder)).version()
    place.age()
    assert place.swept(hours=0) == 0, "by then VACUUM may remove them, and the follower still does not"
    assert place.files() == known
    for version in range(1, versions + 1):
        assert DeltaTable(str(place.folder), version=version).to_pyarrow_table().num_rows


def test_files_of_commits_that_cannot_be_read_any_more_and_of_others_stay(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.follow()
    place.begun()
    place.follow()
    place.age()
    other = place.folder / f"part-{'a' * 36}-{'b' * 36}.parquet"
    other.write_bytes(b"of an earlier release")
    os.utime(other, (0, 0))
    known = place.files()
    with monkeypatch.context() as patch:
        patch.setattr(FollowedDelta, "read_commit", lambda *_: None)
        assert place.swept() == 0
        patch.setattr(FollowedDelta, "read_commit", lambda *_: b"{damaged")
        assert place.swept() == 0
    assert place.files() == known
    assert place.swept() > 0
    assert other.exists()


def test_files_of_a_table_within_the_folder_stay(place: Place) -> None:
    """In a bucket nobody notices that one table is within another."""
    inner = Place(place.folder.parent / "inner", place.mode)
    inner.follow()
    place.follow()
    place.follow()
    inner.folder.parent.rename(place.folder / "inner")
    inner.folder = place.folder / "inner" / "table"
    inner.age()
    place.age()
    assert place.swept() == 0
    inner.check()


def test_a_follower_removes_orphans_by_itself_once_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, "append")
    place.follow()
    _, written = place.begun()
    [orphan] = [file.path for one in written for file in one.added]
    place.follow()
    place.age()
    idle = place.follow()
    assert idle._orphans.thread is None
    assert orphan in place.files()
    monkeypatch.setattr(orphans, "EVERY_VERSIONS", 1)
    sink = place.follow()
    assert sink._orphans.thread is not None
    sink._orphans.thread.join(60)
    assert orphan not in place.files()
    place.check()


def test_the_pace_is_a_day_and_short_runs_look_at_every_hundredth_version(tmp_path: Path) -> None:
    clock = ManualClock()
    place = Place(tmp_path, "append")
    sweeper = OrphanSweeper(place.sink()._followed, 168, env=Env(clock=clock))

    def begins(version: int) -> bool:
        before, sweeper.thread = sweeper.thread, None
        sweeper.remove_in_time(version)
        found, sweeper.thread = sweeper.thread, sweeper.thread or before
        return found is not None

    assert not begins(99)
    assert begins(100)
    assert not begins(200)
    clock.advance(DAY + 1)
    assert begins(201)
    late = OrphanSweeper(place.sink()._followed, 168, env=Env(clock=clock))
    late.remove_in_time(7)
    assert late.thread is None
    clock.advance(DAY + 1)
    late.remove_in_time(8)
    assert late.thread is not None


def test_a_store_that_fails_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(orphans, "EVERY_VERSIONS", 1)
    monkeypatch.setattr(OrphanSweeper, "removed", lambda _: 1 / 0)
    place = Place(tmp_path, "append")
    sink = place.follow()
    assert sink._orphans.thread is not None
    sink._orphans.thread.join(60)
    assert "could not be removed now" in caplog.text
    place.check()


def test_the_names_of_files_have_the_version_of_their_commit(place: Place) -> None:
    for _ in range(3):
        place.follow()
    sl.tables.rebuild(place.sink(), place.log)
    table = DeltaTable(str(place.folder))
    files = pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()
    assert {version_in(path) for path in files} == {table.version()}
