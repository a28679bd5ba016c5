"""Tables in PostgreSQL, through ``psycopg``: rows are copied into temporary tables, and merged in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import DiskFull, InvalidInput, MissingExtra, StorageError, TransientStorageError
from strandline.model.arguments import Named, Secret, anything, checked
from strandline.storage.fork_check import Origin, bound_to_process
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
from strandline.tables.sql.copy_format import EPOCH_DAYS, EPOCH_MICROSECONDS, copy_data
from strandline.tables.sql.sink import SoftDeletes, SqlSink, TableChanges
from strandline.tables.sql.state import COLUMNS, CursorRow, SeenColumn, SeenTable, decoded_row, encoded_schema

if TYPE_CHECKING:
    import psycopg

LONGEST_KEY: Final = 2_600
"""Bytes of a key in a table of the latest values: a primary key of PostgreSQL holds no more."""
LOCK_SECONDS: Final = 30
IDLE_SECONDS: Final = 60
"""The server rolls back a transaction whose client has been silent for so long: a follower that was suspended holds no
lock for ever."""

_LONGEST_NAME: Final = 63
_SYSTEM_COLUMNS: Final = frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"})
_EARLIEST: Final = -211_813_488_000_000_000 + EPOCH_MICROSECONDS
_DAYS: Final = (-2_451_545 + EPOCH_DAYS, 2_145_031_948 + EPOCH_DAYS)
_NUL_IN_JSON: Final = r"(^|[^\\])(\\\\)*\\u0000"
_LOCK_KEY: Final = 0x7374726E  # this package's advisory locks
_PLAIN: Final[tuple[tuple[Callable[[Any], bool], str], ...]] = (
    (pt.is_boolean, "boolean"),
    (pt.is_int8, "smallint"),
    (pt.is_uint8, "smallint"),
    (pt.is_int16, "smallint"),
    (pt.is_uint16, "integer"),
    (pt.is_int32, "integer"),
    (pt.is_uint32, "bigint"),
    (pt.is_int64, "bigint"),
    (pt.is_uint64, "numeric(20,0)"),
    (pt.is_float16, "real"),
    (pt.is_float32, "real"),
    (pt.is_float64, "double precision"),
    (pt.is_string, "text"),
    (pt.is_large_string, "text"),
    (pt.is_binary, "bytea"),
    (pt.is_large_binary, "bytea"),
    (pt.is_date, "date"),
    (pt.is_time, "time without time zone"),
    (is_nested, "jsonb"),
)


def postgres_type(field: pa.Field) -> str:
    """The type of a column, as PostgreSQL spells it."""
    kind = field.type
    if pt.is_timestamp(kind):
        return f"timestamp {'with' if kind.tz else 'without'} time zone"
    if pt.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    for is_it, name in _PLAIN:
        if is_it(kind):
            return name
    raise refused(field, "PostgreSQL")


@bound_to_process(close=("close",))
@checked
class PostgresSink(SqlSink):
    """A table in PostgreSQL that follows a log: rows, dead letters and cursor are one transaction.

    ``mode="latest"`` keeps one row per key, the newest by offset; deletes and purges remove it
    (``soft_deletes``: mark it). ``mode="append"`` keeps every change. ``value`` decodes values into typed columns; new
    fields add columns. A record that has no row, such as one that cannot be decoded, is ``BadRecord``, or a row of
    ``<table>_dead_letters`` with ``dead_letters=True``; more than ``max_bad_share`` of a commit's records stop it.

    The cursor is a row of ``strandline_cursors`` in the same schema. A follower that another one has replaced is
    ``Fenced`` and changes nothing; a table that was dropped, re-created or altered is ``Diverged``. Other programs may
    read, create indexes and add columns that may be null; rows that they change are not noticed.
    """

    def __init__(
        self,
        dsn: Secret,
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
    ) -> None:
        """The table ``table`` or ``schema.table``, created by the first apply, in the database that ``dsn`` names.

        ``dsn`` is a connection string or address of PostgreSQL; what it omits comes from the usual variables
        (``PGHOST``, ``PGPASSWORD``, ...).
        """
        shape = TableShape(mode, fixed(value), as_key(key), transform, soft_deletes)
        self.mode = mode
        """The kind of the table."""
        self._table = table
        self._name = name
        self._postgres = PostgresDatabase(dsn, table)
        super().__init__(
            *(self._postgres, shape, table, name), value=value, dead_letters=dead_letters, max_bad_share=max_bad_share
        )
        self._origin = Origin(f"The sink of the table {table}", self, advice="make it again there")

    def __repr__(self) -> str:
        return f"PostgresSink(table={self._table!r}, mode={self.mode!r}, name={self._name!r})"

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
        check_names(schema.names, longest=_LONGEST_NAME, reserved=_SYSTEM_COLUMNS)
        for field in schema:
            postgres_type(field)

    def unfit(self, rows: pa.Table, key: str | None) -> Iterator[tuple[pa.ChunkedArray, str]]:
        """Values that PostgreSQL cannot hold: NUL in texts, times before its calendar, keys too long for an index."""
        if key is not None:
            sizes = pc.binary_length(rows.column(key))
            yield pc.greater(sizes, LONGEST_KEY), f"Its key is longer than the {LONGEST_KEY} bytes of a primary key."
        for field in rows.schema:
            column, kind = rows.column(field.name), field.type
            mask = None
            if pt.is_string(kind) or pt.is_large_string(kind):
                mask = pc.match_substring(column, "\0")
            elif is_nested(kind) and column.null_count < len(column):
                mask = pc.match_substring_regex(as_json(column), _NUL_IN_JSON)
            elif pt.is_timestamp(kind):
                mask = pc.less(column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64()), _EARLIEST)
            elif pt.is_date(kind):
                days = column.cast(pa.date32()).cast(pa.int32())
                mask = pc.or_(pc.less(days, _DAYS[0]), pc.greater_equal(days, _DAYS[1]))
            if mask is not None:
                yield pc.fill_null(mask, False), f"PostgreSQL cannot store the value of its field {field.name!r}."

    def look(self) -> SeenTable:
        """The table as it is now."""
        with self._transaction() as session:
            return session.look()

    @contextlib.contextmanager
    def reading(self) -> Iterator[PostgresSession]:
        """A transaction that sees one state of all tables."""
        with self._transaction() as session:
            session.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            yield session

    @contextlib.contextmanager
    def writing(self, *, is_long: bool = False) -> Iterator[PostgresSession]:
        """A transaction, whose commit is on the server's disk when the block has ended."""
        with self._transaction() as session:
            session.run(
                "SELECT set_config('synchronous_commit', 'on', true) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
            session.run(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
            session.run(f"SET LOCAL idle_in_transaction_session_timeout = '{0 if is_long else IDLE_SECONDS}s'")
            yield session

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[PostgresSession]:
        with self._named_errors():
            connection = self._connected()
            with connection.transaction():
                yield PostgresSession(connection, self._schema, self._table)

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


@dataclass(slots=True)
class PostgresSession:
    """One transaction; see :class:`~strandline.tables.sql.sink.Session`."""

    connection: psycopg.Connection[Any]
    schema: str
    table: str

    def run(self, statement: str, *values: Any) -> psycopg.Cursor[Any]:
        """Run one statement, whose values are ``$1``, ``$2``, ...: names in it may hold any letter."""
        cursor: psycopg.Cursor[Any] = psycopg_library().RawCursor(self.connection)
        cursor.execute(statement, values or None)
        return cursor

    def stage(self, changes: TableChanges) -> None:
        """Copy the rows into temporary tables: only this transaction sees them, and no lock is held meanwhile."""
        self._copied("strandline_puts", changes.puts)
        if len(changes.deleted):
            self._copied("strandline_deletes", pa.table({"key": changes.deleted}))
        if changes.soft is not None:
            self._copied("strandline_marks", changes.soft.marks)

    def lock(self) -> None:
        """One follower at a time commits to the table; nobody drops or alters it meanwhile."""
        self.run("SELECT pg_advisory_xact_lock($1, hashtext($2))", _LOCK_KEY, f"{self.schema}.{self.table}")
        if self.run("SELECT to_regclass($1)", self._named()).fetchone() != (None,):
            self.run(f"LOCK TABLE {self._named()} IN ROW EXCLUSIVE MODE")

    def look(self) -> SeenTable:
        """The table, its columns, and its cursor row."""
        found = self.run("SELECT oid::bigint, relkind FROM pg_class WHERE oid = to_regclass($1)", self._named())
        table = found.fetchone()
        row = self._row()
        if table is None:
            return SeenTable(None, {}, row)
        if table[1] not in ("r", "p"):
            raise InvalidInput(f"{self.schema}.{self.table} is no plain table: follow into a table of its own.")
        return SeenTable(str(table[0]), self._columns(self._named()), row)

    def _columns(self, named: str) -> dict[str, SeenColumn]:
        found = self.run(
            "SELECT attname, format_type(atttypid, atttypmod), NOT attnotnull OR atthasdef OR attidentity <> '' "
            "FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
            named,
        )
        return {name: SeenColumn(kind, is_optional) for name, kind, is_optional in found}

    def _row(self) -> CursorRow | None:
        if self.run("SELECT to_regclass($1)", self._cursors()).fetchone() == (None,):
            return None
        found = self.run(
            f"SELECT {COLUMNS} FROM {self._cursors()} WHERE target = $1",  # noqa: S608
            self.table,
        ).fetchone()
        return None if found is None else decoded_row(found)

    def create(self, changes: TableChanges) -> str:
        """Create the table; its object id is its identity."""
        self.run(f"CREATE TABLE {self._named()} ({_definitions(changes.schema, changes.primary)})")
        (identity,) = self.run("SELECT to_regclass($1)::oid::bigint", self._named()).fetchone() or (None,)
        return str(identity)

    def alter(self, changes: TableChanges) -> None:
        """Add and widen columns."""
        for field in changes.columns.added:
            self.run(f"ALTER TABLE {self._named()} ADD COLUMN {quoted(field.name)} {postgres_type(field)}")
        for field in changes.columns.retyped:
            self.run(f"ALTER TABLE {self._named()} ALTER COLUMN {quoted(field.name)} TYPE {postgres_type(field)}")

    def merge(self, changes: TableChanges) -> None:
        """Put and delete the staged rows."""
        if len(changes.deleted) and changes.key is not None:
            self.run(
                f"DELETE FROM {self._named()} t USING strandline_deletes d WHERE t.{quoted(changes.key)} = d.key"  # noqa: S608
            )
        if changes.puts.num_rows:
            self._inserted("strandline_puts", self._named(), changes.schema, changes.key)
        if changes.soft is not None and changes.soft.marks.num_rows:
            self._mark(changes.soft, changes.schema)

    def _mark(self, soft: SoftDeletes, schema: pa.Schema) -> None:
        names = soft.names
        stamps = f'{quoted(names.deleted)} = true, {quoted(names.offset)} = m."offset", '
        stamps += f'{quoted(names.timestamp)} = m."timestamp"'
        emptied = "".join(f", {quoted(name)} = NULL" for name in soft.payload(schema))
        for is_purged, sets in (("NOT m.purged", stamps), ("m.purged", stamps + emptied)):
            self.run(
                f"UPDATE {self._named()} t SET {sets} FROM strandline_marks m "  # noqa: S608
                f"WHERE t.{quoted(names.key)} = m.key AND {is_purged}"
            )

    def _inserted(self, staged: str, into: str, schema: pa.Schema, key: str | None, *, is_plain: bool = False) -> None:
        columns = ", ".join(quoted(name) for name in schema.names)
        values = ", ".join(f"{quoted(field.name)}{_cast(field, is_plain=is_plain)}" for field in schema)
        conflict = ""
        if key is not None:
            others = [quoted(name) for name in schema.names if name != key]
            conflict = f" ON CONFLICT ({quoted(key)}) DO UPDATE SET " + ", ".join(
                f"{name} = excluded.{name}" for name in others
            )
        self.run(f"INSERT INTO {into} ({columns}) SELECT {values} FROM {staged}{conflict}")  # noqa: S608

    def put_dead_letters(self, bad: pa.Table, *, removed_from: int | None) -> None:
        """Add dead letters to their own table, which is created if it is missing."""
        if not bad.num_rows and removed_from is None:
            return
        named = self._named(DEAD_LETTERS)
        expected = {field.name: _letter_type(field) for field in BAD_SCHEMA}
        found = self._columns(named)
        if not found:
            self.run(f"CREATE TABLE {named} ({_definitions(BAD_SCHEMA, 'offset', _letter_type)})")
        elif any(name not in found or found[name].kind != kind for name, kind in expected.items()):
            raise InvalidInput(f"The table {named} has other columns than dead letters have: rename it.")
        elif removed_from is not None:
            self.run(f'DELETE FROM {named} WHERE "offset" >= $1', removed_from)  # noqa: S608
        if bad.num_rows:
            self._copied("strandline_letters", bad)
            self._inserted("strandline_letters", named, BAD_SCHEMA, "offset", is_plain=True)

    def clear(self) -> None:
        """Delete all rows of the table. Others see them until the commit, which TRUNCATE does not promise."""
        self.run(f"DELETE FROM {self._named()}")  # noqa: S608

    def size(self) -> tuple[int, int]:
        """Rows of the table, and its bytes with those of its indexes."""
        (rows,) = self.run(f"SELECT count(*) FROM {self._named()}").fetchone() or (0,)  # noqa: S608
        (size,) = self.run("SELECT pg_total_relation_size(to_regclass($1))", self._named()).fetchone() or (0,)
        return rows, size

    def compared(self, expected: pa.Table) -> RowDifferences:
        """Compare the table with rows in a temporary one."""
        self._copied("strandline_expected", expected)
        columns = ", ".join(quoted(name) for name in expected.column_names)
        values = ", ".join(f"{quoted(field.name)}{_cast(field, is_plain=False)}" for field in expected.schema)
        ours = f"SELECT {values} FROM strandline_expected"  # noqa: S608
        theirs = f"SELECT {columns} FROM {self._named()}"  # noqa: S608
        missing = [str(row) for row in self.run(f"{ours} EXCEPT ALL {theirs}")]
        extra = [str(row) for row in self.run(f"{theirs} EXCEPT ALL {ours}")]
        return RowDifferences(self.size()[0], missing, extra)

    def store(self, row: CursorRow, before: CursorRow | None) -> bool:
        """Replace the cursor row, if nobody else has."""
        self.run(
            f"CREATE TABLE IF NOT EXISTS {self._cursors()} (target text PRIMARY KEY, name text NOT NULL, "
            "log_id uuid NOT NULL, cursor text NOT NULL, next bigint NOT NULL, epoch bigint NOT NULL, "
            "identity text NOT NULL, mode text NOT NULL, columns text NOT NULL, start bigint NOT NULL, "
            "commit_id text NOT NULL)"
        )
        values = (
            *(self.table, row.name, row.cursor.log_id, str(row.cursor), row.cursor.next, row.epoch),
            *(row.identity, row.mode, encoded_schema(row.schema), row.start, row.commit_id),
        )
        if before is None:
            done = self.run(
                f"INSERT INTO {self._cursors()} VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) "  # noqa: S608
                "ON CONFLICT DO NOTHING",
                *values,
            )
        else:
            done = self.run(
                f"UPDATE {self._cursors()} SET name = $2, log_id = $3, cursor = $4, next = $5, epoch = $6, "  # noqa: S608
                "identity = $7, mode = $8, columns = $9, start = $10, commit_id = $11 "
                "WHERE target = $1 AND next = $12 AND epoch = $13",
                *values,
                before.cursor.next,
                before.epoch,
            )
        return done.rowcount == 1

    def _copied(self, name: str, rows: pa.Table) -> None:
        staged = pa.table([_staged(column) for column in rows.columns], rows.column_names)
        columns = ", ".join(f"{quoted(field.name)} {_staged_type(field)}" for field in staged.schema)
        self.run(f"DROP TABLE IF EXISTS pg_temp.{name}")
        self.run(f"CREATE TEMPORARY TABLE {name} ({columns}) ON COMMIT DROP")
        cursor = psycopg_library().RawCursor(self.connection)
        with cursor.copy(f"COPY {name} FROM STDIN (FORMAT binary)") as copy:
            for piece in copy_data(staged):
                copy.write(piece)

    def _named(self, suffix: str = "") -> str:
        return f"{quoted(self.schema)}.{quoted(self.table + suffix)}"

    def _cursors(self) -> str:
        return f"{quoted(self.schema)}.{CURSORS}"


def _definitions(schema: pa.Schema, primary: str | None, type_of: TypeOf = postgres_type) -> str:
    columns = [
        f"{quoted(field.name)} {type_of(field)}{'' if field.nullable and field.name != primary else ' NOT NULL'}"
        for field in schema
    ]
    return ", ".join([*columns, *([f"PRIMARY KEY ({quoted(primary)})"] if primary is not None else [])])


def _letter_type(field: pa.Field) -> str:
    """Headers of dead letters stay text: PostgreSQL's JSON refuses what they may hold."""
    return "text" if is_nested(field.type) else postgres_type(field)


def _is_text_staged(kind: pa.DataType) -> bool:
    return bool(is_nested(kind) or pt.is_decimal(kind) or pt.is_uint64(kind))


def _staged(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column that binary COPY takes: what has no simple binary form is text, and converted by the server."""
    kind = column.type
    if is_nested(kind):
        return as_json(column)
    if _is_text_staged(kind):
        return column.cast(pa.string())
    return column.cast(pa.float32()) if pt.is_float16(kind) else column


def _staged_type(field: pa.Field) -> str:
    return postgres_type(field)


def _cast(field: pa.Field, *, is_plain: bool) -> str:
    return f"::{postgres_type(field)}" if _is_text_staged(field.type) and not is_plain else ""


def _sentence(error: BaseException) -> str:
    """The first line of the server's message: the others repeat values."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def psycopg_library() -> Any:
    """The library, or ``MissingExtra``."""
    try:
        import psycopg
        import psycopg.conninfo
    except ImportError as error:
        raise MissingExtra("PostgreSQL needs the extra 'postgres': pip install 'strandline[postgres]'.") from error
    return psycopg
