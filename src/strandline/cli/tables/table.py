"""``strandline table``: cursor, size, verification, repair and upkeep of a table that follows a log."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import LogPlace
from strandline.cli.shared.common import (
    Until,
    Workers,
    Yes,
    beginning,
    confirm,
    connecting,
    guarded,
    on_interruption,
)
from strandline.cli.shared.groups import group
from strandline.cli.shared.options import argument, flag, option
from strandline.cli.shared.pools import is_on_spark, spark_session, task_pool
from strandline.cli.shared.tables import RowOptions, TableUrl
from strandline.cli.shared.text import escaped, readable
from strandline.errors import InvalidInput, NotFound
from strandline.formats.json.records import record_fields, rows_of
from strandline.log.addressed import log_at
from strandline.log.contract import Log
from strandline.tables.maintain.following import letters_at
from strandline.tables.maintain.opening import is_in_database

table = group("Look after a table that follows a log.")

FollowedLog = Annotated[LogPlace, argument("LOG", "The address of the log that it follows.", parser=LogPlace)]
Letters = Annotated[
    str | None, option("TABLE", "The address of its dead-letter table; a SQL database knows it.", "--dead-letters")
]


@table.command()
@connecting
def describe(
    url: TableUrl,
    log: Annotated[LogPlace | None, argument("LOG", "Its log: shows the cursor, too.", parser=LogPlace)] = None,
    *,
    options: RowOptions,
) -> None:
    """Show what a table keeps, its size and columns, and how far it has followed its log.

    The cursor is proved by the table's history: a table whose rows others changed is an error that says what to do.

    Example: strandline table describe ./tables/orders ./orders
    """
    opened: Any = None if log is None else log.open()
    sink = options.sink(url, opened)
    found = sl.tables.describe(sink, opened)
    behind = None
    if opened is not None and found.cursor is not None:
        behind = max(0, opened.end().next - found.cursor.next)
    cursor = None if found.cursor is None else str(found.cursor)
    fields = {**asdict(found), "columns": dict(found.columns), "cursor": cursor, "records_behind": behind}
    lines = [
        f"{found.url}  {found.kind}, version {found.version:,}",
        show.counted(found.rows, "row")
        + (f" in {show.counted(found.files, 'file')}" if found.files else "")
        + f" ({show.size(found.bytes)})",
        *[f"  {column}: {kind}" for column, kind in found.columns],
    ]
    if found.cursor is not None:
        since = f"from offset {found.start:,} " if found.start else ""
        lines.append(f"applied {since}up to offset {found.cursor.next:,}; {show.counted(behind or 0, 'record')} behind")
    show.answer(fields, *lines)


@table.command()
@connecting
def verify(url: TableUrl, log: FollowedLog, *, options: RowOptions, workers: Workers = None) -> None:
    """Compare each row of a table with its log, up to the table's cursor. Changes nothing.

    Ends with status 1 if there is a difference.

    Example: strandline table verify ./tables/orders ./orders
    """
    opened: Any = log.open()
    sink = options.sink(url, opened)
    pool = task_pool(workers)
    with show.busy("comparing rows with the log"):
        check = sl.tables.verify(sink, opened, pool=pool)
    fields = {"clean": check.is_clean, **asdict(check), "cursor": str(check.cursor)}
    text = f"{show.counted(check.rows, 'row')}, up to offset {check.cursor.next:,}: "
    if check.is_clean:
        show.answer(fields, f"{text}each is as the log says.")
        return
    first = [f"  {one}" for one in check.first]
    again = f"Build it again with 'strandline table rebuild {url} {log.url}'."
    show.answer(fields, f"{text}{check.missing:,} missing, {check.extra:,} too many.", *first, again)
    raise typer.Exit(1)


@table.command()
@connecting
def rebuild(
    url: TableUrl,
    log: FollowedLog,
    *,
    options: RowOptions,
    dead_letters: Letters = None,
    start: Annotated[
        Any,
        beginning("Where its rows begin: beginning, retained, an offset, a time; by default where they began before."),
    ] = None,
    upto: Until = None,
    slot: Annotated[
        str | None, option("NAME", "The follower's slot: it pins what comes behind; made if there is none.")
    ] = None,
    into: Annotated[
        str | None, option("TABLE", "Build a table like this one there, and leave this one as it is.")
    ] = None,
    unverified: Annotated[bool, flag("Show the new rows without comparing them with the log.", "--no-verify")] = False,
    yes: Yes = False,
) -> None:
    """Build all rows of a table again from its log, compare them with it, and replace the old ones in one commit.

    Readers see the old rows until then. Stop the table's follower first: it would be refused. Afterwards it continues.
    Name the table's dead letters if it has some: a record that cannot become a row is an error otherwise. A Delta or
    Iceberg table is built by a cluster with 'strandline spark rebuild'.

    Example: strandline table rebuild ./tables/orders ./orders --from 2026-01-15T00:00Z
    """
    opened: Any = log.open(writes=slot is not None)
    letters = letters_at(into or url, dead_letters)
    sink = options.sink(url, opened, dead_letters=letters, into=into)
    confirm(f"Replace all rows of {sink.where} by those of {log.url}?", yes=yes)
    session = spark_session() if is_on_spark() else None
    with show.busy("building all rows again"):
        if session is not None:
            cursor = sl.spark.rebuild(session, log.url, sink, start=start, upto=upto, slot=slot, verify=not unverified)
        else:
            cursor = sl.tables.rebuild(sink, opened, start=start, upto=upto, slot=slot, verify=not unverified)
    found = sl.tables.describe(sink)
    first = sink.start()
    were = "was" if found.rows == 1 else "were"
    text = f"{show.counted(found.rows, 'row')} {were} built again, from offset {first:,} up to {cursor.next:,}"
    text += "." if unverified else ", and each is as the log says."
    show.answer({"rows": found.rows, "start": first, "cursor": str(cursor)}, text)


@table.command()
@connecting
def repair(url: TableUrl, log: FollowedLog, *, options: RowOptions) -> None:
    """Restore a table that others changed to its last version that is known to be right.

    Example: strandline table repair ./tables/orders ./orders
    """
    opened: Any = log.open()
    sink = options.sink(url, opened)
    sink.meet(opened)

    def serves(cursor: sl.Cursor) -> bool:
        return bool(opened.bounds().first <= cursor.next <= opened.bounds().next)

    cursor = sink.repair(opened.log_id, serves)
    if cursor is None:
        raise InvalidInput(f"There is no table at {url}: check the address.")
    show.answer({"cursor": str(cursor)}, f"The table is right, at offset {cursor.next:,}.")


@table.command()
@guarded
def move(
    url: TableUrl,
    old: Annotated[str, argument("OLD", "The address of the log that it follows.")],
    new: Annotated[str, argument("NEW", "The address of the copy that it is to follow.")],
    *,
    dead_letters: Letters = None,
    options: RowOptions,
) -> None:
    """Let a table that follows a log follow its copy from now on, in one commit that changes no row.

    NEW was made of OLD by 'strandline ingest', or OLD of NEW, and has the records of the table at the same offsets:
    otherwise nothing is changed, and the table has to be built again. Stop the table's follower first: it is refused
    from then on. A Delta or Iceberg table must have no dead letters: name their table, so that they are looked for.

    Example: strandline table move ./tables/orders ./orders ./backup
    """
    letters = letters_at(url, dead_letters)
    former: Log
    with (
        on_interruption("repeat the command: it says which log the table follows."),
        log_at(old) as former,
        show.busy("comparing the offsets of both logs"),
    ):
        sink = options.sink(url, former, dead_letters=letters)
        done = sl.bulk.move_table(sink, old, new)
    follows = "follows that log already" if done.was_there else "follows that log now"
    text = f"The table {follows}, from offset {done.cursor.next:,} on; no row was changed."
    show.answer({"cursor": str(done.cursor), "moved": not done.was_there}, text)


@table.command()
@connecting
def replay(url: TableUrl, log: FollowedLog, *, dead_letters: Letters = None, options: RowOptions) -> None:
    """Apply dead letters that can become rows by now, each once and in its place, and remove them.

    For after a corrected schema: give the corrected one with --schema, or let the log name it. Letters that still
    cannot become rows stay. The table's follower may run meanwhile; a replay that was interrupted can be repeated.

    Example: strandline table replay ./tables/orders ./orders --dead-letters ./tables/bad-orders
    """
    opened: Any = log.open()
    done = sl.tables.replay_letters(options.sink(url, opened, dead_letters=_place_of(url, dead_letters)), opened)
    lines = [f"{show.counted(done.applied, 'dead letter')} applied."]
    if not any((done.applied, done.unreadable, done.expired, done.of_others)):
        lines += _absence_of(dead_letters)
    if done.unreadable:
        lines.append(f"{done.unreadable:,} still cannot become rows (first: {escaped(done.first_reason)})")
    if done.expired:
        lines.append(
            f"{done.expired:,} stay, since the log no longer has the records since, which decide what their keys have."
        )
    if done.of_others:
        lines.append(f"{done.of_others:,} stay, since they name other tables.")
    show.answer(asdict(done), *lines)


@table.command()
@connecting
def letters(
    url: TableUrl,
    log: FollowedLog,
    *,
    dead_letters: Letters = None,
    options: RowOptions,
    limit: Annotated[int, option("N", "How many are shown, from the first on.", min=1)] = 100,
) -> None:
    """Show the dead letters of a table: the records that could not become rows, each with the reason.

    Only letters of records that the table has applied: one of a commit that was interrupted is shown when that is
    repeated.

    Example: strandline table letters ./tables/orders ./orders --dead-letters ./tables/bad-orders
    """
    opened: Any = log.open()
    sink = options.sink(url, opened, dead_letters=_place_of(url, dead_letters))
    found = sl.tables.letters(sink, opened)
    rows = rows_of(found.slice(0, limit))
    fields = {"letters": found.num_rows, "first": [{**record_fields(row), "reason": row["reason"]} for row in rows]}
    lines = [
        f"{row['offset']:>10}  {readable(row['key'])}  {readable(row['value'])}  {escaped(row['reason'])}"
        for row in rows
    ]
    more = [] if found.num_rows <= limit else [f"{found.num_rows - limit:,} more: see --limit."]
    if not found.num_rows:
        more = _absence_of(dead_letters)
    show.answer(fields, f"{show.counted(found.num_rows, 'dead letter')}.", *lines, *more)


def _absence_of(dead_letters: str | None) -> list[str]:
    """What to say where no letter is found: the address may be a wrong one."""
    if dead_letters is not None and not is_in_database(dead_letters) and dead_letters != "yes":
        try:
            sl.tables.existing(dead_letters)
        except NotFound:
            return [f"There is no table at {dead_letters}: none was stored there yet, or the address is another one."]
    return []


def _place_of(url: str, dead_letters: str | None) -> str | bool:
    if is_in_database(url):
        return True
    if dead_letters is None:
        raise InvalidInput(
            f"The table {url} does not record where its dead letters are: name their table with --dead-letters."
        )
    return dead_letters


@table.command()
@guarded
def optimize(url: TableUrl) -> None:
    """Join small files of a table of all changes, or of a history. Its follower may run meanwhile.

    Example: strandline table optimize ./tables/orders
    """
    fewer = sl.tables.optimize(sl.tables.existing(url))
    show.answer({"files_fewer": fewer}, f"The table has {show.counted(fewer, 'file')} fewer.")


@table.command()
@guarded
def vacuum(
    url: TableUrl,
    *,
    hours: Annotated[int, option("N", "Keep the files of versions younger than this.", min=1)] = 168,
) -> None:
    """Remove data files that no version of the last days names, such as those of failed jobs.

    The table can then be restored only to versions of that time. Keep files for longer than any job takes.

    Example: strandline table vacuum ./tables/orders --hours 336
    """
    gone = sl.tables.vacuum(sl.tables.existing(url), hours)
    show.answer({"files_removed": gone}, f"{show.counted(gone, 'file')} removed.")
