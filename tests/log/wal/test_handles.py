"""Handles of a write-ahead log's appends, in threads and in event loops: each returns its own result."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from queue import SimpleQueue

import pytest

from strandline.compat.spool.lsn_log import LsnHandle, WriteAheadLog
from strandline.log.wal.write import groups
from strandline.log.wal.write.groups import CommitGroup
from strandline.storage.env import Env
from tests.log.wal.blocked_disks import SOON, GatedDisk, Threads, UnsyncedDisk, hasty_threads, said

pytestmark = pytest.mark.usefixtures(hasty_threads.__name__)

# --- handles -----------------------------------------------------------------------------------------------------


def test_a_handle_can_be_asked_from_any_thread(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log", env=Env(disk=UnsyncedDisk())) as wal, Threads() as threads:
        shared: list[SimpleQueue[LsnHandle | None]] = [SimpleQueue() for _ in range(6)]
        answers: list[list[int]] = [[] for _ in shared]

        def ask(mine: int) -> None:
            while (handle := shared[mine].get(timeout=SOON)) is not None:
                answers[mine].append(handle.result(SOON))
                assert handle.done()
                assert handle.result(0) == answers[mine][-1]

        for mine in range(len(shared)):
            threads.start(ask, mine)
        for number in range(1500):
            handle = wal.submit(b"%d" % number)
            for queue in shared:
                queue.put(handle)
        for queue in shared:
            queue.put(None)
    assert answers == [list(range(1, 1501))] * 6


def test_a_handle_that_is_asked_too_early_raises_and_can_be_asked_again(tmp_path: Path):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log") as wal:
        disk.hold()
        handle = wal.submit(b"first")
        disk.wait_until_held()
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError):
                handle.result(timeout)
        disk.let_go()
        assert handle.result(SOON) == 1


# --- asyncio -----------------------------------------------------------------------------------------------------


def test_many_tasks_of_one_loop_each_get_their_lsn(tmp_path: Path):
    async def appender(wal: WriteAheadLog, who: int) -> list[int]:
        return [await wal.submit(said(who, counter)) for counter in range(20)]

    async def main(wal: WriteAheadLog) -> list[list[int]]:
        async with asyncio.timeout(SOON):
            return await asyncio.gather(*(appender(wal, who) for who in range(100)))

    with WriteAheadLog.open(tmp_path / "log") as wal:
        told = asyncio.run(main(wal))
        check_told(wal, told)


def test_two_loops_in_two_threads_share_a_log(tmp_path: Path):
    told: dict[int, list[int]] = {}

    async def appender(wal: WriteAheadLog, who: int) -> None:
        told[who] = [await wal.submit(said(who, counter)) for counter in range(60)]

    async def main(wal: WriteAheadLog, first: int) -> None:
        async with asyncio.timeout(SOON):
            await asyncio.gather(*(appender(wal, who) for who in range(first, first + 20)))

    with WriteAheadLog.open(tmp_path / "log", env=Env(disk=UnsyncedDisk())) as wal:
        with Threads() as threads:
            for first in (0, 20):
                threads.start(lambda first=first: asyncio.run(main(wal, first)))
        check_told(wal, [told[who] for who in range(40)])


def check_told(wal: WriteAheadLog, told: list[list[int]]) -> None:
    """Check that each record is at its acknowledged offset, and that there are no others."""
    assert sorted(lsn for lsns in told for lsn in lsns) == list(range(1, wal.current + 1))
    values = {record.lsn: record.payload for record in wal.read_since(0, wal.current)}
    for who, lsns in enumerate(told):
        assert [values[lsn] for lsn in lsns] == [said(who, counter) for counter in range(len(lsns))]


def test_awaits_that_are_cancelled_disturb_no_other(tmp_path: Path):
    disk = GatedDisk()

    async def main(wal: WriteAheadLog) -> None:
        disk.hold()
        handles = [wal.submit(b"%d" % number) for number in range(30)]

        async def wait_for(handle: LsnHandle) -> int:
            return await handle

        impatient = [asyncio.create_task(wait_for(handle)) for handle in handles]
        patient = [asyncio.create_task(wait_for(handle)) for handle in handles]
        await asyncio.sleep(0)
        for task in impatient[::2]:
            task.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await handles[0]
        disk.let_go()
        async with asyncio.timeout(SOON):
            assert await asyncio.gather(*patient) == list(range(1, 31))
            outcomes = await asyncio.gather(*impatient, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[::2])
        assert outcomes[1::2] == list(range(2, 31, 2))
        assert await handles[0] == 1, "what nobody waited for is durable all the same"

    with disk.open_log(tmp_path / "log") as wal:
        asyncio.run(main(wal))
        assert wal.current == 30


def test_a_loop_that_is_gone_when_its_append_becomes_durable_disturbs_no_other(tmp_path: Path):
    disk = GatedDisk()

    async def give_up(wal: WriteAheadLog) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await wal.submit(b"first")

    with disk.open_log(tmp_path / "log") as wal:
        disk.hold()
        asyncio.run(give_up(wal))
        disk.let_go()
        assert wal.append(b"second") == 2


def test_one_group_is_awaited_by_threads_and_by_loops_at_once(tmp_path: Path):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log") as wal:
        for first in range(1, 200, 10):
            disk.hold()
            handles = [wal.submit(b"x") for _ in range(10)]

            async def wait(handles: list[LsnHandle]) -> list[int]:
                return [await handle for handle in handles]

            answers: SimpleQueue[list[int]] = SimpleQueue()
            with Threads() as threads:
                for _ in range(2):
                    threads.start(lambda: answers.put([handle.result(SOON) for handle in handles]))  # noqa: B023
                    threads.start(lambda: answers.put(asyncio.run(wait(handles))))  # noqa: B023
                disk.let_go()
            assert [answers.get() for _ in range(4)] == [list(range(first, first + 10))] * 4


# --- being woken -------------------------------------------------------------------------------------------------


def test_a_waiter_that_gives_up_does_not_block_the_next_wake_up(monkeypatch: pytest.MonkeyPatch):
    """Each woken thread wakes another: none may be left waiting when one of them has given up."""
    monkeypatch.setattr(groups, "_CHECK_SECONDS", 1000.0)  # whoever is left out would wait for this
    for _ in range(30):
        group, woken, given_up = CommitGroup(), SimpleQueue[int](), SimpleQueue[int]()

        with Threads() as threads:
            for number in range(16):
                patience = 0.0 if number % 4 == 1 else 0.001 if number % 4 == 2 else SOON
                threads.start(_wait, group, number, patience, woken, given_up)
            for _ in range(4):
                given_up.get(timeout=SOON)  # some are gone, some are about to go, when it is settled
            group.settle()
        assert {woken.get(timeout=SOON) for _ in range(woken.qsize())} >= {0, 3, 4, 7, 8, 11, 12, 15}


def test_a_thread_whose_turn_was_interrupted_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(groups, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(groups.CommitGroup, "_pass_on", lambda _: None)  # nobody is ever woken
    group = CommitGroup()
    with Threads() as threads:
        for _ in range(4):
            threads.start(group.wait, SOON)
        group.settle()


def _wait(
    group: CommitGroup, number: int, patience: float, woken: SimpleQueue[int], given_up: SimpleQueue[int]
) -> None:
    try:
        group.wait(patience)
    except TimeoutError:
        given_up.put(number)
    else:
        woken.put(number)


def test_a_handle_is_not_sent_to_another_process_where_it_would_be_waited_for_for_ever(tmp_path: Path):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log") as wal:
        disk.hold()
        handle = wal.submit(b"first")
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(handle)
        disk.let_go()
        assert pickle.loads(pickle.dumps(handle.result(SOON))) == 1
