"""Slot heartbeats: a thread touches a claimed slot at a third of its idle limit, even while a batch is applied."""

from __future__ import annotations

import logging
import threading
from typing import Final, Protocol, Self, final, runtime_checkable

from strandline.errors import StorageError, StrandlineError
from strandline.model.cursor import Cursor
from strandline.model.retention import SlotLimits
from strandline.storage.env import Env
from strandline.storage.worker_thread import WorkerThread

_LOGGER: Final = logging.getLogger(__name__)

MOST: Final = 60.0
"""Longest interval in seconds; used where the log has no slot limits."""

LIMITS_INTERVAL: Final = 20.0
"""Seconds between two reads of limits without an idle limit: one may be set at any time."""

_TICK: Final = 0.25
"""Real seconds between two reads of the clock."""


class TouchableSlot(Protocol):
    """The part of a claimed slot that a heartbeat needs."""

    def advance(self, to: Cursor) -> None:
        """Durably move the position up to a cursor."""

    def touch(self) -> None:
        """Record that the holder is alive."""


@runtime_checkable
class Limited(Protocol):
    """A log that has limits for its slots."""

    def slot_limits(self) -> SlotLimits:
        """The limits as stored now."""


def heartbeat_interval(limits: SlotLimits) -> float:
    """Seconds between two heartbeats: a third of the idle limit, and a minute at most.

    Without an idle limit, it is the interval at which the limits are read again.

    >>> heartbeat_interval(SlotLimits(idle_seconds=30)), heartbeat_interval(SlotLimits())
    (10.0, 20.0)
    """
    return min(MOST, limits.idle_seconds / 3) if limits.idle_seconds else LIMITS_INTERVAL


@final
class SlotHeartbeat:
    """Sends heartbeats of a claimed slot in a background thread, while it is entered. Safe in threads.

    Each heartbeat reads the limit again, so that a changed limit needs no restart. A failed heartbeat is
    repeated. The holder learns that the slot was taken over or invalidated when it advances.
    """

    def __init__(self, slot: TouchableSlot, log: object, *, env: Env) -> None:
        self._slot = slot
        self._log = log
        self._clock = env.clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._read_limits()
        self._seen = env.clock.monotonic()
        self._thread = WorkerThread(self._run, name="strandline-heartbeat")

    def advance(self, to: Cursor) -> None:
        """Durably move the position up to a cursor."""
        with self._lock:
            self._slot.advance(to)  # no write if the slot is there already: the next heartbeat is in time

    def touch(self) -> None:
        """Record that the holder is alive."""
        with self._lock:
            self._touch()

    def beat(self) -> None:
        """Touch the slot if the interval is over."""
        if self._clock.monotonic() - self._seen >= self._every:
            with self._lock:
                if self._counts(self._read_limits()):
                    self._touch()
                else:
                    self._seen = self._clock.monotonic()  # without an idle limit nothing is written

    def if_needed(self) -> Self | None:
        """This heartbeat; None if the log is known to limit nothing that it would keep alive."""
        return self if self._counts(self._read_limits()) else None

    def _counts(self, limits: SlotLimits | None) -> bool:
        # A provisional slot, which no consumer has claimed yet, expires unless it is touched.
        return limits is None or bool(limits.idle_seconds or getattr(self._slot, "is_provisional", False))

    def _touch(self) -> None:
        now = self._clock.monotonic()  # before the write, which may take long: the next one must be in time
        self._slot.touch()
        self._seen = now

    def _read_limits(self) -> SlotLimits | None:
        """The current limits; None if the log has none. The interval follows them."""
        limits = self._log.slot_limits() if isinstance(self._log, Limited) else None
        self._every = MOST if limits is None else heartbeat_interval(limits)
        return limits

    def _run(self) -> None:
        while not self._stop.wait(_TICK):
            try:
                self.beat()
            except StorageError as error:
                _LOGGER.debug("A heartbeat failed and is repeated: %s", error)
            except StrandlineError as error:
                _LOGGER.debug("A slot needs no heartbeats any more: %s", error)
                return

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended: it was stopped, or the slot was lost."""
        return not self._thread.is_alive()

    def start(self) -> Self:
        """Start the thread; the first heartbeat follows after one interval."""
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def halt(self) -> None:
        """Start no further heartbeat; does not wait."""
        self._stop.set()

    def stop(self) -> None:
        """Send no more heartbeats; waits briefly for a running one."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
