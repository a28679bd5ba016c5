"""Slot lag: records, bytes and time behind, retained bytes, and distance to the limits."""

from __future__ import annotations

import pytest

from strandline.errors import StorageError
from strandline.log.object.head.edits import CHUNK, SPILL_AT
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.slots.slot_lag import SlotLag
from strandline.model.retention import InvalidReason, SlotLimits, parse_retention
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.slots import append
from tests.log.slots.head_lags import slot_lags, trim_end
from tests.matrix_cases import some

TOTAL = 2 * CHUNK + SPILL_AT


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(clock: ManualClock) -> ObjectLog:
    """A log of several chunks, whose batches are listed ten seconds after each other."""
    log = open_log(PlainStore(), create=True, env=Env(clock=clock))
    for number in range(TOTAL):
        clock.advance(10)
        append(log, b"x" * (number % 7), number=number)
    return log


def stand(log: ObjectLog, retention: str = "consumed", limits: SlotLimits | None = None) -> dict[str, SlotLag]:
    found = slot_lags(
        log.head(),
        log.slots.list(),
        log.chunks,
        retention=parse_retention(retention),
        limits=limits or SlotLimits(),
        now=log.env.clock.now(),
    )
    return {one.state.name: one for one in found}


def sizes(log: ObjectLog) -> list[int]:
    return [span.size for span in log.plan(log.start())]


@pytest.mark.matrix
@pytest.mark.parametrize("position", some([0, 1, CHUNK, CHUNK + 7, TOTAL - 1, TOTAL], 3))
def test_lag_is_exact_in_records_bytes_and_time(log: ObjectLog, position: int):
    log.slots.create("a", position)
    found = stand(log)["a"]
    assert found.records_behind == TOTAL - position
    assert found.bytes_behind == sum(sizes(log)[position:])
    assert found.seconds_behind == (0 if position == TOTAL else 10 * (TOTAL - position - 1))


def test_what_one_slot_retains_ends_at_the_next_slots_position(log: ObjectLog):
    log.slots.create("slow", 20)
    log.slots.create("fast", 150)
    found = stand(log)
    assert found["slow"].retained == sum(sizes(log)[20:150])
    assert found["fast"].retained == 0
    assert (found["slow"].pins_floor, found["fast"].pins_floor) == (True, False)


def test_two_slots_at_the_same_place_retain_nothing_alone(log: ObjectLog):
    log.slots.create("a", 20)
    log.slots.create("b", 20)
    assert [one.retained for one in stand(log).values()] == [0, 0]
    assert all(one.pins_floor for one in stand(log).values())


@pytest.mark.matrix
@pytest.mark.parametrize("retention", some(["forever", "consumed", "age:200s", "bytes:9000", "age:1s", "bytes:1"], 3))
@pytest.mark.parametrize("position", some([0, 20, 150, TOTAL], 1))
def test_the_next_trim_is_foretold_exactly(log: ObjectLog, retention: str, position: int):
    """And so is what would be retained: by letting the slot catch up, and trimming again."""
    log.set_retention(retention, SlotLimits())
    log.slots.create("a", position)
    retained = stand(log, retention)["a"].retained
    told = trim_end(
        log.head(), log.slots.list(), log.chunks, retention=parse_retention(retention), now=log.env.clock.now()
    )
    before = sum(sizes(log))
    log.trim()
    assert log.bounds().first == told
    kept = sum(sizes(log))
    log.slots.claim("a", "me").advance(log.end())
    log.trim()
    assert kept - sum(sizes(log)) == retained
    assert kept <= before


def test_a_slot_that_is_being_moved_pins_both_places(log: ObjectLog):
    log.slots.create("a", 100)
    store = FaultyStore(log.store)
    dying = open_log(store, env=log.env)
    store.fail_next("put_if", path_prefix="slots/", error=StorageError("Nobody finishes this."))
    with pytest.raises(StorageError):
        dying.slots.reset("a", 30)
    found = stand(log)["a"]
    assert (found.pending, found.pins_floor) == (30, True)
    assert found.retained == sum(sizes(log)[30:])


def test_the_distance_to_the_limits_is_shown_and_predicts_invalidation(log: ObjectLog, clock: ManualClock):
    log.slots.create("a", 100)
    behind = sum(sizes(log)[100:])
    found = stand(log, limits=SlotLimits(lag_bytes=behind, idle_seconds=60))["a"]
    assert (found.bytes_left, found.seconds_left) == (0, 60)
    clock.advance(61)
    limits = SlotLimits(lag_bytes=behind - 1, idle_seconds=60)
    found = stand(log, limits=limits)["a"]
    assert (found.bytes_left, found.seconds_left) == (-1, -1)
    log.set_retention("consumed", limits)
    (gone,) = log.trim().invalidated
    assert gone.invalid is not None
    assert gone.invalid.reason is InvalidReason.HORIZON
    found = stand(log, limits=limits)["a"]
    assert (found.bytes_left, found.seconds_left, found.pins_floor, found.retained) == (None, None, False, 0)
    assert stand(log)["a"].bytes_left is None


def test_a_hold_reports_how_long_it_lasts(log: ObjectLog, clock: ManualClock):
    hold = log.hold(5, 30)
    clock.advance(10)
    assert stand(log)[hold.name].expires_in == 20
