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
from strandline.cli.shared.tables import DecodingOptions, NewTableOptions, TableUrl
from strandline.cli.tables.routed import Answered, NamingOptions, follow_routed, for_name
from strandline.followers.routes.progress import RouteOptions
from strandline.storage.clock import CHANCE
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.following import followed
from strandline.tables.maintain.opening import recorded_at
from strandline.tables.routes.named import named


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
    options: NewTableOptions,
    decoding: DecodingOptions,
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
    naming: NamingOptions,
    metrics: Metrics,
) -> None:
    """Keep a table in step with a log, exactly.

    Rows and position are one commit: killed at any moment and started again it continues from the position in the
    table. Two followers of one table cannot both commit. What the table keeps is recorded in it: without --mode, a
    table that is there stays as it is. --by keeps a table for each name among the records: one that fails is tried
    again and stops no other.

    For a first look at values that nobody has described, --infer chooses the columns; the table records them.

    Examples: strandline follow ./orders ./tables/orders --slot orders --until end

    strandline follow ./orders ./tables/changes --mode append --partition-by 'day(_timestamp)' --cluster-by customer

    strandline follow ./shop './tables/{name}' --by source.table --schema './schemas/{name}.json' --slot tables
    """
    end = _end(until)
    has_many = naming.check(table)
    decoding.check(options, has_many=has_many)
    opened = place.reading() if slot is None else place.writing()
    sinks: list[MaintainedTable] = []
    progress = show.meter("following", total=None, note=lambda: _letters(sum(sink.bad_records for sink in sinks)))
    if end is None:
        log_to_stderr(logging.INFO)
    with (
        stop_on_signal() as stop,
        metrics.served() as health,
        opened as log,
        progress as work,
        ExitStack() as measured,
    ):

        def sink_of(name: str) -> MaintainedTable:
            place, own = named(table, name), for_name(options, name)
            recorded = recorded_at(place)
            value, inferred = decoding.value(own, log, recorded)
            letters = dead_letters and named(dead_letters, name)
            asked: dict[str, Any] = {"mode": mode, "letters": letters, "layout": own.layout, "inferred": inferred}
            sinks.append(followed(place, recorded, **asked, **own.shape(value)))
            return sinks[-1]

        if has_many:
            last = log.end().next if end == "end" else end
            chosen = RouteOptions(start, slot=slot, holder=str(CHANCE.uuid()), upto=last)
            answered = follow_routed(
                log, naming.route(table, sink_of), chosen, stop=stop, work=work, metrics=metrics, ready=health.ready
            )
        else:
            sink = sink_of("")
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
            count = show.counted(done.next - first, "record")
            text = f"{count} applied in {show.seconds(work.seconds)}: the table is at offset {done.next:,}"
            answered = Answered(done.next - first, done.next, sink.bad_records, text)
        behind = max(0, log.end().next - answered.next)
        interrupted = stop.is_set()
    fields = {
        "records": answered.records,
        "next": answered.next,
        "behind": behind,
        "dead_letters": answered.letters,
        "seconds": round(work.seconds, 3),
        "interrupted": interrupted,
        **answered.more,
    }
    text = f"{answered.text}, {show.counted(behind, 'record')} behind{_letters(answered.letters)}"
    show.answer(fields, f"{'stopped: ' if interrupted else ''}{text}")
    if interrupted and end is not None:
        raise typer.Exit(INTERRUPTED)
    if fail_on_letters and answered.letters:
        raise typer.Exit(1)


def _letters(count: int) -> str:
    """What is said of the records that a run has set aside."""
    return f", {show.counted(count, 'dead letter')}" if count else ""


def _end(until: str) -> int | Literal["end"] | None:
    if until == "forever":
        return None
    if until == "end":
        return "end"
    if until.isdecimal():
        return int(until)
    raise typer.BadParameter(f"--until is end, forever or an offset, not {until!r}.")
