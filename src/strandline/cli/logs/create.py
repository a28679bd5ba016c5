"""``strandline create``: make a log, and record the format of its values."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt, LogPlace
from strandline.cli.shared.common import connecting, retention_option
from strandline.cli.shared.decoding import codec_by, named_format
from strandline.errors import NotALog, WrongKind
from strandline.tier.read.tiered_log import hot_tier
from strandline.values.contract import Codec


class ValueFormat(StrEnum):
    """The formats of values that a schema in a file describes."""

    JSON = "json"
    AVRO = "avro"
    MESSAGEPACK = "messagepack"
    ARROW = "arrow"


@connecting
def create(
    place: AnyLogAt,
    *,
    retention: Annotated[str | None, retention_option("What the log")] = None,
    value: Annotated[
        ValueFormat | None,
        typer.Option(
            "--value",
            metavar="FORMAT",
            help="The format of its values, with --schema: json (the default), avro, messagepack or arrow.",
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option("--schema", metavar="FILE", help="The fields of its values: a JSON Schema or an Avro schema."),
    ] = None,
) -> None:
    """Make a log: plain bytes, or typed, with the format of its values on record.

    Producers, tables and readers of a typed log take the format from there. A log that is there already stays as it
    is, and is refused if its values have another format.

    Example: strandline create ./orders --schema order.json --retention age:7d
    """
    if value is not None and schema is None:
        raise typer.BadParameter(f"--value {value} needs the fields of the values: --schema FILE.")
    codec = None if schema is None else codec_from_file(value or ValueFormat.JSON, schema)
    is_new = _is_absent(place)
    with place.writing(create=True, retention=retention if is_new else None, value=codec) as log:
        hot = hot_tier(log)
        fields: dict[str, Any] = {
            "url": log.url,
            "log_id": str(log.log_id),
            "created": is_new,
            "retention": str(hot.identity.retention) if isinstance(hot, sl.log.ObjectLog) else None,
            "value": named_format(hot),
        }
    values = "plain bytes" if fields["value"] is None else fields["value"]
    said = "is created" if is_new else "was there already, and stays as it is"
    show.answer(fields, f"{fields['url']} {said}; values: {values}")


def codec_from_file(kind: ValueFormat, schema: Path) -> Codec:
    """The codec of values in a format, with the schema in a file."""
    kinds: dict[ValueFormat, Callable[[str], Codec]] = {
        ValueFormat.JSON: sl.values.Json,
        ValueFormat.AVRO: sl.values.Avro,
        ValueFormat.MESSAGEPACK: sl.values.MessagePack,
        ValueFormat.ARROW: sl.values.Arrow,
    }
    return codec_by(kinds[kind], schema)


def _is_absent(place: LogPlace) -> bool:
    """Whether there is no log yet; something else there is refused."""
    if place.is_node:
        return False
    try:
        with place.reading():
            return False
    except WrongKind:
        raise
    except NotALog:
        return True
