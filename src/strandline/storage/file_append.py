"""Appends to local files: whole or an error, in writes of a size that the kernel handles well."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from functools import partial
from io import FileIO
from pathlib import PurePath
from typing import Final

from strandline.errors import AlreadyExists, DiskFull, InvalidInput, NotFound, StorageError
from strandline.storage.closing import Closing
from strandline.storage.fork_check import call_in_child

SETTING: Final = "STRANDLINE_UMASK"
"""Environment variable for shared files and folders: the rights to remove from 777 and 666, in octal."""

_PRIVATE: Final = 0o077
_ALL: Final = 0o777


def parse_umask(text: str) -> int:
    """The rights that an octal text removes; never those of the owner.

    >>> oct(parse_umask("027"))
    '0o27'
    """
    try:
        umask = int(text, 8)
    except ValueError:
        umask = -1
    if not 0 <= umask <= _ALL or umask & 0o700:
        raise InvalidInput(
            f"{SETTING}={text!r} is no umask: write three octal digits that leave the owner all rights, such as 077 "
            "(private, the default), 027 (the group may read) or 007 (the group may write, too)."
        )
    return umask


def _umask() -> int:
    text = os.environ.get(SETTING)
    return _PRIVATE if text is None else parse_umask(text)


def file_mode() -> int:
    """The mode of a new file; the process's own umask removes more."""
    return 0o666 & ~_umask()


def folder_mode() -> int:
    """The mode of a new folder; the process's own umask removes more."""
    return _ALL & ~_umask()


_PAGE: Final = 4096
"""The most bytes at the beginning of a file that are overwritten through a memory map."""

_VECTOR: Final = 512
"""Number of buffers per system call; every system allows at least this number."""

CALL_BYTES: Final = 512 << 10
"""Bytes per system call. Calls of 2 MiB and more were measured to be five times slower per byte."""


@contextlib.contextmanager
def translated_errors(path: str, *, making: bool = False) -> Iterator[None]:
    """Translate errors of the system. With ``making``, a missing file means that its folder is missing."""
    try:
        yield
    except OSError as error:
        if making and isinstance(error, FileNotFoundError | NotADirectoryError):
            named = PurePath(path)
            raise NotFound(f"There is no folder {named.parent} to write {named.name} in: make it first.") from error
        raise translated(path, error) from error


def translated(path: str, error: OSError) -> StorageError:
    """Translate one error of the system."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(f"There is nothing at {path}.")
    if isinstance(error, FileExistsError):
        return AlreadyExists(f"{path} exists already.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(
            f"The disk has no room for {path} ({error.strerror}); nothing was acknowledged: make room and try again."
        )
    return StorageError(f"The disk refused {path}: {error.strerror or error}.")


def write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts, however many bytes the system accepts at a time."""
    size = sum(map(len, parts))
    if size <= CALL_BYTES and len(parts) <= _VECTOR:  # one call suffices
        written = os.writev(descriptor, parts)
        if written == size:
            return
        parts = [memoryview(b"".join(parts))[written:]]
    for waiting in _calls(parts):
        while waiting:
            _drop(waiting, os.writev(descriptor, waiting))


def _rewrite_all(descriptor: int, start: int, parts: Sequence[bytes | memoryview]) -> None:
    for waiting in _calls(parts):
        while waiting:
            written = os.pwritev(descriptor, waiting, start)
            start += written
            _drop(waiting, written)


def _drop(waiting: list[memoryview], written: int) -> None:
    while waiting and written >= len(waiting[0]):
        written -= len(waiting.pop(0))
    if written:
        waiting[0] = waiting[0][written:]


