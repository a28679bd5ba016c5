"""Columns of a table in a SQL database: their types, nested values as JSON text, and names that a database takes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import CorruptData, SchemaRefused
from strandline.tables.rows.shape import BAD_SCHEMA

TypeOf: TypeAlias = Callable[[pa.Field], str]
"""The type of a column in a database; ``SchemaRefused`` if it has none for it."""

EXACT_TIME: Final = "timestamp_us"
STORED_LETTERS: Final = BAD_SCHEMA.append(pa.field(EXACT_TIME, pa.int64()))
"""The columns of a dead-letter table in a database: a time that it cannot store is the nearest one in ``timestamp``,
and exact, in microseconds since 1970, in the last column. Tables of earlier versions lack that one."""

_LETTER_TIMES: Final = range(-62_167_219_200_000_000, 253_402_300_800_000_000)
"""The years 0 to 9999, which every database and its clients give back as they were, in microseconds since 1970."""

DEAD_LETTERS: Final = "_dead_letters"
"""Behind a table's name: its dead-letter table."""
CURSORS: Final = "strandline_cursors"
"""The table of all sinks' cursors, beside the tables that they write."""


def quoted(name: str) -> str:
    """A name as SQL has it, whatever its letters.

    >>> quoted('a "b" c')
    '"a ""b"" c"'
    """
    return '"' + name.replace('"', '""') + '"'


def check_columns(
    schema: pa.Schema,
    type_of: TypeOf,
    database: str,
    most: int,
    longest: int | None = None,
    reserved: frozenset[str] = frozenset(),
) -> None:
    """``SchemaRefused`` for columns that a database cannot have: too many, or names that it cuts, confuses or keeps."""
    if len(schema) > most:
        raise SchemaRefused(
            f"A table of {database} has up to {most:,} columns, and this schema has {len(schema):,}: use fewer."
        )
    seen: dict[str, str] = {}
    for field in schema:
        type_of(field)
        name = field.name
        if not name or "\0" in name:
            raise SchemaRefused(f"The field {name!r} cannot be a column of a SQL table: rename it.")
        if longest is not None and len(name.encode()) > longest:
            raise SchemaRefused(
                f"The field {name[:longest]!r}… has a longer name than the {longest} bytes of a column: rename it."
            )
        if name.lower() in reserved:
            raise SchemaRefused(f"The database keeps the column name {name!r} for itself: rename the field.")
        if (twin := seen.setdefault(name.casefold(), name)) != name:
            raise SchemaRefused(
                f"The fields {twin!r} and {name!r} differ only in upper and lower case: rename one of them."
            )


def refused(field: pa.Field, database: str) -> SchemaRefused:
    """The error for a type that a database has no column for."""
    return SchemaRefused(
        f"The field {field.name!r} is {field.type}, and {database} has no column type for it: convert it with a "
        "transform, or leave it out of the schema."
    )


def as_json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Nested values as JSON text: maps as lists of key and value, bytes in base64, times in ISO 8601.

    >>> as_json(pa.chunked_array([pa.array([{"a": b"x"}, None], pa.struct({"a": pa.binary()}))])).to_pylist()
    ['{"a":"eA=="}', None]
    """
    if column.null_count == len(column):  # headers are, mostly
        return pa.chunked_array([pa.nulls(len(column), pa.string())])
    texts = [None if one is None else _ENCODER.encode(one) for one in column.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.string())])


def definitions(schema: pa.Schema, primary: str | None, type_of: TypeOf) -> str:
    """The columns of a new table, in SQL."""
    columns = [
        f"{quoted(field.name)} {type_of(field)}{'' if field.nullable and field.name != primary else ' NOT NULL'}"
        for field in schema
    ]
    return ", ".join([*columns, *([f"PRIMARY KEY ({quoted(primary)})"] if primary is not None else [])])


def storable_letters(bad: pa.Table) -> pa.Table:
    """Dead letters as a database stores them (:data:`STORED_LETTERS`).

    >>> times = pa.array([0, -(2**63)], pa.timestamp("us", "UTC"))
    >>> storable_letters(pa.table({"timestamp": times})).column(EXACT_TIME).to_pylist()
    [None, -9223372036854775808]
    """
    exact = bad.column("timestamp").cast(pa.int64())
    is_odd = times_outside(bad.column("timestamp"), _LETTER_TIMES)
    nearest = pc.max_element_wise(pc.min_element_wise(exact, _LETTER_TIMES.stop - 1), _LETTER_TIMES.start)
    at = bad.schema.get_field_index("timestamp")
    stored = bad.set_column(at, bad.schema.field(at), nearest.cast(bad.schema.field(at).type))
    return stored.append_column(
        STORED_LETTERS.field(EXACT_TIME), pc.if_else(is_odd, exact, pa.scalar(None, pa.int64()))
    )


def times_outside(column: pa.ChunkedArray, times: range) -> pa.ChunkedArray:
    """Which timestamps or dates are outside of a range of microseconds since 1970; never a null."""
    kind = column.type
    if pt.is_timestamp(kind):
        below, above = {"s": (1_000_000, 1), "ms": (1_000, 1), "us": (1, 1), "ns": (1, 1_000)}[kind.unit]
        counts = column.cast(pa.int64())
    else:
        below, above = 86_400_000_000, 1
        counts = column.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
    low, high = -(-times.start * above // below), (times.stop - 1) * above // below
    low, high = max(low, -(1 << 63)), min(high, (1 << 63) - 1)
    return pc.fill_null(pc.or_(pc.less(counts, low), pc.greater(counts, high)), False)


def letters_of(columns: Sequence[Sequence[Any]]) -> pa.Table:
    """Dead letters from the columns of their table; ``CorruptData`` if another program wrote something else there."""
    offsets, times, ops, keys, values, headers, reasons, exact = columns
    try:
        return pa.table(
            [
                pa.array(offsets, pa.int64()),
                pc.coalesce(pa.array(exact, pa.int64()).cast(BAD_SCHEMA.field("timestamp").type), _times(times)),
                pa.array(ops, pa.int8()),
                pa.array(keys, pa.binary()),
                pa.array(values, pa.binary()),
                pa.array([_headers(one) for one in headers], BAD_SCHEMA.field("headers").type),
                pa.array(reasons, pa.string()),
            ],
            schema=BAD_SCHEMA,
        )
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise CorruptData(
            f"Dead letters cannot be read, because another program changed them ({error}): delete those, or rebuild "
            "the table."
        ) from error


def _times(times: Sequence[Any]) -> pa.Array:
    kind = BAD_SCHEMA.field("timestamp").type
    is_text = bool(times) and isinstance(times[0], str)
    return pa.array(times, pa.string()).cast(kind) if is_text else pa.array(times, pa.int64()).cast(kind)


def _headers(text: str | None) -> list[tuple[str, bytes | None]] | None:
    if text is None:
        return None
    return [(name, None if value is None else base64.b64decode(value)) for name, value in json.loads(text)]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_ENCODER: Final = json.JSONEncoder(default=_plain, separators=(",", ":"), ensure_ascii=True)
