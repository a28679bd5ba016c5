"""The write-ahead log against a plain list, on a simulated disk: any sequence of calls, and a crash anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from strandline.compat.spool.lsn_log import LsnHandle, WriteAheadLog
from strandline.errors import (
    AlreadyExists,
    CursorExpired,
    Diverged,
    ExpectationFailed,
    Fenced,
    NotFound,
    NotReady,
    OutOfOrder,
    StrandlineError,
    WriterExpired,
)
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import Receipt
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Crash
from strandline.testing.simdisk import POWER, CrashMode, SimulatedDisk
from tests.contracts.logs import records, writer_named
from tests.matrix_cases import examples, some

FOLDER = "/srv/log"

values = st.binary(max_size=40) | st.integers(0, 255).map(lambda byte: bytes([byte]) * 700)
some_values = st.lists(values, min_size=1, max_size=6)
nearby = st.integers(-3, 3)
fractions = st.floats(0, 1)
names = st.sampled_from(["a", "b", "c"])
holders = st.sampled_from(["me", "you"])
moments = st.sampled_from(["before", "half", "unsynced", "after"])


@dataclass(slots=True)
class SlotModel:
    position: int
    written: int
    """Where it stands at least after a crash: what was only noted may be forgotten."""
    holder: str | None = None
    epoch: int = 0
    dropped: bool = False


@dataclass(slots=True)
class Frame:
    """One appended batch: its values, its term, and its writer and number."""

    values: list[bytes]
    term: int
    writer: tuple[int, int] | None = None


@dataclass(slots=True)
class Model:
    """The log as a list, and the few numbers beside it."""

    start: int = 0
    base: int = 0
    """The offset of the list's first record."""
    records: list[tuple[bytes, int]] = field(default_factory=list)
    """Each value and its term."""
    term: int = 0
    writers: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """The last number of each writer, with first offset and count."""
    slots: dict[str, SlotModel] = field(default_factory=dict)

    @property
    def next(self) -> int:
        return self.base + len(self.records)

    def append(self, frame: Frame) -> int:
        first = self.next
        self.records += [(value, frame.term) for value in frame.values]
        self.term = frame.term
        if frame.writer is not None:
            writer, number = frame.writer
            self.writers[writer] = (number, first, len(frame.values))
        return first

    def since(self, offset: int, upto: int) -> list[tuple[int, bytes, int]]:
        return [(at, *self.records[at - self.base]) for at in range(offset, min(upto, self.next))]

    def floor(self) -> int | None:
        return min((slot.position for slot in self.slots.values() if not slot.dropped), default=None)

    def write_slots(self) -> None:
        for slot in self.slots.values():
            slot.written = slot.position


