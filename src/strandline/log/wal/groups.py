"""Groups: all appends that share one sync, and so one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pyarrow as pa

from strandline.formats.block import Parts
from strandline.log.contract import Receipt
from strandline.model.head import WriterId

R = TypeVar("R")


@dataclass(slots=True)
class Run:
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


Item = Run | Whole


class _Here(threading.local):
    """The loop that was last found running in a thread: asking for it costs a call of the system each time."""

    loop: asyncio.AbstractEventLoop | None = None


_HERE: Final = _Here()


class Group:
    """Appends that become durable together. One thread settles it, any number wait for it."""

    __slots__ = ("_error", "_futures", "_waiters", "done", "items", "pump", "run", "size")

    def __init__(self, pump: Callable[[], object] | None = None) -> None:
        """An open group; who waits for it calls ``pump`` first, if nobody else commits."""
        self.items: list[Item] = []
        self.run: Run | None = None
        """The last item, if the next single record may join it."""
        self.size = 0
        self.done = False
        self.pump = pump
        self._error: Callable[[], Exception] | None = None
        # A lock for each thread that waits: a condition would let all of them contend for one when they wake.
        self._waiters: list[threading.Lock] = []
        self._futures: dict[asyncio.AbstractEventLoop, Awaited] = {}

    def settle(self, error: Callable[[], Exception] | None = None) -> None:
        """Tell everyone who waits that it is durable, or why it is not."""
        self._error = error
        self.items, self.run = [], None
        self.done = True  # before the waiters are gone through: who comes later sees it
        for waiter in self._waiters:
            waiter.release()
        for loop, waiting in list(self._futures.items()):
            with contextlib.suppress(RuntimeError):  # nobody awaits in a loop that was closed
                loop.call_soon_threadsafe(_wake, waiting, error)

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is durable, or raise why it is not; ``TimeoutError`` if neither yet."""
        if not self.done:
            if self.pump is not None:
                self.pump()
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if not self.done:  # or who settles it may not have seen this waiter
                self._block(waiter, timeout)
        if self._error is not None:
            raise self._error()

    def _block(self, waiter: threading.Lock, timeout: float | None) -> None:
        if not waiter.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimeoutError("The append is not durable yet; ask its handle again.")

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
        if self.pump is not None:
            self.pump()
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

    def __init__(self, group: Group, first: int | None, count: int) -> None:
        """``count`` records from ``first`` on, in this group."""
        self.group = group
        self.first = first
        self.count = count

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.group.done

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until the records are durable, or raise why they are not."""
        self.group.wait(timeout)
        return Receipt(self.first, self.count)

    def __await__(self) -> Generator[object, None, Receipt]:
        return self.group.awaited(Receipt(self.first, self.count))


def settled_group() -> Group:
    """A group that became durable before."""
    group = Group()
    group.done = True
    return group
