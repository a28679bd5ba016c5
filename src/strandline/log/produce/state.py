"""The state of a producer: its queue, the batch being filled, and the closed batches that are not listed yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, takewhile
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import BufferFull, ExpectationFailed, ProducerClosed, ProducerFailed, Sealed
from strandline.log.produce.handles import BatchOutcome, Page
from strandline.log.produce.rows import (
    FIRST_PAGE,
    PAGE_BYTES,
    Call,
    Room,
    Row,
    cut_rows,
    fitting_page,
    page_of,
    tickets_of,
)
from strandline.log.produce.shipper import MAX_METADATA, Limits, Shipper
from strandline.log.produce.uploads import Batch, Uploads
from strandline.model.head import MetadataRanges, Receipt
from strandline.storage.clock import CLOCK
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, call_in_child
from strandline.storage.metrics import count_written
from strandline.storage.worker_thread import ReentrantEvent

_LAG: Final = 4
"""Number of pages that may queue up during an encoding before appenders wait for it."""

_ALL_TICKETS: Final = range(1 << 62)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failed batch that blocks all later ones. ``final``: its records are in no batch, and a retry cannot help."""

    reason: BaseException
    writer: UUID
    number: int
    final: bool

    def held_back(self) -> ProducerFailed | ProducerClosed | Sealed:
        """The error for everything after the failed batch, or in a producer that was dropped, or of a sealed log."""
        if isinstance(self.reason, ProducerClosed | Sealed):
            return self.reason
        advice = "open a new producer" if self.final else "call retry(), or close it and open a new producer"
        error = ProducerFailed(
            f"Batch {self.number} of writer {self.writer} failed ({self.reason}), and no later one may be listed "
            f"before it: {advice}."
        )
        error.writer, error.number, error.__cause__ = self.writer, self.number, self.reason
        return error


