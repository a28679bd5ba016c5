"""The disk that crashes: it does what the machine's own disk does, until it loses what was not synced."""

from __future__ import annotations

import contextlib

import pytest

from strandline.errors import AlreadyExists, DiskFull, InvalidInput, NotFound, StorageError
from strandline.storage.disk import DISK, AppendFile, Disk
from strandline.testing.faulty import Crash
from strandline.testing.simdisk import (
    POWER,
    CrashMode,
    SimulatedDisk,
    crash_everywhere,
    every,
    fail_everywhere,
    fill_everywhere,
)
from tests.disk_doubles import damage_everywhere


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


def test_the_simulated_disk_is_a_disk():
    disk = SimulatedDisk()
    assert isinstance(disk, Disk)
    assert isinstance(disk.open_append("/a"), AppendFile)


def test_a_simulated_disk_does_what_the_local_disk_does(place):
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
    file.sync()
    disk.rename(f"{at}/a", f"{at}/b")
    file.write([b"goes on"])
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


def test_a_file_is_rewritten_in_place_and_may_grow_by_it(place):
    disk, at = place
    file = disk.open_append(f"{at}/a")
    file.rewrite(0, [b"new"])
    file.write([b"0123456789"])
    file.rewrite(3, [b"ab"])
    assert disk.read(f"{at}/a") == b"newab23456789"
    file.rewrite(10, [b"c", memoryview(b"def"), b"", b"gh"])
    file.rewrite(16, [b"!"])
    file.rewrite(2, [])
    file.rewrite(2, [b""])
    assert (disk.read(f"{at}/a"), file.size()) == (b"newab23456cdefgh!", 17)
    file.write([b"at the end"])
    assert disk.read(f"{at}/a") == b"newab23456cdefgh!at the end"
    file.cut(5)
    file.rewrite(4, [b"x" * 1_000_000, b"y" * 700_000])
    file.rewrite(0, [b"z" * 600_000])
    assert disk.read(f"{at}/a") == b"z" * 600_000 + b"x" * 400_004 + b"y" * 700_000
    file.sync()
    file.close()


@pytest.mark.parametrize("how", ["remove", "remove_folder", "replace", "move", "move_folder"])
def test_a_file_that_its_path_does_not_lead_to_any_more_cannot_be_made_durable(place, how):
    disk, at = place
    disk.make_folders(f"{at}/log")
    file = disk.open_append(f"{at}/log/a")
    file.write([b"one"])
    file.sync()
    file.check_in_place()
    disk.link(f"{at}/log/a", f"{at}/second")
    match how:
        case "remove":
            disk.remove(f"{at}/log/a")
        case "remove_folder":
            disk.remove_folder(f"{at}/log")
        case "replace":
            disk.write_new(f"{at}/log/b", [])
            disk.rename(f"{at}/log/b", f"{at}/log/a")
        case "move":
            disk.rename(f"{at}/log/a", f"{at}/log/b")
        case "move_folder":
            disk.rename(f"{at}/log", f"{at}/aside")
    file.write([b"two"])
    for call in (file.check_in_place, file.sync):
        with pytest.raises(NotFound, match="was removed, moved or replaced"):
            call()


@pytest.mark.parametrize("start", [4, 100, -1])
def test_a_rewrite_leaves_no_hole(place, start):
    disk, at = place
    file = disk.open_append(f"{at}/a")
    file.write([b"123"])
    with pytest.raises(InvalidInput, match="has 3 bytes"):
        file.rewrite(start, [b"x"])
    assert disk.read(f"{at}/a") == b"123"


def test_a_rewrite_finds_its_file_under_another_name_and_leaves_the_one_that_has_its_own(place):
    disk, at = place
    file = disk.open_append(f"{at}/a")
    file.write([b"mine"])
    disk.rename(f"{at}/a", f"{at}/b")
    disk.write_new(f"{at}/a", [b"other"])
    file.rewrite(0, [b"M"])
    disk.remove(f"{at}/a")
    file.rewrite(1, [b"I"])
    assert disk.read(f"{at}/b") == b"MIne"


