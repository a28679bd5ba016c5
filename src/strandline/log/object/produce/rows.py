"""Rows of single records: checked, queued without a lock, encoded to Arrow page by page."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, chain, compress, count, repeat
from operator import itemgetter, mul
from typing import Final, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput
from strandline.log.object.produce.upload import RANGE_BYTES
from strandline.model.arguments import shown
from strandline.model.head import MetadataRanges
from strandline.model.records import MAX_RECORD_BYTES, Op, record_batch

Headers = Mapping[str, bytes]

Row = tuple[int, int, bytes | None, bytes | None, Headers | None]
"""Nanoseconds, operation, key, value, headers."""

Call = tuple[int, int, bytes, bytes | tuple[bytes, ...], int]
"""A whole ``produce`` call in one row: nanoseconds, :data:`CALL` or :data:`ENTRY`, its metadata, its entries, and
about their bytes."""

CALL: Final = 255
"""Stands where a row has its operation: a call, with its entries in a tuple."""

ENTRY: Final = 254
"""Stands there, too: a call with one entry, as it is. A tuple around it would be one more for the garbage collector."""

_CALLS: Final = frozenset((CALL, ENTRY))
_TIME, _OP, _METADATA, _CONTENT, _SIZE = (itemgetter(place) for place in range(5))

SKIPPED: Final = cast("Row", ())
"""Stands where a ticket was found without its row; false, unlike any row."""

_WITHDRAWN: Final = cast("Row", None)
"""Stands where a row was taken back; false, too."""

FIRST_PAGE: Final = 1 << 6
"""So many records are turned into Arrow at a time before it is known how large they are."""

_PAGE: Final = 1 << 14
"""At most so many are: rarely enough to be cheap."""

PAGE_BYTES: Final = 2 << 20
"""About so many bytes are: often enough to stay a small part of the buffer."""

ONLY_VALUES: Final = (
    "This log keeps values and nothing else: a record may have no key, no headers and no operation but put, and must "
    "have a value."
)

_MAX_TIME: Final = ((1 << 63) - 1) // 1000


class RowQueue:
    """Rows in the order of their tickets, queued from many threads without a lock.

    Taking a ticket and storing a row under it are atomic in CPython. Between the two a thread may be held up: whoever
    takes rows then marks the ticket as skipped, and the thread, which finds the mark, takes another ticket. Nobody
    waits, nothing is lost, and a call that returned before another began has the lower ticket.
    """

    __slots__ = ("next_ticket", "rows")

    def __init__(self) -> None:
        self.next_ticket: Callable[[], int] = count().__next__
        self.rows: dict[int, Row | Call] = {}

    def take(self, start: int, stop: int) -> tuple[list[Row | Call], list[int]]:
        """The rows of these tickets, and the tickets that were skipped. Only one thread may take at a time."""
        pop = self.rows.pop
        found = list(map(pop, range(start, stop), repeat(SKIPPED)))
        if all(found):
            return found, []
        rows: list[Row | Call] = []
        holes: list[int] = []
        for ticket, early in enumerate(found, start):
            row = early
            if row is SKIPPED and self.rows.setdefault(ticket, SKIPPED) is not SKIPPED:
                row = pop(ticket)
            if row is SKIPPED or row is _WITHDRAWN:
                holes.append(ticket)
            else:
                rows.append(row)
        return rows, holes

    def withdraw(self, ticket: int) -> bool:
        """Take a row back, unless it was taken already. Not while another thread takes."""
        if ticket not in self.rows:
            return False
        self.rows[ticket] = _WITHDRAWN  # not removed: nobody would ever clear the mark of a skipped ticket
        return True


def fitting_page(record: int, batch_bytes: int) -> int:
    """How many records of this size to turn into Arrow at a time: a power of two."""
    rows = min(PAGE_BYTES, batch_bytes // 2) // max(1, record)
    return max(1, min(_PAGE, 1 << max(0, rows.bit_length() - 1)))


def has_calls(rows: list[Row | Call]) -> bool:
    """Whether any of the rows is a whole call."""
    return not _CALLS.isdisjoint(map(_OP, rows))


class RowGroup(NamedTuple):
    """Rows that go into one batch together."""

    rows: list[Row | Call]
    ranges: MetadataRanges
    """What its calls attached, counted from its own first record."""
    widths: list[int]
    """How many records each row is."""
    entries: list[bytes] | None
    """Its records' values, if all its rows are calls."""
    times: memoryview
    """Of each row, in microseconds."""
    apart: bool
    """Whether they begin a new batch, since the one that is being filled has no room for them."""


