"""The contract of a codec: between the value bytes of records and typed Arrow columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import InvalidInput
from strandline.model.records import Op

Columns: TypeAlias = pa.RecordBatch | pa.Table
"""Typed columns, one row per record."""

BAD_SCHEMA: Final = pa.schema(
    [pa.field("row", pa.int64(), nullable=False), pa.field("reason", pa.string(), nullable=False)]
)
"""The schema of :attr:`Decoded.bad`."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoded values: typed columns, and the rows that could not be decoded.

    Attributes:
        columns: As many rows as there were values. A null value and a bad one are a row of nulls.
        bad: The bad rows in ascending order, each once: ``row`` (position among the values) and ``reason``.
        op: Operations that the values themselves carry (``int8``); null, or no array at all: the record's own. Only
            the codecs of change events give it.
    """

    columns: pa.RecordBatch
    bad: pa.RecordBatch
    op: pa.Array | None = None

    def operations(self, own: pa.Array) -> pa.Array:
        """The operation of each record; ``own`` are the records' own. A purge stays a purge."""
        if self.op is None:
            return own
        return pc.if_else(pc.equal(own, pa.scalar(Op.PURGE, own.type)), own, pc.coalesce(self.op, own))


@runtime_checkable
class Codec(Protocol):
    """Turns the values of records into typed columns and back.

    A codec is immutable, equal to another of its class with the same settings, and picklable: it travels to Spark's
    executors. It does no I/O, except that a schema registry given by address is asked for schemas. Implement it for an
    encoding of your own; ``strandline.testing.codecs.CodecContract`` is its test suite.
    """

    @property
    def name(self) -> str:
        """Name of the encoding, such as ``json``."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of a decoded value. All of them are nullable."""

    def decode(self, values: pa.Array) -> Decoded:
        """Decode an array of type ``binary``, ``large_binary`` or ``null``, as it is in a record batch.

        Whatever the bytes are, this returns, in memory proportional to them: a value that is not valid is a bad row.
        A null value is never bad. The columns have :attr:`schema`; those of a self-describing codec may have more.
        """

    def encode(self, columns: Columns) -> pa.Array:
        """Encode rows as a ``binary`` array, one value per row: the exact inverse of :meth:`decode`.

        Columns are matched by name, and missing ones are null. ``InvalidInput`` for a column that is not in the
        schema, and for a row that the encoding cannot represent. No value is null: a row of nulls is encoded, too.
        """

    def encode_one(self, value: Any) -> bytes:
        """Encode one value: a mapping of field names, a dataclass or a ``msgspec.Struct``.

        ``InvalidInput`` if it does not fit the schema; the sentence names the field.
        """


def rounds_floats(codec: Codec | None) -> bool:
    """Whether ``float32`` columns hold rounded numbers, because the values have wider ones: text, or 64 bits.

    A codec says so by an attribute of this name. Without it the values have floats of 32 bits, as Avro and Protobuf do.
    """
    return bool(getattr(codec, "rounds_floats", False))


def check_values(values: pa.Array) -> pa.Array:
    """The values, if they are an array of bytes or of nulls; ``InvalidInput`` otherwise."""
    kind = values.type
    if not (pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_null(kind)):
        raise InvalidInput(f"Values to decode are an array of type binary, large_binary or null, not {kind}.")
    return values


def bad_rows(reasons: dict[int, str]) -> pa.RecordBatch:
    """The ``bad`` of :class:`Decoded`, from reasons by row."""
    rows = sorted(reasons)
    columns = [pa.array(rows, pa.int64()), pa.array([reasons[row] for row in rows], pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=BAD_SCHEMA)
