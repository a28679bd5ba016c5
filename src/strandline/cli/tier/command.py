"""The commands of ``strandline tier`` and ``strandline segments``."""

from __future__ import annotations

import typer

from strandline.cli.tier.attach import attach
from strandline.cli.tier.listing import list_
from strandline.cli.tier.picture import map_
from strandline.cli.tier.run import run, serve, truncate
from strandline.cli.tier.status import status
from strandline.cli.tier.verify import verify

tier = typer.Typer(
    no_args_is_help=True,
    help="Give a log a cold tier, and copy what is old into it: once, or as a service.",
    short_help="Give a log a cold tier, and copy what is old into it.",
    rich_markup_mode="markdown",
)
tier.command()(attach)
tier.command()(run)
tier.command()(serve)
tier.command()(status)
tier.command()(truncate)

segments = typer.Typer(
    no_args_is_help=True,
    help="List, draw and verify the segments of a log's cold tier.",
    short_help="List, draw and verify the segments of a cold tier.",
    rich_markup_mode="markdown",
)
segments.command("list")(list_)
segments.command("map")(map_)
segments.command()(verify)
