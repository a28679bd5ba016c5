"""The disk that crashes: it does what the machine's own disk does, until it loses what was not synced."""

from __future__ import annotations

import contextlib

import pytest

from strandline.model.errors import AlreadyExists, DiskFull, NotFound, StorageError
from strandline.storage.disk import DISK, AppendFile, Disk
from strandline.testing.faulty import Crash
from strandline.testing.simdisk import (
    POWER,
    CrashMode,
    SimulatedDisk,
    crash_everywhere,
    damage_everywhere,
    every,
    fail_everywhere,
    fill_everywhere,
)


@pytest.fixture(params=["local", "simulated"])
def place(request, tmp_path):
    disk = DISK if request.param == "local" else SimulatedDisk()
    disk.make_folders(str(tmp_path / "in"))
    return disk, str(tmp_path / "in")


def outcome(call):
    try:
        return call()
    except (NotFound, AlreadyExists) as error:
        return type(error)


def test_it_is_a_disk():
    disk = SimulatedDisk()
    assert isinstance(disk, Disk)
    assert isinstance(disk.open_append("/a"), AppendFile)


def test_it_does_what_the_local_disk_does(place):
    disk, at = place
    disk.write_new(f"{at}/a", [b"one", memoryview(b"two")])
    assert outcome(lambda: disk.write_new(f"{at}/a", [])) is AlreadyExists
    assert outcome(lambda: disk.write_new(f"{at}/none/a", [])) is NotFound
    assert disk.read(f"{at}/a") == b"onetwo"
    assert disk.read(f"{at}/a", 2, 2) == b"et"
    assert disk.read(f"{at}/a", 5, 99) == b"o"
    assert disk.read(f"{at}/a", 99, 1) == b""
    assert outcome(lambda: disk.read(f"{at}/b")) is NotFound
    assert outcome(lambda: disk.read(at)) is NotFound
    assert disk.size(f"{at}/a") == 6
    file = disk.open_append(f"{at}/a")
    file.write([b"!", b"?"])
    file.cut(7)
    assert (file.size(), disk.read(f"{at}/a")) == (7, b"onetwo!")
    disk.rename(f"{at}/a", f"{at}/b")
    file.write([b"goes on"])
    file.sync()
    file.close()
    file.close()
    assert disk.read(f"{at}/b") == b"onetwo!goes on"
    assert outcome(lambda: disk.size(f"{at}/a")) is NotFound
    assert outcome(lambda: disk.rename(f"{at}/a", f"{at}/c")) is NotFound
    disk.link(f"{at}/b", f"{at}/c")
    assert outcome(lambda: disk.link(f"{at}/b", f"{at}/c")) is AlreadyExists
    disk.copy(f"{at}/b", f"{at}/d")
    disk.make_folders(f"{at}/sub/deeper")
    disk.write_new(f"{at}/sub/deeper/x", [b"x"])
    disk.rename(f"{at}/sub", f"{at}/moved")
    assert disk.read(f"{at}/moved/deeper/x") == b"x"
    assert [(row.name, row.is_folder, row.size) for row in disk.scan(at)] == [
        ("b", False, 14), ("c", False, 14), ("d", False, 14), ("moved", True, 0),
    ]  # fmt: skip
    disk.remove(f"{at}/b")
    disk.remove(f"{at}/b")
    assert disk.read(f"{at}/c") == b"onetwo!goes on"
    disk.make_folders(f"{at}/full")
    disk.write_new(f"{at}/full/y", [b"y"])
    with pytest.raises(StorageError):
        disk.rename(f"{at}/moved", f"{at}/full")
    disk.remove_folder(f"{at}/moved")
    disk.remove_folder(f"{at}/moved")
    assert [row.name for row in disk.scan(at)] == ["c", "d", "full"]
    assert disk.scan(f"{at}/none") == []
    disk.sync_file(f"{at}/c")
    disk.sync_folder(at)
    assert outcome(lambda: disk.sync_folder(f"{at}/none")) is NotFound


def test_a_lock_is_held_once_and_free_again(place):
    disk, at = place
    with disk.try_locked(f"{at}/lock") as first, disk.try_locked(f"{at}/lock") as second:
        assert (first, second) == (True, False)
    with disk.locked(f"{at}/lock"), disk.try_locked(f"{at}/lock") as third:
        assert not third
    with disk.try_locked(f"{at}/lock") as fourth:
        assert fourth


