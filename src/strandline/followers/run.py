"""``follow``: runs the follower engine on a log and a sink."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event as StopEvent
from typing import Final, Literal, Protocol, cast, runtime_checkable
from uuid import UUID

from strandline.errors import StrandlineError
from strandline.followers import events
from strandline.followers.committer import SinkCommitter, begin
from strandline.followers.engine import GATHER, Engine
from strandline.followers.events import Batching, Signal
from strandline.followers.record_route import RecordRoute
from strandline.followers.routes.follower import RouteFollower
from strandline.followers.routes.progress import RouteOptions
from strandline.followers.table_route import Observer, Pieces, TableRoute
from strandline.log.addressed import log_at
from strandline.log.contract import Log
from strandline.log.read.reading import Arrival, wait_for_more
from strandline.log.slots.heartbeat import SlotHeartbeat, TouchableSlot
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Limit, Start
from strandline.model.head import LogBatch
from strandline.model.sink import BatchSink, Sink
from strandline.storage.env import SYSTEM, Env
from strandline.tables.routes.route import Route, as_route
from strandline.tables.work import InProcess, Workers

__all__ = ["Batching", "Start", "begin", "follow"]

_LOGGER: Final = logging.getLogger(__name__)
_POLL = 0.25
_SEEN_EVERY = 60.0


@checked
def follow(
    log: Log | Address,
    sink: Sink | Route | Sequence[Sink],
    slot: str | None = None,
    *,
    batching: Batching | None = None,
    start: Start = "beginning",
    repair: bool = False,
    upto: int | Literal["end"] | None = None,
    stop: StopEvent | None = None,
    holder: str | None = None,
    on_progress: Callable[[Cursor], None] = lambda _: None,
    env: Env = SYSTEM,
) -> Cursor:
    """Keep a sink exactly in step with a log, or the log at an address; returns the cursor that the sink has stored.

    Resumes from the sink's own cursor, whatever happened to earlier runs; only a new follower uses ``start``. By
    default that is the log's very first record, and ``CursorExpired`` if that was trimmed: a table of the latest
    values would lack keys. ``start="retained"`` begins at the first retained record. Ends at the
    offset ``upto`` (``"end"``: the log's end as of this call), at the end of a sealed log, or when ``stop`` is set,
    after applying the fetched records. ``slot`` names the slot that pins unread records; it is created if missing,
    claimed for ``holder`` and advanced only to the sink's stored cursor. ``on_progress`` gets that cursor, after each
    commit.

    ``sink`` may be a route into many tables: a list of table sinks with their conditions, or
    :func:`sl.tables.route <strandline.tables.route>` or :func:`sl.tables.by <strandline.tables.by>`. The log is read
    once for all of them; each has its own cursor and commits, and the slot follows the slowest. A table that fails
    falls behind alone, and is tried again; its error is raised when all others are at the end ``upto``. Returns the
    cursor of the slowest table.

    A table that other writers have changed so that it no longer matches its cursor is ``Diverged``; ``repair=True``
    restores the last version that does. A new follower that is refused before anything was stored leaves no table and
    no slot.

    Raises ``CursorExpired`` or ``Diverged`` if the log cannot serve the sink's cursor, ``Fenced`` if a newer follower
    took over, ``CorruptData`` or ``NotFound`` naming a damaged object; the sink is then unchanged.
    """
    route, single = as_route(sink), cast("Sink", sink)
    with log_at(log, changes_slots=slot is not None) as source:
        if route is not None:
            last = source.end().next if upto == "end" else upto
            options = RouteOptions(start, repair, slot, holder or str(env.chance.uuid()), batching or Batching(), last)
            return RouteFollower(source, route, options, env, on_progress=on_progress).run(stop)
        committer = begin(source, single, slot, start=start, holder=holder or str(env.chance.uuid()), repair=repair)
        # Also while the sink applies a batch.
        alive = contextlib.nullcontext(committer) if slot is None else SlotHeartbeat(committer, source, env=env)
        with committer.abandoned_on_error(), alive as position:
            last = source.end().next if upto == "end" else upto
            engine = Engine(batching or Batching(), upto=last, gather=GATHER)
            follower = Follower(engine, source, committer, position, env, on_progress=on_progress)
            end = follower.run(committer.start, stop)
            committer.settle()
            return end


@runtime_checkable
class PushedLog(Protocol):
    """A log whose batches are pushed to a replica."""

    @property
    def log_id(self) -> UUID:
        """The log's identity."""

    def arrived(self, since: Cursor) -> Sequence[LogBatch]:
        """All received batches after a cursor; the first may begin before it."""

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until a batch arrives (True), new or not, or until the timeout (False)."""


@dataclass(frozen=True, slots=True)
class _IntoCopy:
    """Stores pushed batches as a copy of the log."""

    log: PushedLog
    sink: BatchSink

    def receive(self, since: Cursor, limit: Limit) -> events.Received | None:
        del limit  # the batches are in memory already
        batches = self.log.arrived(since)
        if not batches:
            return None
        last, size = batches[-1], sum([batch.size for batch in batches])
        return events.Received(batches, last.next - since.next, Cursor(since.log_id, last.next, last.term), since, size)

    def store(self, chunks: Sequence[events.SourceDelivery], since: Cursor, upto: Cursor) -> None:
        self.sink.take([batch for chunk in chunks for batch in chunk], since=since, upto=upto)


@dataclass(slots=True)
class Follower:
    """Runs the engine on a log and a sink, step by step; driven by a thread or by a simulator.

    A :class:`~strandline.model.sink.BatchSink` follows an :class:`PushedLog` log, every other sink any log.
    """

    engine: Engine
    log: Log | PushedLog
    sink: Sink | BatchSink
    slot: TouchableSlot | None
    env: Env
    seen_every: float = _SEEN_EVERY
    workers: Workers = field(default_factory=InProcess)
    observer: Observer = field(default_factory=Observer)
    retries_errors: bool = False
    """Whether retryable errors of the log and the sink are retried, with pauses."""
    on_progress: Callable[[Cursor], None] = lambda _: None
    _seen: float = 0.0
    _event: events.Event | None = None
    _failure: BaseException | None = None
    _failed_reads: int = 0
    _route: RecordRoute | TableRoute | _IntoCopy = field(init=False)

    def __post_init__(self) -> None:
        # Once, not for each batch: these checks take longer than most of the work on a batch.
        log, sink = self.log, self.sink
        if isinstance(sink, BatchSink) and isinstance(log, PushedLog):
            self._route = _IntoCopy(log, sink)
        elif isinstance(sink, BatchSink) or isinstance(log, PushedLog):
            raise TypeError("A copy follows pushed batches, and a table follows a log.")
        elif isinstance(sink, SinkCommitter) and sink.table is not None and not log.counts_batches:
            most = self.engine.batching.bytes
            self._route = TableRoute(log, sink, sink.table, Pieces(log), self.workers, self.env, self.observer, most)
        else:
            # Also if its offsets are batches, and not records that workers could count.
            self._route = RecordRoute(log, sink, Pieces(log))

    def begin(self, cursor: Cursor) -> None:
        """Resume at this cursor, which is the sink's own."""
        self._seen = self.env.clock.monotonic()
        self._event = events.Began(cursor)

    def run(self, cursor: Cursor, stop: StopEvent | None) -> Cursor:
        """Follow until ``stop`` is set, or up to the engine's end."""
        self.begin(cursor)
        while True:
            if stop is not None and stop.is_set():
                self.engine.stop()
            finished = self.step()
            if finished is not None:
                return finished

    @property
    def is_between(self) -> bool:
        """Whether everything received is stored and reported, and the next step waits for more."""
        return self._event is Signal.NOTHING

    def step(self) -> Cursor | None:
        """Do one step; returns the cursor if it was the last. Waits for the log for a quarter of a second at most."""
        if self._event is None:
            raise AssertionError("begin() was not called")
        action = self.engine.step(self._event, self.env.clock.monotonic())
        if isinstance(action, events.Apply):  # the sink does both in one step
            action = self.engine.step(Signal.APPLIED, self.env.clock.monotonic())
        if isinstance(action, events.Finish) and action.cursor is not None:
            return action.cursor
        self._event = self._do(action)
        return None

    def _do(self, action: events.Action) -> events.Event:
        match action:
            case events.Open():
                return Signal.OPENED  # a log is planned again each time
            case events.Receive(since, records, size, seconds, batches) if since is not None:
                limit = Limit(records=records, bytes=size, batches=batches, upto=self.engine.upto)
                return self._receive(since, limit, seconds)
            case events.StoreBatch(events.AppliedRange(chunks, since, upto)) if since is not None:
                return self._stored(chunks, since, upto)
            case events.ReportCursor():
                self._advance()
                self.observer.step("advanced")
                return Signal.NOTHING
            case events.Pause(seconds):
                self.env.clock.sleep(min(seconds, _POLL))  # so that a stop takes effect soon
                return Signal.NOTHING
            case events.GiveUp() if self._failure is not None:
                raise self._failure
        raise AssertionError(f"a log's follower has no action {action}")

    def _stored(self, chunks: Sequence[events.SourceDelivery], since: Cursor, upto: Cursor) -> events.Event:
        try:
            self._route.store(chunks, since, upto)
        except StrandlineError as error:
            if not self.retries_errors or not error.retryable:
                raise
            _LOGGER.warning("Offsets %d to %d were not stored, and are tried again: %s", since.next, upto.next, error)
            self._failure = error
            return Signal.STORE_FAILED
        self._failure = None
        return Signal.STORED

    def _receive(self, since: Cursor, limit: Limit, seconds: float) -> events.Event:
        try:
            found = self._route.receive(since, limit)
        except StrandlineError as error:
            self._failed_reads += 1
            if not self.retries_errors or not error.retryable or self._failed_reads >= self.engine.retries.attempts:
                raise
            _LOGGER.warning("The log cannot be read now, and is tried again: %s", error)
            self.env.clock.sleep(min(_POLL, self.engine.retries.pause(self._failed_reads - 1, 1.0)))
            return Signal.NOTHING
        self._failed_reads = 0
        if found is None:
            self._touch_slot()
            # A short wait, so that a stop takes effect soon.
            if self._has_more(since, min(seconds, _POLL)):
                found = self._route.receive(since, limit)
        return Signal.NOTHING if found is None else found

    def _has_more(self, since: Cursor, seconds: float) -> bool:
        """Wait for the log; at the end of a sealed one the follower ends, as at the offset that it was given."""
        if isinstance(self.log, PushedLog):
            return self.log.wait(since, seconds)
        arrival = wait_for_more(self.log, since, seconds)
        if arrival is Arrival.END:
            self.engine.upto = since.next
        return arrival is Arrival.MORE

    def _advance(self) -> None:
        stored = self.sink.cursor(self.log.log_id)  # stored, not only sent to it
        if self.slot is not None and stored is not None:
            self.slot.advance(stored)
            self._seen = self.env.clock.monotonic()
        if stored is not None:
            self.on_progress(stored)

    def _touch_slot(self) -> None:
        """Touch the slot of an idle follower, so that it is not invalidated as idle."""
        if self.slot is not None and self.env.clock.monotonic() - self._seen >= self.seen_every:
            self.slot.touch()
            self._seen = self.env.clock.monotonic()
