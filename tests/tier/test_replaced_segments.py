"""A plan survives compactions: the objects of replaced segments stay for the grace period, but no erased value does."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import Fenced, NotFound
from strandline.log.read.planning import divided_spans
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.head import WriterId
from strandline.model.records import Op, record_batch
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState, TopicPartition
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.tier.copy import planning
from strandline.tier.copy.planning import KnownSegments
from strandline.tier.copy.segment_files import ColdSpan, SegmentSpan, forget_tails
from tests.matrix_cases import partly, sampled
from tests.tier.read.tiered_logs import KINDS, DyingProcess, Kind, Row, Tiers, fetched

DAY = 24 * 3600.0
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


def sent(tiers: Tiers, spans: Sequence[Span]) -> bytes:
    """A plan as it travels to an executor; the store is opened there."""
    cold = [replace(span, store=None) for span in spans if isinstance(span, ColdSpan | SegmentSpan)]
    assert len(cold) == len(spans), "all of it is cold"
    return pickle.dumps(cold)


def received(tiers: Tiers, plan: bytes) -> list[Row]:
    """The records of the plan, read by another process."""
    forget_tails()
    spans = [replace(span, store=tiers.plain) for span in pickle.loads(plan)]
    return fetched(list(divided_spans(spans)))


def cold(kind: Kind, batches: int = 12) -> Tiers:
    """A log whose records are all in small segments alone."""
    tiers = Tiers(kind, batches=batches)
    tiers.tierer(target=1).run_once()
    tiers.trim()
    return tiers


def whole_plan(tiers: Tiers) -> bytes:
    log = tiers.tiered()
    return sent(tiers, log.plan(Cursor(log.log_id, 0)))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_readable_for_the_grace_period_after_a_compaction(kind: Kind) -> None:
    tiers = cold(kind)
    plan = whole_plan(tiers)
    assert tiers.tierer(target=1 << 20, grace=DAY).compact(everything=True).replaced
    for _ in range(4):
        assert received(tiers, plan) == tiers.truth
        tiers.clock.advance(DAY / 4)
        tiers.reopen()
        removed = tiers.tierer(grace=DAY).run_once().removed
    assert len(removed) == 12, "the events remember when they were replaced, over restarts"
    assert fetched(tiers.tiered().plan(Cursor(tiers.hot().log_id, 0))) == tiers.truth
    with pytest.raises(NotFound, match="plan again"):
        received(tiers, plan)
    assert len(tiers.objects()) == len(tiers.segments()) == 1


@pytest.mark.matrix
def test_a_grace_period_outlasts_a_compaction_of_what_a_compaction_made() -> None:
    tiers = cold("object")
    plans = [whole_plan(tiers)]
    for target in (8_000, 20_000, 1 << 20):
        assert tiers.tierer(target=target, grace=DAY).compact(everything=True).made
        plans.append(whole_plan(tiers))
        tiers.clock.advance(3600)
    assert [received(tiers, plan) for plan in plans] == [tiers.truth] * 4


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 4)),
        st.tuples(st.just("tier"), st.sampled_from([1, 400, 900])),
        st.tuples(st.just("trim"), st.integers(0, 100)),
        st.tuples(st.just("plan"), st.integers(0, 100)),
        st.tuples(st.just("compact"), st.sampled_from([8_000, 20_000, 1 << 20])),
        st.tuples(st.just("die"), st.integers(0, 60)),
        st.tuples(st.just("pass"), st.sampled_from([1, 3600, 9 * 3600])),
    ),
    max_size=24,
)


@pytest.mark.parametrize("histories", partly(6, 200))
def test_every_plan_of_a_random_history_is_exact_for_its_grace_period(histories: int) -> None:
    settings(max_examples=histories, deadline=None)(given(st.sampled_from(KINDS), STEPS)(follow_history))()


def follow_history(kind: Kind, steps: list[tuple[str, int]]) -> None:
    tiers = Tiers(kind, batches=3)
    plans: list[tuple[int, bytes, list[Row]]] = []
    for step, number in [("tier", 1), ("trim", 100), *steps, ("plan", 0), ("compact", 1 << 20)]:
        match step:
            case "append":
                tiers.append(number)
            case "tier":
                tiers.tierer(target=number, grace=DAY).run_once(everything=True)
            case "trim":
                tiers.trim(len(tiers.truth) * number // 100)
            case "plan":
                log = tiers.tiered()
                first = log.hot.bounds().first * number // 101
                spans = log.plan(Cursor(log.log_id, first), Limit(upto=log.hot.bounds().first))
                end = spans[-1].next if spans else first
                plans.append((tiers.clock.now(), sent(tiers, spans), tiers.truth[first:end]))
            case "compact":
                tiers.tierer(target=number, grace=DAY).compact(everything=True)
            case "die":
                dying = DyingProcess(tiers, number)
                try:
                    tierer = tiers.tierer(store=dying.store, topic=dying.topic, target=1 << 20, grace=DAY)
                    tierer.compact(everything=True)
                except Crash:
                    tiers.reopen()
            case "pass":
                tiers.clock.advance(number)
        for made, plan, rows in plans:
            if tiers.clock.now() - made < DAY * SECOND:
                assert received(tiers, plan) == rows
    tiers.clock.advance(DAY)
    tiers.tierer(grace=DAY).run_once()
    assert {each.state for each in tiers.segments()} <= {SegmentState.COPY_FINISHED}, "nothing stays for good"
    assert len(tiers.objects()) == len(tiers.segments())


# --- what does not stay ----------------------------------------------------------------------------------------


def keyed(tiers: Tiers, changes: Sequence[tuple[Op, bytes, bytes | None]]) -> None:
    batch = record_batch(
        timestamps=range(len(changes)),
        ops=[op for op, _, _ in changes],
        keys=[key for _, key, _ in changes],
        values=[value for _, _, value in changes],
    )
    tiers.hot().append(batch, writer=WriterId(UUID(int=77)), number=len(tiers.firsts)).result(120)
    tiers.firsts.append(0)
    tiers.clock.advance(5)


def has_secret(tiers: Tiers) -> bool:
    return any(b"secret" in bytes(tiers.plain.get(path).data) for path in tiers.objects())


def purgeable() -> Tiers:
    tiers = Tiers("object")
    keyed(tiers, [(Op.PUT, b"anna", b"secret"), (Op.PUT, b"bert", b"b1")])
    for number in range(4):
        keyed(tiers, [(Op.PUT, b"carl", b"c%d" % number)])
    tiers.tierer(target=1).run_once()
    tiers.trim()
    return tiers


def purged(tiers: Tiers) -> None:
    keyed(tiers, [(Op.PURGE, b"anna", None)])
    tiers.tierer(target=1, grace=DAY).run_once()
    tiers.trim()


def test_a_purge_also_erases_what_an_earlier_compaction_left_for_readers() -> None:
    tiers = purgeable()
    tiers.tierer(target=1 << 20, grace=DAY).compact(everything=True)
    assert len(tiers.objects()) == 6, "readers may have planned with them"
    purged(tiers)
    assert has_secret(tiers)
    tiers.tierer(target=1 << 20, grace=DAY).compact(purge=True)
    assert not has_secret(tiers)
    assert len(tiers.objects()) > len(tiers.finished()), "what has nothing to erase stays for its readers"


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(31))
def test_a_purge_that_died_before_it_deleted_replaced_segments_is_finished_by_the_next_one(every: int) -> None:
    tiers, at = purgeable(), 0
    purged(tiers)
    while True:
        twin = tiers.copy()
        dying = DyingProcess(twin, at)
        try:
            tierer = twin.tierer(store=dying.store, topic=dying.topic, target=1 << 20, grace=DAY)
            tierer.compact(purge=True, everything=True)
            break
        except Crash:
            twin.reopen()
            twin.tierer(target=1 << 20, grace=DAY).compact(purge=True, everything=True)
            twin.clock.advance(DAY)
            twin.tierer(grace=DAY).run_once()  # sweeps the objects of failed copies
            assert not has_secret(twin)
        at += every
    assert at > 60


def test_a_compaction_beside_which_another_one_erases_is_fenced_and_reports_no_lost_segment() -> None:
    tiers = purgeable()
    purged(tiers)
    forget_tails()
    store, begun = FaultyStore(tiers.plain, clock=tiers.clock), list[str]()

    def erase(call: Call) -> None:
        if call.name == "get_range" and not begun:
            begun.append(call.path)
            tiers.tierer(target=1 << 20, grace=DAY).compact(purge=True, everything=True)
            forget_tails()

    store.hook(erase)
    with pytest.raises(Fenced):
        tiers.tierer(store=store, target=1 << 20, grace=DAY).compact(purge=True, everything=True)
    assert not has_secret(tiers)


def test_segments_that_retention_removes_do_not_stay() -> None:
    tiers = cold("object")
    tiers.tierer(target=1 << 20, grace=DAY).compact(everything=True)
    assert len(tiers.objects()) == 13
    tiers.tierer(grace=DAY, retention="bytes:1B").run_once()
    tiers.tierer(grace=DAY, retention="bytes:1B").run_once()
    assert tiers.objects() == []
    assert tiers.segments() == []


# --- the decision ----------------------------------------------------------------------------------------------


def segment(
    number: int, start: int, end: int, *, term: int = 0, state: SegmentState = SegmentState.COPY_FINISHED, at: int = 0
) -> SegmentMetadata:
    partition = TopicPartition("", UUID(int=1), 0)
    return SegmentMetadata(
        segment=SegmentId(partition, UUID(int=number)), start=start, end=end, broker=0, max_timestamp=0,
        event_timestamp=at, terms=((term, start),), size=10, custom_metadata=b"", no_transaction_index=True,
        state=state,
    )  # fmt: skip


DELETING: Any = {"state": SegmentState.DELETE_STARTED}


def test_only_segments_that_others_hold_wholly_and_in_their_terms_count_as_replaced() -> None:
    one, two = segment(1, 0, 19), segment(2, 20, 39)
    inside, across, before = segment(3, 5, 9, **DELETING), segment(4, 15, 25, **DELETING), segment(5, 0, 19)
    beyond, other = segment(6, 30, 45, **DELETING), segment(7, 5, 9, term=1, **DELETING)
    never = segment(8, 0, 9, state=SegmentState.COPY_STARTED)
    left = [inside, across, before, beyond, other, never]
    known = KnownSegments((one, two, *left))
    assert planning.replaced(known, left) == [inside, across, before]
    assert planning.replaced(KnownSegments(tuple(left)), left) == [], "nothing holds them"


def test_a_clock_that_is_some_hours_ahead_or_behind_ends_no_grace_period_early() -> None:
    hour, now = 3600 * SECOND, 10_000 * SECOND
    ahead = segment(1, 0, 9, at=(now + 23 * hour) // 1000, **DELETING)
    for later in (0, hour, 24 * hour, 46 * hour):
        assert planning.within_grace([ahead], DAY, now=now + later, own=now + later) == [ahead]
    assert planning.within_grace([ahead], DAY, now=now + 47 * hour, own=now + 47 * hour) == []


def test_a_grace_period_begins_with_the_deletion_and_a_wrong_clock_cannot_make_it_endless() -> None:
    hour = 3600 * SECOND
    young, old = segment(1, 0, 9, at=9_000_000, **DELETING), segment(2, 0, 9, at=5_000_000, **DELETING)
    ahead, new = segment(3, 0, 9, at=99_000_000, **DELETING), segment(4, 0, 9)
    now = 10_000 * SECOND
    assert planning.within_grace([young, old, ahead, new], 3600, now=now, own=now) == [young, new]
    assert planning.within_grace([young, old, new], 0, now=now, own=now) == []
    fast = 99_000 * SECOND
    assert planning.within_grace([ahead], 3600, now=now, own=fast) == [ahead], "the store's clock is behind"
    assert planning.within_grace([ahead], 3600, now=fast + hour, own=fast + hour) == []
