"""Closed batches of a producer, and the threads that upload them side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from strandline.log.produce.handles import BatchOutcome
from strandline.log.produce.shipper import FinishedBatch, Shipper
from strandline.storage.clock import CLOCK


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way: being filled, waiting for its number, being uploaded, and being listed."""

    draft: Any
    """None once it is sealed."""
    outcome: BatchOutcome = field(default_factory=BatchOutcome)
    size: int = 0
    expect: int | None = None
    number: int = -1
    sealed: FinishedBatch[Any] | None = None
    uploaded: Any = None
    error: BaseException | None = None
    """Why its upload failed."""
    began: float = field(default_factory=CLOCK.monotonic)

    @property
    def is_done(self) -> bool:
        """Whether its upload has ended, successfully or not."""
        return self.uploaded is not None or self.error is not None

    def ship(self, shipper: Shipper[Any, Any]) -> None:
        """Seal and upload it, unless it has failed already. In a thread of its own: either may take long."""
        if self.is_done:
            return
        try:
            if self.sealed is None:
                self.sealed = shipper.seal(self.draft, number=self.number, expect=self.expect)
                self.draft = None
            self.uploaded = shipper.upload(self.sealed)
        except BaseException as error:  # noqa: BLE001 - every error must reach the handles
            self.error = error


class Uploads:
    """Uploads batches in up to ``most`` threads, and calls ``ended`` after each.

    Threads are started on demand, and are daemons: a hanging store must not keep the program from exiting. The standard
    pool would wait for its whole queue at exit.
    """

    def __init__(self, shipper: Shipper[Any, Any], most: int, ended: Callable[[], None]) -> None:
        self.threads: list[threading.Thread] = []
        self._shipper, self._most, self._ended = shipper, most, ended
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    def put(self, batch: Batch) -> None:
        """Upload a batch as soon as a thread is free."""
        self._queue.put(batch)
        if self._idle.acquire(blocking=False) or len(self.threads) >= self._most:
            return
        thread = threading.Thread(target=self._work, name="strandline-upload", daemon=True)
        self.threads.append(thread)  # before: a signal's exception may end the call though the thread runs
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the running ones do it, if there are any
            self.threads.remove(thread)
            if not self.threads:
                batch.error = error
                self._queue.get()
                self._ended()

    def close(self) -> None:
        """Let the threads end when all uploads are done; does not wait for them."""
        for _ in self.threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            batch.ship(self._shipper)
            del batch  # frees its memory while the thread waits
            self._ended()
            self._idle.release()
