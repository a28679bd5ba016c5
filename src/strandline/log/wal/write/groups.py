"""Appends, checked and encoded in the caller's thread, and commit groups: appends that share one sync."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.formats.arrow.block import Compression, Parts, encode_page, page_checksum
from strandline.formats.wal.frame import MAX_PAYLOAD
from strandline.log.wal.read.span import Records
from strandline.log.writers.numbered import check_number, forget_silent, is_repeated
from strandline.log.writers.source import remembered
from strandline.model.arguments import LARGEST_NUMBER, TIMEOUT
from strandline.model.head import Receipt, WriterId, WriterState, proof_of
from strandline.model.records import RecordSource, conform, value_bytes
from strandline.storage.fork_check import call_in_child

_LITTLE: Final = 4096
_METADATA: Final = 4 << 10
"""More than the schema and the metadata of a frame take."""


@dataclass(slots=True)
class FrameContent:
    """The content of one frame. It gets its place in the log when it is queued."""

    count: int
    pages: Sequence[Parts]
    size: int
    """Bytes of the pages."""
    kept: Records | None
    """The records, if they may stay in memory for readers."""
    writer: tuple[WriterId, int] | None = None
    """Writer and number of the append; None if unnumbered."""
    timestamp: int | None = None
    """Time of the frame in milliseconds; None for the time of writing."""
    first: int = 0
    term: int = 0
    seals: bool = False
    """Whether the log is sealed behind it."""


def encoded(batch: RecordSource, *, now: int) -> FrameContent:
    """The batch as the pages of a frame; ``InvalidInput`` if it is not a batch, or over 256 MiB."""
    content = encoded_copy(tuple(conform(batch, now=now)))
    if content.kept is not None and all(len(page) == 1 for page in content.pages):
        content.kept.checksums = tuple(map(page_checksum, content.pages))
    return content


def encoded_copy(batches: tuple[pa.RecordBatch, ...], pages: Sequence[Parts] | None = None) -> FrameContent:
    """Valid records, encoded unless they are already, as a frame's pages; ``InvalidInput`` if they are over 256 MiB."""
    if pages is None:
        pages = [encode_page(page, Compression.NONE) for page in batches]
    size = sum(len(part) for page in pages for part in page)
    _check_size(size, "batch")
    return FrameContent(
        sum(batch.num_rows for batch in batches), pages, size, Records(batches) if _is_compact(batches) else None
    )


def _is_compact(batches: Sequence[pa.RecordBatch]) -> bool:
    """Whether these batches hold little more memory than their own bytes: a slice holds all of its parent."""
    for batch in batches:
        size = batch.get_total_buffer_size()  # faster than nbytes
        if size > _LITTLE and size > 2 * batch.nbytes + _LITTLE:
            return False
    return True


def value_of(value: bytes) -> bytes:
    """The value as immutable bytes; ``InvalidInput`` if it is not bytes, or too large for a frame."""
    plain = value_bytes(value)
    _check_size(len(plain), "value")
    return plain


def _check_size(size: int, what: str) -> None:
    if size + _METADATA > MAX_PAYLOAD:
        raise InvalidInput(f"A frame may hold {MAX_PAYLOAD:,} bytes and this {what} has {size:,}: append it in parts.")


def check_numbers(**numbers: int | None) -> None:
    """Refuse numbers that a frame cannot hold: each is a whole number from 0 up to 63 bits, or None."""
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or not 0 <= number <= LARGEST_NUMBER):
            raise InvalidInput(f"{name} is a whole number from 0 up to 2**63 - 1, not {number!r}.")


R = TypeVar("R")


@dataclass(slots=True)
class ValueRun:
    """Values that were appended one by one, each a record of its own; together they become one frame, or a few."""

    first: int
    term: int
    values: list[bytes] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    """Microseconds."""


Item = ValueRun | FrameContent


class _RunningLoop(threading.local):
    """The event loop last found running in a thread: finding it costs a system call each time."""

    loop: asyncio.AbstractEventLoop | None = None

    def forget(self) -> None:
        """In a forked child, the parent's loop would seem to run forever."""
        self.loop = None


_RUNNING_LOOP: Final = _RunningLoop()
call_in_child(_RUNNING_LOOP, _RunningLoop.forget)


_AT_ONCE: Final = 4
"""Number of threads that are woken first; each of them wakes another."""

_CHECK_SECONDS: Final = 1.0
"""Seconds after which a waiting thread checks by itself whether its group is settled."""


@dataclass(slots=True, eq=False)
class GroupOrigin:
    """State that all groups of one committer share."""

    commit: Callable[[], object] | None = None
    """Without a committing thread, a thread that waits for a group calls it first."""
    lost: bool = False

    def lose(self, refusal: Callable[[], Exception]) -> None:
        """Make waiting for an unsettled group raise: none will ever be settled."""

        def refuse() -> None:
            raise refusal()

        self.commit, self.lost = refuse, True


_NO_ORIGIN: Final = GroupOrigin()


