"""Trims the history of a Delta table, and removes data files that no kept version names: part of a follower's upkeep.

The oldest version that is kept is one with a checkpoint. It is committed as the table's floor before anything is
removed: a repair that begins later goes back to none below it, and one that began before is refused by that commit.
Then commit files and checkpoints below the floor go, and data files last: so each version that can still be opened is
whole, and what a round that was interrupted has left is found by the next one. A data file has the version in its name
as which its job was to be committed: so a file at or below the floor which the floor does not name is of no kept
version, and can never become part of one. That does not hold of a version that a repair or an adoption made, which may
name files that were removed before: until it is the floor itself or below it, nothing is removed. Clocks decide when,
never whether.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import unquote

from strandline.model.cursor import Cursor
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.history import NOBODY, parse_commit
from strandline.tables.delta.version import DeltaVersion
from strandline.tables.files.layout import version_in
from strandline.tables.files.upkeep import TrimCounts

_ENTRY: Final = re.compile(r"(\d{20})\.(?:(json)|crc|(checkpoint\.parquet)|checkpoint\.\d{10}\.\d{10}\.parquet)")
_LATE_CHECKPOINT: Final = 100
"""Versions without a checkpoint after which upkeep makes one: commits do so every twenty versions."""
_REMOVED_KEPT: Final = "delta.deletedFileRetentionDuration"
"""For how long checkpoints name removed files: each one is read whenever the table is opened."""


@dataclass(frozen=True, slots=True)
class LogEntries:
    """The commit files and the checkpoints of a table's history, by their versions; and all files of each."""

    commits: tuple[int, ...]
    checkpoints: tuple[int, ...]
    names: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> LogEntries:
        """The entries among the files of the history's folder.

        >>> found = LogEntries.of([f"{7:020d}.json", f"{7:020d}.checkpoint.parquet", "_last_checkpoint"])
        >>> found.commits, found.checkpoints, len(found.names)
        ((7,), (7,), 2)
        """
        found = sorted((int(one[1]), one[0], one[2], one[3]) for name in names if (one := _ENTRY.fullmatch(name)))
        return cls(
            tuple(at for at, _, commit, _ in found if commit),
            tuple(at for at, _, _, checkpoint in found if checkpoint),
            tuple((at, name) for at, name, *_ in found),
        )

    def floor(self, before: int, time_of: Callable[[int], int]) -> int | None:
        """The newest checkpoint at which, or behind which, all versions are that were current since ``before``.

        None: nothing is older. The times of versions ascend.

        >>> entries = LogEntries(tuple(range(10, 60)), (19, 39), ())
        >>> [entries.floor(before, lambda version: version) for before in (9, 18, 19, 38, 39, 99)]
        [None, None, 19, 19, 39, 39]
        """
        place = bisect.bisect_right(self.commits, before, key=time_of) - 1
        if place < 0:
            return None
        return max((one for one in self.checkpoints if one <= self.commits[place]), default=None)


def trim(followed: DeltaCommits, version: DeltaVersion, at: Cursor, seconds: float) -> TrimCounts:
    """Remove what no version names that was current in the last ``seconds``; ``version`` is proved to be at a cursor.

    ``Conflict`` if another job commits meanwhile: then nothing is removed.
    """
    kept = f"interval {max(1, round(seconds))} seconds"
    if version.properties.get(_REMOVED_KEPT) != kept:
        version = replace(followed.keep_removed(version, at, {_REMOVED_KEPT: kept}), holder=version.holder)
    entries = LogEntries.of(followed.files.history())
    if version.number - max(entries.checkpoints, default=0) >= _LATE_CHECKPOINT:
        followed.add_checkpoint()
    before = followed.now() - round(seconds * 1000)
    floor = entries.floor(before, lambda number: _time_of(followed, number, before))
    if floor is None or followed.reset_of(version, at.log_id) > floor:
        return TrimCounts()
    oldest = followed.at_version(floor)
    named = {*oldest.listed_files(), *version.listed_files()}
    if floor > followed.floor_of(version, at.log_id):
        followed.make_checkpoint_durable(floor)
        followed.raise_floor(version, at, floor)
    old = [name for number, name in entries.names if number < floor]
    for name in old:
        followed.files.remove(f"_delta_log/{name}")
    files = [row.name for row in followed.files.listed(recursive=False) if not row.is_folder]
    gone = [name for name in files if is_outlived(name, floor) and unquote(name) not in named]
    followed.files.refuse_links(gone)
    for name in gone:
        followed.files.remove(name)
    return TrimCounts(len(gone), len(old))


def is_outlived(name: str, floor: int) -> bool:
    """Whether a file is of a job that was to commit the floor or a version below it, by its name.

    >>> from strandline.tables.files.layout import job_name
    >>> name = f"part-{job_name(7, 'c' * 36)}-{'d' * 36}.parquet"
    >>> is_outlived(name, 6), is_outlived(name, 7), is_outlived("other.parquet", 7)
    (False, True, False)
    """
    number = version_in(name)
    return number is not None and number <= floor


def _time_of(followed: DeltaCommits, number: int, before: int) -> int:
    """When a version was committed, in milliseconds; ``before`` plus one if that is unknown."""
    data = followed.read_commit(number)
    found = None if data is None else parse_commit(number, data, NOBODY).time
    return before + 1 if found is None else found
