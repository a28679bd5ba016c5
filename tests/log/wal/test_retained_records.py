"""Retained records of a write-ahead log: trimming, slots, and the state after opening."""

from __future__ import annotations

import os
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import (
    CorruptData,
    CursorExpired,
    Fenced,
    InvalidInput,
    NotALog,
    NotFound,
    NotReady,
    UnsupportedVersion,
    WrongKind,
)
from strandline.followers.stores.append_log import AppendLogStore
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import data_name
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Bounds, Cursor
from strandline.model.retention import InvalidReason
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.keyed_stores import content as content_of
from strandline.testing.simdisk import CrashMode, SimulatedDisk
from tests.contracts.logs import append, records
from tests.contracts.logs.batches import SOON
from tests.disk_doubles import RecordingDisk
from tests.log.wal.workload import FOLDER, open_on, payload


def lsns(found):
    return [record.lsn for record in found]


class TestPruning:
    def test_trimming_returns_what_it_reached_and_remembers_the_start_exactly(self, tmp_path):
        with WriteAheadLog.open(tmp_path) as wal:
            wal.append_many([b"%d" % number for number in range(10)])
            assert wal.prune_through(4) == 4
            assert wal.prune_through(2) == 4
            assert (wal.oldest, wal.current) == (5, 10)
        with WriteAheadLog.open(tmp_path) as wal:
            assert (wal.oldest, wal.current) == (5, 10)
            assert lsns(wal.read_since(4)) == [5, 6, 7, 8, 9, 10]

    def test_whole_files_are_dropped(self, tmp_path):
        with WriteAheadLog.open(tmp_path, roll_bytes=2000, background=False) as wal:
            for _ in range(30):
                wal.append(bytes(500))
            files = len(list(tmp_path.glob("*.log")))
            assert files > 5
            wal.prune_through(15)
            assert len(list(tmp_path.glob("*.log"))) < files
            assert lsns(wal.read_since(15)) == list(range(16, 31))
            first = min(tmp_path.glob("*.log")).name
            assert int(first[:20]) <= 15
            assert not [path for path in tmp_path.glob("*.index") if not path.with_suffix(".log").exists()]

    def test_the_end_never_moves_back_not_even_when_everything_is_trimmed(self, tmp_path):
        with WriteAheadLog.open(tmp_path) as wal:
            wal.append_many([b"a", b"b", b"c"])
            assert wal.prune_through(99) == 3
            assert (wal.oldest, wal.current) == (4, 3)
        for _ in range(2):
            with WriteAheadLog.open(tmp_path) as wal:
                assert (wal.oldest, wal.current) == (4, 3)
                assert len(list(tmp_path.glob("*.log"))) == 1
        with WriteAheadLog.open(tmp_path) as wal:
            assert wal.append(b"d") == 4

    def test_records_that_a_slot_needs_are_trimmed_only_on_request(self, tmp_path):
        with WriteAheadLog.open(tmp_path) as wal:
            wal.append_many([b"%d" % number for number in range(10)])
            wal.log.slots.create("billing", 4)
            assert wal.prune_through(8) == 4
            assert wal.log.trim(8, beyond_slots=True) == 8
            (slot,) = wal.log.slots.list()
            assert slot.invalid is not None
            assert slot.invalid.reason == InvalidReason.WAL_REMOVED
        with WriteAheadLog.open(tmp_path) as wal:
            assert wal.log.slots.list() == [slot]

    def test_a_plan_made_before_a_trim_finds_its_file_gone_and_a_new_one_is_expired(self, tmp_path):
        with WalLog.open(str(tmp_path), roll_bytes=0, tail_bytes=0, background=False) as log:
            for number in range(4):
                log.append_value(b"%d" % number).result()
            spans = log.plan(log.start())
            log.trim(3)
            with pytest.raises(NotFound, match="trimmed"):
                spans[0].fetch()
            with pytest.raises(CursorExpired):
                list(log.read(Cursor(log.log_id, 0)))


