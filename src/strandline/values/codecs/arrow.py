"""The codec of self-describing values: Arrow IPC streams of one row."""

from __future__ import annotations

import struct
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import CorruptData, InvalidInput, SchemaRefused
from strandline.formats.arrow.header import check_message
from strandline.formats.arrow.stream import END, batch_header
from strandline.model.arguments import checked
from strandline.values.codecs.rows import one_row, reason_of
from strandline.values.contract import Columns, Decoded, bad_rows, check_values
from strandline.values.schema.evolution import conform_columns, evolve
from strandline.values.schema.schemas import as_schema

_DAMAGE: Final = (pa.ArrowException, OSError, ValueError, EOFError, struct.error, OverflowError, CorruptData)


class Arrow:
    """Values that are Arrow IPC streams with one row each: every value carries its own schema.

    A decoded batch has the columns of ``schema``, if one is given, and all further columns of its values, merged as
    :func:`~strandline.values.evolve` does. A value whose columns cannot be merged with those before it is a bad row.
    So is a value with compressed buffers, or with more or fewer rows than one.

    >>> codec = Arrow()
    >>> values = pa.array([codec.encode_one({"id": 1}), codec.encode_one({"id": 2, "vip": True})], pa.binary())
    >>> codec.decode(values).columns.to_pylist()
    [{'id': 1, 'vip': None}, {'id': 2, 'vip': True}]

    Args:
        schema: The columns that are always there, or None.
    """

    name = "arrow"
    __slots__ = ("_schema",)

    def __init__(self, schema: Any = None) -> None:
        self._schema = pa.schema([]) if schema is None else as_schema(schema)

    @property
    def schema(self) -> pa.Schema:
        """The columns that every decoded batch has."""
        return self._schema

    def __repr__(self) -> str:
        return f"Arrow({', '.join(f'{field.name}: {field.type}' for field in self._schema)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arrow) and self._schema.equals(other._schema)

    def __hash__(self) -> int:
        return hash((Arrow, tuple(self._schema.names)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Arrow, (self._schema if len(self._schema) else None,)

    @checked
    def decode(self, values: pa.Array) -> Decoded:
        """Decode each value; the columns are those of all good values together."""
        check_values(values)
        schema, reasons = self._schema, dict[int, str]()
        batches: list[pa.RecordBatch | None] = []
        known: dict[bytes, pa.Schema] = {}
        present = [None] * len(values) if pt.is_null(values.type) else values.to_pylist()
        for row, value in enumerate(present):
            batch = None
            try:
                if value is not None:
                    batch, head = _read(value)
                    if head not in known:
                        known[head] = as_schema(batch.schema)
                        schema = evolve(schema, known[head]).schema
            except _DAMAGE as error:
                reasons[row], batch = reason_of(error), None
            batches.append(batch)
        empty = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
        columns: list[pa.RecordBatch] = []
        for row, batch in enumerate(batches):
            try:
                columns.append(empty if batch is None else conform_columns(batch, schema))
            except SchemaRefused as error:
                reasons[row] = str(error)
                columns.append(empty)
        return Decoded(_joined(columns, schema, len(values)), bad_rows(reasons))

    @checked
    def encode(self, columns: Columns) -> pa.Array:
        """Encode each row as a stream with the columns given, and those of the schema."""
        schema = evolve(self._schema, as_schema(columns.schema)).schema
        batch = conform_columns(columns, schema)
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


def _read(value: bytes) -> tuple[pa.RecordBatch, bytes]:
    """The row in a value, and the bytes of its schema."""
    data = memoryview(value)
    source = pa.BufferReader(pa.py_buffer(value))
    check_message(data)
    schema = pa.ipc.read_schema(source)
    start = source.tell()
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
    return batch, value[:start]


def _written(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([_own(column) for column in row.columns], schema=row.schema))
    return bytes(sink.getvalue())


def _own(column: pa.Array) -> pa.Array:
    return pa.concat_arrays([column]) if column.offset else column


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if not len(schema):
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), rows, [None]))
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    return table.to_batches()[0] if rows else pa.RecordBatch.from_pylist([], schema=schema)
