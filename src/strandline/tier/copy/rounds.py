"""Rounds of a tierer, one after the other: when to sweep, and the back-off after a failed one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from strandline.errors import StrandlineError
from strandline.storage.clock import Clock

_SWEEP_EVERY: Final = 3600.0
"""Seconds between two searches for objects that crashes left behind."""
_FIRST_PAUSE: Final = 0.1
"""Seconds before the first retry of a failed round; doubled for each further one."""


class RunRound(Protocol):
    """Makes one round."""

    def __call__(self, *, sweep: bool) -> bool:
        """Returns whether a round was made. ``sweep``: it also searches for objects that crashes left behind."""


def run_rounds(
    run: RunRound,
    on_failure: Callable[[StrandlineError], None],
    stop: threading.Event,
    *,
    pause: float,
    clock: Clock,
) -> None:
    """Run rounds until ``stop`` is set. After a failure the back-off is at most ``pause`` seconds.

    ``on_failure`` logs the error of a round, which is then repeated; or raises it, which ends the rounds.
    """
    swept: float | None = None
    failures = 0
    while not stop.is_set():
        now = clock.monotonic()
        sweep = swept is None or now - swept >= _SWEEP_EVERY
        try:
            is_made = run(sweep=sweep)
        except StrandlineError as error:
            on_failure(error)
            failures += 1
            clock.wait(stop, min(pause, _FIRST_PAUSE * 2.0 ** min(failures, 20)))
            continue
        failures = 0
        swept = now if sweep and is_made else swept
        clock.wait(stop, pause)
