"""Maintenance of a table that follows a log: describe, verify by the log, rebuild, optimize, remove orphan files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from typing import Final

import pyarrow as pa

from strandline.errors import InvalidInput, Unsupported
from strandline.log.addressed import log_at
from strandline.log.contract import Log
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Start
from strandline.storage.task_pool import TaskPool, ThreadPool
from strandline.tables.maintain.contract import MaintainedTable, TableDescription
from strandline.tables.maintain.opening import existing
from strandline.tables.maintain.rebuilding import rebuild_table
from strandline.tables.maintain.replay import Replayed

GRACE_HOURS: Final = 168
"""Hours for which files are kept that no version names: a slow commit may still name them."""
_MOST_HOURS: Final = 1_000_000
"""More hours mean the same, and are beyond the first year of calendars."""


@checked
def describe(sink: MaintainedTable | Address, log: Log | Address | None = None) -> TableDescription:
    """The table's size and columns; with a log also its cursor, which is ``Diverged`` if others changed the rows.

    Both may be addresses. A table in a SQL database has no files, and its version is the number of followers that it
    has had.
    """
    table = _table(sink)
    found = table.size()
    if log is None:
        return found
    with log_at(log) as source:
        table.meet(source)
        cursor = table.cursor(source.log_id)
    return replace(found, cursor=cursor, start=None if cursor is None else table.start())


def _table(sink: MaintainedTable | Address) -> MaintainedTable:
    """The sink, or that of the table at an address: for calls that read no values."""
    return existing(sink) if isinstance(sink, str | PathLike) else sink


@dataclass(frozen=True, slots=True)
class TableCheck:
    """Comparison of a table with its log, up to the table's cursor."""

    cursor: Cursor
    rows: int
    missing: int
    """Rows that the log gives and the table does not have."""
    extra: int
    """Rows that the table has and the log does not give."""
    first: tuple[str, ...]
    """The first differences."""

    @property
    def is_clean(self) -> bool:
        """Whether there is no difference."""
        return not self.missing and not self.extra


@checked
def verify(sink: MaintainedTable, log: Log | Address, *, pool: TaskPool | None = None) -> TableCheck:
    """Compare each row with the log, from the table's start up to its cursor. Changes nothing.

    ``pool`` runs the comparison: threads of this process, or ``sl.spark.executors(spark)``. Its tasks divide keyed
    tables of files by their keys, and fetch everything each; those of all changes by offsets. The follower may run
    meanwhile. Tables in a SQL database are compared there: ``Conflict`` if a follower commits meanwhile. What a keyed
    one should hold is computed here, in shares of its keys that fit into memory, each of which reads the whole log.
    ``CursorExpired`` if the log no longer has the records.
    """
    with log_at(log) as source:
        sink.meet(source)
        cursor, found = sink.compared(source, pool or ThreadPool())
    return TableCheck(cursor, found.rows, found.missing, found.extra, found.first)


@checked
def rebuild(
    sink: MaintainedTable,
    log: Log | Address,
    *,
    start: Start | None = None,
    upto: int | None = None,
    slot: str | None = None,
    verify: bool = True,
    pool: TaskPool | None = None,
) -> Cursor:
    """Build all rows again, compare them with the log, and replace the table's in one commit; returns its cursor.

    Readers see the old rows until then; interrupted at any moment, the rebuild has changed nothing. For a table that
    was damaged or restored, and after a corrected schema or transform. Both tiers of the log are read, from where the
    table began up to its end now, or up to ``upto``. Followers continue from there.

    ``start`` is another beginning, for this table from now on: an offset, a time, a cursor, ``"beginning"`` or
    ``"retained"``. A table of the latest values from an offset on holds the keys that were written since. If there is
    no table, it is created empty, and built; without ``start`` from the log's beginning.

    While it runs, a slot of its own pins what it reads; it expires ten minutes after a crash. ``slot`` is that of the
    table's follower: it pins what comes behind the new cursor, from before the rows are replaced. It is created if it
    is missing, and moved back if it is past that.

    ``pool`` compares the new rows, as for :func:`verify`; ``CorruptData`` if they differ, and the table is as it was.
    ``verify=False`` leaves that out: for a transform that gives other rows each time. ``CursorExpired`` if the log no
    longer has the start, ``Conflict`` if another job committed meanwhile.
    """
    with log_at(log, changes_slots=slot is not None) as source:
        return rebuild_table(sink, source, start=start, upto=upto, slot=slot, pool=pool, is_verified=verify)


