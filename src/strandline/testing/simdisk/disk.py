"""A simulated in-memory disk: a crash loses unsynced data, as a power failure does."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple, TypeVar

from strandline.errors import NotFound, StorageError
from strandline.storage.disk import AppendFile, FolderRow
from strandline.testing.faulty import Crash
from strandline.testing.simdisk.nodes import (
    Choices,
    CrashMode,
    Drawn,
    File,
    Folder,
    crash_below,
    observable_state,
    walk,
)
from strandline.testing.simdisk.tree import Tree, clean

R = TypeVar("R")

SimulatedAction = Literal[
    "write_new", "open_append", "write", "rewrite", "sync", "cut", "copy", "remove_folder", "rename", "link",
    "remove", "sync_file", "sync_folder", "make_folders",
]  # fmt: skip
Moment = Literal["before", "half", "unsynced", "after"]

MOMENTS: Final[dict[SimulatedAction, tuple[Moment, ...]]] = {
    "write": ("half", "after"),
    "rewrite": ("half", "after"),
    "write_new": ("half", "unsynced", "after"),
    "copy": ("half", "unsynced", "after"),
    "remove_folder": ("half", "after"),
    "make_folders": ("unsynced", "after"),
}
"""The moments of a call that have different effects from before it, if there are more than after it."""


class SimulatedCall(NamedTuple):
    """One call that may change the disk."""

    action: SimulatedAction
    path: str


class SimulatedDisk:
    """A :class:`~strandline.storage.disk.Disk` in memory, for tests of what a crash leaves. Paths are POSIX paths.

    A file's bytes are durable when they were synced, a name when its folder was. :meth:`crash` keeps those, and of the
    rest what its mode says; of bytes that were rewritten and not synced, the old ones or the new. A file whose sync
    failed keeps bytes that can be read but that no later sync makes durable, although it succeeds, as on Linux: only
    rewriting them does, or truncating them and writing them again. A folder whose sync failed can be synced again.

    Every call that changes something is counted in :attr:`calls`; :meth:`interrupt` makes one of them fail, and
    :meth:`stop` stops the machine there. With a ``capacity``, a write without room is ``DiskFull``, and the part
    that fits is written.

    >>> disk = SimulatedDisk()
    >>> disk.make_folders("/data")
    >>> disk.write_new("/data/a", [b"durable"])
    >>> disk.sync_folder("/data")
    >>> disk.write_new("/data/b", [b"synced, but its name is not"])
    >>> disk.unsynced(), list(disk.durable())
    (['/data'], ['/data/a'])
    >>> disk.crash(CrashMode.NOTHING)
    >>> disk.files()
    {'/data/a': b'durable'}
    """

    def __init__(self, seed: int = 0, *, capacity: int | None = None) -> None:
        """Begin empty; the seed decides what crashes keep where they have a choice."""
        self.calls: list[SimulatedCall] = []
        """The calls so far that may have changed something, in order."""
        self.stopped = False
        """Whether the machine has stopped: nothing can be read or done until the crash."""
        self.restarts = 0
        """Number of power failures; a process that ends by itself does not count."""
        self._choices: Choices = Drawn(seed)
        self._mutex = threading.RLock()
        self._tree = Tree(capacity)
        self._locks: dict[str, threading.Lock] = {}
        self._interruptions: dict[int, tuple[BaseException, Moment]] = {}
        self._stops: int | None = None
        self._life = 0

    # --- for tests ---------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """Capacity of all files together in bytes; None for unlimited. Set it to make room."""
        return self._tree.capacity

    @capacity.setter
    def capacity(self, size: int | None) -> None:
        self._tree.capacity = size

    def crash(self, mode: CrashMode = CrashMode.SCRAPS, choices: Choices | None = None) -> None:
        """Lose power, or only the process: unsynced data is kept according to the mode and these choices.

        Open files become invalid, locks are released, and plans of :meth:`interrupt` are cancelled.
        """
        with self._mutex:
            crash_below(self._tree.root, mode, choices or self._choices)
            self._locks.clear()
            self._interruptions.clear()
            self._life += 1
            self.restarts += mode is not CrashMode.KILL
            self._stops, self.stopped = None, False

    def kill(self) -> None:
        """End the process that uses the disk: its open files become invalid and its locks free, its writes are kept."""
        self.crash(CrashMode.KILL)

    def interrupt(self, number: int, error: BaseException, *, moment: Moment = "before") -> None:
        """Raise this from call ``number`` (counted from 0, as in :attr:`calls`), once.

        ``before`` anything is done; when ``half`` of it is (of the bytes, or of the entries of a folder to be removed);
        when all is done and still ``unsynced``, if the call syncs by itself; or ``after`` all of it. A
        ``StorageError`` of a sync is a failed sync at each of them, and leaves no half of a file that was being
        created.
        """
        self._interruptions[number] = (error, moment)

    def stop(self, number: int, *, moment: Moment = "before") -> None:
        """Stop the machine at call ``number``: that one and all later ones, reads too, raise ``Crash``."""
        self.interrupt(number, Crash(f"stopped at call {number}"), moment=moment)
        self._stops = number

    def fork(self, seed: int = 0) -> SimulatedDisk:
        """A copy of the disk, with its synced and unsynced data; without locks, calls, plans and open files."""
        with self._mutex:
            twin = SimulatedDisk(seed)
            twin._tree = copy.deepcopy(self._tree)
            twin.restarts = self.restarts
            return twin

    def files(self) -> dict[str, bytes]:
        """Every file with its current bytes."""
        with self._mutex:
            return {path: bytes(node.data) for path, node in walk(self._tree.root) if isinstance(node, File)}

    def folders(self) -> list[str]:
        """Every current folder."""
        with self._mutex:
            return [path for path, node in walk(self._tree.root) if isinstance(node, Folder)]

    def fingerprint(self) -> bytes:
        """Equal for two disks that cannot be distinguished: by their content, synced state, and lost writes."""
        with self._mutex:
            return hashlib.sha256(repr(observable_state(self._tree.root)).encode()).digest()

    def durable(self) -> dict[str, bytes]:
        """Every file that no crash can remove, with its bytes as last synced.

        A crash can only lose bytes of them that were truncated or rewritten since.
        """
        with self._mutex:
            return {path: node.synced for path, node in walk(self._tree.root, durable=True) if isinstance(node, File)}

    def unsynced(self) -> list[str]:
        """The paths of the files and folders that were changed since they were synced."""
        with self._mutex:
            nodes = [("/", self._tree.root), *walk(self._tree.root)]
            return [path for path, node in nodes if (not node.is_synced if isinstance(node, File) else node.pending)]

    @property
    def refused(self) -> int:
        """Number of writes without room."""
        return self._tree.refused

    def damage(self, path: str, at: int, data: bytes) -> None:
        """Overwrite bytes of a file, durably, as a faulty disk does."""
        with self._mutex:
            self._tree.file(path).overwrite(at, data)

    # --- the disk ----------------------------------------------------------------------------------------------

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, or ``NotFound``."""
        with self._alive():
            data = self._tree.file(path).data
            return bytes(data[start:] if length is None else data[start : start + max(0, length)])

    def size(self, path: str) -> int:
        """The file's size, or ``NotFound``."""
        with self._alive():
            return len(self._tree.file(path).data)

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create, write and sync a file; removed again if that fails."""
        self._make("write_new", path, lambda: b"".join(parts))

    def copy(self, source: str, target: str) -> None:
        """Create a file with the bytes of another, and sync it."""
        self._make("copy", target, lambda: bytes(self._tree.file(source).data))

    def open_append(self, path: str) -> AppendFile:
        """Open a file to add to it, creating it if there is none."""

        def find() -> AppendFile:
            known = self._tree.find(path) is not None
            return _SimulatedFile(self, path, self._tree.file(path) if known else self._tree.create(path))

        return self._call("open_append", path, find)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with its content, one entry after another; absent is fine."""
        tree = self._tree
        half = partial(tree.remove_folder, path, whole=False)
        self._call("remove_folder", path, partial(tree.remove_folder, path), half=half)

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file, replacing ``target``, or a folder to an absent or empty ``target``."""
        self._call("rename", target, partial(self._tree.rename, source, target))

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""
        self._call("link", target, lambda: self._tree.link(self._tree.file(source), target))

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""
        self._call("remove", path, partial(self._tree.remove, path))

    def sync_file(self, path: str) -> None:
        """Make a file's content durable, whichever process wrote it."""
        with self._alive():
            file = self._tree.file(path)
            self._call("sync_file", path, file.sync, failed=file.fail_to_sync)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._call("sync_folder", path, lambda: self._tree.folder(path).sync())

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents, durably."""
        unsynced = partial(self._tree.make_folders, path, synced=False)
        self._call("make_folders", path, partial(self._tree.make_folders, path), unsynced=unsynced)

    def scan(self, path: str) -> list[FolderRow]:
        """The entries of the folder, by name; ``[]`` if there is none."""
        with self._alive():
            folder = self._tree.find(path)
            inside = dict(folder.names) if isinstance(folder, Folder) else {}
        return sorted(
            FolderRow(name, is_folder=True)
            if isinstance(node, Folder)
            else FolderRow(name, size=len(node.data), modified=node.modified)
            for name, node in inside.items()
        )

    @contextlib.contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Hold an exclusive lock; a crash drops it."""
        with self._lock(path):
            yield

    @contextlib.contextmanager
    def try_locked(self, path: str) -> Iterator[bool]:
        """Hold an exclusive lock if it is free; whether it was."""
        lock = self._lock(path)
        held = lock.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                lock.release()

    # --- inside ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        with self._mutex:
            if self.stopped:
                raise Crash("the machine has stopped")
            yield

    def _call(
        self,
        action: SimulatedAction,
        path: str,
        work: Callable[[], R],
        *,
        half: Callable[[], object] = lambda: None,
        unsynced: Callable[[], object] = lambda: None,
        failed: Callable[[], object] = lambda: None,
    ) -> R:
        with self._alive():
            number = len(self.calls)
            error, moment = self._interruptions.pop(number, (None, "before"))
            self.calls.append(SimulatedCall(action, path))
            if error is None:
                return work()
            if isinstance(error, StorageError):
                failed()
            if isinstance(error, StorageError) and action in ("write_new", "copy") and moment != "after":
                pass  # a surviving process removes the incomplete file
            elif moment == "half":
                half()
            elif moment == "unsynced":
                unsynced()
            elif moment == "after" and (action not in ("sync", "sync_file") or not isinstance(error, StorageError)):
                work()
            self.stopped = number == self._stops
            raise error

    def _make(self, action: SimulatedAction, path: str, content: Callable[[], bytes]) -> None:
        def make(*, whole: bool = True, synced: bool = True) -> None:
            data = content()
            self._tree.require(len(data), path)
            file = self._tree.create(path)
            file.write(data if whole else data[: len(data) // 2])
            if synced:
                file.sync()

        half, unsynced = partial(make, whole=False, synced=False), partial(make, synced=False)
        self._call(action, path, make, half=half, unsynced=unsynced)

    def _lock(self, path: str) -> threading.Lock:
        with self._alive():
            self._tree.lock_file(path)
            return self._locks.setdefault(clean(path), threading.Lock())


class _SimulatedFile:
    """An open file; dead after a crash."""

    def __init__(self, disk: SimulatedDisk, path: str, file: File) -> None:
        self._disk, self._path, self._file = disk, path, file
        self._life = disk._life  # noqa: SLF001 - two halves of one thing
        self._closed = False

    def size(self) -> int:
        self._check()
        return len(self._file.data)

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        self._put("write", None, parts)

    def rewrite(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        self._put("rewrite", start, parts)

    def _put(self, action: SimulatedAction, start: int | None, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        put = partial(self._disk._tree.rewrite, self._file, self._path, start)  # noqa: SLF001
        self._do(action, partial(put, data), half=partial(put, data[: len(data) // 2]))

    def sync(self) -> None:
        def sync() -> None:
            self._file.sync()
            self.check_in_place()

        self._do("sync", sync, failed=self._file.fail_to_sync)

    def check_in_place(self) -> None:
        if self._disk._tree.find(self._path) is not self._file:  # noqa: SLF001
            raise NotFound(f"{self._path} was removed, moved or replaced while it was written: put it back.")

    def cut(self, size: int) -> None:
        self._do("cut", lambda: self._file.cut(size))

    def close(self) -> None:
        self._closed = True

    def _do(
        self,
        action: SimulatedAction,
        work: Callable[[], None],
        *,
        half: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._check()
        self._disk._call(action, self._path, work, half=half, failed=failed)  # noqa: SLF001

    def _check(self) -> None:
        with self._disk._alive():  # noqa: SLF001
            if self._closed or self._life != self._disk._life:  # noqa: SLF001
                raise StorageError(f"The disk refused {self._path}: it is not open any more.")
