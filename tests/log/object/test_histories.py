"""Thousands of seeded histories of racing writers and holders, and broken twins that they must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strandline.errors import OutcomeUnknown, TransientStorageError
from strandline.log.object import ObjectLog
from strandline.log.object.head import edits
from strandline.log.slots import rules
from strandline.model.head import Receipt, WriterId
from strandline.testing.faulty import Faults
from tests.contracts.slots import append
from tests.log.object.histories import AppendTo, append_numbered, play
from tests.matrix_cases import sampled

HISTORIES = 800


def played(seeds: range) -> None:
    histories = [play(seed) for seed in seeds]
    # Each kind of trouble must really have come up, or the run has shown nothing.
    for trouble in ("lost", "late", "conflicts", "deaths", "fenced"):
        assert sum(getattr(history, trouble) for history in histories) > len(seeds) / 20, trouble
    assert sum(len(history.acknowledged) for history in histories) > 3 * len(seeds)
    assert sum(len(history.advanced) for history in histories) > 2 * len(seeds)
    assert sum(history.given_up for history in histories) < len(seeds) / 20


@pytest.mark.parametrize("every", sampled(24))
def test_no_history_of_racing_failing_and_dying_writers_and_holders_loses_or_doubles_anything(every: int) -> None:
    played(range(0, HISTORIES, every))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_for_many_more_histories() -> None:
    played(range(HISTORIES, 15 * HISTORIES))


LOSSY = Faults(after=0.15, before=0.05)


def caught(append_to: AppendTo = append_numbered, *, faults: Faults = LOSSY) -> str:
    """The error that the check finds in a broken twin within a few hundred histories."""
    for seed in range(400):
        try:
            play(seed, append_to, faults=faults)
        except AssertionError as error:
            return str(error).splitlines()[0]
    pytest.fail("nobody noticed")


def test_a_caller_that_appends_under_a_new_number_when_it_got_no_answer_is_caught() -> None:
    def append_anew(log: ObjectLog, writer: WriterId, number: int, values: tuple[bytes, ...]) -> Receipt:
        for attempt in range(10):
            stranger = WriterId(type(writer)(int=writer.int ^ (attempt << 8 | number)))
            try:
                return append(log, *values, writer=stranger, number=0)
            except (OutcomeUnknown, TransientStorageError):
                continue
        raise OutcomeUnknown("gave up")

    message = caught(append_anew)
    assert "nowhere" in message or "twice" in message


def test_a_lister_that_ignores_writers_numbers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_anyway(head: edits.Head, listings: list[edits.BatchListing], now: int) -> edits.Head:
        for listing in listings:
            stranger = replace(head, writers={}, writers_floor=0)
            listed = edits.list_batches(stranger, [replace(listing, number=0)], now)
            entry = replace(listed.tail[-1], number=listing.number)
            head = replace(listed, tail=(*listed.tail[:-1], entry), writers={**head.writers, **listed.writers})
        return head

    monkeypatch.setattr("strandline.log.object.upload.list_batches", list_anyway)
    assert "listed twice" in caught()


def test_a_holder_that_advances_without_checking_its_epoch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rules.advance

    def advance_anyway(state: rules.SlotState, *, holder: str, epoch: int, **others: Any) -> rules.SlotState:
        return honest(state, holder=state.holder, epoch=state.epoch, **others)

    monkeypatch.setattr(rules, "advance", advance_anyway)
    assert "advanced with epoch" in caught()


def test_a_holder_that_may_go_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[..., rules.SlotState] = rules.advance

    def move_anywhere(state: rules.SlotState, *, to: int, **others: Any) -> rules.SlotState:
        honest(state, to=to, **others)
        return replace(state, position=max(0, to - 1))

    monkeypatch.setattr(rules, "advance", move_anywhere)
    assert "went back" in caught()


def test_a_claim_that_leaves_the_epoch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "claim", lambda state, holder, _, **__: replace(state, holder=holder, epoch=1))
    assert "two holders" in caught()


def test_a_caller_that_takes_no_answer_for_success_is_caught() -> None:
    def forgetful(log: ObjectLog, writer: WriterId, number: int, values: tuple[bytes, ...]) -> Receipt:
        try:
            return append(log, *values, writer=writer, number=number)
        except (OutcomeUnknown, TransientStorageError):
            return Receipt(log.end().next, len(values))

    message = caught(forgetful, faults=Faults(before=0.2, after=0.2))
    assert "lost" in message or "elsewhere" in message
