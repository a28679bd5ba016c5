"""Tables in SQLite: a file of this machine, for services that keep their state in it."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import (
    AlreadyExists,
    DiskFull,
    Diverged,
    InvalidInput,
    StorageError,
    TransientStorageError,
    WrongKind,
)
from strandline.model.addresses import Address, as_folder, is_text
from strandline.model.arguments import Named, anything, checked
from strandline.storage.clock import CHANCE
from strandline.storage.disk import DISK, Disk, exists, make_own_folder
from strandline.tables.comparison import RowDifferences
from strandline.tables.logged import Value, fixed
from strandline.tables.shape import BAD_SCHEMA, TableShape, as_key
from strandline.tables.sql.columns import (
    CURSORS,
    DEAD_LETTERS,
    TypeOf,
    as_json,
    check_names,
    is_nested,
    quoted,
    refused,
)
from strandline.tables.sql.sink import SoftDeletes, SqlSink, TableChanges
from strandline.tables.sql.state import (
    COLUMNS,
    NO_TABLE,
    REMEDY,
    CursorRow,
    SeenColumn,
    SeenTable,
    decoded_row,
    encoded_schema,
)

LOCK_SECONDS: Final = 30.0
_MARK: Final = re.compile(r"/\* strandline ([0-9a-f-]{36}) \*/")
_MOST_COLUMNS: Final = 2_000


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


@checked
class SqliteSink(SqlSink):
    """A table in a SQLite file that follows a log: rows, dead letters and cursor are one transaction.

    ``mode="latest"`` keeps one row per key, the newest by offset; deletes and purges remove it
    (``soft_deletes``: mark it). ``mode="append"`` keeps every change. ``value`` decodes values into typed columns; new
    fields add columns. A record that has no row, such as one that cannot be decoded, is ``BadRecord``, or a row of
    ``<table>_dead_letters`` with ``dead_letters=True``; more than ``max_bad_share`` of a commit's records stop it.

    The cursor is a row of ``strandline_cursors`` in the same file. A follower that another one has replaced is
    ``Fenced`` and changes nothing; a table that was dropped, re-created or altered is ``Diverged``. Other programs may
    read, create indexes and add columns that may be null; rows that they change are not noticed.

    >>> import tempfile, strandline as sl
    >>> log = sl.open("memory://doctest-sqlite", create=True)
    >>> with log.producer() as producer:
    ...     _ = producer.append(key=b"k", value=b"v").result(timeout=10)
    >>> file = tempfile.mkdtemp() + "/orders.db"
    >>> sl.follow(log, sl.SqliteSink(file, table="orders"), until="end").next
    1
    >>> sqlite3.connect(file).execute("SELECT key, value FROM orders").fetchall()
    [(b'k', b'v')]
    """

    def __init__(
        self,
        path: Address,
        *,
        table: Named,
        mode: Literal["latest", "append"] = "latest",
        value: Value | None = None,
        key: str | Sequence[str] = (),
        transform: Callable[[pa.Table], pa.Table] | None = None,
        soft_deletes: bool = False,
        dead_letters: bool = False,
        max_bad_share: Annotated[Any, anything("a share between 0 and 1")] = 1.0,
        name: Named = "default",
        disk: Disk = DISK,
    ) -> None:
        """The table ``table`` in the file ``path``; both are created by the first apply if they are missing."""
        self.path = as_folder(path)
        """The file of the database."""
        if not is_text(self.path):
            raise InvalidInput(f"{self.path!a} is not UTF-8, and the path of a database has to be: name another file.")
        if "\0" in table or table.lower().startswith("sqlite_"):
            raise InvalidInput(f"{table!r} cannot be the name of a table in SQLite: choose another.")
        shape = TableShape(mode, fixed(value), as_key(key), transform, soft_deletes)
        self.mode = mode
        """The kind of the table."""
        self._table = table
        self._name = name
        where = f"{table} in {self.path}"
        database = SqliteDatabase(self.path, table, disk)
        super().__init__(
            *(database, shape, where, name), value=value, dead_letters=dead_letters, max_bad_share=max_bad_share
        )

    def __repr__(self) -> str:
        return f"SqliteSink({self.path!r}, table={self._table!r}, mode={self.mode!r}, name={self._name!r})"


class SqliteDatabase:
    """One table of a SQLite file. Each call opens the file: a file that was replaced is noticed, a fork is harmless."""

    type_of: TypeOf = staticmethod(sqlite_type)

    def __init__(self, path: str, table: str, disk: Disk) -> None:
        self._path = path
        self._table = table
        self._disk = disk

    def check_schema(self, schema: pa.Schema) -> None:
        """``SchemaRefused`` for columns that SQLite cannot have."""
        check_names(schema.names, longest=None, reserved=frozenset())
        for field in schema:
            sqlite_type(field)
        if len(schema) > _MOST_COLUMNS:
            raise InvalidInput(f"A table of SQLite has up to {_MOST_COLUMNS} columns, and this schema {len(schema)}.")

    def unfit(self, rows: pa.Table, key: str | None) -> Iterator[tuple[pa.ChunkedArray, str]]:
        """Nothing: SQLite stores whatever a record holds. NaN becomes null."""
        yield from ()

    def look(self) -> SeenTable:
        """The table as it is now."""
        if not self._is_there():
            return NO_TABLE
        with self._named_errors(), contextlib.closing(self._connected()) as connection:
            connection.execute("BEGIN")  # one state of all tables
            return SqliteSession(connection, self._table).look()

    @contextlib.contextmanager
    def reading(self) -> Iterator[SqliteSession]:
        """A transaction that sees one state of all tables."""
        with self._named_errors(), contextlib.closing(self._connected()) as connection:
            connection.execute("BEGIN")
            yield SqliteSession(connection, self._table)

    @contextlib.contextmanager
    def writing(self, *, is_long: bool = False) -> Iterator[SqliteSession]:
        """A transaction, which is on the disk when the block has ended."""
        del is_long  # a file has no server that ends silent transactions
        is_new = not self._is_there()
        if is_new:
            self._create()
        with self._named_errors():
            before = self._file()
            with contextlib.closing(self._connected()) as connection:
                if is_new:
                    connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                session = SqliteSession(connection, self._table)
                try:
                    yield session
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            if self._file() != before:
                raise Diverged(f"The file {self._path} was replaced while it was committed to. {REMEDY}")

    def _is_there(self) -> bool:
        if os.path.isdir(self._path):  # noqa: PTH112 - text, as everywhere
            raise WrongKind(f"{self._path} is a folder, and a SQLite database is a file: name another place.")
        return exists(self._path, disk=self._disk)

    def _create(self) -> None:
        """An empty file is an empty database. Made here, so that only its owner reads it, and its name is durable."""
        folder = os.path.dirname(self._path) or "."  # noqa: PTH120
        make_own_folder(folder, disk=self._disk)
        with contextlib.suppress(AlreadyExists):
            self._disk.write_new(self._path, [b""])
        self._disk.sync_folder(folder)

    def _file(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _connected(self) -> sqlite3.Connection:
        address = f"file:{quote(os.path.abspath(self._path))}?mode=rw"  # noqa: PTH100
        return sqlite3.connect(address, uri=True, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "full" in str(error):
                raise DiskFull(f"There is no room for the database {self._path}: {error}.") from error
            raise TransientStorageError(
                f"The database {self._path} could not be read or written, and stays at its cursor: {error}."
            ) from error
        except sqlite3.DatabaseError as error:
            if "not a database" in str(error):
                raise WrongKind(f"The file {self._path} is no SQLite database: name another place.") from error
            raise StorageError(f"The database {self._path} refused a statement: {error}.") from error


@dataclass(slots=True)
class SqliteSession:
    """One transaction; see :class:`~strandline.tables.sql.sink.Session`."""

    connection: sqlite3.Connection
    table: str

    def stage(self, changes: TableChanges) -> None:
        """Nothing: rows are inserted from memory."""

    def lock(self) -> None:
        """Only one process writes to the file."""
        self.connection.execute("BEGIN IMMEDIATE")

    def look(self) -> SeenTable:
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
        columns = _definitions(changes.schema, changes.primary)
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
            self.connection.execute(f"CREATE TABLE {quoted(name)} ({_definitions(BAD_SCHEMA, 'offset')})")
        elif any(one not in found or found[one].kind != kind for one, kind in expected.items()):
            raise InvalidInput(f"The table {name} has other columns than dead letters have: rename it.")
        elif removed_from is not None:
            self.connection.execute(f'DELETE FROM {quoted(name)} WHERE "offset" >= ?', [removed_from])  # noqa: S608
        self._inserted(name, bad, "offset")

    def clear(self) -> None:
        """Delete all rows of the table."""
        self.connection.execute(f"DELETE FROM {quoted(self.table)}")  # noqa: S608

    def size(self) -> tuple[int, int]:
        """Rows of the table, and bytes of the whole file."""
        (rows,) = self.connection.execute(f"SELECT count(*) FROM {quoted(self.table)}").fetchone()  # noqa: S608
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        (size,) = self.connection.execute("PRAGMA page_size").fetchone()
        return rows, pages * size

    def compared(self, expected: pa.Table) -> RowDifferences:
        """Compare the table with rows in a temporary one. Rows that differ in their number count as different."""
        self.connection.execute(f"CREATE TEMPORARY TABLE strandline_expected ({_definitions(expected.schema, None)})")
        self._inserted("strandline_expected", expected, None)
        columns = ", ".join(quoted(name) for name in expected.column_names)
        ours, theirs = (
            f"SELECT {columns}, count(*) FROM {table} GROUP BY {columns}"  # noqa: S608
            for table in ("temp.strandline_expected", f"main.{quoted(self.table)}")
        )
        missing = [str(row[:-1]) for row in self.connection.execute(f"{ours} EXCEPT {theirs}")]
        extra = [str(row[:-1]) for row in self.connection.execute(f"{theirs} EXCEPT {ours}")]
        return RowDifferences(self.size()[0], missing, extra)

    def store(self, row: CursorRow, before: CursorRow | None) -> bool:
        """Replace the cursor row, if nobody else has."""
        self.connection.execute(
            f"CREATE TABLE IF NOT EXISTS {CURSORS} (target TEXT PRIMARY KEY COLLATE NOCASE, name TEXT NOT NULL, "
            "log_id TEXT NOT NULL, cursor TEXT NOT NULL, next INTEGER NOT NULL, epoch INTEGER NOT NULL, "
            "identity TEXT NOT NULL, mode TEXT NOT NULL, columns TEXT NOT NULL, start INTEGER NOT NULL, "
            "commit_id TEXT NOT NULL)"
        )
        values: list[Any] = [
            *(row.name, str(row.cursor.log_id), str(row.cursor), row.cursor.next, row.epoch),
            *(row.identity, row.mode, encoded_schema(row.schema), row.start, row.commit_id, self.table),
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


def _definitions(schema: pa.Schema, primary: str | None) -> str:
    columns = [
        f"{quoted(field.name)} {sqlite_type(field)}{'' if field.nullable and field.name != primary else ' NOT NULL'}"
        for field in schema
    ]
    return ", ".join([*columns, *([f"PRIMARY KEY ({quoted(primary)})"] if primary is not None else [])])


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
