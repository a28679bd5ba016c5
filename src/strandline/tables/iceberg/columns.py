"""Columns of an Iceberg table as Arrow has them, with the numbers by which Iceberg finds them in data files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from strandline.errors import MissingExtra, SchemaRefused
from strandline.values.schema.schemas import as_schema

if TYPE_CHECKING:
    from pyiceberg.schema import Schema


def iceberg_library() -> Any:
    """The library, or ``MissingExtra``."""
    try:
        import pyiceberg.catalog
        import pyiceberg.exceptions
        import pyiceberg.io.pyarrow
        import pyiceberg.schema
    except ImportError as error:
        raise MissingExtra("Iceberg tables need the extra 'iceberg': pip install 'strandline[iceberg]'.") from error
    return pyiceberg


def iceberg_schema(schema: pa.Schema) -> Schema:
    """The columns as Iceberg has them, newly numbered; ``SchemaRefused`` for a type that it lacks."""
    library = iceberg_library()
    try:
        unnumbered = library.io.pyarrow._pyarrow_to_schema_without_ids(schema)  # noqa: SLF001 - what its catalogs call
        found: Schema = library.schema.assign_fresh_schema_ids(unnumbered)
    except (TypeError, ValueError, library.io.pyarrow.UnsupportedPyArrowTypeException) as error:
        raise SchemaRefused(f"Iceberg has no such column: {error} Convert it with a transform.") from error
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), arrow_schema(found)).close()
    except (pa.ArrowException, OSError) as error:
        raise SchemaRefused(f"Parquet has no such column: {error}. Convert it with a transform.") from error
    return found


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns as Arrow has them; each field carries its number for Parquet in its metadata."""
    wide = iceberg_library().io.pyarrow.schema_to_pyarrow(schema, include_field_ids=True)
    return pa.schema([_small_field(field) for field in wide])


def in_iceberg(schema: pa.Schema) -> pa.Schema:
    """The columns as they come back from Iceberg, which knows fewer types than Arrow."""
    return arrow_schema(iceberg_schema(schema))


def kept_in_iceberg(schema: pa.Schema) -> pa.Schema:
    """The columns of values as the table stores them; ``SchemaRefused`` for a type that Iceberg lacks."""
    return as_schema(in_iceberg(schema)) if len(schema) else schema


def _small_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _small(field.type), field.nullable, field.metadata)


def _small(kind: pa.DataType) -> pa.DataType:
    """The type with 32-bit offsets, as records have it."""
    if pt.is_large_string(kind):
        return pa.string()
    if pt.is_large_binary(kind):
        return pa.binary()
    if pt.is_large_list(kind) or pt.is_list(kind):
        return pa.list_(_small_field(kind.value_field))
    if pt.is_struct(kind):
        return pa.struct([_small_field(field) for field in kind])
    if pt.is_map(kind):
        return pa.map_(_small_field(kind.key_field), _small_field(kind.item_field))
    return kind
