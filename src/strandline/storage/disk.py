"""The disk protocol: the operations from which durable files are made."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

from strandline.errors import InvalidInput, NotFound, StorageError
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.file_append import (
    STROKE,
    LocalAppendFile,
    LockFile,
    file_mode,
    folder_mode,
    speaking,
    write_all,
)


class FolderRow(NamedTuple):
    """One name in a folder; of a folder in it, only the name is told."""

    name: str
    is_folder: bool = False
    size: int = 0
    modified: int = 0
    """When the file was last written, in microseconds since the epoch."""
    is_link: bool = False
    """Whether the name is a symbolic link, whatever it leads to."""
    links: int = 1
    """How many names the file has; 0 for what is no plain file, and for a link that leads nowhere."""


@runtime_checkable
class AppendFile(Protocol):
    """An open file that grows at its end. One thread at a time; nothing is durable before :meth:`sync`."""

    def size(self) -> int:
        """How many bytes it has."""

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Add all parts at the end. When it raises, any part of them may be there: :meth:`cut` them off."""

    def rewrite(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        """Put all parts over what the file has from byte ``start`` on; what is behind them stays as it is.

        Until :meth:`sync` a crash may leave the old bytes, the new ones, or any mixture. The file grows if they reach
        past its end; a ``start`` that lies past it is ``InvalidInput``. When it raises anything else, any part of them
        may be there. What a failed sync left unwritten is written by the next sync once it was rewritten, though with
        the same bytes.
        """

    def sync(self) -> None:
        """Make everything written durable. When it raises, nothing that was not synced before may be trusted.

        ``NotFound`` as :meth:`check_in_place` raises it: what the file holds cannot be found any more.
        """

    def check_in_place(self) -> None:
        """``NotFound`` if the file is no longer what its path leads to.

        It was removed, and is gone with this process; or it, or a folder above it, was moved or replaced.
        """

    def cut(self, size: int) -> None:
        """Shorten the file to this size."""

    def close(self) -> None:
        """Let go of it, without syncing. Closing twice is fine."""


@runtime_checkable
class Disk(Protocol):
    """Files and folders. Nothing is durable before :meth:`write_new` returned and the folder was synced."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file (fewer than ``length`` at its end), or ``NotFound``."""

    def size(self, path: str) -> int:
        """The file's size, or ``NotFound``."""

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create a file that did not exist, write all parts, and fsync it. ``DiskFull`` if there is no room."""

    def open_append(self, path: str) -> AppendFile:
        """Open a file to add to it, creating it if there is none; the folder is not synced."""

    def copy(self, source: str, target: str) -> None:
        """Create a file that did not exist with the bytes of another, and fsync it."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; links in it are removed, not followed. Absent is fine."""

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file over whatever is at ``target``, or a folder to where nothing or an empty one is."""

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""

    def sync_file(self, path: str) -> None:
        """Make a file's content durable, whoever wrote it."""

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents, durably."""

    def scan(self, path: str) -> list[FolderRow]:
        """What is in the folder, by name; ``[]`` if there is none."""

    def locked(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Hold an exclusive lock that a dead process cannot keep; the file at ``path`` stays behind.

        Waits for whoever holds it, for a bounded time: then it is a ``StorageError`` that names the lock.
        """

    def try_locked(self, path: str) -> contextlib.AbstractContextManager[bool]:
        """The same without waiting: the block is given True if it holds the lock, False if someone else does."""


LOCK_TIMEOUT: Final = 60.0
"""How long a lock is waited for, in seconds. Whoever holds one writes one small object, and lets go of it."""
_FIRST_LOOK: Final = 0.0005
_LONGEST_LOOK: Final = 0.02


class LocalDisk:
    """The machine's own file system. What it creates is its owner's alone, unless ``STRANDLINE_UMASK`` says otherwise.

    What exists keeps its mode.
    """

    def __init__(self, *, lock_timeout: float = LOCK_TIMEOUT, clock: Clock = CLOCK) -> None:
        """Wait for locks up to ``lock_timeout`` seconds."""
        self._lock_timeout = lock_timeout
        self._clock = clock

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, or ``NotFound``."""
        with speaking(path):
            try:
                opened = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
            except IsADirectoryError as error:
                raise NotFound(f"There is a folder at {path}, and no file.") from error
        with speaking(path), opened as file:
            if length is not None:
                # Reading allocates what was asked for, and a damaged length may ask for anything.
                length = max(0, min(length, os.fstat(file.fileno()).st_size - start))
                if not length:
                    return b""
            if start:
                file.seek(start)
            data = file.read() if length is None else file.read(length)
            while length is not None and len(data) < length:
                more = file.read(length - len(data))
                if not more:
                    break
                data += more
            return data

    def size(self, path: str) -> int:
        """The file's size, or ``NotFound``."""
        with speaking(path):
            return os.stat(path).st_size

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create, write and fsync a file; what could not be written whole is removed again."""
        with _new_file(path) as descriptor:
            write_all(descriptor, parts)

    def open_append(self, path: str) -> AppendFile:
        """Open a file to add to it, creating it if there is none."""
        return LocalAppendFile(path)

    def copy(self, source: str, target: str) -> None:
        """Create a file with the bytes of another, and fsync it; a link is copied as what it leads to."""
        with speaking(source):
            found = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _new_file(target) as made:
                while piece := os.read(found, STROKE):
                    write_all(made, [piece])
        finally:
            os.close(found)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; absent is fine."""
        with speaking(path), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file over whatever is at ``target``, or a folder to where nothing or an empty one is."""
        with _speaking_of_two(source, target):
            os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""
        with _speaking_of_two(source, target):
            os.link(source, target)

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""
        with speaking(path), contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(path)

    def sync_file(self, path: str) -> None:
        """Make a file's content durable, whoever wrote it."""
        self._sync(path, os.O_RDONLY)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def _sync(self, path: str, flags: int) -> None:
        with speaking(path):
            descriptor = os.open(path, flags | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents; each new name is synced into the folder that holds it."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent and parent != path:
            self.make_folders(parent)
        with speaking(path):
            # Two processes may create the same folder at once; both then sync the name, which is harmless.
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, folder_mode())
            if not os.path.isdir(path):
                raise StorageError(f"{path} is in the way: a folder is needed there, and it is a file.")
        self.sync_folder(parent or ".")

    def scan(self, path: str) -> list[FolderRow]:
        """What is in the folder, by name."""
        rows = []
        with speaking(path), contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                # A file may go away between the listing and the look at it; then it is simply not there.
                with contextlib.suppress(FileNotFoundError):
                    link = entry.is_symlink()
                    if entry.is_dir():
                        rows.append(FolderRow(entry.name, is_folder=True, is_link=link))
                        continue
                    if link and not os.path.exists(entry.path):
                        rows.append(FolderRow(entry.name, is_link=True, links=0))
                        continue
                    found = entry.stat()
                    when, names = found.st_mtime_ns // 1000, found.st_nlink if stat.S_ISREG(found.st_mode) else 0
                    rows.append(FolderRow(entry.name, size=found.st_size, modified=when, is_link=link, links=names))
        return sorted(rows)

    @contextlib.contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Hold an exclusive advisory lock (``flock``), which the kernel drops when its process dies."""
        # Not a blocking call: anybody who can open the file can hold its lock, and would stop us without a word.
        deadline, pause = self._clock.monotonic() + self._lock_timeout, _FIRST_LOOK
        while True:
            with LockFile() as lock:
                if lock.take(path):
                    yield
                    return
            if self._clock.monotonic() >= deadline:
                raise StorageError(
                    f"The lock {path} was held by another process for {self._lock_timeout:g} s; nothing was changed. "
                    f"Find out who holds it ('fuser {path}'), end that, and try again."
                )
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK)

    @contextlib.contextmanager
    def try_locked(self, path: str) -> Iterator[bool]:
        """Hold the same lock if nobody else does; the block is told whether."""
        with LockFile() as lock:
            yield lock.take(path)


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[int]:
    """The descriptor of a new file, which is synced at the end, and removed if that is not reached."""
    with speaking(path, making=True):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode())
        try:
            yield descriptor
            os.fsync(descriptor)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _speaking_of_two(source: str, target: str) -> Iterator[None]:
    """In our words what the system raises about two paths: it does not say which of them is missing."""
    with speaking(target, making=True):
        try:
            yield
        except FileNotFoundError as error:
            if not os.path.lexists(source):
                raise NotFound(f"There is nothing at {source}.") from error
            raise


DISK = LocalDisk()


def below(folder: str, *names: str) -> str:
    """The path of what has these names in a folder; ``InvalidInput`` for a name that could lead out of it.

    >>> below("/data", "snapshots", "replica-1")
    '/data/snapshots/replica-1'
    """
    for name in names:
        if name in ("", ".", "..") or any(letter in "/\\" or ord(letter) < ord(" ") for letter in name):
            raise InvalidInput(f"{name[:200]!r} is no plain name of a file in {folder}: nothing was done there.")
    return "/".join((folder, *names))


def replace_file(disk: Disk, path: str, data: bytes, *, temporary: str) -> None:
    """Durably put a file in place of whatever is at ``path``: afterwards, and after any crash, the old or the new.

    ``temporary`` is a name in the same folder that nobody else uses; what a crash has left there is overwritten.
    """
    disk.remove(temporary)
    try:
        disk.write_new(temporary, [data])
        disk.rename(temporary, path)
    except StorageError:
        with contextlib.suppress(StorageError):
            disk.remove(temporary)
        raise
    disk.sync_folder(os.path.dirname(path) or ".")


def exists(path: str, *, disk: Disk) -> bool:
    """Whether there is a file of this name."""
    try:
        disk.size(path)
    except NotFound:
        return False
    return True


def make_own_folder(folder: str, *, disk: Disk) -> None:
    """Make a folder, and its name durable even if it is there.

    Whoever made it, or put something into it, may have died before syncing the name: then a power cut would take it,
    with all that was acknowledged in it since.
    """
    disk.make_folders(folder)
    sync_name(folder, disk=disk)


def sync_name(folder: str, *, disk: Disk) -> None:
    """Make the name of a folder durable."""
    disk.sync_folder(str(Path(folder).absolute().parent))
