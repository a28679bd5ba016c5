"""One open stream: its log, how requests append to it, and the end that live readers watch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, Self, TypeAlias, final, runtime_checkable

import pyarrow as pa

from strandline.errors import (
    CommitTimedOut,
    ExpectationFailed,
    InvalidInput,
    OutcomeUnknown,
    OutOfOrder,
    ProducerClosed,
    ProducerFailed,
    Sealed,
    StrandlineError,
)
from strandline.formats.json.streams import StreamDescription
from strandline.log.contract import Handle, Log
from strandline.log.produce.producer import Producer
from strandline.log.writers.numbered import InDoubt, NumberedWriter, Refused
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import Receipt, WriterId, WriterState
from strandline.model.records import record_batch
from strandline.serve.http.calls import Calls
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.protocol.producers import HttpProducer, Next, Refusal, judge
from strandline.serve.http.protocol.records import BadValue, check_values
from strandline.serve.http.protocol.tokens import token_of
from strandline.serve.http.tail import LiveTail
from strandline.storage.env import Env
from strandline.storage.retry import Backoff
from strandline.values.contract import Codec

STREAM_SEQ: Final = "stream-seq"
"""Header of the last record of an append that had a ``Stream-Seq``."""

_WINDOW: Final = 256
_RETRIES: Final = Backoff(attempts=5, base=0.05, ceiling=0.5)
_ROUNDS: Final = 16
"""How often an append is judged again because another server appended meanwhile."""
_IDLE_SECONDS: Final = 5.0


@runtime_checkable
class StreamLog(Log, Protocol):
    """What a stream needs of its log: all kinds that a process can append to have it."""

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append of a writer; None if the log does not know it."""

    def close(self) -> None:
        """Release the log."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Records that are durable."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Closed:
    """The stream was closed: nothing was appended."""

    end: int


@dataclass(frozen=True, slots=True)
class BehindSequence:
    """The ``Stream-Seq`` is not above the last one, ``last``: nothing was appended."""

    last: bytes


@dataclass(frozen=True, slots=True)
class Judged:
    """The producer's headers decided: nothing was appended."""

    producer: HttpProducer
    verdict: Refusal
    bounds: Bounds


Outcome: TypeAlias = Appended | Closed | BehindSequence | Judged


@dataclass(frozen=True, slots=True)
class Append:
    """What a request wants to append."""

    read: Callable[[], pa.Table | pa.RecordBatch] | None
    """Reads the records from the body; may take seconds. None: it only closes the stream."""
    producer: HttpProducer | None = None
    sequence: bytes | None = None
    closes: bool = False
    records: pa.Table | pa.RecordBatch | None = None
    """What ``read`` gave."""


def batch_of(values: Sequence[bytes], now: int, sequence: bytes | None = None) -> pa.RecordBatch:
    """Values as records; the last one has the ``Stream-Seq`` of the append."""
    count = len(values)
    headers = None if sequence is None else [*[None] * (count - 1), [(STREAM_SEQ, sequence)]]
    return record_batch(timestamps=[now] * count, ops=[0] * count, keys=[None] * count, values=values, headers=headers)


