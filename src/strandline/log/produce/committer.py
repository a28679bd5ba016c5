"""Background threads of a producer: one closes batches after the linger time, one lists uploaded batches."""

from __future__ import annotations

from itertools import chain, takewhile
from typing import Final

from strandline.log.produce.state import State
from strandline.log.produce.uploads import Batch
from strandline.model.head import Receipt
from strandline.storage.env import Env
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


class Committer:
    """Closes batches in time and lists them in order, in two threads.

    It has no reference to the producer: its threads must not keep an abandoned producer alive.
    """

    def __init__(self, state: State, env: Env) -> None:
        self._state = state
        self._clock = env.clock
        self._pace = ListingPace()
        self._rested_at = 0.0
        self._is_dropped = False
        self._threads = [
            WorkerThread(self._close_in_time, name="strandline-closing"),
            WorkerThread(self._list_in_order, name="strandline-listing"),
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Wait until everything is listed, or failed, and the threads have ended."""
        self._state.wake.set()
        self._state.ready.set()
        for thread in chain(self._threads, self._state.uploads.threads):  # the listing thread starts the last ones
            if thread.ident is not None:  # a signal's exception may have come before the start
                thread.join()

    def drop(self) -> None:
        """Fail everything that is not listed, and end the threads. Takes no lock: see :class:`ReentrantEvent`."""
        self._is_dropped = True
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
        state, rest = self._state, None
        while not state.is_finished():
            if rest is None:
                state.ready.wait()
            else:
                self._clock.wait(state.ready, rest)
            state.ready.clear()
            try:
                rest = self._list_ready()
            except BaseException as error:  # noqa: BLE001 - every error must reach the handles
                with state.lock:
                    state.fail(error)
        state.uploads.close()

    def _list_ready(self) -> float | None:
        """List what is uploaded; returns the seconds to rest before there is more to list."""
        if self._is_dropped:
            self._state.abandon(_DROPPED)
        while batches := self._state.uploaded():
            left = self._rested_at - self._clock.monotonic()
            if left > 0 and self._state.closed is None:
                return left
            self._list(batches)
        return None

    def _list(self, batches: list[Batch]) -> None:
        """Let the log list the oldest batches before the first whose upload failed, or fail that one."""
        shipper = self._state.shipper
        good = [batch.uploaded for batch in takewhile(lambda batch: batch.error is None, batches)]
        receipts: list[Receipt] = []
        failure: BaseException | None = None
        began = self._clock.monotonic()
        try:
            if good:
                receipts = shipper.enlist(good)  # perhaps the first few only: the others raise why not when repeated
            else:
                failure = batches[0].error
        except BaseException as error:  # noqa: BLE001 - every error must reach the handles
            failure = error
        ended = self._clock.monotonic()
        self._rested_at = ended + self._pace.rest(ended - began, crowded=bool(receipts) and shipper.crowded)
        self._state.settle(receipts, failure)
