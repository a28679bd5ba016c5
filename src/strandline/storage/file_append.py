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
"""The environment variable by which folders and files are shared: rights to take away from 777 and 666, in octal."""

_PRIVATE: Final = 0o077
_ALL: Final = 0o777


def parse_umask(text: str) -> int:
    """The rights that a text in octal takes away; never those of the owner.

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
    """The mode of a new file; the process's own umask takes away more."""
    return 0o666 & ~_umask()


def folder_mode() -> int:
    """The mode of a new folder; the process's own umask takes away more."""
    return _ALL & ~_umask()


_PAGE: Final = 4096
"""So few bytes at the beginning of a file can be written over in memory."""

_VECTOR: Final = 512
"""How many buffers one system call takes; every system allows at least so many."""

STROKE: Final = 512 << 10
"""How many bytes one system call writes. Calls of 2 MiB and more were measured to be five times slower per byte."""


@contextlib.contextmanager
def speaking(path: str, *, making: bool = False) -> Iterator[None]:
    """What the system raises about a path, in our words; ``making`` if the file need not be there, but its folder."""
    try:
        yield
    except OSError as error:
        if making and isinstance(error, FileNotFoundError | NotADirectoryError):
            named = PurePath(path)
            raise NotFound(f"There is no folder {named.parent} to write {named.name} in: make it first.") from error
        raise spoken(path, error) from error


def spoken(path: str, error: OSError) -> StorageError:
    """One error of the system, in our words."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(f"There is nothing at {path}.")
    if isinstance(error, FileExistsError):
        return AlreadyExists(f"{path} exists already.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(
            f"No room to write {path} ({error.strerror}); nothing was acknowledged: make room and try again."
        )
    return StorageError(f"The disk refused {path}: {error.strerror or error}.")


def write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts, whatever the system takes at a time."""
    size = sum(map(len, parts))
    if size <= STROKE and len(parts) <= _VECTOR:  # one stroke, as it is
        written = os.writev(descriptor, parts)
        if written == size:
            return
        parts = [memoryview(b"".join(parts))[written:]]
    for waiting in _strokes(parts):
        while waiting:
            _drop(waiting, os.writev(descriptor, waiting))


def _rewrite_all(descriptor: int, start: int, parts: Sequence[bytes | memoryview]) -> None:
    for waiting in _strokes(parts):
        while waiting:
            written = os.pwritev(descriptor, waiting, start)
            start += written
            _drop(waiting, written)


def _drop(waiting: list[memoryview], written: int) -> None:
    """Take away what is written."""
    while waiting and written >= len(waiting[0]):
        written -= len(waiting.pop(0))
    if written:
        waiting[0] = waiting[0][written:]


