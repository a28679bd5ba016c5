"""The seam between the tiers: nobody can tell where it is, also while it moves; and what is not known is not denied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from strandline.errors import (
    CorruptData,
    CursorExpired,
    Diverged,
    InvalidInput,
    NotFound,
    NotReady,
    StrandlineError,
    TransientStorageError,
)
from strandline.followers.run import Batching, begin, follow
from strandline.log.contract import Log
from strandline.log.read.planning import cursor_after
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Bounds, Cursor, Limit
from strandline.model.retention import FOREVER, TIER_SLOT, Consumed, MaxAge, MaxBytes
from strandline.storage.env import Env
from strandline.testing.sinks import MemorySink
from strandline.tier.copy.segment_files import forget_tails, segment_path
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.read.cold_reader import ColdReader
from strandline.tier.read.tiered_log import TieredLog
from tests.matrix_cases import sampled, some
from tests.tier.metadata.manager_doubles import Events
from tests.tier.read.tiered_logs import LIMITS, PARTITIONS, Kind, Tiers, fetched, forget, rows

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


@pytest.fixture(params=[pytest.param("object", marks=pytest.mark.matrix), "wal"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def filled(kind: Kind, **options: Any) -> Tiers:
    """Eight batches, in logs with terms of three terms, all of them in segments and none forgotten yet."""
    tiers = Tiers(kind, batches=8, terms=kind == "wal", **options)
    tiers.tier()
    return tiers


def seams(tiers: Tiers) -> Iterator[int]:
    """Let the hot tier forget ever more."""
    yield 0
    for seam in (tiers.firsts[2], tiers.firsts[5], len(tiers.truth)):
        assert tiers.trim(seam) == seam
        assert tiers.hot().bounds().first == seam
        yield seam


def outcome(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except StrandlineError as error:
        return type(error)


# --- what is read ----------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(3))
def test_every_cursor_gives_the_same_records_within_every_limit(kind: Kind, every: int) -> None:
    tiers = filled(kind)
    truth, end = tiers.truth, len(tiers.truth)
    log = tiers.tiered()
    for _ in seams(tiers):
        for since in range(0, end + 1, every):
            assert fetched(log.plan(Cursor(log.log_id, since))) == truth[since:]
            for limit in LIMITS:
                spans = log.plan(Cursor(log.log_id, since), limit)
                assert bool(spans) == (since < end)
                assert [span.first for span in spans] == [since, *(span.next for span in spans)][: len(spans)]
                records, size = sum(span.next - span.first for span in spans), sum(span.size for span in spans)
                assert len(spans) <= 1 or limit.allows(records=records, size=size, batches=len(spans))


@pytest.mark.matrix
def test_a_limit_is_used_up_across_the_seam(kind: Kind) -> None:
    tiers = filled(kind)
    log = tiers.tiered()
    for _ in seams(tiers):
        spans = log.plan(log.start())
        for count in range(1, len(spans) + 1):
            part = spans[:count]
            assert log.plan(log.start(), Limit(batches=count)) == part
            assert log.plan(log.start(), Limit(records=part[-1].next)) == part
            assert log.plan(log.start(), Limit(bytes=sum(span.size for span in part))) == part
            assert len(log.plan(log.start(), Limit(bytes=sum(span.size for span in part) - 1))) == max(1, count - 1)


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(4))
def test_an_end_offset_clips_exactly_in_either_tier(kind: Kind, every: int) -> None:
    tiers = filled(kind)
    end = len(tiers.truth)
    log = tiers.tiered()
    for _ in seams(tiers):
        for since in range(0, end + 1, every):
            for upto in range(end + 2):
                spans = log.plan(Cursor(log.log_id, since), Limit(upto=upto))
                assert [offset for span in spans for offset in range(span.first, span.next)] == list(
                    range(since, min(upto, end))
                )
            assert rows(log.read(Cursor(log.log_id, since))) == tiers.truth[since:]
            assert rows(log.read(Cursor(log.log_id, since), upto=max(since, 7))) == tiers.truth[since:7]


def test_plan_after_plan_covers_everything_once(kind: Kind) -> None:
    tiers = filled(kind)
    log = tiers.tiered()
    for _ in seams(tiers):
        for limit in LIMITS:
            cursor, found = log.start(), []
            while spans := log.plan(cursor, limit):
                found += fetched(spans)
                for span in spans:
                    cursor = cursor_after(cursor, span)
            assert found == tiers.truth
            assert cursor == log.end()


def test_bounds_are_those_of_both_tiers(kind: Kind) -> None:
    tiers = filled(kind)
    log = tiers.tiered()
    end = len(tiers.truth)
    for _ in seams(tiers):
        assert log.bounds() == Bounds(0, end)
        assert (log.start(), log.end().next) == (Cursor(log.log_id, 0), end)
    segments = tiers.finished()
    tiers.tier(retention=MaxBytes(sum(segment.size for segment in segments[2:])))
    assert log.bounds() == Bounds(segments[2].start, end)
    with pytest.raises(CursorExpired):
        log.plan(Cursor(log.log_id, segments[2].start - 1))
    assert rows(log.read()) == tiers.truth[segments[2].start :]
    tiers.tier(retention=MaxBytes(1))
    assert log.bounds() == Bounds(end, end)
    assert log.plan(log.start()) == []
    tiers.append(2, term=9)
    assert rows(log.read()) == tiers.truth[end:]


@pytest.mark.matrix
def test_terms_are_judged_as_in_a_log_that_has_everything() -> None:
    whole = Tiers("wal", batches=8, terms=True)

    def look(log: Log, since: int, term: int) -> object:
        return outcome(lambda: [span.next for span in log.plan(Cursor(log.log_id, since, term), Limit(upto=99))][-1:])

    # Where a file begins the term before it is known there; everywhere else only the cold tier knows.
    for options in ({}, {"roll_bytes": 1 << 20}):
        tiers = filled("wal", **options)
        log = tiers.tiered()
        for _ in seams(tiers):
            for since in range(len(tiers.truth) + 1):
                for term in range(10):
                    assert look(log, since, term) == look(whole.hot(), since, term), (since, term)


def test_a_cursor_of_another_term_at_the_very_beginning_of_the_cold_tier_is_judged_by_what_comes_behind() -> None:
    tiers = filled("wal")
    tiers.trim()
    log, segments = tiers.tiered(), tiers.finished()
    tiers.tier(retention=MaxBytes(sum(segment.size for segment in segments[1:])))
    first = log.bounds().first
    assert first == segments[1].start > 0
    term = segments[1].terms[0][0]
    assert log.plan(Cursor(log.log_id, first, term))
    with pytest.raises(Diverged):
        log.plan(Cursor(log.log_id, first, term + 1))


@pytest.mark.matrix
def test_a_newcomer_begins_at_a_time_wherever_that_is(kind: Kind) -> None:
    tiers, whole = filled(kind), Tiers(kind, batches=8, terms=kind == "wal")
    log = tiers.tiered()
    times = [time + shift for time in tiers.times for shift in (-2_500_000, -1000, -1, 0, 1, 1000)]
    for _ in seams(tiers):
        for time in times:
            start = EPOCH + timedelta(microseconds=time)
            assert log.position_of(start) == whole.hot().position_of(start)
        assert log.position_of(EPOCH) == log.position_of("retained") == 0
        assert log.position_of("now") == log.position_of(EPOCH + timedelta(days=99999)) == len(tiers.truth)
        assert log.position_of(5) == log.position_of(log.start().at(5)) == 5
        with pytest.raises(InvalidInput):
            log.position_of(datetime(2026, 1, 1))  # noqa: DTZ001
    segments = tiers.finished()
    tiers.tier(retention=MaxBytes(sum(segment.size for segment in segments[1:])))
    assert log.position_of(EPOCH) == log.position_of("retained") == segments[1].start


def test_a_time_is_found_though_segments_expire_while_it_is_looked_for(kind: Kind) -> None:
    tiers = filled(kind)
    tiers.trim()
    segments = tiers.finished()
    log = tiers.tiered()
    reader = log._cold_reader()
    current, looks = reader.registry.current, []

    def looked(*arguments: Any) -> Any:
        answer = current(*arguments)
        looks.append(answer)
        if len(looks) == 1:
            tiers.tier(retention=MaxBytes(sum(segment.size for segment in segments[2:])))
            forget_tails()
        return answer

    reader.registry.current = looked
    assert reader.listed_since(0, log._hot_start()) == segments[2].start
    assert len(looks) == 2


# --- slots -----------------------------------------------------------------------------------------------------


def test_slots_may_be_in_the_cold_tier_as_anywhere(kind: Kind) -> None:
    tiers = filled(kind)
    tiers.trim()
    log, segments = tiers.tiered(), tiers.finished()
    end = len(tiers.truth)
    assert log.slots.create("billing", 2).position == 2
    assert log.slots.floor() == 2
    slot = log.slots.claim("billing", "me")
    slot.touch()
    slot.advance(Cursor(log.log_id, segments[1].start))
    assert (log.slots.floor(), slot.state().invalid) == (segments[1].start, None)
    tiers.trim()
    assert slot.state().invalid is None
    assert log.slots.reset("billing", 1).position == 1
    assert log.slots.reset("billing", end).position == end
    with pytest.raises(Diverged):
        log.slots.create("audit", end + 1)
    tiers.tier(retention=MaxBytes(sum(segment.size for segment in segments[1:])))
    first = segments[1].start
    for refused in (lambda: log.slots.create("audit", first - 1), lambda: log.slots.reset("billing", 0)):
        with pytest.raises(CursorExpired, match=f"begins at {first}"):
            refused()
    assert [(state.name, state.position) for state in log.slots.list()] == [("billing", end), (TIER_SLOT, end)]
    assert log.slots.create("audit", first).position == first
    log.slots.drop("audit")


def test_slots_in_the_cold_tier_outlive_their_process(kind: Kind) -> None:
    tiers = filled(kind)
    tiers.trim()
    tiers.tiered().slots.create("billing", 2)
    tiers.reopen()
    log = tiers.tiered()
    assert log.slots.floor() == 2
    slot = log.slots.claim("billing", "me")
    assert rows(log.read(Cursor(log.log_id, slot.state().position))) == tiers.truth[2:]


def test_a_consumer_s_slot_pins_the_cold_tier_and_not_the_hot_one(kind: Kind) -> None:
    tiers = Tiers(kind, batches=4)
    log = tiers.tiered()
    log.slots.create("billing", 2)
    tiers.tier()
    assert tiers.trim() == len(tiers.truth)
    for retention in (MaxBytes(1), MaxAge(1), Consumed()):
        tiers.tier(retention=retention)
        assert rows(log.read(Cursor(log.log_id, 2))) == tiers.truth[2:]
    log.slots.claim("billing", "me").advance(log.end())
    tiers.tier(retention=Consumed())
    assert log.bounds() == Bounds(len(tiers.truth), len(tiers.truth))


@pytest.mark.matrix
def test_a_hold_pins_the_cold_tier_for_its_time() -> None:
    tiers = filled("object")
    tiers.trim()
    log = tiers.tiered()
    hold = log.hold(3, 60.0)
    tiers.tier(retention=MaxBytes(1))
    assert rows(log.read(Cursor(log.log_id, 3))) == tiers.truth[3:]
    hold.renew(5)
    hold.release()
    tiers.tier(retention=MaxBytes(1))
    assert log.bounds().count == 0
    with pytest.raises(CursorExpired):
        log.hold(3, 60.0)
    with pytest.raises(InvalidInput):
        filled("wal").tiered().hold(0, 60.0)


# --- what moves while it is read -------------------------------------------------------------------------------


class Meanwhile:
    """Another log, in which something happens between a plan and what is fetched of it."""

    def __init__(self, inner: Any, action: Callable[[], None], *, plans: int = 1) -> None:
        self._inner, self._action, self._left = inner, action, plans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plan(self, since: Cursor, limit: Limit) -> Any:
        spans = self._inner.plan(since, limit)
        if self._left:
            self._left -= 1
            if not self._left:
                self._action()
        return spans


def moved(tiers: Tiers) -> None:
    tiers.tier()
    tiers.trim()
    forget_tails()


@pytest.mark.matrix
@pytest.mark.parametrize("upto", [None, 1])
def test_a_follower_goes_on_in_the_cold_tier_where_what_it_planned_was_moved(kind: Kind, upto: int | None) -> None:
    tiers = Tiers(kind, batches=8)
    log = tiers.tiered()

    def move() -> None:
        tiers.tier()
        tiers.trim(None if upto is None else tiers.firsts[upto])  # all of what was planned, or its beginning

    sink = MemorySink()
    # The first plan of a follower only looks whether its cursor can be served.
    follow(Meanwhile(log, move, plans=2), sink, upto="end", batching=Batching(records=1000), env=Env(clock=tiers.clock))
    assert [(offset, value) for offset, _, value in sink.rows()] == tiers.truth


@pytest.mark.matrix
def test_a_follower_gets_an_error_for_records_that_are_really_missing(kind: Kind) -> None:
    tiers = filled(kind)
    tiers.trim()
    log, sink, segments = tiers.tiered(), MemorySink(), tiers.finished()
    tiers.plain.delete(segment_path(segments[1].segment, segments[1].start))
    forget_tails()
    with pytest.raises(NotFound, match=f"offsets {segments[1].start} to"):
        follow(log, sink, upto="end", env=Env(clock=tiers.clock), batching=Batching(records=1))
    assert [offset for offset, _, _ in sink.rows()] == list(range(segments[1].start))


def test_reading_goes_on_where_what_was_planned_was_moved(kind: Kind) -> None:
    tiers = Tiers(kind, batches=8)
    log = tiers.tiered()
    reading = log.read()
    found = [next(reading)]
    moved(tiers)
    assert rows([*found, *reading]) == tiers.truth


def test_reading_says_what_expired_while_it_was_read(kind: Kind) -> None:
    tiers = filled(kind)
    tiers.trim()
    log = tiers.tiered()
    reading = log.read()
    next(reading)
    tiers.tier(retention=MaxBytes(1))
    forget_tails()
    with pytest.raises((CursorExpired, NotFound)):
        list(reading)


def test_a_plan_that_loses_every_race_says_so(kind: Kind) -> None:
    tiers = filled(kind)
    log = tiers.tiered()

    class Restless:
        """A hot tier that has never what the cold one has not."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tiers.hot(), name)

        def bounds(self) -> Bounds:
            return Bounds(len(tiers.truth), len(tiers.truth))

        def plan(self, since: Cursor, limit: Limit) -> Any:
            raise CursorExpired("moved again")

    restless = TieredLog(Restless(), tiers.cell(), log._open_reader)
    assert fetched(restless.plan(log.start())) == tiers.truth  # everything is in segments
    assert fetched(restless.plan(log.start(), Limit(records=3))) == tiers.truth[:3]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", some(range(3), 1))
