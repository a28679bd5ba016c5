"""Rewinding a write-ahead log: which records stay, which are quarantined, and every interruption."""

from __future__ import annotations

import contextlib
import logging
from itertools import count
from uuid import UUID

import pytest

from strandline.errors import (
    AlreadyExists,
    CorruptData,
    Diverged,
    Fenced,
    InvalidInput,
    NotALog,
    NotReady,
    OutOfOrder,
    StorageError,
)
from strandline.formats.wal.index import decode_index, new_chain
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import REWIND, data_name, firsts_in, index_name
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.recover.manual_repair import repair_log
from strandline.log.wal.recover.rewind import rewind
from strandline.log.wal.recover.verify import verify
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import Receipt, WriterId
from strandline.model.retention import InvalidReason
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM, Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Crash
from strandline.testing.simdisk import CrashMode, SimulatedDisk
from strandline.testing.simdisk.explore import _Explorer
from tests.contracts.logs import records
from tests.log.wal.workload import values
from tests.matrix_cases import sampled, some

WRITER = WriterId(UUID(int=7))
OTHER = WriterId(UUID(int=8))
END = 14
TERMS = [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3]


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


def opened(folder, **options):
    return WalLog.open(str(folder), **{"roll_bytes": 1500, "background": False, **options})


def build(log):
    """Records of three terms, in files of a few; two batches of numbered writers."""
    for at in range(2):
        log.append_value(b"%d" % at + bytes(400), term=1).result()
    log.append(records(b"2", b"3"), writer=WRITER, number=0).result()
    for at in range(4, 6):
        log.append_value(b"%d" % at + bytes(400), term=2).result()
    log.append(records(b"6", b"7", b"8"), writer=WRITER, number=1).result()
    for at in range(9, 12):
        log.append_value(b"%d" % at + bytes(600), term=3).result()
    log.append(records(b"12"), writer=OTHER, number=0).result()
    log.append_value(b"13").result()


@pytest.fixture
def folder(tmp_path):
    with opened(tmp_path / "log") as log:
        build(log)
    assert len(firsts_in(DISK.scan(str(tmp_path / "log")))) >= 4
    return tmp_path / "log"


def content(folder):
    return values(WalReader(str(folder)))


def is_clean(folder):
    found = verify(str(folder), env=SYSTEM)
    return not [finding.message for finding in found.findings]


