"""Types of columns that every table format can store, and what other types become."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import SchemaRefused
from strandline.values.codecs.exact import cutting

_SIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20)}
_PLAIN = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary(), pa.float16(): pa.float32()}


def storable(schema: pa.Schema) -> pa.Schema:
    """The columns as tables store them: signed numbers, microseconds in UTC; ``SchemaRefused`` for what they cannot.

    >>> storable(pa.schema({"n": pa.uint32(), "at": pa.timestamp("ms", "Europe/Oslo")})).types
    [DataType(int64), TimestampType(timestamp[us, tz=UTC])]
    """
    return pa.schema([field.with_type(_storable(field.name, field.type)) for field in schema])


def _storable(name: str, kind: pa.DataType) -> pa.DataType:  # noqa: PLR0911 - one for each kind of type
    if kind in _SIGNED or kind in _PLAIN:
        return _SIGNED.get(kind) or _PLAIN[kind]
    if pt.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pt.is_dictionary(kind):
        return _storable(name, kind.value_type)
    if pt.is_struct(kind):
        return pa.struct([one.with_type(_storable(f"{name}.{one.name}", one.type)) for one in kind])
    if pt.is_list(kind) or pt.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_storable(f"{name}[]", kind.value_type)))
    if pt.is_map(kind):
        return pa.map_(_storable(f"{name}{{}}", kind.key_type), _storable(f"{name}{{}}", kind.item_type))
    is_simple = pt.is_boolean(kind) or pt.is_integer(kind) or pt.is_floating(kind) or pt.is_date32(kind)
    is_decimal = pt.is_decimal128(kind) and 0 <= kind.scale <= kind.precision
    if is_simple or pt.is_string(kind) or pt.is_binary(kind) or is_decimal:
        return kind
    raise SchemaRefused(
        f"The field {name!r} has the type {kind}, which tables cannot store: declare it as text or as a number."
    )


def stored(table: pa.Table) -> pa.Table:
    """A table with storable columns; digits below a microsecond are cut off."""
    wanted = storable(table.schema)
    if wanted.equals(table.schema):
        return table
    columns = [
        column if column.type == field.type else column.cast(options=cutting(field.type))
        for column, field in zip(table.columns, wanted, strict=True)
    ]
    return pa.table(columns, schema=wanted)
