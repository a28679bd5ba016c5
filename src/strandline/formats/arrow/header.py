"""Limits of untrusted Arrow data: headers checked before Arrow reads them, unpacked sizes, received batches.

The strings and tables of a flatbuffer may be shared: a header of 1 MB may refer to one string of half of that
100,000 times, and Arrow copies it each time.
"""

from __future__ import annotations

import struct
from typing import Final

import pyarrow as pa

from strandline.errors import CorruptData, StrandlineError
from strandline.model.records import MAX_BATCH_BYTES

LARGEST_HEADER: Final = 1 << 20
"""Largest header of a message."""

_WRITTEN_OUT: Final = 4 << 20
"""Largest memory of a header with nothing shared."""

_SMALL: Final = 1 << 10
"""A header of up to this size takes a few MB at most, even with sharing."""

_TABLE_BYTES: Final = 512
"""Approximate memory of a table of the header: a column, or a pair of strings."""

# Positions of fields in the flatbuffer tables of Arrow's Message.fbs and Schema.fbs.
_MESSAGE_KIND, MESSAGE_HEADER, _MESSAGE_PAIRS = 1, 2, 4
_SCHEMA_KIND: Final = 1
_SCHEMA_COLUMNS, _SCHEMA_PAIRS = 1, 2
_COLUMN_NAME, _COLUMN_CHILDREN, _COLUMN_PAIRS = 0, 5, 6
_PAIR: Final = (0, 1)


_PREFIX: Final = struct.Struct("<II")
CONTINUATION: Final = 0xFFFFFFFF


def check_message(data: memoryview) -> None:
    """:func:`check_header` of the encapsulated message at the beginning of these bytes."""
    if len(data) < _PREFIX.size:
        raise ValueError("a message ends before its header")
    mark, size = _PREFIX.unpack_from(data)
    if mark != CONTINUATION:
        raise ValueError("a message does not begin as one")
    check_header(data[_PREFIX.size : _PREFIX.size + size])


def check_header(header: memoryview) -> None:
    """``ValueError`` for a header that is too large, or takes much more memory than its bytes."""
    if len(header) <= _SMALL:
        return
    if len(header) > LARGEST_HEADER:
        raise ValueError(f"a header of {len(header):,} bytes is larger than the limit of {LARGEST_HEADER:,}")
    try:
        _Sizes(header).add_message()
    except struct.error as error:
        raise ValueError("a header has an offset outside itself") from error


class _Sizes:
    """Adds up the memory of a header's parts, each as often as it is referenced."""

    def __init__(self, header: memoryview) -> None:
        self._header = header
        self._left = _WRITTEN_OUT

    def add_message(self) -> None:
        message = read_number(self._header, 0, "I")
        self._add_pairs(find_field(self._header, message, _MESSAGE_PAIRS))
        kind = find_field(self._header, message, _MESSAGE_KIND)
        if kind is None or read_number(self._header, kind, "B") != _SCHEMA_KIND:
            return
        schema = target_of(self._header, find_field(self._header, message, MESSAGE_HEADER))
        self._add_pairs(find_field(self._header, schema, _SCHEMA_PAIRS))
        waiting = [find_field(self._header, schema, _SCHEMA_COLUMNS)]
        while waiting:
            for column in self._tables(waiting.pop()):
                self._add_text(find_field(self._header, column, _COLUMN_NAME))
                self._add_pairs(find_field(self._header, column, _COLUMN_PAIRS))
                waiting.append(find_field(self._header, column, _COLUMN_CHILDREN))

    def _add_pairs(self, at: int | None) -> None:
        for pair in self._tables(at):
            for text in _PAIR:
                self._add_text(find_field(self._header, pair, text))

    def _tables(self, at: int | None) -> list[int]:
        """The tables that a vector refers to, if there is one."""
        if at is None:
            return []
        vector = target_of(self._header, at)
        count = read_number(self._header, vector, "I")
        self._add(count * _TABLE_BYTES)
        return [target_of(self._header, vector + 4 * (index + 1)) for index in range(count)]

    def _add_text(self, at: int | None) -> None:
        if at is not None:
            self._add(read_number(self._header, target_of(self._header, at), "I"))

    def _add(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError(f"a header of {len(self._header):,} bytes takes more than {_WRITTEN_OUT:,} in memory")


def read_number(data: memoryview, at: int, kind: str) -> int:
    """A number of a flatbuffer, in a format of ``struct``; ``ValueError`` or ``struct.error`` out of range."""
    if at < 0:
        raise ValueError("an offset points before the message")
    return int(struct.unpack_from("<" + kind, data, at)[0])


def find_field(data: memoryview, table: int, index: int) -> int | None:
    """Position of a field in a flatbuffer table, or None if it is absent."""
    directory = table - read_number(data, table, "i")
    if 4 + 2 * index + 2 > read_number(data, directory, "H"):
        return None
    offset = read_number(data, directory + 4 + 2 * index, "H")
    return table + offset if offset else None


def target_of(data: memoryview, at: int | None) -> int:
    """Target of an offset in a flatbuffer."""
    if at is None:
        raise ValueError("a message lacks a field")
    return at + read_number(data, at, "I")


PADDED_LIMIT: Final = MAX_BATCH_BYTES + MAX_BATCH_BYTES // 8
"""Limit of a batch, and the padding between its buffers."""

_EARLIER_LIMIT: Final = (1 << 30) + (1 << 27)
"""Earlier versions allowed batches of 1 GiB: they are still read, unless few bytes unpack to that."""

_DENSEST: Final = 64
"""Records rarely compress better than this: the limit above :data:`PADDED_LIMIT`."""


def unpacked_limit(stored: int) -> int:
    """Limit of the bytes, in total, to which ``stored`` bytes may unpack.

    >>> unpacked_limit(34_000) == PADDED_LIMIT
    True
    >>> unpacked_limit(1 << 20) < unpacked_limit(10 << 20) < unpacked_limit(1 << 30) == unpacked_limit(1 << 40)
    True
    """
    return max(PADDED_LIMIT, min(_EARLIER_LIMIT, _DENSEST * stored))


def check_unpacked(announced: int, stored: int, where: str) -> None:
    """``CorruptData`` if the announced size exceeds the limit for the stored bytes."""
    limit = unpacked_limit(stored)
    if announced > limit:
        raise CorruptData(
            f"{where} is damaged: its {stored:,} bytes announce {announced:,} unpacked, more than the {limit:,} that a "
            "batch may hold. Restore the object; retrying does not help."
        )


RECORD_BYTES: Final = 24
"""Least bytes of a record in a log: on the wire a column of nulls may take none."""


def admit_batch(batch: object, what: str, *, wrong: type[StrandlineError] = CorruptData) -> pa.RecordBatch:
    """The batch, fully validated; raises ``wrong`` for an invalid one.

    Received batches must pass this first: measuring, slicing, comparing or encoding one whose offsets are out of
    bounds crashes the process.
    """
    if not isinstance(batch, pa.RecordBatch):
        raise wrong(f"{what} has no Arrow batch.")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise wrong(f"{what} is damaged: {str(error).splitlines()[0][:200]}.") from error
    return batch


def memory_of(batch: pa.RecordBatch) -> int:
    """Bytes of an admitted batch as records of a log, which may exceed its buffers."""
    size: int = batch.nbytes
    return max(size, RECORD_BYTES * int(batch.num_rows))