class Room(NamedTuple):
    """What a batch has left: bytes of metadata, and bytes of records."""

    metadata: int
    space: int


def cut_calls(rows: list[Row | Call], room: Room, most: Room, tick: int = 1) -> list[RowGroup]:
    """Rows in pieces, each for one batch: one ends with the call that uses up the room for metadata, or before the one
    that would not fit; none is empty, and no call is cut.

    The batch that is being filled has ``room`` left, an empty one ``most``. Times are cut to ``tick`` microseconds.
    Works on whole columns: nothing here is done for each row in Python.
    """
    ops = bytes(map(_OP, rows))
    narrow = ops.count(ENTRY) == len(rows)
    pure = narrow or ops.count(ENTRY) + ops.count(CALL) == len(rows)
    calls = cast("list[Call]", rows) if pure else [cast("Call", row if row[1] in _CALLS else _NO_CALL) for row in rows]
    payloads, contents, sizes = list(map(_METADATA, calls)), list(map(_CONTENT, calls)), list(map(_SIZE, calls))
    times = memoryview(_microseconds(map(_TIME, calls), tick).buffers()[1]).cast("q")
    widths = [1] * len(rows) if narrow else [len(row[3]) if row[1] == CALL else 1 for row in calls]
    # Beside what its payload takes, each range takes as much as any other.
    attached = [0, *accumulate(map(len, payloads) if pure else _attached(calls))]
    beside = RANGE_BYTES if pure else 0
    filled = [] if sum(sizes) <= room.space else [0, *accumulate(sizes)]
    pieces: list[RowGroup] = []
    at, apart = 0, False
    while at < len(rows):
        used = attached[at] + beside * at + room.metadata
        full = bisect_left(range(len(rows)), used, at + 1, key=lambda place: attached[place] + beside * place)
        unfit = len(rows)
        if filled:
            # What is larger than a whole batch is one of its own.
            space = room.space if room.space < most.space else max(room.space, sizes[at])
            unfit = bisect_right(filled, filled[at] + space, at + 1) - 1
        end = min(full, unfit)
        if end > at:
            starts = range(end - at) if narrow else accumulate(widths[at : end - 1], initial=0)
            ranges = MetadataRanges(tuple(starts), tuple(times[at:end].tolist()), tuple(payloads[at:end]))
            entries = None
            if narrow:
                entries = cast("list[bytes]", contents[at:end])
            elif pure:
                entries = list(chain.from_iterable(map(as_tuple, contents[at:end])))
            else:
                ranges = _chosen(ranges, [op in _CALLS for op in ops[at:end]])
            pieces.append(RowGroup(rows[at:end], ranges, widths[at:end], entries, times[at:end], apart))
        at, room, apart = end, most, unfit < full
    return pieces


_NO_CALL: Final = cast("Call", (0, 0, b"", b"", 0))
"""Stands where a single record is among calls: as wide, and nothing attached."""


