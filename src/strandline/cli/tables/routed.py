"""``strandline follow --by``: one log into a table for each name among its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Final

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.monitoring import Metrics
from strandline.cli.shared.options import option
from strandline.cli.shared.tables import NewTableOptions
from strandline.errors import StrandlineError
from strandline.followers.routes.follower import RouteFollower
from strandline.followers.routes.progress import RouteOptions
from strandline.model.sink import Sink
from strandline.storage.env import SYSTEM
from strandline.tables.routes.named import NAME, NamedTables, named, names_beside
from strandline.tables.routes.route import Route

_PANEL: Final = "Many tables"


@dataclass(frozen=True, slots=True)
class NamingOptions:
    """The options of a command that makes a table for each name."""

    by: Annotated[
        str | None,
        option(
            "WHAT",
            "Make a table for each name among the records: TABLE has {name} where the name goes, and --schema and "
            "--dead-letters may have it, too. WHAT is where the name is: a field of JSON values such as source.table, "
            "header:NAME, or key:SEPARATOR, which is the key up to that.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    unrouted: Annotated[
        str | None,
        option(
            "TABLE",
            "With --by: a table for the records without a name, as bytes; or skip. Without it the first one ends the "
            "command.",
            rich_help_panel=_PANEL,
        ),
    ] = None

    without: Annotated[
        list[str] | None,
        option(
            "NAME",
            "With --by: a name that has no table, so that its records are without one; may be repeated.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    names: Annotated[
        str | None,
        option(
            "FOLDER",
            "With --by: where the names are remembered, a folder or an object store. By default that is "
            "_strandline_route in the folder that has {name} in it; tables in a database or a catalog have none.",
            rich_help_panel=_PANEL,
        ),
    ] = None

    def check(self, table: str) -> bool:
        """Whether there are many tables; refuses what does not fit together."""
        if self.by is None:
            for name, given in (("unrouted", self.unrouted), ("without", self.without), ("names", self.names)):
                if given:
                    raise typer.BadParameter(f"--{name} is for many tables: give --by, too.")
            if NAME in table:
                raise typer.BadParameter(f"The table's address has {NAME}: say by --by where the names are.")
            return False
        if NAME not in table:
            raise typer.BadParameter(f"With --by the tables' address has {NAME} where the name goes, unlike {table!r}.")
        if self.names is None and names_beside(table) is None:
            raise typer.BadParameter(
                f"{table!r} has no folder with {NAME} in it, where the names are remembered: name another one by "
                "--names."
            )
        return True

    def route(self, table: str, sink: Callable[[str], Sink]) -> Route:
        """The route; the names are remembered in ``_strandline_route`` beside ``{name}``, or where they are said to."""
        return NamedTables(table, self.by or "", self.unrouted, self.without or (), self.names).route(sink)


def for_name(options: NewTableOptions, name: str) -> NewTableOptions:
    """The same options with the name in the schema's file."""
    schema = options.schema
    return options if schema is None else replace(options, schema=Path(named(str(schema), name)))


@dataclass(frozen=True, slots=True)
class Answered:
    """What the command says at its end."""

    records: int
    next: int
    letters: int
    text: str
    more: Mapping[str, Any] = field(default_factory=dict)


def follow_routed(
    log: Any,
    route: Route,
    options: RouteOptions,
    *,
    stop: Event,
    work: show.Meter,
    metrics: Metrics,
    ready: Callable[[], object],
) -> Answered:
    """Follow the route; the position is that of the slowest table."""
    first = 0
    with ExitStack() as measured:
        moves: list[Callable[[int], None]] = []

        def on_progress(cursor: sl.Cursor) -> None:
            work.upto(cursor.next - first)
            for moved in moves:
                moved(cursor.next)

        follower = RouteFollower(log, route, options, SYSTEM, on_progress=on_progress)
        follower.open()
        first = follower.cursor().next
        moves.append(measured.enter_context(metrics.lag_of(log, (log.url, "route"), first)))
        ready()
        try:
            done = follower.run(stop)
        except StrandlineError:
            for one in follower.progress().tables:
                if one.error:
                    show.warning(
                        f"The table {one.name} is at offset {'-' if one.next is None else one.next}: {one.error}"
                    )
            raise
    found = follower.progress()
    tables = [
        {"name": one.name, "next": one.next, "records": one.records, "dead_letters": one.bad_records}
        for one in found.tables
    ]
    text = f"{found.line()}, in {show.seconds(work.seconds)}: the slowest is at offset {done.next:,}"
    more = {"tables": tables, "unrouted": found.unrouted}
    return Answered(found.records, done.next, sum(one.bad_records for one in found.tables), text, more)