def synced_and_not(seed):
    disk = SimulatedDisk(seed)
    file = disk.open_append("/log")
    disk.sync_folder("/")
    file.write([b"s" * 1000])
    file.sync()
    file.write([b"u" * 1000])
    return disk, file


def test_a_crash_keeps_what_was_synced_and_any_part_of_the_rest():
    found = set()
    for seed in range(300):
        disk, file = synced_and_not(seed)
        disk.crash()
        data = disk.read("/log")
        assert data[:1000] == b"s" * 1000
        assert set(data[1000:]) <= set(b"u\0")
        rest = data[1000:]
        found.add("none" if not rest else "whole" if rest == b"u" * 1000 else "holes" if 0 in rest else "part")
        with pytest.raises(StorageError):
            file.write([b"a dead process writes nothing"])
    assert found == {"none", "whole", "holes", "part"}


def test_the_same_seed_keeps_the_same():
    for seed in range(5):
        first, second = synced_and_not(seed)[0], synced_and_not(seed)[0]
        first.crash()
        second.crash()
        assert first.files() == second.files()


def test_names_that_were_not_synced_are_kept_up_to_some_moment():
    found = set()
    for seed in range(60):
        disk = SimulatedDisk(seed)
        disk.write_new("/old", [b"old"])
        disk.sync_folder("/")
        disk.write_new("/new", [b"new"])
        disk.rename("/new", "/old")
        disk.crash()
        found.add(tuple(disk.files().items()))
    assert found == {(("/old", b"old"),), (("/new", b"new"), ("/old", b"old")), (("/old", b"new"),)}


def test_a_synced_name_stays():
    for seed in range(20):
        disk = SimulatedDisk(seed)
        disk.make_folders("/a/b")
        disk.write_new("/a/b/c", [b"1"])
        disk.sync_folder("/a/b")
        disk.crash()
        assert disk.read("/a/b/c") == b"1"


def test_what_a_failed_sync_left_can_be_read_and_is_never_durable_unless_written_again():
    for again in (False, True):
        disk, file = synced_and_not(3)
        disk.interrupt(len(disk.calls), StorageError("no"))
        with pytest.raises(StorageError):
            file.sync()
        assert disk.read("/log")[1000:] == b"u" * 1000
        if again:
            file.cut(1000)
            file.write([b"u" * 1000])
        file.sync()
        disk.crash()
        assert disk.read("/log")[1000:] == (b"u" if again else b"\0") * 1000


def test_an_interrupted_write_is_not_done_half_done_or_done():
    for moment, size in (("before", 0), ("half", 5), ("after", 10)):
        disk = SimulatedDisk()
        file = disk.open_append("/log")
        disk.interrupt(1, StorageError("no"), moment=moment)
        with pytest.raises(StorageError):
            file.write([b"0123456789"])
        assert disk.size("/log") == size
        file.write([b"x"])
        assert disk.size("/log") == size + 1


def test_a_killed_process_loses_its_files_and_locks_and_nothing_else():
    disk, file = synced_and_not(1)
    held = disk.try_locked("/lock")
    assert held.__enter__()
    disk.kill()
    assert disk.read("/log") == b"s" * 1000 + b"u" * 1000
    with pytest.raises(StorageError):
        file.size()
    with disk.try_locked("/lock") as again:
        assert again


# --- every mode ------------------------------------------------------------------------------------------------


def ways(make, mode):
    """Everything that a crash in this mode can leave of a disk: all its files, for each way."""

    def left(choices):
        disk = make()
        disk.crash(mode, choices)
        return tuple(disk.files().items())

    return set(every(left))


def contents(make, mode):
    return {dict(files)["/log"] for files in ways(make, mode)}


def log_of(*writes, synced=b""):
    def make():
        disk = SimulatedDisk()
        file = disk.open_append("/log")
        disk.sync_folder("/")
        file.write([synced])
        file.sync()
        for data in writes:
            file.write([data])
        return disk

    return make


def test_a_crash_that_keeps_nothing_keeps_what_was_synced():
    assert contents(log_of(b"u" * 9, synced=b"s"), CrashMode.NOTHING) == {b"s"}


def test_a_killed_process_leaves_all_of_it_and_none_of_it_is_durable_yet():
    disk = log_of(b"u", synced=b"s")()
    disk.kill()
    assert (disk.read("/log"), disk.durable(), disk.unsynced()) == (b"su", {"/log": b"s"}, ["/log"])
    disk.crash(CrashMode.NOTHING)
    assert disk.read("/log") == b"s"


