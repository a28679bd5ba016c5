"""Bootstrap: a store is imported from the newest snapshot, its slot pins the next records, and it follows them."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import (
    AlreadyExists,
    CorruptData,
    CursorExpired,
    Diverged,
    InvalidInput,
    NotFound,
    SlotInvalid,
    StorageError,
)
from strandline.followers.run import follow
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.rocks import RocksStore
from strandline.kv.log import LogKeyValue
from strandline.log.memory import MemoryLog
from strandline.log.object.log import open_log
from strandline.log.slots.pin import SlotPin
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA
from strandline.model.retention import NEWCOMER_SECONDS, SlotLimits
from strandline.snapshots.artifacts import Artifacts
from strandline.snapshots.bootstrapping import bootstrap
from strandline.snapshots.sealed import next_number, snapshot_folder
from strandline.storage.clock import CHANCE
from strandline.storage.env import SYSTEM, Env
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Crash, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.sinks import changes
from tests.followers.small_store import DyingDisk, TinyStore, cursor, tiny


def append(log, *rows: tuple[bytes, bytes]) -> None:
    log.append(changes(0, *rows).drop_columns("offset"), writer=WriterId(CHANCE.uuid()), number=0).result()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def log():
    log = MemoryLog()
    for number in range(4):
        append(log, (b"a", b"%d" % number), (b"k%d" % number, b"x"))
    return log


@pytest.fixture
def fold(log, tmp_path):
    """A store that has followed the whole log."""
    store = AppendLogStore.open(str(tmp_path / "veteran"), sync=False)
    follow(log, store, upto="end")
    yield store
    store.close()


def followed(log, folder: Path) -> AppendLogStore:
    store = AppendLogStore.open(str(folder), sync=False)
    follow(log, store, upto="end")
    return store


@pytest.fixture
def artifacts():
    return Artifacts(PlainStore())


@pytest.fixture(params=["published", "numbered", "single"])
def source(request, fold, artifacts, tmp_path):
    """The consumer's snapshot, in each of the places that a newcomer can be sent to."""
    many = str(tmp_path / "many")
    fold.export_to(snapshot_folder(many, next_number(many)))
    if request.param == "published":
        artifacts.publish(snapshot_folder(many, 1))
        return artifacts
    return many if request.param == "numbered" else snapshot_folder(many, 1)


