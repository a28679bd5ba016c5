"""Proof that a table and its dead letters are of the history that the log has now.

A log that was restored from a copy has other records at the same offsets. So the table's cursor is proved by log id,
term and fingerprint, as a follower's is; and each letter is compared with the record at its offset, since letters
may be older than the table. Letters of records that the log no longer retains rest on the cursor alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Diverged
from strandline.log.contract import Log
from strandline.log.read.erased_records import same_unless_erased
from strandline.log.read.reading import read_between
from strandline.model.cursor import Cursor, Limit
from strandline.model.records import READ_SCHEMA
from strandline.tables.rows.kinds import distinct

_GAP: Final = 10_000
"""Offsets between two letters that are read rather than skipped: a new plan takes longer."""


def prove_letters(log: Log, cursor: Cursor, letters: pa.Table, first: int, where: str) -> None:
    """``Diverged`` if the log does not serve the table's cursor, or has another record at the offset of a letter.

    ``letters`` are in the order of their offsets; those below ``first`` are not retained. ``CursorExpired`` if the
    cursor is not, so that nothing can be proved.
    """
    log.plan(cursor, Limit(batches=1))
    letters = letters.select(READ_SCHEMA.names).cast(READ_SCHEMA)
    letters = letters.filter(pc.greater_equal(letters.column("offset"), first))
    records = _records_at(log, distinct(letters.column("offset")))
    if not same_unless_erased(letters, records):
        _compare_each(letters, records, where)


def _records_at(log: Log, offsets: pa.Array) -> pa.Table:
    found = [
        batch.filter(pc.is_in(batch.column("offset"), value_set=offsets))
        for some in _ranges(offsets.to_pylist())
        for batch in read_between(log, some.start, some.stop, None)
    ]
    return pa.Table.from_batches(found, READ_SCHEMA)


def _ranges(offsets: list[int]) -> Iterator[range]:
    """The ranges of a log that hold some offsets, which ascend.

    >>> list(_ranges([3, 5, 90_000]))
    [range(3, 6), range(90000, 90001)]
    """
    since = 0
    for place, offset in enumerate(offsets):
        if place + 1 == len(offsets) or offsets[place + 1] - offset > _GAP:
            yield range(offsets[since], offset + 1)
            since = place + 1


def _compare_each(letters: pa.Table, records: pa.Table, where: str) -> None:
    """Compare letter by letter: in a queue of version 1 all records of a batch have one offset."""
    at: dict[int, list[pa.Table]] = {}
    for row, offset in enumerate(records.column("offset").to_pylist()):
        at.setdefault(offset, []).append(records.slice(row, 1))
    for row, offset in enumerate(letters.column("offset").to_pylist()):
        letter: Any = letters.slice(row, 1)
        if not any(same_unless_erased(letter, record) for record in at.get(offset, ())):
            raise Diverged(
                f"The dead letter of offset {offset} of the table {where} is not the record that the log has there: "
                "the log was restored from a copy, and grew differently. Nothing was changed: rebuild the table "
                "('strandline table rebuild'), which replaces its letters, too."
            )
