"""Groups: all appends that share one sync, and so one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from strandline.formats.block import Parts
from strandline.log.contract import Receipt
from strandline.model.head import WriterId

RUN_BYTES: Final = 4 << 20
RUN_RECORDS: Final = 1 << 16
"""Records that were appended one by one share a frame, up to so many bytes and records."""


@dataclass(slots=True)
class Run:
    """Values that were appended one by one, each a record of its own; together they are one frame."""

    first: int
    term: int
    values: list[bytes] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    """Microseconds."""
    size: int = 0


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
        self._futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def settle(self, error: Callable[[], Exception] | None = None) -> None:
        """Tell everyone who waits that it is durable, or why it is not."""
        self._error = error
        self.items, self.run = [], None
        self.done = True  # before the waiters are gone through: who comes later sees it
        for waiter in self._waiters:
            waiter.release()
        for loop, futures in list(self._futures.items()):
            with contextlib.suppress(RuntimeError):  # nobody awaits in a loop that was closed
                loop.call_soon_threadsafe(_wake, futures)

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

    def future(self) -> asyncio.Future[None] | None:
        """What to await until it is durable or has failed, in the running loop; None if that is known.

        Each caller has one of its own: giving up on it does not disturb who else awaits the group.
        """
        if self.pump is not None and not self.done:
            self.pump()
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._futures.setdefault(loop, []).append(future)
        return None if self.done else future


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


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
        if not self.group.done and (future := self.group.future()) is not None:
            yield from future
        self.group.check()
        return Receipt(self.first, self.count)


def settled_group() -> Group:
    """A group that became durable before."""
    group = Group()
    group.done = True
    return group
