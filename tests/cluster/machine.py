"""A simulated machine: a disk that loses power, a clock of its own, a line to the lease, and a node while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from strandline.node.node import Node
from strandline.testing.faulty import FaultyStore
from strandline.testing.simdisk import SimulatedAction, SimulatedDisk

R = TypeVar("R")

_EPOCH: Final = 1_700_000_000_000_000
_DURABLE: Final = frozenset({"sync", "sync_folder", "rename"})


class Time:
    """The one true time of a simulation, in seconds; no machine is told of it."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        """Let it pass."""
        self.now += max(0.0, seconds)


class MachineClock:
    """One machine's view of the time: it runs a little faster or slower, and its wall clock is whatever it is.

    Sleeping moves the time for all. Satisfies :class:`~strandline.storage.clock.Clock`.
    """

    def __init__(self, time: Time, *, drift: float = 0.0, skew: float = 0.0) -> None:
        """``drift`` is how many seconds it is ahead after each; ``skew`` how many its wall clock is off."""
        self._time = time
        self._rate = 1.0 + drift
        self.skew = skew
        self.missed = 0.0
        """Seconds that the machine was suspended: only :meth:`boot` and the wall clock have counted them."""

    def now(self) -> int:
        """Wall-clock microseconds since the epoch."""
        return _EPOCH + int((self._time.now * self._rate + self.skew) * 1e6)

    def now_ns(self) -> int:
        """The same in nanoseconds."""
        return self.now() * 1000

    def monotonic(self) -> float:
        """Seconds since the simulation began, without suspension."""
        return (self._time.now - self.missed) * self._rate

    def boot(self) -> float:
        """Seconds since the simulation began."""
        return self._time.now * self._rate

    def sleep(self, seconds: float) -> None:
        """Let the time pass at once."""
        self._time.advance(seconds)

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """The same, unless the event is set."""
        if not event.is_set():
            self._time.advance(timeout or 0.0)
        return event.is_set()


class WatchedDisk(SimulatedDisk):
    """A simulated disk that tells when something has become durable, and has not been answered yet.

    There a test lets the machine stand still while all others go on.
    """

    def __init__(self, seed: int) -> None:
        """Begin empty; nobody is told."""
        super().__init__(seed)
        self.told: Callable[[], None] | None = None
        self.asked: Callable[[], None] | None = None
        """Called before a sync: other threads may already see what was written."""

    @property
    def is_armed(self) -> bool:
        """Whether something is arranged to fail."""
        return bool(self._interruptions)

    def disarm(self) -> None:
        """Let nothing more fail that was arranged."""
        self._interruptions.clear()
        self._stops = None

    def _call(
        self,
        action: SimulatedAction,
        path: str,
        work: Callable[[], R],
        *,
        half: Callable[[], object] = lambda: None,
        unsynced: Callable[[], object] = lambda: None,
        failed: Callable[[], object] = lambda: None,
    ) -> R:
        if self.asked is not None and action == "sync":
            self.asked()
        done = super()._call(action, path, work, half=half, unsynced=unsynced, failed=failed)
        if self.told is not None and action in _DURABLE:
            self.told()
        return done


@dataclass(slots=True, eq=False)
class Machine:
    """A machine and, while it runs, the node on it."""

    name: str
    disk: WatchedDisk
    clock: MachineClock
    line: FaultyStore
    """The lease's store, as this machine reaches it."""
    node: Node | None = None
    life: int = 0
    """Grows with each start of the node: who knows an earlier one knows a dead process."""
    founds: bool = False
    """Whether it is told to begin the log if there is none."""
    wakes: float = 0.0
    """The node is left alone until then."""
    paused: float = 0.0
    """It stands still until then."""
    starts: float = 0.0
    """It is down until then at least."""
    idle: bool = False
    """Whether its last step only waited."""
    role: str = ""
    """What it was last seen to be."""
    generation: int = 0
    """Which copy of the log it was last seen to have."""

    @property
    def condition(self) -> str:
        """What the node on it does, or that it is down."""
        return "down" if self.node is None else self.node.condition

    @property
    def running(self) -> Node:
        """The node on it, which runs."""
        if self.node is None:
            raise AssertionError(f"{self.name} is down")
        return self.node
