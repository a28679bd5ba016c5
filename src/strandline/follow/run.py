"""Following with threads: the shell around the engine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from threading import Event as StopEvent
from typing import Literal

import pyarrow as pa

from strandline.follow.engine import Engine
from strandline.follow.sink import Sink
from strandline.follow.steps import (
    Action,
    Applied,
    Apply,
    Batching,
    Began,
    Event,
    Finish,
    Nothing,
    Open,
    Opened,
    Range,
    Receive,
    Received,
    Report,
    Reported,
    Store,
    Stored,
)
from strandline.log.contract import Log, Slot
from strandline.log.fetch import fetch_in_order
from strandline.model.cursor import Cursor, Limit, Start
from strandline.model.errors import AlreadyExists
from strandline.model.records import READ_SCHEMA
from strandline.storage.ambient import CHANCE, CLOCK, Chance, Clock

__all__ = ["Batching", "Start", "begin", "follow"]

_POLL = 0.25
_SEEN_EVERY = 60.0


def follow(
    log: Log,
    sink: Sink,
    slot: str | None = None,
    *,
    batching: Batching | None = None,
    start: Start = "beginning",
    until: int | Literal["end"] | None = None,
    stop: StopEvent | None = None,
    holder: str | None = None,
    clock: Clock = CLOCK,
    chance: Chance = CHANCE,
) -> Cursor:
    """Keep a sink exactly in step with a log; returns the cursor that the sink has stored.

    Resumes from the sink's own cursor, whatever happened to earlier runs; only a newcomer asks ``start``. Ends at the
    offset ``until`` (``"end"``: the log's end as of this call), or when ``stop`` is set, after applying what it has
    fetched. ``slot`` names the slot that pins what is still needed; it is created if missing, claimed for ``holder``
    and advanced only from what the sink has stored.

    Raises ``CursorExpired`` or ``Diverged`` if the log cannot serve the sink's cursor, ``Fenced`` if a newer follower
    took over, ``CorruptData`` or ``NotFound`` naming a damaged object; the sink then stays where it was.
    """
    cursor, claimed = begin(log, sink, slot, start=start, holder=holder or str(chance.uuid()))
    engine = Engine(batching or Batching(), until=log.bounds().next if until == "end" else until)
    return _Follower(engine, log, sink, claimed, stop, clock).run(cursor)


def begin(log: Log, sink: Sink, slot: str | None, *, start: Start, holder: str) -> tuple[Cursor, Slot | None]:
    """Where a follower starts, and its claimed slot: what every follower does first, with Spark or without.

    That is the sink's own cursor, or for a newcomer what it asks for, which is then stored in the sink. The slot pins
    it before that, so that nothing is trimmed away in between.
    """
    cursor = sink.cursor(log.log_id)
    newcomer = cursor is None
    if cursor is None:
        cursor = log.start().at(log.position_of(start))
    log.plan(cursor, Limit(batches=1))  # refuses a cursor that this log cannot serve
    claimed = None if slot is None else _take_slot(log, slot, cursor, holder)
    if claimed is not None:
        claimed.advance(cursor)  # an earlier run may have died between the sink and the slot
    if newcomer:
        sink.apply(READ_SCHEMA.empty_table(), since=cursor, upto=cursor)
    return cursor, claimed


def _take_slot(log: Log, name: str, cursor: Cursor, holder: str) -> Slot:
    if all(known.name != name for known in log.slots()):
        with contextlib.suppress(AlreadyExists):  # someone was faster: then it is there
            log.create_slot(name, cursor.next)
    claimed = log.claim_slot(name, holder)
    if claimed.state().position > cursor.next:
        # The sink was rebuilt, and needs again what its slot had let go of: pin that before it is read.
        log.reset_slot(name, cursor.next)
        claimed = log.claim_slot(name, holder)
    return claimed


@dataclass(slots=True)
class _Follower:
    engine: Engine
    log: Log
    sink: Sink
    slot: Slot | None
    stop: StopEvent | None
    clock: Clock
    seen: float = 0.0

    def run(self, cursor: Cursor) -> Cursor:
        self.seen = self.clock.monotonic()
        event: Event = Began(cursor)
        while True:
            if self._told_to_stop():
                self.engine.stop()
            action = self.engine.step(event, self.clock.monotonic())
            if isinstance(action, Finish) and action.cursor is not None:
                return action.cursor
            event = self._do(action)

    def _do(self, action: Action) -> Event:
        match action:
            case Open():
                return Opened()  # a log is planned anew each time
            case Receive(since, records, size, seconds) if since is not None:
                return self._receive(since, Limit(records=records, bytes=size, upto=self.engine.until), seconds)
            case Apply():
                return Applied()  # the sink does both in one step
            case Store(Range(chunks, since, upto)) if since is not None:
                batches = [batch for chunk in chunks for batch in chunk]
                self.sink.apply(pa.Table.from_batches(batches, READ_SCHEMA), since=since, upto=upto)
                return Stored()
            case Report():
                self._advance()
                return Reported()
        raise AssertionError(f"a log's follower has no use for {action}")

    def _receive(self, since: Cursor, limit: Limit, seconds: float) -> Event:
        spans = self.log.plan(since, limit)
        if not spans:
            self._wait(since, seconds)
            return Nothing()
        batches = [batch for _, part in fetch_in_order(spans) for batch in part]
        size = sum(batch.nbytes for batch in batches)
        upto = since.at(spans[-1].next)
        return Received(batches, upto.next - since.next, upto, since=since.at(spans[0].first), size=size)

    def _advance(self) -> None:
        stored = self.sink.cursor(self.log.log_id)  # the sink's own word, not ours
        if self.slot is not None and stored is not None:
            self.slot.advance(stored)
            self.seen = self.clock.monotonic()

    def _be_seen(self) -> None:
        """Keep a slot whose follower has nothing to do from being taken for one that nobody follows."""
        if self.slot is not None and self.clock.monotonic() - self.seen >= _SEEN_EVERY:
            self.slot.touch()
            self.seen = self.clock.monotonic()

    def _wait(self, past: Cursor, seconds: float) -> None:
        """Wait for the log in short turns, so that a request to stop is heard soon."""
        self._be_seen()
        deadline = self.clock.monotonic() + seconds
        while (left := deadline - self.clock.monotonic()) > 0:
            if self._told_to_stop() or self.log.wait(past, min(left, _POLL)):
                return

    def _told_to_stop(self) -> bool:
        return self.stop is not None and self.stop.is_set()
