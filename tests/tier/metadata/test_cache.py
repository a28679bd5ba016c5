"""The segment cache: the lifecycle through it, what lookups and lists answer, and that its tables lose nothing."""

from dataclasses import replace
from itertools import product
from uuid import UUID

import pytest

from strandline.errors import InvalidInput
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.tier.metadata import cache as cache_module
from strandline.tier.metadata import cache_rows
from strandline.tier.metadata.cache import SegmentCache

ORDERS = TopicPartition("orders", UUID(int=0xCA), 7)
OTHERS = TopicPartition("others", UUID(int=0xCB), 0)
STARTED, FINISHED, DELETING, DELETED = SegmentState
TO = {
    None: (),
    STARTED: (STARTED,),
    FINISHED: (STARTED, FINISHED),
    DELETING: (STARTED, FINISHED, DELETING),
    DELETED: (STARTED, FINISHED, DELETING, DELETED),
}
"""The events that lead to a state."""
STEPS = {(None, STARTED), (STARTED, FINISHED), (STARTED, DELETING), (FINISHED, DELETING), (DELETING, DELETED)}
DELETIONS = (None, *PartitionDeleteState)


def name(number, partition=ORDERS):
    return SegmentId(partition, UUID(int=number << 64 | number))


def add(number, start=0, end=99, terms=None, partition=ORDERS, **changes):
    made = SegmentMetadata(
        segment=name(number, partition),
        start=start,
        end=end,
        broker=1,
        max_timestamp=50,
        event_timestamp=10,
        terms=((0, start),) if terms is None else terms,
        size=1000 + number,
    )
    return replace(made, **changes)


def update(number, state, partition=ORDERS, **changes):
    made = SegmentUpdate(segment=name(number, partition), broker=1, event_timestamp=10, state=state)
    return replace(made, **changes)


def deletion(state, partition=ORDERS, **changes):
    return replace(PartitionDelete(partition=partition, broker=1, event_timestamp=10, state=state), **changes)


def filled(*events):
    cache = SegmentCache()
    for event in events:
        assert cache.apply(event)
    return cache


def copied(*adds):
    """A cache with these segments, whose copies finished one after the other."""
    return filled(*(event for made in adds for event in (made, replace_state(made, FINISHED))))


def replace_state(made, state):
    return SegmentUpdate(segment=made.segment, broker=1, event_timestamp=10, state=state)


def found(cache, term, offset, partition=ORDERS):
    """The number of the segment that a lookup gives."""
    segment = cache.segment_for(partition, term, offset)
    return None if segment is None else segment.segment.id.int & 0xFFFF


def numbers(segments):
    return [segment.segment.id.int & 0xFFFF for segment in segments]


def told(number, state):
    """The event that leads to this state."""
    return add(number) if state is STARTED else update(number, state)


def led_to(state):
    return filled(*(told(1, step) for step in TO[state]))


def everything(cache):
    return {
        partition: (list(cache.segments(partition)), numbers(cache.unreferenced(partition)), cache.deletion(partition))
        for partition in (ORDERS, OTHERS)
    }


def refuses(cache, event, match):
    before = everything(cache)
    with pytest.raises(InvalidInput, match=match):
        cache.check(event)
    with pytest.raises(InvalidInput, match=match):
        cache.apply(event)
    assert everything(cache) == before


# --- the lifecycle: every state, every event -------------------------------------------------------------------


