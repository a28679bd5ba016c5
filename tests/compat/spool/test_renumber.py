"""Spools with gaps or disorder in their lsns: refused with the option's name, and migrated whole with it."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.compat.spool import migrate
from strandline.compat.spool.format import encode_record_frame
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.compat.spool.renumbering import OLD_LSN, plan_renumbering
from strandline.errors import CorruptData
from strandline.model.retention import InvalidReason, SlotState
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.simdisk import CrashMode, SimulatedDisk, crash_everywhere

FOLDER = "/data/orders"
SPOOL, SLOTS = f"{FOLDER}.logical.wal", f"{FOLDER}.logical.slots.json"
LAST = 2**63 - 1


def spool_of(*lsns, term=1):
    return b"".join(b"".join(encode_record_frame(term, lsn, lsn % 1000, b"%d" % lsn)) for lsn in lsns)


def on_disk(*lsns, slots=(), disk=None):
    disk = disk or SimulatedDisk()
    disk.make_folders("/data")
    disk.write_new(SPOOL, [spool_of(*lsns)])
    rows = [{"id": name, "restart_lsn": lsn, "confirmed_lsn": lsn} for name, lsn in dict(slots).items()]
    disk.write_new(SLOTS, [json.dumps({"slots": rows}).encode()])
    disk.sync_folder("/data")
    return disk


def open_on(disk, **options):
    options = {"migrate": True, "renumber": True, **options}
    env = Env(disk=disk, clock=ManualClock(), chance=SeededChance(1))
    return WriteAheadLog.open(FOLDER, background=False, env=env, **options)


def headers_of(wal):
    return [
        dict(header)
        for span in wal.log.plan(wal.log.end().at(wal.oldest - 1))
        for batch in span.fetch()
        for header in batch.column("headers").to_pylist()
    ]


GAPS = (7, 8, 11, 12, 20)
DISORDER = (5, 6, 9, 8, 7, 10)


@pytest.mark.parametrize("lsns", [GAPS, DISORDER, (3, 3)], ids=["gaps", "disorder", "a double"])
def test_without_the_option_the_error_names_it_and_nothing_is_changed(lsns):
    disk = on_disk(*lsns)
    before = disk.files()
    with pytest.raises(CorruptData, match=r"instead of.*wal migrate --renumber.*renumber=True"):
        open_on(disk, renumber=False)
    assert {path: data for path, data in disk.files().items() if ".migrating" not in path} == before


@pytest.mark.parametrize("lsns", [GAPS, DISORDER, (3, 3), (0, 1), (2**64 - 1, 5)], ids=str)
def test_every_record_is_brought_over_in_order_and_keeps_its_lsn(lsns):
    with open_on(on_disk(*lsns)) as wal:
        records = wal.read_since(wal.oldest - 1)
        first = lsns[0] if 1 <= lsns[0] < LAST else 1
        assert [record.lsn for record in records] == list(range(first, first + len(lsns)))
        assert [record.payload for record in records] == [b"%d" % lsn for lsn in lsns]
        assert headers_of(wal) == [{OLD_LSN: b"%d" % lsn} for lsn in lsns]
        wal.append(b"more")
        assert wal.verify().is_clean


def test_a_spool_whose_lsns_are_contiguous_is_left_unchanged():
    with open_on(on_disk(4, 5, 6)) as wal:
        assert [record.lsn for record in wal.read_since(3)] == [4, 5, 6]
        assert wal.log.plan(wal.log.end().at(3))[0].fetch()[0].column("headers").null_count == 3
        assert plan_renumbering([4, 5, 6], LAST) is None


def test_slots_are_moved_to_where_no_consumer_misses_a_record():
    slots = {"none": 6, "some": 8, "in a gap": 9, "at a gap": 10, "late": 12, "all": 20}
    with open_on(on_disk(*GAPS, slots={name.replace(" ", "-"): at for name, at in slots.items()})) as wal:
        found = {slot.name: slot.position for slot in wal.log.slots.list()}
    assert found == {"none": 6, "some": 8, "in-a-gap": 8, "at-a-gap": 8, "late": 10, "all": 11}


def test_a_slot_that_needs_what_is_not_there_is_invalid_and_one_past_the_end_is_refused():
    with open_on(on_disk(*GAPS, slots={"behind": 3})) as wal:
        (slot,) = wal.log.slots.list()
        assert slot.invalid.reason is InvalidReason.WAL_REMOVED
    with pytest.raises(CorruptData, match="ahead"):
        open_on(on_disk(*GAPS, slots={"ahead": 21}))


@given(lsns=st.lists(st.integers(1, 40), min_size=1, max_size=25), position=st.integers(0, 45))
def test_no_slot_skips_a_record_that_its_consumer_does_not_have(lsns, position):
    plan = plan_renumbering(lsns, LAST)
    if plan is None:
        return
    (slot,) = plan.slots([SlotState("a", position, None, 0, 0)])
    passed = lsns[: max(0, slot.position - plan.start)]
    if position + 1 >= min(lsns):
        assert all(lsn <= position for lsn in passed)
        rest = lsns[len(passed) :]
        assert not rest or position > max(lsns) or rest[0] > position
    else:
        assert slot.position < max(plan.start, 1)


def test_each_gap_is_reported(caplog):
    with caplog.at_level(logging.WARNING):
        done = migrate.migrate_spool(
            FOLDER, env=Env(disk=on_disk(*GAPS, 15), clock=ManualClock(), chance=SeededChance(1)), renumber=True
        )
    assert [(gap.index, gap.after, gap.found, gap.missing) for gap in done.gaps] == [
        (2, 8, 11, 2),
        (4, 12, 20, 7),
        (5, 20, 15, 0),
    ]
    assert done.missing == 9
    assert [str(gap) for gap in done.gaps] == ["9-10", "13-19", "15 after 20"]
    for told in ("9-10", "13-19", "15 after 20", "3 gaps with 9 lsns missing"):
        assert told in caplog.text


def test_many_records_share_frames(monkeypatch):
    monkeypatch.setattr(migrate, "_FRAME_RECORDS", 10)
    lsns = [2 * number + 1 for number in range(35)]
    with open_on(on_disk(*lsns)) as wal:
        assert len(wal.log.plan(wal.log.end().at(0))) == 4
        assert headers_of(wal) == [{OLD_LSN: b"%d" % lsn} for lsn in lsns]


@pytest.mark.matrix
def test_a_crash_anywhere_leaves_no_log_or_all_of_it_renumbered():
    def work(disk, notes):
        if "given" not in notes:
            for path in (SPOOL, SLOTS):
                disk.remove(path)
            on_disk(*DISORDER, slots={"a": 6}, disk=disk)
            notes.append("given")
        open_on(disk).close()
        notes.append("migrated")

    def check(disk, notes):
        if f"{FOLDER}/log.json" not in disk.files():
            assert "migrated" not in notes
            return
        with open_on(disk) as wal:
            assert [record.payload for record in wal.read_since(4)] == [b"%d" % lsn for lsn in DISORDER]
            assert [slot.position for slot in wal.log.slots.list()] == [6]

    assert crash_everywhere(work, check, modes=(CrashMode.SECTORS,), seeds=(0,), limit=2).states > 5
