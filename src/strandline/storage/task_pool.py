"""Pools that run independent tasks side by side: threads of this process, or Spark's executors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar, final

from strandline.model.arguments import Positive, checked

R = TypeVar("R")
T = TypeVar("T")


def side_by_side(action: Callable[[T], R], items: Sequence[T], *, threads: int, name: str) -> list[R]:
    """The results of an action on each item, in order, in up to so many threads; raises the first error."""
    if len(items) < 2:  # noqa: PLR2004 - nothing to do side by side
        return [action(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), name) as pool:
        return list(pool.map(action, items))


class TaskPool(Protocol):
    """Runs independent tasks side by side. A task is a picklable function without arguments; its result is small."""

    @property
    def count(self) -> int:
        """How many tasks run at once."""

    def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
        """The results as they arrive, each with the number of its task; raises the first error of a task.

        A task may run more than once, also at the same time, so it must be idempotent. ``title`` describes the job to
        operators.
        """


@final
@checked
class ThreadPool:
    """Runs tasks in threads of this process. Reading, decoding and compressing run outside of Python's lock.

    >>> sorted(ThreadPool(2).run([lambda: "a", lambda: "b"], "letters"))
    [(0, 'a'), (1, 'b')]
    """

    def __init__(self, count: Positive | None = None) -> None:
        """Use ``count`` threads; None: one for each core that this process may use."""
        self._count = count or len(os.sched_getaffinity(0))

    @property
    def count(self) -> int:
        """How many tasks run at once."""
        return self._count

    def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
        """The results as they arrive; when it is interrupted, tasks that have begun are finished."""
        pool = ThreadPoolExecutor(self._count, f"strandline {title}")
        try:
            numbers: dict[Future[R], int] = {pool.submit(task): number for number, task in enumerate(tasks)}
            rest = set(numbers)
            while rest:
                done, rest = wait(rest, return_when=FIRST_COMPLETED)
                for future in done:
                    yield numbers[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