class TestNewcomers:
    def test_a_newcomer_gets_the_newest_snapshot_and_follows_on_from_its_cursor(self, source, log, fold, tmp_path):
        append(log, (b"a", b"later"), (b"new", b"y"))
        with bootstrap(source, str(tmp_path / "dest"), AppendLogStore, log=log, sync=False) as store:
            assert store.position().cursor == fold.position().cursor == log.start().at(8)
            assert list(store.range()) == list(fold.range())
            follow(log, store, upto="end")
            follow(log, fold, upto="end")
            assert list(store.range()) == list(fold.range())
            assert store.get(b"a") == b"later"
        assert not [name for name in names(tmp_path) if name.startswith(".")], "nothing hidden stays behind"

    def test_a_bootstrap_needs_no_log(self, source, tmp_path):
        with bootstrap(source, str(tmp_path / "dest"), AppendLogStore) as store:
            assert store.position().cursor.next == 8

    def test_only_what_came_after_the_snapshot_is_read(self, source, log, tmp_path):
        log.trim(8)
        append(log, (b"late", b"1"))
        with bootstrap(source, str(tmp_path / "dest"), AppendLogStore, log=log, slot="new") as store:
            follow(log, store, "new", upto="end")
            assert (store.get(b"late"), store.get(b"k0")) == (b"1", b"x")

    @pytest.mark.parametrize("pause", [0.0, 3600.0])
    def test_a_snapshot_of_a_lost_history_is_replaced_at_once_however_far_it_reaches(self, artifacts, tmp_path, pause):
        scratch, place = tmp_path / "scratch", tmp_path / "log"
        log = open_log(place, create=True)
        append(log, (b"a", b"1"))
        shutil.copytree(place, tmp_path / "backup")
        append(log, (b"b", b"lost"), (b"c", b"lost"))
        with followed(log, tmp_path / "old") as old:
            assert artifacts.export(old, scratch=scratch, log=log).outcome == "published"
            shutil.rmtree(place)
            log = open_log(shutil.copytree(tmp_path / "backup", place))
            append(log, (b"b", b"new"))
            with pytest.raises(Diverged):
                bootstrap(artifacts, str(tmp_path / "newcomer"), AppendLogStore, log=log)
            with followed(log, tmp_path / "new") as new:
                assert artifacts.export(new, scratch=scratch).outcome == "current", "without the log nothing is known"
                assert artifacts.export(new, scratch=scratch, log=place, pause=pause).outcome == "published"
                assert artifacts.export(new, scratch=scratch, log=log).outcome == "current"
            with pytest.raises(Diverged, match="Nothing was published"):
                artifacts.export(old, scratch=scratch, log=log)
        with bootstrap(artifacts, str(tmp_path / "newcomer"), AppendLogStore, log=log) as store:
            assert dict(store.range()) == {b"a": b"1", b"b": b"new"}

    def test_a_snapshot_that_is_built_from_the_log_replaces_one_of_a_lost_history(self, artifacts, tmp_path):
        place = tmp_path / "log"
        log = open_log(place, create=True)
        shutil.copytree(place, tmp_path / "backup")
        append(log, (b"a", b"lost"))
        append(log, (b"b", b"lost"))
        sl.bulk.build_snapshot(log, tmp_path / "old", publish=artifacts)
        shutil.rmtree(place)
        log = open_log(shutil.copytree(tmp_path / "backup", place))
        append(log, (b"a", b"new"))
        built = sl.bulk.build_snapshot(log, tmp_path / "new", publish=artifacts)
        assert artifacts.newest().cursor == built.cursor
        assert built.cursor.next == 1

    def test_no_snapshot_at_all_says_what_to_do(self, artifacts, log, tmp_path):
        for place in (artifacts, str(tmp_path / "nothing")):
            with pytest.raises(NotFound, match="publish one from a consumer that has caught up"):
                bootstrap(place, str(tmp_path / "dest"), AppendLogStore, log=log, slot="new")
        assert not (tmp_path / "dest").exists()
        assert log.slots.list() == []

    def test_the_newest_valid_one_of_many_is_taken(self, log, fold, tmp_path):
        many = str(tmp_path / "many")
        fold.export_to(snapshot_folder(many, 1))
        append(log, (b"a", b"5"))
        follow(log, fold, upto="end")
        fold.export_to(snapshot_folder(many, 2))
        (Path(snapshot_folder(many, 2)) / "MANIFEST.json").unlink()
        with bootstrap(many, str(tmp_path / "dest"), AppendLogStore, log=log) as store:
            assert store.position().cursor.next == 8

    def test_a_snapshot_of_another_log_is_refused(self, source, tmp_path):
        with pytest.raises(Diverged):
            bootstrap(source, str(tmp_path / "dest"), AppendLogStore, log=MemoryLog(), slot="new")
        assert not (tmp_path / "dest").exists()

    def test_a_snapshot_of_another_kind_is_refused(self, source, tmp_path):
        with pytest.raises(InvalidInput, match="cannot be imported as 'tiny'"):
            bootstrap(source, str(tmp_path / "dest"), TinyKind)
        assert not (tmp_path / "dest").exists()

    def test_a_damaged_snapshot_leaves_nothing(self, fold, tmp_path):
        single = tmp_path / "single"
        fold.export_to(str(single))
        next(path for path in (single / "data").iterdir()).write_bytes(b"")
        with pytest.raises(CorruptData):
            bootstrap(str(single), str(tmp_path / "dest"), AppendLogStore)
        assert not (tmp_path / "dest").exists()

    def test_a_slot_without_its_log_is_refused(self, source, tmp_path):
        with pytest.raises(InvalidInput, match="pass log="):
            bootstrap(source, str(tmp_path / "dest"), AppendLogStore, slot="new")


class TinyKind:
    open = staticmethod(TinyStore)
    import_from = staticmethod(TinyStore.import_from)


