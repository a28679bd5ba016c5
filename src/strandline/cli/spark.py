"""``strandline spark``: the bulk commands, with their tasks on Spark's executors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from strandline.cli.bulk.export import export
from strandline.cli.bulk.ingest import ingest
from strandline.cli.bulk.load import load
from strandline.cli.bulk.snapshot import snapshot
from strandline.cli.cold.tier import compact, run
from strandline.cli.logs.verify import verify
from strandline.cli.shared.groups import group
from strandline.cli.shared.options import option
from strandline.cli.shared.pools import SESSION
from strandline.cli.shared.spark_session import started
from strandline.cli.tables.table import rebuild

spark = group(
    "Run a bulk command on Spark's executors.\n\nThe same command, with its tasks on executors instead of threads."
)
_COMMANDS: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "export": ("export", export),
    "verify": ("verify", verify),
    "snapshot": ("snapshot", snapshot),
    "load": ("load", load),
    "ingest": ("ingest", ingest),
    "rebuild": ("table rebuild", rebuild),
    "tier": ("tier run", run),
    "compact": ("tier compact", compact),
}
"""The commands, and how each is called without Spark."""


@spark.callback()
def session_options(
    context: typer.Context,
    *,
    master: Annotated[
        str | None,
        option(
            "URL",
            "The cluster: local[4], spark://host:7077, yarn, k8s://...; by default that of spark-submit, or all "
            "cores of this machine.",
        ),
    ] = None,
    remote: Annotated[str | None, option("URL", "A Spark Connect server instead: sc://host:15002.")] = None,
    conf: Annotated[list[str] | None, option("KEY=VALUE", "A setting of Spark's; may be repeated.")] = None,
) -> None:
    """Start the session when a command needs it, and stop it when the command ends."""
    settings = dict(_setting(text) for text in conf or ())

    @functools.cache
    def start() -> Any:
        session, stop = started(master, remote, settings)
        if stop is not None:
            context.call_on_close(stop)
        return session

    token = SESSION.set(start)
    context.call_on_close(lambda: SESSION.reset(token))


def _setting(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not name or not is_set:
        raise typer.BadParameter(f"{text!r} is no setting: write --conf spark.executor.memory=4g.")
    return name, value


for _name, (_without_spark, _command) in _COMMANDS.items():
    _help = inspect.getdoc(_command) or ""
    _example = f"Example: strandline spark {_name} "
    spark.command(_name, help=_help.replace(f"Example: strandline {_without_spark} ", _example))(_command)
