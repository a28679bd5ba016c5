"""The Typer application: its commands are imported when they are called."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final, Literal

import typer
from typer.core import TyperCommand

from strandline.cli.shared import logs
from strandline.cli.shared.groups import MARKUP, Command, CommandGroup, Commands
from strandline.cli.shared.options import SharedOptions, begin, flag, option, with_groups

USAGE_ERROR: Final[Any] = typer.BadParameter.__base__
"""A command was called wrongly: an unknown option, a missing argument and others."""

COMMANDS: Final = {
    "create": ("logs.create", "Make a log, of plain bytes or with a format of values."),
    "describe": ("logs.describe", "Show what a log is: offsets, size, retention, values, slots."),
    "produce": ("logs.produce", "Append records: lines of standard input, or rows of files."),
    "tail": ("logs.tail", "Print records: offset, time, operation, key and value."),
    "follow": ("tables.follow", "Keep a table in step with a log, exactly."),
    "lag": ("logs.lag", "Show how far each slot is behind, and what pins the floor."),
    "retention": ("logs.slots", "Show or change the retention policy of a log."),
    "trim": ("logs.trim", "Delete what the retention policy and the slots of a log allow."),
    "verify": ("logs.verify", "Verify a log: each offset once and in order, each record intact."),
    "promote": ("node.admin", "Make a node the primary, if that loses nothing committed."),
    "doctor": ("doctor.command", "Check this machine, and the store of a log."),
    "ingest": ("bulk.ingest", "Append all records of a source to a log, each once, in order."),
    "export": ("bulk.export", "Write the records of a range into files, each once, in order."),
    "snapshot": ("bulk.snapshot", "Seal the newest value of each key, for stores to bootstrap from."),
    "load": ("bulk.load", "Append the rows of files to an object log: all of them or none."),
    "seal": ("logs.seal", "End a log for good: no more records, and followers end there."),
    "delete": ("bulk.delete", "Delete a log: its records, slots, dead letters, and the cold tier beside it."),
    "upgrade": ("bulk.upgrade", "Copy a queue of version 1 into a log, each batch once."),
    "quickstart": ("quickstart", "Follow a log into a table, killed half-way: the shortest proof."),
    "demo": ("demo.command", "Kill Spark at its worst moments, and count what is wrong."),
    "slots": ("logs.slots", "List, create, reset and drop slots."),
    "sources": ("logs.sources", "List what a log has ingested; forget a source that has ended."),
    "table": ("tables.table", "Look after a table that follows a log."),
    "tier": ("cold.tier", "Give a log a cold tier, and copy what is old into it."),
    "segments": ("cold.segments", "List and draw the segments of a cold tier."),
    "spark": ("spark", "Run a bulk command on Spark's executors."),
    "wal": ("logs.wal", "Inspect, repair, export and migrate a write-ahead log."),
    "node": ("node", "Run a node of a replicated log, and administer running ones."),
    "serve": ("serve.run", "Run everything that a file names: logs, nodes, ingests, tables, HTTP."),
    "config": ("serve.config", "Check, show and reload the file of a server."),
}
"""The module that defines each command, and its help in the list of commands, which is shown without importing it."""


class _Watching(Command):
    """``--watch`` takes an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from strandline.cli.logs.lag import with_default_interval

        return super().parse_args(ctx, with_default_interval(args))


class CommandsOnDemand(CommandGroup):
    """Lists commands by name and help, and imports one when it is called, or when its arguments are completed."""

    def __init__(self, **options: Any) -> None:
        """Add each command with its name and help only."""
        super().__init__(**options)
        for name, (_, text) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=text, rich_markup_mode=MARKUP))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, imported now."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, None if found is None or name is None else imported_command(name), rest

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command. With ``--json`` a usage error is JSON, too."""
        given = args[0] if args else options.get("args")
        in_json = "--json" in (sys.argv[1:] if given is None else given) and options.get("standalone_mode", True)
        try:
            if not in_json:
                return super().main(*args, **options)
            status = super().main(*args, **{**options, "standalone_mode": False})
            sys.exit(status if isinstance(status, int) else 0)
        except USAGE_ERROR as error:
            if not in_json:
                raise
            from strandline.cli.shared import output as show

            begin(SharedOptions(json=True))  # the command has not noted it
            show.error(error, error.format_message())
            sys.exit(error.exit_code)
        finally:
            begin(SharedOptions())


@cache
def imported_command(name: str) -> Any:
    """The command itself, with its options."""
    found = getattr(import_module(f"strandline.cli.{COMMANDS[name][0]}"), name)
    if not isinstance(found, typer.Typer):
        alone = Commands(add_completion=False, rich_markup_mode=MARKUP)
        alone.command(name, cls=_Watching if name == "lag" else None)(found)
        found = alone
    found._add_completion = False  # noqa: SLF001 - only the front command has these options
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(
    name="strandline",
    cls=CommandsOnDemand,
    help="A change log in a bucket that tables, caches and replicas follow exactly.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from strandline import __version__

        typer.echo(f"strandline {__version__}")
        raise typer.Exit


@app.callback()
@with_groups
def strandline_(
    *,
    version: Annotated[
        bool, flag("Print the version and stop.", "--version", callback=_version, is_eager=True)
    ] = False,
    log_format: Annotated[
        Literal["text", "json"], option("text|json", "Write log messages as text, or as JSON lines.")
    ] = "text",
    given: SharedOptions,
) -> None:
    """A change log in a bucket that tables, caches and replicas follow exactly."""
    del version  # its callback has handled it
    logs.write_as(log_format)
    begin(given)
