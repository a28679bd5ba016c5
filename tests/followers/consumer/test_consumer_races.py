"""Seeded histories of consumers that race for one queue, and broken twins that they must catch."""

from __future__ import annotations

from typing import Any

import pytest

from strandline.compat.v1 import edits
from strandline.log.queue.log_queue import ObjectLogQueue
from strandline.log.slots import rules
from strandline.model.head import QueueManifest
from strandline.model.retention import SlotState
from tests.followers.consumer.queue_histories import play
from tests.followers.consumer.queue_places import ObjectLogPlace, PlaceKind, V1Place
from tests.matrix_cases import sampled

HISTORIES = 300


def played(kind: PlaceKind, seeds: range) -> None:
    histories = [play(seed, kind) for seed in seeds]
    # Each kind of trouble must really have come up, or the run has shown nothing.
    for trouble in ("lost", "deaths", "fenced"):
        assert sum(getattr(history, trouble) for history in histories) > len(seeds) / 10, trouble
    for work in ("opened", "read", "acknowledged", "appended"):
        assert sum(getattr(history, work) for history in histories) > len(seeds), work


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(15))
@pytest.mark.parametrize("kind", [ObjectLogPlace, V1Place])
def test_after_the_fence_the_old_one_changes_nothing_and_nothing_is_skipped_or_comes_again(
    kind: PlaceKind, every: int
) -> None:
    played(kind, range(0, HISTORIES, every))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [ObjectLogPlace, V1Place])
def test_the_same_for_many_more_histories(kind: PlaceKind) -> None:
    played(kind, range(HISTORIES, 40 * HISTORIES))


def caught(*signs: str, kind: PlaceKind = ObjectLogPlace) -> bool:
    """Whether a history of a broken twin shows one of these signs; others have consequences that show, too."""
    others = []
    for seed in range(400):
        try:
            play(seed, kind)
        except AssertionError as error:
            if any(sign in str(error) for sign in signs):
                return True
            others.append(str(error))
    pytest.fail(f"nobody noticed; instead: {others}")


@pytest.mark.matrix
def test_a_consumer_that_acknowledges_without_checking_its_epoch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rules.advance

    def advance_anyway(state: SlotState, *, holder: str, epoch: int, to: int, **others: Any) -> SlotState:
        if to:
            holder, epoch = state.holder or holder, state.epoch
        return honest(state, holder=holder, epoch=epoch, to=to, **others)

    monkeypatch.setattr(rules, "advance", advance_anyway)
    assert caught("went well after")


def test_a_consumer_that_reads_without_checking_its_epoch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectLogQueue, "_own_state", lambda self: self._log.slots.get(self.slot))
    assert caught("went well after")


@pytest.mark.matrix
def test_a_consumer_that_begins_where_the_slot_was_before_it_claimed_it_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = ObjectLogQueue.claim

    def claim_late(self: ObjectLogQueue, holder: str, last_acked: int | None) -> int:
        self._create_if_missing(last_acked)
        log, _ = self._look()
        before = self._sequence_at(log, self._log.slots.get(self.slot).position)
        honest(self, holder, last_acked)
        return before

    monkeypatch.setattr(ObjectLogQueue, "claim", claim_late)
    assert caught("comes again", "is gone")


def test_a_queue_of_version_1_that_does_not_check_its_epoch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def anyone(manifest: QueueManifest, epoch: int) -> None:
        """Accept any holder."""

    monkeypatch.setattr(edits, "check_epoch", anyone)
    assert caught("went well after", kind=V1Place)
