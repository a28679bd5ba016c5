"""The tables that ``sl.tables`` looks after: what each kind of sink offers for that, and how one is addressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable
from uuid import UUID

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.log.contract import Log
from strandline.model.addresses import Address, as_address, refuse_credentials
from strandline.model.cursor import Cursor
from strandline.tables.comparison import RowDifferences
from strandline.tables.kinds import RAW, TYPED, Kind
from strandline.tables.logged import Value, is_raw
from strandline.tables.replay import Replayed
from strandline.tables.work import Workers


@dataclass(frozen=True, slots=True)
class TableSize:
    """Version, rows, files and bytes of a table, and its columns. SQL databases count no files."""

    version: int
    rows: int
    files: int
    bytes: int
    columns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """What a table records of itself."""

    mode: Kind
    columns: pa.Schema

    @property
    def has_soft_deletes(self) -> bool:
        """Whether deleted rows are marked, by its columns."""
        names = RAW if is_raw(self.columns) else TYPED
        return self.mode == "latest" and names.deleted in self.columns.names


@runtime_checkable
class MaintainedTable(Protocol):
    """A table sink that can be described, verified, rebuilt, repaired and compacted."""

    @property
    def where(self) -> str:
        """The table, in messages."""

    @property
    def mode(self) -> Kind:
        """The kind of the table."""

    def meet(self, log: Any) -> None:
        """Name the log that the table follows."""

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far the table has applied that log; None if there is no table."""

    def start(self) -> int:
        """The offset at which the table began; ``NotFound`` if there is no table."""

    def size(self) -> TableSize:
        """Its size; ``NotFound`` if there is no table."""

    def recorded(self) -> RecordedTable | None:
        """What the table records; None for a table of another program. ``NotFound`` if there is none."""

    def compared(self, records: pa.Table) -> RowDifferences:
        """Compare the rows with what these records, from the table's start to its cursor, amount to."""

    def rebuilt(self, log: Log, upto: int, workers: Workers | None = None) -> Cursor:
        """Replace all rows by those of the log, from the table's start, in one commit; returns its cursor.

        ``workers`` write the rows: None is this process.
        """

    def compacted(self) -> int:
        """Join small files; returns by how many the table has fewer. ``InvalidInput`` if the format needs none."""

    def vacuumed(self, hours: int) -> int:
        """Remove what no version of the last hours needs. ``InvalidInput`` if the format keeps none."""

    def replay_letters(self, log: Log) -> Replayed:
        """Apply dead letters that can become rows by now, and remove them."""

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Go back to the last state that is known to be right, if needed."""


_ICEBERG: Final = "iceberg://"
_SQLITE: Final = "sqlite:"
_POSTGRES: Final = ("postgresql://", "postgres://")


def is_in_database(address: str) -> bool:
    """Whether an address is that of a table in a SQL database."""
    return address.startswith((_SQLITE, *_POSTGRES))


def sink_at(address: str, options: Mapping[str, str] | None, **shape: Any) -> MaintainedTable:
    """The sink of a table by its address.

    ``iceberg://CATALOG/namespace.table``, ``sqlite:FILE#TABLE`` and ``postgresql://host/database#schema.table``; any
    other address is that of a Delta table.
    """
    url = as_address(address)
    refuse_credentials(url, "PostgreSQL takes user and password from PGUSER, PGPASSWORD or its password file")
    place, _, table = url.partition("#")
    if url.startswith(_ICEBERG):
        from strandline.tables.iceberg.sink import IcebergSink

        catalog, _, identifier = url.removeprefix(_ICEBERG).partition("/")
        if not catalog or not identifier:
            raise InvalidInput("An Iceberg table is addressed as iceberg://CATALOG/namespace.table.")
        return IcebergSink(catalog, identifier, **shape)
    if is_in_database(url) and not table:
        raise InvalidInput("A table in a SQL database is addressed by the database, '#' and the table's name.")
    if url.startswith(_SQLITE):
        from strandline.tables.sql.sqlite import SqliteSink

        return SqliteSink(place.removeprefix(_SQLITE).removeprefix("//"), table=table, **shape)
    if url.startswith(_POSTGRES):
        from strandline.tables.sql.postgres import PostgresSink

        return PostgresSink(place, table=table, **shape)
    from strandline.tables.delta.sink import DeltaSink

    return DeltaSink(url, options=options, **shape)


def existing_sink(
    address: str,
    value: Value | None,
    key: str | Sequence[str],
    name: str,
    options: Mapping[str, str] | None,
    *,
    dead_letters: Address | bool | None,
) -> MaintainedTable:
    """The sink of a table that is there, with what the table records of itself."""
    sink = sink_at(address, options, name=name)
    recorded = sink.recorded()
    if recorded is None:
        raise InvalidInput(f"The table {sink.where} follows no log: it was made by another program.")
    shape: dict[str, Any] = {"mode": recorded.mode, "value": value, "key": key, "name": name}
    if recorded.has_soft_deletes:
        shape["soft_deletes"] = True
    if dead_letters is not None:
        shape["dead_letters"] = dead_letters
    return sink_at(address, options, **shape)
