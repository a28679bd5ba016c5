"""The data source ``strandline``: the driver plans, executors fetch whole batches as Arrow."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from prometheus_client import Counter
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from strandline.compat.v1.log import open_queue
from strandline.errors import CursorExpired, Diverged, InvalidInput, NotFound, NotReady, StrandlineError
from strandline.log.contract import Log
from strandline.log.object import ObjectLog
from strandline.log.planning import joined, pack
from strandline.log.reading import fetch_in_order
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span
from strandline.spark.datasource.decoding import Decoding
from strandline.spark.datasource.planning import (
    admit,
    decode_offset,
    encode_offset,
    narrower,
    resolve,
    trimmed_meanwhile,
)
from strandline.spark.datasource.shaping import SPARK_SCHEMA, check_schema, shaped
from strandline.spark.failures import retried
from strandline.spark.options import NodeAccess, Position, ReadOptions, parse_options

if TYPE_CHECKING:
    from strandline.tier.read.tiered_log import TieredLog

_SKIPPED: Final = Counter(
    "strandline_spark_records_skipped",
    "Records that a query with failOnDataLoss=false skipped because the log no longer retains them.",
)
R = TypeVar("R")
_LOGGER: Final = logging.getLogger(__name__)
_AHEAD: Final = 32 << 20
"""Bytes that a task decodes ahead. A larger batch is read alone, so that a task stays small."""
_MOVES: Final = 4
"""How often a task locates its records again without progress."""


@dataclass(frozen=True)
class SpanPartition(InputPartition):
    """The work of one task: spans to fetch one after another."""

    spans: tuple[Span, ...]


class StrandlineDataSource(DataSource):
    """Reads a log as a table of its records, in batch and streaming queries, from both of its tiers.

    Reading claims no slot.

    ``spark.read.format("strandline").load("s3://bucket/log")`` and the same with ``readStream``. Options:
    ``startingOffset`` (``earliest``, ``beginning``, ``latest``, an offset or a cursor), ``endingOffset``,
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
                "hold is for batch reads, which end before it does: let a slot pin the records of a stream, as "
                "sl.spark.follow(..., slot=...) does."
            )
        return LogStreamReader(options, *_columns(options, schema))


def _typed(options: ReadOptions, find: Callable[[Log], R]) -> R:
    """What the log's value format is asked for."""
    opened = _Opened(options, pa.schema([]))
    try:
        return retried(lambda: find(opened.log))
    finally:
        opened.close()


def _columns(options: ReadOptions, schema: StructType) -> tuple[pa.Schema, Decoding | None]:
    if not options.decode:
        return check_schema(schema, SPARK_SCHEMA), None
    return _typed(options, lambda log: Decoding.planned(log, options.bad_rows, options.url, schema))