def test_a_consumer_follows_across_the_seam_while_everything_runs(kind: Kind, seed: int) -> None:
    """A follower with a slot, from the beginning, beside a producer, a tierer, retention and trimming."""
    tiers = Tiers(kind, batches=6, background=True)
    tiers.tier()
    tiers.trim(tiers.firsts[3])
    stop = threading.Event()
    failures: list[BaseException] = []
    sink = MemorySink()
    with ExitStack() as opened:
        manager = opened.enter_context(MetadataManager.start(tiers.topic))
        manager.reconcile_assignment(range(PARTITIONS))
        log = TieredLog(tiers.hot(), tiers.cell(), lambda _: ColdReader(manager, tiers.plain, tiers.partition))
        begin(log, sink, "billing", start="beginning", holder="me")

        def keep() -> None:
            tierer = tiers.tierer(retention=Consumed(), target=300 + 200 * seed)
            try:
                while not stop.is_set():
                    tierer.run_once(everything=True)
                    tiers.trim()
            except BaseException as error:
                failures.append(error)
                raise

        keeper = threading.Thread(target=keep)
        keeper.start()
        try:
            done = follow(log, sink, "billing", upto=len(tiers.truth), holder="me")
            for number in range(40):
                tiers.append(1 + number % 4)
                if number % 7 == seed:
                    done = follow(log, sink, "billing", upto=len(tiers.truth), holder="me")
            done = follow(log, sink, "billing", upto=len(tiers.truth), holder="me")
        finally:
            stop.set()
            keeper.join(120)
    assert not failures
    assert done.next == len(tiers.truth)
    assert [(offset, value) for offset, _, value in sink.rows()] == tiers.truth
    assert sink.cursor(log.log_id) == done


