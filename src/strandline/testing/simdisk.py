"""A disk in memory that forgets, when it crashes, what was not synced: as a machine does that loses power."""

from __future__ import annotations

import contextlib
import posixpath
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from strandline.model.errors import AlreadyExists, NotFound, StorageError
from strandline.storage.disk import AppendFile, FolderRow

R = TypeVar("R")

SimulatedAction = Literal[
    "write_new", "open_append", "write", "sync", "cut", "copy", "remove_folder", "rename", "link", "remove",
    "sync_file", "sync_folder", "make_folders",
]  # fmt: skip
Moment = Literal["before", "half", "after"]

_SECTORS: Final = (1, 8, 64, 512)


class SimulatedCall(NamedTuple):
    """One thing that was asked of the disk and may change what is on it."""

    action: SimulatedAction
    path: str


class _Folder:
    """What stands for a folder among the names."""


@dataclass(slots=True, eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    """What a crash cannot touch."""
    lost: list[tuple[int, int]] = field(default_factory=list)
    """What a failed sync took for written: it can be read, and no later sync writes it."""
    modified: int = 0

    def sync(self) -> None:
        kept = bytearray(self.data)
        for start, end in self.lost:
            kept[start:end] = bytes(end - start)
        self.synced = bytes(kept)

    def fail_to_sync(self) -> None:
        if len(self.data) > len(self.synced):
            self.lost.append((len(self.synced), len(self.data)))

    def cut(self, size: int) -> None:
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        self.lost = [(start, min(end, size)) for start, end in self.lost if start < size]

    def after_crash(self, chance: random.Random) -> bytes:
        """What is found: of each sector that was not synced the new bytes, the old ones, or zeros where none were."""
        new, old = bytearray(self.data), self.synced
        for start, end in self.lost:
            new[start:end] = bytes(end - start)
        if new == old:
            return old
        size = chance.choice([len(old), len(new), chance.randint(*sorted((len(old), len(new))))])
        sector, luck = chance.choice(_SECTORS), chance.choice([0.0, 0.5, 0.9, 1.0])
        found = bytearray(old[:size].ljust(size, b"\0"))
        first = len(old) // sector * sector if new.startswith(old) else 0
        for at in range(first, size, sector):
            if chance.random() < luck:
                piece = new[at : min(at + sector, size)]
                found[at : at + len(piece)] = piece
        return bytes(found)


_Node: TypeAlias = _File | _Folder
_Change: TypeAlias = Callable[[dict[str, _Node]], None]


class SimulatedDisk:
    """A :class:`~strandline.storage.disk.Disk` in memory, for tests of what a crash leaves. Paths are POSIX paths.

    A file's bytes are durable when they were synced, a name when its folder was. :meth:`crash` keeps those, and of the
    rest whatever its seed says: of a file any sectors of what was written, in any order, with zeros in between; of a
    folder the changes of its names up to any moment. A file whose sync failed keeps bytes that can be read and that no
    later sync makes durable, as Linux does it: only cutting them off and writing them again does.

    Every call that changes something is counted in :attr:`calls`; :meth:`interrupt` makes one of them fail, or die.

    >>> disk = SimulatedDisk(seed=1)
    >>> disk.make_folders("/data")
    >>> disk.write_new("/data/a", [b"synced, but its name is not"])
    >>> disk.write_new("/data/b", [b"durable"])
    >>> disk.sync_folder("/data")
    >>> disk.remove("/data/a")
    >>> disk.crash()
    >>> disk.read("/data/b")
    b'durable'
    """

    def __init__(self, seed: int = 0) -> None:
        """Begin empty; the seed decides what crashes keep."""
        self.calls: list[SimulatedCall] = []
        """What was asked so far, and may have changed something, in order."""
        self._random = random.Random(seed)
        self._mutex = threading.RLock()
        self._names: dict[str, _Node] = {}
        self._durable: dict[str, _Node] = {}
        self._pending: dict[str, list[_Change]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._interruptions: dict[int, tuple[BaseException, Moment]] = {}
        self._life = 0
        self._writes = 0

    # --- the hand of the test ----------------------------------------------------------------------------------

    def crash(self) -> None:
        """Lose power: what was not synced is kept in part or not at all; open files are dead and locks are free."""
        with self._mutex:
            for changes in self._pending.values():
                for change in changes[: self._random.randint(0, len(changes))]:
                    change(self._durable)
            self._pending.clear()
            for path in [path for path in self._durable if not self._reachable(path)]:
                del self._durable[path]
            self._names = dict(self._durable)
            for node in {id(node): node for node in self._names.values()}.values():
                if isinstance(node, _File):
                    node.synced = node.after_crash(self._random)
                    node.data = bytearray(node.synced)
                    node.lost = []
            self.kill()

    def kill(self) -> None:
        """End the process that uses the disk: its open files are dead and its locks free, what it wrote is kept."""
        with self._mutex:
            self._locks.clear()
            self._interruptions.clear()
            self._life += 1

    def interrupt(self, number: int, error: BaseException, *, moment: Moment = "before") -> None:
        """Raise this from call ``number`` (counted from 0, as in :attr:`calls`), once.

        ``before`` anything is done; when ``half`` of the bytes were written, if it is a write; or ``after`` all is
        done. A ``StorageError`` of a sync is a failed sync at each of them.
        """
        self._interruptions[number] = (error, moment)

    def files(self) -> dict[str, bytes]:
        """Every file with its bytes, as they can be read now."""
        with self._mutex:
            return {path: bytes(node.data) for path, node in sorted(self._names.items()) if isinstance(node, _File)}

    def damage(self, path: str, at: int, data: bytes) -> None:
        """Overwrite bytes of a file, durably, as a bad disk does."""
        with self._mutex:
            file = self._file(path)
            file.data[at : at + len(data)] = data
            file.sync()

    # --- the disk ----------------------------------------------------------------------------------------------

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, or ``NotFound``."""
        with self._mutex:
            data = self._file(path).data
            return bytes(data[start:] if length is None else data[start : start + max(0, length)])

    def size(self, path: str) -> int:
        """The file's size, or ``NotFound``."""
        with self._mutex:
            return len(self._file(path).data)

    def write_new(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create, write and sync a file; what could not be written whole is removed again."""

        def write() -> None:
            file = self._create(path)
            file.data.extend(b"".join(parts))
            file.sync()

        self._call("write_new", path, write)

    def open_append(self, path: str) -> AppendFile:
        """Open a file to add to it, creating it if there is none."""

        def find() -> AppendFile:
            node = self._names.get(_clean(path))
            return _SimulatedFile(self, path, self._create(path) if node is None else self._file(path))

        return self._call("open_append", path, find)

    def copy(self, source: str, target: str) -> None:
        """Create a file with the bytes of another, and sync it."""

        def copy() -> None:
            data = self.read(source)
            file = self._create(target)
            file.data.extend(data)
            file.sync()

        self._call("copy", target, copy)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; absent is fine."""
        self._call("remove_folder", path, lambda: self._change(path, lambda names: _drop(names, _clean(path))))

    def rename(self, source: str, target: str) -> None:
        """Atomically move a file over whatever is at ``target``, or a folder to where nothing or an empty one is."""

        def rename() -> None:
            old, new = _clean(source), _clean(target)
            if old not in self._names:
                raise NotFound(f"There is nothing at {source}.")
            self._parent(new)
            if isinstance(self._names[old], _Folder) and self.scan(new):
                raise StorageError(f"The disk refused {target}: Directory not empty.")
            self._change(target, lambda names: _move(names, old, new))

        self._call("rename", target, rename)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; ``AlreadyExists`` if that is taken."""

        def link() -> None:
            file = self._file(source)
            self._free(target)
            self._change(target, lambda names: names.update({_clean(target): file}))

        self._call("link", target, link)

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""

        def remove() -> None:
            if isinstance(self._names.get(_clean(path)), _File):
                self._change(path, lambda names: _drop(names, _clean(path)))

        self._call("remove", path, remove)

    def sync_file(self, path: str) -> None:
        """Make a file's content durable, whoever wrote it."""
        with self._mutex:
            file = self._file(path)
            self._call("sync_file", path, file.sync, failed=file.fail_to_sync)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""

        def sync() -> None:
            if not isinstance(self._names.get(_clean(path), _Folder() if _clean(path) == "/" else None), _Folder):
                raise NotFound(f"There is nothing at {path}.")
            for change in self._pending.pop(_clean(path), ()):
                change(self._durable)

        self._call("sync_folder", path, sync)

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents, durably."""

        def make() -> None:
            at = ""
            for name in _clean(path).strip("/").split("/"):
                at = f"{at}/{name}"
                if isinstance(self._names.get(at), _File):
                    raise StorageError(f"{at} is in the way: a folder is needed there, and it is a file.")
                folder = self._names.setdefault(at, _Folder())
                self._durable.setdefault(at, folder)

        self._call("make_folders", path, make)

    def scan(self, path: str) -> list[FolderRow]:
        """What is in the folder, by name; ``[]`` if there is none."""
        with self._mutex:
            inside = {name: node for name, node in self._names.items() if posixpath.dirname(name) == _clean(path)}
        return sorted(
            FolderRow(posixpath.basename(name), is_folder=True)
            if isinstance(node, _Folder)
            else FolderRow(posixpath.basename(name), size=len(node.data), modified=node.modified)
            for name, node in inside.items()
        )

    @contextlib.contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Hold an exclusive lock; a crash drops it."""
        lock = self._lock(path)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def try_locked(self, path: str) -> Iterator[bool]:
        """Hold an exclusive lock if it is free, and say whether it was."""
        lock = self._lock(path)
        held = lock.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                lock.release()

    # --- inside ------------------------------------------------------------------------------------------------

    def _call(
        self,
        action: SimulatedAction,
        path: str,
        work: Callable[[], R],
        *,
        half: Callable[[], object] = lambda: None,
        failed: Callable[[], object] = lambda: None,
    ) -> R:
        with self._mutex:
            error, moment = self._interruptions.pop(len(self.calls), (None, "before"))
            self.calls.append(SimulatedCall(action, path))
            if error is None:
                return work()
            if isinstance(error, StorageError):
                failed()
            if moment == "half":
                half()
            elif moment == "after" and (action not in ("sync", "sync_file") or not isinstance(error, StorageError)):
                work()
            raise error

    def _change(self, path: str, change: _Change) -> None:
        """Change the names now, and once the folder of this one is synced for good."""
        change(self._names)
        self._pending.setdefault(posixpath.dirname(_clean(path)), []).append(change)

    def _create(self, path: str) -> _File:
        self._free(path)
        self._writes += 1
        file = _File(modified=self._writes)
        self._change(path, lambda names: names.update({_clean(path): file}))
        return file

    def _file(self, path: str) -> _File:
        node = self._names.get(_clean(path))
        if not isinstance(node, _File):
            raise NotFound(f"There is nothing at {path}." if node is None else f"There is a folder at {path}.")
        return node

    def _free(self, path: str) -> None:
        self._parent(path)
        if _clean(path) in self._names:
            raise AlreadyExists(f"{path} exists already.")

    def _parent(self, path: str) -> None:
        folder = posixpath.dirname(_clean(path))
        if folder != "/" and not isinstance(self._names.get(folder), _Folder):
            raise NotFound(f"There is nothing at {folder}.")

    def _reachable(self, path: str) -> bool:
        folder = posixpath.dirname(path)
        return folder == "/" or (isinstance(self._durable.get(folder), _Folder) and self._reachable(folder))

    def _lock(self, path: str) -> threading.Lock:
        with self._mutex:
            if _clean(path) not in self._names:
                self._parent(path)
                self._names[_clean(path)] = self._durable[_clean(path)] = _File()
            return self._locks.setdefault(_clean(path), threading.Lock())


class _SimulatedFile:
    """An open file; dead after a crash, and at home under whatever name the file has."""

    def __init__(self, disk: SimulatedDisk, path: str, file: _File) -> None:
        self._disk, self._path, self._file = disk, path, file
        self._life = disk._life  # noqa: SLF001 - two halves of one thing
        self._closed = False

    def size(self) -> int:
        self._check()
        return len(self._file.data)

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        self._do("write", lambda: self._file.data.extend(data), half=lambda: self._file.data.extend(_half(data)))

    def sync(self) -> None:
        self._do("sync", self._file.sync, failed=self._file.fail_to_sync)

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
        if self._closed or self._life != self._disk._life:  # noqa: SLF001
            raise StorageError(f"The disk refused {self._path}: it is not open any more.")


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _clean(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path))


def _drop(names: dict[str, _Node], path: str) -> None:
    for name in [name for name in names if name == path or name.startswith(f"{path}/")]:
        del names[name]


def _move(names: dict[str, _Node], source: str, target: str) -> None:
    moved = {name: node for name, node in names.items() if name == source or name.startswith(f"{source}/")}
    if moved:
        _drop(names, target)
    for name, node in moved.items():
        del names[name]
        names[target + name[len(source) :]] = node


__all__ = ["SimulatedCall", "SimulatedDisk"]
