"""Statements of one transaction in PostgreSQL: rows are copied into temporary tables, and merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from strandline.errors import InvalidInput, MissingExtra
from strandline.tables.maintain.comparison import RowDifferences
from strandline.tables.sql.columns import (
    CURSORS,
    DEAD_LETTERS,
    STORED_LETTERS,
    definitions,
    quoted,
)
from strandline.tables.sql.copy_format import copy_data
from strandline.tables.sql.database import SqlTransaction, TableChanges
from strandline.tables.sql.postgres_types import letter_type, postgres_type, server_cast, staged_column
from strandline.tables.sql.state import SeenColumn

if TYPE_CHECKING:
    import psycopg

_LOCK_KEY: Final = 0x7374726E  # this package's advisory locks


class PostgresTransaction(SqlTransaction):
    """One transaction; see :class:`~strandline.tables.sql.database.SqlTransaction`."""

    letter_time = '(extract(epoch FROM "timestamp") * 1000000)::bigint'  # Python's times have fewer years
    no_key = "NULL::bytea"
    cursor_columns = (
        "target text PRIMARY KEY, name text NOT NULL, log_id uuid NOT NULL, cursor text NOT NULL, "
        "next bigint NOT NULL, epoch bigint NOT NULL, identity text NOT NULL, mode text NOT NULL, "
        "columns text NOT NULL, start bigint NOT NULL, commit_id text NOT NULL"
    )

    def __init__(self, connection: psycopg.Connection[Any], schema: str, table: str) -> None:
        self.connection, self.schema, self.table = connection, schema, table
        self.type_of, self.letter_type = postgres_type, letter_type
        self.cursors = f"{quoted(schema)}.{CURSORS}"

    def run(self, statement: str, *values: Any) -> psycopg.Cursor[Any]:
        """Run one statement."""
        cursor: psycopg.Cursor[Any] = psycopg_library().RawCursor(self.connection)
        cursor.execute(statement, values or None)
        return cursor

    def stage(self, changes: TableChanges) -> None:
        """Copy the rows into temporary tables: only this transaction sees them, and no lock is held meanwhile."""
        self._copied("strandline_puts", changes.puts)
        if changes.deleted is not None:
            self._copied("strandline_deletes", pa.table({"key": changes.deleted}))
        if changes.marks is not None:
            self._copied("strandline_marks", changes.marks)

    def lock(self) -> None:
        """One follower at a time commits to the table; nobody drops or alters it meanwhile."""
        self.run("SELECT pg_advisory_xact_lock($1, hashtext($2))", _LOCK_KEY, f"{self.schema}.{self.table}")
        if self.run("SELECT to_regclass($1)", self.named()).fetchone() != (None,):
            self.run(f"LOCK TABLE {self.named()} IN ROW EXCLUSIVE MODE")

    def identity(self) -> str | None:
        """The object id of the table."""
        statement = "SELECT oid::bigint, relkind FROM pg_class WHERE oid = to_regclass($1)"
        found = self.run(statement, self.named()).fetchone()
        if found is not None and found[1] not in ("r", "p"):
            raise InvalidInput(f"{self.schema}.{self.table} is no plain table: follow into a table of its own.")
        return None if found is None else str(found[0])

    def seen_columns(self, named: str) -> dict[str, SeenColumn]:
        """The columns of a table."""
        found = self.run(
            "SELECT attname, format_type(atttypid, atttypmod), NOT attnotnull OR atthasdef OR attidentity <> '' "
            "FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
            named,
        )
        return {name: SeenColumn(kind, is_optional) for name, kind, is_optional in found}

    def create(self, changes: TableChanges) -> str:
        """Create the table."""
        self.run(f"CREATE TABLE {self.named()} ({definitions(changes.schema, changes.primary, postgres_type)})")
        return str(self.identity())

    def ensure_cursors(self) -> None:
        """Create the table of cursors, if it is missing: one follower at a time, as IF NOT EXISTS alone is no lock."""
        if not self.seen_columns(self.cursors):
            self.run("SELECT pg_advisory_xact_lock($1, hashtext($2))", _LOCK_KEY, self.cursors)
            super().ensure_cursors()

    def describe(self, text: str) -> None:
        """Make it the comment on the table. Such a statement takes no parameters."""
        literal = text.replace("'", "''")
        self.run(f"COMMENT ON TABLE {self.named()} IS '{literal}'")

    def alter(self, changes: TableChanges) -> None:
        """Add and widen columns."""
        super().alter(changes)
        kept = (field for field in changes.schema if field.name in changes.before.names)
        for field in kept:
            if postgres_type(field) != postgres_type(changes.before.field(field.name)):
                self.run(f"ALTER TABLE {self.named()} ALTER COLUMN {quoted(field.name)} TYPE {postgres_type(field)}")

    def merge(self, changes: TableChanges) -> None:
        """Put and delete the staged rows."""
        if changes.deleted is not None and changes.key is not None:
            self.run(
                f"DELETE FROM {self.named()} t USING strandline_deletes d WHERE t.{quoted(changes.key)} = d.key"  # noqa: S608
            )
        if changes.puts.num_rows:
            self._inserted("strandline_puts", self.named(), changes.schema, changes.key)
        if changes.marks is not None and changes.marks.num_rows:
            mark = (f"m.{quoted(name)}" for name in changes.marks.column_names)
            self.run(self.marking(changes, "FROM strandline_marks m", *mark))

    def _inserted(self, staged: str, into: str, schema: pa.Schema, key: str | None, *, is_plain: bool = False) -> None:
        values = ", ".join(f"{quoted(field.name)}{server_cast(field, is_plain=is_plain)}" for field in schema)
        self.run(self.insertion(into, schema.names, f"SELECT {values} FROM {staged}", key))  # noqa: S608

    def insert_letters(self, letters: pa.Table) -> None:
        """Add dead letters to their table."""
        self._copied("strandline_letters", letters)
        self._inserted("strandline_letters", self.named(DEAD_LETTERS), STORED_LETTERS, "offset", is_plain=True)

    def remove_letters(self, offsets: Sequence[int]) -> int:
        """Remove the dead letters of these offsets; returns how many there were."""
        statement = f'DELETE FROM {self.named(DEAD_LETTERS)} WHERE "offset" = ANY($1)'  # noqa: S608
        return self.run(statement, list(offsets)).rowcount

    def stored_bytes(self) -> int:
        """Bytes of the table and of its indexes."""
        (size,) = self.run("SELECT pg_total_relation_size(to_regclass($1))", self.named()).fetchone() or (0,)
        return int(size)

    def compared(self, expected: Iterable[pa.Table], schema: pa.Schema) -> RowDifferences:
        """Compare the table with rows in a temporary one."""
        self._copied("strandline_expected", schema.empty_table())
        for rows in expected:
            self._copy("strandline_expected", _staged(rows))
        columns = ", ".join(quoted(name) for name in schema.names)
        values = ", ".join(f"{quoted(field.name)}{server_cast(field, is_plain=False)}" for field in schema)
        ours = f"SELECT {values} FROM strandline_expected"  # noqa: S608
        theirs = f"SELECT {columns} FROM {self.named()}"  # noqa: S608
        missing, extra = self.differing(f"{ours} EXCEPT ALL {theirs}"), self.differing(f"{theirs} EXCEPT ALL {ours}")
        return RowDifferences.counted(self.size()[0], missing, extra)

    def _copied(self, name: str, rows: pa.Table) -> None:
        staged = _staged(rows)
        columns = ", ".join(f"{quoted(field.name)} {postgres_type(field)}" for field in staged.schema)
        self.run(f"DROP TABLE IF EXISTS pg_temp.{name}")
        self.run(f"CREATE TEMPORARY TABLE {name} ({columns}) ON COMMIT DROP")
        self._copy(name, staged)

    def _copy(self, name: str, staged: pa.Table) -> None:
        cursor = psycopg_library().RawCursor(self.connection)
        with cursor.copy(f"COPY {name} FROM STDIN (FORMAT binary)") as copy:
            for piece in copy_data(staged):
                copy.write(piece)

    def named(self, suffix: str = "") -> str:
        """The name of the table, or of one beside it."""
        return f"{quoted(self.schema)}.{quoted(self.table + suffix)}"


def _staged(rows: pa.Table) -> pa.Table:
    return pa.table([staged_column(column) for column in rows.columns], rows.column_names)


def psycopg_library() -> Any:
    """The library, or ``MissingExtra``."""
    try:
        import psycopg
        import psycopg.conninfo
    except ImportError as error:
        raise MissingExtra("PostgreSQL needs the extra 'postgres': pip install 'strandline[postgres]'.") from error
    return psycopg
