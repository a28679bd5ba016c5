"""Retention of a write-ahead log: limits of slots, and retention policies."""

from __future__ import annotations

import logging

import pytest

from strandline.errors import SlotInvalid
from strandline.log.wal.log import WalLog
from strandline.model.cursor import SECOND, Bounds, Cursor
from strandline.model.retention import NO_LIMITS, Consumed, Forever, InvalidReason, MaxAge, MaxBytes, SlotLimits
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.storage.metrics import INVALIDATIONS
from strandline.testing.clock import ManualClock
from tests.disk_doubles import _PassingDisk


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def log(tmp_path, clock):
    """Twenty records, one a second, in files of a few."""
    with WalLog.open(str(tmp_path), roll_bytes=4000, background=False, env=Env(clock=clock)) as found:
        for _ in range(20):
            found.append_value(bytes(500)).result()
            clock.advance(1)
        yield found


def stored(log, position):
    """What the spans from a position on take, which is less than what the files do by what those begin with."""
    return sum(span.size for span in log.plan(Cursor(log.log_id, position)))


class TestBytesBehind:
    def test_it_is_what_is_stored_from_a_position_on(self, log):
        sizes = [log.bytes_behind(position) for position in range(22)]
        assert sizes[20:] == [0, 0]
        for position in range(20):
            files = len(log._catalog.firsts)
            assert 0 <= sizes[position] - stored(log, position) <= 800 * files
            assert sizes[position] - sizes[position + 1] >= stored(log, position) - stored(log, position + 1)

    def test_below_the_start_it_is_counted_from_there(self, log):
        log.trim(7)
        assert log.bytes_behind(0) == log.bytes_behind(7)

    def test_it_reads_little_however_long_the_log_is(self, tmp_path, clock):
        with WalLog.open(str(tmp_path), background=False, env=Env(clock=clock)) as log:
            for _ in range(70):
                handles = [log.append_value(bytes(2000)) for _ in range(50)]
                handles[-1].result()
        disk = _Counting()
        with WalLog.open(str(tmp_path), background=False, env=Env(clock=clock, disk=disk)) as log:
            disk.bytes = 0
            assert log.bytes_behind(100) > 6_000_000
            assert disk.bytes < 1_200_000


class _Counting(_PassingDisk):
    def __init__(self):
        super().__init__(DISK)
        self.bytes = 0

    def read(self, path, start=0, length=None):
        found = super().read(path, start, length)
        self.bytes += len(found)
        return found


class TestLimits:
    def test_a_slot_beyond_a_limit_is_durably_and_loudly_invalidated(self, tmp_path, log, clock, caplog):
        log.slots.create("far", 2)
        log.slots.create("near", 18)
        before = INVALIDATIONS.labels("horizon")._value.get()
        with caplog.at_level(logging.WARNING):
            found = log.enforce(SlotLimits(lag_bytes=log.bytes_behind(10)))
        assert [(slot.name, slot.invalid.reason) for slot in found] == [("far", InvalidReason.HORIZON)]
        assert INVALIDATIONS.labels("horizon")._value.get() == before + 1
        assert "Slot 'far'" in caplog.text
        assert log.slots.floor() == 18
        assert log.enforce(SlotLimits(lag_bytes=log.bytes_behind(10))) == []
        log.close()
        with WalLog.open(str(tmp_path), background=False, env=Env(clock=clock)) as again:
            assert {slot.name: slot.pins for slot in again.slots.list()} == {"far": False, "near": True}

    def test_exactly_at_a_limit_is_within_it(self, log):
        log.slots.create("reader", 10)
        assert log.enforce(SlotLimits(lag_bytes=log.bytes_behind(10))) == []
        assert len(log.enforce(SlotLimits(lag_bytes=log.bytes_behind(10) - 1))) == 1

    def test_a_silent_slot_is_invalidated_and_one_with_heartbeats_is_not(self, log, clock):
        log.slots.create("silent", 5)
        log.slots.create("alive", 5)
        alive = log.slots.claim("alive", "me")
        clock.advance(100)
        alive.touch()
        clock.advance(1)
        (found,) = log.enforce(SlotLimits(idle_seconds=100))
        assert (found.name, found.invalid.reason) == ("silent", InvalidReason.IDLE_TIMEOUT)
        alive.advance(Cursor(log.log_id, 6))
        with pytest.raises(SlotInvalid):
            log.slots.claim("silent", "me").advance(Cursor(log.log_id, 6))

    def test_the_time_that_a_log_was_closed_counts_as_idle_for_no_slot(self, tmp_path, log, clock):
        log.slots.create("reader", 5)
        log.close()
        clock.advance(5000)
        with WalLog.open(str(tmp_path), background=False, env=Env(clock=clock)) as again:
            clock.advance(100)
            assert again.enforce(SlotLimits(idle_seconds=100)) == []
            clock.advance(1)
            assert len(again.enforce(SlotLimits(idle_seconds=100))) == 1

    def test_a_slot_that_moves_while_it_is_judged_is_left_alone(self, log):
        judged = log.slots.create("reader", 2)
        log.slots.claim("reader", "me").advance(Cursor(log.log_id, 19))
        assert log.slots._invalidate_judged([(judged, InvalidReason.HORIZON)]) == []
        assert log.slots.floor() == 19

    def test_trimming_enforces_them_first(self, log):
        log.slots.create("far", 2)
        log.slots.create("near", 15)
        assert log.trim(20) == 2
        assert log.trim(20, limits=SlotLimits(lag_bytes=log.bytes_behind(10))) == 15

    def test_without_limits_nothing_is_judged(self, log, clock):
        log.slots.create("far", 0)
        clock.advance(10**6)
        assert log.enforce(NO_LIMITS) == []
        assert log.trim(20) == 0


