"""Data files of Iceberg tables that no snapshot names: removed when no commit can name them any more, no other ever."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from strandline.storage.clock import CLOCK
from strandline.storage.env import Env
from strandline.tables.iceberg import vacuum
from strandline.testing.clock import ManualClock
from tests.matrix_cases import some

DAY = 86_400


class Place:
    """A log and a table that follows it."""

    def __init__(self, folder: Path, mode: Any, **properties: str) -> None:
        self.mode = mode
        self.log: Any = sl.log.MemoryLog()
        self.catalog = SqlCatalog(
            "shop",
            uri=f"sqlite:///{folder}/catalog.db",
            warehouse=f"file://{folder}/warehouse",
            **properties,
        )
        self.catalog.create_namespace("shop")
        self.data = folder / "warehouse" / "shop" / "orders" / "data"

    def sink(self) -> sl.IcebergSink:
        return sl.IcebergSink(self.catalog, "shop.orders", mode=self.mode)

    def extend(self) -> None:
        with self.log.producer() as producer:
            for key in (b"a", b"b"):
                producer.append(key=key, value=b"%d" % self.log.end().next)

    def follow(self) -> None:
        self.extend()
        sl.follow(self.log, self.sink(), upto="end")

    def begun(self) -> tuple[Any, Any]:
        """A job that has written its files, and has not committed yet."""
        self.extend()
        sink = self.sink()
        at = sink.cursor(self.log.log_id) or self.log.start()
        transaction = sink.begin(since=at, upto=self.log.end(), tasks=1)
        assert transaction is not None
        return transaction, [part.write(self.log.read(at)) for part in transaction.parts]

    def files(self) -> set[str]:
        return {file.name for file in self.data.glob("*.parquet")}

    def age(self, days: float = 8) -> None:
        for file in self.data.glob("*.parquet"):
            found = file.stat()
            os.utime(file, (found.st_atime, found.st_mtime - days * DAY))

    def snapshots(self) -> int:
        return len(self.catalog.load_table("shop.orders").snapshots())

    def wait_past(self, moment: int) -> None:
        """Wait until the clock is past a time in milliseconds."""
        while CLOCK.now() // 1_000 <= moment:
            pass

    def check(self) -> None:
        assert sl.tables.verify(self.sink(), self.log).is_clean


@pytest.fixture(params=some(["latest", "append", "history"], 1))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.param)


def names(written: Any) -> set[str]:
    return {file.path.rpartition("/")[2] for one in written for file in one.added}


@pytest.mark.matrix
def test_files_of_a_job_that_lost_its_number_are_removed_after_the_grace_period(place: Place) -> None:
    place.follow()
    _, written = place.begun()
    mine = names(written)
    assert mine
    place.follow()
    assert sl.tables.vacuum(place.sink()) == 0, "they are young"
    place.age()
    assert sl.tables.vacuum(place.sink()) == len(mine)
    assert not mine & place.files()
    place.check()
    place.follow()
    place.check()


def test_files_of_a_job_that_may_still_commit_stay_however_old_they_are(place: Place) -> None:
    place.follow()
    transaction, written = place.begun()
    place.age(400)
    assert sl.tables.vacuum(place.sink(), 1) == 0
    transaction.commit(written)
    place.check()


def test_the_first_files_of_a_table_stay_until_their_commit(place: Place) -> None:
    transaction, written = place.begun()
    place.age(400)
    transaction.commit(written)
    place.age(400)
    assert sl.tables.vacuum(place.sink(), 1) == 0
    place.check()


def test_a_job_that_lost_its_number_cannot_commit_though_the_table_goes_back_to_where_it_began(place: Place) -> None:
    place.follow()
    table = place.catalog.load_table("shop.orders")
    before = table.current_snapshot()
    assert before is not None
    transaction, written = place.begun()
    place.follow()
    place.catalog.load_table("shop.orders").manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()
    with pytest.raises(sl.errors.StrandlineError):
        transaction.commit(written)


def test_files_of_expired_snapshots_are_removed_and_those_of_kept_ones_stay(place: Place) -> None:
    for _ in range(4):
        place.follow()
    kept = {
        task.file.file_path.rpartition("/")[2] for task in place.catalog.load_table("shop.orders").scan().plan_files()
    }
    replaced = place.files() - kept
    later = ManualClock(now=CLOCK.now() + 30 * DAY * 1_000_000)
    assert place.sink().vacuumed(1, env=Env(clock=later)) == len(replaced)
    assert (place.files(), place.snapshots()) == (kept, 1)
    place.check()
    place.follow()
    place.check()


def test_files_that_a_tag_names_stay(place: Place) -> None:
    place.follow()
    table = place.catalog.load_table("shop.orders")
    tagged = table.current_snapshot()
    assert tagged is not None
    table.manage_snapshots().create_tag(tagged.snapshot_id, "audit").commit()
    before = place.files()
    for _ in range(2):
        place.follow()
    later = ManualClock(now=CLOCK.now() + 30 * DAY * 1_000_000)
    place.sink().vacuumed(1, env=Env(clock=later))
    assert before <= place.files()
    rows = place.catalog.load_table("shop.orders").scan(snapshot_id=tagged.snapshot_id).to_arrow()
    assert rows.num_rows


def test_a_snapshot_that_was_current_until_just_now_keeps_its_files(place: Place) -> None:
    """Its readers may have begun a moment before the next commit."""
    place.follow()
    old = place.catalog.load_table("shop.orders").current_snapshot()
    assert old is not None
    hour = ManualClock(now=CLOCK.now() + 3_600_000_000)
    place.follow()
    place.age()
    place.sink().vacuumed(1, env=Env(clock=hour))
    assert place.catalog.load_table("shop.orders").scan(snapshot_id=old.snapshot_id).to_arrow().num_rows


def test_files_of_others_stay(place: Place) -> None:
    place.follow()
    (place.data / "part-00000-of-another-program.parquet").write_bytes(b"x")
    (place.data / "notes.txt").write_bytes(b"x")
    place.age()
    before = {file.name for file in place.data.iterdir()}
    sl.tables.vacuum(place.sink())
    assert {file.name for file in place.data.iterdir()} == before


def in_a_month() -> ManualClock:
    return ManualClock(now=CLOCK.now() + 30 * DAY * 1_000_000)


@pytest.mark.matrix
def test_files_of_a_renamed_table_stay_though_another_one_is_at_its_location(place: Place) -> None:
    for _ in range(2):
        place.follow()
    place.catalog.rename_table("shop.orders", "shop.kept")
    for _ in range(3):
        place.follow()
    kept = place.catalog.load_table("shop.kept")
    assert kept.location() == place.catalog.load_table("shop.orders").location()
    rows = kept.scan().to_arrow().num_rows
    place.sink().vacuumed(1, env=Env(clock=in_a_month()))
    assert kept.scan().to_arrow().num_rows == rows
    place.check()


def test_files_of_a_job_that_creates_the_table_again_stay(place: Place) -> None:
    """It began before another job created the table, and commits after that table was dropped."""
    transaction, written = place.begun()
    place.follow()
    place.sink().vacuumed(1, env=Env(clock=in_a_month()))
    place.catalog.drop_table("shop.orders")
    transaction.commit(written)
    sl.follow(place.log, place.sink(), upto="end")
    place.check()


@pytest.mark.matrix
def test_a_table_that_goes_back_while_snapshots_expire_keeps_its_snapshot(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        place.follow()
    first = place.catalog.load_table("shop.orders").snapshots()[0].snapshot_id
    load, loads = place.catalog.load_table, list[int]()

    def load_then_roll_back(identifier: Any) -> Any:
        found = load(identifier)
        loads.append(1)
        if len(loads) == 1:
            load(identifier).manage_snapshots().rollback_to_snapshot(first).commit()
        return found

    sink = place.sink()
    monkeypatch.setattr(place.catalog, "load_table", load_then_roll_back)
    with pytest.raises(sl.errors.Diverged, match="rolled back"):
        sink.vacuumed(1, env=Env(clock=in_a_month()))
    current = load("shop.orders").current_snapshot()
    assert current is not None
    assert current.snapshot_id == first
    assert load("shop.orders").scan().to_arrow().num_rows


@pytest.mark.matrix
def test_snapshots_expire_beside_a_follower_that_commits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        place.follow()
    load, loads = place.catalog.load_table, list[int]()

    def load_then_follow(identifier: Any) -> Any:
        found = load(identifier)
        loads.append(1)
        if len(loads) == 1:
            place.follow()
        return found

    sink = place.sink()
    monkeypatch.setattr(place.catalog, "load_table", load_then_follow)
    sink.vacuumed(1, env=Env(clock=in_a_month()))
    assert place.snapshots() == 1
    place.check()


def test_a_snapshot_that_was_rolled_back_just_now_keeps_its_files(place: Place) -> None:
    """It may have readers, though it is no ancestor of the current one."""
    for _ in range(3):
        place.follow()
    table = place.catalog.load_table("shop.orders")
    replaced, first = table.current_snapshot(), table.snapshots()[0].snapshot_id
    assert replaced is not None
    place.wait_past(replaced.timestamp_ms + 1)
    hour = ManualClock(now=CLOCK.now() + 3_600_000_000)
    table.manage_snapshots().rollback_to_snapshot(first).commit()
    place.sink().repair(place.log.log_id, lambda _: True)
    place.age()
    place.sink().vacuumed(1, env=Env(clock=hour))
    rows = place.catalog.load_table("shop.orders").scan(snapshot_id=replaced.snapshot_id).to_arrow()
    assert rows.num_rows


@pytest.mark.matrix
def test_a_file_that_another_vacuum_removes_meanwhile_is_no_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.follow()
    _, written = place.begun()
    place.follow()
    place.age()
    others: list[int] = []
    listed = vacuum._listed

    def list_then_vacuum(*given: Any) -> Any:
        found = list(listed(*given))
        monkeypatch.setattr(vacuum, "_listed", listed)
        others.append(sl.tables.vacuum(place.sink()))
        return found

    monkeypatch.setattr(vacuum, "_listed", list_then_vacuum)
    assert sl.tables.vacuum(place.sink()) == 0
    assert others == [len(names(written))]
    place.check()


def test_nothing_is_removed_if_a_manifest_cannot_be_read(place: Place) -> None:
    place.follow()
    place.begun()
    place.follow()
    place.age()
    before = place.files()
    snapshot = place.catalog.load_table("shop.orders").snapshots()[0]
    Path(snapshot.manifest_list.removeprefix("file://")).write_bytes(b"damaged")
    with pytest.raises(sl.errors.StrandlineError):
        sl.tables.vacuum(place.sink())
    assert place.files() == before


def test_any_number_of_hours_is_taken(place: Place) -> None:
    place.follow()
    assert sl.tables.vacuum(place.sink(), 10**15) == 0


def test_a_table_that_follows_no_log_is_refused_in_one_sentence(place: Place) -> None:
    place.catalog.create_table("shop.orders", schema=pa.schema({"id": pa.int64()}))
    with pytest.raises(sl.errors.InvalidInput, match=r"shop\.orders follows no log"):
        sl.tables.vacuum(place.sink())


def test_files_that_cannot_be_listed_stay_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(tmp_path, "latest", **{"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"})
    for _ in range(3):
        place.follow()
    before = place.files()
    later = ManualClock(now=CLOCK.now() + 30 * DAY * 1_000_000)
    assert place.sink().vacuumed(1, env=Env(clock=later)) == 0
    assert place.files() == before
    assert "shop.orders that no snapshot names stay: FsspecFileIO cannot list them" in caplog.text
    place.check()
