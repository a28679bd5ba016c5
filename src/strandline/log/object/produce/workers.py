"""Threads of a producer. All are daemons: a hanging store must not keep the program from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Bell(threading.Event):
    """An event that one thread waits for and that may be set from anywhere, even by the garbage collector.

    The standard event takes a lock when it is set. The collector may run within that very lock, and the finalizer of a
    producer, setting the event, would wait for itself. What this one is made of can be interrupted by itself.
    """

    def __init__(self) -> None:
        """A silent bell."""
        super().__init__()
        self._rung: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it was rung since it was last cleared."""
        return not self._rung.empty()

    def set(self) -> None:
        """Ring."""
        if self._rung.empty():
            self._rung.put(None)

    def clear(self) -> None:
        """Be silent again."""
        try:
            while True:
                self._rung.get_nowait()
        except Empty:
            return

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it rings (True) or the time has passed (False)."""
        try:
            self._rung.get(timeout=timeout)
        except Empty:
            return False
        self._rung.put(None)
        return True


class Workers:
    """Up to so many threads, started as they are needed. Used by one thread at a time.

    Not the standard pool, because that is waited for when the program ends, with everything that is queued in it.
    """

    def __init__(self, most: int, name: str) -> None:
        """Start at most ``most`` threads."""
        self._most = most
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> Future[R]:
        """Have the work done by one of the threads."""
        future: Future[R] = Future()

        def run() -> None:
            if future.done() or not future.set_running_or_notify_cancel():
                return
            try:
                result = work(*args, **options)
            except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(run)
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            thread = threading.Thread(target=_work, args=(self._queue, self._idle), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine gives no more: those that run will do it, if there are any
                if not self._threads:
                    future.set_exception(error)
            else:
                self._threads.append(thread)
        return future

    def close(self) -> None:
        """Let the threads end after what is queued; does not wait for them."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        """Wait until they have ended."""
        for thread in self._threads:
            thread.join()


def _work(queue: SimpleQueue[Callable[[], None] | None], idle: threading.Semaphore) -> None:
    while (run := queue.get()) is not None:
        run()
        del run  # what it holds must not live on until there is more to do
        idle.release()
