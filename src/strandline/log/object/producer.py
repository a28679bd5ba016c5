"""The producer: many small appends become few large batches, listed in the order they were made."""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, takewhile
from types import TracebackType
from typing import Final, Self, cast

import pyarrow as pa
import pyarrow.compute as pc

from strandline.formats.block import Compression
from strandline.log.object.handles import BatchHandle, Era, Outcome, RecordHandle, new_outcome
from strandline.log.object.upload import Draft, Lister, Sealed, seal
from strandline.model.errors import (
    BufferFull,
    InvalidInput,
    ProducerClosed,
    ProducerFailed,
)
from strandline.model.head import MetadataRange, WriterId
from strandline.model.records import MAX_BATCH_BYTES, MAX_RECORD_BYTES, Op, RecordSource, conform, record_batch
from strandline.storage.ambient import Clock

Headers = Mapping[str, bytes]

_PAGE: Final = 1 << 14
"""At most so many single records are turned into Arrow at a time: rarely enough to be cheap."""

_FIRST_PAGE: Final = 1 << 6
"""The same, before it is known how large the records are."""

_PAGE_BYTES: Final = 2 << 20
"""About so many bytes are turned into Arrow at a time: often enough to stay a small part of the buffer."""

_LARGE: Final = 1 << 14
"""A value of this size is turned into Arrow at once, so that queued records stay a small part of the buffer."""

_MAX_TIME: Final = ((1 << 63) - 1) // 1000

_LAG: Final = 4
"""How many pages may queue up while another thread turns one into Arrow, before appenders wait for it."""


_BYTES: Final = (bytes, type(None))

_Row = tuple[int, int, bytes | None, bytes | None, Headers | None]
"""Nanoseconds, operation, key, value, headers."""

_SKIPPED: Final = cast("_Row", ())
"""Stands where a drain found a ticket without its row; false, unlike any row."""


