"""``strandline tail``: the records of a log, from anywhere in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Final

import pyarrow as pa
import typer
from rich.text import Text

import strandline as sl
from strandline.cli import show
from strandline.cli.frame import Debug, Json, Url, guarded, open_log
from strandline.cli.text import readable, to_fields
from strandline.log.fetch import fetch_in_order

_LAST: Final = 10
_WAIT: Final = 1.0
_PLANNED: Final = 16
_STYLES: Final = {sl.Op.PUT: "green", sl.Op.DELETE: "red", sl.Op.PURGE: "magenta"}


@guarded
def tail(
    url: Url,
    *,
    since: Annotated[
        str | None,
        typer.Option(metavar="OFFSET|beginning|now", help="Where to begin; by default with the last 10 records."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many records.")] = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Print records: offset, time, operation, key and value. Reading claims nothing and moves no slot.

    Values that are not UTF-8 are shown in hexadecimal, and with --json in base64.
    """
    log = open_log(url)
    cursor = _start(log, since)
    try:
        for table in _batches(log, cursor, follow=follow, limit=limit):
            _print(table, as_json=json)
    except KeyboardInterrupt:
        if not follow:
            raise
        # Ctrl-C is how following ends.


def _start(log: sl.ObjectLog, since: str | None) -> sl.Cursor:
    bounds = log.bounds()
    named = {None: max(bounds.first, bounds.next - _LAST), "beginning": bounds.first, "now": bounds.next}
    if since in named:
        return sl.Cursor(log.log_id, named[since])
    if since is None or not since.isdecimal():
        raise typer.BadParameter(f"--since takes an offset, 'beginning' or 'now', not {since!r}.")
    cursor = sl.Cursor(log.log_id, int(since))
    log.plan(cursor, sl.Limit(batches=1))  # refuses what is not retained, or past the end
    return cursor


def _batches(log: sl.ObjectLog, cursor: sl.Cursor, *, follow: bool, limit: int | None) -> Iterator[pa.RecordBatch]:
    last = None if limit is None else cursor.next + limit
    end = log.bounds().next
    while last is None or cursor.next < last:
        upto = last if follow else min(end, end if last is None else last)
        spans = log.plan(cursor, sl.Limit(batches=_PLANNED, upto=upto))
        for _, batches in fetch_in_order(spans):
            yield from batches
        if spans:
            cursor = cursor.at(spans[-1].next)
        elif not follow:
            return
        else:
            log.wait(cursor, _WAIT)


def _print(batch: pa.RecordBatch, *, as_json: bool) -> None:
    coloured = not as_json and sys.stdout.isatty()
    console = show.out() if coloured else None
    for record in batch.to_pylist(maps_as_pydicts="strict"):
        if as_json:
            show.document(to_fields(record))
            continue
        op = sl.Op(record["op"])
        moment = record["timestamp"].strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        offset, key, value = f"{record['offset']:>10}", readable(record["key"]), readable(record["value"])
        headers = "".join(f" {name}={readable(data)}" for name, data in (record["headers"] or {}).items())
        if console is None:
            sys.stdout.write(f"{offset}  {moment}  {op.name.lower():<6}  {key}  {value}{headers}\n")
        else:
            line = Text(f"{offset}  {moment}  ", "dim")
            line.append(f"{op.name.lower():<6}  ", _STYLES[op]).append(f"{key}  ", "bold")
            console.print(line.append(value, "none").append(headers, "cyan"), soft_wrap=True)
    sys.stdout.flush()
