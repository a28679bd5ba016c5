"""``strandline tier attach``: attaches a cold tier to a log."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.tier.shared import Place, open_to_look
from strandline.tier.attachment import PARTITIONS
from strandline.tier.opening import attach as give
from strandline.tier.opening import cold_cell, log_address


@guarded
def attach(
    log: Place,
    *,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Where segments are put; by default 'cold' beside the log.", show_default=False
        ),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where their events are: an address, by default 'events' in that store, or kafka://host:port/topic.",
            show_default=False,
        ),
    ] = None,
    partitions: Annotated[
        int, typer.Option(min=1, help="How many partitions the events have; logs may share them.")
    ] = PARTITIONS,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Give a log a cold tier: durably say where its segments and their events are. Nothing is copied yet.

    Whoever opens the log from now on reads both tiers as one. Repeating it changes nothing; a log has one cold tier,
    and another one is refused.
    """
    opened = open_to_look(log)
    known = cold_cell(opened).look()
    cold = give(opened, store, events, partitions=partitions)
    if json:
        url, fields = log_address(opened), asdict(cold)
        show.document({"url": url, **fields, "log_id": str(cold.log_id), "attached": known is None})
        return
    has = "has its cold tier" if known is None else "had its cold tier already"
    out = show.out()
    out.print(f"{log_address(opened)} {has}.", soft_wrap=True)
    out.print(f"  segments  {cold.store}", soft_wrap=True)
    out.print(f"  events    {cold.events}  {show.counted(cold.partitions, 'partition')}", soft_wrap=True)