def test_a_closed_file_is_not_rewritten(place):
    disk, at = place
    for before in (False, True):
        file = disk.open_append(f"{at}/{before}")
        file.write([b"123"])
        if before:
            file.rewrite(0, [b"a"])
        file.close()
        file.close()
        with pytest.raises(StorageError):
            file.rewrite(0, [b"x"])
        assert disk.read(f"{at}/{before}") == (b"a23" if before else b"123")


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


def test_bytes_of_a_failed_sync_can_be_read_but_are_never_durable_unless_written_again():
    for again in (None, "cut", "rewrite"):
        disk, file = synced_and_not(3)
        fails_to_sync(disk, file)
        assert disk.read("/log")[1000:] == b"u" * 1000
        if again == "cut":
            file.cut(1000)
            file.write([b"u" * 1000])
        elif again == "rewrite":
            file.rewrite(1000, [b"u" * 1000])
        file.sync()
        disk.crash()
        assert disk.read("/log")[1000:] == (b"u" if again else b"\0") * 1000


def fails_to_sync(disk, file):
    disk.interrupt(len(disk.calls), StorageError("no"))
    with pytest.raises(StorageError):
        file.sync()


def test_a_rewrite_heals_what_a_failed_sync_lost_even_after_a_sync_that_lied_and_only_what_it_covers():
    for lies in (0, 1, 2):
        disk, file = synced_and_not(3)
        fails_to_sync(disk, file)
        for _ in range(lies):
            file.sync()
        assert disk.unsynced() == ["/log"]
        disk.kill()
        file = disk.open_append("/log")
        file.rewrite(1200, [b"u" * 300])
        assert disk.durable()["/log"][1000:] == bytes(1000 if lies else 0)
        file.sync()
        healed = b"s" * 1000 + bytes(200) + b"u" * 300 + bytes(500)
        assert disk.durable() == {"/log": healed}
        assert disk.unsynced() == ["/log"]
        file.rewrite(1000, [b"u" * 1000])
        file.sync()
        assert disk.unsynced() == []
        disk.crash()
        assert disk.read("/log") == b"s" * 1000 + b"u" * 1000


def test_a_rewrite_that_is_not_synced_heals_nothing_and_one_whose_sync_fails_is_lost_again():
    for mode in POWER:
        disk, file = synced_and_not(3)
        fails_to_sync(disk, file)
        file.rewrite(1000, [b"u" * 1000])
        fails_to_sync(disk, file)
        file.sync()
        disk.crash(mode)
        assert disk.read("/log") == b"s" * 1000 + bytes(1000)
    disk, file = synced_and_not(3)
    fails_to_sync(disk, file)
    file.rewrite(1000, [b"u" * 1000])
    disk.crash(CrashMode.NOTHING)
    assert disk.read("/log") == b"s" * 1000


def test_a_failed_sync_of_a_rewrite_leaves_the_old_bytes_on_the_disk_and_shows_the_new():
    for mode in POWER:
        disk = log_of(synced=b"s" * 700)()
        file = disk.open_append("/log")
        file.rewrite(300, [b"n" * 500])
        fails_to_sync(disk, file)
        file.sync()
        assert disk.read("/log") == b"s" * 300 + b"n" * 500
        assert disk.unsynced() == ["/log"]
        disk.crash(mode)
        assert disk.read("/log") == b"s" * 700 + bytes(100)


def test_an_interrupted_rewrite_is_not_done_half_done_or_done():
    for moment, data in (("before", b"0123"), ("half", b"01ab"), ("after", b"01abcd")):
        disk = SimulatedDisk()
        file = disk.open_append("/log")
        file.write([b"0123"])
        disk.interrupt(2, StorageError("no"), moment=moment)
        with pytest.raises(StorageError):
            file.rewrite(2, [b"abc", b"d"])
        assert disk.read("/log") == data
        assert disk.calls[2] == ("rewrite", "/log")


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
    """Each state of a disk, with all its files, that a crash in this mode can leave."""

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


@pytest.mark.matrix
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


