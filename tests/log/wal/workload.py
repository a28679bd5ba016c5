"""Shared parts of tests of the write-ahead log on a simulated disk: a workload, and its acknowledged results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa

from strandline.errors import CursorExpired, NotReady
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Cursor
from strandline.model.head import Receipt, WriterId
from strandline.model.records import READ_SCHEMA
from strandline.storage.disk import DISK, AppendFile, Disk
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.simdisk import SimulatedDisk
from tests.contracts.logs import records
from tests.contracts.logs.batches import SOON
from tests.disk_doubles import _PassingDisk, _PassingFile

FOLDER = "/srv/log"
WRITER = WriterId(UUID(int=7))
END = 17
"""Where the workload is at its end."""
BATCH, BATCH_END = 5, 8
"""The offsets of the batch that is appended with a number."""


class Note(NamedTuple):
    """What the workload was promised, or has seen."""

    what: str
    value: Any


def payload(offset: int) -> bytes:
    """What the record at an offset holds; some are longer than a page."""
    return b"%d:" % offset + bytes([offset]) * (5000 if offset % 6 == 4 else 30 * offset)


def open_on(disk: Any, **options: Any) -> WalLog:
    """The log on this disk, as a process would open it that has no threads."""
    settings: dict[str, Any] = {"background": False, "roll_bytes": 9000, "boot": UUID(int=disk.restarts), **options}
    return WalLog.open(FOLDER, env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(1)), **settings)


def values(log: Any) -> dict[int, bytes]:
    """Everything that can be read, by its offset."""
    batches = [batch for span in log.plan(log.start()) for batch in span.fetch()]
    table = pa.Table.from_batches(batches, READ_SCHEMA)
    return dict(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True))


def workload(disk: SimulatedDisk, notes: list[Note]) -> None:
    """Append one by one, in groups and in batches, roll, pin, acknowledge and trim; from the end of the log on."""
    work = Work(open_on(disk), notes)
    while (end := work.log.bounds().next) < END:
        upto, step = next((upto, step) for upto, step in STEPS if end < upto)
        step(work, upto - end)
    work.log.close()


class Work:
    """One process at work; it notes each promise when it was given."""

    def __init__(self, log: WalLog, notes: list[Note]) -> None:
        self.log = log
        self._notes = notes

    def _promised(self, what: str, value: Any) -> None:
        self._notes.append(Note(what, value))

    def single(self, _: int) -> None:
        receipt = self.log.append_value(payload(self.log.bounds().next)).result()
        self._promised("durable", receipt.first + 1)

    def group(self, count: int) -> None:
        end = self.log.bounds().next
        handles = [self.log.append_value(payload(offset)) for offset in range(end, end + count)]
        self._promised("durable", handles[-1].result().first + 1)
        assert all(handle.done() for handle in handles)

    def numbered(self, _: int) -> None:
        batch = records(*map(payload, range(BATCH, BATCH_END)))
        self._promised("durable", self.log.append(batch, writer=WRITER, number=0).result().first + 3)

    def pin(self, count: int) -> None:
        if not self.log.slots.list():
            self.log.slots.create("reader", 2)
            self._promised("slot", 2)
        self.log.slots.claim("reader", "me")
        self._promised("holder", "me")
        self.group(count)

    def move_and_trim(self, count: int) -> None:
        slot = self.log.slots.claim("reader", "me")
        slot.advance(Cursor(self.log.log_id, 6))
        assert self.log.trim(10) == max(6, self.log.bounds().first)
        self._promised("start", 6)
        self.group(count)

    def trim_all(self, count: int) -> None:
        if self.log.slots.list():
            self.log.slots.drop("reader")
        self._promised("dropped", value=True)
        assert self.log.trim(99) == self.log.bounds().next
        self._promised("start", self.log.bounds().next)
        self.group(count)


STEPS: list[tuple[int, Callable[[Work, int], None]]] = [
    (1, Work.single),
    (4, Work.group),
    (BATCH, Work.single),
    (BATCH_END, Work.numbered),
    (10, Work.pin),
    (13, Work.move_and_trim),
    (15, Work.trim_all),
    (END, Work.single),
]
"""What is done below each offset."""


def check(disk: SimulatedDisk, notes: list[Note]) -> None:
    """Every promise holds: nothing acknowledged is missing, nothing is there twice or between, slots are kept."""
    told = _Told(notes)
    _check_reader(disk, told)
    log = open_on(disk)
    bounds = log.bounds()
    assert bounds.next >= told.highest("durable"), f"{bounds} and {told.highest('durable')} was acknowledged"
    assert bounds.next >= told.highest("seen")
    assert bounds.first >= told.highest("start")
    assert values(log) == {offset: payload(offset) for offset in range(bounds.first, bounds.next)}
    for expired in range(bounds.first):
        try:
            log.plan(Cursor(log.log_id, expired))
        except CursorExpired:
            continue
        raise AssertionError(f"offset {expired} is trimmed, and was not said to be expired")
    _check_slots(log, told)
    if bounds.next >= BATCH_END:
        again = log.append(records(b"x"), writer=WRITER, number=0)
        assert again.result() == Receipt(BATCH, 3), "an append whose answer was lost was not recognised"
    else:
        assert bounds.next <= BATCH, "a part of a batch can be seen"
    notes.append(Note("seen", bounds.next))
    disk.kill()


def _check_slots(log: WalLog, told: _Told) -> None:
    slots = log.slots.list()
    assert len(slots) <= 1
    if told.has("slot") and not told.has("dropped") and log.bounds().next < 13:
        assert [slot.name for slot in slots] == ["reader"], "a slot that was created is gone"
        assert 2 <= slots[0].position <= 6
        assert slots[0].position >= log.bounds().first, "what a valid slot needs was trimmed"
        if told.has("holder"):
            assert slots[0].holder == "me", "a claim that was answered is gone"


def _check_reader(disk: SimulatedDisk, told: _Told) -> None:
    """A reader in another process sees durable records or nothing, and changes nothing."""
    before = disk.fingerprint()
    try:
        reader = WalReader(FOLDER, env=Env(disk=disk, clock=ManualClock()), boot=UUID(int=disk.restarts))
        bounds = reader.bounds()
        found = values(reader)
    except NotReady:
        return
    except Exception:
        if told.has("durable"):
            raise
        return
    assert found == {offset: payload(offset) for offset in range(bounds.first, bounds.next)}
    told.notes.append(Note("seen", bounds.next))
    assert disk.fingerprint() == before


class _Told:
    def __init__(self, notes: list[Note]) -> None:
        self.notes = notes

    def highest(self, what: str) -> int:
        return max((note.value for note in self.notes if note.what == what), default=0)

    def has(self, what: str) -> bool:
        return any(note.what == what for note in self.notes)


class HeldSyncs(_PassingDisk):
    """A disk whose syncs of frames wait, once :meth:`hold` was called, until :meth:`release`."""

    def __init__(self, inner: Disk = DISK) -> None:
        super().__init__(inner)
        self.waiting = threading.Event()
        """Set when a sync has come and waits."""
        self.free = threading.Event()
        self.free.set()

    def hold(self) -> None:
        self.waiting.clear()
        self.free.clear()

    def release(self) -> None:
        self.free.set()

    def open_append(self, path: str) -> AppendFile:
        file = super().open_append(path)
        return _HeldFile(file, self) if path.endswith(".log") else file


class _HeldFile(_PassingFile):
    def __init__(self, inner: AppendFile, disk: HeldSyncs) -> None:
        super().__init__(inner)
        self._disk = disk

    def sync(self) -> None:
        if not self._disk.free.is_set():
            self._disk.waiting.set()
            assert self._disk.free.wait(SOON)
        super().sync()
