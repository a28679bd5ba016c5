"""The sink of a table in a SQL database: decides what a range changes; a :class:`Database` does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import (
    BadRecord,
    CorruptData,
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    StorageError,
    TransientStorageError,
)
from strandline.log.contract import Log
from strandline.log.planning import behind, joined
from strandline.log.reading import fetch_in_order
from strandline.model.arguments import anything, checked
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.records import READ_SCHEMA, Op
from strandline.model.sink import remaining
from strandline.storage.clock import CHANCE
from strandline.tables.bad_records import BadShare, first_bad, refused
from strandline.tables.comparison import RowDifferences, folded
from strandline.tables.kinds import KINDS, RAW_LATEST, Names, merge_latest, newest_per_key, table_schema, taken_rows
from strandline.tables.logged import LoggedShape, Value
from strandline.tables.maintained import RecordedTable, TableSize
from strandline.tables.shape import BAD_SCHEMA, ShapedRows, TableShape
from strandline.tables.sql.columns import AlteredColumns, TypeOf, altered
from strandline.tables.sql.state import CursorRow, Expected, Held, SeenTable
from strandline.values.schema.evolution import conform_columns


@dataclass(frozen=True, slots=True)
class SoftDeletes:
    """Rows of the table that are marked as deleted: their keys, with offset and time of the delete.

    A purge removes their values, too.
    """

    names: Names
    marks: pa.Table
    """The columns ``key``, ``offset``, ``timestamp`` and ``purged``."""

    def payload(self, schema: pa.Schema) -> list[str]:
        """The columns that a purge empties."""
        names = self.names
        return [name for name in schema.names if name not in (*names.all, names.deleted)]


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What a range does to a table: rows to put, keys to delete, dead letters; and the table's columns afterwards."""

    schema: pa.Schema
    puts: pa.Table
    deleted: pa.ChunkedArray
    bad: pa.Table
    columns: AlteredColumns
    key: str | None
    """The column by which rows are replaced; None in a table of all changes."""
    primary: str | None
    """The column of a new table's primary key."""
    soft: SoftDeletes | None = None


class Session(Protocol):
    """A transaction that writes. Nothing of it is visible, or holds a lock that others need, before :meth:`lock`."""

    def stage(self, changes: TableChanges) -> None:
        """Send the rows to the database."""

    def lock(self) -> None:
        """Exclude other followers, and changes of the table's columns, until the end of the transaction."""

    def look(self) -> SeenTable:
        """The table as it is now."""

    def create(self, changes: TableChanges) -> str:
        """Create the table; returns its identity."""

    def alter(self, changes: TableChanges) -> None:
        """Add and widen columns."""

    def merge(self, changes: TableChanges) -> None:
        """Put and delete the staged rows."""

    def put_dead_letters(self, bad: pa.Table, *, removed_from: int | None) -> None:
        """Add dead letters, and first remove those from an offset on."""

    def clear(self) -> None:
        """Delete all rows of the table."""

    def size(self) -> tuple[int, int]:
        """Rows of the table, and bytes that the database says it has."""

    def compared(self, expected: pa.Table) -> RowDifferences:
        """Compare the table with rows of the same columns, in the database's own types."""

    def store(self, row: CursorRow, before: CursorRow | None) -> bool:
        """Replace the cursor row; False if it is not ``before`` any more. None: there was no table."""


class Database(Protocol):
    """A database with one followed table."""

    @property
    def type_of(self) -> TypeOf:
        """The type of a column."""

    def look(self) -> SeenTable:
        """The table as it is now."""

    def unfit(self, rows: pa.Table, key: str | None) -> Iterator[tuple[pa.ChunkedArray, str]]:
        """Rows that the database cannot store, as a mask, with the reason."""

    def check_schema(self, schema: pa.Schema) -> None:
        """``SchemaRefused`` for columns that the database cannot have."""

    def reading(self) -> AbstractContextManager[Session]:
        """A transaction that sees one state of all tables, and changes none."""

    def writing(self, *, is_long: bool = False) -> AbstractContextManager[Session]:
        """A transaction, committed durably at the end of the block, and rolled back if that raises.

        ``is_long``: the follower may be silent for longer than a commit takes.
        """