@pytest.mark.parametrize(("state", "wanted"), list(product(TO, SegmentState)), ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
def test_each_update_goes_along_an_edge_or_is_refused_naming_both_states(state, wanted, kept):
    cache = led_to(state)
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    event = update(1, wanted, broker=2)
    if (state, wanted) in STEPS - {(None, STARTED)}:
        cache.check(event)
        assert cache.apply(event)
        assert cache.get(name(1)) == (None if wanted is DELETED else add(1, state=wanted, broker=2))
    else:
        refuses(cache, event, f"cannot go from {state or 'none'} to {wanted}")


@pytest.mark.parametrize("state", TO, ids=str)
@pytest.mark.parametrize("wanted", SegmentState, ids=str)
def test_only_an_unknown_segment_can_be_added_and_only_in_copy_started(state, wanted):
    cache, event = led_to(state), add(1, broker=2, state=wanted)
    if (state, wanted) == (None, STARTED):
        cache.check(event)
        assert cache.apply(event)
        assert cache.get(name(1)) == event
    else:
        refuses(cache, event, f"cannot go from {state or 'none'} to {wanted}")


@pytest.mark.parametrize("state", SegmentState, ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
def test_an_exact_retry_of_the_last_event_changes_nothing(state, kept):
    cache = led_to(state)
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    before = everything(cache)
    cache.check(told(1, state))
    assert not cache.apply(told(1, state))
    assert everything(cache) == before


@pytest.mark.parametrize(
    "changes", [{"broker": 2}, {"event_timestamp": 11}, {"custom_metadata": b""}, {"custom_metadata": b"x"}], ids=str
)
@pytest.mark.parametrize("state", [FINISHED, DELETING, DELETED], ids=str)
def test_an_event_that_differs_from_the_last_one_is_no_retry(state, changes):
    refuses(led_to(state), update(1, state, **changes), f"cannot go from {state} to {state}")


@pytest.mark.parametrize(("state", "wanted"), list(product(DELETIONS, PartitionDeleteState)), ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
def test_a_partitions_deletion_goes_step_by_step(state, wanted, kept):
    steps = DELETIONS[1 : DELETIONS.index(state) + 1]
    cache = filled(add(1), *(deletion(step) for step in steps))
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    event = deletion(wanted, broker=2)
    if DELETIONS.index(wanted) == DELETIONS.index(state) + 1:
        cache.check(event)
        assert cache.apply(event)
        assert cache.deletion(ORDERS) == event
    else:
        refuses(cache, event, f"cannot go from {state or 'none'} to {wanted}")
    if state is not None:
        assert not cache.apply(cache.deletion(ORDERS))


def test_an_update_replaces_broker_time_and_custom_metadata():
    cache = filled(add(1, custom_metadata=b"first"))
    cache.apply(update(1, FINISHED, broker=7, event_timestamp=11, custom_metadata=b"second"))
    expected = add(1, broker=7, event_timestamp=11, custom_metadata=b"second", state=FINISHED)
    assert cache.get(name(1)) == expected
    loaded = SegmentCache.from_tables(cache.to_tables())
    assert loaded.get(name(1)) == expected
    loaded.apply(update(1, DELETING))
    assert loaded.get(name(1)) == add(1, state=DELETING)
    assert SegmentCache.from_tables(loaded.to_tables()).get(name(1)) == add(1, state=DELETING)


def test_no_custom_metadata_is_not_the_same_as_empty():
    cache = filled(add(1, custom_metadata=b""), add(2))
    for cached in (cache, SegmentCache.from_tables(cache.to_tables())):
        assert [segment.custom_metadata for segment in cached.segments(ORDERS)] == [b"", None]


# --- lookups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", TO, ids=str)
def test_only_copy_finished_segments_are_found(state):
    assert found(led_to(state), 0, 50) == (1 if state is FINISHED else None)


def test_a_lookup_ends_where_the_next_term_starts_in_the_segment():
    cache = copied(add(1, terms=((0, 0), (1, 20), (4, 80))), add(2, 100, 199, terms=((4, 100),)))
    assert [found(cache, 0, offset) for offset in (0, 19, 20, 100)] == [1, 1, None, None]
    assert [found(cache, 1, offset) for offset in (19, 20, 79, 80)] == [None, 1, 1, None]
    assert [found(cache, 4, offset) for offset in (79, 80, 99, 100, 199, 200)] == [None, 1, 1, 2, 2, None]
    assert found(cache, 2, 50) is None
    assert found(cache, -1, 50) is None


def test_a_lookup_never_gives_a_segment_that_does_not_hold_the_offset():
    # The term begins long before the segments, and each tells where.
    cache = copied(add(1, 100, 199, terms=((0, 0),)), add(2, 200, 299, terms=((0, 0),)))
    assert [found(cache, 0, offset) for offset in (50, 100, 199, 200, 299, 300)] == [None, 1, 1, 2, 2, None]
    assert list(cache.unreferenced(ORDERS)) == []


def test_a_term_without_offsets_hides_nothing():
    cache = copied(add(1, 50, 80, terms=((1, 50),)), add(2, 0, 99, terms=((0, 0), (1, 50), (2, 50))))
    assert [found(cache, 1, offset) for offset in (50, 80)] == [1, 1]
    assert found(cache, 2, 50) == 2


def test_a_gap_is_not_answered():
    cache = copied(add(1, 0, 99), add(2, 200, 299))
    assert [found(cache, 0, offset) for offset in (99, 100, 199, 200)] == [1, None, None, 2]


def test_partitions_are_the_same_whatever_their_name():
    cache = copied(add(1))
    assert found(cache, 0, 5, TopicPartition("renamed", ORDERS.topic_id, 7)) == 1
    assert found(cache, 0, 5, OTHERS) is None


def test_the_same_id_in_two_partitions_is_two_segments():
    cache = copied(add(1), add(1, 0, 9, partition=OTHERS))
    for cached in (cache, SegmentCache.from_tables(cache.to_tables())):
        cached.apply(update(1, DELETING, OTHERS))
        assert cached.get(name(1)).state is FINISHED
        assert cached.get(name(1, OTHERS)).state is DELETING


# --- the highest offset ----------------------------------------------------------------------------------------


def test_the_highest_offset_is_per_term():
    cache = copied(add(1, terms=((0, 0), (1, 20))), add(2, 100, 199, terms=((1, 100),)))
    assert [cache.highest_offset(ORDERS, term) for term in (0, 1, 2)] == [19, 199, None]
    assert cache.highest_offset(OTHERS, 0) is None


def test_the_highest_offset_needs_a_finished_copy():
    cache = filled(add(1))
    assert cache.highest_offset(ORDERS, 0) is None


def test_the_highest_offset_does_not_fall_on_deletion():
    cache = led_to(DELETED)
    assert cache.highest_offset(ORDERS, 0) == 99
    assert SegmentCache.from_tables(cache.to_tables()).highest_offset(ORDERS, 0) == 99


# --- overlaps after a change of leader --------------------------------------------------------------------------


def test_a_copy_that_holds_all_of_an_older_one_supersedes_it():
    cache = copied(add(1, 0, 100), add(2, 0, 200))
    assert [found(cache, 0, offset) for offset in (0, 100, 200)] == [2, 2, 2]
    assert numbers(cache.unreferenced(ORDERS)) == [1]
    assert numbers(cache.segments(ORDERS)) == numbers(cache.segments(ORDERS, 0)) == [1, 2]


def test_a_copy_that_begins_earlier_and_ends_later_supersedes():
    cache = copied(add(1, 10, 90), add(2, 5, 100), add(3, 101, 200))
    assert [found(cache, 0, offset) for offset in (4, 5, 50, 95, 150)] == [None, 2, 2, 2, 3]
    assert numbers(cache.unreferenced(ORDERS)) == [1]


def test_several_older_copies_are_superseded_at_once():
    cache = copied(add(1, 0, 50), add(2, 51, 100), add(3, 101, 150), add(4, 20, 160))
    assert [found(cache, 0, offset) for offset in (0, 19, 20, 75, 160)] == [1, 1, 4, 4, 4]
    assert numbers(cache.unreferenced(ORDERS)) == [2, 3]


def test_a_superseded_segment_is_unreferenced_until_it_is_removed():
    cache = copied(add(1, 0, 100), add(2, 0, 200))
    cache.apply(update(1, DELETING))
    assert numbers(cache.unreferenced(ORDERS)) == [1]
    cache.apply(update(1, DELETED))
    assert numbers(cache.unreferenced(ORDERS)) == []
    assert found(cache, 0, 50) == 2


def test_superseded_in_one_term_and_needed_in_another_is_not_unreferenced():
    cache = copied(add(1, 0, 100, terms=((0, 0), (1, 50))), add(2, 50, 200, terms=((1, 50),)))
    assert [found(cache, 0, 30), found(cache, 1, 60)] == [1, 2]
    assert numbers(cache.unreferenced(ORDERS)) == []


@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (add(2, 0, 100), [2, 2, 2, 1, 1]),
        (add(2, 50, 100), [1, 2, 2, 1, 1]),
        (add(2, 100, 300), [1, 1, 2, 2, 2]),
    ],
    ids=["the same start", "within", "across the end"],
)
def test_a_shorter_later_copy_makes_no_offset_unreadable(later, expected, kept):
    cache = copied(add(1, 0, 200), later)
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    assert [found(cache, 0, offset) for offset in (0, 60, 100, 101, 200)] == expected
    assert numbers(cache.unreferenced(ORDERS)) == []


@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
def test_a_superseded_segment_answers_again_when_the_later_one_is_deleted(kept):
    cache = copied(add(1, 0, 100), add(2, 0, 200))
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    cache.apply(update(2, DELETING))
    assert [found(cache, 0, offset) for offset in (0, 100, 101)] == [1, 1, None]
    assert numbers(cache.unreferenced(ORDERS)) == [2]


@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
def test_a_copy_that_ends_before_others_supersedes_nothing(kept):
    cache = copied(add(1, 50, 100), add(2, 0, 70))
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    assert [found(cache, 0, offset) for offset in (0, 49, 50, 70, 100)] == [2, 2, 1, 1, 1]
    assert numbers(cache.unreferenced(ORDERS)) == []


@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
def test_a_later_copy_around_an_older_one_answers_behind_it_too(kept):
    cache = copied(add(1, 50, 60), add(2, 100, 200), add(3, 0, 90))
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    assert [found(cache, 0, offset) for offset in (49, 55, 70, 90, 91, 100)] == [3, 1, 3, 3, None, 2]


@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
def test_a_superseded_segment_answers_only_where_no_other_does(kept):
    cache = copied(add(1, 120, 150), add(2, 0, 200), add(3, 50, 100))
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    assert [found(cache, 0, offset) for offset in (49, 75, 110, 130, 200)] == [2, 3, 2, 2, 2]
    assert numbers(cache.unreferenced(ORDERS)) == [1]
    cache.apply(update(2, DELETING))
    assert [found(cache, 0, offset) for offset in (49, 75, 110, 130, 200)] == [None, 3, None, 1, None]
    assert numbers(cache.unreferenced(ORDERS)) == [2]


def test_being_copied_and_being_deleted_are_unreferenced():
    cache = filled(add(1), add(2, 100, 199), update(2, DELETING), add(3, 200, 299), update(3, FINISHED))
    assert numbers(cache.unreferenced(ORDERS)) == [1, 2]


# --- lists, sizes, transaction indexes --------------------------------------------------------------------------


def test_lists_are_sorted_by_start_and_have_every_state_but_deleted():
    cache = filled(
        *(add(3, 200, 299), add(1, 0, 99, terms=((0, 0), (1, 50))), add(4, 300, 399, terms=((1, 300),))),
        *(add(2, 100, 199, terms=((1, 100),)), update(1, FINISHED), update(2, DELETING)),
        *(add(5, 400, 499), update(5, DELETING), update(5, DELETED)),
    )
    for cached in (cache, SegmentCache.from_tables(cache.to_tables())):
        assert numbers(cached.segments(ORDERS)) == [1, 2, 3, 4]
        assert numbers(cached.segments(ORDERS, 0)) == [1, 3]
        assert numbers(cached.segments(ORDERS, 1)) == [1, 2, 4]
        assert (
            list(cached.segments(ORDERS, 2)) == list(cached.segments(OTHERS)) == list(cached.segments(OTHERS, 0)) == []
        )


def test_a_list_begun_before_a_removal_goes_on_without_what_was_removed(monkeypatch):
    monkeypatch.setattr(cache_rows, "_FEW", 1)
    cache = copied(add(1), add(2, 100, 199), add(3, 200, 299))
    listed = cache.segments(ORDERS)
    assert next(listed).segment == name(1)
    cache.apply(update(2, DELETING))
    cache.apply(update(2, DELETED))
    assert numbers(listed) in ([3], [2, 3])
    assert numbers(cache.segments(ORDERS)) == [1, 3]


def test_sizes_are_summed_per_term_in_every_state_but_deleted():
    cache = filled(add(1, terms=((0, 0), (1, 50))), add(2, 100, 199, terms=((1, 100),)), update(1, FINISHED))
    for cached in (cache, SegmentCache.from_tables(cache.to_tables())):
        assert [cached.size(ORDERS, term) for term in (0, 1, 2)] == [1001, 2003, 0]
        cached.apply(add(3, 200, 299))
        cached.apply(update(2, DELETING))
        assert [cached.size(ORDERS, term) for term in (0, 1)] == [2004, 2003]
        cached.apply(update(2, DELETED))
        assert [cached.size(ORDERS, term) for term in (0, 1)] == [2004, 1001]
        assert cached.size(OTHERS, 0) == 0


# --- what is gone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True], ids=["live", "loaded"])
def test_when_the_deletion_of_a_partition_has_finished_its_segments_are_gone(kept):
    cache = copied(add(1), add(2, 100, 199), add(1, partition=OTHERS))
    if kept:
        cache = SegmentCache.from_tables(cache.to_tables())
    for state in PartitionDeleteState:
        assert found(cache, 0, 5) == 1
        cache.apply(deletion(state))
    for cached in (cache, SegmentCache.from_tables(cache.to_tables())):
        assert found(cached, 0, 5) is None
        assert (
            list(cached.segments(ORDERS)) == list(cached.unreferenced(ORDERS)) == list(cached.segments(ORDERS, 0)) == []
        )
        assert (cached.highest_offset(ORDERS, 0), cached.size(ORDERS, 0), cached.get(name(2))) == (None, 0, None)
        assert cached.deletion(ORDERS).state is PartitionDeleteState.FINISHED
        assert found(cached, 0, 5, OTHERS) == 1
        assert not cached.apply(deletion(PartitionDeleteState.FINISHED))
        refuses(cached, add(9), "the deletion of its partition has finished")
        refuses(cached, update(1, DELETING), "cannot go from none to delete started")


def test_only_so_many_removed_segments_are_remembered(monkeypatch):
    monkeypatch.setattr(cache_module, "_REMEMBERED", 2)
    cache = SegmentCache()
    for number in (1, 2, 3):
        for state in SegmentState:
            cache.apply(told(number, state))
    refuses(cache, update(1, DELETED), "cannot go from none to delete finished")
    for cached in (cache, SegmentCache.from_tables(cache.to_tables())):
        assert not cached.apply(update(2, DELETED))
        assert not cached.apply(update(3, DELETED))
        refuses(cached, add(3), "cannot go from delete finished to copy started")


def test_a_retry_of_a_removal_is_known_by_its_custom_metadata_too():
    cache = filled(add(1), update(1, DELETING), update(1, DELETED, custom_metadata=b"x" * 1000))
    assert not cache.apply(update(1, DELETED, custom_metadata=b"x" * 1000))
    for other in (None, b"", b"x" * 1001):
        refuses(cache, update(1, DELETED, custom_metadata=other), "cannot go from delete finished to delete finished")


def test_a_forgotten_segment_may_be_added_again(monkeypatch):
    monkeypatch.setattr(cache_module, "_REMEMBERED", 0)
    cache = SegmentCache.from_tables(led_to(FINISHED).to_tables())
    for state in (DELETING, DELETED):
        assert cache.apply(update(1, state))
    assert cache.apply(add(1, 100, 199))
    assert cache.get(name(1)).start == 100
    assert numbers(cache.segments(ORDERS)) == [1]
