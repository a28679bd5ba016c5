"""Opens the sink of an existing table by its address, whatever the format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from strandline.errors import InvalidInput, NotFound, Unsupported
from strandline.log.read.value_format import named_codec
from strandline.model.addresses import Address, as_address, refuse_credentials
from strandline.model.arguments import Named, checked
from strandline.tables.delta.files import table_folder
from strandline.tables.maintain.contract import MaintainedTable, RecordedTable
from strandline.tables.rows.logged import Value
from strandline.tables.rows.tombstones import Tombstones
from strandline.values.codecs.structs import Json

_ICEBERG: Final = "iceberg://"
_SQLITE: Final = "sqlite:"
_POSTGRES: Final = ("postgresql://", "postgres://")


def is_in_database(address: str) -> bool:
    """Whether an address is that of a table in a SQL database."""
    return address.startswith((_SQLITE, *_POSTGRES))


def sink_at(address: Address, options: Mapping[str, str] | None, **shape: Any) -> MaintainedTable:
    """The sink of a table by its address, as :func:`existing` takes it; Delta is what no other format's address is."""
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
        raise InvalidInput(f"{place} names a database, and no table in it: write {place}#TABLE.")
    if url.startswith(_SQLITE):
        from strandline.tables.sql.sqlite import SqliteSink

        return SqliteSink(place.removeprefix(_SQLITE).removeprefix("//"), table=table, **shape)
    if url.startswith(_POSTGRES):
        from strandline.tables.sql.postgres import PostgresSink

        return PostgresSink(place, table=table, **shape)
    from strandline.tables.delta.sink import DeltaSink

    return DeltaSink(url, options=options, **shape)


def value_of(log: Any) -> Value | None:
    """The codec of a table's values if none is given: the log's, if that names one; None for bytes."""
    with contextlib.suppress(Unsupported):
        return None if log is None or named_codec(log) is None else "log"
    return None


def recorded_at(address: Address, options: Mapping[str, str] | None = None) -> RecordedTable | None:
    """What the table at an address records; None if there is none, or one of another program."""
    try:
        return sink_at(address, options).recorded()
    except NotFound:
        return None


@checked
def existing(
    url: Address,
    *,
    value: Value | None = None,
    key: str | Sequence[str] = (),
    tombstones: Tombstones | None = None,
    dead_letters: Address | bool | None = None,
    name: Named = "default",
    options: Mapping[str, str] | None = None,
    into: Address | None = None,
) -> MaintainedTable:
    """The sink of a table that follows a log; what it keeps is recorded in the table.

    Without ``value`` a table whose columns were inferred has the recorded codec, and any other the record's columns.
    The address of a Delta table, ``iceberg://CATALOG/namespace.table``, ``sqlite:FILE#TABLE`` or
    ``postgresql://host/database#schema.table``. ``dead_letters`` is that of the sink: the place of the letters. A SQL
    database has one for each table, which is used if it exists, or with True. ``into`` is the address of another table,
    whose sink keeps the same.
    ``NotFound`` if there is no table, ``InvalidInput`` if it follows no log.
    """
    other = None if into is None else as_address(into)
    sink = sink_at(url, options, name=name)
    recorded = sink.recorded()
    if recorded is None:
        raise InvalidInput(f"The table {sink.where} follows no log: it was made by another program.")
    if other is not None:
        _check_other(as_address(url), other, recorded)
    if value is None and recorded.inferred is not None:
        value = Json(recorded.inferred)
    shape: dict[str, Any] = {"mode": recorded.opened_as, "value": value, "key": key, "tombstones": tombstones}
    if dead_letters is None and recorded.has_letters and (other is None or is_in_database(other)):
        dead_letters = True
    if recorded.layout is not None:
        shape["layout"] = recorded.layout
    if dead_letters is not None:
        shape["dead_letters"] = dead_letters
    found = sink_at(other or url, options, name=name, **shape)
    if recorded.inferred is not None:
        found = found.with_inferred(recorded.inferred)
    return found if recorded.only is None else found.taking(recorded.only)


def _check_other(address: str, into: str, recorded: RecordedTable) -> None:
    """``InvalidInput`` if a table cannot be built at ``into`` as the one at ``address`` is."""
    if _canonical(address) == _canonical(into):
        raise InvalidInput(f"{into} is the table itself, which would be replaced: choose another path for the new one.")
    if recorded.is_transformed:
        raise InvalidInput(
            f"The rows of the table {address} come from a transform: build {into} in a program, by a sink with that "
            "transform."
        )


def _canonical(address: str) -> str:
    """The address without other spellings of its file or folder."""
    if address.startswith((_ICEBERG, *_POSTGRES)):
        return address
    place, mark, table = address.partition("#") if address.startswith(_SQLITE) else (address, "", "")
    path = place.removeprefix(_SQLITE).removeprefix("//") if mark else table_folder(place)
    return place.rstrip("/") if path is None else os.path.realpath(path) + mark + table.lower()
