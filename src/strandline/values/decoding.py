"""Records with their values decoded: the value's fields, and the record's own columns beside them."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import BadRecord, InvalidInput
from strandline.model.records import READ_SCHEMA
from strandline.values.contract import Codec

BadRows: TypeAlias = Literal["fail", "null"]
"""What happens to a record that cannot be decoded: an error, or null fields with the reason in ``_error``."""

RECORD_FIELDS: Final = {
    name: READ_SCHEMA.field(name).with_name(f"_{name}") for name in ("key", "offset", "timestamp", "op", "headers")
}
"""The record's own columns, by their names in a log."""

ERROR: Final = pa.field("_error", pa.string())
"""Why a value could not be decoded; null if it could."""

UNREADABLE: Final = pa.field("_value", pa.binary())
"""The bytes of a value that could not be decoded; null if it could."""


def value_fields(codec: Codec) -> list[pa.Field]:
    """The columns of a value; ``InvalidInput`` if one could be taken for a column of the record."""
    fields = [field.with_nullable(True) for field in codec.schema]
    clash = [field.name for field in fields if field.name.startswith("_")]
    if clash:
        raise InvalidInput(
            f"The value's field {clash[0]!r} begins with an underscore, as columns that are added to it do: rename it."
        )
    return fields


def decoded_schema(codec: Codec, bad: BadRows = "fail") -> pa.Schema:
    """The columns of decoded records; a self-describing codec may give more fields.

    >>> from strandline.values import Json
    >>> decoded_schema(Json(pa.schema({"id": pa.int64()})), "null").names
    ['id', '_key', '_offset', '_timestamp', '_op', '_headers', '_error', '_value']
    """
    further = [ERROR, UNREADABLE] if bad == "null" else []
    return pa.schema([*value_fields(codec), *RECORD_FIELDS.values(), *further])


def decode_records(records: pa.RecordBatch, codec: Codec, bad: BadRows = "fail") -> pa.RecordBatch:
    """The records of a log with their values decoded; each row stays in its place.

    A value that cannot be decoded is ``BadRecord``, with the offset and the reason; with ``bad="null"`` its fields are
    null, ``_error`` says why, and ``_value`` has the bytes. A null value has null fields. The codec of change events
    decides the operation. ``records`` needs ``offset`` and ``value``; of the other columns those that it has are given.
    """
    found = codec.decode(records.column("value"))
    if found.bad.num_rows and bad == "fail":
        row, reason = (found.bad.column(name)[0].as_py() for name in ("row", "reason"))
        offset = records.column("offset")[row].as_py()
        raise BadRecord(
            f"The value of the record at offset {offset} cannot be decoded: {reason} Correct the schema, or have such "
            "records as rows of nulls with the reason (bad rows: null)."
        )
    columns = dict(zip(found.columns.schema.names, found.columns.columns, strict=True))
    fields = list(found.columns.schema)
    for name, field in RECORD_FIELDS.items():
        if name in records.schema.names:
            own = records.column(name)
            columns[field.name] = found.operations(own) if name == "op" else own
            fields.append(field)
    if bad == "null":
        columns |= _errors(records.column("value"), found.bad)
        fields += [ERROR, UNREADABLE]
    return pa.RecordBatch.from_arrays([columns[field.name] for field in fields], schema=pa.schema(fields))


def _errors(values: pa.Array, bad: pa.RecordBatch) -> dict[str, pa.Array]:
    count = len(values)
    if not bad.num_rows:
        return {ERROR.name: pa.nulls(count, ERROR.type), UNREADABLE.name: pa.nulls(count, UNREADABLE.type)}
    at = pc.index_in(pa.array(range(count), pa.int64()), value_set=bad.column("row"))
    unreadable = pc.if_else(at.is_valid(), values.cast(pa.binary()), pa.scalar(None, pa.binary()))
    return {ERROR.name: bad.column("reason").take(at), UNREADABLE.name: unreadable}
