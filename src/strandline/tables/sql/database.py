"""The contract of a database with one followed table: transactions, and the statements that a sink needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.tables.maintain.comparison import FIRST_DIFFERENCES, RowDifferences
from strandline.tables.maintain.replay import PAIRS
from strandline.tables.rows.kinds import ColumnNames
from strandline.tables.rows.shape import BAD_SCHEMA
from strandline.tables.sql.columns import (
    DEAD_LETTERS,
    EXACT_TIME,
    STORED_LETTERS,
    TypeOf,
    definitions,
    letters_of,
    quoted,
    storable_letters,
)
from strandline.tables.sql.state import COLUMNS, CursorRow, SeenColumn, SeenTable, decoded_row, encoded_columns


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changes of a table by a range: rows to put, keys to delete, dead letters; and the columns afterwards."""

    before: pa.Schema
    """The columns that the table has."""
    schema: pa.Schema
    names: ColumnNames
    bad: pa.Table
    puts: pa.Table
    key: str | None = None
    """The column by which rows are replaced; None in a table of all changes."""
    primary: str | None = None
    """The column of a new table's primary key."""
    deleted: pa.ChunkedArray | None = None
    """The keys of rows that go; None: no row goes."""
    marks: pa.Table | None = None
    """Rows of the table that are marked as deleted: ``key``, ``offset`` and ``timestamp`` of the delete, and
    ``purged``, which removes the values, too."""


