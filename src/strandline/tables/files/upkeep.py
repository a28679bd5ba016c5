"""Upkeep of a table by its follower: when small files are joined, and when old versions go. Decisions; no I/O.

A commit a second makes 86,400 small files and versions a day. Joins keep the files few: a file is small, and as soon as
32 files of one size class are there, they become one of a larger class. So a row is written again about once for each
class, however many commits there are, and a table has at most 32 files of each class besides the large ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from strandline.tables.files.layout import is_closed, range_of, version_in
from strandline.tables.rows.kinds import Kind

FEW: Final = 32
"""Files of one size class that are joined; joins are looked for once in so many versions."""
TRIM_EVERY: Final = 64
"""Old versions are removed once in so many versions."""
LARGE: Final = 64 << 20
"""Bytes of a file that is joined no more."""
MOST_JOINED: Final = 1024
"""Files that are joined at once at most: for a table that was followed without upkeep before."""
_CLASSES: Final = (0, 64 << 10, 1 << 20, 16 << 20, LARGE)


@dataclass(frozen=True, slots=True)
class TrimCounts:
    """What a round has removed."""

    files: int = 0
    """Data files that no kept version names, also those of failed jobs."""
    entries: int = 0
    """Files of the table's history."""


@dataclass(frozen=True, slots=True)
class UpkeepDone:
    """What upkeep has done since the sink was made."""

    joins: int = 0
    joined: int = 0
    """Small files that joins have replaced."""
    files: int = 0
    """Data files that were removed."""
    entries: int = 0
    """Files of the table's history that were removed."""
    failures: int = 0
    """Rounds that failed. The follower goes on, and the next round tries again."""
    error: str = ""
    """Why the last one failed; empty once a later one succeeded."""

    def with_join(self, joined: int) -> UpkeepDone:
        """A join was committed."""
        return replace(self, joins=self.joins + 1, joined=self.joined + joined)

    def with_trim(self, trimmed: TrimCounts) -> UpkeepDone:
        """Old versions were removed."""
        return replace(self, files=self.files + trimmed.files, entries=self.entries + trimmed.entries)


def is_due(before: int, now: int, every: int) -> bool:
    """Whether a table passed a multiple of ``every`` from one version to another: so short runs have their turn, too.

    >>> is_due(30, 31, 32), is_due(31, 33, 32), is_due(32, 33, 32)
    (False, True, False)
    """
    return now // every > before // every


def to_join(
    sizes: Mapping[str, int],
    kind: Kind,
    full: AbstractSet[str] = frozenset(),
    partitions: Mapping[str, Hashable] | None = None,
) -> list[str]:
    """The files that are joined now, in the order in which they were written; none if there is nothing to join.

    Of the smallest class that has 32 files, or enough of them for a large one. ``full`` are files that a join has not
    made fewer: their rows take too much memory. Files of current rows of a keyed table are not joined: each covers keys
    of its own, and is written again with these. Closed versions of a history are joined with those of the same keys,
    and files of a partition with those of the same one.

    >>> few = {f"part-{at}.parquet": 1000 for at in range(32)}
    >>> len(to_join(few, "append")), to_join({**few, "large": 1 << 30}, "latest"), to_join({"one": 5}, "append")
    (32, [], [])
    """
    fit = {path: size for path, size in sizes.items() if path not in full and (kind == "append" or is_closed(path))}
    for low, high in pairwise(_CLASSES):
        alike: dict[Hashable, list[str]] = {}
        for path in sorted(fit, key=lambda path: (version_in(path) or 0, path)):
            if low <= fit[path] < high:
                alike.setdefault((range_of(path), (partitions or {}).get(path)), []).append(path)
        for some in alike.values():
            if len(some) >= FEW or (len(some) > 1 and sum(fit[path] for path in some) >= LARGE):
                return _at_once(some, fit)
    return []


def _at_once(paths: list[str], sizes: Mapping[str, int]) -> list[str]:
    """The first files that together are a large one, or the most that are joined at once."""
    total = 0
    for count, path in enumerate(paths, 1):
        total += sizes[path]
        if total >= LARGE and count > 1:
            return paths[:count]
    return paths[:MOST_JOINED]
