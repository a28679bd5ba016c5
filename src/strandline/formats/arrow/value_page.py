"""Encoder for pages of plain values: writes the same bytes as Arrow, at a fraction of the cost.

A group commit writes such a page every hundred microseconds, and Arrow's many small objects dominated its cost.
Arrow's header of a page is constant for a number of records, except for a few numbers that depend on the length of
the values: Arrow encodes one sample for each number of records, and those numbers are patched.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import pyarrow as pa

from strandline.model.records import RECORD_SCHEMA, TIMESTAMP, no_headers

MOST_RECORDS: Final = 1 << 12
"""For more records in a page, Arrow's own cost does not matter."""

_NUMBER = struct.Struct("<q")
_WIDTH: Final = 8
_PREFIX: Final = 8
"""The beginning of a message: a marker, and the length of its metadata."""


class _Template(NamedTuple):
    """The constant parts of all pages with the same number of records."""

    metadata: bytes
    lengths: tuple[tuple[int, int], ...]
    """Positions of numbers that are the bytes of all values plus a constant."""
    padded: tuple[tuple[int, int], ...]
    """The same for those bytes with their padding."""
    before: bytes
    """Bytes between the timestamps and the offsets of the values."""
    after: bytes
    """Bytes after the values and their padding."""
    gap: bytes
    """Padding after the offsets of the values."""


def encode_values(values: Sequence[bytes], timestamps: Sequence[int]) -> bytes:
    """The page of these records (timestamps in microseconds), as ``RecordBatch.serialize`` would give it.

    There are at least one and at most :data:`MOST_RECORDS` records.
    """
    template = _template(len(values))
    data = b"".join(values)
    size = len(data)
    padding = -size % _WIDTH
    metadata = bytearray(template.metadata)
    for place, more in template.lengths:
        _NUMBER.pack_into(metadata, place, size + more)
    for place, more in template.padded:
        _NUMBER.pack_into(metadata, place, size + padding + more)
    offsets = array("i", accumulate(map(len, values), initial=0))
    return b"".join(
        (
            metadata,
            array("q", timestamps),
            template.before,
            offsets,
            template.gap,
            data,
            bytes(padding),
            template.after,
        )
    )


@lru_cache(maxsize=1024)
def _template(count: int) -> _Template:
    """The template for pages of ``count`` records, learned from two samples whose values differ by one byte."""
    one, other = _sample(count, _WIDTH), _sample(count, _WIDTH + 1)
    (length,) = struct.unpack_from("<i", one, 4)
    end = _PREFIX + length
    lengths, padded = [], []
    for place in range(0, end, _WIDTH):
        (mine,), (theirs,) = _NUMBER.unpack_from(one, place), _NUMBER.unpack_from(other, place)
        if theirs - mine == 1:
            lengths.append((place, mine - _WIDTH))
        elif theirs - mine == _WIDTH:
            padded.append((place, mine - _WIDTH))
        elif theirs != mine:
            raise AssertionError("this version of Arrow describes a page differently")
    body = one[end:]
    data = body.index(_MARK)
    start = data - _aligned(4 * (count + 1))
    return _Template(
        one[:end],
        tuple(lengths),
        tuple(padded),
        body[_aligned(_WIDTH * count) : start],
        body[data + _WIDTH :],
        bytes(_aligned(4 * (count + 1)) - 4 * (count + 1)),
    )


_MARK: Final = b"\xf7\xa5~values"[:_WIDTH]
"""Placeholder of the values in a sample: it occurs nowhere else."""


def _sample(count: int, size: int) -> bytes:
    # Not from Python lists: converting one imports pandas, which takes longer than a thousand commits.
    offsets = array("i", [0] * count + [size])
    columns = [
        pa.Array.from_buffers(TIMESTAMP, count, [None, pa.py_buffer(bytes(_WIDTH * count))]),
        pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(bytes(count))]),
        pa.nulls(count, pa.binary()),
        pa.Array.from_buffers(
            pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(_MARK.ljust(size, b"\xff"))]
        ),
        no_headers(count),
    ]
    return bytes(pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA).serialize().to_pybytes())


def _aligned(size: int) -> int:
    return -(-size // _WIDTH) * _WIDTH


def decode_values(page: bytes) -> pa.RecordBatch:
    """The record batch in a page that was just encoded: its columns refer to these bytes without a copy."""
    return pa.ipc.read_record_batch(pa.py_buffer(page), RECORD_SCHEMA)
