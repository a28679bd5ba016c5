"""Exporting a log as a spool: what a round trip keeps, what is refused, and a crash at every disk operation."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from strandline.compat.spool import export
from strandline.compat.spool.export import export_spool
from strandline.compat.spool.format import LegacyEnding, LegacyScanner, decode_slots
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import AlreadyExists, CursorExpired, DiskFull, Fenced, InvalidInput, NotFound, StorageError
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Cursor
from strandline.model.records import Op, record_batch
from strandline.model.retention import InvalidReason
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.simdisk import SimulatedDisk, crash_everywhere, fail_everywhere, fill_everywhere
from tests.spools import read_spool

FOLDER, OUT = "/data/orders", "/out/old"
SPOOL, SLOTS = f"{OUT}.logical.wal", f"{OUT}.logical.slots.json"


def open_on(disk, path=FOLDER, **options):
    env = Env(disk=disk, clock=ManualClock(), chance=SeededChance(1))
    return WriteAheadLog.open(path, env=env, **{"background": False, **options})


def filled(disk):
    """A log with singles, batches, several files and terms, from lsn 4 on; and slots of every kind."""
    wal = open_on(disk, roll_bytes=1500)
    wal.append(b"three", lsn=3, term=2, timestamp=1_000)
    wal.append(b"four", timestamp=2_000)
    wal.append_many([b"", b"six", b"seven" * 100])
    wal.append(b"eight", term=7, timestamp=3_000)
    wal.prune_through(3)
    log = wal.log
    log.slots.create("plain", 5)
    log.slots.create("held", 4)
    log.slots.create("gone", 4)
    log.slots.invalidate("gone", InvalidReason.IDLE_TIMEOUT)
    log.slots.claim("held", "someone").advance(Cursor(log.log_id, 8))
    return wal


def all_of(wal):
    return [tuple(record) for record in wal.read_since(wal.oldest - 1, 10**6)]


def made(disk):
    return {path for path in disk.files() if path.startswith("/out")}


@pytest.fixture
def disk():
    disk = SimulatedDisk()
    disk.make_folders("/out")
    return disk


# --- the round trip --------------------------------------------------------------------------------------------


def test_a_spool_that_is_migrated_again_is_the_same_log(disk):
    with filled(disk) as wal:
        found = export_spool(wal.log, OUT, env=Env(disk=disk))
        records, slots = all_of(wal), wal.log.slots.list()
    assert [record[:2] for record in records] == [(2, 4), (2, 5), (2, 6), (2, 7), (7, 8)]
    with open_on(disk, OUT, migrate=True) as back:
        assert all_of(back) == records
        assert back.log.slots.list() == slots
        assert (back.oldest, back.current, back.log.term) == (4, 8, 7)
    assert (found.path, found.slots_path, found.first, found.last, found.records, found.slots) == (
        SPOOL, SLOTS, 4, 8, 5, 3,
    )  # fmt: skip
    assert found.size == len(disk.read(SPOOL))


def test_an_export_is_a_spool_of_version_3_frames_and_nothing_else(disk):
    with filled(disk) as wal:
        export_spool(wal.log, OUT, env=Env(disk=disk))
        scanner = LegacyScanner(memoryview(disk.read(SPOOL)))
        assert {frame.version for frame in scanner} == {3}
        assert scanner.stop.ending is LegacyEnding.CLEAN
    assert made(disk) == {SPOOL, SLOTS}


def test_slots_have_the_names_that_older_programs_know(disk):
    with filled(disk) as wal:
        export_spool(wal.log, OUT, env=Env(disk=disk))
        gone, held, plain = json.loads(disk.read(SLOTS))["slots"]
        assert decode_slots(disk.read(SLOTS), SLOTS, now=0) == wal.log.slots.list()
    now = ManualClock().now() // 1000
    assert (plain["id"], plain["restart_lsn"], plain["last_seen_at_unix_ms"]) == ("plain", 5, now)
    assert (held["holder"], held["restart_lsn"]) == ("someone", 8)
    assert (gone["invalidation_reason"], gone["invalidated_at_unix_ms"]) == ("idle-timeout", now)


def test_an_empty_log_becomes_an_empty_spool(disk):
    with open_on(disk) as wal:
        found = export_spool(wal.log, OUT, env=Env(disk=disk))
    assert (found.records, found.first, found.last, disk.read(SPOOL)) == (0, 1, 0, b"")


def test_times_are_kept_to_the_millisecond(disk):
    with open_on(disk) as wal:
        values = {"ops": [Op.PUT], "keys": [None], "values": [b"x"]}
        wal.append_batch(record_batch(timestamps=[1_234_567], **values))
        export_spool(wal.log, OUT, env=Env(disk=disk))
    assert read_spool(memoryview(disk.read(SPOOL))).records[0].timestamp == 1234


def test_a_reader_in_another_process_can_export_while_the_log_is_written(tmp_path):
    folder, out = str(tmp_path / "orders"), tmp_path / "old.logical.wal"
    with WriteAheadLog.open(folder) as wal:
        wal.append_many([b"%d" % number for number in range(1000)])
        found = export_spool(WalReader(folder), out)
        records = all_of(wal)
    assert (found.path, found.records) == (str(out), 1000)
    with WriteAheadLog.open(tmp_path / "old", migrate=True) as back:
        assert all_of(back) == records


def test_a_relative_name_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with WriteAheadLog.open("orders") as wal:
        wal.append(b"x")
        export_spool(wal.log, "old")
    assert Path("old.logical.wal").stat().st_size > 0
    assert Path("old.logical.slots.json").exists()


def test_records_that_are_appended_meanwhile_stay_out_and_no_slot_is_past_the_end(disk):
    with filled(disk) as wal:

        class Busy:
            """A log to which another appends and acknowledges between any two reads."""

            def __getattr__(self, name):
                found = getattr(wal.log, name)
                if name in ("slots", "bounds", "plan"):
                    wal.append(b"more")
                    wal.log.slots.claim("held", "someone").advance(wal.log.end())
                return found

        found = export_spool(Busy(), OUT, env=Env(disk=disk))
        assert found.last < wal.current
    with open_on(disk, OUT, migrate=True) as back:
        assert back.current == found.last
        assert [slot.name for slot in back.log.slots.list() if slot.pins] == ["held", "plain"]


def test_an_export_is_written_in_pieces_and_reports_its_progress(disk, monkeypatch):
    monkeypatch.setattr(export, "_PIECE", 1000)
    with open_on(disk) as wal:
        wal.append_many([b"x" * 100] * 95)
        told = []
        export_spool(wal.log, OUT, env=Env(disk=disk), on_progress=told.append)
    assert told == [*range(10, 100, 10), 95]
    writes = [call for call in disk.calls if call.path.startswith(SPOOL) and call.action == "write"]
    assert len(writes) == 10


def test_the_time_between_pieces_is_bounded_for_empty_payloads_too(disk, monkeypatch):
    monkeypatch.setattr(export, "_PARTS", 30)
    with open_on(disk) as wal:
        wal.append_many([b""] * 25)
        told = []
        export_spool(wal.log, OUT, env=Env(disk=disk), on_progress=told.append)
    assert told == [10, 20, 25]


def as_the_older_program_reads(data):
    """The slots of a spool as older programs read them: one without an id or an lsn is dropped silently."""
    slots = json.loads(data)["slots"]
    needed = {"id": str, "restart_lsn": int, "confirmed_lsn": int}
    whole = [slot for slot in slots if all(isinstance(slot.get(name), kind) for name, kind in needed.items())]
    return {slot["id"]: slot for slot in whole}


def test_the_older_program_drops_no_slot_of_an_export(disk):
    with filled(disk) as wal:
        export_spool(wal.log, OUT, env=Env(disk=disk))
        slots = wal.log.slots.list()
    found = as_the_older_program_reads(disk.read(SLOTS))
    assert {name: slot["confirmed_lsn"] for name, slot in found.items()} == {slot.name: slot.position for slot in slots}
    assert {name: slot["restart_lsn"] for name, slot in found.items()} == {slot.name: slot.position for slot in slots}
    assert found["gone"]["invalidation_reason"] == "idle-timeout"
    assert found["gone"]["invalidated_at_unix_ms"] == next(slot for slot in slots if slot.invalid).invalid.at // 1000
    assert found["held"]["last_seen_at_unix_ms"] == slots[1].last_seen // 1000


@pytest.mark.matrix
def test_every_slot_comes_back_from_an_export_as_it_was(disk):
    with filled(disk) as wal:
        wal.log.slots.create("second", 6)
        wal.log.slots.claim("second", "other")
        wal.log.slots.claim("second", "another")
        export_spool(wal.log, OUT, env=Env(disk=disk))
        slots = wal.log.slots.list()
    with open_on(disk, OUT, migrate=True) as back:
        assert back.log.slots.list() == slots


def test_slots_that_the_older_program_has_written_again_keep_position_and_invalidation(disk):
    with filled(disk) as wal:
        export_spool(wal.log, OUT, env=Env(disk=disk))
        slots = wal.log.slots.list()
    own = (
        "id",
        "restart_lsn",
        "confirmed_lsn",
        "last_seen_at_unix_ms",
        "invalidation_reason",
        "invalidated_at_unix_ms",
    )
    rewritten = [
        {name: float(slot[name]) if isinstance(slot[name], int) else slot[name] for name in own & slot.keys()}
        for slot in as_the_older_program_reads(disk.read(SLOTS)).values()
    ]
    disk.remove(SLOTS)
    disk.write_new(SLOTS, [json.dumps({"slots": rewritten}).encode()])
    with open_on(disk, OUT, migrate=True) as back:
        found = back.log.slots.list()
    assert [(slot.name, slot.position, slot.invalid and slot.invalid.reason) for slot in found] == [
        (slot.name, slot.position, slot.invalid and slot.invalid.reason) for slot in slots
    ]


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"keys": [None, b"k"]},
        {"headers": [None, [("h", b"v")]]},
        {"ops": [Op.PUT, Op.DELETE]},
        {"ops": [Op.PUT, Op.PURGE]},
        {"values": [b"x", None]},
    ],
)
def test_a_record_that_is_more_than_a_value_is_refused_with_its_offset(disk, more):
    plain = {"timestamps": [1, 1], "ops": [Op.PUT] * 2, "keys": [None] * 2, "values": [b"x"] * 2}
    with open_on(disk) as wal:
        wal.append_batch(record_batch(**plain))
        wal.append_batch(record_batch(**{**plain, **more}))
        with pytest.raises(InvalidInput, match=r"Offset 3 \(lsn 4\)"):
            export_spool(wal.log, OUT, env=Env(disk=disk))
    assert made(disk) == set()


def test_a_spool_in_a_folder_that_is_not_there_is_refused_by_the_name_of_that_folder(tmp_path):
    with WriteAheadLog.open(tmp_path / "orders") as wal:
        wal.append(b"x")
        with pytest.raises(NotFound, match=r"There is no folder \S*/absent to write old.logical.wal"):
            export_spool(wal.log, tmp_path / "absent" / "old")


def test_a_time_before_1970_is_refused_with_its_lsn(disk):
    with open_on(disk) as wal:
        wal.append_batch(record_batch(timestamps=[-1], ops=[Op.PUT], keys=[None], values=[b"x"]))
        with pytest.raises(InvalidInput, match="lsn 1 "):
            export_spool(wal.log, OUT, env=Env(disk=disk))
    assert made(disk) == set()


@pytest.mark.parametrize("path", [SPOOL, SLOTS])
def test_an_existing_file_is_never_replaced(disk, path):
    disk.write_new(path, [b"mine"])
    with filled(disk) as wal, pytest.raises(AlreadyExists, match=path):
        export_spool(wal.log, OUT, env=Env(disk=disk))
    assert made(disk) == {path}
    assert disk.read(path) == b"mine"


def test_a_log_that_was_used_and_retains_nothing_is_refused(disk):
    with open_on(disk) as wal:
        wal.append_many([b"x"] * 3)
        wal.prune_through(3)
        with pytest.raises(InvalidInput, match="continues at lsn 4"):
            export_spool(wal.log, OUT, env=Env(disk=disk))
    assert made(disk) == set()


def test_two_cannot_write_the_same_spool(disk):
    with filled(disk) as wal, disk.try_locked(f"{SPOOL}.exporting"), pytest.raises(Fenced, match=SPOOL):
        export_spool(wal.log, OUT, env=Env(disk=disk))


class Overtaken(SimulatedDisk):
    """Another process writes the spool before this one has its lock."""

    overtaker = None

    @contextlib.contextmanager
    def try_locked(self, path):
        if path.endswith(".exporting") and self.overtaker is not None:
            other, self.overtaker = self.overtaker, None
            other()
        with super().try_locked(path) as is_mine:
            yield is_mine


def test_a_late_creator_does_not_replace_what_another_has_made():
    disk = Overtaken()
    disk.make_folders("/out")
    with filled(disk) as wal:
        disk.overtaker = lambda: export_spool(wal.log, OUT, env=Env(disk=disk))
        with pytest.raises(AlreadyExists, match=SPOOL):
            export_spool(wal.log, OUT, env=Env(disk=disk))
    assert made(disk) == {SPOOL, SLOTS}


def test_an_export_of_a_log_that_is_trimmed_meanwhile_is_refused_and_leaves_nothing(disk, monkeypatch):
    monkeypatch.setattr("strandline.log.read.reading._PLANNED", 1)
    monkeypatch.setattr(export, "_PARTS", 1)
    with WalLog.open(
        FOLDER, roll_bytes=0, tail_bytes=0, background=False, env=Env(disk=disk, clock=ManualClock())
    ) as log:
        for number in range(5):
            log.append_value(b"%d" % number).result()
        with pytest.raises(CursorExpired):
            export_spool(log, OUT, env=Env(disk=disk), on_progress=lambda done: log.trim(4) if done == 2 else None)
    assert made(disk) == set()


# --- crashes ---------------------------------------------------------------------------------------------------


class Exporting:
    """Exports a log that is on another disk; notes when it was promised. A spool that is there is whole."""

    def __init__(self):
        self.wal = filled(SimulatedDisk())
        self.records = [
            (record.term, record.lsn, record.timestamp, record.payload) for record in self.wal.read_since(3)
        ]

    def __call__(self, disk, notes):
        disk.make_folders("/out")
        if SPOOL not in disk.files():
            export_spool(self.wal.log, OUT, env=Env(disk=disk))
            notes.append("exported")

    def check(self, disk, notes):
        if SPOOL not in disk.files():
            assert not notes
            return
        assert [tuple(record) for record in read_spool(memoryview(disk.read(SPOOL))).records] == self.records
        assert decode_slots(disk.read(SLOTS), SLOTS, now=0) == self.wal.log.slots.list()


def explored(capsys, what, found):
    with capsys.disabled():
        print(f"\nexport, {what}: {found}")
    return found.states


@pytest.mark.matrix
def test_a_crash_anywhere_leaves_no_spool_or_all_of_it_with_its_slots(capsys, monkeypatch):
    monkeypatch.setattr(export, "_PIECE", 500)  # so that there are several writes
    work = Exporting()
    assert explored(capsys, "crashed", crash_everywhere(work, work.check, again=3)) > 50


@pytest.mark.matrix
def test_a_failure_anywhere_leaves_no_spool_or_all_of_it_with_its_slots(capsys):
    work = Exporting()
    assert explored(capsys, "one operation fails", fail_everywhere(work, work.check, then=2)) > 20


@pytest.mark.matrix
def test_a_full_disk_anywhere_leaves_no_spool_or_all_of_it_with_its_slots(capsys):
    work = Exporting()
    assert explored(capsys, "the disk fills", fill_everywhere(work, work.check, step=64)) > 5


def test_leftovers_of_an_interrupted_export_are_no_part_of_the_next(disk):
    disk.write_new(f"{SPOOL}.exporting", [b"half"])
    with filled(disk) as wal:
        export_spool(wal.log, OUT, env=Env(disk=disk))
    assert len(read_spool(memoryview(disk.read(SPOOL))).records) == 5


def test_a_failed_export_leaves_nothing_and_can_be_repeated(disk):
    with filled(SimulatedDisk()) as wal:
        number = 0
        while True:
            twin = disk.fork()
            twin.interrupt(number, StorageError("no"))
            try:
                export_spool(wal.log, OUT, env=Env(disk=twin))
                break
            except StorageError:
                assert f"{SPOOL}.exporting" not in twin.files()
            if SPOOL not in twin.files():
                export_spool(wal.log, OUT, env=Env(disk=twin))
            assert len(read_spool(memoryview(twin.read(SPOOL))).records) == 5
            number += 1
    assert number > 5


def test_a_full_disk_is_a_clear_error(disk):
    with filled(disk) as wal:
        disk.capacity = sum(map(len, disk.files().values())) + 100
        with pytest.raises(DiskFull, match=SPOOL):
            export_spool(wal.log, OUT, env=Env(disk=disk))
        disk.capacity = None
    assert made(disk) == set()
