"""Slot lag of an object log: its head and chunks as a listing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from strandline.log.object.head.index import Chunks, bytes_from, entries_from, entries_listed_since, start_of_newest
from strandline.log.slots.trimming import retention_start
from strandline.model.cursor import Bounds
from strandline.model.head import Head
from strandline.model.retention import Retention


@final
@dataclass(frozen=True, slots=True)
class HeadListing:
    """Satisfies :class:`~strandline.log.slots.slot_lag.Listing`; reads at most one chunk of each level per position."""

    head: Head
    chunks: Chunks
    now: int

    @property
    def bounds(self) -> Bounds:
        """The retained offsets."""
        return Bounds(self.head.floor, self.head.next_offset)

    def bytes_from(self, position: int) -> int:
        """Stored bytes of the batches from a position on."""
        return bytes_from(self.head, position, self.chunks)

    def written_at(self, position: int) -> int | None:
        """When the batch with this offset was listed, in microseconds; None at the end."""
        entry = next(entries_from(self.head, position, self.chunks), None)
        return None if entry is None else entry.listed

    def policy_start(self, retention: Retention, consumed: int | None) -> int:
        """The first offset that a policy retains; a batch that begins below may hold it."""

        def listed_since(time: int) -> int | None:
            entry = next(entries_listed_since(self.head, time, self.chunks), None)
            return None if entry is None else entry.first

        def newest(size: int) -> int:
            return start_of_newest(self.head, size, self.chunks)

        return retention_start(
            retention, self.bounds, consumed, written_since=listed_since, newest=newest, now=self.now
        )
