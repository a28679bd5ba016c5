"""Tables for commands: the sink of a table by its address."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import strandline as sl
from strandline.cli.shared.decoding import json_codec
from strandline.errors import Unsupported
from strandline.log.read.value_format import named_codec
from strandline.tables.maintain.contract import MaintainedTable


class DeletesWithoutValue(StrEnum):
    """What deletes without a value mean in a table with --key."""

    KEY = "key"
    JSON = "json"
    DEAD_LETTERS = "dead-letters"


TombstoneOption = Annotated[
    DeletesWithoutValue | None,
    typer.Option(
        "--tombstones",
        metavar="HOW",
        help="How a delete without a value names its row, with --key: key, the record's key is the text of that "
        "column; json, it is a JSON object with it; or dead-letters, it is set aside. Without it the first one is an "
        "error.",
    ),
]
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
    tombstones: DeletesWithoutValue | None = None,
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
    means: Any = None if tombstones is None else tombstones.value
    return sl.tables.existing(url, value=value, key=tuple(key or ()), tombstones=means, name=name, **options)
