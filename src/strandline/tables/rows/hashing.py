"""The hash of keys that assigns rows to the files of a table. Fixed for ever: tables on disk depend on it."""

from __future__ import annotations

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
    starts, sizes = ends[:-1] - low, np.diff(ends)
    value = sizes.astype(np.uint64) * np.uint64(_SIZE)
    for at in range(0, int(sizes.max()), 8):
        left = sizes - at
        word = words[np.minimum(starts + at, high - low)]
        if left.min() < 8:  # noqa: PLR2004 - the bytes of a word
            short = (np.uint64(1) << (np.clip(left, 0, 7) * 8).astype(np.uint64)) - np.uint64(1)
            word = word & np.where(left >= 8, np.uint64(0xFFFFFFFFFFFFFFFF), short)  # noqa: PLR2004
        mixed = (value ^ word) * np.uint64(_WORD)
        mixed ^= mixed >> np.uint64(32)
        value = np.where(left > 0, mixed, value)
    value *= np.uint64(_LAST)
    return (value >> np.uint64(32)).astype(np.uint32)
