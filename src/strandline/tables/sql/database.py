"""The contract of a database with one followed table: transactions, and the statements that a sink needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import pyarrow as pa

from strandline.tables.maintain.comparison import RowDifferences
from strandline.tables.sql.changes import ColumnRules, TableChanges
from strandline.tables.sql.state import CursorRow, SeenTable


class SqlTransaction(Protocol):
    """A transaction that writes. Nothing of it is visible, or holds a lock that others need, before :meth:`lock`."""

    def stage(self, changes: TableChanges) -> None:
        """Send the rows to the database."""

    def lock(self) -> None:
        """Exclude other followers, and changes of the table's columns, until the end of the transaction."""

    def read_table(self) -> SeenTable:
        """The table as it is now."""

    def create(self, changes: TableChanges) -> str:
        """Create the table; returns its identity."""

    def alter(self, changes: TableChanges) -> None:
        """Add and widen columns."""

    def merge(self, changes: TableChanges) -> None:
        """Put and delete the staged rows."""

    def put_dead_letters(self, bad: pa.Table, *, removed_from: int | None) -> None:
        """Add dead letters, and first remove those from an offset on."""

    def has_letters(self) -> bool:
        """Whether there is a table of its dead letters."""

    def letters(self) -> pa.Table:
        """All dead letters of the table (:data:`~strandline.tables.rows.shape.BAD_SCHEMA`)."""

    def remove_letters(self, offsets: Sequence[int]) -> int:
        """Remove the dead letters of these offsets; returns how many there were."""

    def pairs(self, offset: str, key: str | None, since: int) -> pa.Table:
        """Offset and key of the table's rows from an offset on, by the names of these columns; null without a key."""

    def clear(self) -> None:
        """Delete all rows of the table."""

    def size(self) -> tuple[int, int]:
        """Rows of the table, and bytes that the database says it has."""

    def compared(self, expected: Iterable[pa.Table], schema: pa.Schema) -> RowDifferences:
        """Compare the table with rows of its columns, which arrive in pieces, in the database's own types.

        The table is not read before the last piece has arrived.
        """

    def store(self, row: CursorRow, before: CursorRow | None) -> bool:
        """Replace the cursor row; False if it is not ``before`` any more. None: there was no table."""


class Database(ColumnRules, Protocol):
    """A database with one followed table."""

    def read_table(self) -> SeenTable:
        """The table as it is now."""

    def reading(self) -> AbstractContextManager[SqlTransaction]:
        """A transaction that sees one state of all tables, and changes none."""

    def writing(self, *, is_long: bool = False) -> AbstractContextManager[SqlTransaction]:
        """A transaction, committed durably at the end of the block, and rolled back if that raises.

        ``is_long``: the follower may be silent for longer than a commit takes.
        """
