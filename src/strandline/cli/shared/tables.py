"""Tables for commands: the sink of a table by its address."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

import strandline as sl
from strandline.cli.shared.decoding import json_codec
from strandline.errors import Unsupported
from strandline.log.read.value_format import named_codec
from strandline.tables.maintain.contract import MaintainedTable

TableUrl = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="The address of the table: of a Delta table, iceberg://CATALOG/namespace.table, sqlite:FILE#TABLE, or "
        "postgresql://host/database#schema.table.",
    ),
]


def followed_table(
    url: str,
    log: Any = None,
    *,
    schema: Path | None = None,
    key: Sequence[str] | None = None,
    name: str = "default",
    **options: Any,
) -> MaintainedTable:
    """The sink of a table; without a schema it decodes as its log says, if the log does."""
    value: Any = None
    if schema is None and log is not None:
        with suppress(Unsupported):
            value = None if named_codec(log) is None else "log"
    if schema is not None:
        value = json_codec(schema)
    return sl.tables.existing(url, value=value, key=tuple(key or ()), name=name, **options)
