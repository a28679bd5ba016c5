"""``strandline follow``: keep a table in step with a log."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from enum import StrEnum
from typing import Annotated, Any, Literal, cast

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, AnyLogAt
from strandline.cli.shared.common import INTERRUPTED, connecting, stop_on_signal
from strandline.cli.shared.common import start as known_start
from strandline.cli.shared.decoding import named
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.monitoring import Metrics
from strandline.cli.shared.tables import RowOptions, TableUrl, letters_at
from strandline.errors import NotFound
from strandline.model.cursor import Start
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.opening import sink_at
from strandline.tables.rows.logged import Value

_START: Any = "beginning"  # given to the parser


class TableMode(StrEnum):
    """What a table keeps."""

    LATEST = "latest"
    MARKED = "marked"
    APPEND = "append"
    HISTORY = "history"


@connecting
def follow(
    place: AnyLogAt,
    table: TableUrl,
    *,
    mode: Annotated[
        TableMode | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="What a new table keeps: latest, the latest row of each key (the default); marked, the same with "
            "deleted rows marked; append, every change; or history, every version.",
        ),
    ] = None,
    slot: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The slot that pins what is still to be applied; made if there is none."),
    ] = None,
    options: RowOptions,
    decode: Annotated[
        bool | None,
        typer.Option(
            "--decode/--no-decode",
            help="Columns for the fields of values, in the format that the log names (by default if it names one), or "
            "keys and values as bytes.",
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            parser=known_start,
            help="Where a new table begins: beginning, retained, now, an offset or a time.",
        ),
    ] = _START,
    until: Annotated[
        str, typer.Option(metavar="end|forever|OFFSET", help="Where to stop: forever is until Ctrl-C.")
    ] = "forever",
    dead_letters: Annotated[
        str | None,
        typer.Option(
            "--dead-letters",
            metavar="TABLE",
            help="A second table, for records that cannot become rows; without it such a record is an error. In a SQL "
            "database it is named after the table: --dead-letters yes.",
        ),
    ] = None,
    fail_on_letters: Annotated[
        bool,
        typer.Option("--fail-on-letters", help="End with status 1 if this run has set records aside."),
    ] = False,
    metrics: Metrics,
) -> None:
    """Keep a table in step with a log, exactly: rows and position are one commit.

    Killed at any moment and started again it continues from the position in the table. Two followers of one table
    cannot both commit. What the table keeps is recorded in it: without --mode, a table that is there stays as it is.

    Example: strandline follow ./orders ./tables/orders --slot orders --until end
    """
    end = _end(until)
    opened = place.reading() if slot is None else place.writing()
    sinks: list[MaintainedTable] = []
    progress = show.meter("following", total=None, note=lambda: "".join(map(_letters_of, sinks)))
    if end is None:
        log_to_stderr(logging.INFO)
    with (
        stop_on_signal() as stop,
        metrics.served() as health,
        opened as log,
        progress as work,
        ExitStack() as measured,
    ):
        shape = options.shape(_value(log, options, decode))
        shape["mode"] = _recorded_mode(table, options.name) if mode is None else mode.value
        letters = letters_at(table, dead_letters)
        sink = sink_at(table, None, **shape, **({} if letters is None else {"dead_letters": letters}))
        sinks.append(sink)
        sink.meet(log)
        since = sink.cursor(log.log_id)
        first = log.position_of(cast("Start", start)) if since is None else since.next
        moved = measured.enter_context(metrics.lag_of(log, (log.url, sink.where), first))

        def on_progress(cursor: sl.Cursor) -> None:
            work.upto(cursor.next - first)
            moved(cursor.next)

        health.ready()
        done = sl.follow(
            cast("sl.Log", log),
            cast("sl.followers.Sink", sink),
            slot,
            start=cast("Start", start),
            upto=end,
            stop=stop,
            on_progress=on_progress,
        )
        behind = max(0, log.end().next - done.next)
        interrupted = stop.is_set()
    fields = {
        "records": done.next - first,
        "next": done.next,
        "behind": behind,
        "dead_letters": sink.bad_records,
        "seconds": round(work.seconds, 3),
        "interrupted": interrupted,
    }
    text = f"{show.counted(done.next - first, 'record')} applied in {show.seconds(work.seconds)}: "
    text += f"the table is at offset {done.next:,}, {show.counted(behind, 'record')} behind{_letters_of(sink)}"
    show.answer(fields, f"{'stopped: ' if interrupted else ''}{text}")
    if interrupted and end is not None:
        raise typer.Exit(INTERRUPTED)
    if fail_on_letters and sink.bad_records:
        raise typer.Exit(1)


def _letters_of(sink: MaintainedTable) -> str:
    """What is said of the records that a run has set aside."""
    return f", {show.counted(sink.bad_records, 'dead letter')}" if sink.bad_records else ""


def _end(until: str) -> int | Literal["end"] | None:
    if until == "forever":
        return None
    if until == "end":
        return "end"
    if until.isdecimal():
        return int(until)
    raise typer.BadParameter(f"--until is end, forever or an offset, not {until!r}.")


def _value(log: AnyLog, options: RowOptions, decode: bool | None) -> Value | None:
    """The codec of the table's columns; None for bytes."""
    if decode is False:
        if options.schema is not None:
            raise typer.BadParameter("--schema decodes values: leave out --no-decode.")
        return None
    if decode and options.schema is None:
        named(log)  # which says what to give instead, if the log names none
    return options.value(log)


def _recorded_mode(table: str, name: str) -> str:
    """What the table at an address keeps; of a new one the latest rows."""
    try:
        recorded = sink_at(table, None, name=name).recorded()
    except NotFound:
        return "latest"
    return "latest" if recorded is None else recorded.opened_as
