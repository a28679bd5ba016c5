"""Spark's executors as workers: a job per range, spans go out, descriptions of files come back.

Each worker fetches what its part needs; the rows of many keyed parts, and of a transform, are shuffled
(:mod:`~strandline.spark.pipelines.shuffle`). No record passes through the driver. A job that fails is tried again from
the table's cursor.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from strandline.errors import JobFailed
from strandline.log.read.planning import divided, pack
from strandline.model.cursor import Span
from strandline.spark.executor_pool import ExecutorPool
from strandline.spark.failures import UserFailures, rerun_if_lost
from strandline.spark.pipelines.shuffle import ShuffleJob, observed_reports
from strandline.spark.pipelines.transform import FrameTransform
from strandline.spark.task_payload import check_version
from strandline.tables.exchange import exchanged
from strandline.tables.files.part import TablePart
from strandline.tables.routes.work import RoutedReport, RoutedTask
from strandline.tables.work import InProcess, assigned, is_exchanged, is_shuffled, written
from strandline.tables.written import Written

Place: TypeAlias = Literal["auto", "driver", "executors"]
"""Where a range is written: by its size, or always in the driver's process, or always by executors."""

_WHAT: Final = "The sink's transform, or its codec,"
JOB_BYTES: Final = 16 << 20
"""Bytes in memory from which a range is worth a Spark job, which costs about 0.1 seconds; smaller ones take less than
that in the driver."""


class SparkWorkers:
    """Writes the parts of large ranges on executors, those of small ones in the driver; transforms run in Spark."""

    def __init__(
        self,
        spark: Any,
        place: Place = "auto",
        *,
        transform: FrameTransform | None = None,
        columns: pa.Schema | None = None,
        reruns: bool = False,
    ) -> None:
        """``columns``: of the transform's rows. ``reruns``: a job that lost its workers is run again here."""
        self._reruns = reruns
        self._spark = spark
        self._pool = ExecutorPool(spark)
        self._place = place
        self._transform = transform
        self._columns = columns
        self._here = InProcess()
        self.sizes = self._here.sizes
        self._is_cancelled = False
        self._failures = UserFailures()
        self.ran_jobs = 0
        """How many ranges were written by executors."""

    def _uses_executors(self, spans: Sequence[Span]) -> bool:
        if self._transform is not None:
            return True
        if self._place != "auto":
            return self._place == "executors"
        return self.sizes.total(spans) >= JOB_BYTES

    def works_here(self, spans: Sequence[Span]) -> bool:
        """Whether a range is written in the driver, since that is quicker."""
        return not self._uses_executors(spans)

    def run_routed(self, tasks: Sequence[RoutedTask], title: str) -> Sequence[RoutedReport]:
        """Write the tables of a route in one job; see :class:`~strandline.followers.routes.jobs.RouteWorkers`."""
        if self._is_cancelled:
            raise JobFailed(f"The pipeline is being stopped; nothing of this was committed: {title}")
        self.ran_jobs += 1
        try:
            with self._pool.shown(title):
                done = self._pool.results(tasks, title, "A sink's transform, or its codec,")
        except JobFailed as error:
            raise self._failures.judged(error, error.__cause__) from error.__cause__
        self._failures.succeeded()
        return done

    def tasks(self, spans: Sequence[Span]) -> int:
        """As many as the cores, for large ranges a multiple of them; in the driver one."""
        return len(pack(spans, self._pool.count, self.sizes.of)) if self._uses_executors(spans) else 1

    def run(
        self, parts: Sequence[TablePart], spans: Sequence[Span], title: str, most: int | None = None
    ) -> Sequence[Written]:
        """Write the parts; see :class:`~strandline.tables.work.Workers`."""
        if not self._uses_executors(spans):
            return self._here.run(parts, spans, title, most)
        if self._is_cancelled:
            raise JobFailed(f"The pipeline is being stopped; nothing of this was committed: {title}")
        job = partial(self._run, parts, spans, title, most)
        return rerun_if_lost(job) if self._reruns else job()

    def _run(
        self, parts: Sequence[TablePart], spans: Sequence[Span], title: str, most: int | None
    ) -> Sequence[Written]:
        self.ran_jobs += 1
        try:
            with self._pool.shown(title):
                if self._transform is not None or is_shuffled(parts):
                    done = self._shuffled(parts, spans, most)
                elif is_exchanged(parts):
                    done = exchanged(parts, spans, most, lambda tasks: self._pool.results(tasks, title, _WHAT))
                else:
                    tasks = [partial(written, part, list(own), most) for part, own in assigned(parts, spans)]
                    done = self._pool.results(tasks, title, _WHAT)
        except JobFailed as error:
            raise self._failures.judged(error, error.__cause__) from error.__cause__
        self._failures.succeeded()
        return done

    def _shuffled(self, parts: Sequence[TablePart], spans: Sequence[Span], most: int | None) -> list[Written]:
        groups = [group for group in divided(spans, max(1, self.tasks(spans))) if group]
        job = ShuffleJob(self._spark, parts, groups, partial(check_version, version("strandline")), most)
        if self._transform is None or self._columns is None:
            return _reports(job.answers())
        frame, seen = job.transformed(self._transform, self._columns)
        writers = _reports(frame)
        readers = observed_reports(seen, len(groups))
        missing = [number for number in range(len(groups)) if number not in readers]
        extra = _reports(job.missing_reports(missing)) if missing else []
        return [*readers.values(), *extra, *writers]

    def cancel(self) -> None:
        """Cancel the running job, if any; safe in another thread."""
        self._is_cancelled = True
        self._pool.cancel()


def _reports(frame: Any) -> list[Written]:
    return [pickle.loads(row.answer) for row in frame.collect()]  # noqa: S301 - written by our own tasks
