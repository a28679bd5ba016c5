"""Sources in other systems: a stream of messages with growing positions, read as a log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa

from strandline.errors import CursorExpired, Diverged, StrandlineError, Unsupported
from strandline.log.contract import LogReading
from strandline.log.read.planning import known_columns
from strandline.log.read.reading import HeadPoller
from strandline.model.arguments import Timeout
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start, batch_fingerprint
from strandline.model.records import READ_SCHEMA
from strandline.storage.closing import Closing
from strandline.storage.env import Env

TAKEN_RECORDS: Final = 50_000
"""Messages of one read, at most."""
TAKEN_BYTES: Final = 16 << 20


_MARK_BITS: Final = 40
_INCARNATION_BITS: Final = 24


class Taken(NamedTuple):
    """Messages of one read, and the position behind them.

    ``mark`` distinguishes the message before that position from any other that could be there; empty if there is none.
    """

    batch: pa.RecordBatch
    next: int
    mark: str


def position_fingerprint(incarnation: str, mark: str) -> int | None:
    """The fingerprint of a position: 24 bits for the stream, 40 for the message before it; 0 is unknown. None of both.

    >>> one, other = position_fingerprint("created today", "7"), position_fingerprint("created today", "8")
    >>> may_be_same(one, one), may_be_same(one, other), may_be_same(one, position_fingerprint("created today", ""))
    (True, False, True)
    >>> may_be_same(one, position_fingerprint("created again", ""))
    False
    """
    of_stream, of_message = _hashed(incarnation, _INCARNATION_BITS), _hashed(mark, _MARK_BITS)
    return of_stream << _MARK_BITS | of_message or None


def _hashed(text: str, bits: int) -> int:
    return max(1, batch_fingerprint(text) >> (64 - bits)) if text else 0


def may_be_same(one: int | None, other: int | None) -> bool:
    """Whether two fingerprints may be of one position: what is known of both is equal.

    A message that was deleted meanwhile is unknown, and so is the incarnation of an old broker's topic.
    """
    halves = (
        [(each or 0) >> _MARK_BITS for each in (one, other)],
        [(each or 0) & (1 << _MARK_BITS) - 1 for each in (one, other)],
    )
    return all(0 in pair or pair[0] == pair[1] for pair in halves)


@dataclass(frozen=True, slots=True)
class TakenSpan:
    """Messages that were read already: positions ``first`` up to ``next``, some of which may hold no message."""

    batch: pa.RecordBatch
    first: int
    next: int
    fingerprint: int | None
    """See :func:`position_fingerprint`; of ``next``."""

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
    _env: Env
    broken_headers: int = 0
    """Messages that were read so far, and whose headers cannot be read whole."""
    _planned: TakenSpan | None = None
    _proven: int | None = None
    """The position that was read or proven last, since the last failure: the next read continues there."""

    def __init__(self) -> None:
        """Remember how to wait."""
        self._waiter = HeadPoller()

    @property
    @abstractmethod
    def log_id(self) -> UUID:
        """The identity of the stream, by its name: a stream that was created again differs by its incarnation only."""

    @abstractmethod
    def bounds(self) -> Bounds:
        """The first retained and the next position."""

    @abstractmethod
    def incarnation(self) -> str:
        """Distinguishes the stream from one of the same name that was created again; empty if that is not known."""

    @abstractmethod
    def take(self, since: int, *, upto: int, records: int, size: int) -> Taken:
        """The next messages from a position on, within limits, and the position behind them.

        At least one message, unless there is none below ``upto``.
        """

    def end(self) -> Cursor:
        """The cursor at the end as of now."""
        return Cursor(self.log_id, self.bounds().next)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor at a position; reads the message before it, if it is there: it is a part of its fingerprint."""
        return Cursor(self.log_id, offset, fingerprint=self._fingerprint_at(offset, self.bounds()))

    def _fingerprint_at(self, offset: int, bounds: Bounds) -> int | None:
        is_there = bounds.first < offset <= bounds.next
        mark = self.take(offset - 1, upto=offset, records=1, size=1).mark if is_there else ""
        return position_fingerprint(self.incarnation(), mark)

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until the stream reaches past the cursor (True), or until the timeout (False); polls."""
        try:
            return self._waiter.wait(self.bounds, past, timeout, self._env.clock)
        except StrandlineError:
            self._forget()
            raise

    def ended(self, at: int) -> bool:
        """False: streams of other systems are not sealed. Asks the other system nothing."""
        return False

    def _forget(self) -> None:
        """After a failure the stream may be another one: its history is proven again."""
        self._planned = self._proven = None

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
        try:
            return self._plan(since, limit)
        except StrandlineError:
            self._forget()
            raise

    def _plan(self, since: Cursor, limit: Limit) -> list[TakenSpan]:
        if since.log_id != self.log_id:
            raise Diverged(f"The cursor is of {since.log_id}, and not of {self.name} ({self.log_id}).")
        bounds = self.bounds()
        if since.next > bounds.next:
            raise Diverged(
                f"{self.name} ends at position {bounds.next}, and {since.next} was reached before: it was created "
                "again, or lost its end. Ingest it into another log."
            )
        if since.fingerprint is not None and since.next != self._proven:
            self._prove(since, bounds)  # first: positions of another stream of the same name were not deleted from it
        if since.next < bounds.first:
            raise CursorExpired(f"{self.name} begins at position {bounds.first}, and {since.next} was deleted.")
        upto = bounds.next if limit.upto is None else min(limit.upto, bounds.next)
        if since.next >= upto:
            return []
        if self._planned is not None and self._planned.first == since.next and self._planned.next <= upto:
            return [self._planned]  # planned again: a follower plans once before it begins
        records = min(TAKEN_RECORDS, limit.records or TAKEN_RECORDS)
        size = min(TAKEN_BYTES, limit.bytes or TAKEN_BYTES)
        taken = self.take(since.next, upto=upto, records=records, size=size)
        fingerprint = position_fingerprint(self.incarnation(), taken.mark)
        is_new = taken.next > since.next
        self._planned = TakenSpan(taken.batch, since.next, taken.next, fingerprint) if is_new else None
        self._proven = taken.next
        return [] if self._planned is None else [self._planned]

    def _prove(self, since: Cursor, bounds: Bounds) -> None:
        """``Diverged`` if another message is before the cursor than was, or if the stream was created again."""
        if not may_be_same(since.fingerprint, self._fingerprint_at(since.next, bounds)):
            raise Diverged(
                f"{self.name} was created again, or lost its end, and has grown differently since: the message before "
                f"position {since.next} is another one than was ingested. Ingest it into another log."
            )
        self._proven = since.next


def message_batch(columns: dict[str, Any]) -> pa.RecordBatch:
    """Messages in columns as a batch with offsets; timestamps are microseconds."""
    arrays = [
        pa.array(columns[field.name], pa.int64() if field.name == "timestamp" else field.type) for field in READ_SCHEMA
    ]
    at = READ_SCHEMA.get_field_index("timestamp")
    arrays[at] = arrays[at].view(READ_SCHEMA.field(at).type)
    return pa.RecordBatch.from_arrays(arrays, schema=READ_SCHEMA)
