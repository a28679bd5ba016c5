"""The hash of keys that assigns rows to the files of a table. Fixed for ever: tables on disk depend on it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    import numpy as np

HASH_BITS: Final = 32
"""The bits of a hash."""
HASH_VERSION: Final = 1
"""Recorded in each table that relies on it."""

_SIZE: Final = 0x9E3779B97F4A7C15
_WORD: Final = 0xFF51AFD7ED558CCD
_LAST: Final = 0xC4CEB9FE1A85EC53
_64_BITS: Final = 0xFFFFFFFFFFFFFFFF
_WORDS: Final = struct.Struct("<Q")
_WORD_BYTES: Final = _WORDS.size
_FEW: Final = 48
"""So many keys are hashed one by one: about as fast as a step over all of them."""
_PIECE: Final = 1 << 16
"""Bytes of a key that become numbers at a time."""


def key_hashes(keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The 32-bit hash of each key: a function of its bytes alone, computed for all keys at once, 8 bytes at a time.

    A null counts as an empty key.

    >>> [f"{one:08x}" for one in key_hashes(pa.array([b"", b"a", b"order-1", b"a longer key than eight bytes"]))]
    ['00000000', '0723d2d2', '762f2dbc', '72170a5a']
    """
    import numpy as np

    if isinstance(keys, pa.ChunkedArray):
        if keys.num_chunks != 1:
            return np.concatenate([key_hashes(chunk) for chunk in keys.chunks] or [np.empty(0, np.uint32)])
        keys = keys.chunk(0)
    count = len(keys)
    if not count:
        return np.empty(0, np.uint32)
    if keys.null_count:
        keys = keys.fill_null(b"")
    _, offsets, data = keys.buffers()
    width = np.int64 if pa.types.is_large_binary(keys.type) else np.int32
    ends = np.frombuffer(offsets, width)[keys.offset : keys.offset + count + 1].astype(np.int64)
    low, high = int(ends[0]), int(ends[-1])
    octets = np.zeros(high - low + 8, np.uint8)
    if high > low:
        octets[: high - low] = np.frombuffer(data, np.uint8, high - low, low)
    words = np.ndarray((high - low + 1,), np.dtype("<u8"), octets.data, strides=(1,))  # one word begins at each byte
    place, left = ends[:-1] - low, np.diff(ends)
    value = left.astype(np.uint64) * np.uint64(_SIZE)
    rows, now = np.arange(count), value  # the rows that may have bytes left, and their values
    while len(rows) > _FEW:
        shortest = int(left.min())
        if shortest <= 0 and 2 * np.count_nonzero(going := left > 0) <= len(rows):
            # So a byte costs the same, however long the other keys are.
            value[rows] = now
            rows, place, left = rows[going], place[going], left[going]
            now = value[rows]
            continue
        mixed = words[np.minimum(place, high - low)]
        if shortest < _WORD_BYTES:
            short = (np.uint64(1) << (np.clip(left, 0, 7) * 8).astype(np.uint64)) - np.uint64(1)
            mixed &= np.where(left >= _WORD_BYTES, np.uint64(_64_BITS), short)
        mixed ^= now
        mixed *= np.uint64(_WORD)
        mixed ^= mixed >> np.uint64(32)
        now = mixed if shortest > 0 else np.where(left > 0, mixed, now)
        place += _WORD_BYTES
        left -= _WORD_BYTES
    value[rows] = now
    # Few long keys: numbers of Python are faster than arrays of a few elements.
    for row, begin, size in zip(rows.tolist(), place.tolist(), left.tolist(), strict=True):
        value[row] = _mixed(int(value[row]), octets[begin : begin + max(size, 0)])
    value *= np.uint64(_LAST)
    return (value >> np.uint64(32)).astype(np.uint32)


def _mixed(value: int, octets: np.ndarray) -> int:
    """The value of a key after the rest of its bytes."""
    for begin in range(0, len(octets), _PIECE):
        piece = octets[begin : begin + _PIECE].tobytes()
        padded = piece.ljust(-(-len(piece) // _WORD_BYTES) * _WORD_BYTES, b"\0")
        for (word,) in _WORDS.iter_unpack(padded):
            value = (value ^ word) * _WORD & _64_BITS
            value ^= value >> 32
    return value
