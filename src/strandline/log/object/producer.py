"""The producer: many small appends become few large batches, listed in the order they were made."""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from strandline.formats.block import Compression
from strandline.log.object.handles import BatchHandle, Outcome, RecordHandle
from strandline.log.object.upload import Draft, Lister, Sealed, seal
from strandline.model.errors import (
    BufferFull,
    InvalidInput,
    ProducerClosed,
    ProducerFailed,
)
from strandline.model.head import MetadataRange, WriterId
from strandline.model.records import MAX_RECORD_BYTES, Op, RecordSource, conform, record_batch
from strandline.storage.ambient import Clock

Headers = Mapping[str, bytes]

_PAGE: Final = 1 << 14
"""So many single records are turned into Arrow at a time: rarely enough to be cheap, often enough to stay small."""

_LARGE: Final = 1 << 14
"""A value of this size is turned into Arrow at once, so that queued records stay a small part of the buffer."""

_LAG: Final = 4
"""How many pages may queue up while another thread turns one into Arrow, before appenders wait for it."""


_BYTES: Final = (bytes, type(None))


class _Open:
    """The batch being filled."""

    __slots__ = ("draft", "outcome")

    def __init__(self, compression: Compression) -> None:
        self.draft = Draft(compression)
        self.outcome: Outcome = Future()


@dataclass(frozen=True, slots=True)
class _Closed:
    """A batch on its way: being uploaded, then listed."""

    outcome: Outcome
    size: int
    uploaded: Future[Sealed]


