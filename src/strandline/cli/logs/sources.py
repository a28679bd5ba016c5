"""``strandline sources``: what an object log has ingested, and forgetting a source that has ended."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import object_log_at
from strandline.cli.shared.common import Url, Yes, confirm, guarded
from strandline.cli.shared.groups import ListingGroup, group
from strandline.cli.shared.options import argument
from strandline.cli.shared.text import escaped
from strandline.log.writers.numbered import MAX_SOURCES

sources = group(
    "List what a log has ingested; forget a source that has ended.\n\nSources are ingested logs and topics, Spark "
    f"streams, series of jobs; a log remembers {MAX_SOURCES} at most. **strandline sources URL** lists them.",
    cls=ListingGroup,
)


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no id of a source: 'strandline sources URL' shows them.") from None


@sources.command("list")
@guarded
def list_(url: Url) -> None:
    """List the sources: id, address if it was ingested, position, and the last record that came from each.

    Example: strandline sources list s3://bucket/orders
    """
    found = sl.log.sources(object_log_at(url))
    lines = [_line(one) for one in found]
    lines.append(f"{show.counted(len(found), 'source') if found else 'no sources'}; a log remembers {MAX_SOURCES}")
    show.answer({"sources": [_fields(one) for one in found], "most": MAX_SOURCES}, *lines)


@sources.command()
@guarded
def forget(
    url: Url,
    source: Annotated[UUID, argument("ID", "The id of the source, as 'sources list' shows it.", parser=_id)],
    *,
    yes: Yes = False,
) -> None:
    """Forget a source that has ended, so that the log can remember another one.

    If the same source is ingested again, or a stream or job of the same name runs again, its records are appended
    again.

    Example: strandline sources forget s3://bucket/orders 73726308-2f4c-8a81-b1cc-000000000000
    """
    confirm(f"Forget source {source} of {url}? Ingested again, its records would be appended again.", yes=yes)
    gone = sl.log.forget_source(object_log_at(url), source)
    show.answer(_fields(gone), f"{source} is forgotten; it was at position {gone.position:,}.")


def _line(one: Any) -> str:
    address = "" if one.name is None else f"  {escaped(one.name)}"
    return f"{one.id}{address}  position {one.position:,}  last at offset {one.last_offset:,}, {_when(one.listed)}"


def _fields(one: Any) -> dict[str, Any]:
    return {
        "id": str(one.id),
        "address": one.name,
        "position": one.position,
        "last_offset": one.last_offset,
        "listed": None if one.listed is None else one.listed.isoformat(),
    }


def _when(listed: datetime | None) -> str:
    return "at an unknown time" if listed is None else f"listed {listed:%Y-%m-%d %H:%M:%S}"
