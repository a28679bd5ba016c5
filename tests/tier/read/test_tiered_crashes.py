"""A log in two tiers whose keepers die anywhere, and one to which anything happens in any order: nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from strandline.errors import CursorExpired, Diverged
from strandline.model.cursor import Cursor, Limit
from strandline.model.retention import TIER_SLOT, Consumed, MaxAge, MaxBytes
from strandline.model.segments import SegmentState
from strandline.testing.faulty import Crash
from strandline.tier.copy.segment_files import forget_tails, segment_path
from tests.matrix_cases import parts, some
from tests.tier.read.tiered_logs import KINDS, LIMITS, DyingProcess, Kind, Tiers, fetched, rows


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


# --- dying anywhere --------------------------------------------------------------------------------------------


@functools.cache
def base(kind: Kind) -> Tiers:
    """A log of six batches with a consumer that has read two of them; the first ones have been in the cold tier."""
    tiers = Tiers(kind, batches=6)
    tiers.hot().slots.create("billing", tiers.firsts[2])
    tiers.tierer(target=1).run_once()
    tiers.trim(tiers.firsts[1])
    tiers.append(2)
    return tiers


class Dying(DyingProcess):
    """A process that keeps a log in two tiers, and dies at one point of all that it does."""

    def work(self) -> None:
        """Copy, forget, let expire what the consumer has read, and once more."""
        tiers = self.tiers
        tierer = tiers.tierer(store=self.store, topic=self.topic, retention=MaxBytes(1), target=500)
        tierer.run_once(everything=True)
        self.point()
        tiers.trim(store=self.store)
        self.point()
        tierer.run_once(everything=True)


def intact(tiers: Tiers) -> None:
    """Everything from the log's first record on can be read, once, and the consumer's are among it."""
    tiers.reopen()
    log = tiers.tiered()
    first = log.bounds().first
    assert first <= tiers.firsts[2]
    assert rows(log.read()) == tiers.truth[first:]
    assert rows(log.read(Cursor(log.log_id, tiers.firsts[2]))) == tiers.truth[tiers.firsts[2] :]
    spans = log.plan(Cursor(log.log_id, first))
    assert [span.first for span in spans[1:]] == [span.next for span in spans[:-1]]


def clean(tiers: Tiers) -> None:
    segments = tiers.segments()
    assert {segment.state for segment in segments} == {SegmentState.COPY_FINISHED}
    assert tiers.objects() == [segment_path(segment.segment, segment.start) for segment in segments]


@functools.cache
def points(kind: Kind) -> int:
    calm = Dying(base(kind).copy(), None)
    calm.work()
    intact(calm.tiers)
    assert calm.tiers.tiered().bounds().first == calm.tiers.firsts[2]
    assert calm.tiers.hot().bounds().first == len(calm.tiers.truth)
    return calm.points


PARTS = 27


@pytest.mark.parametrize("part", parts(PARTS, kept=9))
@pytest.mark.parametrize("kind", [pytest.param("object", marks=pytest.mark.matrix), "wal"])
def test_whatever_dies_at_any_point_of_a_round_nothing_is_missing_or_repeated(kind: Kind, part: int) -> None:
    for at in range(part, points(kind), PARTS):
        dying = Dying(base(kind).copy(), at)
        tiers = dying.tiers
        with pytest.raises(Crash):
            dying.work()
        intact(tiers)
        again = Dying(tiers, None)
        again.work()
        intact(tiers)
        again.work()
        clean(tiers)
        assert tiers.tiered().bounds().first == tiers.firsts[2]
        # And the log goes on.
        tiers.append(3)
        intact(tiers)


@pytest.mark.parametrize("part", parts(PARTS, kept=9))
def test_whatever_the_disk_has_when_the_machine_stops_nothing_is_missing_or_repeated(part: int) -> None:
    def calls(tiers: Tiers) -> int:
        return len(tiers.disk.calls)

    calm = base("wal").copy()
    calm.hot()
    before = calls(calm)
    Dying(calm, None).work()
    for at in range(before + part, calls(calm), PARTS):
        tiers = base("wal").copy()
        tiers.hot()
        tiers.disk.stop(at)
        with pytest.raises(Crash):
            Dying(tiers, None).work()
        tiers.disk.crash()
        tiers._wal = None
        intact(tiers)
        Dying(tiers, None).work()
        Dying(tiers, None).work()
        clean(tiers)
        intact(tiers)


# --- anything in any order -------------------------------------------------------------------------------------


class History:
    """What happens to a log in two tiers, and a list beside it."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tiers = Tiers(kind)
        self.log = self.tiers.tiered()
        self.slots: dict[str, int] = {}
        self.first = 0
        self.term = 1

    @property
    def end(self) -> int:
        return len(self.tiers.truth)

    def play(self, steps: int) -> None:
        self.append()
        actions: list[Callable[[], None]] = [
            *[self.append] * 3,
            *[self.tier] * 2,
            *[self.trim] * 2,
            self.expire,
            *[self.create] * 2,
            *[self.advance] * 2,
            self.drop,
            self.reset,
            *[self.read] * 4,
            self.seek,
            self.reopen,
        ]
        for _ in range(steps):
            self.dice.choice(actions)()
            self.check()
        self.read()
        assert rows(self.log.read()) == self.tiers.truth[self.first :]

    def check(self) -> None:
        bounds = self.log.bounds()
        assert bounds.next == self.end
        assert bounds.first >= self.first  # what is gone does not come back
        assert bounds.first <= min([*self.slots.values(), self.tiers.hot().bounds().first])
        self.first = bounds.first
        states = {state.name: state for state in self.log.slots.list() if state.name != TIER_SLOT}
        assert {name: state.position for name, state in states.items()} == self.slots
        assert all(state.invalid is None for state in states.values())

    def append(self) -> None:
        self.term += self.dice.random() < 0.2
        self.tiers.append(self.dice.randint(1, 5), term=self.term if self.tiers.kind == "wal" else None)

    def tier(self) -> None:
        self.tiers.tierer(target=self.dice.choice([1, 300, 900, 1 << 20])).run_once(everything=self.dice.random() < 0.7)

    def trim(self) -> None:
        if any(state.name == TIER_SLOT for state in self.log.slots.list()):
            self.tiers.trim(self.dice.choice([None, self.dice.randint(self.first, self.end)]))

    def expire(self) -> None:
        before = self.log.bounds().first
        retention = self.dice.choice([Consumed(), MaxAge(1), MaxBytes(1), MaxBytes(2000)])
        self.tiers.tierer(retention=retention).run_once()
        if isinstance(retention, Consumed) and not self.slots:
            assert self.log.bounds().first == before

    def create(self) -> None:
        name, position = self.dice.choice("abcd"), self.dice.randint(0, self.end + 1)
        if name in self.slots:
            return
        with self.refused(position):
            self.log.slots.create(name, position)
            self.slots[name] = position

    def reset(self) -> None:
        if self.slots:
            name, position = self.dice.choice(list(self.slots)), self.dice.randint(0, self.end + 1)
            with self.refused(position):
                self.log.slots.reset(name, position)
                self.slots[name] = position

    @contextlib.contextmanager
    def refused(self, position: int) -> Iterator[None]:
        """Nothing is refused but what is not there."""
        kind = CursorExpired if position < self.first else Diverged if position > self.end else None
        with contextlib.nullcontext() if kind is None else pytest.raises(kind):
            yield

    def advance(self) -> None:
        if self.slots:
            name = self.dice.choice(list(self.slots))
            position = self.dice.randint(self.slots[name], self.end)
            self.log.slots.claim(name, self.dice.choice("xy")).advance(Cursor(self.log.log_id, position))
            self.slots[name] = position

    def drop(self) -> None:
        if self.slots:
            name = self.dice.choice(list(self.slots))
            self.log.slots.drop(name)
            del self.slots[name]

    def read(self) -> None:
        since = self.dice.randint(0, self.end + 1)
        cursor = Cursor(self.log.log_id, since)
        limit = self.dice.choice([*LIMITS, Limit(upto=self.dice.randint(0, self.end + 2))])
        with self.refused(since):
            spans = self.log.plan(cursor, limit)
            end = self.end if limit.upto is None else min(limit.upto, self.end)
            reached = spans[-1].next if spans else since
            assert fetched(spans) == self.tiers.truth[since:reached]
            assert bool(spans) == (since < end)
            assert reached <= max(end, since)
            assert rows(self.log.read(cursor)) == self.tiers.truth[since:]

    def seek(self) -> None:
        number = self.dice.randrange(len(self.tiers.firsts))
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=self.tiers.times[number])
        assert self.log.position_of(time) == max(self.first, self.tiers.firsts[number])

    def reopen(self) -> None:
        self.tiers.reopen()
        self.log = self.tiers.tiered()
        if self.tiers.kind == "wal":  # positions are written lazily: after a crash, they may be lower
            known, first = dict(self.slots), self.log.bounds().first
            self.slots = {state.name: state.position for state in self.log.slots.list() if state.name != TIER_SLOT}
            assert known.keys() == self.slots.keys()
            assert all(first <= position <= known[name] for name, position in self.slots.items())


def test_a_position_that_was_only_noted_is_durable_before_anything_below_it_goes() -> None:
    tiers = Tiers("wal", batches=4)
    log = tiers.tiered()
    log.slots.create("billing", 0)
    tierer = tiers.tierer(target=1, retention=Consumed())
    tierer.run_once(everything=True)
    tiers.trim()
    log.slots.claim("billing", "me").advance(Cursor(log.log_id, tiers.firsts[2]))
    assert len(tierer.run_once().expired) == 2
    tiers.reopen()
    log = tiers.tiered()
    assert log.bounds().first == log.slots.floor() == tiers.firsts[2]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "seed", [*some(range(12), 4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 150))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_history_reads_as_a_list(kind: Kind, seed: int) -> None:
    History(kind, seed).play(50)
