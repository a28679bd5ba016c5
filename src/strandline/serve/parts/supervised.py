"""A part of a server in a thread of its own: run, tried again, paused, stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from strandline.errors import NotReady
from strandline.serve.config.changes import PartName
from strandline.serve.parts.states import PartState, Status, sentence, what_next
from strandline.storage.env import Env
from strandline.storage.metrics import PART_FAILURES, PART_RUNNING
from strandline.storage.worker_thread import WorkerThread

_LOGGER: Final = logging.getLogger("strandline.serve")


class Part(Protocol):
    """What a server shows and controls, whatever runs it."""

    @property
    def state(self) -> PartState:
        """As it is now."""

    def pause(self) -> None:
        """Stop it, until it is resumed. Idempotent."""

    def resume(self) -> None:
        """Let it run again: also one that has stopped by an error. Idempotent."""

    def stop(self) -> None:
        """Let it finish what it does, and end; does not wait."""

    def join(self, timeout: float) -> bool:
        """Wait until it has ended (True), or until the timeout (False)."""


class StateKeeper:
    """The state of one part; logs and counts what becomes of it. Thread-safe: each change is one assignment."""

    def __init__(self, part: PartName, env: Env) -> None:
        self.state = PartState(part, since=env.clock.now())
        self._env = env
        self._lock = threading.Lock()
        PART_RUNNING.labels(str(part)).set(0)

    def works(self, position: int | None = None) -> None:
        """It does what it should, up to a position."""
        now = self.state
        if now.status is not Status.RUNNING or now.failures:
            if now.status is Status.FAILING:
                _LOGGER.info("%s works again.", now.part)
            self.becomes(Status.RUNNING)
        if position is not None and position != self.state.position:
            with self._lock:
                self.state = replace(self.state, position=position)

    def failed(self, error: BaseException) -> float | None:
        """It has failed; returns the seconds until it is tried again, or None if it stops."""
        pause = what_next(error, self.state.failures + 1, self._env.chance.jitter())
        said, part = sentence(error), self.state.part
        if isinstance(error, NotReady) and self.state.status is Status.STARTING:  # as everything that starts
            with self._lock:
                self.state = replace(self.state, error=said, failures=self.state.failures + 1)
            return pause
        PART_FAILURES.labels(str(part)).inc()
        if pause is None:
            _LOGGER.error("%s has stopped: %s", part, said)
        elif said != self.state.error:
            level = logging.INFO if isinstance(error, NotReady) else logging.WARNING
            _LOGGER.log(level, "%s failed, and is tried again: %s", part, said)
        self.becomes(Status.STOPPED if pause is None else Status.FAILING, said)
        return pause

    def becomes(self, status: Status, error: str = "") -> None:
        """Its status, from now on."""
        with self._lock:
            self.state = self.state.moved(status, self._env.clock.now(), error)
        PART_RUNNING.labels(str(self.state.part)).set(status is Status.RUNNING)

    def end(self) -> None:
        """The part is removed, with its metrics."""
        for metric in (PART_RUNNING, PART_FAILURES):
            try:
                metric.remove(str(self.state.part))
            except KeyError:
                continue


class Supervised:
    """A part that follows something, in a thread of its own."""

    def __init__(
        self, part: PartName, run: Callable[[threading.Event, Callable[[int | None], None]], None], env: Env
    ) -> None:
        """``run`` works until the event is set, and reports each position: begun again, it continues there."""
        self._run, self._env = run, env
        self._keeper = StateKeeper(part, env)
        self._changing = threading.Lock()
        self._stop = threading.Event()
        self._thread: WorkerThread | None = None

    @property
    def state(self) -> PartState:
        """As it is now."""
        return self._keeper.state

    def start(self) -> None:
        """Start its thread."""
        with self._changing:
            self._start()

    def _start(self) -> None:
        self._stop = threading.Event()
        self._keeper.becomes(Status.STARTING)
        name = f"strandline-{self.state.part}"
        self._thread = WorkerThread(self._supervise, self._stop, name=name)
        self._thread.start()

    def pause(self) -> None:
        """Stop it, until it is resumed."""
        with self._changing:
            self._stop.set()
            if self._thread is not None:
                self._thread.join()
            self._keeper.becomes(Status.PAUSED)

    def resume(self) -> None:
        """Let it run again."""
        with self._changing:  # of two requests at once only one starts a thread
            if self.state.status in (Status.PAUSED, Status.STOPPED, Status.ENDED):
                self._start()

    def stop(self) -> None:
        """Let it finish what it does, and end."""
        self._stop.set()

    def join(self, timeout: float) -> bool:
        """Wait until it has ended."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        return thread.has_ended

    def _supervise(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                self._run(stop, self._keeper.works)
            except Exception as error:  # noqa: BLE001 - shown as this part's own, and stops no other
                pause = self._keeper.failed(error)
                if pause is None:
                    return
                self._env.clock.wait(stop, pause)
            else:
                if not stop.is_set():
                    self._keeper.becomes(Status.ENDED)
                return
