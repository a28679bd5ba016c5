"""The producer: many small appends become few large batches, listed in the order they were made."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Never, Self

from strandline.errors import ExpectationFailed, InvalidInput, ProducerClosed, Unsupported
from strandline.log.produce.committer import Committer
from strandline.log.produce.handles import ProduceHandle, RecordHandle
from strandline.log.produce.rows import (
    BY_NAME,
    CALL,
    ENTRY,
    ONLY_VALUES,
    PAGE_BYTES,
    Headers,
    Row,
    as_tuple,
    check_opaque,
    check_rare,
    check_size,
    header_bytes,
    microseconds_of,
    page_of_records,
)
from strandline.log.produce.shipper import Limits, Shipper
from strandline.log.produce.state import State
from strandline.log.produce.typed import TYPES, ValueEncoder
from strandline.model.arguments import checked
from strandline.model.head import MetadataRanges, Receipt, WriterId
from strandline.model.records import Op, RecordSource, conform, record_batch
from strandline.storage.closing import Closing
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, bound_to_process, call_in_child

_LARGE: Final = 1 << 14
"""A value of this size is encoded to Arrow at once, so that queued records stay a small part of the buffer."""

_LARGE_CALL: Final = 1 << 16
"""A call of at least this size is encoded at once, too; smaller ones wait to be encoded together with others."""

_ENTRY: Final = 22
"""Bytes of a value in Arrow, besides its content."""

_CLOSED: Final = "The producer is closed; nothing was appended. Open a new one."

_BYTES: Final = frozenset({bytes})

_PUT: Final = int(Op.PUT)
"""A plain number: with an enumeration member in it, the garbage collector would track every row."""


@bound_to_process(own=("append", "produce"))
@checked(own=("append", "produce"))
class Producer(Closing):
    """Appends records. When a handle resolves, its records are durable, and listed in the log once.

    Records of one producer are listed in the order of the calls, also over threads. A batch is closed at
    ``batch_bytes``, ``linger`` seconds after its first record, or by :meth:`flush`. Batches are uploaded side by side,
    ``uploads`` at a time, and one conditional write lists all that are ready. When ``budget`` bytes are not yet listed,
    appending blocks, or raises ``BufferFull`` if ``block`` is false.

    If a batch fails, its handles raise the reason, those of later records raise ``ProducerFailed``, and so does every
    later call: no batch is skipped. The appended records are kept. Either :meth:`retry` sends them again, under the
    same writer and numbers, or :meth:`close` discards them, and a new producer with a new writer id continues. Failed
    handles stay failed. A call that raised has appended nothing.

    In asyncio: ``async with log.producer(block=False) as producer``, ``await handle``, and, when an append raises
    ``BufferFull``, ``await producer.flush_async()`` before trying again.

    >>> import strandline as sl
    >>> log = sl.open("memory://doctest-producer", create=True)
    >>> with log.producer() as producer:
    ...     handles = [producer.append(key=b"k", value=b"v"), producer.produce([b"a", b"b"], metadata=b"m")]
    >>> [handle.result() for handle in handles]
    [Receipt(first=0, count=1), Receipt(first=1, count=2)]

    With a codec, the producer's (``log.producer(value=…)``) or the log's own, values may be typed:

    >>> import pyarrow as pa
    >>> with log.producer(value=sl.values.Json(pa.schema({"id": pa.int32()}))) as producer:
    ...     producer.append(key=b"k", value={"id": 1}).result()
    ...     producer.append_batch(pa.table({"key": [b"k", b"l"], "id": [2, 3]})).result()
    Receipt(first=3, count=1)
    Receipt(first=4, count=2)
    >>> log.producer(value=sl.values.Json(pa.schema({"id": pa.int32()}))).append(value={"id": "x"})
    Traceback (most recent call last):
    strandline.errors.InvalidInput: The value does not fit the schema: Expected `int | null`, got `str` - at `$.id`.
    """

    def __init__(
        self,
        shipper: Shipper[Any, Any],
        limits: Limits,
        *,
        writer: WriterId,
        number: int,
        env: Env,
        values: ValueEncoder | None = None,
    ) -> None:
        """Use :meth:`~strandline.log.contract.Log.producer` of a log."""
        self._values = ValueEncoder(None, lambda: None) if values is None else values
        self.writer = writer
        self._clock = env.clock
        self._origin = Origin(f"The producer with the writer id {writer}", self)
        self._opaque = shipper.opaque
        self._state = State(shipper, limits, writer=writer, number=number, env=env, origin=self._origin)
        self._committer = Committer(self._state, env)
        self._is_closing = self._had_failed = False
        # Threads and handles refer to the parts, not to the producer, so that an abandoned producer is detected.
        self._dropped = weakref.finalize(self, _drop, self._committer, writer)
        call_in_child(self, Producer._after_fork)

    def __repr__(self) -> str:
        return f"<Producer, writer {self.writer}>"

    def _after_fork(self) -> None:
        self._dropped.detach()

    def append(  # noqa: C901, PLR0912 - called per record: a helper would cost 10 %
        self,
        *by_position: Never,
        key: bytes | None = None,
        value: Any = None,
        op: int = _PUT,
        timestamp: int | datetime | None = None,
        headers: Headers | None = None,
    ) -> RecordHandle:
        """Append one record; ``timestamp`` is a datetime, or in microseconds, and defaults to now.

        ``value`` is bytes, None, or, where there is a codec, a mapping, a dataclass or a Struct with its fields. One
        that does not fit is ``InvalidInput``, with the field, and nothing is appended.
        """
        if by_position:
            raise InvalidInput(BY_NAME)
        state = self._state
        opaque, large = self._opaque, False
        if value is None:
            if opaque:
                raise InvalidInput(ONLY_VALUES)
        else:
            if type(value) is not bytes:
                value = self._values.one(value)
            large = len(value) >= _LARGE
        if type(key) is bytes:
            large = large or len(key) >= _LARGE
            if opaque:
                raise InvalidInput(ONLY_VALUES)
        elif key is not None:
            raise InvalidInput(TYPES)
        if op or headers is not None:
            headers, op = check_rare(op, headers), int(op)
            large = large or (headers is not None and header_bytes(headers) >= _LARGE)
            if opaque and (op or headers):
                raise InvalidInput(ONLY_VALUES)
        if timestamp is not None:
            timestamp = microseconds_of(timestamp)
        if state.halted:
            state.wait_for_room()
        now = state.now_ns() if timestamp is None else timestamp * 1000
        if large:
            return self._append_whole((now, op, key, value, headers, 0))
        page, ticket = state.page, state.next_ticket()  # in this order: the record is in this page or a later one
        row = (now, op, key, value, headers, ticket)
        state.queue_row(row)
        if len(state.rows) >= state.fill_at:
            state.fill_page()
        if state.halted:
            state.take_back(row)
        if state.first_at is None:
            state.note_first()
        return RecordHandle((page, ticket))

    def _append_whole(self, row: Row) -> RecordHandle:
        check_size(*row[2:5], self._state.shipper.most_record_bytes)
        return RecordHandle(self._state.place_whole([page_of_records([row])]))

    def append_batch(self, batch: RecordSource, *, expect: int | None = None) -> RecordHandle:
        """Append a table of records, whole or not at all, never split over two batches.

        Where there is a codec, the table may have the value's fields as columns, with ``key``, ``op``, ``timestamp``
        and ``headers`` beside them (``_key`` and so on, if the value has a field of that name); or ``value`` is a
        struct. A row that does not fit is ``InvalidInput``, with the field and the reason, and nothing is appended.

        With ``expect`` it is listed only if the log ends exactly there by then, with all earlier appends of this
        producer; else its handle raises ``ExpectationFailed``, the log is unchanged, and the producer continues.
        """
        batches = conform(self._values.records(batch), now=self._clock.now())
        if self._opaque:
            check_opaque(batches)
        return RecordHandle((*self._state.place_whole(batches, expect=expect), sum(map(len, batches))))

    def produce(self, values: Sequence[bytes], metadata: bytes = b"", *, expect: int | None = None) -> ProduceHandle:
        """Append values as records without key, op and headers, whole or not at all, with metadata attached.

        Each call is one metadata range, also without metadata, and the handle's ``ingested`` is its ingestion time.
        ``Unsupported`` with metadata where the log has no place for it: only object logs and queues of version 1 have.
        ``expect`` is as in :meth:`append_batch`.
        """
        content: bytes | tuple[bytes, ...] | None = None
        if (type(values) is list or type(values) is tuple) and len(values) == 1:
            (content,) = values
        # Most calls have one value, and object creation takes most of their time.
        if type(content) is bytes:
            op, total, size = ENTRY, 1, len(content) + _ENTRY
        else:
            content = tuple(values)  # a copy: the caller may change its list
            op, total, size = CALL, len(content), _size_of(content)
        state = self._state
        if type(metadata) is not bytes or len(metadata) > state.shipper.most_metadata:
            raise _refused(metadata, state.shipper.most_metadata)
        if expect is not None or size >= _LARGE_CALL:
            return self._produce_whole(as_tuple(content), metadata, expect)
        if state.halted:
            state.wait_for_room()
        page, ticket = state.page, state.next_ticket()  # in this order: the call is in this page or a later one
        now = state.now_ns()
        row = (now, op, metadata, content, size, ticket)
        state.queue_row(row)
        queued = state.queued = state.queued + size
        if len(state.rows) >= state.fill_at or queued >= PAGE_BYTES:
            state.fill_page()
        if state.halted:
            state.take_back(row)
        if state.first_at is None:
            state.note_first()
        return ProduceHandle((page, ticket, total, now))

    def _produce_whole(self, values: tuple[bytes, ...], metadata: bytes, expect: int | None) -> ProduceHandle:
        now, total = self._clock.now(), len(values)
        batch = record_batch(timestamps=[now] * total, ops=[0] * total, keys=[None] * total, values=values)
        ranges = MetadataRanges((0,), (now - now % self._state.shipper.tick,), (metadata,))
        return ProduceHandle((*self._state.place_whole(conform(batch, now=now), ranges, expect), total, now * 1000))

    def flush(self, timeout: float | None = None) -> None:
        """Block until everything appended before this call is durable and listed; raises the first failure."""
        state = self._state
        with state.lock:
            state.drain()
            state.seal()
            if state.failure is not None:
                raise state.failure.held_back()
            outcomes = state.outcomes()
        if outcomes:
            with suppress(ExpectationFailed):  # its own handle raises it; all before it are listed
                outcomes[-1].result(timeout)

    async def flush_async(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as in flush
        """:meth:`flush` for asyncio: does not block the event loop."""
        await asyncio.to_thread(self.flush, timeout)

    def retry(self, timeout: float | None = None) -> list[Receipt]:
        """Send the batches that a failure left unlisted again, and continue; returns one receipt for each, in order.

        Blocks until all of them are durable and listed. They keep their writer and numbers, so that a batch
        that had landed after all is recognised and not duplicated. If it fails again, this raises the reason, and all
        is kept: retry once more, or close. ``TimeoutError``: they are still being sent. Without a failure it does
        nothing. ``WriterExpired``, ``OutOfOrder`` and ``Diverged`` stay: close the producer and open another.
        """
        state = self._state
        with state.lock:
            if state.closed is not None:
                raise ProducerClosed(state.closed)
            if state.failure is None:
                return []
            if state.failure.final:
                raise state.failure.held_back()
            outcomes = state.resend()
        if wait(outcomes, timeout).not_done:
            raise TimeoutError("The kept batches are not listed yet; they are still being sent.")
        return [outcome.result() for outcome in outcomes]

    def close(self) -> None:
        """Flush, then stop. Raises what could not be made durable, and discards it: flush first to be able to retry.

        If it is interrupted, by Ctrl-C for example, the producer's threads continue; closing again waits for them.
        """
        state = self._state
        try:
            with state.lock:
                if state.closed is None:
                    self._is_closing, self._had_failed = True, state.failure is not None
                    state.closed = _CLOSED
                elif not self._is_closing:
                    return
                state.end_intake()  # also if that was interrupted
            self._committer.end()
        finally:
            self._dropped.detach()
        self._is_closing = False
        if state.failure is not None:
            raise state.failure.held_back() if self._had_failed else state.failure.reason

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def buffered(self) -> int:
        """Bytes that are appended and not yet listed, without the last few queued records."""
        return self._state.buffered


def _refused(metadata: object, most: int) -> InvalidInput:
    if most or type(metadata) is not bytes:
        return InvalidInput(f"Metadata is at most {most:,} bytes: it is stored in the head.")
    return Unsupported(
        "This log has no place for the metadata of a call, only an object log and a queue of version 1 have: put it "
        "into the values, or into headers of records (append, append_batch). Nothing was appended."
    )


def _size_of(values: tuple[bytes, ...]) -> int:
    """Approximate size of a call's values in Arrow; ``InvalidInput`` if they are not bytes."""
    if not values:
        raise InvalidInput("produce needs at least one value.")
    if not _BYTES.issuperset(map(type, values)) and not all(isinstance(value, bytes) for value in values):
        raise InvalidInput("Values are bytes: encode text first.")
    return sum(map(len, values)) + _ENTRY * len(values)


def _drop(committer: Committer, writer: WriterId) -> None:
    # May run in any thread at any point, within the garbage collector: no locks here.
    committer.drop()
    warnings.warn(
        f"The producer with writer id {writer} was never closed; its unlisted records are not in the log. "
        "Use 'with log.producer() as producer'.",
        ResourceWarning,
        stacklevel=2,
    )
