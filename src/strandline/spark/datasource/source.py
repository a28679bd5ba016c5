"""The data source ``strandline``: the driver plans, executors fetch whole batches as Arrow, or write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

from strandline.errors import InvalidInput
from strandline.log.contract import Log
from strandline.spark.datasource.batch_reader import LogReader
from strandline.spark.datasource.decoding import Decoding
from strandline.spark.datasource.opened import OpenedLog
from strandline.spark.datasource.shaping import SPARK_SCHEMA, check_schema
from strandline.spark.datasource.stream_reader import LogStreamReader
from strandline.spark.failures import retried
from strandline.spark.options import ReadOptions, parse_options

R = TypeVar("R")


class StrandlineDataSource(DataSource):
    """Reads a log as a table of its records, in batch and streaming queries, from both of its tiers.

    Reading claims no slot, except for a stream with the option ``slot``.

    ``spark.read.format("strandline").load("s3://bucket/log")`` and the same with ``readStream``. Options:
    ``startingOffset`` (``earliest``, ``beginning``, ``latest``, an offset or a cursor), ``endingOffset``,
    ``startingTimestamp`` and ``endingTimestamp`` (when records were listed), ``timestampFrom``, ``timestampBefore`` and
    ``keyPrefix`` (only such records; batches and row groups without any are skipped), ``slot`` (of a stream),
    ``maxRecordsPerTrigger``, ``maxBytesPerTrigger``, ``maxBatchesPerTrigger``, ``failOnDataLoss``, ``partitions``,
    ``hold`` (for how long the records of a batch query are pinned), and ``storage.*`` for the store. For nodes
    ``tokenFile`` (or ``token``), ``caFile``, ``certFile`` and ``keyFile``, for the driver only, and ``readFrom``.
    ``decode`` = ``true`` gives the value's fields as columns, as a typed log names them, and ``_key``, ``_offset``,
    ``_timestamp``, ``_op`` and ``_headers``; a value that cannot be decoded fails the query, or with ``badRows`` =
    ``null`` has null fields, the reason in ``_error`` and its bytes in ``_value``.
    A narrower ``.schema(...)`` reads less. ``logFormat`` = ``queue-v1`` reads a queue of version 1, whose parts are at
    ``manifest`` and ``data``; its offsets count batches, and reading acknowledges nothing.
    """

    @classmethod
    def name(cls) -> str:
        """The name for ``format``."""
        return "strandline"

    def schema(self) -> StructType:
        """All columns of a log, or of its decoded values."""
        options = parse_options(self.options)
        if not options.decode:
            return SPARK_SCHEMA
        return _typed(options, lambda log: Decoding.of(log, options.bad_rows, options.url).spark_schema())

    def reader(self, schema: StructType) -> LogReader:
        """A reader of the log as of planning."""
        options = parse_options(self.options)
        if options.slot is not None:
            raise InvalidInput("slot is for streams: hold pins the records of a batch read.")
        return LogReader(options, *_columns(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """A writer that appends the rows of a batch job."""
        from strandline.spark.datasource.writing import batch_writer  # readers need not import it

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - Spark's
        """A writer that appends the rows of each micro-batch."""
        from strandline.spark.datasource.writing import stream_writer

        return stream_writer(self.options, schema, overwrite=overwrite)

    def streamReader(self, schema: StructType) -> LogStreamReader:  # noqa: N802 - Spark's name
        """A reader that also follows new records."""
        options = parse_options(self.options)
        if options.hold is not None:
            raise InvalidInput(
                "hold is for batch reads, which end before it does: let a slot pin the records of a stream, with the "
                "option slot."
            )
        return LogStreamReader(options, *_columns(options, schema))


def _typed(options: ReadOptions, find: Callable[[Log], R]) -> R:
    """What the log's value format is asked for."""
    opened = OpenedLog(options, pa.schema([]))
    try:
        return retried(lambda: find(opened.log))
    finally:
        opened.close()


def _columns(options: ReadOptions, schema: StructType) -> tuple[pa.Schema, Decoding | None]:
    if not options.decode:
        return check_schema(schema, SPARK_SCHEMA), None
    return _typed(options, lambda log: Decoding.planned(log, options.bad_rows, options.url, schema))