# --- what is not known yet -------------------------------------------------------------------------------------

NEED_OLD: list[Callable[[TieredLog], object]] = [
    lambda log: log.bounds(),
    lambda log: log.start(),
    lambda log: log.plan(Cursor(log.log_id, 0)),
    lambda log: log.plan(Cursor(log.log_id, 0), Limit(upto=0)),
    lambda log: list(log.read()),
    lambda log: list(log.read(Cursor(log.log_id, 1))),
    lambda log: log.position_of("retained"),
    lambda log: log.position_of(EPOCH),
    lambda log: log.slots.create("late", 1),
    lambda log: log.slots.reset("known", 1),
    lambda log: log.pieces(0, 4),
    lambda log: follow(log, MemorySink(), upto="end"),
]


def needs_nothing_old(tiers: Tiers, log: TieredLog) -> None:
    """All that is about the hot tier is served."""
    first, end = tiers.hot().bounds().first, len(tiers.truth)
    assert 0 < first < end
    assert fetched(log.plan(Cursor(log.log_id, first))) == tiers.truth[first:]
    assert rows(log.read(Cursor(log.log_id, first))) == tiers.truth[first:]
    assert log.position_of("now") == log.end().next == end
    assert log.position_of(EPOCH + timedelta(days=99999)) == end
    assert log.slots.create("new", first).position == first
    assert log.slots.reset("new", end).position == end
    sink = MemorySink()
    assert follow(log, sink, "new", start=first, upto="end", env=Env(clock=tiers.clock)).next == end
    assert [(offset, value) for offset, _, value in sink.rows()] == tiers.truth[first:]
    assert follow(log, MemorySink(), start="now", upto="end", env=Env(clock=tiers.clock)).next == end
    log.slots.drop("new")


