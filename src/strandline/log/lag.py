"""Lag of a position behind the end of its log: in records, stored bytes and time."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.log.contract import LogReading
from strandline.log.object.head.head_log import HeadListing
from strandline.log.object.log import ObjectLog
from strandline.log.slots.slot_lag import Listing
from strandline.log.wal.read.reading import WalListing, WalReading
from strandline.model.cursor import SECOND


@dataclass(frozen=True, slots=True)
class LogLag:
    """Lag of a position behind the log's end. Numbers that the log does not know are None, never 0."""

    records: int
    bytes: int | None
    """Stored bytes of the batches from the position on."""
    seconds: float | None
    """Age of the oldest batch that is not passed, by the time at which it was listed or written."""


def lag_of(log: LogReading, position: int, now: int) -> LogLag:
    """The lag of an offset at ``now`` (microseconds). Reads the log's listing, and no record.

    Bytes and times are known for object logs and write-ahead logs, as far as their own tier retains the position.
    """
    listing: Listing | None = None
    if isinstance(log, ObjectLog):
        listing = HeadListing(log.head(), log.chunks, now)
    elif isinstance(log, WalReading):
        listing = WalListing(log, log.bounds(), now)
    bounds = log.bounds() if listing is None else listing.bounds
    records = max(0, bounds.next - position)
    if listing is None or not records or position < bounds.first:
        return LogLag(records, None, None) if records else LogLag(0, 0, 0.0)
    written = listing.written_at(position)
    # Not below 0: clocks of other machines may be ahead.
    age = None if written is None else max(0.0, (now - written) / SECOND)
    return LogLag(records, listing.bytes_from(position), age)