@checked
class SqlSink:
    """A table in a SQL database that follows a log; see :class:`~strandline.model.sink.Sink`.

    Rows, dead letters and the cursor are written in one transaction, which ends with ``UPDATE … SET next = … WHERE
    next = <as it was read> AND epoch = <as it was read>``. If that changes no row, another follower was
    faster, and this one is ``Fenced``. A follower takes a new epoch with its first commit, so that one that it
    replaced, and that was only slow, is ``Fenced``, too.

    The database does not tell who else changes rows, and the sink does not look: let other programs read only. A
    table that was dropped, re-created or altered is ``Diverged``.
    """

    def __init__(
        self,
        database: Database,
        shape: TableShape,
        where: str,
        name: str,
        *,
        value: Value | None = None,
        dead_letters: bool = False,
        max_bad_share: Annotated[Any, anything("a share between 0 and 1")] = 1.0,
    ) -> None:
        """``shape`` has the codec, unless ``value`` is ``"log"``."""
        self._database = database
        self._shape = shape
        self._logged = LoggedShape(shape, value, where)
        self._expected = Expected(
            *(where, name, shape.kind, database.type_of), shape.names.deleted, has_soft_deletes=shape.soft_deletes
        )
        self._has_dead_letters = dead_letters
        self._bad_share = BadShare.of(max_bad_share)
        self._held: Held | None = None
        self._unanswered: set[str] = set()
        """Numbers of commits whose answers were lost: they may still land."""
        self._lock = threading.Lock()
        if shape.transform is None and not self._logged.is_logged:
            database.check_schema(shape.schema())

    def meet(self, log: Annotated[Any, anything("a log")]) -> None:
        """Name the log that the table follows, whose codec decodes the values with ``value="log"``.

        Followers and the functions of ``sl.tables`` call it.
        """
        self._logged.meet(log)
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        """Take over the codec that the log names now."""
        if not self._logged.is_logged:
            return
        self._shape = self._logged.resolved(self._columns_now)
        self._expected = replace(self._expected, deleted=self._shape.names.deleted)
        if self._shape.transform is None:
            self._database.check_schema(self._shape.schema())

    def _columns_now(self) -> pa.Schema | None:
        seen = self._database.look()
        return None if seen.identity is None or seen.row is None else seen.row.schema

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far the table has applied that log; None if there is no table yet.

        ``Diverged`` if it follows another log, or is not the table that its cursor row describes.
        """
        self._logged.check_met()
        with self._lock:
            row = self._expected.proved(self._database.look(), log_id, self._held)
        return None if row is None else row.cursor

    def resume(self, log_id: UUID) -> Cursor | None:
        """The same for a starting follower, which has only what the database says."""
        with self._lock:
            self._held = None
            self._refresh()
        return self.cursor(log_id)

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """The cursor, if the table needs no repair: a SQL table has no earlier versions to go back to."""
        try:
            return self.resume(log_id)
        except Diverged as error:
            raise Diverged(
                f"The table {self._expected.where} cannot be repaired, since a SQL database keeps no earlier versions "
                f"of it. ({error})"
            ) from error

    def adopt(self, log_id: UUID) -> Cursor:
        """Accept the table as it is now as the state of its cursor row: the caller knows that it is right.

        For a table that was restored from a dump, or created again on purpose. ``NotFound`` if there is no table, or
        no cursor row of that log.
        """
        with self._lock, self._database.writing() as session:
            session.lock()
            seen = session.look()
            if seen.identity is None or seen.row is None or seen.row.cursor.log_id != log_id:
                raise NotFound(f"There is no table {self._expected.where} with a cursor in log {log_id} to adopt.")
            row = replace(seen.row, identity=seen.identity, epoch=seen.row.epoch + 1)
            self._expected.proved(replace(seen, row=row), log_id, None)
            if not session.store(row, seen.row):
                raise self._expected.fenced()
            self._held = None
        return row.cursor

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Commit the range with its cursor, exactly once; see :class:`~strandline.model.sink.Sink`."""
        with self._lock:
            self._refresh()
            while True:
                found = self._expected.proved(self._database.look(), since.log_id, self._held)
                todo = remaining(records, since=since, upto=upto, at=None if found is None else found.cursor)
                if todo is None:
                    return
                try:
                    if found is not None and self._held is not None and found.epoch != self._held.row.epoch:
                        raise self._expected.fenced()
                    if self._commit(self._changes(todo, found), found, since, upto):
                        return
                except Fenced:
                    self._held = None  # a follower that may go on all the same, by its slot, begins anew
                    self._unanswered.clear()
                    raise

    @property
    def where(self) -> str:
        """The table, in messages."""
        return self._expected.where

    def _existing(self) -> SeenTable:
        seen = self._database.look()
        if seen.identity is None:
            raise NotFound(f"There is no table {self.where}.")
        return seen

    def start(self) -> int:
        """The offset at which the table began to follow its log; ``NotFound`` if there is no table."""
        row = self._existing().row
        return 0 if row is None else row.start

    def size(self) -> TableSize:
        """Its size; ``NotFound`` if there is no table. The version is the number of followers that it has had."""
        row = self._existing().row
        with self._database.reading() as session:
            rows, size = session.size()
        columns = () if row is None else tuple((field.name, self._database.type_of(field)) for field in row.schema)
        return TableSize(0 if row is None else row.epoch, rows, 0, size, columns)

    def recorded(self) -> RecordedTable | None:
        """What the table records; None for a table of another program. ``NotFound`` if there is none."""
        row = self._existing().row
        mode = next((kind for kind in KINDS if row is not None and kind == row.mode), None)
        return None if mode is None or row is None else RecordedTable(mode, row.schema)

    def compared(self, records: pa.Table) -> RowDifferences:
        """Compare the rows, in the database; see :func:`~strandline.tables.maintenance.verify`."""
        row = self._existing().row
        if row is None:
            raise NotFound(f"The table {self.where} follows no log.")
        changes = self._fitting(records, self._shape.rows(records)).rows
        with self._database.reading() as session:
            return session.compared(folded(self._shape, changes, row.schema))

    def rebuilt(self, log: Log, upto: int) -> Cursor:
        """Replace all rows in one transaction; see :func:`~strandline.tables.maintenance.rebuild`.

        Rows are deleted and inserted, not the table: its indexes, rights and views stay. Other followers wait, and the
        one that followed the table so far is ``Fenced``.
        """
        with self._lock:
            self._refresh()
            beginning = log.cursor_at(self.start())
            spans = log.plan(beginning, Limit(upto=upto))
            end = behind(beginning, spans[-1]) if spans else beginning
            with self._database.writing(is_long=True) as session:
                session.lock()
                found = self._expected.proved(session.look(), log.log_id, None)
                if found is None or found.start != beginning.next:
                    raise NotFound(f"The table {self.where} was dropped or replaced while it was built again.")
                session.clear()
                row, at = found, beginning.next
                for records in _ranges(spans):
                    if records.column("offset")[0].as_py() != at:
                        raise CorruptData(f"Offset {at} is missing in log {log.log_id}. Nothing was committed.")
                    at += records.num_rows
                    changes = self._changes(records, row, is_rebuilt=True)
                    session.stage(changes)
                    session.alter(changes)
                    session.merge(changes)
                    if self._has_dead_letters:
                        is_first = row is found
                        session.put_dead_letters(changes.bad, removed_from=beginning.next if is_first else None)
                    row = replace(row, schema=changes.schema, cursor=end)
                if at != end.next:
                    raise CorruptData(f"Offset {at} is missing in log {log.log_id}. Nothing was committed.")
                row = replace(row, cursor=end, epoch=found.epoch + 1, commit_id=str(CHANCE.uuid()))
                if not session.store(row, found):
                    raise self._expected.fenced()
            self._held = None
        return end

    def compacted(self) -> int:
        """``InvalidInput``: a database keeps its tables compact by itself."""
        raise InvalidInput(f"The database keeps the table {self.where} compact by itself: there is nothing to join.")

    def vacuumed(self, hours: int) -> int:
        """``InvalidInput``: a database keeps no earlier versions of a table."""
        raise InvalidInput(
            f"The database keeps no earlier versions of the table {self.where}: let it run its own VACUUM."
        )

    def _commit(self, changes: TableChanges, found: CursorRow | None, since: Cursor, upto: Cursor) -> bool:
        """Commit; False if an earlier commit of this sink, which had no answer, has landed since ``found``."""
        epoch = 1 if found is None else found.epoch + (self._held is None)
        commit_id = str(CHANCE.uuid())
        row: CursorRow | None = None
        try:
            with self._database.writing() as session:
                session.stage(changes)
                session.lock()
                seen = session.look()
                if self._expected.proved(seen, since.log_id, self._held) != found:
                    if seen.row is not None and seen.row.commit_id in self._unanswered:
                        self._hold(seen.row)
                        return False
                    raise self._expected.fenced()
                if found is None:
                    identity, before = session.create(changes), seen.row
                    epoch = 1 if before is None else before.epoch + 1
                else:
                    identity, before = found.identity, found
                    session.alter(changes)
                session.merge(changes)
                if self._has_dead_letters:
                    session.put_dead_letters(changes.bad, removed_from=since.next if found is None else None)
                mine = self._expected
                start = since.next if found is None else found.start
                row = CursorRow(mine.name, upto, epoch, identity, mine.mode, changes.schema, start, commit_id)
                if not session.store(row, before):
                    raise self._expected.fenced()
                self._unanswered.add(commit_id)
                if self._held is not None:
                    self._held = replace(self._held, unanswered=frozenset(self._unanswered))
        except TransientStorageError:
            if not self._is_stored(commit_id):
                raise
        if row is not None:
            self._hold(row)
        return True

    def _hold(self, row: CursorRow) -> None:
        self._held = Held(row)
        self._unanswered.clear()

    def _is_stored(self, commit_id: str) -> bool:
        """Whether a commit has landed whose answer was lost; False if that cannot be known now."""
        try:
            row = self._database.look().row
        except StorageError:
            return False
        return row is not None and row.commit_id == commit_id

    def _changes(self, records: pa.Table, found: CursorRow | None, *, is_rebuilt: bool = False) -> TableChanges:
        shape = self._shape
        shaped = self._fitting(records, shape.rows(records))
        if shaped.bad.num_rows and not self._has_dead_letters:
            raise refused(shaped.bad)
        self._bad_share.check(shaped.bad.num_rows, records.num_rows, first_bad(shaped.bad))
        self._check_letters(shaped.bad)
        names, rows = shape.names, shaped.rows
        wanted = self._schema_of(rows)
        before = wanted if found is None else found.schema
        schema = shape.evolution(before, wanted, is_rebuilt=is_rebuilt).schema
        self._database.check_schema(schema)
        columns = altered(before, schema, self._database.type_of)
        if not shape.is_keyed:
            primary = names.offset if shape.transform is None else None
            none = pa.chunked_array([], pa.binary())
            return TableChanges(schema, _conformed(rows, schema), none, shaped.bad, columns, None, primary)
        newest = newest_per_key(rows, names)
        is_put = pc.equal(newest.column(names.op), int(Op.PUT))
        if shape.soft_deletes:
            return self._soft_changes(rows, newest.filter(pc.invert(is_put)), wanted, schema, shaped.bad, columns)
        puts = newest.filter(is_put).select(wanted.names)
        deleted = newest.column(names.key).filter(pc.invert(is_put))
        return TableChanges(schema, _conformed(puts, schema), deleted, shaped.bad, columns, names.key, names.key)

    def _soft_changes(
        self,
        rows: pa.Table,
        deletes: pa.Table,
        wanted: pa.Schema,
        schema: pa.Schema,
        bad: pa.Table,
        columns: AlteredColumns,
    ) -> TableChanges:
        """Rows of the range, deleted ones marked; and marks for the table's own rows of keys that it only deletes."""
        names = self._shape.names
        puts = merge_latest(wanted.empty_table(), rows, names, wanted)
        known = puts.column(names.key).combine_chunks()
        marked = deletes.filter(pc.invert(pc.is_in(deletes.column(names.key), value_set=known)))
        purges = rows.filter(pc.equal(rows.column(names.op), int(Op.PURGE))).column(names.key).combine_chunks()
        marks = pa.table(
            {
                "key": marked.column(names.key),
                "offset": marked.column(names.offset),
                "timestamp": marked.column(names.timestamp),
                "purged": pc.is_in(marked.column(names.key), value_set=purges),
            }
        )
        none = pa.chunked_array([], pa.binary())
        return TableChanges(
            schema, _conformed(puts, schema), none, bad, columns, names.key, names.key, SoftDeletes(names, marks)
        )

    def _check_letters(self, bad: pa.Table) -> None:
        """``BadRecord`` for one that the database cannot even store as a dead letter."""
        for mask, reason in self._database.unfit(bad.select(["timestamp"]), None):
            unfit = bad.filter(mask)
            if unfit.num_rows:
                raise BadRecord(
                    f"The record at offset {unfit.column('offset')[0].as_py()} can be neither a row nor a dead letter: "
                    f"{reason} Nothing was applied; follow into another kind of table."
                )

    def _schema_of(self, rows: pa.Table) -> pa.Schema:
        """The columns of a table with these changes: a codec may find more fields than it announced."""
        raw = self._shape.schema()
        if raw is RAW_LATEST:
            return raw
        shape = self._shape
        return table_schema(shape.kind, rows.schema.remove_metadata(), shape.names, soft_deletes=shape.soft_deletes)

    def _fitting(self, records: pa.Table, shaped: ShapedRows) -> ShapedRows:
        """Without the rows that the database cannot store, which become bad ones."""
        offset = self._shape.names.offset
        key = self._shape.names.key if self._shape.is_keyed else None
        bad, dropped = [shaped.bad], [pa.array([], pa.int64())]
        for mask, reason in self._database.unfit(shaped.rows, key):
            if not pc.any(mask).as_py():
                continue
            if offset not in shaped.rows.column_names:
                raise BadRecord(f"A row that the transform made cannot be stored: {reason} Nothing was applied.")
            offsets = pc.unique(shaped.rows.column(offset).filter(mask))
            dropped.append(offsets)
            bad.append(_bad_rows(records.filter(pc.is_in(records.column("offset"), value_set=offsets)), reason))
        if len(dropped) == 1:
            return ShapedRows(shaped.rows, _once(shaped.bad))
        is_dropped = pc.is_in(shaped.rows.column(offset), value_set=pa.concat_arrays(dropped))
        return ShapedRows(shaped.rows.filter(pc.invert(is_dropped)), _once(pa.concat_tables(bad)))


