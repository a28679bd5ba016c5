"""Background threads of a producer: one closes batches after the linger time, one lists uploaded batches."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Final
from uuid import UUID

from strandline.errors import ExpectationFailed, ProducerClosed
from strandline.log.contract import Receipt
from strandline.log.produce.buffer import CLOSED, Buffer, Failure
from strandline.log.produce.handles import BatchOutcome
from strandline.log.produce.outbox import Outbox, ReentrantEvent, Sent
from strandline.storage.clock import CLOCK
from strandline.storage.env import Env
from strandline.storage.metrics import count_written
from strandline.storage.worker_thread import WorkerThread

_LONGEST_REST: Final = 0.25

_DROPPED: Final = "The producer was dropped without closing it, before this was listed: it is not in the log."


class ListingPace:
    """Pause between listings while other writers list, too: about as long as a listing takes.

    A writer that lists again at once knows the head and wins every race; the others have to read it first, and would
    never succeed. Batches that become ready meanwhile are listed together, so the pause costs no throughput.
    """

    def __init__(self) -> None:
        self._shortest = _LONGEST_REST

    def rest(self, took: float, *, crowded: bool) -> float:
        """Seconds to pause after a listing that took ``took`` seconds."""
        self._shortest = min(took, 1.1 * self._shortest)  # the store may have become slower
        return min(took, 2 * self._shortest, _LONGEST_REST) if crowded else 0.0


class ProducerThreads:
    """Closes batches in time, lists them in order, and fails or keeps them when one fails.

    It has no reference to the producer: its threads must not keep an abandoned producer alive.
    """

    def __init__(self, buffer: Buffer, outbox: Outbox, *, writer: UUID, env: Env, ready: ReentrantEvent) -> None:
        """``ready`` is set when there may be something to list."""
        self._buffer = buffer
        self._outbox = outbox
        self._writer = writer
        self._clock = env.clock
        self._ready = ready
        self._dropped = False
        self._last: BatchOutcome | None = None
        self._is_closing = False
        """Whether closing has begun and not everything is listed yet; ``_last`` is the last outcome."""
        self._pace = ListingPace()
        self._rested_at = 0.0
        self._hurry = ReentrantEvent()
        self._threads = [
            WorkerThread(self._close_in_time, name="strandline-closing"),
            WorkerThread(self._list_in_order, name="strandline-listing"),
        ]
        for thread in self._threads:
            thread.start()

    # --- calls of the producer ----------------------------------------------------------------------------------

    def flush(self, timeout: float | None) -> None:
        """Block until everything before this call is listed."""
        buffer = self._buffer
        with buffer.lock:
            buffer.drain()
            buffer.seal()
            failure, last = buffer.failure, self._outbox.last
        if failure is not None:
            raise failure.held_back()
        _wait_for(last, timeout)

    def retry(self, timeout: float | None) -> list[Receipt]:
        """Send the kept batches again, continue, and block until they are listed."""
        buffer = self._buffer
        with buffer.lock:
            if buffer.closed is not None:
                raise ProducerClosed(buffer.closed)
            if buffer.failure is None:
                return []
            if buffer.failure.final:
                raise buffer.failure.held_back()
            outcomes = self._outbox.resend()
            buffer.resume()
        self._ready.set()
        if wait(outcomes, timeout).not_done:
            raise TimeoutError("The kept batches are not listed yet; they are still being sent.")
        return [outcome.result() for outcome in outcomes]

    def close(self) -> None:
        """List everything, then end the threads; raises what could not be listed, and discards it.

        After an interruption it continues; closing again waits for it.
        """
        buffer = self._buffer
        with buffer.lock:
            if buffer.closed is None:
                failure = buffer.failure
                buffer.finish()
                self._last = self._outbox.last if failure is None else None
                self._is_closing = True
                buffer.closed = CLOSED
            elif not self._is_closing:
                return
        buffer.wake.set()
        self._hurry.set()
        self._ready.set()
        try:
            _wait_for(self._last, None)
        except Exception:
            self._join()
            raise
        # Not if it is interrupted: the caller need not wait for the store.
        self._join()
        if buffer.failure is not None:
            raise buffer.failure.held_back()

    def _join(self) -> None:
        self._is_closing, self._last = False, None
        for thread in self._threads:
            thread.join()
        self._outbox.join()

    def drop(self) -> None:
        """Fail everything that is not listed, and end the threads. Takes no lock: see :class:`ReentrantEvent`."""
        self._dropped = True
        self._buffer.refusing = True
        self._hurry.set()
        self._ready.set()

    # --- in time -----------------------------------------------------------------------------------------------

    def _close_in_time(self) -> None:
        buffer = self._buffer
        while buffer.closed is None:
            self._clock.wait(buffer.wake, buffer.until_due())
            buffer.wake.clear()
            try:
                with buffer.lock:
                    buffer.seal_if_due()
            except BaseException:  # noqa: BLE001, S112 - the buffer has failed the handles
                continue

    # --- in order ----------------------------------------------------------------------------------------------

    def _list_in_order(self) -> None:
        while not self._finished():
            self._ready.wait()
            self._ready.clear()
            try:
                self._list_ready()
            except BaseException as error:  # noqa: BLE001 - every error must reach the handles
                with self._buffer.lock:
                    self._hold_back(Failure(error, self._writer, self._outbox.number, final=True))
        self._outbox.close()

    def _list_ready(self) -> None:
        if self._dropped:
            self._abandon()
        while batches := self._uploaded():
            left = self._rested_at - self._clock.monotonic()
            if left > 0 and not self._hurry.is_set():
                self._clock.wait(self._hurry, left)
            else:
                self._deliver(batches)

    def _finished(self) -> bool:
        with self._buffer.lock:
            return self._buffer.closed is not None and not self._outbox

    def _uploaded(self) -> list[Sent]:
        with self._buffer.lock:
            if self._buffer.failure is not None:
                self._hold_back(self._buffer.failure)
            return self._outbox.uploaded()

    def _deliver(self, batches: list[Sent]) -> None:
        began = self._clock.monotonic()
        delivery = self._outbox.deliver(batches)
        ended = self._clock.monotonic()
        self._rested_at = ended + self._pace.rest(ended - began, crowded=delivery.crowded)
        with self._buffer.lock:
            for receipt in delivery.receipts:
                sent = self._outbox.take()
                self._buffer.account(-sent.size)
                count_written(receipt.count, sent.size, CLOCK.monotonic() - sent.began)
                sent.outcome.set_result(receipt)
            refused = self._outbox.take_refused(delivery.failure)
            if refused is not None:
                self._buffer.account(-refused.size)
                refused.outcome.set_exception(delivery.failure)
            elif delivery.failure is not None:
                self._hold_back(Failure(delivery.failure, self._writer, self._outbox.number, final=False))

    def _hold_back(self, failure: Failure) -> None:
        """Fail everything that is not listed, and keep it unless a retry is useless. Under the lock."""
        self._outbox.halt()
        self._buffer.finish()
        if self._buffer.failure is None or not self._buffer.failure.final:
            self._buffer.failure = failure
        failure.annotate()
        first = None if failure.final else failure.reason
        for outcome in self._outbox.outcomes():
            if not outcome.done():
                outcome.set_exception(first or failure.held_back())
            first = None
        if self._buffer.failure.final or self._buffer.closed is not None:
            self._forget()

    def _abandon(self) -> None:
        buffer = self._buffer
        with buffer.lock:
            self._outbox.halt()
            buffer.finish()
            buffer.closed = _DROPPED
            for outcome in self._outbox.outcomes():
                if not outcome.done():
                    outcome.set_exception(ProducerClosed(_DROPPED))
            self._forget()
        buffer.wake.set()

    def _forget(self) -> None:
        self._outbox.clear()
        self._buffer.account(-self._buffer.buffered)


def _wait_for(last: Future[Receipt] | None, timeout: float | None) -> None:
    try:
        if last is not None:
            last.result(timeout)
    except ExpectationFailed:
        return  # raised by its own handle; all before it are listed
