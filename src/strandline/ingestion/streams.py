"""Sources in other systems: a stream of messages with growing positions, read as a log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import CursorExpired, Diverged, Unsupported
from strandline.log.contract import LogReading
from strandline.log.read.planning import known_columns
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.records import READ_SCHEMA
from strandline.storage.closing import Closing

TAKEN_RECORDS: Final = 50_000
"""Messages of one read, at most."""
TAKEN_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class TakenSpan:
    """Messages that were read already: positions ``first`` up to ``next``, some of which may hold no message."""

    batch: pa.RecordBatch
    first: int
    next: int

    @property
    def size(self) -> int:
        """Bytes of the records."""
        size: int = self.batch.nbytes
        return size

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """The records, with their positions as offsets."""
        return [self.batch if columns is None else self.batch.select(known_columns(columns))]


class MessageStream(LogReading, Closing, ABC):
    """A stream of another system, as the source of an ingest: read in order, by one thread.

    Positions grow and may leave gaps. It has no slots: the other system decides what it retains.
    """

    name: str
    """The stream, for errors."""
    _planned: TakenSpan | None = None

    @property
    @abstractmethod
    def log_id(self) -> UUID:
        """The identity of the stream, by its name: a stream that was created again has the same."""

    @abstractmethod
    def bounds(self) -> Bounds:
        """The first retained and the next position."""

    @abstractmethod
    def take(self, since: int, *, upto: int, records: int, size: int) -> tuple[pa.RecordBatch, int]:
        """The next messages from a position on, within limits, and the position behind them.

        At least one message, unless there is none below ``upto``.
        """

    def end(self) -> Cursor:
        """The cursor at the end as of now."""
        return Cursor(self.log_id, self.bounds().next)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor at a position."""
        return Cursor(self.log_id, offset)

    def position_of(self, start: Start) -> int:
        """The position at which a new ingest begins."""
        match start:
            case "beginning" | "retained":
                return self.bounds().first
            case "now":
                return self.bounds().next
            case datetime():
                raise Unsupported(f"{self.name} cannot be read from a time on: start at a position, or at 'beginning'.")
            case Cursor():
                return start.next
        return start

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[TakenSpan]:
        """The next messages, which are read here; ``[]`` if there are none now."""
        if since.log_id != self.log_id:
            raise Diverged(f"The cursor is of {since.log_id}, and not of {self.name} ({self.log_id}).")
        bounds = self.bounds()
        if since.next > bounds.next:
            raise Diverged(
                f"{self.name} ends at position {bounds.next}, and {since.next} was reached before: it was created "
                "again, or lost its end. Ingest it into another log."
            )
        if since.next < bounds.first:
            raise CursorExpired(f"{self.name} begins at position {bounds.first}, and {since.next} was deleted.")
        upto = bounds.next if limit.upto is None else min(limit.upto, bounds.next)
        if since.next >= upto:
            return []
        if self._planned is not None and self._planned.first == since.next and self._planned.next <= upto:
            return [self._planned]  # planned again: a follower plans once before it begins
        records = min(TAKEN_RECORDS, limit.records or TAKEN_RECORDS)
        size = min(TAKEN_BYTES, limit.bytes or TAKEN_BYTES)
        batch, following = self.take(since.next, upto=upto, records=records, size=size)
        self._planned = TakenSpan(batch, since.next, following) if following > since.next else None
        return [] if self._planned is None else [self._planned]


def message_batch(columns: dict[str, Any]) -> pa.RecordBatch:
    """Messages in columns as a batch with offsets; timestamps are microseconds."""
    arrays = [
        pa.array(columns[field.name], pa.int64() if field.name == "timestamp" else field.type) for field in READ_SCHEMA
    ]
    at = READ_SCHEMA.get_field_index("timestamp")
    arrays[at] = arrays[at].view(READ_SCHEMA.field(at).type)
    return pa.RecordBatch.from_arrays(arrays, schema=READ_SCHEMA)
