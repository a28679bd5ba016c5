"""A log that went back and went on differently, beside its cold tier: its own history is kept, or nothing is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from strandline.errors import CursorExpired, Diverged, Gap, InvalidInput, NotReady
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Bounds, Cursor
from strandline.model.retention import TIER_SLOT
from strandline.model.segments import SegmentMetadata
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.tier.copy.segment_files import forget_tails
from tests.matrix_cases import parts, some
from tests.tier.read.tiered_logs import KINDS, Kind, PointedTopic, Tiers, fetched, rows

EVERYTHING = 1 << 20
"""A size of segments that takes all there is into one."""
PARTS = 18


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


def position(tiers: Tiers) -> int:
    """Where the tierer's slot stands."""
    (found,) = [state.position for state in tiers.hot().slots.list() if state.name == TIER_SLOT]
    return found


def ranges(segments: list[SegmentMetadata]) -> list[tuple[int, int, tuple[int, ...]]]:
    """What segments hold, and in which terms."""
    return [(segment.start, segment.end, tuple(term for term, _ in segment.terms)) for segment in segments]


def ten(kind: Kind = "wal", *, target: int = EVERYTHING, hot_from: int = 0) -> Tiers:
    """Ten records of one term, in segments of about ``target`` bytes; the hot tier begins at ``hot_from``."""
    tiers = Tiers(kind)
    go_on(tiers, 10, term=1)
    tiers.tier(target=target)
    tiers.trim(hot_from)
    assert tiers.hot().bounds() == Bounds(hot_from, 10)
    return tiers


def as_time(time: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)


