"""A folder as an object store: durable puts, and a conditional update by lock, compare and atomic rename."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from strandline.errors import AlreadyExists, Conflict, InvalidInput, NotFound, StorageError
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.objects.store import (
    LARGEST_OBJECT,
    Absent,
    Object,
    ObjectInfo,
    Payload,
    Precondition,
    Version,
    check_whole,
    payload_parts,
)

_HIDDEN = ".~"
"""Name prefix of temporary files and locks, which listings omit."""


def _version_of(parts: list[bytes | memoryview]) -> Version:
    # Not inode, time and size: inodes are reused and time has ticks, so two different contents could have the same.
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return Version(digest.hexdigest())


def _is_plain(path: str) -> bool:
    pieces = path.split("/")
    strange = (piece in ("", ".", "..") or piece.startswith(_HIDDEN) for piece in pieces)
    return "\0" not in path and not any(strange)


@bound_to_process(keep=("url",))
class LocalStore:
    """Objects as files below a folder. A put is fsynced, file and folder, before it is acknowledged."""

    def __init__(self, root: str, *, env: Env = SYSTEM) -> None:
        """Use the folder ``root``, which need not exist yet."""
        self._root = os.path.abspath(root)
        self._env = env
        self._synced: set[str] = set()
        """Folders whose names this process has made durable."""
        self._origin = Origin(f"The store {self.url}", self)

    @property
    def url(self) -> str:
        """The address of this store."""
        # Only the characters with a meaning in an address are escaped.
        return "file://" + self._root.replace("%", "%25").replace("?", "%3F").replace("#", "%23")

    def __reduce__(self) -> tuple[Any, ...]:
        return (LocalStore, (self._root,))

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    def _file(self, path: str) -> str:
        if not _is_plain(path):
            raise InvalidInput(f"{path!r} cannot be the path of an object: its parts must be plain names.")
        return os.path.join(self._root, *path.split("/"))

    def get(self, path: str) -> Object:
        """The whole object, or ``NotFound``."""
        data = self._env.disk.read(self._file(path), 0, LARGEST_OBJECT + 1)
        check_whole(len(data), self.url, path)
        return Object(data, partial(_version_of, [data]))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``start``."""
        data = self._env.disk.read(self._file(path), start, length)
        if len(data) != length:
            raise InvalidInput(f"{self.url}/{path} ends before byte {start + length}.")
        return data

    def put(self, path: str, data: Payload) -> None:
        """Write durably, replacing an existing object."""
        self._install(self._file(path), payload_parts(data), replacing=True)

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        """Write durably if the precondition holds."""
        file, parts = self._file(path), payload_parts(data)
        if isinstance(when, Absent):
            self._install(file, parts, replacing=False)
            return _version_of(parts)
        folder, name = os.path.split(file)
        self._ensure(folder)
        with self._env.disk.locked(os.path.join(folder, f"{_HIDDEN}lock-{name}")):
            try:
                found = _version_of([self._env.disk.read(file)])
            except NotFound as error:
                raise Conflict(f"{self.url}/{path} is gone; read it again.") from error
            if found != when.version:
                # The process that changed it may have died before syncing the name; see _install.
                self._env.disk.sync_folder(folder)
                raise Conflict(f"{self.url}/{path} was changed by another writer; read it again.")
            self._install(file, parts, replacing=True)
        return _version_of(parts)

    def copy(self, source: str, target: str) -> None:
        """Give the file a second name, durably: files of a store are replaced and never changed."""
        file, found = self._file(target), self._file(source)
        folder = os.path.dirname(file)
        self._ensure(folder)
        try:
            self._env.disk.link(found, file)
        except NotFound:
            raise
        except StorageError:  # the name is taken, or the file system has no second names
            self.put(target, self.get(source).data)
            return
        self._env.disk.sync_folder(folder)

    def _ensure(self, folder: str) -> None:
        """Create a folder, and sync its name and those of its parents up to the store's folder, even if it exists.

        The process that created it may have died before syncing its name: a power failure would then remove it, with
        everything acknowledged in it since.
        """
        self._env.disk.make_folders(folder)
        if folder in self._synced:
            return
        inside = folder
        while inside != self._root:
            inside = os.path.dirname(inside)
            self._env.disk.sync_folder(inside)
        with contextlib.suppress(StorageError):  # the parent folder may not be readable
            self._env.disk.sync_folder(os.path.dirname(inside))
        self._synced.add(folder)

    def _install(self, file: str, parts: list[bytes | memoryview], *, replacing: bool) -> None:
        folder = os.path.dirname(file)
        self._ensure(folder)
        temporary = os.path.join(folder, f"{_HIDDEN}new-{self._env.chance.uuid().hex}")
        try:
            self._env.disk.write_new(temporary, parts)
            if replacing:
                self._env.disk.rename(temporary, file)
            else:
                self._env.disk.link(temporary, file)  # fails if the name is taken, which a rename would not
        except BaseException as error:
            with contextlib.suppress(StorageError):
                self._env.disk.remove(temporary)
            if isinstance(error, AlreadyExists):
                # The winner may not have synced the name yet: the loser must not rely on it before that.
                self._env.disk.sync_folder(folder)
            raise
        if not replacing:
            self._env.disk.remove(temporary)
        self._env.disk.sync_folder(folder)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects below ``prefix`` in path order; folders that cannot hold a match are not read."""
        # Start at the deepest folder of the prefix: its siblings must cost nothing.
        folder = prefix.rpartition("/")[0]
        if folder and not _is_plain(folder):
            return  # no object can have such a path, which might lead out of the store
        yield from self._walk(folder, prefix, start_after)

    def _walk(self, below: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        folder = os.path.join(self._root, *below.split("/")) if below else self._root
        rows = [
            row
            for row in self._env.disk.scan(folder)
            if not row.name.startswith(_HIDDEN) and (row.links or not row.is_link)  # a link to nowhere is no object
        ]
        # Path order compares "a/b" with "a.c" by "/", so a folder sorts as its name with the slash.
        for name, is_folder, size, modified, *_ in sorted(
            rows, key=lambda row: row.name + "/" if row.is_folder else row.name
        ):
            path = f"{below}/{name}" if below else name
            if not is_folder:
                if path.startswith(prefix) and path > start_after:
                    yield ObjectInfo(path, size, modified)
                continue
            inside = path + "/"
            may_match = inside.startswith(prefix) or prefix.startswith(inside)
            if may_match and (inside > start_after or start_after.startswith(inside)):
                yield from self._walk(path, prefix, start_after)

    def delete(self, path: str) -> None:
        """Remove the object durably; absent is fine."""
        file = self._file(path)
        self._env.disk.remove(file)
        if os.path.isdir(os.path.dirname(file)):
            self._env.disk.sync_folder(os.path.dirname(file))
