"""One table transaction, from its beginning to its commit: the loop that all kinds of workers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from strandline.errors import Conflict, Contended
from strandline.model.cursor import Cursor
from strandline.model.sink import Sink
from strandline.tables.written import Written

if TYPE_CHECKING:
    from strandline.tables.files.part import TablePart
    from strandline.tables.files.transaction import FileTransaction

Work: TypeAlias = Callable[["Sequence[TablePart]"], Sequence[Written]]
"""Writes all parts of a transaction; returns their reports in the same order."""

_ATTEMPTS: Final = 8


@runtime_checkable
class TableSink(Sink, Protocol):
    """A sink whose writing can be spread over workers: ``apply`` is one transaction with one part, written here."""

    def begin(self, *, since: Cursor, upto: Cursor, tasks: int) -> FileTransaction | None:
        """Prove the table, and plan at most ``tasks`` parts; None if it has the range. Raises as ``apply`` does."""


def apply_with(sink: TableSink, work: Work, *, since: Cursor, upto: Cursor, tasks: int) -> Sequence[Written]:
    """Begin, let workers write, commit; again if another job changed files. Returns the reports, if it was needed."""
    for _ in range(_ATTEMPTS):
        try:
            transaction = sink.begin(since=since, upto=upto, tasks=tasks)
            if transaction is None:
                return []
            try:
                written = work(transaction.parts)
            except BaseException as error:
                transaction.abandon(error)
                raise
            transaction.commit(written)
        except Conflict:
            continue
        return written
    raise Contended(
        f"Other jobs committed to the table {sink!r} at each of {_ATTEMPTS} tries; nothing was committed. Try again."
    )


def apply_records(
    sink: TableSink, records: pa.Table, *, since: Cursor, upto: Cursor, selected: bool = False
) -> Sequence[Written]:
    """Apply a range in this process. The caller vouches for it: a table of the newest records only is allowed.

    ``selected``: these are the records of the range that the table takes, and not all of them.
    """
    count = upto.next - since.next

    def work(parts: Sequence[TablePart]) -> Sequence[Written]:
        (part,) = parts
        if selected:
            part = replace(part, shape=part.shape.without_condition())
        done = part.write(records.to_batches())
        shared = 0 if selected else max(0, done.records - count)
        others = count - done.records if selected else done.others
        seen = replace(done, first=since.next, next=upto.next, records=count, taken=count)
        return [replace(seen, shared=shared, others=others)]

    return apply_with(sink, work, since=since, upto=upto, tasks=1)