class TestSlots:
    def test_a_missing_slot_is_created_at_the_snapshots_cursor(self, source, log, tmp_path):
        bootstrap(source, str(tmp_path / "dest"), AppendLogStore, log=log, slot="new").close()
        assert [(slot.name, slot.position) for slot in log.slots.list()] == [("new", 8)]

    def test_a_slot_that_holds_it_already_is_left_unchanged(self, source, log, tmp_path):
        log.slots.create("new", 3)
        claimed = log.slots.claim("new", "me")
        bootstrap(source, str(tmp_path / "dest"), AppendLogStore, log=log, slot="new").close()
        claimed.touch()
        assert log.slots.get("new").position == 3

    def test_a_slot_that_is_past_the_snapshot_is_put_back(self, source, log, tmp_path):
        append(log, (b"z", b"z"))
        log.slots.create("new", 9)
        bootstrap(source, str(tmp_path / "dest"), AppendLogStore, log=log, slot="new").close()
        assert log.slots.get("new").position == 8

    def test_the_pin_comes_before_the_snapshot_is_read(self, artifacts, fold, log, tmp_path):
        line = FaultyStore(PlainStore())
        published = Artifacts(line)
        published.export(fold, scratch=str(tmp_path / "scratch"))
        append(log, (b"z", b"z"))
        pinned = []
        line.hook(lambda call: pinned.append(log.slots.floor()) if "payloads" in call.path else None)
        bootstrap(published, str(tmp_path / "dest"), AppendLogStore, log=log, slot="new").close()
        assert set(pinned) == {8}

    def test_a_snapshot_older_than_what_the_log_retains_says_what_to_do(self, source, log, tmp_path):
        append(log, (b"z", b"z"))
        log.trim(9)
        log.slots.create("new", 9)
        for slot in (None, "new", "absent"):
            with pytest.raises(CursorExpired, match=r"retains records from offset 9 on.* Publish a snapshot"):
                bootstrap(source, str(tmp_path / "dest"), AppendLogStore, log=log, slot=slot)
        assert not (tmp_path / "dest").exists()
        assert log.slots.get("new").position == 9

    def test_an_invalidated_slot_is_healed_and_its_consumer_follows_on(self, fold, artifacts, tmp_path):
        clock = ManualClock()
        log = sl.open(
            f"file://{tmp_path}/log",
            create=True,
            retention="bytes:1KiB",
            limits=SlotLimits(lag_bytes=3000),
            env=Env(clock=clock),
        )
        for number in range(6):
            append(log, (b"a", b"%d" % number * 400))
        lagging = AppendLogStore.open(str(tmp_path / "lagging"))
        follow(log, lagging, "lagging", upto=2)
        ahead = AppendLogStore.open(str(tmp_path / "ahead"))
        follow(log, ahead, "ahead", upto="end")
        artifacts.export(ahead, scratch=str(tmp_path / "scratch"))
        append(log, (b"later", b"1"))
        log.trim()
        assert log.bounds().first > 2
        with pytest.raises((CursorExpired, SlotInvalid)):
            follow(log, lagging, "lagging", upto="end")
        lagging.close()
        with bootstrap(artifacts, str(tmp_path / "lagging"), AppendLogStore, log=log, slot="lagging") as healed:
            assert healed.position().cursor.next == 6
            follow(log, healed, "lagging", upto="end")
            assert healed.get(b"later") == b"1"
        assert all(slot.invalid is None for slot in log.slots.list())

    def test_pinning_copes_with_another_that_creates_the_slot_at_once(self, log, monkeypatch):
        create = log.slots.create

        def raced(name: str, position: int, **options):
            create(name, 8)
            return create(name, position, **options)

        monkeypatch.setattr(log.slots, "create", raced)
        SlotPin(log, "new", SYSTEM).hold(log.start().at(3), is_stored=True)
        assert log.slots.get("new").position == 3


