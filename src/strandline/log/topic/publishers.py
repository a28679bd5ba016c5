"""Publishers of a topic's partitions: each appends the messages of this process to one log."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import pyarrow as pa

from strandline.errors import OutcomeUnknown
from strandline.log.contract import Log
from strandline.log.wal.log import WalLog
from strandline.log.writers.numbered import InDoubt, NumberedWriter, Refused
from strandline.model.head import Receipt
from strandline.model.records import Op, record_batch, values_bytes
from strandline.storage.env import Env
from strandline.storage.retry import Backoff

_TOGETHER: Final = 8 << 20
"""Bytes of several callers in one batch."""

_BACKOFF: Final = Backoff(attempts=4)


class TopicPublisher(Protocol):
    """The publisher of one partition's log in this process. Safe in threads."""

    def publish(self, values: Sequence[bytes]) -> int:
        """Append at least one message, contiguously; returns the first offset when they are durable."""


@final
class WalPublisher:
    """Publishes to a write-ahead log; appends that arrive during a sync share the next one."""

    def __init__(self, log: WalLog) -> None:
        self._log = log
        self._add = log.add_value

    def publish(self, values: Sequence[bytes]) -> int:
        """Append messages as one frame; a single one shares a frame with those of other callers."""
        if len(values) == 1:
            group, offset = self._add(values[0])
            group.wait()
            return offset
        return _first_offset(self._log.append_batch(_batch(values, self._log.env.clock.now())).result())


@dataclass(slots=True, eq=False)
class _Waiting:
    values: Sequence[bytes]
    first: int | None = None
    error: BaseException | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.values))

    @property
    def is_settled(self) -> bool:
        return self.first is not None or self.error is not None


@final
class BatchingPublisher:
    """Publishes to any log as a numbered writer: a lost answer duplicates nothing.

    One batch is sent at a time. Messages that arrive meanwhile, from any thread, share the next one. A batch with an
    unknown outcome is sent again under the same number, a few times; if that does not help, its callers get the
    error, it may or may not be in the log, and a new writer id is used from then on.
    """

    def __init__(self, log: Log, *, env: Env, backoff: Backoff = _BACKOFF) -> None:
        self._clock = env.clock
        self._writer = NumberedWriter(log, env=env, retries=backoff)
        self._changed = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._sending = False

    def publish(self, values: Sequence[bytes]) -> int:
        """Append messages; a thread that finds no batch in flight sends the queue, the others wait for it."""
        mine = _Waiting(values_bytes(values))  # before queueing: an invalid message must not fail the others
        with self._changed:
            self._queue.append(mine)
            try:
                while self._sending and not mine.is_settled:
                    self._changed.wait()
            except BaseException:
                if mine in self._queue:
                    self._queue.remove(mine)  # an interrupted caller does not expect it to be published later
                raise
            if sends := not mine.is_settled:
                self._sending = True
        if sends:
            try:
                while not mine.is_settled:
                    self._send()
            finally:
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()
        if mine.error is not None:
            raise mine.error
        if mine.first is None:
            raise AssertionError("a settled message has an offset or an error")
        return mine.first

    def _send(self) -> None:
        """Append one batch of the longest-waiting messages."""
        waiting = self._next()
        values = [payload for each in waiting for payload in each.values]
        try:
            first = self._append(values)
        except BaseException as error:
            with self._changed:
                for each in waiting:
                    each.error = error
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise
            return
        with self._changed:
            for each in waiting:
                each.first = first
                first += len(each.values)
            self._changed.notify_all()

    def _next(self) -> list[_Waiting]:
        with self._changed:
            waiting = [self._queue.popleft()]
            size = waiting[0].size
            while self._queue and (size := size + self._queue[0].size) <= _TOGETHER:
                waiting.append(self._queue.popleft())
            return waiting

    def _append(self, values: Sequence[bytes]) -> int:
        match self._writer.append(_batch(values, self._clock.now())):
            case Refused(error) | InDoubt(error):
                raise error
            case receipt:
                return _first_offset(receipt)


def _first_offset(receipt: Receipt) -> int:
    if receipt.first is None:
        raise OutcomeUnknown(
            f"{receipt.count} messages are in the log, but at unknown offsets: read the end of the log before "
            "they are published again."
        )
    return receipt.first


def _batch(values: Sequence[bytes], now: int) -> pa.RecordBatch:
    count = len(values)
    return record_batch(timestamps=[now] * count, ops=[int(Op.PUT)] * count, keys=[None] * count, values=values)
