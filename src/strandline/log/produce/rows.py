"""Rows of single records and calls: checked, divided over batches, encoded to Arrow page by page."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate, chain, compress
from operator import add, itemgetter
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput
from strandline.log.produce.shipper import RANGE_BYTES
from strandline.model.arguments import shown
from strandline.model.cursor import microseconds
from strandline.model.head import MetadataRanges
from strandline.model.records import Op, record_batch

Headers = Mapping[str, bytes]

Row = tuple[int, int, bytes | None, bytes | None, Headers | None, int]
"""Nanoseconds, operation, key, value, headers, ticket."""

Call = tuple[int, int, bytes, bytes | tuple[bytes, ...], int, int]
"""A whole ``produce`` call in one row: nanoseconds, :data:`CALL` or :data:`ENTRY`, its metadata, its entries, about
their bytes, and its ticket."""

CALL: Final = 255
"""In the place of the operation: a call, with its entries in a tuple."""

ENTRY: Final = 254
"""In the place of the operation: a call with one entry, without a tuple, which the garbage collector would track."""

_RANGE_OF: Final = bytes(ENTRY) + bytes([RANGE_BYTES, RANGE_BYTES])
"""By operation: bytes of the call's range in the listing, besides its metadata; 0 for a single record."""

_TIME, _OP, _METADATA, _CONTENT, _SIZE, _TICKET = (itemgetter(place) for place in range(6))

FIRST_PAGE: Final = 1 << 6
"""Records encoded at a time before their size is known."""

_PAGE: Final = 1 << 14
"""Largest number of records encoded at a time."""

PAGE_BYTES: Final = 2 << 20
"""Bytes encoded at a time: small enough to stay a small part of the buffer."""

ONLY_VALUES: Final = (
    "This log keeps values and nothing else: a record may have no key, no headers and no operation but put, and must "
    "have a value."
)

BY_NAME: Final = "Producer.append takes its arguments by name: append(value=…), or append(key=…, value=…)."

MAX_TIME: Final = ((1 << 63) - 1) // 1000