class _Opened:
    """A log that is opened on first use: some processes create readers but never read.

    Its cold tier is followed only while old records are needed, and until :meth:`close`.
    """

    def __init__(self, options: ReadOptions, columns: pa.Schema, decoding: Decoding | None = None) -> None:
        self.options = options
        self.columns = columns
        self.decoding = decoding
        self._log: Log | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Executors read by tickets: the credentials stay in the process that plans.
        return {**self.__dict__, "_log": None, "options": replace(self.options, node=NodeAccess())}

    @property
    def log(self) -> Log:
        if self._log is None:
            url, storage, queue = self.options.url, self.options.storage or None, self.options.queue
            if queue is None:
                # Not above: a task that finds its planned records opens nothing, and need not import this.
                from strandline.spark.opening import opened_log

                self._log = opened_log(self.options)
            else:
                self._log = open_queue(url, manifest=queue.manifest, data=queue.data, options=storage)
        return self._log

    @property
    def tiered(self) -> TieredLog | None:
        """The log, if it has a cold tier."""
        from strandline.tier.read.tiered_log import TieredLog  # opening the log has imported it

        log = self.log
        return log if isinstance(log, TieredLog) else None

    def close(self) -> None:
        """Stop following the cold tier: Spark's processes live on, and nothing else would end it."""
        if self._log is not None and self.tiered is not None:
            self.tiered.close()

    def bounds(self, needed: Position) -> Bounds:
        """The retained offsets, for a reader that needs everything from a position on.

        A reader that needs only the hot tier gets the bounds of that alone. So it can read while the
        cold tier is unknown, and a stream in the hot tier does not pay for it.
        """
        tiered, offset = self.tiered, needed.next if isinstance(needed, Cursor) else needed
        if tiered is None:
            bounds = self.log.bounds()
            if self.options.queue is None and isinstance(offset, int) and offset < bounds.first:
                self._log = None  # it may have a cold tier by now
                bounds = self.log.bounds()
            return bounds
        if offset != "earliest" and self.options.end != "earliest":
            recent = tiered.hot.bounds()
            if offset == "latest" or offset >= recent.first:
                tiered.close()
                return recent
        return tiered.bounds()

    def pack(self, spans: Sequence[Span]) -> list[InputPartition]:
        cores = self.options.partitions or len(os.sched_getaffinity(0))
        return [SpanPartition(tuple(joined(task))) for task in pack(spans, cores)]

    def fetch(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, SpanPartition):  # Spark's placeholder for "no partitions"
            return
        batches, decoding = _drained(self._fetched(partition.spans)), self.decoding
        if decoding is not None:
            batches = (decoding.decoded(batch, self.columns) for batch in batches)
        yield from shaped(batches, self.columns)

    def _fetched(self, spans: Sequence[Span]) -> Iterator[tuple[Span, list[pa.RecordBatch]]]:
        moves = 0
        names = self.columns.names if self.decoding is None else self.decoding.needed(self.columns)
        while spans:
            done = 0
            try:
                for fetched in fetch_in_order(spans, columns=names, ahead=_AHEAD):
                    yield fetched
                    done += 1
            except NotFound as error:
                if self.options.is_node:
                    raise  # a node finds what it has moved
                moves = 1 if done else moves + 1
                spans = self._moved(spans[done:], moves, error)
            else:
                return

    def _moved(self, spans: Sequence[Span], moves: int, error: NotFound) -> Sequence[Span]:
        """The current location of planned spans, the first of which is missing.

        Never "no records": they were moved to the cold tier, or trimmed, and then a new read helps, or the
        object is lost.
        """
        end = spans[-1].next
        try:
            trimmed = trimmed_meanwhile(spans[0], retried(self.log.bounds), self.options.url)
            if trimmed is not None:
                raise trimmed from error
            if moves >= _MOVES or self.tiered is None:
                raise error
            found = retried(lambda: self.log.plan(Cursor(self.log.log_id, spans[0].first), Limit(upto=end)))
            _check_reaches(found, end, self.options.url)
            return found
        finally:
            self.close()

    def admit(self, cursor: Cursor, bounds: Bounds) -> tuple[Cursor, int]:
        admitted = admit(cursor, self.log.log_id, bounds, fail_on_data_loss=self.options.fail_on_data_loss)
        return admitted.cursor, admitted.skipped


