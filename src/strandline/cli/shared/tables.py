"""Tables for commands: the sink of a table by its address."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import strandline as sl
from strandline.cli.shared.common import Schema
from strandline.cli.shared.decoding import json_codec
from strandline.cli.shared.options import argument, option
from strandline.errors import InvalidInput, Unsupported
from strandline.log.read.value_format import named_codec
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.opening import is_in_database
from strandline.tables.rows.logged import Value

TableUrl = Annotated[
    str,
    argument(
        "TABLE",
        "The address of the table: of a Delta table, iceberg://CATALOG/namespace.table, sqlite:FILE#TABLE, or "
        "postgresql://host/database#schema.table.",
    ),
]


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The options of commands for a table that say how records become its rows."""

    schema: Schema = None
    key: Annotated[list[str] | None, option("COLUMN", "A column that identifies a row; may be repeated.")] = None
    tombstones: Annotated[
        Literal["key", "json", "dead-letters"] | None,
        option(
            "HOW",
            "How a delete without a value names its row, with --key: key, the record's key is the text of that "
            "column; json, it is a JSON object with it; or dead-letters, it is set aside. Without it the first one is "
            "an error.",
        ),
    ] = None

    def value(self, log: Any) -> Value | None:
        """The codec of the values: by the schema, else as the log says, if it does; None for bytes."""
        if self.schema is not None:
            return json_codec(self.schema)
        with suppress(Unsupported):
            return None if log is None or named_codec(log) is None else "log"
        return None

    def shape(self, value: Value | None) -> dict[str, Any]:
        """The arguments of a sink."""
        return {"value": value, "key": tuple(self.key or ()), "tombstones": self.tombstones}

    def sink(self, url: str, log: Any, **more: Any) -> MaintainedTable:
        """The sink of a table that is there; ``more`` are arguments of :func:`strandline.tables.existing`."""
        return sl.tables.existing(url, **self.shape(self.value(log)), **more)


def letters_at(table: str, named: str | None) -> str | bool | None:
    """The place of a table's dead letters as its sink takes it: those of a SQL database are beside the table."""
    if named is None or not is_in_database(table):
        return named
    if named != "yes":
        raise InvalidInput("The dead letters of a table in a SQL database are beside it: write --dead-letters yes.")
    return True