def test_a_prefix_is_of_whole_writes():
    assert contents(log_of(b"1", b"22", b"333"), CrashMode.PREFIX) == {b"", b"1", b"122", b"122333"}


@pytest.mark.parametrize(("mode", "unit"), [(CrashMode.TORN_512, 512), (CrashMode.TORN_4096, 4096)])
def test_a_write_is_torn_where_the_sectors_of_the_file_end(mode, unit):
    found = contents(log_of(b"u" * 2 * unit, synced=b"s" * 10), mode)
    whole = b"s" * 10 + b"u" * 2 * unit
    torn = [whole[:unit], whole[: 2 * unit]]
    assert found == {b"s" * 10, whole, *torn, *(data.ljust(len(whole), b"\0") for data in torn)}
    assert contents(log_of(b"1" * (unit - 10), b"2" * 5, synced=b"s" * 4), mode) == {
        b"ssss", b"ssss" + b"1" * (unit - 10), b"ssss" + b"1" * (unit - 10) + b"2" * 5,
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "unit"), [(CrashMode.SECTORS, 512), (CrashMode.PAGES, 4096)])
def test_any_pages_may_be_kept_and_a_later_write_may_survive_an_earlier_one(mode, unit):
    found = contents(log_of(b"1" * unit, b"2" * unit), mode)
    one, two, none = b"1" * unit, b"2" * unit, bytes(unit)
    assert found == {b"", one, none, one + two, one + none, none + two, none + none}


def test_a_page_that_was_synced_in_part_keeps_that_part():
    for mode in POWER:
        if mode is not CrashMode.SCRAPS:
            assert all(
                data.startswith(b"sss") for data in contents(log_of(b"1" * 600, b"2" * 5000, synced=b"sss"), mode)
            )


def test_a_cut_that_was_not_synced_may_be_undone():
    def make():
        disk = log_of(synced=b"x" * 1500)()
        disk.open_append("/log").cut(100)
        return disk

    assert contents(make, CrashMode.NOTHING) == {b"x" * 1500}
    assert contents(make, CrashMode.PREFIX) == {b"x" * 1500, b"x" * 100}
    assert b"x" * 100 + bytes(412) + b"x" * 988 in contents(make, CrashMode.SECTORS)


def renamed():
    disk = SimulatedDisk()
    disk.write_new("/old", [b"old"])
    disk.sync_folder("/")
    disk.write_new("/new", [b"new"])
    disk.rename("/new", "/old")
    disk.remove("/other")
    disk.write_new("/late", [b"late"])
    return disk


def test_names_that_were_not_synced_may_or_may_not_be_there():
    old, new, both, late = ("/old", b"old"), ("/old", b"new"), ("/new", b"new"), ("/late", b"late")
    assert ways(renamed, CrashMode.NOTHING) == {(old,)}
    assert ways(renamed, CrashMode.PREFIX) == {(old,), (both, old), (new,), (late, new)}
    # Any of them, whatever came before it.
    assert ways(renamed, CrashMode.PAGES) == {(old,), (both, old), (new,), (late, old), (late, both, old), (late, new)}


def test_a_file_that_moves_to_another_folder_is_never_under_no_name():
    def make():
        disk = SimulatedDisk()
        disk.make_folders("/a")
        disk.make_folders("/b")
        disk.write_new("/a/x", [b"x"])
        disk.sync_folder("/a")
        disk.rename("/a/x", "/b/x")
        return disk

    assert ways(make, CrashMode.PAGES) == {(("/a/x", b"x"),), (("/a/x", b"x"), ("/b/x", b"x")), (("/b/x", b"x"),)}
    disk = make()
    disk.sync_folder("/b")
    disk.sync_folder("/a")
    disk.crash(CrashMode.NOTHING)
    assert list(disk.files()) == ["/b/x"]


def test_a_name_that_was_removed_for_good_does_not_come_back_with_the_move_that_made_it():
    disk = SimulatedDisk()
    disk.make_folders("/a")
    disk.make_folders("/b")
    disk.write_new("/a/x", [b"x"])
    disk.rename("/a/x", "/b/x")
    disk.remove("/b/x")
    disk.sync_folder("/b")
    disk.sync_folder("/a")
    disk.crash(CrashMode.NOTHING)
    assert disk.files() == {}


