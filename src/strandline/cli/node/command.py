"""The commands of ``strandline node``, put together."""

from __future__ import annotations

import typer

from strandline.cli.node.asking import promote, rebootstrap, unregister
from strandline.cli.node.run import run
from strandline.cli.node.terms import reset_term
from strandline.cli.node.topology import status, topology

__all__ = ["node", "promote"]

node = typer.Typer(
    no_args_is_help=True,
    help="Run a node of a replicated log, and look at and after those that run.",
    short_help="Run a node of a replicated log; see who replicates it, and how far each is.",
    rich_markup_mode="markdown",
)
node.command()(run)
node.command()(topology)
node.command()(status)
node.command()(unregister)
node.command()(rebootstrap)
node.command("reset-term")(reset_term)