def rewritten(*steps, synced):
    def make():
        disk = log_of(synced=synced)()
        file = disk.open_append("/log")
        for at, data in steps:
            file.rewrite(at, [data])
        return disk

    return make


def test_a_rewrite_that_was_not_synced_may_be_undone_and_a_later_one_survives_only_with_the_earlier_ones_in_a_prefix():
    make = rewritten((1, b"aa"), (2, b"bbb"), synced=b"ssss")
    assert contents(make, CrashMode.NOTHING) == {b"ssss"}
    assert contents(make, CrashMode.KILL) == {b"sabbb"}
    assert contents(make, CrashMode.PREFIX) == {b"ssss", b"saas", b"sabbb"}
    disk = make()
    assert (disk.durable(), disk.unsynced()) == ({"/log": b"ssss"}, ["/log"])
    disk.sync_file("/log")
    assert (disk.durable(), disk.unsynced()) == ({"/log": b"sabbb"}, [])


@pytest.mark.parametrize(("mode", "unit"), [(CrashMode.TORN_512, 512), (CrashMode.TORN_4096, 4096)])
def test_a_rewrite_is_torn_where_the_sectors_of_the_file_end_and_the_rest_is_as_it_was(mode, unit):
    old = b"s" * 3 * unit
    head, tail = b"s" * (unit - 10), b"s" * (unit - 10)
    new = b"n" * (unit + 20)
    assert contents(rewritten((unit - 10, new), synced=old), mode) == {
        old, head + new + tail, head + new[:10] + b"s" * 2 * unit, head + new[: unit + 10] + b"s" * unit,
    }  # fmt: skip
    # One that makes the file longer: the rest is old bytes, and behind them nothing, or zeros.
    longer, short = head + b"n" * 2 * unit, b"s" * (unit + 5)
    torn = [longer[:unit] + b"s" * 5, longer[: 2 * unit]]
    assert contents(rewritten((unit - 10, b"n" * 2 * unit), synced=short), mode) == {
        short, longer, *torn, *(data.ljust(len(longer), b"\0") for data in torn),
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "unit"), [(CrashMode.SECTORS, 512), (CrashMode.PAGES, 4096)])
def test_of_rewritten_pages_any_version_may_be_kept_and_a_later_rewrite_may_survive_an_earlier_one(mode, unit):
    make = rewritten((0, b"1" * 2 * unit), (unit, b"2" * unit), synced=b"s" * 3 * unit)
    kept = {b"%c" % data[0] + b"%c" % data[unit] + b"%c" % data[2 * unit] for data in contents(make, mode)}
    assert kept == {b"sss", b"s1s", b"s2s", b"1ss", b"11s", b"12s"}
    assert all(len(set(data[at : at + unit])) == 1 for data in contents(make, mode) for at in (0, unit, 2 * unit))


def test_scraps_of_a_rewrite_are_of_any_version_and_what_was_not_rewritten_stays():
    found = set()
    for seed in range(300):
        disk = rewritten((4, b"1" * 8), (4, b"2" * 8), synced=b"s" * 16)()
        disk = disk.fork(seed)
        disk.crash(CrashMode.SCRAPS)
        data = disk.read("/log")
        assert data[:4] == data[12:] == b"ssss"
        found.add(frozenset(data[4:12]))
    assert found == {frozenset(kept) for kept in (b"s", b"1", b"2", b"s1", b"s2", b"12", b"s12")}


def test_a_crash_takes_nothing_of_a_rewrite_that_was_synced():
    for mode in CrashMode:
        for seed in range(5):
            disk = rewritten((4, b"1" * 600), (2, b"2" * 100), synced=b"s" * 16)().fork(seed)
            disk.sync_file("/log")
            disk.crash(mode)
            assert disk.read("/log") == b"ss" + b"2" * 100 + b"1" * 502


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


