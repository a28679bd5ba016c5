"""Upkeep between the commits of a follower: joins small files, then removes old versions; a failure stops nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

from strandline.tables.files.upkeep import FEW, TRIM_EVERY, TrimCounts, UpkeepDone, is_due
from strandline.tables.rows.partitions import Layout, Upkeep

Join: TypeAlias = Callable[[set[str]], int]
"""Joins small files of the table, if there are enough; returns how many. Notes the files that a join leaves as many."""
Trim: TypeAlias = Callable[[float], TrimCounts]
"""Removes what no version needs that was current in the last seconds."""
_LOGGER: Final = logging.getLogger(__name__)


class UpkeepRounds:
    """The upkeep of one sink's table: which rounds are due after a commit, and what they have done."""

    def __init__(self, layout: Layout | None, where: str) -> None:
        given = None if layout is None else layout.upkeep
        self._settings = Upkeep() if given == "auto" else given
        self._where = where
        self._seen: int | None = None
        self._full: set[str] = set()
        self._seen_letters: int | None = None
        self._full_letters: set[str] = set()
        self.done = UpkeepDone()

    @property
    def is_wanted(self) -> bool:
        """Whether there is any upkeep."""
        return self._settings is not None

    def after_commit(self, number: int, join: Join, trim: Trim) -> None:
        """Do what is due behind the commit of a version. Raises nothing: the commit has landed."""
        if self._settings is None:
            return
        before = number - 1 if self._seen is None else self._seen
        self._seen = number
        with self._counted():
            if is_due(before, number, FEW):
                self._join(join, self._full)
            if is_due(before, number, TRIM_EVERY):
                self.done = replace(self.done.with_trim(trim(self._settings.seconds)), error="")

    def after_letters(self, number: int, join: Join) -> None:
        """Join files of the dead-letter table, if it is due behind a commit that stored letters. Raises nothing.

        It is looked at more often than a table of rows: other tables may share it, which join their own files.
        """
        before = number - 1 if self._seen_letters is None else self._seen_letters
        self._seen_letters = number
        with self._counted():
            if is_due(before, number, FEW // 4):
                self._join(join, self._full_letters)

    def _join(self, join: Join, full: set[str]) -> None:
        joined = join(full)
        self.done = self.done.with_join(joined) if joined else self.done

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a round that failed, and log it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - rows and cursor are committed, whatever becomes of the upkeep
            self.done = replace(self.done, failures=self.done.failures + 1, error=f"{type(error).__name__}: {error}")
            _LOGGER.warning("The upkeep of the table %s failed, and is tried again later: %s", self._where, error)