def fitting_page(record: int, batch_bytes: int) -> int:
    """How many records of this size to encode at a time: a power of two."""
    rows = min(PAGE_BYTES, batch_bytes // 2) // max(1, record)
    return max(1, min(_PAGE, 1 << max(0, rows.bit_length() - 1)))


def tickets_of(rows: list[Row | Call]) -> Sequence[int]:
    """The tickets of rows, as a range if they are consecutive.

    A thread that pauses between taking a ticket and queueing its row is overtaken; nearly always none is.
    """
    tickets = list(map(_TICKET, rows))
    first, last = tickets[0], tickets[-1]
    is_in_order = last - first == len(tickets) - 1 and sorted(tickets) == tickets
    return range(first, last + 1) if is_in_order else tickets


class BatchRows(NamedTuple):
    """Rows that go into one batch together."""

    rows: list[Row | Call]
    ranges: MetadataRanges
    """Metadata of its calls, counted from its own first record."""
    widths: list[int]
    """Number of records of each row."""
    entries: list[bytes] | None = None
    """Values of its records, if all its rows are calls."""
    times: np.ndarray[Any, Any] = np.empty(0, np.int64)
    """Time of each row, in microseconds."""
    apart: bool = False
    """Whether they begin a new batch, since the current one has no room for them."""


class Room(NamedTuple):
    """Space left in a batch: bytes of metadata, and bytes of records."""

    metadata: int
    space: int


def cut_rows(rows: list[Row | Call], room: Room, most: Room, tick: int = 1) -> list[BatchRows]:
    """Split rows into groups, each for one batch. A group ends with the call that uses up the room for metadata, or
    before the call that would not fit; no group is empty, and no call is split.

    The current batch has ``room`` left, an empty one ``most``. Times are truncated to ``tick`` microseconds.
    Rows without calls are one group: pages are small. Works on whole columns, without a Python loop per row.
    """
    ops = bytes(map(_OP, rows))
    of_ranges = ops.translate(_RANGE_OF)
    if rows and not any(of_ranges):
        return [BatchRows(rows, MetadataRanges(), [1] * len(rows))]
    pure, narrow = all(of_ranges), ops.count(ENTRY) == len(rows)
    calls = cast("list[Call]", rows if pure else [row if row[1] >= ENTRY else _NO_CALL for row in rows])
    payloads, contents, sizes = list(map(_METADATA, calls)), list(map(_CONTENT, calls)), list(map(_SIZE, calls))
    times = _microseconds(calls, tick)
    widths = [1] * len(rows) if narrow else [len(row[3]) if row[1] == CALL else 1 for row in calls]
    attached = [0, *accumulate(map(add, map(len, payloads), of_ranges))]
    filled = [0, *accumulate(sizes)]
    pieces: list[BatchRows] = []
    at, apart = 0, False
    while at < len(rows):
        full = bisect_left(attached, attached[at] + room.metadata, at + 1, len(rows))
        # A call larger than a whole batch gets its own.
        space = room.space if room.space < most.space else max(room.space, sizes[at])
        unfit = bisect_right(filled, filled[at] + space, at + 1) - 1
        end = min(full, unfit)
        if end > at:
            starts = range(end - at) if narrow else accumulate(widths[at : end - 1], initial=0)
            columns: list[Any] = [starts, times[at:end].tolist(), payloads[at:end]]
            entries: list[Any] | None = contents[at:end] if narrow else None
            if not pure:
                columns = [compress(column, of_ranges[at:end]) for column in columns]
            elif not narrow:
                entries = list(chain.from_iterable(map(as_tuple, contents[at:end])))
            ranges = MetadataRanges(*map(tuple, columns))
            pieces.append(BatchRows(rows[at:end], ranges, widths[at:end], entries, times[at:end], apart))
        at, room, apart = end, most, unfit < full
    return pieces


_NO_CALL: Final = cast("Call", (0, 0, b"", b"", 0, 0))
"""In the place of a call: a single record, without metadata."""


def as_tuple(content: bytes | tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The entries of a call, in either form of a row."""
    return (content,) if isinstance(content, bytes) else content


def page_of(piece: BatchRows) -> pa.RecordBatch:
    """The records of a piece as one record batch."""
    if piece.entries is None:
        return page_of_records(_flat(piece.rows) if piece.ranges else cast("list[Row]", piece.rows))
    count = len(piece.entries)
    return record_batch(
        timestamps=pa.array(piece.times if count == len(piece.rows) else np.repeat(piece.times, piece.widths)),
        ops=pa.array(np.zeros(count, np.int8)),
        keys=pa.nulls(count, pa.binary()),
        values=piece.entries,
    )


def _flat(rows: list[Row | Call]) -> list[Row]:
    found: list[Row] = []
    for row in rows:
        if row[1] >= ENTRY:
            time, _, _, content, *_ = cast("Call", row)
            found += [(time, int(Op.PUT), None, entry, None, 0) for entry in as_tuple(content)]
        else:
            found.append(cast("Row", row))
    return found


def page_of_records(rows: list[Row]) -> pa.RecordBatch:
    """Rows without calls as one record batch."""
    headers = list(map(_SIZE, rows))
    return record_batch(
        timestamps=pa.array(_microseconds(rows)),
        ops=pa.array(np.fromiter(map(_OP, rows), np.int8, len(rows))),
        keys=list(map(_METADATA, rows)),
        values=list(map(_CONTENT, rows)),
        headers=headers if any(headers) else None,
    )


def _microseconds(rows: Sequence[Row | Call], tick: int = 1) -> np.ndarray[Any, Any]:
    return np.fromiter(map(_TIME, rows), np.int64, len(rows)) // (1000 * tick) * tick


def check_size(key: bytes | None, value: bytes | None, headers: Headers | None, most: int) -> None:
    """Refuse a record that is too large for a batch of the log."""
    size = len(key or b"") + len(value or b"") + header_bytes(headers or {})
    if size > most:
        raise InvalidInput(f"A record of {size:,} bytes (key, value and headers) is over the limit of {most:,}.")


def header_bytes(headers: Headers) -> int:
    """Bytes of headers in a batch: names, values, and their end offsets."""
    return sum(len(name.encode()) + len(value) + 8 for name, value in headers.items())


def microseconds_of(timestamp: int | datetime) -> int:
    """A record's time in microseconds since 1970; other values are refused."""
    found = microseconds(timestamp) if isinstance(timestamp, datetime) else timestamp
    if type(found) is not int or not -MAX_TIME <= found <= MAX_TIME:
        raise InvalidInput(
            f"A timestamp is a datetime, or a whole number of microseconds since 1970, not {shown(timestamp)}."
        )
    return found


def check_opaque(batches: list[pa.RecordBatch]) -> None:
    """Refuse records with more than a value, where only values are stored."""
    for batch in batches:
        _, ops, keys, values, headers = batch.columns
        plain = keys.null_count == headers.null_count == batch.num_rows and not values.null_count
        if not plain or pc.max(ops).as_py() != Op.PUT:
            raise InvalidInput(ONLY_VALUES)


def check_rare(op: int, headers: Headers | None) -> Headers | None:
    """Refuse an invalid operation or headers; returns headers that the caller cannot change any more."""
    if op not in (Op.PUT, Op.DELETE, Op.PURGE):
        raise InvalidInput(f"Operations are Op.PUT, Op.DELETE and Op.PURGE, not {shown(op)}.")
    if not headers:
        return None
    try:
        kept = dict(headers.items())
        "".join(kept).encode()
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"Headers map text to bytes: {error}.") from error
    if not all(type(name) is str and type(value) is bytes for name, value in kept.items()):
        raise InvalidInput("Headers map text to bytes: encode their values first.")
    return kept
