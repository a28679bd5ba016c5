"""A log restored from a copy beside its cold tier: nothing of its own history is forgotten before it is copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from strandline.errors import Diverged
from strandline.log.slots import trimming
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Bounds, Cursor
from strandline.model.records import Op, record_batch
from strandline.model.retention import TIER_SLOT, SlotState
from strandline.tier.copy.segment_files import forget_tails
from strandline.tier.opening import attach, tiered, tiering
from tests.matrix_cases import some
from tests.tier.read.test_tiered_terms import go_on, position, settle
from tests.tier.read.tiered_logs import KINDS, Kind, Tiers, fetched, rows


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


# --- what may be forgotten before a tierer's round -------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", some([2, 6, 10], 1))
def test_a_log_restored_from_before_its_tierer_s_slot_forgets_nothing_before_a_tierer_has_looked(
    kind: Kind, more: int
) -> None:
    tiers = Tiers(kind)
    go_on(tiers, 4, term=1)
    copy = tiers.backup()  # nobody has tiered yet: there is no slot
    go_on(tiers, 6, term=1)
    tiers.tier(target=500)
    tiers.restore(copy)
    go_on(tiers, more, term=1)
    assert tiers.trim() == 0
    assert rows(tiers.hot().read()) == tiers.truth
    if more >= 6:
        with pytest.raises(Diverged, match="truncate --from 4"):
            tiers.tier(target=500)
        assert tiers.trim() <= 4
    tiers.tierer(target=500).truncate(4)
    settle(tiers)


def test_a_log_whose_slots_are_newer_than_itself_is_not_trimmed_before_a_tierer_has_compared_it() -> None:
    tiers = Tiers("object")
    go_on(tiers, 4, term=1)
    tiers.tier(target=500)
    copy = tiers.backup()
    go_on(tiers, 6, term=1)
    tiers.tier(target=500)
    tiers.restore(copy, slots=False)  # the head is of the copy, and the slots' objects were left
    go_on(tiers, 8, term=1)
    assert position(tiers) == 10
    assert tiers.trim() == 0
    assert rows(tiers.tiered().read()) == tiers.truth
    with pytest.raises(Diverged, match="truncate --from 4"):
        tiers.tier(target=500)
    tiers.tierer(target=500).truncate(4)
    settle(tiers)


def test_a_log_shorter_than_what_its_slot_says_was_copied_forgets_nothing() -> None:
    tiers = Tiers("object")
    go_on(tiers, 4, term=1)
    copy = tiers.backup()
    go_on(tiers, 6, term=1)
    tiers.tier(target=500)
    tiers.restore(copy, slots=False)
    go_on(tiers, 2, term=1)
    assert tiers.trim() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_whose_cold_tier_was_deleted_is_trimmed_by_its_own_retention_again(kind: Kind) -> None:
    tiers = Tiers(kind)
    go_on(tiers, 6, term=1)
    tiers.tier()
    tiers.tierer().delete_partition()
    assert tiers.trim() == 6


@pytest.mark.parametrize("kind", KINDS)
def test_an_unbroken_history_is_forgotten_up_to_what_was_copied(kind: Kind) -> None:
    tiers = Tiers(kind)
    go_on(tiers, 4, term=1)
    tiers.tier()
    go_on(tiers, 4, term=2)
    assert tiers.trim() == 4
    tiers.reopen()
    assert tiers.trim() == 4
    tiers.tier()
    assert tiers.trim() == 8
    assert rows(tiers.tiered().read()) == tiers.truth


def test_a_write_ahead_log_restored_from_a_copy_of_its_folder_keeps_its_own_records(tmp_path: Path) -> None:
    folder = tmp_path / "log"

    def append(log: WalLog, text: str) -> None:
        for number in range(5):
            value = [f"{text}-{number}".encode()]
            log.append_batch(record_batch(timestamps=[0], ops=[Op.PUT], keys=[None], values=value)).result(120)

    cold = (tmp_path / "cold").as_uri()
    with WalLog.open(str(folder), roll_bytes=0) as log:
        attach(log, cold)
        append(log, "both")
    copytree(folder, tmp_path / "copy")
    with WalLog.open(str(folder), roll_bytes=0) as log:
        append(log, "lost")
        with tiering(log) as tierer:
            tierer.run_once(everything=True)
        log.trim(10)
    rmtree(folder)
    copytree(tmp_path / "copy", folder)
    with WalLog.open(str(folder), roll_bytes=0) as log:
        append(log, "new")
        assert log.trim(10) == 0
        with tiering(log) as tierer, pytest.raises(Diverged, match="another record at offset 5"):
            tierer.run_once(everything=True)
        assert log.trim(10) <= 5
        whole = tiered(log)
        values = [value for batch in whole.read() for value in batch.column("value").to_pylist()]
        whole.close()
        assert values == [f"{text}-{number}".encode() for text in ("both", "new") for number in range(5)]


def test_a_tierer_s_slot_proves_only_what_is_behind_the_batch_that_it_was_advanced_to() -> None:
    def floor(slot: SlotState | None, *, own: int | None = 5, attached: bool = True, end: int = 9) -> int | None:
        slots = [SlotState("consumer", 3, None, 0, 0)] + ([] if slot is None else [slot])
        return trimming.trim_floor(
            trimming.proven(slots, trimming.ColdTierProof(Bounds(2, end), lambda: attached, lambda _: own))
        )

    copied = SlotState(TIER_SLOT, 7, None, 0, 0, fingerprint=5)
    assert floor(copied) == 7
    assert floor(copied, own=6) == 2
    assert floor(copied, own=None) == 7
    assert floor(copied, end=6) == 2
    assert floor(None) == 2
    assert floor(None, attached=False) == 3


# --- the same records in another history -----------------------------------------------------------------------


def regrown(kind: Kind) -> Tiers:
    """A log that was restored from a copy at four and has, from six on, the very records that its cold tier has."""
    tiers = Tiers(kind)
    go_on(tiers, 4, term=1)
    tiers.tier(target=500)
    copy = tiers.backup()
    go_on(tiers, 6, term=1)
    tiers.tier(target=500)
    tiers.restore(copy)
    tiers.clock.advance(60)
    go_on(tiers, 2, term=1)
    for _ in range(3):
        tiers.append(2, term=1 if kind == "wal" else None, like=0)
    return tiers


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_that_grew_differently_and_then_has_equal_records_again_is_not_tiered_on(kind: Kind) -> None:
    tiers = regrown(kind)
    segments, objects = tiers.segments(), tiers.objects()
    with pytest.raises(Diverged, match="truncate --from 4"):
        tiers.tier(target=500)
    assert (tiers.segments(), tiers.objects()) == (segments, objects)
    assert tiers.trim() <= 4
    log = tiers.tiered()
    assert rows(log.read()) == tiers.truth
    pieces = log.pieces(0, len(tiers.truth))
    assert not pieces or pieces[-1].next <= 4
    tiers.tierer(target=500).truncate(4)
    settle(tiers)
    assert fetched(log.plan(Cursor(log.log_id, 0))) == tiers.truth


@pytest.mark.parametrize("kind", KINDS)
def test_trimmed_records_are_not_read_from_the_cold_tier_of_another_history(kind: Kind) -> None:
    tiers = Tiers(kind)
    go_on(tiers, 4, term=1)
    tiers.tier(target=500)
    old = tiers.backup()
    go_on(tiers, 6, term=1)
    tiers.tier(target=500)
    assert tiers.trim() == 10
    new, truth = tiers.backup(), tiers.truth
    tiers.restore(old)
    tiers.tierer(target=500).truncate(4)
    tiers.clock.advance(60)
    go_on(tiers, 6, term=1)
    tiers.tier(target=500)
    assert rows(tiers.tiered().read()) == tiers.truth
    tiers.restore(new)
    tiers.truth = truth
    log = tiers.tiered()
    with pytest.raises(Diverged, match="its cold tier has another history"):
        log.plan(Cursor(log.log_id, 0))
    go_on(tiers, 2, term=1)
    assert fetched(log.plan(Cursor(log.log_id, 10))) == tiers.truth[10:]


# --- reading before a tierer's round ---------------------------------------------------------------------------


def parted_copy(*, trimmed: bool) -> Tiers:
    """A log restored from a copy at four, whose cold tier was cut and went on in a later term without it."""
    tiers = Tiers("wal")
    go_on(tiers, 4, term=1)
    tiers.tier(target=500)
    if trimmed:
        tiers.trim(2)
    tiers.hot().close()  # with the slot as it stands
    copy, own = tiers.backup(), list(tiers.truth)
    tiers.rewind(2)
    go_on(tiers, 2, term=2)
    tiers.tier(target=500)
    tiers.restore(copy)
    tiers.truth = own
    return tiers


def test_a_restored_log_that_has_all_its_records_is_read_whatever_its_cold_tier_holds() -> None:
    tiers = parted_copy(trimmed=False)
    assert rows(tiers.tiered().read()) == tiers.truth


def test_a_restored_log_that_has_forgotten_records_is_not_read_from_a_cold_tier_of_another_history() -> None:
    tiers = parted_copy(trimmed=True)
    with pytest.raises(Diverged, match="restored from a copy"):
        list(tiers.tiered().read())


def test_a_restored_log_is_not_read_any_more_once_it_forgets_what_its_cold_tier_does_not_have() -> None:
    tiers = parted_copy(trimmed=False)
    log = tiers.tiered()
    assert rows(log.read()) == tiers.truth
    tiers.trim(2)
    with pytest.raises(Diverged, match="restored from a copy"):
        list(log.read())


def test_a_restored_log_is_compared_again_when_its_process_begins_to_lead() -> None:
    """Only a primary has the tierer's slot: a replica could not compare."""
    tiers = parted_copy(trimmed=True)
    roles: list[str | None] = [None]
    (slot,) = (slot for slot in tiers.hot().slots.list() if slot.name == TIER_SLOT)
    log = tiers.tiered(role=lambda: roles[-1], tier_slot=lambda: None if roles[-1] is None else slot)
    log.bounds()
    roles.append("primary")
    with pytest.raises(Diverged, match="restored from a copy"):
        log.bounds()
