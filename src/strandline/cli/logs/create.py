"""``strandline create``: make a log, and record the format of its values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt, LogPlace
from strandline.cli.shared.common import connecting, retention_option
from strandline.cli.shared.decoding import codec_by, named_format
from strandline.cli.shared.options import option
from strandline.errors import NotALog, WrongKind
from strandline.tier.read.tiered_log import hot_tier

_CODECS: Final = {"json": "Json", "avro": "Avro", "messagepack": "MessagePack", "arrow": "Arrow"}
"""The formats of values that a schema in a file describes."""


@connecting
def create(
    place: AnyLogAt,
    *,
    retention: Annotated[str | None, retention_option("What the log")] = None,
    value: Annotated[
        Literal["json", "avro", "messagepack", "arrow"] | None,
        option("FORMAT", "The format of its values, with --schema: json (the default), avro, messagepack or arrow."),
    ] = None,
    schema: Annotated[Path | None, option("FILE", "The fields of its values: a JSON Schema or an Avro schema.")] = None,
) -> None:
    """Make a log, of plain bytes or with a format of values.

    Producers, tables and readers of a typed log take the format from there. A log that is there already stays as it
    is, and is refused if its values have another format.

    Example: strandline create ./orders --schema order.json --retention age:7d
    """
    if value is not None and schema is None:
        raise typer.BadParameter(f"--value {value} needs the fields of the values: --schema FILE.")
    codec = None if schema is None else codec_by(getattr(sl.values, _CODECS[value or "json"]), schema)
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
