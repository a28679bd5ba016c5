"""What a changed file changes in a running server, and what only a restart does. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from strandline.serve.config.settings import OF_MANY, LogSection, Settings


class PartName(NamedTuple):
    """A part of the server: its section, and its name there."""

    section: str
    name: str

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference of two files: parts to stop, parts to start, and sentences on what a restart is needed for."""

    stop: tuple[PartName, ...] = ()
    start: tuple[PartName, ...] = ()
    """Those that changed are stopped, and started again."""
    restart: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """One line for each.

        >>> Changes((PartName("tables", "a"),), (PartName("tables", "a"),), ()).lines()
        ['tables.a is changed']
        """
        both = set(self.stop) & set(self.start)
        said = [f"{part} is {'changed' if part in both else 'added'}" for part in self.start]
        return [*said, *(f"{part} is removed" for part in self.stop if part not in both), *self.restart]


_FIXED: Final = ("process", "http", "flight", "security", "streams")
_OF_ROUNDS: Final = ("retention", "slot_lag", "slot_idle", "trim", "grace", "cold")
"""Settings of a log that a running server changes: those of its rounds."""


def changes(old: Settings, new: Settings) -> Changes:
    """What to do so that a server with the old settings has the new ones."""
    stop: list[PartName] = []
    start: list[PartName] = []
    restart = [
        f"[{name}] is changed: restart the process for that"
        for name in _FIXED
        if getattr(old, name) != getattr(new, name)
    ]
    for section in OF_MANY:
        before, after = getattr(old, section), getattr(new, section)
        for name in [*before, *(each for each in after if each not in before)]:
            was, now = before.get(name), after.get(name)
            if was == now:
                continue
            if isinstance(was, LogSection) and isinstance(now, LogSection) and not _is_of_rounds(was, now):
                restart.append(f"[logs.{name}] has another address, node or store: restart the process for that")
                continue
            stop += [PartName(section, name)] if was is not None else []
            start += [PartName(section, name)] if now is not None else []
    return Changes(tuple(stop), tuple(start), tuple(restart))


def in_force(old: Settings, new: Settings) -> Settings:
    """The settings after :func:`changes` was applied: the new ones, apart from what a restart is needed for."""
    logs = {
        name: old.logs[name] if name in old.logs and not _is_of_rounds(old.logs[name], log) else log
        for name, log in new.logs.items()
    }
    return msgspec.structs.replace(new, logs=logs, **{name: getattr(old, name) for name in _FIXED})


def _is_of_rounds(was: LogSection, now: LogSection) -> bool:
    """Whether only settings differ that a running server can change. A node has all of its own from its start."""
    if was.node is not None or now.node is not None:
        return was == now
    return msgspec.structs.replace(was, **{name: getattr(now, name) for name in _OF_ROUNDS}) == now
