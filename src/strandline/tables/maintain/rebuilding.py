"""Rebuild of a table: new rows are written beside the old ones, compared with the log, and swapped in by one commit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime

from strandline.errors import CorruptData, InvalidInput, NotFound, Unsupported
from strandline.log.contract import Log, cursor_of
from strandline.log.read.span_tasks import MOVES, spans_between
from strandline.model.cursor import Cursor, Span, Start
from strandline.model.records import READ_SCHEMA
from strandline.storage.task_pool import TaskPool, ThreadPool
from strandline.tables.apply import TableSink
from strandline.tables.files.part import TablePart
from strandline.tables.maintain.comparison import RowDifferences, compared_shares, share_tasks
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.range_pin import RebuildPin
from strandline.tables.work import IN_PROCESS, Rebuild, Workers
from strandline.tables.written import Written


def rebuild_table(
    sink: MaintainedTable,
    log: Log,
    *,
    start: Start | None,
    upto: int | None,
    slot: str | None = None,
    workers: Workers = IN_PROCESS,
    pool: TaskPool | None = None,
    is_verified: bool,
) -> Cursor:
    """Build all rows of a table from its log; see :func:`~strandline.tables.maintain.operations.rebuild`."""
    if workers is not IN_PROCESS and not isinstance(sink, TableSink):
        raise Unsupported(f"The table {sink.where} is written in one transaction: build it again without Spark.")
    sink.meet(log)
    beginning = None if start is None else cursor_of(log, start)
    if isinstance(start, datetime) and beginning is not None and beginning.next == log.end().next:
        raise InvalidInput(
            f"The log has no record since {start}, and the table {sink.where} would be empty: name an earlier time, or "
            f"the offset {beginning.next}."
        )
    with contextlib.ExitStack() as pins:
        pin = RebuildPin(log, slot, pins)
        job = Rebuild(log, upto, beginning, workers, pool or ThreadPool(), is_verified, pin)
        try:
            sink.start()
        except NotFound:
            first, _, _ = job.planned(0)  # refuses what the log cannot serve before there is a table
            sink.apply(READ_SCHEMA.empty_table(), since=first, upto=first)
        end = sink.rebuilt(job)
        pin.keep()
    return end


def written_again(
    job: Rebuild, parts: Sequence[TablePart], spans: Sequence[Span], held: range, where: str
) -> Sequence[Written]:
    """Let workers write new rows, again if records moved to the cold tier, and compare them; commits nothing."""
    for _ in range(MOVES):
        try:
            done = job.workers.run(parts, spans, f"rebuild of offsets {held.start:,} to {held.stop:,}")
            break
        except NotFound:
            moved = spans_between(job.log, held.start, held.stop)  # CursorExpired if they were trimmed
            if list(moved) == list(spans):
                raise
            spans = moved
    else:
        raise NotFound(f"Records of {job.log!r} moved {MOVES} times while a table was built from them: try again.")
    if job.is_verified:
        part, paths = parts[0], [file.path for one in done for file in one.added]
        tasks = share_tasks(part.shape, part.schema, part.files, paths, held, job.pool.count)
        check_rebuilt(compared_shares(job.log, tasks, job.pool, f"verify the new rows of {where}"), where)
    return done


def check_rebuilt(found: RowDifferences, where: str) -> None:
    """``CorruptData`` if new rows are not those of the log."""
    if not found.missing and not found.extra:
        return
    raise CorruptData(
        f"The new rows of the table {where} are not those of its log ({found.missing:,} missing, {found.extra:,} too "
        f"many; {found.first[0]}), and the table stays as it was. If its transform gives other rows each time, rebuild "
        "it without the comparison (--no-verify)."
    )
