"""The kind of a folder's content is recognised before anything is opened there."""

from __future__ import annotations

import pytest

import strandline as sl
from strandline.errors import NotALog, WrongKind
from strandline.log.folders import FolderKind, contents, recognise, refuse_others
from strandline.log.wal.recover.manual_repair import repair_log
from strandline.log.wal.recover.verify import verify
from strandline.storage.disk import DISK, FolderRow
from strandline.storage.env import SYSTEM
from strandline.testing.simdisk import SimulatedDisk
from tests import path_contents

KINDS = {
    path_contents.wal: {FolderKind.WAL},
    path_contents.object_log: {FolderKind.OBJECT_LOG},
    path_contents.queue_v1: {FolderKind.QUEUE_V1},
    path_contents.topic: {FolderKind.TOPIC},
    path_contents.node: {FolderKind.NODE},
    path_contents.append_log_store: {FolderKind.APPEND_LOG_STORE},
    path_contents.rocksdb_store: {FolderKind.ROCKSDB_STORE},
    path_contents.snapshot: {FolderKind.SNAPSHOT},
    path_contents.delta_table: {FolderKind.DELTA_TABLE},
    path_contents.spool: {FolderKind.SPOOL},
    path_contents.spool_beside: {FolderKind.SPOOL},
    path_contents.empty: {FolderKind.EMPTY},
    path_contents.file: {FolderKind.FILE},
    path_contents.absent: {FolderKind.ABSENT},
    path_contents.something_else: {FolderKind.OTHER},
    path_contents.wal_and_append_log_store: {FolderKind.WAL, FolderKind.APPEND_LOG_STORE},
    path_contents.object_log_and_node: {FolderKind.OBJECT_LOG, FolderKind.NODE},
    path_contents.object_log_over_wal: {FolderKind.OBJECT_LOG, FolderKind.WAL},
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_each_kind_of_folder_is_recognised_and_left_unchanged(tmp_path, make):
    place = tmp_path / "place"
    make(place)
    before = path_contents.state_of(tmp_path)
    assert contents(place, disk=DISK).kinds == KINDS[make]
    assert contents(f"{place}/", disk=DISK).kinds == KINDS[make]
    assert path_contents.state_of(tmp_path) == before


TAKEN = [make for make in KINDS if not KINDS[make] & {FolderKind.EMPTY, FolderKind.ABSENT, FolderKind.OTHER}]


@pytest.mark.parametrize(
    "make",
    [make for make in TAKEN if make not in (path_contents.delta_table, path_contents.file, path_contents.spool)],
    ids=lambda make: make.__name__,
)
def test_no_delta_table_begins_in_the_place_of_something_else_whose_files_its_vacuum_would_delete(tmp_path, make):
    place = tmp_path / "place"
    make(place)
    before = path_contents.state_of(tmp_path)
    log = sl.open("memory://no-table-begins", create=True)
    with log.producer() as producer:
        producer.append(key=b"k", value=b"v")
    with pytest.raises(WrongKind, match="an empty Delta table there would hide it"):
        sl.follow(log, sl.DeltaSink(place), "slot", upto="end")
    assert path_contents.state_of(tmp_path) == before
    assert log.slots.list() == []


def test_a_write_ahead_log_that_lost_its_identity_is_still_one(tmp_path):
    path_contents.wal(tmp_path / "place")
    (tmp_path / "place" / "log.json").unlink()
    assert contents(tmp_path / "place", disk=DISK).kinds == {FolderKind.WAL}


def test_an_object_log_whose_identity_is_damaged_is_still_one(tmp_path):
    path_contents.object_log(tmp_path / "place")
    (tmp_path / "place" / "log.json").write_bytes(b"\xff{")
    assert contents(tmp_path / "place", disk=DISK).kinds == {FolderKind.OBJECT_LOG}


def test_a_folder_with_leftovers_of_a_refused_opening_counts_as_empty():
    assert recognise([FolderRow("lock"), FolderRow("node.lock"), FolderRow(".~lock-head")], {}) == {
        FolderKind.EMPTY: ()
    }


def test_several_kinds_are_named_with_the_files_of_each(tmp_path):
    path_contents.object_log_over_wal(tmp_path / "place")
    told = str(contents(tmp_path / "place", disk=DISK))
    assert told == (
        "a write-ahead log (slots.json, mark, 00000000000000000000.log) and an object log (log.json, head, batches)"
    )


@pytest.mark.parametrize(
    "make", [path_contents.object_log, path_contents.node, path_contents.append_log_store, path_contents.snapshot]
)
def test_verifying_and_repairing_a_log_that_is_none_refuses_it_and_leaves_nothing(tmp_path, make):
    make(tmp_path / "place")
    before = path_contents.state_of(tmp_path)
    for tried in (
        lambda: verify(str(tmp_path / "place"), env=SYSTEM),
        lambda: repair_log(str(tmp_path / "place"), forget_slots=True),
    ):
        with pytest.raises(NotALog, match="and no write-ahead log: "):
            tried()
    assert path_contents.state_of(tmp_path) == before


def test_a_relative_path_and_the_simulated_disk_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path_contents.empty(tmp_path / "place")
    assert contents("place", disk=DISK).kinds == {FolderKind.EMPTY}
    assert contents("elsewhere", disk=DISK).kinds == {FolderKind.ABSENT}
    disk = SimulatedDisk()
    disk.make_folders("/data/place")
    assert contents("/data/place", disk=disk).kinds == {FolderKind.EMPTY}
    assert contents("/data/elsewhere", disk=disk).kinds == {FolderKind.ABSENT}
    assert contents("/data/place", disk=disk).is_free()


def test_the_error_names_what_is_there_and_what_was_expected(tmp_path):
    path_contents.node(tmp_path / "place")
    there = contents(tmp_path / "place", disk=DISK)
    with pytest.raises(
        NotALog, match=r"place is the folder of a node \(node.json, data-00000001\), and no write-ahead"
    ):
        refuse_others(there, FolderKind.WAL)
    refuse_others(there, FolderKind.NODE)
