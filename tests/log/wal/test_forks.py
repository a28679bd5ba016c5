"""The write-ahead log in a forked child: refused at once, whatever was under way, and nothing of its parent changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline.compat.spool.lsn_log import LsnHandle, WriteAheadLog
from strandline.errors import Fenced, UsedAcrossFork
from strandline.log.wal.read.reading import WalReader
from strandline.storage.env import Env
from tests.contracts.logs import records
from tests.forking import in_a_child
from tests.log.wal.blocked_disks import CHANGES, SOON, GatedDisk, Threads, UnsyncedDisk, kept, refusals

REFUSED = dict.fromkeys(CHANGES, "UsedAcrossFork")


# --- what changes the log ----------------------------------------------------------------------------------------


def without_index(folder: Path) -> dict[str, bytes]:
    """The files of a log's folder except its index, which the parent writes lazily."""
    return {name: data for name, data in kept(folder).items() if not name.endswith(".index")}


@pytest.mark.parametrize("background", [True, False])
def test_a_forked_child_is_refused_and_changes_nothing(tmp_path: Path, background: bool):
    with WriteAheadLog.open(tmp_path / "log", background=background) as wal:
        wal.append(b"first")
        wal.log.slots.create("old", 0)
        slot = wal.log.slots.claim("old", "me")
        slot.touch()  # noted, and not written
        queued = None if background else wal.submit(b"second")
        before = without_index(tmp_path / "log")

        def use() -> None:
            assert refusals(wal, slot) == REFUSED
            wal.close()
            assert refusals(wal, slot) == REFUSED

        assert in_a_child(use) == "returned None"
        assert without_index(tmp_path / "log") == before
        assert queued is None or queued.result() == 2
        assert wal.append(b"next") == wal.current


@pytest.mark.parametrize("held", ["write", "sync"])
def test_a_child_that_was_forked_amid_a_commit_is_refused_and_changes_nothing(tmp_path: Path, held: str):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log") as wal:
        wal.append(b"first")
        wal.log.slots.create("old", 0)
        slot = wal.log.slots.claim("old", "me")
        disk.hold(held)
        handle = wal.submit(b"second")
        disk.wait_until_held()
        before = kept(tmp_path / "log")
        assert in_a_child(lambda: refusals(wal, slot)) == f"returned {REFUSED!r}"
        assert kept(tmp_path / "log") == before
        disk.let_go()
        assert handle.result(SOON) == 2
        assert wal.append(b"third") == 3


def test_a_child_that_was_forked_amid_a_trim_is_refused_and_changes_nothing(tmp_path: Path):
    disk = GatedDisk()
    with Threads() as threads, disk.open_log(tmp_path / "log", roll_bytes=0) as wal:
        wal.append_many([b"first", b"second"])
        wal.append(b"third")
        wal.log.slots.create("old", 3)
        slot = wal.log.slots.claim("old", "me")
        wal.log.trim(0)  # behind the thread that writes the last index
        disk.hold("remove")
        threads.start(wal.prune_through, 2)
        disk.wait_until_held()
        before = kept(tmp_path / "log")
        assert in_a_child(lambda: refusals(wal, slot)) == f"returned {REFUSED!r}"
        assert kept(tmp_path / "log") == before
        disk.let_go()
        threads.join()
        assert wal.oldest == 3


