"""Write-ahead logs that are cut back, replaced by copies and go on in new terms, in any order, beside a plain list."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from strandline.errors import CursorExpired, Diverged, Gap, NotReady, StrandlineError
from strandline.log.contract import Log
from strandline.model.cursor import Cursor, Limit
from strandline.model.retention import TIER_SLOT, MaxBytes
from strandline.tier.copy import history, truncation
from strandline.tier.copy.segment_files import forget_tails
from strandline.tier.read import tiered_log as tiered
from strandline.tier.read.cold_reader import ColdReader, HotStart
from strandline.tier.read.tiered_log import TieredLog
from tests.matrix_cases import some
from tests.tier.read.tiered_logs import LIMITS, Backup, Row, Tiers, fetched, rows

STEPS = 40


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


class Copy(NamedTuple):
    """A copy of the log, what it holds, where it begins, and what had happened by then."""

    backup: Backup
    truth: list[Row]
    first: int
    partings: int
    is_lost: bool


class Histories:
    """What happens to a log in two tiers; ``tiers.truth`` is the history that it has now."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tiers = Tiers("wal", roll_bytes=self.dice.choice([0, 600, 1 << 20]))
        self.log = self.tiers.tiered()
        self.term, self.latest = 1, 1
        """The log's term, and the highest that any history had."""
        self.copies: list[Copy] = []
        self.partings: list[int] = []
        """Where the log went on differently, each time."""
        self.is_unseen = False
        """Whether a copy has taken over, and no tierer has looked at it: then nothing may be trimmed."""
        self.is_lost = False
        """Whether what the hot tier has forgotten was given up for another history."""
        self.is_cut = False
        """Whether it went back, and has not gone on yet."""

    @property
    def end(self) -> int:
        return len(self.tiers.truth)

    def play(self, steps: int = STEPS) -> None:
        self.append()
        self.tier()
        actions: list[Callable[[], None]] = [
            *[self.append] * 3,
            *[self.tier] * 3,
            *[self.trim] * 2,
            *[self.rewind] * 2,
            self.copy,
            self.promote,
            self.expire,
            *[self.read] * 2,
            self.reopen,
        ]
        for _ in range(steps):
            self.dice.choice(actions)()
            self.check()
        self.append()
        self.tier()
        self.trim()
        self.check()

    def check(self) -> None:
        """Everything from the log's beginning on is what the list has, wherever it is read from."""
        bounds = self.log.bounds()
        assert bounds.next == self.end
        assert rows(self.log.read()) == self.tiers.truth[bounds.first :]
        for piece in self.log.pieces(bounds.first, self.end):
            spans = self.log._cold_reader().plan(Cursor(self.log.log_id, piece.first), Limit(upto=piece.next), NO_SEAM)
            assert fetched(spans) == self.tiers.truth[piece.first : piece.next]

    def append(self) -> None:
        if self.is_cut or self.dice.random() < 0.2:
            self.term = self.latest = self.latest + 1
        self.is_cut = False
        self.tiers.append(self.dice.randint(1, 4), term=self.term)

    def tier(self) -> None:
        tierer = self.tiers.tierer(target=self.dice.choice([1, 300, 1 << 20]))
        with self.refused():
            self.is_unseen = False
            tierer.run_once(everything=self.dice.random() < 0.8)
            tierer.run_once()

    def refused(self) -> contextlib.AbstractContextManager[None]:
        """A log that went back and has not gone on cannot be told from one that was replaced."""
        kinds = [*([NotReady, Diverged] if self.is_cut else []), *([Gap] if self.is_lost else [])]
        return contextlib.suppress(*kinds)

    def trim(self) -> None:
        if not self.is_unseen and any(state.name == TIER_SLOT for state in self.log.slots.list()):
            self.tiers.trim(self.dice.choice([None, self.dice.randint(0, self.end)]))

    def expire(self) -> None:
        with self.refused():
            self.tiers.tierer(retention=MaxBytes(self.dice.choice([1, 1500]))).run_once()

    def rewind(self) -> None:
        to = self.dice.randint(self.tiers.hot().bounds().first, self.end)
        self.is_cut = self.is_cut or to < self.end
        self.partings.append(to)
        self.tiers.rewind(to)
        self.log = self.tiers.tiered()

    def copy(self) -> None:
        first = self.tiers.hot().bounds().first
        self.copies.append(Copy(self.tiers.backup(), list(self.tiers.truth), first, len(self.partings), self.is_lost))

    def promote(self) -> None:
        """Let a copy that was taken earlier take over."""
        if self.copies:
            copy = self.dice.choice(self.copies)
            pairs = zip(self.tiers.truth, copy.truth, strict=False)
            self.partings.append(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.is_lost = copy.is_lost or any(parting < copy.first for parting in self.partings[copy.partings :])
            self.tiers.truth, self.is_cut, self.is_unseen = list(copy.truth), True, True
            self.tiers.restore(copy.backup)
            self.log = self.tiers.tiered()

    def read(self) -> None:
        since, first = self.dice.randint(0, self.end), self.log.bounds().first
        limit = self.dice.choice(LIMITS)
        with pytest.raises(CursorExpired) if since < first else contextlib.nullcontext():
            spans = self.log.plan(Cursor(self.log.log_id, since), limit)
            reached = spans[-1].next if spans else since
            assert fetched(spans) == self.tiers.truth[since:reached]
            assert bool(spans) == (since < self.end)

    def reopen(self) -> None:
        self.tiers.reopen()
        self.log = self.tiers.tiered()


NO_SEAM = HotStart(1 << 40, None)
SEEDS = [*some(range(8), 1), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))]


