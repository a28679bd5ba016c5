"""Moves a table from the log that it follows to a copy of that log, or back: one commit, and no row changes.

The rows of a table have offsets of the log in them: as columns, and in the order by which changes of a key are merged.
So a table can be moved only to a log that has its records at the same offsets.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from os import PathLike
from typing import Final, cast

from strandline.errors import CursorExpired, Diverged, NotFound, Unsupported
from strandline.ingestion.translation import CopiedRanges, IngestedLog, translate_cursor
from strandline.log.addressed import log_at
from strandline.log.contract import Log, LogReading, require
from strandline.log.writers.source import source_writer
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Limit
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.opening import existing

_REBUILD: Final = "Build the table again from the other log: remove it, and follow that log into it."


@dataclass(frozen=True, slots=True)
class TableMove:
    """Result of a move."""

    cursor: Cursor
    """The table's cursor in the log that it follows now."""
    was_there: bool
    """Whether the table followed that log already, and nothing was committed."""


@checked
def move_table(sink: MaintainedTable | Address, old: Log | Address, new: Log | Address) -> TableMove:
    """Let a table that follows a log follow another one, of which one was ingested from the other. No row changes.

    One commit gives the table the cursor of the same record in ``new``. A follower of ``new`` continues exactly; one of
    ``old`` is ``Diverged`` from then on, also if it runs. Repeated, it does nothing. ``sink`` is the table's sink, or
    the address of a table that keeps the record's own columns.

    Nothing is changed if it raises. ``Unsupported`` if ``new`` has other offsets for what the table holds, because
    other writers appended to one of the logs, or records were skipped: build the table again. Likewise for a Delta or
    Iceberg table with dead letters: replay them before. ``NotReady`` if ``new`` does not have all that the table holds,
    ``CursorExpired`` if a log deleted too much of it to know, ``Diverged`` if the table, or a log, has another history;
    ``Conflict`` if the table's follower commits meanwhile.

    >>> import tempfile, strandline as sl
    >>> old, new = sl.log.MemoryLog(), sl.log.MemoryLog()
    >>> with old.producer() as producer:
    ...     _ = producer.append(key=b"a", value=b"1").result()
    >>> table = sl.SqliteSink(f"{tempfile.mkdtemp()}/shop.db", table="orders")
    >>> _ = sl.follow(old, table, upto="end"), sl.ingest(old, new)
    >>> moved = move_table(table, old, new)
    >>> moved.cursor == new.end(), moved.was_there, move_table(table, old, new).was_there
    (True, False, True)
    """
    table = existing(sink) if isinstance(sink, str | PathLike) else sink
    copy: Log
    with log_at(old) as former, log_at(new, changes_slots=True) as other:
        at = _cursor_in(table, other)
        if at is not None:
            return TableMove(at, was_there=True)
        if _holds(other, former) or not isinstance(old, str | PathLike):
            return _moved(table, former, other)
        # A reader of a write-ahead log beside its writer does not know what was ingested into it.
        with log_at(old, changes_slots=True) as copy:
            return _moved(table, copy, other)


def _cursor_in(table: MaintainedTable, log: Log) -> Cursor | None:
    """The table's cursor in a log; None if it does not follow that."""
    try:
        table.meet(log)
        at = table.cursor(log.log_id)
    except Diverged:
        return None
    if at is not None:
        with contextlib.suppress(CursorExpired):
            log.plan(at, Limit(batches=1))  # refuses a cursor of another history
    return at


def _moved(table: MaintainedTable, old: Log, new: Log) -> TableMove:
    table.meet(old)
    cursor = table.cursor(old.log_id)
    if cursor is None:
        raise NotFound(f"There is no table {table.where}: check the address.")
    old.plan(cursor, Limit(batches=1))  # refuses a cursor of another history, or one that cannot be proved any more
    there = _same_place(table.where, old, new, table.start(), cursor)
    table.move(cursor, there)
    return TableMove(there, was_there=False)


def _same_place(where: str, old: Log, new: Log, start: int, cursor: Cursor) -> Cursor:
    """The cursor in another log, which has the same records from the start up to it; else ``Unsupported``."""
    source, target = _direction(old, new)
    held = f"The table {where} holds offsets {start} to {cursor.next - 1} of its log"
    try:
        found = translate_cursor(cursor, source=source, target=target)  # refuses a copy that lags, or of another log
        is_same = CopiedRanges(source, target).has_same_offsets(start, cursor.next)
        if is_same and (start < cursor.next or found.next == cursor.next):
            there = new.cursor_at(cursor.next)  # a translation also skips other writers' records behind it
            new.plan(there, Limit(batches=1))  # refuses what this log can serve no more
            return there
    except CursorExpired as error:
        raise CursorExpired(
            f"{held}, and one of the two logs no longer has all of these records, or not in its hot tier, so that "
            f"offsets cannot be compared, or the table could not continue; nothing was changed. {_REBUILD}"
        ) from error
    raise Unsupported(
        f"{held}, and the other log has other records at some of these offsets: its rows would have wrong offsets, and "
        f"nothing was changed. {_REBUILD}"
    )


def _direction(old: Log, new: Log) -> tuple[LogReading, IngestedLog]:
    """Which of two logs is the source of the other: the former one, unless only the reverse is true."""
    source, target = old, new
    if not _holds(new, old):
        require(old, "moved from, unless the other log is its copy", "last_append")
        if _holds(old, new):
            source, target = new, old
    require(target, "moved to, or from", "append_at", "last_append", "cursor_at", "bounds", "plan")
    return source, cast("IngestedLog", target)


def _holds(copy: Log, source: Log) -> bool:
    """Whether a log is known to have records that were ingested from another one."""
    return isinstance(copy, IngestedLog) and copy.last_append(source_writer(str(source.log_id))) is not None
