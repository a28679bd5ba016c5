"""Background threads: one that can be joined again after an interruption, and an event that any code may set."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any


class WorkerThread(threading.Thread):
    """A daemon thread; :meth:`join` returns only when its work is over, also after an interrupted join.

    CPython marks a thread as stopped once a signal interrupts a join of it: the next join returns at once, while the
    thread still works.
    """

    def __init__(self, target: Callable[..., object], *arguments: Any, name: str) -> None:
        super().__init__(target=target, args=arguments, name=name, daemon=True)
        self._is_over = threading.Event()

    def run(self) -> None:
        """Do the work."""
        try:
            super().run()
        finally:
            self._is_over.set()

    @property
    def has_ended(self) -> bool:
        """Whether its work is over."""
        return self._is_over.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the work is over, for at most ``timeout`` seconds.

        Not while the interpreter shuts down: daemon threads are frozen by then, and their work never ends.
        """
        if sys.is_finalizing():
            return
        self._is_over.wait(timeout)


class ReentrantEvent(threading.Event):
    """An event that one thread waits for and any code may set, even the garbage collector.

    The standard event takes a lock when it is set. If the collector ran within that lock, the finalizer of a
    producer would deadlock by setting the event. This one is reentrant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signals: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it was set since it was last cleared."""
        return not self._signals.empty()

    def set(self) -> None:
        """Set the event, and wake the waiting thread."""
        if self._signals.empty():
            self._signals.put(None)

    def clear(self) -> None:
        """Reset it."""
        try:
            while True:
                self._signals.get_nowait()
        except Empty:
            return

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set (True), or until the timeout (False)."""
        try:
            self._signals.get(timeout=timeout)
        except Empty:
            return False
        self._signals.put(None)
        return True
