"""Damage within a spool: tells it from a torn tail, which a crash of the older program leaves."""

from __future__ import annotations

import re
from typing import Final

from strandline.compat.spool.format import UNCHECKED_VERSION, LegacyEnding, LegacyFrame, LegacyStop, legacy_frame_at
from strandline.formats.wal.frame import MAGIC

_MAGIC: Final = re.compile(re.escape(MAGIC))
_CHECKED_BYTES: Final = 8
"""Bytes that are checked for each byte of the remainder, at most: hostile bytes may look like a frame at any place."""


def frame_behind(data: memoryview, stop: LegacyStop) -> int | None:
    """The byte at which a whole frame begins behind the damage; None for a torn tail, behind which there is none.

    A program that crashed has written nothing behind a frame that it did not finish. A frame without a checksum counts
    only if another frame, or the end, follows it.

    >>> from strandline.compat.spool.format import LegacyScanner, encode_record_frame
    >>> one, two = (b"".join(encode_record_frame(1, lsn, 0, b"a")) for lsn in (1, 2))
    >>> scanner = LegacyScanner(memoryview(b"?" + one[1:] + two))
    >>> list(scanner), frame_behind(memoryview(b"?" + one[1:] + two), scanner.stop)
    ([], 38)
    >>> frame_behind(memoryview(one + two[:9]), LegacyStop(LegacyEnding.TORN, 38, "")) is None
    True
    """
    if stop.ending is LegacyEnding.CLEAN:
        return None
    budget = _CHECKED_BYTES * (len(data) - stop.at)
    for match in _MAGIC.finditer(data, stop.at + 1):
        found = legacy_frame_at(data, match.start())
        if isinstance(found, LegacyStop):
            budget -= found.needs if found.ending is LegacyEnding.BAD_CHECKSUM else 0
            if budget < 0:
                return match.start()
        elif found.version != UNCHECKED_VERSION or _is_followed(data, found.end):
            return match.start()
    return None


def _is_followed(data: memoryview, at: int) -> bool:
    following = legacy_frame_at(data, at)
    return isinstance(following, LegacyFrame) or following.ending is LegacyEnding.CLEAN
