"""Whole histories of a queue: consumers that race, lose answers, die and come back, while others append and trim."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from strandline.compat.v1.log import QueueLog, open_queue
from strandline.errors import (
    Contended,
    CursorExpired,
    Fenced,
    NotFound,
    OutcomeUnknown,
    TransientStorageError,
)
from strandline.followers.consumer.consumer import Consumer
from strandline.log.object import ObjectLog, open_log
from strandline.model.head import WriterId
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, Faults, FaultyStore
from tests.contracts.logs import records
from tests.contracts.queues import QueuePlace
from tests.followers.consumer.queue_places import ObjectLogPlace, PlaceKind, filled
from tests.interleave import Interleaver

R = TypeVar("R")

BAD_LINE = Faults(before=0.03, after=0.06, late=0.03, throttled=0.02)
DEATH = 0.01
UNHEARD = (OutcomeUnknown, Contended, TransientStorageError)


class Stopped(Exception):
    """This consumer's life is over: it was fenced."""


@dataclass(slots=True)
class History:
    """What happened, for the check and for tests that make sure that something did."""

    seed: int
    asked: set[int] = field(default_factory=set)
    promised: int = 0
    opened: int = 0
    read: int = 0
    acknowledged: int = 0
    appended: int = 0
    trimmed: int = 0
    fenced: int = 0
    lost: int = 0
    deaths: int = 0
    complaints: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Machine:
    """A process with a failing store, which is restarted after a crash."""

    history: History
    place: QueuePlace
    line: FaultyStore
    chance: random.Random

    def log(self) -> ObjectLog | QueueLog:
        names = SeededChance(self.chance.getrandbits(64))
        if isinstance(self.place, ObjectLogPlace):
            return open_log(self.line, env=Env(clock=ManualClock(), chance=names))
        return open_queue(self.line, env=Env(clock=ManualClock(), chance=names))

    def insist(self, action: Callable[[], R]) -> R:
        """Repeat the same call while its outcome is unknown."""
        for _ in range(30):
            try:
                return action()
            except UNHEARD:
                continue
        raise Stopped


@dataclass(slots=True)
class Life:
    """One life of one consumer, which records the history."""

    machine: Machine
    consumer: Consumer | None = None
    expected: int = 0

    @property
    def history(self) -> History:
        return self.machine.history

    def epoch(self) -> int:
        queue = self.consumer._queue
        return queue._own.epoch if isinstance(self.machine.place, ObjectLogPlace) else queue._epoch

    def newest(self) -> int:
        """The epoch of the last claim, read from the store without faults."""
        place = self.machine.place
        return place.log.slots.get("default").epoch if isinstance(place, ObjectLogPlace) else place.log.manifest().epoch

    def open(self) -> None:
        log = self.machine.insist(self.machine.log)
        # A bad line fails often enough within one opening that it is begun anew, as a process would be.
        self.consumer = self.machine.insist(
            lambda: Consumer(
                log, ack_every=2, trim_every=None, env=Env(chance=SeededChance(self.machine.chance.getrandbits(64)))
            )
        )
        self.history.opened += 1
        self.expected = first = self.consumer.next_to_ack
        if self.epoch() == self.newest():  # then whatever was promised, was promised before this claim
            promised = self.history.promised
            if first < promised:
                self.complain(f"{first} comes again, though everything below {promised} was acknowledged durably")
            if skipped := set(range(first)) - self.history.asked:
                self.complain(f"{skipped} were skipped, though nobody acknowledged them")

    def complain(self, what: str) -> None:
        self.history.complaints.append(what)

    def call(self, action: Callable[[], R], what: str) -> R:
        """Whatever touches the queue: after someone newer has claimed it, that must be refused."""
        fenced = self.newest() > self.epoch()

        def checked() -> R:
            try:
                return action()
            except Fenced as error:
                self.history.fenced += 1
                raise Stopped from error
            except (NotFound, CursorExpired) as error:
                if self.newest() > self.epoch():
                    raise Stopped from error  # someone newer is past it, and it was trimmed
                self.complain(f"epoch {self.epoch()} needs something that is gone: {error}")
                raise Stopped from error

        answer = self.machine.insist(checked)
        if fenced:
            self.complain(f"{what} with epoch {self.epoch()} went well after {self.newest()} had claimed")
        return answer

    def read(self) -> bool:
        batch = self.call(self.consumer.next_batch, "reading")
        if batch is None:
            return False
        if batch.sequence != self.expected:
            self.complain(f"{batch.sequence} was read where {self.expected} was next")
        self.expected += 1
        self.history.read += 1
        return True

    def acknowledge(self) -> None:
        way = self.machine.chance.choice(["ack", "ack", "through", "flush"])
        first, end = self.consumer.next_to_ack, self.consumer.next_to_read
        if first == end:
            way = "flush"
        if way == "ack":
            self.history.asked.add(first)
            self.machine.insist(lambda: self._ack(first))
            return
        if way == "through":
            last = self.machine.chance.randrange(first, end)
            self.history.asked |= set(range(first, last + 1))
            self.call(lambda: self.consumer.ack_through(last), "acknowledging")
        else:
            self.call(self.consumer.flush, "flushing")
        self.promise()

    def _ack(self, sequence: int) -> None:
        try:
            self.consumer.ack(sequence)  # durable only every second time, and then fenced like all others
        except Fenced as error:
            raise Stopped from error

    def promise(self) -> None:
        self.history.promised = max(self.history.promised, self.consumer.next_to_ack)
        self.history.acknowledged += 1

    def close(self) -> None:
        pending = self.consumer._progress.flush() is not None
        if pending:
            self.call(self.consumer.close, "closing")
            self.promise()