class TestRewinding:
    @pytest.mark.parametrize("to", some(range(END), 5))
    def test_the_log_ends_there_and_what_came_after_is_a_log_of_its_own(self, folder, tmp_path, to):
        before = content(folder)
        aside = str(tmp_path / "aside")
        done = rewind(str(folder), to, quarantine=aside)
        cursor = Cursor(done.cursor.log_id, to, TERMS[to - 1] if to else 0)
        assert (done.quarantine, done.cursor, done.end, done.count) == (aside, cursor, END, END - to)
        assert content(folder) == {at: value for at, value in before.items() if at < to}
        assert content(aside) == {at: value for at, value in before.items() if at >= to}
        assert is_clean(folder)
        assert is_clean(aside)
        with opened(folder, create=False) as log, opened(aside, create=False) as kept:
            assert log.log_id == kept.log_id
            assert (log.end(), kept.bounds(), kept.term) == (cursor, Bounds(to, END), 3)
            assert log.append_value(b"new", term=4).result() == Receipt(to, 1)
            assert [log.term_at(at) for at in range(to + 1)] == [*TERMS[:to], 4]
            assert [kept.term_at(at) for at in range(to, END)] == TERMS[to:]
            assert values(log)[to] == b"new"
        with opened(folder, create=False) as log:
            assert log.bounds() == Bounds(0, to + 1)
        assert is_clean(folder)

    @pytest.mark.parametrize(
        ("to", "number"), [(0, None), (2, None), (3, None), (4, 0), (6, 0), (8, 0), (9, 1), (13, 1)]
    )
    def test_writers_are_remembered_as_of_then(self, folder, tmp_path, to, number):
        rewind(str(folder), to, quarantine=str(tmp_path / "aside"))
        for _ in range(2):  # as it was left, and as it is found again
            with opened(folder, create=False) as log:
                if number is not None:
                    assert log.append(records(b"x"), writer=WRITER, number=number).result().first == [2, 6][number]
                    with pytest.raises(OutOfOrder):
                        log.append(records(b"x"), writer=WRITER, number=number + 2)
        following = 0 if number is None else number + 1
        with opened(folder, create=False) as log:
            assert log.append(records(b"again"), writer=WRITER, number=following).result() == Receipt(to, 1)

    def test_of_a_batch_that_is_cut_the_records_below_belong_to_no_append(self, folder, tmp_path):
        rewind(str(folder), 7, quarantine=str(tmp_path / "aside"))
        with opened(folder, create=False) as log, opened(tmp_path / "aside", create=False) as aside:
            below = log.plan(Cursor(log.log_id, 6))[0].batch()
            assert (below.first, below.next, below.term, below.append) == (6, 7, 2, None)
            whole = aside.plan(aside.start())[0]
            assert (whole.first, whole.next) == (7, 9)
            assert (whole.batch().first, whole.batch().append) == (6, (WRITER, 1))
            assert below.timestamp == whole.batch().timestamp

    def test_a_log_that_ends_there_is_left_unchanged(self, folder, tmp_path):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        done = rewind(str(folder), END, quarantine=str(tmp_path / "aside"))
        assert (done.quarantine, done.count, done.cursor.next, done.cursor.term) == (None, 0, END, 3)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert not (tmp_path / "aside").exists()

    def test_the_same_again_is_a_no_op(self, folder, tmp_path):
        rewind(str(folder), 5, quarantine=str(tmp_path / "aside"))
        assert rewind(str(folder), 5, quarantine=str(tmp_path / "other")).count == 0
        assert not (tmp_path / "other").exists()

    def test_a_trimmed_log_is_cut_back_to_its_start_and_not_below(self, folder, tmp_path):
        with opened(folder) as log:
            log.trim(7)
        for to in (-1, 0, 6, END + 1):
            with pytest.raises(InvalidInput, match="offsets 7 up to 14"):
                rewind(str(folder), to, quarantine=str(tmp_path / "aside"))
        rewind(str(folder), 7, quarantine=str(tmp_path / "aside"))
        with opened(folder, create=False) as log:
            assert (log.bounds(), log.term) == (Bounds(7, 7), 2)
        assert sorted(content(tmp_path / "aside")) == list(range(7, END))

    def test_slots_above_it_are_put_back_and_nothing_else_of_them_changes(self, folder, tmp_path):
        with opened(folder) as log:
            for name, position in (("low", 3), ("high", 12), ("broken", 11)):
                log.slots.create(name, position)
            log.slots.claim("high", "me")
            log.slots.invalidate("broken", InvalidReason.HORIZON)
            before = {slot.name: slot for slot in log.slots.list()}
        rewind(str(folder), 5, quarantine=str(tmp_path / "aside"))
        with opened(folder) as log:
            after = {slot.name: slot for slot in log.slots.list()}
        assert {name: slot.position for name, slot in after.items()} == {"low": 3, "high": 5, "broken": 5}
        assert (after["high"].holder, after["high"].epoch) == ("me", before["high"].epoch)
        assert after["broken"].invalid == before["broken"].invalid

    def test_a_slot_that_is_put_back_no_longer_names_the_batch_before_where_it_stood(self, folder, tmp_path):
        with opened(folder) as log:
            for name, position in (("above", 12), ("there", 5)):
                log.slots.create(name, 0)
                log.slots.claim(name, "me").advance(log.cursor_at(position))
            before = {slot.name: slot.fingerprint for slot in log.slots.list()}
        assert None not in before.values()
        rewind(str(folder), 5, quarantine=str(tmp_path / "aside"))
        with opened(folder) as log:
            after = {slot.name: (slot.position, slot.fingerprint) for slot in log.slots.list()}
        assert after == {"above": (5, None), "there": (5, before["there"])}

    def test_a_cursor_of_what_was_cut_has_diverged(self, folder, tmp_path):
        rewind(str(folder), 9, quarantine=str(tmp_path / "aside"))
        with opened(folder) as log:
            log.append_batch(records(*[b"new"] * 4), term=5).result()
            with pytest.raises(Diverged):
                log.plan(Cursor(log.log_id, 12, 3))
            assert log.end_of_term(3) == 9
            assert log.plan(Cursor(log.log_id, 9, 2))[0].first == 9

    @pytest.mark.parametrize("to", [0, 10])
    def test_a_reader_that_had_seen_more_continues_with_what_is_there(self, tmp_path, to):
        with opened(tmp_path / "log", roll_bytes=1 << 20) as log:
            for _ in range(200):
                log.append_value(bytes(50), term=1).result()
        reader = WalReader(str(tmp_path / "log"))
        assert reader.plan(Cursor(reader.log_id, 190))
        rewind(str(tmp_path / "log"), to, quarantine=str(tmp_path / "aside"))
        assert reader.bounds() == Bounds(0, to)
        with opened(tmp_path / "log", roll_bytes=1 << 20) as log:
            for _ in range(300):
                log.append_value(b"longer than before" + bytes(50), term=2).result()
            assert sorted(values(reader)) == list(range(to + 300))
            assert reader.plan(Cursor(reader.log_id, to + 200))[0].first == to + 200

    @pytest.mark.parametrize(("to", "entries"), [(0, []), (60, []), (150, [64, 128])])
    def test_a_file_with_an_index_keeps_what_of_it_is_right(self, tmp_path, to, entries):
        with opened(tmp_path / "log", roll_bytes=1 << 20) as log:
            for _ in range(300):
                log.append_value(bytes(50), term=1).result()
        done = rewind(str(tmp_path / "log"), to, quarantine=str(tmp_path / "aside"))
        assert is_clean(tmp_path / "log")
        assert is_clean(tmp_path / "aside")
        with opened(tmp_path / "log", create=False) as log:
            assert log.bounds() == Bounds(0, to)
        path = tmp_path / "log" / index_name(0)
        index = decode_index(path.read_bytes() if path.exists() else b"", new_chain(done.cursor.log_id, 0))
        assert [entry.offset for entry in index.entries] == entries

    def test_other_content_in_the_folder_is_refused_and_nothing_is_changed(self, folder, tmp_path):
        (tmp_path / "aside").mkdir()
        (tmp_path / "aside" / "mine").write_text("x")
        before = content(folder)
        with pytest.raises(AlreadyExists):
            rewind(str(folder), 5, quarantine=str(tmp_path / "aside"))
        assert content(folder) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["aside", "log"]

    def test_a_log_that_is_open_is_not_cut(self, folder, tmp_path):
        with opened(folder), pytest.raises(Fenced):
            rewind(str(folder), 5, quarantine=str(tmp_path / "aside"))

    def test_there_must_be_a_log(self, tmp_path):
        with pytest.raises(NotALog):
            rewind(str(tmp_path), 0, quarantine=str(tmp_path / "aside"))

    def test_damage_below_it_is_refused_and_nothing_is_changed(self, folder, tmp_path):
        firsts = firsts_in(DISK.scan(str(folder)))
        path = folder / data_name(firsts[1])
        whole = path.read_bytes()
        path.write_bytes(whole[:-700] + b"x" + whole[-699:])
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
        with pytest.raises(CorruptData):
            rewind(str(folder), firsts[2] - 1, quarantine=str(tmp_path / "aside"))
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"} == before


