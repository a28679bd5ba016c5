"""The append-log store: the suite that every store passes, damage of every kind, and a disk that fails."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from uuid import UUID

import pytest

from strandline.errors import CorruptData, Fenced, InvalidInput, StorageError, UnsupportedVersion
from strandline.followers.stores import append_log_file as foldfile
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.append_log_file import read_content
from strandline.formats.wal.frame import HEADER_SIZE, FrameInfo, FrameScanner, encode_frame
from strandline.model.cursor import Cursor
from strandline.model.sink import StorePosition
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.keyed_stores import content
from strandline.testing.simdisk import SimulatedDisk
from strandline.testing.sinks import DELETE, LOG, changes
from strandline.testing.store_snapshots import ExportingStoreContract

OTHER = UUID(int=2)
FOLDER, FILE = "/fold", "/fold/fold.log"
VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "frames.json").read_text())


@pytest.mark.parametrize("sync", [True, False], ids=["synced", "unsynced"])
class TestAppendLogStore(ExportingStoreContract):
    @pytest.fixture
    def sink(self, tmp_path, sync):
        self._sync = sync
        self._opened = [AppendLogStore.open(str(tmp_path / "fold"), sync=sync)]
        yield self._opened[0]
        for store in self._opened:
            store.close()

    def reopen(self, store):
        store.close()
        self._opened.append(AppendLogStore.open(store._folder, sync=self._sync))
        return self._opened[-1]

    def import_from(self, snapshot, dest):
        self._opened.append(AppendLogStore.import_from(snapshot, dest, sync=self._sync))
        return self._opened[-1]


def open_on(disk, *, sync=True, compact_after=10 << 20, seed=1):
    return AppendLogStore.open(
        FOLDER,
        sync=sync,
        compact_after=compact_after,
        env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(seed)),
    )


def apply(store, first, *rows):
    cursor = Cursor(LOG, first)
    store.apply(changes(first, *rows), since=cursor, upto=cursor.at(first + len(rows)))


def state(store):
    return content(store), store.position()


def written(disk, *, sync=True, compact=False):
    """Three writes; returns the states after none, one, two and three of them, and where their frames begin."""
    store = open_on(disk, sync=sync)
    states = [state(store)]
    for first, rows in enumerate([[(b"a", b"1"), (b"b", b"2")], [(b"a", DELETE), (b"c", b"3")], [(b"d", bytes(50))]]):
        apply(store, 2 * first, *rows)
        states.append(state(store))
        if compact and first == 1:
            store.compact()
    starts = [frame.start for frame in FrameScanner(memoryview(disk.read(FILE)))]
    return store, states, starts


def fold_of(data):
    """A disk with a store of these bytes."""
    disk = SimulatedDisk()
    disk.make_folders(FOLDER)
    disk.write_new(FILE, [data])
    disk.sync_folder(FOLDER)
    return disk


def three_writes(**options):
    disk = SimulatedDisk()
    _, states, starts = written(disk, **options)
    return disk.read(FILE), states, starts


# --- torn tails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [100, pytest.param(32 << 20, marks=pytest.mark.matrix)])
def test_a_last_frame_torn_at_any_byte_is_cut_and_what_comes_next_is_kept(monkeypatch, window):
    monkeypatch.setattr(foldfile, "_WINDOW", window)
    data, states, starts = three_writes()
    for size in range(starts[2], len(data), 1 if window > len(data) else 7):
        disk = fold_of(data[:size])
        store = open_on(disk)
        assert state(store) == states[2]
        assert disk.size(FILE) == starts[2]
        if size > starts[2]:
            assert disk.read(f"{FILE}.torn") == data[starts[2] : size]
        if size % 16:
            continue
        apply(store, 4, (b"d", bytes(50)))
        store.close()
        again = open_on(disk)
        assert content(again) == states[3][0]


@pytest.mark.matrix
def test_a_last_frame_of_which_any_part_is_zeros_is_cut():
    data, states, starts = three_writes()
    for at in range(starts[2], len(data), 7):
        for behind in (at + 8, len(data)):
            torn = data[:at] + bytes(min(behind, len(data)) - at) + data[behind:]
            if torn != data:
                assert state(open_on(fold_of(torn))) == states[2], f"zeros from {at} to {behind}"


def test_zeros_after_the_last_frame_are_cut():
    data, states, _ = three_writes()
    disk = fold_of(data + bytes(5000))
    assert state(open_on(disk)) == states[3]
    assert disk.size(FILE) == len(data)


def test_a_cut_is_logged(caplog):
    data, _, starts = three_writes()
    open_on(fold_of(data[:-1]))
    assert f"from byte {starts[2]} on are cut off" in caplog.text


def test_a_torn_frame_is_cut_even_if_it_holds_frames_as_values():
    disk = SimulatedDisk()
    store, states, _ = written(disk)
    alien = b"".join(encode_frame(FrameInfo(1, 99, 0, 0, 98, pages=0), []))
    apply(store, 5, (b"e", disk.read(FILE)), (b"f", alien))
    data = disk.read(FILE)
    for torn in (data[:-1], data[:-600] + bytes(8) + data[-592:]):
        assert state(open_on(fold_of(torn))) == states[3]


def test_an_empty_file_opens_as_a_newcomer():
    store = open_on(fold_of(b""))
    assert state(store) == ({}, StorePosition(None))
    apply(store, 0, (b"a", b"1"))
    assert content(store) == {b"a": b"1"}


def test_a_file_of_a_header_only_opens_as_a_newcomer():
    data, states, _ = three_writes()
    for size in range(1, HEADER_SIZE + 1):
        disk = fold_of(data[:size])
        store = open_on(disk)
        assert state(store) == ({}, StorePosition(None))
        assert disk.size(FILE) == 0
        apply(store, 0, (b"a", b"1"), (b"b", b"2"))
        store.close()
        assert state(open_on(disk)) == states[1]


def test_a_compacted_file_without_keys_opens():
    disk = SimulatedDisk()
    store = open_on(disk)
    store.compact()
    store.close()
    again = open_on(disk)
    assert state(again) == ({}, StorePosition(None))
    apply(again, 0, (b"a", b"1"))
    again.close()
    assert content(open_on(disk)) == {b"a": b"1"}


# --- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True], ids=["plain", "compacted"])
@pytest.mark.parametrize("window", [100, pytest.param(32 << 20, marks=pytest.mark.matrix)])
def test_damage_in_the_middle_is_an_error_with_file_and_byte_and_changes_nothing(monkeypatch, compact, window):
    monkeypatch.setattr(foldfile, "_WINDOW", window)
    data, _, starts = three_writes(compact=compact)
    for at in range(0, starts[-1], 1 if window > len(data) else 7):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        disk = fold_of(bytes(damaged))
        start = max(start for start in starts if start <= at)
        with pytest.raises((CorruptData, UnsupportedVersion), match=rf"{FILE} .*byte {start}\b"):
            open_on(disk)
        assert disk.files()[FILE] == bytes(damaged)


@pytest.mark.matrix
def test_damage_of_a_compacted_state_is_an_error_even_if_nothing_follows():
    disk = SimulatedDisk()
    store, _, _ = written(disk)
    store.compact()
    data = disk.read(FILE)
    last = [frame.start for frame in FrameScanner(memoryview(data))][-1]
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((CorruptData, UnsupportedVersion)):
            open_on(fold_of(damaged))
    for size in range(last, len(data)):
        with pytest.raises(CorruptData):
            open_on(fold_of(data[:size]))


def test_a_hole_of_a_whole_frame_is_an_error():
    data, _, starts = three_writes()
    for missing in (
        data[starts[1] :],
        data[: starts[1]] + data[starts[2] :],
        data[: starts[1]] * 2 + data[starts[1] :],
    ):
        with pytest.raises(CorruptData):
            open_on(fold_of(missing))


def test_frames_of_another_fold_are_an_error():
    data, _, starts = three_writes()
    disk = SimulatedDisk()
    other = open_on(disk, seed=2)
    for first in range(3):
        apply(other, first, (b"x", b"y"))
    second = [frame.start for frame in FrameScanner(memoryview(disk.read(FILE)))][1]
    with pytest.raises(CorruptData, match=f"byte {starts[1]}"):
        open_on(fold_of(data[: starts[1]] + disk.read(FILE)[second:] + data[starts[1] :]))


def test_a_file_that_is_no_fold_is_left_alone():
    for foreign in (b"PAR1" + bytes(100), b"x", b'{"json": true}'):
        disk = fold_of(foreign)
        with pytest.raises(CorruptData, match="no store at all"):
            open_on(disk)
        assert disk.read(FILE) == foreign


def test_a_frame_of_another_version_is_refused_and_nothing_changed():
    data, _, starts = three_writes()
    for start in starts:
        for version in (1, 3, 5):
            newer = data[: start + 4] + bytes([version]) + data[start + 5 :]
            disk = fold_of(newer)
            with pytest.raises(UnsupportedVersion):
                open_on(disk)
            assert disk.read(FILE) == newer


def test_unsynced_writes_that_a_crash_left_out_of_order_are_a_torn_tail():
    data, states, starts = three_writes(sync=False)
    for number, start in enumerate(starts):
        torn = data[: start + 70] + bytes(50) + data[start + 120 :]
        assert state(open_on(fold_of(torn))) == states[number]


def test_damage_of_unsynced_writes_is_an_error_once_they_were_closed_or_opened_again():
    disk = SimulatedDisk()
    store, _, starts = written(disk, sync=False)
    store.close()
    closed = disk.read(FILE)
    with pytest.raises(CorruptData):
        open_on(fold_of(closed[: starts[1] + 70] + bytes(50) + closed[starts[1] + 120 :]))
    again = open_on(fold_of(closed[: len(closed) - 1]), sync=False)
    apply(again, 5, (b"e", b"5"))
    later = again._env.disk.read(FILE)
    with pytest.raises(CorruptData):
        open_on(fold_of(later[: starts[2] + 70] + bytes(50) + later[starts[2] + 120 :]))


def test_closing_and_opening_again_and_again_does_not_make_the_file_longer():
    disk = SimulatedDisk()
    store, states, _ = written(disk, sync=False)
    store.close()
    size = disk.size(FILE)
    for _ in range(3):
        open_on(disk, sync=False).close()
    assert disk.size(FILE) == size
    assert state(open_on(disk)) == states[3]


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_whatever_is_damaged_a_fold_is_refused_or_holds_what_it_held_at_some_moment(sync):
    data, states, _ = three_writes(sync=sync)
    chance = random.Random(3)
    refused = 0
    for _ in range(800):
        damaged = bytearray(data)
        for _ in range(chance.choice([1, 1, 3])):
            at = chance.randrange(len(damaged))
            damaged[at : at + chance.choice([1, 8, 64])] = chance.randbytes(chance.choice([1, 8, 64]))
        try:
            assert state(open_on(fold_of(bytes(damaged)))) in states
        except (CorruptData, UnsupportedVersion):
            refused += 1
    assert refused


def test_a_fold_that_was_written_once_is_read_for_ever():
    store = open_on(fold_of(bytes.fromhex(VECTORS["fold"])))
    assert state(store) == ({b"b": b"2", b"c": b"", b"d": b"4"}, StorePosition(Cursor(LOG, 4, 2), OTHER))


def test_metadata_that_is_no_cursor_is_corrupt():
    for told in ({"strandline.cursor": "x"}, {"strandline.cursor": f"{LOG}/0/-1"}, {"strandline.resync": "1"}):
        frame = b"".join(encode_frame(FrameInfo(1, 1, 0, 0, 0, pages=0), [], told))
        with pytest.raises(CorruptData, match="cursor cannot be read"):
            open_on(fold_of(frame))


def test_flags_that_are_not_known_are_refused():
    frame = b"".join(encode_frame(FrameInfo(1, 1, 0, 0, 0, flags=4, pages=0), []))
    with pytest.raises(UnsupportedVersion):
        open_on(fold_of(frame))


# --- failed writes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_a_failed_append_changes_nothing_and_is_cut_off_before_the_next_one(moment):
    disk = SimulatedDisk()
    store, states, _ = written(disk)
    size = disk.size(FILE)
    disk.interrupt(len(disk.calls), StorageError("no"), moment=moment)
    with pytest.raises(StorageError, match="no"):
        apply(store, 5, (b"e", bytes(500)))
    assert state(store) == states[3]
    apply(store, 5, (b"e", b"5"))
    assert [call.action for call in disk.calls[-6:]].count("cut") == (moment != "before")
    data = disk.read(FILE)
    assert [frame.start for frame in FrameScanner(memoryview(data))][3] == size
    disk.crash()
    assert content(open_on(disk)) == {**states[3][0], b"e": b"5"}


def test_bytes_of_a_failed_sync_are_not_shown_and_not_trusted():
    disk = SimulatedDisk()
    store, states, _ = written(disk)
    disk.interrupt(len(disk.calls) + 1, StorageError("no sync"))
    with pytest.raises(StorageError, match="no sync"):
        apply(store, 5, (b"e", b"5"))
    assert disk.calls[-1].action == "sync"
    assert state(store) == states[3]
    # The disk shows the frame, and will never write it: only one that was cut off and written again survives.
    assert b"5" in disk.read(FILE)
    apply(store, 5, (b"e", b"5"))
    disk.crash()
    again = open_on(disk)
    assert state(again) == ({**states[3][0], b"e": b"5"}, StorePosition(Cursor(LOG, 6)))


def test_unsynced_writes_that_a_failed_sync_has_lost_are_written_again_from_memory():
    for seed in range(10):
        disk = SimulatedDisk(seed)
        store, states, _ = written(disk, sync=False)
        disk.interrupt(len(disk.calls), StorageError("torn"), moment="half")
        disk.interrupt(len(disk.calls) + 3, StorageError("no sync"))
        for error in ("torn", "no sync"):
            with pytest.raises(StorageError, match=error):
                apply(store, 5, (b"e", b"5"))
        apply(store, 5, (b"e", b"5"))
        disk.crash()
        again = open_on(disk)
        assert state(again) in (states[3], ({**states[3][0], b"e": b"5"}, StorePosition(Cursor(LOG, 6))))


def test_a_write_is_refused_as_long_as_the_file_cannot_be_mended():
    disk = SimulatedDisk()
    store, states, _ = written(disk)
    disk.interrupt(len(disk.calls), StorageError("torn"), moment="half")
    with pytest.raises(StorageError, match="torn"):
        apply(store, 5, (b"e", b"5"))
    # What was cut off once need not be cut again.
    for step, ahead in (("open_append", 0), ("cut", 1), ("sync", 2), ("sync_folder", 2)):
        disk.interrupt(len(disk.calls) + ahead, StorageError(step))
        with pytest.raises(StorageError, match=step):
            apply(store, 5, (b"e", b"5"))
        assert disk.calls[-1].action == step
        assert state(store) == states[3]
    apply(store, 5, (b"e", b"5"))
    disk.crash()
    assert content(open_on(disk)) == {**states[3][0], b"e": b"5"}


def test_a_write_with_sync_is_durable_and_the_file_has_its_name():
    for seed in range(20):
        disk = SimulatedDisk(seed)
        store = open_on(disk)
        apply(store, 0, (b"a", b"1"))
        disk.crash()
        assert content(open_on(disk)) == {b"a": b"1"}


def test_without_sync_no_write_waits_for_the_disk():
    disk = SimulatedDisk()
    store = open_on(disk, sync=False)
    begun = len(disk.calls)
    for first in range(5):
        apply(store, first, (b"a", b"1"))
    assert [call.action for call in disk.calls[begun:]] == ["write"] * 5


def test_a_file_that_was_cut_by_someone_else_is_not_written_on():
    disk = SimulatedDisk()
    store, _, _ = written(disk)
    disk.open_append(FILE).cut(100)
    disk.interrupt(len(disk.calls), StorageError("no"))
    with pytest.raises(StorageError):
        apply(store, 5, (b"e", b"5"))
    with pytest.raises(StorageError, match="shorter"):
        apply(store, 5, (b"e", b"5"))


# --- large writes ----------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_write_over_the_size_of_a_frame_is_atomic_all_the_same(monkeypatch):
    monkeypatch.setattr(foldfile, "_FRAME_BYTES", 400)
    disk = SimulatedDisk()
    store, states, _ = written(disk)
    size = disk.size(FILE)
    apply(store, 5, *((b"k%d" % number, bytes(60)) for number in range(20)))
    after = state(store)
    data = disk.read(FILE)
    assert len([frame for frame in FrameScanner(memoryview(data)) if frame.start >= size]) > 3
    assert state(open_on(fold_of(data))) == after
    for end in range(size, len(data), 11):
        torn = fold_of(data[:end])
        again = open_on(torn)
        assert state(again) == states[3]
        assert torn.size(FILE) == size


def test_a_record_that_fits_no_frame_is_refused_and_changes_nothing(monkeypatch):
    monkeypatch.setattr("strandline.formats.wal.frame.MAX_PAYLOAD", 5000)
    disk = SimulatedDisk()
    store, states, _ = written(disk)
    with pytest.raises(InvalidInput, match="5,000"):
        apply(store, 5, (b"e", bytes(6000)))
    assert state(store) == states[3]
    apply(store, 5, (b"e", b"5"))
    assert content(store)[b"e"] == b"5"


# --- compaction ------------------------------------------------------------------------------------------------


def test_compaction_at_every_flush_stays_consistent():
    disk = SimulatedDisk()
    store = open_on(disk, compact_after=0)
    truth = {}
    chance = random.Random(5)
    offset = 0
    for turn in range(60):
        rows = [(b"k%d" % chance.randrange(9), chance.choice([DELETE, b"%d" % turn])) for _ in range(3)]
        apply(store, offset, *rows)
        offset += 3
        for key, value in rows:
            truth.pop(key, None) if value == DELETE else truth.update({key: value})
        assert state(store) == (truth, StorePosition(Cursor(LOG, offset)))
        assert state(open_on(fold_of(disk.read(FILE)))) == state(store)
    assert [call.action for call in disk.calls].count("rename") == 60


def test_a_compaction_keeps_a_resync_that_is_under_way():
    disk = SimulatedDisk()
    store, states, _ = written(disk)
    store.begin_resync(OTHER)
    store.compact()
    store.close()
    assert state(open_on(disk)) == (states[3][0], StorePosition(Cursor(LOG, 5), OTHER))


def test_a_compaction_waits_for_the_threshold_and_for_as_many_bytes_as_are_live():
    for keys, compact_after in ((500, 1000), (5, 20_000)):
        disk = SimulatedDisk()
        store = open_on(disk, compact_after=compact_after)
        apply(store, 0, *((b"k%03d" % number, bytes(100)) for number in range(keys)))
        store.compact()
        live = keys * (4 + 100 + foldfile.ROW_OVERHEAD)
        offset, grown = keys, 0
        while not grown:
            size = disk.size(FILE)
            apply(store, offset, (b"k000", bytes(100)))
            offset += 1
            grown = 0 if disk.size(FILE) > size else size - store._place.base
        assert grown <= max(live, compact_after) < grown + 1000


def test_opening_costs_about_the_live_data_however_often_it_was_rewritten():
    disk = SimulatedDisk()
    store = open_on(disk, sync=False, compact_after=1000)
    for turn in range(40):
        apply(store, turn * 300, *((b"k%03d" % number, b"%0100d" % turn) for number in range(300)))
    live = 300 * (4 + 100 + foldfile.ROW_OVERHEAD)
    assert disk.size(FILE) < 2.5 * live
    store.compact()
    assert disk.size(FILE) < 1.1 * live
    fold = read_content(FILE, disk=disk)
    assert fold.state.live == {b"k%03d" % number: b"%0100d" % 39 for number in range(300)}


class _Watched(SimulatedDisk):
    """A disk that calls a function of the test in the middle of every call."""

    look = None

    def _call(self, action, path, work, **options):
        if self.look is not None:
            self.look(action, path)
        return super()._call(action, path, work, **options)


def test_readers_continue_during_a_compaction():
    disk = _Watched()
    store, states, _ = written(disk)
    seen = []

    def look(action, path):
        reader = threading.Thread(target=lambda: seen.append((action, store.get(b"c"), state(store))))
        reader.start()
        reader.join(120)  # a reader that waits for the compaction would be seen too late, or never

    disk.look = look
    store.compact()
    disk.look = None
    assert {"write", "rename", "sync", "sync_folder"} <= {action for action, _, _ in seen}
    assert {value for _, value, _ in seen} == {b"3"}
    assert all(found == states[3] for _, _, found in seen)


def test_nothing_is_shown_before_it_is_durable():
    disk = _Watched()
    store, states, _ = written(disk)
    seen = []
    disk.look = lambda action, _: seen.append((action, store.get(b"e"), store.position()))
    apply(store, 5, (b"e", b"5"))
    assert seen == [("write", None, states[3][1]), ("sync", None, states[3][1])]
    assert store.get(b"e") == b"5"


def test_a_compaction_that_fails_does_not_fail_the_write(caplog):
    probe = SimulatedDisk()
    store = open_on(probe, compact_after=0)
    begun = len(probe.calls)
    apply(store, 0, (b"a", b"1"))
    for step in range(begun + 2, len(probe.calls)):
        caplog.clear()
        disk = SimulatedDisk()
        store = open_on(disk, compact_after=0)
        disk.interrupt(step, StorageError("no room"))
        apply(store, 0, (b"a", b"1"))
        assert "could not be compacted" in caplog.text
        assert content(store) == {b"a": b"1"}
        apply(store, 1, (b"b", b"2"))
        disk.crash()
        assert content(open_on(disk)) == {b"a": b"1", b"b": b"2"}


def test_a_rename_that_was_done_and_failed_all_the_same_is_noticed():
    probe = SimulatedDisk()
    written(probe)[0].compact()
    actions = [call.action for call in probe.calls]
    for moment in ("before", "after"):
        disk = SimulatedDisk()
        store, states, _ = written(disk)
        disk.interrupt(actions.index("rename"), StorageError("what?"), moment=moment)
        with pytest.raises(StorageError, match="what"):
            store.compact()
        apply(store, 5, (b"e", b"5"))
        store.compact()
        apply(store, 6, (b"f", b"6"))
        disk.crash()
        assert content(open_on(disk)) == {**states[3][0], b"e": b"5", b"f": b"6"}


def test_leftovers_of_a_compaction_are_removed_on_opening():
    disk = SimulatedDisk()
    written(disk)[0].close()
    disk.write_new("/fold/fold.log.new", [b"half of it"])
    open_on(disk)
    assert "/fold/fold.log.new" not in disk.files()


# --- one opener ------------------------------------------------------------------------------------------------


def test_a_second_opener_is_fenced_and_changes_nothing(tmp_path):
    folder = str(tmp_path / "fold")
    with AppendLogStore.open(folder) as store:
        apply(store, 0, (b"a", b"1"))
        before = (tmp_path / "fold" / "fold.log").read_bytes()
        with pytest.raises(Fenced, match="open elsewhere"):
            AppendLogStore.open(folder)
        program = f"from strandline.followers.stores.append_log import AppendLogStore as A\nA.open({folder!r})"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "Fenced" in done.stderr
        assert (tmp_path / "fold" / "fold.log").read_bytes() == before
    with AppendLogStore.open(folder) as store:
        assert content(store) == {b"a": b"1"}


def test_an_opening_that_failed_holds_no_lock(tmp_path):
    (tmp_path / "fold.log").write_bytes(b"something else")
    for _ in range(2):
        with pytest.raises(CorruptData):
            AppendLogStore.open(str(tmp_path))


def test_a_closed_store_takes_no_writes_and_can_still_be_read():
    store, states, _ = written(SimulatedDisk())
    store.close()
    for refused in (lambda: apply(store, 5, (b"e", b"5")), store.compact, lambda: store.export_to("/s")):
        with pytest.raises(InvalidInput, match="closed"):
            refused()
    assert state(store) == states[3]


def test_a_snapshot_is_one_compacted_file(tmp_path):
    with AppendLogStore.open(str(tmp_path / "fold")) as store:
        for first in range(20):
            apply(store, first, (b"a", bytes(100)))
        snapshot = store.export_to(str(tmp_path / "snapshot"))
    assert (snapshot.kind, snapshot.kind_version) == ("append-log", 1)
    assert [file.path for file in snapshot.files] == ["fold.log"]
    assert snapshot.files[0].size < 2500


@pytest.mark.parametrize("compact_after", [-1])
def test_a_threshold_below_zero_is_refused(compact_after):
    with pytest.raises(InvalidInput):
        open_on(SimulatedDisk(), compact_after=compact_after)
