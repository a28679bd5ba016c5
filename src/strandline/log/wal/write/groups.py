"""Appends, checked and encoded in the caller's thread, and commit groups: appends that share one sync."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.formats.arrow.block import Compression, Parts, encode_page, page_checksum
from strandline.formats.wal.frame import MAX_PAYLOAD
from strandline.log.contract import Receipt
from strandline.model.arguments import TIMEOUT
from strandline.model.head import WriterId
from strandline.model.records import RecordSource, conform
from strandline.storage.fork_check import call_in_child

LARGEST: Final = (1 << 63) - 1
"""Of offsets, terms, numbers and times."""

_METADATA: Final = 4 << 10
"""More than the schema and the metadata of a frame take."""


class Encoded(NamedTuple):
    """A batch that fits a frame: its records, and their bytes."""

    batches: tuple[pa.RecordBatch, ...]
    pages: Sequence[Parts]
    size: int
    checksums: tuple[int, ...] | None = None
    """Of the records of each page, where they are small: for who sends them on, and has no pages then."""


def encoded(batch: RecordSource, *, now: int) -> Encoded:
    """The batch as the pages of a frame; ``InvalidInput`` if it is none, or over 256 MiB."""
    content = encoded_copy(tuple(conform(batch, now=now)))
    is_small = all(len(page) == 1 for page in content.pages)
    return content._replace(checksums=tuple(map(page_checksum, content.pages))) if is_small else content


def encoded_copy(batches: tuple[pa.RecordBatch, ...], pages: Sequence[Parts] | None = None) -> Encoded:
    """The same for records that are known to be such, or even encoded; ``InvalidInput`` if they are over 256 MiB."""
    if pages is None:
        pages = [encode_page(page, Compression.NONE) for page in batches]
    size = sum(len(part) for page in pages for part in page)
    _check_size(size, "batch")
    return Encoded(batches, pages, size)


def value_of(value: bytes) -> bytes:
    """The value as bytes that nobody can change; ``InvalidInput`` if it is none, or over 256 MiB."""
    if type(value) is not bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInput(f"A value is bytes, not {type(value).__name__}.")
        value = bytes(value)  # a copy: its owner may change it before it is written
    _check_size(len(value), "value")
    return value


def _check_size(size: int, what: str) -> None:
    if size + _METADATA > MAX_PAYLOAD:
        raise InvalidInput(f"A frame may hold {MAX_PAYLOAD:,} bytes and this {what} has {size:,}: append it in parts.")


def check_numbers(**numbers: int | None) -> None:
    """Refuse what a frame cannot say: each is a whole number from 0 up to 63 bits, or was not given."""
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or not 0 <= number <= LARGEST):
            raise InvalidInput(f"{name} is a whole number from 0 up to {LARGEST}, not {number!r}.")


R = TypeVar("R")


@dataclass(slots=True)
class ValueRun:
    """Values that were appended one by one, each a record of its own; together they are one frame, or a few."""

    first: int
    term: int
    values: list[bytes] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    """Microseconds."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A batch that is one frame, encoded by who appended it."""

    first: int
    term: int
    count: int
    batches: tuple[pa.RecordBatch, ...]
    pages: Sequence[Parts]
    size: int
    writer: tuple[WriterId, int] | None
    """Whose append it is, and its number; None if nobody numbered it."""
    timestamp: int | None
    """When the frame says that it was written, in milliseconds; None for when it is."""
    checksums: tuple[int, ...] | None = None
    """Of the records of each page, if they are known."""


Item = ValueRun | Whole


class _Here(threading.local):
    """The loop that was last found running in a thread: asking for it costs a call of the system each time."""

    loop: asyncio.AbstractEventLoop | None = None

    def forget(self) -> None:
        """In a child, the loop that has forked it seems to run for ever."""
        self.loop = None


_HERE: Final = _Here()
call_in_child(_HERE, _Here.forget)


_AT_ONCE: Final = 4
"""So many threads are woken first; each of them wakes another."""

_LOOK: Final = 1.0
"""Seconds after which a thread looks by itself whether its group is settled."""


class Source:
    """Where groups come from. What is changed here holds for all of them, wherever they are on their way."""

    __slots__ = ("lost", "pump")

    def __init__(self, pump: Callable[[], object] | None = None) -> None:
        """Who waits for a group calls ``pump`` first, if nobody else commits."""
        self.pump = pump
        self.lost = False

    def lose(self, refusal: Callable[[], Exception]) -> None:
        """Nobody will ever settle a group that is not settled yet: who asks for one is told so."""

        def refuse() -> None:
            raise refusal()

        self.pump, self.lost = refuse, True


