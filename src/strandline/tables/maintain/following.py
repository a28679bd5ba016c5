"""The sink of a table that a follower makes, or goes on with: its codec, its layout and its dead letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Final, Literal, TypeAlias

from strandline.errors import InvalidInput
from strandline.model.addresses import Address, as_address
from strandline.storage.disk import DISK, Disk
from strandline.tables.maintain.contract import MaintainedTable, RecordedTable
from strandline.tables.maintain.opening import is_in_database, sink_at, value_of
from strandline.tables.rows.kinds import Mode
from strandline.tables.rows.logged import Value
from strandline.tables.rows.partitions import Layout
from strandline.values.codecs.envelopes import BeforeAfter, Debezium
from strandline.values.codecs.structs import Json
from strandline.values.contract import Codec
from strandline.values.schema.files import json_codec

Envelope: TypeAlias = Literal["debezium", "before-after"]
"""Change events around rows: Debezium's, or plain ``before`` and ``after``."""

_ENVELOPES: Final[dict[Envelope, Callable[[Codec], Codec]]] = {"debezium": Debezium, "before-after": BeforeAfter}
_PLAIN: Final = Layout()


def followed(
    address: Address,
    recorded: RecordedTable | None,
    *,
    mode: Mode | None = None,
    letters: str | None = None,
    layout: Layout = _PLAIN,
    inferred: str | None = None,
    options: Mapping[str, str] | None = None,
    **shape: Any,
) -> MaintainedTable:
    """The sink of a table: one that is there stays as it is recorded.

    A new one keeps the latest row of each key, unless ``mode`` says otherwise. ``layout`` has what is asked for, and
    the rest is as recorded; ``letters`` is as :func:`letters_at` takes it. ``InvalidInput`` for what its database does
    not have.
    """
    place = letters_at(as_address(address), letters)
    shape |= _laid_out(as_address(address), layout, None if recorded is None else recorded.layout)
    shape["mode"] = mode or ("latest" if recorded is None else recorded.opened_as)
    if place is not None:
        shape["dead_letters"] = place
    sink = sink_at(address, options, **shape)
    return sink if inferred is None else sink.with_inferred(inferred)


def followed_value(
    log: Any,
    recorded: RecordedTable | None,
    *,
    schema: str | PathLike[str] | None,
    envelope: Envelope | None = None,
    raw: bool = False,
    disk: Disk = DISK,
) -> Value | None:
    """The codec of a table's values: by a schema, else as it was inferred, else as the log says; None for bytes.

    With an ``envelope`` the values are change events, and the schema is that of their rows. ``InvalidInput`` for an
    envelope without a schema.
    """
    if envelope is not None and schema is None:
        raise InvalidInput(f"The envelope {envelope} is around rows: name their schema, too.")
    if raw:
        return None
    if schema is not None:
        codec = json_codec(schema, disk)
        return codec if envelope is None else _ENVELOPES[envelope](codec)
    if recorded is not None and recorded.inferred is not None:
        return Json(recorded.inferred)
    return value_of(log)


def letters_at(table: str, named: str | None) -> str | bool | None:
    """The place of a table's dead letters as its sink takes it: those of a SQL database are beside the table."""
    if named is None or not is_in_database(table):
        return named
    if named != "yes":
        raise InvalidInput(f"The dead letters of {table} are beside it, in its SQL database: say yes, and no place.")
    return True


def _laid_out(table: str, asked: Layout, recorded: Layout | None) -> dict[str, Any]:
    """The sink's argument for the layout; none for a table without one."""
    if is_in_database(table):
        if asked.partition_by or asked.cluster_by:
            raise InvalidInput(
                f"{table} is in a SQL database, which lays its tables out itself: leave out partitions and clustering."
            )
        if asked.upkeep is not None:
            raise InvalidInput(f"{table} is in a SQL database, which looks after its tables itself: leave out upkeep.")
        return {}
    known = _PLAIN if recorded is None else recorded
    return {
        "layout": Layout(asked.partition_by or known.partition_by, asked.cluster_by or known.cluster_by, asked.upkeep)
    }