def test_what_was_not_synced_in_a_folder_moves_with_it_and_can_be_synced_there():
    disk = SimulatedDisk()
    disk.make_folders("/hidden")
    disk.write_new("/hidden/x", [b"x"])
    disk.rename("/hidden", "/shown")
    disk.sync_folder("/")
    assert disk.unsynced() == ["/shown"]
    lost = disk.fork()
    lost.crash(CrashMode.NOTHING)
    assert (lost.folders(), lost.files()) == (["/shown"], {})
    disk.sync_folder("/shown")
    disk.crash(CrashMode.NOTHING)
    assert disk.files() == {"/shown/x": b"x"}


def test_a_folder_that_was_being_removed_may_be_there_with_any_of_its_files():
    def make():
        disk = SimulatedDisk()
        disk.make_folders("/a")
        for name in "xy":
            disk.write_new(f"/a/{name}", [b""])
        disk.sync_folder("/a")
        disk.remove_folder("/a")
        return disk

    assert {tuple(dict(files)) for files in ways(make, CrashMode.PAGES)} == {("/a/x", "/a/y"), ("/a/x",), ("/a/y",), ()}


def test_a_failed_sync_of_a_file_is_followed_by_syncs_that_lie_in_every_mode():
    for mode in POWER:
        disk = log_of(b"u" * 600, synced=b"s")()
        disk.interrupt(len(disk.calls), StorageError("no"))
        with pytest.raises(StorageError):
            disk.sync_file("/log")
        disk.sync_file("/log")
        assert disk.read("/log") == b"s" + b"u" * 600
        disk.crash(mode)
        assert disk.read("/log") == b"s" + bytes(600)


def test_a_disk_fills_and_what_fits_is_written_and_removing_makes_room():
    disk = SimulatedDisk(capacity=10)
    file = disk.open_append("/log")
    file.write([b"123456"])
    with pytest.raises(DiskFull):
        file.write([b"789abcdef"])
    assert disk.read("/log") == b"123456789a"
    for write in (lambda: disk.write_new("/new", [b"1"]), lambda: disk.copy("/log", "/new")):
        with pytest.raises(DiskFull):
            write()
    assert list(disk.files()) == ["/log"]
    assert disk.refused == 3
    file.cut(5)
    disk.write_new("/new", [b"12345"])
    disk.remove("/new")
    disk.capacity = None
    file.write([b"x" * 100])
    assert disk.size("/log") == 105


def test_a_machine_that_has_stopped_does_nothing_more_until_it_crashes():
    disk = SimulatedDisk()
    disk.stop(2, moment="half")
    file = disk.open_append("/log")
    disk.sync_folder("/")
    with pytest.raises(Crash):
        file.write([b"1234"])
    for call in (lambda: disk.read("/log"), file.sync, file.size, lambda: disk.scan("/"), lambda: disk.remove("/log")):
        with pytest.raises(Crash):
            call()
    assert disk.stopped
    disk.kill()
    assert disk.read("/log") == b"12"


def test_a_file_that_was_being_made_is_not_there_half_there_or_there_and_not_synced():
    for moment, live, synced in (
        ("before", None, None),
        ("half", b"12", b""),
        ("unsynced", b"1234", b""),
        ("after", b"1234", b"1234"),
    ):
        disk = SimulatedDisk()
        disk.stop(0, moment=moment)
        with pytest.raises(Crash):
            disk.write_new("/new", [b"1234"])
        disk.kill()
        disk.sync_folder("/")
        assert (disk.files().get("/new"), disk.durable().get("/new")) == (live, synced)
    disk.interrupt(len(disk.calls), StorageError("no"), moment="half")
    with pytest.raises(StorageError):
        disk.write_new("/other", [b"1234"])
    assert "/other" not in disk.files()  # the living remove what they could not finish


def test_a_fork_goes_its_own_way():
    disk = log_of(b"u", synced=b"s")()
    twin = disk.fork()
    twin.crash(CrashMode.NOTHING)
    twin.write_new("/more", [b""])
    assert disk.files() == {"/log": b"su"}
    assert disk.durable() == {"/log": b"s"}
    disk.link("/log", "/again")
    shared = disk.fork()
    shared.open_append("/again").write([b"!"])
    assert shared.read("/log") == b"su!"


def test_disks_that_differ_only_in_what_is_synced_or_lost_are_told_apart():
    disks = [log_of(b"u", synced=b"s")() for _ in range(4)]
    disks[1].sync_file("/log")
    disks[2].interrupt(len(disks[2].calls), StorageError("no"))
    with pytest.raises(StorageError):
        disks[2].sync_file("/log")
    disks[3].link("/log", "/again")
    disks[3].remove("/again")
    assert len({repr(disk.files()) for disk in disks}) == 1
    assert len({disk.fingerprint() for disk in disks}) == 4
    assert all(disk.fork().fingerprint() == disk.fingerprint() for disk in disks)


