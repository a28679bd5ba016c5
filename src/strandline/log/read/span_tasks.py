"""Tasks of bulk jobs over ranges of a log: their spans, and their run by a pool while records move between tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from strandline.errors import CorruptData, CursorExpired, Diverged, NotFound, NotReady
from strandline.log.contract import LogReading
from strandline.log.read.reading import fetch_in_order
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.records import READ_SCHEMA, RECORD_SCHEMA
from strandline.storage.task_pool import TaskPool

AHEAD: Final = 32 << 20
"""Bytes that one task reads early."""
MOVES: Final = 4
"""How often a range is located again without progress."""

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class SpanTask(Protocol[R_co]):
    """A task over the offsets ``first`` up to ``next``: a frozen dataclass with a field ``spans``. Repeatable."""

    @property
    def first(self) -> int:
        """Its first offset."""

    @property
    def next(self) -> int:
        """One past its last offset."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where its records are."""

    def __call__(self) -> R_co:
        """Do the work; ``NotFound`` if records are no longer where they were planned."""


T = TypeVar("T", bound="SpanTask[Any]")


def spans_between(log: LogReading, first: int, end: int) -> tuple[Span, ...]:
    """The spans of a range, all of it; ``NotReady`` if the log does not give all of it now."""
    if first == end:
        return ()
    spans = log.plan(Cursor(log.log_id, first), Limit(upto=end))
    if not spans or spans[-1].next != end:
        raise NotReady(f"{log!r} gave offsets up to {spans[-1].next if spans else first}, and not to {end}: try again.")
    return tuple(spans)


def last_record(log: LogReading, upto: int) -> pa.RecordBatch | None:
    """The last record below an offset, without the offset; None if it is not retained."""
    try:
        spans = log.plan(Cursor(log.log_id, upto - 1), Limit(batches=1, upto=upto))
        batches = [batch for span in spans for batch in span.fetch() if batch.num_rows]
    except (CursorExpired, NotFound):
        return None
    return batches[-1].slice(batches[-1].num_rows - 1).select(RECORD_SCHEMA.names) if batches else None


def is_same_history(log: LogReading, cursor: Cursor) -> bool:
    """Whether the log still has the records before a cursor: a log that was restored from a copy may have others.

    True if they were trimmed: then there is nothing to compare with.
    """
    try:
        log.plan(cursor, Limit(batches=1))
    except CursorExpired:
        return True
    except Diverged:
        return False
    return True


def run_located(log: LogReading, tasks: Sequence[T], pool: TaskPool, title: str) -> Iterator[tuple[T, Any]]:
    """The tasks and their results, as they arrive.

    Records that moved to the cold tier since they were planned are located again; ``CursorExpired`` if they were
    trimmed, ``NotFound`` if they are lost.
    """
    moves = 0
    while tasks:
        rest = dict(enumerate(tasks))
        try:
            for number, result in pool.run(tasks, title):
                yield rest.pop(number), result
        except NotFound:
            moves = moves + 1 if len(rest) == len(tasks) else 1
            if moves >= MOVES:
                raise
        tasks = [_moved(log, task) for task in rest.values()]


def _moved(log: LogReading, task: T) -> T:
    spans = spans_between(log, task.first, task.next)
    return replace(task, spans=spans)  # type: ignore[type-var]  # a dataclass, as the protocol says


def records_between(
    spans: Sequence[Span], first: int, end: int, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The records of some spans; ``CorruptData`` unless they are exactly the offsets ``first`` up to ``end``.

    ``columns`` begin with the offset.
    """
    at = first
    for span, batches in fetch_in_order(spans, columns=READ_SCHEMA.names if columns is None else columns, ahead=AHEAD):
        for batch in batches:
            if batch.num_rows and batch.column(0)[0].as_py() != at:
                raise CorruptData(f"The log gave offset {batch.column(0)[0]} where {at} was expected.")
            if not hasattr(span, "numbers_batches"):
                at += batch.num_rows
            yield batch
        if hasattr(span, "numbers_batches"):
            at = span.next
    if at != end:
        raise CorruptData(f"The log gave offsets {first} to {at - 1} instead of {first} to {end - 1}.")
