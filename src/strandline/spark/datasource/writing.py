"""Writes of Spark into a log: executors stage batch objects, the driver lists all of them in one conditional write."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal
from uuid import UUID, uuid5

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import DateType, IntegralType, StructType, TimestampNTZType

from strandline.errors import Diverged, InvalidInput, OutOfOrder, StrandlineError, Unsupported
from strandline.formats.arrow.block import Compression
from strandline.log.object import ObjectLog
from strandline.log.object.head.edits import BatchListing
from strandline.log.object.staging import StagedAppend
from strandline.log.produce.typed import ValueEncoder
from strandline.log.read.value_format import named_codec
from strandline.log.writers.source import source_writer
from strandline.model.head import Receipt, WriterId
from strandline.model.records import RECORD_SCHEMA, conform
from strandline.opening import open_url
from strandline.spark.datasource.outbox import forward, needs_outbox, open_outbox
from strandline.spark.failures import retried
from strandline.spark.task_payload import SameVersion
from strandline.spark.write_options import WriteOptions, parse_write_options
from strandline.storage.clock import CHANCE, CLOCK
from strandline.tier.read.tiered_log import TieredLog
from strandline.values.contract import Codec

_JOBS: Final = UUID("5e0b4a4e-59a1-4c39-9d0f-6a8f3e1c7b52")
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedTask(WriterCommitMessage):
    """What one task has staged."""

    partition: int
    query: str
    """The id of the streaming query; empty in a batch job."""
    batches: tuple[BatchListing, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Target:
    """The log of a write. Picklable: tasks store batches in it, the driver lists them."""

    log: ObjectLog
    codec: Codec | None
    columns: tuple[str, ...]
    """The columns that are written."""
    compression: Compression

    @classmethod
    def opened(cls, options: WriteOptions, schema: StructType) -> Target:
        """Open the log in the driver; ``Unsupported`` for a log that takes no staged batches."""
        log, codec = _opened(options)
        return cls(log, codec, _written(schema, codec), Compression.named(options.compression))

    def staged(self, writer: WriterId, job: str, query: str = "") -> StagedAppend:
        """An append of this write."""
        return StagedAppend(self.log.store, self.log.log_id, writer, job, self.compression, query)

    def stage(self, append: StagedAppend, rows: Iterator[pa.RecordBatch], query: str) -> StagedTask:
        """Store the rows of one task."""
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        batches = append.write(self._records(rows))
        return StagedTask(partition, query, tuple(batches), sum(batch.count for batch in batches))

    def _records(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        values = ValueEncoder(self.codec, lambda: None)
        for batch in rows:
            if batch.num_rows:
                chosen = batch.select(list(self.columns))
                yield from conform(chosen if self.codec is None else values.records(chosen), now=CLOCK.now())


def _opened(options: WriteOptions) -> tuple[ObjectLog, Codec | None]:
    """The log in which tasks store batches, and the format of the values."""
    if needs_outbox(options.url):
        outbox = open_outbox(options)
        return outbox.log, outbox.codec
    if options.outbox is not None:
        raise InvalidInput(f"outbox is for nodes and write-ahead logs: executors write into {options.url} themselves.")
    opened = retried(lambda: open_url(options.url, options=options.storage or None, create=options.create))
    log = opened.hot if isinstance(opened, TieredLog) else opened
    opened.close()
    if not isinstance(log, ObjectLog):
        raise Unsupported(f"Spark writes into object logs, and {options.url} is none.")
    return log, named_codec(log)


def _written(schema: StructType, codec: Codec | None) -> tuple[str, ...]:
    """The columns of a DataFrame that are written: all but the offsets of the log that it was read from."""
    fields = () if codec is None else codec.schema.names
    names = [name for name in schema.names if not (name in ("offset", "_offset") and name not in fields)]
    if len(set(names)) < len(names):
        raise InvalidInput(f"The DataFrame has a column twice: {', '.join(names)}.")
    if codec is None:
        unknown = [name for name in names if name not in RECORD_SCHEMA.names]
        if unknown:
            raise InvalidInput(
                f"The log names no format for its values, so that it takes {', '.join(RECORD_SCHEMA.names)}, and the "
                f"DataFrame has {', '.join(unknown)}: encode them into value (to_json(struct(…))), or create the log "
                "with value=sl.values.Json(…)."
            )
    if not names:
        raise InvalidInput("The DataFrame has no column that could be written: it needs at least key or value.")
    _check_time(schema, "timestamp" if codec is None else "_timestamp", fields)
    return tuple(names)


def _check_time(schema: StructType, name: str, fields: Sequence[str]) -> None:
    """Refuse times of an unknown unit or zone: Spark and the log would take them for different ones."""
    if name not in schema.names or name in fields:
        return
    kind = schema[name].dataType
    if isinstance(kind, IntegralType | DateType | TimestampNTZType):
        raise InvalidInput(
            f"The column {name} is of type {kind.simpleString()}, which does not say what time it is: make it a "
            "TIMESTAMP (timestamp_millis, timestamp_micros, or cast, which takes the session's time zone)."
        )


class _Writer(SameVersion):
    """Writes into the log of some options."""

    kind: ClassVar[Literal["job", "stream"]]

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        """Opens the log, so that a wrong address or column is refused before any task runs."""
        if overwrite:
            mode = "mode" if self.kind == "job" else "outputMode"
            raise InvalidInput(f"A log only grows, and cannot be overwritten: use {mode}('append').")
        self._options = parse_write_options(options, self.kind)
        self._target = Target.opened(self._options, schema)


class LogWriter(_Writer, DataSourceArrowWriter):
    """One batch job: all of its rows become records of the log, in the order of the partitions, or none of them."""

    kind = "job"

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        """Opens the log, and names the job's writer."""
        super().__init__(options, schema, overwrite=overwrite)
        job = self._options.job
        if self._options.number is not None:
            writer = source_writer(f"spark-job:{job}")
        else:
            writer = WriterId(CHANCE.uuid() if job is None else uuid5(_JOBS, f"{self._target.log.log_id}/{job}"))
        self._append = self._target.staged(writer, CHANCE.uuid().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        """Stage the rows of one task, in an executor."""
        return self._target.stage(self._append, iterator, "")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:  # Spark requires a list
        """List what the tasks have staged."""
        tasks = _in_order(messages)
        upto = 1 if self._options.number is None else self._options.number + 1
        _committed(self._append, tasks, upto, self._options)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # Spark requires a list
        """Delete what the tasks have staged; a trim deletes a day later what tasks stage that still run."""
        _discarded(self._append, None)


class LogStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """One streaming query: a micro-batch is in the log once, which remembers the last in the write that lists it."""

    kind = "stream"

    def _append(self, query: str, batch: int) -> StagedAppend:
        writer = source_writer(f"spark-stream:{self._options.writer or query}")
        return self._target.staged(writer, f"{query}-{batch}", query)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        """Stage the rows of one task, in an executor."""
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY)
        batch = None if context is None else context.getLocalProperty(_BATCH)
        if query is None or batch is None:
            raise Unsupported("Spark does not say which query and micro-batch this is: the sink needs Spark 4.2.")
        return self._target.stage(self._append(query, int(batch)), iterator, query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """List what the tasks have staged, unless the log has this micro-batch."""
        tasks = _in_order(messages)
        if not tasks:
            return
        _committed(self._append(tasks[0].query, batchId), tasks, batchId + 1, self._options)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Delete what successful tasks have staged; a trim deletes the rest a day later."""
        tasks = _in_order(messages)
        if tasks:
            _discarded(self._append(tasks[0].query, batchId), _batches_of(tasks))


def _in_order(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    tasks = [message for message in messages if isinstance(message, StagedTask)]
    return sorted(tasks, key=lambda task: task.partition)


def _committed(append: StagedAppend, tasks: Sequence[StagedTask], upto: int, options: WriteOptions) -> None:
    batches = _batches_of(tasks)
    receipt = retried(lambda: append.commit(batches, upto=upto, expect=options.expect))
    _discarded(append, batches)
    if needs_outbox(options.url):
        forward(options)
    if not options.accept:
        _check_same(receipt, sum(task.rows for task in tasks), upto, options)
        if options.writer is not None:
            _check_query(append, receipt, upto, options)


def _check_same(receipt: Receipt, rows: int, upto: int, options: WriteOptions) -> None:
    """Refuse a job or micro-batch that the log has already, if it has other rows now: they would be lost."""
    accept = "If the log is right, continue with the option repeated=accept."
    what = f"{'The job' if options.kind == 'job' else 'The micro-batch'} {upto - 1}"
    if receipt.first is None and rows:
        raise OutOfOrder(
            f"{what} is older than the last one that {options.url} has, and was not written: its checkpoint is older "
            f"than the log, or its name is used twice. Restore the checkpoint, or write under another name. {accept}"
        )
    if receipt.count != rows:
        raise Diverged(
            f"{options.url} has {what.lower()} with {receipt.count:,} rows, and now it has {rows:,}: nothing was "
            "written. Either its name is used twice or its checkpoint is older than the log (then write under another "
            f"name), or the query gives other rows each time. {accept}"
        )


def _check_query(append: StagedAppend, receipt: Receipt, upto: int, options: WriteOptions) -> None:
    """Refuse the micro-batch of a query whose writer another query has: the rows would be lost."""
    if not retried(lambda: append.listed_by_this_run(receipt)):
        raise Diverged(
            f"{options.url} has a micro-batch {upto - 1} of writer {options.writer!r} from another query, and nothing "
            "was written: each query needs a writer of its own, and one with a new checkpoint is another query. Write "
            "under another name. If the log is right, continue with the option repeated=accept."
        )


def _batches_of(tasks: Sequence[StagedTask]) -> list[BatchListing]:
    return [batch for task in tasks for batch in task.batches]


def _discarded(append: StagedAppend, batches: Sequence[BatchListing] | None) -> None:
    try:
        append.discard(batches)
    except StrandlineError as error:
        _LOGGER.warning("Staged batches of %s were left for the next trim: %s", append.store.url, error)