def _calls(parts: Sequence[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, in groups of buffers for one call each."""
    group: list[memoryview] = []
    size = 0
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), CALL_BYTES):
            piece = view[at : at + CALL_BYTES]
            if group and (size + len(piece) > CALL_BYTES or len(group) >= _VECTOR):
                yield group
                group, size = [], 0
            group.append(piece)
            size += len(piece)
    if group:
        yield group


class LocalAppendFile:
    """A file of the local file system; closed with this object."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer = self._descriptor = -1
        self._page: mmap.mmap | None = None
        """The first bytes of the file, in memory, once they were overwritten."""
        with translated_errors(path, making=True):
            self._absolute_path = os.path.abspath(path)  # independent of the working directory
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, file_mode())
            opened = os.fstat(self._descriptor)
            self._identity = (opened.st_dev, opened.st_ino)

    def size(self) -> int:
        """Its size in bytes."""
        with translated_errors(self._path):
            return os.fstat(self._descriptor).st_size

    # Group commit calls these three: the context manager of the others would cost more than some of the writes.

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Append all parts."""
        try:
            write_all(self._descriptor, parts)
        except OSError as error:
            raise translated(self._path, error) from error

    def sync(self) -> None:
        """Make all writes durable."""
        try:
            if self._page is not None:
                self._page.flush()
            _sync_data(self._descriptor)
        except OSError as error:
            raise translated(self._path, error) from error
        self.check_in_place()

    def check_in_place(self) -> None:
        """``NotFound`` if the path no longer leads to this file."""
        try:
            found = os.stat(self._absolute_path)
            in_place = (found.st_dev, found.st_ino) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            in_place = False
        except OSError as error:
            raise translated(self._path, error) from error
        if not in_place:  # its bytes are lost with the process, or at an unknown path
            raise NotFound(
                f"{self._path} was removed, moved or replaced while it was written: its new bytes do not count "
                "as durable. Put it back, and open it again."
            )

    def rewrite(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        """Overwrite bytes from ``start`` on."""
        try:
            if start == 0 and len(parts) == 1 and self._overwritten(parts[0]):
                return
            if self._writer < 0:
                self._writer = self._reopened()
            if start and not 0 < start <= os.lseek(self._writer, 0, os.SEEK_END):
                raise InvalidInput(
                    f"{self._path} has {self.size()} bytes: it cannot be rewritten from byte {start} on."
                )
            if len(parts) == 1 and len(parts[0]) <= CALL_BYTES:
                part = parts[0]
                if os.pwrite(self._writer, part, start) == len(part):
                    return
            # A short write is repeated from its beginning: the same bytes at the same position.
            _rewrite_all(self._writer, start, parts)
        except OSError as error:
            raise translated(self._path, error) from error

    def _overwritten(self, data: bytes | memoryview) -> bool:
        """Overwrite the first bytes through a memory map, without a system call; False if that is not possible.

        A system call releases the interpreter lock, and other threads may run before this one gets it back.
        """
        if len(data) > _PAGE:
            return False
        if self._page is None or len(self._page) != len(data):
            self._unmap()
            if os.fstat(self._descriptor).st_size < len(data):
                return False
            self._page = mmap.mmap(self._descriptor, len(data))
        self._page[:] = bytes(data)
        return True

    def _unmap(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None

    def _reopened(self) -> int:
        """The same file without O_APPEND, with which Linux ignores positions and writes at the end.

        Through the open descriptor where the system supports it, since the file may have been renamed, and its name
        reused.
        """
        own = os.fstat(self._descriptor)
        for place in (f"/proc/self/fd/{self._descriptor}", self._path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found = os.open(place, os.O_RDWR | os.O_CLOEXEC)
                if os.path.samestat(own, os.fstat(found)):
                    return found
                os.close(found)
        raise StorageError(f"{self._path} is not the opened file any more: open the file again under its new name.")

    def cut(self, size: int) -> None:
        """Truncate the file."""
        self._unmap()  # writing to truncated pages would crash the process
        with translated_errors(self._path):
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._unmap()
        descriptors = self._writer, self._descriptor
        self._writer = self._descriptor = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        self.close()


# macOS has no fdatasync; it would only skip the time of the last change.
_sync_data = getattr(os, "fdatasync", os.fsync)


class LockFile(Closing):
    """An exclusive ``flock`` on a file, which ends with this object and is never kept by a forked child.

    The lock belongs to the open file. So the file is closed with this object, also when a signal interrupts that. A
    forked child closes its copy of the file at once: that would hold the lock as long as the child lives.
    """

    def __init__(self) -> None:
        # Not the bare descriptor: a signal between two statements would leak it.
        self._file: FileIO | None = None
        self._process = os.getpid()
        call_in_child(self, LockFile.close)  # first: another thread may fork at any time

    def take(self, path: str) -> bool:
        """Whether the lock is held now: False if another process holds it. Creates the file if needed."""
        with translated_errors(path, making=True):
            while True:
                self._file = file = FileIO(path, "a+", opener=partial(os.open, mode=file_mode()))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.close()
                    return False
                if os.fstat(file.fileno()).st_nlink:
                    return True
                self.close()  # the file was removed meanwhile: a lock on it excludes no other process

    def close(self) -> None:
        """Release it. Idempotent. A forked child closes only its own copy of the file."""
        file = self._file
        if file is None or file.closed:
            return
        if self._process == os.getpid():
            fcntl.flock(file, fcntl.LOCK_UN)  # also for children that have not closed their copies
        file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # else __init__ was interrupted
            self.close()
