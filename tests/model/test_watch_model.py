"""Every order of events, up to a bound, around the production watch: its guarantees hold in all of them.

The bounds count how often each thing may happen; when and in which order is what is explored.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import pytest

from strandline.followers.events import Batching
from tests.model import broken_watches
from tests.model.explorer import Counterexample, Explored, explore
from tests.model.watch_environment import Budget
from tests.model.watch_model import Scenario, WatchModel

PUT_1, PUT_2, DELETE_1, DELETE_2 = (b"k1", b""), (b"k2", b""), (b"k1", None), (b"k2", None)
ONE = ((b"k1", b"0.0"),)
BOTH = ((b"k1", b"0.0"), (b"k2", b"0.1"))
ROOMY = Batching(records=2, window=1.0, queue=3)


@pytest.fixture(autouse=True)
def _quiet():
    """Without this, tens of thousands of failures are logged and as many states searched for garbage."""
    logging.disable(logging.CRITICAL)
    gc.disable()  # states are many and have no cycles
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


def explored(*, most: int = 60_000, at_rest: bool = True, **options: object) -> Explored:
    model = WatchModel(Scenario(**options)).model()
    if not at_rest:
        model = replace(model, final=lambda _: None)  # looks for what is broken before everything is quiet
    found = explore(model, most=most)
    print(found)
    return found


# --- flush failure and crash at every step -------------------------------------------------------------------------


def test_with_failures_and_crashes_at_every_step_the_store_is_the_source_at_its_cursor():
    budget = Budget(writes=2, failures=1, crashes=1)
    assert explored(budget=budget, history=ONE, followed=1).states > 1_500


def test_with_batches_that_wait_for_failed_ones_nothing_skips_the_gap():
    budget = Budget(writes=3, failures=2, crashes=1)
    assert explored(budget=budget, history=ONE, followed=1, script=(PUT_2, DELETE_1, PUT_1)).states > 1_000


@pytest.mark.matrix
def test_a_store_that_fails_too_often_ends_the_watch_and_the_next_one_makes_it_good():
    budget = Budget(writes=2, failures=4)
    assert explored(budget=budget, history=ONE, followed=1).states > 2_000


def test_updates_that_were_received_but_not_batched_are_delivered_again_after_a_crash():
    budget = Budget(writes=3, crashes=1, stops=1)
    assert (
        explored(budget=budget, history=BOTH, followed=2, batching=ROOMY, script=(DELETE_1, PUT_2, PUT_1)).states > 500
    )


@pytest.mark.matrix
def test_a_newcomer_that_dies_in_its_first_listing_is_made_whole():
    budget = Budget(writes=1, trims=1, failures=1, crashes=1)
    assert explored(budget=budget, history=(*BOTH, (b"k1", b"0.2"))).states > 2_000


@pytest.mark.matrix
def test_a_store_that_may_lose_its_last_write_in_a_crash_loses_data_and_cursor_together():
    budget = Budget(writes=2, trims=1, crashes=1)
    assert explored(budget=budget, history=BOTH, followed=2, unsynced=True).states > 2_000


def test_a_stop_at_every_step_returns_what_the_store_has_taken():
    budget = Budget(writes=2, failures=1, stops=1)
    assert explored(budget=budget, history=ONE, followed=1).states > 2_000


# --- resync ----------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_resync_ends_with_the_sources_state_whatever_is_written_around_its_listings():
    budget = Budget(writes=3, trims=1)
    assert explored(budget=budget, history=BOTH, followed=2).states > 10_000


def test_a_resync_with_a_delete_then_recreate_and_a_crash_at_every_step_ends_with_the_sources_state():
    budget = Budget(writes=3, trims=1, crashes=2)
    assert explored(budget=budget, history=BOTH, followed=2, script=(DELETE_1, PUT_1, DELETE_2)).states > 2_000


@pytest.mark.matrix
def test_a_resync_with_deletes_at_every_step_and_a_failing_store_or_listing_ends_with_the_sources_state():
    budget = Budget(writes=3, trims=1, failures=2, crashes=1)
    assert explored(budget=budget, history=BOTH, followed=2, script=(DELETE_1, DELETE_2, PUT_1)).states > 8_000


@pytest.mark.matrix
def test_a_watch_that_is_overrun_applies_nothing_past_the_gap_and_is_resynced():
    budget = Budget(writes=2, trims=2, failures=1)
    assert explored(budget=budget, history=ONE, followed=1).states > 4_000


@pytest.mark.matrix
def test_a_resync_in_a_prefix_spares_all_other_keys():
    budget = Budget(writes=2, trims=1)
    assert explored(budget=budget, history=(*BOTH, (b"z", b"0.2")), followed=2, keys=(b"k1", b"z")).states > 2_000


@pytest.mark.matrix
def test_a_full_watch_onto_a_store_that_is_not_empty_is_a_resync():
    budget = Budget(writes=1, failures=1, crashes=1, anew=1)
    assert explored(budget=budget, history=BOTH, followed=1).states > 2_000


@pytest.mark.matrix
def test_a_source_that_is_created_again_even_in_the_middle_of_a_resync_is_followed():
    budget = Budget(writes=1, recreations=2, failures=1, crashes=1)
    assert explored(budget=budget, history=BOTH, followed=2).states > 2_000


# --- exports ---------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_an_export_asked_at_every_step_holds_exactly_what_was_applied():
    budget = Budget(writes=1, trims=1, failures=1, exports=2)
    assert explored(budget=budget, history=BOTH, followed=2).states > 3_000


@pytest.mark.matrix
def test_exports_asked_of_a_newcomer_are_answered_too():
    budget = Budget(writes=1, failures=1, exports=2)
    assert explored(budget=budget, history=BOTH).states > 2_000


# --- what apply keeps --------------------------------------------------------------------------------------------


def test_state_that_apply_keeps_beyond_a_watch_catches_up_as_long_as_no_cursor_expires():
    budget = Budget(writes=3, failures=1, crashes=1)
    script = (PUT_2, DELETE_2, PUT_1)
    assert explored(budget=budget, history=ONE, followed=1, kept=True, script=script).states > 500


@pytest.mark.matrix
def test_state_that_apply_keeps_beyond_a_watch_may_hold_a_key_that_the_store_never_had():
    """The known limit: no removal is reported of a key that was applied, never stored, then deleted and trimmed.

    So what ``apply`` builds should live and die with its watch, or be built from the store when the next one begins.
    """
    with pytest.raises(Counterexample, match="what apply holds is not in step") as found:
        explored(budget=Budget(writes=2, trims=1, crashes=1), history=ONE, followed=1, kept=True)
    assert found.value.trace.index("Apply [+k2]") < found.value.trace.index("crash")


# --- broken twins ------------------------------------------------------------------------------------------------

BROKEN = {
    "drop the failed batch": (
        {"engine": broken_watches.DropsTheFailedBatch, "budget": Budget(writes=2, failures=1), "at_rest": False},
        "holds something else than the source did there",
        "StoreBatch AppliedRange",
    ),
    "put the failed batch behind": (
        {"engine": broken_watches.PutsTheFailedBatchBehind, "budget": Budget(writes=2, failures=1)},
        "holds something else than the source did there",
        "StoreBatch AppliedRange",
    ),
    "resume from memory": (
        {"watch": broken_watches.ResumesFromMemory, "budget": Budget(writes=2, crashes=1)},
        "The applied cursor 3 is beyond the store's",
        "the watch begins",
    ),
    "report before storing": (
        {"engine": broken_watches.ReportsBeforeStoring, "budget": Budget(writes=1)},
        "The applied cursor 3 is beyond the store's",
        "Apply",
    ),
    "no barrier before the full watch": (
        {"engine": broken_watches.HasNoBarrier, "budget": Budget(writes=1, trims=1)},
        "The full watch is opened before what vanished was removed from the store",
        "Open",
    ),
    "no barrier, and what comes of it": (
        {
            "engine": broken_watches.HasNoBarrier,
            "watcher": broken_watches.LooksAway,
            "budget": Budget(writes=2, trims=1),
        },
        "The removal of b'k[12]' came after it was listed again",
        "Apply [-k",
    ),
    "no sweep": (
        {"engine": broken_watches.DoesNotSweep, "budget": Budget(writes=2, trims=1)},
        "holds something else than the source did there",
        "StoreBatch EndResync",
    ),
    "removals are not applied": (
        {"engine": broken_watches.AppliesNoRemovals, "budget": Budget(writes=1, trims=1)},
        "what apply holds is not in step with the source",
        "ReportCursor",
    ),
    "a resync is ended twice": (
        {"watch": broken_watches.EndsAResyncTwice, "budget": Budget(writes=1, trims=1, failures=1)},
        "The store refuses a write",
        "StoreBatch EndResync",
    ),
    "the flag is not durable": (
        {"store": broken_watches.KeepsTheFlagInMemory, "budget": Budget(writes=1, trims=1, crashes=1)},
        "holds something else than the source did there",
        "crash",
    ),
    "export before the flush": (
        {"engine": broken_watches.ExportsAtOnce, "budget": Budget(writes=1, failures=1, exports=1)},
        "its data is not what was applied",
        "Export",
    ),
    "an expired cursor is clamped": (
        {"watcher": broken_watches.ClampsSilently, "budget": Budget(writes=2, trims=1)},
        "the store is not in step with the source",
        "Open",
    ),
    "a gap is jumped over": (
        {"watcher": broken_watches.JumpsOverGaps, "budget": Budget(writes=2, trims=1), "at_rest": False},
        "What was applied up to 4 is not the source's state there",
        "Apply",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_twin_is_found(name):
    options, broken, last = BROKEN[name]
    with pytest.raises(Counterexample, match=broken) as found:
        explored(history=BOTH, followed=2, **options)
    print(found.value)
    assert found.value.trace[-1].startswith(last)


@pytest.mark.matrix
def test_a_trace_is_found_again_exactly_as_it_was():
    traces = []
    for _ in range(2):
        with pytest.raises(Counterexample) as found:
            explored(history=BOTH, followed=2, **BROKEN["no sweep"][0])
        traces.append(found.value.trace)
    assert traces[0] == traces[1]
    assert any(label.startswith("the source deletes") for label in traces[0])


# --- larger bounds -----------------------------------------------------------------------------------------------

LARGER = {
    "failures and crashes": {"budget": Budget(writes=3, failures=2, crashes=2), "history": ONE, "followed": 1},
    "resync": {"budget": Budget(writes=3, trims=1, failures=1, crashes=1), "history": BOTH, "followed": 2},
    "two resyncs": {"budget": Budget(writes=2, trims=2, failures=1, crashes=1), "history": BOTH, "followed": 2},
    "newcomer": {"budget": Budget(writes=2, trims=1, failures=1, crashes=1), "history": (*BOTH, (b"k1", b"0.2"))},
    "exports": {"budget": Budget(writes=2, trims=1, failures=1, exports=2), "history": BOTH, "followed": 2},
    "stops": {"budget": Budget(writes=2, trims=1, failures=1, stops=1, crashes=1), "history": BOTH, "followed": 2},
    "unsynced": {
        "budget": Budget(writes=2, trims=1, failures=1, crashes=2),
        "history": BOTH,
        "followed": 2,
        "unsynced": True,
    },
    "full watch": {"budget": Budget(writes=2, failures=1, crashes=1, anew=1), "history": BOTH, "followed": 1},
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LARGER)
def test_larger_bounds_hold_too(name):
    assert explored(most=1_000_000, **LARGER[name]).states > 20_000
