"""``strandline spark``: the bulk commands, with their tasks on Spark's executors."""

from __future__ import annotations

import functools
import os
from typing import Annotated, Any

import typer

from strandline.cli.bulk.export import export
from strandline.cli.bulk.ingest import ingest
from strandline.cli.bulk.load import load
from strandline.cli.bulk.snapshot import snapshot
from strandline.cli.cold.tier import compact, run
from strandline.cli.logs.verify import verify
from strandline.cli.shared.pools import SESSION
from strandline.cli.tables.table import rebuild
from strandline.errors import InvalidInput, JobFailed

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
        session, is_new = _started(master, remote, settings)
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


def _started(master: str | None, remote: str | None, settings: dict[str, str]) -> tuple[Any, bool]:
    """The session, and whether it was started here; ``InvalidInput`` for both a master and a remote server."""
    from strandline.spark.session import local_session

    if master is not None and remote is not None:
        raise InvalidInput("--master and --remote exclude each other: one starts a session, the other uses a server's.")
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active, False
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    if remote is None and (master is None or master.startswith("local")) and not is_submitted:
        conf: dict[str, Any] = {**settings, **({} if master is None else {"spark.master": master})}
        return local_session(cores=len(os.sched_getaffinity(0)), **conf), True
    builder: Any = SparkSession.builder.appName("strandline")
    for name, value in {**settings, "spark.sql.session.timeZone": "UTC"}.items():
        builder = builder.config(name, value)
    builder = builder.remote(remote) if remote is not None else builder.master(master) if master else builder
    try:
        return builder.getOrCreate(), True
    except (PySparkException, OSError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise JobFailed(f"No session on {remote or master or 'the cluster'}: {first[:200]}") from error


spark.command("export")(export)
spark.command("verify")(verify)
spark.command("snapshot")(snapshot)
spark.command("load")(load)
spark.command("ingest")(ingest)
spark.command("rebuild")(rebuild)
spark.command("tier")(run)
spark.command("compact")(compact)
