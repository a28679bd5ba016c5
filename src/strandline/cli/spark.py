"""``strandline spark``: the bulk commands, with their tasks on Spark's executors."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer

from strandline.cli.bulk.export import export
from strandline.cli.bulk.ingest import ingest
from strandline.cli.bulk.load import load
from strandline.cli.bulk.snapshot import snapshot
from strandline.cli.cold.tier import compact, run
from strandline.cli.logs.verify import verify
from strandline.cli.shared.pools import SESSION
from strandline.cli.shared.spark_session import started
from strandline.cli.tables.table import rebuild

spark = typer.Typer(
    no_args_is_help=True,
    help="Run a bulk command on Spark: the same command, with its tasks on executors instead of threads.",
    short_help="Run a bulk command on Spark's executors.",
    rich_markup_mode="markdown",
)


@spark.callback()
def session_options(
    context: typer.Context,
    *,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The cluster: local[4], spark://host:7077, yarn, k8s://...; by default that of spark-submit, or all "
            "cores of this machine.",
        ),
    ] = None,
    remote: Annotated[
        str | None, typer.Option(metavar="URL", help="A Spark Connect server instead: sc://host:15002.")
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark's; may be repeated.")
    ] = None,
) -> None:
    """Start the session when a command needs it, and stop it when the command ends."""
    settings = dict(_setting(text) for text in conf or ())

    @functools.cache
    def start() -> Any:
        session, is_new = started(master, remote, settings)
        if is_new:
            context.call_on_close(session.stop)
        return session

    token = SESSION.set(start)
    context.call_on_close(lambda: SESSION.reset(token))


def _setting(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not name or not is_set:
        raise typer.BadParameter(f"{text!r} is no setting: write --conf spark.executor.memory=4g.")
    return name, value


spark.command("export")(export)
spark.command("verify")(verify)
spark.command("snapshot")(snapshot)
spark.command("load")(load)
spark.command("ingest")(ingest)
spark.command("rebuild")(rebuild)
spark.command("tier")(run)
spark.command("compact")(compact)
