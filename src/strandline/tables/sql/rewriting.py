"""Rebuild of a table in a SQL database, and replay of its dead letters: each is one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from strandline.errors import Conflict, CorruptData
from strandline.log.contract import Log
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


def rebuilt_row(
    transaction: SqlTransaction,
    planner: ChangePlanner,
    job: Rebuild,
    held: CursorRow,
    bounds: tuple[Cursor, Cursor],
    where: str,
) -> CursorRow:
    """Replace the rows of a locked table, and its cursor row ``held``, by those of the records between two cursors."""
    (beginning, end), row = bounds, held
    transaction.clear()
    if planner.has_dead_letters:
        transaction.put_dead_letters(BAD_SCHEMA.empty_table(), removed_from=beginning.next)
    at, bad, example = beginning.next, 0, ""
    for records in record_ranges(job.log, beginning, end.next):
        _check_offset(job.log, at, records.column("offset")[0].as_py())
        at += records.num_rows
        changes = planner.planned(records, row.schema, is_rebuilt=True)
        transaction.stage(changes)
        transaction.alter(changes)
        transaction.merge(changes)
        if changes.bad.num_rows:
            transaction.put_dead_letters(changes.bad, removed_from=None)
        bad, example = bad + changes.bad.num_rows, example or first_bad(changes.bad)
        row = replace(row, schema=changes.schema)
    _check_offset(job.log, at, end.next)
    planner.bad_share.check(bad, at - beginning.next, example)
    if job.is_verified:
        read = partial(record_ranges, job.log, beginning, end.next)
        expected = expected_pieces(planner, row.schema, read, transaction.size()[1])
        check_rebuilt(transaction.compared(expected, row.schema), where)
    return replace(row, cursor=end, start=beginning.next, epoch=held.epoch + 1, commit_id=str(CHANCE.uuid()))


def _check_offset(log: Log, at: int, found: int) -> None:
    if found != at:
        raise CorruptData(f"Offset {at} is missing in log {log.log_id}. Nothing was committed.")


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
