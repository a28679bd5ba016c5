"""Spark's executors as the pool that runs the tasks of a bulk job."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from strandline.errors import JobFailed, StrandlineError
from strandline.spark.failures import rerun_if_lost
from strandline.spark.missing_modules import located
from strandline.spark.pipelines.workers import JobLabels, jobs_of
from strandline.spark.task_payload import packed, unpacked

R = TypeVar("R")


class ExecutorPool:
    """Runs the tasks of a bulk job on executors, of a classic session or over Spark Connect.

    Results come when all tasks are done. A failed task is repeated by Spark, and a job that ended because workers were
    killed, or did not start in time, is run again. An error of this package is raised as it is, a module that executors
    lack is ``MissingExtra``, and whatever else ends the job is ``JobFailed``.
    """

    def __init__(self, spark: Any) -> None:
        """Work with a session."""
        self._jobs = jobs_of(spark)
        self._labels = JobLabels(spark)

    @property
    def count(self) -> int:
        """How many tasks run at once."""
        return self._jobs.cores

    def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
        """The results; see :class:`~strandline.storage.task_pool.TaskPool`."""
        if not tasks:
            return
        items = [packed(task, "A task of the job") for task in tasks]
        answers = rerun_if_lost(lambda: self._answers(items, title))
        if len(answers) != len(items):
            raise JobFailed(f"Only {len(answers)} of {len(items)} tasks of a Spark job answered: {title}. Try again.")
        for number, answer in answers:
            found = pickle.loads(answer)  # noqa: S301 - written by our own task
            if isinstance(found, StrandlineError):
                raise found
            yield number, found

    def _answers(self, items: Sequence[bytes], title: str) -> list[tuple[int, bytes]]:
        with self._labels.shown(title):
            return list(self._jobs.run(items, _done))


def executors(spark: Any) -> ExecutorPool:
    """The executors of a session, for bulk jobs: ``sl.bulk.export(..., pool=sl.spark.executors(spark))``."""
    return ExecutorPool(spark)


def _done(item: bytes) -> bytes:
    """One task, on an executor. Its answer is the result, or the Strandline error that it met."""
    try:
        return pickle.dumps(unpacked(item)())
    except StrandlineError as error:
        return pickle.dumps(located(error))
