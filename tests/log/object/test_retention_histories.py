"""Thousands of seeded histories of logs with retention, and broken twins of each rule that they must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from strandline.log.object import slots, upload
from strandline.log.object.head import edits
from strandline.log.object.maintain import trimmer
from strandline.model.head import Head
from strandline.model.retention import SlotState
from strandline.testing.faulty import CALM
from tests.log.object.retention_histories import play
from tests.matrix_cases import sampled

HISTORIES = 120


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few entries, so that short histories have all levels; no threads, so that seeds repeat."""
    monkeypatch.setattr(edits, "CHUNK", 2)
    monkeypatch.setattr(edits, "SPILL_AT", 3)
    monkeypatch.setattr(trimmer, "WORKERS", 1)


def played(seeds: range) -> None:
    histories = [play(seed) for seed in seeds]
    # Each kind of trouble must really have come up, or the run has shown nothing.
    for what in ("trims", "deleted", "resets", "deaths", "read"):
        assert sum(getattr(history, what) for history in histories) > len(seeds), what
    assert sum(history.invalidated for history in histories) > len(seeds) / 5
    assert sum(len(history.acknowledged) for history in histories) > 10 * len(seeds)
    assert sum(history.given_up for history in histories) < len(seeds) / 20


@pytest.mark.parametrize("every", sampled(15))
def test_nothing_needed_is_deleted_and_nothing_acknowledged_is_lost_in_any_history(every):
    played(range(0, HISTORIES, every))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_for_many_more_histories():
    played(range(HISTORIES, 10 * HISTORIES))


# --- broken twins ----------------------------------------------------------------------------------------------


def caught(tries: int = 400) -> str:
    """What is said of a broken twin, within a few hundred calm histories: races are enough."""
    for seed in range(tries):
        try:
            play(seed, faults=CALM)
        except Exception as error:  # noqa: BLE001 - a twin may also make the log unreadable
            return str(error)
    pytest.fail("nobody noticed")


@pytest.mark.matrix
def test_a_trim_that_does_not_mind_new_members_is_caught(monkeypatch: pytest.MonkeyPatch):
    honest = edits.apply_trim
    monkeypatch.setattr(
        trimmer, "apply_trim", lambda head, trim, now: honest(head, replace(trim, membership=head.membership), now)
    )
    assert "is above the" in caught()


def test_a_trim_above_the_floor_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trimmer, "trim_to", lambda policy, _: policy)
    assert "is above the valid slot" in caught()


@pytest.mark.matrix
def test_a_slot_that_is_invalidated_only_in_memory_is_caught(monkeypatch: pytest.MonkeyPatch):
    def forgetful(
        self: trimmer.Trimmer, head: Head, limits: object, done: trimmer.TrimResult, clocks: object
    ) -> slots.Members:
        pretended = trimmer.TrimResult(dry_run=True)
        members = judged(self, head, limits, pretended, clocks)
        done.invalidated += pretended.invalidated
        return members

    judged = trimmer.Trimmer._judged
    monkeypatch.setattr(trimmer.Trimmer, "_judged", forgetful)
    assert "is above the valid slot" in caught()


@pytest.mark.matrix
def test_a_reset_that_does_not_pin_first_is_caught(monkeypatch: pytest.MonkeyPatch):
    def unpinned(head: Head, name: str, position: int, *cold: int | None) -> Head:
        pinned = edits.repin_slot(head, name, position, *cold)  # without a pin a reset would begin again
        return replace(pinned, slots={**pinned.slots, name: replace(pinned.slots[name], position=head.next_offset)})

    monkeypatch.setattr(slots, "repin_slot", unpinned)
    assert "is above the valid slot" in caught()


def test_a_new_slot_that_does_not_pin_first_is_caught(monkeypatch: pytest.MonkeyPatch):
    def unpinned(head: Head, name: str, position: int, *cold: int | None) -> Head:
        pinned = edits.pin_slot(head, name, position, *cold)
        return replace(pinned, slots={**pinned.slots, name: replace(pinned.slots[name], position=head.next_offset)})

    honest: Callable[..., SlotState] = slots.SlotKeeper._first_state

    def at_the_wanted_place(keeper, cell, op, name, pin, expires):
        return honest(keeper, cell, op, name, replace(pin, position=0), expires)

    monkeypatch.setattr(slots, "pin_slot", unpinned)
    monkeypatch.setattr(slots.SlotKeeper, "_first_state", at_the_wanted_place)
    assert "is above the valid slot" in caught()


@pytest.mark.matrix
def test_listing_an_object_that_a_trimmer_may_have_deleted_is_caught(monkeypatch: pytest.MonkeyPatch):
    honest = edits.list_batches

    def trusting(head: Head, listings: list[edits.BatchListing], now: int) -> Head:
        return honest(head, [replace(listing, generation=1 << 60) for listing in listings], now)

    monkeypatch.setattr(upload, "list_batches", trusting)
    message = caught()
    assert "listed" in message or "missing" in message


def test_deleting_before_the_generation_is_raised_is_caught(monkeypatch: pytest.MonkeyPatch):
    honest = edits.begin_trim_round

    def late(head: Head, now: int, **options: int) -> Head:
        return replace(honest(head, now, **options), min_generation=head.min_generation)

    monkeypatch.setattr(trimmer, "begin_trim_round", late)
    monkeypatch.setattr(
        trimmer.Trimmer,
        "_of_generations",
        lambda self, folder, low, _: self.slots.store.list(f"{folder}/", start_after=f"{folder}/{low:016d}"),
    )
    message = caught()
    assert "listed" in message or "missing" in message


def test_deleting_within_the_grace_period_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trimmer, "takewhile", lambda _, cuts: cuts)
    assert "grace period" in caught()