def test_an_empty_log_does_not_begin_elsewhere_in_a_child(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        before = kept(tmp_path / "log")
        assert in_a_child(lambda: wal.submit(b"x", lsn=7)).startswith("UsedAcrossFork")
        assert in_a_child(lambda: wal.submit_batch(records(b"x"), lsn=7)).startswith("UsedAcrossFork")
        assert kept(tmp_path / "log") == before
        assert wal.append(b"first") == 1


def test_the_refusal_names_the_process_that_has_the_log_open(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        here = f"opened by the process {os.getpid()} "
        assert here in in_a_child(lambda: wal.append(b"x"))
        assert here in in_a_child(lambda: in_a_child(lambda: wal.append(b"x")))


# --- handles -----------------------------------------------------------------------------------------------------


def check_in_a_child(handle: LsnHandle, lsn: int) -> None:
    """A child gets outcomes that were known before the fork, and an error for every other call."""

    async def awaited() -> int:
        return await handle

    was_done = handle.done()
    for question in (handle.result, lambda: asyncio.run(awaited()), handle.lsns):
        said = in_a_child(question)
        assert said in (f"returned {lsn}", f"returned {range(lsn, lsn + 1)}") if was_done else said.startswith("Used")
    assert in_a_child(handle.done) == "returned True", "who asks again and again would never end"


@pytest.mark.matrix
def test_a_child_is_refused_an_append_that_is_queued_and_one_that_is_being_synced(tmp_path: Path):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log") as wal:
        disk.hold()
        under_way = wal.submit(b"first")
        disk.wait_until_held()
        queued = wal.submit(b"second")
        for lsn, handle in enumerate((under_way, queued), 1):
            assert not handle.done()
            check_in_a_child(handle, lsn)
        disk.let_go()
        assert (under_way.result(SOON), queued.result(SOON)) == (1, 2)
        check_in_a_child(queued, 2)


@pytest.mark.matrix
def test_a_forked_child_does_not_wait_for_a_durable_append_whose_handle_is_not_settled(tmp_path: Path):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log") as wal:
        disk.hold()
        durable = wal.submit(b"first")
        disk.wait_until_held()
        written = wal.submit(b"second")
        disk.hold("write")
        disk.wait_until_held()
        assert wal.current == 1
        check_in_a_child(durable, 1)
        check_in_a_child(written, 2)
        disk.let_go()
        assert (durable.result(SOON), written.result(SOON)) == (1, 2)


@pytest.mark.matrix
def test_a_forked_child_does_not_commit_appends_that_a_waiting_thread_commits(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log", background=False) as wal:
        handle = wal.submit(b"first")
        before = kept(tmp_path / "log")
        check_in_a_child(handle, 1)
        assert kept(tmp_path / "log") == before
        assert handle.result() == 1


def test_a_child_that_a_task_has_forked_can_await_in_a_loop_of_its_own(tmp_path: Path):
    async def append(folder: str) -> int:
        disk = GatedDisk()
        with disk.open_log(tmp_path / folder) as wal:
            disk.hold()
            handle = wal.submit(b"first")
            asyncio.get_running_loop().call_soon(disk.let_go)  # not before it is awaited
            return await handle

    async def fork() -> str:
        assert await append("parents") == 1
        return in_a_child(lambda: asyncio.run(append("childs")))

    assert asyncio.run(fork()) == "returned 1"


# --- locks -------------------------------------------------------------------------------------------------------


def locks_of(log: Any) -> Iterator[Any]:
    """All locks that the parts of a log have."""
    kinds = type(threading.Lock()), type(threading.RLock()), threading.Condition
    for part in (log, *vars(log).values()):
        if type(part).__module__.startswith("strandline.log.wal"):
            yield from (value for value in vars(part).values() if isinstance(value, kinds))


def test_whatever_locks_others_hold_when_it_is_forked_a_child_does_not_wait_for_them(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log", roll_bytes=200) as wal, Threads() as threads:
        for number in range(5):
            wal.append(b"%d" % number * 100)
        wal.log.slots.create("old", 0)
        slot = wal.log.slots.claim("old", "me")
        locks = list(locks_of(wal.log))
        assert len(locks) > 7
        held, forked = threading.Event(), threading.Event()

        def hold() -> None:
            mine = [lock for lock in locks if lock.acquire(blocking=False)]
            held.set()
            forked.wait(SOON)
            for lock in mine:
                lock.release()

        def use() -> None:
            assert refusals(wal, slot) == REFUSED
            check_reading(wal)
            wal.close()

        threads.start(hold)
        assert held.wait(SOON)
        said = in_a_child(use)
        forked.set()
        assert said == "returned None"


def check_reading(wal: WriteAheadLog) -> None:
    """A child cannot read through its parent's log either, and never waits for a thread of the parent."""
    log = wal.log
    for look in (
        log.bounds,
        log.slots.list,
        log.slots.floor,
        lambda: wal.current,
        lambda: wal.read_since(0),
        lambda: wal.wait(0, SOON),
        lambda: wal.wait(5, SOON),
    ):
        with pytest.raises(UsedAcrossFork):
            look()


@pytest.mark.matrix
def test_forks_in_the_midst_of_everything_do_not_hang(tmp_path: Path):
    disk = UnsyncedDisk()
    with WriteAheadLog.open(tmp_path / "log", roll_bytes=3000, env=Env(disk=disk)) as wal, Threads() as threads:
        wal.log.slots.create("old", 0)
        slot = wal.log.slots.claim("old", "me")

        def append() -> None:
            while not threads.stop.is_set():
                wal.append(b"x" * 50)

        def trim() -> None:
            while not threads.stop.is_set():
                wal.log.slots.reset("old", wal.current)
                wal.prune_through(wal.current)

        def read() -> None:
            while not threads.stop.is_set():
                wal.wait(wal.current, 0.001)

        def use() -> None:
            assert refusals(wal, slot) == REFUSED
            check_reading(wal)
            with contextlib.suppress(UsedAcrossFork):
                handle.result()
            wal.close()

        for work in (append, append, trim, read):
            threads.start(work)
        for _ in range(15):
            handle = wal.submit(b"y")
            said = in_a_child(use)
            assert said == "returned None"
        threads.stop.set()


# --- the lock of the log -----------------------------------------------------------------------------------------


def test_a_child_does_not_keep_the_lock_when_its_parent_has_closed_the_log(tmp_path: Path):
    wal = WriteAheadLog.open(tmp_path / "log")
    wal.append(b"first")
    reading, writing = os.pipe()
    told, telling = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(writing)
            signal.alarm(int(SOON))
            os.write(telling, b"x")
            os.read(reading, 1)  # lives until the parent has looked
        os._exit(0)
    os.close(reading)
    os.close(telling)
    try:
        assert os.read(told, 1), "the child lives"
        with pytest.raises(Fenced):
            WriteAheadLog.open(tmp_path / "log")
        wal.close()
        with WriteAheadLog.open(tmp_path / "log") as again:
            assert again.append(b"second") == 2
    finally:
        os.close(told)
        os.close(writing)
        os.waitpid(child, 0)


def test_a_child_that_ends_leaves_the_lock_with_its_parent(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        assert in_a_child(wal.close) == "returned None"
        with pytest.raises(Fenced):
            WriteAheadLog.open(tmp_path / "log")
        assert wal.append(b"first") == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell what is open")
def test_a_child_keeps_no_file_of_its_parent_open(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        wal.append(b"first")
        said = in_a_child(lambda: [name for name in map(os.readlink, descriptors()) if str(tmp_path) in name])
        assert said == "returned []"


def descriptors() -> list[str]:
    """The open files of this process; those that are gone when they are looked at are left out."""
    return [path for name in os.listdir("/proc/self/fd") if os.path.islink(path := f"/proc/self/fd/{name}")]


def test_a_child_may_read_the_log_as_any_other_process(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        wal.append(b"first")
        assert in_a_child(lambda: WalReader(wal.log.folder).bounds().next) == "returned 1"
