"""Rebuild of a table in a SQL database, and replay of its dead letters: each is one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, CorruptData
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.tables.claim import replaced
from strandline.tables.maintain.rebuilding import check_rebuilt
from strandline.tables.maintain.replay import LetterChanges
from strandline.tables.rows.bad_records import first_bad
from strandline.tables.rows.shape import BAD_SCHEMA, ShapedRows
from strandline.tables.sql.changes import ChangePlanner
from strandline.tables.sql.database import Database, SqlTransaction
from strandline.tables.sql.expected import expected_pieces, record_ranges
from strandline.tables.sql.state import CursorRow, Expected
from strandline.tables.work import Rebuild


@dataclass(frozen=True, slots=True)
class SqlRebuild:
    """Replaces the rows of a locked table by those of the records from ``beginning`` up to ``end``."""

    transaction: SqlTransaction
    planner: ChangePlanner
    job: Rebuild
    beginning: Cursor
    end: Cursor
    where: str

    def run(self, found: CursorRow) -> CursorRow:
        """The cursor row of the table with its new rows; ``found`` is the one that it has."""
        self.transaction.clear()
        if self.planner.has_dead_letters:
            self.transaction.put_dead_letters(BAD_SCHEMA.empty_table(), removed_from=self.beginning.next)
        row = self._filled(found)
        if self.job.is_verified:
            read = partial(record_ranges, self.job.log, self.beginning, self.end.next)
            expected = expected_pieces(self.planner, row.schema, read, self.transaction.size()[1])
            check_rebuilt(self.transaction.compared(expected, row.schema), self.where)
        return replace(row, start=self.beginning.next, epoch=found.epoch + 1, commit_id=str(CHANCE.uuid()))

    def _filled(self, row: CursorRow) -> CursorRow:
        at, bad, example = self.beginning.next, 0, ""
        for records in record_ranges(self.job.log, self.beginning, self.end.next):
            self._check_offset(at, records.column("offset")[0].as_py())
            at += records.num_rows
            changes = self.planner.planned(records, row.schema, is_rebuilt=True)
            self.transaction.stage(changes)
            self.transaction.alter(changes)
            self.transaction.merge(changes)
            if changes.bad.num_rows:
                self.transaction.put_dead_letters(changes.bad, removed_from=None)
            bad, example = bad + changes.bad.num_rows, example or first_bad(changes.bad)
            row = replace(row, schema=changes.schema)
        self._check_offset(at, self.end.next)
        self.planner.bad_share.check(bad, at - self.beginning.next, example)
        return replace(row, cursor=self.end)

    def _check_offset(self, at: int, found: int) -> None:
        if found != at:
            raise CorruptData(f"Offset {at} is missing in log {self.job.log.log_id}. Nothing was committed.")


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

    def letters(self) -> tuple[pa.Table, int]:
        """All letters: the table has its own place for them."""
        with self.database.reading() as transaction:
            return transaction.letters(), 0

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
                        raise replaced(self.expected.where)


def replayed_sql(database: Database, expected: Expected, planner: ChangePlanner, log_id: UUID) -> ReplayedSql:
    """The table and its letters. ``NotFound`` without a table, ``Diverged`` if it is not the one of the log."""
    row = expected.existing(database.read_table(), log_id)
    return ReplayedSql(database, expected, planner, row)