@final
class Stream:
    """A stream whose log is open. Coroutines run on one event loop; blocking calls in threads."""

    def __init__(
        self,
        name: str,
        log: StreamLog,
        content_type: str,
        *,
        calls: Calls,
        limits: HttpLimits,
        env: Env,
        state: StreamDescription | None = None,
        used: Callable[[Stream], Awaitable[None]] | None = None,
    ) -> None:
        """``used`` is told again and again that live readers wait."""
        self.name = name
        self.log = log
        self.log_id = log.log_id
        self.content_type = content_type
        self.state = state
        """The description of a stream that a client created; None: configured."""
        self.looked_at = env.clock.monotonic()
        """When the description was read."""
        self.tail = LiveTail(self._look, limits.poll_seconds)
        self._tell_used = used
        self._env = env
        self._calls = calls
        self._has_terms = log.end().term > 0
        self._value: Codec | None = getattr(log, "value", None)
        self._order = threading.Lock()
        self._numbered = NumberedWriter(log, env)
        self._known: tuple[int, bytes | None] | None = None
        """Where the log ended, and the last ``Stream-Seq`` below; None: not read yet."""
        self._producer: Producer | None = None
        self._opening: asyncio.Lock = asyncio.Lock()
        self._used = env.clock.monotonic()
        self._users = 0
        self.is_gone = False
        """Whether it was deleted: readers that wait are told, whatever its log can still give."""
        self._turns: dict[str, asyncio.Lock] = {}

    def use(self) -> Self:
        """Begin a request: the log stays open until :meth:`release`."""
        self._users += 1
        return self

    def release(self) -> None:
        """End a request."""
        self._users -= 1
        self._used = self._env.clock.monotonic()

    @property
    def idle_seconds(self) -> float:
        """How long there was no request."""
        return 0.0 if self._users else self._env.clock.monotonic() - self._used

    async def _look(self) -> Bounds:
        """Where the log ends, for readers that wait."""
        if self._tell_used is not None:
            await self._tell_used(self)
        return await self._calls(self.log.bounds)

    async def token_at(self, offset: int) -> str:
        """The token of an offset, for an answer."""
        return token_of(await self._calls(self.cursor_at, offset) if self._has_terms else self.cursor_at(offset))

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor of an offset, with what tells its history from others; may block."""
        return self.log.cursor_at(offset) if self._has_terms else Cursor(self.log_id, offset)

    def _read(self, wanted: Append) -> Append:
        """Read the records to append; ``BadValue`` if one does not fit the format that the log names, if it names one.

        Blocks, maybe for seconds.
        """
        if wanted.read is None:
            return wanted
        records = wanted.read()
        if self._value is not None:
            try:
                check_values(records, self._value)
            except BadValue:
                self._value = getattr(self.log, "value", None)  # a version may have been added
                if self._value is not None:
                    check_values(records, self._value)
        return replace(wanted, records=records)

    async def append(self, wanted: Append) -> Outcome:
        """Append once; durable when it returns. Raises what the log raised."""
        try:
            if wanted.producer is not None:
                turn = self._turns.setdefault(wanted.producer.id, asyncio.Lock())
                try:
                    async with turn:  # requests of one producer in their order; other servers are told by the log
                        return await self._calls(self._append_numbered, wanted, wanted.producer)
                finally:
                    if not turn.locked():
                        self._turns.pop(wanted.producer.id, None)
            if wanted.read is None:
                return await self._calls(self._close_only)
            if wanted.closes or wanted.sequence is not None:
                return await self._calls(self._append_in_order, wanted)
            begun = await self._calls(self._begin, wanted)
            return Appended(await (begun if isinstance(begun, Handle) else self._append_plain(begun)))
        except Sealed as error:
            return Closed(await self._calls(lambda: self.log.bounds().next) if error.end is None else error.end)
        finally:
            self.tail.wake()

    # --- plain appends: many requests share a sync, or a batch ----------------------------------------------------

    def _begin(self, wanted: Append) -> Handle | pa.Table | pa.RecordBatch:
        """Append to a log that makes appends of many threads durable together; for any other, return the records."""
        records = self._read(wanted).records
        append_batch = getattr(self.log, "append_batch", None)
        return records if append_batch is None else append_batch(records)

    async def _append_plain(self, records: pa.Table | pa.RecordBatch) -> Receipt:
        for _ in range(2):
            producer = await self._open_producer()
            try:
                return await producer.append_batch(records)
            except ProducerClosed:
                continue  # it was idle, and closed just now
            except StrandlineError as error:
                if not isinstance(error, InvalidInput) or isinstance(error, ProducerFailed):
                    await self._drop_producer(producer)
                cause = error.__cause__ if isinstance(error, ProducerFailed) else None
                if isinstance(cause, StrandlineError):
                    # Held back behind a batch that failed: nothing of this request was appended.
                    if isinstance(cause, Sealed):
                        raise cause from error
                    continue
                raise
        raise OutcomeUnknown("The log failed twice while the request waited; it was not appended. Try again.")

    async def _open_producer(self) -> Producer:
        if self._producer is None:
            async with self._opening:
                if self._producer is None:
                    self._producer = await self._calls(self.log.producer, linger=0.0, block=False)
        return self._producer

    async def _drop_producer(self, producer: Producer) -> None:
        if self._producer is producer:
            self._producer = None
        with contextlib.suppress(StrandlineError):
            await self._calls(producer.close)

    async def rest(self) -> None:
        """Give back the threads of appends, if there was none for a while."""
        producer = self._producer
        if producer is not None and self.idle_seconds > _IDLE_SECONDS:
            await self._drop_producer(producer)

    # --- appends that depend on what the log holds ----------------------------------------------------------------

    def _append_in_order(self, wanted: Append) -> Outcome:
        """Append behind a check of ``Stream-Seq``: at the end that was checked, or not at all."""
        wanted = self._read(wanted)
        for _ in range(_ROUNDS):
            with self._order:
                expect, refused = self._check_sequence(wanted.sequence)
                if refused is not None:
                    return refused
                try:
                    if wanted.closes:
                        # A log is closed once: a fresh writer id for that is no waste.
                        writer = WriterId(self._env.chance.uuid())
                        receipt = self._append_once(writer, 0, wanted, expect)
                    else:
                        receipt = self._append_expecting(wanted.records, expect)
                except ExpectationFailed:
                    continue
                self._note(receipt, wanted.sequence)
                return Appended(receipt)
        raise _too_many(self.name)

    def _append_expecting(self, records: pa.Table, expect: int | None) -> Receipt:
        outcome = self._numbered.append(records, expect)
        if isinstance(outcome, Refused | InDoubt):
            raise outcome.error
        return outcome

    def _append_numbered(self, wanted: Append, producer: HttpProducer) -> Outcome:
        """Append as a producer: the log has its state, whichever server appended last."""
        wanted = self._read(wanted)
        for _ in range(_ROUNDS):
            verdict = judge(producer, self.log.last_append(producer.writer))
            if not isinstance(verdict, Next):
                return Judged(producer, verdict, self.log.bounds())
            if wanted.records is None:
                return self._close_only()
            with self._order if wanted.sequence is not None else contextlib.nullcontext():
                expect, refused = self._check_sequence(wanted.sequence)
                if refused is not None:
                    return refused
                try:
                    writer, number = producer.append_as(verdict.number), verdict.number
                    receipt = self._append_once(writer, number, wanted, expect)
                except (OutOfOrder, ExpectationFailed):
                    continue  # another server appended meanwhile: judge by what the log has now
                self._note(receipt, wanted.sequence)
                return Appended(receipt)
        raise _too_many(self.name)

    def _append_once(self, writer: WriterId, number: int, wanted: Append, expect: int | None) -> Receipt:
        """Append under a writer and number, which make a repetition harmless: a lost answer is asked for again."""
        assert wanted.records is not None  # noqa: S101 - checked by the callers
        records, seal = wanted.records, wanted.closes
        return _RETRIES.repeat(
            lambda: self.log.append(records, writer=writer, number=number, expect=expect, seal=seal).result(),
            _may_be_repeated,
            self._env,
        )

    def _close_only(self) -> Outcome:
        end = self.log.seal().next
        return Appended(Receipt(end, 0))

    # --- Stream-Seq: stored in a header of the append's last record -----------------------------------------------

    def _check_sequence(self, sequence: bytes | None) -> tuple[int | None, Outcome | None]:
        """The end at which an append with this ``Stream-Seq`` may land, or why it may not."""
        if sequence is None:
            return None, None
        bounds = self.log.bounds()
        if bounds.sealed:
            return None, Closed(bounds.next)
        last = self._last_sequence(bounds)
        return bounds.next, BehindSequence(last) if last is not None and sequence <= last else None

    def _last_sequence(self, bounds: Bounds) -> bytes | None:
        """The last ``Stream-Seq`` of a retained record. What was read before is not read again."""
        known = self._known if self._known is not None and self._known[0] <= bounds.next else None
        since, last = (bounds.first, None) if known is None else known
        upto, window, since = bounds.next, _WINDOW, max(since, bounds.first)
        while upto > since:  # backwards: mostly the last record has it
            start = max(since, upto - window)
            found = self._sequence_within(start, upto)
            if found is not None:
                last = found
                break
            upto, window = start, window * 4
        self._known = (bounds.next, last)
        return last

    def _sequence_within(self, start: int, upto: int) -> bytes | None:
        found = None
        for batch in self.log.read(start, upto=upto, columns=["headers"]):
            headers = batch.column("headers")
            if headers.null_count < len(headers):
                for pairs in headers.drop_null().to_pylist():
                    found = next((value for name, value in pairs if name == STREAM_SEQ), found)
        return found

    def _note(self, receipt: Receipt, sequence: bytes | None) -> None:
        """What is known of ``Stream-Seq`` after an own append with one, which landed where it expected the end."""
        if sequence is not None and receipt.first is not None:
            self._known = (receipt.first + receipt.count, sequence)

    @property
    def has_failed(self) -> bool:
        """Whether the log of a stream that a client created takes no more appends until it is opened again."""
        return self.state is not None and bool(getattr(self.log, "failed", False))

    async def open_again(self, open_log: Callable[[], StreamLog]) -> None:
        """Open the log again after a write failed. If that fails too, what is durable can still be read."""
        if self._producer is not None:
            await self._drop_producer(self._producer)
        with contextlib.suppress(StrandlineError):
            await self._calls(self.log.close)  # it holds the lock
        self.log = await self._calls(open_log)
        self._numbered = NumberedWriter(self.log, self._env)
        self.tail.wake()

    def close(self) -> None:
        """Release the log, of a stream that a client created; blocks."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(StrandlineError):
                producer.close()
        if self.state is not None:
            self.log.close()


def _may_be_repeated(error: StrandlineError) -> bool:
    return (error.retryable or isinstance(error, OutcomeUnknown)) and not isinstance(error, CommitTimedOut)


def _too_many(name: str) -> StrandlineError:
    return OutcomeUnknown(
        f"Other servers appended to stream {name} at each of {_ROUNDS} tries; nothing was appended. Try again."
    )
