"""The heart of following, without I/O: events in, actions out.

The order that makes a follower right is here and nowhere else: fetch, then apply, and only when the sink has said
that data and cursor are stored, move on and advance the slot. Threads drive it in production, a simulator in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Batching:
    """When fetched records are applied: at so many records or bytes, or so long after the first of them came."""

    records: int = 1_000_000
    bytes: int = 64 << 20
    window: float = 1.0

    def __post_init__(self) -> None:
        if self.records < 1 or self.bytes < 1 or self.window < 0:
            raise InvalidInput("Batching needs at least one record and one byte, and no negative window.")


# --- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """The sink is at this cursor."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Planned:
    """The log's answer to :class:`Plan`."""

    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The records of the spans of one :class:`Fetch`, in order."""

    spans: Sequence[Span]
    batches: Sequence[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Applied:
    """The sink has stored data and cursor."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Woken:
    """A wait is over, for whatever reason."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """Somebody asked to stop: what is fetched is still applied."""


Event = Began | Planned | Fetched | Applied | Woken | Stopping


# --- actions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Ask the log what comes next."""

    since: Cursor
    limit: Limit


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read these spans, and report them together."""

    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Apply:
    """Hand this range to the sink."""

    batches: Sequence[pa.RecordBatch]
    since: Cursor
    upto: Cursor


@dataclass(frozen=True, slots=True)
class Advance:
    """Move the slot; the cursor is one that the sink has stored."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the log reaches past the cursor, but no longer than so many seconds."""

    past: Cursor
    seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do; the sink is at this cursor."""

    cursor: Cursor


Action = Plan | Fetch | Apply | Advance | Wait | Finish

_IDLE = 1.0


@dataclass(slots=True)
class Engine:
    """One follower's state. ``until`` is an offset to stop at; without it, it follows until told to stop."""

    batching: Batching
    until: int | None = None
    _applied: Cursor | None = None
    _read: Cursor | None = None
    _due: float | None = None
    _pending: list[pa.RecordBatch] = field(default_factory=list)
    _records: int = 0
    _bytes: int = 0
    _stopping: bool = False

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event and say what to do, in order. ``now`` is in seconds on a clock that never goes back."""
        match event:
            case Began(cursor):
                self._applied = self._read = cursor
                return self._onward(now)
            case Planned(spans):
                return [Fetch(spans)] if spans else self._at_the_end(now)
            case Fetched():
                return self._fetched(event, now)
            case Applied(cursor):
                self._applied = cursor
                return [Advance(cursor), *self._onward(now)]
            case Woken():
                return self._onward(now)
            case Stopping():
                self._stopping = True
                return []

    @property
    def _position(self) -> Cursor:
        if self._read is None:
            raise InvalidInput("An engine begins with Began.")
        return self._read

    def _fetched(self, event: Fetched, now: float) -> list[Action]:
        position = self._position
        for span in event.spans:
            if span.first != position.next:
                raise InvalidInput(f"Fetched offset {span.first} where {position.next} was due.")
            position = position.at(span.next)
        self._records += position.next - self._position.next
        self._bytes += sum(batch.nbytes for batch in event.batches)
        self._pending += event.batches
        self._read = position
        if self._due is None:
            self._due = now + self.batching.window
        full = self._records >= self.batching.records or self._bytes >= self.batching.bytes
        return [self._apply()] if full else self._onward(now)

    def _apply(self) -> Apply:
        if self._applied is None:
            raise InvalidInput("An engine begins with Began.")
        batches, self._pending = self._pending, []
        self._records = self._bytes = 0
        self._due = None
        return Apply(batches, since=self._applied, upto=self._position)

    def _done(self) -> bool:
        return self._stopping or (self.until is not None and self._position.next >= self.until)

    def _onward(self, now: float) -> list[Action]:
        due = self._due is not None and now >= self._due
        if self._pending and (due or self._done()):
            return [self._apply()]
        return [Finish(self._position)] if self._done() else self._plan()

    def _plan(self) -> list[Action]:
        limit = Limit(
            records=max(1, self.batching.records - self._records),
            bytes=max(1, self.batching.bytes - self._bytes),
            upto=self.until,
        )
        return [Plan(self._position, limit)]

    def _at_the_end(self, now: float) -> list[Action]:
        if self._due is None:
            return [Wait(self._position, _IDLE)]
        return [self._apply()] if now >= self._due else [Wait(self._position, self._due - now)]
