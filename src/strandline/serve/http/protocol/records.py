"""Records beyond the protocol: whole records as JSON lines, Arrow or CloudEvents, into any stream and out of it. Pure.

A stream's own content is the values of its records. These notations carry key, operation, time and headers as well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput, StrandlineError
from strandline.formats.arrow.header import admit_batch, check_message
from strandline.formats.arrow.stream import END
from strandline.formats.json.records import parse_record, record_fields, record_table, rows_of
from strandline.model.records import MAX_BATCH_BYTES, READ_SCHEMA, RECORD_SCHEMA, TIMESTAMP, Op, conform
from strandline.node.flight.wire.append_stream import check_types
from strandline.node.flight.wire.protocol import read_batch, read_schema_message
from strandline.serve.http.protocol.bad_rows import BadRow
from strandline.serve.http.protocol.cloud_events import (
    BATCH,
    EVENT,
    body_of_events,
    checked_key,
    event_of_request,
    events_of,
    is_event,
)
from strandline.serve.http.protocol.content import media_type, sizes_of
from strandline.values.contract import Codec

LINES: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
NOTATIONS: Final = (LINES, ARROW, BATCH)
"""What a reader may ask for."""
_SENT: Final = (*NOTATIONS, EVENT)

_OPS: Final = {op.name.lower(): int(op) for op in Op}
_FIELD: Final = re.compile(r"at `\$\.?(?P<path>[^`]*)`|field '(?P<name>[^']*)'")
_MOST_BATCHES: Final = 4096
_MOST_PARTS: Final = 1 << 18
"""Values within one line that is decoded into objects, each of which takes some hundred bytes."""
_RECORD_BYTES: Final = 64
"""What a record takes beside key, value and headers, at least: its offset and its time."""


class BadValue(BadRow):
    """A value does not fit the format that the log names; nothing was appended."""

    def __init__(self, row: int, reason: str) -> None:
        """``reason`` is what the log's codec says."""
        found = _FIELD.search(reason)
        field = None if found is None else found["path"] or found["name"]
        message = f"Record {row} does not fit the values of this log: {reason}. Nothing was appended."
        super().__init__(message, row, field, reason)


_NULL: Final = msgspec.Raw(b"null")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A record as most clients write it; others are read one by one."""

    key: str | None = None
    value: msgspec.Raw = _NULL
    """Not decoded: an array of a body's size would take thirty times that."""
    op: str = "put"
    offset: int | None = None


_DECODER: Final = msgspec.json.Decoder(_Line)
_TEXT: Final = msgspec.json.Decoder(str)


def accepted(accept: str | None) -> str | None:
    """The notation of records that a reader asks for; None if it takes the stream's own content."""
    kinds = [media_type(part) for part in (accept or "").split(",")]
    return next((kind for kind in kinds if kind in NOTATIONS), None)


def is_whole(headers: Mapping[str, str]) -> bool:
    """Whether the headers of a request, whose names are in lower case, say that its body is whole records."""
    return is_event(headers) or media_type(headers.get("content-type", "")) in _SENT


def records_sent(headers: Mapping[str, str], body: bytes, key: str | None, *, now: int) -> pa.Table:
    """The records of a request; ``InvalidInput`` or :class:`BadRow` says which line is wrong.

    ``key`` names the attribute of CloudEvents that is the key, None for the subject.

    >>> sent = records_sent({"content-type": LINES}, b'{"key": "a", "value": {"n": 1}}', None, now=0)
    >>> sent.select(["key", "value"]).to_pylist()
    [{'key': b'a', 'value': b'{"n":1}'}]
    """
    notation, name = media_type(headers.get("content-type", "")), checked_key(key)
    if notation in (EVENT, BATCH):  # its own attributes count, and not those in the headers
        return events_of(body, notation, name, now=now)
    if is_event(headers):
        return event_of_request(headers, body, name, now=now)
    if name is not None:
        raise InvalidInput("key names an attribute of CloudEvents: leave it out with other notations.")
    return _table_of_lines(body, now) if notation == LINES else _table_of_arrow(body, now)


