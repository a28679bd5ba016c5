"""Simulated files and folders: synced content, and the states that a crash may leave of the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

R = TypeVar("R")

_SCRAPS: Final = (1, 8, 64)
_LUCK: Final = (0, 5, 9, 10)


class Choices(Protocol):
    """A source of decisions."""

    def pick(self, count: int) -> int:
        """A number from 0 to below ``count``, which is at least 1."""


class Drawn:
    """Choices drawn from a seed: the same seed, the same choices."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def pick(self, count: int) -> int:
        """Any of them, at random."""
        return self._random.randrange(count) if count > 1 else 0


class _Scripted:
    """Scripted choices, then the first of each; counts them."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.made: list[tuple[int, int]] = []

    def pick(self, count: int) -> int:
        chosen = self._script[len(self.made)] if len(self.made) < len(self._script) else 0
        self.made.append((chosen, count))
        return chosen


def every(run: Callable[[Choices], R]) -> Iterator[R]:
    """The results of ``run`` for all combinations of its choices; it must be deterministic.

    >>> list(every(lambda choices: (choices.pick(2), choices.pick(3))))
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    """
    script: list[int] = []
    while True:
        choices = _Scripted(script)
        yield run(choices)
        made = choices.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return
        script = [chosen for chosen, _ in made]
        script[-1] += 1


class CrashMode(Enum):
    """What a crash keeps of unsynced bytes and names. Synced ones are always kept."""

    KILL = "kill"
    """Only the process dies: everything can still be read, but is no more durable than before."""
    NOTHING = "nothing"
    """None of it."""
    PREFIX = "prefix"
    """Of each file the first few writes, rewrites and cuts, each of them whole; of a folder the first few changes."""
    TORN_512 = "torn at 512"
    """The same, and of the next write the part before a multiple of 512; the rest is unchanged: missing, or
    zeros, or the old bytes."""
    TORN_4096 = "torn at 4096"
    """The same with multiples of 4096."""
    SECTORS = "sectors"
    """Of each sector of 512 bytes any version that it ever had, independently of its neighbours, so that a later
    write may survive an earlier one; of a file's size any that it had; and any of the changes of names."""
    PAGES = "pages"
    """The same with pages of 4096."""
    SCRAPS = "scraps"
    """The same with pieces of 1, 8 or 64 bytes, and any size: worse than a disk, so that short writes are torn too."""


POWER: Final = tuple(mode for mode in CrashMode if mode is not CrashMode.KILL)
"""The modes in which the machine loses power."""

_UNITS: Final = {CrashMode.SECTORS: 512, CrashMode.PAGES: 4096}
_TEARS: Final = {CrashMode.TORN_512: 512, CrashMode.TORN_4096: 4096}


class _Write(NamedTuple):
    at: int
    data: bytes


class _Cut(NamedTuple):
    size: int