class WalMachine(RuleBasedStateMachine):
    """Applies the same calls to a log and to a list, and compares them."""

    @initialize(
        seed=st.integers(0, 1000), roll=st.sampled_from([0, 700, 3000]), tail=st.sampled_from([0, 1500, 1 << 20])
    )
    def create(self, seed: int, roll: int, tail: int) -> None:
        self.disk = SimulatedDisk(seed)
        self.options: dict[str, Any] = {"roll_bytes": roll, "tail_bytes": tail}
        self.clock = ManualClock()
        self.model = Model()
        self.pending: list[tuple[LsnHandle, Frame]] = []
        self.claims: list[tuple[str, int, Any]] = []
        self.wal = self.open()

    def open(self) -> WriteAheadLog:
        boot = UUID(int=self.disk.restarts)
        log = WalLog.open(
            FOLDER,
            background=False,
            env=Env(disk=self.disk, clock=self.clock, chance=SeededChance(1)),
            boot=boot,
            **self.options,
        )
        return WriteAheadLog(log)

    @property
    def queued_term(self) -> int:
        return self.pending[-1][1].term if self.pending else self.model.term

    @property
    def queued_next(self) -> int:
        return self.model.next + sum(len(frame.values) for _, frame in self.pending)

    def commit(self) -> None:
        """Everything queued is durable: to wait for one handle commits all of them."""
        for handle, frame in self.pending:
            first = self.model.append(frame)
            assert handle.done()
            assert handle.result() == first + len(frame.values)
        self.pending.clear()

    # --- appending ---------------------------------------------------------------------------------------------

    @rule(value=values)
    def append(self, value: bytes) -> None:
        lsn = self.wal.append(value)
        self.commit_then(Frame([value], self.queued_term), lsn)

    @rule(many=some_values)
    def append_many(self, many: list[bytes]) -> None:
        lsns = self.wal.append_many(many)
        assert len(lsns) == len(many)
        self.commit_then(Frame(many, self.queued_term), lsns[-1])

    def commit_then(self, frame: Frame, lsn: int) -> None:
        self.commit()
        assert lsn == self.model.append(frame) + len(frame.values)

    @rule(value=values, off=nearby, batch=st.booleans())
    def append_at_an_explicit_lsn(self, value: bytes, off: int, batch: bool) -> None:
        lsn = max(1, self.queued_next + 1 + off)
        fits = lsn == self.queued_next + 1 or self.queued_next == 0

        def append() -> int:
            return self.wal.append_batch(records(value), lsn=lsn)[-1] if batch else self.wal.append(value, lsn=lsn)

        if not fits:
            with pytest.raises(ExpectationFailed, match=rf"\b{self.queued_next + 1}\b"):
                append()
            return
        self.begin_at(lsn - 1)
        frame = Frame([value], self.queued_term)
        self.commit_then(frame, append())

    def begin_at(self, offset: int) -> None:
        """A log that never held a record begins at the offset of its first one; earlier positions are invalid."""
        if self.queued_next == 0 and offset:
            self.model.base = self.model.start = offset
            for name in [name for name, slot in self.model.slots.items() if not slot.dropped]:
                self.wal.log.slots.drop(name)
                self.model.slots[name].dropped = True

    @rule(value=values, change=st.integers(-2, 3))
    def append_in_a_term(self, value: bytes, change: int) -> None:
        term = max(0, self.queued_term + change)
        if term < self.queued_term:
            with pytest.raises(Fenced, match=f"in term {self.queued_term}"):
                self.wal.append(value, term=term)
            return
        frame = Frame([value], term)
        self.commit_then(frame, self.wal.append(value, term=term))

    @rule(writer=st.integers(0, 2), change=st.integers(-2, 3), some=some_values)
    def append_with_a_number(self, writer: int, change: int, some: list[bytes]) -> None:
        known = self.model.writers.get(writer)
        number = max(0, (0 if known is None else known[0]) + change)

        def append() -> Receipt:
            return self.wal.log.append(records(*some), writer=writer_named(writer), number=number).result()

        if known is None and number:
            with pytest.raises(WriterExpired):
                append()
        elif known is not None and number <= known[0]:
            # A repetition has nothing to commit, and nothing is appended whatever the batch holds.
            assert append() == (Receipt(*known[1:]) if number == known[0] else Receipt(None, len(some)))
        elif known is not None and number > known[0] + 1:
            with pytest.raises(OutOfOrder):
                append()
        else:
            receipt = append()
            self.commit()
            assert receipt == Receipt(self.model.append(Frame(some, self.model.term, (writer, number))), len(some))

    @rule(some=some_values, batches=st.lists(st.booleans(), min_size=6, max_size=6))
    def submit(self, some: list[bytes], batches: list[bool]) -> None:
        """Queue appends; nothing of them can be seen before someone commits."""
        for value, batch in zip(some, batches, strict=False):
            handle = self.wal.submit_batch(records(value)) if batch else self.wal.submit(value)
            assert not handle.done()
            self.pending.append((handle, Frame([value], self.queued_term)))

    @precondition(lambda self: self.pending)
    @rule(which=fractions)
    def wait_for_one(self, which: float) -> None:
        handle, _ = self.pending[min(len(self.pending) - 1, int(which * len(self.pending)))]
        handle.result()
        self.commit()

    # --- forgetting --------------------------------------------------------------------------------------------

    @rule(where=fractions, beyond=st.booleans())
    def trim(self, where: float, beyond: bool) -> None:
        model = self.model
        lsn = model.next + 5 if beyond else model.start + round(where * (model.next - model.start))
        assert self.wal.prune_through(lsn) == self.trimmed_to(lsn)
        if self.trimmed_to(lsn) > model.start:
            model.start = self.trimmed_to(lsn)
            model.write_slots()

    def trimmed_to(self, lsn: int) -> int:
        floor = self.model.floor()
        reach = min(lsn, self.model.next)
        return max(self.model.start, reach if floor is None else min(reach, floor))

    # --- slots -------------------------------------------------------------------------------------------------

    def place(self, where: float, off: int) -> int:
        return max(0, self.model.start + round(where * (self.model.next - self.model.start)) + off)

    def check_place(self, position: int) -> type[StrandlineError] | None:
        if position < self.model.start:
            return CursorExpired
        return Diverged if position > self.model.next else None

    @rule(name=names, where=fractions, off=nearby)
    def create_slot(self, name: str, where: float, off: int) -> None:
        position, slot = self.place(where, off), self.model.slots.get(name)
        exists = slot is not None and not slot.dropped
        error = AlreadyExists if exists else self.check_place(position)
        if error is not None:
            with pytest.raises(error):
                self.wal.log.slots.create(name, position)
            return
        self.wal.log.slots.create(name, position)
        self.model.slots[name] = SlotModel(position, position, epoch=0 if slot is None else slot.epoch + 1)
        self.model.write_slots()

    @rule(name=names, holder=holders)
    def claim_slot(self, name: str, holder: str) -> None:
        slot = self.model.slots.get(name)
        if slot is None or slot.dropped:
            with pytest.raises(NotFound):
                self.wal.log.slots.claim(name, holder)
            return
        claim = self.wal.log.slots.claim(name, holder)
        if slot.holder != holder:
            slot.holder, slot.epoch = holder, slot.epoch + 1
            self.model.write_slots()
        assert claim.epoch == slot.epoch
        self.claims.append((name, slot.epoch, claim))

    @precondition(lambda self: self.claims)
    @rule(which=st.integers(0, 100), where=fractions, off=nearby)
    def advance_slot(self, which: int, where: float, off: int) -> None:
        name, epoch, claim = self.claims[which % len(self.claims)]
        slot, position = self.model.slots[name], self.place(where, off)
        cursor = Cursor(self.wal.log.log_id, position)
        calls = len(self.disk.calls)
        error: type[StrandlineError] | None = Diverged if position > self.model.next else None
        if error is None:
            error = NotFound if slot.dropped else Fenced if slot.epoch != epoch else None
        if error is not None:
            with pytest.raises(error):
                claim.advance(cursor)
        else:
            claim.advance(cursor)
            slot.position = max(slot.position, position)
        assert len(self.disk.calls) == calls, "moving a slot costs no write"

    @rule(name=names, where=fractions, off=nearby)
    def reset_slot(self, name: str, where: float, off: int) -> None:
        position, slot = self.place(where, off), self.model.slots.get(name)
        error = NotFound if slot is None or slot.dropped else self.check_place(position)
        if error is not None:
            with pytest.raises(error):
                self.wal.log.slots.reset(name, position)
            return
        self.wal.log.slots.reset(name, position)
        assert slot is not None
        self.model.slots[name] = SlotModel(position, position, epoch=slot.epoch + 1)
        self.model.write_slots()

    @rule(name=names)
    def drop_slot(self, name: str) -> None:
        slot = self.model.slots.get(name)
        if slot is None or slot.dropped:
            with pytest.raises(NotFound):
                self.wal.log.slots.drop(name)
            return
        self.wal.log.slots.drop(name)
        slot.dropped = True
        self.model.write_slots()

    # --- reading -----------------------------------------------------------------------------------------------

    @rule(where=fractions, off=nearby, count=st.integers(1, 20))
    def read_since(self, where: float, off: int, count: int) -> None:
        lsn = self.place(where, off)
        error = self.check_place(lsn)
        if error is not None:
            with pytest.raises(error):
                self.wal.read_since(lsn, count)
            return
        found = [(record.lsn - 1, record.payload, record.term) for record in self.wal.read_since(lsn, count)]
        assert found == self.model.since(lsn, lsn + count)

    @rule(
        where=fractions,
        limit=st.builds(
            Limit,
            records=st.none() | st.integers(1, 9),
            bytes=st.none() | st.integers(1, 5000),
            batches=st.none() | st.integers(1, 4),
        ),
        upto=st.none() | fractions,
        elsewhere=st.booleans(),
    )
    def plan(self, where: float, limit: Limit, upto: float | None, elsewhere: bool) -> None:
        since = self.place(where, 0)
        end = self.model.next if upto is None else self.place(upto, 0)
        bound = Limit(limit.records, limit.bytes, limit.batches, None if upto is None else end)
        log = self.reader() if elsewhere else self.wal.log
        spans = log.plan(Cursor(log.log_id, since), bound)
        assert bool(spans) == (since < end)
        assert len(spans) <= (limit.batches or len(spans))
        if len(spans) > 1:
            assert sum(span.next - span.first for span in spans) <= (limit.records or self.model.next)
            assert sum(span.size for span in spans) <= (limit.bytes or 1 << 60)
        for span in spans:
            assert span.first == since
            found = [
                row
                for batch in span.fetch(["offset", "value"])
                for row in zip(*map(list, _columns(batch)), strict=True)
            ]
            assert found == [(at, value) for at, value, _ in self.model.since(since, span.next)]
            since = span.next
        assert since <= max(end, self.place(where, 0))

    def reader(self) -> WalReader:
        return WalReader(FOLDER, env=Env(disk=self.disk, clock=self.clock), boot=UUID(int=self.disk.restarts))

    @invariant()
    def the_log_shows_what_the_list_has(self) -> None:
        bounds = self.wal.log.bounds()
        assert (bounds.first, bounds.next) == (self.model.start, self.model.next)
        assert (self.wal.oldest, self.wal.current) == (self.model.start + 1, self.model.next)
        assert self.wal.log.end().term == self.model.term
        assert self.wal.wait(self.model.next, 0) is False
        assert self.model.next == 0 or self.wal.wait(self.model.next - 1, 0)

    @invariant()
    def the_slots_stand_where_they_should(self) -> None:
        found = {slot.name: (slot.position, slot.holder, slot.epoch) for slot in self.wal.log.slots.list()}
        model = {name: slot for name, slot in self.model.slots.items() if not slot.dropped}
        assert found == {name: (slot.position, slot.holder, slot.epoch) for name, slot in model.items()}
        assert self.wal.log.slots.floor() == self.model.floor()
        assert all(slot.position >= self.model.start for slot in model.values())

    @rule()
    def another_process_sees_the_same_and_changes_nothing(self) -> None:
        before = self.disk.fingerprint()
        reader = self.reader()
        self.check_all(reader)
        found = {slot.name: slot for slot in reader.slots.list()}
        model = {name: slot for name, slot in self.model.slots.items() if not slot.dropped}
        assert found.keys() == model.keys()
        for name, slot in model.items():
            assert slot.written <= found[name].position <= slot.position
            assert (found[name].holder, found[name].epoch) == (slot.holder, slot.epoch)
        assert self.disk.fingerprint() == before

    def check_all(self, log: Any) -> None:
        bounds = log.bounds()
        assert (bounds.first, bounds.next) == (self.model.start, self.model.next)
        found = [
            (offset, value)
            for span in log.plan(log.start())
            for batch in span.fetch(["offset", "value"])
            for offset, value in zip(*_columns(batch), strict=True)
        ]
        assert found == [(at, value) for at, value, _ in self.model.since(bounds.first, bounds.next)]

    # --- ends, good and bad ------------------------------------------------------------------------------------

    @rule()
    def close_and_open(self) -> None:
        self.wal.close()
        self.commit()
        self.model.write_slots()
        self.claims.clear()
        self.check_all(self.reader())
        self.wal = self.open()
        self.check_all(self.wal.log)

    @rule()
    def close_lose_power_and_open(self) -> None:
        self.wal.close()
        self.commit()
        self.model.write_slots()
        self.disk.crash(CrashMode.NOTHING)
        self.check_all(self.reader())  # a clean end is known to be one
        self.come_back()

    @rule()
    def kill_and_open(self) -> None:
        self.disk.kill()
        self.pending.clear()
        self.check_all(self.reader())
        self.come_back()

    @rule(mode=st.sampled_from(POWER))
    def lose_power_and_open(self, mode: CrashMode) -> None:
        self.disk.crash(mode)
        self.pending.clear()
        with pytest.raises(NotReady):
            self.reader().bounds()
        self.come_back()

    def come_back(self) -> None:
        """Open what a crash has left: the records as before, the slots at their positions or a little below."""
        self.pending.clear()
        self.claims.clear()
        self.wal = self.open()
        found = {slot.name: slot for slot in self.wal.log.slots.list()}
        for name, slot in self.model.slots.items():
            if not slot.dropped:
                assert slot.written <= found[name].position <= slot.position
                slot.position = slot.written = found[name].position
        self.check_all(self.wal.log)

    # --- ends in the middle of something -----------------------------------------------------------------------

    def interrupt(self, call: int, moment: Any, mode: CrashMode, work: Callable[[], object]) -> bool:
        """Stop the machine at one of the next disk operations, crash, and say whether the work came to its end."""
        self.disk.stop(len(self.disk.calls) + call, moment=moment)
        done = False
        with contextlib.suppress(Crash, StrandlineError):
            work()
            done = not self.disk.stopped
        self.disk.crash(mode)
        return done

    @rule(
        call=st.integers(0, 9),
        moment=moments,
        mode=st.sampled_from(CrashMode),
        frames=st.lists(some_values, max_size=3),
    )
    def crash_while_appending(self, call: int, moment: Any, mode: CrashMode, frames: list[list[bytes]]) -> None:
        """Of an unfinished append any number of whole frames exists, in order; of an acknowledged one all."""
        queued = [frame for _, frame in self.pending]
        for values in frames:
            self.wal.submit_batch(records(*values))
            queued.append(Frame(values, self.queued_term))
        done = self.interrupt(call, moment, mode, lambda: self.wal.append(b"last"))
        queued.append(Frame([b"last"], self.queued_term))
        self.pending.clear()
        self.claims.clear()
        self.wal = self.open()
        assert not done or self.wal.current == self.model.next + sum(len(frame.values) for frame in queued)
        self.adopt(queued, self.wal.current)
        self.come_back_again()

    def adopt(self, queued: list[Frame], end: int) -> None:
        """Take what is there of what was queued. Single records that stood next to each other shared a frame."""
        values = [(value, frame.term) for frame in queued for value in frame.values]
        assert self.model.next <= end <= self.model.next + len(values)
        taken = values[: end - self.model.next]
        self.model.records += taken
        if taken:
            self.model.term = taken[-1][1]

    def come_back_again(self) -> None:
        """What was shown once stays, though the power fails right after it."""
        self.disk.crash(CrashMode.NOTHING)
        self.come_back()

    @rule(call=st.integers(0, 16), moment=moments, mode=st.sampled_from(CrashMode), where=fractions)
    def crash_while_trimming(self, call: int, moment: Any, mode: CrashMode, where: float) -> None:
        lsn = self.place(where, 0)
        reach = self.trimmed_to(lsn)
        done = self.interrupt(call, moment, mode, lambda: self.wal.prune_through(lsn))
        self.pending.clear()
        self.wal = self.open()
        start = self.wal.oldest - 1
        assert start in ({reach} if done else {reach, self.model.start})
        if start > self.model.start:
            self.model.start = start
            self.model.write_slots()
        self.come_back_again()

    @rule(call=st.integers(0, 5), moment=moments, mode=st.sampled_from(CrashMode), name=names, where=fractions)
    def crash_while_creating_or_resetting_a_slot(
        self, call: int, moment: Any, mode: CrashMode, name: str, where: float
    ) -> None:
        position, before = self.place(where, 0), self.model.slots.get(name)
        change = self.wal.log.slots.create if before is None or before.dropped else self.wal.log.slots.reset
        done = self.interrupt(call, moment, mode, lambda: change(name, position))
        self.pending.clear()
        self.wal = self.open()
        found = next((slot for slot in self.wal.log.slots.list() if slot.name == name), None)
        epoch = 0 if before is None else before.epoch + 1
        if found is not None and found.epoch == epoch:
            self.model.slots[name] = SlotModel(position, position, epoch=epoch)
            self.model.write_slots()
        else:
            assert not done, "a slot that was answered is gone"
        self.come_back_again()


