"""Rebuild of a table in a SQL database: all rows are replaced, and compared with the log, in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from strandline.errors import CorruptData
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.tables.maintain.rebuilding import check_rebuilt
from strandline.tables.rows.bad_records import first_bad
from strandline.tables.rows.shape import BAD_SCHEMA
from strandline.tables.sql.changes import ChangePlanner
from strandline.tables.sql.database import SqlTransaction
from strandline.tables.sql.expected import ExpectedRows, record_ranges
from strandline.tables.sql.state import CursorRow
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
            expected = ExpectedRows(self.planner, row.schema, read, self.transaction.size()[1])
            check_rebuilt(self.transaction.compared(expected.pieces(), row.schema), self.where)
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
