"""Contract of slots; :class:`~tests.contracts.logs.LogContract` includes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final
from uuid import UUID

import pytest

from strandline.errors import AlreadyExists, CursorExpired, Diverged, Fenced, InvalidInput, NotFound, SlotInvalid
from strandline.log.contract import Log, Slot
from strandline.model.cursor import Cursor
from strandline.model.head import Receipt, WriterId
from strandline.model.records import Op, record_batch
from strandline.testing.stores import together

SOMEBODY: Final = WriterId(UUID(int=1))
"""The writer of tests that need only one."""


def append(log: Log, *values: bytes, writer: WriterId = SOMEBODY, number: int, expect: int | None = None) -> Receipt:
    """Append puts with these values, and wait until they are durable."""
    count = len(values)
    batch = record_batch(timestamps=range(count), ops=[Op.PUT] * count, keys=[None] * count, values=values)
    return log.append(batch, writer=writer, number=number, expect=expect).result(120.0)


class LogOwner(ABC):
    """Operations that the contract leaves to the log's owner."""

    @abstractmethod
    def retain_from(self, log: Log, offset: int) -> None:
        """Trim the log up to an offset, whatever its slots say."""

    @abstractmethod
    def invalidate(self, log: Log, name: str) -> None:
        """Invalidate a slot, for whatever reason."""


