"""Slot heartbeats: a thread touches a claimed slot at a third of its idle limit, even while a batch is applied."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol, Self, final, runtime_checkable

from strandline.errors import StorageError, StrandlineError
from strandline.model.cursor import Cursor
from strandline.model.retention import SlotLimits
from strandline.storage.clock import Clock
from strandline.storage.worker_thread import WorkerThread

_LOGGER: Final = logging.getLogger(__name__)

MOST: Final = 60.0
"""Seconds between two heartbeats at most; so it is where nothing is known of a limit."""

_LOOK: Final = 20.0
"""Seconds between two looks at limits of which none is for idle slots: one may be set at any time."""

_TICK: Final = 0.25
"""Real seconds between two looks at the clock."""


class Beating(Protocol):
    """The part of a claimed slot that a heartbeat needs."""

    def advance(self, to: Cursor) -> None:
        """Durably move the position up to a cursor."""

    def touch(self) -> None:
        """Say that the holder is alive."""


@runtime_checkable
class Limited(Protocol):
    """A log that knows within which limits its slots pin."""

    def slot_limits(self) -> SlotLimits:
        """The limits as they are stored now."""


@runtime_checkable
class Provisional(Protocol):
    """A claimed slot, or what stands for one, that knows whether it pins for a while only."""

    @property
    def is_provisional(self) -> bool:
        """Whether nobody has claimed it yet, so that it goes unless its consumer is seen."""


def heartbeat_interval(limits: SlotLimits) -> float:
    """Seconds between two heartbeats: a third of the idle limit, and a minute at most.

    Without a limit it is what passes between two looks whether there is one now.

    >>> heartbeat_interval(SlotLimits(idle_seconds=30)), heartbeat_interval(SlotLimits())
    (10.0, 20.0)
    """
    return min(MOST, limits.idle_seconds / 3) if limits.idle_seconds else _LOOK


@final
class SlotHeartbeat:
    """A claimed slot that is touched in time by a thread of its own, for as long as it is entered. Safe in threads.

    The limit is read again with each heartbeat: who changes it does not have to restart consumers. What a heartbeat
    cannot write now, it tries again; that the slot was taken over or invalidated, its holder hears when it advances.
    """

    def __init__(
        self, slot: Beating, log: object, *, clock: Clock, is_alive: Callable[[], bool] = lambda: True
    ) -> None:
        """Keep ``slot`` of ``log`` alive while it is entered and ``is_alive`` says so."""
        self._slot = slot
        self._log = log
        self._clock = clock
        self._is_alive = is_alive
        self._lock = threading.Lock()
        self._stop = threading.Event()
        limits = self._limits()
        self._every = MOST if limits is None else heartbeat_interval(limits)
        self._seen = clock.monotonic()
        self._thread = WorkerThread(self._run, name="strandline-heartbeat")

    def advance(self, to: Cursor) -> None:
        """Durably move the position up to a cursor."""
        with self._lock:
            self._slot.advance(to)  # one that stands there already is not seen by this: the next heartbeat is in time

    def touch(self) -> None:
        """Say that the holder is alive."""
        with self._lock:
            self._touch()

    def beat(self) -> None:
        """Say so if it is time."""
        if self._clock.monotonic() - self._seen >= self._every and self._is_alive():
            with self._lock:
                limits = self._limits()
                self._every = MOST if limits is None else heartbeat_interval(limits)
                if limits is None or limits.idle_seconds or self._is_provisional():
                    self._touch()
                else:
                    self._seen = self._clock.monotonic()  # nobody asks when it was seen: nothing is written

    def _is_provisional(self) -> bool:
        return isinstance(self._slot, Provisional) and self._slot.is_provisional

    def _touch(self) -> None:
        now = self._clock.monotonic()  # before it is written, which may take long: the next one must be in time
        self._slot.touch()
        self._seen = now

    def _limits(self) -> SlotLimits | None:
        """The limits as they are now; None if the log does not tell."""
        return self._log.slot_limits() if isinstance(self._log, Limited) else None

    def _run(self) -> None:
        while not self._stop.wait(_TICK):
            try:
                self.beat()
            except StorageError as error:
                _LOGGER.debug("A heartbeat failed and is repeated: %s", error)
            except StrandlineError as error:
                _LOGGER.debug("A slot needs no heartbeats any more: %s", error)
                return

    def start(self) -> Self:
        """Begin; the first heartbeat is an interval away."""
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def halt(self) -> None:
        """Begin no further heartbeat; does not wait."""
        self._stop.set()

    def stop(self) -> None:
        """Send no more heartbeats; waits for one that is under way, but not for long."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
