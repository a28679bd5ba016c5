"""Whole histories of a log: writers and would-be holders of a slot that race, lose answers, die and come back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from strandline.errors import AlreadyExists, Contended, Fenced, OutcomeUnknown, TransientStorageError
from strandline.log.contract import Slot
from strandline.log.object import ObjectLog, open_log
from strandline.model.head import Receipt, WriterId
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.logs import content
from tests.contracts.slots import append
from tests.interleave import Interleaver

R = TypeVar("R")

BAD_LINE = Faults(before=0.04, after=0.08, late=0.04, throttled=0.02)
DEATH = 0.01
UNHEARD = (OutcomeUnknown, Contended, TransientStorageError)

AppendTo = Callable[[ObjectLog, WriterId, int, tuple[bytes, ...]], Receipt]


@dataclass(slots=True)
class Appended:
    """One acknowledged append."""

    writer: WriterId
    number: int
    values: tuple[bytes, ...]
    receipt: Receipt


@dataclass(slots=True)
class History:
    """What happened, for the check and for tests that make sure that something did."""

    seed: int
    acknowledged: list[Appended] = field(default_factory=list)
    intended: set[tuple[WriterId, int]] = field(default_factory=set)
    claims: list[tuple[str, int]] = field(default_factory=list)
    advanced: list[int] = field(default_factory=list)
    highest_epoch: int = 0
    created: int = 0
    fenced: int = 0
    given_up: int = 0
    lost: int = 0
    late: int = 0
    conflicts: int = 0
    deaths: int = 0
    complaints: list[str] = field(default_factory=list)


class Caller:
    """A process with a failing store; after a crash it opens the log again and remembers only its own intentions."""

    def __init__(self, history: History, line: FaultyStore, chance: random.Random) -> None:
        self.history = history
        self._line = line
        self._chance = SeededChance(chance.getrandbits(64))
        self._log: ObjectLog | None = None

    def insist(self, action: Callable[[ObjectLog], R]) -> R | None:
        """Repeat the action until it is answered, up to a bound; None if it never was."""
        for _ in range(12):
            try:
                if self._log is None:
                    self._log = open_log(self._line, env=Env(clock=ManualClock(), chance=self._chance))
                return action(self._log)
            except Crash:
                self.history.deaths += 1
                self._log = None
            except UNHEARD:
                continue
        self.history.given_up += 1
        return None


def append_numbered(log: ObjectLog, writer: WriterId, number: int, values: tuple[bytes, ...]) -> Receipt:
    return append(log, *values, writer=writer, number=number)


def play(
    seed: int,
    append_to: AppendTo = append_numbered,
    *,
    faults: Faults = BAD_LINE,
    place: ObjectStore | None = None,
) -> History:
    """Two or three writers and two or three holders of one slot, in an order drawn from the seed; then the check."""
    chance = random.Random(seed)
    order = Interleaver(chance.getrandbits(64))
    place, history = place or PlainStore(), History(seed)
    log = open_log(place, create=True, env=Env(chance=SeededChance(seed)))
    append(log, b"first", writer=WriterId(SeededChance(~seed).uuid()), number=0)
    lines: list[FaultyStore] = []

    def caller() -> Caller:
        line = FaultyStore(place, seed=chance.getrandbits(64), faults=faults)
        line.hook(_meet(order, random.Random(chance.getrandbits(64))))
        lines.append(line)
        return Caller(history, line, chance)

    tasks = [
        _writer(caller(), f"w{name}", random.Random(seed + name), append_to) for name in range(chance.randint(2, 3))
    ]
    tasks += [_holder(caller(), f"h{name}", random.Random(~seed + name)) for name in range(chance.randint(2, 3))]
    order.run(tasks)
    for line in lines:
        line.land_late()
        history.lost += sum(row.outcome == "after" and row.name == "put_if" for row in line.log)
        history.late += sum(row.outcome == "late" and row.name == "put_if" for row in line.log)
        history.conflicts += sum(row.outcome == "raised" and row.name == "put_if" for row in line.log)
    check(history, place)
    return history


def _meet(order: Interleaver, chance: random.Random) -> Callable[[Call], None]:
    def hook(call: Call) -> None:
        if call.stage == "before" or call.name == "put_if":  # reads and uploads matter to nobody when they are done
            order.point()
        if chance.random() < DEATH / 2:
            raise Crash(f"at {call}")

    return hook


def _writer(caller: Caller, name: str, chance: random.Random, append_to: AppendTo) -> Callable[[], None]:
    writer = WriterId(SeededChance(chance.getrandbits(64)).uuid())

    def work() -> None:
        for number in range(chance.randint(1, 3)):
            values = tuple(f"{name}/{number}/{part}".encode() for part in range(chance.randint(1, 3)))
            caller.history.intended.add((writer, number))
            receipt = caller.insist(lambda log: append_to(log, writer, number, values))  # noqa: B023 - called at once
            if receipt is None:
                return  # the number's fate is unknown: nothing may come behind it
            caller.history.acknowledged.append(Appended(writer, number, values, receipt))

    return work


@dataclass(frozen=True, slots=True)
class Holder:
    """What a would-be holder of the slot does, one answered call at a time."""

    history: History
    name: str

    def create(self, log: ObjectLog) -> bool:
        try:
            log.slots.create("s", 0)
        except AlreadyExists:
            return True
        self.history.created += 1
        return True

    def claim(self, log: ObjectLog) -> Slot | None:
        try:
            slot = log.slots.claim("s", self.name)
        except Fenced:
            return None
        self.history.claims.append((self.name, slot.epoch))
        self.history.highest_epoch = max(self.history.highest_epoch, slot.epoch)
        return slot

    def advance(self, log: ObjectLog, slot: Slot) -> bool:
        to, newest = log.end(), self.history.highest_epoch
        try:
            slot.advance(to)
        except Fenced:
            self.history.fenced += 1
            return False
        if slot.epoch < newest:
            self.history.complaints.append(f"{self.name} advanced with epoch {slot.epoch} after {newest} was claimed")
        self.history.advanced.append(to.next)
        return True


def _holder(caller: Caller, name: str, chance: random.Random) -> Callable[[], None]:
    holder = Holder(caller.history, name)

    def work() -> None:
        if caller.insist(holder.create) is None:
            return
        for _ in range(chance.randint(1, 2)):
            slot = caller.insist(holder.claim)
            if slot is None:
                continue
            for _ in range(chance.randint(1, 3)):
                if not caller.insist(lambda log: holder.advance(log, slot)):  # noqa: B023 - called at once
                    break

    return work


def check(history: History, place: ObjectStore) -> None:
    """Raise ``AssertionError``, naming the seed, unless an exact log could have made this history."""
    log = open_log(place)
    head = log.head()
    story = f"seed {history.seed}"
    assert not history.complaints, f"{story}: {history.complaints}"
    ends = [0, *(entry.next for entry in head.tail)]
    assert [entry.first for entry in head.tail] == ends[:-1], f"There is a hole or an overlap; {story}"
    assert ends[-1] == head.next_offset, f"The end is not where the entries end; {story}"
    assert [entry.sequence for entry in head.tail] == list(range(len(head.tail))), story
    listed = [(entry.writer, entry.number) for entry in head.tail[1:]]
    assert len(listed) == len(set(listed)), f"A number is listed twice; {story}"
    assert set(listed) <= history.intended, f"A batch came from nowhere; {story}"
    for writer in {writer for writer, _ in listed}:
        numbers = [number for who, number in listed if who == writer]
        assert numbers == list(range(len(numbers))), f"A writer's numbers are out of order; {story}"
    found = [value for _, value in content(log)]
    assert len(found) == len(set(found)), f"A record is there twice; {story}"
    for done in history.acknowledged:
        assert (done.writer, done.number) in listed, f"{done} was acknowledged and is lost; {story}"
        first = done.receipt.first
        assert first is not None, f"{done} does not know its place; {story}"
        assert tuple(found[first : first + done.receipt.count]) == done.values, f"{done} is elsewhere; {story}"
    _check_slot(history, log, story)


def _check_slot(history: History, log: ObjectLog, story: str) -> None:
    holders: dict[int, str] = {}
    for name, epoch in history.claims:
        assert holders.setdefault(epoch, name) == name, f"Epoch {epoch} was given to two holders; {story}"
    assert history.created <= 1, f"The slot was created {history.created} times; {story}"
    states = log.slots.list()
    if history.claims:
        (state,) = states
        assert state.epoch >= history.highest_epoch, f"An epoch was lost; {story}"
        assert state.position >= max(history.advanced, default=0), f"A position went back; {story}"
        assert state.position <= log.end().next, f"A position is past the end; {story}"
        floor = log.slots.floor()
        assert floor is not None, story
        assert floor <= state.position, f"The floor is above the slot; {story}"