# --- interrupted -----------------------------------------------------------------------------------------------

PLACE, ASIDE = "/srv/log", "/srv/aside/1"


def sim_open(disk, **options):
    settings = {"background": False, "roll_bytes": 1500, "boot": UUID(int=disk.restarts), **options}
    return WalLog.open(PLACE, env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(1)), **settings)


@pytest.fixture(scope="module")
def built():
    """A disk with a closed log, and the records of the log."""
    disk = SimulatedDisk()
    with sim_open(disk) as log:
        build(log)
        log.slots.create("reader", 12)
        held = values(log)
    return disk, held


def interrupted(built, to, *, goes_on):
    """The workload, and the check of what it was promised."""
    _, held = built

    def workload(disk, notes):
        if "rewound" not in notes:
            rewind(PLACE, to, quarantine=ASIDE, env=Env(disk=disk))
            notes.append("rewound")
        if goes_on:
            with sim_open(disk) as log:
                if log.bounds().next == to:
                    log.append_batch(records(b"new"), term=4, writer=WRITER, number=(to >= 4) + (to >= 9)).result()
            notes.append("appended")

    def check(disk, notes):
        _check_reader(disk)
        log = sim_open(disk)
        found = values(log)
        end = log.bounds().next
        below = {at: value for at, value in held.items() if at < to}
        if "appended" in notes or found.get(to) == b"new":
            assert found == {**below, to: b"new"}
            assert log.term == 4
        elif "rewound" in notes or end == to:
            assert found == below, "what was cut is there again"
            assert log.end() == Cursor(log.log_id, to, TERMS[to - 1])
        else:
            assert found == held, "something in between can be seen"
        if found != held:
            assert [slot.position for slot in log.slots.list()] == [min(to, 12)]
            aside = verify(ASIDE, env=Env(disk=disk, clock=ManualClock()))
            assert aside.is_clean
            assert aside.bounds == Bounds(to, END)
            assert values(WalReader(ASIDE, env=Env(disk=disk))) == {at: value for at, value in held.items() if at >= to}
        disk.kill()

    def _check_reader(disk):
        """Before anybody opens it: below the cut everything is there, or nothing is said."""
        try:
            found = values(WalReader(PLACE, env=Env(disk=disk), boot=UUID(int=disk.restarts)))
        except NotReady:
            return
        assert {at: value for at, value in found.items() if at < to} == {
            at: value for at, value in held.items() if at < to
        }

    return workload, check