class SqlTransaction(ABC):
    """A transaction that writes. Nothing of it is visible, or holds a lock that others need, before :meth:`lock`.

    Statements that all databases take are written here. Their values are ``$1``, ``$2``, ...: names hold any letter.
    """

    table: str
    type_of: TypeOf
    letter_type: TypeOf
    """The type of a column of dead letters."""
    letter_time: ClassVar[str]
    """The time of a dead letter, in microseconds or as text."""
    no_key: ClassVar[str]
    cursors: str
    """The table of cursors."""
    cursor_columns: ClassVar[str]
    """Its columns."""

    @abstractmethod
    def run(self, statement: str, *values: Any) -> Any:
        """Run one statement; returns a cursor."""

    @abstractmethod
    def named(self, suffix: str = "") -> str:
        """The name of the table, as SQL has it; with a suffix that of one beside it."""

    @abstractmethod
    def seen_columns(self, named: str) -> dict[str, SeenColumn]:
        """The columns of a table; none if there is no such table."""

    @abstractmethod
    def stage(self, changes: TableChanges) -> None:
        """Send the rows to the database."""

    @abstractmethod
    def lock(self) -> None:
        """Exclude other followers, and changes of the table's columns, until the end of the transaction."""

    @abstractmethod
    def identity(self) -> str | None:
        """What a table that is dropped and created again has another one of; None if there is no table."""

    def read_table(self) -> SeenTable:
        """The table as it is now, its columns, and its cursor row."""
        return SeenTable(self.identity(), self.seen_columns(self.named()), self.row())

    @abstractmethod
    def create(self, changes: TableChanges) -> str:
        """Create the table; returns its identity."""

    @abstractmethod
    def describe(self, text: str) -> None:
        """Store what the table says about itself, in a database that has a place for it."""

    def alter(self, changes: TableChanges) -> None:
        """Add and widen columns."""
        for field in changes.schema:
            if field.name not in changes.before.names:
                self.run(f"ALTER TABLE {self.named()} ADD COLUMN {quoted(field.name)} {self.type_of(field)}")

    @abstractmethod
    def merge(self, changes: TableChanges) -> None:
        """Put and delete the staged rows."""

    def marking(self, changes: TableChanges, source: str, *mark: str) -> str:
        """The statement that marks rows as deleted, by the columns of ``changes.marks`` as expressions."""
        key, offset, time, purged = mark
        names = changes.names
        payload = [quoted(name) for name in changes.schema.names if name not in (*names.all, names.deleted)]
        emptied = "".join(f", {name} = CASE WHEN {purged} THEN NULL ELSE t.{name} END" for name in payload)
        return (
            f"UPDATE {self.named()} AS t SET {quoted(names.deleted)} = true, {quoted(names.offset)} = {offset}, "  # noqa: S608
            f"{quoted(names.timestamp)} = {time}{emptied} {source} WHERE t.{quoted(names.key)} = {key}"
        )

    def put_dead_letters(self, bad: pa.Table, *, removed_from: int | None) -> None:
        """Add dead letters to their own table, which is created if it is missing; first those from an offset on go."""
        if not bad.num_rows and removed_from is None:
            return
        named, type_of = self.named(DEAD_LETTERS), self.letter_type
        found = self.seen_columns(named)
        if not found:
            self.run(f"CREATE TABLE {named} ({definitions(STORED_LETTERS, 'offset', type_of)})")
        elif any(one.name not in found or found[one.name].kind != type_of(one) for one in BAD_SCHEMA):
            raise InvalidInput(f"The table {named} has other columns than dead letters have: rename it.")
        elif EXACT_TIME not in found:
            self.run(f"ALTER TABLE {named} ADD COLUMN {EXACT_TIME} {type_of(STORED_LETTERS.field(EXACT_TIME))}")
        if found and removed_from is not None:
            self.run(f'DELETE FROM {named} WHERE "offset" >= $1', removed_from)  # noqa: S608
        if bad.num_rows:
            self.insert_letters(storable_letters(bad))

    @abstractmethod
    def insert_letters(self, letters: pa.Table) -> None:
        """Add dead letters to their table (:data:`~strandline.tables.sql.columns.STORED_LETTERS`)."""

    @staticmethod
    def insertion(into: str, names: Sequence[str], source: str, key: str | None) -> str:
        """The statement that adds rows of a source to a table, in place of those with the same key if there is one."""
        columns, conflict = [quoted(name) for name in names], ""
        if key is not None:
            sets = ", ".join(f"{name} = excluded.{name}" for name in columns if name != quoted(key))
            conflict = f" ON CONFLICT ({quoted(key)}) DO UPDATE SET {sets}"
        return f"INSERT INTO {into} ({', '.join(columns)}) {source}{conflict}"

    def has_letters(self) -> bool:
        """Whether there is a table of its dead letters."""
        return bool(self.seen_columns(self.named(DEAD_LETTERS)))

    def letters(self) -> pa.Table:
        """All dead letters of the table (:data:`~strandline.tables.rows.shape.BAD_SCHEMA`)."""
        named = self.named(DEAD_LETTERS)
        known, found = self.seen_columns(named), []
        if known:
            columns = ", ".join(self.letter_time if name == "timestamp" else quoted(name) for name in BAD_SCHEMA.names)
            exact = EXACT_TIME if EXACT_TIME in known else "NULL"
            found = self.run(f"SELECT {columns}, {exact} FROM {named}").fetchall()  # noqa: S608
        return letters_of(list(zip(*found, strict=True)) or [()] * len(STORED_LETTERS))

    @abstractmethod
    def remove_letters(self, offsets: Sequence[int]) -> int:
        """Remove the dead letters of these offsets; returns how many there were."""

    def pairs(self, offset: str, key: str | None, since: int) -> pa.Table:
        """Offset and key of the table's rows from an offset on, by the names of these columns; null without a key."""
        columns = f"{quoted(offset)}, {self.no_key if key is None else quoted(key)}"
        statement = f"SELECT {columns} FROM {self.named()} WHERE {quoted(offset)} >= $1"  # noqa: S608
        offsets, keys = list(zip(*self.run(statement, since), strict=True)) or ((), ())
        return pa.table([pa.array(offsets, pa.int64()), pa.array(keys, pa.binary())], schema=PAIRS)

    def clear(self) -> None:
        """Delete all rows of the table. Others see them until the commit, which TRUNCATE does not promise."""
        self.run(f"DELETE FROM {self.named()}")  # noqa: S608

    def size(self) -> tuple[int, int]:
        """Rows of the table, and bytes that the database says it has."""
        (rows,) = self.run(f"SELECT count(*) FROM {self.named()}").fetchone()  # noqa: S608
        return rows, self.stored_bytes()

    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes that the database says the table has."""

    @abstractmethod
    def compared(self, expected: Iterable[pa.Table], schema: pa.Schema) -> RowDifferences:
        """Compare the table with rows in pieces, by its own types; it is not read before the last has arrived."""

    def differing(self, query: str) -> tuple[int, list[tuple[Any, ...]]]:
        """The number of rows of a query, and the first ones."""
        (count,) = self.run(f"SELECT count(*) FROM ({query}) differing").fetchone()  # noqa: S608
        return count, list(self.run(f"{query} LIMIT {FIRST_DIFFERENCES}")) if count else []

    def row(self) -> CursorRow | None:
        """The cursor row of the table."""
        if not self.seen_columns(self.cursors):
            return None
        found = self.run(f"SELECT {COLUMNS} FROM {self.cursors} WHERE target = $1", self.table).fetchone()  # noqa: S608
        return None if found is None else decoded_row(found)

    def ensure_cursors(self) -> None:
        """Create the table of cursors, if it is missing."""
        self.run(f"CREATE TABLE IF NOT EXISTS {self.cursors} ({self.cursor_columns})")

    def store(self, row: CursorRow, before: CursorRow | None) -> bool:
        """Replace the cursor row; False if it is not ``before`` any more. None: there was no table."""
        self.ensure_cursors()
        values = (
            *(self.table, row.name, str(row.cursor.log_id), str(row.cursor), row.cursor.next, row.epoch),
            *(row.identity, row.mode, encoded_columns(row), row.start, row.commit_id),
        )
        if before is None:
            done = self.run(
                f"INSERT INTO {self.cursors} (target, name, log_id, cursor, next, epoch, identity, mode, columns, "  # noqa: S608
                "start, commit_id) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT DO NOTHING",
                *values,
            )
        else:
            done = self.run(
                f"UPDATE {self.cursors} SET name = $2, log_id = $3, cursor = $4, next = $5, epoch = $6, "  # noqa: S608
                "identity = $7, mode = $8, columns = $9, start = $10, commit_id = $11 "
                "WHERE target = $1 AND next = $12 AND epoch = $13",
                *(*values, before.cursor.next, before.epoch),
            )
        return bool(done.rowcount == 1)


class Database(Protocol):
    """A database with one followed table: its types, what it cannot store, and its transactions."""

    @property
    def type_of(self) -> TypeOf:
        """The type of a column."""

    def unfit(self, rows: pa.Table, key: str | None) -> Iterator[tuple[pa.ChunkedArray, str]]:
        """Rows that the database cannot store, as a mask, with the reason."""

    def check_schema(self, schema: pa.Schema) -> None:
        """``SchemaRefused`` for columns that the database cannot have."""

    def read_table(self) -> SeenTable:
        """The table as it is now."""

    def reading(self) -> AbstractContextManager[SqlTransaction]:
        """A transaction that sees one state of all tables, and changes none."""

    def writing(self, *, is_long: bool = False) -> AbstractContextManager[SqlTransaction]:
        """A transaction, durable at the end of the block, or rolled back. ``is_long``: it may be silent for long."""
