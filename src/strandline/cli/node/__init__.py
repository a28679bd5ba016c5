"""``strandline node`` and ``strandline promote``: run, query and administer the nodes of a log."""

from __future__ import annotations

import typer

from strandline.cli.node.admin import rebootstrap, reset_term, status, topology, unregister
from strandline.cli.node.run import run

node = typer.Typer(
    no_args_is_help=True,
    help="Run a node of a replicated log, and inspect and administer running ones.",
    short_help="Run a node of a replicated log; show its replicas and their lag.",
    rich_markup_mode="markdown",
)
for command in (run, topology, status, unregister, rebootstrap, reset_term):
    node.command()(command)
