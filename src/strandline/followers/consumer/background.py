"""Threads of an open consumer: the trimmer of its queue, and the heartbeat of its slot."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

from strandline.errors import StrandlineError
from strandline.log.queue.contract import Queue
from strandline.log.slots.heartbeat import LIMITS_INTERVAL
from strandline.storage.clock import Clock
from strandline.storage.fork_check import call_in_child

_LOGGER: Final = logging.getLogger(__name__)

_STOP_SECONDS: Final = 10.0
"""Seconds that stopping waits for a running round."""


class ConsumerThreads:
    """The trimmer and the heartbeat of a consumer, until they are stopped or the consumer is garbage-collected."""

    def __init__(self, consumer: object, queue: Queue, *, trim_every: float | None, clock: Clock) -> None:
        """Start both: the trimmer unless ``trim_every`` is None, the heartbeat if the slot needs one now."""
        self.heartbeat = HeartbeatOnDemand(queue, clock)
        _halt_with(consumer, self.heartbeat.halt)
        self.trimmer: BackgroundTrimmer | None = None
        if trim_every is not None:
            # Where many consume one log, the first of them to wake up trims for all.
            trim = partial(queue.trim, trim_every / 2)
            look = self.heartbeat.look
            self.trimmer = BackgroundTrimmer(trim, every=trim_every, clock=clock, name=queue.url, look=look)
            _halt_with(consumer, self.trimmer.halt)

    def halt(self) -> None:
        """Start nothing more; does not wait."""
        if self.trimmer is not None:
            self.trimmer.halt()
        self.heartbeat.halt()

    def stop(self) -> None:
        """Start nothing more, and wait briefly for what is running."""
        if self.trimmer is not None:
            self.trimmer.stop()
        self.heartbeat.stop()


class HeartbeatOnDemand:
    """The heartbeat of a slot, with a thread only from when a limit is found that it serves. Safe in threads.

    The consumer's reads and its trimmer look for a limit that was set meanwhile, three times a minute at most.
    """

    def __init__(self, queue: Queue, clock: Clock) -> None:
        """Start it, if the slot needs one now."""
        self._queue = queue
        self._clock = clock
        self._lock = threading.Lock()
        self._is_halted = False
        self._beating = queue.heartbeat()
        if self._beating is not None:
            self._beating.start()
        self._looked = clock.monotonic()

    def look(self) -> None:
        """Start the heartbeat if a limit was set since; asks the queue at most once in a while. Never raises."""
        if self._clock.monotonic() - self._looked < LIMITS_INTERVAL:
            return
        with self._lock:
            if self._beating is not None or self._is_halted:
                return
            self._looked = self._clock.monotonic()
            try:
                beating = self._queue.heartbeat()
            except StrandlineError as error:
                _LOGGER.debug("The limits of %s could not be read, and are read again: %s", self._queue.url, error)
                return
            if beating is not None:
                self._beating = beating.start()
                if self._is_halted:  # dropped meanwhile
                    beating.halt()

    def halt(self) -> None:
        """Start no further heartbeat; takes no lock, and does not wait: the garbage collector may call it."""
        self._is_halted = True
        if self._beating is not None:
            self._beating.halt()

    def stop(self) -> None:
        """Send no more heartbeats; waits briefly for a running one."""
        with self._lock:
            self.halt()
        if self._beating is not None:
            self._beating.stop()


def _halt_with(consumer: object, halt: Callable[[], None]) -> None:
    """Call ``halt`` when the consumer is garbage-collected unclosed, unless in a forked child."""
    dropped = weakref.finalize(consumer, halt)
    call_in_child(consumer, lambda _: dropped.detach())


class BackgroundTrimmer:
    """Calls ``trim`` from a daemon thread at a fixed interval, until it is stopped.

    A failed round is logged, and the next one follows in time: the consumer is not affected. The queue decides
    what is trimmed; a round that the end of the process interrupts leaves a consistent state.
    """

    def __init__(
        self,
        trim: Callable[[], None],
        *,
        every: float,
        clock: Clock,
        name: str,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread; the first round follows after ``every`` seconds. ``look`` is called in between."""
        self._stop = threading.Event()
        # The thread refers neither to this object nor to the consumer: both can be garbage-collected unclosed.
        arguments = (trim, every, clock, name, self._stop, look)
        self._thread = threading.Thread(target=_run, args=arguments, name="strandline-trimmer", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether its thread is alive."""
        return self._thread.is_alive()

    def halt(self) -> None:
        """Start no further round; does not wait."""
        self._stop.set()

    def stop(self) -> None:
        """Start no further round, and wait briefly for a running one."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)


def _run(
    trim: Callable[[], None], every: float, clock: Clock, name: str, stop: threading.Event, look: Callable[[], None]
) -> None:
    due = clock.monotonic() + every
    while not clock.wait(stop, max(0.0, min(LIMITS_INTERVAL, due - clock.monotonic()))):
        look()
        if clock.monotonic() < due:
            continue
        try:
            trim()
        except Exception as error:  # noqa: BLE001 - the next round may succeed
            _LOGGER.warning("Trimming %s failed, and is tried again in %g s: %s", name, every, error)
        due = clock.monotonic() + every
