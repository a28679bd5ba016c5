"""Topics: the logs of all partitions as one table, with the number of the partition as a column.

Each partition is read by the reader of a log. A stream's offset has that of each partition.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import IntegerType, StructField, StructType

from strandline.errors import InvalidInput
from strandline.log.topic.logs import partition_address, topic_partitions
from strandline.model.arguments import shown
from strandline.model.cursor import Limit
from strandline.spark.datasource.opened import SpanPartition, log_schema
from strandline.spark.datasource.readers import LogReader, LogStreamReader
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.failures import retried
from strandline.spark.options import ReadOptions, parse_options
from strandline.spark.task_payload import SameVersion

TOPIC: Final = "topic"
"""The ``logFormat`` of a topic."""
_POSITIONS: Final[tuple[str, ...]] = ("startingoffset", "endingoffset")


def is_topic(options: Mapping[str, str]) -> bool:
    """Whether the options name a topic."""
    given = {name.lower(): value for name, value in options.items()}
    return given.get("logformat", "").strip().lower() == TOPIC


def partition_options(options: Mapping[str, str]) -> list[ReadOptions]:
    """The options of each partition's log; asks the store how many there are.

    ``startingOffset`` and ``endingOffset`` are a word for all partitions, or JSON with a position for some of them:
    ``{"0": 120, "3": "latest"}``.
    """
    given = {name.lower(): value for name, value in options.items() if name.lower() != "logformat"}
    rest = {name: text for name, text in given.items() if name not in _POSITIONS}
    plain = parse_options(rest)
    if plain.is_node:
        raise InvalidInput("The partitions of a topic are logs in a store or a folder, not on nodes.")
    count = retried(lambda: topic_partitions(plain.url, plain.storage or None))
    positions = {name: _positions(name, given[name], count) for name in _POSITIONS if name in given}
    return [
        parse_options(
            {
                **rest,
                **{name: text for name, texts in positions.items() if (text := texts[partition]) is not None},
                "path": partition_address(plain.url, partition),
            }
        )
        for partition in range(count)
    ]


def _positions(name: str, text: str, count: int) -> list[str | None]:
    """The position of each partition; None for the default."""
    option = "startingOffset" if name.startswith("starting") else "endingOffset"
    if not text.strip().startswith("{"):
        if text.strip().lower() not in ("earliest", "retained", "beginning", "latest"):
            raise InvalidInput(
                f"{option} of a topic is a word such as earliest, or JSON by partition such as "
                f'{{"0": 120, "1": "latest"}}, not {shown(text)}.'
            )
        return [text] * count
    try:
        named = {int(partition): str(position) for partition, position in json.loads(text).items()}
    except ValueError as error:
        raise InvalidInput(f'{option} is JSON such as {{"0": 120}}, not {shown(text)}: {error}.') from error
    wrong = [partition for partition in named if not 0 <= partition < count]
    if wrong:
        raise InvalidInput(f"{option} names partition {wrong[0]}, and the topic has 0 to {count - 1}.")
    return [named.get(partition) for partition in range(count)]


def topic_schema(options: Mapping[str, str]) -> StructType:
    """The columns of the logs, and the number of the partition."""
    first = partition_options(options)[0]
    number = StructField(_column(first), IntegerType(), nullable=False)
    return StructType([number, *log_schema(first)])


def _column(options: ReadOptions) -> str:
    """The name of the partition's column; beside decoded values, names of a record's columns begin with underscores."""
    return "_partition" if options.decode else "partition"


class _Partitions(SameVersion):
    """Reads the logs of all partitions, and adds the partition's number to the rows, if that column is requested."""

    _reader: ClassVar[type[LogReader | LogStreamReader]]

    def __init__(self, options: Sequence[ReadOptions], schema: StructType) -> None:
        self._columns: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self._name = _column(options[0])
        rest = StructType([field for field in schema if field.name != self._name])
        inner = rest if rest.fields else StructType([SPARK_SCHEMA["offset"]])  # so that rows can be counted
        self._logs: list[Any] = [self._reader(one, inner) for one in options]

    def _tasks(self, plans: Iterable[Sequence[SpanPartition]]) -> list[InputPartition]:  # Spark requires a list
        return [replace(task, partition=number) for number, plan in enumerate(plans) for task in plan]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, in an executor."""
        if not isinstance(partition, SpanPartition):  # Spark's placeholder for "no partitions"
            return
        for batch in self._logs[partition.partition].read(partition):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns[self._name] = pa.repeat(pa.scalar(partition.partition, pa.int32()), batch.num_rows)
            yield pa.RecordBatch.from_arrays([columns[name] for name in self._columns.names], schema=self._columns)


class TopicReader(_Partitions, DataSourceReader):
    """One batch query over all partitions, each as of planning."""

    _reader = LogReader

    def partitions(self) -> list[InputPartition]:
        """The plans of all partitions."""
        return self._tasks(log.partitions() for log in self._logs)


class TopicStreamReader(_Partitions, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query over all partitions. The limits of a trigger are divided among them."""

    _reader = LogStreamReader

    def __init__(self, options: Sequence[ReadOptions], schema: StructType) -> None:
        """Divides the limits."""
        super().__init__([replace(one, limit=_share(one, len(options))) for one in options], schema)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The start of a query without checkpoint."""
        return _offset([log.initialOffset() for log in self._logs])

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The limit of one partition, which each of them gets back."""
        found: ReadLimit = self._logs[0].getDefaultReadLimit()
        return found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of this run in each partition."""
        for log in self._logs:
            log.prepareForTriggerAvailableNow()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The ends of the next batch."""
        return _offset(
            [log.latestOffset(since, limit) for log, since in zip(self._logs, self._each(start), strict=True)]
        )

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """The ends of the logs as last read."""
        ends = [log.reportLatestOffset() for log in self._logs]
        return None if any(end is None for end in ends) else _offset(ends)

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """The plan of one micro-batch."""
        ranges = zip(self._logs, self._each(start), self._each(end), strict=True)
        return self._tasks(log.partitions(since, upto) for log, since, upto in ranges)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Move the query's slots, if it has them."""
        for log, upto in zip(self._logs, self._each(end), strict=True):
            log.commit(upto)

    def _each(self, offset: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The offset of each partition; ``InvalidInput`` for a checkpoint of another topic."""
        names = [str(number) for number in range(len(self._logs))]
        if sorted(offset) != sorted(names):
            raise InvalidInput(
                f"The checkpoint has the partitions {', '.join(sorted(offset))[:100]}, and the topic {len(names)} of "
                "them: start with a new checkpoint."
            )
        return [offset[name] for name in names]


def _offset(each: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    return {str(number): offset for number, offset in enumerate(each)}


def _share(options: ReadOptions, count: int) -> Limit:
    """A partition's part of the limits of a trigger, at least one of each."""
    limit = options.limit
    return Limit(*(most and max(1, most // count) for most in (limit.records, limit.bytes, limit.batches)))
