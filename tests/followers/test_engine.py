"""The follower engine, step by step, with a log and its sink; test_watch_engine.py tests the steps of a watch."""

import pytest

from strandline.errors import InvalidInput
from strandline.followers.engine import Engine
from strandline.followers.events import (
    AppliedRange,
    Apply,
    Batching,
    Began,
    Finish,
    Open,
    Receive,
    Received,
    ReportCursor,
    Signal,
    StoreBatch,
)
from strandline.model.cursor import Cursor
from strandline.testing.sinks import LOG

AT = Cursor(LOG, 0)


def received(first: int, rows: int = 1) -> Received:
    return Received(f"{first}+{rows}", rows, AT.at(first + rows), since=AT.at(first), size=10)


def begun(gather: float | None = None, **batching: float) -> Engine:
    engine = Engine(Batching(**batching), gather=gather)
    assert engine.step(Began(AT), 0.0) == Open(AT)
    take = engine.step(Signal.OPENED, 0.0)
    assert isinstance(take, Receive)
    assert take.since == AT
    return engine


def test_received_records_are_applied_then_stored_and_only_then_reported():
    engine = begun(records=3)
    assert engine.step(received(0, 3), 0.0) == Apply(["0+3"])
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(AppliedRange(["0+3"], AT, AT.at(3)))
    assert engine.applied == AT
    assert engine.step(Signal.STORED, 0.0) == ReportCursor(AT.at(3))
    assert engine.applied == AT.at(3)
    take = engine.step(Signal.NOTHING, 0.0)
    assert isinstance(take, Receive)
    assert take.since == AT.at(3)


def test_receipt_alone_never_reports_anything():
    engine = begun(records=10, window=5.0)
    assert isinstance(engine.step(received(0), 0.0), Receive)
    assert isinstance(engine.step(Signal.NOTHING, 1.0), Receive)
    assert engine.applied == AT


def test_a_small_batch_is_applied_when_its_window_since_the_first_record_has_passed():
    engine = begun(records=10, window=1.0)
    engine.step(received(0), 10.0)
    take = engine.step(Signal.NOTHING, 10.25)
    assert isinstance(take, Receive)
    assert (take.since, take.seconds) == (AT.at(1), 0.75)
    engine.step(received(1), 10.5)
    assert engine.step(Signal.NOTHING, 11.0) == Apply(["0+1", "1+1"])


def committed(engine: Engine, at: float) -> None:
    """Let what is due be applied and stored."""
    assert isinstance(engine.step(Signal.NOTHING, at), Apply)
    assert isinstance(engine.step(Signal.APPLIED, at), StoreBatch)
    assert isinstance(engine.step(Signal.STORED, at), ReportCursor)
    engine.step(Signal.NOTHING, at)


def test_the_first_records_after_a_pause_are_committed_at_once_and_those_of_a_stream_once_per_window():
    engine = begun(records=10, window=1.0, gather=0.05)
    engine.step(received(0), 0.25)
    assert isinstance(engine.step(Signal.NOTHING, 0.99), Receive)  # it has just begun: there may be a backlog
    committed(engine, 1.0)
    take = engine.step(received(1), 7.0)
    assert isinstance(take, Receive)
    assert round(take.seconds, 6) == 0.05
    engine.step(received(2), 7.03)
    committed(engine, 7.05)
    engine.step(received(3), 7.5)
    assert isinstance(engine.step(Signal.NOTHING, 8.04), Receive)
    assert engine.step(Signal.NOTHING, 8.06) == Apply(["3+1"])


def test_a_window_shorter_than_the_time_of_gathering_holds():
    engine = begun(records=10, window=0.01, gather=0.05)
    engine.step(received(0), 5.0)
    assert engine.step(Signal.NOTHING, 5.02) == Apply(["0+1"])


def test_the_engine_never_asks_for_more_than_the_batch_has_room_for():
    engine = begun(records=10, window=5.0)
    take = engine.step(received(0, 4), 0.0)
    assert isinstance(take, Receive)
    assert take.records == 6


def test_a_request_to_stop_applies_what_was_received_and_then_finishes():
    engine = begun(records=10, window=5.0)
    engine.step(received(0), 0.0)
    engine.stop()
    assert engine.step(Signal.NOTHING, 0.0) == Apply(["0+1"])
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(AppliedRange(["0+1"], AT, AT.at(1)))
    assert engine.step(Signal.STORED, 0.0) == ReportCursor(AT.at(1))
    assert engine.step(Signal.NOTHING, 0.0) == Finish(AT.at(1))


def test_the_engine_ends_at_its_last_offset_and_asks_for_nothing_beyond():
    engine = Engine(Batching(), upto=2)
    assert engine.step(Began(AT), 0.0) == Open(AT)
    assert isinstance(engine.step(Signal.OPENED, 0.0), Receive)
    assert engine.step(received(0, 2), 0.0) == Apply(["0+2"])
    engine.step(Signal.APPLIED, 0.0)
    assert engine.step(Signal.STORED, 0.0) == ReportCursor(AT.at(2))
    assert engine.step(Signal.NOTHING, 0.0) == Finish(AT.at(2))


def test_the_engine_ends_at_once_at_its_last_offset():
    assert Engine(Batching(), upto=0).step(Began(AT), 0.0) == Finish(AT)


def test_an_empty_log_is_waited_for():
    take = begun().step(Signal.NOTHING, 0.0)
    assert isinstance(take, Receive)
    assert take.seconds > 0


def test_a_hole_in_what_was_received_is_refused():
    with pytest.raises(InvalidInput, match="Received offset 1 where 0 was due"):
        begun().step(received(1), 0.0)


def test_batching_that_could_never_apply_is_refused():
    with pytest.raises(InvalidInput):
        Batching(records=0)
