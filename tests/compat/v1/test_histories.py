"""Seeded histories of queues of version 1, and broken twins that they must catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strandline.compat.v1 import edits
from strandline.compat.v1.trimming import QueueTrimmer, QueueTrimResult, is_old, names_in, unlisted
from strandline.model.head import QueueManifest
from strandline.testing.faulty import Faults
from tests.compat.v1.histories import play
from tests.matrix_cases import sampled

HISTORIES = 500


def played(seeds: range, **options) -> None:
    histories = [play(seed, **options) for seed in seeds]
    # Each kind of trouble must really have come up, or the run has shown nothing.
    for trouble in ("lost", "conflicts", "deaths", "fenced", "deleted", "uploaded_again"):
        assert sum(getattr(history, trouble) for history in histories) > len(seeds) / 20, trouble
    assert sum(len(history.acknowledged) for history in histories) > 4 * len(seeds)
    assert sum(len(history.consumed) for history in histories) > len(seeds)
    assert sum(history.given_up for history in histories) < len(seeds) / 20
    assert any(history.doubled for history in histories), "the documented case has come up, and was recognised as such"


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(5))
def test_no_history_loses_lists_twice_or_trims_too_early(every):
    played(range(0, HISTORIES, every))


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(15))
def test_nor_does_one_in_which_writes_land_late_while_no_time_passes(every):
    late = Faults(before=0.03, after=0.06, late=0.08)
    histories = [play(seed, faults=late, stall=0.0) for seed in range(0, 300, every)]
    assert sum(history.late for history in histories) > 20 / every


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_for_many_more_histories():
    played(range(HISTORIES, 20 * HISTORIES))


def caught(**options) -> str:
    """The violation that a broken twin shows within a few hundred histories."""
    for seed in range(600):
        try:
            play(seed, **options)
        except AssertionError as error:
            return str(error).splitlines()[0]
    pytest.fail("nobody noticed")


@pytest.mark.matrix
def test_a_lister_that_does_not_look_for_its_batch_is_caught(monkeypatch):
    honest = edits.list_batches

    def blind(manifest, listings, now, patience):
        listed = honest(replace(manifest, entries=()), listings, now, patience)
        return replace(listed, entries=(*manifest.entries, *listed.entries))

    monkeypatch.setattr("strandline.compat.v1.shipper.list_batches", blind)
    assert "listed twice" in caught(faults=Faults(after=0.15), stall=0.0)


@pytest.mark.matrix
def test_a_lister_that_knows_only_the_last_name_of_its_batch_is_caught(monkeypatch):
    monkeypatch.setattr("strandline.compat.v1.edits.mark_of", lambda location: location)
    monkeypatch.setattr("strandline.compat.v1.shipper.mark_of", lambda location: location)
    assert "listed twice" in caught()


def test_a_producer_without_the_rule_of_half_the_grace_period_is_caught(monkeypatch):
    honest = edits.list_batches

    def patient(manifest, listings, now, patience):
        return honest(manifest, listings, now, float("inf"))

    monkeypatch.setattr("strandline.compat.v1.shipper.list_batches", patient)
    assert "was trimmed" in caught()


class ManifestFirst(QueueTrimmer):
    """Reads the manifest, then lists the objects: the wrong way round."""

    def run(self, **options) -> QueueTrimResult:
        manifest = self._read_manifest()
        if manifest is None:
            return QueueTrimResult()
        objects = list(self.store.list(f"{self.folder}/"))
        now = self.env.clock.now()
        for item in unlisted(objects, names_in(manifest), self.folder):
            if is_old(item, now, self.grace):
                self.store.delete(item.path)
        return QueueTrimResult()


def test_a_trimmer_that_reads_the_manifest_before_it_lists_is_caught():
    assert "was trimmed and is listed" in caught(trimmer=ManifestFirst)


class Hasty(QueueTrimmer):
    """Deletes unlisted objects at once."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **{**options, "grace": 0.001, "remember": False})


def test_a_trimmer_without_grace_is_caught():
    assert "trimmed" in caught(trimmer=Hasty)


@pytest.mark.matrix
def test_a_consumer_that_acknowledges_without_checking_its_epoch_is_caught(monkeypatch):
    honest = edits.acknowledge

    def anyway(manifest: QueueManifest, *, epoch: int, **where: Any) -> QueueManifest:
        return honest(manifest, epoch=manifest.epoch, **where)

    monkeypatch.setattr(edits, "acknowledge", anyway)
    assert "acknowledged after" in caught()
