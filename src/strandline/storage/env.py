"""What the package asks of the machine, as one argument: clock, disk and source of randomness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.disk import DISK, Disk


@dataclass(frozen=True, slots=True)
class Env:
    """Clock, disk and chance of whatever is opened with it: the machine's own, unless a test gives others.

    An opened object hands the same value to all its parts. ``Env(clock=ManualClock())`` replaces only the clock.
    """

    clock: Clock = CLOCK
    disk: Disk = DISK
    chance: Chance = CHANCE

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the machine's own by its name: what is unpickled in another process uses that process's own."""
        return "SYSTEM" if self is SYSTEM else (Env, (self.clock, self.disk, self.chance))


SYSTEM: Final = Env()
"""The machine that the process runs on."""
