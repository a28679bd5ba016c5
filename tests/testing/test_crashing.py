"""Crashes at each step of a sink's commits find what is wrong with a sink, and nothing where nothing is."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.followers import remaining
from strandline.log.object.log import ObjectLog, open_log
from strandline.testing.crashing import crashing_at, follow_through_crashes, interrupted
from strandline.testing.plain import PlainStore


class Stored:
    """What outlives a process."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.cursor: sl.Cursor | None = None


class RightSink:
    """Stores both in one step."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored

    def cursor(self, log_id: UUID) -> sl.Cursor | None:
        return self.stored.cursor

    def apply(self, records: pa.Table, *, since: sl.Cursor, upto: sl.Cursor) -> None:
        rest = remaining(records, since=since, upto=upto, at=self.stored.cursor)
        if rest is not None:
            self.store(rest.column("value").to_pylist(), upto)

    def store(self, values: list[bytes], upto: sl.Cursor) -> None:
        self.commit([*self.stored.values, *values], upto)

    def commit(self, values: list[bytes], cursor: sl.Cursor | None) -> None:
        self.stored.values, self.stored.cursor = values, cursor


class DataFirst(RightSink):
    def store(self, values: list[bytes], upto: sl.Cursor) -> None:
        super().commit([*self.stored.values, *values], self.stored.cursor)
        self.commit(self.stored.values, upto)


class CursorFirst(RightSink):
    def store(self, values: list[bytes], upto: sl.Cursor) -> None:
        super().commit(self.stored.values, upto)
        self.commit([*self.stored.values, *values], upto)


class Forgetful(RightSink):
    def apply(self, records: pa.Table, *, since: sl.Cursor, upto: sl.Cursor) -> None:
        self.store(records.column("value").to_pylist(), upto)


class Late(RightSink):
    def store(self, values: list[bytes], upto: sl.Cursor) -> None:
        pass


@pytest.fixture
def log() -> ObjectLog:
    log = open_log(PlainStore(), create=True)
    for number in range(5):
        with log.producer() as producer:
            producer.produce([b"%d-%d" % (number, row) for row in range(3)])
    return log


TRUTH = [b"%d-%d" % (number, row) for number in range(5) for row in range(3)]


def crashed(log: ObjectLog, kind: type[RightSink], *names: str) -> tuple[int, list[bytes]]:
    stored = Stored()
    count = follow_through_crashes(log, lambda: kind(stored), steps=[(kind, name) for name in names])
    return count, stored.values


def test_a_right_sink_survives_a_crash_at_each_step_of_each_batch(log: ObjectLog) -> None:
    assert crashed(log, RightSink, "store", "commit") == (5 * 4, TRUTH)


def test_without_steps_it_crashes_before_and_after_each_batch(log: ObjectLog) -> None:
    assert crashed(log, RightSink) == (5 * 2, TRUTH)


def test_a_sink_that_stores_data_first_has_it_twice(log: ObjectLog) -> None:
    count, values = crashed(log, DataFirst, "commit")
    assert (count, sorted(values)) == (5 * 3, sorted([*TRUTH, *TRUTH]))


def test_a_sink_that_stores_its_cursor_first_loses_data(log: ObjectLog) -> None:
    count, values = crashed(log, CursorFirst, "commit")
    assert (count, values) == (5 * 2, [])


def test_a_sink_that_applies_a_batch_again_has_it_twice(log: ObjectLog) -> None:
    assert sorted(crashed(log, Forgetful)[1]) == sorted([*TRUTH, *TRUTH])


def test_a_sink_that_has_stored_nothing_when_apply_returns_is_named(log: ObjectLog) -> None:
    with pytest.raises(AssertionError, match="The cursor is 0 after apply has returned, and should be 3"):
        crashed(log, Late)


class Careful(RightSink):
    def clean(self) -> None: ...


def test_a_step_that_no_batch_reaches_is_an_error(log: ObjectLog) -> None:
    with pytest.raises(AssertionError, match="No batch has reached clean"):
        crashed(log, Careful, "store", "clean")


def test_an_interruption_happens_once_and_leaves_the_method_as_it_was() -> None:
    class Steps(list[str]):
        def step(self) -> str:
            self.append("step")
            return "answer"

    done, before = Steps(), Steps.step
    for after, expected in ((False, ["event", "step", "step"]), (True, ["step", "event", "step"])):
        done.clear()
        with interrupted(Steps, "step", lambda: done.append("event"), after=after) as reached:
            assert [done.step(), done.step()] == ["answer", "answer"]
        assert (list(done), reached, Steps.step) == (expected, ["step"], before)


def test_a_crash_ends_the_block_and_an_error_passes() -> None:
    class Step:
        def step(self) -> None: ...

    seen: list[Any] = []
    with crashing_at(Step, "step") as reached:
        Step().step()
        seen.append("behind the crash")
    assert (seen, reached) == ([], ["step"])
    with pytest.raises(ValueError, match="mine"), crashing_at(Step, "step"):
        raise ValueError("mine")
