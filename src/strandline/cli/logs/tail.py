"""``strandline tail``: print records of a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from json import dumps
from typing import Annotated, Any, Final

import pyarrow as pa
from rich.text import Text

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, AnyLogAt
from strandline.cli.shared.common import Follow, Schema, beginning, connecting, span_of_time
from strandline.cli.shared.decoding import Unreadable, value_decoder
from strandline.cli.shared.options import flag, option
from strandline.cli.shared.text import escaped, moment, readable
from strandline.errors import InvalidInput, NotReady, SlotInvalid, TransientStorageError
from strandline.formats.json.records import record_fields, rows_of
from strandline.log.read.planning import cursor_after
from strandline.log.read.reading import Arrival, fetch_in_order, pauses, wait_for_more
from strandline.model.cursor import Start
from strandline.storage.clock import CLOCK

_LAST: Final = 10
_WAIT: Final = 1.0
_PLANNED: Final = 16
_STYLES: Final = {sl.Op.PUT: "green", sl.Op.DELETE: "red", sl.Op.PURGE: "magenta"}


@connecting
def tail(
    place: AnyLogAt,
    *,
    since: Annotated[
        Any,
        beginning(
            "Where to begin: an offset, a time, now, or beginning, which is all that is retained; by default with the "
            "last 10 records."
        ),
    ] = None,
    follow: Follow = False,
    limit: Annotated[
        int | None,
        option(
            "N",
            "Number of records after which to end; without --from and --follow, the last N.",
            "--limit",
            "-n",
            min=1,
        ),
    ] = None,
    hold: Annotated[
        int | None,
        span_of_time(
            "Pin the records still to be read, by a slot that expires this long after it was last renewed (10m)."
        ),
    ] = None,
    decode: Annotated[bool, flag("Show values decoded, as the log names their format.", "--decode")] = False,
    schema: Schema = None,
) -> None:
    """Print records: offset, time, operation, key and value.

    Reading claims nothing and moves no slot. Values that are not UTF-8 are shown in hexadecimal, and with --json in
    base64. With --decode values are objects with their fields; for one that cannot be decoded the reason is shown, in
    --json as "error", beside its bytes. With --hold an expiring slot pins the records that are not printed yet: it is
    renewed while the command runs, and released at its end.

    Example: strandline tail s3://bucket/orders --follow
    """
    with place.reading() as log:
        values = value_decoder(log, schema) if decode or schema is not None else None
        cursor = _start(log, since, _LAST if limit is None or follow else limit)
        try:
            with held(log, cursor.next, hold) as still_needed:
                for batch in _batches(log, cursor, still_needed, follow=follow, limit=limit):
                    _print(batch, None if values is None else values(batch))
        except KeyboardInterrupt:
            if not follow:
                raise
            # Ctrl-C ends following.


def _start(log: AnyLog, since: Start | None, last: int) -> sl.Cursor:
    if since is None:
        bounds = log.hot.bounds() if isinstance(log, sl.tier.TieredLog) else log.bounds()
        if isinstance(log, sl.tier.TieredLog) and bounds.first > 0 and bounds.next - bounds.first < last:
            bounds = log.bounds()  # only here the cold tier is needed
        return sl.Cursor(log.log_id, max(bounds.first, bounds.next - last))
    # A reader that only prints records may begin after trimmed ones.
    cursor = sl.Cursor(log.log_id, log.position_of("retained" if since == "beginning" else since))
    log.plan(cursor, sl.log.Limit(batches=1))  # refuses a cursor that is not retained, or past the end
    return cursor


@contextmanager
def held(log: AnyLog, position: int, seconds: float | None) -> Iterator[Callable[[int], None]]:
    """Pin the records from ``position`` on; yields a function to call with the next position that is needed.

    If the hold expired meanwhile, because the reader of the output was slow or the machine slept, it is acquired again;
    ``CursorExpired`` if that is too late.
    """
    if seconds is None:
        yield lambda _: None
        return
    if not isinstance(log, sl.log.ObjectLog | sl.tier.TieredLog):
        raise InvalidInput(f"--hold is for an object log: create a slot in {log.url} instead ('strandline slots').")
    hold, renewed = log.hold(position, seconds), time.monotonic()

    def still_needed(position: int) -> None:
        nonlocal hold, renewed
        if time.monotonic() - renewed < seconds / 3:
            return
        try:
            hold.renew(position)
        except SlotInvalid:
            hold = log.hold(position, seconds)
        renewed = time.monotonic()

    try:
        yield still_needed
    finally:
        hold.release()


def _batches(
    log: AnyLog, cursor: sl.Cursor, still_needed: Callable[[int], None], *, follow: bool, limit: int | None
) -> Iterator[pa.RecordBatch]:
    last = None if limit is None else cursor.next + limit
    end = log.end().next
    waiting: Iterator[float] | None = None
    while last is None or cursor.next < last:
        upto = last if follow else min(end, end if last is None else last)
        try:
            still_needed(cursor.next)
            spans = log.plan(cursor, sl.log.Limit(batches=_PLANNED, upto=upto))
            for span, batches in fetch_in_order(spans):
                yield from batches
                cursor, waiting = cursor_after(cursor, span), None
                still_needed(span.next)
            if not spans and not follow:
                return
            if not spans:
                if wait_for_more(log, cursor, _WAIT) is Arrival.END:
                    return
                waiting = None
        except (TransientStorageError, NotReady) as error:
            if not follow:
                raise
            # A node that restarts, or a store that fails: the next attempt continues behind the last printed record.
            if waiting is None:
                print(f"{escaped(str(error))} Waiting for it.", file=sys.stderr)
                waiting = pauses(None, CLOCK)
            time.sleep(next(waiting))


def _print(batch: pa.RecordBatch, values: list[Any] | None) -> None:
    coloured = not show.for_programs() and sys.stdout.isatty()
    console = show.out() if coloured else None
    for row, record in enumerate(rows_of(batch)):
        decoded = record["value"] if values is None else values[row]
        if show.for_programs():
            show.document(_fields(record, decoded))
            continue
        op = sl.Op(record["op"])
        found = moment(record["timestamp"])
        time = f"{record['timestamp']} us" if found is None else found[:-3]
        offset, key, value = f"{record['offset']:>10}", readable(record["key"]), readable(record["value"])
        if isinstance(decoded, Unreadable):
            value = f"{value} (not decoded: {escaped(decoded)})"
        elif isinstance(decoded, dict):
            value = escaped(dumps(decoded, ensure_ascii=False))
        headers = "".join(f" {escaped(name)}={readable(data)}" for name, data in record["headers"] or ())
        if console is None:
            sys.stdout.write(f"{offset}  {time}  {op.name.lower():<6}  {key}  {value}{headers}\n")
        else:
            line = Text(f"{offset}  {time}  ", "dim")
            line.append(f"{op.name.lower():<6}  ", _STYLES[op]).append(f"{key}  ", "bold")
            console.print(line.append(value, "none").append(headers, "cyan"), soft_wrap=True)
    sys.stdout.flush()


def _fields(record: Mapping[str, Any], decoded: Any) -> dict[str, Any]:
    """A record as JSON, with its decoded value, or why that could not be decoded."""
    fields = record_fields(record)
    if isinstance(decoded, Unreadable):
        return {**fields, "error": str(decoded)}
    if not isinstance(decoded, dict):
        return fields
    return {**{name: part for name, part in fields.items() if name != "value_base64"}, "value": decoded}