@pytest.mark.matrix
@pytest.mark.parametrize("trouble", some(["no high-water mark", "catching up", "not assigned", "not to be opened"], 2))
def test_without_the_events_what_is_old_is_not_ready_and_what_is_hot_is_served(kind: Kind, trouble: str) -> None:
    events = Events(PARTITIONS)
    tiers = filled(kind, topic=events)
    tiers.trim(tiers.firsts[5])
    tiers.hot().slots.create("known", tiers.firsts[6])
    if trouble == "no high-water mark":
        events.unknown = set(range(PARTITIONS))
    if trouble == "catching up":
        events.held = True
    manager = MetadataManager.start(events, background=False, env=Env(clock=tiers.clock))  # type: ignore[arg-type]
    if trouble != "not assigned":
        manager.reconcile_assignment(range(PARTITIONS))
    opened = []

    def reader(_: ExitStack) -> ColdReader:
        if trouble == "not to be opened" and not opened:
            raise TransientStorageError("The broker does not answer.")
        return ColdReader(manager, tiers.plain, tiers.partition)

    log = TieredLog(tiers.hot(), tiers.cell(), reader)
    before = log.slots.list()
    for ask in NEED_OLD:
        with pytest.raises(NotReady):
            ask(log)
    assert [(state.name, state.position) for state in log.slots.list()] == [
        (slot.name, slot.position) for slot in before
    ]
    needs_nothing_old(tiers, log)
    # And all is well as soon as they are there.
    events.unknown, events.held = set(), False
    opened.append(True)
    manager.reconcile_assignment(range(PARTITIONS))
    assert rows(log.read()) == tiers.truth
    needs_nothing_old(tiers, log)


