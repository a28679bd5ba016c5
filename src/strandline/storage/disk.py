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
    CALL_BYTES,
    LocalAppendFile,
    LockFile,
    file_mode,
    folder_mode,
    translated_errors,
    write_all,
)


class FolderRow(NamedTuple):
    """An entry of a folder; of a subfolder, only the name is known."""

    name: str
    is_folder: bool = False
    size: int = 0
    modified: int = 0
    """When the file was last written, in microseconds since the epoch."""
    is_link: bool = False
    """Whether it is a symbolic link."""
    links: int = 1
    """Hard links of the file; 0 if it is no regular file, or a dangling link."""


@runtime_checkable
class AppendFile(Protocol):
    """An open file for appends. One thread at a time; nothing is durable before :meth:`sync`."""

    def size(self) -> int:
        """How many bytes it has."""

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Append all parts. After an error any part of them may be in the file: :meth:`cut` it."""

    def rewrite(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        """Overwrite the file from byte ``start`` on; the bytes after the parts stay.

        Until :meth:`sync` a crash may leave the old bytes, the new ones, or any mixture. The file grows if needed; a
        ``start`` past its end is ``InvalidInput``. After any other error any part of them may be written. Bytes that a
        failed sync left unwritten are written by the next sync if they were rewritten, also with the same bytes.
        """

    def sync(self) -> None:
        """Make all writes durable. After an error no write since the last sync may be trusted.

        ``NotFound`` as :meth:`check_in_place`.
        """

    def check_in_place(self) -> None:
        """``NotFound`` if the path no longer leads to this file.

        The file was removed, or it, or a folder above it, was moved or replaced.
        """

    def cut(self, size: int) -> None:
        """Truncate the file to this size."""

    def close(self) -> None:
        """Close without syncing. Idempotent."""


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
        """Remove a folder with its content; links in it are removed, not followed. Absent is fine."""

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file, replacing ``target``, or a folder to an absent or empty ``target``."""

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""

    def sync_file(self, path: str) -> None:
        """Make a file's content durable, whichever process wrote it."""

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents, durably."""

    def scan(self, path: str) -> list[FolderRow]:
        """The entries of the folder, by name; ``[]`` if there is none."""

    def locked(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Hold an exclusive lock, which is released when the process dies; the file at ``path`` stays.

        Waits for its holder for a bounded time, then raises a ``StorageError`` that names the lock.
        """

    def try_locked(self, path: str) -> contextlib.AbstractContextManager[bool]:
        """Try to lock, without waiting: the block gets True if it holds the lock, False if another process does."""


LOCK_TIMEOUT: Final = 60.0
"""Seconds to wait for a lock. A holder writes one small object, and releases it."""
_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.02