class SlotContract(LogOwner):
    """Every sentence of :class:`~strandline.log.contract.Slot`, as a test on the fixture ``log``, an empty log."""

    @pytest.fixture
    def ten(self, log: Log) -> Log:
        """The log with ten records."""
        append(log, *[b"x"] * 6, number=0)
        append(log, *[b"y"] * 4, number=1)
        return log

    def position(self, log: Log, name: str) -> int:
        """The position of a slot, from the log's own list."""
        (found,) = [state.position for state in log.slots.list() if state.name == name]
        return found

    # --- creating -------------------------------------------------------------------------------------------

    def test_a_new_log_has_no_slots_and_no_floor(self, log: Log) -> None:
        assert log.slots.list() == []
        assert log.slots.floor() is None

    @pytest.mark.parametrize("position", [0, 3, 10])
    def test_a_created_slot_is_at_its_position_and_has_no_holder(self, ten: Log, position: int) -> None:
        state = ten.slots.create("billing", position)
        assert (state.name, state.position, state.holder, state.epoch, state.invalid) == (
            "billing",
            position,
            None,
            0,
            None,
        )
        assert ten.slots.list() == [state]
        assert ten.slots.floor() == position

    def test_a_slot_that_exists_is_not_created_again_and_stays_as_it_is(self, ten: Log) -> None:
        state = ten.slots.create("billing", 4)
        for position in (4, 2, 8):
            with pytest.raises(AlreadyExists, match="billing"):
                ten.slots.create("billing", position)
        assert ten.slots.list() == [state]

    def test_a_position_past_the_end_is_refused(self, ten: Log) -> None:
        with pytest.raises(Diverged, match="11"):
            ten.slots.create("billing", 11)
        assert ten.slots.list() == []
        assert ten.slots.floor() is None

    def test_a_position_that_is_no_longer_retained_is_refused(self, ten: Log) -> None:
        self.retain_from(ten, 6)
        with pytest.raises(CursorExpired, match="5"):
            ten.slots.create("billing", 5)
        assert ten.slots.list() == []
        assert ten.slots.create("billing", 6).position == 6

    @pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "ä", "x" * 129, "a\n", "-x"])
    def test_a_name_that_could_not_be_a_file_is_refused(self, ten: Log, name: str) -> None:
        with pytest.raises(InvalidInput):
            ten.slots.create(name, 0)
        assert ten.slots.list() == []

    def test_slots_are_listed_by_name(self, ten: Log) -> None:
        for name in ("zoo", "Ant", "bee", "ant-2", "x" * 128):
            ten.slots.create(name, 0)
        assert [state.name for state in ten.slots.list()] == ["Ant", "ant-2", "bee", "x" * 128, "zoo"]

    # --- claiming -------------------------------------------------------------------------------------------

    def test_claiming_makes_the_holder_and_raises_the_epoch(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        slot = ten.slots.claim("billing", "node-1")
        assert isinstance(slot, Slot)
        assert (slot.name, slot.epoch) == ("billing", 1)
        state = slot.state()
        assert (state.holder, state.epoch, state.position) == ("node-1", 1, 3)
        assert ten.slots.list() == [state]

    def test_claiming_again_is_idempotent_for_the_same_holder(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        first, second = ten.slots.claim("billing", "node-1"), ten.slots.claim("billing", "node-1")
        assert first.epoch == second.epoch == 1
        first.advance(ten.start().at(5))
        second.advance(ten.start().at(6))
        first.advance(ten.start().at(7))
        assert first.state().position == 7

    def test_every_change_of_holder_raises_the_epoch(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        epochs = [ten.slots.claim("billing", holder).epoch for holder in ("a", "b", "a", "a", "c")]
        assert epochs == [1, 2, 3, 3, 4]

    def test_claiming_does_not_move_the_position(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        ten.slots.claim("billing", "a").advance(ten.start().at(7))
        assert ten.slots.claim("billing", "b").state().position == 7

    def test_a_slot_that_does_not_exist_cannot_be_claimed(self, ten: Log) -> None:
        with pytest.raises(NotFound, match="billing"):
            ten.slots.claim("billing", "node-1")
        assert ten.slots.list() == []

    def test_a_holder_needs_a_name(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        with pytest.raises(InvalidInput):
            ten.slots.claim("billing", "")
        assert ten.slots.list()[0].holder is None

    def test_holders_that_race_get_epochs_of_their_own(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        claimed: list[Slot] = []
        together(*[lambda name=name: claimed.append(ten.slots.claim("billing", f"h{name}")) for name in range(6)])
        assert sorted(slot.epoch for slot in claimed) == [1, 2, 3, 4, 5, 6]
        for slot in sorted(claimed, key=lambda one: one.epoch):
            if slot.epoch == 6:
                slot.advance(ten.end())
            else:
                with pytest.raises(Fenced):
                    slot.advance(ten.end())

    # --- advancing ------------------------------------------------------------------------------------------

    def test_advancing_moves_the_position_up(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        slot = ten.slots.claim("billing", "a")
        for position in (4, 4, 9, 10):
            slot.advance(ten.start().at(position))
            assert self.position(ten, "billing") == position
            assert ten.slots.floor() == position

    def test_a_lower_position_changes_nothing(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        slot = ten.slots.claim("billing", "a")
        slot.advance(ten.start().at(8))
        before = slot.state()
        for position in (8, 7, 0):
            slot.advance(ten.start().at(position))
            assert slot.state() == before

    def test_a_fenced_holder_changes_nothing(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        old, new = ten.slots.claim("billing", "a"), ten.slots.claim("billing", "b")
        before = new.state()
        for position in (2, 3, 9):
            with pytest.raises(Fenced, match="'b'"):
                old.advance(ten.start().at(position))
        assert new.state() == old.state() == before
        new.advance(ten.start().at(9))
        assert self.position(ten, "billing") == 9

    def test_a_holder_that_came_back_is_not_fenced_but_its_former_claim_is(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        old = ten.slots.claim("billing", "a")
        ten.slots.claim("billing", "b")
        again = ten.slots.claim("billing", "a")
        with pytest.raises(Fenced):
            old.advance(ten.start().at(5))
        again.advance(ten.start().at(6))
        assert self.position(ten, "billing") == 6

    def test_a_cursor_of_another_log_or_past_the_end_changes_nothing(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        slot = ten.slots.claim("billing", "a")
        before = slot.state()
        for cursor in (Cursor(UUID(int=4711), 5), ten.start().at(11)):
            with pytest.raises(Diverged):
                slot.advance(cursor)
        assert slot.state() == before

    def test_an_invalidated_slot_does_not_move(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        slot = ten.slots.claim("billing", "a")
        self.invalidate(ten, "billing")
        before = slot.state()
        assert before.invalid is not None
        with pytest.raises(SlotInvalid, match="bootstrap"):
            slot.advance(ten.start().at(5))
        assert slot.state() == before

    # --- resetting, dropping, being seen --------------------------------------------------------------------

    @pytest.mark.parametrize("position", [1, 5, 9, 10])
    def test_a_reset_puts_the_slot_back_or_ahead_and_nobody_holds_it(self, ten: Log, position: int) -> None:
        ten.slots.create("billing", 3)
        slot = ten.slots.claim("billing", "a")
        slot.advance(ten.start().at(5))
        state = ten.slots.reset("billing", position)
        assert (state.position, state.holder, state.invalid) == (position, None, None)
        assert state.epoch > slot.epoch
        assert ten.slots.list() == [state]
        assert ten.slots.floor() == position

    def test_a_reset_fences_the_holder(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        slot = ten.slots.claim("billing", "a")
        state = ten.slots.reset("billing", 2)
        with pytest.raises(Fenced):
            slot.advance(ten.start().at(5))
        assert ten.slots.list() == [state]
        ten.slots.claim("billing", "a").advance(ten.start().at(5))
        assert self.position(ten, "billing") == 5

    def test_a_reset_heals_an_invalidated_slot(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        self.invalidate(ten, "billing")
        assert ten.slots.reset("billing", 4).invalid is None
        assert ten.slots.floor() == 4

    def test_a_claim_does_not_heal_an_invalidated_slot(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        self.invalidate(ten, "billing")
        assert ten.slots.claim("billing", "b").state().invalid is not None
        assert ten.slots.floor() is None

    def test_a_reset_to_what_the_log_does_not_hold_changes_nothing(self, ten: Log) -> None:
        self.retain_from(ten, 6)
        before = ten.slots.create("billing", 8)
        with pytest.raises(CursorExpired, match="5"):
            ten.slots.reset("billing", 5)
        with pytest.raises(Diverged, match="11"):
            ten.slots.reset("billing", 11)
        assert ten.slots.list() == [before]
        assert ten.slots.floor() == 8

    def test_only_a_slot_that_exists_is_reset_or_dropped(self, ten: Log) -> None:
        with pytest.raises(NotFound, match="billing"):
            ten.slots.reset("billing", 5)
        with pytest.raises(NotFound, match="billing"):
            ten.slots.drop("billing")
        assert ten.slots.list() == []
        assert ten.slots.floor() is None

    def test_a_dropped_slot_is_gone_and_pins_nothing(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        ten.slots.create("other", 7)
        slot = ten.slots.claim("billing", "a")
        ten.slots.drop("billing")
        assert [state.name for state in ten.slots.list()] == ["other"]
        assert ten.slots.floor() == 7
        with pytest.raises((SlotInvalid, NotFound)):
            slot.advance(ten.start().at(5))
        with pytest.raises(NotFound):
            ten.slots.get("billing")
        with pytest.raises(NotFound):
            ten.slots.claim("billing", "b")
        with pytest.raises(NotFound):
            ten.slots.drop("billing")

    def test_a_name_that_is_taken_again_keeps_its_former_holder_fenced(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        former = ten.slots.claim("billing", "a")
        ten.slots.drop("billing")
        assert ten.slots.create("billing", 2).position == 2
        current = ten.slots.claim("billing", "a")
        assert current.epoch > former.epoch
        with pytest.raises(Fenced):
            former.advance(ten.start().at(9))
        assert self.position(ten, "billing") == 2

    def test_a_holder_that_is_seen_moves_nothing(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        slot = ten.slots.claim("billing", "a")
        before = slot.state()
        slot.touch()
        assert slot.state().last_seen >= before.last_seen
        assert (slot.state().position, slot.state().epoch, slot.state().holder) == (3, 1, "a")

    def test_a_fenced_holder_is_not_seen(self, ten: Log) -> None:
        ten.slots.create("billing", 3)
        old, new = ten.slots.claim("billing", "a"), ten.slots.claim("billing", "b")
        before = new.state()
        with pytest.raises(Fenced):
            old.touch()
        assert new.state() == before

    # --- the floor ------------------------------------------------------------------------------------------

    def test_the_floor_is_the_lowest_position(self, ten: Log) -> None:
        ten.slots.create("slow", 2)
        ten.slots.create("fast", 9)
        assert ten.slots.floor() == 2
        slow = ten.slots.claim("slow", "a")
        slow.advance(ten.start().at(5))
        assert ten.slots.floor() == 5
        slow.advance(ten.start().at(10))
        assert ten.slots.floor() == 9

    def test_an_invalidated_slot_pins_nothing(self, ten: Log) -> None:
        ten.slots.create("slow", 2)
        ten.slots.create("fast", 9)
        self.invalidate(ten, "slow")
        assert ten.slots.floor() == 9
        self.invalidate(ten, "fast")
        assert ten.slots.floor() is None

    def test_slots_of_one_log_do_not_know_each_other(self, ten: Log) -> None:
        ten.slots.create("one", 1)
        ten.slots.create("two", 2)
        one, two = ten.slots.claim("one", "a"), ten.slots.claim("two", "b")
        one.advance(ten.start().at(5))
        two.advance(ten.start().at(6))
        assert [(state.name, state.position, state.epoch) for state in ten.slots.list()] == [
            ("one", 5, 1),
            ("two", 6, 1),
        ]
