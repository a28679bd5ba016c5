"""Statements of one transaction in PostgreSQL: rows are copied into temporary tables, and merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from strandline.errors import InvalidInput, MissingExtra
from strandline.tables.maintain.comparison import FIRST_DIFFERENCES, RowDifferences
from strandline.tables.maintain.replay import pairs_from
from strandline.tables.rows.shape import BAD_SCHEMA
from strandline.tables.sql.changes import SoftDeletes, TableChanges
from strandline.tables.sql.columns import (
    CURSORS,
    DEAD_LETTERS,
    EXACT_TIME,
    STORED_LETTERS,
    definitions,
    letters_of,
    quoted,
    storable_letters,
)
from strandline.tables.sql.copy_format import copy_data
from strandline.tables.sql.postgres_types import letter_type, postgres_type, server_cast, staged_column
from strandline.tables.sql.state import COLUMNS, CursorRow, SeenColumn, SeenTable, decoded_row, encoded_columns

if TYPE_CHECKING:
    import psycopg

_LOCK_KEY: Final = 0x7374726E  # this package's advisory locks


@dataclass(slots=True)
class PostgresTransaction:
    """One transaction; see :class:`~strandline.tables.sql.database.SqlTransaction`."""

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

    def read_table(self) -> SeenTable:
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
        self.run(f"CREATE TABLE {self._named()} ({definitions(changes.schema, changes.primary, postgres_type)})")
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
        values = ", ".join(f"{quoted(field.name)}{server_cast(field, is_plain=is_plain)}" for field in schema)
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
        expected = {field.name: letter_type(field) for field in BAD_SCHEMA}
        found = self._columns(named)
        if not found:
            self.run(f"CREATE TABLE {named} ({definitions(STORED_LETTERS, 'offset', letter_type)})")
        elif any(name not in found or found[name].kind != kind for name, kind in expected.items()):
            raise InvalidInput(f"The table {named} has other columns than dead letters have: rename it.")
        elif EXACT_TIME not in found:
            self.run(f"ALTER TABLE {named} ADD COLUMN {EXACT_TIME} {letter_type(STORED_LETTERS.field(EXACT_TIME))}")
        if found and removed_from is not None:
            self.run(f'DELETE FROM {named} WHERE "offset" >= $1', removed_from)  # noqa: S608
        if bad.num_rows:
            self._copied("strandline_letters", storable_letters(bad))
            self._inserted("strandline_letters", named, STORED_LETTERS, "offset", is_plain=True)

    def has_letters(self) -> bool:
        """Whether there is a table of its dead letters."""
        return bool(self._columns(self._named(DEAD_LETTERS)))

    def letters(self) -> pa.Table:
        """All dead letters of the table. Times as numbers: Python's have fewer years than PostgreSQL's."""
        found: list[Any] = []
        if self.has_letters():
            times = '(extract(epoch FROM "timestamp") * 1000000)::bigint'
            columns = ", ".join(times if name == "timestamp" else quoted(name) for name in BAD_SCHEMA.names)
            exact = EXACT_TIME if EXACT_TIME in self._columns(self._named(DEAD_LETTERS)) else "NULL"
            found = self.run(f"SELECT {columns}, {exact} FROM {self._named(DEAD_LETTERS)}").fetchall()  # noqa: S608
        return letters_of(list(zip(*found, strict=True)) or [()] * len(STORED_LETTERS))

    def remove_letters(self, offsets: Sequence[int]) -> int:
        """Remove the dead letters of these offsets; returns how many there were."""
        statement = f'DELETE FROM {self._named(DEAD_LETTERS)} WHERE "offset" = ANY($1)'  # noqa: S608
        return self.run(statement, list(offsets)).rowcount

    def pairs(self, offset: str, key: str | None, since: int) -> pa.Table:
        """Offset and key of the rows from an offset on."""
        columns = f"{quoted(offset)}, {'NULL::bytea' if key is None else quoted(key)}"
        statement = f"SELECT {columns} FROM {self._named()} WHERE {quoted(offset)} >= $1"  # noqa: S608
        return pairs_from(self.run(statement, since))

    def clear(self) -> None:
        """Delete all rows of the table. Others see them until the commit, which TRUNCATE does not promise."""
        self.run(f"DELETE FROM {self._named()}")  # noqa: S608

    def size(self) -> tuple[int, int]:
        """Rows of the table, and its bytes with those of its indexes."""
        (rows,) = self.run(f"SELECT count(*) FROM {self._named()}").fetchone() or (0,)  # noqa: S608
        (size,) = self.run("SELECT pg_total_relation_size(to_regclass($1))", self._named()).fetchone() or (0,)
        return rows, size

    def compared(self, expected: Iterable[pa.Table], schema: pa.Schema) -> RowDifferences:
        """Compare the table with rows in a temporary one."""
        self._copied("strandline_expected", schema.empty_table())
        for rows in expected:
            self._copy("strandline_expected", _staged(rows))
        columns = ", ".join(quoted(name) for name in schema.names)
        values = ", ".join(f"{quoted(field.name)}{server_cast(field, is_plain=False)}" for field in schema)
        ours = f"SELECT {values} FROM strandline_expected"  # noqa: S608
        theirs = f"SELECT {columns} FROM {self._named()}"  # noqa: S608
        missing, extra = self._counted(f"{ours} EXCEPT ALL {theirs}"), self._counted(f"{theirs} EXCEPT ALL {ours}")
        return RowDifferences.counted(self.size()[0], missing, extra)

    def _counted(self, query: str) -> tuple[int, list[str]]:
        """The number of rows of a query, and the first ones."""
        (count,) = self.run(f"SELECT count(*) FROM ({query}) differing").fetchone() or (0,)  # noqa: S608
        first = self.run(f"{query} LIMIT {FIRST_DIFFERENCES}") if count else ()
        return count, [str(row) for row in first]

    def store(self, row: CursorRow, before: CursorRow | None) -> bool:
        """Replace the cursor row, unless another follower has replaced it."""
        self.run(
            f"CREATE TABLE IF NOT EXISTS {self._cursors()} (target text PRIMARY KEY, name text NOT NULL, "
            "log_id uuid NOT NULL, cursor text NOT NULL, next bigint NOT NULL, epoch bigint NOT NULL, "
            "identity text NOT NULL, mode text NOT NULL, columns text NOT NULL, start bigint NOT NULL, "
            "commit_id text NOT NULL)"
        )
        values = (
            *(self.table, row.name, row.cursor.log_id, str(row.cursor), row.cursor.next, row.epoch),
            *(row.identity, row.mode, encoded_columns(row), row.start, row.commit_id),
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

    def _named(self, suffix: str = "") -> str:
        return f"{quoted(self.schema)}.{quoted(self.table + suffix)}"

    def _cursors(self) -> str:
        return f"{quoted(self.schema)}.{CURSORS}"


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
