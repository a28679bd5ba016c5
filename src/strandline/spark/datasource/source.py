"""The data source ``strandline``: the driver plans, executors fetch whole batches as Arrow, or write them."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from strandline.errors import InvalidInput
from strandline.spark.datasource.opened import log_schema
from strandline.spark.datasource.readers import LogReader, LogStreamReader
from strandline.spark.datasource.topic import TopicReader, TopicStreamReader, is_topic, partition_options, topic_schema
from strandline.spark.options import ReadOptions, parse_options
from strandline.spark.storage_options import refuse_shown_secrets


class StrandlineDataSource(DataSource):
    """Reads a log as a table of its records, in batch and streaming queries, from both of its tiers.

    Reading claims no slot, except for a stream with the option ``slot``.

    ``spark.read.format("strandline").load("s3://bucket/log")`` and the same with ``readStream``; the page of Spark has
    all options. ``decode`` = ``true`` gives the value's fields as columns, as a typed log names them. A narrower
    ``.schema(...)`` reads less. ``logFormat`` = ``queue-v1`` reads a queue of version 1: its offsets count batches, and
    reading acknowledges nothing. ``logFormat`` = ``topic`` reads all partitions of a topic, and has a column
    ``partition`` (``_partition`` beside decoded values).
    """

    def __init__(self, options: dict[str, str]) -> None:
        """Refuses a secret that Spark would show: Spark creates the source before it describes any plan that runs."""
        super().__init__(options)
        refuse_shown_secrets(options)

    @classmethod
    def name(cls) -> str:
        """The name for ``format``."""
        return "strandline"

    def schema(self) -> StructType:
        """All columns of a log, or of its decoded values."""
        return topic_schema(self.options) if is_topic(self.options) else log_schema(parse_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the log as of planning."""
        options = self._parsed()
        if options[0].slot is not None:
            raise InvalidInput("slot is for streams: hold pins the records of a batch read.")
        return TopicReader(options, schema) if is_topic(self.options) else LogReader(options[0], schema)

    def _parsed(self) -> list[ReadOptions]:
        """The options of the log, or of each partition's."""
        return partition_options(self.options) if is_topic(self.options) else [parse_options(self.options)]

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """A writer that appends the rows of a batch job."""
        from strandline.spark.datasource.writing import LogWriter  # readers need not import it

        return LogWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - Spark's
        """A writer that appends the rows of each micro-batch."""
        from strandline.spark.datasource.writing import LogStreamWriter

        return LogStreamWriter(self.options, schema, overwrite=overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """A reader that also follows new records."""
        options = self._parsed()
        if options[0].hold is not None:
            raise InvalidInput(
                "hold is for batch reads, which end before it does: let a slot pin the records of a stream, with the "
                "option slot."
            )
        return TopicStreamReader(options, schema) if is_topic(self.options) else LogStreamReader(options[0], schema)
