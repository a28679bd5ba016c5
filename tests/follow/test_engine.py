"""The heart of following, driven by hand."""

import pytest

from strandline.follow.engine import (
    Advance,
    Applied,
    Apply,
    Batching,
    Began,
    Engine,
    Fetch,
    Fetched,
    Finish,
    Plan,
    Planned,
    Stopping,
    Wait,
    Woken,
)
from strandline.log.memory import MemorySpan
from strandline.model.cursor import Cursor
from strandline.model.errors import InvalidInput
from strandline.testing.sinks import LOG, changes

AT = Cursor(LOG, 0)


def span(first: int, rows: int = 1) -> MemorySpan:
    table = changes(first, *[(b"k", b"v")] * rows)
    return MemorySpan(tuple(table.to_batches()), first, first + rows, 10)


def fetched(*spans: MemorySpan) -> Fetched:
    return Fetched(spans, [batch for one in spans for batch in one.fetch()])


def begun(**batching: float) -> Engine:
    engine = Engine(Batching(**batching))
    (plan,) = engine.step(Began(AT), 0.0)
    assert isinstance(plan, Plan)
    assert plan.since == AT
    return engine


def test_what_is_fetched_is_applied_from_the_sinks_cursor_and_only_then_is_the_slot_advanced():
    engine = begun(records=3)
    assert engine.step(Planned([span(0, 3)]), 0.0) == [Fetch([span(0, 3)])]
    (apply,) = engine.step(fetched(span(0, 3)), 0.0)
    assert isinstance(apply, Apply)
    assert (apply.since, apply.upto) == (AT, AT.at(3))
    advance, plan = engine.step(Applied(AT.at(3)), 0.0)
    assert advance == Advance(AT.at(3))
    assert isinstance(plan, Plan)
    assert plan.since == AT.at(3)


def test_receipt_alone_never_advances_anything():
    engine = begun(records=10, window=5.0)
    engine.step(Planned([span(0)]), 0.0)
    assert not any(isinstance(action, Advance) for action in engine.step(fetched(span(0)), 0.0))
    assert not any(isinstance(action, Advance) for action in engine.step(Woken(), 1.0))


def test_a_small_batch_is_applied_when_its_window_since_the_first_record_has_passed():
    engine = begun(records=10, window=1.0)
    engine.step(Planned([span(0)]), 0.0)
    engine.step(fetched(span(0)), 10.0)
    (wait,) = engine.step(Planned([]), 10.25)
    assert wait == Wait(AT.at(1), 0.75)
    engine.step(Woken(), 10.5)
    engine.step(fetched(span(1)), 10.5)
    (apply,) = engine.step(Woken(), 11.0)
    assert isinstance(apply, Apply)
    assert apply.upto == AT.at(2)


def test_a_plan_never_asks_for_more_than_the_batch_still_has_room_for():
    engine = begun(records=10, window=5.0)
    (plan,) = engine.step(fetched(span(0, 4)), 0.0)
    assert isinstance(plan, Plan)
    assert plan.limit.records == 6


def test_a_request_to_stop_applies_what_was_fetched_and_then_finishes():
    engine = begun(records=10, window=5.0)
    engine.step(fetched(span(0)), 0.0)
    assert engine.step(Stopping(), 0.0) == []
    (apply,) = engine.step(Woken(), 0.0)
    assert isinstance(apply, Apply)
    assert engine.step(Applied(apply.upto), 0.0) == [Advance(AT.at(1)), Finish(AT.at(1))]


def test_it_finishes_at_the_offset_it_was_given_and_plans_no_further():
    engine = Engine(Batching(), until=2)
    (plan,) = engine.step(Began(AT), 0.0)
    assert isinstance(plan, Plan)
    assert plan.limit.upto == 2
    (apply,) = engine.step(fetched(span(0, 2)), 0.0)
    assert isinstance(apply, Apply)
    assert engine.step(Applied(AT.at(2)), 0.0) == [Advance(AT.at(2)), Finish(AT.at(2))]


def test_it_finishes_at_once_when_it_is_there_already():
    assert Engine(Batching(), until=0).step(Began(AT), 0.0) == [Finish(AT)]


def test_an_empty_log_is_waited_for():
    assert isinstance(begun().step(Planned([]), 0.0)[0], Wait)


def test_a_hole_in_what_was_fetched_is_refused():
    with pytest.raises(InvalidInput, match="Fetched offset 1 where 0 was due"):
        begun().step(fetched(span(1)), 0.0)


def test_batching_that_could_never_apply_is_refused():
    with pytest.raises(InvalidInput):
        Batching(records=0)
