"""The disk: the few operations from which durable files are made."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from strandline.model.errors import AlreadyExists, DiskFull, InvalidInput, NotFound, StorageError


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
        """Make everything written durable. When it raises, nothing that was not synced before may be trusted."""

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
        """Hold an exclusive lock that a dead process cannot keep; the file at ``path`` stays behind."""

    def try_locked(self, path: str) -> contextlib.AbstractContextManager[bool]:
        """The same without waiting: the block is given True if it holds the lock, False if someone else does."""


_VECTOR: Final = 512
"""How many buffers one system call takes; every system allows at least so many."""

_STROKE: Final = 512 << 10
"""How many bytes one system call writes. Calls of 2 MiB and more were measured to be five times slower per byte."""


@contextlib.contextmanager
def _speaking(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _spoken(path, error) from error


def _spoken(path: str, error: OSError) -> StorageError:
    """What the system said, in our words."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(f"There is nothing at {path}.")
    if isinstance(error, FileExistsError):
        return AlreadyExists(f"{path} exists already.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(
            f"No room to write {path} ({error.strerror}); nothing was acknowledged: make room and try again."
        )
    return StorageError(f"The disk refused {path}: {error.strerror or error}.")


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    size = sum(map(len, parts))
    if size <= _STROKE and len(parts) <= _VECTOR:  # one stroke, as it is
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
        for at in range(0, len(view), _STROKE):
            piece = view[at : at + _STROKE]
            if group and (size + len(piece) > _STROKE or len(group) >= _VECTOR):
                yield group
                group, size = [], 0
            group.append(piece)
            size += len(piece)
    if group:
        yield group


class _LocalAppendFile:
    """A file of the machine's own file system."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer = -1
        with _speaking(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def size(self) -> int:
        with _speaking(self._path):
            return os.fstat(self._descriptor).st_size

    # A group commit calls these three: the context manager of the others would cost it more than some of the writes.

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            _write_all(self._descriptor, parts)
        except OSError as error:
            raise _spoken(self._path, error) from error

    def sync(self) -> None:
        try:
            _sync_data(self._descriptor)
        except OSError as error:
            raise _spoken(self._path, error) from error

    def rewrite(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        try:
            if self._writer < 0:
                self._writer = self._reopened()
            if start and not 0 < start <= os.lseek(self._writer, 0, os.SEEK_END):
                raise InvalidInput(
                    f"{self._path} has {self.size()} bytes: it cannot be rewritten from byte {start} on."
                )
            if len(parts) == 1 and len(parts[0]) <= _STROKE:
                part = parts[0]
                if os.pwrite(self._writer, part, start) == len(part):
                    return
            # A write that fell short is done again from its beginning: the same bytes in the same place.
            _rewrite_all(self._writer, start, parts)
        except OSError as error:
            raise _spoken(self._path, error) from error

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
        with _speaking(self._path):
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        descriptors = self._writer, self._descriptor
        self._writer = self._descriptor = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


# macOS has no fdatasync; what it leaves out there is only the time of the last change.
_sync_data = getattr(os, "fdatasync", os.fsync)


class LocalDisk:
    """The machine's own file system."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, or ``NotFound``."""
        with _speaking(path):
            try:
                opened = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
            except IsADirectoryError as error:
                raise NotFound(f"There is a folder at {path}, and no file.") from error
        with _speaking(path), opened as file:
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
        with _speaking(path):
            return os.stat(path).st_size

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create, write and fsync a file; what could not be written whole is removed again."""
        with _speaking(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _write_all(descriptor, parts)
                os.fsync(descriptor)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(descriptor)

    def open_append(self, path: str) -> AppendFile:
        """Open a file to add to it, creating it if there is none."""
        return _LocalAppendFile(path)

    def copy(self, source: str, target: str) -> None:
        """Create a file with the bytes of another, and fsync it; a link is copied as what it leads to."""
        with _speaking(source):
            found = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _speaking(target):
                made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                try:
                    while piece := os.read(found, _STROKE):
                        _write_all(made, [piece])
                    os.fsync(made)
                except BaseException:
                    os.unlink(target)
                    raise
                finally:
                    os.close(made)
        finally:
            os.close(found)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; absent is fine."""
        with _speaking(path), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file over whatever is at ``target``, or a folder to where nothing or an empty one is."""
        with _speaking(target):
            os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""
        with _speaking(target):
            os.link(source, target)

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""
        with _speaking(path), contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(path)

    def sync_file(self, path: str) -> None:
        """Make a file's content durable, whoever wrote it."""
        self._sync(path, os.O_RDONLY)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def _sync(self, path: str, flags: int) -> None:
        with _speaking(path):
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
        with _speaking(path):
            # Two processes may create the same folder at once; both then sync the name, which is harmless.
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            if not os.path.isdir(path):
                raise StorageError(f"{path} is in the way: a folder is needed there, and it is a file.")
        self.sync_folder(parent or ".")

    def scan(self, path: str) -> list[FolderRow]:
        """What is in the folder, by name."""
        rows = []
        with _speaking(path), contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
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
        descriptor, _ = _lock(path, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def try_locked(self, path: str) -> Iterator[bool]:
        """Hold the same lock if nobody else does; the block is told whether."""
        descriptor, held = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield held
        finally:
            os.close(descriptor)


def _lock(path: str, how: int) -> tuple[int, bool]:
    """The lock's file, open, and whether it is held."""
    with _speaking(path):
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, how)
                if os.fstat(descriptor).st_nlink:
                    return descriptor, True
            except BlockingIOError:
                return descriptor, False
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # somebody removed the file meanwhile: a lock on it keeps nobody out


DISK = LocalDisk()
