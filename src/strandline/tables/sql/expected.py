"""The rows that a table in a SQL database should hold by its log, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pyarrow as pa

from strandline.log.contract import LogReading
from strandline.log.read.reading import read_spans
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA
from strandline.tables.files.layout import WHOLE, shares
from strandline.tables.maintain.comparison import expected_rows
from strandline.tables.sql.changes import ChangePlanner

PIECE: Final = 256 << 20
"""Bytes of a keyed table for which there is one more share."""


def record_ranges(log: LogReading, since: Cursor, end: int) -> Iterator[pa.Table]:
    """The records from a cursor up to an offset, span by span; those that move to the cold tier are read there."""
    for _, batches in read_spans(log.plan, since, end, None):
        if sum(batch.num_rows for batch in batches):
            yield pa.Table.from_batches(batches, READ_SCHEMA)


def expected_pieces(
    planner: ChangePlanner, schema: pa.Schema, read: Callable[[], Iterable[pa.Table]], size: int
) -> Iterator[pa.Table]:
    """The rows of all records that ``read`` gives, for a table with the columns ``schema`` and about ``size`` bytes.

    A table of all changes is one piece for each range. A keyed table is divided by the hashes of its keys: each share
    reads all records again, and keeps its own. So memory holds the rows of one share.
    """
    if planner.shape.is_keyed:
        for share in shares(-(-size // PIECE)):
            yield expected_rows(planner.shape, schema, read(), share, planner.shaped)
        return
    for records in read():
        yield expected_rows(planner.shape, schema, [records], WHOLE, planner.shaped)
