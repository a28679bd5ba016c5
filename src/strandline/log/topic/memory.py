"""In-memory topic, for one process and for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast, final
from uuid import UUID

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.log.contract import Log
from strandline.log.slots.resume import check_cursor
from strandline.log.topic.contract import MAX_TAKEN, check_count, check_partition
from strandline.log.topic.logs import IN_MEMORY, LogTopic
from strandline.model.arguments import checked
from strandline.model.cursor import Bounds, Cursor, Limit
from strandline.model.records import values_bytes
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import bound_to_process


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some messages, as the span of a plan."""

    first: int
    values: Sequence[bytes]
    size: int

    @property
    def next(self) -> int:
        return self.first + len(self.values)

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        offsets = pa.array(range(self.first, self.next), pa.int64())
        return [pa.RecordBatch.from_arrays([offsets, pa.array(self.values, pa.binary())], ["offset", "value"])]


class _Messages:
    """The retained messages of a partition: what a subscription needs of a log, and what a topic publishes with."""

    def __init__(self, log_id: UUID) -> None:
        self.log_id = log_id
        self._first = 0
        self._values: list[bytes] = []
        self._lock = threading.Lock()

    def bounds(self) -> Bounds:
        with self._lock:
            return self._bounds()

    def _bounds(self) -> Bounds:
        return Bounds(self._first, self._first + len(self._values))

    def plan(self, since: Cursor, limit: Limit) -> list[_Piece]:
        with self._lock:
            check_cursor(since, since, self._bounds())
            at = since.next - self._first
            values = self._values[at : at + (limit.records or MAX_TAKEN)]
        sizes = [size for size in accumulate(map(len, values)) if limit.allows(records=1, size=size, batches=1)]
        values = values[: max(1, len(sizes))]
        return [_Piece(since.next, values, sum(map(len, values)))] if values else []

    def publish(self, values: Sequence[bytes]) -> int:
        values = values_bytes(values)
        with self._lock:
            first = self._first + len(self._values)
            self._values += values
        return first

    def trim(self, upto: int) -> bool:
        with self._lock:
            if upto <= self._first:
                return False
            if upto > (end := self._bounds().next):
                raise InvalidInput(f"The partition ends at offset {end}: it cannot begin at {upto}.")
            del self._values[: upto - self._first]
            self._first = upto
            return True


@bound_to_process()
@final
@checked
class MemoryTopic(LogTopic):
    """A topic that ends with its process. Satisfies :class:`~strandline.log.topic.contract.Topic`; safe in threads.

    >>> topic = MemoryTopic(2)
    >>> stream, assignment = topic.subscribe([(1, 0)])
    >>> topic.publish(1, b"hello")
    0
    >>> stream.take(timeout=1.0)
    [Message(partition=1, offset=0, payload=b'hello')]
    """

    def __init__(self, partition_count: int, *, env: Env = SYSTEM) -> None:
        self._partitions = [_Messages(env.chance.uuid()) for _ in range(check_count(partition_count))]
        logs = cast("list[Log]", self._partitions)
        super().__init__(logs, publishers=self._partitions, pieces=IN_MEMORY, polling=None, env=env)

    def trim(self, partition: int, upto: int) -> None:
        """Delete all messages of a partition below an offset, even if subscriptions need them."""
        if self._partitions[check_partition(partition, self.partition_count)].trim(upto):
            self._wake(partition)  # the next message of a subscription may be gone, which it must raise
