"""Rounds of a metadata manager: its threads follow segment events, retry assignments and save snapshots."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Final

from strandline.errors import StrandlineError
from strandline.storage.clock import Clock
from strandline.storage.worker_thread import WorkerThread
from strandline.tier.metadata.events import EventFollower
from strandline.tier.metadata.snapshot import MetadataSnapshots
from strandline.tier.metadata.state import PartitionCopy, PositionWaiter

_LOGGER = logging.getLogger(__name__)
_ROUND: Final = 1.0
"""Seconds between retries; also how long the follower waits for events."""
_BREATH: Final = 0.0005
"""Pause in seconds between two partitions of a snapshot, for the follower and readers."""
_PAUSE: Final = 0.01
"""Pause in seconds of a manager without threads that waits for events."""


@dataclass(slots=True, eq=False)
class MetadataRounds:
    """The work of a manager, in two threads or step by step; refers to no manager, so that one can be dropped."""

    follower: EventFollower
    snapshots: MetadataSnapshots | None
    interval: float
    """Seconds between two snapshots."""
    clock: Clock
    is_background: bool
    closed: threading.Event = field(default_factory=threading.Event)
    """Set it to end the threads."""
    failure: str = ""
    """Why the last events could not be taken; empty if they could."""
    _due: float = field(init=False)
    _saving: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[WorkerThread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._due = self.clock.monotonic() + self.interval

    def start(self) -> None:
        """Start the threads, if it has any."""
        if self.is_background:
            self._threads = [
                WorkerThread(target, name=f"strandline-metadata-{name}")
                for name, target in (("follower", self._follow), ("maintenance", self._maintain))
            ]
            for thread in self._threads:
                thread.start()

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()
        self._threads = []

    def step(self) -> bool:
        """One round without waiting: take, apply, retry, save if it is time. False if no event arrived."""
        came = self._taken(0.0)
        self.tick()
        return came

    def wait(self, waiter: PositionWaiter, deadline: float) -> bool:
        """Block until the waiter is woken (True) or the time is over; raises the waiter's error."""
        if self.is_background:
            self.clock.wait(waiter.woken, max(0.0, deadline - self.clock.monotonic()))
        else:
            while not waiter.woken.is_set() and self.clock.monotonic() < deadline:
                if not self.step() and not waiter.woken.is_set():
                    self.clock.sleep(_PAUSE)
        if waiter.error is not None:
            raise waiter.error
        return waiter.woken.is_set()

    def tick(self) -> None:
        """Retry assignments, and save if it is time."""
        self.follower.retry()
        if self.clock.monotonic() >= self._due:
            self.save()
            self._due = self.clock.monotonic() + self.interval

    def save(self) -> None:
        """Take a snapshot if events were applied since the last; a failure is logged, and the next one retries."""
        with self._saving:
            if self.snapshots is None or not self.is_unsaved:
                return
            try:
                taken = self._take()
                self.snapshots.save(taken)
            except Exception as error:  # noqa: BLE001 - the events are durable, and a snapshot only saves time
                _LOGGER.warning("The snapshot of the segment cache failed, and is repeated: %s", error)
            else:
                for each in self.follower.partitions:
                    each.saved = taken[each.number].next if each.number in taken else 0

    @property
    def is_unsaved(self) -> bool:
        """Whether any position moved since the last snapshot."""
        return any(each.next != each.saved for each in self.follower.partitions)

    def _take(self) -> dict[int, PartitionCopy]:
        """One partition after another, so that the follower waits for one copy at most."""
        taken = {}
        for each in self.follower.partitions:
            if (copy := each.take()) is not None:
                taken[each.number] = copy
                self.clock.sleep(_BREATH)  # a lock that is retaken at once starves the waiting threads
        return taken

    def _taken(self, timeout: float) -> bool:
        try:
            came = self.follower.step(timeout)
        except StrandlineError as error:
            self.failure = str(error)
            _LOGGER.warning("Segment events cannot be taken now, and are tried again: %s", error)
            if self.is_background:
                self.clock.wait(self.closed, _ROUND)
            return False
        self.failure = ""
        return came

    def _follow(self) -> None:
        while not self.closed.is_set():
            try:
                self._taken(_ROUND)
            except Exception:
                _LOGGER.exception("Following segment events failed; it is retried.")
                self.clock.wait(self.closed, _ROUND)
        self.follower.subscription.close()  # idempotent: of a manager that was dropped, nothing else closes it

    def _maintain(self) -> None:
        while not self.clock.wait(self.closed, min(_ROUND, self.interval)):
            try:
                self.tick()
            except Exception:
                _LOGGER.exception("A round of the metadata manager failed; the next one follows.")
