"""The write-ahead log in threads: thousands of concurrent rounds, and nothing is lost."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import defaultdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from uuid import UUID

import pytest

from strandline.compat.spool.lsn_log import LsnHandle, WriteAheadLog
from strandline.errors import CursorExpired, ExpectationFailed, LogClosed, NotFound
from strandline.log.wal.read.catalog import Catalog
from strandline.model.cursor import Cursor, Limit
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from tests.contracts.logs import records
from tests.log.wal.blocked_disks import SOON, GatedDisk, Threads, UnsyncedDisk, Witness, hasty_threads, said
from tests.matrix_cases import partly, some

pytestmark = pytest.mark.usefixtures(hasty_threads.__name__)

# --- trim beside append beside read -----------------------------------------------------------------------------


AHEAD = 2000
"""So many records the appenders are ahead of the consumer at most."""


class Traffic:
    """Appenders, readers, a consumer with a slot, and a trimming thread, all on one log."""

    def __init__(self, wal: WriteAheadLog, *, rounds: int, seed: int) -> None:
        self.wal = wal
        self.rounds = rounds
        self.seed = seed
        self.lsns: dict[int, list[int]] = defaultdict(list)
        self.skips = 0
        self.trimmed = 0
        self.done = threading.Event()
        self.moved = threading.Event()
        self.caught_up = threading.Event()
        wal.log.slots.create("consumer", 0)
        self.slot = wal.log.slots.claim("consumer", "me")

    def run(self) -> None:
        with Threads() as threads:
            self.stop = threads.stop
            for who in range(3):
                threads.start(self.append, who)
            threads.start(self.append_batches, 3)
            readers = [self.plan_and_fetch, self.read_since, self.consume, self.consume_late]
            reading = [threads.start(reader, index) for index, reader in enumerate(readers)]
            self.trim()
            self.done.set()
            for thread in reading:
                thread.join(SOON)
            threads.stop.set()

    def is_over(self) -> bool:
        return self.stop.is_set()

    def _goes_on(self) -> bool:
        """Whether to append more: not too far ahead of the consumer, or all others would only read what piled up."""
        while not self.is_over() and self.wal.current - self.slot.state().position > AHEAD:
            self.caught_up.wait(0.05)
            self.caught_up.clear()
        return not self.is_over()

    def append(self, who: int) -> None:
        while self._goes_on():
            self.lsns[who].append(self.wal.append(said(who, len(self.lsns[who]))))

    def append_batches(self, who: int) -> None:
        chance = random.Random(f"{self.seed} batches")
        while self._goes_on():
            count = len(self.lsns[who])
            self.lsns[who] += self.wal.append_many(
                said(who, counter) for counter in range(count, count + chance.randrange(1, 9))
            )

    def trim(self) -> None:
        """Forget up to a place that the consumer has passed; now and then try to take more than it allows."""
        chance = random.Random(f"{self.seed} trim")
        for number in range(self.rounds):
            if self.is_over():
                return
            if number % 4 == 0:  # there is something to trim then
                assert self.moved.wait(SOON), "the consumer stands still"
                self.moved.clear()
            before, position = self.wal.oldest - 1, self.slot.state().position
            reached = self.wal.prune_through(sys.maxsize if number % 3 == 0 else chance.randint(before, position))
            assert before <= reached <= self.slot.state().position
            assert self.wal.oldest == reached + 1
            self.trimmed += reached > before

    # --- readers -----------------------------------------------------------------------------------------------

    def plan_and_fetch(self, number: int) -> None:
        self._follow(f"{self.seed} {number}", jumps=True, fetches=True)

    def read_since(self, number: int) -> None:
        self._follow(f"{self.seed} {number}", jumps=True, fetches=False)

    def _follow(self, seed: str, *, jumps: bool, fetches: bool) -> None:
        chance, witness = random.Random(seed), Witness(0)
        while not (self.done.is_set() or self.is_over()):
            if jumps and chance.random() < 0.2:  # back to what may be gone, or is about to go
                witness, skips = Witness(max(0, self.wal.oldest - 1 - chance.randrange(100))), witness.skips
                witness.skips = skips
            try:
                if fetches:
                    self._fetch(witness, Limit(records=chance.randrange(1, 300)))
                else:
                    for record in self.wal.read_since(witness.next, chance.randrange(1, 300)):
                        witness.see(record.lsn, record.payload)
            except CursorExpired:
                witness.skip(self.wal)
            except NotFound:
                # Planned, and trimmed before it was fetched: looking again says that it has expired.
                assert fetches, "read_since knows no plans"
                with pytest.raises(CursorExpired):
                    self.wal.log.plan(Cursor(self.wal.log.log_id, witness.next))
                witness.skip(self.wal)
        self.skips += witness.skips

    def _fetch(self, witness: Witness, limit: Limit) -> None:
        for span in self.wal.log.plan(Cursor(self.wal.log.log_id, witness.next), limit):
            for batch in span.fetch(["offset", "value"]):
                for offset, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    witness.see(offset + 1, value)

    def consume(self, _: int) -> None:
        """Read everything, and move the slot after it."""
        witness = Witness(0)
        while not (self.done.is_set() or self.is_over()):
            self.wal.wait(witness.next, 0.01)
            self._fetch(witness, Limit(records=200))
            if witness.next > self.slot.state().position:
                self.slot.advance(Cursor(self.wal.log.log_id, witness.next))
                self.moved.set()
                self.caught_up.set()
        while witness.next < self.wal.current and not self.is_over():
            self._fetch(witness, Limit(records=1000))
            if witness.next > self.wal.current - 100:
                break

    def consume_late(self, _: int) -> None:
        """Nothing at or above the position of the slot is ever missing."""
        while not (self.done.is_set() or self.is_over()):
            position = self.slot.state().position
            try:
                self.wal.read_since(position, 5)
            except CursorExpired:
                assert self.slot.state().position > position, "what the slot needs is gone"


@pytest.mark.parametrize(
    ("tail_bytes", "roll_bytes", "rounds"),
    some([(0, 0, 40), (0, 3000, 120), (6000, 2000, 160), (32 << 20, 3000, 60)], 1),
    ids=["a-file-each", "no-tail", "small-tail", "all-in-memory"],
)
def test_trimming_beside_appending_and_reading_loses_nothing(
    tmp_path: Path, tail_bytes: int, roll_bytes: int, rounds: int
):
    check_traffic(tmp_path, UnsyncedDisk(), rounds=rounds, seed=1, tail_bytes=tail_bytes, roll_bytes=roll_bytes)


def test_trimming_beside_appending_and_reading_loses_nothing_on_a_disk_that_syncs(tmp_path: Path):
    check_traffic(tmp_path, DISK, rounds=20, seed=2, tail_bytes=4000, roll_bytes=3000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_trimming_beside_appending_and_reading_loses_nothing_for_long(tmp_path: Path, seed: int):
    options = {"tail_bytes": [0, 3000, 20_000][seed % 3], "roll_bytes": [0, 1000, 9000][seed % 3]}
    check_traffic(tmp_path, UnsyncedDisk(), rounds=1500, seed=seed, **options)


def check_traffic(tmp_path: Path, disk: Any, *, rounds: int, seed: int, **options: int) -> None:
    with WriteAheadLog.open(tmp_path / "log", env=Env(disk=disk), **options) as wal:
        traffic = Traffic(wal, rounds=rounds, seed=seed)
        traffic.run()
        start, end = wal.oldest - 1, wal.current
    assert sorted(lsn for lsns in traffic.lsns.values() for lsn in lsns) == list(range(1, end + 1))
    assert all(lsns == sorted(lsns) for lsns in traffic.lsns.values())
    assert traffic.trimmed >= rounds // 20, "hardly anything was trimmed"
    with WriteAheadLog.open(tmp_path / "log", env=Env(disk=disk), create=False) as wal:
        assert (wal.oldest - 1, wal.current) == (start, end)
        witness = Witness(start)
        while found := wal.read_since(witness.next, 5000):
            for record in found:
                witness.see(record.lsn, record.payload)
        assert witness.next == end


@pytest.mark.matrix
def test_a_slot_that_is_created_or_reset_during_a_trim_is_never_below_the_start(tmp_path: Path):
    with (
        WriteAheadLog.open(tmp_path / "log", roll_bytes=2000, env=Env(disk=UnsyncedDisk())) as wal,
        Threads() as threads,
    ):
        wal.log.slots.create("reset", 0)
        done = threading.Event()

        def check(position: int) -> None:
            # The slot pins its place from now on: whatever is trimmed beside that, it can be read.
            assert wal.oldest - 1 <= position, "a slot was granted a place that is gone"
            wal.read_since(position, 1)

        def create() -> None:
            while not (done.is_set() or threads.stop.is_set()):
                with contextlib.suppress(CursorExpired):
                    check(wal.log.slots.create("created", wal.oldest - 1).position)
                    wal.log.slots.drop("created")

        def reset() -> None:
            while not (done.is_set() or threads.stop.is_set()):
                with contextlib.suppress(CursorExpired):
                    check(wal.log.slots.reset("reset", wal.oldest - 1).position)
                wal.log.slots.reset("reset", wal.current)

        threads.start(create)
        threads.start(reset)
        for number in range(400):
            if threads.stop.is_set():
                break
            wal.append(b"%d" % number)
            wal.prune_through(wal.current)
        done.set()


@pytest.mark.matrix
def test_files_that_are_begun_beside_others_that_go_are_all_known(tmp_path: Path):
    catalog, count = Catalog(str(tmp_path), UUID(int=1), (), disk=DISK), 4000
    begun = threading.Semaphore(0)

    def begin() -> None:
        for first in range(count):
            catalog.add(first)
            begun.release()

    with Threads() as threads:
        threads.start(begin)
        for first in range(count):
            assert begun.acquire(timeout=SOON)
            if first % 8:
                catalog.forget([first])
    assert catalog.firsts == tuple(range(0, count, 8))


# --- waiting -----------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_waiter_is_woken_by_the_append_that_it_waits_for(tmp_path: Path):
    rounds, waiters = 1500, 3
    with WriteAheadLog.open(tmp_path / "log", env=Env(disk=UnsyncedDisk())) as wal, Threads() as threads:
        together = threading.Barrier(waiters + 1)

        def wait() -> None:
            for lsn in range(rounds):
                together.wait(SOON)
                assert wal.wait(lsn, SOON), f"lsn {lsn + 1} was appended, and nobody said so"
                assert wal.current > lsn
                assert len(wal.read_since(lsn, 1)) == 1

        for _ in range(waiters):
            threads.start(wait)
        for lsn in range(1, rounds + 1):
            together.wait(SOON)
            assert wal.append(b"now") == lsn


def test_waiting_for_what_does_not_come_ends_when_the_time_is_over(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        assert not wal.wait(0, 0.0)
        assert not wal.wait(0, 0.01)
        wal.append(b"first")
        assert wal.wait(0, 0.0)
        assert not wal.wait(1, 0.0)


# --- back-pressure -----------------------------------------------------------------------------------------------


def test_appends_wait_while_too_much_is_queued_and_then_continue(tmp_path: Path):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log", pending_bytes=1000) as wal, Threads() as threads:
        disk.hold()
        handles = [wal.submit(b"x" * 2000)]
        disk.wait_until_held()
        handles.append(wal.submit(b"y" * 2000))  # as much as may be queued, and more
        submitted = threading.Event()

        def submit() -> None:
            handles.append(wal.submit(b"z"))
            submitted.set()

        threads.start(submit)
        assert not submitted.wait(0.2), "there was no room for it"
        assert wal.current == 0
        disk.let_go()
        assert submitted.wait(SOON)
        assert [handle.result(SOON) for handle in handles] == [1, 2, 3]


def test_many_that_find_no_room_all_get_through(tmp_path: Path):
    with (
        WriteAheadLog.open(tmp_path / "log", env=Env(disk=UnsyncedDisk()), pending_bytes=300) as wal,
        Threads() as threads,
    ):
        handles: SimpleQueue[LsnHandle] = SimpleQueue()

        def submit(who: int) -> None:
            for counter in range(100):
                if counter % 10:
                    handles.put(wal.submit(said(who, counter)))
                else:
                    handles.put(wal.submit_batch(records(said(who, counter))))

        for who in range(16):
            threads.start(submit, who)
        lsns = [handles.get(timeout=SOON).result(SOON) for _ in range(1600)]
        assert sorted(lsns) == list(range(1, 1601))
        witness = Witness(0)
        for record in wal.read_since(0, 1600):
            witness.see(record.lsn, record.payload)


@pytest.mark.parametrize("batches", [False, True])
def test_an_explicit_lsn_that_had_to_wait_for_room_is_looked_at_again(tmp_path: Path, batches: bool):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log", pending_bytes=100) as wal:
        disk.hold()
        wal.submit(b"x" * 200)
        disk.wait_until_held()
        wal.submit(b"y" * 200)
        outcomes: SimpleQueue[object] = SimpleQueue()

        def append() -> None:
            try:
                outcomes.put(wal.append_batch(records(b"z"), lsn=3)[0] if batches else wal.append(b"z", lsn=3))
            except ExpectationFailed as error:
                outcomes.put(type(error))

        with Threads() as threads:
            for _ in range(6):
                threads.start(append)
            disk.let_go()
        told = [outcomes.get() for _ in range(6)]
        assert sorted(map(str, told)) == sorted(map(str, [3, *[ExpectationFailed] * 5]))
        assert wal.current == 3


# --- closing -----------------------------------------------------------------------------------------------------


def append_until_closed(wal: WriteAheadLog, who: int, going: threading.Barrier, told: dict[int, bytes]) -> None:
    """Append for ever, and remember what was acknowledged; only that the log was closed may end it."""
    going.wait(SOON)
    with contextlib.suppress(LogClosed):
        for counter in range(1_000_000):
            value = said(who, counter)
            told[wal.append(value) if who % 3 else wal.append_many([value])[0]] = value
        raise AssertionError("it was never closed")


@pytest.mark.parametrize("rounds", partly(range(12), range(40)))
def test_closing_beside_appends_keeps_exactly_what_was_acknowledged(tmp_path: Path, rounds: range):
    told: dict[int, bytes] = {}
    for number in rounds:
        wal = WriteAheadLog.open(tmp_path / "log", env=Env(disk=UnsyncedDisk()), roll_bytes=5000)
        before = wal.current
        assert before == len(told), "something was appended that nobody was told of"
        going = threading.Barrier(7)
        with Threads() as threads:
            for who in range(6):
                threads.start(append_until_closed, wal, number * 6 + who, going, told)
            going.wait(SOON)
            wal.wait(before + number, SOON)
            wal.close()
    with WriteAheadLog.open(tmp_path / "log") as wal:
        found: dict[int, bytes | None] = {}
        while more := wal.read_since(len(found), 5000):
            found.update((record.lsn, record.payload) for record in more)
        assert found == told


def test_handles_that_were_given_before_it_was_closed_are_all_durable(tmp_path: Path):
    disk = GatedDisk()
    wal = WriteAheadLog.open(tmp_path / "log", env=Env(disk=disk))
    disk.hold()
    handles = [wal.submit(b"first")]
    disk.wait_until_held()
    handles += [wal.submit(b"%d" % number) for number in range(100)]
    with Threads() as threads:
        threads.start(wal.close)
        assert not any(handle.done() for handle in handles)
        disk.let_go()
    assert [handle.result(0) for handle in handles] == list(range(1, 102))
    with WriteAheadLog.open(tmp_path / "log") as again:
        assert again.current == 101