class LocalDisk:
    """The local file system. New files are private to their owner, unless ``STRANDLINE_UMASK`` is set.

    Existing files keep their mode.
    """

    def __init__(self, *, clock: Clock = CLOCK) -> None:
        self._clock = clock

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, or ``NotFound``."""
        with translated_errors(path):
            try:
                opened = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
            except IsADirectoryError as error:
                raise NotFound(f"{path} is a folder, not a file.") from error
        with translated_errors(path), opened as file:
            if length is not None:
                # A read allocates its length, and a damaged length may be huge.
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
        with translated_errors(path):
            return os.stat(path).st_size

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create, write and fsync a file; removed if that fails."""
        with _new_file(path) as descriptor:
            write_all(descriptor, parts)

    def open_append(self, path: str) -> AppendFile:
        """Open a file to add to it, creating it if there is none."""
        return LocalAppendFile(path)

    def copy(self, source: str, target: str) -> None:
        """Create a file with the bytes of another, and fsync it; a link's target is copied."""
        with translated_errors(source):
            found = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _new_file(target) as made:
                while piece := os.read(found, CALL_BYTES):
                    write_all(made, [piece])
        finally:
            os.close(found)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with its content; absent is fine."""
        with translated_errors(path), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file, replacing ``target``, or a folder to an absent or empty ``target``."""
        with _translated_errors_of_two(source, target):
            os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""
        with _translated_errors_of_two(source, target):
            os.link(source, target)

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""
        with translated_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(path)

    def sync_file(self, path: str) -> None:
        """Make a file's content durable, whichever process wrote it."""
        self._sync(path, os.O_RDONLY)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def _sync(self, path: str, flags: int) -> None:
        with translated_errors(path):
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
        with translated_errors(path):
            # Two processes may create the same folder at once; both then sync the name, which is harmless.
            try:
                os.mkdir(path, folder_mode())
            except FileExistsError:
                pass
            except FileNotFoundError as error:
                raise StorageError(
                    f"The folder {path} cannot be made: {parent or '.'} takes no new folders."
                ) from error
            if not os.path.isdir(path):
                raise StorageError(f"{path} is a file, but a folder is needed there.")
        self.sync_folder(parent or ".")

    def scan(self, path: str) -> list[FolderRow]:
        """The entries of the folder, by name."""
        rows = []
        with (
            translated_errors(path),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(path) as entries,
        ):
            for entry in entries:
                # A file that is removed between listing and stat is omitted.
                with contextlib.suppress(FileNotFoundError):
                    link = entry.is_symlink()
                    if link and not os.path.exists(entry.path):  # it leads nowhere, or to itself
                        rows.append(FolderRow(entry.name, is_link=True, links=0))
                        continue
                    if entry.is_dir():
                        rows.append(FolderRow(entry.name, is_folder=True, is_link=link))
                        continue
                    found = entry.stat()
                    when, names = found.st_mtime_ns // 1000, found.st_nlink if stat.S_ISREG(found.st_mode) else 0
                    rows.append(FolderRow(entry.name, size=found.st_size, modified=when, is_link=link, links=names))
        return sorted(rows)

    @contextlib.contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Hold an exclusive advisory lock (``flock``), which the kernel drops when its process dies."""
        # No blocking call: any process that can open the file can hold its lock forever.
        deadline, pause = self._clock.monotonic() + LOCK_TIMEOUT, _FIRST_PAUSE
        while True:
            with LockFile() as lock:
                if lock.take(path):
                    yield
                    return
            if self._clock.monotonic() >= deadline:
                raise StorageError(
                    f"The lock {path} was held by another process for {LOCK_TIMEOUT:g} s; nothing was changed. "
                    f"Find its holder ('fuser {path}'), stop it, and try again."
                )
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def try_locked(self, path: str) -> Iterator[bool]:
        """Hold the same lock if it is free; the block gets whether it is held."""
        with LockFile() as lock:
            yield lock.take(path)


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[int]:
    """The descriptor of a new file; synced at the end of the block, removed if the block fails."""
    with translated_errors(path, making=True):
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
def _translated_errors_of_two(source: str, target: str) -> Iterator[None]:
    """Translate errors of calls with two paths: the system does not say which one is missing."""
    with translated_errors(target, making=True):
        try:
            yield
        except FileNotFoundError as error:
            if not os.path.lexists(source):
                raise NotFound(f"There is nothing at {source}.") from error
            raise


DISK = LocalDisk()


def below(folder: str, *names: str) -> str:
    """The path of names below a folder; ``InvalidInput`` for a name that could lead out of it.

    >>> below("/data", "snapshots", "replica-1")
    '/data/snapshots/replica-1'
    """
    for name in names:
        if name in ("", ".", "..") or any(letter in "/\\" or ord(letter) < ord(" ") for letter in name):
            raise InvalidInput(f"{name[:200]!r} is no plain name of a file in {folder}: nothing was done there.")
    return "/".join((folder, *names))


def replace_file(disk: Disk, path: str, data: bytes, *, temporary: str) -> None:
    """Replace the file at ``path`` atomically and durably.

    ``temporary`` is an unused name in the same folder; a leftover of a crash is overwritten.
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


def limit_rights(path: str) -> None:
    """Take the rights from a file of another library that files of this package do not have (``STRANDLINE_UMASK``).

    Nothing happens to a file that is gone, is a link, or belongs to another user.
    """
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if os.path.islink(path):
            return
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & file_mode())


def is_linked(folder: str, path: str) -> bool:
    """Whether a path below a folder is a symbolic link, or leads through one."""
    pieces = path.split("/")
    return any(os.path.islink("/".join((folder, *pieces[: at + 1]))) for at in range(len(pieces)))


def make_own_folder(folder: str, *, disk: Disk) -> None:
    """Create a folder, and sync its name even if it exists.

    The process that created it may have died before syncing the name: a power failure would then remove it, with
    everything acknowledged in it since.
    """
    disk.make_folders(folder)
    sync_name(folder, disk=disk)


def sync_name(folder: str, *, disk: Disk) -> None:
    """Sync the name of a folder."""
    disk.sync_folder(str(Path(folder).absolute().parent))


def free_bytes(folder: str) -> int:
    """Bytes that an unprivileged process may still write to the file system of a folder."""
    with translated_errors(folder):
        return shutil.disk_usage(folder).free
