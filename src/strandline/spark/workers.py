"""Spark's executors as workers: a job per range, spans go out, descriptions of files come back.

No record passes through the driver or between Python and the JVM. A task that meets a Strandline error returns it as
its result, so that the driver raises exactly that error. Whatever else ends a job (a lost executor, a killed Python
worker) is :class:`JobFailed`, and the range is tried again from the table's cursor.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from strandline.errors import JobFailed, StrandlineError, UnsupportedVersion
from strandline.followers.workers import InProcess
from strandline.log.planning import pack
from strandline.model.cursor import Span
from strandline.model.sink import Part, Written
from strandline.tables.work import assigned, written

Place: TypeAlias = Literal["auto", "driver", "executors"]
"""Where a range is written: by its size, or always in the driver's process, or always by executors."""

JOB_BYTES: Final = 16 << 20
"""Stored bytes from which a range is worth a Spark job, which costs about 0.1 seconds; smaller ones take less than that
in the driver."""


class SparkWorkers:
    """Writes the parts of large ranges on executors, those of small ones in the driver."""

    def __init__(self, spark: Any, place: Place = "auto", *, job_bytes: int = JOB_BYTES) -> None:
        """Work with a session, classic or Spark Connect."""
        self._jobs = RddJobs(spark) if isinstance(spark, SparkSession) else FrameJobs(spark)
        self._place = place
        self._job_bytes = job_bytes
        self._here = InProcess()
        self._is_cancelled = False
        self.ran_jobs = 0
        """How many ranges were written by executors."""

    def _uses_executors(self, spans: Sequence[Span]) -> bool:
        if self._place != "auto":
            return self._place == "executors"
        return sum(span.size for span in spans) >= self._job_bytes

    def tasks(self, spans: Sequence[Span]) -> int:
        """As many as the cores, for large ranges a multiple of them; in the driver one."""
        return len(pack(spans, self._jobs.cores)) if self._uses_executors(spans) else 1

    def run(self, parts: Sequence[Part], spans: Sequence[Span], title: str) -> Sequence[Written]:
        """Write the parts; see :class:`~strandline.followers.workers.Workers`."""
        if not self._uses_executors(spans):
            return self._here.run(parts, spans, title)
        if self._is_cancelled:
            raise JobFailed(f"The pipeline is being stopped; nothing of this was committed: {title}")
        self.ran_jobs += 1
        package = version("strandline")
        items = [_pickled((package, part, list(own))) for part, own in assigned(parts, spans)]
        answers = dict(self._jobs.run(items, _task, title))
        if len(answers) != len(items):
            raise JobFailed(f"Only {len(answers)} of {len(items)} tasks of a Spark job answered: {title}. Try again.")
        return [_result(answers[number]) for number in range(len(items))]

    def cancel(self) -> None:
        """Cancel the running job, if any; safe in another thread."""
        self._is_cancelled = True
        self._jobs.cancel()


def _pickled(value: object) -> bytes:
    """Also functions that a user wrote in a notebook."""
    from pyspark import cloudpickle

    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def _task(item: bytes) -> bytes:
    """One part, on an executor. Its answer is the report, or the Strandline error that it met."""
    try:
        package, part, spans = pickle.loads(item)  # noqa: S301 - written by our own driver
        mine = version("strandline")
        if package != mine:
            raise UnsupportedVersion(
                f"The driver has version {package} of strandline and an executor has {mine}: install the same on both."
            )
        return pickle.dumps(written(part, spans))
    except StrandlineError as error:
        return pickle.dumps(error)


def _result(answer: bytes) -> Written:
    found = pickle.loads(answer)  # noqa: S301 - written by our own task
    if isinstance(found, Written):
        return found
    raise found


@dataclass(slots=True)
class RddJobs:
    """Jobs of a classic session: the cheapest ones that Spark has."""

    spark: SparkSession

    @property
    def cores(self) -> int:
        """Tasks that run at once."""
        return int(self.spark.sparkContext.defaultParallelism)

    def run(self, items: Sequence[bytes], task: Callable[[bytes], bytes], title: str) -> Iterator[tuple[int, bytes]]:
        """The answer of each item, with its number."""
        context = self.spark.sparkContext
        numbered = list(enumerate(items))
        try:
            context.setJobGroup(self._group, title, interruptOnCancel=True)
            yield from context.parallelize(numbered, len(items)).map(lambda one: (one[0], task(one[1]))).collect()
        except (Py4JError, PySparkException, OSError) as error:
            raise _failed(title, error) from error
        finally:
            with contextlib.suppress(Py4JError, OSError):
                context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
                context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]

    @property
    def _group(self) -> str:
        return f"strandline-{id(self)}"

    def cancel(self) -> None:
        """Cancel what runs."""
        with contextlib.suppress(Py4JError, OSError):
            self.spark.sparkContext.cancelJobGroup(self._group)


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

    def run(self, items: Sequence[bytes], task: Callable[[bytes], bytes], title: str) -> Iterator[tuple[int, bytes]]:
        """The answer of each item, with its number."""
        held = list(items)

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column("id").to_pylist():
                    answer = task(held[number])
                    yield pa.RecordBatch.from_arrays(
                        [pa.array([number], pa.int64()), pa.array([answer], pa.binary())], ["number", "answer"]
                    )

        tag = self._tag
        try:
            self.spark.addTag(tag)
            frame = self.spark.range(0, len(items), 1, len(items)).mapInArrow(work, "number long, answer binary")
            for row in frame.collect():
                yield int(row.number), bytes(row.answer)
        except (Py4JError, PySparkException, OSError) as error:
            raise _failed(title, error) from error
        finally:
            with contextlib.suppress(Py4JError, PySparkException, OSError):
                self.spark.removeTag(tag)

    @property
    def _tag(self) -> str:
        return f"strandline-{id(self)}"

    def cancel(self) -> None:
        """Cancel what runs."""
        with contextlib.suppress(Py4JError, PySparkException, OSError):
            self.spark.interruptTag(self._tag)


def _failed(title: str, error: BaseException) -> JobFailed:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next(
        (line for line in lines if "Exception" in line or "Error" in line), lines[0] if lines else repr(error)
    )
    return JobFailed(f"A Spark job failed, and nothing of it was committed ({title}): {reason[:300]}")