def _strokes(parts: Sequence[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, in groups of buffers that are each written with one call."""
    group: list[memoryview] = []
    size = 0
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), STROKE):
            piece = view[at : at + STROKE]
            if group and (size + len(piece) > STROKE or len(group) >= _VECTOR):
                yield group
                group, size = [], 0
            group.append(piece)
            size += len(piece)
    if group:
        yield group


class LocalAppendFile:
    """A file of the machine's own file system."""

    def __init__(self, path: str) -> None:
        """Open the file, and create it if there is none."""
        self._path = path
        self._writer = -1
        self._page: mmap.mmap | None = None
        """The first bytes of the file, in memory, once they were written over."""
        with speaking(path, making=True):
            self._place = os.path.abspath(path)  # whatever folder the process is in later
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, file_mode())
            opened = os.fstat(self._descriptor)
            self._identity = (opened.st_dev, opened.st_ino)

    def size(self) -> int:
        """How many bytes it has."""
        with speaking(self._path):
            return os.fstat(self._descriptor).st_size

    # A group commit calls these three: the context manager of the others would cost it more than some of the writes.

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Add all parts at the end."""
        try:
            write_all(self._descriptor, parts)
        except OSError as error:
            raise spoken(self._path, error) from error

    def sync(self) -> None:
        """Make everything written durable."""
        try:
            if self._page is not None:
                self._page.flush()
            _sync_data(self._descriptor)
        except OSError as error:
            raise spoken(self._path, error) from error
        self.check_in_place()

    def check_in_place(self) -> None:
        """``NotFound`` if the file is no longer what its path leads to."""
        try:
            found = os.stat(self._place)
            in_place = (found.st_dev, found.st_ino) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            in_place = False
        except OSError as error:
            raise spoken(self._path, error) from error
        if not in_place:  # what it holds goes with the process, or is where nobody looks for it
            raise NotFound(
                f"{self._path} was removed, moved or replaced while it was written: nothing more that it holds counts "
                "as durable. Put it back, and open it again."
            )

    def rewrite(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        """Put bytes in place of what the file has from ``start`` on."""
        try:
            if start == 0 and len(parts) == 1 and self._overwritten(parts[0]):
                return
            if self._writer < 0:
                self._writer = self._reopened()
            if start and not 0 < start <= os.lseek(self._writer, 0, os.SEEK_END):
                raise InvalidInput(
                    f"{self._path} has {self.size()} bytes: it cannot be rewritten from byte {start} on."
                )
            if len(parts) == 1 and len(parts[0]) <= STROKE:
                part = parts[0]
                if os.pwrite(self._writer, part, start) == len(part):
                    return
            # A write that fell short is done again from its beginning: the same bytes in the same place.
            _rewrite_all(self._writer, start, parts)
        except OSError as error:
            raise spoken(self._path, error) from error

    def _overwritten(self, data: bytes | memoryview) -> bool:
        """Write over the first few bytes in memory, if that can be; the next time takes no call of the system.

        Such a call lets go of the interpreter, and a thread that others wait for gets it back only after some of them.
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
        """The same file without O_APPEND, with which Linux writes at the end whatever position it is told.

        By the open file itself where the system can, since the file may have got another name by now, and another
        file its own.
        """
        own = os.fstat(self._descriptor)
        for place in (f"/proc/self/fd/{self._descriptor}", self._path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found = os.open(place, os.O_RDWR | os.O_CLOEXEC)
                if os.path.samestat(own, os.fstat(found)):
                    return found
                os.close(found)
        raise StorageError(f"{self._path} is another file than was opened: open the file anew under its new name.")

    def cut(self, size: int) -> None:
        """Shorten the file."""
        self._unmap()  # to write over what the file no longer has would end the process
        with speaking(self._path):
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Let go of the file; closing twice is fine."""
        self._unmap()
        descriptors = self._writer, self._descriptor
        self._writer = self._descriptor = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


# macOS has no fdatasync; what it leaves out there is only the time of the last change.
_sync_data = getattr(os, "fdatasync", os.fsync)


class LockFile(Closing):
    """A lock that is held on purpose, or not at all.

    An exclusive ``flock`` belongs to the open file, which may stay open by accident. So the lock goes with this object,
    also when a signal interrupts whoever was about to close it; and a forked child closes its copy of the file at once,
    which would hold the lock as long as the child lives, also when the parent is done or dead.
    """

    def __init__(self) -> None:
        """Nothing is open yet."""
        # Not the bare descriptor: between two statements a signal would lose it, and nobody would ever close it.
        self._file: FileIO | None = None
        self._process = os.getpid()
        call_in_child(self, LockFile.close)  # before there is anything that another thread's fork could copy

    def take(self, path: str) -> bool:
        """Whether the lock is held now: False if someone else has it. The file is created if there is none."""
        with speaking(path, making=True):
            while True:
                self._file = file = FileIO(path, "a+", opener=partial(os.open, mode=file_mode()))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.close()
                    return False
                if os.fstat(file.fileno()).st_nlink:
                    return True
                self.close()  # somebody removed the file meanwhile: a lock on it keeps nobody out

    def close(self) -> None:
        """Let go of it; repeating that is fine. A forked child closes only its own copy of the file."""
        file = self._file
        if file is None or file.closed:
            return
        if self._process == os.getpid():
            fcntl.flock(file, fcntl.LOCK_UN)  # also for children that never came to close their copies
        file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # else it was interrupted when it was made
            self.close()
