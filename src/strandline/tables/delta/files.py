"""Data files of a Delta table, through ``deltalake``'s own storage: the same address and options as the table's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from strandline.errors import TransientStorageError
from strandline.model.addresses import split_address
from strandline.storage.disk import DISK, Disk, FolderRow, is_linked
from strandline.tables.files.data_files import named_reading, put_locally
from strandline.tables.files.paths import linked
from strandline.tables.rows.partitions import partition_text
from strandline.tables.written import DataFile

_PIECE: Final = 8 << 20


def table_folder(url: str) -> str | None:
    """The folder of a table on this machine's disk; None for a table in a bucket."""
    if "://" not in url:
        return url
    parts = split_address(url)
    return unquote(parts.path) if parts.scheme == "file" else None


def address_in_letters(url: str) -> str:
    """The address of a table as its letters name it: the same for each spelling of a folder.

    >>> address_in_letters("/tables/x/../a b/"), address_in_letters("file:///tables/a%20b")
    ('/tables/a b', '/tables/a b')
    >>> address_in_letters("s3://bucket/a/")
    's3://bucket/a'
    """
    folder = table_folder(url)
    return url.rstrip("/") if folder is None else os.path.abspath(folder)  # noqa: PTH100 - no lookup, and no ".."


@dataclass(frozen=True, slots=True)
class DeltaFiles:
    """Writes and reads data files; see :class:`~strandline.tables.files.data_files.TableFiles`."""

    url: str
    options: Mapping[str, str] = field(repr=False)
    disk: Disk = field(default=DISK, compare=False, repr=False)
    partitions: Mapping[str, Mapping[str, pa.Scalar]] = field(default_factory=dict, compare=False, repr=False)
    """The values of the partitions of files by other writers, by path: such a file may lack these columns."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(DeltaFiles, self.url, self.options, partitions=self.partitions), ()  # a worker has its own disk

    def stored(self, rows: pa.Table) -> pa.Table:
        """The rows: Delta finds columns by name."""
        return rows

    def put(self, name: str, data: memoryview) -> str:
        """Store a new file; on a local disk it is synced."""
        folder = table_folder(self.url)
        if folder is not None:
            put_locally(self.disk, f"{folder}/{name}", data)
            return name
        try:
            # Not through pyarrow: deltalake's own stream takes bytes, and pyarrow hands it buffers.
            stream = self.handler()._handler.open_output_stream(name, None)  # noqa: SLF001
            with contextlib.closing(stream):
                for start in range(0, len(data), _PIECE):
                    stream.write(bytes(data[start : start + _PIECE]))
        except OSError as error:
            raise TransientStorageError(f"A data file of the table {self.url} could not be written: {error}") from error
        return name

    def read(self, path: str) -> pa.Table:
        """The rows of a file, with the values of its partition."""
        rows = self._stored(path)
        for name, value in self.partitions.get(path, {}).items():
            if name not in rows.column_names:
                rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
        return rows

    def _stored(self, path: str) -> pa.Table:
        self.refuse_links([path])
        folder = table_folder(self.url)
        with named_reading(path, self.url):
            if folder is not None:
                return _rows(f"{folder}/{path}")
            with self.handler().open_input_file(path) as file:
                return _rows(pa.BufferReader(file.read()))

    def refuse_links(self, paths: Iterable[str]) -> None:
        """``CorruptData`` for a file behind a symbolic link on a local disk."""
        folder = table_folder(self.url)
        for path in () if folder is None else paths:
            if is_linked(str(folder), path):
                raise linked(path, self.url)

    def listed(self, *, recursive: bool) -> list[FolderRow]:
        """What is in the place of the table, which may be nothing; or all that is in its folder, also deeper."""
        from pyarrow.fs import FileSelector, FileType

        try:
            found = self.handler().get_file_info_selector(
                FileSelector("", allow_not_found=not recursive, recursive=recursive)
            )
        except OSError as error:
            raise TransientStorageError(f"The files of the table {self.url} could not be listed: {error}") from error
        return [FolderRow(one.path, one.type is FileType.Directory) for one in found]

    def history(self) -> list[str]:
        """The names of the files in the folder of the table's history."""
        from pyarrow.fs import FileSelector

        folder = table_folder(self.url)
        if folder is not None:
            return [row.name for row in self.disk.scan(f"{folder}/_delta_log") if not row.is_folder]
        try:
            found = self.handler().get_file_info_selector(FileSelector("_delta_log"))
        except OSError as error:
            raise TransientStorageError(f"The history of the table {self.url} could not be listed: {error}") from error
        return [one.path.rpartition("/")[2] for one in found]

    def present(self) -> set[str]:
        """The paths of all files."""
        return {row.name for row in self.listed(recursive=True) if not row.is_folder}

    def remove(self, path: str) -> None:
        """Remove a file that no version names; absent is fine."""
        folder = table_folder(self.url)
        if folder is not None:
            self.disk.remove(f"{folder}/{path}")
            return
        try:
            self.handler().delete_file(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise TransientStorageError(f"The data file {path} of the table {self.url} stays: {error}") from error

    def handler(self, place: str | None = None) -> Any:
        """The library's access to the table's folder, or to another place of the same store."""
        from deltalake.fs import DeltaStorageHandler

        return DeltaStorageHandler(place or self.url, dict(self.options) or None)


def _rows(source: Any) -> pa.Table:
    """The rows of a Parquet file. Spark's connector writes times as 96-bit numbers in UTC, without a zone."""
    with pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as file:
        leaves = (file.schema.column(at) for at in range(len(file.schema)))
        old = {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}
        rows = file.read(use_threads=False)
    if not old:
        return rows
    return rows.cast(pa.schema([one.with_type(_in_utc(one.name, one.type, old)) for one in rows.schema]))


def _in_utc(path: str, kind: pa.DataType, old: AbstractSet[str]) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_in_utc(f"{path}.{one.name}", one.type, old)) for one in kind])
    return pa.timestamp("us", "UTC") if path in old else kind


