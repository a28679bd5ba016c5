"""Whole histories of a queue of version 1: producers, consumers and a trimmer that race, fail, stall and die."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from strandline.compat.v1.log import QueueLog, open_queue
from strandline.compat.v1.manifest_format import decode_manifest
from strandline.compat.v1.queue import V1Queue
from strandline.compat.v1.trimming import QueueTrimmer
from strandline.errors import Contended, Fenced, NotFound, OutcomeUnknown, TransientStorageError
from strandline.model.head import QueueManifest
from strandline.storage.env import Env
from strandline.storage.objects.store import Payload, Precondition, Version
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from tests.compat.v1.filled_queues import values, writer
from tests.interleave import Interleaver

R = TypeVar("R")

GRACE = 100.0
MANIFEST = "ingest/manifest"
BAD_LINE = Faults(before=0.04, after=0.08, throttled=0.02)
DEATH = 0.01
UNHEARD = (OutcomeUnknown, Contended, TransientStorageError)


@dataclass(slots=True)
class History:
    """What happened, for the check and for tests that make sure that something did."""

    seed: int
    acknowledged: set[bytes] = field(default_factory=set)
    """Batches that their producers were told are listed."""
    intended: list[bytes] = field(default_factory=list)
    fetched: set[bytes] = field(default_factory=set)
    consumed: list[bytes] = field(default_factory=list)
    """Batches that were fetched and then durably acknowledged."""
    newest: int = 0
    """The highest epoch that anyone was told to have."""
    fenced: int = 0
    deleted: int = 0
    uploaded_again: int = 0
    doubled: int = 0
    conflicts: int = 0
    lost: int = 0
    late: int = 0
    deaths: int = 0
    given_up: int = 0


class Witness(PlainStore):
    """The store that all share; it checks each change, and complains about the first that is wrong."""

    def __init__(self, clock: ManualClock, history: History) -> None:
        super().__init__(clock=clock)
        self._history = history
        self.listed: dict[int, str] = {}
        """Every entry there ever was."""
        self.values: dict[str, bytes] = {}
        self.current = QueueManifest()

    def story(self, what: str) -> str:
        return f"seed {self._history.seed}: {what}"

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        version = super().put_if(path, data, when)
        before, self.current = self.current, decode_manifest(self.get(path).data, path)
        now = self.current
        assert now.epoch >= before.epoch, self.story("the epoch went back")
        assert now.next_sequence >= before.next_sequence, self.story("sequences went back")
        there = {entry.location for entry in before.entries}
        for entry in now.entries:
            known = self.listed.setdefault(entry.sequence, entry.location)
            assert known == entry.location, self.story(f"batch {entry.sequence} became another one")
            assert entry.location in self._objects, self.story(f"{entry.location} is listed and was trimmed")
            if entry.location not in there:
                value = self._content(entry.location)
                self.values[entry.location] = value
                twice = [other for other in there if self.values[other] == value]
                assert not twice, self.story(f"{value!r} is listed twice")
        return version

    def _content(self, location: str) -> bytes:
        return bytes(self.get(location).data)[4:-7]

    def delete(self, path: str) -> None:
        listed = {entry.location for entry in self.current.entries}
        assert path not in listed, self.story(f"{path} was trimmed and is listed")
        assert path != MANIFEST, self.story("the manifest was trimmed")
        self._history.deleted += 1
        super().delete(path)


class Caller:
    """A process with a bad line to the store; after dying it begins again and remembers only its own intentions."""

    def __init__(self, history: History, line: FaultyStore, clock: ManualClock, chance: random.Random) -> None:
        self.history = history
        self.line = line
        self._clock = clock
        self._chance = SeededChance(chance.getrandbits(64))
        self.log = self.opened()

    def opened(self) -> QueueLog:
        return open_queue(self.line, grace=GRACE, env=Env(clock=self._clock, chance=self._chance))

    def insist(self, action: Callable[[QueueLog], R]) -> R | None:
        """Repeat the action until it is answered, up to a bound; None if it never was."""
        for _ in range(12):
            try:
                return action(self.log)
            except Crash:
                self.history.deaths += 1
                self.log = self.opened()
            except UNHEARD:
                continue
        self.history.given_up += 1
        return None


def play(
    seed: int,
    *,
    faults: Faults = BAD_LINE,
    trimmer: type[QueueTrimmer] = QueueTrimmer,
    stall: float = 0.1,
) -> History:
    """Two producers, one or two consumers and a trimmer, in an order drawn from the seed; then the check."""
    chance = random.Random(seed)
    order, clock, history = Interleaver(chance.getrandbits(64)), ManualClock(), History(seed)
    place = Witness(clock, history)
    lines: list[FaultyStore] = []

    def caller() -> Caller:
        line = FaultyStore(place, seed=chance.getrandbits(64), faults=faults, clock=clock)
        line.hook(_meet(order, clock, random.Random(chance.getrandbits(64)), stall))
        lines.append(line)
        return Caller(history, line, clock, chance)

    tasks = [_producer(caller(), name, random.Random(seed + name)) for name in range(2)]
    tasks += [_consumer(caller(), f"c{name}", random.Random(~seed + name)) for name in range(chance.randint(1, 2))]
    tasks.append(_trimmer(caller(), trimmer, clock, random.Random(seed ^ 77)))
    order.run(tasks)
    for line in lines:
        line.land_late()
        history.lost += sum(row.outcome == "after" and row.name == "put_if" for row in line.log)
        history.late += sum(row.outcome == "late" and row.name == "put_if" for row in line.log)
        history.conflicts += sum(row.outcome == "refused" and row.name == "put_if" for row in line.log)
    for line in lines[:2]:
        history.uploaded_again += len({row.path for row in line.named("put")})
    history.uploaded_again -= len(history.acknowledged)
    check(history, place)
    return history


def _meet(order: Interleaver, clock: ManualClock, chance: random.Random, stall: float) -> Callable[[Call], None]:
    """A point where another task may run, time may pass, and a process may die.

    A request that is under way for nearly half the grace period is dropped, as every network does at some time: the
    rule that a producer lists within half of it leaves the other half for the write to arrive.
    """

    def hook(call: Call) -> None:
        if chance.random() < stall and not (call.name == "put_if" and call.stage == "before"):
            clock.advance(chance.choice([1, 10, GRACE / 3, GRACE, 3 * GRACE]))
        began = clock.monotonic()
        if call.stage == "before" or call.name == "put_if":
            order.point()
        if call.stage == "before" and call.name == "put_if" and clock.monotonic() - began > 0.45 * GRACE:
            raise TransientStorageError("The request was under way for too long.")
        if chance.random() < DEATH / 2:
            raise Crash(f"at {call}")

    return hook


def _producer(caller: Caller, name: int, chance: random.Random) -> Callable[[], None]:
    def work() -> None:
        for number in range(chance.randint(2, 4)):
            value = b"%d/%d" % (name, number)
            caller.history.intended.append(value)
            receipt = caller.insist(
                lambda log, number=number, value=value: log.append(
                    values(value), writer=writer(name + 1), number=number, compression="none"
                ).result(120)
            )
            if receipt is None:
                return
            caller.history.acknowledged.add(value)

    return work


def _consumer(caller: Caller, name: str, chance: random.Random) -> Callable[[], None]:
    history = caller.history

    def session(log: QueueLog) -> bool:
        queue = V1Queue(log)
        position = queue.claim(name, None)
        epoch = queue._epoch or 0
        history.newest = max(history.newest, epoch)
        for _ in range(chance.randint(1, 3)):
            taken = []
            for descriptor in queue.peek(position, 2).descriptors:
                try:
                    (batch,) = queue.fetcher().fetch(descriptor)
                except NotFound:
                    # Only who was fenced may miss an object: what is listed is there.
                    queue.peek(descriptor.sequence)
                    raise AssertionError(f"seed {history.seed}: {descriptor} is listed and was trimmed") from None
                taken.append((descriptor, batch.column("value")[0].as_py()))
                history.fetched.add(taken[-1][1])
            if taken:
                newest = history.newest
                queue.acknowledge(taken[-1][0])
                assert epoch >= newest, f"seed {history.seed}: epoch {epoch} acknowledged after {newest} was claimed"
                history.consumed += [value for _, value in taken]
                position = taken[-1][0].sequence + 1
        return True

    def work() -> None:
        for _ in range(chance.randint(1, 3)):
            try:
                caller.insist(session)
            except Fenced:
                history.fenced += 1

    return work


def _trimmer(caller: Caller, kind: type[QueueTrimmer], clock: ManualClock, chance: random.Random) -> Callable[[], None]:
    remember = chance.random() < 0.5

    def work() -> None:
        trimmer: QueueTrimmer | None = None

        def round_of(log: QueueLog) -> bool:
            nonlocal trimmer
            if trimmer is None:
                trimmer = kind(
                    log.store, manifest=MANIFEST, folder="ingest", grace=GRACE, env=Env(clock=clock), remember=remember
                )
            try:
                trimmer.run()
            except Crash:
                trimmer = None  # and with it all that it remembered
                raise
            return True

        for _ in range(chance.randint(3, 7)):
            caller.insist(round_of)

    return work


def check(history: History, place: Witness) -> None:
    """Raise ``AssertionError``, naming the seed, unless an exact queue could have made this history."""
    story = place.story
    log = open_queue(place, grace=GRACE, env=Env(clock=ManualClock()))
    rest = [value for batch in log.read() for value in batch.column("value").to_pylist()]  # each is there and is read
    ever = [place.values[place.listed[sequence]] for sequence in sorted(place.listed)]
    lost = history.acknowledged - set(ever)
    assert not lost, story(f"{lost} were acknowledged and never listed")
    assert set(ever) <= set(history.intended), story("a batch came from nowhere")
    gone = set(ever) - set(rest) - history.fetched
    assert not gone, story(f"{gone} are gone and nobody has read them")
    firsts = list(dict.fromkeys(ever))
    history.doubled = len(ever) - len(firsts)
    assert history.doubled <= history.lost + history.late + history.deaths, story(
        "more was doubled than answers were lost"
    )
    for name in range(2):
        mine = [value for value in firsts if value.startswith(b"%d/" % name)]
        assert mine == sorted(mine), story(f"a producer's batches are out of order: {mine}")
