"""Lag of a position behind the end of its log: in records, stored bytes and time."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.log.contract import LogReading
from strandline.log.object.head.index import bytes_from, entries_from
from strandline.log.object.log import ObjectLog
from strandline.log.wal.read.reading import WalReading
from strandline.model.cursor import SECOND, Limit


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
    if isinstance(log, ObjectLog):
        head = log.head()
        records = max(0, head.next_offset - position)
        if records and position >= head.floor:
            oldest = next(entries_from(head, position, log.chunks))
            return LogLag(records, bytes_from(head, position, log.chunks), _age(oldest.listed, now))
        return _without_sizes(records)
    bounds = log.bounds()
    records = max(0, bounds.next - position)
    if isinstance(log, WalReading) and records and position >= bounds.first:
        span = next(iter(log.plan(log.cursor_at(position), Limit(batches=1))), None)
        age = None if span is None else _age(span.frame.timestamp * 1000, now)
        return LogLag(records, log.bytes_behind(position), age)
    return _without_sizes(records)


def _without_sizes(records: int) -> LogLag:
    return LogLag(records, None, None) if records else LogLag(0, 0, 0.0)


def _age(time: int, now: int) -> float:
    return max(0.0, (now - time) / SECOND)  # clocks of other machines may be ahead