class TestSlots:
    @pytest.fixture
    def recorded(self, tmp_path):
        disk = RecordingDisk()
        with WalLog.open(str(tmp_path), env=Env(disk=disk)) as log:
            log.append_batch(records(*[b"x"] * 10)).result(SOON)
            log.slots.create("billing", 0)
            yield log, disk

    def test_a_pull_costs_no_sync(self, recorded):
        log, disk = recorded
        slot = log.slots.claim("billing", "me")
        before = len(disk.events)
        for position in range(1, 11):
            slot.advance(Cursor(log.log_id, position))
            slot.touch()
        assert disk.events[before:] == []
        assert log.slots.floor() == 10

    @pytest.mark.parametrize(
        "change",
        [
            lambda log: log.slots.create("other", 3),
            lambda log: log.slots.claim("billing", "someone"),
            lambda log: log.slots.reset("billing", 2),
            lambda log: log.slots.drop("billing"),
            lambda log: log.slots.invalidate("billing", InvalidReason.HORIZON),
            lambda log: log.trim(5, beyond_slots=True),
        ],
    )
    def test_changes_that_must_not_be_lost_are_durable_before_the_call_returns(self, recorded, tmp_path, change):
        log, _ = recorded
        change(log)
        assert WalReader(str(tmp_path)).slots.list() == log.slots.list()

    def test_positions_are_written_before_a_trim_and_on_closing(self, recorded, tmp_path):
        log, _ = recorded
        slot = log.slots.claim("billing", "me")
        slot.advance(Cursor(log.log_id, 4))
        assert WalReader(str(tmp_path)).slots.list()[0].position == 0
        assert log.trim(9) == 4
        assert WalReader(str(tmp_path)).slots.list()[0].position == 4
        slot.advance(Cursor(log.log_id, 7))
        log.close()
        assert WalReader(str(tmp_path)).slots.list()[0].position == 7

    @pytest.mark.parametrize("damage", ["", "{}", "nonsense", "flip", "missing", "another log"])
    def test_a_damaged_slot_file_is_an_error_with_instructions_never_no_slots(self, recorded, tmp_path, damage):
        log, _ = recorded
        log.close()
        path = tmp_path / "slots.json"
        text = path.read_text()
        if damage == "missing":
            path.unlink()
        else:
            path.write_text({"flip": text.replace('"start": 0', '"start": 1'), "another log": text}.get(damage, damage))
        if damage == "another log":
            other = tmp_path / "other"
            WalLog.open(str(other)).close()
            path.write_text((other / "slots.json").read_text())
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
        for opened in (WalLog.open, lambda folder: WalReader(folder).slots.list()):
            with pytest.raises(CorruptData, match="restore"):
                opened(str(tmp_path))
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


