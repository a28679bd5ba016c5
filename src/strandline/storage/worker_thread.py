"""A thread that can be joined again after a signal interrupted the join."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


class WorkerThread(threading.Thread):
    """A daemon thread; :meth:`join` returns only when its work is over, also after an interrupted join.

    CPython marks a thread as stopped once a signal interrupts a join of it: the next join returns at once, while the
    thread still works.
    """

    def __init__(self, target: Callable[..., object], *arguments: Any, name: str) -> None:
        """Not started yet."""
        super().__init__(target=target, args=arguments, name=name, daemon=True)
        self._is_over = threading.Event()

    def run(self) -> None:
        """Do the work."""
        try:
            super().run()
        finally:
            self._is_over.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the work is over, for at most ``timeout`` seconds.

        Not while the interpreter shuts down: daemon threads are frozen by then, and their work never ends.
        """
        if sys.is_finalizing():
            return
        self._is_over.wait(timeout)
