"""``strandline follow``: keep a table in step with a log."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Annotated, Any, Literal, cast

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt
from strandline.cli.shared.common import INTERRUPTED, beginning, connecting, stop_on_signal
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.monitoring import Metrics
from strandline.cli.shared.options import flag, option
from strandline.cli.shared.tables import RowOptions, TableUrl, letters_at
from strandline.errors import NotFound
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.opening import sink_at


@connecting
def follow(
    place: AnyLogAt,
    table: TableUrl,
    *,
    mode: Annotated[
        Literal["latest", "marked", "append", "history"] | None,
        option(
            "MODE",
            "What a new table keeps: latest, the latest row of each key (the default); marked, the same with "
            "deleted rows marked; append, every change; or history, every version.",
        ),
    ] = None,
    slot: Annotated[
        str | None, option("NAME", "The slot that pins what is still to be applied; made if there is none.")
    ] = None,
    options: RowOptions,
    raw: Annotated[
        bool, flag("Keys and values as bytes, also of a log that names the format of its values.", "--no-decode")
    ] = False,
    start: Annotated[
        Any, beginning("Where a new table begins: beginning, retained, now, an offset or a time.")
    ] = "beginning",
    until: Annotated[
        str, option("WHERE", "Where to stop: end, an offset, or forever, which is until Ctrl-C.")
    ] = "forever",
    dead_letters: Annotated[
        str | None,
        option(
            "TABLE",
            "A second table, for records that cannot become rows; without it such a record is an error. In a SQL "
            "database it is named after the table: --dead-letters yes.",
        ),
    ] = None,
    fail_on_letters: Annotated[
        bool, flag("End with status 1 if this run has set records aside.", "--fail-on-letters")
    ] = False,
    metrics: Metrics,
) -> None:
    """Keep a table in step with a log, exactly.

    Rows and position are one commit: killed at any moment and started again it continues from the position in the
    table. Two followers of one table cannot both commit. What the table keeps is recorded in it: without --mode, a
    table that is there stays as it is.

    Example: strandline follow ./orders ./tables/orders --slot orders --until end
    """
    end = _end(until)
    if raw and options.schema is not None:
        raise typer.BadParameter("--schema decodes values: leave out --no-decode.")
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
        shape = options.shape(None if raw else options.value(log))
        shape["mode"] = mode or _recorded_mode(table)
        letters = letters_at(table, dead_letters)
        sink = sink_at(table, None, **shape, **({} if letters is None else {"dead_letters": letters}))
        sinks.append(sink)
        sink.meet(log)
        since = sink.cursor(log.log_id)
        first = log.position_of(start) if since is None else since.next
        moved = measured.enter_context(metrics.lag_of(log, (log.url, sink.where), first))

        def on_progress(cursor: sl.Cursor) -> None:
            work.upto(cursor.next - first)
            moved(cursor.next)

        health.ready()
        done = sl.follow(
            cast("sl.Log", log),
            cast("sl.followers.Sink", sink),
            slot,
            start=start,
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


def _recorded_mode(table: str) -> str:
    """What the table at an address keeps; of a new one the latest rows."""
    try:
        recorded = sink_at(table, None).recorded()
    except NotFound:
        return "latest"
    return "latest" if recorded is None else recorded.opened_as
