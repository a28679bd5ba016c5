"""Data files of an Iceberg table, through ``pyiceberg``'s own ``FileIO``; picklable, for workers on other machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.errors import TransientStorageError
from strandline.storage.disk import DISK, Disk, is_linked
from strandline.tables.files.data_files import named_reading, put_locally
from strandline.tables.files.paths import linked
from strandline.tables.written import DataFile

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.schema import Schema


def location_path(location: str) -> str | None:
    """The path of a location on this machine's disk; None for one in a bucket. ``pyiceberg`` decodes nothing in it.

    >>> location_path("file:///tables/a%20b"), location_path("/tables/a b"), location_path("s3://bucket/a")
    ('/tables/a%20b', '/tables/a b', None)
    """
    if "://" not in location:
        return location
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


def data_file(file: DataFile, schema: Schema) -> Any:
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
        partition=Record(),
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
        spec_id=0,
    )
