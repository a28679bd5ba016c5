"""Statements of one transaction in SQLite, and the types of its columns."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import InvalidInput
from strandline.storage.clock import CHANCE
from strandline.tables.maintain.comparison import FIRST_DIFFERENCES, RowDifferences
from strandline.tables.maintain.replay import pairs_from
from strandline.tables.rows.shape import BAD_SCHEMA
from strandline.tables.sql.changes import SoftDeletes, TableChanges
from strandline.tables.sql.columns import (
    CURSORS,
    DEAD_LETTERS,
    EXACT_TIME,
    STORED_LETTERS,
    as_json,
    definitions,
    is_nested,
    letters_of,
    quoted,
    refused,
    storable_letters,
)
from strandline.tables.sql.state import COLUMNS, CursorRow, SeenColumn, SeenTable, decoded_row, encoded_columns

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
    if is_number or pt.is_string(kind) or pt.is_large_string(kind) or is_nested(kind):
        return "TEXT"
    if pt.is_timestamp(kind) or pt.is_date(kind) or pt.is_time(kind):
        return "TEXT"
    raise refused(field, "SQLite")


@dataclass(slots=True)
class SqliteTransaction:
    """One transaction; see :class:`~strandline.tables.sql.database.SqlTransaction`."""

    connection: sqlite3.Connection
    table: str

    def stage(self, changes: TableChanges) -> None:
        """Nothing: rows are inserted from memory."""

    def lock(self) -> None:
        """Only one process writes to the file."""
        self.connection.execute("BEGIN IMMEDIATE")

    def read_table(self) -> SeenTable:
        """The table, its columns, and its cursor row. The mark in its definition is its identity."""
        found = self.connection.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name = ? COLLATE NOCASE",
            [self.table],
        ).fetchone()
        row = self._row()
        if found is None:
            return SeenTable(None, {}, row)
        kind, name, definition = found
        if kind != "table":
            raise InvalidInput(f"{name} is a view: follow into a table of its own.")
        mark = _MARK.search(definition)
        return SeenTable(mark[1] if mark else "", self._columns(self.table), row)

    def _columns(self, table: str) -> dict[str, SeenColumn]:
        found = self.connection.execute(f"PRAGMA table_info({quoted(table)})")
        return {
            name: SeenColumn(kind, is_optional=not is_needed or default is not None)
            for _, name, kind, is_needed, default, _ in found
        }

    def _row(self) -> CursorRow | None:
        if not self._columns(CURSORS):
            return None
        found = self.connection.execute(
            f"SELECT {COLUMNS} FROM {CURSORS} WHERE target = ?",  # noqa: S608
            [self.table],
        ).fetchone()
        return None if found is None else decoded_row(found)

    def create(self, changes: TableChanges) -> str:
        """Create the table, with a mark in its definition, which SQLite keeps as it was written."""
        identity = str(CHANCE.uuid())
        columns = definitions(changes.schema, changes.primary, sqlite_type)
        self.connection.execute(f"CREATE TABLE {quoted(self.table)} (/* strandline {identity} */ {columns})")
        return identity

    def alter(self, changes: TableChanges) -> None:
        """Add columns; a wider number has the same type."""
        for field in changes.columns.added:
            self.connection.execute(
                f"ALTER TABLE {quoted(self.table)} ADD COLUMN {quoted(field.name)} {sqlite_type(field)}"
            )

    def merge(self, changes: TableChanges) -> None:
        """Put and delete the rows."""
        if len(changes.deleted) and changes.key is not None:
            statement = f"DELETE FROM {quoted(self.table)} WHERE {quoted(changes.key)} = ?"  # noqa: S608
            self.connection.executemany(statement, zip(changes.deleted.to_pylist(), strict=True))
        self._inserted(self.table, changes.puts, changes.key)
        if changes.soft is not None:
            self._mark(changes.soft, changes.schema)

    def _mark(self, soft: SoftDeletes, schema: pa.Schema) -> None:
        names = soft.names
        stamps = f"{quoted(names.deleted)} = 1, {quoted(names.offset)} = ?, {quoted(names.timestamp)} = ?"
        emptied = "".join(f", {quoted(name)} = NULL" for name in soft.payload(schema))
        marks = [_bound(soft.marks.column(name)) for name in ("offset", "timestamp", "key", "purged")]
        for is_purged, sets in ((False, stamps), (True, stamps + emptied)):
            statement = f"UPDATE {quoted(self.table)} SET {sets} WHERE {quoted(names.key)} = ?"  # noqa: S608
            self.connection.executemany(statement, [row[:3] for row in zip(*marks, strict=True) if row[3] is is_purged])

    def _inserted(self, table: str, rows: pa.Table, key: str | None) -> None:
        names = [quoted(name) for name in rows.column_names]
        conflict = ""
        if key is not None:
            sets = ", ".join(f"{name} = excluded.{name}" for name in names if name != quoted(key))
            conflict = f" ON CONFLICT ({quoted(key)}) DO UPDATE SET {sets}"
        places = ", ".join("?" for _ in names)
        statement = f"INSERT INTO {quoted(table)} ({', '.join(names)}) VALUES ({places}){conflict}"  # noqa: S608
        for batch in rows.to_batches():
            columns = [_bound(pa.chunked_array([column])) for column in batch.columns]
            self.connection.executemany(statement, zip(*columns, strict=True))

    def put_dead_letters(self, bad: pa.Table, *, removed_from: int | None) -> None:
        """Add dead letters to their own table, which is created if it is missing."""
        if not bad.num_rows and removed_from is None:
            return
        name = self.table + DEAD_LETTERS
        expected = {field.name: sqlite_type(field) for field in BAD_SCHEMA}
        found = self._columns(name)
        if not found:
            self.connection.execute(
                f"CREATE TABLE {quoted(name)} ({definitions(STORED_LETTERS, 'offset', sqlite_type)})"
            )
        elif any(one not in found or found[one].kind != kind for one, kind in expected.items()):
            raise InvalidInput(f"The table {name} has other columns than dead letters have: rename it.")
        elif EXACT_TIME not in found:
            self.connection.execute(
                f"ALTER TABLE {quoted(name)} ADD COLUMN {EXACT_TIME} {sqlite_type(STORED_LETTERS.field(EXACT_TIME))}"
            )
        if found and removed_from is not None:
            self.connection.execute(f'DELETE FROM {quoted(name)} WHERE "offset" >= ?', [removed_from])  # noqa: S608
        self._inserted(name, storable_letters(bad), "offset")

    def has_letters(self) -> bool:
        """Whether there is a table of its dead letters."""
        return bool(self._columns(self.table + DEAD_LETTERS))

    def letters(self) -> pa.Table:
        """All dead letters of the table."""
        name = self.table + DEAD_LETTERS
        columns = ", ".join(quoted(column) for column in BAD_SCHEMA.names)
        known = self._columns(name)
        exact = EXACT_TIME if EXACT_TIME in known else "NULL"
        found = list(self.connection.execute(f"SELECT {columns}, {exact} FROM {quoted(name)}")) if known else []  # noqa: S608
        return letters_of(list(zip(*found, strict=True)) or [()] * len(STORED_LETTERS))

    def remove_letters(self, offsets: Sequence[int]) -> int:
        """Remove the dead letters of these offsets; returns how many there were."""
        statement = f'DELETE FROM {quoted(self.table + DEAD_LETTERS)} WHERE "offset" = ?'  # noqa: S608
        return self.connection.executemany(statement, zip(offsets, strict=True)).rowcount

    def pairs(self, offset: str, key: str | None, since: int) -> pa.Table:
        """Offset and key of the rows from an offset on."""
        columns = f"{quoted(offset)}, {'NULL' if key is None else quoted(key)}"
        statement = f"SELECT {columns} FROM {quoted(self.table)} WHERE {quoted(offset)} >= ?"  # noqa: S608
        return pairs_from(self.connection.execute(statement, [since]))

    def clear(self) -> None:
        """Delete all rows of the table."""
        self.connection.execute(f"DELETE FROM {quoted(self.table)}")  # noqa: S608

    def size(self) -> tuple[int, int]:
        """Rows of the table, and bytes of the whole file."""
        (rows,) = self.connection.execute(f"SELECT count(*) FROM {quoted(self.table)}").fetchone()  # noqa: S608
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        (size,) = self.connection.execute("PRAGMA page_size").fetchone()
        return rows, pages * size

    def compared(self, expected: Iterable[pa.Table], schema: pa.Schema) -> RowDifferences:
        """Compare the table with rows in a temporary one. Rows that differ in their number count as different."""
        columns = definitions(schema, None, sqlite_type)
        self.connection.execute(f"CREATE TEMPORARY TABLE strandline_expected ({columns})")
        for rows in expected:
            self._inserted("strandline_expected", rows, None)
        columns = ", ".join(quoted(name) for name in schema.names)
        ours, theirs = (
            f"SELECT {columns}, count(*) FROM {table} GROUP BY {columns}"  # noqa: S608
            for table in ("temp.strandline_expected", f"main.{quoted(self.table)}")
        )
        missing, extra = self._counted(f"{ours} EXCEPT {theirs}"), self._counted(f"{theirs} EXCEPT {ours}")
        return RowDifferences.counted(self.size()[0], missing, extra)

    def _counted(self, query: str) -> tuple[int, list[str]]:
        """The number of rows of a query, and the first ones."""
        (count,) = self.connection.execute(f"SELECT count(*) FROM ({query})").fetchone()  # noqa: S608
        first = self.connection.execute(f"{query} LIMIT {FIRST_DIFFERENCES}") if count else ()
        return count, [str(row[:-1]) for row in first]

    def store(self, row: CursorRow, before: CursorRow | None) -> bool:
        """Replace the cursor row, unless another follower has replaced it."""
        self.connection.execute(
            f"CREATE TABLE IF NOT EXISTS {CURSORS} (target TEXT PRIMARY KEY COLLATE NOCASE, name TEXT NOT NULL, "
            "log_id TEXT NOT NULL, cursor TEXT NOT NULL, next INTEGER NOT NULL, epoch INTEGER NOT NULL, "
            "identity TEXT NOT NULL, mode TEXT NOT NULL, columns TEXT NOT NULL, start INTEGER NOT NULL, "
            "commit_id TEXT NOT NULL)"
        )
        values: list[Any] = [
            *(row.name, str(row.cursor.log_id), str(row.cursor), row.cursor.next, row.epoch),
            *(row.identity, row.mode, encoded_columns(row), row.start, row.commit_id, self.table),
        ]
        if before is None:
            done = self.connection.execute(
                f"INSERT OR IGNORE INTO {CURSORS} (name, log_id, cursor, next, epoch, identity, mode, columns, start, "  # noqa: S608
                "commit_id, target) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
        else:
            done = self.connection.execute(
                f"UPDATE {CURSORS} SET name = ?, log_id = ?, cursor = ?, next = ?, epoch = ?, identity = ?, "  # noqa: S608
                "mode = ?, columns = ?, start = ?, commit_id = ? WHERE target = ? AND next = ? AND epoch = ?",
                [*values, before.cursor.next, before.epoch],
            )
        return done.rowcount == 1


def _bound(column: pa.ChunkedArray) -> list[Any]:
    """Values as SQLite takes them."""
    kind = column.type
    if is_nested(kind):
        column = as_json(column)
    elif pt.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", "UTC" if kind.tz else None), safe=False).cast(pa.string())
    elif pt.is_temporal(kind) or pt.is_decimal(kind) or pt.is_uint64(kind):
        column = column.cast(pa.string())
    elif pt.is_floating(kind):
        column = pc.cast(column, pa.float64())
    return list(column.to_pylist())
