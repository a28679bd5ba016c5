"""Spark's executors as a pool: tasks go out, their results or errors come back.

A task that meets a Strandline error, or too little memory, returns that as its result, so that the driver raises
exactly that error. Whatever else ends a job (a lost executor, a killed Python worker) is :class:`JobFailed`.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from strandline.errors import JobFailed, StrandlineError
from strandline.spark.failures import (
    GatewayError,
    is_out_of_memory,
    rerun_if_lost,
    tracebacks,
    unpicklable,
    unwrapped,
)
from strandline.spark.missing_modules import describing_task, lacking, located, missing_module
from strandline.spark.task_payload import packed, unpacked
from strandline.tables.work import RangeTooLarge

R = TypeVar("R")

FRAME_BYTES: Final = 32 << 20
"""Bytes of all items in one job over Spark Connect: each of its tasks gets them, and a request has at most 128 MiB."""


class ExecutorPool:
    """Runs tasks on executors, of a classic session or over Spark Connect; names its jobs for operators, cancels them.

    As the pool of a bulk job, results come when all tasks are done. A failed task is repeated by Spark, and a job that
    ended because workers were killed, or did not start in time, is run again. An error of this package is raised as it
    is, a module that executors lack is ``MissingExtra``, and whatever else ends the job is ``JobFailed``.
    """

    def __init__(self, spark: Any) -> None:
        """Work with a session."""
        self.spark = spark
        self._jobs = RddJobs(spark) if isinstance(spark, SparkSession) else FrameJobs(spark)

    @property
    def count(self) -> int:
        """How many tasks run at once."""
        return self._jobs.cores

    def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
        """The results; see :class:`~strandline.storage.task_pool.TaskPool`."""
        if not tasks:
            return

        def answers() -> list[Any]:
            with self.shown(title):
                return self._answers(tasks, title, "A task of the job")

        for number, found in enumerate(rerun_if_lost(answers)):
            yield number, _raised(found)

    def results(self, tasks: Sequence[Callable[[], R]], title: str, what: str) -> list[R]:
        """The results of one job, within :meth:`shown`; ``what`` names a task that cannot be sent to executors."""
        return [_raised(found) for found in self._answers(tasks, title, what)]

    def _answers(self, tasks: Sequence[Callable[[], object]], title: str, what: str) -> list[Any]:
        items = [packed(task, what) for task in tasks]
        answers = dict(self._jobs.run(items, _done))
        if len(answers) != len(items):
            raise JobFailed(f"Only {len(answers)} of {len(items)} tasks of a Spark job answered: {title}. Try again.")
        return [pickle.loads(answers[number]) for number in range(len(items))]  # noqa: S301 - written by our own task

    @property
    def _tag(self) -> str:
        return f"strandline-{id(self)}"

    @contextlib.contextmanager
    def shown(self, title: str) -> Iterator[None]:
        """Show what runs within the block; ``JobFailed`` for an error of Spark, or the Strandline error behind it."""
        try:
            if isinstance(self.spark, SparkSession):
                self.spark.sparkContext.setJobGroup(self._tag, title, interruptOnCancel=True)
            else:
                self.spark.addTag(self._tag)
            yield
        except pickle.PicklingError as error:
            raise unpicklable("The transform", error) from error
        except (GatewayError, PySparkException, OSError) as error:
            found = unwrapped(error)
            if isinstance(found, StrandlineError):
                raise found from error
            if module := missing_module(error):
                raise lacking(module, self._described(module)) from error
            if is_out_of_memory(error):
                raise MemoryError(f"A worker had too little memory ({title}).") from error
            raise _failed(title, error) from error
        finally:
            with contextlib.suppress(GatewayError, PySparkException, OSError):
                if isinstance(self.spark, SparkSession):
                    self.spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
                    self.spark.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
                else:
                    self.spark.removeTag(self._tag)

    def _described(self, module: str) -> list[bytes]:
        """Which Python executors have; nothing if they cannot even say that."""
        try:
            return [answer for _, answer in self._jobs.run([module.encode()] * self.count, describing_task())]
        except (GatewayError, PySparkException, OSError):
            return []

    def cancel(self) -> None:
        """Cancel what runs."""
        with contextlib.suppress(GatewayError, PySparkException, OSError):
            if isinstance(self.spark, SparkSession):
                self.spark.sparkContext.cancelJobGroup(self._tag)
            else:
                self.spark.interruptTag(self._tag)


def executors(spark: Any) -> ExecutorPool:
    """The executors of a session, for bulk jobs: ``sl.bulk.export(..., pool=sl.spark.executors(spark))``."""
    return ExecutorPool(spark)


def _done(item: bytes) -> bytes:
    """One task, on an executor. Its answer is the result, or the error that it met."""
    try:
        return pickle.dumps(unpacked(item)())
    except RangeTooLarge as error:
        return pickle.dumps(error)
    except StrandlineError as error:
        return pickle.dumps(located(error))
    except MemoryError:
        return pickle.dumps(MemoryError("A worker had too little memory."))


def _raised(answer: Any) -> Any:
    """The result of a task; raises it if it is an error."""
    if isinstance(answer, BaseException):
        raise answer
    return answer


@dataclass(slots=True)
class RddJobs:
    """Jobs of a classic session: the cheapest ones that Spark has."""

    spark: SparkSession

    @property
    def cores(self) -> int:
        """Tasks that run at once."""
        return int(self.spark.sparkContext.defaultParallelism)

    def run(self, items: Sequence[bytes], task: Callable[[bytes], bytes]) -> Iterator[tuple[int, bytes]]:
        """The answer of each item, with its number."""
        context = self.spark.sparkContext
        numbered = list(enumerate(items))
        yield from context.parallelize(numbered, len(items)).map(lambda one: (one[0], task(one[1]))).collect()


@dataclass(slots=True)
class FrameJobs:
    """Jobs of any session, also of Spark Connect: ``mapInArrow`` over a range, whose numbers name the items."""

    spark: Any
    _cores: int = 0

    @property
    def cores(self) -> int:
        """Tasks that run at once: the partitions that Spark itself gives a range."""
        if not self._cores:
            from pyspark.sql import functions as sql

            parts = self.spark.range(0, 1 << 20).select(sql.spark_partition_id().alias("part")).distinct().count()
            self._cores = max(1, int(parts))
        return self._cores

    def run(self, items: Sequence[bytes], task: Callable[[bytes], bytes]) -> Iterator[tuple[int, bytes]]:
        """The answer of each item, with its number; in several jobs if one request cannot hold all items."""
        first = 0
        for group in _by_bytes(items, FRAME_BYTES):
            for number, answer in self._answers(group, task):
                yield first + number, answer
            first += len(group)

    def _answers(self, held: list[bytes], task: Callable[[bytes], bytes]) -> Iterator[tuple[int, bytes]]:
        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column("id").to_pylist():
                    answer = task(held[number])
                    yield pa.RecordBatch.from_arrays(
                        [pa.array([number], pa.int64()), pa.array([answer], pa.binary())], ["number", "answer"]
                    )

        frame = self.spark.range(0, len(held), 1, len(held)).mapInArrow(work, "number long, answer binary")
        for row in frame.collect():
            yield int(row.number), bytes(row.answer)


def _by_bytes(items: Sequence[bytes], most: int) -> Iterator[list[bytes]]:
    """Groups of items in order, each up to a size; a larger item is alone.

    >>> [*_by_bytes([b"ab", b"c", b"defg", b"h"], 3)]
    [[b'ab', b'c'], [b'defg'], [b'h']]
    """
    held: list[bytes] = []
    size = 0
    for item in items:
        if held and size + len(item) > most:
            yield held
            held, size = [], 0
        held.append(item)
        size += len(item)
    if held:
        yield held


def _failed(title: str, error: BaseException) -> JobFailed:
    """The reason is the last error of a Python traceback, gRPC's details, or the first line that names an exception."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    details = [line.strip() for line in lines if line.strip().startswith("details = ")]
    named = [line.strip() for line in lines if "Exception" in line or "Error" in line]
    raised = [found.splitlines()[-1] for found in tracebacks(error)]
    reason = raised[-1:] or details or named or lines or [repr(error)]
    return JobFailed(f"A Spark job failed, and nothing of it was committed ({title}): {reason[0][:300]}")
