"""Subscription to the logs of several partitions, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, final

import pyarrow as pa

from strandline.errors import ConsumerClosed, CursorExpired, NotFound
from strandline.log.contract import Log
from strandline.log.read.reading import fetch_in_order
from strandline.log.topic.contract import MAX_TAKEN, Message, check_partition, check_start, offset_expired
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import Cursor, Limit
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, bound_to_process

_TAKEN_BYTES: Final = 8 << 20
"""Approximate limit of their bytes; a single message may be larger."""

_COLUMNS: Final = ("offset", "value")


@dataclass(frozen=True, slots=True)
class ReadSize:
    """Read sizes of a subscription: batches and stored bytes of one read, at least one batch, and number of threads."""

    batches: int = 64
    bytes: int = 4 << 20
    workers: int = 4


@dataclass(frozen=True, slots=True)
class Polling:
    """Polling intervals for logs that other processes write, too: short at first, then growing."""

    first: float = 0.005
    last: float = 0.25
    growth: float = 1.5


@dataclass(slots=True)
class _Followed:
    """An assigned partition. Only the taking thread uses it."""

    partition: int
    log: Log
    position: int
    is_reached: bool = False
    """Whether the log is known to reach the position: before that there is nothing to plan."""
    ahead: deque[pa.RecordBatch] = field(default_factory=deque)
    """Messages that were read but not delivered: the rest of one piece."""


@bound_to_process()
@final
@checked
class LogTopicSubscription:
    """Positions in the logs of a topic, and the rest of one piece of each lagging partition.

    It reads a partition when this process publishes to it and, where other processes may write the logs as well, polls
    all of them. One thread takes, any thread closes.
    """

    def __init__(
        self,
        logs: Sequence[Log],
        *,
        pieces: ReadSize,
        polling: Polling | None,
        closed: Callable[[LogTopicSubscription], None],
        env: Env,
    ) -> None:
        """Use :meth:`LogTopic.subscribe`. ``closed`` is called once everything is released."""
        self._logs = logs
        self._pieces = pieces
        self._polling = polling
        self._on_close = closed
        self._clock = env.clock
        self._lock = threading.Lock()
        self._followed: dict[int, _Followed] = {}
        # The partitions to read, in the order of their turns: a partition that delivered messages moves to the end, so
        # that a busy one does not starve the others.
        self._due: dict[int, None] = {}
        self._woken = threading.Event()
        self._pause = 0.0
        self._poll_at = env.clock.monotonic()
        self._closed = False
        self._origin = Origin(f"A subscription of the topic of {logs[0]!r}", self)

    def take(self, timeout: Timeout) -> list[Message]:
        """The next messages; waits up to ``timeout`` seconds for the first."""
        now = self._clock.monotonic()
        deadline = now + min(timeout, threading.TIMEOUT_MAX / 2)
        while True:
            # Before any log is read: later publishes set it again.
            self._woken.clear()
            if self._closed:
                return []
            if is_poll := self._polling is not None and (now >= self._poll_at or timeout <= 0):
                self._mark_all_due(self._polling)
            if messages := self._gather():
                if is_poll:
                    self._pause, self._poll_at = 0.0, now  # a log with messages may have more
                return messages
            now = self._clock.monotonic()
            if now >= deadline:
                return []
            turn = deadline if self._polling is None else min(deadline, self._poll_at)
            self._clock.wait(self._woken, max(0.0, turn - now))
            now = self._clock.monotonic()

    def _mark_all_due(self, polling: Polling) -> None:
        """Mark all partitions to be read now, and schedule the next poll a little later than this one.

        A thread that takes in short turns keeps its interval.
        """
        self._pause = min(max(polling.first, self._pause * polling.growth), polling.last)
        with self._lock:
            for partition in self._followed:
                self._due.setdefault(partition)
        self._poll_at = self._clock.monotonic() + self._pause

    def _gather(self) -> list[Message]:
        """The messages of the marked partitions, each read once."""
        messages: list[Message] = []
        size = 0
        with self._lock:
            turns = list(self._due)
        for partition in turns:
            if len(messages) >= MAX_TAKEN or size >= _TAKEN_BYTES:
                break
            with self._lock:
                followed = self._followed.get(partition)
                self._due.pop(partition, None)
            if followed is None:
                continue
            try:
                piece = self._read(followed, MAX_TAKEN - len(messages))
            except Exception as error:
                if not messages and isinstance(error, CursorExpired):
                    self._unassign(followed)
                else:
                    self._mark_due(followed)  # at the end of the queue: a failing partition does not delay others
                if messages:
                    break  # it fails again next time; the gathered messages must not be lost
                raise
            if piece:
                messages += piece
                size += sum(len(message.payload) for message in piece)
                self._mark_due(followed)
        return messages

    def _unassign(self, followed: _Followed) -> None:
        with self._lock:
            if self._followed.get(followed.partition) is followed:
                del self._followed[followed.partition]

    def _mark_due(self, followed: _Followed) -> None:
        """Mark a partition to be read again; a removed partition is skipped then."""
        with self._lock:
            self._due.setdefault(followed.partition)

    def _read(self, followed: _Followed, room: int) -> list[Message]:
        """The next messages of a partition; advances its position."""
        if not followed.ahead:
            self._fetch(followed)
        messages: list[Message] = []
        size = 0
        while followed.ahead and len(messages) < room and size < _TAKEN_BYTES:
            batch = followed.ahead.popleft()
            fitting = max(1, (_TAKEN_BYTES - size) * batch.num_rows // max(1, batch.nbytes))
            count = min(room - len(messages), fitting, batch.num_rows)
            if count < batch.num_rows:
                followed.ahead.appendleft(batch.slice(count))
                batch = batch.slice(0, count)
            payloads = [value or b"" for value in batch.column("value").to_pylist()]
            offsets = batch.column("offset").to_pylist()
            messages += map(Message, repeat(followed.partition), offsets, payloads)
            size += batch.nbytes
            followed.position = offsets[-1] + 1
        return messages

    def _fetch(self, followed: _Followed) -> None:
        log, cursor = followed.log, Cursor(followed.log.log_id, followed.position)
        try:
            if not followed.is_reached:
                # A plan past the end is refused: it could be a cursor of another history.
                followed.is_reached = log.bounds().next >= followed.position
            if not followed.is_reached:
                return
            size = self._pieces
            spans = log.plan(cursor, Limit(records=MAX_TAKEN, batches=size.batches, bytes=size.bytes))
            try:
                for _, batches in fetch_in_order(spans, columns=_COLUMNS, workers=size.workers):
                    followed.ahead.extend(batches)
            except NotFound:
                followed.ahead.clear()
                log.plan(cursor, Limit(batches=1))  # raises if it was trimmed since it was planned
                raise
            except BaseException:
                followed.ahead.clear()
                raise
        except CursorExpired as error:
            raise offset_expired(followed.partition, followed.position, log.bounds().first) from error

    def published(self, partition: int) -> None:
        """Messages may have been published to a partition: wake the taking thread if it is assigned."""
        with self._lock:
            if partition not in self._followed:
                return
            self._due.setdefault(partition)
        self._woken.set()

    def close(self) -> None:
        """Release everything, and wake the taking thread."""
        with self._lock:
            self._closed = True
            self._followed.clear()
            self._due.clear()
        self._woken.set()
        self._on_close(self)

    def add(self, partition: int, start: int) -> None:
        """Deliver a partition from an offset on, unless it is delivered already."""
        check_partition(partition, len(self._logs))
        check_start(start)
        with self._lock:
            self._check_open()
            if partition in self._followed:
                return
        log = self._logs[partition]
        if start < (first := log.bounds().first):
            raise offset_expired(partition, start, first)
        with self._lock:
            self._check_open()
            if partition in self._followed:
                return
            self._followed[partition] = _Followed(partition, log, start)
            self._due[partition] = None
        self._woken.set()

    def _check_open(self) -> None:
        if self._closed:
            raise ConsumerClosed("The subscription is closed: no partition was added.")

    def remove(self, partition: int) -> None:
        """Deliver nothing more of a partition."""
        with self._lock:
            self._followed.pop(partition, None)
            self._due.pop(partition, None)

    def partitions(self) -> list[int]:
        """The assigned partitions, ascending."""
        with self._lock:
            return sorted(self._followed)
