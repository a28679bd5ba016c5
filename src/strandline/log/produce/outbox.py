"""Outbox: uploads batches in parallel, lists them strictly in order, keeps them after a failure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, takewhile
from queue import Empty, SimpleQueue
from typing import Any

from strandline.errors import ExpectationFailed
from strandline.log.contract import Receipt
from strandline.log.produce.handles import BatchOutcome
from strandline.log.produce.shipper import Draft, Sealed, Shipper
from strandline.storage.clock import CLOCK


class ReentrantEvent(threading.Event):
    """An event that one thread waits for and any code may set, even the garbage collector.

    The standard event takes a lock when it is set. If the collector ran within that lock, the finalizer of a
    producer would deadlock by setting the event. This one is reentrant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signals: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it was set since it was last cleared."""
        return not self._signals.empty()

    def set(self) -> None:
        """Set the event, and wake the waiting thread."""
        if self._signals.empty():
            self._signals.put(None)

    def clear(self) -> None:
        """Reset it."""
        try:
            while True:
                self._signals.get_nowait()
        except Empty:
            return

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set (True), or until the timeout (False)."""
        try:
            self._signals.get(timeout=timeout)
        except Empty:
            return False
        self._signals.put(None)
        return True


@dataclass(slots=True, eq=False)
class Sent:
    """A batch in the outbox: its outcome, its draft, and its upload."""

    outcome: BatchOutcome
    size: int
    expect: int | None
    draft: Draft | None
    sealed: Sealed[Any] | None = None
    number: int = -1
    uploaded: Future[Sealed[Any]] | None = None
    began: float = field(default_factory=CLOCK.monotonic)

    def done(self) -> bool:
        """Whether its upload has ended, successfully or not."""
        return self.uploaded is not None and self.uploaded.done()

    def error(self) -> BaseException | None:
        """Why its finished upload failed, or None."""
        return None if self.uploaded is None else self.uploaded.exception()

    def ship(self, shipper: Shipper[Any, Any], uploaded: Future[Sealed[Any]]) -> None:
        """Seal and upload it, unless that was cancelled. In a thread of its own: either may take long."""
        if uploaded.done() or not uploaded.set_running_or_notify_cancel():
            return
        try:
            if self.sealed is None:
                self.sealed = shipper.seal(self.draft, number=self.number, expect=self.expect)
                self.draft = None
            uploaded.set_result(shipper.upload(self.sealed))
        except BaseException as error:  # noqa: BLE001 - raised by the future
            uploaded.set_exception(error)


@dataclass(frozen=True, slots=True)
class Delivery:
    """The result of a delivery: the first batches are listed, and the next one failed, or none did.

    ``crowded``: other writers list at the same time.
    """

    receipts: list[Receipt]
    failure: BaseException | None
    crowded: bool = False


