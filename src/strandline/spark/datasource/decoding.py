"""Decoded values in the data source: the value's fields as columns of Spark, as Arrow batches."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from strandline.errors import InvalidInput, SchemaRefused
from strandline.log.read.value_format import named_codec, named_versions
from strandline.spark.datasource.shaping import check_schema
from strandline.tables.rows.types import storable, stored
from strandline.values.contract import Codec
from strandline.values.decoding import RECORD_FIELDS, BadRows, decode_records, decoded_schema
from strandline.values.recorded import codec_of


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a task decodes: the codec as it was when the query was planned. Picklable."""

    codec: Codec
    bad: BadRows

    @classmethod
    def of(cls, log: object, bad: BadRows, url: str) -> Decoding:
        """The codec that a log names; ``InvalidInput`` if it names none."""
        codec = named_codec(log)
        if codec is None:
            raise InvalidInput(f"{url} names no format for its values, so that they are bytes: read it without decode.")
        return cls(codec, bad)

    @classmethod
    def planned(cls, log: object, bad: BadRows, url: str, schema: StructType) -> tuple[pa.Schema, Decoding]:
        """The requested columns, and the newest codec of the log that has them.

        A DataFrame keeps the columns with which it was loaded, also if the log names wider ones since: those are
        decoded as the version of that time says. ``InvalidInput`` if no version has them.
        """
        newest = cls.of(log, bad, url)
        try:
            return check_schema(schema, newest.spark_schema()), newest
        except InvalidInput:
            for version in reversed(named_versions(log)[:-1]):
                older = cls(codec_of(version, url), bad)
                with contextlib.suppress(InvalidInput):
                    return check_schema(schema, older.spark_schema()), older
            raise

    def spark_schema(self) -> StructType:
        """All columns of the decoded log, with types that Spark has; ``SchemaRefused`` for one that it lacks."""
        found: StructType = from_arrow_schema(storable(decoded_schema(self.codec, self.bad)), prefer_timestamp_ntz=True)
        return found

    def needed(self, columns: pa.Schema) -> list[str]:
        """The columns of a log that these ones take; values are read only if one of them comes from a value."""
        own = [name for name, field in RECORD_FIELDS.items() if field.name in columns.names]
        return list(dict.fromkeys([*own, "offset", *(["value"] if self.decodes(columns) else [])]))

    def decodes(self, columns: pa.Schema) -> bool:
        """Whether values have to be decoded for these columns. The codec of change events decides the operation."""
        plain = {field.name for name, field in RECORD_FIELDS.items() if name != "op"}
        return any(name not in plain for name in columns.names)

    def decoded(self, records: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
        """The columns, of exactly their types."""
        if self.decodes(columns):
            found = decode_records(records, self.codec, self.bad)
        else:
            names = [RECORD_FIELDS[name].name for name in records.schema.names]
            found = pa.RecordBatch.from_arrays(records.columns, names)
        table = stored(pa.Table.from_batches([found.select(columns.names)]))
        arrays = [
            _cast(column.combine_chunks(), field.type) for column, field in zip(table.columns, columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column to Spark's type, which names the items of lists differently."""
    try:
        return column if column.type == kind else column.cast(kind)
    except pa.ArrowInvalid as error:
        raise SchemaRefused(
            f"Values are wider than the schema that the log names ({error}): record a wider one with evolve_value, and "
            "start the query again."
        ) from error
