"""Data files of tables: Parquet with statistics, encoded in memory and stored by the table format's own storage."""

from __future__ import annotations

from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.model.sink import ColumnStatistics, DataFile

ROW_GROUP: Final = 131_072
_LONGEST_TEXT: Final = 64
"""Longer texts have no statistics: cutting the highest one would make it too low."""


class TableFiles(Protocol):
    """The data files of one table. Picklable: workers on other machines write and read them."""

    def stored(self, rows: pa.Table) -> pa.Table:
        """The rows as a file holds them: a format may number its columns."""

    def put(self, name: str, data: memoryview) -> str:
        """Store a new file durably; returns its path as the table refers to it."""

    def read(self, path: str) -> pa.Table:
        """The rows of a file."""


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
        use_dictionary=[one.name for one in rows.schema if _repeats(one.type)],
        write_statistics=[one.name for one in rows.schema if _has_statistics(one.type)],
        metadata_collector=found,
    )
    data = out.getvalue()
    path = files.put(name, memoryview(data))
    return DataFile(path, data.size, rows.num_rows, _statistics(rows, found[0]))


def _repeats(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _has_statistics(kind: pa.DataType) -> bool:
    is_number = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    return bool(is_number or pa.types.is_string(kind) or pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _statistics(rows: pa.Table, metadata: Any) -> dict[str, ColumnStatistics]:
    """Of the columns whose lowest and highest values readers can rely on; nulls of the others are not counted."""
    places = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    found = {}
    for one in rows.schema:
        if not _has_statistics(one.type) or one.name not in places:
            continue
        groups = [metadata.row_group(i).column(places[one.name]).statistics for i in range(metadata.num_row_groups)]
        nulls = rows.column(one.name).null_count
        known = [group for group in groups if group is not None and group.has_min_max]
        texts = pa.types.is_string(one.type)
        if nulls == rows.num_rows or len(known) != len(groups):
            found[one.name] = ColumnStatistics(None, None, nulls)
            continue
        low, high = min(group.min for group in known), max(group.max for group in known)
        if texts and len(high) > _LONGEST_TEXT:
            low = high = None
        found[one.name] = ColumnStatistics(low, high, nulls)
    return found
