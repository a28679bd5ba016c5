"""Columns and data files of an Iceberg table, through ``pyiceberg``; workers on other machines write and read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from strandline.errors import MissingExtra, SchemaRefused, TransientStorageError
from strandline.storage.disk import DISK, Disk, is_linked
from strandline.tables.files.data_files import named_reading, put_locally
from strandline.tables.files.paths import linked
from strandline.tables.rows.partitions import FileLayout
from strandline.tables.written import DataFile
from strandline.values.schema.schemas import as_schema

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.partitioning import PartitionSpec
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


def location_path(location: str) -> str | None:
    """The path of a location on this machine's disk; None for one in a bucket. ``pyiceberg`` decodes nothing in it.

    >>> location_path("file:///tables/a%20b"), location_path("/tables/a b"), location_path("s3://bucket/a")
    ('/tables/a%20b', '/tables/a b', None)
    >>> location_path("file:/tables/a")  # so Hive spells it
    '/tables/a'
    """
    if "://" not in location:
        return location.removeprefix("file:")
    return location.removeprefix("file://") if location.startswith("file:///") else None


@dataclass(frozen=True, slots=True)
class IcebergFiles:
    """Writes and reads data files; see :class:`~strandline.tables.files.data_files.TableFiles`."""

    io: FileIO = field(repr=False)
    location: str
    numbered: pa.Schema = field(repr=False)
    """The columns with their numbers: readers find columns by number, not by name."""
    disk: Disk = field(default=DISK, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return IcebergFiles, (self.io, self.location, self.numbered)  # a worker has its own disk

    def stored(self, rows: pa.Table) -> pa.Table:
        """The rows with numbered columns."""
        return rows.select(self.numbered.names).cast(self.numbered)

    def put(self, name: str, data: memoryview) -> str:
        """Store a new file; on a local disk it is synced. Returns its whole address."""
        path = f"{self.location}/data/{name}"
        local = location_path(path)
        if local is not None:
            put_locally(self.disk, local, data)
            return path
        try:
            with self.io.new_output(path).create() as stream:
                stream.write(bytes(data))
        except OSError as error:
            raise TransientStorageError(f"The data file {path} could not be written: {error}") from error
        return path

    def read(self, path: str) -> pa.Table:
        """The rows of a file."""
        folder, local = location_path(self.location), location_path(path)
        if folder is not None and local is not None and is_linked(folder, local.removeprefix(f"{folder}/")):
            raise linked(path, self.location)
        with named_reading(path, self.location), self.io.new_input(path).open() as stream:
            return pq.read_table(pa.BufferReader(stream.read()), use_threads=False)

    def remove(self, path: str) -> None:
        """Remove a file that no snapshot names; absent is fine."""
        local = location_path(path)
        if local is not None:
            self.disk.remove(local)
            return
        try:
            self.io.delete(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise TransientStorageError(f"The data file {path} stays: {error}") from error


def partition_spec(layout: FileLayout | None, schema: Schema) -> PartitionSpec:
    """The partitions of a layout."""
    from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
    from pyiceberg.transforms import DayTransform, HourTransform, IdentityTransform

    kinds: dict[str | None, Any] = {None: IdentityTransform, "day": DayTransform, "hour": HourTransform}
    fields = [
        PartitionField(
            schema.find_field(one.column).field_id, PARTITION_FIELD_ID_START + at, kinds[one.unit](), one.name
        )
        for at, one in enumerate(() if layout is None else layout.fields)
    ]
    return PartitionSpec(*fields)


def is_partitioned_by(layout: FileLayout | None, spec: PartitionSpec, schema: Schema) -> bool:
    """Whether a table has the partitions of a layout, and no others."""
    wanted = () if layout is None else layout.fields
    found = [(schema.find_column_name(one.source_id), str(one.transform)) for one in spec.fields]
    return found == [(one.column, one.unit or "identity") for one in wanted]


def data_file(file: DataFile, schema: Schema, spec: int) -> Any:
    """A written file as a manifest lists it, with the statistics by which readers skip it."""
    from pyiceberg.conversions import to_bytes
    from pyiceberg.manifest import DataFile as Listed
    from pyiceberg.manifest import DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    columns: dict[str, Any] = {one.name: one for one in schema.fields}
    known = {columns[name]: one for name, one in file.statistics.items() if name in columns}
    bounded = {column: one for column, one in known.items() if one.low is not None}
    return Listed.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=FileFormat.PARQUET,
        partition=Record(*file.partition),
        record_count=file.rows,
        file_size_in_bytes=file.size,
        column_sizes={},
        value_counts={column.field_id: file.rows for column in known},
        null_value_counts={column.field_id: one.nulls for column, one in known.items()},
        nan_value_counts={},
        lower_bounds={column.field_id: to_bytes(column.field_type, one.low) for column, one in bounded.items()},
        upper_bounds={column.field_id: to_bytes(column.field_type, one.high) for column, one in bounded.items()},
        key_metadata=None,
        split_offsets=None,
        equality_ids=None,
        sort_order_id=None,
        spec_id=spec,
    )
