"""Whole histories of a log that is trimmed: writers, readers, meddlers and trimmers that race, lose answers and die.

Every write that lands passes a watchman, which tracks what is still needed and complains at once.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import UUID

from strandline.errors import (
    AlreadyExists,
    Contended,
    CursorExpired,
    Diverged,
    Fenced,
    NotFound,
    OutcomeUnknown,
    SlotInvalid,
    TransientStorageError,
)
from strandline.formats.object.head import HeadCodec
from strandline.formats.object.identity import SlotCodec
from strandline.log.object import ObjectLog, open_log
from strandline.log.object.head.index import StoredChunks, chunk_path, newest_first, references_of
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import Head, WriterId
from strandline.model.retention import SlotLimits, SlotState
from strandline.storage.env import Env
from strandline.storage.objects.store import Object, ObjectInfo, ObjectStore, Payload, Precondition, Version
from strandline.storage.retry import RetryingStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.slots import append
from tests.interleave import Interleaver

BAD_LINE = Faults(before=0.03, after=0.05, late=0.03, throttled=0.01)
DEATH = 0.006
GRACE = 100.0
R = TypeVar("R")

UNHEARD = (OutcomeUnknown, Contended, TransientStorageError)
TURNED_AWAY = (AlreadyExists, NotFound, SlotInvalid, CursorExpired, Fenced, Diverged)


@dataclass(slots=True)
class History:
    """What happened, for the check and for tests that make sure that something did."""

    seed: int
    acknowledged: dict[tuple[WriterId, int], tuple[int, tuple[bytes, ...]]] = field(default_factory=dict)
    read: int = 0
    trims: int = 0
    deleted: int = 0
    invalidated: int = 0
    resets: int = 0
    deaths: int = 0
    stale: int = 0
    given_up: int = 0
    complaints: list[str] = field(default_factory=list)


class Watchman:
    """A store that tracks which of its objects are needed, and complains about every write that drops one."""

    def __init__(self, inner: ObjectStore, history: History, clock: ManualClock) -> None:
        self._inner = inner
        self._history = history
        self._clock = clock
        self._left: dict[str, int] = {}
        self._listed: set[str] = set()
        self._chunks: set[str] = set()
        self._head: Head | None = None

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, path: str) -> Object:
        return self._inner.get(path)

    def get_range(self, path: str, start: int, length: int) -> bytes | memoryview:
        return self._inner.get_range(path, start, length)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, start_after=start_after)

    def put(self, path: str, data: Payload) -> None:
        self._inner.put(path, data)

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        version = self._inner.put_if(path, data, when)
        if path == "head":
            self._see_head(HeadCodec().decode(self._inner.get(path).data, path).value)
        elif path.startswith("slots/"):
            self._see_slot(path)
        return version

    def delete(self, path: str) -> None:
        if path in self._listed or path in self._chunks:
            self._complain(f"{path} was deleted while it is listed")
        left = self._left.get(path)
        if left is not None and self._clock.now() - left < GRACE * 1_000_000:
            self._complain(f"{path} was deleted within the grace period")
        self._history.deleted += path.startswith("batches/")
        self._inner.delete(path)

    def _see_head(self, head: Head) -> None:
        if self._head is not None and head.floor > self._head.floor:
            self._history.trims += 1
        self._head = head
        for name, pin in head.slots.items():
            if pin is not None and pin.position < head.floor:
                self._complain(f"the floor {head.floor} is above the pin of {name} at {pin.position}")
            with contextlib.suppress(NotFound):
                self._see_slot(f"slots/{name}.json")
        listed = {
            entry.location
            for entry in newest_first(references_of(head), head.tail, head.floor, StoredChunks(self._inner))
        }
        for path in self._listed - listed:
            self._left[path] = head.trimmed[-1].at  # when it was decided; the write itself may have landed much later
        self._listed = listed
        self._chunks = {chunk_path(reference, level) for level, reference in references_of(head)}

    def _see_slot(self, path: str) -> None:
        name = path.removeprefix("slots/").removesuffix(".json")
        state = SlotCodec(name).decode(self._inner.get(path).data, path).value
        head = self._head
        # While it is pinned its cell may still be that of a dropped slot of the same name: then the pin counts.
        listed = head is not None and head.slots.get(name, self) is None
        if listed and state.pins and state.position < head.floor:
            self._complain(f"the floor {head.floor} is above the valid slot {name} at {state.position}")

    def _complain(self, what: str) -> None:
        self._history.complaints.append(what)


class Process:
    """A process with a bad line; after dying it opens the log again and remembers only its own intentions."""

    def __init__(self, history: History, line: FaultyStore, clock: ManualClock, chance: random.Random) -> None:
        self.history = history
        self.clock = clock
        self.chance = chance
        self._line = line
        self._seeded = SeededChance(chance.getrandbits(64))
        self._log: ObjectLog | None = None

    def insist(self, action: Callable[[ObjectLog], R]) -> R | None:
        """Repeat the action until it is answered, up to a bound; None if it never was."""
        for _ in range(12):
            try:
                if self._log is None:
                    line = RetryingStore(self._line, env=Env(clock=self.clock, chance=self._seeded))
                    self._log = open_log(line, env=Env(clock=self.clock, chance=self._seeded))
                return action(self._log)
            except Crash:
                self.history.deaths += 1
                self._log = None
            except UNHEARD:
                continue
        self.history.given_up += 1
        return None

    def attempt(self, action: Callable[[ObjectLog], R]) -> R | None:
        """The same, for what may be refused for a good reason."""
        with contextlib.suppress(*TURNED_AWAY):
            return self.insist(action)
        return None


def play(seed: int, *, faults: Faults = BAD_LINE) -> History:
    """Two writers, two readers, a meddler and two trimmers, in an order drawn from the seed; then the check."""
    chance = random.Random(seed)
    order = Interleaver(chance.getrandbits(64))
    clock, history = ManualClock(), History(seed)
    place = Watchman(PlainStore(clock=clock), history, clock)
    retention = chance.choice(["consumed", "consumed", "bytes:2000", "age:150s"])
    limits = chance.choice([None, SlotLimits(lag_bytes=4000), SlotLimits(idle_seconds=200)])
    log = open_log(
        place,
        create=True,
        retention=retention,
        limits=limits,
        env=Env(clock=clock, chance=SeededChance(seed ^ 0xABCDEF)),
    )
    append(log, b"first", writer=WriterId(UUID(int=seed + 1)), number=0)
    lines: list[FaultyStore] = []

    def process() -> Process:
        line = FaultyStore(place, seed=chance.getrandbits(64), faults=faults, clock=clock)
        line.hook(_meet(order, random.Random(chance.getrandbits(64))))
        lines.append(line)
        return Process(history, line, clock, random.Random(chance.getrandbits(64)))

    tasks: list[Callable[[], None]] = [_writer(process()) for _ in range(2)]
    tasks += [_reader(process(), f"s{number}") for number in range(2)]
    tasks += [_meddler(process()), *(_trimmer(process()) for _ in range(2))]
    order.run(tasks)
    for line in lines:
        line.land_late()
    check(history, place, clock)
    return history


def _meet(order: Interleaver, chance: random.Random) -> Callable[[Call], None]:
    def hook(call: Call) -> None:
        if call.stage == "before" or call.name in ("put_if", "put"):
            order.point()
        if chance.random() < DEATH / 2:
            raise Crash(f"at {call}")

    return hook


def _writer(process: Process) -> Callable[[], None]:
    chance = process.chance
    writer = WriterId(SeededChance(chance.getrandbits(64)).uuid())

    def work() -> None:
        for number in range(chance.randint(4, 9)):
            values = tuple(f"{writer.hex[:6]}/{number}/{part}".encode() for part in range(chance.randint(1, 3)))

            def act(log: ObjectLog, number: int = number, values: tuple[bytes, ...] = values) -> int | None:
                return append(log, *values, writer=writer, number=number).first

            first = process.insist(act)
            if first is None:
                return  # the number's fate is unknown, or its place is: nothing more can be said of this writer
            process.history.acknowledged[writer, number] = (first, values)

    return work


def _reader(process: Process, name: str) -> Callable[[], None]:
    """Claims the slot, reads from its position and acknowledges what it has read."""
    chance = process.chance

    def once(log: ObjectLog, holder: str) -> None:
        if all(slot.name != name for slot in log.slots.list()):
            log.slots.create(name, log.position_of("retained"))
        slot = log.slots.claim(name, holder)
        cursor = Cursor(log.log_id, slot.state().position)
        for _ in range(2):
            try:
                spans = log.plan(cursor, Limit(batches=2))
                for span in spans:
                    process.history.read += sum(batch.num_rows for batch in span.fetch())
            except (CursorExpired, NotFound) as error:
                _was_told(log, slot.state(), slot.epoch, error, process.history)
                return
            if not spans:
                return
            cursor = cursor.at(spans[-1].next)
            slot.advance(cursor)

    def work() -> None:
        for turn in range(chance.randint(2, 4)):
            process.attempt(lambda log, turn=turn: once(log, f"{name}-{turn}"))

    return work


def _was_told(log: ObjectLog, state: SlotState, epoch: int, error: Exception, history: History) -> None:
    # Read after the failure: a slot that is still valid and ours should have kept what we wanted to read.
    if state.pins and state.epoch == epoch and state.name in log.head().slots:
        history.complaints.append(f"a valid slot at {state.position} could not read on: {error}")


def _meddler(process: Process) -> Callable[[], None]:
    """Resets, drops and creates slots, and holds what it reads."""
    chance, history = process.chance, process.history

    def act(log: ObjectLog) -> None:
        bounds = log.bounds()
        where = chance.randint(bounds.first, bounds.next)
        match chance.choice(["reset", "reset", "drop", "create", "hold"]):
            case "reset":
                log.slots.reset(chance.choice(["s0", "s1"]), where)
                history.resets += 1
            case "drop":
                log.slots.drop(chance.choice(["s0", "s1", "s2"]))
            case "create":
                log.slots.create(chance.choice(["s0", "s2"]), where)
            case _:
                hold = log.hold(where, 120)
                for span in log.plan(Cursor(log.log_id, where), Limit(batches=1)):
                    span.fetch()
                hold.renew(where)
                if chance.random() < 0.7:
                    hold.release()

    def work() -> None:
        for _ in range(chance.randint(3, 7)):
            process.attempt(act)

    return work


def _trimmer(process: Process) -> Callable[[], None]:
    def act(log: ObjectLog) -> None:
        process.history.invalidated += len(log.trim(grace=GRACE).invalidated)

    def work() -> None:
        for _ in range(process.chance.randint(2, 4)):
            process.attempt(act)
            process.clock.advance(process.chance.choice([1, 30, 101]))

    return work


def check(history: History, place: Watchman, clock: ManualClock) -> None:
    """Raise ``AssertionError``, naming the seed, unless an exact log could have made this history."""
    story = f"seed {history.seed}"
    assert not history.complaints, f"{story}: {history.complaints}"
    log = open_log(place, env=Env(clock=clock, chance=SeededChance(history.seed ^ 0x5EED)))
    quiet = 0
    while quiet < 3:  # calmly, until nothing waits any more; an upload is kept for two rounds
        done = log.trim(grace=GRACE, everything=True)
        quiet = 0 if done.deleted or done.waiting or done.trimmed_records else quiet + 1
        clock.advance(GRACE)
    assert not history.complaints, f"{story}: {history.complaints}"
    head, start = log.head(), log.start()
    spans = log.plan(start)
    offsets, values = [], []
    for span in spans:
        for batch in span.fetch():
            offsets += batch["offset"].to_pylist()
            values += batch["value"].to_pylist()
    assert offsets == list(range(head.floor, head.next_offset)), f"There is a hole or an overlap; {story}"
    assert len(values) == len(set(values)), f"A record is there twice; {story}"
    for key, (first, wanted) in history.acknowledged.items():
        kept = tuple(values[max(0, first - head.floor) : max(0, first + len(wanted) - head.floor)])
        assert kept == (wanted if first >= head.floor else ()), (
            f"{key} at {first} was acknowledged and is lost; {story}"
        )
    listed = {span.entry.location for span in spans}
    stored = {item.path for item in place.list("batches/")}
    assert listed == stored, f"{stored - listed} were left behind, {listed - stored} are missing; {story}"
    chunks = {item.path for item in place.list("chunks/")}
    if not chunks <= _live_chunks(head, place):
        raise AssertionError(f"{chunks} were left behind; {story}")


def _live_chunks(head: Head, place: ObjectStore) -> set[str]:
    chunks, waiting, live = StoredChunks(place), list(references_of(head)), set()
    while waiting:
        level, reference = waiting.pop()
        live.add(chunk_path(reference, level))
        if level:
            waiting += [(level - 1, child) for child in chunks.read(reference, level) if child.next > head.floor]
    return live
