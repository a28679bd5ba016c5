"""The file tree of a simulated disk."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from strandline.errors import AlreadyExists, DiskFull, InvalidInput, NotFound, StorageError
from strandline.testing.simdisk.nodes import Change, File, Folder, Node, Step, walk


class Tree:
    """Names of files and folders; every change is visible at once, and durable when it is synced.

    Not locked. Paths are POSIX paths; relative ones begin at the root.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.root = Folder()
        self.capacity = capacity
        self.refused = 0
        """Number of writes without room."""
        self._changes = 0

    # --- finding -----------------------------------------------------------------------------------------------

    def find(self, path: str) -> Node | None:
        """The node at a path, or None."""
        node: Node | None = self.root
        for name in clean(path).split("/"):
            if name:
                node = node.names.get(name) if isinstance(node, Folder) else None
        return node

    def file(self, path: str) -> File:
        """The file there, or ``NotFound``."""
        node = self.find(path)
        if not isinstance(node, File):
            raise NotFound(f"There is nothing at {path}." if node is None else f"There is a folder at {path}.")
        return node

    def folder(self, path: str) -> Folder:
        """The folder there, or ``NotFound``."""
        node = self.find(path)
        if not isinstance(node, Folder):
            raise NotFound(f"There is nothing at {path}.")
        return node

    def place(self, path: str) -> tuple[Folder, str]:
        """The parent folder of a path, and its name there."""
        above, name = posixpath.split(clean(path))
        return self.folder(above), name

    def files(self) -> list[File]:
        """Every file with a name, once."""
        return list({id(node): node for _, node in walk(self.root) if isinstance(node, File)}.values())

    # --- changing ----------------------------------------------------------------------------------------------

    def create(self, path: str) -> File:
        """Create an empty file at an absent path."""
        file = File(modified=self._changes + 1)
        self.link(file, path)
        return file

    def link(self, file: File, path: str) -> None:
        """Give a file a name at an absent path."""
        folder, name = self.place(path)
        if name in folder.names:
            raise AlreadyExists(f"{path} exists already.")
        self._change(Step(folder, name, file))

    def rewrite(self, file: File, path: str, at: int | None, data: bytes) -> None:
        """Overwrite bytes, also past the end (None: at the end), where as many as fit are written, or ``DiskFull``."""
        size = len(file.data)
        at = size if at is None else at
        if not 0 <= at <= size:
            raise InvalidInput(f"{path} has {size} bytes: it cannot be rewritten from byte {at} on.")
        fits = size - at + self._room()
        file.rewrite(at, data[:fits])
        if len(data) > fits:
            raise self._full(path)

    def require(self, size: int, path: str) -> None:
        """Raise ``DiskFull`` unless ``size`` more bytes fit."""
        if size > self._room():
            raise self._full(path)

    def _room(self) -> int:
        if self.capacity is None:
            return 1 << 62
        return max(0, self.capacity - sum(len(file.data) for file in self.files()))

    def _full(self, path: str) -> DiskFull:
        self.refused += 1
        return DiskFull(f"No room to write {path}; nothing was acknowledged: make room and try again.")

    def rename(self, source: str, target: str) -> None:
        """Move a file, replacing the target, or a folder to an absent or empty target."""
        old, name = self.place(source)
        node = old.names.get(name)
        if node is None:
            raise NotFound(f"There is nothing at {source}.")
        new, called = self.place(target)
        there = new.names.get(called)
        if isinstance(node, Folder) and isinstance(there, Folder) and there is not node and there.names:
            raise StorageError(f"The disk refused {target}: Directory not empty.")
        if there is node:
            return
        change = self._change(Step(old, name, None), Step(new, called, node))
        if new is not old and isinstance(node, File):
            # A crash may leave a file under both of its names, but never under neither.
            new.pending[-1] = Change(change.number, (Step(new, called, node),))

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine."""
        if isinstance(self.find(path), File):
            self._change(Step(*self.place(path), None))

    def remove_folder(self, path: str, *, whole: bool = True) -> None:
        """Remove a folder with its content, one entry after another, or the first half of it; absent is fine."""
        node = self.find(path)
        if isinstance(node, Folder):
            steps = [*_removals(node), Step(*self.place(path), None)]
            for step in steps if whole else steps[: len(steps) // 2]:
                self._change(step)

    def make_folders(self, path: str, *, synced: bool = True) -> None:
        """Create a folder and its parents, durably; unless ``synced``, the last of the names is not."""
        at, folder = "", self.root
        names = [name for name in clean(path).split("/") if name]
        for number, name in enumerate(names, 1):
            at = f"{at}/{name}"
            found = folder.names.get(name)
            if isinstance(found, File):
                raise StorageError(f"{at} is a file, but a folder is needed there.")
            if found is None:
                found = Folder()
                change = self._change(Step(folder, name, found))
                if synced or number < len(names):
                    folder.pending.remove(change)
                    change.keep()
            folder = found

    def lock_file(self, path: str) -> None:
        """Create a lock file if needed; its name is durable at once, since it does not matter."""
        if self.find(path) is None:
            folder, name = self.place(path)
            folder.names[name] = folder.durable[name] = File()

    def _change(self, *steps: Step) -> Change:
        self._changes += 1
        change = Change(self._changes, steps)
        change.show()
        for folder in {id(step.folder): step.folder for step in steps}.values():
            folder.pending.append(change)
        return change


def clean(path: str) -> str:
    """The normalised path from the root."""
    return posixpath.normpath(posixpath.join("/", path))


def _removals(folder: Folder) -> Iterator[Step]:
    for name, node in sorted(folder.names.items(), key=lambda item: item[0]):
        if isinstance(node, Folder):
            yield from _removals(node)
        yield Step(folder, name, None)
