"""The producer: many small appends become few large batches, listed in the order they were made."""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from strandline.formats.block import Compression
from strandline.log.object.handles import BatchHandle, Era, Outcome, RecordHandle, new_outcome
from strandline.log.object.outbox import Outbox, Sent
from strandline.log.object.rows import (
    FIRST_PAGE,
    Headers,
    Row,
    RowQueue,
    check_rare,
    check_size,
    check_timestamp,
    fitting_page,
    page_of,
)
from strandline.log.object.upload import Draft, Lister
from strandline.model.errors import (
    BufferFull,
    InvalidInput,
    ProducerClosed,
    ProducerFailed,
)
from strandline.model.head import MetadataRange, WriterId
from strandline.model.records import MAX_BATCH_BYTES, Op, RecordSource, conform, record_batch
from strandline.storage.ambient import Clock

_LARGE: Final = 1 << 14
"""A value of this size is turned into Arrow at once, so that queued records stay a small part of the buffer."""

_LAG: Final = 4
"""How many pages may queue up while another thread turns one into Arrow, before appenders wait for it."""

_MAX_METADATA: Final = 1 << 14
"""A batch is closed when it carries so much metadata, which is kept in the head; no single piece may be larger."""

_PUT: Final = int(Op.PUT)
"""A plain number: with a member of the enumeration in it, no row would ever be left alone by the garbage collector."""

_new_tuple: Final = tuple.__new__

_TYPES: Final = "Keys and values are bytes or None: encode text first."


class _Open:
    """The batch being filled."""

    __slots__ = ("draft", "outcome")

    def __init__(self, compression: Compression) -> None:
        self.draft = Draft(compression)
        self.outcome = new_outcome()


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
        self._clock = clock
        self._now_ns: Callable[[], int] = clock.now_ns
        self._batch_bytes = batch_bytes
        self._linger = linger
        self._budget = budget
        self._block = block
        self._compression = Compression.named(compression)

        queue = RowQueue()
        self._take_rows = queue.take
        self._next_ticket = queue.next_ticket
        self._rows = queue.rows
        self._store_row = queue.rows.setdefault
        self._era = Era(self.place_pending, 0)
        self._page_mask = FIRST_PAGE - 1
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._open: _Open | None = None
        self._buffered = 0
        self._first_at: float | None = None
        self._unnoticed = True  # nobody has told the committer yet that there is a first record
        self._overdue = False  # a page's worth is queued, and its appender found the lock taken
        self._full = False
        self._refusing = False  # set once it is closed or has failed
        self._closed = False
        self._failure: BaseException | None = None

        self._outbox = Outbox(
            lister,
            writer=writer,
            born=born,
            number=number,
            generation=generation,
            uploads=uploads,
            wake=self._wake.set,
        )
        self._committer = threading.Thread(target=self._commit, name="strandline-committer", daemon=True)
        self._committer.start()
        atexit.register(_warn_if_open, weakref.ref(self))

    # --- appending ---------------------------------------------------------------------------------------------

    def append(  # noqa: C901, PLR0912 - once per record: a call to a helper would cost a tenth of it
        self,
        *,
        key: bytes | None = None,
        value: bytes | None = None,
        op: int = _PUT,
        timestamp: int | None = None,
        headers: Headers | None = None,
    ) -> RecordHandle:
        """Append one record; ``timestamp`` is in microseconds and defaults to now."""
        large = False
        if type(value) is bytes:
            large = len(value) >= _LARGE
        elif value is not None:
            raise InvalidInput(_TYPES)
        if type(key) is bytes:
            large = large or len(key) >= _LARGE
        elif key is not None:
            raise InvalidInput(_TYPES)
        if large:
            check_size(key, value)
        if op or headers is not None:
            headers, op = check_rare(op, headers), int(op)
            large = large or (headers is not None and sum(map(len, headers.values())) >= _LARGE)
        if timestamp is not None:
            check_timestamp(timestamp)
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
            if ticket & self._page_mask == self._page_mask:
                self._fill_pages()
        if self._unnoticed:
            self._notice()
        if self._refusing:
            self._refuse_queued(ticket)
        return _new_tuple(RecordHandle, (era, ticket))

    def _queue_large(self, row: Row) -> int:
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
        if type(metadata) is not bytes or len(metadata) > _MAX_METADATA:
            raise InvalidInput(f"Metadata is bytes, and at most {_MAX_METADATA:,} of them: it is kept in the head.")
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
                group.draft.attach(MetadataRange(start, metadata.ingested, metadata.payload))
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
            last = self._outbox.last
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
            self._outbox.close()

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
            rows, holes = self._take_rows(era.start, stop)
            self._era = Era(self.place_pending, stop if stop < end else end + 1)
            refusal = self._refusal()
            if refusal is not None or not rows:
                outcome = new_outcome()
                outcome.set_exception(refusal or ProducerClosed(_CLOSED))
                era.close(stop, outcome, 0, holes, self._era)
                continue
            try:
                page = page_of(rows)
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
            self._page_mask = fitting_page(group.draft.plain // group.draft.count, self._batch_bytes) - 1
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
        if group.draft.plain >= self._batch_bytes or group.draft.attached >= _MAX_METADATA:
            self._seal()

    def _seal(self) -> None:
        group, self._open = self._open, None
        self._first_at = None
        self._unnoticed = True
        if group is None:
            return
        self._outbox.put(group.draft, group.outcome)

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
            uploaded = self._outbox.uploaded()
        if uploaded:
            self._deliver(uploaded)

    def _finished(self) -> bool:
        with self._lock:
            return not (self._outbox or self._open)

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

    def _deliver(self, batches: list[Sent]) -> None:
        delivery = self._outbox.deliver(batches)
        with self._lock:
            for receipt in delivery.receipts:
                sent = self._outbox.take()
                self._account(-sent.size)
                sent.outcome.set_result(receipt)
        if delivery.failure is not None:
            self._fail(delivery.failure)

    def _fail(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = failure
            self._refusing = True
            waiting: list[Outcome] = [sent.outcome for sent in self._outbox.clear()]
            if self._open is not None:
                waiting.append(self._open.outcome)
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
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

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


def _held_back(failure: BaseException) -> ProducerFailed:
    error = ProducerFailed(
        f"Not appended, because an earlier batch of this producer failed ({failure}); open a new producer to go on."
    )
    error.__cause__ = failure
    return error


def _warn_if_open(reference: weakref.ref[Producer]) -> None:
    producer = reference()
    if producer is not None and not producer._closed:  # noqa: SLF001 - its own module
        warnings.warn(
            "A producer was never closed; what it had not listed yet is lost. Use 'with log.producer() as producer'.",
            ResourceWarning,
            stacklevel=1,
        )
