"""A closed write-ahead log: nothing changes any more, and durable records can still be read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from strandline.compat.spool.lsn_log import LsnHandle, WriteAheadLog
from strandline.errors import Fenced, LogClosed, LogFailed, StorageError
from strandline.log.contract import Slot
from strandline.log.wal.log import WalLog
from strandline.storage.clock import CLOCK
from strandline.storage.env import Env
from tests.contracts.logs import records
from tests.interrupts import interrupted_by_a_signal, interruptions
from tests.log.wal.blocked_disks import CHANGES, SOON, GatedDisk, Threads, UnsyncedDisk, kept, refusals

REFUSED = dict.fromkeys(CHANGES, "LogClosed")


def test_a_log_that_was_closed_leaves_alone_what_another_has_opened_since(tmp_path: Path):
    old = WriteAheadLog.open(tmp_path / "log")
    old.append(b"first")
    old.log.slots.create("old", 0)
    slot = old.log.slots.claim("old", "me")
    slot.touch()
    old.close()
    with WriteAheadLog.open(tmp_path / "log") as new:
        new.append(b"second")
        new.log.slots.claim("old", "another")
        before = kept(tmp_path / "log")
        assert refusals(old, slot) == REFUSED
        old.close()
        assert kept(tmp_path / "log") == before
        assert new.append(b"third") == 3


@pytest.mark.parametrize("batches", [False, True])
def test_a_log_that_was_closed_empty_does_not_begin_elsewhere(tmp_path: Path, batches: bool):
    old = WalLog.open(str(tmp_path / "log"))
    old.close()
    before = kept(tmp_path / "log")
    with pytest.raises(LogClosed):
        old.append_batch(records(b"x"), expect=7) if batches else old.append_value(b"x", expect=7)
    with pytest.raises(LogClosed):
        old.append_value(b"x")
    assert kept(tmp_path / "log") == before


def test_noted_positions_are_written_on_closing_and_can_still_be_read(tmp_path: Path):
    wal = WriteAheadLog.open(tmp_path / "log")
    wal.append_many([b"first", b"second"])
    wal.log.slots.create("old", 0)
    slot = wal.log.slots.claim("old", "me")
    slot.advance(wal.log.start().at(1))
    wal.close()
    assert [record.payload for record in wal.read_since(0)] == [b"first", b"second"]
    assert (wal.oldest, wal.current, wal.log.slots.floor(), slot.state().position) == (1, 2, 1, 1)
    assert [state.name for state in wal.log.slots.list()] == ["old"]
    assert wal.wait(1, 0)
    assert not wal.wait(2, 0)
    with WriteAheadLog.open(tmp_path / "log") as again:
        assert again.log.slots.floor() == 1


def test_closing_waits_for_a_trim_that_is_under_way(tmp_path: Path):
    disk = GatedDisk()
    with Threads() as threads, disk.open_log(tmp_path / "log", roll_bytes=0) as wal:
        wal.append(b"first")
        wal.append(b"second")
        closed = threading.Event()

        def close() -> None:
            wal.close()
            closed.set()

        disk.hold("remove")
        threads.start(wal.prune_through, 1)
        disk.wait_until_held()
        threads.start(close)
        assert not closed.wait(0.1), "files of a log that was let go are about to be removed"
        with pytest.raises(Fenced):
            WriteAheadLog.open(tmp_path / "log")
        disk.let_go()
        assert closed.wait(SOON)
    assert sorted(path.name for path in (tmp_path / "log").glob("*.log")) == [f"{1:020d}.log"]


def test_whatever_runs_beside_closing_changes_nothing_once_it_is_closed(tmp_path: Path):
    disk = UnsyncedDisk()
    for number in range(8):
        folder = tmp_path / f"log-{number}"
        wal = WriteAheadLog.open(folder, env=Env(disk=disk), roll_bytes=0)
        wal.log.slots.create("old", 0)
        slot = wal.log.slots.claim("old", "me")

        def until_closed(change: Callable[[], object]) -> None:
            with contextlib.suppress(LogClosed):
                while not threads.stop.is_set():
                    change()
                raise AssertionError("it was never closed")

        def trim(wal: WriteAheadLog = wal) -> None:
            wal.append(b"x")
            wal.prune_through(wal.current)

        def advance(wal: WriteAheadLog = wal, slot: Slot = slot) -> None:
            slot.advance(wal.log.end())

        def reset(wal: WriteAheadLog = wal) -> None:
            wal.log.slots.reset("old", wal.current)

        with Threads() as threads:
            threads.start(until_closed, trim)
            threads.start(until_closed, reset if number % 2 else advance)
            while not (wal.wait(number, 0.1) or threads.stop.is_set()):
                pass
            wal.close()
            before = kept(folder)
        assert kept(folder) == before


def test_two_that_close_it_at_once_both_return_when_it_is_closed(tmp_path: Path):
    disk = GatedDisk()
    wal = WriteAheadLog.open(tmp_path / "log", env=Env(disk=disk))
    disk.hold()
    handle = wal.submit(b"first")
    disk.wait_until_held()

    def close() -> None:
        wal.close()
        assert handle.done()

    with Threads() as threads:
        for _ in range(2):
            threads.start(close)
        disk.let_go()
    with WriteAheadLog.open(tmp_path / "log") as again:
        assert again.current == 1


def test_closing_that_was_interrupted_keeps_the_lock_while_something_is_written(tmp_path: Path):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log") as wal:
        disk.hold()
        handle = wal.submit(b"first")
        disk.wait_until_held()
        for _ in range(2):
            with interrupted_by_a_signal():
                wal.close()
        with pytest.raises(Fenced):
            WriteAheadLog.open(tmp_path / "log")
        with pytest.raises(LogClosed):
            wal.append(b"second")
        disk.let_go()
        with opened_once_it_is_free(tmp_path / "log") as again:
            assert again.current == 1
        assert handle.result(0) == 1
        wal.close()


def opened_once_it_is_free(folder: Path) -> WriteAheadLog:
    """The log in this folder, as soon as its holder has released it."""
    deadline = CLOCK.monotonic() + SOON
    while True:
        try:
            return WriteAheadLog.open(folder)
        except Fenced:
            assert CLOCK.monotonic() < deadline, "nobody lets go of the log"


@pytest.mark.matrix
@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_closing_that_was_interrupted_anywhere_leaves_the_log_open_or_releases_it_by_itself(
    tmp_path: Path, background: bool, queued: bool
):
    def opened(number: int) -> tuple[WriteAheadLog, LsnHandle]:
        wal = WriteAheadLog.open(tmp_path / str(number), background=background)
        first = wal.submit(b"first")
        assert first.result() == 1
        return wal, wal.submit(b"second") if queued else first

    logs, places = [opened(0)], 0

    def close() -> None:
        logs[-1][0].close()

    for place in interruptions(close, within="strandline.log.wal"):
        wal, handle = logs[-1]
        try:
            wal.append(b"third")
        except (LogClosed, LogFailed):
            with opened_once_it_is_free(tmp_path / str(place)) as again:
                assert again.current >= 1
                if background:
                    assert again.current == handle.result(SOON) == 1 + queued
        else:
            assert handle.result(SOON) == 1 + queued
            wal.close()
        with contextlib.suppress(*([] if background else [LogFailed])):  # what was queued is nobody's to commit then
            wal.close()
        places = place
        logs.append(opened(place + 1))
    close()
    assert places > 5


def test_slots_that_cannot_be_written_at_the_end_are_refused_from_then_on_all_the_same(tmp_path: Path):
    class Full(UnsyncedDisk):
        full = False

        def write_new(self, path: str, parts: object) -> None:
            if self.full:
                raise StorageError("no room")
            super().write_new(path, parts)

    disk = Full()
    wal = WriteAheadLog.open(tmp_path / "log", env=Env(disk=disk))
    wal.append(b"first")
    wal.log.slots.create("old", 0)
    slot = wal.log.slots.claim("old", "me")
    slot.advance(wal.log.end())
    disk.full = True
    with pytest.raises(StorageError, match="no room"):
        wal.close()
    disk.full = False
    with WriteAheadLog.open(tmp_path / "log") as again:
        assert again.log.slots.floor() == 0
        before = kept(tmp_path / "log")
        assert refusals(wal, slot) == REFUSED
        assert kept(tmp_path / "log") == before
