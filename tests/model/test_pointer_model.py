"""Exporters that race the pointer to the newest snapshot and trim, in every order: over its production edits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strandline.model.snapshot import Superseded
from strandline.snapshots import pointer as production
from strandline.snapshots.pointer import SnapshotSweep
from tests.model.explorer import Counterexample, Explored, explore
from tests.model.pointer_model import Job, PointerModel, twin


def explored(*jobs: Job | None, most: int = 150_000, **options: object) -> Explored:
    found = explore(PointerModel(jobs, **options).model(), most=most)
    print(found)
    return found


def test_two_exporters_racing_leave_the_newest_whole_and_published():
    assert explored(Job(2), Job(3)).states > 500


@pytest.mark.matrix
def test_exporters_that_die_at_every_step_and_begin_again_do_no_harm():
    assert explored(Job(2), Job(3), crashes=2).states > 5_000


def test_two_identical_exporters_may_upload_over_each_other():
    assert explored(Job(2), Job(2), crashes=2).states > 200


def test_a_slow_twin_of_what_was_superseded_does_not_bring_it_back():
    assert explored(Job(2), Job(2, trims=False), Job(3, trims=False)).states > 500


def test_of_two_different_snapshots_at_one_cursor_the_first_stays():
    assert explored(Job(2, content="a"), Job(2, content="b")).states > 100


def test_a_trim_of_its_own_at_every_step_deletes_nothing_that_is_or_will_be_named():
    assert explored(Job(2, trims=False), Job(3, trims=False), None).states > 1_000


@pytest.mark.matrix
def test_a_log_that_replaces_another_is_whole_too():
    assert explored(Job(2, log=1, replacing=True), Job(5, log=2, replacing=True), crashes=1).states > 1_000


def test_a_slow_twin_of_what_another_log_replaced_is_whole_too():
    ours = Job(2, log=1, replacing=True)
    assert explored(ours, Job(5, log=2, replacing=True, trims=False), replace(ours, trims=False)).states > 1_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_larger_bounds_hold_too():
    assert explored(Job(2), Job(3), None).states > 50_000
    assert explored(Job(2), Job(3), crashes=4).states > 10_000


# --- broken twins ------------------------------------------------------------------------------------------------


def point_at_the_last(pointer, artifact, *, replacing):
    left = () if pointer.current is None else (Superseded(pointer.current.location, 0),)
    return replace(
        pointer, generation=pointer.generation + 1, current=artifact, superseded=(*pointer.superseded, *left)
    )


def sweep_what_is_named(pointer, there, *, before):
    return SnapshotSweep((), tuple(there))


def sweep_without_giving_up(pointer, there, *, before):
    """Deletes what is not listed, though its exporter may still point at it."""
    raised = replace(pointer, min_generation=pointer.generation + 1)
    return production.plan_sweep(raised, there, before=before)


def point_at_what_was_given_up(pointer, artifact, *, replacing):
    moved = production.point(replace(pointer, min_generation=0), artifact, replacing=replacing)
    return replace(moved, min_generation=pointer.min_generation)


BROKEN = {
    "last writer wins": (
        {"rules": twin(point=point_at_the_last)},
        "The pointer went back",
        "points at 2",
    ),
    "the pointer is written without compare-and-set": (
        {"blindly": True},
        "The pointer went back|forgot what it had given up",
        "points at",
    ),
    "what the pointer names is trimmed": (
        {"rules": twin(plan_sweep=sweep_what_is_named)},
        "which is not whole",
        "deletes part",
    ),
    "what was not given up is trimmed": (
        {"rules": twin(plan_sweep=sweep_without_giving_up, abandoned=lambda *_, **__: None)},
        "which is not whole",
        "points at",
    ),
    "what was given up is pointed at": (
        {"rules": twin(point=point_at_what_was_given_up)},
        "which is not whole",
        "points at",
    ),
    "nothing is ever given up": (
        {"rules": twin(abandoned=lambda *_, **__: None), "crashes": 1},
        "would stay for ever",
        "",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_twin_is_found(name):
    options, broken, last = BROKEN[name]
    with pytest.raises(Counterexample, match=broken) as found:
        explored(Job(2), Job(3), **options)
    print(found.value)
    assert last in found.value.trace[-1]
