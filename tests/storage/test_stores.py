"""The store contract on every store that needs no server, and what only the local one promises."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from strandline.errors import AlreadyExists, Conflict, CorruptData, DiskFull, InvalidInput, StorageError
from strandline.storage.disk import DISK, FolderRow, LocalDisk
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.remote import ObstoreStore
from strandline.storage.objects.store import ABSENT, Match, ObjectStore
from strandline.storage.objects.urls import open_store
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import ObjectStoreContract, content, paths
from tests.disk_doubles import DiskAction, FullDisk, RecordingDisk
from tests.storage.child_programs import run_python


@pytest.mark.parametrize("kind", ["local", "obstore"])
def test_an_object_larger_than_any_that_is_read_whole_is_refused_unread(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: ObjectStore = (
        LocalStore(str(tmp_path)) if kind == "local" else ObstoreStore("memory://x", client=MemoryStore())
    )
    store.put("small", bytes(1000))
    store.put("large", bytes(1001))
    for module in ("store", "local"):
        monkeypatch.setattr(f"strandline.storage.objects.{module}.LARGEST_OBJECT", 1000)
    assert len(store.get("small").data) == 1000
    with pytest.raises(CorruptData, match="large has more than 1,000 bytes"):
        store.get("large")
    assert store.get_range("large", 1000, 1) == b"\0", "a part of it can be read all the same"


@pytest.mark.matrix
class TestPlainStore(ObjectStoreContract):
    picklable = False

    @pytest.fixture
    def store(self) -> ObjectStore:
        return PlainStore()


class TestMemoryStore(ObjectStoreContract):
    picklable = False

    @pytest.fixture
    def store(self) -> ObjectStore:
        return ObstoreStore("memory://contract", client=MemoryStore())


class TestLocalStore(ObjectStoreContract):
    nests = False
    increments = 1000

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(str(tmp_path / "store"))


@pytest.mark.matrix
class TestFaultyStoreWithoutFaults(ObjectStoreContract):
    picklable = False

    @pytest.fixture
    def store(self) -> ObjectStore:
        return FaultyStore(PlainStore())


class TestOpenedStore(ObjectStoreContract):
    """What users get: the local store as ``open_store`` opens it, with retries around it."""

    nests = False
    increments = 100
    many = 1100

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"file://{tmp_path}/a%20folder")

    def test_an_escaped_address_names_the_folder_it_means(self, store: ObjectStore, tmp_path: Path) -> None:
        store.put("a", b"content")
        assert (tmp_path / "a folder" / "a").read_bytes() == b"content"


# --- the local store: what is acknowledged is on the disk -----------------------------------------------------


def hidden_files(root: Path) -> list[str]:
    """Temporary files left behind; lock files stay by design."""
    return [path.name for path in root.rglob(".~*") if not path.name.startswith(".~lock-")]


def steps(disk: RecordingDisk) -> list[DiskAction]:
    return [event.action for event in disk.events]


class TestDurability:
    @pytest.fixture
    def disk(self) -> RecordingDisk:
        return RecordingDisk()

    @pytest.fixture
    def store(self, tmp_path: Path, disk: RecordingDisk) -> LocalStore:
        return LocalStore(str(tmp_path), env=Env(disk=disk))

    def test_a_put_is_synced_as_a_file_then_named_then_synced_as_a_name(
        self, store: LocalStore, disk: RecordingDisk, tmp_path: Path
    ) -> None:
        store.put("a/first", b"")
        disk.events.clear()
        store.put("a/b", b"content")
        folders, write, rename, sync = disk.events
        assert (folders.action, folders.path) == ("make_folders", str(tmp_path / "a"))
        assert write.action == "write"
        assert os.path.dirname(write.path) == str(tmp_path / "a")
        assert (rename.action, rename.source, rename.path) == ("rename", write.path, str(tmp_path / "a" / "b"))
        assert (sync.action, sync.path) == ("sync_folder", str(tmp_path / "a"))

    def test_a_creation_is_linked_so_that_it_cannot_replace_and_then_synced(
        self, store: LocalStore, disk: RecordingDisk, tmp_path: Path
    ) -> None:
        store.put("a/first", b"")
        disk.events.clear()
        store.put_if("a/b", b"content", ABSENT)
        assert steps(disk) == ["make_folders", "write", "link", "remove", "sync_folder"]
        assert disk.events[2].source == disk.events[1].path == disk.events[3].path
        assert disk.events[4].path == str(tmp_path / "a")

    def test_a_conditional_update_is_durable_before_the_lock_is_given_up(
        self, store: LocalStore, disk: RecordingDisk
    ) -> None:
        version = store.put_if("a/b", b"first", ABSENT)
        disk.events.clear()
        store.put_if("a/b", b"second", Match(version))
        assert steps(disk) == [
            "make_folders",
            "lock",
            "make_folders",
            "write",
            "rename",
            "sync_folder",
            "unlock",
        ]

    def test_a_delete_is_synced(self, store: LocalStore, disk: RecordingDisk, tmp_path: Path) -> None:
        store.put("a/b", b"content")
        disk.events.clear()
        store.delete("a/b")
        assert [(event.action, event.path) for event in disk.events] == [
            ("remove", str(tmp_path / "a" / "b")),
            ("sync_folder", str(tmp_path / "a")),
        ]

    def test_the_loser_of_a_race_syncs_the_winner_s_name_before_acting_on_it(
        self, store: LocalStore, disk: RecordingDisk
    ) -> None:
        version = store.put_if("a/b", b"first", ABSENT)
        disk.events.clear()
        with pytest.raises(AlreadyExists):
            store.put_if("a/b", b"second", ABSENT)
        assert steps(disk) == ["make_folders", "write", "remove", "sync_folder"]
        store.put("a/b", b"third")
        disk.events.clear()
        with pytest.raises(Conflict):
            store.put_if("a/b", b"fourth", Match(version))
        assert steps(disk) == ["make_folders", "lock", "sync_folder", "unlock"]

    def test_a_new_folder_is_synced_into_the_one_that_holds_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []
        sync = type(DISK).sync_folder
        monkeypatch.setattr(type(DISK), "sync_folder", lambda disk, path: (synced.append(path), sync(disk, path))[1])
        LocalStore(str(tmp_path / "new")).put("x/y", b"")
        assert synced[:2] == [str(tmp_path), str(tmp_path / "new")]
        assert synced[-1] == str(tmp_path / "new" / "x")

    def test_a_folder_that_another_process_made_is_synced_into_its_own_once(
        self, store: LocalStore, disk: RecordingDisk, tmp_path: Path
    ) -> None:
        (tmp_path / "a" / "b").mkdir(parents=True)  # by one that died before it could sync the names
        for _ in range(2):
            store.put("a/b/c", b"")
        synced = [event.path for event in disk.events if event.action == "sync_folder"]
        own = str(tmp_path / "a" / "b")
        assert synced == [str(tmp_path / "a"), str(tmp_path), str(tmp_path.parent), own, own]

    def test_the_write_itself_is_synced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[int] = []
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_size), fsync(file))[1])
        DISK.write_new(str(tmp_path / "file"), [b"1234", b"567"])
        assert synced == [7]


class TestFailingDisk:
    def test_a_put_that_finds_no_room_changes_nothing_and_leaves_nothing(self, tmp_path: Path) -> None:
        disk = FullDisk(DISK, 100)
        store = LocalStore(str(tmp_path), env=Env(disk=disk))
        store.put("a", b"x" * 60)
        with pytest.raises(DiskFull):
            store.put("a", b"y" * 60)
        with pytest.raises(DiskFull):
            store.put_if("b", b"y" * 60, ABSENT)
        with pytest.raises(DiskFull):
            store.put_if("a", b"y" * 60, Match(store.get("a").version))
        assert disk.refused == 3
        assert paths(store) == ["a"]
        assert content(store, "a") == b"x" * 60
        assert hidden_files(tmp_path) == []

    def test_a_put_works_again_when_there_is_room(self, tmp_path: Path) -> None:
        disk = FullDisk(DISK, 10)
        store = LocalStore(str(tmp_path), env=Env(disk=disk))
        with pytest.raises(DiskFull):
            store.put_if("a", b"y" * 60, ABSENT)
        disk.make_room(60)
        store.put_if("a", b"y" * 60, ABSENT)
        assert content(store, "a") == b"y" * 60
        assert disk.room == 0

    def test_a_full_disk_leaves_a_torn_file_as_a_real_one_may(self, tmp_path: Path) -> None:
        with pytest.raises(DiskFull):
            FullDisk(DISK, 5).write_new(str(tmp_path / "file"), [b"123", b"4567"])
        assert (tmp_path / "file").read_bytes() == b"12345"

    def test_a_put_that_cannot_be_named_leaves_no_temporary_file(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        store.put("folder/a", b"content")
        with pytest.raises(StorageError):
            store.put("folder", b"in the way")
        with pytest.raises(AlreadyExists):
            store.put_if("folder/a", b"content", ABSENT)
        with pytest.raises(Conflict):
            store.put_if("folder/a", b"content", Match(store.put_if("other", b"other", ABSENT)))
        assert hidden_files(tmp_path) == []

    def test_a_real_limit_on_file_sizes_is_disk_full_and_leaves_the_old_object(self, tmp_path: Path) -> None:
        program = f"""
