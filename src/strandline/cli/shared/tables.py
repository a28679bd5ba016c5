"""Tables for commands: the sink of a table by its address."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

import strandline as sl
from strandline.cli.shared.common import Schema
from strandline.cli.shared.decoding import say_notes
from strandline.cli.shared.options import argument, flag, option
from strandline.errors import InvalidInput
from strandline.tables.maintain.contract import MaintainedTable, RecordedTable
from strandline.tables.maintain.following import Envelope, followed_value
from strandline.tables.rows.logged import Value
from strandline.tables.rows.partitions import Layout, Upkeep
from strandline.values.schema.json_schema_text import json_schema_of

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
    envelope: Annotated[
        Envelope | None,
        option(
            "KIND",
            "The values are change events around rows of the schema: debezium, with before, after and op; or "
            "before-after, with these two alone. A delete takes the row away.",
        ),
    ] = None
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
        return followed_value(log, None, schema=self.schema, envelope=self.envelope)

    def shape(self, value: Value | None) -> dict[str, Any]:
        """The arguments of a sink."""
        return {"value": value, "key": tuple(self.key or ()), "tombstones": self.tombstones}

    def sink(self, url: str, log: Any, **more: Any) -> MaintainedTable:
        """The sink of a table that is there; ``more`` are arguments of :func:`strandline.tables.existing`."""
        return sl.tables.existing(url, **self.shape(self.value(log)), **more)


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """The options of a command that makes tables: how values become columns, if no schema is given."""

    raw: Annotated[
        bool, flag("Keys and values as bytes, also of a log that names the format of its values.", "--no-decode")
    ] = False
    infer: Annotated[
        bool,
        flag(
            "For a first look: choose the columns of a new table by a sample of the records that are there now. The "
            "table says so, and keeps them; run again it takes those that it has.",
            "--infer",
        ),
    ] = False

    def check(self, rows: RowOptions, *, has_many: bool) -> None:
        """Refuse what does not go together."""
        if self.raw and rows.schema is not None:
            raise typer.BadParameter("--schema decodes values: leave out --no-decode.")
        if rows.envelope is not None and rows.schema is None:
            raise typer.BadParameter("--envelope is around rows: name their schema, --schema FILE.")
        if self.infer and (self.raw or rows.schema is not None or has_many):
            raise typer.BadParameter("--infer goes with neither --schema nor --no-decode nor --by.")

    def value(self, rows: RowOptions, log: Any, recorded: RecordedTable | None) -> tuple[Value | None, str | None]:
        """The codec of the values, and the inferred schema that a new table is to record."""
        known = None if recorded is None or self.raw or rows.schema is not None else recorded.inferred
        if not self.infer or known is not None:
            value = followed_value(log, recorded, schema=rows.schema, envelope=rows.envelope, raw=self.raw)
            return value, known
        if recorded is not None:
            raise InvalidInput("The table is there already, and its columns were not inferred: leave out --infer.")
        found = sl.bulk.infer(log)
        say_notes(found)
        about = f"For a first look: columns inferred from {found.source}, and fixed since."
        text = json.dumps({"description": about, **json_schema_of(found.schema)})
        return sl.values.Json(text), text


@dataclass(frozen=True, slots=True)
class NewTableOptions(RowOptions):
    """The options of a command that may make a table: also how its files are laid out, and looked after."""

    partition_by: Annotated[
        list[str] | None,
        option(
            "COLUMN",
            "Divide a new Delta or Iceberg table by a column, or by day(COLUMN) or hour(COLUMN) of a time; may be "
            "repeated.",
        ),
    ] = None
    cluster_by: Annotated[
        list[str] | None,
        option("COLUMN", "Order the rows of a new Delta or Iceberg table's files by a column; may be repeated."),
    ] = None
    upkeep: Annotated[
        float | None,
        option(
            "HOURS",
            "Join small files between the commits, and remove versions that were replaced more than so many hours ago; "
            "for Delta and Iceberg.",
        ),
    ] = None

    @property
    def layout(self) -> Layout:
        """The layout as given."""
        upkeep = None if self.upkeep is None else Upkeep(self.upkeep)
        return Layout(self.partition_by or (), self.cluster_by or (), upkeep)
