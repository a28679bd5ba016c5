"""When the tables of a route are committed to, and which of them read together. Pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

MANY_ROWS: Final = 10_000
"""Records of a table that wait for no others."""
MANY_BYTES: Final = 4 << 20
"""Likewise their bytes."""
AT_ONCE: Final = 2.5
"""Tables with few records that are committed to in one trigger, on average: a commit costs as much as thousands of
records."""
LONGEST_WAIT: Final = 60.0
"""Seconds that a record waits for a commit at most, besides that for slow tables."""
ALIGNED_SECONDS: Final = 60.0
"""Seconds within which all tables are committed to at one cursor, also those without records: the slot follows them,
and a reader finds a state of all tables at that offset."""
SLOW_SECONDS: Final = 10.0
"""Seconds for which the other tables wait for a commit of one."""


def wait_of(tables: int, pace: float) -> float:
    """Seconds that a table's few records wait for more, if so many tables have some: many cost little more than one.

    >>> [wait_of(tables, 1.0) for tables in (1, 2, 10, 100, 1000)]
    [1.0, 1.0, 4.0, 40.0, 60.0]
    """
    return max(pace, min(LONGEST_WAIT, pace * tables / AT_ONCE))


@dataclass(frozen=True, slots=True)
class Waiting:
    """The records that wait for the next commit of a table."""

    name: str
    rows: int
    size: int
    since: float | None
    """When the oldest of them was read; None: there are none."""
    is_behind: bool
    """Whether its cursor is below what was read."""


@dataclass(frozen=True, slots=True)
class Due:
    """What is committed now."""

    names: tuple[str, ...]
    is_aligned: bool = False
    """Whether all tables have one cursor then."""


def due(tables: Sequence[Waiting], now: float, *, pace: float, most: int, aligned_at: float, ends: bool = False) -> Due:
    """Which tables are committed to at ``now``: those with many records, and all of them together in time.

    ``most`` bounds the bytes that wait. ``aligned_at``: when all tables were last at one cursor. ``ends``: nothing more
    is read.

    >>> few, many = Waiting("few", 5, 500, 0.0, True), Waiting("many", 20_000, 10, 0.0, True)
    >>> due([few, many], 0.5, pace=1.0, most=1 << 20, aligned_at=0.0).names
    ('many',)
    >>> due([few, many], 1.0, pace=1.0, most=1 << 20, aligned_at=0.0).names
    ('few', 'many')
    >>> due([few, Waiting("idle", 0, 0, None, True)], 60.0, pace=1.0, most=1 << 20, aligned_at=0.0)
    Due(names=('few', 'idle'), is_aligned=True)
    """
    waiting = [one for one in tables if one.since is not None]
    oldest = min((one.since for one in waiting if one.since is not None), default=now)
    wait = wait_of(len(waiting), pace)
    is_full = now - oldest >= wait or sum(one.size for one in waiting) >= most
    if ends or now - aligned_at + (wait if is_full else 0.0) >= ALIGNED_SECONDS:  # the next time were too late
        return Due(tuple(one.name for one in tables if one.is_behind), is_aligned=True)
    if is_full:
        return Due(tuple(one.name for one in waiting))
    return Due(tuple(one.name for one in waiting if one.rows >= MANY_ROWS or one.size >= MANY_BYTES))


def together(cursors: Iterable[tuple[str, int]], near: int) -> list[list[str]]:
    """Tables that read together, by their offsets: each group is read from its lowest one on. The last is foremost.

    Tables at most ``near`` records behind the next ones read with these, and drop what they have.

    >>> together([("a", 100), ("b", 990), ("c", 1000), ("d", 120)], near=50)
    [['a', 'd'], ['b', 'c']]
    """
    groups: list[list[str]] = []
    last = 0
    for name, offset in sorted(cursors, key=lambda one: one[1]):
        if groups and offset - last <= near:
            groups[-1].append(name)
        else:
            groups.append([name])
        last = offset
    return groups