class State:
    """Where the records of one producer are: queued, in the open batch, or in closed batches. It never waits for I/O.

    All of it belongs to ``lock`` but the queue. ``Producer.append`` adds a row to the list ``rows``, which is atomic,
    also in the handler of a signal that came within another append. It looks at ``halted`` before and after that, and
    at ``first_at`` after it. Whoever changes one of them looks at the queue after that: so one of the two sees the
    other.

    Closed batches wait for a number, are uploaded side by side, and are listed strictly in order. One that expects an
    end of the log is sent alone: those after it have no number yet, because theirs depends on its outcome.
    """

    def __init__(
        self, shipper: Shipper[Any, Any], limits: Limits, *, writer: UUID, number: int, env: Env, origin: Origin
    ) -> None:
        self.shipper = shipper
        self.now_ns: Callable[[], int] = env.clock.now_ns
        self.next_ticket: Callable[[], int] = count().__next__
        self.rows: list[Row | Call] = []
        self.queue_row = self.rows.append
        self.page = Page(self.place_queued)
        self.fill_at = FIRST_PAGE  # number of queued rows at which to fill a page
        self.queued = 0  # bytes of queued calls, approximate under contention: decides when to fill a page
        self.first_at: float | None = None  # arrival of the first record that is in no closed batch
        self.halted = False  # no room, failed or closed

        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.buffered = 0
        self.failure: Failure | None = None
        self.closed: str | None = None
        self._page_rows = FIRST_PAGE
        self._ended = False  # no row is put in a batch any more: whoever queues one takes it back
        self._drained_at = 0.0
        self._encoder: int | None = None  # the thread that puts rows in batches
        self._open: Batch | None = None
        self._waiting: deque[Batch] = deque()
        self.sent: deque[Batch] = deque()
        self._number = number

        self.wake = ReentrantEvent()  # the batch may have to be closed
        self.ready = ReentrantEvent()  # batches may have to be listed
        self.uploads = Uploads(shipper, limits.uploads, self.ready.set)
        self._limits = replace(limits, batch_bytes=min(limits.batch_bytes, shipper.most_bytes))
        self._writer = writer
        self._clock = env.clock
        self._origin = origin
        call_in_child(self, State._after_fork)

    # --- for appends -------------------------------------------------------------------------------------------

    def wait_for_room(self) -> None:
        """Block while the budget is exceeded; raises ``BufferFull``, or the reason why nothing is accepted any more."""
        self._origin.check()
        with self.lock:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        while self.halted:
            if (refusal := self.refusal()) is not None:
                raise refusal
            if not self._limits.block:
                raise BufferFull(
                    f"{self.buffered:,} bytes wait to be listed, over the budget of {self._limits.budget:,}; nothing "
                    "was appended. Try again, or let the producer block."
                )
            self.room.wait()

    def refusal(self) -> ProducerFailed | ProducerClosed | Sealed | None:
        """Why nothing is accepted any more, or None."""
        if self.closed is not None:
            return ProducerClosed(self.closed)
        return None if self.failure is None else self.failure.held_back()

    def note_first(self) -> None:
        """Record the arrival of a batch's first record, and wake the thread that closes batches in time."""
        if self.first_at is None:
            self.first_at = self._clock.monotonic()
        self.wake.set()

    def fill_page(self) -> None:
        """Put a page's worth in a batch. One thread at a time encodes; others wait for it only if they are far ahead.

        A handler of a signal never waits for a lock that its own thread has.
        """
        is_far_ahead = len(self.rows) >= _LAG * self._page_rows or self.queued >= _LAG * PAGE_BYTES
        if self.lock.locked() and not (is_far_ahead and self._encoder not in (None, threading.get_ident())):
            self.fill_at = len(self.rows) + self._page_rows  # not each append needs to try it again
            self.wake.set()
        else:
            self.place_queued()

    def take_back(self, row: Row | Call) -> None:
        """Take back a row that was queued too late, and raise; if it is in a batch already, just return."""
        self._origin.check()
        with self.lock:
            refusal = self.refusal()
            if refusal is not None and row in self.rows:  # its ticket is no other's
                self.rows.remove(row)
                raise refusal

    def place_queued(self) -> None:
        """Put every queued row in a batch, so that each has an outcome to wait for."""
        with self.lock:  # no acquire() before a try: a signal's exception in between would leave it locked
            self.drain()

    def place_whole(
        self, batches: list[pa.RecordBatch], ranges: MetadataRanges | None = None, expect: int | None = None
    ) -> tuple[Page, int]:
        """Put record batches in one batch; returns a page of their own, which keeps no other, and their ticket."""
        self._origin.check()
        with self.lock:
            self._wait_for_room()
            self.drain()
            page = Page(self.place_queued)
            page.close(range(1), *self._add(batches, ranges, self._limits.batch_bytes, expect))
        return page, 0

    # --- from the queue into batches ---------------------------------------------------------------------------

    def drain(self) -> None:
        """Put all rows that are queued now in batches."""
        began = self._clock.monotonic()
        if not self._ended:
            self.queued, left = 0, len(self.rows)
            try:
                self._encoder = threading.get_ident()
                while left > 0:
                    left -= self._place_rows(min(left, self._page_rows))
                self.fill_at = self._page_rows
            finally:
                self._encoder = None
        self._drained_at = began

    def _place_rows(self, number: int) -> int:
        tickets: Sequence[int] = _ALL_TICKETS
        try:
            rows = self.rows[:number]
            del self.rows[:number]
            tickets = tickets_of(rows)
            room = most = Room(MAX_METADATA, self._limits.batch_bytes)
            if self._open is not None:
                draft = self._open.draft
                room = Room(most.metadata - draft.attached, most.space - draft.plain)
            for piece in cut_rows(rows, room, most, self.shipper.tick):
                if piece.apart:
                    self.seal()
                page, count = page_of(piece), len(piece.rows)
                self._page_rows = fitting_page(page.nbytes // count, self._limits.batch_bytes)
                outcome, first = self._add([page], piece.ranges, self.shipper.most_bytes)
                starts = [0, *accumulate(piece.widths)] if count < page.num_rows else ()
                self.page = self.page.close(tickets[:count], outcome, first, starts)
                tickets = tickets[count:]
        except BaseException as error:
            # Out of memory, for example: these records are in no batch, so later ones may not be either.
            self.page = self.page.close(tickets, BatchOutcome(error))
            self.fail(error)
            raise
        return number

    def _add(
        self, batches: list[pa.RecordBatch], ranges: MetadataRanges | None, most: int, expect: int | None = None
    ) -> tuple[BatchOutcome, int]:
        """Add to the open batch, or to a new one if it would have more than ``most`` bytes; close it if it is full.

        What expects an end of the log gets a batch of its own.
        """
        is_more = self._open is not None and self._open.draft.plain + sum(batch.nbytes for batch in batches) > most
        if is_more or expect is not None:
            self.seal()
        batch = Batch(self.shipper.new_draft()) if self._open is None else self._open
        before = batch.draft.size
        try:
            first = batch.draft.add(batches)
            if ranges:
                batch.draft.attach(ranges.shifted(first))
        except BaseException as error:
            if not isinstance(error, Exception):  # a signal's: the draft may have some of them, and count them wrong
                self.fail(error)
            raise
        self._open = batch  # only now: an empty batch is never passed on
        if self.first_at is None:
            self.note_first()
        self._account(batch.draft.size - before)
        draft, batch.expect = batch.draft, expect
        if expect is not None or draft.plain >= self._limits.batch_bytes or draft.attached >= MAX_METADATA:
            self.seal()
        return batch.outcome, first

    def _account(self, size: int) -> None:
        """Add to the bytes held; negative to subtract."""
        self.buffered += size
        self.halted = self.refusal() is not None or self.buffered >= self._limits.budget
        if self.halted:
            self.wake.set()  # no linger while appenders wait for room
        else:
            self.room.notify_all()

    def seal(self) -> None:
        """Close the open batch, if there is one."""
        batch, self._open = self._open, None
        first, self.first_at = self.first_at, None
        if self.rows:
            # Their appenders may have found that the first one was noted. The records arrived after the last drain
            # and after the first record of this batch.
            self.first_at = self._clock.monotonic() if first is None else max(first, self._drained_at)
            self.wake.set()
        if batch is not None:
            batch.size = batch.draft.size
            self._waiting.append(batch)
            self._send()

    def until_due(self) -> float | None:
        """Seconds until the open batch must be closed; None if there is none. Needs no lock."""
        first = self.first_at
        return None if first is None else max(0.0, first + self._limits.linger - self._clock.monotonic())

    def seal_if_due(self) -> None:
        """Close the batch if its linger time is over, or if appenders wait for room."""
        if self._ended:
            self.first_at = None  # that record is being taken back
        elif self.first_at is not None and (self.halted or self.until_due() == 0.0):
            self.drain()
            self.seal()
        elif len(self.rows) >= self._page_rows or self.queued >= PAGE_BYTES:
            self.drain()  # its appender found the lock taken

    def end_intake(self) -> None:
        """Put everything in batches, close the last one, and accept nothing more."""
        self.halted = True
        while self.rows and not self._ended:
            with suppress(BaseException):  # the handles raise it, and each round removes some rows
                self.drain()
                break
        self.seal()
        self._ended = True
        self.room.notify_all()

    # --- from batches into the log -----------------------------------------------------------------------------

    def _send(self) -> None:
        """Number and upload waiting batches. Under the lock."""
        while self._waiting and self.failure is None:
            is_alone = self._waiting[0].expect is not None or (bool(self.sent) and self.sent[-1].expect is not None)
            if is_alone and self.sent:
                return
            batch = self._waiting.popleft()
            batch.number = self._number
            self._number += 1
            self.sent.append(batch)
            self.uploads.put(batch)

    def uploaded(self) -> list[Batch]:
        """The oldest batches whose uploads have ended, successfully or not. Takes the lock itself."""
        with self.lock:
            if self.failure is not None:
                self._hold_back(self.failure)
                return []
            return list(takewhile(lambda batch: batch.is_done, self.sent))

    def settle(self, receipts: list[Receipt], failure: BaseException | None) -> None:
        """The oldest batches are listed, and the next one failed for this reason, if any. Takes the lock itself."""
        with self.lock:
            for receipt in receipts:
                batch = self._taken()
                count_written(receipt.count, batch.size, CLOCK.monotonic() - batch.began)
                batch.outcome.set_result(receipt)
            if isinstance(failure, ExpectationFailed) and self.sent[0].expect is not None:
                refused = self._taken()
                self._number = refused.number  # it is free again
                refused.outcome.set_exception(failure)
            elif failure is not None:
                failed = self.fail(failure, final=isinstance(failure, Sealed))
                self.sent[0].outcome.set_exception(failure)
                self._hold_back(failed)
            self._send()

    def _taken(self) -> Batch:
        batch = self.sent.popleft()
        self._account(-batch.size)
        return batch

    def fail(self, reason: BaseException, *, final: bool = True) -> Failure:
        """Accept nothing more, since the oldest batch that is not listed failed. An earlier failure for good stays.

        The listing thread fails the handles: it may be listing a batch just now. The reason gets a note.
        """
        self.halted, failure = True, self.failure
        if failure is None or not failure.final:
            number = self.sent[0].number if self.sent else self._number
            failure = self.failure = Failure(reason, self._writer, number, final)
            note = f"Batch {number} of writer {self._writer} was not listed for this reason."
            if note not in getattr(reason, "__notes__", ()):
                reason.add_note(note)
        self.room.notify_all()
        self.ready.set()
        return failure

    def _hold_back(self, failure: Failure) -> None:
        """Fail everything that is not listed, and keep it unless a retry is useless."""
        self.end_intake()
        for outcome in self.outcomes():
            if not outcome.done():
                outcome.set_exception(failure.held_back())
        if failure.final or self.closed is not None:
            for batch in self.sent:
                batch.error = batch.error or CancelledError()  # it is not uploaded, unless that has begun
            self.sent.clear()
            self._waiting.clear()
            self._account(-self.buffered)

    def abandon(self, reason: str) -> None:
        """Accept nothing more, and let the listing thread fail everything that is not listed. Takes the lock itself."""
        with self.lock:
            self.closed = reason
            self.fail(ProducerClosed(reason))
        self.wake.set()

    def is_finished(self) -> bool:
        """Whether the producer is closed, and everything is settled. Takes the lock itself."""
        with self.lock:
            return self.closed is not None and self._ended and not self.outcomes()

    def outcomes(self) -> list[BatchOutcome]:
        """The outcomes of all closed batches, in order."""
        return [batch.outcome for batch in chain(self.sent, self._waiting)]

    def resend(self) -> list[BatchOutcome]:
        """Continue after a failure: send the kept batches again, under the same numbers; returns their new outcomes.

        Uploaded batches are not uploaded again: if their listing landed, it is recognised.
        """
        self.failure, self._ended = None, False
        for batch in chain(self.sent, self._waiting):
            batch.outcome = BatchOutcome()
        outcomes = self.outcomes()
        for batch in self.sent:
            if batch.error is not None:
                batch.error = None
                self.uploads.put(batch)
        self._send()
        self._account(0)
        self.seal()  # no batch is open, but a record may be queued, and must be noted
        self.ready.set()
        return outcomes

    def _after_fork(self) -> None:
        """In a forked child, which has the queue but no threads: accept nothing, and fail the handles."""
        self.halted = True
        self.page.close(_ALL_TICKETS, BatchOutcome(self._origin.refusal()))
