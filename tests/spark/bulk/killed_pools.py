"""Pools whose tasks die on executors, provably within their work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from strandline.storage.task_pool import TaskPool

R = TypeVar("R")


@dataclass(frozen=True)
class DiesOnce:
    """A task whose Python worker is killed where it calls a function for the first time; its repetition lives."""

    task: Callable[[], Any]
    function: str
    mark: str
    """A file that the dying worker leaves: the name of the task's class."""

    def __call__(self) -> Any:
        sys.setprofile(self._watch)
        try:
            return self.task()
        finally:
            sys.setprofile(None)

    def _watch(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_name != self.function:
            return
        try:
            handle = os.open(self.mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(handle, type(self.task).__name__.encode())
        os.kill(os.getpid(), signal.SIGKILL)


def die_at(function: str, time: int) -> None:
    """Kill this process where its main thread calls a function for the n-th time."""
    seen = 0

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal seen
        if event == "call" and frame.f_code.co_name == function:
            seen += 1
            if seen == time:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


class KillingPool:
    """A pool that kills the worker of one task of each job, within the given function."""

    def __init__(self, pool: TaskPool, folder: Path, function: str) -> None:
        self.pool = pool
        self.folder = folder
        self.function = function
        self.jobs = 0

    @property
    def count(self) -> int:
        return self.pool.count

    def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
        mark = str(self.folder / f"killed-{self.jobs}")
        self.jobs += 1
        return self.pool.run([DiesOnce(task, self.function, mark) for task in tasks], title)

    def killed(self) -> set[str]:
        """The kinds of tasks that were killed; one of each job."""
        marks = [self.folder / f"killed-{number}" for number in range(self.jobs)]
        assert marks
        assert all(mark.exists() for mark in marks), "a job lost no task"
        return {mark.read_text() for mark in marks}


class KilledOnce:
    """A transform that kills the Python worker in which it runs, the first time."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __call__(self, rows):
        if rows.num_rows and not os.path.exists(self.mark):
            with open(self.mark, "x"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return rows
