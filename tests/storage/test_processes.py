"""Several processes on one store: forks, races, and deaths while holding the lock."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

import pytest

from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import Match
from strandline.testing.stores import content, paths
from tests.matrix_cases import partly, some
from tests.storage.cell_contract import JsonCodec, Operations, increment
from tests.storage.child_programs import finish, run_python, start_python

FORK = """
import os, signal, sys
from obstore.store import MemoryStore
from strandline.errors import UsedAcrossFork
from strandline.storage.objects.remote import ObstoreStore

store, other = ObstoreStore("memory:///one"), ObstoreStore("memory:///two")
{before}
child = os.fork()
if child == 0:
    signal.alarm(20)  # a hang must not outlive the test
    try:
        {inside}
        print("worked", flush=True)
    except UsedAcrossFork as error:
        print("refused:", "spawn" in str(error), error.retryable, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
print("status", status)
"""

INCREMENT = """
import sys
from strandline.errors import Contended
from strandline.storage.cell import StoreCell
from strandline.storage.objects.local import LocalStore
from tests.storage.cell_contract import JsonCodec, Operations, increment

root, seed, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cell, new_op = StoreCell(LocalStore(root), "counter", JsonCodec()), Operations(seed)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(times):
    op = new_op()
    while True:
        try:
            print(cell.update(op, increment), flush=True)
        except Contended:
            continue
        break
"""

HOLD_THE_LOCK = """
import sys
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import Match
from tests.disk_doubles import RecordingDisk

class StuckDisk(RecordingDisk):
    def rename(self, source, target):
        print("holding", flush=True)
        sys.stdin.readline()

store = LocalStore(sys.argv[1], env=Env(disk=StuckDisk()))
store.put_if("a", b"never acknowledged", Match(store.get("a").version))
"""


class TestForks:
    @pytest.mark.matrix
    @pytest.mark.parametrize(
        ("before", "inside", "outcome"),
        some(
            [
                ("store.put('a', b'1')", "store.get('a')", "refused: True False"),
                ("store.put('a', b'1')", "other.put('a', b'1')", "refused: True False"),
                ("store.put('a', b'1')", "ObstoreStore('memory:///three').put('a', b'1')", "refused: True False"),
                (
                    "store = ObstoreStore('memory://x', client=MemoryStore())",
                    "store.put('a', b'')",
                    "refused: True False",
                ),
                ("pass", "store.put('a', b'1'); assert store.get('a').data == b'1'", "worked"),
            ],
            2,
        ),
        ids=["used itself", "another was used", "opened after", "a client of the parent", "only opened"],
    )
    def test_a_store_works_in_a_forked_child_or_says_that_it_would_hang(
        self, before: str, inside: str, outcome: str
    ) -> None:
        assert run_python(FORK.format(before=before, inside=inside)) == f"{outcome}\nstatus 0\n"


class TestSharedFolder:
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        store = LocalStore(str(tmp_path))
        StoreCell(store, "counter", JsonCodec[int]()).create(OpId(UUID(int=0)), 0)
        return store

    def value(self, store: LocalStore) -> int:
        return StoreCell(store, "counter", JsonCodec[int]()).read().value

    @pytest.mark.matrix
    def test_increments_of_two_processes_add_up(self, store: LocalStore, tmp_path: Path) -> None:
        processes = [start_python(INCREMENT, str(tmp_path), str(seed), "300") for seed in (1, 2)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        given = [[int(line) for line in finish(process).split()] for process in processes]
        assert self.value(store) == 600
        # They raced, and each value was given to exactly one of them.
        assert sorted(given[0] + given[1]) == list(range(1, 601))

    @pytest.mark.parametrize("rounds", partly([0, 4], range(5)))
    def test_acknowledged_records_of_a_killed_process_are_there(
        self, store: LocalStore, tmp_path: Path, rounds: Iterable[int]
    ) -> None:
        for round_ in rounds:
            before = self.value(store)
            process = start_python(INCREMENT, str(tmp_path), str(10 + round_), "100000")
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            for _ in range(7 * round_ + 1):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            # Not by communicate(), which passes over what readline() has read ahead.
            acknowledged = 7 * round_ + 1 + len(process.stdout.read().split())
            process.communicate()
            assert self.value(store) - before in (acknowledged, acknowledged + 1)
        StoreCell(store, "counter", JsonCodec[int]()).update(Operations(99)(), increment)
        assert paths(store) == ["counter"]

    def test_a_process_killed_while_it_holds_the_lock_blocks_no_other(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        store.put("a", b"old")
        process = start_python(HOLD_THE_LOCK, str(tmp_path))
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        with (tmp_path / ".~lock-a").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert content(store, "a") == b"old"
        store.put_if("a", b"new", Match(store.get("a").version))
        assert content(store, "a") == b"new"
        assert paths(store) == ["a"]
