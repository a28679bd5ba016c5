"""Rules of a log with a cold tier: how far it is trimmed, where slots may be, how plans are joined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from strandline.bulk.verifying import verify as verify_log
from strandline.errors import CursorExpired, Diverged
from strandline.log.object.head import edits
from strandline.log.object.log import open_log
from strandline.log.read.planning import PlanBuilder
from strandline.log.slots.rules import check_position
from strandline.log.slots.trimming import floor, outrun, retained_first, trim_floor
from strandline.log.wal.log import WalLog
from strandline.model.cursor import NO_LIMIT, Bounds, Limit
from strandline.model.retention import (
    FOREVER,
    NO_LIMITS,
    TIER_SLOT,
    Consumed,
    Invalidation,
    InvalidReason,
    MaxBytes,
    SlotLimits,
    SlotState,
)
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.plain import PlainStore
from tests.contracts.logs import append
from tests.log.slots.head_lags import slot_lags, trim_end

INVALID = Invalidation(InvalidReason.HORIZON, 1)


def slot(name: str, position: int, **changes: object) -> SlotState:
    return replace(SlotState(name, position, None, 0, 0), **changes)


# --- how far a log may forget ----------------------------------------------------------------------------------


def test_without_a_cold_tier_a_log_forgets_up_to_its_floor() -> None:
    for states, pending in product([(), (slot("a", 5),), (slot("a", 5), slot("b", 3))], [(), (4,), (9, 2)]):
        assert trim_floor(states, pending) == floor(states, pending)


def test_with_a_cold_tier_a_log_trims_copied_records_though_slots_need_them() -> None:
    tier = slot(TIER_SLOT, 7)
    assert trim_floor([slot("a", 2), tier, slot("b", 9)]) == 7
    assert trim_floor([tier]) == 7
    assert trim_floor([slot("a", 2), tier], [3]) == 3  # until its cell is written, a pin may be of any slot
    assert trim_floor([slot("a", 2), tier], [9]) == 7


@pytest.mark.parametrize("changes", [{"invalid": INVALID}, {"dropped": True}])
def test_a_tierer_s_slot_that_pins_nothing_does_not_let_a_log_forget_what_others_need(
    changes: dict[str, object],
) -> None:
    tier = slot(TIER_SLOT, 7, **changes)
    assert trim_floor([slot("a", 2), tier]) == 2
    assert trim_floor([tier]) is None


def test_trimmed_records_are_available_to_slots_while_the_log_has_a_tierers_slot() -> None:
    tier = slot(TIER_SLOT, 7)
    assert retained_first([slot("a", 2)], 5) == 5
    assert retained_first([], 5) == 5
    assert retained_first([slot("a", 2), tier], 5) == 0
    assert retained_first([slot("a", 2), replace(tier, invalid=INVALID)], 5) == 0
    assert retained_first([slot("a", 2), replace(tier, dropped=True)], 5) == 5


def test_outrun_slots_are_those_that_lose_records() -> None:
    a, b, tier = slot("a", 2), slot("b", 9), slot(TIER_SLOT, 7)
    assert outrun([a, b], 2) == []
    assert outrun([a, b], 5) == [a]
    assert outrun([a, b], 10) == [a, b]
    assert outrun([a, b, tier], 7) == []  # the cold tier has all of it
    assert outrun([a, b, tier], 8) == [a, tier]
    replica = slot("replica", 3, hot=True)
    assert outrun([a, replica, tier], 7) == [replica]
    assert outrun([a, replica, replace(tier, invalid=INVALID)], 7) == [a, replica]
    assert outrun([replace(a, invalid=INVALID), replace(b, dropped=True)], 10) == []


def test_a_slot_whose_holder_cannot_read_the_cold_tier_pins_the_hot_one() -> None:
    tier = slot(TIER_SLOT, 7)
    assert trim_floor([slot("a", 1), slot("replica", 3, hot=True), tier]) == 3
    assert trim_floor([slot("a", 1), slot("replica", 9, hot=True), tier]) == 7


def test_a_slot_may_be_anywhere_from_the_beginning_of_the_cold_tier_on() -> None:
    bounds = Bounds(10, 20)
    for position in range(25):
        for first in (None, 0, 4, 10, 15):
            lowest = 10 if first is None else min(10, first)
            if position < lowest:
                with pytest.raises(CursorExpired, match=f"begins at {lowest}"):
                    check_position(position, bounds, first)
            elif position > 20:
                with pytest.raises(Diverged):
                    check_position(position, bounds, first)
            else:
                assert check_position(position, bounds, first) == position


# --- plans that are put together -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    first: int
    next: int
    size: int


PIECES = [Piece(0, 3, 10), Piece(3, 4, 1), Piece(4, 9, 30), Piece(9, 10, 2)]


@pytest.mark.parametrize("limit", [
    NO_LIMIT,
    *(Limit(records=count) for count in range(1, 12)),
    *(Limit(bytes=count) for count in range(1, 46)),
    *(Limit(batches=count) for count in range(1, 6)),
    Limit(records=5, bytes=20, batches=2),
])  # fmt: skip
@pytest.mark.parametrize("cut", range(5))
def test_two_plans_together_are_as_large_as_one(limit: Limit, cut: int) -> None:
    whole: PlanBuilder[Piece] = PlanBuilder(limit)
    whole.add(PIECES)
    parts: PlanBuilder[Piece] = PlanBuilder(limit)
    if parts.add(PIECES[:cut]) and not parts.is_full:
        parts.add(PIECES[cut:])
    assert parts.spans == whole.spans
    assert whole.spans == PIECES[: len(whole.spans)] != []
    records, size = sum(piece.next - piece.first for piece in whole.spans), sum(piece.size for piece in whole.spans)
    assert len(whole.spans) == 1 or limit.allows(records=records, size=size, batches=len(whole.spans))
    following = PIECES[len(whole.spans) : len(whole.spans) + 1]
    for piece in following:
        assert not limit.allows(
            records=records + piece.next - piece.first, size=size + piece.size, batches=len(whole.spans) + 1
        )
        assert not whole.add([piece])
        assert whole.spans == PIECES[: len(whole.spans)]


def test_what_is_left_of_a_limit_is_asked_for_next_and_at_least_one() -> None:
    planned: PlanBuilder[Piece] = PlanBuilder(Limit(records=8, bytes=12, batches=3, upto=99))
    assert planned.rest == Limit(records=8, bytes=12, batches=3, upto=99)
    assert not planned.is_full
    assert planned.add(PIECES[:2])
    assert planned.rest == Limit(records=4, bytes=1, batches=1, upto=99)
    assert not planned.is_full
    assert not planned.add(PIECES[2:])
    full: PlanBuilder[Piece] = PlanBuilder(Limit(records=1))
    assert full.add(PIECES[:1])
    assert full.is_full
    assert full.rest == Limit(records=1)
    assert PlanBuilder(NO_LIMIT).rest == NO_LIMIT


# --- logs ------------------------------------------------------------------------------------------------------


def test_an_object_log_is_trimmed_past_consumers_up_to_the_tierer_s_slot_and_they_stay_valid() -> None:
    clock = ManualClock()
    log = open_log(PlainStore(clock=clock), create=True, env=Env(clock=clock), retention="bytes:1")
    for number in range(10):
        append(log, b"x" * 50, b"y", number=number)
    log.slots.create("slow", 2)
    log.slots.create(TIER_SLOT, 8)
    log.trim(grace=0.0)
    assert log.bounds() == Bounds(8, 20)
    done = log.trim(grace=0.0)
    assert done.invalidated == []
    assert [state.invalid for state in log.slots.list()] == [None, None]
    assert log.slots.floor() == 2
    log.slots.claim(TIER_SLOT, "me").advance(log.end())
    log.set_retention("consumed")
    log.trim(grace=0.0)
    assert log.bounds() == Bounds(20, 20)
    assert not [found for found in verify_log(log).findings if found.kind == "slot"]


def test_an_object_log_with_slots_below_its_beginning_and_none_of_a_tierer_is_not_trimmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its listing soon has chunks of several levels, and those that were trimmed are gone.
    monkeypatch.setattr(edits, "CHUNK", 4)
    monkeypatch.setattr(edits, "SPILL_AT", 6)
    clock = ManualClock()
    store = PlainStore(clock=clock)
    log = open_log(store, create=True, env=Env(clock=clock), retention="bytes:1")
    for number in range(300):
        append(log, b"x", number=number)
    assert len(log.head().levels) > 2
    log.slots.create(TIER_SLOT, 213)
    log.trim(grace=0.0)
    log.trim(grace=0.0)
    assert log.bounds().first == 213
    log.slots.create("old", 5, retained_from=0)
    log.slots.cell(TIER_SLOT).update(log.slots.op(), lambda state: replace(state, invalid=INVALID))
    log = open_log(store, env=Env(clock=clock))  # which has no chunks in memory
    assert log.trim(grace=0.0).invalidated == []
    assert log.bounds().first == 213
    log.slots.drop(TIER_SLOT)
    # Without a cold tier it needs what is gone, and is told so.
    assert [state.name for state in log.trim(grace=0.0).invalidated] == ["old"]
    assert log.bounds().first == 300


def test_the_positions_of_slots_are_shown_also_in_the_cold_tier() -> None:
    clock = ManualClock()
    log = open_log(PlainStore(clock=clock), create=True, env=Env(clock=clock), retention="bytes:1")
    for number in range(10):
        append(log, b"x" * 50, number=number)
    log.slots.create("slow", 2)
    log.slots.create(TIER_SLOT, 6)

    def told() -> dict[str, int]:
        head = log.head()
        found = slot_lags(head, log.slots.list(), log.chunks, retention=MaxBytes(1), limits=NO_LIMITS, now=clock.now())
        return {each.state.name: each.retained for each in found}

    head = log.head()
    for ahead, end in (((), 6), (("slow",), 6), ((TIER_SLOT,), 10), (("slow", TIER_SLOT), 10)):
        reached = trim_end(
            head, log.slots.list(), log.chunks, retention=Consumed(), now=clock.now(), up_to_date=frozenset(ahead)
        )
        assert reached == end
    assert trim_end(head, log.slots.list(), log.chunks, retention=FOREVER, now=clock.now()) == 0
    assert told()["slow"] == 0  # if it were up to date, nothing more would go
    log.trim(grace=0.0)
    assert log.bounds().first == 6
    assert set(told()) == {"slow", TIER_SLOT}


def test_a_write_ahead_log_is_trimmed_past_consumers_up_to_the_tierer_s_slot_and_they_stay(
    tmp_path: Path,
) -> None:
    limits = SlotLimits(lag_bytes=1 << 30, idle_seconds=10**9)
    with WalLog.open(str(tmp_path), background=False, tail_bytes=0, roll_bytes=0) as log:
        for number in range(10):
            append(log, b"x" * 50, b"y", number=number)
        log.slots.create("slow", 2)
        log.slots.create(TIER_SLOT, 8)
        assert log.trim(20) == 8
        assert log.trim(Consumed(), limits=limits) == 8
        assert log.trim(MaxBytes(1), limits=limits) == 8
        assert log.trim(8, beyond_slots=True) == 8
        assert [state.invalid for state in log.slots.list()] == [None, None]
        assert log.slots.floor() == 2
        log.slots.claim(TIER_SLOT, "me").advance(log.start().at(12))
        assert log.trim(10, beyond_slots=True) == 10
        assert [state.invalid for state in log.slots.list()] == [None, None]  # the cold tier has all that went
        assert log.trim(Consumed(), limits=limits) == 12
        with pytest.raises(CursorExpired):
            log.slots.create("new", 3)
        log.slots.create("new", 3, retained_from=2)
        assert log.trim(20) == 12
        assert not log.verify().findings
    with WalLog.open(str(tmp_path), background=False) as log:
        assert {state.name: state.position for state in log.slots.list()} == {"slow": 2, "new": 3, TIER_SLOT: 12}
        assert log.bounds().first == 12
        assert log.trim(14, beyond_slots=True) == 14  # what is in neither tier is gone for everybody
        assert all(state.invalid is not None for state in log.slots.list())


def test_a_write_ahead_log_without_a_tierer_is_trimmed_as_ever(tmp_path: Path) -> None:
    with WalLog.open(str(tmp_path), background=False) as log:
        append(log, *[b"x"] * 10, number=0)
        log.slots.create("slow", 2)
        assert log.trim(10) == 2
        assert log.trim(2, beyond_slots=True) == 2
        assert log.slots.list()[0].invalid is None
        assert log.trim(5, beyond_slots=True) == 5
        assert log.slots.list()[0].invalid is not None
        assert log.trim(7, beyond_slots=True) == 7
