"""``strandline create``: make a log, and record the format of its values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt, LogPlace
from strandline.cli.shared.common import connecting, retention_option
from strandline.cli.shared.decoding import inferred, say_notes
from strandline.cli.shared.options import option
from strandline.errors import NotALog, WrongKind
from strandline.serve.log_state import named_format
from strandline.tier.read.tiered_log import hot_tier
from strandline.values.schema.files import codec_by

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
    content_type: Annotated[
        str | None, option("TYPE", "The media type of its values, for readers over HTTP, such as application/json.")
    ] = None,
    infer: Annotated[
        str | None,
        option(
            "SOURCE",
            "Make nothing, and print a JSON Schema that fits the values there: files that are to be loaded, or a log. "
            "Save it, edit it, and give it with --schema.",
        ),
    ] = None,
) -> None:
    """Make a log, of plain bytes or with a format of values.

    Producers, tables and readers of a typed log take the format from there. A log that is there already stays as it
    is, and is refused if its values have another format.

    Examples: strandline create ./orders --schema order.json --retention age:7d

    strandline create ./orders --infer ./2026-11.jsonl > order.json
    """
    if infer is not None:
        if schema is not None or value is not None or retention is not None or content_type is not None:
            raise typer.BadParameter("--infer only prints a schema: give the other options when the log is made.")
        _propose(infer, place)
        return
    if value is not None and schema is None:
        raise typer.BadParameter(f"--value {value} needs the fields of the values: --schema FILE.")
    codec = None if schema is None else codec_by(getattr(sl.values, _CODECS[value or "json"]), schema)
    is_new = _is_absent(place)
    with place.writing(
        create=True, retention=retention if is_new else None, value=codec, content_type=content_type
    ) as log:
        hot = hot_tier(log)
        fields: dict[str, Any] = {
            "url": log.url,
            "log_id": str(log.log_id),
            "created": is_new,
            "retention": str(hot.identity.retention) if isinstance(hot, sl.log.ObjectLog) else None,
            "value": named_format(hot),
            "content_type": hot.content_type,
        }
    values = "plain bytes" if fields["value"] is None else fields["value"]
    values = values if fields["content_type"] is None else f"{values}, {fields['content_type']}"
    said = "is created" if is_new else "was there already, and stays as it is"
    show.answer(fields, f"{fields['url']} {said}; values: {values}")


def _propose(source: str, place: LogPlace) -> None:
    """Print a schema for the values at an address; what was ambiguous is said beside it."""
    found = inferred(source)
    fields = {"schema": found.document, "notes": found.notes, "values": found.values, "unfit": found.unfit}
    show.answer(fields, *found.text.splitlines())
    say_notes(found)
    if not show.for_programs():
        show.line(
            f"Nothing is made. Save this, edit it, and give it: strandline create {place.url} --schema FILE",
            file=sys.stderr,
        )


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
