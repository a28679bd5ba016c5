"""Producer buffer: queued rows and the batch being filled; applies back-pressure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, cast
from uuid import UUID

import pyarrow as pa

from strandline.errors import BufferFull, ProducerClosed, ProducerFailed, UsedAcrossFork
from strandline.log.produce.handles import BatchOutcome, TicketRange
from strandline.log.produce.limits import Limits
from strandline.log.produce.outbox import Outbox, ReentrantEvent
from strandline.log.produce.rows import (
    FIRST_PAGE,
    PAGE_BYTES,
    Call,
    Room,
    Row,
    RowQueue,
    cut_calls,
    fitting_page,
    has_calls,
    page_of,
    page_of_calls,
)
from strandline.log.produce.shipper import MAX_METADATA, Draft, Shipper
from strandline.model.head import MetadataRange, MetadataRanges
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, call_in_child

_LAG: Final = 4
"""Number of pages that may queue up during an encoding before appenders wait for it."""

_NEVER: Final = 1 << 62
"""A ticket for no record."""

CLOSED: Final = "The producer is closed; nothing was appended. Open a new one."


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


class _OpenBatch:
    """The batch being filled."""

    __slots__ = ("draft", "outcome")

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.outcome = BatchOutcome()


class Buffer:
    """Queues records and fills batches, in the order of the calls, across threads.

    Queueing a record needs no lock: ``Producer.append`` does it with the public attributes. Everything else is done
    under ``lock``.

    ``refusing`` is set before the last drain. A record that was queued without seeing it is in that drain; a thread
    that sees it takes its record back (:meth:`take_back`).
    """

    def __init__(self, shipper: Shipper[Any, Any], outbox: Outbox, limits: Limits, *, writer: UUID, env: Env) -> None:
        self.opaque = shipper.opaque
        self.most_metadata = shipper.most_metadata
        self.most_record_bytes = shipper.most_record_bytes
        self._most_bytes = shipper.most_bytes
        self._tick = shipper.tick
        self.now_ns: Callable[[], int] = env.clock.now_ns
        self.full = False
        self.refusing = False
        self.unnoticed = True  # the first record was not noticed yet
        self.page_mask = FIRST_PAGE - 1
        self.queued = 0  # bytes of queued calls, approximate under contention: decides when to fill pages
        self._queue = RowQueue()
        self.rows = self._queue.rows
        self.next_ticket = self._queue.next_ticket
        self.store_row = self._queue.rows.setdefault
        self.ticket_range = TicketRange(self.place_pending, 0)

        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.wake = ReentrantEvent()
        self.buffered = 0
        self.failure: Failure | None = None
        self.closed: str | None = None
        self._new_draft: Callable[[], Draft] = shipper.new_draft
        self._outbox = outbox
        self._limits = replace(limits, batch_bytes=min(limits.batch_bytes, shipper.most_bytes))
        self._clock = env.clock
        self._open: _OpenBatch | None = None
        self._first_at: float | None = None
        self._drained_at = 0.0
        self._overdue = False  # a page's worth is queued, but its appender found the lock taken
        self._shut = False  # after the last drain
        self._writer = writer
        self._origin = Origin(f"The producer with the writer id {writer}")
        call_in_child(self, Buffer._after_fork)

    def queue_large(self, row: Row) -> int:
        """Queue one record and put it in a page at once: several of them in a page could exceed a batch."""
        with self.lock:
            self._check_usable()
            ticket = self.next_ticket()
            self.rows[ticket] = row
            self.drain()
        return ticket

    def place_whole(
        self, batches: list[pa.RecordBatch], metadata: MetadataRange | None, expect: int | None
    ) -> tuple[BatchOutcome, int, int]:
        """Put record batches in one batch; returns its outcome, and their first and last index in it."""
        size = sum(batch.nbytes for batch in batches)
        with self.lock:
            self._wait_while_full()
            self._check_usable()
            self.drain()
            if self._open is not None:
                fits = self._open.draft.plain + size <= self._limits.batch_bytes
                if expect is not None or not fits:
                    self.seal()
            group, start = self._place(batches)
            if metadata is not None:
                time = metadata.ingested - metadata.ingested % self._tick
                group.draft.attach(MetadataRanges((start,), (time,), (metadata.payload,)))
            placed = group.outcome, start, group.draft.count
            if expect is not None:
                self.seal(expect)
            else:
                self._seal_if_full(group)
        if self.unnoticed:
            self.notice()
        return placed

    def notice(self) -> None:
        """Record the arrival of the batch's first record, and wake the thread that closes batches in time."""
        # In this order, and reversed where a batch is closed: in any interleaving "noticed" implies a time.
        self.unnoticed = False
        if self._first_at is None:
            self._first_at = self._clock.monotonic()
        self.wake.set()

    def take_back(self, ticket: int) -> None:
        """Take back a record that was queued too late, and raise; if it is in a batch already, just return."""
        with self.lock:
            refusal = self.refusal()
            if refusal is None or not self._queue.withdraw(ticket):
                return
        raise refusal

    def wait_for_room(self) -> None:
        """Block while the budget is exceeded; raises ``BufferFull``, or the reason why nothing is accepted any more."""
        with self.lock:
            self._wait_while_full()
            self._check_usable()

    def _wait_while_full(self) -> None:
        while self.full and self.refusal() is None:
            if not self._limits.block:
                raise BufferFull(
                    f"{self.buffered:,} bytes wait to be listed, over the budget of {self._limits.budget:,}; nothing "
                    "was appended. Try again, or let the producer block."
                )
            self.room.wait()

    def refusal(self) -> ProducerFailed | ProducerClosed | UsedAcrossFork | None:
        """Why nothing is accepted any more, or None."""
        if not self._origin.is_here:
            return self._origin.refusal()
        if self.closed is not None:
            return ProducerClosed(self.closed)
        return None if self.failure is None else self.failure.held_back()

    def _check_usable(self) -> None:
        refusal = self.refusal()
        if refusal is not None:
            raise refusal

    # --- from queue to batches (under the lock) ----------------------------------------------------------------

    def place_pending(self) -> None:
        """Put every queued record in a batch, so that each has an outcome to wait for. Takes the lock itself."""
        with self.lock:
            self.drain()

    def fill_pages(self) -> None:
        """Put a page's worth in a batch. Takes the lock itself."""
        # One thread at a time encodes; the others continue to queue, and wait only when they are far ahead.
        far_ahead = len(self.rows) >= _LAG * (self.page_mask + 1) or self.queued >= _LAG * PAGE_BYTES
        if self.lock.acquire(blocking=far_ahead):
            try:
                self.drain()
            finally:
                self.lock.release()
        else:
            self._overdue = True
            self.wake.set()

    def drain(self) -> None:
        """Put all records that have a ticket now in batches."""
        began = self._clock.monotonic()
        if self.rows and not self._shut:
            self.queued = 0
            end = self.next_ticket()
            while self.ticket_range.start < end:
                self._drain_page(end)
        self._drained_at = began

    def _drain_page(self, end: int) -> None:
        start = self.ticket_range.start
        stop = min(start + self.page_mask + 1, end)
        after = stop if stop < end else end + 1
        try:
            rows, holes = self._queue.take(start, stop)
            if not rows:
                self._close_range(after, BatchOutcome(), 0, holes)  # no records: all of these tickets are holes
            elif has_calls(rows):
                self._place_calls(rows, holes, stop, after)
            else:
                self._close_range(after, *self._place_page(page_of(cast("list[Row]", rows)), len(rows)), holes)
        except BaseException as error:
            # Out of memory, for example: these records are in no batch, so later ones may not be either.
            outcome = BatchOutcome()
            outcome.set_exception(error)
            self.refusing = True
            self.failure = Failure(error, self._writer, self._outbox.number, final=True)
            if self.ticket_range.start < stop:
                self._close_range(after, outcome, 0, [])
            self._outbox.ready()
            raise

    def _place_calls(self, rows: list[Row | Call], holes: list[int], stop: int, after: int) -> None:
        """Put rows with calls among them in batches; a batch is closed when it has enough metadata."""
        tickets: Sequence[int] = range(self.ticket_range.start, stop)
        if holes:
            tickets = sorted(frozenset(tickets).difference(holes))
        room = most = Room(MAX_METADATA, self._limits.batch_bytes)
        if self._open is not None:
            draft = self._open.draft
            room = Room(most.metadata - draft.attached, most.space - draft.plain)
        for piece in cut_calls(rows, room, most, self._tick):
            if piece.apart:
                self.seal()
            mine, tickets = tickets[: len(piece.rows)], tickets[len(piece.rows) :]
            end = tickets[0] if tickets else after
            page = page_of_calls(piece)
            outcome, base = self._place_page(page, len(mine), piece.ranges)
            if len(piece.rows) < page.num_rows:
                wide = [(ticket, width - 1) for ticket, width in zip(mine, piece.widths, strict=True) if width > 1]
                self.ticket_range.widen([ticket for ticket, _ in wide], list(accumulate(more for _, more in wide)))
            self._close_range(end, outcome, base, [hole for hole in holes if self.ticket_range.start <= hole < end])

    def _close_range(self, end: int, outcome: BatchOutcome, base: int, holes: list[int]) -> None:
        """Everything before ticket ``end`` is in a batch, or never will be."""
        ticket_range, following = self.ticket_range, TicketRange(self.place_pending, end)
        self.ticket_range = following
        ticket_range.close(end, outcome, base, holes, following)

    def _place_page(
        self, page: pa.RecordBatch, rows: int, ranges: MetadataRanges | None = None
    ) -> tuple[BatchOutcome, int]:
        if self._open is not None and self._open.draft.plain + page.nbytes > self._most_bytes:
            self.seal()
        group, base = self._place([page])
        if ranges:
            group.draft.attach(ranges.shifted(base))
        usual = group.draft.plain // group.draft.count * page.num_rows // rows
        self.page_mask = fitting_page(usual, self._limits.batch_bytes) - 1
        self._seal_if_full(group)
        return group.outcome, base

    def _place(self, batches: list[pa.RecordBatch]) -> tuple[_OpenBatch, int]:
        group = _OpenBatch(self._new_draft()) if self._open is None else self._open
        before = group.draft.size
        start = group.draft.add(batches)
        self._open = group  # only now: an empty batch is never passed on
        self.account(group.draft.size - before)
        return group, start

    def account(self, size: int) -> None:
        """Add to the bytes held; negative to subtract."""
        self.buffered += size
        self.full = self.refusing or self.buffered >= self._limits.budget
        if self.full:
            self.wake.set()  # no linger while appenders wait for room
        else:
            self.room.notify_all()

    # --- closing batches (under the lock) ----------------------------------------------------------------------

    def _seal_if_full(self, group: _OpenBatch) -> None:
        if group.draft.plain >= self._limits.batch_bytes or group.draft.attached >= MAX_METADATA:
            self.seal()

    def seal(self, expect: int | None = None) -> None:
        """Close the batch being filled, if there is one."""
        group, self._open = self._open, None
        first, self._first_at = self._first_at, None
        self.unnoticed = True
        if self.rows:
            # Their appenders may have found "noticed", and woken no thread. The records arrived after the last drain
            # and after the first record of this batch.
            self._first_at = self._clock.monotonic() if first is None else max(first, self._drained_at)
            self.unnoticed = False
            self.wake.set()
        if group is not None:
            self._outbox.put(group.draft, group.outcome, expect)

    def until_due(self) -> float | None:
        """Seconds until the batch must be closed; None if there is none. Needs no lock."""
        first = self._first_at
        return None if first is None else max(0.0, first + self._limits.linger - self._clock.monotonic())

    def seal_if_due(self) -> None:
        """Close the batch if its linger time is over, or if appenders wait for room."""
        if self._shut:
            self._first_at = None  # that record is being taken back
            return
        if self._overdue:
            self._overdue = False
            self.drain()
        if self._first_at is None:
            if self._open is not None or self.rows:
                self.notice()
        elif self.full or self.until_due() == 0.0:
            self.drain()
            self.seal()

    def finish(self) -> None:
        """Put everything in batches, close the last one, and accept nothing more."""
        self.refusing = True  # first: records queued without seeing it are in the last drain
        while self.rows and not self._shut:
            try:
                self.drain()
            except BaseException:  # noqa: BLE001, S112 - the handles raise it, and each round removes some rows
                continue
            break
        self.seal()
        self._shut = True
        self.full = True  # so that appenders check for room, and raise before they queue anything
        self.room.notify_all()

    def _after_fork(self) -> None:
        """In a forked child, which has the queue but no threads: accept nothing, and fail the handles."""
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.refusing = self.full = self._shut = True
        lost = BatchOutcome()
        lost.set_exception(self._origin.refusal())
        ticket_range = self.ticket_range
        self.ticket_range = TicketRange(self.place_pending, _NEVER)
        ticket_range.close(_NEVER, lost, 0, [], self.ticket_range)

    def resume(self) -> None:
        """Continue after a failure."""
        self.failure = None
        self._shut = False
        self.refusing = False
        self.account(0)
        self.seal()  # no batch is open, but a record may be queued, and must be noticed