def go_on(tiers: Tiers, records: int, *, term: int) -> None:
    for _ in range(records // 2):
        tiers.append(2, term=term if tiers.kind == "wal" else None)


def settle(tiers: Tiers, *, target: int = EVERYTHING) -> None:
    """Copy everything, let the hot tier forget all it may, and read what there is."""
    tiers.tier(target=target)
    end = len(tiers.truth)
    assert position(tiers) == end
    assert tiers.trim() == end
    assert rows(tiers.tiered().read()) == tiers.truth
    assert sum(segment.end + 1 - segment.start for segment in tiers.segments()) == end
    assert len(tiers.objects()) == len(tiers.segments())


# --- another term ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", some([500, 1, EVERYTHING], 1))
@pytest.mark.parametrize(("to", "hot_from"), some([(0, 0), (4, 0), (4, 4), (5, 2), (9, 8)], 3))
def test_a_log_that_was_rewound_and_went_on_in_a_new_term_is_tiered_as_it_is(
    to: int, hot_from: int, target: int
) -> None:
    tiers = ten(target=target, hot_from=hot_from)
    tiers.rewind(to)
    go_on(tiers, 10, term=2)
    assert rows(tiers.tiered().read()) == tiers.truth  # before a tierer has looked, too
    settle(tiers, target=target)


def test_a_segment_that_has_the_old_end_is_cut_where_the_terms_part_and_the_rest_of_it_stays_readable() -> None:
    tiers = ten(hot_from=4)
    tiers.rewind(5)
    go_on(tiers, 6, term=2)
    done = tiers.tierer(target=EVERYTHING).run_once(everything=True)
    assert ranges(list(done.retired)) == [(0, 9, (1,))]
    assert ranges(tiers.segments()) == [(0, 4, (1,)), (5, 10, (2,))]
    assert tiers.tierer(target=EVERYTHING).run_once(everything=True).retired == ()
    settle(tiers)


@pytest.mark.matrix
def test_times_are_found_in_what_was_left_of_a_segment_as_before() -> None:
    tiers = ten()
    before = [tiers.tiered().position_of(as_time(time)) for time in tiers.times[:2]]
    tiers.trim(4)
    tiers.rewind(5)
    go_on(tiers, 4, term=2)
    tiers.tier(target=EVERYTHING)
    tiers.trim()
    assert [tiers.tiered().position_of(as_time(time)) for time in tiers.times[:2]] == before == [0, 2]


def test_a_log_that_was_rewound_twice_keeps_the_last_of_its_histories() -> None:
    tiers = ten(hot_from=4)
    for term in (2, 3):
        tiers.rewind(6)
        go_on(tiers, 6, term=term)
        tiers.tier(target=EVERYTHING)
    assert ranges(tiers.segments()) == [(0, 5, (1,)), (6, 11, (3,))]
    settle(tiers)


def test_a_copy_that_takes_over_in_a_new_term_is_tiered_in_place_of_the_former_primary_s_end() -> None:
    tiers = Tiers("wal")
    go_on(tiers, 4, term=1)
    tiers.tier()
    copy = tiers.backup()  # a replica that has four records of ten
    go_on(tiers, 6, term=1)
    tiers.tier()
    tiers.restore(copy)
    go_on(tiers, 2, term=2)  # it is promoted
    assert rows(tiers.tiered().read()) == tiers.truth
    settle(tiers)


def test_a_former_primary_that_comes_back_is_refused_and_changes_nothing() -> None:
    tiers = ten()
    former = tiers.backup()
    tiers.rewind(4)
    go_on(tiers, 10, term=2)
    tiers.tier(target=500)
    segments, truth = tiers.segments(), tiers.truth
    promoted = tiers.backup()
    tiers.restore(former)
    tiers.truth = truth[:4] + [(offset, b"") for offset in range(4, 10)]
    go_on(tiers, 6, term=1)  # it does not know yet, and accepts records
    with pytest.raises(
        Diverged, match=r"offset 4 in term 1 and ends in term 1, but its cold tier has term 2.*Tier the later one"
    ):
        tiers.tier()
    assert tiers.segments() == segments
    tiers.restore(promoted)
    tiers.truth = truth
    settle(tiers)


def test_a_log_that_forgot_its_own_history_uncopied_is_not_continued_by_another_one() -> None:
    tiers = Tiers("wal")
    go_on(tiers, 4, term=1)
    copy = tiers.backup()  # without the tierer's slot
    go_on(tiers, 6, term=1)
    tiers.tier()
    tiers.restore(copy)
    go_on(tiers, 6, term=2)
    assert isinstance(hot := tiers.hot(), WalLog)
    assert hot.trim(8, beyond_slots=True) == 8  # somebody insists
    log = tiers.tiered()
    assert log.bounds() == Bounds(8, 10)
    assert rows(log.read()) == tiers.truth[8:]
    for since in (0, 4, 7):
        with pytest.raises(CursorExpired):
            log.plan(Cursor(log.log_id, since))
        assert log.pieces(since, 10) == []
    segments = tiers.segments()
    with pytest.raises(Gap, match=r"behind a record of term 2, which its cold tier has in term 1"):
        tiers.tier()
    assert tiers.segments() == segments


def test_a_start_within_a_file_still_has_the_term_of_the_record_before_it() -> None:
    tiers = Tiers("wal", roll_bytes=1 << 20)
    go_on(tiers, 6, term=3)
    tiers.tier()
    hot = tiers.hot()
    assert tiers.trim(4) == 4
    assert hasattr(hot.plan(hot.start())[0], "term")
    assert hot.term_at(3) == 3  # type: ignore[union-attr]
    assert rows(tiers.tiered().read()) == tiers.truth


def test_what_spark_reads_from_segments_is_of_the_log_s_history() -> None:
    tiers = ten(target=1, hot_from=4)
    tiers.rewind(6)
    go_on(tiers, 4, term=2)
    pieces = tiers.tiered().pieces(0, 10)
    assert [(piece.first, piece.next) for piece in pieces] == [(0, 2), (2, 4), (4, 6)]
    tiers.tier(target=1)
    pieces = tiers.tiered().pieces(0, 10)
    assert [(piece.first, piece.next) for piece in pieces] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


def test_a_cursor_at_the_seam_is_judged_by_the_log_s_terms() -> None:
    tiers = ten(hot_from=4)
    tiers.rewind(6)
    go_on(tiers, 4, term=2)
    settle(tiers)
    log = tiers.tiered()
    assert fetched(log.plan(Cursor(log.log_id, 8, 2))) == tiers.truth[8:]
    assert fetched(log.plan(Cursor(log.log_id, 6, 1))) == tiers.truth[6:]
    with pytest.raises(Diverged):
        log.plan(Cursor(log.log_id, 8, 1))


# --- dying anywhere --------------------------------------------------------------------------------------------


class Dying:
    """A tierer that dies at one point of all that it does to the store and to the topic."""

    def __init__(self, tiers: Tiers, at: int | None) -> None:
        forget_tails()
        self.at, self.points = at, 0
        store = FaultyStore(tiers.plain, clock=tiers.clock)
        store.hook(self._called)
        topic = PointedTopic(tiers.topic, self._point)
        self.run: Callable[..., object] = tiers.tierer(store=store, topic=topic, target=300).run_once

    def _called(self, _: Call) -> None:
        self._point()

    def _point(self) -> None:
        if self.points == self.at:
            raise Crash
        self.points += 1


@pytest.mark.matrix
@pytest.mark.parametrize("part", parts(PARTS, kept=6))
def test_whatever_dies_while_segments_are_cut_nothing_of_the_log_s_history_is_missing(part: int) -> None:
    base = ten(target=500, hot_from=4)
    base.rewind(5)
    go_on(base, 6, term=2)
    base.hot().close()
    base._wal = None
    calm = Dying(base.copy(), None)
    calm.run(everything=True)
    assert calm.points > PARTS
    for at in range(part, calm.points, PARTS):
        tiers = base.copy()
        with pytest.raises(Crash):
            Dying(tiers, at).run(everything=True)
        tiers.reopen()
        tiers.trim()
        assert rows(tiers.tiered().read()) == tiers.truth
        settle(tiers)


# --- restored from an older copy -------------------------------------------------------------------------------


def restored(kind: Kind, *, slots: bool = True, hot_from: int = 0, target: int = 500) -> Tiers:
    """A log that ends at four, and its cold tier at ten: it was restored from a copy that was taken at four."""
    tiers = Tiers(kind)
    go_on(tiers, 4, term=1)
    tiers.tier(target=target)
    copy = tiers.backup()
    go_on(tiers, 6, term=1)
    tiers.tier(target=target)
    tiers.restore(copy, slots=slots)
    tiers.trim(hot_from)
    return tiers


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "slots"), [("wal", True), ("object", True), ("object", False)])
def test_a_log_restored_from_an_older_copy_is_read_but_not_tiered_before_an_operator_decides(
    kind: Kind, slots: bool
) -> None:
    tiers = restored(kind, slots=slots)
    segments, objects = tiers.segments(), tiers.objects()
    with pytest.raises(NotReady, match=r"ends at 4, but its cold tier has offset 4 .*tier truncate --from 4"):
        tiers.tier()
    assert (tiers.segments(), tiers.objects()) == (segments, objects)
    assert position(tiers) <= 4
    log = tiers.tiered()
    assert log.bounds() == Bounds(0, 4)
    assert rows(log.read()) == tiers.truth
    with pytest.raises(Diverged, match="past the log's end"):
        log.plan(Cursor(log.log_id, 10))


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "slots"), [("wal", True), ("object", True), ("object", False)])
@pytest.mark.parametrize("more", some([2, 6, 10], 1))
def test_a_restored_log_that_grew_differently_within_its_term_is_refused_and_both_histories_are_kept(
    kind: Kind, slots: bool, more: int
) -> None:
    tiers = restored(kind, slots=slots)
    with pytest.raises(NotReady):
        tiers.tier()
    go_on(tiers, more, term=1)
    segments, objects = tiers.segments(), tiers.objects()
    with pytest.raises((Diverged, NotReady)) as refused:
        tiers.tier()
    assert refused.type is (NotReady if more < 6 else Diverged)
    assert f"truncate --from {4 if more >= 6 else 4 + more}" in str(refused.value)
    assert (tiers.segments(), tiers.objects()) == (segments, objects)
    assert tiers.trim() <= 4  # the hot tier forgets nothing of the new one
    assert rows(tiers.tiered().read()) == tiers.truth
    assert rows_of_pieces(tiers) <= 4 or more < 6