class Outbox:
    """One writer's batches in order. The caller ensures that only one thread at a time uses it.

    Only :meth:`deliver` may run at the same time, and blocks. A batch that expects an end of the log is sent alone: it
    waits for those before it, and those after it have no number yet, because theirs depends on its outcome.

    Threads are started on demand, and are daemons: a hanging store must not keep the program from exiting. The standard
    pool would wait for its whole queue at exit.
    """

    def __init__(self, shipper: Shipper[Any, Any], *, number: int, uploads: int, ready: Callable[[], None]) -> None:
        """Number batches from ``number`` on; ``ready`` is called when an upload has ended."""
        self.ready = ready
        self._shipper = shipper
        self._number = number
        self._halted = False
        self._sent: deque[Sent] = deque()
        self._waiting: deque[Sent] = deque()
        self._uploads = uploads
        self._queue: SimpleQueue[tuple[Sent, Future[Sealed[Any]]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._sent) + len(self._waiting)

    @property
    def last(self) -> BatchOutcome | None:
        """The outcome of the newest batch in the outbox."""
        newest = self._waiting or self._sent
        return newest[-1].outcome if newest else None

    @property
    def number(self) -> int:
        """The number of the oldest batch that is not listed."""
        return self._sent[0].number if self._sent else self._number

    def put(self, draft: Draft, outcome: BatchOutcome, expect: int | None = None) -> None:
        """Accept a batch, and upload it as soon as its number is known."""
        self._waiting.append(Sent(outcome, draft.size, expect, draft))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and not self._halted:
            alone = self._waiting[0].expect is not None or (bool(self._sent) and self._sent[-1].expect is not None)
            if alone and self._sent:
                return
            sent = self._waiting.popleft()
            sent.number = self._number
            self._number += 1
            self._sent.append(sent)
            self._upload(sent)

    def _upload(self, sent: Sent) -> None:
        uploaded: Future[Sealed[Any]] = Future()
        sent.uploaded = uploaded
        uploaded.add_done_callback(lambda _: self.ready())
        self._queue.put((sent, uploaded))
        if self._idle.acquire(blocking=False) or len(self._threads) >= self._uploads:
            return
        work = (self._queue, self._idle, self._shipper)
        thread = threading.Thread(target=_work, args=work, name="strandline-upload", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the running ones do it, if there are any
            if not self._threads:
                uploaded.set_exception(error)
        else:
            self._threads.append(thread)

    def uploaded(self) -> list[Sent]:
        """The oldest batches whose uploads have ended, successfully or not."""
        return [] if self._halted else list(takewhile(Sent.done, self._sent))

    def deliver(self, batches: list[Sent]) -> Delivery:
        """Let the log list the oldest batches, up to the first whose upload failed. Blocks."""
        good = list(takewhile(lambda sent: sent.error() is None, batches))
        failure = batches[len(good)].error() if len(good) < len(batches) else None
        if not good:
            return Delivery([], failure)
        try:
            receipts = self._shipper.enlist([sent.uploaded.result() for sent in good if sent.uploaded])
            # The log may have listed the first few only: the rest is delivered again, and raises then why not.
            return Delivery(receipts, failure if len(receipts) == len(good) else None, self._shipper.crowded)
        except BaseException as error:  # noqa: BLE001 - every error must reach the handles
            return Delivery([], error)

    def take(self) -> Sent:
        """Remove the oldest batch, which is listed."""
        taken = self._sent.popleft()
        self._send_waiting()
        return taken

    def take_refused(self, failure: BaseException | None) -> Sent | None:
        """Remove the oldest batch if only its expectation failed: then its number is free again."""
        if not isinstance(failure, ExpectationFailed) or self._sent[0].expect is None:
            return None
        taken = self._sent.popleft()
        self._number = taken.number
        self._send_waiting()
        return taken

    def halt(self) -> None:
        """Keep everything, and start nothing more until :meth:`resend`."""
        self._halted = True

    def outcomes(self) -> list[BatchOutcome]:
        """The outcomes of all batches, in order."""
        return [sent.outcome for sent in chain(self._sent, self._waiting)]

    def resend(self) -> list[BatchOutcome]:
        """Send the kept batches again, under the same numbers; returns their new outcomes, in order.

        Uploaded batches are not uploaded again: if their listing landed, it is recognised.
        """
        self._halted = False
        for sent in chain(self._sent, self._waiting):
            sent.outcome = BatchOutcome()
        for sent in self._sent:
            if sent.done() and sent.error() is not None:
                self._upload(sent)
        self._send_waiting()
        return self.outcomes()

    def clear(self) -> None:
        """Discard everything, and start nothing more."""
        self._halted = True
        for sent in self._sent:
            if sent.uploaded is not None:
                sent.uploaded.cancel()
        self._sent.clear()
        self._waiting.clear()

    def close(self) -> None:
        """Let the threads end when all uploads are done; does not wait for them."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()


def _work(
    queue: SimpleQueue[tuple[Sent, Future[Sealed[Any]]] | None], idle: threading.Semaphore, shipper: Shipper[Any, Any]
) -> None:
    while (work := queue.get()) is not None:
        sent, uploaded = work
        sent.ship(shipper, uploaded)
        del work, sent, uploaded  # frees their memory while the thread waits
        idle.release()
