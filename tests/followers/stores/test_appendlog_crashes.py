"""The append-log store on a disk that crashes, fails, fills and rots: at every operation, in every way."""

from __future__ import annotations

import logging
from uuid import UUID

import pytest

from strandline.errors import CorruptData, NotFound, StorageError, UnsupportedVersion
from strandline.followers.stores import append_log_file as foldfile
from strandline.followers.stores.append_log import AppendLogStore
from strandline.model.cursor import Cursor
from strandline.snapshots.sealed import read_snapshot
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.keyed_stores import content
from strandline.testing.simdisk import (
    CrashMode,
    SimulatedDisk,
    crash_everywhere,
    fail_everywhere,
    fill_everywhere,
)
from strandline.testing.sinks import DELETE, LOG, changes
from tests.disk_doubles import damage_everywhere
from tests.matrix_cases import sampled

OTHER = UUID(int=2)
FOLDER, FILE = "/fold", "/fold/fold.log"
LONG = bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Do not log warnings: each of thousands of torn tails would be one."""
    caplog.set_level(logging.ERROR)


def open_on(disk, *, sync=True, folder=FOLDER, compact_after=10 << 20):
    return AppendLogStore.open(
        folder, sync=sync, compact_after=compact_after, env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(1))
    )


def state(store):
    return content(store), store.position()


def apply(store, first, *rows, log=LOG):
    cursor = Cursor(log, first)
    store.apply(changes(first, *rows), since=cursor, upto=cursor.at(first + len(rows)))


WRITES = [
    lambda store: apply(store, 0, (b"a", b"1"), (b"b", b"2")),
    lambda store: apply(store, 2, (b"a", DELETE), (b"c", LONG[:300])),
    lambda store: apply(store, 4, (b"d", LONG)),
    lambda store: store.begin_resync(OTHER),
    lambda store: store.resync(changes(0, (b"b", DELETE), (b"e", b"5"))),
    lambda store: store.end_resync(Cursor(OTHER, 9)),
    lambda store: apply(store, 9, (b"f", b"6"), log=OTHER),
]
COMPACTED = (2, 5)


def truth():
    """The state of the store after none, one, two, ... of the writes."""
    store = open_on(SimulatedDisk())
    states = [state(store)]
    for write in WRITES:
        write(store)
        states.append(state(store))
    return states


STATES = truth()


class Fold:
    """The writes in order, from the store's cursor on; counts how many were begun and how many are promised.

    With ``sync`` a write is promised when it returns; without, when a compaction, a closing or an opening does.
    """

    def __init__(self, *, sync=True, retry=False, on=lambda disk: disk, **options):
        self.sync, self.retry, self.on, self.options = sync, retry, on, options

    def open(self, disk):
        return open_on(self.on(disk), sync=self.sync, **self.options)

    def work(self, disk, notes):
        store = self._persist(lambda: self.open(disk))
        done = STATES.index(state(store))
        notes.append(("promised", done))
        for number, write in enumerate(WRITES[done:], done + 1):
            notes.append(("begun", number))
            self._persist(lambda write=write: write(store), lambda number=number: state(store) == STATES[number - 1])
            assert state(store) == STATES[number]
            if self.sync:
                notes.append(("promised", number))
            if number in COMPACTED:
                self._persist(store.compact, lambda number=number: state(store) == STATES[number])
                notes.append(("promised", number))
        store.close()
        if not self.retry:  # a closing that fails tells the log only
            notes.append(("promised", len(WRITES)))

    def _persist(self, call, unchanged=lambda: True):
        """Call it; if it fails, see that nothing changed, and call it once more."""
        try:
            return call()
        except StorageError:
            if not self.retry:
                raise
            assert unchanged()
            return call()

    def check(self, disk, notes):
        store = self.open(disk)
        # Data and cursor are compared together: it holds what some number of first writes made of it.
        kept = STATES.index(state(store))
        assert kept >= max((number for what, number in notes if what == "promised"), default=0), "a promise was broken"
        assert kept <= max((number for what, number in notes if what == "begun"), default=0), "nobody wrote that"
        # It was shown, so it must stay, whoever wrote it: opening it has made it durable.
        notes.append(("promised", kept))


def told(capsys, name, explored):
    with capsys.disabled():
        print(f"\n{name}: {explored}")


# --- crashes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", sampled(15))
@pytest.mark.parametrize("sync", [True, False], ids=["synced", "unsynced"])
def test_a_crash_at_any_disk_operation_leaves_a_prefix_of_the_writes_with_all_that_was_promised(capsys, sync, every):
    fold = Fold(sync=sync)
    explored = crash_everywhere(fold.work, fold.check, limit=8 if sync else 4, every=every)
    told(capsys, f"append-log, {sync=}", explored)
    assert explored.states > 150 / every


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(15))
def test_a_crash_while_a_crash_is_repaired_loses_nothing_either(capsys, every):
    fold = Fold()
    modes = (CrashMode.KILL, CrashMode.NOTHING)
    explored = crash_everywhere(fold.work, fold.check, modes=modes, again=9, every=every)
    told(capsys, "append-log, crashes in repairs", explored)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sync", [True, False], ids=["synced", "unsynced"])
def test_a_crash_while_a_crash_is_repaired_loses_nothing_in_any_mode(capsys, sync):
    fold = Fold(sync=sync)
    explored = crash_everywhere(fold.work, fold.check, seeds=range(3), limit=12, again=9)
    told(capsys, f"append-log, crashes in repairs in every mode, {sync=}", explored)


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(15))
def test_a_crash_anywhere_in_a_fold_that_compacts_all_the_time_loses_nothing(capsys, every):
    fold = Fold(compact_after=0)
    explored = crash_everywhere(fold.work, fold.check, seeds=(0,), limit=2, every=every)
    told(capsys, "append-log, compacting", explored)


# --- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", sampled(15))
@pytest.mark.parametrize("sync", [True, False], ids=["synced", "unsynced"])
def test_a_failure_at_any_disk_operation_costs_a_retry_and_nothing_else(capsys, sync, every):
    fold = Fold(sync=sync, retry=True)
    explored = fail_everywhere(fold.work, fold.check, seeds=(0,), limit=2, then=3 if sync else 0, every=every)
    told(capsys, f"append-log, failures, {sync=}", explored)


@pytest.mark.parametrize("every", sampled(15))
def test_a_store_that_is_given_up_after_a_failure_holds_what_was_promised(capsys, every):
    fold = Fold()
    explored = fail_everywhere(fold.work, fold.check, seeds=(0,), limit=4, every=every)
    told(capsys, "append-log, given up", explored)


@pytest.mark.parametrize("every", sampled(15))
def test_a_disk_that_fills_at_any_byte_costs_nothing_but_room(capsys, every):
    fold = Fold()
    explored = fill_everywhere(fold.work, fold.check, step=509 * every, seeds=(0,), limit=4)
    told(capsys, "append-log, full", explored)


# --- damage ----------------------------------------------------------------------------------------------------


def refuses_or_holds_all(fold):
    """A check of a damaged store: it is refused, or has all but the last write, which a crash may have torn."""

    def check(disk, notes):
        before = disk.files()
        try:
            store = fold.open(disk)
        except (CorruptData, UnsupportedVersion):
            assert disk.files() == before
        else:
            assert STATES.index(state(store)) >= len(WRITES) - 1

    return check


@pytest.mark.parametrize("every", sampled(15))
def test_rot_anywhere_is_refused_and_never_cut_off_unless_it_may_be_a_torn_tail(capsys, every):
    fold = Fold()
    explored = damage_everywhere(fold.work, refuses_or_holds_all(fold), step=16 * every, piece=b"\xa5" * 5)
    told(capsys, "append-log, damage", explored)


# --- snapshots -------------------------------------------------------------------------------------------------


class Handing:
    """Seals a snapshot of a store and imports it into another, each if it does not exist yet."""

    def work(self, disk, notes):
        store = open_on(disk)
        if not store.position().cursor:
            apply(store, 0, (b"a", b"1"), (b"b", LONG[:700]))
        if not self.sealed(disk):
            store.export_to("/snapshots/1")
            notes.append("sealed")
        if not self.made(disk):
            AppendLogStore.import_from("/snapshots/1", "/copies/1", env=Env(disk=disk, chance=SeededChance(7)))
            notes.append("made")

    def sealed(self, disk):
        try:
            return read_snapshot("/snapshots/1", env=Env(disk=disk))
        except NotFound:
            return None

    def made(self, disk):
        return bool(disk.scan("/copies/1"))

    def check(self, disk, notes):
        if "sealed" in notes:
            assert self.sealed(disk)
        if "made" in notes:
            assert self.made(disk)
        if self.made(disk):
            store = open_on(disk, folder="/copies/1")
            assert state(store) == ({b"a": b"1", b"b": LONG[:700]}, STATES[1][1])
            notes.append("made")


@pytest.mark.parametrize("every", sampled(15))
def test_a_crash_anywhere_leaves_a_snapshot_and_what_is_made_of_it_whole_or_not_at_all(capsys, every):
    handing = Handing()
    modes = (CrashMode.KILL, CrashMode.NOTHING, CrashMode.PREFIX, CrashMode.SECTORS)
    explored = crash_everywhere(handing.work, handing.check, modes=modes, seeds=(0,), limit=3, every=every)
    told(capsys, "append-log, snapshots", explored)


# --- broken twins ----------------------------------------------------------------------------------------------


def caught(explore, workload, check, **options):
    with pytest.raises((AssertionError, CorruptData)) as broken:
        explore(workload, check, **options)
    assert "The disk: " in broken.value.__notes__[0]
    return broken.value


@pytest.mark.matrix
def test_a_twin_that_acknowledges_before_it_syncs_is_caught():
    class Hasty(Fold):
        def open(self, disk):
            return open_on(disk, sync=False)

    fold = Hasty(sync=True)
    for mode in (CrashMode.NOTHING, CrashMode.TORN_512, CrashMode.SCRAPS):
        caught(crash_everywhere, fold.work, fold.check, modes=[mode])


class _Passing:
    """A disk that forwards all calls."""

    def __init__(self, disk):
        self._disk = disk
        self._renamed = False

    def __getattr__(self, name):
        return getattr(self._disk, name)


class _ForgetsRenames(_Passing):
    """Does not sync a folder in which a file was just renamed."""

    def rename(self, source, target):
        self._disk.rename(source, target)
        self._renamed = True

    def sync_folder(self, path):
        if not self._renamed:
            self._disk.sync_folder(path)
        self._renamed = False


def test_a_twin_that_does_not_sync_the_folder_after_the_rename_of_a_compaction_is_caught():
    fold = Fold(on=_ForgetsRenames)
    for mode in (CrashMode.NOTHING, CrashMode.PREFIX, CrashMode.PAGES):
        caught(crash_everywhere, fold.work, fold.check, modes=[mode])


class _ForgetsFolders(_Passing):
    def sync_folder(self, path):
        pass


def test_a_twin_that_never_syncs_its_folder_is_caught():
    fold = Fold(on=_ForgetsFolders)
    caught(crash_everywhere, fold.work, fold.check, modes=[CrashMode.NOTHING])


class _ForgetsParents(_Passing):
    def sync_folder(self, path):
        if path == FOLDER:
            self._disk.sync_folder(path)


def test_a_twin_that_does_not_sync_the_name_of_a_folder_that_it_found_is_caught():
    """Who made the folder died before the name was durable; who found it there acknowledged; then the power failed."""
    fold = Fold(on=_ForgetsParents)
    where = caught(crash_everywhere, fold.work, fold.check, modes=[CrashMode.KILL, CrashMode.NOTHING], again=9)
    assert "unsynced call 0 (make_folders /fold), kill; then" in where.__notes__[0]


def test_a_twin_that_shows_what_it_found_without_syncing_it_is_caught(monkeypatch):
    """It takes two crashes: the process dies and its write is only cached, the next one shows it, the power fails."""

    class _Hasty(AppendLogStore):
        def _repair_file(self):
            self._adopt()
            self._file = self._env.disk.open_append(self._path)
            self._cut(self._file)
            self._env.disk.sync_folder(self._folder)
            return self._file

    monkeypatch.setitem(globals(), "AppendLogStore", _Hasty)
    fold = Fold()
    assert "kill" in caught(crash_everywhere, fold.work, fold.check, modes=[CrashMode.KILL]).__notes__[0]


class _Insists(_Passing):
    """Repeats a failed sync, and trusts its success."""

    def open_append(self, path):
        file = self._disk.open_append(path)
        sync = file.sync

        def insist():
            try:
                sync()
            except StorageError:
                sync()

        file.sync = insist
        return file


@pytest.mark.matrix
def test_a_twin_that_syncs_again_after_a_failure_and_believes_it_is_caught():
    fold = Fold(on=_Insists, retry=True)
    caught(fail_everywhere, fold.work, fold.check)


def test_a_twin_that_cuts_without_looking_past_the_damage_is_caught(monkeypatch):
    monkeypatch.setattr(foldfile, "_judge", lambda *_: None)
    fold = Fold()
    caught(damage_everywhere, fold.work, refuses_or_holds_all(fold), step=16, piece=b"\xa5" * 5)
