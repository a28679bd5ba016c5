"""Where a returning consumer resumes: a table of cases."""

from __future__ import annotations

from uuid import UUID

import pytest

from strandline.errors import Diverged
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync, plan_resume
from strandline.model.cursor import Bounds, Cursor
from strandline.model.retention import Invalidation, InvalidReason, SlotState

LOG = Cursor(UUID(int=1), 0)
BOUNDS = Bounds(10, 20)


def slot(position: int, reason: InvalidReason | None = None) -> SlotState:
    invalid = None if reason is None else Invalidation(reason, 1)
    return SlotState("replica", position, "me", 1, 0, invalid)


@pytest.mark.parametrize("position", [0, 10, 15, 20])
@pytest.mark.parametrize("since", [10, 14, 20])
def test_a_consumer_resumes_at_its_own_position_wherever_its_slot_is(position: int, since: int) -> None:
    assert plan_resume(slot(position), LOG.at(since), LOG, BOUNDS) == PartialResync(LOG.at(since))
    assert plan_resume(None, LOG.at(since), LOG, BOUNDS) == PartialResync(LOG.at(since))


@pytest.mark.parametrize("since", [0, 9])
def test_a_position_that_is_gone_needs_a_bootstrap(since: int) -> None:
    assert plan_resume(slot(9), LOG.at(since), LOG, BOUNDS) == FullRebootstrap(Cause.WAL_REMOVED)


def test_a_follower_without_a_position_is_new_whatever_its_slot_says() -> None:
    assert plan_resume(slot(15), None, LOG, BOUNDS) == FullRebootstrap(Cause.NEW)
    assert plan_resume(None, None, LOG, BOUNDS) == FullRebootstrap(Cause.NEW)


@pytest.mark.parametrize("reason", list(InvalidReason))
@pytest.mark.parametrize("since", [None, LOG.at(5), LOG.at(15)])
def test_an_invalid_slot_needs_a_bootstrap_until_it_is_reset(reason: InvalidReason, since: Cursor | None) -> None:
    assert plan_resume(slot(15, reason), since, LOG, BOUNDS) == FullRebootstrap(Cause(reason.value))


@pytest.mark.parametrize("since", [LOG.at(21), Cursor(UUID(int=2), 15), Cursor(UUID(int=2), 5)])
def test_a_position_that_was_never_in_this_log_has_diverged(since: Cursor) -> None:
    with pytest.raises(Diverged):
        plan_resume(slot(15), since, LOG, BOUNDS)
