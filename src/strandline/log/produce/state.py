"""The state of a producer: its queue, the batch being filled, and the closed batches that are not listed yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import accumulate, chain, count, takewhile
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import BufferFull, ExpectationFailed, ProducerClosed, ProducerFailed
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

_WAIT: Final = 0.001
_MOST_WAITS: Final = 100
"""Seconds of one look at whether the encoding is over, and how often appenders look."""

_ALL_TICKETS: Final = range(1 << 62)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failed batch that blocks all later ones. ``final``: its records are in no batch, and a retry cannot help."""

    reason: BaseException
    writer: UUID
    number: int
    final: bool

    def held_back(self) -> ProducerFailed:
        """The error for everything after the failed batch."""
        advice = "open a new producer" if self.final else "call retry(), or close it and open a new producer"
        error = ProducerFailed(
            f"Batch {self.number} of writer {self.writer} failed ({self.reason}), and no later one may be listed "
            f"before it: {advice}."
        )
        error.writer, error.number, error.__cause__ = self.writer, self.number, self.reason
        return error

    def annotate(self) -> None:
        """Add a note with the batch to the reason, which the handles of the failed batch raise."""
        note = f"Batch {self.number} of writer {self.writer} was not listed for this reason."
        if note not in getattr(self.reason, "__notes__", ()):
            self.reason.add_note(note)


