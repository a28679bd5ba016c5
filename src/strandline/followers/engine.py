"""The follower engine, a state machine without I/O: takes an event, returns the next action.

The engine alone decides the order: receive, apply, store data and cursor, then report the cursor; after a gap, delete
the keys that vanished, list everything again, then delete the keys that were not listed. A thread drives it in
production, a simulator and a model checker in tests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from strandline.errors import InvalidInput
from strandline.followers import events
from strandline.followers.events import Batching, Signal
from strandline.kv.contract import Ended, Listed
from strandline.model.cursor import Cursor
from strandline.storage.retry import Backoff

_IDLE: Final = 1.0
GATHER: Final = 0.05
"""Seconds in which a sink's first records after a pause are gathered: a producer seldom appends one alone."""
STORE_RETRIES: Final = Backoff(attempts=16, base=0.02, ceiling=2.0)
"""Consecutive failures of a store that are tolerated, and the back-off between them."""


class Phase(Enum):
    """Phase of a follower. All but the last three belong to a resync."""

    CLEARING = "deleting keys that vanished"
    RELISTING = "listing everything again"
    SWEEPING = "deleting keys that were not listed"
    OPENING = "opening the stream"
    LIVE = "following"
    DONE = "finished"


@dataclass(slots=True)
class Engine:
    """State of one follower. It ends at the offset ``upto``; without one, when :meth:`stop` is called.

    ``can_resync``: there are a store, and a reader to compare it with. ``usual_window`` applies if the batching has no
    window.
    """

    batching: Batching
    upto: int | None = None
    can_resync: bool = False
    usual_window: float = 1.0
    retries: Backoff = STORE_RETRIES
    gather: float | None = None
    """Seconds that the first records after a pause of a window wait for others; None: a window, as all others do."""
    is_strict: bool = False
    """Whether nothing more is received while a write fails, so that its range does not grow."""
    phase: Phase = Phase.OPENING
    applied: Cursor | None = None
    """Everything below has been applied, and written to the store."""
    _read: Cursor | None = None
    _due: float | None = None
    _busy_at: float = 0.0
    """When it began, or a write was last stored."""
    _pending: list[events.SourceDelivery] = field(default_factory=list)
    _records: int = 0
    _bytes: int = 0
    _batches: int = 0
    _applying: events.Write | None = None
    _unstored: deque[events.Write] = field(default_factory=deque)
    _unstored_flushes: int = 0
    _failures: int = 0
    _retry: float | None = None
    _removals: deque[events.SourceDelivery] = field(default_factory=deque)
    _compared: bool = False
    _marks: set[bytes] = field(default_factory=set)
    _listed: Cursor | None = None
    _exports: deque[Any] = field(default_factory=deque)
    _served: bool = False
    _stopping: bool = False
    _ended: bool = False
    _tried: bool = False

    @property
    def _window(self) -> float:
        return self.usual_window if self.batching.window is None else self.batching.window

    def stop(self) -> None:
        """Stop: the current batch is still applied, nothing more is received."""
        self._stopping = True

    @property
    def is_settled(self) -> bool:
        """Whether everything received is applied and stored: then a running stream may expire."""
        return self._due is None and self._storable() is None

    def ask(self, request: Any) -> None:
        """Request an export; it is served after the next flush, and after a running resync."""
        self._exports.append(request)

    def step(self, event: events.Event, now: float) -> events.Action:  # noqa: C901, PLR0912 - one case for each event
        """Process one event; returns the next action. ``now`` is in seconds on a monotonic clock."""
        match event:
            case events.Received():
                self._receive(event, now)
            case Signal.APPLIED:
                self._enqueue()
            case Signal.STORED:
                self._busy_at = now
                report = self._stored()
                if report is not None:
                    return report
            case Signal.NOTHING:
                pass
            case Signal.STORE_FAILED:
                self._failures += 1
                self._tried = self._stopping
                if self._failures >= self.retries.attempts and not self._stopping:
                    return events.GiveUp(self._failures)
                self._retry = now + self.retries.pause(self._failures - 1, 1.0)
            case events.Began(cursor, unsettled):
                self._busy_at = now
                self.applied = self._read = cursor
                if not unsettled:
                    return self._next(now) if self._done() else events.Open(cursor)
                self._resync()
            case Signal.OPENED:
                self.phase = Phase.RELISTING if self.phase is Phase.CLEARING and self.can_resync else Phase.LIVE
            case events.Expired(beginning):
                if self.can_resync:
                    self._resync()
                else:
                    self.applied = self._read = beginning  # current values arrive in the order of their versions
                    if beginning is None:
                        return events.Open(None)
                    self._rewind(beginning)
            case events.VanishedKeys(chunks):
                if self.phase is Phase.CLEARING and not self._stopping:
                    self._unstored.append(events.BeginResync())  # from here on the state belongs to no cursor
                self._removals.extend(chunks)
            case Listed(cursor):
                self._list_ends(cursor, now)
            case Ended():
                self._ended = True
            case Signal.STREAM_FAILED:
                self.stop()  # a failing store must not delay the error: it is tried once
        return self._next(now)

    def _receive(self, event: events.Received, now: float) -> None:
        if event.since is not None and self._read is not None and event.since.next != self._read.next:
            raise InvalidInput(f"Received offset {event.since.next} where {self._read.next} was due.")
        if self.phase is Phase.RELISTING:
            self._marks.update(event.chunk.keys)
        self._pending.append(event.chunk)
        self._records += event.count
        self._bytes += event.size
        self._batches += event.batches
        self._read = event.upto
        if self._due is None:
            window = self._window
            gathered = now + (window if self.gather is None else min(window, self.gather))
            self._due = max(gathered, self._busy_at + window)

    def _list_ends(self, cursor: Cursor, now: float) -> None:
        self._read = cursor
        if self.phase is Phase.RELISTING:
            self._listed = cursor
        elif self._due is None and self.applied is not None:  # an empty listing has nothing to report
            self._due = now + self._window

    def _resync(self) -> None:
        """Start a resync by finding the keys that vanished: if that fails, nothing was changed."""
        self.phase, self._compared = Phase.CLEARING, False

    def _rewind(self, beginning: Cursor) -> None:
        """Move the store's cursor to the beginning of the stream; its state stays.

        With its old cursor, of another stream or past the end of this one, the store would refuse or skip new data.
        """
        self.phase, self._compared = Phase.CLEARING, True
        self._unstored.extend((events.BeginResync(), events.EndResync(beginning)))

    def _enqueue(self) -> None:
        """Queue an applied batch for the store; after a failed write it waits and is joined with that."""
        write, self._applying = self._applying, None
        last = self._unstored[-1] if self._unstored else None
        match last, write:
            case (_, None):
                raise InvalidInput("Nothing was being applied.")
            case (events.AppliedRange(), events.AppliedRange()):
                self._unstored[-1] = events.AppliedRange([*last.chunks, *write.chunks], last.since, write.upto)
            case (events.ResyncWrite(), events.ResyncWrite()):
                self._unstored[-1] = events.ResyncWrite([*last.chunks, *write.chunks])
            case _:
                self._unstored.append(write)

    def _stored(self) -> events.Action | None:
        self._failures, self._retry, self._unstored_flushes = 0, None, 0
        match self._unstored.popleft():
            case events.AppliedRange(upto=cursor) | events.EndResync(cursor):
                if self.phase is Phase.SWEEPING:
                    self.phase, self._listed = Phase.LIVE, None
                    self._marks.clear()
                if cursor != self.applied:
                    self.applied = cursor
                    return events.ReportCursor(cursor)
        return None

    def _storable(self) -> events.Write | None:
        """The oldest write that is not in the store. A range that moves no cursor waits for one that does."""
        if not self._unstored:
            return None
        head = self._unstored[0]
        return None if isinstance(head, events.AppliedRange) and head.upto == self.applied else head

    def _next(self, now: float) -> events.Action:
        write = self._storable()
        if self._flushes(now):
            return self._flush()
        if write is not None and self._store_due(now):
            self._retry = None
            return events.StoreBatch(write)
        if self._done():
            if write is not None and not self._stopping:
                return events.Pause(self._wait_seconds(now))  # idle: a failed write is retried
            self.phase = Phase.DONE
            return events.Finish(self.applied, doubtful=write is not None)
        return self._resync_step(write, now) or self._receive_or_export(write, now)

    def _receive_or_export(self, write: events.Write | None, now: float) -> events.Action:
        can_export = bool(self._exports) and self.phase is Phase.LIVE and write is None
        if can_export and not self._served:
            self._served = True
            return events.Export(self._exports.popleft())
        self._served = False  # a batch is received between two exports, so that requests cannot starve it
        if write is not None and (self.is_strict or self._unstored_flushes >= self.retries.attempts):
            return events.Pause(self._wait_seconds(now))  # too much is applied but not stored
        return self._take(0.0 if can_export else self._wait_seconds(now))

    def _store_due(self, now: float) -> bool:
        if self._stopping:
            return not self._tried  # one more try, and then its result counts
        return self._retry is None or now >= self._retry

    def _done(self) -> bool:
        if self._stopping or self._ended:
            return True
        return self.upto is not None and self._read is not None and self._read.next >= self.upto

    def _flushes(self, now: float) -> bool:
        if self._due is None:
            return False
        full = self._records >= self.batching.records or self._bytes >= self.batching.bytes
        full = full or (self.batching.batches is not None and self._batches >= self.batching.batches)
        asked = self._done() or self._listed is not None or (self._exports and self.phase is Phase.LIVE)
        return full or now >= self._due or bool(asked)

    def _flush(self) -> events.Apply:
        chunks, self._pending = self._pending, []
        self._records = self._bytes = self._batches = 0
        self._due = None
        self._unstored_flushes += 1
        if self.phase is Phase.RELISTING:
            return self._apply(events.ResyncWrite(chunks))
        if self._read is None:
            raise InvalidInput("A batch without a cursor after it cannot be applied.")
        since = next(
            (write.upto for write in reversed(self._unstored) if isinstance(write, events.AppliedRange)), self.applied
        )
        return self._apply(events.AppliedRange(chunks, since, self._read))

    def _apply(self, write: events.AppliedRange | events.ResyncWrite) -> events.Apply:
        self._applying = write
        return events.Apply(write.chunks)

    def _resync_step(self, write: events.Write | None, now: float) -> events.Action | None:
        """The next step of a resync; no step starts before the store has all earlier writes."""
        if self.phase not in (Phase.CLEARING, Phase.SWEEPING) and self._listed is None:
            return None
        if write is not None:
            return events.Pause(self._wait_seconds(now))
        return self._resync_onward()

    def _resync_onward(self) -> events.Action:
        if self._removals:
            return self._apply(events.ResyncWrite([self._removals.popleft()]))
        if self.phase is Phase.CLEARING:
            if self._compared:
                return events.Open(None)
            self._compared = True
            return events.FindVanishedKeys()
        if self.phase is Phase.RELISTING:
            self.phase = Phase.SWEEPING
            return events.FindVanishedKeys(frozenset(self._marks))
        if self._listed is None:
            raise InvalidInput("A sweep needs the cursor at which its listing ended.")
        self._unstored.append(events.EndResync(self._listed))
        return events.StoreBatch(self._unstored[0])

    def _take(self, seconds: float) -> events.Receive:
        batching = self.batching
        room = max(1, batching.records - self._records)
        batches = None if batching.batches is None else max(1, batching.batches - self._batches)
        return events.Receive(self._read, room, max(1, batching.bytes - self._bytes), seconds, batches)

    def _wait_seconds(self, now: float) -> float:
        due = [time - now for time in (self._due, self._retry) if time is not None]
        return max(0.0, min([_IDLE, *due]))
