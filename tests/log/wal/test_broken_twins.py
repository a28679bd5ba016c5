"""Broken twins of the write-ahead log: each is caught by the tests of the real one."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from strandline.errors import CorruptData, StorageError, StrandlineError
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import data_name
from strandline.log.wal.recover import repair
from strandline.log.wal.recover import scan_tail as examine
from strandline.log.wal.slots import WalSlots
from strandline.log.wal.write.committer import GroupCommitter
from strandline.log.wal.write.groups import ValueRun
from strandline.log.wal.write.journal import Journal
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.testing.simdisk import CrashMode, SimulatedDisk, crash_everywhere
from tests.contracts.logs.batches import SOON
from tests.log.wal.workload import FOLDER, HeldSyncs, check, open_on, payload, values, workload


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


def explore():
    crash_everywhere(
        workload, check, modes=(CrashMode.NOTHING, CrashMode.PREFIX, CrashMode.SCRAPS), seeds=(0,), limit=4
    )


# --- what a crash shows ----------------------------------------------------------------------------------------


def test_a_twin_that_does_not_sync_the_folder_is_caught(monkeypatch):
    monkeypatch.setattr(Journal, "sync", lambda self: self._file.sync())
    with pytest.raises((AssertionError, CorruptData), match=r"acknowledged|durable"):
        explore()


def test_a_twin_that_acknowledges_before_the_sync_is_caught(monkeypatch):
    def only_the_name(self):
        if self._new:
            self._disk.sync_folder(self._folder)
            self._new = False

    monkeypatch.setattr(Journal, "sync", only_the_name)
    with pytest.raises((AssertionError, CorruptData), match=r"acknowledged|durable"):
        explore()


@pytest.mark.matrix
def test_a_twin_that_takes_damage_above_the_mark_for_corruption_is_caught(monkeypatch):
    def refuse(check, *_, **__):
        return [(problem._replace(why="it is not whole"), False) for problem in check.problems]

    monkeypatch.setattr(examine, "tail_problems", refuse)
    with pytest.raises(CorruptData, match="not whole"):
        explore()


def test_a_twin_that_takes_damage_below_the_mark_for_a_torn_tail_is_caught(monkeypatch):
    def lose_the_middle():
        disk = SimulatedDisk()
        log = open_on(disk, roll_bytes=1 << 20)
        for offset in range(6):
            log.append_value(payload(offset)).result()
        frame = log.plan(log.start())[3].frame
        disk.damage(frame.path, frame.position + 70, b"?")
        disk.kill()
        with pytest.raises(CorruptData, match=f"byte {frame.position}"):
            open_on(disk)

    lose_the_middle()
    monkeypatch.setattr(examine, "tail_problems", lambda *_, **__: ())
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        lose_the_middle()


@pytest.mark.matrix
def test_a_twin_that_serves_the_tail_without_syncing_it_is_caught(monkeypatch):
    def only_cut(folder, found, *, disk):
        with contextlib.closing(disk.open_append(f"{folder}/{data_name(found.place.first)}")) as file:
            file.cut(found.place.size)

    monkeypatch.setattr(repair, "_settle", only_cut)
    with pytest.raises((AssertionError, CorruptData)):
        crash_everywhere(workload, check, modes=(CrashMode.KILL,))


@pytest.mark.matrix
def test_a_twin_that_trims_before_the_slots_are_written_is_caught(monkeypatch):
    def lazily(self, start, *, beyond_slots):
        reached = min(start, self.floor() if self.floor() is not None else start)
        self._start, self._dirty = max(self._start, reached), True
        return self._start

    monkeypatch.setattr(WalSlots, "retain", lazily)
    with pytest.raises((AssertionError, CorruptData, StrandlineError)):
        explore()


# --- a torn tail of a few bytes --------------------------------------------------------------------------------


def leave_stray_bytes(stray):
    """A crash left a few bytes after the last frame; the log continues, and loses no record."""
    disk = SimulatedDisk()
    log = open_on(disk)
    for offset in range(3):
        log.append_value(payload(offset)).result()
    log.close()
    file = disk.open_append(f"{FOLDER}/{data_name(0)}")
    file.write([stray])
    file.sync()
    log = open_on(disk)
    log.append_value(payload(3)).result()
    log.close()
    log = open_on(disk)
    assert values(log) == {offset: payload(offset) for offset in range(4)}
    return disk


@pytest.mark.parametrize("stray", [b"R", b"RD", b"RDL", b"\x00", b"\x00\x00\x00", b"xyz", b"RDLW", b"RDLW\x04"])
def test_a_torn_tail_of_a_few_bytes_is_cut_and_kept_aside(stray):
    disk = leave_stray_bytes(stray)
    assert [data for path, data in disk.files().items() if path.endswith(".torn")] == [stray]


@pytest.mark.parametrize("stray", [b"R", b"RD", b"RDL"])
def test_a_twin_that_takes_a_torn_tail_of_three_bytes_for_the_end_is_caught(monkeypatch, stray):
    honest = repair._settle

    def all_but_a_few(folder, found, *, disk):
        found.place.size = disk.size(f"{folder}/{data_name(found.place.first)}")
        honest(folder, found, disk=disk)

    monkeypatch.setattr(repair, "_settle", all_but_a_few)
    with pytest.raises(StrandlineError):
        leave_stray_bytes(stray)


# --- races -----------------------------------------------------------------------------------------------------


def append_at_once(folder, monkeypatch, add=None):
    """Two threads append at the same time; each gets an offset of its own, and both records are there."""
    meeting = threading.Barrier(2)
    if add is not None:
        monkeypatch.setattr(GroupCommitter, "add", add(meeting))
    with WalLog.open(str(folder)) as log, ThreadPoolExecutor(2) as pool:

        def append(value):
            if add is None:
                meeting.wait(SOON)
            return log.append_value(value).result(SOON).first

        assert sorted(pool.map(append, [b"a", b"b"])) == [0, 1]
        assert sorted(values(log).values()) == [b"a", b"b"]


def test_a_twin_that_gives_the_offset_before_the_lock_is_caught(tmp_path, monkeypatch):
    append_at_once(tmp_path / "honest", monkeypatch)

    def early(meeting):
        def add_early(self, value):
            first = self.next
            meeting.wait(SOON)
            with self._lock:
                group = self._group
                run = ValueRun(first, self.term, [value], [0])
                group.items.append(run)
                self.next = first + 1
                if self._asleep:
                    self._asleep = False
                    self._wake.release()
            return group, first

        return add_early

    with pytest.raises((AssertionError, StrandlineError)):
        append_at_once(tmp_path / "twin", monkeypatch, early)


def trim_beside_an_append(folder):
    """Everything that is durable is trimmed while one more record is being synced; that one stays."""
    disk = HeldSyncs(DISK)
    log = WalLog.open(str(folder), env=Env(disk=disk))
    with ThreadPoolExecutor(2) as pool:
        for offset in range(3):
            log.append_value(payload(offset)).result(SOON)
        disk.hold()
        appended = pool.submit(lambda: log.append_value(payload(3)).result(SOON))
        assert disk.waiting.wait(SOON)
        trimmed = pool.submit(log.trim, 3)
        with contextlib.suppress(TimeoutError):
            trimmed.result(0.3)  # as far as it gets by itself: not through the sync, unless it takes no lock
        disk.release()
        assert trimmed.result(SOON) == 3
        assert appended.result(SOON).first == 3
    log.close()
    with WalLog.open(str(folder)) as log:
        assert values(log) == {3: payload(3)}, "a record that was acknowledged is gone"


@pytest.mark.matrix
def test_a_twin_that_trims_without_the_lock_is_caught(tmp_path, monkeypatch):
    trim_beside_an_append(tmp_path / "honest")
    monkeypatch.setattr(GroupCommitter, "exclusively", lambda _: contextlib.nullcontext())
    with pytest.raises((AssertionError, StrandlineError)):
        trim_beside_an_append(tmp_path / "twin")


def test_a_twin_that_continues_after_a_failed_sync_is_caught(monkeypatch):
    def append_after_a_failure():
        disk = SimulatedDisk()
        log = open_on(disk)
        log.append_value(payload(0)).result()
        calls = len(disk.calls)
        disk.interrupt(calls + 1, StorageError("the sync fails"))
        with pytest.raises(StrandlineError):
            log.append_value(payload(1)).result()
        promised = 1
        with contextlib.suppress(StrandlineError):
            promised = log.append_value(payload(2)).result().first + 1
        disk.crash(CrashMode.NOTHING)
        assert open_on(disk).bounds().next >= promised, "what was acknowledged after a failed sync is gone"

    append_after_a_failure()

    def carelessly(self, group, unsettled=None):
        try:
            self._steps.finish(self._steps.write(group.items))
        except StorageError:
            self.next = group.items[0].first
            group.settle(lambda: StorageError("the sync failed"))
            return False
        return True

    monkeypatch.setattr(GroupCommitter, "_commit_group", carelessly)
    with pytest.raises((AssertionError, CorruptData), match="acknowledged"):
        append_after_a_failure()