def test_the_first_look_at_a_log_that_grew_differently_puts_the_slot_back_to_where_the_two_part() -> None:
    tiers = restored("object", slots=False)
    go_on(tiers, 8, term=1)
    assert position(tiers) == 10
    with pytest.raises(Diverged, match="truncate --from 4"):
        tiers.tier()
    assert position(tiers) == 4
    assert tiers.trim() == 4
    assert rows(tiers.tiered().read()) == tiers.truth


def rows_of_pieces(tiers: Tiers) -> int:
    """Up to where Spark would read segments."""
    pieces = tiers.tiered().pieces(0, len(tiers.truth))
    return pieces[-1].next if pieces else 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_log_is_tiered_as_it_is_once_the_cold_tier_was_truncated(kind: Kind) -> None:
    tiers = restored(kind, slots=False, target=EVERYTHING)
    go_on(tiers, 8, term=1)
    tierer = tiers.tierer(target=EVERYTHING)
    with pytest.raises(InvalidInput, match=r"truncated to offset 8: it diverges from the log at 4"):
        tierer.truncate(8)
    with pytest.raises(InvalidInput, match=r"truncated to offset 13"):
        tierer.truncate(13)
    assert ranges(tierer.truncate(4)) == [(4, 9, (1 if kind == "wal" else 0,))]
    assert tierer.truncate(4) == []
    settle(tiers)