def _columns(batch: Any) -> list[list[Any]]:
    return [column.to_pylist() for column in batch.columns]


@pytest.mark.parametrize("mode", some(CrashMode, 3))
def test_a_log_that_is_stopped_while_it_begins_elsewhere_can_be_opened(mode: CrashMode):
    """An explicit first lsn moves the beginning of an empty log: wherever that is stopped, nothing is damaged."""
    for number in range(100):
        disk = SimulatedDisk(number)
        wal = _open_on(disk)
        disk.stop(len(disk.calls) + number)
        told = 0
        with contextlib.suppress(Crash, StrandlineError):
            told = wal.append(b"first", lsn=10)
        if not disk.stopped:
            assert told == 10
            return
        disk.crash(mode)
        wal = _open_on(disk)
        assert wal.current in (0, 9, 10)
        assert wal.append(b"next", lsn=max(10, wal.current + 1)) == wal.current
        wal.close()
    raise AssertionError("it never came to its end")


def _open_on(disk: SimulatedDisk) -> WriteAheadLog:
    boot = UUID(int=disk.restarts)
    env = Env(disk=disk, clock=ManualClock(), chance=SeededChance(1))
    return WriteAheadLog(WalLog.open(FOLDER, background=False, boot=boot, env=env))


QUICK = settings(
    max_examples=examples(50),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    print_blob=True,
)


def test_a_log_is_a_list_whatever_is_done_to_it_and_wherever_it_crashes():
    run_state_machine_as_test(WalMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_log_is_a_list_for_a_long_time():
    run_state_machine_as_test(
        WalMachine, settings=settings(QUICK, max_examples=1500, stateful_step_count=60, derandomize=False)
    )
