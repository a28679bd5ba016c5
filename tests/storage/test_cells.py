"""The cell contract on every store that needs no server, and thousands of histories of racing writers."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import MemoryStore

from strandline.errors import AlreadyExists, Contended, NotFound, OutcomeUnknown, TransientStorageError
from strandline.model.stamp import REMEMBERED, Stamped
from strandline.storage.cell import StoreCell
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.remote import ObstoreStore
from strandline.storage.objects.store import ObjectStore
from strandline.storage.retry import Backoff
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import CALM, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from tests.matrix_cases import partly, sampled
from tests.storage.broken_stores import BlindRetryCell, BlindRetryStore, LastWriterWinsCell
from tests.storage.cell_contract import CellContract, JsonCodec, Operations, increment
from tests.storage.cell_histories import History, check, open_store_cell, play

HISTORIES = 3000


@pytest.mark.matrix
class TestCellInPlainStore(CellContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return PlainStore()


class TestCellInMemory(CellContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return ObstoreStore("memory://cells", client=MemoryStore())


class TestCellInFolder(CellContract):
    increments = 50

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(str(tmp_path))


class TestHistories:
    @pytest.mark.parametrize("every", sampled(30))
    def test_no_history_of_racing_failing_and_dying_writers_loses_or_doubles_a_change(self, every: int) -> None:
        seeds = range(0, HISTORIES, every)
        histories = [play(seed) for seed in seeds]
        # The histories were worth playing: each thing that can go wrong went wrong often.
        assert sum(history.lost for history in histories) > len(seeds) / 2
        assert sum(history.late for history in histories) > len(seeds) / 4
        assert sum(history.conflicts for history in histories) > len(seeds)
        assert sum(history.deaths for history in histories) > len(seeds) / 10
        assert sum(len(history.acknowledged) for history in histories) > len(seeds) * 5

    @pytest.mark.parametrize("seeds", partly(range(0, 300, 5), range(300)))
    def test_no_history_behind_a_blindly_retrying_client_loses_or_doubles_a_change(self, seeds: range) -> None:
        for seed in seeds:
            play(seed, lambda store: open_store_cell(BlindRetryStore(store)))

    def test_the_same_seed_plays_the_same_history(self) -> None:
        assert [play(seed) for seed in range(20)] == [play(seed) for seed in range(20)]

    def test_without_faults_every_change_is_acknowledged(self) -> None:
        for seed in range(100):
            history = play(seed, faults=CALM)
            assert history.given_up == []
            assert history.lost == history.late == 0

    @pytest.mark.matrix
    def test_a_cell_that_retries_blindly_is_caught_doubling(self) -> None:
        caught = failures(lambda store: BlindRetryCell(store, "cell", JsonCodec[str]()))
        assert sum("doubled" in message for message in caught) > 20

    @pytest.mark.matrix
    def test_a_cell_that_lets_the_last_writer_win_is_caught_losing(self) -> None:
        caught = failures(lambda store: LastWriterWinsCell(store, "cell", JsonCodec[str]()))
        assert sum("lost" in message for message in caught) > 20

    @pytest.mark.matrix
    def test_a_cell_that_forgets_its_operations_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forgetful(state: Stamped[str], value: str, op: object) -> Stamped[str]:
            return Stamped(value, state.revision + 1, ())

        monkeypatch.setattr(Stamped, "stamp", forgetful)
        assert len(failures(open_store_cell)) > 20

    @pytest.mark.parametrize(
        ("history", "complaint"),
        [
            (History(" a0 a0", [("a0", " a0")]), "doubled"),
            (History(" a0", [("a0", " a0"), ("b0", " b0")]), "lost"),
            (History(" a0 b0", [("a0", " a0")]), "nowhere"),
            (History(" a1 a0", [("a0", " a1 a0"), ("a1", " a1")]), "order"),
            (History(" a0 b0", [("a0", " a0"), ("b0", " a0")]), "lacks"),
            (History(" a0 b0", [("a0", " a0"), ("b0", " b0")]), "no part"),
        ],
    )
    def test_the_judge_sees_what_is_wrong(self, history: History, complaint: str) -> None:
        with pytest.raises(AssertionError, match=complaint):
            check(history, 0)

    def test_the_judge_lets_a_right_history_pass(self) -> None:
        check(History(" a0 b0 a1 c0", [("a0", " a0"), ("a1", " a0 b0 a1"), ("b0", " a0 b0")], ["c0", "c1"]), 0)


class TestTheContractCatches:
    """The scripted suite finds the fault of the twin too, not only the random one."""

    class Suite(CellContract):
        def open_cell(self, store: ObjectStore) -> StoreCell[int]:
            return BlindRetryCell(store, "cells/counter", JsonCodec[int]())

    @pytest.mark.parametrize(
        "sentence",
        [
            "test_a_write_whose_answer_was_lost_is_not_doubled",
            "test_a_write_whose_own_success_looks_like_a_conflict_is_not_doubled",
            "test_a_write_that_lands_late_is_not_doubled",
            "test_a_repeated_operation_changes_nothing",
        ],
    )
    def test_a_cell_that_retries_blindly(self, sentence: str) -> None:
        suite, store = self.Suite(), PlainStore()
        suite.create(store)
        with pytest.raises(AssertionError):
            getattr(suite, sentence)(store=store, line=FaultyStore(store), new_op=Operations())


class TestCreating:
    @pytest.fixture
    def place(self) -> PlainStore:
        return PlainStore()

    @pytest.fixture
    def line(self, place: PlainStore) -> FaultyStore:
        return FaultyStore(place)

    @pytest.fixture
    def cell(self, line: FaultyStore) -> StoreCell[int]:
        return StoreCell(line, "cell", JsonCodec[int](), env=Env(clock=ManualClock(), chance=SeededChance(1)))

    def test_a_cell_is_created_once(self, cell: StoreCell[int]) -> None:
        new_op = Operations()
        op = new_op()
        assert cell.create(op, 5) == 5
        assert cell.create(op, 5) == 5
        with pytest.raises(AlreadyExists):
            cell.create(new_op(), 6)
        assert cell.read().value == 5

    def test_a_creation_whose_answer_was_lost_is_found_with_what_others_made_of_it(
        self, cell: StoreCell[int], line: FaultyStore, place: PlainStore
    ) -> None:
        new_op = Operations()
        other = StoreCell(place, "cell", JsonCodec[int]())
        line.lose_answers(1)
        line.hook(lambda call: other.update(new_op(), increment) and None if call.stage == "after" else None)
        assert cell.create(Operations(2)(), 5) == 6

    def test_a_creation_that_never_left_is_tried_again(self, cell: StoreCell[int], line: FaultyStore) -> None:
        line.fail_next("put_if", times=5)
        assert cell.create(Operations()(), 5) == 5
        assert cell.read().value == 5

    def test_whether_a_cell_was_created_stays_unknown_while_the_store_is_down(
        self, cell: StoreCell[int], line: FaultyStore, place: PlainStore
    ) -> None:
        op = Operations()()
        with line.down(), pytest.raises(OutcomeUnknown):
            cell.create(op, 5)
        with pytest.raises(NotFound):
            place.get("cell")
        assert cell.create(op, 5) == 5

    def test_the_creator_of_a_cell_is_unknown_when_the_cell_has_forgotten_it(
        self, cell: StoreCell[int], line: FaultyStore, place: PlainStore
    ) -> None:
        def others_write_much(call: object) -> None:
            line.unhook()
            other, new_op = StoreCell(place, "cell", JsonCodec[int]()), Operations()
            for _ in range(REMEMBERED):
                other.update(new_op(), increment)

        line.fail_next("put_if", after=True)
        line.hook(lambda call: others_write_much(call) if call.stage == "after" else None)
        with pytest.raises(OutcomeUnknown):
            cell.create(Operations(2)(), 5)


class TestPatience:
    def test_pauses_between_tries_grow_and_end(self) -> None:
        store, clock = FaultyStore(PlainStore()), ManualClock()
        backoff = Backoff(attempts=6, base=0.01, ceiling=0.1)
        cell = StoreCell(store, "cell", JsonCodec[int](), backoff=backoff, env=Env(clock=clock, chance=SeededChance(1)))
        cell.create(Operations()(), 0)
        rival = StoreCell(store._inner, "cell", JsonCodec[int]())
        new_op = Operations(2)
        store.hook(
            lambda call: (
                rival.update(new_op(), increment) and None if (call.name, call.stage) == ("put_if", "before") else None
            )
        )
        with pytest.raises(Contended):
            cell.update(Operations(3)(), increment)
        assert len(clock.slept) == 6
        for pause, longest in zip(clock.slept, (0.01, 0.02, 0.04, 0.08, 0.1, 0.1), strict=True):
            assert longest / 2 <= pause <= longest
        assert cell.conflicts == 6

    def test_an_undisturbed_writer_reads_nothing(self) -> None:
        store = FaultyStore(PlainStore())
        cell = StoreCell(store, "cell", JsonCodec[int]())
        new_op = Operations()
        cell.create(new_op(), 0)
        for _ in range(10):
            cell.update(new_op(), increment)
        assert store.named("get") == ()
        assert len(store.named("put_if")) == 11

    def test_a_failing_first_read_is_the_store_s_own_error(self) -> None:
        store = FaultyStore(PlainStore(), faults=Faults(before=1.0))
        with pytest.raises(TransientStorageError):
            StoreCell(store, "cell", JsonCodec[int]()).update(Operations()(), increment)


def failures(open_cell: object, histories: int = 300) -> list[str]:
    """The errors that the check finds in some histories of a cell."""
    caught = []
    for seed in range(histories):
        try:
            play(seed, open_cell)  # type: ignore[arg-type]
        except AssertionError as error:
            caught.append(str(error))
    return caught
