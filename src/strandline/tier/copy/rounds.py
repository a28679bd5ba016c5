"""Rounds of a tierer: the results of their steps, when to sweep, and the back-off after a failed round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from strandline.errors import StrandlineError
from strandline.model.segments import SegmentMetadata
from strandline.storage.clock import Clock

_SWEEP_EVERY: Final = 3600.0
"""Seconds between two searches for objects that crashes left behind."""
_FIRST_PAUSE: Final = 0.1
"""Seconds before the first retry of a failed round; doubled for each further one."""


@dataclass(frozen=True, slots=True)
class TieringStep:
    """One finished step of the tierer: ``what`` is copied, removed, retired, expired, swept,
    merged, erased or replaced.
    """

    what: str
    path: str
    first: int
    last: int
    size: int
    seconds: float = field(default=0.0, compare=False)
    """Duration of a copy."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round."""

    copied: tuple[SegmentMetadata, ...] = ()
    removed: tuple[SegmentMetadata, ...] = ()
    """Leftovers of crashes, and segments that were replaced a grace period ago: their objects are deleted."""
    expired: tuple[SegmentMetadata, ...] = ()
    swept: tuple[str, ...] = ()
    """Objects without an event."""
    retired: tuple[SegmentMetadata, ...] = ()
    """Segments that diverged from the log; their common part is in other segments."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of a compaction."""

    made: tuple[SegmentMetadata, ...] = ()
    """The new segments."""
    replaced: tuple[SegmentMetadata, ...] = ()
    """The segments that the new ones replace; deleted after the grace period, or at once if values were erased."""
    erased: int = 0
    """Records whose values were erased."""
    held_back: int = 0
    """Segments whose records the hot tier still has: what they hold of purged keys is erased after it is trimmed."""


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