class LogReader(DataSourceReader):
    """One batch query: everything from the starting to the ending offset, as of planning."""

    def __init__(self, options: ReadOptions, columns: pa.Schema, decoding: Decoding | None = None) -> None:
        """Nothing is opened yet."""
        self._at = _Opened(options, columns, decoding)

    def partitions(self) -> list[InputPartition]:  # Spark requires a list
        """The plan of the whole range, distributed over tasks."""
        try:
            return retried(self._plan)
        finally:
            self._at.close()

    def _plan(self) -> list[InputPartition]:
        at, options = self._at, self._at.options
        bounds = at.bounds(options.start)
        asked = resolve(options.start, at.log.log_id, bounds)
        upto = resolve(options.end, at.log.log_id, bounds).next
        since, skipped = at.admit(asked, bounds)
        if upto > bounds.next:
            raise InvalidInput(f"endingOffset is {upto}, but {options.url} ends at {bounds.next} now: ask for less.")
        if since.next >= upto:
            return []
        try:
            with self._held(since.next):
                spans = at.log.plan(since, Limit(upto=upto))
                _check_reaches(spans, upto, options.url)
        except CursorExpired as error:
            # It was retained a moment ago. On a retry "earliest" is higher, or the offset is refused.
            raise NotReady(f"{options.url} was trimmed while a read of it was being planned; ask again.") from error
        report_skipped(options.url, asked, skipped)
        return at.pack(spans)

    @contextlib.contextmanager
    def _held(self, position: int) -> Iterator[None]:
        """Pin the records to plan, for the requested time; the end of the query is unknown."""
        seconds, plain = self._at.options.hold, self._at.log
        log = self._at.tiered or (plain if isinstance(plain, ObjectLog) else None)
        if seconds is not None and log is None:
            raise InvalidInput(f"{self._at.options.url} has no holds: let a slot pin what is read, or read without.")
        if seconds is None or log is None:
            yield
            return
        hold = log.hold(position, seconds)
        try:
            yield
        except BaseException:
            with contextlib.suppress(StrandlineError):  # it expires by itself
                hold.release()
            raise

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, in an executor."""
        return self._at.fetch(partition)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query. Its offsets only grow; limits apply at the boundaries of batches, which are never split."""

    def __init__(self, options: ReadOptions, columns: pa.Schema, decoding: Decoding | None = None) -> None:
        """Nothing is opened yet."""
        self._at = _Opened(options, columns, decoding)
        self._target: int | None = None
        self._seen: Cursor | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The start of a query without checkpoint."""
        return encode_offset(retried(self._initial))

    def _initial(self) -> Cursor:
        bounds = self._at.bounds(self._at.options.start)
        cursor = resolve(self._at.options.start, self._at.log.log_id, bounds)
        self._at.admit(cursor, bounds)  # refuses an unavailable offset before anything is read
        return cursor if isinstance(self._at.options.start, Cursor) else self._at.log.cursor_at(cursor.next)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """One of the limits from the options; Spark passes it back, and the others are applied with it."""
        match self._at.options.limit:
            case Limit(bytes=int(size)):
                return ReadMaxBytes(size)
            case Limit(records=int(rows)):
                return ReadMaxRows(rows)
            case Limit(batches=int(files)):
                return ReadMaxFiles(files)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of this run: later records wait for the next one."""
        self._target = retried(self._at.log.end).next

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next batch: never below ``start``."""
        since = decode_offset(start)
        return encode_offset(retried(lambda: self._reachable(since, limit)))

    def _reachable(self, since: Cursor, limit: ReadLimit) -> Cursor:
        at = self._at
        bounds = at.bounds(since)
        self._seen = since.at(bounds.next)
        admitted, _ = at.admit(since, bounds)
        end = min(self._ceiling(bounds), bounds.next)
        if isinstance(limit, ReadMinRows) and self._target is None and end - admitted.next < limit.min_rows:
            return since
        allowed = _limit_of(limit, at.options.limit)
        if allowed != NO_LIMIT and end > admitted.next:
            end = at.log.plan(admitted, narrower(allowed, Limit(upto=end)))[-1].next
        # Unchanged if there is nothing new: Spark treats a changed text as new data.
        return since if end <= since.next else at.log.cursor_at(end)

    def _ceiling(self, bounds: Bounds) -> int:
        ends = [resolve(self._at.options.end, self._at.log.log_id, bounds).next]
        return min(ends if self._target is None else [*ends, self._target])

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """The log's end as last read, for the query's progress."""
        return None if self._seen is None else encode_offset(self._seen)

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """The plan of one micro-batch; the same range always gives the same records."""
        since, upto = decode_offset(start), decode_offset(end)
        return retried(lambda: self._plan(since, upto))

    def _plan(self, since: Cursor, upto: Cursor) -> list[InputPartition]:
        at = self._at
        bounds = at.bounds(since)
        if upto.next < since.next or upto.log_id != since.log_id:
            raise InvalidInput(f"A batch cannot go from {since} back to {upto}: start with a new checkpoint.")
        if upto.next > bounds.next:
            raise Diverged(
                f"The checkpoint is at offset {upto.next}, past the end of {at.options.url} at {bounds.next}: the log "
                "was restored or replaced. Start with a new checkpoint."
            )
        admitted, skipped = at.admit(since, bounds)
        report_skipped(at.options.url, since, min(skipped, upto.next - since.next))
        if admitted.next >= upto.next:
            return []
        spans = at.log.plan(admitted, Limit(upto=upto.next))
        _check_reaches(spans, upto.next, at.options.url)
        return at.pack(spans)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, in an executor."""
        return self._at.fetch(partition)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Nothing: reading claims nothing, and only the sink knows what was applied."""


def report_skipped(url: str, since: Cursor, skipped: int) -> None:
    """Log and count records from a cursor on that a query skips, because they are no longer retained."""
    if skipped:
        _SKIPPED.inc(skipped)
        _LOGGER.warning(
            "%s: skipped %d records from offset %d on, which are no longer retained (failOnDataLoss=false).",
            url,
            skipped,
            since.next,
        )


def _drained(fetched: Iterator[tuple[Span, list[pa.RecordBatch]]]) -> Iterator[pa.RecordBatch]:
    """All batches in order, each freed as soon as it was passed on: no batch is held while the next span is read."""
    for span, batches in fetched:
        batches.reverse()
        while batches:
            yield batches.pop()
        if span.size > _AHEAD:
            pa.default_memory_pool().release_unused()  # else the pool keeps its memory


def _limit_of(limit: ReadLimit, options: Limit) -> Limit:
    match limit:
        case ReadAllAvailable():  # Spark: "regardless of the given source options"
            return NO_LIMIT
        case ReadMaxRows(rows):
            return narrower(options, Limit(records=rows))
        case ReadMaxBytes(size):
            return narrower(options, Limit(bytes=size))
        case ReadMaxFiles(files):
            return narrower(options, Limit(batches=files))
    return options


def _check_reaches(spans: Sequence[Span], end: int, url: str) -> None:
    if not spans or spans[-1].next != end:
        reached = spans[-1].next if spans else "nothing"
        raise NotReady(f"{url} returned offsets up to {reached} instead of {end}; ask again.")
