"""Wall time of a long-running process that does not follow sudden clock changes at once."""

from __future__ import annotations

import logging
import threading
from typing import Final, final

from strandline.model.cursor import SECOND
from strandline.model.times import DAY, TOLERANCE
from strandline.storage.clock import Clock

_LOGGER: Final = logging.getLogger(__name__)


@final
class SteadyTime:
    """The wall clock, without its jumps: what goes by age goes by this. Safe in threads.

    If the clock jumps, time goes on from before the jump, as fast as it passes; if it still says so a day later, it is
    believed. A clock that drifts, or is slewed, is followed. What the time was before the process began, nobody knows.
    """

    def __init__(self, clock: Clock, what: str) -> None:
        """Begin with what the clock says; ``what`` goes by it, and is named in warnings."""
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
                    "This machine's clock was set %s by %d s while %s was in use: what goes by age there goes as if it "
                    "had not been, for a day. Set it right if it is wrong.",
                    "ahead" if jump > 0 else "back", abs(jump) // SECOND, self._what,
                )  # fmt: skip
            elif passed - self._jumped >= DAY:
                self._offset, self._jumped = wall - passed, None
            return passed + self._offset

    def _passed(self) -> int:
        return round(self._clock.boot() * SECOND)
