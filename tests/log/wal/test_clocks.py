"""A write-ahead log on a machine whose clock is wrong, set back or set ahead: nothing expires too early."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.verify import verify
from strandline.model.cursor import SECOND, Bounds
from strandline.model.retention import MaxAge, SlotLimits
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock

YEAR = 365 * 86400
DAY = 86400
WEEK = MaxAge(7 * DAY)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def opened(folder: Path, clock: ManualClock) -> WalLog:
    return WalLog.open(str(folder), roll_bytes=4000, background=False, env=Env(clock=clock))


def append(log: WalLog, count: int = 10) -> None:
    for _ in range(count):
        log.append_value(bytes(500)).result()


def jump(clock: ManualClock, seconds: int) -> None:
    clock.set_wall(clock.now() + seconds * SECOND)


def when(clock: ManualClock, seconds_ago: float = 0) -> datetime:
    return datetime.fromtimestamp(clock.now() / SECOND, UTC) - timedelta(seconds=seconds_ago)


@pytest.mark.parametrize("skew", [YEAR, -YEAR, 10 * YEAR])
def test_a_clock_that_is_set_while_the_log_is_open_makes_nothing_go_too_early(tmp_path, clock, skew):
    with opened(tmp_path, clock) as log:
        append(log)
        clock.advance(DAY)
        jump(clock, skew)
        append(log)
        assert log.trim(WEEK) == 0
        clock.advance(3600)
        jump(clock, -skew)
        append(log)
        clock.advance(5 * DAY)
        assert log.trim(WEEK) == 0
        clock.advance(2 * DAY)
        append(log)
        clock.advance(DAY)
        assert log.trim(WEEK) >= 10


def test_after_a_clock_was_ten_years_ahead_age_and_seeking_work_again_a_day_later(tmp_path, clock):
    with opened(tmp_path, clock) as log:
        append(log)
    jump(clock, 10 * YEAR)
    with opened(tmp_path, clock) as log:
        append(log)
    jump(clock, -10 * YEAR)
    clock.advance(60)
    with opened(tmp_path, clock) as log:
        append(log)  # still ahead: which of the two is wrong, nobody knows yet
        clock.advance(DAY)
        append(log)
        clock.advance(60)
        append(log)
        assert log.position_of(when(clock, 30)) == 40
        assert log.position_of(when(clock, 2 * DAY)) == 0
        clock.advance(7 * DAY - 90)
        assert log.trim(WEEK) == 10  # what was written ahead is no older than what came behind it
        clock.advance(60)
        assert log.trim(WEEK) == 40
        clock.advance(60)
        assert log.trim(WEEK) == 50


def test_a_clock_that_stays_a_year_behind_after_a_restart_loses_nothing_when_it_is_set_right(tmp_path, clock):
    with opened(tmp_path, clock) as log:
        append(log)
    jump(clock, -YEAR)
    with opened(tmp_path, clock) as log:
        append(log)
        assert log.trim(WEEK) == 0
    jump(clock, YEAR)
    clock.advance(3600)
    with opened(tmp_path, clock) as log:
        append(log)
        assert log.trim(WEEK) == 0
        assert log.bounds() == Bounds(0, 30)


@pytest.mark.parametrize("skew", [YEAR, -YEAR])
def test_a_jump_of_the_clock_makes_no_slot_idle_and_keeps_none_from_being_idle(tmp_path, clock, skew):
    limits = SlotLimits(idle_seconds=100)
    with opened(tmp_path, clock) as log:
        append(log)
        log.slots.create("live", 0)
        log.slots.create("dead", 0)
        slot = log.slots.claim("live", "me")
        for _ in range(4):
            clock.advance(30)
            jump(clock, skew)
            slot.touch()
            jump(clock, -skew)
            found = log.enforce(limits)
        assert [state.name for state in found] == ["dead"]


def test_a_suspended_machine_finds_no_slot_idle(tmp_path, clock):
    with opened(tmp_path, clock) as log:
        log.slots.create("live", 0)
        clock.suspend(5000)
        assert log.enforce(SlotLimits(idle_seconds=100)) == []


def test_a_log_that_is_ahead_warns_once(tmp_path, clock, caplog):
    jump(clock, YEAR)
    with opened(tmp_path, clock) as log:
        append(log, 1)
        jump(clock, -YEAR)
        append(log, 2)
    assert caplog.text.count(f"{YEAR} s ahead of this machine's clock") == 1


def test_verifying_reports_a_log_that_is_ahead_but_not_as_damage(tmp_path, clock):
    with opened(tmp_path, clock) as log:
        append(log, 1)
    assert verify(str(tmp_path), env=Env(disk=DISK, clock=clock)).findings == []
    jump(clock, YEAR)
    with opened(tmp_path, clock) as log:
        append(log, 1)
    jump(clock, -YEAR)
    found = verify(str(tmp_path), env=Env(disk=DISK, clock=clock))
    assert found.is_clean
    (note,) = found.findings
    assert f"{YEAR:,} s ahead of this machine's clock" in note.message