def added_file(file: DataFile, now: int, partitions: Sequence[str], *, is_new: bool = True) -> Any:
    """The action that adds a file; ``now`` in milliseconds. ``partitions``: the partition's columns."""
    from deltalake.transaction import AddAction

    values = dict(zip(partitions, file.partition, strict=True))
    return AddAction(quote(file.path), file.size, values, now, is_new, _statistics(file, values))


def removed_file(path: str, size: int, now: int, partition: Mapping[str, pa.Scalar], *, is_gone: bool = True) -> Any:
    """The action that removes a file, by its path in the history. The change feed needs its size and partition."""
    from deltalake.transaction import RemoveAction

    values = {name: partition_text(value.as_py()) for name, value in partition.items()}
    return RemoveAction(unquote(path), is_gone, now, size, values)  # the library encodes the path again


def _statistics(file: DataFile, partition: Collection[str]) -> str:
    """Bounds of all columns, or of none: ``deltalake`` skips the rows of a file that has bounds of some only."""
    bounds = {name: one for name, one in file.statistics.items() if name not in partition}
    known = {name: one for name, one in bounds.items() if one.nulls < file.rows}
    found: dict[str, Any] = {"numRecords": file.rows}
    if bounds and all(one.low is not None for one in known.values()):
        found["minValues"] = {name: _value(one.low) for name, one in known.items()}
        found["maxValues"] = {name: _value(one.high) for name, one in known.items()}
        found["nullCount"] = {name: one.nulls for name, one in bounds.items()}
    return msgspec.json.encode(found).decode()


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        naive = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return f"{naive.isoformat(timespec='microseconds')}Z"
    if isinstance(value, Decimal):
        return msgspec.Raw(f"{value:f}".encode())  # all digits: readers get others from a float or an exponent
    return value.isoformat() if isinstance(value, date) else value
