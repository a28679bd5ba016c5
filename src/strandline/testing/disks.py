"""Disks that fill up, and disks that remember in which order they were asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from strandline.model.errors import DiskFull
from strandline.storage.disk import DISK, AppendFile, Disk, FolderRow


class _PassingDisk:
    """Another disk, every call passed on."""

    def __init__(self, inner: Disk = DISK) -> None:
        self._inner = inner

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, or ``NotFound``."""
        return self._inner.read(path, start, length)

    def size(self, path: str) -> int:
        """The file's size, or ``NotFound``."""
        return self._inner.size(path)

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create, write and fsync a file."""
        self._inner.write_new(path, parts)

    def open_append(self, path: str) -> AppendFile:
        """Open a file to add to it."""
        return self._inner.open_append(path)

    def copy(self, source: str, target: str) -> None:
        """Create a file with the bytes of another, and fsync it."""
        self._inner.copy(source, target)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it."""
        self._inner.remove_folder(path)

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file over whatever is at ``target``."""
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
        """What is in the folder, by name."""
        return self._inner.scan(path)

    def locked(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Hold an exclusive lock."""
        return self._inner.locked(path)

    def try_locked(self, path: str) -> contextlib.AbstractContextManager[bool]:
        """Hold an exclusive lock, if nobody else does."""
        return self._inner.try_locked(path)


class FullDisk(_PassingDisk):
    """A disk with room for ``budget`` more bytes; the write that exceeds it is ``DiskFull`` and stays half done.

    Unlike :class:`~strandline.storage.disk.LocalDisk`, which removes what it could not finish, the torn file
    is left where it is: whoever asked for it must cope with that. Removing files gives no room back; only
    :meth:`make_room` does.
    """

    def __init__(self, inner: Disk, budget: int) -> None:
        """Let ``budget`` bytes through to ``inner``."""
        super().__init__(inner)
        self._budget = budget
        self._lock = threading.Lock()
        self.refused = 0
        """How many writes found no room."""

    @property
    def room(self) -> int:
        """How many bytes can still be written."""
        return self._budget

    def make_room(self, size: int) -> None:
        """Let ``size`` more bytes through."""
        with self._lock:
            self._budget += size

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create, write and fsync a file; if it does not fit, what does is left, and ``DiskFull``."""
        views = [memoryview(part).cast("B") for part in parts]
        wanted = sum(view.nbytes for view in views)
        with self._lock:
            granted = min(wanted, self._budget)
            self._budget -= granted
            self.refused += granted < wanted
        if granted == wanted:
            self._inner.write_new(path, views)
            return
        self._inner.write_new(path, [b"".join(views)[:granted]])
        raise DiskFull(f"No room to write {path} (a test's budget is used up); nothing was acknowledged.")


DiskAction = Literal["write", "rename", "link", "remove", "sync_file", "sync_folder", "make_folders", "lock", "unlock"]


@dataclass(frozen=True, slots=True)
class DiskEvent:
    """One thing a disk has finished doing. ``write`` includes the file's own fsync."""

    action: DiskAction
    path: str
    source: str | None = None
    """For ``rename`` and ``link``: the old name."""


class RecordingDisk(_PassingDisk):
    """A disk that remembers what was done to it, in order. Only what succeeded is recorded; reads are not."""

    def __init__(self, inner: Disk = DISK) -> None:
        """Pass everything on to ``inner``."""
        super().__init__(inner)
        self.events: list[DiskEvent] = []
        """What was done so far. Clear it to begin anew."""

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create, write and fsync a file."""
        self._inner.write_new(path, parts)
        self.events.append(DiskEvent("write", path))

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file over whatever is at ``target``."""
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
