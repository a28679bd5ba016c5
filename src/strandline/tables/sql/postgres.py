"""Tables in PostgreSQL, through ``psycopg``: rows are copied into temporary tables, and merged in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import DiskFull, InvalidInput, StorageError, TransientStorageError
from strandline.model.arguments import Named, Secret, checked
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.tables.rows.logged import Value, shape_of
from strandline.tables.rows.tombstones import Tombstones
from strandline.tables.sql.columns import DEAD_LETTERS, TypeOf, check_columns, times_outside
from strandline.tables.sql.copy_format import EPOCH_DAYS, TIMES
from strandline.tables.sql.postgres_transaction import PostgresTransaction, psycopg_library
from strandline.tables.sql.postgres_types import LONGEST_ROW, are_too_long, has_no_json, postgres_type
from strandline.tables.sql.sink import SqlSink
from strandline.tables.sql.state import SeenTable

if TYPE_CHECKING:
    import psycopg

LONGEST_KEY: Final = 2_600
"""Bytes of a key in a table of the latest values: a primary key of PostgreSQL holds no more."""
LOCK_SECONDS: Final = 30
IDLE_SECONDS: Final = 60
"""Seconds of silence after which the server rolls a transaction back: a suspended follower keeps no lock."""

_LONGEST_NAME: Final = 63
_DAY: Final = 86_400_000_000
_MOST_COLUMNS: Final = 1_600
_SYSTEM_COLUMNS: Final = frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"})
_DAYS: Final = range((-2_451_545 + EPOCH_DAYS) * _DAY, (2_145_031_948 + EPOCH_DAYS) * _DAY)


@bound_to_process(close=("close",))
@checked
class PostgresSink(SqlSink):
    """A table in PostgreSQL that follows a log: rows, dead letters and cursor are one transaction.

    ``mode="latest"`` keeps one row per key, the newest by offset; deletes and purges remove it
    (``mode="marked"``: mark it). ``mode="append"`` keeps every change. ``value`` decodes values into typed columns; new
    fields add columns. ``key`` and ``tombstones`` are those of :class:`~strandline.tables.delta.sink.DeltaSink`. A
    record that has no row, such as one that cannot be decoded, is ``BadRecord``, or a row of ``<table>_dead_letters``
    with ``dead_letters=True``; more than ``max_bad_share`` of a commit's records stop it.

    The cursor is a row of ``strandline_cursors`` in the same schema. A follower that another one has replaced is
    ``Fenced`` and changes nothing; a table that was dropped, re-created or altered is ``Diverged``. Other programs may
    read, create indexes and add columns that may be null; rows that they change are not noticed.
    """

    def __init__(
        self,
        dsn: Secret,
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
    ) -> None:
        """The table ``table`` or ``schema.table``, created by the first apply, in the database that ``dsn`` names.

        ``dsn`` is a connection string or address of PostgreSQL; what it omits comes from the usual variables
        (``PGHOST``, ``PGPASSWORD``, ...).
        """
        shape = shape_of(mode, value, key, tombstones, transform)
        self._postgres = PostgresDatabase(dsn, table)
        super().__init__(
            *(self._postgres, shape, table, name), value=value, dead_letters=dead_letters, max_bad_share=max_bad_share
        )
        self._origin = Origin(f"The sink of the table {table}", self, advice="make it again there")

    def close(self) -> None:
        """Close the connection. Idempotent; the next call connects again."""
        with self._lock:
            self._postgres.close()


class PostgresDatabase:
    """One table of a PostgreSQL database, over one connection that is made when it is needed."""

    type_of: TypeOf = staticmethod(postgres_type)

    def __init__(self, dsn: str, table: str) -> None:
        schema, _, name = table.rpartition(".")
        longest = _LONGEST_NAME - len(DEAD_LETTERS)
        if "." in schema or not name or "\0" in table or len(name.encode()) > longest or (not schema and "." in table):
            raise InvalidInput(
                f"{table!r} names no table: write table or schema.table, with a name of up to {longest} bytes."
            )
        library = psycopg_library()
        try:
            library.conninfo.conninfo_to_dict(dsn)
        except library.Error as error:
            raise InvalidInput(
                "The connection string is not one of PostgreSQL: write 'host=… dbname=…', or postgresql://host/database."
            ) from error
        self._dsn = dsn
        self._schema = schema
        self._table = name
        self._connection: psycopg.Connection[Any] | None = None

    def check_schema(self, schema: pa.Schema) -> None:
        """``SchemaRefused`` for columns that PostgreSQL cannot have."""
        check_columns(schema, postgres_type, "PostgreSQL", _MOST_COLUMNS, _LONGEST_NAME, _SYSTEM_COLUMNS)

    def unfit(self, rows: pa.Table, key: str | None) -> Iterator[tuple[pa.ChunkedArray, str]]:
        """What PostgreSQL cannot hold: NUL in texts, times before its calendar, keys and rows that are too long."""
        if key is not None:
            sizes = pc.binary_length(rows.column(key))
            yield pc.greater(sizes, LONGEST_KEY), f"Its key is longer than the {LONGEST_KEY} bytes of a primary key."
        for field in rows.schema:
            column, kind = rows.column(field.name), field.type
            mask = None
            if pt.is_string(kind) or pt.is_large_string(kind):
                mask = pc.match_substring(column, "\0")
            elif pt.is_nested(kind) and column.null_count < len(column):
                mask = has_no_json(column)
            elif pt.is_timestamp(kind):
                mask = times_outside(column, TIMES)
            elif pt.is_date(kind):
                mask = times_outside(column, _DAYS)
            if mask is not None:
                yield pc.fill_null(mask, False), f"PostgreSQL cannot store the value of its field {field.name!r}."
        if (mask := are_too_long(rows)) is not None:
            yield mask, f"Its row is longer than the {LONGEST_ROW:,} bytes of one in PostgreSQL: use fewer fields."

    def read_table(self) -> SeenTable:
        """The table as it is now."""
        with self._transaction() as transaction:
            return transaction.read_table()

    @contextlib.contextmanager
    def reading(self) -> Iterator[PostgresTransaction]:
        """A transaction that sees one state of all tables."""
        with self._transaction() as transaction:
            transaction.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            yield transaction

    @contextlib.contextmanager
    def writing(self, *, is_long: bool = False) -> Iterator[PostgresTransaction]:
        """A transaction, whose commit is on the server's disk when the block has ended."""
        with self._transaction() as transaction:
            transaction.run(
                "SELECT set_config('synchronous_commit', 'on', true) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
            transaction.run(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
            transaction.run(f"SET LOCAL idle_in_transaction_session_timeout = '{0 if is_long else IDLE_SECONDS}s'")
            yield transaction

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[PostgresTransaction]:
        with self._named_errors():
            connection = self._connected()
            with connection.transaction():
                yield PostgresTransaction(connection, self._schema, self._table)

    def _connected(self) -> psycopg.Connection[Any]:
        connection = self._connection
        if connection is not None and not connection.closed:
            return connection
        # Not prepared: behind a connection pooler each transaction may be on another server process.
        connect = psycopg_library().connect
        made: psycopg.Connection[Any] = connect(self._dsn, autocommit=True, prepare_threshold=None)
        self._connection = made
        if not self._schema:
            (found,) = made.execute("SELECT current_schema()").fetchone() or (None,)
            if found is None:
                raise InvalidInput(f"The database has no current schema: name the table schema.{self._table}.")
            self._schema = found
        return made

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        errors = psycopg_library().errors
        try:
            yield
        except errors.DiskFull as error:
            raise DiskFull(f"The server of the table {self._table} has no room: {_sentence(error)}") from error
        except errors.ProgramLimitExceeded as error:  # an OperationalError, which no retry mends
            raise StorageError(
                f"A row or the table {self._table} is larger than PostgreSQL allows, and nothing was committed: "
                f"{_sentence(error)} Use fewer or shorter fields."
            ) from error
        except (errors.OperationalError, errors.InterfaceError) as error:
            self.close()  # whatever state it is in
            raise TransientStorageError(
                f"The table {self._table} could not be reached, or its commit not be confirmed: {_sentence(error)}"
            ) from error
        except errors.Error as error:
            raise StorageError(
                f"The database refused a statement on the table {self._table}, and nothing was committed: "
                f"{_sentence(error)}"
            ) from error


def _sentence(error: BaseException) -> str:
    """The first line of the server's message: the others repeat values."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