class TestWhatIsThere:
    def test_a_store_whose_cursor_is_retained_is_reused_and_reported(self, source, log, tmp_path, caplog):
        dest = str(tmp_path / "dest")
        mine = AppendLogStore.open(dest)
        follow(log, mine, upto=4)
        mine.close()
        with (
            caplog.at_level(logging.INFO),
            bootstrap(source, dest, AppendLogStore, log=log, slot="new") as store,
        ):
            assert store.position().cursor.next == 4
        assert "is used as it is" in caplog.text
        assert log.slots.get("new").position == 4

    def test_the_slot_that_a_killed_bootstrap_has_left_no_longer_expires(self, source, log, tmp_path):
        dest = str(tmp_path / "dest")
        mine = AppendLogStore.open(dest)
        follow(log, mine, upto=4)
        mine.close()
        log.slots.create("new", 4, lifetime=NEWCOMER_SECONDS)
        bootstrap(source, dest, AppendLogStore, log=log, slot="new").close()
        assert (log.slots.get("new").position, log.slots.get("new").expires) == (4, None)

    def test_a_store_that_is_too_old_is_replaced(self, source, log, tmp_path, caplog):
        dest = str(tmp_path / "dest")
        mine = AppendLogStore.open(dest)
        follow(log, mine, upto=4)
        mine.close()
        log.trim(6)
        with caplog.at_level(logging.WARNING), bootstrap(source, dest, AppendLogStore, log=log) as store:
            assert store.position().cursor.next == 8
        assert "too old to resume" in caplog.text
        assert not [name for name in names(tmp_path) if name.startswith(".")]

    def test_a_store_that_is_too_old_stays_if_there_is_nothing_better(self, artifacts, log, tmp_path):
        dest = str(tmp_path / "dest")
        mine = AppendLogStore.open(dest)
        follow(log, mine, upto=4)
        mine.close()
        log.trim(6)
        with pytest.raises(NotFound):
            bootstrap(artifacts, dest, AppendLogStore, log=log)
        with AppendLogStore.open(dest) as store:
            assert store.position().cursor.next == 4

    def test_a_store_that_is_too_old_comes_back_if_the_import_fails(self, source, log, tmp_path):
        dest = str(tmp_path / "dest")
        mine = AppendLogStore.open(dest)
        follow(log, mine, upto=4)
        mine.close()
        log.trim(6)

        class Failing:
            open = staticmethod(AppendLogStore.open)

            @staticmethod
            def import_from(snapshot, dest):
                assert Path(snapshot).exists()
                assert not Path(dest).exists()
                raise StorageError("no")

        with pytest.raises(StorageError, match="no"):
            bootstrap(source, dest, Failing, log=log)
        with AppendLogStore.open(dest) as store:
            assert store.position().cursor.next == 4
        assert not [name for name in names(tmp_path) if name.startswith(".")]

    def test_a_store_of_another_log_is_refused_and_stays(self, source, log, tmp_path):
        dest, other = str(tmp_path / "dest"), MemoryLog()
        append(other, (b"a", b"1"))
        mine = AppendLogStore.open(dest)
        follow(other, mine, upto="end")
        mine.close()
        with pytest.raises(Diverged):
            bootstrap(source, dest, AppendLogStore, log=log)
        with AppendLogStore.open(dest) as store:
            assert store.position().cursor == other.start().at(1)

    def test_a_store_without_cursor_or_in_the_middle_of_a_resync_is_replaced(self, source, log, tmp_path):
        AppendLogStore.open(str(tmp_path / "new")).close()
        half = AppendLogStore.open(str(tmp_path / "half"))
        follow(log, half, upto=4)
        half.begin_resync(log.log_id)
        half.close()
        for name in ("new", "half"):
            with bootstrap(source, str(tmp_path / name), AppendLogStore, log=log) as store:
                assert store.position().cursor.next == 8

    def test_a_store_is_replaced_when_asked(self, source, log, tmp_path):
        dest = str(tmp_path / "dest")
        mine = AppendLogStore.open(dest)
        follow(log, mine, upto=4)
        mine.close()
        with bootstrap(source, dest, AppendLogStore, log=log, replace=True) as store:
            assert store.position().cursor.next == 8

    def test_a_death_at_any_operation_is_repaired_by_bootstrapping_again(self, tmp_path):
        store = tiny(str(tmp_path / "veteran"), 5, a="1")
        published = Artifacts(PlainStore())
        published.export(store, scratch=str(tmp_path / "scratch"))
        number = 0
        while True:
            place = tmp_path / str(number)
            place.mkdir()
            tiny(str(place / "dest"), 2, a="0")
            disk = DyingDisk(number, dies=True)
            source = Artifacts(published._store, env=Env(disk=disk), workers=1)
            try:
                bootstrap(source, str(place / "dest"), TinyKind, replace=True, env=Env(disk=disk))
            except (Crash, StorageError, AlreadyExists):
                found = bootstrap(published, str(place / "dest"), TinyKind, replace=True)
                assert found.at == cursor(5)
                assert names(place) == {"dest"}
                number += 1
            else:
                break
        assert number > 20