class _Open:
    """The batch being filled."""

    __slots__ = ("draft", "outcome")

    def __init__(self, compression: Compression) -> None:
        self.draft = Draft(compression)
        self.outcome = new_outcome()


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
        if min(batch_bytes, budget, uploads) < 1 or linger < 0 or batch_bytes > MAX_BATCH_BYTES // 2:
            raise InvalidInput(
                "batch_bytes, budget and uploads must be at least 1, linger not negative, and batch_bytes at most "
                f"{MAX_BATCH_BYTES // 2:,}."
            )
        self.writer = writer
        self._lister = lister
        self._born = born
        self._number = number
        self._generation = generation
        self._clock = clock
        self._now_ns: Callable[[], int] = clock.now_ns
        self._batch_bytes = batch_bytes
        self._linger = linger
        self._budget = budget
        self._block = block
        self._compression = Compression.named(compression)

        # Single records queue up without a lock: taking a ticket and storing a row under it are atomic in CPython. A
        # drain that finds a ticket without its row marks it skipped, and the appender then takes another one.
        self._next_ticket: Callable[[], int] = count().__next__
        self._rows: dict[int, _Row] = {}
        self._store_row = self._rows.setdefault
        self._era = Era(self, 0)
        self._page_mask = _FIRST_PAGE - 1
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._open: _Open | None = None
        self._sealed: deque[_Closed] = deque()
        self._buffered = 0
        self._first_at: float | None = None
        self._unnoticed = True  # nobody has told the committer yet that there is a first record
        self._overdue = False  # a page's worth is queued, and its appender found the lock taken
        self._full = False
        self._refusing = False  # set once it is closed or has failed
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
        large = (value is not None and len(value) >= _LARGE) or (key is not None and len(key) >= _LARGE)
        if large:
            _check_size(key, value)
        if op or headers is not None:
            headers = _check_rare(op, headers)
            large = large or (headers is not None and sum(map(len, headers.values())) >= _LARGE)
        if timestamp is not None:
            _check_timestamp(timestamp)
        if self._full:
            self._wait_for_room()
        era = self._era  # before the ticket: the record is in this era or a later one
        row = (self._now_ns() if timestamp is None else timestamp * 1000, op, key, value, headers)
        if large:
            ticket = self._queue_large(row)
        else:
            ticket = self._next_ticket()
            while self._store_row(ticket, row) is not row:
                del self._rows[ticket]
                ticket = self._next_ticket()
            if not ticket & self._page_mask:
                self._fill_pages()
        if self._unnoticed:
            self._notice()
        if self._refusing:
            self._refuse_queued(ticket)
        return RecordHandle(era, ticket)

    def _queue_large(self, row: _Row) -> int:
        # One at a time, and into a page at once: several in one page could be more than a batch may hold.
        with self._lock:
            if self._refusing:
                self._check_usable()
            ticket = self._next_ticket()
            self._rows[ticket] = row
            self._drain()
        return ticket

    def append_batch(self, batch: RecordSource) -> BatchHandle:
        """Append a table of records, whole or not at all, never split over two batches."""
        return self._append_whole(conform(batch, now=self._clock.now()), None)

    def produce(self, entries: Sequence[bytes], metadata: bytes = b"") -> BatchHandle:
        """Append opaque entries (records with a value only), whole or not at all, with metadata attached."""
        if not entries:
            raise InvalidInput("produce needs at least one entry.")
        now, total = self._clock.now(), len(entries)
        if not all(isinstance(entry, bytes) for entry in entries):
            raise InvalidInput("Entries are bytes: encode text first.")
        if not isinstance(metadata, bytes):
            raise InvalidInput("Metadata is bytes: encode text first.")
        batch = record_batch(timestamps=[now] * total, ops=[0] * total, keys=[None] * total, values=entries)
        return self._append_whole(conform(batch, now=now), MetadataRange(0, now, metadata))

    def _append_whole(self, batches: list[pa.RecordBatch], metadata: MetadataRange | None) -> BatchHandle:
        if self._full:
            self._wait_for_room()
        size = sum(batch.nbytes for batch in batches)
        with self._lock:
            self._check_usable()
            self._drain()
            if self._open is not None and self._open.draft.plain + size > self._batch_bytes:
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
            self._drain()
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
        # First refuse, then drain: an appender that did not see the refusal had queued its record before the drain.
        self._refusing = True
        with self._lock:
            self._drain()
            if self._open is not None:
                self._seal()
            self._closed = True
            self._room.notify_all()
        try:
            self.flush()
        finally:
            self._wake.set()
            self._committer.join()
            self._pool.shutdown(wait=True)

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
            self._drain()

    def _fill_pages(self) -> None:
        # One thread at a time works; the others go on queueing, and wait only when they are far ahead of it.
        if self._lock.acquire(blocking=len(self._rows) >= _LAG * (self._page_mask + 1)):
            try:
                self._drain()
            finally:
                self._lock.release()
        else:
            self._overdue = True
            self._wake.set()

    def _drain(self) -> None:
        """Put everything that has a ticket now in batches."""
        if not self._rows:
            return
        end = self._next_ticket()
        while (era := self._era).start < end:
            stop = min(era.start + self._page_mask + 1, end)
            rows, holes = self._take(era.start, stop)
            self._era = Era(self, stop if stop < end else end + 1)
            refusal = self._refusal()
            if refusal is not None or not rows:
                outcome = new_outcome()
                outcome.set_exception(refusal or ProducerClosed(_CLOSED))
                era.close(stop, outcome, 0, holes, self._era)
                continue
            try:
                page = _page(rows)
                if self._open is not None and self._open.draft.plain + page.nbytes > MAX_BATCH_BYTES:
                    self._seal()
                group = self._group()
                base = self._add(group, [page])
            except BaseException as error:
                # Out of memory, say: these records are in no batch, so that nothing after them may be either.
                self._failure, self._refusing = error, True
                outcome = new_outcome()
                outcome.set_exception(error)
                era.close(stop, outcome, 0, holes, self._era)
                self._wake.set()
                raise
            era.close(stop, group.outcome, base, holes, self._era)
            self._page_mask = self._fitting_page(group.draft.plain // group.draft.count) - 1
            self._seal_if_full(group)

    def _fitting_page(self, record: int) -> int:
        """How many records of this size to turn into Arrow at a time: a power of two."""
        rows = min(_PAGE_BYTES, self._batch_bytes // 2) // max(1, record)
        return max(1, min(_PAGE, 1 << max(0, rows.bit_length() - 1)))

    def _take(self, start: int, stop: int) -> tuple[list[_Row], list[int]]:
        """The rows of these tickets, and the tickets whose rows did not come in time."""
        waiting = self._rows
        pop = waiting.pop
        found = [pop(ticket, _SKIPPED) for ticket in range(start, stop)]
        if all(found):
            return found, []
        holes = []
        for index, row in enumerate(found):
            if row is _SKIPPED:
                late = waiting.setdefault(start + index, _SKIPPED)
                if late is _SKIPPED:
                    holes.append(start + index)  # its appender will find the mark, and take another ticket
                else:
                    found[index] = pop(start + index)
        return [row for row in found if row is not _SKIPPED], holes

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
        if group.draft.plain >= self._batch_bytes:
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
            try:
                self._commit_once()
            except BaseException as error:  # noqa: BLE001 - every reason must reach the handles
                self._fail(error)

    def _commit_once(self) -> None:
        if self._failure is not None:
            self._fail(self._failure)
        with self._lock:
            if self._overdue:
                self._overdue = False
                self._drain()
            self._seal_if_due()
            ready = self._ready()
        if ready:
            self._list(ready)

    def _finished(self) -> bool:
        with self._lock:
            return not (self._sealed or self._open)

    def _until_due(self) -> float | None:
        first = self._first_at
        return None if first is None else max(0.0, first + self._linger - self._clock.monotonic())

    def _seal_if_due(self) -> None:
        if self._open is None and not self._rows:
            return
        now = self._clock.monotonic()
        if self._first_at is None:
            self._first_at = now
        if self._full or now >= self._first_at + self._linger:
            self._drain()
            if self._open is not None:
                self._seal()
            # A record that was queued while we sealed found "noticed" and told nobody: look once more.
            if self._rows:
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
            self._refusing = True
            waiting: list[Outcome] = [group.outcome for group in self._sealed]
            if self._open is not None:
                waiting.append(self._open.outcome)
            self._sealed.clear()
            self._open = None
            self._account(-self._buffered)
            for index, outcome in enumerate(waiting):
                outcome.set_exception(_held_back(failure) if index else failure)
            self._drain()

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

    def _refuse_queued(self, ticket: int) -> None:
        """Fail what was queued too late to be listed, and say so to the caller that queued it."""
        with self._lock:
            refusal = self._refusal()
            if refusal is None or (self._failure is None and ticket not in self._rows):
                return  # it was queued before the last drain, and is in a batch
            self._drain()
        raise refusal

    def _refusal(self) -> ProducerFailed | ProducerClosed | None:
        if self._failure is not None:
            return _held_back(self._failure)
        return ProducerClosed(_CLOSED) if self._closed else None


_CLOSED: Final = "The producer is closed; nothing was appended. Open a new one."


def _page(rows: list[_Row]) -> pa.RecordBatch:
    headers = [row[4] for row in rows]
    nanoseconds = pa.array(array("q", [row[0] for row in rows]), pa.int64())
    return record_batch(
        timestamps=pc.divide(nanoseconds, 1000),
        ops=array("b", [row[1] for row in rows]),
        keys=[row[2] for row in rows],
        values=[row[3] for row in rows],
        headers=headers if any(headers) else None,
    )


def _held_back(failure: BaseException) -> ProducerFailed:
    error = ProducerFailed(
        f"Not appended, because an earlier batch of this producer failed ({failure}); open a new producer to go on."
    )
    error.__cause__ = failure
    return error


def _check_size(*parts: bytes | None) -> None:
    for part in parts:
        if part is not None and len(part) > MAX_RECORD_BYTES:
            raise InvalidInput(f"A key or value of {len(part):,} bytes is over the limit of {MAX_RECORD_BYTES:,}.")


def _check_timestamp(timestamp: int) -> None:
    if type(timestamp) is not int or not -_MAX_TIME <= timestamp <= _MAX_TIME:
        raise InvalidInput(f"A timestamp is a whole number of microseconds since 1970, not {timestamp!r}.")


def _check_rare(op: int, headers: Headers | None) -> Headers | None:
    if op not in (Op.PUT, Op.DELETE, Op.PURGE):
        raise InvalidInput(f"Operations are {Op.PUT:d}, {Op.DELETE:d} and {Op.PURGE:d}, not {op!r}.")
    if not headers:
        return None
    try:
        kept = dict(headers.items())  # a copy: the caller may go on using its own
        size = sum(len(name.encode()) + len(value) for name, value in kept.items())
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"Headers map text to bytes: {error}.") from error
    if not all(type(name) is str and type(value) is bytes for name, value in kept.items()):
        raise InvalidInput("Headers map text to bytes.")
    if size > MAX_RECORD_BYTES:
        raise InvalidInput(f"Headers of {size:,} bytes are over the limit of {MAX_RECORD_BYTES:,}.")
    return kept


def _warn_if_open(reference: weakref.ref[Producer]) -> None:
    producer = reference()
    if producer is not None and not producer._closed:  # noqa: SLF001 - its own module
        warnings.warn(
            "A producer was never closed; what it had not listed yet is lost. Use 'with log.producer() as producer'.",
            ResourceWarning,
            stacklevel=1,
        )
