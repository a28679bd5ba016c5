"""When the tables of a route are committed to, and which read together."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from strandline.followers.routes.pacing import AT_ONCE, LONGEST_WAIT, Waiting, due, together, wait_of

OFFSETS = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


@given(OFFSETS, st.integers(0, 200))
def test_each_table_is_in_one_group_and_groups_are_far_apart(offsets, near):
    cursors = [(str(number), offset) for number, offset in enumerate(offsets)]
    groups = together(cursors, near)
    assert sorted(name for group in groups for name in group) == sorted(name for name, _ in cursors)
    at = dict(cursors)
    spans = [(min(at[name] for name in group), max(at[name] for name in group)) for group in groups]
    assert all(low - high > near for (_, high), (low, _) in itertools.pairwise(spans))


@given(st.integers(1, 5000), st.floats(0.1, 100))
def test_no_table_waits_longer_than_a_trigger_or_a_minute(tables, pace):
    assert pace <= wait_of(tables, pace) <= max(pace, LONGEST_WAIT)
    assert wait_of(int(AT_ONCE), pace) == pace


def waiting(name: str, rows: int = 1, since: float | None = 0.0) -> Waiting:
    return Waiting(name, rows, rows * 100, since, is_behind=True)


def names(tables: list[Waiting], now: float, **options) -> tuple[str, ...]:
    return due(tables, now, **{"pace": 1.0, "most": 1 << 30, "aligned_at": 0.0, **options}).names


def test_many_tables_with_few_rows_wait_for_each_other():
    tables = [waiting(str(number)) for number in range(30)]
    assert names(tables, 11.9) == ()
    assert len(names(tables, 12.0)) == 30


def test_a_few_tables_with_rows_do_not_wait_for_many_without():
    idle = [waiting(f"idle {number}", 0, None) for number in range(500)]
    assert names([waiting("a"), waiting("b"), *idle], 1.0) == ("a", "b")


def test_all_tables_are_committed_to_together_if_the_next_time_would_be_late():
    tables = [waiting("idle", 0, None), *(waiting(str(number), since=20.0) for number in range(100))]
    assert len(names(tables, 59.0)) == 0
    assert due(tables, 60.0, pace=1.0, most=1 << 30, aligned_at=0.0).is_aligned
    later = due(tables, 60.0, pace=1.0, most=1 << 30, aligned_at=30.0)
    assert (len(later.names), later.is_aligned) == (101, True)
    assert not due(tables[:5], 60.0, pace=1.0, most=1 << 30, aligned_at=30.0).is_aligned


def test_a_table_with_many_rows_waits_for_no_other():
    assert names([waiting("few"), waiting("many", 10_000)], 0.0) == ("many",)


def test_all_that_waits_is_committed_when_memory_is_full():
    assert names([waiting("a", 5), waiting("b", 5)], 0.0, most=1000) == ("a", "b")


def test_a_table_without_rows_is_committed_to_once_a_minute_and_at_the_end():
    idle = waiting("idle", 0, None)
    assert names([idle], 59.0) == ()
    assert names([idle], 60.0) == ("idle",)
    assert names([idle], 1.0, ends=True) == ("idle",)


def test_a_table_that_has_all_is_not_committed_to():
    done = Waiting("done", 0, 0, None, is_behind=False)
    assert names([done], 100.0, ends=True) == ()
