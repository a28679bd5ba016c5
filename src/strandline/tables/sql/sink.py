"""The sink of a table in a SQL database: proves the table, and commits what a range changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

import pyarrow as pa

from strandline.errors import (
    Diverged,
    InvalidInput,
    NotFound,
    StorageError,
    TransientStorageError,
)
from strandline.log.contract import Log
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.sink import remaining
from strandline.storage.clock import CHANCE
from strandline.storage.task_pool import TaskPool
from strandline.tables.claim import TableClaim, replaced
from strandline.tables.maintain.comparison import RowDifferences
from strandline.tables.maintain.contract import (
    MaintainedTable,
    RecordedTable,
    TableDescription,
    committed_meanwhile,
    no_table,
    refuse_moved_on,
)
from strandline.tables.maintain.replay import LetterReplay
from strandline.tables.rows.conditions import recorded_condition
from strandline.tables.rows.kinds import KINDS
from strandline.tables.rows.logged import Value
from strandline.tables.rows.shape import TableShape, refuse_lost_transform
from strandline.tables.sql.changes import ChangePlanner
from strandline.tables.sql.database import Database, SqlTransaction, TableChanges
from strandline.tables.sql.expected import expected_pieces, record_ranges
from strandline.tables.sql.rewriting import ReplayedSql, rebuilt_row
from strandline.tables.sql.state import CursorRow, Expected, SeenTable
from strandline.tables.work import Rebuild


@checked
class SqlSink(MaintainedTable):
    """A table in a SQL database that follows a log; see :class:`~strandline.model.sink.Sink`.

    Rows, dead letters and the cursor are written in one transaction, which ends with ``UPDATE … SET next = … WHERE
    next = <as it was read> AND epoch = <as it was read>``. If that changes no row, another follower was
    faster, and this one is ``Fenced``. A follower takes a new epoch with its first commit
    (:mod:`strandline.tables.claim`), so that one that it replaced, and that was only slow, is ``Fenced``, too.

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
        max_bad_share: Any = 1.0,
    ) -> None:
        super().__init__(where, name, shape, value, max_bad_share)
        self._database = database
        self._expected = Expected(where, name, database.type_of, shape)
        self._has_dead_letters = dead_letters
        self._held: CursorRow | None = None
        """That of the last commit that a follower with this object knows of."""
        self._claim: TableClaim[int] | None = None
        self._unanswered: set[str] = set()
        """Numbers of commits whose answers were lost: they may still land."""
        self._lock = threading.Lock()
        if shape.transform is None and not self._logged.is_logged:
            database.check_schema(shape.schema())

    def _reshape(self, shape: TableShape) -> None:
        super()._reshape(shape)
        self._expected = replace(self._expected, shape=shape)

    def _refresh(self) -> None:
        """Take over the codec that the log names now."""
        if not self._logged.is_logged:
            return
        self._shape = self._logged.resolved(self._columns_now)
        self._expected = replace(self._expected, shape=self._shape)
        if self._shape.transform is None:
            self._database.check_schema(self._shape.schema())

    def _planner(self, columns: pa.Schema | None = None, values: pa.ChunkedArray | None = None) -> ChangePlanner:
        """``columns``: those of the table; ``values``: self-describing ones may bring more."""
        shape = self._shape
        if columns is not None or values is not None:
            given = (one for chunk in values.chunks for one in chunk.to_pylist()) if values is not None else ()
            shape = shape.for_table(columns, given, self._kept)
        return ChangePlanner(shape, self._database, self._bad_share, self._has_dead_letters)

    def _kept(self, schema: pa.Schema) -> pa.Schema:
        names = self._shape.names
        beside = [pa.field(name, pa.binary()) for name in (*names.all, names.deleted)]
        self._database.check_schema(pa.schema([*schema, *beside]))
        return schema

    def _columns_now(self) -> pa.Schema | None:
        seen = self._database.read_table()
        return None if seen.identity is None or seen.row is None else seen.row.schema

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far the table has applied that log; None if there is no table yet.

        ``Diverged`` if it follows another log, or is not the table that its cursor row describes.
        """
        self._logged.check_met()
        with self._lock:
            row = self._proved(self._database.read_table(), log_id)
        return None if row is None else row.cursor

    def _proved(self, seen: SeenTable, log_id: UUID) -> CursorRow | None:
        return self._expected.proved(seen, log_id, self._held, self._unanswered)

    def resume(self, log_id: UUID) -> Cursor | None:
        """The cursor for a starting follower, by the database alone."""
        self._logged.check_met()
        with self._lock:
            self._held = None
            self._refresh()
            row = self._expected.proved(self._database.read_table(), log_id)
            self._claim = _started(row).started_again(self._claim)
        return None if row is None else row.cursor

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """The cursor, if the table needs no repair: a SQL table has no earlier versions to go back to."""
        try:
            return self.resume(log_id)
        except Diverged as error:
            raise Diverged(
                f"The table {self.where} cannot be repaired, since a SQL database keeps no earlier versions "
                f"of it. ({error})"
            ) from error

    def adopt(self, log_id: UUID) -> Cursor:
        """Accept the table as it is now as the state of its cursor row: the caller knows that it is right.

        For a table that was restored from a dump, or created again on purpose. ``NotFound`` if there is no table, or
        no cursor row of that log.
        """
        with self._lock, self._database.writing() as transaction:
            transaction.lock()
            seen = transaction.read_table()
            if seen.identity is None or seen.row is None or seen.row.cursor.log_id != log_id:
                raise NotFound(f"There is no table {self.where} with a cursor in log {log_id} to adopt.")
            row = replace(seen.row, identity=seen.identity)
            self._expected.proved(replace(seen, row=row), log_id)
            self._accept(transaction, seen.row, row)
        return row.cursor

    def move(self, former: Cursor, to: Cursor) -> None:
        """Follow another log from now on. Dead letters go along: they are proved by the records there."""
        with self._lock, self._database.writing() as transaction:
            transaction.lock()
            row = self._expected.existing(transaction.read_table(), former.log_id, is_moved=True)
            refuse_moved_on(former, row.cursor, self.where)
            self._accept(transaction, row, replace(row, cursor=to))

    def _accept(self, transaction: SqlTransaction, before: CursorRow, row: CursorRow) -> None:
        """Commit that the table as it is has the state of this row; a running follower is fenced."""
        if not transaction.store(replace(row, epoch=before.epoch + 1), before):
            raise replaced(self.where)
        self._held = self._claim = None

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Commit the range with its cursor, exactly once; see :class:`~strandline.model.sink.Sink`."""
        with self._lock:
            self._refresh()
            while True:
                found = self._proved(self._database.read_table(), since.log_id)
                claim = self._claim = self._claim or _started(found)
                if found is None and claim.at is not None:
                    raise self._expected.dropped(claim.at)
                if found is not None and found.commit_id in self._unanswered:
                    self._hold(found, claim)
                if found is not None:
                    claim.check(found.epoch, found.cursor.next, self.where)
                todo = remaining(records, since=since, upto=upto, at=None if found is None else found.cursor)
                end = upto
                if todo is None:
                    if found is None or not claim.is_disputed(found.cursor.next):
                        return
                    todo, end = records.slice(0, 0), found.cursor
                if found is not None:
                    refuse_lost_transform(self._shape, self.where, is_transformed=found.is_transformed)
                before = None if found is None else found.schema
                changes = self._planner(before, todo.column("value")).planned(todo, before)
                if self._commit(changes, found, since, end, claim):
                    self._bad_share.found += changes.bad.num_rows
                    return

    def _existing(self) -> CursorRow | None:
        seen = self._database.read_table()
        if seen.identity is None:
            raise no_table(self.where)
        return seen.row

    def start(self) -> int:
        """The offset at which the table began to follow its log; ``NotFound`` if there is no table."""
        row = self._existing()
        return 0 if row is None else row.start

    def size(self) -> TableDescription:
        """Its size and columns; ``NotFound`` if there is no table. The version is how many followers it has had."""
        row = self._existing()
        with self._database.reading() as transaction:
            rows, size = transaction.size()
        columns = () if row is None else tuple((field.name, self._database.type_of(field)) for field in row.schema)
        return TableDescription(self.where, self.mode, 0 if row is None else row.epoch, rows, 0, size, columns)

    def recorded(self) -> RecordedTable | None:
        """What the table records; None for a table of another program. ``NotFound`` if there is none."""
        row = self._existing()
        mode = next((kind for kind in KINDS if row is not None and kind == row.mode), None)
        if mode is None or row is None:
            return None
        with self._database.reading() as transaction:
            only = recorded_condition(row.key or "{}", self.where)
            return RecordedTable(
                mode, row.schema, row.is_transformed, only, transaction.has_letters(), inferred=row.inferred
            )

    def compared(self, log: Log, pool: TaskPool) -> tuple[Cursor, RowDifferences]:
        """Compare the rows, in the database; see :func:`~strandline.tables.maintain.operations.verify`."""
        with self._lock:
            row = self._expected.existing(self._database.read_table(), log.log_id)
            self._refresh()  # the codec of the last record that the table has, or a newer one
            read = partial(record_ranges, log, log.cursor_at(row.start), row.cursor.next)
            expected = expected_pieces(self._planner(row.schema), row.schema, read, self.size().bytes)
            with self._database.reading() as transaction:
                found = transaction.compared(expected, row.schema)
                if transaction.read_table().row != row:
                    raise committed_meanwhile(self.where)
        return row.cursor, found

    def rebuilt(self, job: Rebuild) -> Cursor:
        """Replace all rows in one transaction; see :func:`~strandline.tables.maintain.operations.rebuild`.

        Rows are deleted and inserted, not the table: its indexes, rights and views stay. Other followers wait, and the
        one that followed the table so far is ``Fenced``.
        """
        with self._lock, self._database.writing(is_long=True) as transaction:
            transaction.lock()
            found = self._expected.existing(transaction.read_table(), job.log.log_id)
            beginning, _, end = job.planned(found.start)
            self._refresh()  # the codec of the last record, or a newer one
            planner = self._planner(found.schema)
            row = rebuilt_row(transaction, planner, job, found, (beginning, end), self.where)
            if not transaction.store(row, found):
                raise replaced(self.where)
            self._held = self._claim = None
        return end

    def _letter_replay(self, log: Log) -> LetterReplay:
        if not self._has_dead_letters:
            raise InvalidInput(f"The sink of {self.where} has no dead letters: open it with them.")
        self.meet(log)
        row, values = self._database.read_table().row, None
        if row is not None and self._shape.is_self_describing:  # letters bring columns, as records do
            with self._database.reading() as transaction:
                values = transaction.letters().column("value")
        planner = self._planner(None if row is None else row.schema, values)
        planner = replace(planner, shape=planner.shape.for_letters())

        def opened() -> ReplayedSql:
            row = self._expected.existing(self._database.read_table(), log.log_id)
            return ReplayedSql(self._database, self._expected, planner, row)

        return LetterReplay(self.where, opened, planner.shape, planner.shaped, log)

    def optimized(self) -> int:
        """``InvalidInput``: a database has no files to join."""
        raise InvalidInput(f"The database keeps the table {self.where} as it should be: there are no files to join.")

    def vacuumed(self, hours: int) -> int:
        """``InvalidInput``: a database keeps no earlier versions of a table."""
        raise InvalidInput(
            f"The database keeps no earlier versions of the table {self.where}: let it run its own VACUUM."
        )

    def _commit(
        self, changes: TableChanges, found: CursorRow | None, since: Cursor, upto: Cursor, claim: TableClaim[int]
    ) -> bool:
        """Commit; False if an earlier commit without an answer, or a replay, has landed: look at the table again."""
        epoch = 1 if found is None else found.epoch + (not claim.is_held)
        commit_id = str(CHANCE.uuid())
        row: CursorRow | None = None
        try:
            with self._database.writing() as transaction:
                transaction.stage(changes)
                transaction.lock()
                seen = transaction.read_table()
                row_now = self._proved(seen, since.log_id)
                if row_now != found:
                    if seen.row is not None and seen.row.commit_id in self._unanswered:
                        self._hold(seen.row, claim)
                        return False
                    if row_now is not None and found is not None and row_now.position == found.position:
                        return False  # a replay of dead letters changed columns
                    raise replaced(self.where)
                if found is None:
                    identity, before = transaction.create(changes), seen.row
                    if self._shape.description is not None:
                        transaction.describe(self._shape.description)
                    epoch = 1 if before is None else before.epoch + 1
                else:
                    identity, before = found.identity, found
                    transaction.alter(changes)
                transaction.merge(changes)
                if self._has_dead_letters:
                    transaction.put_dead_letters(changes.bad, removed_from=since.next if found is None else None)
                start = since.next if found is None else found.start
                is_transformed = self._shape.transform is not None if found is None else found.is_transformed
                made = (epoch, identity, self.mode, changes.schema, start, commit_id, self._expected.key)
                inferred = self._shape.inferred if found is None else found.inferred
                row = CursorRow(self._name, upto, *made, is_transformed, inferred)
                if not transaction.store(row, before):
                    raise replaced(self.where)
                self._unanswered.add(commit_id)
        except TransientStorageError:
            if not self._is_stored(commit_id):
                raise
        if row is not None:
            self._hold(row, claim)
        return True

    def _hold(self, row: CursorRow, claim: TableClaim[int]) -> None:
        self._held = row
        claim.hold(row.epoch)
        self._unanswered.clear()

    def _is_stored(self, commit_id: str) -> bool:
        """Whether a commit has landed whose answer was lost; False if that cannot be known now."""
        try:
            row = self._database.read_table().row
        except StorageError:
            return False
        return row is not None and row.commit_id == commit_id


def _started(row: CursorRow | None) -> TableClaim[int]:
    """The claim of a follower that finds this row of the table as it starts."""
    return TableClaim(None, None) if row is None else TableClaim(row.epoch, row.cursor.next)
