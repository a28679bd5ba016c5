"""Spark jobs with a shuffle: readers decode records, writers merge the rows of a part and write its files.

For tables of many keyed parts, and for transforms that Spark runs. Rows travel as Arrow; those of a keyed table are
shuffled in blobs of many rows, each an Arrow stream for one part. No record passes through the driver.

Readers check that they were given every record of their spans, and report that; the driver adds the reports up. Without
a transform, reports travel with the blobs. Past a transform they travel as an observed metric: a set of reports, so
that a repeated or speculative task changes nothing. If a report is missing, because the transform did not read all of
its input, those spans are read once more.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Observation
from pyspark.sql import functions as sql
from pyspark.sql.types import BinaryType, StructField, StructType

from strandline.errors import SchemaRefused
from strandline.model.cursor import Span
from strandline.spark.datasource.shaping import shaped
from strandline.spark.pipelines.transform import FrameTransform, spark_columns
from strandline.tables.files.part import PartReader, TablePart, complete_rows
from strandline.tables.rows.types import storable, stored
from strandline.tables.work import records_of
from strandline.tables.written import Written

_REPORT: Final = "_strandline_report"
_BLOBS: Final = "part int, blob binary"
_ANSWERS: Final = "number int, answer binary"
_ANSWER_SCHEMA: Final = pa.schema({"number": pa.int32(), "answer": pa.binary()})
_BLOB_SCHEMA: Final = pa.schema({"part": pa.int32(), "blob": pa.binary()})
_METRIC_SECONDS: Final = 60.0
_LOGGER: Final = logging.getLogger(__name__)

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class ShuffleJob:
    """One range, as DataFrames of a session, classic or Spark Connect. ``check`` runs first in every task."""

    spark: Any
    parts: Sequence[TablePart]
    groups: Sequence[Sequence[Span]]
    """The spans of each reader."""
    check: Callable[[], None]
    most: int | None = None
    """Bytes in memory that a reader may read, about."""

    def answers(self) -> Any:
        """The job without a transform: (number, pickled report) of all readers and writers."""
        read, count = self._reading(), len(self.parts)
        parts = list(self.parts)

        def split(batches: Batches) -> Batches:
            for number in _numbers(batches):
                reader, rows = read(number)
                yield from _blobs(parts, rows)
                yield _one(_BLOB_SCHEMA, count, pickle.dumps(replace(reader.passed_on(), number=number)))

        blobs = self._each_reader().mapInArrow(split, _BLOBS)
        return self._merged(blobs, count + 1)

    def transformed(self, transform: FrameTransform, columns: pa.Schema) -> tuple[Any, Observation]:
        """The job with a transform: (number, pickled report) of all writers; and where readers' reports arrive."""
        read, part = self._reading(), self.parts[0]
        decoded = part.shape.decoded_schema()
        kinds = StructType([*spark_columns(decoded), StructField(_REPORT, BinaryType())])
        nullable = [field.with_nullable(True) for field in storable(decoded)]
        schema = pa.schema([*nullable, pa.field(_REPORT, pa.binary())])

        def decode(batches: Batches) -> Batches:
            for number in _numbers(batches):
                reader, rows = read(number)
                for batch in _limited(stored(table) for table in rows):
                    no_report = pa.nulls(batch.num_rows, pa.binary())
                    yield pa.RecordBatch.from_arrays([*batch.columns, no_report], schema=schema)
                answer = pickle.dumps(replace(reader.passed_on(), number=number))
                nulls = [pa.nulls(1, field.type) for field in nullable]
                yield pa.RecordBatch.from_arrays([*nulls, pa.array([answer])], schema=schema)

        seen = Observation()
        source = self._each_reader().mapInArrow(decode, kinds)
        observed = source.observe(seen, sql.collect_set(sql.col(_REPORT)).alias("reports"))
        rows = transform(observed.where(sql.col(_REPORT).isNull()).drop(_REPORT))
        if rows.columns != columns.names:
            raise SchemaRefused(
                f"The transform gives the columns {', '.join(rows.columns)} now, and gave {', '.join(columns.names)} "
                "when the pipeline was started: start it again."
            )
        return self._written(rows), seen

    def missing_reports(self, numbers: Sequence[int]) -> Any:
        """A job that reads the spans of some readers for their reports alone."""
        read = self._reading()
        wanted = list(numbers)

        def report(batches: Batches) -> Batches:
            for at in _numbers(batches):
                reader, rows = read(wanted[at])
                for _ in rows:
                    pass
                yield _one(_ANSWER_SCHEMA, wanted[at], pickle.dumps(replace(reader.passed_on(), number=wanted[at])))

        return self.spark.range(0, len(wanted), 1, len(wanted)).mapInArrow(report, _ANSWERS)

    def _each_reader(self) -> Any:
        return self.spark.range(0, len(self.groups), 1, len(self.groups))

    def _reading(self) -> Callable[[int], tuple[PartReader, Iterator[pa.Table]]]:
        groups, part, check, most = [list(group) for group in self.groups], self.parts[0], self.check, self.most

        def read(number: int) -> tuple[PartReader, Iterator[pa.Table]]:
            check()
            reader = part.reader()
            return reader, complete_rows(reader, records_of(groups[number], most), groups[number])

        return read

    def _written(self, rows: Any) -> Any:
        parts, check, end = list(self.parts), self.check, self._end
        if parts[0].takes == "offsets":

            def write(batches: Batches) -> Batches:
                check()
                tables = (parts[0].finished(pa.Table.from_batches([batch]), end) for batch in batches)
                yield _one(_ANSWER_SCHEMA, 0, pickle.dumps(parts[0].write_rows(tables, number=0)))

            return rows.mapInArrow(write, _ANSWERS)

        def split(batches: Batches) -> Batches:
            check()
            tables = (parts[0].finished(pa.Table.from_batches([batch]), end) for batch in batches)
            yield from _blobs(parts, tables)

        return self._merged(rows.mapInArrow(split, _BLOBS), len(parts))

    @property
    def _end(self) -> int:
        return max((span.next for group in self.groups for span in group), default=0)

    def _merged(self, blobs: Any, partitions: int) -> Any:
        """Bring the blobs of each part together, and write it; parts without rows, too."""
        parts, check = list(self.parts), self.check

        def merge(batches: Batches) -> Batches:
            found: dict[int, list[Any]] = {}
            for batch in batches:
                for number, blob in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
                    found.setdefault(number, []).append(blob.as_buffer() if blob.is_valid else None)
            for number, held in found.items():
                if number == len(parts):  # reports of readers
                    for report in held:
                        yield _one(_ANSWER_SCHEMA, number, bytes(report))
                    continue
                check()
                tables = (pa.ipc.open_stream(blob).read_all() for blob in held if blob is not None)
                yield _one(_ANSWER_SCHEMA, number, pickle.dumps(parts[number].write_rows(tables, number=number)))

        seeds = self.spark.range(0, len(parts), 1, 1).select(
            sql.col("id").cast("int").alias("part"), sql.lit(None).cast("binary").alias("blob")
        )
        together = blobs.unionAll(seeds).repartitionById(partitions, sql.col("part"))
        return together.mapInArrow(merge, _ANSWERS)


