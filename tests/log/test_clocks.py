"""Clocks that are wrong by any amount in either direction: their effects are bounded, and end by themselves."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as some

from strandline.bulk.verifying import verify as verify_log
from strandline.log.object.head.edits import (
    BatchListing,
    apply_spills,
    begin_trim_round,
    is_due,
    list_batches,
    plan_spills,
    set_back,
)
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.slots.rules import has_expired, is_idle, is_suspect, seen, suspect
from strandline.model.cursor import SECOND, Bounds, Cursor
from strandline.model.head import Head, WriterId
from strandline.model.records import record_batch
from strandline.model.retention import SlotLimits, SlotState
from strandline.model.times import DAY, LEAP, NO_DOUBT, TOLERANCE, Doubt, Present, doubt_of, may_expire, may_set_back
from strandline.storage.clock import SteadyTime
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.plain import PlainStore
from tests import matrix_cases

WRITER = WriterId(UUID(int=1))
YEAR = 365 * 86400
NOW = 1_700_000_000_000_000
SKEWS = pytest.mark.parametrize("skew", matrix_cases.some([10 * YEAR, YEAR, 120, -120, -YEAR, -10 * YEAR], 2))


class World:
    """A bucket with a clock of its own, and machines whose clocks differ by chosen amounts."""

    def __init__(self, *, url: str = "s3://bucket", retention: str = "consumed", idle: int = 0) -> None:
        self.store_clock = ManualClock()
        self.store = PlainStore(url, clock=self.store_clock)
        self.clocks: list[ManualClock] = [self.store_clock]
        self.number = 0
        self.log = self.machine(create=True, retention=retention, limits=SlotLimits(idle_seconds=idle))

    def machine(self, skew: float = 0.0, **options) -> ObjectLog:
        """The log on a machine whose clock is ``skew`` seconds ahead of the true time."""
        clock = ManualClock(now=self.store_clock.now() + int(skew * SECOND))
        self.clocks.append(clock)
        return open_log(self.store, env=Env(clock=clock, chance=SeededChance(len(self.clocks))), **options)

    def pass_by(self, seconds: float) -> None:
        for clock in self.clocks:
            clock.advance(seconds)

    def append(self, log: ObjectLog, count: int = 1) -> None:
        for _ in range(count):
            batch = record_batch(timestamps=[0], ops=[0], keys=[None], values=[b"%d" % self.number])
            log.append(batch, writer=WRITER, number=self.number).result(120)
            self.number += 1

    def time(self) -> datetime:
        return datetime.fromtimestamp(self.store_clock.now() / SECOND, UTC)


# --- the trimmer ---------------------------------------------------------------------------------------------


@SKEWS
def test_a_trimmer_with_a_wrong_clock_stops_no_other_from_trimming(skew: float):
    world = World()
    world.append(world.log, 3)
    world.log.slots.create("done", 3)
    world.machine(skew).trim()
    world.pass_by(301)
    assert not world.log.trim(pause=300).skipped


@SKEWS
@pytest.mark.parametrize("retention", ["consumed", "age:7d"])
def test_a_dry_run_reports_clocks_as_a_trim_does_and_leaves_nothing(skew: float, retention: str):
    world = World(retention=retention)
    world.append(world.log, 3)
    world.append(world.machine(-skew), 1)
    world.log.slots.create("done", 3)
    wrong = world.machine(skew)
    before = dict(world.store._objects)
    planned = wrong.trim(dry_run=True)
    assert world.store._objects == before
    done = wrong.trim()
    assert planned.clocks.warnings() == done.clocks.warnings() != []
    assert (planned.trimmed_records, planned.floor) == (done.trimmed_records, done.floor)
    assert (planned.clocks.skew != 0) is True


@SKEWS
def test_batches_trimmed_by_a_wrong_clock_are_deleted_a_grace_period_later_and_not_before(skew: float):
    world = World()
    world.append(world.log, 3)
    world.log.slots.create("done", 3)
    wrong = world.machine(skew)
    assert wrong.trim().trimmed_records == 3
    world.pass_by(598)
    assert [wrong.trim().waiting, world.log.trim().waiting] == [1, 1]
    world.pass_by(4)  # the store's clock knows whole seconds only
    assert world.log.trim().waiting == 0
    assert list(world.store.list("batches/")) == []


@SKEWS
def test_a_trimmer_with_a_wrong_clock_invalidates_no_live_slot(skew: float):
    world = World(idle=60)
    world.append(world.log, 3)
    world.log.slots.create("live", 1)
    slot = world.log.slots.claim("live", "me")
    wrong = world.machine(skew)
    for _ in range(20):
        world.pass_by(20)
        slot.touch()
        for _ in range(2):
            wrong.trim()
            world.log.trim()
    assert world.log.slots.get("live").invalid is None


@SKEWS
def test_a_slot_of_a_consumer_with_a_wrong_clock_stays_while_it_lives_and_goes_when_it_is_dead(skew: float):
    world = World(idle=60)
    world.append(world.log, 3)
    wrong = world.machine(skew)
    wrong.slots.create("skewed", 1)
    slot = wrong.slots.claim("skewed", "me")
    for _ in range(20):
        world.pass_by(20)
        slot.touch()
        world.log.trim()
    assert world.log.slots.get("skewed").invalid is None
    for _ in range(8):  # dead: twice the limit, and a round
        world.pass_by(20)
        world.log.trim()
    assert world.log.slots.get("skewed").invalid is not None


@SKEWS
def test_a_hold_of_a_reader_with_a_wrong_clock_lasts_as_long_as_it_should(skew: float):
    world = World()
    world.append(world.log, 3)
    world.log.slots.create("done", 3)
    hold = world.machine(skew).hold(1, 60)
    world.log.trim()
    world.pass_by(59)
    assert world.log.trim().expired == []
    assert world.log.bounds().first == 1
    world.pass_by(1)
    assert world.log.trim().expired == [hold.name]


@SKEWS
def test_nothing_goes_too_early_by_the_clock_of_one_trimmer(skew: float):
    world = World(retention="age:7d")
    world.append(world.log, 3)
    wrong = world.machine(skew)
    world.pass_by(6 * 86400)
    assert [wrong.trim().trimmed_records, world.log.trim().trimmed_records] == [0, 0]
    world.pass_by(86401)
    assert world.log.trim().trimmed_records == 3


@SKEWS
def test_a_trimmer_reports_which_clock_is_wrong_and_by_how_much(skew: float, caplog: pytest.LogCaptureFixture):
    world = World()
    with caplog.at_level(logging.WARNING):
        done = world.machine(skew).trim()
    assert done.clocks is not None
    assert done.clocks.skew == pytest.approx(skew, abs=1)
    assert ("ahead of the store's" if skew > 0 else "behind the store's") in caplog.text
    assert world.log.trim().clocks.skew == 0


# --- the producer ----------------------------------------------------------------------------------------------


@SKEWS
def test_after_a_producer_with_a_wrong_clock_age_and_seeking_are_right_from_the_next_round_on(skew: float):
    world = World(retention="age:7d")
    world.append(world.log, 100)  # some of it is in chunks
    world.pass_by(60)
    world.log.trim()
    world.append(world.machine(skew), 100)
    world.log.trim()
    world.pass_by(3600)
    world.append(world.log, 3)
    assert world.log.position_of(world.time() - timedelta(minutes=30)) == 200
    assert world.log.position_of(world.time() - timedelta(minutes=65)) <= 100
    assert verify_log(world.log).findings == []
    world.pass_by(7 * 86400 - 60)
    assert world.log.trim().floor == 200
    world.pass_by(61)
    assert world.log.trim().floor == 203


def test_listing_times_ahead_are_reported_and_set_back(caplog: pytest.LogCaptureFixture):
    world = World()
    world.append(world.machine(YEAR), 2)
    with caplog.at_level(logging.WARNING):
        done = world.log.trim()
    assert done.clocks.ahead == pytest.approx(YEAR)
    assert "listed up to 365 days ahead of the present" in caplog.text
    assert world.log.head().listed <= world.store_clock.now()
    assert world.log.trim().clocks.warnings() == []


def test_nothing_is_set_back_while_the_store_s_clock_disagrees():
    world = World(retention="age:7d")
    world.append(world.log, 3)
    listed = world.log.head().listed
    world.machine(-YEAR).trim()
    assert world.log.head().listed >= listed
    world.pass_by(60)
    assert world.log.trim().trimmed_records == 0


def test_a_store_whose_clock_is_behind_sets_back_nothing_that_machines_listed_by_the_right_time():
    world = World(retention="age:7d")  # whose store is a year behind all machines
    right = world.machine(YEAR)
    world.append(right, 3)
    listed = right.head().listed
    right.trim()
    assert right.head().listed == listed
    world.pass_by(60)
    assert right.trim().clocks.skew == pytest.approx(YEAR, abs=1)
    assert right.bounds() == Bounds(0, 3)


# --- where there is one clock only -----------------------------------------------------------------------------


def one_machine(retention: str = "age:7d") -> tuple[World, ManualClock]:
    world = World(url="file:///log", retention=retention)
    clock = world.clocks[1]
    return world, clock


@pytest.mark.parametrize("skew", [-YEAR, YEAR])
def test_a_clock_that_was_wrong_for_an_hour_costs_a_folder_nothing(skew: int):
    world, clock = one_machine()
    world.append(world.log, 3)
    world.log.trim()
    world.pass_by(3600)
    clock.set_wall(clock.now() + skew * SECOND)
    for _ in range(6):
        world.append(world.log)
        world.log.trim()
        world.pass_by(600)
    clock.set_wall(clock.now() - skew * SECOND)
    for _ in range(3 * 24):
        world.log.trim()
        world.pass_by(3600)
    assert world.log.bounds().first == 0
    for _ in range(6 * 24):
        world.log.trim()
        world.pass_by(3600)
    assert world.log.bounds() == Bounds(9, 9)


@pytest.mark.parametrize("skew", [YEAR, 10 * YEAR])
def test_a_trimmer_of_a_folder_that_was_ahead_stops_no_other_and_its_trims_go_a_grace_period_later(skew: int):
    world = World(url="file:///log")
    world.append(world.log, 3)
    world.log.slots.create("done", 3)
    assert world.machine(skew).trim().trimmed_records == 3
    done = world.log.trim(pause=300)
    assert (done.skipped, done.waiting) == (False, 1)
    world.pass_by(599)
    assert world.log.trim().waiting == 1
    world.pass_by(1)
    assert world.log.trim().waiting == 0


def test_a_folder_s_clock_that_was_ahead_heals_within_a_day():
    world, clock = one_machine()
    clock.set_wall(clock.now() + 10 * YEAR * SECOND)
    world.append(world.log, 3)
    clock.set_wall(clock.now() - 10 * YEAR * SECOND)
    world.log.trim()
    assert world.log.head().listed > clock.now()
    world.pass_by(86400)
    world.log.trim()
    assert world.log.head().listed <= clock.now()
    world.append(world.log)
    assert world.log.position_of(datetime.fromtimestamp(clock.now() / SECOND, UTC) - timedelta(seconds=5)) <= 3


# --- the rules, for any skew -----------------------------------------------------------------------------------

times = some.integers(NOW - 20 * YEAR * SECOND, NOW + 20 * YEAR * SECOND)
skews = some.integers(-20 * YEAR * SECOND, 20 * YEAR * SECOND)


def listed(*moments: int) -> Head:
    head = Head(UUID(int=2))
    for number, now in enumerate(moments):
        head = list_batches(head, [BatchListing(f"b{number}", 0, 1, 1, 0, 0, WRITER, number, 0)], now)
        head = apply_spills(head, plan_spills(head))
    return head


@given(some.lists(times, min_size=1, max_size=120), times)
def test_setting_back_leaves_times_in_order_and_none_ahead(moments: list[int], now: int):
    head = set_back(listed(*moments), now)
    after = [*(item for level in reversed(head.levels) for item in level), *head.tail]
    found = [getattr(item, "listed_last", None) or item.listed for item in after]
    assert found == sorted(found)
    assert head.listed <= max(now, 0)
    assert all(time <= now for time in found)
    again = list_batches(head, [BatchListing("new", 0, 1, 1, 0, 0, WRITER, len(moments), 0)], now + 5)
    assert again.listed == max(now + 5, head.listed)


@given(skews)
def test_a_trimmer_alone_never_sets_back_what_the_store_does_not_call_ahead(skew: int):
    present = Present(NOW + skew, skew, is_witnessed=True)
    assert not may_set_back(present, NO_DOUBT, listed=NOW)
    assert present.earliest <= NOW + TOLERANCE
    assert abs(present.now - NOW) <= TOLERANCE


@given(skews, some.integers(0, DAY - 1))
def test_where_no_second_clock_is_a_jump_is_not_believed_for_a_day(skew: int, after: int):
    jumped = Present(NOW + skew)
    doubt = doubt_of(jumped, NO_DOUBT, listed=NOW, last_trim=NOW)
    later = Present(jumped.local + after)
    doubt = doubt_of(later, doubt, listed=NOW, last_trim=jumped.local)
    assert not may_set_back(later, doubt, listed=NOW)
    assert may_expire(later, doubt) is (skew <= LEAP)


@given(skews)
def test_a_jump_that_is_taken_back_leaves_no_doubt(skew: int):
    doubt = doubt_of(Present(NOW + skew), NO_DOUBT, listed=NOW, last_trim=NOW)
    after = doubt_of(Present(NOW + 10), doubt, listed=NOW, last_trim=NOW + skew)
    assert after == NO_DOUBT or (skew < -LEAP and after == Doubt(leap_since=NOW + 10))  # back is ahead, for a day


@given(skews, skews, some.integers(3, 10**6), some.integers(1, 20))
def test_a_holder_that_is_seen_each_third_of_its_limit_is_never_idle(holder: int, trimmer: int, limit: int, turn: int):
    """Whatever its clock and one trimmer's show, and whenever the trimmer runs."""
    limits, third = SlotLimits(idle_seconds=limit), limit * SECOND // 3
    state = SlotState("live", 0, "me", 1, NOW + holder)
    for beat in range(turn):
        true = NOW + beat * third
        state = seen(state, epoch=1, now=true + holder)
        for look in (0, third // 2, third - 1):
            now = true + look + trimmer
            assert not is_idle(state, limits, now)
            if is_suspect(state, limits, now):
                state = suspect(state, state, now)
            assert not is_idle(state, limits, now)


@given(skews, skews, some.integers(3, 10**6))
def test_a_dead_holder_is_idle_after_two_limits_and_a_minute_whatever_the_clocks_say(
    holder: int, trimmer: int, limit: int
):
    limits, state = SlotLimits(idle_seconds=limit), SlotState("dead", 0, "me", 1, NOW + holder)
    half = limit * SECOND // 2 + 1
    for look in range(5 + TOLERANCE // half):
        now = NOW + trimmer + look * half
        if is_suspect(state, limits, now):
            state = suspect(state, state, now)
    assert is_idle(state, limits, now)


@given(skews, some.integers(1, 10**6))
def test_a_hold_ends_when_trimmers_have_seen_it_for_its_time(skew: int, seconds: int):
    reader, length = NOW + skew, seconds * SECOND
    state = SlotState("hold", 0, None, 0, reader, expires=reader + length)
    assert is_suspect(state, SlotLimits(), NOW)
    state = suspect(state, state, NOW)
    assert not has_expired(state, NOW + length - 1)
    assert has_expired(state, NOW + length)


@given(times, some.floats(1, 10**6))
def test_a_round_that_seems_to_be_of_the_future_delays_no_round(began: int, pause: float):
    assert is_due(began, NOW, pause) is not (-TOLERANCE <= NOW - began < pause * SECOND)
    begun = begin_trim_round(Head(UUID(int=2), trim_began=began), NOW)
    assert begun.trim_began == NOW


def test_a_damaged_note_is_no_doubt():
    from strandline.formats.object.clock_note import decode_clock_note, encode_clock_note

    doubt = Doubt(5, None)
    assert decode_clock_note(encode_clock_note(doubt)) == doubt
    for data in (b"", b"{", b"[]", b'{"ahead_since": "x", "leap_since": null}', b'{"ahead_since": 1}'):
        assert decode_clock_note(data) == NO_DOUBT


# --- a process that runs for long ------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [YEAR, -YEAR, 120, -120])
def test_a_clock_that_is_set_while_a_process_runs_is_believed_after_a_day(jump: int, caplog: pytest.LogCaptureFixture):
    clock = ManualClock()
    steady = SteadyTime(clock, "/wal")
    clock.advance(10)
    before = steady.now()
    clock.set_wall(clock.now() + jump * SECOND)
    clock.advance(5)
    assert steady.now() == before + 5 * SECOND
    assert f"set {'ahead' if jump > 0 else 'back'} by {abs(jump)} s" in caplog.text
    clock.advance(86400)
    assert steady.now() == clock.now()


def test_a_clock_that_drifts_is_followed():
    clock = ManualClock()
    steady = SteadyTime(clock, "/wal")
    for _ in range(100):
        clock.advance(60)
        clock.set_wall(clock.now() + 30 * SECOND)
        assert steady.now() == clock.now()


def test_a_slot_that_is_claimed_again_stays_where_it_was_seen():
    world = World(idle=60)
    world.append(world.log, 2)
    world.log.slots.create("a", 0)
    world.log.slots.claim("a", "me").advance(Cursor(world.log.log_id, 1))
    assert world.log.slots.get("a").last_seen == world.clocks[1].now()
