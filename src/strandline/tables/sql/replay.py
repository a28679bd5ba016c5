"""Replay of dead letters into a table of a SQL database: rows and letters change in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.tables.maintain.replay import LetterChanges, OwnLetters
from strandline.tables.rows.shape import BAD_SCHEMA, ShapedRows
from strandline.tables.sql.changes import ChangePlanner
from strandline.tables.sql.database import Database
from strandline.tables.sql.state import CursorRow, Expected


@dataclass(slots=True)
class ReplayedSql:
    """A :class:`~strandline.tables.maintain.replay.ReplayedTable`: reads unlocked, and proves the table before a write.

    Cursor and epoch stay: the table's follower continues.
    """

    database: Database
    expected: Expected
    planner: ChangePlanner
    row: CursorRow

    @property
    def start(self) -> int:
        """The offset at which the table began."""
        return self.row.start

    @property
    def cursor(self) -> Cursor:
        """The table's cursor."""
        return self.row.cursor

    def columns(self) -> pa.Schema:
        """The columns of the table."""
        return self.row.schema

    def letters(self) -> OwnLetters:
        """All letters: the table has its own place for them."""
        with self.database.reading() as transaction:
            return OwnLetters(transaction.letters())

    def pairs(self, offset: str, key: str | None, since: int) -> Iterator[pa.Table]:
        """Offset and key of the rows."""
        with self.database.reading() as transaction:
            found = transaction.pairs(offset, key, since)
        yield found

    def apply(self, changes: LetterChanges | None, done: pa.Array) -> None:
        """Commit the changes without the letters; ``Conflict`` if the table was committed to since it was read."""
        planned = None
        if changes is not None:
            rows = ShapedRows(changes.rows, BAD_SCHEMA.empty_table())
            planned = self.planner.of_rows(rows, self.row.schema)
        with self.database.writing() as transaction:
            if planned is not None:
                transaction.stage(planned)
            transaction.lock()
            found = self.expected.proved(transaction.read_table(), self.row.cursor.log_id)
            # A concurrent replay moves no cursor: the letters themselves tell whether it was faster.
            if found != self.row or transaction.remove_letters(done.to_pylist()) != len(done):
                raise Conflict(f"The table {self.expected.where} was committed to while its letters were replayed.")
            if planned is not None:
                transaction.alter(planned)
                transaction.merge(planned)
                if planned.schema != self.row.schema:
                    wider = replace(self.row, schema=planned.schema, commit_id=str(CHANCE.uuid()))
                    if not transaction.store(wider, self.row):
                        raise self.expected.fenced()


@contextlib.contextmanager
def replayed_sql(
    database: Database, expected: Expected, planner: ChangePlanner, log_id: UUID
) -> Iterator[ReplayedSql | None]:
    """The table and its letters. ``NotFound`` without a table, ``Diverged`` if it is not the one of the log."""
    row = expected.existing(database.read_table(), log_id, planner.shape)
    yield ReplayedSql(database, expected, planner, row)