def _ranges(spans: Sequence[Span]) -> Iterator[pa.Table]:
    """The records of the spans, span by span."""
    for _, batches in fetch_in_order(joined(spans)):
        if sum(batch.num_rows for batch in batches):
            yield pa.Table.from_batches(batches, READ_SCHEMA)


def _bad_rows(records: pa.Table, reason: str) -> pa.Table:
    columns = [*[records.column(name) for name in BAD_SCHEMA.names[:-1]], pa.repeat(reason, records.num_rows)]
    return pa.table(columns, schema=BAD_SCHEMA)


def _once(bad: pa.Table) -> pa.Table:
    """Each bad record once, in the order of their offsets, with its first reason."""
    if not bad.num_rows:
        return bad
    ordered = bad.append_column("at", pa.array(range(bad.num_rows), pa.int64()))
    firsts = ordered.group_by("offset").aggregate([("at", "min")]).sort_by("offset").column("at_min")
    found = taken_rows(bad, firsts)
    reasons = pc.replace_substring(found.column("reason"), "\0", "\\0")  # PostgreSQL's texts cannot hold it
    return found.set_column(BAD_SCHEMA.get_field_index("reason"), BAD_SCHEMA.field("reason"), reasons)


def _conformed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    if rows.schema.equals(schema):
        return rows
    batches = [conform_columns(batch, schema) for batch in rows.to_batches()]
    return pa.Table.from_batches(batches, schema)