def observed_reports(seen: Observation, readers: int) -> dict[int, Written]:
    """The reports of readers that went through a transform; some are missing if it did not read everything."""
    found: list[Any] = []

    def get() -> None:
        try:
            found.extend(bytes(one) for one in seen.get["reports"])
        except Exception as error:  # noqa: BLE001 - Spark has no metrics of a query that it did not have to run
            _LOGGER.debug("No reports of readers: %r", error)

    waiting = threading.Thread(target=get, name="strandline-observed", daemon=True)
    waiting.start()
    waiting.join(_METRIC_SECONDS)
    reports = [pickle.loads(one) for one in found]  # noqa: S301 - written by our own tasks
    return {one.number: one for one in reports if one.number < readers}


def _numbers(batches: Batches) -> Iterator[int]:
    for batch in batches:
        yield from batch.column("id").to_pylist()


def _one(schema: pa.Schema, number: int, answer: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([number], pa.int32()), pa.array([answer], pa.binary())], schema=schema)


def _limited(tables: Iterable[pa.Table]) -> Batches:
    """The rows in batches of a size that Spark can hold."""
    batches = (batch for table in tables for batch in table.to_batches())
    for first in batches:  # its columns are those of all
        yield from shaped(chain([first], batches), first.schema)


def _blobs(parts: Sequence[TablePart], tables: Iterable[pa.Table]) -> Batches:
    """Rows as Arrow streams of many rows, each for one part."""
    import numpy as np

    for batch in _limited(tables):
        rows = pa.Table.from_batches([batch])
        numbers = parts[0].numbers(rows, len(parts))
        order = np.argsort(numbers, kind="stable")
        ordered, numbers = rows.take(pa.array(order)).combine_chunks(), numbers[order]
        ends = np.searchsorted(numbers, np.arange(len(parts)), side="right")
        start = 0
        for number, end in enumerate(ends.tolist()):
            if end > start:
                yield _one(_BLOB_SCHEMA, number, _stream(ordered.slice(start, end - start)))
            start = end


def _stream(rows: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(out.getvalue())
