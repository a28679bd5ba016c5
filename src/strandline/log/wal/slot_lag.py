"""Slot lag of a write-ahead log: its frames as a listing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from strandline.log.wal.read.reading import WalReading
from strandline.model.cursor import Bounds, Limit
from strandline.model.retention import Retention


@final
@dataclass(frozen=True, slots=True)
class WalListing:
    """Satisfies :class:`~strandline.log.slots.slot_lag.Listing`; reads one frame per position."""

    log: WalReading
    bounds: Bounds
    now: int

    def bytes_from(self, position: int) -> int:
        """Bytes stored from the frame with an offset on."""
        return self.log.bytes_behind(position)

    def written_at(self, position: int) -> int | None:
        """When the frame with this offset was written, in microseconds; None at the end."""
        span = next(iter(self.log.plan(self.log.cursor_at(position), Limit(batches=1))), None)
        return None if span is None else span.frame.timestamp * 1000

    def policy_start(self, retention: Retention, consumed: int | None) -> int:
        """The first offset that a policy retains."""
        return self.log._retention_start(retention, consumed, self.now)  # noqa: SLF001 - of the same package
