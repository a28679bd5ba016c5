"""Data files of tables: Parquet with statistics, encoded in memory and stored by the table format's own storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from strandline.errors import CorruptData, NotFound, TransientStorageError
from strandline.storage.disk import Disk, make_own_folder
from strandline.tables.written import ColumnStatistics, DataFile

ROW_GROUP: Final = 131_072
_LONGEST_TEXT: Final = 64
"""Letters of a text in statistics."""


class TableFiles(Protocol):
    """The data files of one table. Picklable: workers on other machines write and read them."""

    def stored(self, rows: pa.Table) -> pa.Table:
        """The rows as a file holds them: a format may number its columns."""

    def put(self, name: str, data: memoryview) -> str:
        """Store a new file durably; returns its path as the table refers to it."""

    def read(self, path: str) -> pa.Table:
        """The rows of a file."""


def lost_file(path: str, where: str) -> CorruptData:
    """The error for a data file that a table names, and that is gone."""
    return CorruptData(
        f"The data file {path} of the table {where} is gone, though the table names it: put it back, repair it "
        "('strandline table repair'), which goes back to the last version whose files are all there, or build the "
        "table again."
    )


def put_locally(disk: Disk, path: str, data: memoryview) -> None:
    """Store a new file durably on this machine's disk; the first one of a table makes its folder."""
    try:
        disk.write_new(path, [data])
    except NotFound:
        make_own_folder(path.rpartition("/")[0], disk=disk)
        disk.write_new(path, [data])


@contextlib.contextmanager
def named_reading(path: str, where: str) -> Iterator[None]:
    """The errors of a file that cannot be read: ``CorruptData`` if it is damaged or lost."""
    try:
        yield
    except pa.ArrowInvalid as error:
        raise CorruptData(
            f"The data file {path} of the table {where} is damaged ({error}): build the table again."
        ) from error
    except FileNotFoundError as error:
        raise lost_file(path, where) from error
    except OSError as error:
        raise TransientStorageError(f"The data file {path} of the table {where} could not be read: {error}") from error


def write_file(files: TableFiles, name: str, rows: pa.Table) -> DataFile:
    """Encode rows as Parquet and store them."""
    rows = files.stored(rows)
    out = pa.BufferOutputStream()
    found: list[Any] = []
    pq.write_table(
        rows,
        out,
        row_group_size=ROW_GROUP,
        compression="zstd",
        compression_level=1,
        # Opaque values do not repeat: a dictionary takes twice the time and gives larger files.
        use_dictionary=[one.name for one in rows.schema if pt.is_string(one.type) or pt.is_large_string(one.type)],
        write_statistics=[one.name for one in rows.schema if _has_statistics(one.type)],
        metadata_collector=found,
    )
    data = out.getvalue()
    path = files.put(name, memoryview(data))
    return DataFile(path, data.size, rows.num_rows, _statistics(rows, found[0]))


def _has_statistics(kind: pa.DataType) -> bool:
    is_number = pt.is_integer(kind) or pt.is_floating(kind)
    return bool(is_number or pt.is_string(kind) or pt.is_timestamp(kind) or pt.is_date32(kind))


def _needs_statistics(kind: pa.DataType) -> bool:
    """Whether a reader may expect bounds of the column, or of a field inside it."""
    if pt.is_struct(kind):
        return any(_needs_statistics(field.type) for field in kind)
    return _has_statistics(kind) or bool(pt.is_decimal(kind))


def _statistics(rows: pa.Table, metadata: Any) -> dict[str, ColumnStatistics]:
    """Bounds of all columns that readers may expect them of; of none if one of them has no exact bounds.

    ``deltalake`` compares with null where a file has bounds of some columns only, and skips its rows.
    """
    found: dict[str, ColumnStatistics] = {}
    places = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    for one in rows.schema:
        if not _needs_statistics(one.type):
            continue
        column = rows.column(one.name)
        if column.null_count == rows.num_rows:
            found[one.name] = ColumnStatistics(None, None, rows.num_rows)
            continue
        bounds = None if "." in one.name else _bounds(column, metadata, places.get(one.name))
        if bounds is None:
            return {}
        found[one.name] = ColumnStatistics(*bounds, column.null_count)
    return found


def _bounds(column: pa.ChunkedArray, metadata: Any, place: int | None) -> tuple[Any, Any] | None:
    """Lowest and highest value by the file's own statistics; None if they are not exact, or unknown."""
    if place is None or not _has_statistics(column.type):
        return None
    if pt.is_floating(column.type) and not pc.all(pc.is_finite(column), skip_nulls=True).as_py():
        return None
    groups = [metadata.row_group(i).column(place).statistics for i in range(metadata.num_row_groups)]
    known = [group for group in groups if group is not None and group.has_min_max]
    if len(known) != len([group for group in groups if group is None or group.num_values]):
        return None
    try:
        low, high = min(group.min for group in known), max(group.max for group in known)
    except (OverflowError, ValueError):  # a time that Python does not have
        return None
    if pt.is_string(column.type) and len(high) > _LONGEST_TEXT:
        high = high[:_LONGEST_TEXT] + "\U0010ffff"  # not below any text that begins so
    return (low[:_LONGEST_TEXT], high) if pt.is_string(column.type) else (low, high)
