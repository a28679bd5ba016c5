"""The codec of self-describing values: Arrow IPC streams of one row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import CorruptData, InvalidInput, SchemaRefused
from strandline.formats.arrow.header import check_message
from strandline.formats.arrow.stream import END, batch_header
from strandline.model.arguments import Positive, checked
from strandline.values.codecs.columns import check_memory
from strandline.values.codecs.exact import OTHER_YEARS, cutting, field_of_other_years
from strandline.values.codecs.rows import CodecValue, one_row, reason_of
from strandline.values.contract import Columns, Decoded, bad_rows, check_values
from strandline.values.schema.evolution import SchemaUnion, conform_columns, evolve, one_batch, placed
from strandline.values.schema.json_schema import constraining_keyword
from strandline.values.schema.schemas import as_schema

_DAMAGE: Final = (
    SchemaRefused,
    pa.ArrowException,
    OSError,
    ValueError,
    EOFError,
    struct.error,
    OverflowError,
    CorruptData,
)

Kept: TypeAlias = Callable[[pa.Schema], pa.Schema]
"""Columns as a table stores them; ``SchemaRefused`` for those that it cannot."""

MAX_COLUMNS: Final = 1_000
"""Fields that self-describing values may bring: a table of PostgreSQL has up to 1,600 columns, one of SQLite 2,000."""
MAX_NAME: Final = 63
"""Bytes of a name: those of a column in PostgreSQL."""


class Arrow(CodecValue):
    """Values that are Arrow IPC streams with one row each: every value carries its own schema.

    A decoded batch has the columns of ``schema``, if one is given, and all further columns of its values, merged as
    :func:`~strandline.values.evolve` does. A value whose columns cannot be merged with those before it is a bad row,
    and so is one with compressed buffers, another number of rows, a year outside of 1 to 9999, or a name that begins
    with an underscore, as columns that tables add do.

    >>> codec = Arrow()
    >>> values = pa.array([codec.encode_one({"id": 1}), codec.encode_one({"id": 2, "vip": True})], pa.binary())
    >>> codec.decode(values).columns.to_pylist()
    [{'id': 1, 'vip': None}, {'id': 2, 'vip': True}]

    Args:
        schema: The columns that are always there, or None.
        max_columns: Limit on the fields of a batch and of a table: a value that would bring more is a bad row.
        max_name: Limit on the bytes of a field's name, likewise.
    """

    name = "arrow"
    __slots__ = ("_longest", "_most", "unenforced")

    @checked
    def __init__(
        self, schema: Any = None, *, max_columns: Positive = MAX_COLUMNS, max_name: Positive = MAX_NAME
    ) -> None:
        self._schema = pa.schema([]) if schema is None else as_schema(schema)
        self.unenforced = constraining_keyword(schema)
        self._most, self._longest = max_columns, max_name

    def settings(self) -> dict[str, Any]:
        """The arguments that make an equal codec, as a log records them."""
        schema = self._schema if len(self._schema) else None
        return {"schema": schema, "max_columns": self._most, "max_name": self._longest}

    def limits(self) -> dict[str, int]:
        """The limits that are not the default ones, by their names."""
        named = {"max_columns": (self._most, MAX_COLUMNS), "max_name": (self._longest, MAX_NAME)}
        return {name: limit for name, (limit, usual) in named.items() if limit != usual}

    @checked
    def decode(self, values: pa.Array) -> Decoded:
        """Decode each value; the columns are those of all good values together."""
        check_values(values)
        union = SchemaUnion(self._schema, self._most)
        groups: dict[bytes, _Group] = {}
        reasons: dict[int, str] = {}
        for row, value in enumerate([] if pt.is_null(values.type) else values.to_pylist()):
            if value is None:
                continue
            try:
                batch, head = _read(value)
                if head not in groups:
                    groups[head] = self._group(batch.schema, union, head)
                groups[head].rows.append(row)
                groups[head].batches.append(batch)
            except _DAMAGE as error:
                check_memory(error)
                reasons[row] = reason_of(error)
        schema = union.schema
        good = [found for group in groups.values() if (found := group.good(reasons)) is not None]
        return Decoded(_assembled(good, schema, len(values)), bad_rows(reasons))

    def _group(self, given: pa.Schema, union: SchemaUnion, head: bytes) -> _Group:
        """The values of a schema, if its columns can be taken; all of them are bad otherwise."""
        try:
            return _Group(fields=self._taken(_named(given, self._longest), union, head))
        except SchemaRefused as error:
            return _Group(str(error))

    def _taken(self, fields: pa.Schema, union: SchemaUnion, head: bytes) -> pa.Schema:
        """The columns, merged with those before; ``SchemaRefused`` if they cannot be."""
        del head
        union.add(fields)
        return fields

    @checked
    def encode(self, columns: Columns) -> pa.Array:
        """Encode each row as a stream with the columns given, and those of the schema."""
        schema = evolve(self._schema, as_schema(columns.schema)).schema
        batch = conform_columns(columns, schema)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if (found := field_of_other_years(name, column)) is not None:
                raise InvalidInput(f"The field '{found}' is {OTHER_YEARS}.")
        return pa.array([_written(batch.slice(row, 1)) for row in range(batch.num_rows)], pa.binary())

    def encode_one(self, value: Any) -> bytes:
        """Encode a mapping, a dataclass or a Struct; fields that are not in the schema have the type of their value."""
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            further = {
                name: part for name, part in value.items() if name not in self._schema.names and part is not None
            }
            try:
                guessed = list(as_schema(pa.RecordBatch.from_pylist([further]).schema)) if further else []
            except (pa.ArrowException, ArithmeticError, TypeError, ValueError, RecursionError) as error:
                raise InvalidInput(f"The value does not fit the schema: {reason_of(error)}") from error
            schema = pa.schema([*self._schema, *guessed])
            value = {name: part for name, part in value.items() if part is not None}
        else:
            schema = self._schema if len(self._schema) else as_schema(type(value))
        if not len(schema):
            raise InvalidInput("A value needs at least one field that is not null.")
        return _written(one_row(schema, value))


class TableArrow(Arrow):
    """The codec of one table: see :func:`table_codec`."""

    __slots__ = ("_kept", "_refused")

    def __init__(self, schema: pa.Schema, most: int, longest: int, kept: Kept, refused: dict[bytes, str]) -> None:
        super().__init__(schema if len(schema) else None, max_columns=most, max_name=longest)
        self._kept, self._refused = kept, refused

    def __reduce__(self) -> tuple[Any, ...]:
        return TableArrow, (self._schema, self._most, self._longest, self._kept, self._refused)

    def offered(self, value: bytes | None) -> bytes | None:
        """The schema of a value that brings columns, as bytes; None if it brings none, or they were refused."""
        with suppress(*_DAMAGE):
            batch, head = (None, b"") if value is None else _read(value)
            if batch is not None and head not in self._refused:
                fields = self._kept(_named(batch.schema, self._longest))
                if SchemaUnion(self._schema, self._most).uncovered(fields) is not None:
                    return head
        return None

    def _taken(self, fields: pa.Schema, union: SchemaUnion, head: bytes) -> pa.Schema:
        if head in self._refused:
            raise SchemaRefused(self._refused[head])
        fields = self._kept(fields)
        if (lacking := union.uncovered(fields)) is not None:
            raise SchemaRefused(
                f"The table has no column for its field '{lacking[:100]}', or one of another type: name it in the "
                "codec's schema."
            )
        return fields


def table_codec(codec: Arrow, columns: pa.Schema, values: Iterable[bytes | None], kept: Kept) -> TableArrow:
    """The codec of a table: it gives the table's columns, and those that the values bring to it.

    A value whose fields the table cannot have, or does not have, is a bad row. ``kept`` are columns as the table
    stores them; ``SchemaRefused`` for those that it cannot.
    """
    _, most, longest = codec.settings().values()
    union = SchemaUnion(evolve(kept(codec.schema), as_schema(columns) if len(columns) else columns).schema, most)
    refused: dict[bytes, str] = {}
    known: set[bytes] = set()
    for value in values:
        with suppress(*_DAMAGE):  # decoding says why it is bad
            head, fields = _head(value) if value is not None else (b"", pa.schema([]))
            if head in known:
                continue
            known.add(head)
            try:
                fields = kept(_named(fields, longest) if value is not None else fields)
                union.check(fields)
                kept(pa.schema([*[one for one in union.schema if one.name not in fields.names], *fields]))
                union.add(fields)
            except SchemaRefused as error:
                refused[head] = str(error)
    return TableArrow(union.schema, most, longest, kept, refused)


def _head(value: bytes) -> tuple[bytes, pa.Schema]:
    """The bytes of a value's schema, and the schema."""
    source = pa.BufferReader(pa.py_buffer(value))
    check_message(memoryview(value))
    schema = pa.ipc.read_schema(source)
    return value[: source.tell()], schema


