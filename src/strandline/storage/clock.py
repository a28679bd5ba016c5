"""Clock and random source as arguments, so that a simulator can replace both."""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from pathlib import Path
from typing import Final, Protocol, final, runtime_checkable
from uuid import UUID

from strandline.model.cursor import SECOND
from strandline.model.times import DAY, TOLERANCE


@runtime_checkable
class Clock(Protocol):
    """Time, and waiting for it."""

    def now(self) -> int:
        """Wall-clock microseconds since the epoch. May jump; never decides correctness."""

    def now_ns(self) -> int:
        """Wall-clock nanoseconds since the epoch, at the lowest cost: called once per record."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""

    def boot(self) -> float:
        """Seconds on a clock that never goes back and also counts the time that the machine was suspended."""

    def sleep(self, seconds: float) -> None:
        """Block for about this long."""

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """Block until the event is set (True) or the time has passed (False)."""


@runtime_checkable
class Chance(Protocol):
    """Randomness: names that never collide, and jitter."""

    def uuid(self) -> UUID:
        """A fresh identifier."""

    def jitter(self) -> float:
        """A number from 0 up to 1."""


# On Linux the monotonic clock stops while the machine is suspended, and this one does not; macOS has no such
# clock, but there CLOCK_MONOTONIC (unlike time.monotonic) continues.
_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class SystemClock:
    """The machine's clock."""

    def now(self) -> int:
        """Wall-clock microseconds since the epoch."""
        return time.time_ns() // 1000

    now_ns = staticmethod(time.time_ns)

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    def boot(self) -> float:
        """Seconds, including suspension, where the system supports it; elsewhere as :meth:`monotonic`."""
        return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)

    def sleep(self, seconds: float) -> None:
        """Block for about this long."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """Block until the event is set (True) or the time has passed (False)."""
        return event.wait(timeout)


class SystemChance:
    """The machine's source of randomness; safe across forks."""

    def uuid(self) -> UUID:
        """A random (version 4) identifier."""
        return uuid.uuid4()

    def jitter(self) -> float:
        """A number from 0 up to 1."""
        return random.random()


def boot_id() -> UUID:
    """Identifies this boot of the machine; all zeros if the system does not provide it."""
    try:
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return UUID(int=0)


CLOCK = SystemClock()
CHANCE = SystemChance()


_LOGGER: Final = logging.getLogger(__name__)


@final
class SteadyTime:
    """The wall clock without jumps, for retention by age. Thread-safe.

    After a jump, time continues from before it at the normal rate; if the clock still differs a day later, it is
    accepted. Drift and slewing are followed. A clock that was wrong before the process started is not detected.
    """

    def __init__(self, clock: Clock, what: str) -> None:
        """Start with the clock's time; ``what`` names its user in warnings."""
        self._clock = clock
        self._what = what
        self._offset = clock.now() - self._passed()
        self._jumped: int | None = None
        self._lock = threading.Lock()

    def now(self) -> int:
        """Microseconds since the epoch."""
        with self._lock:
            passed, wall = self._passed(), self._clock.now()
            jump = wall - passed - self._offset
            if abs(jump) <= TOLERANCE:
                self._offset, self._jumped = wall - passed, None
            elif self._jumped is None:
                self._jumped = passed
                _LOGGER.warning(
                    "This machine's clock was set %s by %d s while %s was in use: for a day, retention by age ignores "
                    "that. Correct the clock if it is wrong.",
                    "ahead" if jump > 0 else "back", abs(jump) // SECOND, self._what,
                )  # fmt: skip
            elif passed - self._jumped >= DAY:
                self._offset, self._jumped = wall - passed, None
            return passed + self._offset

    def _passed(self) -> int:
        return round(self._clock.boot() * SECOND)
