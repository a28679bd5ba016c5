"""Trimming and garbage collection in the background of a consumer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from strandline.storage.clock import Clock

_LOGGER: Final = logging.getLogger(__name__)

_PATIENCE: Final = 10.0
"""Seconds that stopping waits for a round that is under way."""


class BackgroundCollector:
    """Calls ``collect`` every so many seconds from a daemon thread, until it is stopped.

    A round that fails is logged and the next one comes in its time: consuming goes on without it. What is collected
    is decided by the queue; a round that a process's end cuts off leaves nothing wrong behind.
    """

    def __init__(self, collect: Callable[[], None], *, every: float, clock: Clock, name: str) -> None:
        """Begin now; the first round is ``every`` seconds away."""
        self._stop = threading.Event()
        # The thread knows neither this object nor the consumer: both may go away without being closed.
        arguments = (collect, every, clock, name, self._stop)
        self._thread = threading.Thread(target=_run, args=arguments, name="strandline-collector", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether its thread is alive."""
        return self._thread.is_alive()

    def halt(self) -> None:
        """Let no further round begin; does not wait."""
        self._stop.set()

    def stop(self) -> None:
        """Let no further round begin, and wait for one that is under way, but not for long."""
        self._stop.set()
        self._thread.join(_PATIENCE)


def _run(collect: Callable[[], None], every: float, clock: Clock, name: str, stop: threading.Event) -> None:
    while not clock.wait(stop, every):
        try:
            collect()
        except Exception as error:  # noqa: BLE001 - whatever it was, the next round may go well
            _LOGGER.warning("Collecting %s failed, and is tried again in %g s: %s", name, every, error)
