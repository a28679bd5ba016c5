"""``strandline produce``: append lines, JSON, files of rows or made-up records to a log."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, cast

import pyarrow as pa
import typer

import strandline as sl
from strandline.bulk.appending import FileAppender
from strandline.bulk.load_files import RecordFields
from strandline.bulk.load_sources import FileFormat, LoadedFile, files_at
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import OR_CREATE, AnyLogAt, LogPlace
from strandline.cli.shared.common import (
    INTERRUPTED,
    Interruption,
    TruncateTimes,
    connecting,
    retention_option,
    stop_on_signal,
)
from strandline.cli.shared.text import parse_line
from strandline.errors import InvalidInput
from strandline.formats.json.records import InputRecord, parse_record, record_table
from strandline.log.contract import Handle
from strandline.log.produce.rows import MAX_TIME
from strandline.storage.clock import CLOCK

_VALUE_BYTES: Final = 100
_CHUNK: Final = 20_000
_LETTERS: Final = bytes(b"abcdefghijklmnopqrstuvwxyz0123456789"[code % 36] for code in range(256))


class InputFormat(StrEnum):
    """How standard input is read (lines, json), or files (the others)."""

    LINES = "lines"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


_FILES: Final = "Rows of files"
_MADE_UP: Final = "Made-up records"
_OF_INPUT: Final = (None, InputFormat.LINES, InputFormat.JSON)


def _field(*names: str, help_: str) -> Any:
    return typer.Option(*names, metavar="FIELD", help=help_, rich_help_panel=_FILES)


@dataclass(slots=True)
class ProducedCount:
    """Records and bytes appended so far, and the handle of the last append."""

    records: int = 0
    bytes: int = 0
    last: Handle | None = None


@connecting
def produce(
    place: AnyLogAt,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="Files or folders of JSON lines, CSV, Parquet or Arrow; without any, standard input is read.",
        ),
    ] = None,
    *,
    format: Annotated[  # noqa: A002
        InputFormat | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Of standard input: lines (the default) or json, as 'tail --json' prints it. Of files: jsonl, csv, "
            "parquet or arrow; by default their names say it.",
        ),
    ] = None,
    key: Annotated[str | None, _field("--key", help_="The field or column that is the key.")] = None,
    op_field: Annotated[str | None, _field("--op-field", help_="The one that says put, delete or purge.")] = None,
    timestamp_field: Annotated[
        str | None, _field("--timestamp-field", help_="The one with the time, and its zone; by default it is now.")
    ] = None,
    value_field: Annotated[
        str | None, _field("--value-field", help_="The one that is the value; by default the whole row is.")
    ] = None,
    headers: Annotated[
        list[str] | None, _field("--headers", help_="One that becomes a header of its name; may be repeated.")
    ] = None,
    truncate_times: TruncateTimes = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue behind the rows that the log has already.", rich_help_panel=_FILES),
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The name by which the log knows the files; by default their addresses.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Splits a line into key and value; without it a line is a value.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of records to generate instead of reading standard input.",
            rich_help_panel=_MADE_UP,
        ),
    ] = None,
    keys: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of keys of generated records.", rich_help_panel=_MADE_UP)
    ] = 1000,
    seed: Annotated[
        int, typer.Option(metavar="N", help="The same seed gives the same records.", rich_help_panel=_MADE_UP)
    ] = 0,
    create: Annotated[bool, typer.Option("--create", help="Make the log if there is none.")] = False,
    retention: Annotated[str | None, retention_option("With --create: what the log")] = None,
) -> None:
    r"""Append records: lines of standard input, rows of files, or made-up ones.

    Rows of files become JSON objects, or what a typed log says; the log remembers how many rows it has, so that an
    append that was interrupted continues with --resume, each row once. With --format json, lines of standard input
    have the fields key, value, op (put, delete, purge), headers and timestamp; what is not text goes into
    key_base64, value_base64 and headers_base64. That is what "tail --json" prints, so one log can be piped into
    another. A record is durable when the command has ended with status 0.

    Example: strandline produce ./orders orders.jsonl --key id
    """
    if key_separator == "" or (key_separator is not None and format not in (None, InputFormat.LINES)):
        raise typer.BadParameter("--key-separator needs at least one character, and --format lines.")
    if retention is not None and not create:
        raise typer.BadParameter("--retention is for a log that is made: it needs --create.")
    fields = RecordFields(key, op_field, timestamp_field, value_field, tuple(headers or ()), truncate_times)
    if files:
        if count is not None or key_separator is not None or (format is not None and format in _OF_INPUT):
            raise typer.BadParameter(
                "--count, --key-separator, and --format lines and json are for standard input: give no files, and "
                "write strandline produce URL < FILE."
            )
        _append_files(
            place,
            files_at(files, cast("FileFormat | None", format)),
            fields,
            source=source,
            resume=resume,
            create=create,
            retention=retention,
        )
        return
    if fields.named or truncate_times or resume or source is not None or format not in _OF_INPUT:
        raise typer.BadParameter(
            "--key, --op-field, --timestamp-field, --value-field, --headers, --truncate-times, --resume, --source and "
            "the formats jsonl, csv, parquet and arrow are for files: name one behind the log."
        )
    tally, began = ProducedCount(), time.monotonic()
    failure: InvalidInput | None = None
    with (
        place.writing(create=create, retention=retention, hint=OR_CREATE) as log,
        Interruption() as interruption,
        log.producer() as producer,
        show.meter("appending", total=count) as advance,
    ):
        try:
            if count is not None:
                tables = made_up(count, keys=keys, seed=seed)
                _append_tables(producer, tally, advance, interruption.items(tables))
            else:
                lines = interruption.items(sys.stdin.buffer)
                separator = None if key_separator is None else key_separator.encode()
                _append_lines(producer, tally, advance, lines, kind=format or InputFormat.LINES, separator=separator)
        except InvalidInput as error:
            failure = error
        producer.flush()
    _report(tally, time.monotonic() - began, stopped=interruption.asked)
    if failure is not None:
        were = "was" if tally.records == 1 else "were"
        raise InvalidInput(f"{failure} {show.counted(tally.records, 'record')} before it {were} appended.")
    if interruption.asked:
        raise typer.Exit(INTERRUPTED)


def _append_files(
    place: LogPlace,
    files: Sequence[LoadedFile],
    fields: RecordFields,
    *,
    source: str | None,
    resume: bool,
    create: bool,
    retention: str | None,
) -> None:
    began, done = time.monotonic(), False
    with place.writing(create=create, retention=retention, hint=OR_CREATE) as log, stop_on_signal() as stop:
        work = FileAppender(log, source or " ".join(file.where for file in files), files, fields)
        try:
            with show.meter("appending", total=None) as advance:
                done = work.run(resume=resume, stop=stop, on_progress=show.so_far(advance))
        except BaseException:
            if work.has_begun:
                _report_files(work, time.monotonic() - began, "failed")
            raise
        _report_files(work, time.monotonic() - began, "done" if done else "stopped")
    if not done:
        raise typer.Exit(INTERRUPTED)


def _report_files(work: FileAppender, took: float, outcome: Literal["done", "stopped", "failed"]) -> None:
    rate = work.appended / took if took else 0.0
    fields = {
        "records": work.appended,
        "stored": work.stored,
        "source": work.source,
        "seconds": round(took, 3),
        "records_per_second": round(rate),
        "next": work.log.bounds().next if outcome == "done" else None,
        "interrupted": outcome != "done",
    }
    text = f"{show.counted(work.appended, 'record')} in {show.seconds(took)}, {show.rate(rate, 'record')}; "
    text += f"the log has {work.stored:,} of {work.source}"
    if outcome == "done":
        if work.stored and not work.appended:
            stored = show.counted(work.stored, "record")
            text = f"There was nothing to append: the log has all {stored} of {work.source}"
    elif work.stored:
        when = "continue" if outcome == "stopped" else "when the cause is mended, continue"
        text = f"{outcome}: {text}. They are durable; {when} behind them with the same command and --resume."
    else:
        again = "; repeat the command" if outcome == "stopped" else ""
        text = f"{outcome}: the log has nothing of {work.source} yet{again}."
    show.answer(fields, text)


def _append_lines(
    producer: sl.Producer,
    tally: ProducedCount,
    advance: Callable[[int], None],
    lines: Iterable[bytes],
    *,
    kind: InputFormat,
    separator: bytes | None,
) -> None:
    for number, line in enumerate(lines, 1):
        if kind is InputFormat.JSON and not line.strip():
            continue
        row = parse_record(line, f"Line {number}") if kind is InputFormat.JSON else parse_line(line, number, separator)
        tally.last = _append_row(producer, row)
        tally.records += 1
        tally.bytes += len(row.key or b"") + len(row.value or b"")
        advance(1)


def _append_row(producer: sl.Producer, row: InputRecord) -> Any:
    headers = None if row.headers is None else {name: data for name, data in row.headers if data is not None}
    is_plain = headers is None or (bool(headers) and len(headers) == len(row.headers or ()))
    if is_plain and abs(row.timestamp or 0) <= MAX_TIME:
        return producer.append(key=row.key, value=row.value, op=row.op, timestamp=row.timestamp, headers=headers)
    # A header that is there twice, or a time that a clock cannot have: a batch of one record can.
    return producer.append_batch(record_table([row], now=CLOCK.now()))


def _append_tables(
    producer: sl.Producer, tally: ProducedCount, advance: Callable[[int], None], tables: Iterable[pa.Table]
) -> None:
    for table in tables:
        tally.last = producer.append_batch(table)
        tally.records += table.num_rows
        tally.bytes += table.nbytes
        advance(table.num_rows)


def made_up(count: int, *, keys: int, seed: int) -> Iterator[pa.Table]:
    """Tables of generated records: random ones of ``keys`` keys, random text as values; the same for the same seed."""
    chance = random.Random(seed)
    names = pa.array([f"key-{index:08d}".encode() for index in range(keys)], pa.binary())
    while count > 0:
        rows = min(count, _CHUNK)
        chosen = pa.array(chance.choices(range(keys), k=rows), pa.int64())
        content = pa.py_buffer(chance.randbytes(rows * _VALUE_BYTES).translate(_LETTERS))
        ends = pa.array(range(0, (rows + 1) * _VALUE_BYTES, _VALUE_BYTES), pa.int32()).buffers()[1]
        values = pa.Array.from_buffers(pa.binary(), rows, [None, ends, content])
        yield pa.table({"key": names.take(chosen), "value": values})
        count -= rows


def _report(tally: ProducedCount, took: float, *, stopped: bool) -> None:
    receipt = None if tally.last is None else tally.last.result()
    first = None if receipt is None else receipt.first
    end = None if receipt is None or first is None else first + receipt.count
    rate = tally.records / took if took else 0.0
    fields = {
        "records": tally.records,
        "bytes": tally.bytes,
        "seconds": round(took, 3),
        "records_per_second": round(rate),
        "next": end,
        "interrupted": stopped,
    }
    records, size = show.counted(tally.records, "record"), show.size(tally.bytes)
    what = f"{records} ({size}) in {show.seconds(took)}, {show.rate(rate, 'record')}"
    text = "nothing was appended" if end is None else f"{what}; the last one is at offset {end - 1:,}"
    show.answer(fields, f"{'stopped: ' if stopped else ''}{text}")