import resource, signal
from strandline.errors import DiskFull
from strandline.storage.objects.local import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = LocalStore({str(tmp_path)!r})
store.put("a", b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))
for attempt in (lambda: store.put("a", b"x" * 200_000), lambda: store.put("b", [b"x" * 60_000] * 2)):
    try:
        attempt()
    except DiskFull as error:
        print("full:", error.retryable)
"""
        assert run_python(program) == "full: False\nfull: False\n"
        assert paths(LocalStore(str(tmp_path))) == ["a"]
        assert (tmp_path / "a").read_bytes() == b"old"
        assert hidden_files(tmp_path) == []

    def test_a_write_that_fails_halfway_is_removed_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match="No space left"):
            DISK.write_new(str(tmp_path / "file"), [b"half"])
        assert list(tmp_path.iterdir()) == []

    def test_a_rewrite_that_falls_short_is_gone_on_with(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pwrite, pwritev = os.pwrite, os.pwritev
        monkeypatch.setattr(os, "pwrite", lambda to, part, at: pwrite(to, part[:3], at))
        monkeypatch.setattr(os, "pwritev", lambda to, parts, at: pwritev(to, [parts[0][:3]], at))
        file = DISK.open_append(str(tmp_path / "file"))
        file.write([b"0123456789"])
        file.rewrite(1, [b"abcdefg"])
        assert (tmp_path / "file").read_bytes() == b"0abcdefg89"
        file.rewrite(4, [b"ABCD", b"", b"E", memoryview(b"FGHIJ")])
        assert (tmp_path / "file").read_bytes() == b"0abcABCDEFGHIJ"
        file.close()

    def test_a_rewrite_that_finds_no_room_is_disk_full(self, tmp_path: Path) -> None:
        program = f"""