def test_the_cold_tier_is_truncated_within_a_segment() -> None:
    tiers = ten()
    tiers.rewind(5)
    go_on(tiers, 6, term=1)
    tierer = tiers.tierer(target=EVERYTHING)
    with pytest.raises(Diverged, match="truncate --from 5"):
        tierer.run_once(everything=True)
    tiers.trim(2)
    assert ranges(tierer.truncate(5)) == [(0, 9, (1,))]
    assert ranges(tiers.segments()) == [(0, 4, (1,))]
    settle(tiers)


def test_the_cold_tier_is_not_truncated_below_what_the_log_itself_has() -> None:
    tiers = ten(hot_from=6)
    segments = tiers.segments()
    with pytest.raises(InvalidInput, match="the log itself has 6 up to 10"):
        tiers.tierer().truncate(4)
    assert tiers.segments() == segments


@pytest.mark.matrix
def test_a_restored_log_that_went_on_in_a_new_term_is_tiered_as_it_is() -> None:
    tiers = restored("wal", hot_from=2)
    go_on(tiers, 4, term=2)
    settle(tiers)


@pytest.mark.matrix
def test_a_restored_log_that_grew_within_its_term_and_then_in_a_new_one_is_refused_where_it_parted() -> None:
    tiers = restored("wal", target=EVERYTHING)
    go_on(tiers, 2, term=1)
    go_on(tiers, 4, term=2)
    segments = tiers.segments()
    with pytest.raises(Diverged, match=r"another record at offset 4.*truncate --from 4"):
        tiers.tier()
    assert tiers.segments() == segments
    assert tiers.trim() <= 4
    tiers.tierer().truncate(4)
    settle(tiers)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_copy_of_the_log_is_tiered_on_as_if_nothing_had_been(kind: Kind) -> None:
    tiers = Tiers(kind)
    go_on(tiers, 4, term=1)
    old = tiers.backup()
    go_on(tiers, 6, term=1)
    tiers.tier(target=500)
    new, truth, segments = tiers.backup(), tiers.truth, tiers.segments()
    tiers.restore(old)
    with pytest.raises(NotReady):
        tiers.tier()
    tiers.restore(new)
    tiers.truth = truth
    tiers.tier()
    assert tiers.segments() == segments
    go_on(tiers, 4, term=1)
    settle(tiers)
