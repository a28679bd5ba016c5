"""Background threads of a producer: one closes batches after the linger time, one lists uploaded batches."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from itertools import takewhile
from typing import Final

from strandline.errors import ExpectationFailed, ProducerClosed
from strandline.log.produce.state import State
from strandline.log.produce.uploads import Batch
from strandline.model.head import Receipt
from strandline.storage.env import Env
from strandline.storage.worker_thread import ReentrantEvent, WorkerThread

_LONGEST_REST: Final = 0.25

_CLOSED: Final = "The producer is closed; nothing was appended. Open a new one."

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


class Committer:
    """Closes batches in time and lists them in order, in two threads; and the calls that wait for them.

    It has no reference to the producer: its threads must not keep an abandoned producer alive.
    """

    def __init__(self, state: State, env: Env) -> None:
        self._state = state
        self._clock = env.clock
        self._pace = ListingPace()
        self._rested_at = 0.0
        self._hurry = ReentrantEvent()
        self._is_dropped = False
        self._is_closing = self._had_failed = False
        self._threads = [
            WorkerThread(self._close_in_time, name="strandline-closing"),
            WorkerThread(self._list_in_order, name="strandline-listing"),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def threads(self) -> list[threading.Thread]:
        """All threads of the producer."""
        return [*self._threads, *self._state.uploads.threads]

    def flush(self, timeout: float | None) -> None:
        """Block until everything before this call is listed."""
        state = self._state
        with state.lock:
            state.drain()
            state.seal()
            if state.failure is not None:
                raise state.failure.held_back()
            outcomes = state.outcomes()
        if outcomes:
            try:
                outcomes[-1].result(timeout)
            except ExpectationFailed:
                return  # raised by its own handle; all before it are listed

    def retry(self, timeout: float | None) -> list[Receipt]:
        """Send the kept batches again, continue, and block until they are listed."""
        state = self._state
        with state.lock:
            if state.closed is not None:
                raise ProducerClosed(state.closed)
            if state.failure is None:
                return []
            if state.failure.final:
                raise state.failure.held_back()
            outcomes = state.resend()
        if wait(outcomes, timeout).not_done:
            raise TimeoutError("The kept batches are not listed yet; they are still being sent.")
        return [outcome.result() for outcome in outcomes]

    def close(self) -> None:
        """List everything, then end the threads; raises what could not be listed, and discards it.

        After an interruption it continues; closing again waits for it.
        """
        state = self._state
        with state.lock:
            if state.closed is None:
                self._is_closing, self._had_failed = True, state.failure is not None
                state.end_intake()
                state.closed = _CLOSED
            elif not self._is_closing:
                return
        state.wake.set()
        self._hurry.set()
        state.ready.set()
        for thread in self._threads:
            thread.join()
        for upload in state.uploads.threads:  # the listing thread has started the last one
            if upload.ident is not None:  # a signal's exception may have come before the start
                upload.join()
        self._is_closing = False
        if state.failure is not None:
            raise state.failure.held_back() if self._had_failed else state.failure.reason

    def drop(self) -> None:
        """Fail everything that is not listed, and end the threads. Takes no lock: see :class:`ReentrantEvent`."""
        self._is_dropped = True
        self._hurry.set()
        self._state.ready.set()

    def _close_in_time(self) -> None:
        state = self._state
        while state.closed is None:
            self._clock.wait(state.wake, state.until_due())
            state.wake.clear()
            try:
                with state.lock:
                    state.seal_if_due()
            except BaseException as error:  # noqa: BLE001 - the handles raise it
                with state.lock:
                    state.fail(error)

    def _list_in_order(self) -> None:
        state = self._state
        while not self._is_finished():
            state.ready.wait()
            state.ready.clear()
            try:
                self._list_ready()
            except BaseException as error:  # noqa: BLE001 - every error must reach the handles
                with state.lock:
                    state.hold_back(state.failed(error, final=True))
        state.uploads.close()

    def _is_finished(self) -> bool:
        with self._state.lock:
            return self._state.closed is not None and not self._state.outcomes()

    def _list_ready(self) -> None:
        if self._is_dropped:
            self._state.abandon(_DROPPED)
        while batches := self._state.uploaded():
            left = self._rested_at - self._clock.monotonic()
            if left > 0 and not self._hurry.is_set():
                self._clock.wait(self._hurry, left)
            else:
                self._list(batches)

    def _list(self, batches: list[Batch]) -> None:
        """Let the log list the oldest batches, up to the first whose upload failed."""
        shipper = self._state.shipper
        good = [batch.uploaded for batch in takewhile(lambda batch: batch.error is None, batches)]
        failure = batches[len(good)].error if len(good) < len(batches) else None
        receipts: list[Receipt] = []
        began = self._clock.monotonic()
        if good:
            try:
                receipts = shipper.enlist(good)
            except BaseException as error:  # noqa: BLE001 - every error must reach the handles
                failure = error
            else:
                # The log may have listed the first few only: the rest is delivered again, and raises then why not.
                failure = failure if len(receipts) == len(good) else None
        ended = self._clock.monotonic()
        self._rested_at = ended + self._pace.rest(ended - began, crowded=bool(receipts) and shipper.crowded)
        self._state.settle(receipts, failure)
