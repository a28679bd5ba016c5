"""Data files of tables: Parquet with statistics, encoded in memory and stored by the table format's own storage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from strandline.errors import CorruptData, NotFound, TransientStorageError
from strandline.storage.disk import Disk, make_own_folder
from strandline.tables.rows.partitions import FileLayout, PartitionValues, divided
from strandline.tables.written import ColumnStatistics, DataFile

ROW_GROUP: Final = 131_072
_LONGEST_TEXT: Final = 64
"""Letters of a text in statistics."""
_LAST_LETTER: Final = "\U0010ffff"
_SURROGATES: Final = 0xD800
_BEHIND_SURROGATES: Final = 0xE000


class TableFiles(Protocol):
    """The data files of one table. Picklable: workers on other machines write and read them."""

    def stored(self, rows: pa.Table) -> pa.Table:
        """The rows as a file holds them: a format may number its columns."""

    def put(self, name: str, data: memoryview) -> str:
        """Store a new file durably; returns its path as the table refers to it."""

    def read(self, path: str) -> pa.Table:
        """The rows of a file."""

    def remove(self, path: str) -> None:
        """Remove a file that no version names; absent is fine."""


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


def write_files(
    files: TableFiles, names: Callable[[], str], rows: pa.Table, layout: FileLayout | None
) -> Iterator[DataFile]:
    """Write a file for each partition of some rows, in the order that the layout gives them; none without rows."""
    for partition, some in divided(layout, rows):
        yield write_file(files, names(), some, partition)


def write_file(files: TableFiles, name: str, rows: pa.Table, partition: PartitionValues = ()) -> DataFile:
    """Encode rows as Parquet and store them. Also the values of their partition, so that a file alone has all rows."""
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
        write_statistics=[one.name for one in rows.schema if _has_statistics(one.type) and not _has_nan(rows, one)],
        metadata_collector=found,
    )
    data = out.getvalue()
    path = files.put(name, memoryview(data))
    return DataFile(path, data.size, rows.num_rows, _statistics(rows, found[0]), partition)


def _has_statistics(kind: pa.DataType) -> bool:
    """Whether the file itself has bounds of the column."""
    is_number = pt.is_integer(kind) or pt.is_floating(kind)
    return bool(is_number or pt.is_string(kind) or pt.is_timestamp(kind) or pt.is_date32(kind))


def _has_nan(rows: pa.Table, one: pa.Field) -> bool:
    """Whether bounds would leave out values: Parquet's know no NaN, and DuckDB skips rows that have one by them."""
    return bool(pt.is_floating(one.type) and pc.any(pc.is_nan(rows.column(one.name))).as_py())


def _statistics(rows: pa.Table, metadata: Any) -> dict[str, ColumnStatistics]:
    """Nulls and bounds of all columns that readers may expect bounds of; bounds that are not known are None."""
    places = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    found: dict[str, ColumnStatistics] = {}
    for one in rows.schema:
        if not (_has_statistics(one.type) or pt.is_boolean(one.type) or pt.is_decimal(one.type)):
            continue
        column = rows.column(one.name)
        place = places.get(one.name) if _has_statistics(one.type) and "." not in one.name else None
        known = column.null_count < rows.num_rows
        low, high = (_bounds(column, metadata, place) or (None, None)) if known else (None, None)
        found[one.name] = ColumnStatistics(low, high, column.null_count)
    return found


def _bounds(column: pa.ChunkedArray, metadata: Any, place: int | None) -> tuple[Any, Any] | None:
    """A value that is not above any, and one that is not below any; None if there are none that each reader knows."""
    if pt.is_floating(column.type) and not pc.all(pc.is_finite(column), skip_nulls=True).as_py():
        return None
    try:
        low, high = _stored_bounds(metadata, place) or pc.min_max(column).as_py().values()
    except (OverflowError, ValueError):  # a time that Python does not have
        return None
    if not pt.is_string(column.type):
        return low, high
    above = text_above(high)
    return None if above is None else (low[:_LONGEST_TEXT], above)


def _stored_bounds(metadata: Any, place: int | None) -> tuple[Any, Any] | None:
    """The bounds by the file's own statistics, which have no long texts; None if they are not complete."""
    if place is None:
        return None
    groups = [metadata.row_group(i).column(place).statistics for i in range(metadata.num_row_groups)]
    known = [group for group in groups if group is not None and group.has_min_max]
    if len(known) != len([group for group in groups if group is None or group.num_values]):
        return None
    return min(group.min for group in known), max(group.max for group in known)


def text_above(text: str) -> str | None:
    """The text, or for a long one a shorter text that is above all that begin alike; None if there is none.

    >>> text_above("a"), text_above("a" * 63 + "bc") == "a" * 63 + "c"
    ('a', True)
    """
    if len(text) <= _LONGEST_TEXT:
        return text
    begin = text[:_LONGEST_TEXT].rstrip(_LAST_LETTER)
    if not begin:
        return None
    following = ord(begin[-1]) + 1
    return begin[:-1] + chr(_BEHIND_SURROGATES if following == _SURROGATES else following)
