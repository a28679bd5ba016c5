"""Contract suite for cells: inherit the class, give it a store, and run it with ``pytest``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar
from uuid import UUID

import pytest

from strandline.errors import (
    Conflict,
    Contended,
    CorruptData,
    NotFound,
    OutcomeUnknown,
    StorageError,
    TransientStorageError,
)
from strandline.model.stamp import REMEMBERED, OpId, Stamped
from strandline.storage.cell import StoreCell
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, FaultyStore
from strandline.testing.stores import together

T = TypeVar("T")


class JsonCodec(Generic[T]):
    """A cell's state as JSON, for values that survive a round trip: numbers and strings.

    >>> codec = JsonCodec[int]()
    >>> codec.decode(codec.encode(Stamped(7, 1)), "here")
    Stamped(value=7, revision=1, recent=())
    """

    def encode(self, state: Stamped[T]) -> bytes:
        """The bytes of a state."""
        return json.dumps([state.value, state.revision, [op.hex for op in state.recent]]).encode()

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[T]:
        """The state in these bytes."""
        try:
            value, revision, recent = json.loads(bytes(data))
            return Stamped(value, revision, tuple(OpId(UUID(text)) for text in recent))
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptData(f"{where} is not the state of a cell: {error}") from error


class Operations:
    """Fresh operation ids, the same in each run."""

    def __init__(self, seed: int = 1) -> None:
        """Begin the sequence of ``seed``."""
        self._chance = SeededChance(seed)

    def __call__(self) -> OpId:
        """The next one."""
        return OpId(self._chance.uuid())


def increment(value: int) -> int:
    """The edit of most tests: not idempotent."""
    return value + 1


class CellContract:
    """Every sentence of :class:`~strandline.storage.cell.StoreCell`, as a test on a cell that counts.

    A subclass named ``Test...`` defines the fixture ``store``, an empty object store for each test, and
    overrides :meth:`open_cell` and :meth:`create` if its cells are not :class:`~strandline.storage.cell.StoreCell`.
    """

    threads: ClassVar[int] = 4
    increments: ClassVar[int] = 250
    """How many increments each thread makes; fewer where each costs a disk's fsync."""

    def open_cell(self, store: ObjectStore) -> StoreCell[int]:
        """A cell over the store that has seen nothing yet; it must not sleep in real time."""
        return StoreCell(store, "cells/counter", JsonCodec[int](), env=Env(clock=ManualClock(), chance=SeededChance(2)))

    def create(self, store: ObjectStore) -> None:
        """Make the cell, with the value 0."""
        StoreCell(store, "cells/counter", JsonCodec[int]()).create(OpId(UUID(int=0)), 0)

    @pytest.fixture
    def line(self, store: ObjectStore) -> FaultyStore:
        """The store of the writer under test, whose calls a test may let fail; the cell exists."""
        self.create(store)
        return FaultyStore(store)

    @pytest.fixture
    def new_op(self) -> Operations:
        """Fresh operation ids."""
        return Operations()

    def value(self, store: ObjectStore) -> int:
        """The value that a newly opened cell reads."""
        return self.open_cell(store).read().value

    def others_write(self, store: ObjectStore, times: int, new_op: Operations) -> Callable[[], None]:
        """Another writer, on a store without faults, that increments ``times`` times when called."""
        other = self.open_cell(store)

        def write() -> None:
            for _ in range(times):
                other.update(new_op(), increment)

        return write

    # --- once per operation ---------------------------------------------------------------------------------

    def test_an_update_is_applied_and_returned(self, store: ObjectStore, line: FaultyStore, new_op: Operations) -> None:
        cell = self.open_cell(line)
        assert cell.update(new_op(), increment) == 1
        assert cell.update(new_op(), increment) == 2
        assert self.value(store) == 2

    def test_reading_an_absent_cell_is_not_found(self, store: ObjectStore, new_op: Operations) -> None:
        cell = self.open_cell(store)
        with pytest.raises(NotFound):
            cell.read()
        with pytest.raises(NotFound):
            cell.update(new_op(), increment)

    def test_a_version_changes_with_the_value_and_only_with_it(self, line: FaultyStore, new_op: Operations) -> None:
        cell = self.open_cell(line)
        before = cell.read()
        assert cell.read() == before
        cell.update(new_op(), increment)
        assert cell.read().version != before.version

    def test_a_repeated_operation_changes_nothing(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        cell, op = self.open_cell(line), new_op()
        assert cell.update(op, increment) == 1
        assert cell.update(op, increment) == 1
        assert self.open_cell(store).update(op, increment) == 1
        assert self.value(store) == 1

    def test_an_operation_repeated_after_others_wrote_changes_nothing(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        cell, op = self.open_cell(line), new_op()
        cell.update(op, increment)
        self.others_write(store, REMEMBERED - 1, new_op)()
        assert cell.update(op, increment) >= 1
        assert self.open_cell(store).update(op, increment) == REMEMBERED
        assert self.value(store) == REMEMBERED

    # --- lost answers ---------------------------------------------------------------------------------------

    def test_a_write_that_never_left_is_tried_again(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        line.fail_next("put_if", times=3)
        assert self.open_cell(line).update(new_op(), increment) == 1
        assert self.value(store) == 1

    def test_a_write_whose_answer_was_lost_is_not_doubled(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        line.lose_answers(1)
        assert self.open_cell(line).update(new_op(), increment) == 1
        assert self.value(store) == 1

    def test_a_write_whose_own_success_looks_like_a_conflict_is_not_doubled(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        # What a proxy or client library does that repeats a conditional write whose answer it lost.
        line.fail_next("put_if", after=True, error=Conflict("someone, maybe you, changed it"))
        assert self.open_cell(line).update(new_op(), increment) == 1
        assert self.value(store) == 1

    def test_a_write_that_lands_late_is_not_doubled(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        def land_just_before_the_second_try(call: Call) -> None:
            if call.name == "put_if" and call.stage == "before":
                line.land_late()

        line.delay_next("put_if")
        line.hook(land_just_before_the_second_try)
        assert self.open_cell(line).update(new_op(), increment) == 1
        assert self.value(store) == 1

    @pytest.mark.parametrize("times", [1, REMEMBERED - 1])
    def test_a_lost_answer_is_found_though_others_wrote_since(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations, times: int
    ) -> None:
        self._once_written(line, self.others_write(store, times, new_op))
        line.lose_answers(1)
        assert self.open_cell(line).update(new_op(), increment) == 1 + times
        assert self.value(store) == 1 + times

    @pytest.mark.parametrize("times", [REMEMBERED, REMEMBERED * 3])
    def test_a_writer_that_was_idle_while_others_wrote_continues(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations, times: int
    ) -> None:
        cell = self.open_cell(line)
        cell.read()
        self.others_write(store, times, new_op)()
        assert cell.update(new_op(), increment) == times + 1
        assert self.value(store) == times + 1

    def test_more_writes_since_than_are_remembered_leave_the_outcome_unknown(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        self._once_written(line, self.others_write(store, REMEMBERED, new_op))
        line.lose_answers(1)
        with pytest.raises(OutcomeUnknown):
            self.open_cell(line).update(new_op(), increment)
        assert self.value(store) == REMEMBERED + 1

    @pytest.mark.parametrize("landed", [True, False], ids=["landed", "not landed"])
    def test_a_store_that_is_down_afterwards_leaves_the_outcome_unknown_until_it_is_back(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations, *, landed: bool
    ) -> None:
        cell, op = self.open_cell(line), new_op()
        stage = "after" if landed else "before"
        line.hook(lambda call: line.turn_down() if (call.name, call.stage) == ("put_if", stage) else None)
        line.lose_answers(1)
        with pytest.raises(OutcomeUnknown):
            cell.update(op, increment)
        assert self.value(store) == landed
        line.unhook()
        line.heal()
        assert cell.update(op, increment) == 1
        assert self.value(store) == 1

    def test_an_outcome_that_stayed_unknown_is_not_doubled_by_a_repetition_after_it_was_forgotten(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        cell, op = self.open_cell(line), new_op()
        line.fail_next("put_if", after=True)
        self._once_written(line, line.turn_down)
        with pytest.raises(OutcomeUnknown):
            cell.update(op, increment)
        line.heal()
        for _ in range(REMEMBERED):
            cell.update(new_op(), increment)
        with pytest.raises(OutcomeUnknown):
            cell.update(op, increment)
        assert self.value(store) == REMEMBERED + 1

    def test_a_store_that_is_down_from_the_start_changes_nothing(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        cell, op = self.open_cell(line), new_op()
        with line.down(), pytest.raises(StorageError):
            cell.update(op, increment)
        assert self.value(store) == 0
        assert cell.update(op, increment) == 1

    def test_a_store_that_takes_no_writes_ends_in_an_error_and_the_operation_can_be_repeated(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        cell, op = self.open_cell(line), new_op()
        line.throttle_next("put_if", times=100_000)
        with pytest.raises((OutcomeUnknown, TransientStorageError)):
            cell.update(op, increment)
        line.heal()
        assert cell.update(op, increment) == 1
        assert self.value(store) == 1

    # --- edits ----------------------------------------------------------------------------------------------

    def test_an_edit_that_raises_on_the_current_value_changes_nothing(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        def refuse(value: int) -> int:
            raise ValueError(f"not on {value}")

        with pytest.raises(ValueError, match="not on 0"):
            self.open_cell(line).update(new_op(), refuse)
        assert self.value(store) == 0
        assert line.named("put", "put_if", "delete") == ()

    def test_an_edit_that_raises_on_an_outdated_value_is_asked_again_on_the_current_one(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        def only_above_zero(value: int) -> int:
            if value == 0:
                raise ValueError("not on 0")
            return value + 10

        cell = self.open_cell(line)
        assert cell.read().value == 0
        self.others_write(store, 1, new_op)()
        assert cell.update(new_op(), only_above_zero) == 11

    def test_an_edit_that_changes_nothing_writes_nothing(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        cell = self.open_cell(line)
        before = cell.read()
        assert cell.update(new_op(), lambda value: value) == 0
        assert line.named("put", "put_if", "delete") == ()
        assert self.open_cell(store).read() == before

    def test_an_edit_that_would_change_nothing_is_asked_again_on_the_current_value(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        cell = self.open_cell(line)
        assert cell.read().value == 0
        self.others_write(store, 1, new_op)()
        assert cell.update(new_op(), lambda value: value + 10 if value else value) == 11

    # --- races ----------------------------------------------------------------------------------------------

    def test_a_lost_race_is_run_again_on_the_winner_s_value(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        self._at_each_try(line, self.others_write(store, 1, new_op), tries=3)
        assert self.open_cell(line).update(new_op(), increment) == 4
        assert self.value(store) == 4

    def test_losing_every_race_ends_in_contended_and_changes_nothing(
        self, store: ObjectStore, line: FaultyStore, new_op: Operations
    ) -> None:
        cell, op = self.open_cell(line), new_op()
        self._at_each_try(line, self.others_write(store, 1, new_op), tries=10_000)
        with pytest.raises(Contended):
            cell.update(op, increment)
        tries = len(line.named("put_if"))
        assert 2 <= tries < 1000
        assert self.value(store) == tries
        line.unhook()
        assert cell.update(op, increment) == tries + 1

    def test_increments_of_many_threads_add_up(self, store: ObjectStore, line: FaultyStore) -> None:
        self._increment_in_threads(lambda: self.open_cell(store))
        assert self.value(store) == self.threads * self.increments

    def test_threads_may_share_one_cell(self, store: ObjectStore, line: FaultyStore) -> None:
        cell = self.open_cell(store)
        self._increment_in_threads(lambda: cell)
        assert self.value(store) == self.threads * self.increments

    # --- inside ---------------------------------------------------------------------------------------------

    def _increment_in_threads(self, cell_of_thread: Callable[[], StoreCell[int]]) -> None:
        """Increment a cell from several threads at once, each as often as :attr:`increments` says."""

        def work(number: int) -> None:
            cell, new_op = cell_of_thread(), Operations(100 + number)
            for _ in range(self.increments):
                op = new_op()
                while True:
                    try:
                        cell.update(op, increment)
                    except Contended:
                        continue
                    break

        together(*[lambda number=number: work(number) for number in range(self.threads)])

    def _once_written(self, line: FaultyStore, then: Callable[[], Any]) -> None:
        """Run ``then`` when the first write on the line has landed and its answer has not arrived."""
        self._call_back(line, then, times=1, stage="after")

    def _at_each_try(self, line: FaultyStore, then: Callable[[], Any], *, tries: int) -> None:
        """Run ``then`` just before each of the first ``tries`` writes on the line."""
        self._call_back(line, then, times=tries, stage="before")

    def _call_back(self, line: FaultyStore, then: Callable[[], Any], *, times: int, stage: str) -> None:
        left = times

        def callback(call: Call) -> None:
            nonlocal left
            if call.name == "put_if" and call.stage == stage and left:
                left -= 1
                then()

        line.hook(callback)
