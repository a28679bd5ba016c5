"""Limits on decompressed size, checked from headers before anything is decompressed.

The limits of a batch are those of :mod:`strandline.model.records`, which every producer keeps to; this module is where
readers apply them.
"""

from __future__ import annotations

from typing import Final

from strandline.errors import CorruptData
from strandline.model.records import MAX_BATCH_BYTES

PADDED_LIMIT: Final = MAX_BATCH_BYTES + MAX_BATCH_BYTES // 8
"""A batch, and the padding between its buffers."""

_EARLIER_LIMIT: Final = (1 << 30) + (1 << 27)
"""A batch could once hold 1 GiB: such batches are still read, unless they are forged out of a few bytes."""

_DENSEST: Final = 64
"""Records rarely compress better than this. Above :data:`PADDED_LIMIT` nothing may."""


def unpacked_limit(stored: int) -> int:
    """How many bytes may be unpacked from so many stored ones, everything together that is in memory then.

    >>> unpacked_limit(34_000) == PADDED_LIMIT
    True
    >>> unpacked_limit(1 << 20) < unpacked_limit(10 << 20) < unpacked_limit(1 << 30) == unpacked_limit(1 << 40)
    True
    """
    return max(PADDED_LIMIT, min(_EARLIER_LIMIT, _DENSEST * stored))


def check_unpacked(announced: int, stored: int, where: str) -> None:
    """``CorruptData`` if what is announced is more than such stored bytes may unpack to."""
    limit = unpacked_limit(stored)
    if announced > limit:
        raise CorruptData(
            f"{where} is damaged: its {stored:,} bytes announce {announced:,} unpacked, more than the {limit:,} that a "
            "batch may hold. Restore the object; retrying does not help."
        )