class Producer:
    """Appends records. A handle that resolves means: durable, and listed in the log, once.

    Records of one producer are listed in the order of the calls, also over threads. A batch is closed at
    ``batch_bytes``, ``linger`` seconds after its first record, or by :meth:`flush`. When ``budget`` bytes are not yet
    listed, appending blocks, or raises ``BufferFull`` if ``block`` is false.

    If a batch fails for good, its handles raise the reason, those of later records raise ``ProducerFailed``, and so
    does every later call: nothing jumps the hole. Open a new producer to go on.
    """

    def __init__(
        self,
        lister: Lister,
        *,
        writer: WriterId,
        born: int,
        number: int,
        generation: int,
        clock: Clock,
        batch_bytes: int = 64 << 20,
        linger: float = 0.1,
        budget: int = 256 << 20,
        block: bool = True,
        uploads: int = 4,
        compression: str = "lz4",
    ) -> None:
        """Use :meth:`ObjectLog.producer`, which passes the first arguments."""
        if batch_bytes < 1 or budget < 1 or uploads < 1 or linger < 0:
            raise InvalidInput("batch_bytes, budget and uploads must be at least 1, and linger not negative.")
        self.writer = writer
        self._lister = lister
        self._born = born
        self._number = number
        self._generation = generation
        self._clock = clock
        self._now: Callable[[], int] = clock.now
        self._batch_bytes = batch_bytes
        self._linger = linger
        self._budget = budget
        self._block = block
        self._compression = Compression.named(compression)

        self._queue: deque[RecordHandle] = deque()  # appended to without a lock: CPython's deque is atomic
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._open: _Open | None = None
        self._sealed: deque[_Closed] = deque()
        self._buffered = 0
        self._first_at: float | None = None
        self._unnoticed = True  # nobody has told the committer yet that there is a first record
        self._full = False
        self._closed = False
        self._failure: BaseException | None = None

        self._pool = ThreadPoolExecutor(uploads, thread_name_prefix="strandline-upload")
        self._committer = threading.Thread(target=self._commit, name="strandline-committer", daemon=True)
        self._committer.start()
        atexit.register(_warn_if_open, weakref.ref(self))

    # --- appending ---------------------------------------------------------------------------------------------

    def append(
        self,
        *,
        key: bytes | None = None,
        value: bytes | None = None,
        op: int = Op.PUT,
        timestamp: int | None = None,
        headers: Headers | None = None,
    ) -> RecordHandle:
        """Append one record; ``timestamp`` is in microseconds and defaults to now."""
        if type(key) not in _BYTES or type(value) not in _BYTES:
            raise InvalidInput("Keys and values are bytes or None: encode text first.")
        if self._full:
            self._wait_for_room()
        handle = RecordHandle(self, self._now() if timestamp is None else timestamp, op, key, value, headers)
        if op or headers is not None:
            _check_rare(op, headers)
        queue = self._queue
        queue.append(handle)
        if len(queue) >= _PAGE or (value is not None and len(value) >= _LARGE):
            self._fill_pages(large=value)
        if self._unnoticed:
            self._notice()
        if self._closed or self._failure is not None:
            self._refuse_queued()
        return handle

    def append_batch(self, batch: RecordSource) -> BatchHandle:
        """Append a table of records, whole or not at all, never split over two batches."""
        return self._append_whole(conform(batch, now=self._now()), None)

    def produce(self, entries: Sequence[bytes], metadata: bytes = b"") -> BatchHandle:
        """Append opaque entries (records with a value only), whole or not at all, with metadata attached."""
        if not entries:
            raise InvalidInput("produce needs at least one entry.")
        now, count = self._now(), len(entries)
        if not all(isinstance(entry, bytes) for entry in entries):
            raise InvalidInput("Entries are bytes: encode text first.")
        batch = record_batch(timestamps=[now] * count, ops=[0] * count, keys=[None] * count, values=entries)
        return self._append_whole(conform(batch, now=now), MetadataRange(0, now, metadata))

    def _append_whole(self, batches: list[pa.RecordBatch], metadata: MetadataRange | None) -> BatchHandle:
        if self._full:
            self._wait_for_room()
        size = sum(batch.nbytes for batch in batches)
        with self._lock:
            self._check_usable()
            self._drain(everything=True)
            if self._open is not None and self._open.draft.size + size > self._batch_bytes:
                self._seal()
            group = self._group()
            start = self._add(group, batches)
            if metadata is not None:
                group.draft.metadata.append(MetadataRange(start, metadata.ingested, metadata.payload))
            handle = BatchHandle(group.outcome, start, group.draft.count - start)
            self._seal_if_full(group)
        if self._unnoticed:
            self._notice()
        return handle

    # --- flushing ----------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Block until everything appended before this call is durable and listed; raises what failed."""
        with self._lock:
            self._drain(everything=True)
            if self._open is not None:
                self._seal()
            last = self._sealed[-1].outcome if self._sealed else None
        self._wake.set()
        if last is not None:
            last.result(timeout)
        if self._failure is not None:
            raise ProducerFailed(f"An earlier batch failed: {self._failure}") from self._failure

    def close(self) -> None:
        """Flush, then stop. Raises what could not be made durable."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
        finally:
            self._wake.set()
            self._committer.join()
            self._pool.shutdown(wait=True)
            self._refuse_queued()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def buffered(self) -> int:
        """Bytes that are appended and not yet listed, without the last few queued records."""
        return self._buffered

    # --- from queue to pages (under the lock) ------------------------------------------------------------------

    def place_pending(self) -> None:
        """Put every queued record in a batch, so that each has an outcome to wait for."""
        with self._lock:
            self._drain(everything=True)

    def _fill_pages(self, large: bytes | None) -> None:
        if large is not None and len(large) > MAX_RECORD_BYTES:
            self._queue.pop()
            raise InvalidInput(f"A value of {len(large):,} bytes is over the limit of {MAX_RECORD_BYTES:,}.")
        # One thread at a time works; the others go on queueing, and wait only when they are far ahead of it.
        if self._lock.acquire(blocking=large is not None or len(self._queue) >= _LAG * _PAGE):
            try:
                self._drain(everything=large is not None)
            finally:
                self._lock.release()

    def _drain(self, *, everything: bool) -> None:
        queue = self._queue
        while len(queue) >= _PAGE or (everything and queue):
            rows = [queue.popleft() for _ in range(min(len(queue), _PAGE))]
            if self._failure is not None:
                _settle_late(rows, _held_back(self._failure))
                continue
            headers = [row.headers for row in rows]
            page = record_batch(
                timestamps=[row.timestamp for row in rows],
                ops=[row.op for row in rows],
                keys=[row.key for row in rows],
                values=[row.value for row in rows],
                headers=headers if any(item is not None for item in headers) else None,
            )
            group = self._group()
            start = self._add(group, [page])
            outcome = group.outcome
            for index, row in enumerate(rows, start):
                row.index = index
                row.key = row.value = row.headers = None  # the page has them; a kept handle must not
                row.outcome = outcome
            self._seal_if_full(group)

    def _group(self) -> _Open:
        if self._open is None:
            self._open = _Open(self._compression)
        return self._open

    def _add(self, group: _Open, batches: list[pa.RecordBatch]) -> int:
        before = group.draft.size
        start = group.draft.add(batches)
        self._account(group.draft.size - before)
        return start

    def _account(self, size: int) -> None:
        self._buffered += size
        self._full = self._buffered >= self._budget
        if self._full:
            self._wake.set()  # nothing may wait for its time to pass while appenders wait for room
        else:
            self._room.notify_all()

    def _seal_if_full(self, group: _Open) -> None:
        if group.draft.size >= self._batch_bytes:
            self._seal()

    def _seal(self) -> None:
        group, self._open = self._open, None
        self._first_at = None
        self._unnoticed = True
        if group is None:
            return
        sealed = seal(group.draft, writer=self.writer, number=self._number, born=self._born)
        self._number += 1
        uploaded = self._pool.submit(self._lister.upload, sealed, self._generation)
        self._sealed.append(_Closed(group.outcome, group.draft.size, uploaded))
        uploaded.add_done_callback(lambda _: self._wake.set())

    # --- the committer thread ----------------------------------------------------------------------------------

    def _notice(self) -> None:
        self._unnoticed = False
        self._wake.set()

    def _commit(self) -> None:
        while not (self._closed and self._finished()):
            self._clock.wait(self._wake, self._until_due())
            self._wake.clear()
            with self._lock:
                self._seal_if_due()
                ready = self._ready()
            if ready:
                self._list(ready)

    def _finished(self) -> bool:
        with self._lock:
            return not (self._sealed or self._open or self._queue)

    def _until_due(self) -> float | None:
        first = self._first_at
        return None if first is None else max(0.0, first + self._linger - self._clock.monotonic())

    def _seal_if_due(self) -> None:
        if self._open is None and not self._queue:
            return
        now = self._clock.monotonic()
        if self._first_at is None:
            self._first_at = now
        if self._full or now >= self._first_at + self._linger:
            self._drain(everything=True)
            if self._open is not None:
                self._seal()
            # A record that was queued while we sealed found "noticed" and told nobody: look once more.
            if self._queue:
                self._first_at = now
                self._unnoticed = False

    def _ready(self) -> list[_Closed]:
        return list(takewhile(lambda group: group.uploaded.done(), self._sealed))

    def _list(self, groups: list[_Closed]) -> None:
        """List what is uploaded, up to the first batch that is not to be had."""
        good = list(takewhile(lambda group: group.uploaded.exception() is None, groups))
        failure = groups[len(good)].uploaded.exception() if len(good) < len(groups) else None
        if good:
            try:
                receipts = self._lister.enlist([group.uploaded.result() for group in good])
            except BaseException as error:  # noqa: BLE001 - every reason must reach the handles
                failure = error
            else:
                with self._lock:
                    for group, receipt in zip(good, receipts, strict=True):
                        self._sealed.popleft()
                        self._account(-group.size)
                        group.outcome.set_result(receipt)
        if failure is not None:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = failure
            waiting: list[Outcome] = [group.outcome for group in self._sealed]
            if self._open is not None:
                waiting.append(self._open.outcome)
            self._sealed.clear()
            self._open = None
            self._account(-self._buffered)
            waiting[0].set_exception(failure)
            for outcome in waiting[1:]:
                outcome.set_exception(_held_back(failure))
            self._drain(everything=True)

    # --- refusing ----------------------------------------------------------------------------------------------

    def _wait_for_room(self) -> None:
        with self._lock:
            while self._full and self._failure is None and not self._closed:
                if not self._block:
                    raise BufferFull(
                        f"{self._buffered:,} bytes wait to be listed, over the budget of {self._budget:,}; nothing was "
                        "appended. Try again, or let the producer block."
                    )
                self._room.wait()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise _held_back(self._failure)
        if self._closed:
            raise ProducerClosed(_CLOSED)

    def _refuse_queued(self) -> None:
        """Fail what was queued too late to be listed, and say so to the caller that queued it."""
        if self._failure is None and self._committer.is_alive():
            return  # closing has begun, and will still list what is queued
        with self._lock:
            rows = list(self._queue)
            self._queue.clear()
            error = ProducerClosed(_CLOSED) if self._failure is None else _held_back(self._failure)
            _settle_late(rows, error)
        if rows:
            raise error


_CLOSED: Final = "The producer is closed; nothing was appended. Open a new one."


def _settle_late(rows: list[RecordHandle], error: BaseException) -> None:
    outcome: Outcome = Future()
    outcome.set_exception(error)
    for row in rows:
        row.outcome = outcome


def _held_back(failure: BaseException) -> ProducerFailed:
    error = ProducerFailed(
        f"Not appended, because an earlier batch of this producer failed ({failure}); open a new producer to go on."
    )
    error.__cause__ = failure
    return error


def _check_rare(op: int, headers: Headers | None) -> None:
    if op not in (Op.PUT, Op.DELETE, Op.PURGE):
        raise InvalidInput(f"Operations are {Op.PUT:d}, {Op.DELETE:d} and {Op.PURGE:d}, not {op!r}.")
    if headers is not None and not all(type(name) is str and type(value) is bytes for name, value in headers.items()):
        raise InvalidInput("Headers map text to bytes.")


def _warn_if_open(reference: weakref.ref[Producer]) -> None:
    producer = reference()
    if producer is not None and not producer._closed:  # noqa: SLF001 - its own module
        warnings.warn(
            "A producer was never closed; what it had not listed yet is lost. Use 'with log.producer() as producer'.",
            ResourceWarning,
            stacklevel=1,
        )
