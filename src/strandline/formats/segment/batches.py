"""Fingerprints of the batches in a segment file: which batch holds an offset, as in the cursor behind it.

Parquet's key-value metadata has them as ``strandline.batches``: base64 of 12 bytes for each batch, in order, up to the
segment's last record: u32 its records, u64 its fingerprint (0: unknown), little-endian. A segment of more batches than
:data:`MOST_BATCHES` has the last ones. Readers that do not know the key ignore it.
"""

from __future__ import annotations

import base64
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

BATCHES_KEY: Final = b"strandline.batches"
MOST_BATCHES: Final = 1 << 16
"""They take 1 MiB of a footer, which may have 2 MiB."""
_ENTRY: Final = struct.Struct("<IQ")
_MOST_RECORDS: Final = (1 << 32) - 1

BatchRun = tuple[int, int | None]
"""A number of records, all of one batch, and the fingerprint of that batch; None: unknown."""


@dataclass(frozen=True, slots=True)
class SegmentBatches:
    """The batches of a segment, as far as they are known: the first offset of each in the segment, its fingerprint."""

    firsts: Sequence[int]
    fingerprints: Sequence[int]
    next: int
    """One past the last offset."""

    @classmethod
    def decode(cls, data: bytes | None, start: int, end: int) -> Self:
        """The batches of a segment with offsets ``start`` up to ``end``, inclusive; ``ValueError`` for damage."""
        found = b"" if data is None else base64.b64decode(data, validate=True)
        if len(found) % _ENTRY.size or len(found) > MOST_BATCHES * _ENTRY.size:
            raise ValueError(f"its list of batches has {len(found):,} bytes")
        entries = list(_ENTRY.iter_unpack(found))
        first = end + 1 - sum(count for count, _ in entries)
        if first < start or any(not count for count, _ in entries):
            raise ValueError("its list of batches has other records than the segment")
        firsts = array("Q")
        for count, _ in entries:
            firsts.append(first)
            first += count
        return cls(firsts, array("Q", (fingerprint for _, fingerprint in entries)), end + 1)

    def fingerprint_at(self, offset: int) -> int | None:
        """The fingerprint of the batch with the record at an offset; None if it is unknown."""
        place = bisect_right(self.firsts, offset) - 1
        return self.fingerprints[place] or None if place >= 0 and offset < self.next else None

    def runs(self, first: int, end: int) -> list[BatchRun]:
        """The batches of the records from ``first`` up to ``end``, exclusive."""
        found: list[BatchRun] = []
        place = bisect_right(self.firsts, first)
        while first < end:
            behind = min(end, self.firsts[place] if place < len(self.firsts) else self.next)
            found.append((behind - first, self.fingerprint_at(first)))
            first, place = behind, place + 1
        return found


class BatchRuns:
    """Collects the batches of a segment that is written."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def add(self, runs: Iterable[BatchRun]) -> None:
        """Add records; those that follow records of the same batch are of the same run.

        >>> batches = BatchRuns()
        >>> batches.add([(2, 7), (1, 7), (3, None), (1, 9)])
        >>> SegmentBatches.decode(batches.encode(), 10, 16).runs(11, 17)
        [(2, 7), (3, None), (1, 9)]
        """
        for count, fingerprint in runs:
            known = fingerprint or 0
            if self._runs and self._runs[-1][1] == known and self._runs[-1][0] + count <= _MOST_RECORDS:
                self._runs[-1] = (self._runs[-1][0] + count, known)
            elif count:
                self._runs.append((count, known))

    def encode(self) -> bytes:
        """As a value of Parquet's key-value metadata; empty if no batch is known."""
        known = any(fingerprint for _, fingerprint in self._runs)
        return base64.b64encode(b"".join(_ENTRY.pack(*run) for run in self._runs[-MOST_BATCHES:])) if known else b""
