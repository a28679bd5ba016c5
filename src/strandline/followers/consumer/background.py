"""Threads of an open consumer: the trimmer of its queue, and the heartbeat of its slot."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Final

from strandline.errors import StrandlineError
from strandline.log.queue.contract import Queue
from strandline.log.slots.heartbeat import LIMITS_INTERVAL
from strandline.storage.env import Env
from strandline.storage.fork_check import call_in_child

_LOGGER: Final = logging.getLogger(__name__)

_STOP_SECONDS: Final = 10.0
"""Seconds that stopping waits for a running round."""


class ConsumerThreads:
    """The trimmer and the heartbeat of a consumer, until they are stopped or the consumer is garbage-collected.

    The heartbeat has a thread only from when a limit is found that it serves: the consumer's reads and its trimmer look
    for one that was set meanwhile, three times a minute at most. A failed round of trimming is logged, and the next one
    follows in time: the consumer is not affected. Refers to no consumer. Safe in threads.
    """

    def __init__(self, consumer: object, queue: Queue, *, trim_every: float | None, env: Env) -> None:
        """Start both: the trimmer unless ``trim_every`` is None, the heartbeat if the slot needs one now."""
        self._queue = queue
        self._clock = env.clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._beating = queue.heartbeat()
        if self._beating is not None:
            self._beating.start()
        self._looked = env.clock.monotonic()
        dropped = weakref.finalize(consumer, self.halt)
        call_in_child(consumer, lambda _: dropped.detach())
        self.trimmer: threading.Thread | None = None
        if trim_every is not None:
            self.trimmer = threading.Thread(
                target=self._trim, args=(trim_every,), name="strandline-trimmer", daemon=True
            )
            self.trimmer.start()

    def look(self) -> None:
        """Start the heartbeat if a limit was set since; asks the queue at most once in a while. Never raises."""
        if self._clock.monotonic() - self._looked < LIMITS_INTERVAL:
            return
        with self._lock:
            if self._beating is not None or self._stop.is_set():
                return
            self._looked = self._clock.monotonic()
            try:
                beating = self._queue.heartbeat()
            except StrandlineError as error:
                _LOGGER.debug("The limits of %s could not be read, and are read again: %s", self._queue.url, error)
                return
            if beating is not None:
                self._beating = beating.start()
                if self._stop.is_set():  # dropped meanwhile
                    beating.halt()

    def _trim(self, every: float) -> None:
        clock = self._clock
        due = clock.monotonic() + every
        while not clock.wait(self._stop, max(0.0, min(LIMITS_INTERVAL, due - clock.monotonic()))):
            self.look()
            if clock.monotonic() < due:
                continue
            try:
                self._queue.trim(every / 2)  # where many consume one log, the first to wake up trims for all
            except Exception as error:  # noqa: BLE001 - the next round may succeed
                _LOGGER.warning("Trimming %s failed, and is tried again in %g s: %s", self._queue.url, every, error)
            due = clock.monotonic() + every

    def halt(self) -> None:
        """Start no further round and heartbeat; takes no lock, and does not wait: the garbage collector may call it."""
        self._stop.set()
        if self._beating is not None:
            self._beating.halt()

    def stop(self) -> None:
        """Start no further round and heartbeat, and wait briefly for running ones."""
        self.halt()
        if self.trimmer is not None:
            self.trimmer.join(_STOP_SECONDS)
        with self._lock:  # a heartbeat that is being started is stopped, too
            if self._beating is not None:
                self._beating.stop()
