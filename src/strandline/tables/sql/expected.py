"""The rows that a table in a SQL database should hold by its log, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from strandline.log.contract import LogReading
from strandline.log.read.reading import read_spans
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA
from strandline.tables.files.layout import HashRange, shares
from strandline.tables.files.part import changes_schema, in_schema, narrowed
from strandline.tables.rows.kinds import merge_latest
from strandline.tables.sql.changes import ChangePlanner

PIECE: Final = 256 << 20
"""Bytes of a keyed table for which there is one more share."""
_MERGED: Final = 64 << 20
"""Bytes of changes that are merged at once, at least."""


def record_ranges(log: LogReading, since: Cursor, end: int) -> Iterator[pa.Table]:
    """The records from a cursor up to an offset, span by span; those that move to the cold tier are read there."""
    for _, batches in read_spans(log.plan, since, end, None):
        if sum(batch.num_rows for batch in batches):
            yield pa.Table.from_batches(batches, READ_SCHEMA)


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows of all records that ``read`` gives, for a table with the columns ``schema`` and about ``size`` bytes.

    A table of all changes is one piece for each range. A keyed table is divided by the hashes of its keys: each share
    reads all records again, keeps its own, and merges them as they come. So memory holds the rows of one share.
    """

    planner: ChangePlanner
    schema: pa.Schema
    read: Callable[[], Iterable[pa.Table]]
    size: int

    def pieces(self) -> Iterator[pa.Table]:
        """All rows, each once."""
        if self.planner.shape.is_keyed:
            for share in shares(-(-self.size // PIECE)):
                yield self._merged(share)
            return
        for records in self.read():
            yield in_schema(narrowed(self.planner.shaped(records).rows, self.schema), self.schema)

    def _merged(self, share: HashRange) -> pa.Table:
        rows, waiting, size = self.schema.empty_table(), list[pa.Table](), 0
        for records in self.read():
            changes = self._changes(records, share)
            columns = changes_schema(self.schema, changes.schema, self.planner.shape.names)
            waiting.append(in_schema(narrowed(changes, columns), columns))
            size += waiting[-1].nbytes
            if size >= max(_MERGED, rows.nbytes):  # a merge of more rows takes longer
                rows, waiting, size = self._with(rows, waiting), [], 0
        return self._with(rows, waiting)

    def _with(self, rows: pa.Table, changes: list[pa.Table]) -> pa.Table:
        if not changes:
            return rows
        return merge_latest(rows, pa.concat_tables(changes), self.planner.shape.names, self.schema)

    def _changes(self, records: pa.Table, share: HashRange) -> pa.Table:
        shape = self.planner.shape
        if shape.has_record_keys:
            return self.planner.shaped(share.rows_of(records, "key")).rows
        return share.rows_of(self.planner.shaped(records).rows, shape.names.key)
