"""Converts Arrow batches of a log to Spark's columns, nullability and batch sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from strandline.errors import InvalidInput
from strandline.model.records import halved

SPARK_SCHEMA: Final = StructType(
    [
        StructField("offset", LongType(), nullable=False),
        StructField("timestamp", TimestampType(), nullable=False),
        StructField("op", ByteType(), nullable=False),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", MapType(StringType(), BinaryType())),
    ]
)
"""The schema of a log in Spark."""

GOOD_ROWS: Final = 1 << 16
GOOD_BYTES: Final = 16 << 20


def check_schema(schema: StructType, columns: StructType = SPARK_SCHEMA) -> pa.Schema:
    """The Arrow schema of a requested schema: some of a log's columns, in any order; else ``InvalidInput``."""
    types: dict[str, DataType] = {field.name: field.dataType for field in columns}
    if not schema.fields:
        raise InvalidInput(f"The schema is empty; ask for at least one of {', '.join(types)}.")
    for field in schema:
        wanted = types.get(field.name)
        if wanted is None:
            raise InvalidInput(f"A log has no column {field.name!r}; its columns are {', '.join(types)}.")
        if field.dataType != wanted:
            kind, other = wanted.simpleString().upper(), field.dataType.simpleString().upper()
            raise InvalidInput(
                f"The column {field.name!r} of a log is {kind}, not {other}: read it as {kind} and cast it afterwards."
            )
    if len(set(schema.names)) < len(schema.names):
        raise InvalidInput(f"The schema asks for a column twice: {', '.join(schema.names)}.")
    shape: pa.Schema = to_arrow_schema(schema, timezone="UTC")
    return shape


def shaped(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, rows: int = GOOD_ROWS, size: int = GOOD_BYTES
) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, in batches of up to about ``rows`` rows and ``size`` bytes.

    Small batches are joined, because each has a fixed cost in Spark; large ones are split, because Spark holds a whole
    batch in memory, outside its heap. The columns must be those of ``schema``, in its order.
    """
    pending: list[pa.RecordBatch] = []
    held = weight = 0
    for batch in batches:
        for piece in halved(batch, size, rows):
            more = piece.nbytes
            if pending and (held + piece.num_rows > rows or weight + more > size):
                yield _joined(pending, schema)
                pending, held, weight = [], 0, 0
            pending.append(piece)
            held += piece.num_rows
            weight += more
    if pending:
        yield _joined(pending, schema)


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    return pa.RecordBatch.from_arrays(whole.columns, schema=schema)