class TestPolicies:
    def test_forever_forgets_nothing(self, log):
        assert log.trim(Forever()) == 0

    def test_what_only_a_newcomer_is_past_is_not_consumed(self, log):
        log.slots.create("newcomer", 15, lifetime=600)
        assert log.trim(Consumed()) == 0
        log.slots.claim("newcomer", "me")
        assert log.trim(Consumed()) == 15

    def test_records_that_every_valid_slot_has_passed_are_consumed(self, log):
        assert log.trim(Consumed()) == 0
        log.slots.create("a", 9)
        log.slots.create("b", 12)
        assert log.trim(Consumed()) == 9
        log.slots.invalidate("a", InvalidReason.HORIZON)
        assert log.trim(Consumed()) == 12
        log.slots.invalidate("b", InvalidReason.HORIZON)
        assert log.trim(Consumed()) == 12

    @pytest.mark.parametrize(("seconds", "start"), [(1, 19), (5, 15), (19, 1), (20, 0), (99, 0)])
    def test_batches_older_than_the_age_are_deleted(self, log, seconds, start):
        assert log.trim(MaxAge(seconds)) == start
        assert log.bounds() == Bounds(start, 20)

    def test_everything_goes_when_all_of_it_is_too_old_and_the_end_stays(self, log, clock):
        clock.advance(100)
        assert log.trim(MaxAge(60)) == 20
        assert log.trim(MaxAge(60)) == 20
        assert log.append_value(b"x").result().first == 20

    def test_the_oldest_go_until_the_rest_fits(self, log):
        sizes = [log.bytes_behind(position) for position in range(21)]
        for size in (10**9, sizes[0], sizes[0] - 1, sizes[3], sizes[7] + 5, sizes[13] - 1, sizes[19], 1):
            start = log.trim(MaxBytes(size))
            assert log.bytes_behind(start) <= size
            assert start == 0 or sizes[start - 1] > size
        assert start == 20

    def test_no_policy_goes_above_the_floor(self, log, clock):
        log.slots.create("reader", 4)
        clock.advance(1000)
        for policy in (MaxAge(1), MaxBytes(1), Consumed()):
            assert log.trim(policy) == 4

    def test_a_slot_beyond_its_limit_no_longer_keeps_a_policy_from_anything(self, log, clock):
        log.slots.create("reader", 4)
        clock.advance(1000)
        assert log.trim(MaxAge(1), limits=SlotLimits(idle_seconds=500)) == 20

    def test_sweeping_again_changes_nothing(self, tmp_path, log):
        log.trim(MaxAge(5))
        before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
        assert log.trim(MaxAge(5)) == 15
        assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def test_seconds_are_those_of_the_clock(clock):
    before = clock.now()
    clock.advance(1)
    assert clock.now() - before == SECOND
