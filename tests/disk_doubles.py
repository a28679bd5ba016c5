"""Disk doubles: one that fills up, one that records the order of operations, one that skips fsync; and damage."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from strandline.errors import DiskFull
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.disk import DISK, AppendFile, Disk, FolderRow
from strandline.testing.simdisk import SimulatedDisk
from strandline.testing.simdisk.explore import Check, Explored, N, Workload, _blamed, _Explorer

_Parts: TypeAlias = Sequence[bytes | memoryview]


class OneFile:
    """The part of a disk that reads a file, for bytes in memory."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = bytes(data)

    def read(self, _path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of the file."""
        return self._data[start:] if length is None else self._data[start : start + length]


class _PassingDisk:
    """Passes every call on to another disk."""

    def __init__(self, inner: Disk = DISK) -> None:
        self._inner = inner

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, or ``NotFound``."""
        return self._inner.read(path, start, length)

    def size(self, path: str) -> int:
        """The file's size, or ``NotFound``."""
        return self._inner.size(path)

    def write_new(self, path: str, parts: _Parts) -> None:
        """Create, write and fsync a file."""
        self._inner.write_new(path, parts)

    def open_append(self, path: str) -> AppendFile:
        """Open a file to add to it."""
        return self._inner.open_append(path)

    def copy(self, source: str, target: str) -> None:
        """Create a file with the bytes of another, and fsync it."""
        self._inner.copy(source, target)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with its content."""
        self._inner.remove_folder(path)

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file, replacing ``target``."""
        self._inner.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""
        self._inner.link(source, target)

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""
        self._inner.remove(path)

    def sync_file(self, path: str) -> None:
        """Make a file's content durable."""
        self._inner.sync_file(path)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._inner.sync_folder(path)

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents, durably."""
        self._inner.make_folders(path)

    def scan(self, path: str) -> list[FolderRow]:
        """The entries of the folder, by name."""
        return self._inner.scan(path)

    def locked(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Hold an exclusive lock."""
        return self._inner.locked(path)

    def try_locked(self, path: str) -> contextlib.AbstractContextManager[bool]:
        """Hold an exclusive lock, if it is free."""
        return self._inner.try_locked(path)


class _PassingFile:
    """Passes every call on to another open file."""

    def __init__(self, inner: AppendFile) -> None:
        self._inner = inner

    def size(self) -> int:
        return self._inner.size()

    def write(self, parts: _Parts) -> None:
        self._inner.write(parts)

    def rewrite(self, start: int, parts: _Parts) -> None:
        self._inner.rewrite(start, parts)

    def sync(self) -> None:
        self._inner.sync()

    def check_in_place(self) -> None:
        self._inner.check_in_place()

    def cut(self, size: int) -> None:
        self._inner.cut(size)

    def close(self) -> None:
        self._inner.close()


class FullDisk(_PassingDisk):
    """A disk with room for ``budget`` more bytes; the write that exceeds it is ``DiskFull`` and stays half done.

    Unlike :class:`~strandline.storage.disk.LocalDisk`, which removes what it could not finish, the torn file
    stays: the caller must handle that. Bytes that are rewritten in place take no room.
    Removing and truncating files frees no room; only :meth:`make_room` does.
    """

    def __init__(self, inner: Disk, budget: int) -> None:
        """Let ``budget`` bytes through to ``inner``."""
        super().__init__(inner)
        self._budget = budget
        self._lock = threading.Lock()
        self.refused = 0
        """Number of writes without room."""

    @property
    def room(self) -> int:
        """Bytes that can still be written."""
        return self._budget

    def make_room(self, size: int) -> None:
        """Let ``size`` more bytes through."""
        with self._lock:
            self._budget += size

    def write_new(self, path: str, parts: _Parts) -> None:
        """Create, write and fsync a file; if it does not fit, the part that does is written, and ``DiskFull``."""
        self._fill(path, parts, lambda fitting: self._inner.write_new(path, fitting))

    def open_append(self, path: str) -> AppendFile:
        """Open a file for appends; of a write that does not fit, the part that does is written, and ``DiskFull``."""
        return _FullFile(self, path, self._inner.open_append(path))

    def _fill(self, path: str, parts: _Parts, write: Callable[[_Parts], None], *, free: int = 0) -> None:
        """Write as much as there is room for, of which ``free`` bytes need none; ``DiskFull`` if that was not all."""
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(view.nbytes for view in views)
        with self._lock:
            wanted = max(0, size - free)
            granted = min(wanted, self._budget)
            self._budget -= granted
            self.refused += granted < wanted
        if granted == wanted:
            write(views)
            return
        write([b"".join(views)[: free + granted]])
        raise DiskFull(f"No room to write {path} (a test's budget is used up); nothing was acknowledged.")


class _FullFile(_PassingFile):
    def __init__(self, disk: FullDisk, path: str, inner: AppendFile) -> None:
        super().__init__(inner)
        self._disk, self._path = disk, path

    def write(self, parts: _Parts) -> None:
        self._disk._fill(self._path, parts, self._inner.write)

    def rewrite(self, start: int, parts: _Parts) -> None:
        there = max(0, self._inner.size() - start)
        self._disk._fill(self._path, parts, partial(self._inner.rewrite, start), free=there)


DiskAction = Literal[
    "write", "open_append", "append", "rewrite", "sync", "cut", "rename", "link", "remove", "sync_file", "sync_folder",
    "make_folders", "lock", "unlock",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiskEvent:
    """One completed operation of a disk. ``write`` includes the file's own fsync; ``append`` and ``rewrite`` do not,
    and have the path under which the file was opened, as ``sync`` and ``cut`` have.
    """

    action: DiskAction
    path: str
    source: str | None = None
    """For ``rename`` and ``link``: the old name."""


class RecordingDisk(_PassingDisk):
    """A disk that records its operations, in order. Only successful ones are recorded; reads are not."""

    def __init__(self, inner: Disk = DISK) -> None:
        """Pass everything on to ``inner``."""
        super().__init__(inner)
        self.events: list[DiskEvent] = []
        """The operations so far. Clear it to start again."""

    def write_new(self, path: str, parts: _Parts) -> None:
        """Create, write and fsync a file."""
        self._inner.write_new(path, parts)
        self.events.append(DiskEvent("write", path))

    def open_append(self, path: str) -> AppendFile:
        """Open a file for appends; its operations are recorded, too."""
        file = _RecordedFile(self, path, self._inner.open_append(path))
        self.events.append(DiskEvent("open_append", path))
        return file

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file, replacing ``target``."""
        self._inner.rename(source, target)
        self.events.append(DiskEvent("rename", target, source))

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""
        self._inner.link(source, target)
        self.events.append(DiskEvent("link", target, source))

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""
        self._inner.remove(path)
        self.events.append(DiskEvent("remove", path))

    def sync_file(self, path: str) -> None:
        """Make a file's content durable."""
        self._inner.sync_file(path)
        self.events.append(DiskEvent("sync_file", path))

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._inner.sync_folder(path)
        self.events.append(DiskEvent("sync_folder", path))

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents, durably."""
        self._inner.make_folders(path)
        self.events.append(DiskEvent("make_folders", path))

    @contextlib.contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Hold an exclusive lock."""
        with self._inner.locked(path):
            self.events.append(DiskEvent("lock", path))
            try:
                yield
            finally:
                self.events.append(DiskEvent("unlock", path))


class _RecordedFile(_PassingFile):
    def __init__(self, disk: RecordingDisk, path: str, inner: AppendFile) -> None:
        super().__init__(inner)
        self._disk, self._path = disk, path

    def write(self, parts: _Parts) -> None:
        self._inner.write(parts)
        self._disk.events.append(DiskEvent("append", self._path))

    def rewrite(self, start: int, parts: _Parts) -> None:
        self._inner.rewrite(start, parts)
        self._disk.events.append(DiskEvent("rewrite", self._path))

    def sync(self) -> None:
        self._inner.sync()
        self._disk.events.append(DiskEvent("sync", self._path))

    def cut(self, size: int) -> None:
        self._inner.cut(size)
        self._disk.events.append(DiskEvent("cut", self._path))


class SlowSyncDisk(_PassingDisk):
    """A disk whose open files take ``seconds`` to sync, and are NOT synced: for benchmarks only, nothing is durable.

    So a measurement does not depend on the machine's disk: a sync always costs the same, however much was written.
    It waits on the clock, and other threads run meanwhile, as during a real sync. Everything else is passed on,
    including the syncs of new files and of folders.

    >>> from strandline.testing.clock import ManualClock
    >>> from strandline.testing.simdisk import SimulatedDisk
    >>> clock, inner = ManualClock(), SimulatedDisk()
    >>> file = SlowSyncDisk(inner, 0.001, clock=clock).open_append("/log")
    >>> file.write([b"data"])
    >>> file.sync()
    >>> clock.slept, inner.read("/log"), "/log" in inner.unsynced()
    ([0.001], b'data', True)
    """

    def __init__(self, inner: Disk, seconds: float, *, clock: Clock = CLOCK) -> None:
        """Pass everything on to ``inner`` except the syncs of open files."""
        super().__init__(inner)
        self._seconds, self._clock = seconds, clock

    def open_append(self, path: str) -> AppendFile:
        """Open a file for appends; its syncs only take time."""
        return _SlowFile(self._inner.open_append(path), self._seconds, self._clock)


class _SlowFile(_PassingFile):
    def __init__(self, inner: AppendFile, seconds: float, clock: Clock) -> None:
        super().__init__(inner)
        self._seconds, self._clock = seconds, clock

    def sync(self) -> None:
        self._clock.sleep(self._seconds)


def damage_everywhere(workload: Workload[N], check: Check[N], *, step: int, piece: bytes) -> Explored:
    """Put the piece over durable bytes of each file at every ``step`` bytes, after the workload's end, and check.

    The check must accept that damaged data is refused.
    """
    explorer = _Explorer(workload, check, (), (), 0, stops=1)
    disk, notes = SimulatedDisk(), list[N]()
    workload(disk, notes)
    for path, data in disk.durable().items():
        if path not in disk.files():
            continue  # removed, but not yet durably
        for at in range(0, len(data), step):
            found = disk.fork()
            found.damage(path, at, piece)
            if explorer._is_new(found, notes):
                with _blamed(f"{path} is damaged at byte {at}"):
                    check(found, copy.deepcopy(notes))
    return explorer.explored()
