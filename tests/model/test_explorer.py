"""The explorer itself, on tiny models."""

from __future__ import annotations

import pytest

from tests.model.explorer import Counterexample, Explored, Model, Move, TooManyStates, explore


def counting(moves, *, invariant=lambda _: None, final=lambda _: None) -> Model[int]:
    return Model(0, moves, lambda number: number, invariant, final)


def up_to_ten(number: int):
    if number < 10:
        yield Move("one more", number + 1, fair=True)
        yield Move("two more", min(10, number + 2))


def test_the_explorer_visits_each_state_once():
    assert explore(counting(up_to_ten), most=11) == Explored(states=11, moves=20, depth=5, settled=1)


def test_a_broken_invariant_gives_a_shortest_trace():
    with pytest.raises(Counterexample) as found:
        explore(counting(up_to_ten, invariant=lambda number: "Five is bad." if number == 5 else None), most=99)
    assert found.value.broken == "Five is bad."
    assert len(found.value.trace) == 3
    assert "1. one more" in str(found.value)


def test_final_checks_are_for_states_that_no_fair_move_leaves():
    seen = []
    explore(counting(up_to_ten, final=seen.append), most=99)
    assert seen == [10]


def test_a_state_that_only_turns_on_itself_is_settled():
    explored = explore(counting(lambda number: [Move("wait", number, fair=True)]), most=9)
    assert (explored.states, explored.settled) == (1, 1)


def test_going_round_for_ever_is_a_counterexample():
    with pytest.raises(Counterexample, match="never settles"):
        explore(counting(lambda number: [Move("round", (number + 1) % 3, fair=True)]), most=9)


def test_unfair_moves_do_not_count_as_a_way_out():
    def moves(number: int):
        yield Move("round", number ^ 1 if number < 2 else number, fair=True)
        yield Move("out", 2)

    with pytest.raises(Counterexample, match="never settles"):
        explore(counting(moves), most=9)


def test_a_model_that_is_too_large_proves_nothing():
    with pytest.raises(TooManyStates, match="more than 5 states"):
        explore(counting(up_to_ten), most=5)
