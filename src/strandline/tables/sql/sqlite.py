"""Tables in SQLite: a file of this machine, for services that keep their state in it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal
from urllib.parse import quote

import pyarrow as pa
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
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import Named, checked, is_text
from strandline.storage.disk import exists, make_own_folder
from strandline.storage.env import SYSTEM, Env
from strandline.tables.rows.logged import Value, shape_of
from strandline.tables.rows.tombstones import Tombstones
from strandline.tables.sql.columns import TypeOf, check_columns, times_outside
from strandline.tables.sql.sink import SqlSink
from strandline.tables.sql.sqlite_transaction import TIMES, SqliteTransaction, sqlite_type
from strandline.tables.sql.state import REMEDY, SeenTable

LOCK_SECONDS: Final = 30.0
_MOST_COLUMNS: Final = 2_000


@checked
class SqliteSink(SqlSink):
    """A table in a SQLite file that follows a log: rows, dead letters and cursor are one transaction.

    The options, and what other programs may do with the table, are those of
    :class:`~strandline.tables.sql.postgres.PostgresSink`; the table ``strandline_cursors`` is in the same file.

    >>> import tempfile, strandline as sl
    >>> log = sl.open("memory://doctest-sqlite", create=True)
    >>> with log.producer() as producer:
    ...     _ = producer.append(key=b"k", value=b"v").result(timeout=10)
    >>> file = tempfile.mkdtemp() + "/orders.db"
    >>> sl.follow(log, sl.SqliteSink(file, table="orders"), upto="end").next
    1
    >>> sqlite3.connect(file).execute("SELECT key, value FROM orders").fetchall()
    [(b'k', b'v')]
    """

    def __init__(
        self,
        path: Address,
        *,
        table: Named,
        mode: Literal["latest", "marked", "append"] = "latest",
        value: Value | None = None,
        key: str | Sequence[str] = (),
        tombstones: Tombstones | None = None,
        transform: Callable[[pa.Table], pa.Table] | None = None,
        dead_letters: bool = False,
        max_bad_share: Any = 1.0,
        name: Named = "default",
        env: Env = SYSTEM,
    ) -> None:
        """The table ``table`` in the file ``path``; both are created by the first apply if they are missing."""
        self.path = as_folder(path)
        """The file of the database."""
        if not is_text(self.path):
            raise InvalidInput(f"{self.path!a} is not UTF-8, and the path of a database has to be: name another file.")
        if "\0" in table or table.lower().startswith("sqlite_"):
            raise InvalidInput(f"{table!r} cannot be the name of a table in SQLite: choose another.")
        shape = shape_of(mode, value, key, tombstones, transform)
        where = f"{table} in {self.path}"
        database = SqliteDatabase(self.path, table, env)
        super().__init__(
            *(database, shape, where, name), value=value, dead_letters=dead_letters, max_bad_share=max_bad_share
        )


class SqliteDatabase:
    """One table of a SQLite file. Each call opens the file: a file that was replaced is noticed, a fork is harmless."""

    type_of: TypeOf = staticmethod(sqlite_type)

    def __init__(self, path: str, table: str, env: Env) -> None:
        self._path = path
        self._table = table
        self._disk = env.disk

    def check_schema(self, schema: pa.Schema) -> None:
        """``SchemaRefused`` for columns that SQLite cannot have."""
        check_columns(schema, sqlite_type, "SQLite", _MOST_COLUMNS)

    def unfit(self, rows: pa.Table, key: str | None) -> Iterator[tuple[pa.ChunkedArray, str]]:
        """Times and dates of which there is no right text. NaN becomes null."""
        for field in rows.schema:
            if pt.is_timestamp(field.type) or pt.is_date(field.type):
                reason = f"The time of its field {field.name!r} is outside of the years -32767 to 32767."
                yield times_outside(rows.column(field.name), TIMES), reason

    def read_table(self) -> SeenTable:
        """The table as it is now."""
        if not self._is_there():
            return SeenTable(None, {}, None)
        with self.reading() as transaction:
            return transaction.read_table()

    @contextlib.contextmanager
    def reading(self) -> Iterator[SqliteTransaction]:
        """A transaction that sees one state of all tables."""
        with self._named_errors(), contextlib.closing(self._connected()) as connection:
            connection.execute("BEGIN")
            yield SqliteTransaction(connection, self._table)

    @contextlib.contextmanager
    def writing(self, *, is_long: bool = False) -> Iterator[SqliteTransaction]:
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
                transaction = SqliteTransaction(connection, self._table)
                try:
                    yield transaction
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            if self._file() != before:
                raise Diverged(f"The file {self._path} was replaced while it was committed to. {REMEDY}")

    def _is_there(self) -> bool:
        if os.path.isdir(self._path):  # noqa: PTH112 - text, as everywhere
            raise WrongKind(f"{self._path} is a folder, and a SQLite database is a file: choose another path.")
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
                raise WrongKind(f"The file {self._path} is no SQLite database: choose another path.") from error
            raise StorageError(f"The database {self._path} refused a statement: {error}.") from error