def _table_of_lines(body: bytes, now: int) -> pa.Table:
    try:
        body.decode()
        lines = _DECODER.decode_lines(body)
        values = [_value_of(bytes(line.value)) for line in lines]
        ops = [_OPS[line.op] for line in lines]
    except (msgspec.MsgspecError, KeyError, UnicodeError, OverflowError, RecursionError):
        return _table_one_by_one(body, now)
    if not lines:
        raise InvalidInput("The body holds no record: give one as JSON on each line.")
    keys = [None if line.key is None else line.key.encode() for line in lines]
    columns = {
        "timestamp": pa.repeat(pa.scalar(now, pa.int64()), len(lines)).view(TIMESTAMP),
        "op": pa.array(ops, pa.int8()),
        "key": pa.array(keys, pa.binary()),
        "value": pa.array(values, pa.binary()),
    }
    return pa.Table.from_batches(conform(pa.table(columns), now=now))


def _value_of(found: bytes) -> bytes | None:
    """Text as UTF-8, null as None, anything else as its JSON without spaces."""
    if found == b"null":
        return None
    return _TEXT.decode(found).encode() if found[:1] == b'"' else msgspec.json.format(found, indent=-1)


def _table_one_by_one(body: bytes, now: int) -> pa.Table:
    lines = [(number, line) for number, line in enumerate(body.split(b"\n"), 1) if line.strip()]
    for number, line in lines:
        if sum(map(line.count, (b"[", b"{", b","))) > _MOST_PARTS:
            raise InvalidInput(f"Line {number} holds more than {_MOST_PARTS:,} values of JSON: give them as base64.")
    return record_table([parse_record(line, f"Line {number}") for number, line in lines], now=now)


def _table_of_arrow(body: bytes, now: int) -> pa.Table:
    """The records in an Arrow stream, message by message: each is judged by its header before Arrow unpacks it."""
    source, view = pa.BufferReader(body), memoryview(body)
    schema: pa.Schema | None = None
    batches: list[pa.RecordBatch] = []
    try:
        while (at := source.tell()) < len(view) and bytes(view[at : at + len(END) + 1]) != END:
            check_message(view[at:])
            pa.ipc.read_message(source)
            message = pa.py_buffer(bytes(view[at : source.tell()]))
            if schema is None:
                schema = read_schema_message(message)
                check_types(pa.schema([column for column in schema if column.name != "offset"]))
                continue
            batch = read_batch(message, schema, MAX_BATCH_BYTES)
            batches.append(admit_batch(batch, "A batch of the body", wrong=InvalidInput))
            if len(batches) > _MOST_BATCHES:
                raise InvalidInput(f"The body has more than {_MOST_BATCHES:,} Arrow batches: send larger ones.")
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        if isinstance(error, StrandlineError):
            raise
        raise InvalidInput(f"The body is no Arrow stream ({str(error)[:200]}); nothing was appended.") from error
    if schema is None or not batches:
        raise InvalidInput("The body holds no record: give an Arrow stream with a batch.")
    table = pa.Table.from_batches(batches, schema)
    if "offset" in table.column_names:
        table = table.drop_columns(["offset"])
    return pa.Table.from_batches(conform(table, now=now), RECORD_SCHEMA)


def check_values(records: pa.Table | pa.RecordBatch, codec: Codec) -> None:
    """``BadValue`` for the first value that the codec of the log cannot decode."""
    first = 0
    for batch in records.to_batches() if isinstance(records, pa.Table) else [records]:
        bad = codec.decode(batch.column("value")).bad
        if bad.num_rows:
            raise BadValue(first + bad.column("row")[0].as_py(), bad.column("reason")[0].as_py())
        first += batch.num_rows


def sizes_of_records(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """About the bytes of each record in a body of records: also one without key and value takes some."""
    more: int = batch.column("headers").nbytes // max(1, batch.num_rows) + _RECORD_BYTES
    return sizes_of(batch.column("value"), 0) + sizes_of(batch.column("key"), 0) + more


def with_prefix(batch: pa.RecordBatch, prefix: bytes) -> pa.RecordBatch:
    """The records whose key begins with these bytes."""
    return batch.filter(pc.fill_null(pc.starts_with(batch.column("key"), prefix), False)) if prefix else batch


def body_of_records(batches: Sequence[pa.RecordBatch], notation: str, log_id: UUID, content_type: str) -> bytes:
    """The body of an answer with these records, which have offsets, of a stream with this content type."""
    if notation == BATCH:
        return body_of_events(batches, log_id, content_type)
    if notation == ARROW:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, READ_SCHEMA) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return sink.getvalue()
    return b"".join(msgspec.json.encode(record_fields(row)) + b"\n" for batch in batches for row in rows_of(batch))
