"""The disk that crashes: it does what the machine's own disk does, until it loses what was not synced."""

from __future__ import annotations

import pytest

from strandline.model.errors import AlreadyExists, NotFound, StorageError
from strandline.storage.disk import DISK, AppendFile, Disk
from strandline.testing.simdisk import SimulatedDisk


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