def test_a_rewrite_takes_room_only_for_what_is_past_the_end():
    disk = SimulatedDisk(capacity=10)
    file = disk.open_append("/log")
    file.write([b"12345678"])
    file.rewrite(0, [b"abcdefghij"])
    file.rewrite(0, [b"ABCDEFGHIJ"])
    assert disk.refused == 0
    with pytest.raises(DiskFull):
        file.rewrite(5, [b"-------"])
    assert (disk.read("/log"), disk.refused) == (b"ABCDE-----", 1)
    disk.capacity = 5
    file.rewrite(0, [b"full"])
    assert disk.read("/log") == b"fullE-----"


def test_a_rewrite_of_a_damaged_disk_changes_no_other_version_of_its_bytes():
    make = rewritten((0, b"11"), (1, b"22"), synced=b"ssss")
    disk = make()
    disk.damage("/log", 2, b"??")
    assert disk.read("/log") == b"12??"

    def damaged():
        disk = make()
        disk.damage("/log", 2, b"??")
        return disk

    assert contents(damaged, CrashMode.PREFIX) == {b"ss??", b"11??", b"12??"}


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


def test_disks_that_differ_only_in_synced_or_lost_writes_have_different_fingerprints():
    disks = [log_of(b"u", synced=b"s")() for _ in range(5)]
    disks[1].sync_file("/log")
    disks[2].interrupt(len(disks[2].calls), StorageError("no"))
    with pytest.raises(StorageError):
        disks[2].sync_file("/log")
    disks[3].link("/log", "/again")
    disks[3].remove("/again")
    disks[4].open_append("/log").rewrite(0, [b"x"])
    disks[4].open_append("/log").rewrite(0, [b"s"])
    assert len({repr(disk.files()) for disk in disks}) == 1
    assert len({disk.fingerprint() for disk in disks}) == 5
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


@pytest.mark.matrix
def test_a_correct_workload_passes_every_driver(capsys):
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
def test_a_broken_promise_is_caught_with_its_place(broken):
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


class Mended(Counter):
    """The same, but rewrites what it finds before trusting it: its sync may have failed in an earlier process."""

    def __init__(self, *, rewrite=True, **options):
        super().__init__(**options)
        self.rewrite = rewrite

    def work(self, disk, notes):
        self.open(disk)
        super().work(disk, notes)

    def check(self, disk, notes):
        self.open(disk)
        notes += [number for number in self.read(disk)[0] if number not in notes]
        super().check(disk, notes)

    def open(self, disk):
        size = self.read(disk)[1]
        file = disk.open_append("/log")
        file.cut(size)
        if self.rewrite:
            file.rewrite(0, [disk.read("/log", 0, size)])
        file.sync()
        disk.sync_folder("/")


@pytest.mark.matrix
def test_a_recovery_that_rewrites_what_it_finds_survives_a_failed_sync_of_a_dead_process():
    mended = Mended()
    assert fail_everywhere(mended.work, mended.check, modes=tuple(CrashMode), then=2).states > 10
    mended = Mended(lines=2)
    assert crash_everywhere(mended.work, mended.check, again=3).states > 10


def test_a_recovery_that_only_syncs_what_it_finds_is_caught():
    mended = Mended(rewrite=False)
    with pytest.raises(AssertionError) as caught:
        fail_everywhere(mended.work, mended.check, modes=[CrashMode.KILL])
    assert "(sync /log) failed, kill" in caught.value.__notes__[0]


def test_a_rewrite_is_stopped_before_half_way_and_after():
    seen = []

    def work(disk, _notes):
        seen.append(disk)
        file = disk.open_append("/log")
        file.rewrite(0, [b"1234"])

    explored = crash_everywhere(work, lambda _disk, _notes: None, modes=[CrashMode.KILL])
    assert explored.stops == 2 + 3 + 1  # the opening, the rewrite, and the end
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


@pytest.mark.matrix
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
                file.rewrite(2000, [bytes([number + 20]) * 5000])
            disk.crash(mode)
            return disk.files()

        assert [crashed(seed) for seed in range(5)] == [crashed(seed) for seed in range(5)]
        if mode not in (CrashMode.KILL, CrashMode.NOTHING):
            assert len({repr(crashed(seed)) for seed in range(20)}) > 2
