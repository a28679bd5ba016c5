"""The pool of a bulk command: threads of this process, or within ``strandline spark`` the executors of its session."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from strandline.errors import InvalidInput
from strandline.storage.task_pool import TaskPool, ThreadPool

SESSION: Final[ContextVar[Callable[[], Any] | None]] = ContextVar("session", default=None)
"""Starts the session of ``strandline spark``; None for a command that runs in this process."""


def task_pool(workers: int | None) -> TaskPool:
    """The pool of the running command; starts the session if it runs on Spark."""
    session = SESSION.get()
    if session is None:
        return ThreadPool(workers)
    if workers is not None:
        raise InvalidInput("--workers is for threads: on Spark, the cores of the session decide (--master 'local[4]').")
    from strandline.spark.executor_pool import executors

    return executors(session())


def is_on_spark() -> bool:
    """Whether the running command is one of ``strandline spark``."""
    return SESSION.get() is not None


def spark_session() -> Any:
    """The session of ``strandline spark``; started by the first call."""
    session = SESSION.get()
    if session is None:
        raise InvalidInput("This command runs on Spark: use it as a command of 'strandline spark'.")
    return session()