import resource, signal
from strandline.errors import DiskFull
from strandline.storage.disk import DISK
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = DISK.open_append({str(tmp_path / "file")!r})
file.write([b"x" * 1000])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
file.rewrite(0, [b"in place"])
for attempt in (lambda: file.rewrite(1000, [b"y"]), lambda: file.rewrite(990, [b"y" * 10, b"y" * 10])):
    try:
        attempt()
    except DiskFull as error:
        print("full:", error.retryable)
"""
        assert run_python(program) == "full: False\nfull: False\n"
        assert (tmp_path / "file").read_bytes() == b"in place" + b"x" * 982 + b"y" * 10

    def test_a_rewrite_that_the_disk_refuses_raises(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        file = DISK.open_append(str(tmp_path / "file"))
        monkeypatch.setattr(os, "pwrite", broken)
        with pytest.raises(StorageError, match=r"refused .*file: Input/output error"):
            file.rewrite(0, [b"x"])

    def test_rewriting_opens_the_file_once_and_closing_closes_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: set[int] = set()
        os_open, os_close = os.open, os.close

        def count(*arguments: Any) -> int:
            found = os_open(*arguments)
            opened.add(found)
            return found

        monkeypatch.setattr(os, "open", count)
        monkeypatch.setattr(os, "close", lambda file: (opened.discard(file), os_close(file))[1])
        file = DISK.open_append(str(tmp_path / "file"))
        assert len(opened) == 1
        for _ in range(5):
            file.rewrite(0, [b"x"])
        assert len(opened) == 2
        file.close()
        assert not opened

    def test_where_open_files_have_no_names_a_rewrite_goes_by_the_path_and_never_to_another_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os_open = os.open

        def without_proc(path: str, *arguments: Any) -> int:
            return os_open(path.replace("/proc/", "/no such/"), *arguments)

        monkeypatch.setattr(os, "open", without_proc)
        path = tmp_path / "file"
        file = DISK.open_append(str(path))
        file.rewrite(0, [b"found"])
        file.close()
        file = DISK.open_append(str(path))
        DISK.rename(str(path), str(tmp_path / "moved"))
        with pytest.raises(StorageError, match="not the opened file"):
            file.rewrite(1, [b"x"])
        path.write_bytes(b"another")
        with pytest.raises(StorageError, match="not the opened file"):
            file.rewrite(1, [b"x"])
        file.close()
        assert (path.read_bytes(), (tmp_path / "moved").read_bytes()) == (b"another", b"found")

    def test_the_first_bytes_are_written_over_in_memory_and_everyone_sees_them(self, tmp_path: Path) -> None:
        path = tmp_path / "mark"
        file = DISK.open_append(str(path))
        for number in range(5):
            file.rewrite(0, [b"%08d" % number])
            assert path.read_bytes() == b"%08d" % number
        file.write([b"more"])
        file.rewrite(0, [b"all of them!"])  # as long as the file is now
        assert path.read_bytes() == b"all of them!"
        file.cut(4)  # a page that is no longer there must not be written to
        file.rewrite(0, [b"12345678"])
        file.sync()
        assert path.read_bytes() == b"12345678"
        file.close()
        DISK.rename(str(path), str(tmp_path / "moved"))
        file = DISK.open_append(str(tmp_path / "moved"))
        file.rewrite(0, [b"x"])
        file.close()
        assert (tmp_path / "moved").read_bytes() == b"x2345678"

    def test_names_of_temporary_files_cannot_be_objects(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        (tmp_path / ".~new-left-by-a-crash").write_bytes(b"torn")
        assert paths(store) == []
        with pytest.raises(InvalidInput):
            store.get(".~new-left-by-a-crash")
        with pytest.raises(InvalidInput):
            store.put("a/.~lock-b", b"")


class TestListingAFolder:
    def test_it_has_the_time_of_the_last_write(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        store.put("a", b"first")
        os.utime(tmp_path / "a", ns=(0, 1_600_000_000_123_456_789))
        assert [row.modified for row in store.list("")] == [1_600_000_000_123_456]
        store.put("a", b"second")
        assert [row.modified > 1_600_000_000_123_456 for row in store.list("")] == [True]

    def test_it_begins_at_the_deepest_folder_that_the_prefix_names(self, tmp_path: Path) -> None:
        scanned: list[str] = []

        class Watched(LocalDisk):
            def scan(self, path: str) -> list[FolderRow]:
                scanned.append(os.path.relpath(path, tmp_path))
                return super().scan(path)

        store = LocalStore(str(tmp_path), env=Env(disk=Watched()))
        for name in ("a/b/c/1", "a/b/c/2", "a/b/other/1", "a/x/1", "y/1"):
            store.put(name, b"")
        assert paths(store, "a/b/c/") == ["a/b/c/1", "a/b/c/2"]
        assert scanned == ["a/b/c"]
        scanned.clear()
        assert paths(store, "a/b/c", "a/b/c/1") == ["a/b/c/2"]
        assert scanned == ["a/b", "a/b/c"]

    @pytest.mark.parametrize("prefix", ["../", "a/../a/", "./", "/", "a//", "nul\0/", ".~hidden/", "a/b/c/"])
    def test_a_prefix_that_no_object_can_have_lists_nothing(self, tmp_path: Path, prefix: str) -> None:
        store = LocalStore(str(tmp_path / "store"))
        store.put("a/b", b"")
        store.put("outside", b"")
        (tmp_path / "store" / ".~hidden").mkdir()
        (tmp_path / "store" / ".~hidden" / "file").touch()
        assert paths(store, prefix) == []


def test_a_plain_store_stamps_its_objects_by_its_clock() -> None:
    clock = ManualClock(now=1_000_000)
    store = PlainStore(clock=clock)
    store.put("a", b"")
    store.put("b", b"")
    clock.advance(2.0)
    store.put("b", b"again")
    assert [(row.path, row.modified) for row in store.list("")] == [("a", 1_000_000), ("b", 3_000_000)]


def test_a_conditional_write_that_a_bucket_answers_with_not_found_is_a_conflict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What S3 says to If-Match on an object that is gone; the memory store says that the precondition failed.
    def gone(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("no such key")

    store = ObstoreStore("memory://gone", client=MemoryStore())
    version = store.put_if("a", b"1", ABSENT)
    monkeypatch.setattr("obstore.put", gone)
    with pytest.raises(Conflict):
        store.put_if("a", b"2", Match(version))


class TestAddresses:
    def test_one_memory_address_is_one_store_in_this_process(self) -> None:
        open_store("memory://one").put("a", b"1")
        assert content(open_store("memory://one"), "a") == b"1"
        assert paths(open_store("memory://two")) == []

    @pytest.mark.parametrize("url", ["memory://", "memory://one", "s3://bucket/some/prefix"])
    def test_the_address_of_a_store_opens_it_again(self, url: str) -> None:
        assert open_store(open_store(url).url).url == open_store(url).url

    def test_a_trailing_slash_is_no_part_of_the_address(self) -> None:
        assert open_store("s3://bucket/prefix/").url == "s3://bucket/prefix"

    @pytest.mark.parametrize("url", ["ftp://host/x", "file://", ""])
    def test_an_address_that_cannot_work_is_refused(self, url: str) -> None:
        with pytest.raises(InvalidInput):
            open_store(url)

    def test_a_bucket_that_cannot_be_reached_is_a_retryable_error_that_names_it(self) -> None:
        options = {
            "endpoint": "http://127.0.0.1:1",
            "allow_http": "true",
            "region": "us-east-1",
            "access_key_id": "nobody",
            "secret_access_key": "nothing",
        }
        store = ObstoreStore("s3://bucket/log", options)
        with pytest.raises(StorageError, match="s3://bucket/log/head") as caught:
            store.get("head")
        assert caught.value.retryable

    def test_an_option_that_does_not_exist_is_refused_by_name(self) -> None:
        with pytest.raises(StorageError, match="no_such_option") as caught:
            ObstoreStore("s3://bucket/log", {"no_such_option": "1"}).get("head")
        assert not caught.value.retryable


def test_a_lock_whose_file_was_removed_during_the_wait_is_taken_again(tmp_path, monkeypatch):
    path, honest = tmp_path / "lock", fcntl.flock

    def removed_before(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", honest)
        path.unlink()
        honest(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with DISK.try_locked(str(path)) as held:
        assert held
        with DISK.try_locked(str(path)) as second:
            assert not second
