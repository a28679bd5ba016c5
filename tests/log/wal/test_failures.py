"""The write-ahead log on a disk that refuses writes, is full, or fails to sync."""

from __future__ import annotations

import pytest

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import (
    DiskFull,
    LogFailed,
    StorageError,
)
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Bounds
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.testing.simdisk import CrashMode, SimulatedDisk
from tests.contracts.logs import append, content, records, writer_named
from tests.contracts.logs.batches import SOON
from tests.disk_doubles import FullDisk, _PassingDisk
from tests.log.wal.workload import HeldSyncs, open_on, payload


class FailingDisk(_PassingDisk):
    """A disk whose next operation of one kind, on files of frames, fails."""

    def __init__(self) -> None:
        super().__init__(DISK)
        self.fails: str | None = None
        self.error: Exception = StorageError("The disk refused it: Input/output error.")

    def open_append(self, path):
        return _FailingFile(super().open_append(path), self) if path.endswith(".log") else super().open_append(path)


class _FailingFile:
    def __init__(self, inner, disk) -> None:
        self._inner, self._disk = inner, disk

    def __getattr__(self, name):
        def call(*args):
            if self._disk.fails == name:
                raise self._disk.error
            return getattr(self._inner, name)(*args)

        return call


class Turnstile:
    """A lock that is always free, and reports who checks it."""

    def __init__(self, locked) -> None:
        self.locked = locked

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class TestFailures:
    @pytest.mark.parametrize("operation", ["write", "sync"])
    def test_a_failure_poisons_the_log_until_it_is_opened_again(self, tmp_path, operation):
        disk = FailingDisk()
        log = WalLog.open(str(tmp_path), env=Env(disk=disk))
        log.append_value(b"a").result(SOON)
        disk.fails = operation
        with pytest.raises(LogFailed, match="open it again") as caught:
            log.append_value(b"b").result(SOON)
        assert caught.value.__cause__ is disk.error
        disk.fails = None
        for refused in (lambda: log.append_value(b"c"), lambda: append(log, b"c", number=0)):
            with pytest.raises(LogFailed, match=r"Input/output"):
                refused()
        # What was durable before is still to be had, and nothing else.
        assert content(log) == [(0, b"a")]
        log.close()
        with WalLog.open(str(tmp_path)) as log:
            assert log.bounds().next in (1, 2)  # it may have been stored: nobody was told
            log.append_value(b"d").result(SOON)

    def test_every_pending_append_gets_the_error(self, tmp_path):
        disk = HeldSyncs(FailingDisk())
        log = WalLog.open(str(tmp_path), env=Env(disk=disk))
        disk.hold()
        first = log.append_value(b"a")
        assert disk.waiting.wait(SOON)
        later = [log.append_value(b"%d" % number) for number in range(20)]
        batch = log.append(records(b"x"), writer=writer_named(1), number=0)
        disk._inner.fails = "sync"
        disk.release()
        for handle in (first, *later, batch):
            with pytest.raises(LogFailed):
                handle.result(SOON)
        assert log.bounds() == Bounds(0, 0)
        assert log.plan(log.start()) == []

    def test_a_full_disk_is_a_clear_error_and_the_log_continues_once_there_is_room(self, tmp_path):
        disk = FullDisk(DISK, 1 << 20)
        wal = WriteAheadLog.open(tmp_path, env=Env(disk=disk))
        acknowledged = 0
        with pytest.raises(DiskFull, match="make room"):  # noqa: PT012 - it is the last of many
            while True:
                acknowledged = wal.append(bytes(10_000))
        with pytest.raises(DiskFull, match="make room, and open it again"):
            wal.append(b"x")
        wal.close()
        with pytest.raises(DiskFull):
            WriteAheadLog.open(tmp_path, env=Env(disk=FullDisk(DISK, 0)))
        with WriteAheadLog.open(tmp_path) as wal:
            assert wal.current == acknowledged
            assert wal.append(b"x") == acknowledged + 1
            assert len(wal.read_since(0)) == acknowledged + 1

    def test_an_error_that_is_not_the_disk_s_is_raised_too(self, tmp_path, monkeypatch):
        log = WalLog.open(str(tmp_path))

        def broken(items):
            raise MemoryError("no memory")

        monkeypatch.setattr(log._committer._steps, "write", broken)
        with pytest.raises(LogFailed, match="no memory"):
            log.append_value(b"a").result(SOON)
        log.close()

    def test_a_failed_sync_is_not_believed_later_even_if_the_bytes_can_be_read(self):
        disk = SimulatedDisk()
        log = open_on(disk)
        log.append_value(payload(0)).result()
        disk.interrupt(len(disk.calls) + 1, StorageError("the sync fails"))
        with pytest.raises(LogFailed):
            log.append_value(payload(1)).result()
        disk.kill()  # only the process: what it wrote can still be read, and no sync would make it durable
        log = open_on(disk)
        seen = log.bounds().next
        disk.crash(CrashMode.NOTHING)
        assert open_on(disk).bounds().next == seen

    def test_closing_raises_what_no_caller_has_waited_for(self, tmp_path):
        disk = FailingDisk()
        log = WalLog.open(str(tmp_path), env=Env(disk=disk), background=False)
        log.append_value(b"a")
        disk.fails = "sync"
        with pytest.raises(LogFailed, match="Input/output"):
            log.close()
        log.close()
        WalLog.open(str(tmp_path)).close()  # it let go of the lock all the same

    def test_closing_does_not_repeat_an_error_that_a_handle_raised(self, tmp_path):
        disk = FailingDisk()
        log = WalLog.open(str(tmp_path), env=Env(disk=disk))
        disk.fails = "sync"
        with pytest.raises(LogFailed):
            log.append_value(b"a").result(SOON)
        log.close()

    def test_a_failure_elsewhere_leaves_no_thread_waiting_whose_records_are_durable(self, tmp_path, monkeypatch):
        """Something else fails when a group is durable but not yet notified, and the next one is refused."""
        log = WalLog.open(str(tmp_path))
        committer, honest = log._committer, log._committer._commit_group
        looks = iter([True])

        def commit(group, unsettled=None):
            done = honest(group, unsettled)
            if not queued:
                queued.append(log.append_value(b"queued"))
            return done

        def locked():
            if next(looks, False):  # the last look before the thread may go to sleep
                committer.fail(StorageError("something else failed"))
            return False

        queued = []
        monkeypatch.setattr(committer, "_commit_group", commit)
        monkeypatch.setattr(committer, "_turnstile", Turnstile(locked))
        assert log.append_value(b"durable").result(SOON).first == 0
        with pytest.raises(LogFailed):
            queued[0].result(SOON)
        log.close()
