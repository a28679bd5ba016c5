"""Watch of a NATS bucket, with checks that it skips nothing that retention removed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from strandline.errors import Gap, InvalidInput, NotFound, StrandlineError, TransientStorageError
from strandline.kv.contract import Ended, Listed
from strandline.kv.nats.connection import NatsConnection, StreamState
from strandline.kv.nats.feed import ConsumerLost, MessageFeed, StreamMessage
from strandline.model.arguments import Positive, Timeout, checked
from strandline.model.cursor import Cursor
from strandline.model.keyed import Scope, Updates
from strandline.model.records import Op
from strandline.storage.closing import Closing
from strandline.storage.fork_check import Origin, bound_to_process

_FIRST_CHECK: Final = 0.1
_LONGEST_CHECK: Final = 5.0
_SHORTEST_WAIT: Final = 0.01
_LONGEST_WAIT: Final = 1.0
_MOST_FILTERS: Final = 16
_ALIGNED: Final = re.compile(rb"([-/_=a-zA-Z0-9]+\.)*")
_OPERATIONS: Final = {"DEL": Op.DELETE, "PURGE": Op.PURGE}
_REASON: Final = "Nats-Marker-Reason"
_REASONS: Final = {"MaxAge": Op.PURGE, "Purge": Op.PURGE, "Remove": Op.DELETE}


def scope_filters(scope: Scope, subjects: str) -> list[str]:
    """The subject filters that cover every key in scope, as narrow as NATS allows.

    >>> from strandline.model.keyed import Prefix
    >>> scope_filters(Prefix("node.", "route."), "$KV.b.")
    ['$KV.b.node.>', '$KV.b.route.>']
    >>> scope_filters(Prefix("node.", "rou"), "$KV.b.")
    ['$KV.b.>']
    """
    aligned = all(_ALIGNED.fullmatch(prefix) for prefix in scope.prefixes)
    if not aligned or len(scope.prefixes) > _MOST_FILTERS:
        return [f"{subjects}>"]
    return [f"{subjects}{prefix.decode()}>" for prefix in scope.prefixes]


def removal(headers: Mapping[str, str]) -> Op | None:
    """The removal that a message marks, written by a client or the server; None for a value."""
    operation = headers.get("KV-Operation")
    if operation is not None:
        return _OPERATIONS.get(operation)
    reason = headers.get(_REASON)
    return None if reason is None else _REASONS.get(reason, Op.DELETE)


@dataclass(slots=True)
class _ReceivedChanges:
    """Received changes, and the first hole in their sequence numbers."""

    ops: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    received: bool = False
    hole_after: int | None = None
    before_hole: int = 0

    def cut(self) -> None:
        for column in (self.ops, self.keys, self.values, self.versions):
            del column[self.before_hole :]


@bound_to_process()
@checked
class NatsSubscription(Closing):
    """A watch of a NATS bucket.

    Two sequence numbers are its position: everything in scope up to ``seen`` was returned, or was not current when a
    full watch began; ``through`` was received last. Sequence numbers have holes, since values are superseded and keys
    are out of scope. So after each hole, before the message is returned, the watch reads the first sequence number of
    the stream: had retention removed anything in the hole, it would be past the start of the hole.
    """

    def __init__(
        self,
        connection: NatsConnection,
        stream: str,
        subjects: str,
        scope: Scope,
        *,
        start: Mapping[str, Any],
        identity: UUID,
        window: int,
        seen: int,
        listing_upto: int | None = None,
        values: bool = True,
        markers: bool = False,
    ) -> None:
        """Create the consumer. A full watch lists up to the last sequence in scope before it began."""
        self._connection = connection
        self._clock = connection.env.clock
        self._stream = stream
        self._skipped = len(subjects)
        self._scope = scope
        self._filters = scope_filters(scope, subjects)
        self._unfiltered = self._filters == [f"{subjects}>"]
        self._identity = identity
        self._markers = markers
        self.aged: set[bytes] = set()
        """The keys that the server removed by age, if ``markers`` is set."""
        full = listing_upto is not None
        self._seen = seen
        self._through = 0 if full else seen
        self._current_upto = seen if full else 0
        self._target = listing_upto
        self._listed_at: int | None = None
        self._given_upto = -1
        self._check_at = self._clock.monotonic() + (_FIRST_CHECK if full else 0)
        self._check_interval = _FIRST_CHECK
        self._suspect = False
        self._failure: StrandlineError | None = None
        self._closed = False
        self._feed = MessageFeed(connection, stream, self._filters, start, window=window, values=values)
        self._origin = Origin(f"A watch of {stream} at {connection.url}", self)

    @property
    def stream(self) -> UUID:
        """The identity of the bucket's stream."""
        return self._identity

    def take(self, most: Positive, timeout: Timeout) -> Updates | Listed | Ended | None:
        """The next changes, up to ``most``; None if none arrived in time."""
        if self._closed:
            raise InvalidInput("This watch is closed: open another one.")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        try:
            return self._take(most, self._clock.monotonic() + timeout)
        except ConsumerLost as error:
            self._failure = error
            self._state()  # NotFound if the bucket is gone
            raise
        except StrandlineError as error:
            self._failure = error
            raise

    def _take(self, most: int, deadline: float) -> Updates | Listed | None:
        while True:
            self._feed.ready()
            given = self._end_of_listing() or self._settle(self._gather(most))
            self._feed.pull()
            if given is not None:
                return given
            if len(self._feed) or self._at_target():
                continue
            now = self._clock.monotonic()
            if now >= self._check_at and not self._connection.lost_for():
                given = self._check_stream(now)
                if given is not None:
                    return given
                if len(self._feed) or self._suspect or self._at_target():
                    continue
            self._feed.check()
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return None
            self._feed.wait(min(left, _LONGEST_WAIT, max(_SHORTEST_WAIT, self._check_at - now)))

    def _gather(self, most: int) -> _ReceivedChanges:
        """The received changes, up to ``most`` in scope."""
        chunk = _ReceivedChanges()
        keys, cut, scope, seen = chunk.keys, self._skipped, self._scope, self._seen
        everything = scope.everything
        sequence = self._through
        while len(keys) < most and (messages := self._feed.next(most - len(keys))):
            for message in messages:
                sequence = message.sequence
                if sequence > seen:
                    if sequence != seen + 1 and chunk.hole_after is None:
                        chunk.hole_after, chunk.before_hole = seen, len(keys)
                    seen = sequence
                key = message.subject[cut:].encode(errors="surrogateescape")
                if everything or key in scope:
                    self._add(chunk, key, message)
            chunk.received = True
        self._seen, self._through = seen, sequence
        return chunk

    def _add(self, chunk: _ReceivedChanges, key: bytes, message: StreamMessage) -> None:
        op: Op | None = None
        if message.headers:
            op = removal(message.headers)
            # Keys removed before a full watch began are absent.
            if op is not None and message.sequence <= self._current_upto and not self._markers:
                return
            if self._markers:
                aged = message.headers.get(_REASON) == "MaxAge"
                (self.aged.add if aged else self.aged.discard)(key)
        chunk.ops.append(0 if op is None else op)
        chunk.keys.append(key)
        chunk.values.append(message.data if op is None else None)
        chunk.versions.append(message.sequence)

    def _settle(self, chunk: _ReceivedChanges) -> Updates | None:
        """Return the received changes, if none is missing before them."""
        if not chunk.received:
            return None
        self._suspect = False
        self._check_interval = _FIRST_CHECK
        self._check_at = self._clock.monotonic() + _FIRST_CHECK
        if chunk.hole_after is not None:
            state = self._state()
            if state.first > chunk.hole_after + 1:
                gap = self._gap(chunk.hole_after, state.first - 1)
                if not chunk.before_hole:
                    raise gap
                self._failure = gap
                self._seen = self._through = chunk.hole_after
                chunk.cut()
        if not chunk.keys and self._target is not None:
            return None
        return self._give(chunk, self._through)

    def _give(self, chunk: _ReceivedChanges, upto: int) -> Updates:
        self._given_upto = upto
        return Updates(chunk.ops, chunk.keys, chunk.values, chunk.versions, Cursor(self._identity, upto + 1))

    def _state(self) -> StreamState:
        """The stream's current state; ``NotFound`` if it was created again."""
        state = self._connection.state(self._stream, f"Watching {self._stream}")
        if state.identity != self._identity:
            raise NotFound(f"{self._stream} was deleted and created again during this watch: start a full watch.")
        return state

    def _end(self) -> tuple[StreamState, int]:
        """The stream's state, and after it the highest retained sequence in scope."""
        state = self._state()
        if state.last <= self._seen and self._target is None:
            return state, self._through
        return state, self._connection.last(self._stream, self._filters, f"Watching {self._stream}")

    def _gap(self, seen: int, dropped: int) -> Gap:
        return Gap(
            f"Changes {seen + 1} up to {dropped} of {self._stream} were dropped before this watch received them: "
            "resume from the applied cursor, which resyncs the rest."
        )

    def _check_stream(self, now: float) -> Updates | None:
        """When no message arrives: advance the cursor past changes out of scope, or find a gap."""
        self._check_interval = min(2 * self._check_interval, _LONGEST_CHECK)
        self._check_at = now + self._check_interval
        try:
            state, last = self._end()
        except TransientStorageError:
            return None  # the feed detects a lost server
        dropped = state.first - 1
        if self._unfiltered and last < state.last:
            dropped = state.last  # the newest change, which nothing can have superseded
        if dropped > self._seen:
            # Messages delivered before they were dropped may have arrived only now: check again.
            if self._suspect:
                raise self._gap(self._seen, dropped)
            self._suspect, self._check_at = True, now
            return None
        self._suspect = False
        if self._target is not None:
            self._target = min(self._target, last)
            return None
        if self._through < last:
            return None  # in flight
        self._seen = self._through = max(self._seen, state.last, last)
        return self._give(_ReceivedChanges(), self._seen) if self._seen > self._given_upto else None

    def _at_target(self) -> bool:
        return self._target is not None and self._through >= self._target

    def _end_of_listing(self) -> Listed | None:
        """``Listed``, once all initial values were returned or superseded, and their successors returned.

        Otherwise a resync would delete a key that was present all the time.
        """
        if not self._at_target():
            return None
        if self._listed_at is None:
            state, last = self._end()
            if state.first > self._seen + 1:
                raise self._gap(self._seen, state.first - 1)
            self._listed_at = max(state.last, last)
            self._target = last
            if self._through < last:
                return None
        self._target = None
        self._seen = self._through = self._given_upto = max(self._seen, self._listed_at)
        return Listed(Cursor(self._identity, self._seen + 1))

    def close(self) -> None:
        """Close the watch. Idempotent."""
        if not self._closed:
            self._closed = True
            self._feed.close()
