"""Spark's executors as workers: a job per range, spans go out, descriptions of files come back.

Each worker fetches what its part needs; the rows of many keyed parts, and of a transform, are shuffled
(:mod:`~strandline.spark.pipelines.shuffle`). No record passes through the driver. A task that meets a Strandline error
returns it as its result, so that the driver raises exactly that error. Whatever else ends a job (a lost executor, a
killed Python worker) is :class:`JobFailed`, and the range is tried again from the table's cursor.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final, Literal, TypeAlias, cast

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from strandline.errors import JobFailed, StrandlineError
from strandline.log.read.planning import pack
from strandline.model.cursor import Span
from strandline.model.sink import Part, Written
from strandline.spark.failures import (
    GatewayError,
    UserFailures,
    is_out_of_memory,
    rerun_if_lost,
    unpicklable,
    unwrapped,
)
from strandline.spark.missing_modules import describing_task, lacking, located, missing_module
from strandline.spark.pipelines.shuffle import ShuffleJob, observed_reports, spans_per_reader
from strandline.spark.pipelines.transform import FrameTransform
from strandline.spark.task_payload import check_version, packed, unpacked
from strandline.tables.files.part import TablePart
from strandline.tables.work import InProcess, RangeTooLarge, assigned, is_shuffled, written

Place: TypeAlias = Literal["auto", "driver", "executors"]
"""Where a range is written: by its size, or always in the driver's process, or always by executors."""

JOB_BYTES: Final = 16 << 20
"""Bytes in memory from which a range is worth a Spark job, which costs about 0.1 seconds; smaller ones take less than
that in the driver."""

FRAME_BYTES: Final = 32 << 20
"""Bytes of all items in one job over Spark Connect: each of its tasks gets them, and a request has at most 128 MiB."""


class SparkWorkers:
    """Writes the parts of large ranges on executors, those of small ones in the driver; transforms run in Spark."""

    def __init__(
        self,
        spark: Any,
        place: Place = "auto",
        *,
        job_bytes: int = JOB_BYTES,
        transform: FrameTransform | None = None,
        columns: pa.Schema | None = None,
        reruns: bool = False,
    ) -> None:
        """Work with a session, classic or Spark Connect. ``columns`` are those of the transform's rows.

        ``reruns``: a job that lost its workers is run again here. A pipeline does that by itself, from its cursor.
        """
        self._reruns = reruns
        self._spark = spark
        self._labels = JobLabels(spark)
        self._jobs = jobs_of(spark)
        self._place = place
        self._job_bytes = job_bytes
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
        return self.sizes.total(spans) >= self._job_bytes

    def tasks(self, spans: Sequence[Span]) -> int:
        """As many as the cores, for large ranges a multiple of them; in the driver one."""
        return len(pack(spans, self._jobs.cores, self.sizes.of)) if self._uses_executors(spans) else 1

    def run(
        self, parts: Sequence[Part], spans: Sequence[Span], title: str, most: int | None = None
    ) -> Sequence[Written]:
        """Write the parts; see :class:`~strandline.tables.work.Workers`."""
        if not self._uses_executors(spans):
            return self._here.run(parts, spans, title, most)
        if self._is_cancelled:
            raise JobFailed(f"The pipeline is being stopped; nothing of this was committed: {title}")
        job = partial(self._run, parts, spans, title, most)
        return rerun_if_lost(job) if self._reruns else job()

    def _run(self, parts: Sequence[Part], spans: Sequence[Span], title: str, most: int | None) -> Sequence[Written]:
        self.ran_jobs += 1
        try:
            with self._labels.shown(title):
                is_by_rows = self._transform is not None or is_shuffled(parts)
                shuffle = partial(self._shuffled, parts, spans, most)
                done = shuffle() if is_by_rows else self._refetched(parts, spans, title, most)
        except JobFailed as error:
            raise self._failures.judged(error, error.__cause__) from error.__cause__
        self._failures.succeeded()
        return done

    def _refetched(
        self, parts: Sequence[Part], spans: Sequence[Span], title: str, most: int | None
    ) -> Sequence[Written]:
        what = "The sink's transform, or its codec,"
        items = [packed((part, list(own), most), what) for part, own in assigned(parts, spans)]
        answers = dict(self._jobs.run(items, _task))
        if len(answers) != len(items):
            raise JobFailed(f"Only {len(answers)} of {len(items)} tasks of a Spark job answered: {title}. Try again.")
        return [_result(answers[number]) for number in range(len(items))]

    def _shuffled(self, parts: Sequence[Part], spans: Sequence[Span], most: int | None) -> Sequence[Written]:
        groups = spans_per_reader(spans, self.tasks(spans))
        job = ShuffleJob(
            self._spark, cast("Sequence[TablePart]", parts), groups, partial(check_version, version("strandline")), most
        )
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
        self._labels.cancel()


def _reports(frame: Any) -> list[Written]:
    return [_result(bytes(row.answer)) for row in frame.collect()]


@dataclass(slots=True)
class JobLabels:
    """Names the jobs of a pipeline for operators, and cancels them. Their errors become Strandline's."""

    spark: Any

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
            jobs = jobs_of(self.spark)
            return [answer for _, answer in jobs.run([module.encode()] * jobs.cores, describing_task())]
        except (GatewayError, PySparkException, OSError):
            return []

    def cancel(self) -> None:
        """Cancel what runs."""
        with contextlib.suppress(GatewayError, PySparkException, OSError):
            if isinstance(self.spark, SparkSession):
                self.spark.sparkContext.cancelJobGroup(self._tag)
            else:
                self.spark.interruptTag(self._tag)


def _task(item: bytes) -> bytes:
    """One part, on an executor. Its answer is the report, or the Strandline error that it met."""
    try:
        part, spans, most = unpacked(item)
        return pickle.dumps(written(part, spans, most))
    except RangeTooLarge as error:
        return pickle.dumps(error)
    except StrandlineError as error:
        return pickle.dumps(located(error))
    except MemoryError:
        return pickle.dumps(MemoryError("A worker had too little memory."))


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


def jobs_of(spark: Any) -> RddJobs | FrameJobs:
    """The jobs of a session."""
    return RddJobs(spark) if isinstance(spark, SparkSession) else FrameJobs(spark)


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
    reason = [*_raised(lines)][-1:] or details or named or lines or [repr(error)]
    return JobFailed(f"A Spark job failed, and nothing of it was committed ({title}): {reason[0][:300]}")


def _raised(lines: Sequence[str]) -> Iterator[str]:
    """The errors at the ends of Python tracebacks."""
    is_traceback = False
    for line in lines:
        if line.startswith("Traceback "):
            is_traceback = True
        elif is_traceback and not line.startswith(" "):
            is_traceback = False
            yield line