def test_an_empty_apply_leaves_a_cursor_that_a_snapshot_can_be_taken_of(tmp_path):
    log = MemoryLog()
    with AppendLogStore.open(str(tmp_path / "a")) as store:
        store.apply(READ_SCHEMA.empty_table(), since=log.start(), upto=log.start())
        store.export_to(str(tmp_path / "snap"))
    with bootstrap(str(tmp_path / "snap"), str(tmp_path / "b"), AppendLogStore, log=log) as copy:
        assert copy.position().cursor == log.start()


@pytest.mark.parametrize("kind", [AppendLogStore, RocksStore])
def test_a_newcomer_watches_on_from_its_snapshot_where_the_log_begins_no_earlier(kind, log, artifacts, tmp_path):
    veteran = kind.open(str(tmp_path / "old"), sync=False)
    follow(log, veteran, upto="end")
    assert artifacts.export(veteran, scratch=str(tmp_path)).outcome == "published"
    veteran.close()
    log.trim(log.bounds().next)
    append(log, (b"late", b"1"), (b"a", b"last"))
    seen, stop = [], threading.Event()
    newcomer = bootstrap(artifacts, str(tmp_path / "new"), kind, log=log, slot="newcomer")
    end = sl.watch_applied(
        LogKeyValue(log), seen.extend, store=newcomer, stop=stop, on_applied=lambda at: at == log.end() and stop.set()
    )
    assert end == log.end()
    assert [update.key for update in seen] == [b"late", b"a"]
    assert dict(newcomer.range()) == {b"a": b"last", b"late": b"1", **{b"k%d" % number: b"x" for number in range(4)}}
    assert log.slots.get("newcomer").position == 8
    newcomer.close()


def test_a_watcher_of_a_trimmed_log_has_to_bootstrap_and_its_store_is_unchanged(log, fold, artifacts, tmp_path):
    late = AppendLogStore.open(str(tmp_path / "late"), sync=False)
    follow(log, late, upto=2)
    before = late.position(), list(late.range())
    artifacts.export(fold, scratch=str(tmp_path))
    log.trim(log.bounds().next)
    seen = []
    supervisor = sl.Supervisor(LogKeyValue(log), seen.extend, store=late, reader=LogKeyValue(log))
    with pytest.raises(CursorExpired, match="snapshot"):
        supervisor.run()
    assert supervisor.state().phase == "failed"
    assert (late.position(), list(late.range())) == before
    assert seen == []
    late.close()
    healed = bootstrap(artifacts, str(tmp_path / "late"), AppendLogStore, log=log)
    assert list(healed.range()) == list(fold.range())
    assert healed.position() == fold.position()
    healed.close()


def test_a_store_that_cannot_be_pinned_is_closed_again(log, fold, artifacts, monkeypatch):
    fold.close()

    def refuse(name, position, **options):
        raise StorageError("The slots cannot be written now.")

    monkeypatch.setattr(log.slots, "create", refuse)
    with pytest.raises(StorageError, match="cannot be written now"):
        bootstrap(artifacts, fold._folder, AppendLogStore, log=log, slot="newcomer")
    AppendLogStore.open(fold._folder).close()  # nobody holds it


def test_a_store_whose_place_is_trimmed_before_it_is_pinned_is_replaced(log, fold, artifacts, tmp_path, monkeypatch):
    follow(log, late := AppendLogStore.open(str(tmp_path / "late"), sync=False), upto=2)
    late.close()
    artifacts.export(fold, scratch=str(tmp_path))
    real = log.slots.create

    def trim_first(name, position, **options):
        log.trim(log.bounds().next)
        return real(name, position, **options)

    monkeypatch.setattr(log.slots, "create", trim_first)
    newcomer = bootstrap(artifacts, str(tmp_path / "late"), AppendLogStore, log=log, slot="newcomer")
    assert newcomer.position() == fold.position()
    newcomer.close()