class TestOpening:
    def test_one_process_writes_and_the_error_names_it(self, tmp_path):
        with (
            WalLog.open(str(tmp_path)) as log,
            pytest.raises(Fenced, match=f"process {os.getpid()} on "),
        ):
            WalLog.open(str(tmp_path))
        log.close()
        WalLog.open(str(tmp_path)).close()

    def test_there_is_no_log_where_none_was_created(self, tmp_path):
        for opened in (lambda: WalLog.open(str(tmp_path / "x"), create=False), lambda: WalReader(str(tmp_path / "x"))):
            with pytest.raises(NotALog):
                opened()
        assert list(tmp_path.iterdir()) == []

    def test_an_unknown_version_refuses_to_open_and_changes_nothing(self, tmp_path):
        with WalLog.open(str(tmp_path)) as log:
            log.append_value(b"a").result(SOON)
        path = tmp_path / data_name(0)
        path.write_bytes(path.read_bytes() + b"RDLW\x09" + bytes(100))
        (tmp_path / "lock").write_bytes(b"")
        before = path.read_bytes()
        with pytest.raises(UnsupportedVersion, match="version 9"):
            WalLog.open(str(tmp_path))
        assert path.read_bytes() == before

    def test_a_log_without_its_identity_is_not_created_over(self, tmp_path):
        with WalLog.open(str(tmp_path)) as log:
            log.append_value(b"a").result(SOON)
        (tmp_path / "log.json").unlink()
        with pytest.raises(CorruptData, match="restore"):
            WalLog.open(str(tmp_path))

    def test_a_log_without_its_files_is_an_error(self, tmp_path):
        WalLog.open(str(tmp_path)).close()
        (tmp_path / data_name(0)).unlink()
        with pytest.raises(CorruptData, match="restore"):
            WalLog.open(str(tmp_path))

    def test_a_file_of_another_log_is_refused(self, tmp_path):
        for name in ("one", "two"):
            with WalLog.open(str(tmp_path / name)) as log:
                log.append_value(b"a").result(SOON)
        (tmp_path / "one" / data_name(0)).write_bytes((tmp_path / "two" / data_name(0)).read_bytes())
        with pytest.raises(CorruptData, match="does not belong here"):
            WalLog.open(str(tmp_path / "one"))

    def test_a_reader_does_not_guess_after_the_machine_stopped(self):
        disk = SimulatedDisk()
        log = open_on(disk)
        log.append_value(payload(0)).result()
        seen = WalReader(FOLDER, env=Env(disk=disk, clock=ManualClock()), boot=UUID(int=0))
        assert seen.bounds() == Bounds(0, 1)
        disk.crash(CrashMode.SCRAPS)
        after = WalReader(FOLDER, env=Env(disk=disk, clock=ManualClock()), boot=UUID(int=1))
        with pytest.raises(NotReady, match="open it for writing once"):
            after.bounds()
        open_on(disk).close()
        assert after.bounds() == Bounds(0, 1)
        disk.crash(CrashMode.NOTHING)  # it was closed: its end is known even now
        assert WalReader(FOLDER, env=Env(disk=disk, clock=ManualClock()), boot=UUID(int=2)).bounds() == Bounds(0, 1)

    def test_a_reader_refuses_to_write(self, tmp_path):
        WalLog.open(str(tmp_path)).close()
        reader = WalReader(str(tmp_path))
        for refused in (
            lambda: append(reader, b"a", number=0),
            lambda: reader.slots.create("a", 0),
            lambda: reader.slots.claim("a", "b"),
            lambda: reader.slots.reset("a", 0),
            lambda: reader.slots.drop("a"),
        ):
            with pytest.raises(InvalidInput, match="opened for reading"):
                refused()

    @pytest.mark.parametrize("option", ["roll_bytes", "tail_bytes", "pending_bytes"])
    def test_sizes_are_not_negative(self, tmp_path, option):
        with pytest.raises(InvalidInput):
            WalLog.open(str(tmp_path), **{option: -1})


@pytest.mark.parametrize("as_reader", [False, True])
def test_following_a_write_ahead_log_is_as_following_any_other(tmp_path, as_reader):
    folder = str(tmp_path / "log")
    with WalLog.open(folder) as log:
        log.append_batch(pa.table({"key": [b"a", b"b", b"a"], "value": [b"1", b"2", b"3"]})).result(SOON)
        with AppendLogStore.open(str(tmp_path / "fold")) as store:
            if as_reader:
                assert sl.follow(WalReader(folder), store, upto="end").next == 3
            else:
                assert sl.follow(log, store, slot="fold", upto="end").next == 3
                assert log.slots.floor() == 3
            assert content_of(store) == {b"a": b"3", b"b": b"2"}


def test_opening_a_write_ahead_log_as_an_object_log_says_how_to_open_it(tmp_path):
    WalLog.open(str(tmp_path)).close()
    with pytest.raises(WrongKind, match="open it as wal:///path/to/folder"):
        sl.open(str(tmp_path))
    with pytest.raises(WrongKind, match="open it as wal:///path/to/folder"):
        sl.open(str(tmp_path), create=True)
    store = tmp_path / "object"
    sl.open(str(store), create=True)
    before = sorted(store.rglob("*"))
    with pytest.raises(InvalidInput, match=r"is an object log .* open it by its address"):
        sl.compat.WriteAheadLog.open(store)
    assert sorted(store.rglob("*")) == before
    sl.open(str(store))
