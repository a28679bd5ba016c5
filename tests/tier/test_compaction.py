"""Many segments at once, merged segments, erased values: nothing is lost or doubled, whatever dies on the way."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strandline as sl
from strandline.errors import Diverged, Fenced, InvalidInput, NotReady
from strandline.log.read.erased_records import same_unless_erased
from strandline.log.read.planning import divided_spans
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, Op, record_batch
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState, TopicPartition
from strandline.testing.faulty import Crash
from strandline.tier.copy import planning
from strandline.tier.copy.segment_files import SegmentSpan, forget_tails, plan_segment, segment_path
from strandline.tier.read import cold_reader
from tests.matrix_cases import parts
from tests.tier.read.tiered_logs import KINDS, DyingProcess, Kind, Tiers, rows

R = TypeVar("R")
DAY = 24 * 3600.0


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


class Backwards:
    """A pool of one thread whose tasks are done, and answer, in reverse order; ``between`` is called after each."""

    def __init__(self, count: int = 4, between: Callable[[], object] = lambda: None) -> None:
        self.count = count
        self.between = between
        self.jobs: list[str] = []

    def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
        self.jobs.append(title)
        for number, task in reversed([*enumerate(tasks)]):
            done = task()
            self.between()
            yield number, done


def intact(tiers: Tiers) -> None:
    """Everything can be read, once, and no segment leaves a gap."""
    tiers.reopen()
    log = tiers.tiered()
    assert rows(log.read()) == tiers.truth
    spans = log.plan(Cursor(log.log_id, 0))
    assert [span.first for span in spans[1:]] == [span.next for span in spans[:-1]]


def clean(tiers: Tiers) -> None:
    """Each segment is finished, follows the one before it, and has the only object at its place."""
    segments = tiers.segments()
    assert {segment.state for segment in segments} <= {SegmentState.COPY_FINISHED}
    assert tiers.objects() == [segment_path(segment.segment, segment.start) for segment in segments]
    assert [segment.start for segment in segments[1:]] == [segment.end + 1 for segment in segments[:-1]]


def clean_after_grace(tiers: Tiers) -> None:
    """The same, once the objects of replaced segments are deleted."""
    tiers.clock.advance(DAY)
    tiers.tierer(grace=DAY).run_once()
    clean(tiers)


# --- a backlog -------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_backlog_is_copied_by_many_tasks_and_published_in_order(kind: Kind) -> None:
    tiers, pool = Tiers(kind, batches=40), Backwards()
    tiers.clock.advance(5)
    steps: list[Any] = []
    done = tiers.tierer(pool=pool, grace=DAY, on_progress=steps.append).run_once(everything=True)
    assert len(done.copied) > 2 * pool.count, "more than one wave"
    assert len(pool.jobs) > 1
    assert [step.first for step in steps] == [segment.start for segment in done.copied]
    (slot,) = tiers.hot().slots.list()
    assert slot.position == len(tiers.truth)
    intact(tiers)
    clean(tiers)
    tiers.trim()
    intact(tiers)


def test_a_last_segment_that_is_not_full_waits_with_a_pool_too() -> None:
    tiers = Tiers("object", batches=80)
    tierer = tiers.tierer(pool=Backwards(), grace=DAY, linger=3600.0, target=20_000)
    first = tierer.run_once().copied
    assert 0 < first[-1].end + 1 < len(tiers.truth)
    assert tierer.run_once().copied == ()
    tiers.clock.advance(3600)
    assert tierer.run_once().copied[-1].end + 1 == len(tiers.truth)
    intact(tiers)


def test_a_pool_needs_a_grace_period_in_which_its_objects_are_safe() -> None:
    tiers = Tiers("object", batches=4)
    with pytest.raises(InvalidInput, match="grace"):
        tiers.tierer(pool=Backwards(), grace=599.0)
    pool = Backwards(between=lambda: tiers.clock.advance(301))
    with pytest.raises(NotReady, match="grace period"):
        tiers.tierer(pool=pool, grace=600.0).run_once(everything=True)
    assert tiers.segments() == []
    assert tiers.objects() == [], "what is not published is deleted"


def test_a_replaced_tierer_publishes_nothing_of_what_its_tasks_stored() -> None:
    tiers = Tiers("object", batches=12)

    def take_over() -> None:
        if len(tiers.hot().slots.list()) and not tiers.finished():
            tiers.tier()

    with pytest.raises(Fenced):
        tiers.tierer(pool=Backwards(between=take_over), grace=DAY).run_once(everything=True)
    intact(tiers)
    clean(tiers)


def test_an_object_that_a_sweep_took_is_not_published() -> None:
    tiers = Tiers("object", batches=12)

    def sweep() -> None:
        for path in tiers.objects():
            tiers.plain.delete(path)

    with pytest.raises(sl.errors.NotFound):
        tiers.tierer(pool=Backwards(between=sweep), grace=DAY).run_once(everything=True)
    tiers.tier()
    intact(tiers)
    clean(tiers)


# --- dying anywhere --------------------------------------------------------------------------------------------


@functools.cache
def base(kind: Kind) -> Tiers:
    """A log whose first records are in small segments, and no longer in the log itself."""
    tiers = Tiers(kind, batches=6)
    tiers.tierer(target=1).run_once()
    tiers.trim(tiers.firsts[4])
    for count in (2, 3, 1, 4, 2):
        tiers.append(count)
    return tiers


class Dying(DyingProcess):
    """A process that copies a backlog and compacts, and dies at one point of all that it does."""

    def work(self) -> None:
        pool = Backwards(2, self.point)
        shared: dict[str, Any] = {"store": self.store, "topic": self.topic, "pool": pool, "grace": DAY}
        self.tiers.tierer(target=900, **shared).run_once(everything=True)
        self.tiers.tierer(target=20_000, **shared).compact(everything=True)


@functools.cache
def points(kind: Kind) -> int:
    calm = Dying(base(kind).copy(), None)
    before = len(calm.tiers.finished())
    calm.work()
    intact(calm.tiers)
    clean_after_grace(calm.tiers)
    assert len(calm.tiers.finished()) < before, "segments were merged"
    return calm.points


PARTS = 24


@pytest.mark.parametrize("part", parts(PARTS, kept=6))
@pytest.mark.parametrize("kind", ["object", pytest.param("wal", marks=pytest.mark.matrix)])
def test_whatever_dies_at_any_point_of_a_compaction_nothing_is_missing_or_repeated(kind: Kind, part: int) -> None:
    for at in range(part, points(kind), PARTS):
        dying = Dying(base(kind).copy(), at)
        tiers = dying.tiers
        with pytest.raises(Crash):
            dying.work()
        intact(tiers)
        tiers.tierer(grace=DAY, target=900).run_once(everything=True)  # one without a pool cleans up after it
        intact(tiers)
        tiers.clock.advance(DAY + 3600)
        tiers.tierer(grace=DAY, target=900).run_once(everything=True)  # and sweeps what nobody published
        intact(tiers)
        clean(tiers)


# --- merging ---------------------------------------------------------------------------------------------------


def test_merged_segments_keep_terms_listing_times_and_the_fingerprints_of_batches() -> None:
    tiers = Tiers("wal", batches=8, terms=True)
    tiers.tierer(target=1).run_once()
    before = {time: tiers.tiered().position_of(sl_time(time)) for time in tiers.times}
    last = tiers.finished()[-1]
    cursors = [str(tiers.hot().cursor_at(offset)) for offset, _ in tiers.truth[1:]]
    done = tiers.tierer(target=1 << 20, grace=DAY).compact(everything=True)
    (only,) = tiers.finished()
    assert done.made == (only,)
    assert len(done.replaced) == 8
    assert [term for term, _ in only.terms] == [1, 3, 7]
    tiers.trim()
    intact(tiers)
    log = tiers.tiered()
    assert {time: log.position_of(sl_time(time)) for time in tiers.times} == before
    assert [str(log.cursor_at(offset)) for offset, _ in tiers.truth[1:]] == cursors
    assert only.max_timestamp == max(last.max_timestamp, only.max_timestamp)
    assert tiers.tierer(grace=DAY).run_once(everything=True).copied == ()


def sl_time(microseconds: int) -> Any:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


def test_a_reader_that_planned_before_a_compaction_reads_on() -> None:
    tiers = Tiers("object", batches=12)
    tiers.tierer(target=1).run_once()
    tiers.trim()
    log = tiers.tiered()
    reader = iter(log.read())
    seen = [next(reader)]
    tiers.tierer(target=1 << 20, grace=DAY).compact(everything=True)
    seen += reader
    assert rows(seen) == tiers.truth


def test_a_compaction_that_is_stopped_changes_nothing_more() -> None:
    tiers, stop = Tiers("object", batches=12), threading.Event()
    tiers.tierer(target=1).run_once()
    stop.set()
    before = tiers.finished()
    assert tiers.tierer(target=1 << 20, grace=DAY).compact(everything=True, stop=stop).made == ()
    assert tiers.finished() == before


def test_a_plan_of_many_segments_goes_on_with_whole_ones_that_are_read_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cold_reader, "_MANY_SPANS", 3)
    tiers = Tiers("wal", batches=8, terms=True)
    tiers.tierer(target=1).run_once()
    tiers.trim()
    log = tiers.tiered()
    first, end = 2, len(tiers.truth) - 1
    spans = log.plan(Cursor(log.log_id, first), Limit(upto=end))
    assert [span.first for span in spans] == [first, *(span.next for span in spans[:-1])]
    assert spans[-1].next == end, "the last one is clipped"
    assert [isinstance(span, SegmentSpan) for span in spans] == [False] * 3 + [True] * 4 + [False]
    plain = log.plan(Cursor(log.log_id, first), Limit(upto=end, batches=100))
    assert not any(isinstance(span, SegmentSpan) for span in plain)
    assert [(span.first, span.next, span.term) for span in spans] == [(s.first, s.next, s.term) for s in plain]
    assert rows(log.read(first))[:-1] == tiers.truth[first:end]
    sent = pickle.loads(pickle.dumps([replace(span, store=None) for span in spans]))
    parts = [part for span in sent for part in divided_spans([replace(span, store=tiers.plain)])]
    assert rows(batch for part in parts for batch in part.fetch()) == tiers.truth[first:end]
    assert rows(batch for span in spans for batch in span.fetch()) == tiers.truth[first:end]


PARTITION = TopicPartition("", UUID(int=1), 0)


def segment(number: int, start: int, end: int, size: int = 10, term: int = 0) -> SegmentMetadata:
    return SegmentMetadata(
        segment=SegmentId(PARTITION, UUID(int=number)), start=start, end=end, broker=0, max_timestamp=0,
        event_timestamp=0, terms=((term, start),), size=size, custom_metadata=b"", no_transaction_index=True,
        state=SegmentState.COPY_FINISHED,
    )  # fmt: skip


def test_what_a_longer_segment_holds_is_left_over_only_behind_its_start_and_in_its_terms() -> None:
    long = segment(1, 10, 39)
    inner, last = segment(2, 20, 29), segment(3, 30, 39)
    other_term, shortened, before = segment(4, 20, 29, term=1), segment(5, 10, 19), segment(6, 0, 9)
    assert planning.contained([before, long, inner, last]) == [inner, last]
    assert planning.contained([long, other_term]) == []
    assert planning.contained([long, shortened]) == [], "a cut segment is newer than the longer one"
    assert planning.contained([before, replace(inner, start=5, terms=((0, 5),))]) == []


@given(st.lists(st.integers(1, 120), max_size=400), st.booleans())
def test_repeated_merging_rewrites_a_record_a_few_times_only(sizes: list[int], everything: bool) -> None:
    target, written = 1000, 0
    segments: list[SegmentMetadata] = []
    for number, size in enumerate(sizes):
        segments.append(segment(number, number, number, size))
        for run in planning.merges(segments, target, everything=False):
            assert len(run) > 1
            assert sum(each.size for each in run) <= target
            assert all(each.size < target // 2 for each in run)
            at = segments.index(run[0])
            assert segments[at : at + len(run)] == run
            whole = segment(number + 1000, run[0].start, run[-1].end, sum(each.size for each in run))
            segments[at : at + len(run)] = [whole]
            written += whole.size
    assert written <= 4 * sum(sizes)
    if everything:
        for run in planning.merges(segments, target, everything=True):
            assert len(run) > 1


# --- erasing ---------------------------------------------------------------------------------------------------


def keyed(tiers: Tiers, changes: Sequence[tuple[Op, bytes, bytes | None]]) -> None:
    """Append a batch of changes with headers."""
    batch = record_batch(
        timestamps=range(len(changes)),
        ops=[op for op, _, _ in changes],
        keys=[key for _, key, _ in changes],
        values=[value for _, _, value in changes],
        headers=[{"who": b"of " + key} for _, key, _ in changes],
    )
    tiers.hot().append(batch, writer=WriterId(UUID(int=77)), number=len(tiers.firsts)).result(120)
    tiers.firsts.append(0)
    tiers.clock.advance(5)


def found(tiers: Tiers) -> list[tuple[int, int, bytes, bytes | None, Any]]:
    """All records of the segments."""
    tables = [
        pa.Table.from_batches(span.fetch(), READ_SCHEMA)
        for each in tiers.finished()
        for span in plan_segment(tiers.plain, each, each.start)
    ]
    return [
        (row["offset"], row["op"], row["key"], row["value"], row["headers"])
        for table in tables
        for row in table.to_pylist()
    ]


def purging() -> Tiers:
    tiers = Tiers("object")
    keyed(tiers, [(Op.PUT, b"anna", b"secret 1"), (Op.PUT, b"bert", b"b1")])
    keyed(tiers, [(Op.PUT, b"anna", b"secret 2"), (Op.PUT, b"carl", None)])
    keyed(tiers, [(Op.PURGE, b"anna", None), (Op.PUT, b"bert", b"b2")])
    keyed(tiers, [(Op.PUT, b"anna", b"new life"), (Op.DELETE, b"bert", None)])
    keyed(tiers, [(Op.PUT, b"dora", b"d1")])
    return tiers


@pytest.mark.parametrize("merging", [False, True])
def test_values_of_purged_keys_are_erased_from_every_segment_and_what_came_later_stays(merging: bool) -> None:
    tiers = purging()
    tiers.tierer(target=1).run_once()
    keyed(tiers, [(Op.PURGE, b"dora", None)])  # in no segment yet
    tiers.trim()
    before = found(tiers)
    assert tiers.hot().bounds().first == 9
    target = 1 << 20 if merging else 1
    done = tiers.tierer(target=target, grace=DAY).compact(purge=True, everything=True)
    assert done.erased == 3
    assert done.held_back == 0
    erased = {0, 2, 8}
    expected = [
        (offset, int(Op.PURGE) if offset in erased else op, key, *((None, None) if offset in erased else rest))
        for offset, op, key, *rest in before
    ]
    assert found(tiers) == expected
    assert not any(b"secret" in bytes(tiers.plain.get(path).data) for path in tiers.objects())
    clean_after_grace(tiers)
    again = tiers.tierer(target=target, grace=DAY).compact(purge=True)
    assert (again.made, again.erased) == ((), 0), "nothing is left to erase"


def test_values_that_the_log_itself_still_has_are_erased_after_it_is_trimmed() -> None:
    tiers = purging()
    tiers.tierer(target=1).run_once()
    tiers.trim(2)
    assert tiers.hot().bounds().first == 2
    done = tiers.tierer(target=1, grace=DAY).compact(purge=True)
    assert (done.erased, done.held_back) == (1, 4)
    tiers.trim()
    done = tiers.tierer(target=1, grace=DAY).compact(purge=True)
    assert (done.erased, done.held_back) == (1, 0)
    assert not any(value and b"secret" in value for _, _, _, value, _ in found(tiers))


def test_erased_records_are_equal_to_the_log_s_own_and_nothing_else_is() -> None:
    rows: dict[str, Any] = {"offset": [0, 1], "timestamp": [1, 1], "key": [b"a", b"b"]}
    tags = [[("who", b"x")], [("who", b"y")]]

    def table(ops: list[Op], values: list[bytes | None], headers: list[Any]) -> pa.Table:
        columns = {**rows, "op": ops, "value": values, "headers": headers}
        return pa.table([pa.array(columns[each.name], each.type) for each in READ_SCHEMA], schema=READ_SCHEMA)

    hot = table([Op.PUT, Op.PURGE], [b"1", None], tags)
    assert same_unless_erased(hot, table([Op.PURGE, Op.PURGE], [None, None], [None, tags[1]]))
    assert not same_unless_erased(hot, table([Op.DELETE, Op.PURGE], [None, None], [None, tags[1]]))
    assert not same_unless_erased(hot, table([Op.PURGE, Op.PURGE], [None, None], [None, tags[0]]))
    assert not same_unless_erased(hot, hot.slice(0, 1))
    assert same_unless_erased(hot.slice(0, 0), hot.slice(0, 0))


def test_a_log_that_still_has_erased_values_has_not_diverged() -> None:
    """A primary that takes over may have trimmed less than the one before it."""
    tiers = purging()
    backup = tiers.backup()
    tiers.tierer(target=1).run_once()
    keyed(tiers, [(Op.PURGE, b"dora", None)])
    tiers.trim()
    tiers.tierer(target=1, grace=DAY).compact(purge=True)
    tiers.restore(backup)
    done = tiers.tierer(target=1, grace=DAY).run_once(everything=True)
    assert done.copied == ()
    assert tiers.hot().bounds().first == 0


def test_values_are_erased_although_listing_times_fall_between_the_segments() -> None:
    """A clock that was ahead, and was set right, leaves segments that cannot be merged into one."""
    ahead = 366 * DAY * 1e6
    tiers = Tiers("wal")
    keyed(tiers, [(Op.PUT, b"anna", b"secret 1")])
    tiers.reopen()
    tiers.clock.set_wall(tiers.clock.now() + int(ahead))
    keyed(tiers, [(Op.PUT, b"anna", b"secret 2")])
    tiers.reopen()
    tiers.clock.set_wall(tiers.clock.now() - int(ahead))
    for number in (3, 4, 5):  # what lies ahead is believed to be wrong a day after it was noticed
        keyed(tiers, [(Op.PUT, b"anna", b"secret %d" % number), (Op.PUT, b"bert", b"stays")])
        tiers.clock.advance(1.5 * DAY)
    keyed(tiers, [(Op.PURGE, b"anna", None)])
    tiers.tierer(target=1).run_once()
    tiers.trim()
    done = tiers.tierer(target=1 << 20, grace=DAY).compact(purge=True, everything=True)
    assert (done.erased, done.held_back) == (5, 0)
    assert 1 < len(tiers.finished()) < len(done.replaced), "what can be merged is"
    assert [value for _, _, _, value, _ in found(tiers)] == [None, None, *[None, b"stays"] * 3, None]
    clean_after_grace(tiers)


@pytest.mark.parametrize("merging", [False, True])
def test_an_earlier_purge_loses_its_value_and_headers_too(merging: bool) -> None:
    tiers = Tiers("object")
    keyed(tiers, [(Op.PURGE, b"anna", b"secret"), (Op.PUT, b"bert", b"b1")])
    keyed(tiers, [(Op.PURGE, b"anna", None)])
    tiers.tierer(target=1).run_once()
    tiers.trim()
    target = 1 << 20 if merging else 1
    done = tiers.tierer(target=target, grace=DAY).compact(purge=True, everything=True)
    assert done.erased == 1
    assert found(tiers)[0][3:] == (None, None)
    again = tiers.tierer(target=target, grace=DAY).compact(purge=True)
    assert (again.made, again.erased) == ((), 0), "nothing is left to erase"


def test_a_purge_of_another_history_erases_nothing() -> None:
    tiers = Tiers("object")
    keyed(tiers, [(Op.PUT, b"anna", b"value")])
    tiers.tierer(target=1).run_once()
    tiers.trim()
    backup = tiers.backup()
    keyed(tiers, [(Op.PURGE, b"anna", None)])
    tiers.tierer(target=1).run_once()
    tiers.restore(backup)
    tiers.append(1)  # instead of the purge
    with pytest.raises(Diverged, match="truncate --from 1"):
        tiers.tierer(target=1, grace=DAY).compact(purge=True)
    assert found(tiers)[0][3] == b"value"
