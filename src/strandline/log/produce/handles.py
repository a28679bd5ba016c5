"""Append handles: records of one batch share one outcome; a handle is an index into it."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import ClassVar

from strandline.log.contract import Receipt
from strandline.model.arguments import TIMEOUT
from strandline.storage.fork_check import Origin, call_in_child


class BatchOutcome(Future[Receipt]):
    """The shared outcome of some records.

    It cannot be cancelled: many callers wait for it. In a forked child, where no thread would ever settle it, an
    unknown outcome raises ``UsedAcrossFork``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._origin = Origin("The producer of these records", advice="only the parent learns their outcome")
        call_in_child(self, BatchOutcome._after_fork)

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


class _Placed(ABC):
    """The handle of records whose position in a batch is known, or found on request."""

    __slots__ = ()

    @abstractmethod
    def _place(self) -> tuple[BatchOutcome, int, int]:
        """The outcome of their batch, the index of their first record in it, and their number."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the outcome is known."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'done' if self.done() else 'not done'}>"

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until the records are durable and listed, or raise why they are not."""
        outcome, index, count = self._place()
        return outcome.result(timeout).part(index, count)

    def __await__(self) -> Generator[object, None, Receipt]:
        outcome, index, count = self._place()
        whole = yield from asyncio.wrap_future(outcome).__await__()
        return whole.part(index, count)


class BatchHandle(_Placed, tuple[BatchOutcome, int, int]):
    """The handle of an append of many records: the batch's outcome, their first index, and their number."""

    __slots__ = ()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self[0].done()

    def _place(self) -> tuple[BatchOutcome, int, int]:
        return self


class TicketRange:
    """Consecutive tickets that were put in one batch together; open until that happens.

    A ticket is that of one record or, if it is among ``calls``, of all entries of a call.

    Ranges form a chain: a handle keeps the range that was open before it took its ticket, and finds its own from there.
    Ranges without a handle are garbage-collected.
    """

    __slots__ = ("base", "calls", "end", "following", "holes", "outcome", "place", "start", "widened")

    def __init__(self, place: Callable[[], None], start: int) -> None:
        """Begin with ticket ``start``; ``place`` puts every queued record in a batch."""
        self.place = place
        self.start = start
        self.end: int | None = None
        self.outcome: BatchOutcome | None = None
        self.base = 0
        self.holes: list[int] = []
        self.calls: list[int] = []
        self.widened: list[int] = []
        self.following: TicketRange | None = None

    def close(self, end: int, outcome: BatchOutcome, base: int, holes: list[int], following: TicketRange) -> None:
        """Tickets below ``end``, except ``holes``, are records of this outcome, counted from ``base``."""
        self.outcome = outcome
        self.base = base
        self.holes = holes
        self.following = following
        self.end = end  # last: a thread that sees it sees the rest

    def widen(self, calls: list[int], widened: list[int]) -> None:
        """Set which tickets are calls, and the cumulative number of extra records; before closing."""
        self.calls = calls
        self.widened = widened

    def index(self, ticket: int) -> int:
        """The index of a ticket's first record within the batch."""
        index = self.base + ticket - self.start - bisect_left(self.holes, ticket)
        before = bisect_left(self.calls, ticket)
        return index + self.widened[before - 1] if before else index

    def found(self, ticket: int) -> TicketRange | None:
        """The range of the ticket, from this one on; None if it is still open."""
        ticket_range: TicketRange | None = self
        while ticket_range is not None and ticket_range.end is not None and ticket >= ticket_range.end:
            ticket_range = ticket_range.following
        return None if ticket_range is None or ticket_range.end is None else ticket_range

    def placed(self, ticket: int) -> tuple[BatchOutcome, int]:
        """The outcome of a ticket, and the index of its first record; puts it in a batch if needed."""
        while (ticket_range := self.found(ticket)) is None or ticket_range.outcome is None:
            self.place()
        return ticket_range.outcome, ticket_range.index(ticket)

    def done(self, ticket: int) -> bool:
        """Whether the outcome of a ticket is known."""
        ticket_range = self.found(ticket)
        return ticket_range is not None and ticket_range.outcome is not None and ticket_range.outcome.done()


class RecordHandle(_Placed, tuple[TicketRange, int]):
    """The handle of one record: a range of tickets from which to search its batch, and its ticket.

    A tuple, because one is created for every record, and nothing is faster.
    """

    __slots__ = ()

    def done(self) -> bool:
        """Whether the outcome is known."""
        ticket_range, ticket = self
        return ticket_range.done(ticket)

    def _place(self) -> tuple[BatchOutcome, int, int]:
        ticket_range, ticket = self
        return *ticket_range.placed(ticket), 1


class ProduceHandle(_Placed, tuple[TicketRange, int, int, int]):
    """The handle of a ``produce`` call: like that of a record, with its number of entries and ingestion time."""

    __slots__ = ()

    @property
    def ingested(self) -> int:
        """The call's ingestion time in microseconds, as in its metadata."""
        nanoseconds = self[3]
        return nanoseconds // 1000 if nanoseconds >= 0 else -(-nanoseconds // 1000)  # rounds as Arrow does

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self[0].done(self[1])

    def _place(self) -> tuple[BatchOutcome, int, int]:
        ticket_range, ticket, count, _ = self
        return *ticket_range.placed(ticket), count


def placed_range(outcome: BatchOutcome, base: int) -> TicketRange:
    """A range whose one ticket, 0, begins at this record of the batch with this outcome."""
    ticket_range = TicketRange(_place_nothing, 0)
    ticket_range.close(1, outcome, base, [], TicketRange(_place_nothing, 1))
    return ticket_range


def _place_nothing() -> None:
    """Nothing is queued."""


class RepeatedHandle(BatchHandle):
    """The handle of an append whose number the log has recognised: it adds nothing."""

    __slots__ = ()

    repeated: ClassVar = True


def settled(receipt: Receipt, *, repeated: bool = False) -> BatchHandle:
    """A handle whose outcome is known already."""
    outcome = BatchOutcome()
    outcome.set_result(receipt)
    return (RepeatedHandle if repeated else BatchHandle)((outcome, 0, receipt.count))
