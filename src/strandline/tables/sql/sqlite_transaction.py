"""Statements of one transaction in SQLite, and the types of its columns."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import InvalidInput
from strandline.storage.clock import CHANCE
from strandline.tables.maintain.comparison import RowDifferences
from strandline.tables.sql.columns import (
    CURSORS,
    DEAD_LETTERS,
    as_json,
    definitions,
    quoted,
    refused,
)
from strandline.tables.sql.database import SqlTransaction, TableChanges
from strandline.tables.sql.state import SeenColumn

TIMES: Final = range(-1_096_193_779_200_000_000, 971_890_963_200_000_000)
"""The years of which Arrow makes a right text, -32767 to 32767, in microseconds since 1970."""
_MARK: Final = re.compile(r"/\* strandline ([0-9a-f-]{36}) \*/")


def sqlite_type(field: pa.Field) -> str:
    """The type of a column: SQLite knows four. Times are texts that sort, JSON and exact decimals are texts, too."""
    kind = field.type
    if pt.is_boolean(kind) or (pt.is_integer(kind) and not pt.is_uint64(kind)):
        return "INTEGER"
    if pt.is_floating(kind):
        return "REAL"
    if pt.is_binary(kind) or pt.is_large_binary(kind):
        return "BLOB"
    is_number = pt.is_uint64(kind) or pt.is_decimal(kind)
    if is_number or pt.is_string(kind) or pt.is_large_string(kind) or pt.is_nested(kind):
        return "TEXT"
    if pt.is_timestamp(kind) or pt.is_date(kind) or pt.is_time(kind):
        return "TEXT"
    raise refused(field, "SQLite")


class SqliteTransaction(SqlTransaction):
    """One transaction; see :class:`~strandline.tables.sql.database.SqlTransaction`."""

    letter_time = '"timestamp"'
    no_key = "NULL"
    cursor_columns = (
        "target TEXT PRIMARY KEY COLLATE NOCASE, name TEXT NOT NULL, log_id TEXT NOT NULL, cursor TEXT NOT NULL, "
        "next INTEGER NOT NULL, epoch INTEGER NOT NULL, identity TEXT NOT NULL, mode TEXT NOT NULL, "
        "columns TEXT NOT NULL, start INTEGER NOT NULL, commit_id TEXT NOT NULL"
    )

    def __init__(self, connection: sqlite3.Connection, table: str) -> None:
        self.connection, self.table, self.cursors = connection, table, CURSORS
        self.type_of = self.letter_type = sqlite_type

    def run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Run one statement."""
        return self.connection.execute(statement, {str(at): value for at, value in enumerate(values, 1)})

    def named(self, suffix: str = "") -> str:
        """The name of the table, or of one beside it."""
        return quoted(self.table + suffix)

    def stage(self, changes: TableChanges) -> None:
        """Nothing: rows are inserted from memory."""

    def lock(self) -> None:
        """Only one process writes to the file."""
        self.run("BEGIN IMMEDIATE")

    def identity(self) -> str | None:
        """The mark in the definition of the table."""
        found = self.run(
            "SELECT type, name, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name = $1 COLLATE NOCASE",
            self.table,
        ).fetchone()
        if found is None:
            return None
        kind, name, definition = found
        if kind != "table":
            raise InvalidInput(f"{name} is a view: follow into a table of its own.")
        mark = _MARK.search(definition)
        return mark[1] if mark else ""

    def seen_columns(self, named: str) -> dict[str, SeenColumn]:
        """The columns of a table."""
        found = self.run(f"PRAGMA table_info({named})")
        return {
            name: SeenColumn(kind, is_optional=not is_needed or default is not None)
            for _, name, kind, is_needed, default, _ in found
        }

    def create(self, changes: TableChanges) -> str:
        """Create the table, with a mark in its definition, which SQLite keeps as it was written."""
        identity = str(CHANCE.uuid())
        columns = definitions(changes.schema, changes.primary, sqlite_type)
        self.run(f"CREATE TABLE {self.named()} (/* strandline {identity} */ {columns})")
        return identity

    def describe(self, text: str) -> None:
        """SQLite has no comments: the cursor row has the text."""

    def merge(self, changes: TableChanges) -> None:
        """Put and delete the rows."""
        if changes.deleted is not None and changes.key is not None:
            statement = f"DELETE FROM {self.named()} WHERE {quoted(changes.key)} = ?"  # noqa: S608
            self.connection.executemany(statement, zip(changes.deleted.to_pylist(), strict=True))
        self._inserted(self.named(), changes.puts, changes.key)
        if changes.marks is not None:
            marks = zip(*map(_bound, changes.marks.columns), strict=True)
            self.connection.executemany(self.marking(changes, "", "?1", "?2", "?3", "?4"), marks)

    def _inserted(self, named: str, rows: pa.Table, key: str | None) -> None:
        places = ", ".join("?" for _ in rows.column_names)
        statement = self.insertion(named, rows.column_names, f"VALUES ({places})", key)
        for batch in rows.to_batches():
            columns = [_bound(pa.chunked_array([column])) for column in batch.columns]
            self.connection.executemany(statement, zip(*columns, strict=True))

    def insert_letters(self, letters: pa.Table) -> None:
        """Add dead letters to their table."""
        self._inserted(self.named(DEAD_LETTERS), letters, "offset")

    def remove_letters(self, offsets: Sequence[int]) -> int:
        """Remove the dead letters of these offsets; returns how many there were."""
        statement = f'DELETE FROM {self.named(DEAD_LETTERS)} WHERE "offset" = ?'  # noqa: S608
        return self.connection.executemany(statement, zip(offsets, strict=True)).rowcount

    def stored_bytes(self) -> int:
        """Bytes of the whole file."""
        (pages,), (size,) = (self.run(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        return int(pages * size)

    def compared(self, expected: Iterable[pa.Table], schema: pa.Schema) -> RowDifferences:
        """Compare the table with rows in a temporary one. Rows that differ in their number count as different."""
        columns = definitions(schema, None, sqlite_type)
        self.run(f"CREATE TEMPORARY TABLE strandline_expected ({columns})")
        for rows in expected:
            self._inserted("strandline_expected", rows, None)
        columns = ", ".join(quoted(name) for name in schema.names)
        ours, theirs = (
            f"SELECT {columns}, count(*) FROM {table} GROUP BY {columns}"  # noqa: S608
            for table in ("temp.strandline_expected", f"main.{self.named()}")
        )
        missing, extra = (
            (count, [row[:-1] for row in rows])
            for count, rows in map(self.differing, (f"{ours} EXCEPT {theirs}", f"{theirs} EXCEPT {ours}"))
        )
        return RowDifferences.counted(self.size()[0], missing, extra)


def _bound(column: pa.ChunkedArray) -> list[Any]:
    """Values as SQLite takes them."""
    kind = column.type
    if pt.is_nested(kind):
        column = as_json(column)
    elif pt.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", "UTC" if kind.tz else None), safe=False).cast(pa.string())
    elif pt.is_temporal(kind) or pt.is_decimal(kind) or pt.is_uint64(kind):
        column = column.cast(pa.string())
    elif pt.is_floating(kind):
        column = pc.cast(column, pa.float64())
    return list(column.to_pylist())