def test_a_permanent_error_of_opening_is_raised_unchanged(kind: Kind) -> None:
    tiers = filled(kind)
    tiers.trim(tiers.firsts[5])

    def reader(_: ExitStack) -> ColdReader:
        raise CorruptData("The topic is damaged.")

    with pytest.raises(CorruptData):
        TieredLog(tiers.hot(), tiers.cell(), reader).bounds()


def test_opened_parts_are_closed_even_if_the_rest_could_not_be_opened(kind: Kind) -> None:
    tiers = filled(kind)
    assert tiers.trim(), "what is only in segments needs them"
    events: list[str] = []

    def reader(opened: ExitStack) -> ColdReader:
        opened.callback(events.append, "closed")
        if not events:
            raise TransientStorageError("The store does not answer.")
        return ColdReader(tiers.manager(), tiers.plain, tiers.partition)

    with TieredLog(tiers.hot(), tiers.cell(), reader) as log:
        with pytest.raises(NotReady):
            log.bounds()
        assert events == ["closed"]
        assert log.bounds().first == 0
        assert events == ["closed"]
    assert events == ["closed", "closed"]
    assert log.bounds().first == 0  # it is opened again


def test_an_untiered_log_with_a_cold_tier_begins_where_it_begins(kind: Kind) -> None:
    tiers = Tiers(kind, batches=4)
    assert tiers.trim(tiers.firsts[2]) == 0  # it keeps what is in no segment
    hot = tiers.hot()
    forget(hot, tiers.firsts[2])  # as a log does that was trimmed before it got a cold tier
    log = tiers.tiered()
    assert log.bounds() == hot.bounds() == Bounds(tiers.firsts[2], len(tiers.truth))
    with pytest.raises(CursorExpired):
        log.plan(Cursor(log.log_id, 0))
    with pytest.raises(CursorExpired):
        log.slots.create("billing", 0)


def test_a_hole_between_the_tiers_is_not_bridged() -> None:
    tiers = Tiers("wal", batches=3)
    tiers.tier()
    tiers.trim()
    tiers.append(4)
    tiers.append(2)
    hot = tiers.hot()
    assert isinstance(hot, WalLog)
    hot.trim(tiers.firsts[4], beyond_slots=True)
    log = tiers.tiered()
    assert log.bounds().first == tiers.firsts[4]
    for since in (0, tiers.firsts[3]):  # what is before the hole cannot be known to be of the log's history
        with pytest.raises(CursorExpired):
            log.plan(Cursor(log.log_id, since))
    with pytest.raises(CursorExpired):
        list(log.read(Cursor(log.log_id, 0)))
    assert rows(log.read()) == tiers.truth[tiers.firsts[4] :]


def test_nothing_expires_by_a_policy_that_keeps_everything(kind: Kind) -> None:
    tiers = filled(kind)
    tiers.trim()
    tiers.tier(retention=FOREVER)
    assert tiers.tiered().bounds().first == 0