def as_tuple(content: bytes | tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The entries of a call, however a row has them."""
    return (content,) if isinstance(content, bytes) else content


def _attached(calls: list[Call]) -> list[int]:
    return [0 if call is _NO_CALL else len(call[2]) + RANGE_BYTES for call in calls]


def _chosen(ranges: MetadataRanges, which: list[bool]) -> MetadataRanges:
    return MetadataRanges(
        tuple(compress(ranges.starts, which)),
        tuple(compress(ranges.times, which)),
        tuple(compress(ranges.payloads, which)),
    )


def page_of_calls(piece: RowGroup) -> pa.RecordBatch:
    """The records of a piece as one record batch."""
    if piece.entries is None:
        return page_of(_flat(piece.rows))
    count = len(piece.entries)
    times: memoryview | bytes = piece.times
    if count > len(piece.rows):
        times = b"".join(map(mul, map(itemgetter(0), struct.iter_unpack("8s", times)), piece.widths))
    return record_batch(
        timestamps=_numbers(pa.int64(), times),
        ops=_numbers(pa.int8(), bytes(count)),
        keys=pa.nulls(count, pa.binary()),
        values=piece.entries,
    )


def _flat(rows: list[Row | Call]) -> list[Row]:
    """Each record as a row of its own."""
    found: list[Row] = []
    for row in rows:
        if row[1] in _CALLS:
            time, _, _, content, _ = cast("Call", row)
            found += [(time, int(Op.PUT), None, entry, None) for entry in as_tuple(content)]
        else:
            found.append(cast("Row", row))
    return found


def page_of(rows: list[Row]) -> pa.RecordBatch:
    """The rows as one record batch."""
    headers = list(map(itemgetter(4), rows))
    return record_batch(
        timestamps=_microseconds(map(_TIME, rows)),
        ops=_numbers(pa.int8(), bytes(map(itemgetter(1), rows))),
        keys=list(map(itemgetter(2), rows)),
        values=list(map(itemgetter(3), rows)),
        headers=headers if any(headers) else None,
    )


def _microseconds(nanoseconds: Iterable[int], tick: int = 1) -> pa.Array:
    given = list(nanoseconds)
    ticks = pc.divide(_numbers(pa.int64(), struct.pack(f"={len(given)}q", *given)), 1000 * tick)
    return ticks if tick == 1 else pc.multiply(ticks, tick)


def _numbers(kind: pa.DataType, data: memoryview | bytes) -> pa.Array:
    """The numbers in a buffer, as they lie there: ``pa.array`` would walk through them one by one."""
    buffer = pa.py_buffer(data)
    return pa.Array.from_buffers(kind, buffer.size * 8 // kind.bit_width, [None, buffer])


def check_size(key: bytes | None, value: bytes | None, headers: Headers | None) -> None:
    """Refuse a record that no batch may hold."""
    size = len(key or b"") + len(value or b"") + header_bytes(headers or {})
    if size > MAX_RECORD_BYTES:
        raise InvalidInput(
            f"A record of {size:,} bytes (key, value and headers) is over the limit of {MAX_RECORD_BYTES:,}."
        )


def header_bytes(headers: Headers) -> int:
    """What headers take in a batch: their names and values, and where each of them ends."""
    return sum(len(name.encode()) + len(value) + 8 for name, value in headers.items())


def check_timestamp(timestamp: int) -> None:
    """Refuse what is no time in microseconds."""
    if type(timestamp) is not int or not -_MAX_TIME <= timestamp <= _MAX_TIME:
        raise InvalidInput(f"A timestamp is a whole number of microseconds since 1970, not {shown(timestamp)}.")


def check_opaque(batches: list[pa.RecordBatch]) -> None:
    """Refuse records that are more than a value, where only values are kept."""
    for batch in batches:
        _, ops, keys, values, headers = batch.columns
        plain = keys.null_count == headers.null_count == batch.num_rows and not values.null_count
        if not plain or pc.max(ops).as_py() != Op.PUT:
            raise InvalidInput(ONLY_VALUES)


def check_rare(op: int, headers: Headers | None) -> Headers | None:
    """Refuse an operation or headers that no record has; returns headers that the caller cannot change any more."""
    if op not in (Op.PUT, Op.DELETE, Op.PURGE):
        raise InvalidInput(f"Operations are {Op.PUT:d}, {Op.DELETE:d} and {Op.PURGE:d}, not {shown(op)}.")
    if not headers:
        return None
    try:
        kept = dict(headers.items())
        "".join(kept).encode()
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"Headers map text to bytes: {error}.") from error
    if not all(type(name) is str and type(value) is bytes for name, value in kept.items()):
        raise InvalidInput("Headers map text to bytes.")
    return kept