class Intake(Enum):
    """Whether queued rows are put in batches."""

    OPEN = auto()
    ENDING = auto()
    """For the last time: rows that were queued without seeing this are among them."""
    ENDED = auto()
    """Not any more: whoever queued a row takes it back."""


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
        self._intake = Intake.OPEN
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
        while (refusal := self.refusal()) is None and self.halted:
            if not self._limits.block:
                raise BufferFull(
                    f"{self.buffered:,} bytes wait to be listed, over the budget of {self._limits.budget:,}; nothing "
                    "was appended. Try again, or let the producer block."
                )
            self.room.wait()
        if refusal is not None:
            raise refusal

    def refusal(self) -> ProducerFailed | ProducerClosed | None:
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
        """Put a page's worth in a batch. One thread at a time encodes; those far ahead wait for it, but not for ever:
        this may be the handler of a signal, within a call of this thread that has the lock.
        """
        waits = _MOST_WAITS
        while waits and self.lock.locked() and self._encoder != threading.get_ident() and self._is_far_ahead():
            CLOCK.sleep(_WAIT)
            waits -= 1
        if self.lock.locked():
            self.fill_at = len(self.rows) + self._page_rows  # not each append needs to try it again
            self.wake.set()
        else:
            with self.lock:  # no acquire() before a try: a signal's exception in between would leave it locked
                self.drain()

    def _is_far_ahead(self) -> bool:
        return len(self.rows) >= _LAG * self._page_rows or self.queued >= _LAG * PAGE_BYTES

    def take_back(self, row: Row | Call) -> None:
        """Take back a row that was queued too late, and raise; if it is in a batch already, just return."""
        self._origin.check()
        with self.lock:
            refusal = self.refusal()
            place = None if refusal is None else next((at for at, one in enumerate(self.rows) if one is row), None)
            if refusal is not None and place is not None:
                del self.rows[place]
                raise refusal

    def place_queued(self) -> None:
        """Put every queued row in a batch, so that each has an outcome to wait for."""
        with self.lock:
            self.drain()

    def place_whole(
        self, batches: list[pa.RecordBatch], ranges: MetadataRanges | None = None, expect: int | None = None
    ) -> tuple[BatchOutcome, int]:
        """Put record batches in one batch; returns its outcome, and the index of their first record in it."""
        self._origin.check()
        with self.lock:
            self._wait_for_room()
            self.drain()
            batch, first = self._add(batches, ranges, self._limits.batch_bytes if expect is None else -1)
            if expect is None:
                self._seal_if_full(batch)
            else:
                batch.expect = expect
                self.seal()
        return batch.outcome, first

    # --- from the queue into batches ---------------------------------------------------------------------------

    def drain(self) -> None:
        """Put all rows that are queued now in batches."""
        began = self._clock.monotonic()
        if self._intake is not Intake.ENDED:
            self.queued, self._encoder = 0, threading.get_ident()
            left = len(self.rows)
            while left > 0:
                left -= self._place_rows(min(left, self._page_rows))
            self.fill_at, self._encoder = self._page_rows, None
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
                batch, first = self._add([page], piece.ranges, self.shipper.most_bytes)
                record = batch.draft.plain // batch.draft.count
                self._page_rows = fitting_page(record * page.num_rows // count, self._limits.batch_bytes)
                self._seal_if_full(batch)
                starts = [0, *accumulate(piece.widths)] if count < page.num_rows else ()
                self.page = self.page.close(tickets[:count], batch.outcome, first, starts)
                tickets = tickets[count:]
        except BaseException as error:
            # Out of memory, for example: these records are in no batch, so later ones may not be either.
            outcome = BatchOutcome()
            outcome.set_exception(error)
            self.page = self.page.close(tickets, outcome)
            self.fail(error)
            raise
        return number

    def _add(self, batches: list[pa.RecordBatch], ranges: MetadataRanges | None, most: int) -> tuple[Batch, int]:
        """Add to the open batch, or to a new one if it would have more than ``most`` bytes."""
        if self._open is not None and self._open.draft.plain + sum(batch.nbytes for batch in batches) > most:
            self.seal()
        batch = Batch(self.shipper.new_draft()) if self._open is None else self._open
        before = batch.draft.size
        try:
            first = batch.draft.add(batches)
            if ranges:
                batch.draft.attach(ranges.shifted(first))
        except Exception:
            raise
        except BaseException as error:  # a signal's: the draft may have some of them, and count them wrong
            self.fail(error)
            raise
        self._open = batch  # only now: an empty batch is never passed on
        if self.first_at is None:
            self.note_first()
        self._account(batch.draft.size - before)
        return batch, first

    def _account(self, size: int) -> None:
        """Add to the bytes held; negative to subtract."""
        self.buffered += size
        self.halted = self._intake is not Intake.OPEN or self.buffered >= self._limits.budget
        if self.halted:
            self.wake.set()  # no linger while appenders wait for room
        else:
            self.room.notify_all()

    def _seal_if_full(self, batch: Batch) -> None:
        if batch.draft.plain >= self._limits.batch_bytes or batch.draft.attached >= MAX_METADATA:
            self.seal()

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
        if self._intake is Intake.ENDED:
            self.first_at = None  # that record is being taken back
        elif self.first_at is not None and (self.halted or self.until_due() == 0.0):
            self.drain()
            self.seal()
        elif len(self.rows) >= self._page_rows or self.queued >= PAGE_BYTES:
            self.drain()  # its appender found the lock taken

    def end_intake(self) -> None:
        """Put everything in batches, close the last one, and accept nothing more."""
        self.halted = True
        while self.rows and self._intake is not Intake.ENDED:
            self._intake = Intake.ENDING
            try:
                self.drain()
            except BaseException:  # noqa: BLE001, S112 - the handles raise it, and each round removes some rows
                continue
            break
        self.seal()
        self._intake = Intake.ENDED
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
                self.hold_back(self.failure)
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
                self.hold_back(self.failed(failure, final=False))
            self._send()

    def _taken(self) -> Batch:
        batch = self.sent.popleft()
        self._account(-batch.size)
        return batch

    def fail(self, reason: BaseException) -> None:
        """Accept nothing more for good. The listing thread fails the handles: it may be listing a batch just now."""
        self._intake, self.halted = Intake.ENDING, True
        self.failure = self.failed(reason, final=True)
        self.room.notify_all()
        self.ready.set()

    def failed(self, reason: BaseException, *, final: bool) -> Failure:
        """The failure of the oldest batch that is not listed."""
        return Failure(reason, self._writer, self.sent[0].number if self.sent else self._number, final)

    def hold_back(self, failure: Failure) -> None:
        """Fail everything that is not listed, and keep it unless a retry is useless."""
        if self.failure is None or not self.failure.final:
            self.failure = failure  # first: nothing more is sent
        self.end_intake()
        failure.annotate()
        first = None if failure.final else failure.reason
        for outcome in self.outcomes():
            if not outcome.done():
                outcome.set_exception(first or failure.held_back())
            first = None
        if self.failure.final or self.closed is not None:
            self._forget()

    def abandon(self, reason: str) -> None:
        """Fail everything that is not listed, and accept nothing more: the producer was dropped."""
        with self.lock:
            self.failure = self.failure or self.failed(ProducerClosed(reason), final=True)
            self.end_intake()
            self.closed = reason
            for outcome in self.outcomes():
                if not outcome.done():
                    outcome.set_exception(ProducerClosed(reason))
            self._forget()
        self.wake.set()

    def outcomes(self) -> list[BatchOutcome]:
        """The outcomes of all closed batches, in order."""
        return [batch.outcome for batch in chain(self.sent, self._waiting)]

    def _forget(self) -> None:
        for batch in self.sent:
            batch.discard()
        self.sent.clear()
        self._waiting.clear()
        self._account(-self.buffered)

    def resend(self) -> list[BatchOutcome]:
        """Continue after a failure: send the kept batches again, under the same numbers; returns their new outcomes.

        Uploaded batches are not uploaded again: if their listing landed, it is recognised.
        """
        self.failure, self._intake = None, Intake.OPEN
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
        lost = BatchOutcome()
        lost.set_exception(self._origin.refusal())
        self.page.close(_ALL_TICKETS, lost)
