"""Migrating spools: the shared vectors, slots, what is refused, and a crash at every disk operation."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import re
import struct
import sys
import threading
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from zlib import crc32

import pyarrow as pa
import pytest

from strandline.compat.spool import migrate
from strandline.compat.spool.format import encode_record_frame
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import AlreadyExists, CorruptData, Diverged, Fenced, InvalidInput, StorageError
from strandline.formats.wal.folder import SlotsFile
from strandline.ingestion.api import ingest
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.recover.verify import verify
from strandline.log.wal.slots import write_slots_file
from strandline.model.retention import InvalidReason
from strandline.storage.disk import DISK, replace_file
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.simdisk import CrashMode, SimulatedDisk, crash_everywhere, fail_everywhere, fill_everywhere
from tests.matrix_cases import sampled

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[2] / "vectors" / "wal_spool.json").read_text())["cases"]
}
FOLDER = "/data/orders"
SPOOL, SLOTS = f"{FOLDER}.logical.wal", f"{FOLDER}.logical.slots.json"
CHANGE = b'{"lsn":9,"operation":"insert","collection":"users","term":4}'
U64 = 2**64 - 1


def v1(lsn, payload):
    return b"RDLW\x01" + struct.pack("<QQ", lsn, len(payload)) + payload


def v2(lsn, time, payload):
    covered = b"\x02" + struct.pack("<QQI", lsn, time, len(payload)) + payload
    return b"RDLW" + covered + struct.pack("<I", crc32(covered))


def v3(lsn, time, payload, term=1):
    return b"".join(encode_record_frame(term, lsn, time, payload))


MIXED = v1(7, b"seven") + v2(8, 1000, b"eight") + v2(9, 2000, CHANGE) + v3(10, 3000, b"ten", term=5) + b"RDL"
RECORDS = [(1, 7, 0, b"seven"), (1, 8, 1000, b"eight"), (4, 9, 2000, CHANGE), (5, 10, 3000, b"ten")]
MIXED_SLOTS = json.dumps(
    {
        "slots": [
            {"id": "behind", "position": 3, "holder": "x", "epoch": 2, "last_seen": 5},
            {"id": "older", "restart_lsn": 8, "last_seen_at_unix_ms": 6},
            {"id": "ended", "position": 1, "epoch": 1, "invalid": {"reason": "horizon", "at": 4}},
        ]
    }
).encode()


def on_disk(spool, slots=None, *, disk=None):
    disk = disk or SimulatedDisk()
    disk.make_folders("/data")
    disk.write_new(SPOOL, [spool])
    if slots is not None:
        disk.write_new(SLOTS, [slots if isinstance(slots, bytes) else json.dumps({"slots": slots}).encode()])
    disk.sync_folder("/data")
    return disk


def open_on(disk, path=FOLDER, **options):
    return WriteAheadLog.open(
        path,
        **{"migrate": True, "background": False, **options},
        env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(1)),
    )


def all_of(wal):
    return [tuple(record) for record in wal.read_since(wal.oldest - 1, 10**6)]


def but_for_the_lock(disk):
    """The files that a refused migration leaves, without the lock file, which stays."""
    return {path: data for path, data in disk.files().items() if not path.endswith(".migrating.lock")}


def refused(disk, error, *said):
    before = but_for_the_lock(disk)
    with pytest.raises(error) as caught:
        open_on(disk)
    for text in said:
        assert str(text) in str(caught.value)
    assert but_for_the_lock(disk) == before


# --- records ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_each_vector_becomes_a_log_of_its_valid_prefix(name, caplog):
    case = CASES[name]
    data = bytes.fromhex(case["hex"])
    disk = on_disk(data)
    expected = [
        (record["term"], record["lsn"], record["timestamp_ms"], bytes.fromhex(record["payload"]))
        for record in case["records"]
    ]
    if name == "crc_mismatch_truncates":  # a record follows the damaged one
        refused(disk, CorruptData, SPOOL, f"byte {case['valid_bytes']} ")
    with open_on(disk, valid_prefix=name == "crc_mismatch_truncates") as wal:
        assert all_of(wal) == expected
        assert wal.current == (expected[-1][1] if expected else 0)
    assert disk.read(SPOOL) == data
    left = len(data) - case["valid_bytes"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == bool(left)
    assert all(f"up to byte {case['valid_bytes']}," in text and f"the {left} bytes" in text for text in warnings)


@pytest.mark.parametrize("name", CASES)
def test_no_vector_is_touched_unless_asked(name):
    disk = on_disk(bytes.fromhex(CASES[name]["hex"]))
    before = disk.files()
    with pytest.raises(InvalidInput, match="open it with migrate"):
        open_on(disk, migrate=False)
    assert disk.files() == before
    assert disk.folders() == ["/data"]


def test_the_log_continues_where_the_spool_ended_and_is_not_migrated_again():
    disk = on_disk(MIXED)
    with open_on(disk) as wal:
        log_id = wal.log.log_id
        assert wal.log.term == 5
        assert wal.append(b"eleven", timestamp=4000) == 11
    for migrate_again in (True, False):
        with open_on(disk, migrate=migrate_again) as wal:
            assert wal.log.log_id == log_id
            assert all_of(wal) == [*RECORDS, (5, 11, 4000, b"eleven")]
    assert disk.read(SPOOL) == MIXED


@pytest.mark.parametrize("changed", [MIXED[:-3] + v3(11, 4000, b"new", term=5), MIXED + b"X", MIXED[:-3], b""])
def test_a_spool_that_was_written_after_its_migration_is_refused(changed):
    disk = on_disk(MIXED)
    with open_on(disk) as wal:
        wal.append(b"eleven")
    replace_file(disk, SPOOL, changed, temporary=f"{SPOOL}.new")
    said = f"{SPOOL} has {len(changed)} bytes, and had {len(MIXED)} when it was migrated"
    for opening in (
        lambda env: open_on(env.disk),
        *(partial(WalLog.open, FOLDER + end, create=False, background=False) for end in ("", "/", "//", "/.")),
        partial(WalReader, FOLDER),
    ):
        with pytest.raises(Diverged, match=re.escape(said)) as refusal:
            opening(env=Env(disk=disk))
        assert f"ingest COPY {FOLDER} --from 10'" in str(refusal.value)
    disk.remove(SPOOL)
    with open_on(disk) as wal:
        assert all_of(wal)[-1][3] == b"eleven"
    assert verify(FOLDER, env=Env(disk=disk, clock=ManualClock())).findings == []


def test_the_new_records_of_a_spool_are_taken_over_as_the_refusal_says(tmp_path):
    folder, spool = tmp_path / "orders", tmp_path / "orders.logical.wal"
    spool.write_bytes(v3(1, 1000, b"one") + v3(2, 2000, b"two"))
    with WriteAheadLog.open(folder, migrate=True) as wal:
        wal.append(b"by the new program")
    with spool.open("ab") as file:
        file.write(v3(3, 3000, b"by the old program"))
    with pytest.raises(Diverged, match="--from 2"):
        WriteAheadLog.open(folder)
    spool.rename(tmp_path / "copy.logical.wal")
    WriteAheadLog.open(tmp_path / "copy", migrate=True).close()
    ingest(f"wal://{tmp_path}/copy", f"wal://{folder}", start=2)
    with WriteAheadLog.open(folder) as wal:
        assert [record.payload for record in wal.read_since(0)] == [
            b"one",
            b"two",
            b"by the new program",
            b"by the old program",
        ]


@pytest.mark.parametrize("mark", [b"", b"{}", b'{"kind": 1}', b"\xff"])
def test_a_damaged_note_of_the_migration_is_named(mark):
    disk = on_disk(MIXED)
    open_on(disk).close()
    replace_file(disk, f"{FOLDER}/spool.json", mark, temporary=f"{FOLDER}/spool.json.new")
    with pytest.raises(CorruptData, match=r"spool\.json is damaged"):
        open_on(disk)


def test_a_log_that_an_earlier_release_has_migrated_is_opened_as_before():
    disk = on_disk(MIXED)
    open_on(disk).close()
    disk.remove(f"{FOLDER}/spool.json")
    replace_file(disk, SPOOL, MIXED + b"X", temporary=f"{SPOOL}.new")
    with open_on(disk) as wal:
        assert all_of(wal) == RECORDS


def test_a_spool_may_be_named_by_its_file_or_with_a_slash(tmp_path):
    for number, path in enumerate(("{}.logical.wal", "{}/", "{}")):
        base = tmp_path / str(number)
        Path(f"{base}.logical.wal").write_bytes(MIXED)
        with WriteAheadLog.open(path.format(base), migrate=True) as wal:
            assert all_of(wal) == RECORDS
        assert (base / "log.json").exists()


def test_a_relative_name_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("orders.logical.wal").write_bytes(MIXED)
    with WriteAheadLog.open("orders", migrate=True) as wal:
        assert all_of(wal) == RECORDS


def test_a_long_spool_becomes_few_frames_that_can_be_found_by_time(monkeypatch):
    monkeypatch.setattr(migrate, "_FRAME_RECORDS", 100)
    monkeypatch.setattr(migrate, "_GROUP_BYTES", 10_000)
    frames = [v3(lsn, lsn * 10, b"%d" % lsn * 20, term=1 + lsn // 500) for lsn in range(1, 1201)]
    disk = on_disk(b"".join(frames))
    with open_on(disk) as wal:
        assert all_of(wal) == [(1 + lsn // 500, lsn, lsn * 10, b"%d" % lsn * 20) for lsn in range(1, 1201)]
        assert len(wal.log.plan(wal.log.start())) == 13
        assert len([call for call in disk.calls if call.action == "sync" and "migrating" in call.path]) < 20
        # By the times that the records tell, not by that of the migration; a frame is of its latest.
        assert wal.log.position_of(datetime.fromtimestamp(2.5, UTC)) == 200
        assert wal.log.position_of(datetime.fromtimestamp(13, UTC)) == 1200


def test_nothing_holds_on_to_the_bytes_of_a_spool_that_was_migrated():
    """Arrow leaks views that it makes an array of, and each would hold the whole file."""

    class Lending(SimulatedDisk):
        lent = bytes(bytearray(MIXED))

        def read(self, path, *where):
            return self.lent if path == SPOOL else super().read(path, *where)

    disk = on_disk(MIXED, disk=Lending())
    before = sys.getrefcount(disk.lent)
    open_on(disk).close()
    gc.collect()
    after = sys.getrefcount(disk.lent)
    assert after == before


def test_times_out_of_range_become_the_latest_valid_one_and_do_not_spoil_later_ones(caplog):
    disk = on_disk(v3(1, 5, b"a") + v3(2, U64, b"b") + v3(3, 7, b"c"))
    with open_on(disk) as wal:
        assert [time for _, _, time, _ in all_of(wal)] == [5, migrate.LAST_TIME, 7]
        assert wal.log.plan(wal.log.start())[-1].frame.timestamp == ManualClock().now() // 1000
    assert "has 1 records with a time" in caplog.text


def test_an_empty_payload_and_an_empty_spool_come_along():
    with open_on(on_disk(v3(1, 5, b""))) as wal:
        assert all_of(wal) == [(1, 1, 5, b"")]
    with open_on(on_disk(b"")) as wal:
        assert (all_of(wal), wal.oldest, wal.current) == ([], 1, 0)
        assert wal.append(b"first", lsn=40) == 40


# --- what is refused -------------------------------------------------------------------------------------------


FIRST = v3(4, 1, b"four", term=3)


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (v3(6, 1, b"six", term=3), ["lsn 6 is there instead of 5"]),
        (v3(4, 1, b"four", term=3), ["lsn 4 is there instead of 5"]),
        (v3(2, 1, b"two", term=3), ["lsn 2 is there instead of 5"]),
        (v3(5, 1, b"five", term=2), ["lsn 5 is of term 2", "of term 3"]),
        (v2(5, 1, b"five"), ["lsn 5 is of term 1", "of term 3"]),
    ],
    ids=["a gap", "twice", "back", "a lower term", "no term"],
)
def test_a_record_that_does_not_follow_is_refused_with_its_lsn_and_byte(behind, said):
    refused(on_disk(FIRST + behind), CorruptData, SPOOL, f"byte {len(FIRST)},", "record 1 ", *said)


@pytest.mark.parametrize("lsn", [0, 2**63, U64])
def test_an_lsn_that_no_record_has_is_refused(lsn):
    refused(on_disk(v3(lsn, 1, b"x")), CorruptData, SPOOL, "byte 0", lsn)


def test_lsns_that_run_out_are_refused():
    last = 2**63 - 1
    with open_on(on_disk(v3(last, 1, b"x"))) as wal:
        assert all_of(wal) == [(1, last, 1, b"x")]
    refused(on_disk(v3(last, 1, b"x") + v3(last + 1, 1, b"y")), CorruptData, "byte 0", last)


@pytest.mark.parametrize(
    "data", [b"no spool at all", b"RDLW\x63" + bytes(40), v3(1, 1, b"x")[:-1] + b"!"], ids=["magic", "version", "sum"]
)
def test_a_file_that_does_not_begin_with_a_record_is_refused(data):
    refused(on_disk(data), CorruptData, SPOOL, "does not begin with a record")


def test_a_first_record_that_is_torn_leaves_an_empty_log(caplog):
    with open_on(on_disk(v3(1, 1, b"x")[:-1])) as wal:
        assert all_of(wal) == []
    assert "valid up to byte 0" in caplog.text


@pytest.mark.matrix
def test_damage_with_records_behind_it_is_refused_unless_the_prefix_is_asked_for(caplog):
    frames = [v3(lsn, 1, b"x%d" % lsn) for lsn in range(1, 6)]
    for place in range(len(frames[0])):  # also in the length, which then claims all that follows
        changed = bytearray(b"".join(frames))
        changed[len(frames[0]) * 2 + place] ^= 0x40
        disk = on_disk(bytes(changed))
        refused(disk, CorruptData, SPOOL, f"byte {2 * len(frames[0])} ", f"byte {3 * len(frames[0])} ", "damage, 2,")
        with open_on(disk, valid_prefix=True) as wal:
            assert [record[1] for record in all_of(wal)] == [1, 2]
        assert "valid up to byte" in caplog.text


def test_damaged_frames_without_checksum_are_told_from_a_torn_tail():
    frames = [v1(lsn, b"x%d" % lsn) for lsn in range(1, 6)]
    size = len(frames[0])
    refused(on_disk(b"".join([frames[0], b"?" + frames[1][1:], *frames[2:]])), CorruptData, f"byte {size} ")
    with open_on(on_disk(b"".join([*frames, v1(6, b"a" * 50)[:-1]]))) as wal:
        assert wal.current == 5


def test_damage_of_the_last_record_counts_as_a_torn_tail():
    """A crash may leave the length of a file without the bytes: without a record behind it nothing tells them apart."""
    with open_on(on_disk(v3(1, 1, b"x") + v3(2, 1, b"y")[:-1] + b"!")) as wal:
        assert wal.current == 1


def test_hostile_bytes_that_begin_a_frame_everywhere_are_refused_soon():
    size = 1 << 20
    bait = b"RDLW\x03" + struct.pack("<QQQI", 1, 9, 1, size // 2)
    tail = bait * (size // len(bait))
    refused(on_disk(v3(1, 1, b"x") + b"?" + tail), CorruptData, SPOOL)


@pytest.mark.parametrize("name", ["orders", "orders.migrating"])
@pytest.mark.parametrize("link", [False, True], ids=["file", "link"])
def test_a_file_or_a_link_in_the_way_is_named(tmp_path, name, link):
    spool = tmp_path / "orders.logical.wal"
    spool.write_bytes(v3(1, 1, b"x"))
    (tmp_path / name).symlink_to("nowhere") if link else (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(AlreadyExists, match=f"{name} is a file or a link"):
        WriteAheadLog.open(tmp_path / "orders", migrate=True)
    assert (tmp_path / name).is_symlink() is link


def test_a_folder_in_place_of_the_slots_is_never_no_slots(tmp_path):
    (tmp_path / "orders.logical.wal").write_bytes(v3(1, 1, b"x"))
    (tmp_path / "orders.logical.slots.json").mkdir()
    with pytest.raises(InvalidInput, match="is a folder"):
        WriteAheadLog.open(tmp_path / "orders", migrate=True)


@pytest.mark.slow
def test_a_payload_that_fits_no_frame_is_refused_with_its_lsn():
    refused(on_disk(v3(1, 1, b"x") + v3(2, 1, bytes((256 << 20) - 100))), InvalidInput, SPOOL, "lsn 2 ")


@pytest.mark.parametrize("name", ["notes.txt", "00000000000000000007.log", "mark"])
def test_a_folder_with_anything_else_in_it_is_left_alone(name):
    disk = on_disk(MIXED)
    disk.make_folders(FOLDER)
    disk.write_new(f"{FOLDER}/{name}", [b"mine"])
    refused(disk, InvalidInput, FOLDER, name)


def test_records_and_slots_of_a_log_without_its_identity_are_left_alone():
    disk = SimulatedDisk()
    with open_on(disk, path=FOLDER) as wal:
        wal.append(b"mine")
    disk.remove(f"{FOLDER}/log.json")
    for row in disk.scan(FOLDER):
        if row.name.endswith((".index", "mark")):
            disk.remove(f"{FOLDER}/{row.name}")
    refused(on_disk(MIXED, disk=disk), InvalidInput, "00000000000000000000.log")
    disk.remove(f"{FOLDER}/00000000000000000000.log")
    disk.remove(f"{FOLDER}/slots.json")
    write_slots_file(FOLDER, SlotsFile(SeededChance(3).uuid(), 7), disk=disk)
    refused(disk, InvalidInput, "slots.json")


def test_an_empty_folder_and_the_rest_of_an_interrupted_creation_are_no_obstacle():
    empty = on_disk(MIXED)
    empty.make_folders(FOLDER)
    begun = SimulatedDisk()
    with open_on(begun):
        pass
    for name in ("log.json", "mark", "00000000000000000000.index"):
        begun.remove(f"{FOLDER}/{name}")
    begun.write_new(f"{FOLDER}/log.json.new", [b"half"])
    on_disk(MIXED, disk=begun)
    for disk in (empty, begun):
        with open_on(disk) as wal:
            assert all_of(wal) == RECORDS
            assert f"{FOLDER}/log.json.new" not in disk.files()


def test_a_folder_in_which_another_process_makes_a_log_is_left_to_it():
    disk = on_disk(MIXED)
    disk.make_folders(FOLDER)
    with disk.try_locked(f"{FOLDER}/lock"):
        refused(disk, Fenced, FOLDER)


# --- slots -----------------------------------------------------------------------------------------------------


def test_slots_come_along_and_pin():
    disk = on_disk(MIXED, MIXED_SLOTS)
    with open_on(disk) as wal:
        behind, ended, older = wal.log.slots.list()
        assert (older.name, older.position, older.last_seen, older.invalid) == ("older", 8, 6000, None)
        assert (ended.invalid.reason, ended.invalid.at, ended.position) == (InvalidReason.HORIZON, 4, 1)
        assert (behind.holder, behind.epoch, behind.position) == ("x", 2, 3)
        assert wal.prune_through(10) == 8
    with open_on(disk) as wal:
        assert [slot.name for slot in wal.log.slots.list()] == ["behind", "ended", "older"]
    assert disk.read(SLOTS) == MIXED_SLOTS


def test_a_slot_that_needs_trimmed_records_is_invalid_and_reported(caplog):
    with open_on(on_disk(MIXED, MIXED_SLOTS)) as wal:
        behind = wal.log.slots.list()[0]
        assert (behind.invalid.reason, behind.invalid.at) == (InvalidReason.WAL_REMOVED, ManualClock().now())
    assert "Slot 'behind'" in caplog.text
    assert "'older'" not in caplog.text


def test_slots_at_the_very_start_and_end_are_valid():
    with open_on(on_disk(MIXED, [{"id": "start", "position": 6}, {"id": "end", "position": 10}])) as wal:
        assert [slot.pins for slot in wal.log.slots.list()] == [True, True]


def test_a_slot_past_the_end_proves_that_records_are_lost():
    refused(on_disk(MIXED, [{"id": "ahead", "position": 11}]), CorruptData, SLOTS, "'ahead' at 11", "ends at 10")
    refused(on_disk(v3(1, 1, b"x")[:9], [{"id": "ahead", "position": 1}]), CorruptData, "'ahead' at 1", "ends at 0")
    lost = {"id": "ahead", "position": 11, "invalid": {"reason": "horizon", "at": 1}}
    with open_on(on_disk(MIXED, [lost])) as wal:
        assert wal.log.slots.list()[0].position == 11


def test_an_empty_spool_continues_after_its_highest_slot():
    slots = [{"id": "a", "position": 5}, {"id": "b", "position": 7}]
    disk = on_disk(b"", slots)
    with open_on(disk) as wal:
        assert [slot.pins for slot in wal.log.slots.list()] == [False, True]
        assert wal.append(b"next") == 8
    with open_on(disk) as wal:
        assert (wal.oldest, wal.current) == (8, 8)
    refused(on_disk(b"", [{"id": "a", "position": U64}]), InvalidInput, SLOTS, f"{U64:,}")


@pytest.mark.parametrize("slots", [b"", b"{}", b'{"slots": [', MIXED_SLOTS[:-1], b'{"slots": [{"id": "a"}]}'])
def test_damaged_slots_are_an_error_and_never_none(slots):
    refused(on_disk(MIXED, slots), CorruptData, SLOTS)


def test_a_slot_whose_name_no_slot_may_have_is_refused():
    refused(on_disk(MIXED, [{"id": "a/b", "position": 8}]), InvalidInput, SLOTS, "'a/b'")


# --- two at once -----------------------------------------------------------------------------------------------


class Overtaken(SimulatedDisk):
    """Another process migrates while this one waits for the lock."""

    overtaker = None

    @contextlib.contextmanager
    def locked(self, path):
        other, self.overtaker = self.overtaker, None
        if other is not None:
            other()
        with super().locked(path):
            yield


def test_the_second_migration_finds_it_done():
    disk = on_disk(MIXED, MIXED_SLOTS, disk=Overtaken())
    clock = ManualClock()
    disk.overtaker = lambda: migrate.migrate_spool(FOLDER, env=Env(clock, disk, SeededChance(1)))
    migrate.migrate_spool(FOLDER, env=Env(clock, disk, SeededChance(2)))
    with open_on(disk) as wal:
        assert wal.log.log_id == SeededChance(1).uuid()
        assert all_of(wal) == RECORDS


def test_threads_that_migrate_at_once_make_one_log(tmp_path):
    folder = str(tmp_path / "orders")
    Path(f"{folder}.logical.wal").write_bytes(MIXED)
    failures = []

    def run(seed):
        try:
            migrate.migrate_spool(folder, env=Env(disk=DISK, clock=ManualClock(), chance=SeededChance(seed)))
        except Exception as error:  # noqa: BLE001 - whatever it is
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with WriteAheadLog.open(folder) as wal:
        assert all_of(wal) == RECORDS
    assert {path.name for path in tmp_path.iterdir()} == {"orders", "orders.logical.wal", "orders.migrating.lock"}


@pytest.mark.parametrize("path", [SPOOL, SLOTS])
@pytest.mark.parametrize("renumber", [False, True])
def test_a_spool_that_is_written_meanwhile_is_refused_until_its_program_has_stopped(path, renumber):
    class Busy(SimulatedDisk):
        """Another program writes once more, while the log is being filled."""

        def open_append(self, name):
            if ".migrating" in name and not self.has_written:
                self.has_written = True
                replace_file(self, path, b"".join(written[path]), temporary=f"{path}.new")
            return super().open_append(name)

    spool = v3(1, 1000, b"one") + v3(3 if renumber else 2, 1000, b"two")
    slots = {"slots": [{"id": "a", "position": 1}]}
    written = {
        SPOOL: [spool, v3(4 if renumber else 3, 1000, b"acknowledged since")],
        SLOTS: [json.dumps({"slots": [{"id": "a", "position": 2}]}).encode()],
    }
    disk = on_disk(spool, slots["slots"], disk=Busy())
    disk.has_written = False
    with pytest.raises(Fenced, match="is written by another program: stop that, and migrate again"):
        open_on(disk, renumber=renumber)
    assert not [name for name in disk.files() if name.startswith((f"{FOLDER}/", f"{FOLDER}.migrating/"))]
    with open_on(disk, renumber=renumber) as wal:
        assert [record[3] for record in all_of(wal)][2:] == ([b"acknowledged since"] if path == SPOOL else [])


# --- crashes ---------------------------------------------------------------------------------------------------


class Migration:
    """Lays a spool down, migrates it and appends; notes what was promised or seen."""

    def __init__(self, *, begun=False):
        self.begun = begun

    def __call__(self, disk, notes):
        disk.make_folders("/data")
        if SPOOL not in disk.files():
            disk.remove(SLOTS)
            disk.write_new(SLOTS, [MIXED_SLOTS])
            disk.sync_folder("/data")
            if self.begun:
                disk.make_folders(FOLDER)
                disk.remove(f"{FOLDER}/slots.json")
                write_slots_file(FOLDER, SlotsFile(SeededChance(9).uuid(), 0), disk=disk)
            replace_file(disk, SPOOL, MIXED, temporary=f"{SPOOL}.laid")
        with open_on(disk) as wal:
            notes.append("migrated")
            while wal.current < 11:
                notes.append(wal.append(b"more", timestamp=9000))

    def check(self, disk, notes):
        if SPOOL not in disk.files():
            assert not notes
            return
        assert disk.read(SPOOL) == MIXED
        assert disk.read(SLOTS) == MIXED_SLOTS
        if f"{FOLDER}/log.json" not in disk.files():
            assert not notes
            before = disk.files()
            with pytest.raises(InvalidInput):
                open_on(disk, migrate=False)
            assert disk.files() == before
            return
        with open_on(disk, migrate=False) as wal:
            records = all_of(wal)
            assert records[: len(RECORDS)] == RECORDS
            assert records[len(RECORDS) :] == [(5, lsn, 9000, b"more") for lsn in range(11, wal.current + 1)]
            assert wal.current >= max([note for note in notes if note != "migrated"], default=10)
            assert [(slot.name, slot.position, slot.pins) for slot in wal.log.slots.list()] == [
                ("behind", 3, False),
                ("ended", 1, False),
                ("older", 8, True),
            ]
            notes.append("migrated")
            notes.append(wal.current)


@pytest.fixture
def _quiet(caplog):
    """Do not log warnings: each of thousands of torn tails would be one."""
    caplog.set_level(logging.ERROR)


def explored(capsys, what, found):
    with capsys.disabled():
        print(f"\nmigration, {what}: {found}")
    return found.states


@pytest.mark.matrix
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("every", sampled(15))
def test_a_crash_anywhere_leaves_no_log_or_all_of_it(capsys, every):
    work = Migration()
    found = crash_everywhere(work, work.check, seeds=(0,), limit=4, every=every)
    assert explored(capsys, "crashed", found) > 200 / every


@pytest.mark.matrix
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("every", sampled(9))
def test_a_failure_anywhere_leaves_no_log_or_all_of_it(capsys, every):
    work = Migration()
    modes = (CrashMode.NOTHING, CrashMode.SCRAPS)
    found = fail_everywhere(work, work.check, modes=modes, seeds=(0,), limit=1, every=every)
    assert explored(capsys, "one operation fails", found) > 50 / every


@pytest.mark.matrix
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("every", sampled(9))
def test_a_full_disk_anywhere_leaves_no_log_or_all_of_it(capsys, every):
    work = Migration()
    found = fill_everywhere(work, work.check, step=512 * every, seeds=(0,), limit=2)
    assert explored(capsys, "the disk fills", found) > 30 / every


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("begun", [False, True])
def test_two_crashes_leave_no_log_or_all_of_it(begun, capsys):
    work = Migration(begun=begun)
    found = crash_everywhere(work, work.check, seeds=(0,), limit=4, again=4)
    assert explored(capsys, "crashed twice", found) > 200


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("begun", [False, True])
def test_failures_and_full_disks_leave_no_log_or_all_of_it(begun, capsys):
    work = Migration(begun=begun)
    assert explored(capsys, "one operation fails", fail_everywhere(work, work.check, then=1)) > 200
    assert explored(capsys, "the disk fills", fill_everywhere(work, work.check, step=128)) > 100


@pytest.mark.matrix
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("every", sampled(9))
def test_a_crash_while_a_folder_that_was_begun_gives_way_loses_nothing(capsys, every):
    work = Migration(begun=True)
    found = crash_everywhere(work, work.check, modes=(CrashMode.SECTORS,), seeds=(0,), limit=2, every=every)
    assert explored(capsys, "into a begun folder", found) > 40 / every


def test_a_migration_that_returned_is_durable():
    disk = on_disk(MIXED, MIXED_SLOTS)
    migrate.migrate_spool(FOLDER, env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(1)))
    disk.crash(CrashMode.NOTHING)
    with open_on(disk, create=False, migrate=False) as wal:
        assert all_of(wal) == RECORDS
        assert len(wal.log.slots.list()) == 3


@pytest.mark.matrix
def test_a_failed_migration_leaves_no_files_and_can_be_repeated():
    disk = on_disk(MIXED)
    number = 0
    while True:
        twin = disk.fork()
        twin.interrupt(number, StorageError("no"))
        with contextlib.suppress(StorageError):
            open_on(twin).close()
            break
        assert not [path for path in twin.folders() if path.endswith(".migrating")] or number == 0
        with open_on(twin) as wal:
            assert all_of(wal) == RECORDS
        number += 1
    assert number > 20


def test_records_are_arrow_and_hold_a_value_only():
    with open_on(on_disk(MIXED)) as wal:
        table = pa.Table.from_batches(wal.log.read())
        assert table.column("key").null_count == table.column("headers").null_count == 4
        assert set(table.column("op").to_pylist()) == {0}
