"""The Typer application with all commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import strandline
from strandline.cli.cold.segments import segments
from strandline.cli.cold.tier import tier
from strandline.cli.demo.command import demo
from strandline.cli.doctor.command import doctor
from strandline.cli.logs.export import export
from strandline.cli.logs.gc import gc
from strandline.cli.logs.ingest import ingest
from strandline.cli.logs.lag import lag, with_default_interval
from strandline.cli.logs.load import load
from strandline.cli.logs.produce import produce
from strandline.cli.logs.slots import retention, slots
from strandline.cli.logs.snapshot import snapshot
from strandline.cli.logs.sources import sources
from strandline.cli.logs.tail import tail
from strandline.cli.logs.upgrade import upgrade
from strandline.cli.logs.verify import verify
from strandline.cli.logs.wal import wal
from strandline.cli.node import node
from strandline.cli.node.admin import promote
from strandline.cli.quickstart import quickstart
from strandline.cli.spark import spark
from strandline.cli.tables.table import table

app = typer.Typer(
    name="strandline",
    help="A change log in a bucket that tables, caches and replicas follow exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"strandline {strandline.__version__}")
        raise typer.Exit


@app.callback()
def strandline_(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A change log in a bucket that tables, caches and replicas follow exactly."""


class _Watching(TyperCommand):
    """``--watch`` takes an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_default_interval(args))


app.command()(produce)
app.command()(tail)
app.command(cls=_Watching)(lag)
for command in (retention, gc, verify, promote, doctor, ingest, export, snapshot, load, upgrade, quickstart, demo):
    app.command()(command)
for name, group in {
    "slots": slots,
    "sources": sources,
    "table": table,
    "tier": tier,
    "segments": segments,
    "spark": spark,
    "wal": wal,
    "node": node,
}.items():
    app.add_typer(group, name=name)
