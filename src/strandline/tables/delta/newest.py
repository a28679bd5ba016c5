"""The newest version of a Delta table, remembered: opening one reads all commits since its last checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strandline.errors import CorruptData, TransientStorageError
from strandline.tables.delta.history import NOBODY, parse_commit

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass(frozen=True, slots=True)
class NewestVersion:
    """A version of a table that was the newest one, with its commit file."""

    table: DeltaTable
    version: int
    commit: bytes

    @classmethod
    def of(cls, table: DeltaTable, read_commit: Callable[[int], bytes | None]) -> NewestVersion | None:
        """None if the commit file cannot be read, or does not say whose commit it is."""
        version = table.version()
        with contextlib.suppress(TransientStorageError, CorruptData):
            commit = read_commit(version)
            if commit is not None and parse_commit(version, commit, NOBODY).commit_id is not None:
                return cls(table, version, commit)
        return None

    def is_current(self, read_commit: Callable[[int], bytes | None]) -> bool:
        """Whether the table has the same commit at this version, and no later one.

        A commit of this package has a random id. So the same bytes are the same table, also if it was removed and
        created again.
        """
        if self.table.version() != self.version:
            return False  # an operation has moved the handle
        with contextlib.suppress(TransientStorageError):
            return read_commit(self.version + 1) is None and read_commit(self.version) == self.commit
        return False
