"""Logs in two tiers that were written by a clock years ahead, before it was set right."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from strandline.model.cursor import SECOND
from strandline.storage.clock import SteadyTime
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.matrix_cases import some
from tests.tier.read.tiered_logs import KINDS, Kind, Tiers, rows

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY = 86400
AHEAD = 10 * 366 * DAY * SECOND
WHOLE = 1 << 20
"""A size that no segment reaches: a round copies everything into one."""


def written(kind: Kind, *, between: int | None = None) -> Tiers:
    """A log of two batches of the right time, two of ten years later, and three after the clock was set right.

    With ``between`` a tierer with segments of that size runs while the clock is ahead.
    """
    tiers = Tiers(kind, batches=2)
    tiers.reopen()  # an open log would not believe the clock yet
    tiers.clock.set_wall(tiers.clock.now() + AHEAD)
    tiers.append(2)
    tiers.append(1)
    if between is not None:
        tiers.tier(target=between)
    tiers.reopen()
    tiers.clock.set_wall(tiers.clock.now() - AHEAD)
    for _ in range(2):  # what lies ahead is believed to be wrong a day after it was noticed
        tiers.append(1)
        if kind == "object":
            tiers.trim(0)
        tiers.clock.advance(1.5 * DAY)
    for _ in range(3):
        tiers.append(2)
        tiers.clock.advance(60)
    return tiers


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("target", some([WHOLE, 400], 1))
@pytest.mark.parametrize("between", [None, WHOLE])
def test_a_clock_that_was_ahead_is_not_taken_for_another_history(kind: Kind, target: int, between: int | None) -> None:
    tiers = written(kind, between=between)
    tiers.tier(target=target)
    for _ in range(2):
        tiers.reopen()  # the next tierer compares log and segments
        tiers.append(1)
        tiers.tier(target=target)
    assert tiers.trim() == len(tiers.truth)
    assert rows(tiers.tiered().read()) == tiers.truth


@pytest.mark.matrix
@pytest.mark.parametrize("target", [WHOLE, 400])
@pytest.mark.parametrize("between", [None, WHOLE, 400])
def test_a_time_is_found_in_segments_as_in_the_log_although_a_clock_was_ahead(
    kind: Kind, target: int, between: int | None
) -> None:
    tiers = written(kind, between=between)
    shifts = (-1_500_000, -1000, 0, 500, 1000, 1_500_000)
    right = [*tiers.times[:2], *tiers.times[-3:]]  # those of a wrong clock, and of the day after it, are not asked for
    starts = [EPOCH + timedelta(microseconds=time + shift) for time in right for shift in shifts]
    expected = [tiers.hot().position_of(start) for start in starts]
    tiers.tier(target=target)
    for seam in (tiers.firsts[3], tiers.firsts[5], tiers.firsts[-2], len(tiers.truth)):
        assert tiers.trim(seam) == seam
        log = tiers.tiered()
        assert [log.position_of(start) for start in starts] == expected
        assert log.position_of(EPOCH + timedelta(microseconds=tiers.clock.now() + DAY * SECOND)) == len(tiers.truth)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tierer_whose_clock_is_a_year_ahead_of_its_store_expires_nothing(kind: Kind) -> None:
    tiers = Tiers(kind, batches=6)
    tiers.tier()
    tiers.trim()
    tiers.plain._url = "s3://bucket"  # a server has a clock of its own
    tierer = tiers.tierer(retention="age:90d")
    ahead = ManualClock(now=tiers.clock.now() + 365 * DAY * SECOND)
    ledger = replace(tierer._ledger, env=Env(clock=ahead))
    tierer._expiry = replace(tierer._expiry, ledger=ledger, steady=SteadyTime(ahead, "the cold tier"))
    assert not tierer.run_once().expired
    tiers.clock.advance(100 * DAY)
    assert tiers.tierer(retention="age:90d").run_once().expired, "what is old by both clocks goes"