def _read(value: bytes) -> tuple[pa.RecordBatch, bytes]:
    """The row in a value, and the bytes of its schema."""
    head, schema = _head(value)
    data, start = memoryview(value), len(head)
    source = pa.BufferReader(pa.py_buffer(value))
    source.seek(start)
    check_message(data[start:])
    message = pa.ipc.read_message(source)
    if message.type != "record batch":
        raise ValueError(f"it has a {message.type} message in place of a row")
    rows, is_compressed = batch_header(message, "The value")
    if rows != 1 or is_compressed:
        raise ValueError(f"a value has one row, which is not compressed; this one has {rows}")
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)
    if bytes(data[source.tell() :]) not in (END, b""):
        raise ValueError("bytes follow the row")
    return batch, head


def _written(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    columns = [pa.concat_arrays([column]) if column.offset else column for column in row.columns]
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=row.schema))
    return bytes(sink.getvalue())


@dataclass
class _Group:
    """Values with the same schema, which are taken together; ``refused`` says why all of them are bad."""

    refused: str | None = None
    fields: pa.Schema | None = None
    """The columns as they are given."""
    rows: list[int] = field(default_factory=list)
    batches: list[pa.RecordBatch] = field(default_factory=list)

    def good(self, reasons: dict[int, str]) -> tuple[list[int], pa.RecordBatch] | None:
        """The good rows, and their columns; None if there is none. The others get their reasons."""
        if self.refused is not None:
            reasons.update(dict.fromkeys(self.rows, self.refused))
            return None
        columns = one_batch(pa.Table.from_batches(self.batches))
        try:
            return self.rows, self._cast(columns)
        except ValueError:
            pass
        good: list[tuple[int, pa.RecordBatch]] = []
        for at, row in enumerate(self.rows):
            try:
                good.append((row, self._cast(columns.slice(at, 1))))
            except ValueError as error:
                reasons[row] = reason_of(error)
        if not good:
            return None
        return [row for row, _ in good], one_batch(pa.Table.from_batches([one for _, one in good]))

    def _cast(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        """The columns as they are given; ``ValueError`` if one of their values cannot be."""
        arrays = []
        for column, one in zip(columns.columns, self.fields or columns.schema, strict=True):
            arrays.append(column if column.type == one.type else column.cast(options=cutting(one.type)))
            if (found := field_of_other_years(one.name, column)) is not None:
                raise ValueError(f"The field '{found}' is {OTHER_YEARS}")
        return pa.RecordBatch.from_arrays(arrays, schema=self.fields or columns.schema)


def _named(given: pa.Schema, longest: int) -> pa.Schema:
    """The columns of a value; ``SchemaRefused`` for those that no table can have."""
    fields = as_schema(given)
    _check_names(fields, longest)
    return fields


def _check_names(fields: Iterable[pa.Field], longest: int, path: str = "") -> None:
    """``SchemaRefused`` for names that tables have for themselves, or cannot have."""
    for one in fields:
        name = one.name
        if not path and name.startswith("_"):
            raise SchemaRefused(
                f"The value's field {name!r:.100} begins with an underscore, as columns that are added to it do: "
                "rename it."
            )
        if "\0" in name or len(name.encode(errors="replace")) > longest:
            raise SchemaRefused(
                f"The name of the field {path + name!r:.100} has a NUL, or more than {longest} bytes (max_name): "
                "rename it."
            )
        kind = one.type
        if pt.is_nested(kind):
            inside = [kind.field(at) for at in range(kind.num_fields)]
            _check_names(inside, longest, f"{path}{name}.")


def _assembled(good: list[tuple[list[int], pa.RecordBatch]], schema: pa.Schema, count: int) -> pa.RecordBatch:
    """All rows in their order; a row of nulls for each that is not good."""
    import numpy as np

    if not len(schema):
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None]))
    rows = np.concatenate([np.array(rows, np.int64) for rows, _ in good]) if good else np.empty(0, np.int64)
    parts = [dict(zip(columns.schema.names, columns.columns, strict=True)) for _, columns in good]
    arrays = placed(schema, parts, len(rows))
    if len(rows) < count or len(good) > 1:
        at = np.full(count, -1, np.int64)
        at[rows] = np.arange(len(rows))
        places = pa.array(at, mask=at < 0)
        arrays = [array.take(places) for array in arrays]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
