"""Tables with a layout in both formats, as other programs see them: rows, partitions, files that a query needs."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import closing
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl

_SCANNED = re.compile(r"Total Files Read: (\d+)")


def duck(*extensions: str) -> Any:
    """A connection to DuckDB with its extensions; its settings and temporary tables are its own."""
    return _extended(*extensions).cursor()


@cache
def _extended(*extensions: str) -> Any:
    """DuckDB with its extensions, which it would download by itself. To load them takes longer than to use them."""
    connection = duckdb.connect()
    for name in extensions:
        folder = resources.files(f"duckdb_extension_{name}") / "extensions" / f"v{duckdb.__version__}"
        connection.load_extension(str(folder / f"{name}.duckdb_extension"))
    return connection


class Place:
    """Where a table is, in one format."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self) -> None:
        """Close the catalog, if there is one."""

    def scan(self) -> str:
        """The table in DuckDB's SQL."""
        raise NotImplementedError

    def asked(self, condition: str, extensions: tuple[str, ...]) -> tuple[int, int]:
        """How many rows DuckDB finds, and how many files it reads for that."""
        with closing(duck(*extensions)) as connection:
            connection.execute("SET timezone = 'America/New_York'")
            found = connection.execute(f"SELECT count(*) FROM {self.scan()} WHERE {condition}").fetchone()
            told = connection.execute(f"EXPLAIN ANALYZE SELECT * FROM {self.scan()} WHERE {condition}").fetchall()
        read = _SCANNED.search(told[0][1])
        return found[0], int(read[1]) if read else 0


class DeltaPlace(Place):
    name = "delta"

    def sink(self, **options: Any) -> sl.DeltaSink:
        return sl.DeltaSink(str(self.folder / "table"), dead_letters=str(self.folder / "letters"), **options)

    @property
    def address(self) -> str:
        return str(self.folder / "table")

    def table(self) -> DeltaTable:
        return DeltaTable(self.address)

    def rows(self) -> pa.Table:
        return pa.table(self.table().to_pyarrow_table())

    def scan(self) -> str:
        return f"delta_scan('{self.address}')"

    def duck(self, condition: str) -> tuple[int, int]:
        return self.asked(condition, ("delta",))

    def files(self) -> dict[str, tuple[Any, ...]]:
        """The path of each file, and the values of its partition."""
        adds = pa.table(self.table().get_add_actions(flatten=True))
        columns = [adds.column(f"partition.{name}") for name in self.table().metadata().partition_columns]
        rows = zip(adds.column("path").to_pylist(), *[column.to_pylist() for column in columns], strict=True)
        return {f"{self.address}/{unquote(path)}": tuple(values) for path, *values in rows}


class IcebergPlace(Place):
    name = "iceberg"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        place = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
        self.catalog = SqlCatalog("c", **place)

    def close(self) -> None:
        self.catalog.close()

    def sink(self, **options: Any) -> sl.IcebergSink:
        return sl.IcebergSink(self.catalog, "shop.orders", dead_letters="shop.letters", **options)

    def table(self) -> Any:
        return self.catalog.load_table("shop.orders")

    def rows(self) -> pa.Table:
        return self.table().scan().to_arrow()

    def scan(self) -> str:
        return f"iceberg_scan('{self.table().metadata_location.removeprefix('file://')}')"

    def duck(self, condition: str) -> tuple[int, int]:
        return self.asked(condition, ("avro", "iceberg"))

    def files(self) -> dict[str, tuple[Any, ...]]:
        tasks = self.table().scan().plan_files()
        count = len(self.table().spec().fields)
        return {
            one.file.file_path.removeprefix("file://"): tuple(one.file.partition[at] for at in range(count))
            for one in tasks
        }


PLACES = {"delta": DeltaPlace, "iceberg": IcebergPlace}


def stored(path: str) -> pa.Table:
    """The rows of one file, as it is."""
    with pq.ParquetFile(path) as file:
        return file.read()


def counts(place: Any) -> Counter[tuple[Any, ...]]:
    """The rows of each partition, by the files themselves."""
    found: Counter[tuple[Any, ...]] = Counter()
    for path, values in place.files().items():
        found[values] += stored(path).num_rows
    return found