@checked
def replay_letters(sink: MaintainedTable, log: Log | Address) -> Replayed:
    """Apply the dead letters of a table that can become rows by now, each exactly once, and remove them.

    For after a corrected schema, codec or transform: ``sink`` has the corrected one, and ``dead_letters``. A letter has
    the effect that it would have had at its offset. In a table of the latest values a newer row, or a newer delete,
    wins; in a history the version lies between those before and after it. For that the log is read, from the first
    letter on: letters of records that it no longer retains stay (``expired``), except in a table of all changes, which
    needs the letters alone. Those that still cannot become rows stay, too. Only letters below the table's cursor are
    replayed, and only those that name this table by its address.

    Safe beside the table's follower, and at every crash: repeat it. ``Diverged``, and nothing is changed, if the log
    was restored from a copy and has another history than the table or a letter. ``InvalidInput`` for letters of several
    logs, and, before anything is written, if a record since the first letter has a row whose key the corrected sink no
    longer gives it: such a table has to be rebuilt. ``Unsupported`` for a queue of version 1, whose records share the
    offset of their batch.

    >>> import tempfile, pyarrow as pa, strandline as sl
    >>> folder = tempfile.mkdtemp()
    >>> log = sl.open(f"{folder}/log", create=True)
    >>> with log.producer() as producer:
    ...     _ = producer.append(key=b"a", value=b'{"id": 3000000000}').result()
    >>> def sink(kind: pa.DataType) -> sl.DeltaSink:
    ...     codec = sl.values.Json(pa.schema({"id": kind}))
    ...     return sl.DeltaSink(f"{folder}/table", value=codec, dead_letters=f"{folder}/letters")
    >>> sl.follow(log, sink(pa.int32()), upto="end").next
    1
    >>> sl.tables.replay_letters(sink(pa.int64()), log)
    Replayed(applied=1, unreadable=0, expired=0, first_reason='', of_others=0)
    >>> sink(pa.int64()).rows().column("id").to_pylist()
    [3000000000]
    """
    with log_at(log) as source:
        if source.counts_batches:
            raise Unsupported(
                f"{source!r} is a queue of version 1, whose records share the offset of their batch: no letter can be "
                "told from the rows of its batch, and nothing was changed. Copy the queue into a log with "
                "'strandline ingest', and follow that into another table."
            )
        return sink.replay_letters(source)


@checked
def letters(sink: MaintainedTable, log: Log | Address) -> pa.Table:
    """The dead letters of a table, in the order of their offsets: the records, and the ``reason`` of each.

    Only those of the offsets that the table holds, from its start up to its cursor. So a letter is seen here together
    with the rows of its range, also where the two are commits of their own, and a crash was between them: Delta and
    Iceberg have no transaction over two tables. ``NotFound`` if there is no table; else as :func:`replay_letters`.

    >>> import tempfile, pyarrow as pa, strandline as sl
    >>> folder = tempfile.mkdtemp()
    >>> log = sl.open(f"{folder}/log", create=True)
    >>> with log.producer() as producer:
    ...     _ = producer.append(key=b"a", value=b"no JSON").result()
    >>> codec = sl.values.Json(pa.schema({"id": pa.int64()}))
    >>> sink = sl.DeltaSink(f"{folder}/table", value=codec, dead_letters=f"{folder}/letters")
    >>> sl.follow(log, sink, upto="end").next
    1
    >>> sl.tables.letters(sink, log).select(["offset", "value"]).to_pylist()
    [{'offset': 0, 'value': b'no JSON'}]
    """
    with log_at(log) as source:
        return sink.stored_letters(source)


@checked
def optimize(sink: MaintainedTable | Address) -> int:
    """Join small files of a table of all changes; returns by how many files it has fewer. Safe beside its follower.

    Files of one partition are joined, and if the table is clustered, their rows are ordered over all of them. Of a
    history the files of ended versions are joined. Those of current versions, and of tables of the latest rows, are
    divided by their keys, and each trigger writes them again: there is nothing to join. ``Conflict`` if others change
    the table each time.
    """
    table = _table(sink)
    if table.mode not in ("append", "history"):
        raise InvalidInput(
            f"A table of mode {table.mode!r} has no files to join: its follower, or its database, keeps them few."
        )
    return table.optimized()


@checked
def vacuum(sink: MaintainedTable | Address, hours: int = GRACE_HOURS) -> int:
    """Remove data files that no version of the last ``hours`` needs; returns how many.

    Delta: all that no such version names. A commit that takes longer than ``hours`` would lose its files: keep them for
    longer than any job takes. ``WrongKind`` if files of something else are within the table, such as another table.
    Iceberg: older snapshots expire, but never those that prove the cursor; then the follower's files that no snapshot
    names, and that no commit can name any more. The table can then be restored only to versions of that time.
    """
    if hours < 1:
        raise InvalidInput("Files are kept for an hour at least: a running job may still commit them.")
    return _table(sink).vacuumed(min(hours, _MOST_HOURS))