@pytest.fixture
def unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are read wherever they are, for the test's own looks at pieces."""
    reaches = ColdReader._reaches
    monkeypatch.setattr(ColdReader, "_reaches", lambda self, cache, seam: seam == NO_SEAM or reaches(self, cache, seam))


@pytest.mark.usefixtures("unjoined")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_reads_as_the_list_of_its_own_history_whatever_histories_were_tiered(seed: int) -> None:
    Histories(seed).play()


def caught(seeds: range) -> bool:
    for seed in seeds:
        try:
            Histories(seed).play()
        except (AssertionError, StrandlineError, pytest.fail.Exception):
            return True
    return False


@pytest.mark.usefixtures("unjoined")
def test_a_tierer_that_does_not_compare_terms_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "divergence", lambda *_: None)
    monkeypatch.setattr(truncation, "is_same_record", lambda *_: True)
    assert caught(range(8))


@pytest.mark.matrix
@pytest.mark.usefixtures("unjoined")
def test_a_tierer_that_moves_its_slot_by_a_cursor_without_term_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "divergence", lambda *_: None)
    monkeypatch.setattr(truncation, "is_same_record", lambda *_: True)
    monkeypatch.setattr("strandline.tier.copy.tierer.Cursor", lambda log_id, offset, *_: Cursor(log_id, offset))
    for seed in range(8):
        with contextlib.suppress(StrandlineError):
            try:
                Histories(seed).play()
            except AssertionError:
                return
    pytest.fail("Records of another history were never read.")


def test_a_reader_that_takes_segments_behind_the_seam_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieredLog, "_hot_start", lambda _: NO_SEAM)
    monkeypatch.setattr(ColdReader, "_reaches", lambda *_: True)
    assert caught(range(8))


@pytest.mark.usefixtures("unjoined")
def test_a_reader_of_pieces_that_does_not_compare_terms_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "divergence", lambda *_: None)
    monkeypatch.setattr(tiered, "is_same_record", lambda *_: True)
    assert caught(range(8))


def is_never_same(*_: object) -> bool:
    return False


def test_nothing_is_copied_behind_a_record_that_the_log_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tiers("wal", batches=2)
    tiers.tier()
    tiers.append(2)
    monkeypatch.setattr(truncation, "is_same_record", is_never_same)
    with pytest.raises(Diverged):
        tiers.tier()


def test_the_history_of_a_log_is_read_while_it_is_trimmed() -> None:
    tiers = Tiers("wal", batches=8, terms=True)
    tiers.tier()
    hot = tiers.hot()

    class Pruned:
        """A log that forgets its first records while its terms are looked at."""

        looks = 0

        def __getattr__(self, name: str) -> object:
            return getattr(hot, name)

        def term_at(self, offset: int) -> int | None:
            self.looks += 1
            if self.looks == 2:
                tiers.trim(tiers.firsts[4])
            return hot.term_at(offset)  # type: ignore[union-attr]

        def end_of_term(self, term: int) -> int:
            return hot.end_of_term(term)  # type: ignore[union-attr]

    log: Log = Pruned()  # type: ignore[assignment]
    found = history.read_history(log)
    assert found == history.read_history(hot)
    assert found.starts == ((3, tiers.firsts[4] - 1), (7, tiers.firsts[5]))
