"""Agreement of segments with their log, over all small histories: as an offset by offset comparison says."""

from __future__ import annotations

from itertools import groupby
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import Diverged, Gap, NotReady
from strandline.model.cursor import Bounds
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState, TopicPartition
from strandline.tier.copy.history import TermHistory, divergence, lowest_divergence, plan_cuts

PARTITION = TopicPartition("", UUID(int=7), 0)

Terms = list[int]
"""The term of each offset."""


def starts(terms: Terms, first: int) -> tuple[tuple[int, int], ...]:
    """Each term with the offset where it starts."""
    found, at = [], first
    for term, same in groupby(terms):
        found.append((term, at))
        at += len(list(same))
    return tuple(found)


def segment(start: int, terms: Terms, number: int = 0) -> SegmentMetadata:
    return SegmentMetadata(
        segment=SegmentId(PARTITION, UUID(int=number)),
        start=start,
        end=start + len(terms) - 1,
        broker=0,
        max_timestamp=0,
        event_timestamp=0,
        terms=starts(terms, start),
        size=1,
        state=SegmentState.COPY_FINISHED,
    )


def history(terms: Terms, first: int, *, before: bool) -> TermHistory:
    """The history of a log of these terms that has forgotten everything below ``first``."""
    known = first - 1 if before and first else first
    last = terms[-1] if terms and first <= len(terms) else 0
    return TermHistory(Bounds(first, len(terms)), starts(terms[known:], known), last)


ascending = st.lists(st.integers(1, 4), max_size=9).map(sorted)


@settings(deadline=None)
@given(ascending, ascending.filter(bool), st.data(), st.booleans())
def test_a_segment_parts_from_the_log_at_the_first_offset_with_another_term_or_none(
    log: Terms, tiered: Terms, data: st.DataObject, before: bool
) -> None:
    start = data.draw(st.integers(0, 6))
    first = data.draw(st.integers(0, len(log)))
    known = first - 1 if before and first else first
    wanted = next(
        (
            offset
            for offset, term in enumerate(tiered, start)
            if offset >= (known if log[known:] else first) and (offset >= len(log) or log[offset] != term)
        ),
        None,
    )
    assert divergence(segment(start, tiered), history(log, first, before=before)) == wanted


@settings(deadline=None)
@given(ascending.filter(bool), st.lists(st.tuples(st.integers(0, 9), ascending.filter(bool)), max_size=3))
def test_what_is_left_of_segments_agrees_with_the_log_or_nothing_is_cut(
    log: Terms, tiered: list[tuple[int, Terms]]
) -> None:
    segments = sorted((segment(at, terms, number) for number, (at, terms) in enumerate(tiered)), key=lambda s: s.start)
    known = history(log, 0, before=False)
    parts = {found.segment: divergence(found, known) for found in segments}
    late = [found for found in segments if parts[found.segment] is not None and found.terms[-1][0] >= log[-1]]
    try:
        cuts = plan_cuts(segments, known, PARTITION)
    except (Diverged, NotReady):
        assert late
        return
    assert not late
    assert {cut.segment.segment: cut.at for cut in cuts} == {name: at for name, at in parts.items() if at is not None}
    assert (lowest_divergence(segments, known) is None) == (not cuts)
    agreeing = [found for found in segments if parts[found.segment] is None]
    held = {offset for found in agreeing for offset in range(found.start, found.end + 1)}
    for cut in cuts:
        kept = range(cut.segment.start, cut.at)
        assert [cut.segment.term_at(offset) for offset in kept] == log[kept.start : kept.stop]
        assert cut.spare == held.issuperset(kept)


def test_the_later_last_term_decides_and_not_the_terms_where_two_histories_part() -> None:
    log = history([1, 2, 2, 4], 0, before=False)
    (cut,) = plan_cuts([segment(0, [1, 3, 3])], log, PARTITION)
    assert cut.at == 1
    with pytest.raises(Diverged, match=r"ends in term 4, but its cold tier has term 5"):
        plan_cuts([segment(0, [1, 1, 5])], log, PARTITION)


def test_a_log_that_is_only_shorter_is_not_ready_and_one_that_forgot_where_it_parted_has_a_gap() -> None:
    with pytest.raises(NotReady, match=r"ends at 2, but its cold tier has offset 2 in term 1.*tier truncate --from 2"):
        plan_cuts([segment(0, [1, 1, 1])], history([1, 1], 0, before=False), PARTITION)
    with pytest.raises(Gap, match=r"behind a record of term 2, which its cold tier has in term 1"):
        plan_cuts([segment(0, [1, 1, 1])], history([1, 2, 2, 2], 2, before=True), PARTITION)


def test_a_stray_segment_is_cut_though_the_log_has_forgotten_its_offsets_if_others_hold_them() -> None:
    right, stray = segment(0, [1, 2, 2], 1), segment(0, [1, 1, 1], 2)
    (cut,) = plan_cuts([right, stray], history([1, 2, 2, 2], 3, before=True), PARTITION)
    assert (cut.segment, cut.at, cut.spare) == (stray, 2, True)
