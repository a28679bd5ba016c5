"""Rounds of many parts in one small pool: a part that waits costs no thread."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Final

from strandline.serve.config.changes import PartName
from strandline.serve.parts.states import PartState, Status
from strandline.serve.parts.supervised import StateKeeper
from strandline.storage.env import Env
from strandline.storage.worker_thread import WorkerThread

THREADS: Final = 4
"""Rounds at a time."""
_LONGEST_SLEEP: Final = 3600.0


class RoundPart:
    """A part that has something to do now and then. Its rounds never overlap."""

    def __init__(
        self,
        rounds: Rounds,
        part: PartName,
        round_: Callable[[threading.Event], float | None],
        close: Callable[[], None],
    ) -> None:
        self.keeper = StateKeeper(part, rounds.env)
        self.stopping = threading.Event()
        self._rounds, self._round, self._close = rounds, round_, close
        self._running = threading.Lock()
        self._ended = threading.Event()
        self.turn = 0
        """The number of its newest appointment: former ones are void."""

    @property
    def state(self) -> PartState:
        """As it is now."""
        return self.keeper.state

    def run(self) -> float | None:
        """One round; returns the seconds until the next one, or None if there is none."""
        with self._running:
            if self.stopping.is_set():
                self._end()
                return None
            if self.state.status in (Status.PAUSED, Status.STOPPED):
                return None
            try:
                pause = self._round(self.stopping)
            except Exception as error:  # noqa: BLE001 - shown as this part's own, and stops no other
                return self.keeper.failed(error)
            self.keeper.works()
            return pause

    def pause(self) -> None:
        """No rounds, until it is resumed; waits for the one that runs."""
        with self._running:
            self.keeper.becomes(Status.PAUSED)

    def resume(self) -> None:
        """A round now, and others after it."""
        if self.state.status in (Status.PAUSED, Status.STOPPED):
            self.keeper.becomes(Status.STARTING)
            self._rounds.due(self, 0.0)

    def stop(self) -> None:
        """End it after the round that runs."""
        self.stopping.set()
        self._rounds.due(self, 0.0)

    def join(self, timeout: float) -> bool:
        """Wait until it has ended, and closed what it had open."""
        return self._ended.wait(timeout)

    def _end(self) -> None:
        if not self._ended.is_set():
            try:
                self._close()
            finally:
                self._ended.set()


class Rounds:
    """The scheduler of all rounds: one thread that waits, and a pool that works."""

    def __init__(self, env: Env, threads: int = THREADS) -> None:
        self.env = env
        self._lock = threading.Lock()
        self._due: list[tuple[float, int, RoundPart, int]] = []
        self._numbers = count()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="strandline-round")
        self._thread = WorkerThread(self._schedule, name="strandline-rounds")
        self._thread.start()

    def add(
        self,
        part: PartName,
        round_: Callable[[threading.Event], float | None],
        close: Callable[[], None] = lambda: None,
        *,
        after: float = 0.0,
    ) -> RoundPart:
        """Add a part. ``round_`` returns the seconds until the next one, or None; its event is set when it should end.

        ``close`` is called once, after the last round.
        """
        added = RoundPart(self, part, round_, close)
        self.due(added, after)
        return added

    def due(self, part: RoundPart, seconds: float) -> None:
        """The next round of a part, this soon; it has no other appointment then."""
        with self._lock:
            part.turn += 1
            heapq.heappush(self._due, (self.env.clock.monotonic() + seconds, next(self._numbers), part, part.turn))
        self._wake.set()

    def close(self) -> None:
        """End the scheduler; parts are stopped before."""
        self._stop.set()
        self._wake.set()
        self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def has_failed(self) -> bool:
        """Whether the scheduler has ended, though nobody has closed it."""
        return self._thread.has_ended and not self._stop.is_set()

    def _schedule(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            pause = _LONGEST_SLEEP
            with self._lock:
                now = self.env.clock.monotonic()
                while self._due and self._due[0][0] <= now:
                    _, _, part, turn = heapq.heappop(self._due)
                    if turn == part.turn:
                        self._pool.submit(self._run, part)
                if self._due:
                    pause = min(pause, self._due[0][0] - now)
            self.env.clock.wait(self._wake, pause)

    def _run(self, part: RoundPart) -> None:
        pause = part.run()
        if pause is not None:
            self.due(part, pause)
