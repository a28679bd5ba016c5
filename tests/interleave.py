"""Deterministic scheduler: threads run one at a time, in an order drawn from a seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Final

_STUCK_SECONDS: Final = 30.0
"""Real seconds after which a run counts as stuck."""


class Interleaver:
    """Runs tasks so that exactly one is running at any time; the seed decides which one continues.

    The order can change only where a task calls :meth:`point`: make it a hook of a
    :class:`~strandline.testing.faulty.FaultyStore`, and writers interleave at each operation. A task must not wait
    for another one in any other way.

    >>> seen = []
    >>> def task(name):
    ...     for step in (1, 2):
    ...         order.point()
    ...         seen.append(f"{name}{step}")
    >>> order = Interleaver(seed=3)
    >>> order.run([lambda: task("a"), lambda: task("b")])
    >>> seen
    ['a1', 'b1', 'a2', 'b2']
    """

    def __init__(self, seed: int) -> None:
        """Draw the order from ``seed``."""
        self._random = random.Random(seed)
        self._gates: list[threading.Lock] = []
        self._unfinished: list[int] = []
        self._tasks: dict[int, int] = {}
        self._over = threading.Lock()
        self._failures: list[BaseException] = []

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all tasks to their ends, then raise the error of the first failing one."""
        self._gates = [threading.Lock() for _ in tasks]
        self._unfinished = list(range(len(tasks)))
        self._over.acquire()
        threads = []
        for number, task in enumerate(tasks):
            self._gates[number].acquire()
            thread = threading.Thread(target=self._work, args=(number, task), daemon=True)
            threads.append(thread)
            thread.start()
        self._run_next()
        if not self._over.acquire(timeout=_STUCK_SECONDS):
            raise RuntimeError("The tasks are stuck: one waits for another by other means than point().")
        self._over.release()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def point(self) -> None:
        """Perhaps run another task, and return when it is this one's turn again; outside a run, do nothing."""
        number = self._tasks.get(threading.get_ident())
        if number is None:
            return
        chosen = self._random.choice(self._unfinished)
        if chosen != number:
            self._gates[chosen].release()
            self._gates[number].acquire()

    def _work(self, number: int, task: Callable[[], None]) -> None:
        self._gates[number].acquire()
        self._tasks[threading.get_ident()] = number
        try:
            task()
        except BaseException as failure:  # noqa: BLE001 - raised again by run(), in the test's own thread
            self._failures.append(failure)
        finally:
            del self._tasks[threading.get_ident()]
            self._unfinished.remove(number)
            self._run_next()

    def _run_next(self) -> None:
        if self._unfinished:
            self._gates[self._random.choice(self._unfinished)].release()
        else:
            self._over.release()