_NOWHERE: Final = Source()


class CommitGroup:
    """Appends that become durable together. One thread settles it, any number wait for it."""

    __slots__ = ("_error", "_futures", "_waiters", "done", "items", "run", "size", "source")

    def __init__(self, source: Source = _NOWHERE) -> None:
        self.items: list[Item] = []
        self.run: ValueRun | None = None
        """The last item, if the next single record may join it."""
        self.size = 0
        self.done = False
        self.source = source
        self._error: Callable[[], Exception] | None = None
        # A lock for each thread that waits: a condition would let all of them contend for one when they wake.
        self._waiters: deque[threading.Lock] = deque()
        self._futures: dict[asyncio.AbstractEventLoop, Awaited] = {}

    def __reduce__(self) -> NoReturn:
        """It is not pickled: who waits for a copy in another process waits for ever."""
        raise TypeError("The handle of an append stays in its process: send what its result() gives.")

    def settle(self, error: Callable[[], Exception] | None = None) -> None:
        """Tell everyone who waits that it is durable, or why it is not."""
        self._error = error
        self.items, self.run = [], None
        self.done = True  # before the waiters are gone through: who comes later sees it
        for _ in range(min(_AT_ONCE, len(self._waiters))):
            self._pass_on()
        for loop, waiting in list(self._futures.items()):
            with contextlib.suppress(RuntimeError):  # nobody awaits in a loop that was closed
                loop.call_soon_threadsafe(_wake, waiting, error)

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is durable, or raise why it is not; ``TimeoutError`` if neither yet."""
        if timeout is not None:
            TIMEOUT.check(timeout, "result: timeout")
        if not self.done:
            if self.source.pump is not None:
                self.source.pump()
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            self._block(waiter, timeout)
        if self._error is not None:
            raise self._error()

    def _block(self, waiter: threading.Lock, timeout: float | None) -> None:
        """Wait to be woken, and wake the next one.

        Threads that are woken all at once contend for the interpreter, go to sleep again, and are woken a second time.
        So each wakes the next as the first thing it does: that one is awake when the interpreter is free.
        """
        left = math.inf if timeout is None else timeout
        is_woken = False
        try:
            # A look now and then: nobody must wait for ever for a thread that was interrupted just when its turn came.
            while not self.done:
                is_woken = waiter.acquire(timeout=min(max(0.0, left), _LOOK))
                if is_woken:
                    break
                left -= _LOOK
                if left <= 0:
                    raise TimeoutError("The append is not durable yet; ask its handle again.")
        finally:
            if is_woken or not self._withdraws(waiter):
                self._pass_on()

    def _withdraws(self, waiter: threading.Lock) -> bool:
        """Whether it was not this one's turn yet; then it never will be."""
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
        """Raise why it did not become durable, if that is so."""
        if self._error is not None:
            raise self._error()

    def awaited(self, result: R) -> Generator[object, None, R]:
        """What awaiting it comes down to: the result once it is durable, or why it is not.

        Each caller has a future of its own: giving up on one does not disturb who else awaits the group.
        """
        if self.done:
            return self._known(result)
        if self.source.pump is not None:
            self.source.pump()
        loop = _HERE.loop
        if loop is None or not loop.is_running():
            loop = _HERE.loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiting = self._futures.get(loop)
        if waiting is None:
            waiting = self._futures[loop] = []
        waiting.append((future, result))
        if self.done:  # who settles it may not have seen this future
            return self._known(result)
        return future.__await__()

    def _known(self, result: R) -> Generator[object, None, R]:
        self.check()
        return result
        yield  # never: what makes it a generator


Awaited = list[tuple["asyncio.Future[Any]", Any]]
"""Futures, and what each of them comes to if the group is durable."""


def _wake(waiting: Awaited, error: Callable[[], Exception] | None) -> None:
    for future, result in waiting:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error())


class WalHandle:
    """The handle of an append to a write-ahead log: its offsets are given, its durability is awaited."""

    __slots__ = ("count", "first", "group")

    def __init__(self, group: CommitGroup, first: int | None, count: int) -> None:
        self.group = group
        self.first = first
        self.count = count

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.group.is_known

    @property
    def is_driven(self) -> bool:
        """Whether a thread makes it durable, though nobody waits for it."""
        return self.group.source.pump is None

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until the records are durable, or raise why they are not."""
        self.group.wait(timeout)
        return Receipt(self.first, self.count)

    def __await__(self) -> Generator[object, None, Receipt]:
        return self.group.awaited(Receipt(self.first, self.count))


def settled_group() -> CommitGroup:
    """A group that became durable before."""
    group = CommitGroup()
    group.done = True
    return group