def crash_everywhere(built, to, *, modes=tuple(CrashMode), seeds=(0,), limit=2, again=0, goes_on=True, every=1):
    """As the driver of that name, but from a log that is there."""
    explorer = _Explorer(*interrupted(built, to, goes_on=goes_on), modes, seeds, limit, every)
    explorer.stop_everywhere(built[0], [], "", again=again)
    return explorer.explored()


FEW = (CrashMode.KILL, CrashMode.NOTHING, CrashMode.SCRAPS)


@pytest.mark.parametrize("every", sampled(15))
@pytest.mark.parametrize(("to", "modes"), some([(3, FEW[:1]), (7, FEW[2:])], 1))
def test_a_crash_at_every_operation_leaves_all_or_nothing_of_it(built, to, modes, capsys, every):
    explored = crash_everywhere(built, to, modes=modes, limit=1, goes_on=False, every=every)
    with capsys.disabled():
        print(f"\n  rewind to {to}: {explored}")
    assert explored.states > 30 / every


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("to", [1, 4, 6, 7, 9, 13])
def test_a_crash_anywhere_leaves_all_or_nothing_wherever_the_log_is_cut(built, to):
    assert crash_everywhere(built, to, seeds=(0, 1), limit=8).states > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("to", [3, 7])
def test_a_second_crash_while_a_decided_one_is_finished_leaves_nothing_in_between(built, to):
    for number in count():
        disk = built[0].fork()
        disk.stop(number)
        with contextlib.suppress(Crash):
            rewind(PLACE, to, quarantine=ASIDE, env=Env(disk=disk))
        if f"{PLACE}/{REWIND}" in disk.durable():
            break
    disk.kill()
    explorer = _Explorer(*interrupted(built, to, goes_on=False), FEW, (0,), 1)
    explorer.stop_everywhere(disk, [], "", again=20, reach=40)
    assert explorer.explored().states > 50


@pytest.mark.matrix
def test_an_operation_that_fails_leaves_all_or_nothing_of_it(built, capsys):
    workload, check = interrupted(built, 7, goes_on=False)
    explorer = _Explorer(workload, check, (CrashMode.KILL, CrashMode.NOTHING), (0,), 2)
    for number in count():
        disk, notes = built[0].fork(), []
        disk.interrupt(number, StorageError(f"call {number} fails"))
        with contextlib.suppress(StorageError):
            workload(disk, notes)
        if len(disk.calls) <= number:
            break
        explorer._crash(disk, notes, f"call {number} failed")
    with capsys.disabled():
        print(f"\n  rewind, one operation fails: {explorer.explored()}")
    assert explorer.explored().states > 20


@pytest.mark.matrix
def test_a_repair_by_hand_finishes_what_was_decided(built):
    decided = 0
    for number in count():
        disk = built[0].fork()
        disk.stop(number)
        with contextlib.suppress(Crash):
            rewind(PLACE, 7, quarantine=ASIDE, env=Env(disk=disk))
        if not disk.stopped:
            break
        disk.kill()
        if f"{PLACE}/{REWIND}" not in disk.files():
            sim_open(disk).close()
            assert not [path for path in disk.files() if path.startswith(PLACE) and path.endswith(".log.new")]
            continue
        decided += 1
        notes = [finding.message for finding in verify(PLACE, env=Env(disk=disk.fork(), clock=ManualClock())).findings]
        assert any("an interrupted rewind" in note for note in notes)
        repair_log(PLACE, forget_slots=False, env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(1)))
        assert sorted(values(WalReader(PLACE, env=Env(disk=disk)))) == list(range(7))
        assert verify(PLACE, env=Env(disk=disk, clock=ManualClock())).findings == []
    assert decided > 5