def play(seed: int, kind: PlaceKind, *, faults: Faults = BAD_LINE) -> History:
    """Two or three consumers, a writer and, on object logs, a trimmer; in an order drawn from the seed."""
    chance = random.Random(seed)
    order = Interleaver(chance.getrandbits(64))
    history, place = History(seed), filled(kind, 5)
    lines: list[FaultyStore] = []

    def machine() -> Machine:
        line = FaultyStore(place.store, seed=chance.getrandbits(64), faults=faults)
        line.hook(_meet(order, random.Random(chance.getrandbits(64))))
        lines.append(line)
        return Machine(history, place, line, random.Random(chance.getrandbits(64)))

    tasks = [_consumer(machine()) for _ in range(chance.randint(2, 3))] + [_writer(machine())]
    if kind is ObjectLogPlace:
        tasks.append(_trimmer(machine()))
    order.run(tasks)
    for line in lines:
        line.heal()
        line.land_late()
        history.lost += sum(row.outcome in ("after", "late") and row.name == "put_if" for row in line.log)
    _check(history, place)
    return history


def _meet(order: Interleaver, chance: random.Random) -> Callable[[Call], None]:
    def hook(call: Call) -> None:
        if call.stage == "before" or call.name == "put_if":
            order.point()
        if chance.random() < DEATH / 2:
            raise Crash(f"at {call}")

    return hook


def _consumer(machine: Machine) -> Callable[[], None]:
    def live() -> None:
        life = Life(machine)
        life.open()
        for _ in range(machine.chance.randint(1, 6)):
            if machine.chance.random() < 0.5:
                life.read()
            else:
                life.acknowledge()
        life.close()

    def work() -> None:
        for _ in range(machine.chance.randint(1, 3)):
            try:
                live()
            except Crash:
                machine.history.deaths += 1
            except Stopped:
                continue
            except Fenced:
                machine.history.fenced += 1  # already while it was being opened

    return work


def _writer(machine: Machine) -> Callable[[], None]:
    def work() -> None:
        writer = WriterId(SeededChance(machine.chance.getrandbits(64)).uuid())
        for number in range(3):
            try:
                machine.insist(lambda: machine.log().append(records(b"new"), writer=writer, number=number))  # noqa: B023
            except (Stopped, Crash):
                return
            machine.history.appended += 1

    return work


def _trimmer(machine: Machine) -> Callable[[], None]:
    def work() -> None:
        for _ in range(2):
            try:
                machine.insist(lambda: machine.log().trim(grace=0.0))
            except (Stopped, Crash):
                continue
            machine.history.trimmed += 1

    return work


def _check(history: History, place: QueuePlace) -> None:
    story = f"seed {history.seed}"
    assert not history.complaints, f"{story}: {history.complaints}"
    with place.open() as consumer:
        begins = consumer.next_to_ack
        assert begins >= history.promised, f"{begins} comes again, {history.promised} was promised; {story}"
        assert set(range(begins)) <= history.asked, f"Something below {begins} was skipped; {story}"
        found = [batch.sequence for batch in consumer.batches()]
        assert found == list(range(begins, begins + len(found))), story
        assert begins + len(found) >= 5 + min(1, history.appended), story