class CommitGroup:
    """Appends that become durable together. One thread settles it, any number wait for it."""

    __slots__ = ("_error", "_futures", "_waiters", "done", "items", "run", "size", "source")

    def __init__(self, source: GroupOrigin = _NO_ORIGIN) -> None:
        self.items: list[Item] = []
        self.run: ValueRun | None = None
        """The last item, if the next single record may join it."""
        self.size = 0
        self.done = False
        self.source = source
        self._error: Callable[[], Exception] | None = None
        # A lock for each waiting thread: with a condition all of them would contend for one when they wake.
        self._waiters: deque[threading.Lock] = deque()
        self._futures: dict[asyncio.AbstractEventLoop, Awaited] = {}

    def __reduce__(self) -> NoReturn:
        """Not picklable: a copy in another process would never be settled."""
        raise TypeError("The handle of an append cannot be pickled: send the receipt that its result() returns.")

    def settle(self, error: Callable[[], Exception] | None = None) -> None:
        """Wake all waiters: the group is durable, or failed with an error."""
        self._error = error
        self.items, self.run = [], None
        self.done = True  # before the waiters are woken: later ones see it
        for _ in range(min(_AT_ONCE, len(self._waiters))):
            self._pass_on()
        for loop, waiting in list(self._futures.items()):
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_wake, waiting, error)

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is durable, or raise why it is not; ``TimeoutError`` if it is neither yet."""
        if timeout is not None:
            TIMEOUT.check(timeout, "timeout")
        if not self.done:
            if self.source.commit is not None:
                self.source.commit()
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            self._block(waiter, timeout)
        self.check()

    def _block(self, waiter: threading.Lock, timeout: float | None) -> None:
        """Wait to be woken, and wake the next one.

        Threads that are woken all at once contend for the interpreter lock, sleep again, and are woken a second time.
        So each wakes the next one first: that one is awake when the interpreter lock is free.
        """
        left = math.inf if timeout is None else timeout
        is_woken = False
        try:
            # A periodic check: no thread must wait forever for one that was interrupted at its turn.
            while not self.done:
                is_woken = waiter.acquire(timeout=min(max(0.0, left), _CHECK_SECONDS))
                if is_woken:
                    break
                left -= _CHECK_SECONDS
                if left <= 0:
                    raise TimeoutError("The append is not durable yet; ask its handle again.")
        finally:
            if is_woken or not self._withdraws(waiter):
                self._pass_on()

    def _withdraws(self, waiter: threading.Lock) -> bool:
        """Remove a thread from the queue of waiters; False if it was woken already."""
        try:
            self._waiters.remove(waiter)
        except ValueError:
            return False
        return True

    def _pass_on(self) -> None:
        with contextlib.suppress(IndexError):
            self._waiters.popleft().release()

    @property
    def is_known(self) -> bool:
        """Whether waiting for it would not block."""
        return self.done or self.source.lost

    def check(self) -> None:
        """Raise why it did not become durable, if it failed."""
        if self._error is not None:
            raise self._error()

    def awaited(self, result: R) -> Generator[object, None, R]:
        """Implements ``await``: the result once it is durable, or the error.

        Each caller has a future of its own: cancelling one does not disturb the others.
        """
        if self.done:
            return self._known(result)
        if self.source.commit is not None:
            self.source.commit()
        loop = _RUNNING_LOOP.loop
        if loop is None or not loop.is_running():
            loop = _RUNNING_LOOP.loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiting = self._futures.get(loop)
        if waiting is None:
            waiting = self._futures[loop] = []
        waiting.append((future, result))
        if self.done:  # the settling thread may not have seen this future
            return self._known(result)
        return future.__await__()

    def _known(self, result: R) -> Generator[object, None, R]:
        self.check()
        return result
        yield  # never reached: makes this a generator


Awaited = list[tuple["asyncio.Future[Any]", Any]]
"""Futures, and the result of each if the group is durable."""


def _wake(waiting: Awaited, error: Callable[[], Exception] | None) -> None:
    for future, result in waiting:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error())


@dataclass(slots=True, eq=False)
class WalHandle:
    """The handle of an append to a write-ahead log: its offsets are assigned, its durability is awaited."""

    group: CommitGroup
    first: int | None
    count: int
    repeated: bool = False
    """Whether the log recognised the number of the append, which adds nothing then."""

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.group.is_known

    @property
    def is_driven(self) -> bool:
        """Whether a thread makes it durable without a waiter."""
        return self.group.source.commit is None

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until the records are durable, or raise why they are not."""
        self.group.wait(timeout)
        return Receipt(self.first, self.count)

    def __await__(self) -> Generator[object, None, Receipt]:
        return self.group.awaited(Receipt(self.first, self.count))


_DURABLE: Final = CommitGroup()
_DURABLE.done = True
_MANY_WRITERS: Final = 1024


class NumberedAppends:
    """Last appends by writer, each with the group to wait for until it is durable. The caller holds the lock."""

    __slots__ = ("_last",)

    def __init__(self, writers: Mapping[WriterId, WriterState]) -> None:
        self._last = {writer: (state, _DURABLE) for writer, state in writers.items()}

    def last(self, writer: WriterId) -> tuple[WriterState, CommitGroup] | None:
        """The last append of a writer; None if it is not known."""
        return self._last.get(writer)

    def repeated(self, writer: WriterId, number: int, count: int) -> WalHandle | None:
        """The handle of an append that was made before; None if it was not."""
        known, upto = remembered(writer, number)
        state, group = self._last.get(known, (None, _DURABLE))
        if state is not None and is_repeated(writer, number, state):
            # An earlier number is in the same group or in an earlier one, and durable when this one is.
            first, held = (state.first, state.count) if upto == state.number else (None, count)
            return WalHandle(group, first, held, repeated=True)
        return None

    def check(self, writer: WriterId, number: int) -> None:
        """Refuse a number that is not the writer's next, and was not appended before."""
        known, _ = remembered(writer, number)
        check_number(writer, number, self._last.get(known, (None, _DURABLE))[0], known=self._last)

    def remember(self, writer: WriterId, number: int, first: int, count: int, group: CommitGroup) -> None:
        """Note a queued append; of too many writers, those that were silent longest are forgotten."""
        known, upto = remembered(writer, number)
        self._last[known] = (WriterState(upto, first, first, count, 0, proof_of(writer)), group)
        if len(self._last) > _MANY_WRITERS:
            states = {known: state for known, (state, _) in self._last.items()}
            forget_silent(states)
            self._last = {known: self._last[known] for known in states}
