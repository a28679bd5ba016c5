"""``strandline produce``: append lines, JSON, files of rows or made-up records to a log."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

import pyarrow as pa
import typer

import strandline as sl
from strandline.bulk.appending import FileAppender
from strandline.bulk.load_files import RecordFields
from strandline.bulk.load_sources import FileFormat, LoadedFile, files_at
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt, LogPlace
from strandline.cli.shared.common import (
    INTERRUPTED,
    Create,
    Interruption,
    connecting,
    retention_option,
    stop_on_signal,
)
from strandline.cli.shared.field_options import FieldOptions
from strandline.cli.shared.options import argument, flag, option
from strandline.cli.shared.text import parse_line
from strandline.errors import InvalidInput
from strandline.formats.json.records import InputRecord, parse_record, record_table
from strandline.log.contract import Handle
from strandline.log.produce.rows import MAX_TIME
from strandline.storage.clock import CLOCK

_KEYS: Final = 1000
_VALUE_BYTES: Final = 100
_CHUNK: Final = 20_000
_LETTERS: Final = bytes(b"abcdefghijklmnopqrstuvwxyz0123456789"[code % 36] for code in range(256))


InputFormat: TypeAlias = Literal["lines", "json", "jsonl", "csv", "parquet", "arrow"]
"""How standard input is read (lines, json), or files (the others)."""
_OF_INPUT: Final = (None, "lines", "json")
_FILES: Final = "Rows of files"


@connecting
def produce(
    place: AnyLogAt,
    files: Annotated[
        list[str] | None,
        argument("FILE", "Files or folders of JSON lines, CSV, Parquet or Arrow; without any, standard input is read."),
    ] = None,
    *,
    format: Annotated[  # noqa: A002
        InputFormat | None,
        option(
            "FORMAT",
            "Of standard input: lines (the default) or json, as 'tail --json' prints it. Of files: jsonl, csv, "
            "parquet or arrow; by default their names say it.",
        ),
    ] = None,
    rows: FieldOptions,
    headers: Annotated[
        list[str] | None,
        option("FIELD", "One that becomes a header of its name; may be repeated.", rich_help_panel=_FILES),
    ] = None,
    resume: Annotated[
        bool, flag("Continue behind the rows that the log has already.", "--resume", rich_help_panel=_FILES)
    ] = False,
    source: Annotated[
        str | None,
        option(
            "NAME", "The name by which the log knows the files; by default their addresses.", rich_help_panel=_FILES
        ),
    ] = None,
    key_separator: Annotated[
        str | None, option("TEXT", "Splits a line into key and value; without it a line is a value.")
    ] = None,
    count: Annotated[
        int | None, option("N", "Number of records to make up instead of reading standard input.", min=1)
    ] = None,
    create: Create = False,
    retention: Annotated[str | None, retention_option("With --create: what the log")] = None,
) -> None:
    r"""Append records: lines of standard input, or rows of files.

    Rows of files become JSON objects, or what a typed log says; the log remembers how many rows it has, so that an
    append that was interrupted continues with --resume, each row once. With --format json, lines of standard input
    have the fields key, value, op (put, delete, purge), headers and timestamp; what is not text goes into
    key_base64, value_base64 and headers_base64. That is what "tail --json" prints, so one log can be piped into
    another. A record is durable when the command has ended with status 0.

    Example: strandline produce ./orders orders.jsonl --key id
    """
    if key_separator == "" or (key_separator is not None and format not in (None, "lines")):
        raise typer.BadParameter("--key-separator needs at least one character, and --format lines.")
    if retention is not None and not create:
        raise typer.BadParameter("--retention is for a log that is made: it needs --create.")
    fields = rows.fields(tuple(headers or ()))
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
    if fields.named or rows.truncate_times or resume or source is not None or format not in _OF_INPUT:
        raise typer.BadParameter(
            "--key, --op, --timestamp, --value, --headers, --truncate-times, --resume, --source and "
            "the formats jsonl, csv, parquet and arrow are for files: name one behind the log."
        )
    failure: InvalidInput | None = None
    last: Handle | None = None
    size = 0
    with (
        place.writing(create=create, retention=retention) as log,
        Interruption() as interruption,
        log.producer() as producer,
        show.meter("appending", total=count) as work,
    ):
        given = _lines(format or "lines", key_separator) if count is None else made_up(count)
        try:
            for part in interruption.items(given):
                if isinstance(part, pa.Table):
                    last = producer.append_batch(part)
                    size += part.nbytes
                    work.add(part.num_rows)
                else:
                    last = _append_row(producer, part)
                    size += len(part.key or b"") + len(part.value or b"")
                    work.add(1)
        except InvalidInput as error:
            failure = error
        producer.flush()
    _report(work, size, last, stopped=interruption.asked)
    if failure is not None:
        were = "was" if work.done == 1 else "were"
        raise InvalidInput(f"{failure} {show.counted(work.done, 'record')} before it {were} appended.")
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
    with place.writing(create=create, retention=retention) as log, stop_on_signal() as stop:
        appender = FileAppender(log, source or " ".join(file.where for file in files), files, fields)
        try:
            with show.meter("appending", total=None) as work:
                done = appender.run(resume=resume, stop=stop, on_progress=work.upto)
        except BaseException:
            if appender.has_begun:
                _report_files(appender, time.monotonic() - began, "failed")
            raise
        _report_files(appender, time.monotonic() - began, "done" if done else "stopped")
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


def _lines(kind: InputFormat, separator: str | None) -> Iterator[InputRecord]:
    """The records in the lines of standard input."""
    between = None if separator is None else separator.encode()
    for number, line in enumerate(sys.stdin.buffer, 1):
        if kind == "lines":
            yield parse_line(line, number, between)
        elif line.strip():
            yield parse_record(line, f"Line {number}")


def _append_row(producer: sl.Producer, row: InputRecord) -> Any:
    headers = None if row.headers is None else {name: data for name, data in row.headers if data is not None}
    is_plain = headers is None or (bool(headers) and len(headers) == len(row.headers or ()))
    if is_plain and abs(row.timestamp or 0) <= MAX_TIME:
        return producer.append(key=row.key, value=row.value, op=row.op, timestamp=row.timestamp, headers=headers)
    # A header that is there twice, or a time that a clock cannot have: a batch of one record can.
    return producer.append_batch(record_table([row], now=CLOCK.now()))


def made_up(count: int) -> Iterator[pa.Table]:
    """Tables of generated records: random ones of a thousand keys, random text as values; the same each time."""
    chance = random.Random(0)
    names = pa.array([f"key-{index:08d}".encode() for index in range(_KEYS)], pa.binary())
    while count > 0:
        rows = min(count, _CHUNK)
        chosen = pa.array(chance.choices(range(_KEYS), k=rows), pa.int64())
        content = pa.py_buffer(chance.randbytes(rows * _VALUE_BYTES).translate(_LETTERS))
        ends = pa.array(range(0, (rows + 1) * _VALUE_BYTES, _VALUE_BYTES), pa.int32()).buffers()[1]
        values = pa.Array.from_buffers(pa.binary(), rows, [None, ends, content])
        yield pa.table({"key": names.take(chosen), "value": values})
        count -= rows


def _report(work: show.Meter, size: int, last: Handle | None, *, stopped: bool) -> None:
    receipt = None if last is None else last.result()
    end = None if receipt is None or receipt.first is None else receipt.first + receipt.count
    took = work.seconds
    rate = work.done / took if took else 0.0
    fields = {
        "records": work.done,
        "bytes": size,
        "seconds": round(took, 3),
        "records_per_second": round(rate),
        "next": end,
        "interrupted": stopped,
    }
    records = f"{show.counted(work.done, 'record')} ({show.size(size)})"
    what = f"{records} in {show.seconds(took)}, {show.rate(rate, 'record')}"
    text = "nothing was appended" if end is None else f"{what}; the last one is at offset {end - 1:,}"
    show.answer(fields, f"{'stopped: ' if stopped else ''}{text}")
