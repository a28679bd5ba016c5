"""Append handles: records of one batch share one outcome; a handle is an index into it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from strandline.model.arguments import TIMEOUT
from strandline.model.head import Receipt
from strandline.storage.fork_check import Origin, call_in_child


class BatchOutcome(Future[Receipt]):
    """The shared outcome of some records.

    It cannot be cancelled: many callers wait for it. In a forked child, where no thread would ever settle it, an
    unknown outcome raises ``UsedAcrossFork``.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._origin = Origin("The producer of these records", advice="only the parent learns their outcome")
        call_in_child(self, BatchOutcome._after_fork)
        if error is not None:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until it is known, or raise why nothing was appended."""
        if timeout is not None:
            TIMEOUT.check(timeout, "timeout")
        return super().result(timeout)

    def _after_fork(self) -> None:
        # Another thread may have held the lock, and the callbacks belong to the parent.
        self._condition = threading.Condition()
        self._done_callbacks: list[Callable[[Future[Receipt]], object]] = []
        self._waiters = []
        if not self.done():
            self.set_exception(self._origin.refusal())


class Page:
    """Rows that are put in one batch together; open until that happens.

    Pages form a chain: a handle keeps the page that was open before its row was queued, and finds its own from there.
    Pages without a handle are garbage-collected.
    """

    __slots__ = ("_base", "_following", "_places", "_starts", "outcome", "place_queued")

    def __init__(self, place_queued: Callable[[], None]) -> None:
        """Not closed yet; ``place_queued`` puts every queued row in a batch."""
        self.place_queued = place_queued
        self._following: Page | None = None

    def close(self, tickets: Sequence[int], outcome: BatchOutcome, base: int = 0, starts: Sequence[int] = ()) -> Page:
        """Rows with these tickets, in this order, are records of this outcome, counted from ``base``; returns the next.

        ``starts`` has the first record of each row, counted from that of the page, if rows are not one record each.
        """
        self.outcome = outcome
        self._places = tickets if isinstance(tickets, range) else dict(zip(tickets, count(), strict=False))
        self._base, self._starts = base, starts
        self._following = Page(self.place_queued)  # last: a thread that sees it sees the rest
        return self._following

    def found(self, ticket: int) -> Page | None:
        """The page with a ticket, from this one on; None if its row is still queued."""
        page = self
        while (following := page._following) is not None:
            if ticket in page._places:
                return page
            page = following
        return None

    def placed(self, ticket: int) -> tuple[BatchOutcome, int]:
        """The outcome of a ticket, and the index of its first record in the batch; puts it in one if needed."""
        while (page := self.found(ticket)) is None:
            self.place_queued()
        return page.outcome, page.index(ticket)

    def index(self, ticket: int) -> int:
        """The index of a ticket of this page within the batch."""
        place = self._places.index(ticket) if isinstance(self._places, range) else self._places[ticket]
        return self._base + (self._starts[place] if self._starts else place)


class RecordHandle(tuple[Any, ...]):
    """The handle of records: a page from which to search theirs, the ticket of their row, and their number if not one.

    A tuple, because one is created for every record, and nothing is faster.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'done' if self.done() else 'not done'}>"

    def _place(self) -> tuple[BatchOutcome, int, int]:
        """The outcome of their batch, the index of their first record in it, and their number."""
        return *self[0].placed(self[1]), self[2] if len(self) > 2 else 1  # noqa: PLR2004 - see above

    def done(self) -> bool:
        """Whether the outcome is known."""
        found: Page | None = self[0].found(self[1])
        return found is not None and found.outcome.done()

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until the records are durable and listed, or raise why they are not."""
        outcome, index, count = self._place()
        return outcome.result(timeout).part(index, count)

    def __await__(self) -> Generator[object, None, Receipt]:
        outcome, index, count = self._place()
        whole = yield from asyncio.wrap_future(outcome).__await__()
        return whole.part(index, count)


class ProduceHandle(RecordHandle):
    """The handle of a ``produce`` call, with its ingestion time."""

    __slots__ = ()

    @property
    def ingested(self) -> int:
        """The call's ingestion time in microseconds, as in its metadata."""
        return int(self[3]) // 1000
