"""The ``strandline wal`` command group."""

from __future__ import annotations

import typer

from strandline.cli.wal.inspect import inspect
from strandline.cli.wal.moving import export, migrate
from strandline.cli.wal.repair import repair
from strandline.cli.wal.verify import verify

wal = typer.Typer(
    no_args_is_help=True,
    help="Inspect, verify, repair, export and migrate a write-ahead log, which is a folder on this machine.",
    short_help="Inspect, verify, repair, export and migrate a write-ahead log.",
    rich_markup_mode="markdown",
)
wal.command()(inspect)
wal.command()(verify)
wal.command()(repair)
wal.command()(export)
wal.command()(migrate)
