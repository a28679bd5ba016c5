"""A manual clock, and seeded randomness."""

from __future__ import annotations

import random
import threading
from typing import Final
from uuid import UUID

from strandline.errors import InvalidInput

_LOOK_EVERY: Final = 0.001
"""Real seconds between two reads of the manual time while waiting for an event."""

_EPOCH: Final = 1_700_000_000_000_000
"""Start of manual time: microseconds, in November 2023."""


def _ticks(seconds: float) -> int:
    """Microseconds; at least one for a positive time, or a waiter for the remainder would wait forever."""
    return max(round(seconds * 1e6), int(seconds > 0))


class ManualClock:
    """A clock that stands still until it is moved; wall time and monotonic time move together, except for suspension.

    With ``auto`` (for one thread) a sleep moves the time itself and returns at once, and so does waiting for
    an event that is not set. Without it (for several) sleepers and waiters block until another thread calls
    :meth:`advance`, or sets their event.

    >>> clock = ManualClock()
    >>> clock.sleep(2.5)
    >>> clock.monotonic(), clock.slept
    (2.5, [2.5])
    """

    def __init__(self, *, auto: bool = True, now: int = _EPOCH) -> None:
        """Begin at ``now`` microseconds of wall time, and at 0 monotonic seconds."""
        self._auto = auto
        self._began = now
        self._passed = 0  # in microseconds: sums of floats would drift
        self._suspended = 0
        self._moved = threading.Condition()
        self._blocked = 0
        self.slept: list[float] = []
        """Requested duration of each :meth:`sleep`, in order."""

    def now(self) -> int:
        """Wall-clock microseconds since the epoch."""
        with self._moved:
            return self._began + self._passed + self._suspended

    def now_ns(self) -> int:
        """The same in nanoseconds."""
        return self.now() * 1000

    def monotonic(self) -> float:
        """Seconds since this clock was made."""
        with self._moved:
            return self._passed / 1e6

    def boot(self) -> float:
        """Seconds since this clock was made, suspended ones included."""
        with self._moved:
            return (self._passed + self._suspended) / 1e6

    def advance(self, seconds: float) -> None:
        """Move the time forward, and wake the sleepers whose time is over."""
        if seconds < 0:
            raise InvalidInput(f"Time cannot go back by {-seconds} s; set_wall() makes the wall clock jump.")
        with self._moved:
            self._passed += _ticks(seconds)
            self._moved.notify_all()

    def suspend(self, seconds: float) -> None:
        """Suspend the machine: the wall clock and :meth:`boot` continue for ``seconds``, monotonic time does not."""
        with self._moved:
            self._suspended += _ticks(seconds)

    def set_wall(self, now: int) -> None:
        """Make the wall clock jump, back or forth, as a machine's may; monotonic time does not change."""
        with self._moved:
            self._began = now - self._passed - self._suspended

    def sleep(self, seconds: float) -> None:
        """Move the time by this much (``auto``), or block until it was moved so far."""
        with self._moved:
            self.slept.append(seconds)
            if not self._auto:
                deadline = self._passed + _ticks(seconds)
                self._block(+1)
                self._moved.wait_for(lambda: self._passed >= deadline)
                self._block(-1)
                return
        self.advance(max(seconds, 0.0))

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """Block until the event is set (True) or the manual time has passed (False)."""
        if event.is_set():
            return True
        if self._auto and timeout is not None:
            self.advance(max(timeout, 0.0))
            return event.is_set()
        with self._moved:
            deadline = None if timeout is None else self._passed + _ticks(timeout)
            self._block(+1)
        try:
            while not event.wait(_LOOK_EVERY):
                with self._moved:
                    if deadline is not None and self._passed >= deadline:
                        return event.is_set()
            return True
        finally:
            with self._moved:
                self._block(-1)

    def wait_until_blocked(self, threads: int, *, patience: float = 10.0) -> bool:
        """Block, for at most ``patience`` real seconds, until this number of threads sleep or wait on this clock.

        So a test of several threads can be sure that the other one sleeps before it moves time.
        """
        with self._moved:
            return self._moved.wait_for(lambda: self._blocked >= threads, patience)

    def _block(self, change: int) -> None:
        self._blocked += change
        self._moved.notify_all()


class SeededChance:
    """The same identifiers and the same jitter for the same seed.

    >>> SeededChance(7).uuid() == SeededChance(7).uuid()
    True
    """

    def __init__(self, seed: int) -> None:
        """Begin the sequence of ``seed``."""
        self._random = random.Random(seed)

    def uuid(self) -> UUID:
        """The next identifier (version 4); no two of one sequence are alike."""
        return UUID(int=self._random.getrandbits(128), version=4)

    def jitter(self) -> float:
        """The next number from 0 up to 1."""
        return self._random.random()
