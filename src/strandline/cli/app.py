"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import strandline
from strandline.cli.demo.command import demo
from strandline.cli.lag import lag
from strandline.cli.produce import produce
from strandline.cli.quickstart import quickstart
from strandline.cli.tail import tail

app = typer.Typer(
    name="strandline",
    help="A change log in a bucket that tables, caches and replicas follow exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
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


app.command()(produce)
app.command()(tail)
app.command()(lag)
app.command()(quickstart)
app.command()(demo)