@dataclass(slots=True, eq=False)
class File:
    """A file's bytes as they can be read, as they were last synced, and the steps since.

    The readable bytes are the synced ones plus the steps, except for writes that a failed sync has lost: those are in
    ``data`` but in no step, so that no later sync writes them until they are written again.
    """

    modified: int = 0
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    """What a crash leaves without later steps."""
    pending: list[_Write | _Cut] = field(default_factory=list)
    """The steps since; a lost write is here with the bytes that it left unchanged."""

    @property
    def is_synced(self) -> bool:
        """Whether there are no steps since, and no readable byte is lost."""
        return not self.pending and self.data == self.synced

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self.rewrite(len(self.data), data)

    def rewrite(self, at: int, data: bytes) -> None:
        """Overwrite bytes, also past the end."""
        if data:
            step = _Write(at, data)
            self.pending.append(step)
            _take(self.data, step)

    def cut(self, size: int) -> None:
        """Truncate it, or extend it with zeros."""
        if size != len(self.data):
            step = _Cut(size)
            self.pending.append(step)
            _take(self.data, step)

    def sync(self) -> None:
        """Make everything durable, except for writes that an earlier sync has lost, without an error."""
        *_, self.synced = self._stages()
        self.pending.clear()

    def fail_to_sync(self) -> None:
        """Lose the writes since the last sync, but keep showing them: the disk has the former bytes."""
        disk, left = bytearray(self.synced), list[_Write | _Cut]()
        for step in self.pending:
            if isinstance(step, _Write):
                end = step.at + len(step.data)
                left.append(_Write(step.at, bytes(disk[step.at : end].ljust(len(step.data), b"\0"))))
            else:
                left.append(step)
            _take(disk, left[-1])
        self.pending = left

    def overwrite(self, at: int, data: bytes) -> None:
        """Change existing bytes, durable ones durably."""
        kept = bytearray(self.synced)
        for found in (self.data, kept):
            _spoil(found, at, data)
        self.synced = bytes(kept)
        for number, step in enumerate(self.pending):
            if isinstance(step, _Write):
                part = bytearray(step.data)
                _spoil(part, max(0, at - step.at), data[max(0, step.at - at) :])
                self.pending[number] = _Write(step.at, bytes(part))

    def crash(self, mode: CrashMode, choices: Choices) -> None:
        """Become the state after a crash; all of it is durable."""
        if mode is CrashMode.KILL:
            return
        if self.pending and mode is not CrashMode.NOTHING:
            self.synced = self._survivor(mode, choices)
        self.data = bytearray(self.synced)
        self.pending = []

    def _survivor(self, mode: CrashMode, choices: Choices) -> bytes:
        stages = list(self._stages())
        if mode is CrashMode.PREFIX:
            return stages[choices.pick(len(stages))]
        if mode in _TEARS:
            torn = self._torn(stages, _TEARS[mode])
            return torn[choices.pick(len(torn))]
        if mode is CrashMode.SCRAPS:
            return _scraps(stages, choices)
        return _pieces(stages, _UNITS[mode], choices)

    def _torn(self, stages: list[bytes], unit: int) -> list[bytes]:
        found = list(stages)
        for before, after, step in zip(stages, stages[1:], self.pending, strict=False):
            if isinstance(step, _Write):
                for at in range((step.at // unit + 1) * unit, step.at + len(step.data), unit):
                    torn = after[:at] + before[at:]
                    found += [torn, torn.ljust(len(after), b"\0")]
        return list(dict.fromkeys(found))

    def _stages(self) -> Iterator[bytes]:
        """The disk's bytes when the file was last synced, and after each step since."""
        disk = bytearray(self.synced)
        yield bytes(disk)
        for step in self.pending:
            _take(disk, step)
            yield bytes(disk)


def _take(data: bytearray, step: _Write | _Cut) -> None:
    if isinstance(step, _Write):
        data[step.at : step.at + len(step.data)] = step.data
    else:
        _resize(data, step.size)


def _spoil(data: bytearray, at: int, piece: bytes) -> None:
    """Overwrite the existing bytes of a range."""
    piece = piece[: max(0, len(data) - at)]
    data[at : at + len(piece)] = piece


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def _pieces(stages: list[bytes], unit: int, choices: Choices) -> bytes:
    """Of each piece any version that it had, in a file of any size that it had."""
    sizes = list(dict.fromkeys(map(len, stages)))
    size = sizes[choices.pick(len(sizes))]
    found = bytearray()
    for at in range(0, size, unit):
        versions = list(dict.fromkeys(stage[at : at + unit].ljust(unit, b"\0") for stage in stages))
        found += versions[choices.pick(len(versions))]
    return bytes(found[:size])


def _scraps(stages: list[bytes], choices: Choices) -> bytes:
    """Of each scrap the oldest or the newest version, or one between if it was rewritten, in a file of any size."""
    old, new = stages[0], stages[-1]
    grown = all(map(bytes.startswith, stages[1:], stages))
    later = stages[-1:] if grown else stages[1:]
    low, high = sorted((len(old), len(new)))
    size = (len(old), len(new), low + choices.pick(high - low + 1))[choices.pick(3)]
    unit, luck = _SCRAPS[choices.pick(len(_SCRAPS))], _LUCK[choices.pick(len(_LUCK))]
    found = bytearray(old[:size].ljust(size, b"\0"))
    first = len(old) // unit * unit if grown else 0
    for at in range(first, size, unit):
        if choices.pick(10) < luck:
            piece = later[choices.pick(len(later))][at : min(at + unit, size)]
            found[at : at + len(piece)] = piece
    return bytes(found)


# --- folders ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Folder:
    """The visible names in a folder, the synced ones, and the changes since."""

    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    stamps: dict[str, int] = field(default_factory=dict)
    """The change that set each durable name, so that an earlier one does not undo it."""
    pending: list[Change] = field(default_factory=list)

    def sync(self) -> None:
        """Make all changes of its names durable."""
        for change in self.pending:
            change.keep()
        self.pending.clear()

    def crash(self, mode: CrashMode, choices: Choices) -> None:
        """Keep the changes that the mode allows; :meth:`settle` shows them."""
        changes = self.pending
        if mode in (CrashMode.PREFIX, *_TEARS):
            changes = changes[: choices.pick(len(changes) + 1)]
        elif mode is CrashMode.NOTHING:
            changes = []
        else:
            changes = [change for change in changes if choices.pick(2)]
        for change in changes:
            change.keep()

    def settle(self) -> None:
        """Show the durable names only."""
        self.names = dict(self.durable)
        self.pending.clear()
        self.stamps.clear()


Node: TypeAlias = File | Folder


class Step(NamedTuple):
    """One name in one folder, and its new target; None if it is removed."""

    folder: Folder
    name: str
    node: Node | None


@dataclass(slots=True, eq=False)
class Change:
    """Steps that become visible and durable together."""

    number: int
    steps: tuple[Step, ...]

    def show(self) -> None:
        """Make it visible."""
        for folder, name, node in self.steps:
            _set(folder.names, name, node)

    def keep(self) -> None:
        """Make it durable, unless a later change is already."""
        for folder, name, node in self.steps:
            if folder.stamps.get(name, -1) < self.number:
                folder.stamps[name] = self.number
                _set(folder.durable, name, node)


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def walk(folder: Folder, path: str = "", *, durable: bool = False) -> Iterator[tuple[str, Node]]:
    """Everything below a folder with its path, in name order; a folder comes before its content."""
    for name, node in sorted((folder.durable if durable else folder.names).items(), key=lambda item: item[0]):
        yield f"{path}/{name}", node
        if isinstance(node, Folder):
            yield from walk(node, f"{path}/{name}", durable=durable)


def observable_state(root: Folder) -> list[object]:
    """Everything by which a reader, a sync or a crash could distinguish this tree; its ``repr`` is stable."""
    found: list[object] = []
    for durable in (False, True):
        for path, node in [("", root), *walk(root, durable=durable)]:
            if isinstance(node, File):
                found.append((path, bytes(node.data), node.synced, node.pending))
            else:
                changes = [[(step.name, step.node is None) for step in change.steps] for change in node.pending]
                found.append((path, changes))
    return found


def crash_below(root: Folder, mode: CrashMode, choices: Choices) -> None:
    """Apply a crash in this mode to everything below."""
    if mode is CrashMode.KILL:
        return
    seen = [root, *(node for durable in (True, False) for _, node in walk(root, durable=durable))]
    folders = {id(node): node for node in seen if isinstance(node, Folder)}
    for folder in folders.values():
        folder.crash(mode, choices)
    for folder in folders.values():
        folder.settle()
    files = {id(node): node for _, node in walk(root) if isinstance(node, File)}
    for file in files.values():
        file.crash(mode, choices)