# --- the drivers -----------------------------------------------------------------------------------------------


class Counter:
    """A file of numbered lines, each synced before it is acknowledged; what is torn at the end is cut."""

    def __init__(self, lines=3, *, sync=True, cut=True, folder=True):
        self.lines, self.sync, self.cut, self.folder = lines, sync, cut, folder

    def read(self, disk):
        try:
            data = disk.read("/log")
        except NotFound:
            return [], 0
        found, size = [], 0
        for line in data.splitlines(keepends=True):
            if line != b"%0600d\n" % len(found):
                break
            found.append(len(found))
            size += len(line)
        return found, size

    def work(self, disk, notes):
        found, size = self.read(disk)
        file = disk.open_append("/log")
        if self.cut:
            file.cut(size)
        file.sync()
        if self.folder:
            disk.sync_folder("/")
        for number in range(len(found), self.lines):
            file.write([b"%0600d\n" % number])
            if self.sync:
                file.sync()
            notes.append(number)

    def check(self, disk, notes):
        found, _ = self.read(disk)
        assert set(notes) <= set(found)


def test_what_keeps_its_promises_passes_every_driver(capsys):
    counter = Counter()
    for drive, options in (
        (crash_everywhere, {"again": 4}),
        (fail_everywhere, {}),
        (fill_everywhere, {"step": 100}),
    ):
        explored = drive(counter.work, counter.check, **options)
        with capsys.disabled():
            print(f"\nlines of a file, {drive.__name__}: {explored}")
        assert explored.states > 10
        assert explored.crashes >= explored.states


@pytest.mark.parametrize("broken", ["sync", "cut", "folder"])
def test_what_breaks_a_promise_is_caught_and_told_where(broken):
    counter = Counter(**{broken: False})
    with pytest.raises(AssertionError) as caught:
        crash_everywhere(counter.work, counter.check)
    assert "The disk: " in caught.value.__notes__[0]
    assert "call" in caught.value.__notes__[0]


def test_every_call_is_stopped_before_and_after_and_a_write_half_way():
    seen = []

    def work(disk, notes):
        with contextlib.suppress(Crash):
            seen.append(disk)
            disk.open_append("/log").write([b"1234"])
        if disk.stopped:
            raise Crash

    explored = crash_everywhere(work, lambda _disk, _notes: None, modes=[CrashMode.KILL])
    assert explored.stops == 2 + 3 + 1  # the opening, the write, and the end
    assert {len(disk.files().get("/log", b"-")) for disk in seen} >= {0, 1, 2, 4}


def test_an_error_of_the_workload_itself_is_not_taken_for_the_crash():
    def work(disk, _notes):
        disk.open_append("/log")
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        crash_everywhere(work, lambda _disk, _notes: None)


def test_damage_is_put_everywhere_and_shown_to_the_check():
    counter, found = Counter(2), set()
    explored = damage_everywhere(counter.work, lambda disk, _: found.add(disk.read("/log")), step=100, piece=b"?")
    assert explored.states == len(found) == 13
    assert all(data.count(b"?") == 1 for data in found)


def test_the_same_seeds_go_the_same_way_and_others_another():
    def explore(seeds):
        counter = Counter(5, sync=False)
        traces = []

        def work(disk, notes):
            try:
                counter.work(disk, notes)
            finally:
                traces.append(tuple(disk.calls))

        return crash_everywhere(work, lambda disk, _: counter.read(disk), seeds=seeds), traces

    first, second, other = explore((0, 1)), explore((0, 1)), explore((2, 3))
    assert first == second
    assert first[0].fingerprint != other[0].fingerprint


def test_the_same_seed_crashes_the_same_way_in_every_mode():
    for mode in CrashMode:

        def crashed(seed, mode=mode):
            disk = SimulatedDisk(seed)
            for number in range(4):
                file = disk.open_append(f"/{number}")
                file.write([bytes([number + 1]) * 3000])
                file.write([bytes([number + 9]) * 9000])
            disk.crash(mode)
            return disk.files()

        assert [crashed(seed) for seed in range(5)] == [crashed(seed) for seed in range(5)]
        if mode not in (CrashMode.KILL, CrashMode.NOTHING):
            assert len({repr(crashed(seed)) for seed in range(20)}) > 2
