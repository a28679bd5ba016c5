"""The log of a query: opened when it is needed, planned in the driver, fetched in tasks as Arrow."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from prometheus_client import Counter
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from strandline.errors import CursorExpired, InvalidInput, NotFound, NotReady, StrandlineError
from strandline.log.contract import Log
from strandline.log.read.planning import divided_spans, pack
from strandline.log.read.reading import fetch_in_order
from strandline.model.cursor import Bounds, Cursor, Limit, Span, Start
from strandline.spark.datasource.decoding import Decoding
from strandline.spark.datasource.planning import resume_point, trimmed_meanwhile
from strandline.spark.datasource.shaping import SPARK_SCHEMA, check_schema, shaped
from strandline.spark.failures import retried
from strandline.spark.options import NodeAccess, ReadOptions

if TYPE_CHECKING:
    from strandline.log.object.slots import Hold
    from strandline.tier.read.tiered_log import TieredLog


_SKIPPED: Final = Counter(
    "strandline_spark_records_skipped",
    "Records that a query with failOnDataLoss=false skipped because the log no longer retains them.",
)
_OUTSIDE: Final = Counter(
    "strandline_spark_spans_outside",
    "Batches and row groups that queries did not read, because none of their records is within the query's bounds.",
)
_LOGGER: Final = logging.getLogger(__name__)
_AHEAD: Final = 32 << 20
"""Bytes that a task decodes ahead. A larger batch is read alone, so that a task stays small."""
_MOVES: Final = 4
"""How often a task locates its records again without progress."""


@dataclass(frozen=True)
class SpanPartition(InputPartition):
    """The work of one task: spans to fetch one after another."""

    spans: tuple[Span, ...]
    partition: int = 0
    """That of a topic."""


class OpenedLog:
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
        """The log, opened now if it was not."""
        if self._log is None:
            # Not above: a task that finds its planned records opens nothing, and need not import this.
            from strandline.spark.opening import opened_log

            self._log = opened_log(self.options)
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

    def bounds(self, needed: Start) -> Bounds:
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
        is_old = isinstance(offset, datetime) or "retained" in (offset, self.options.end)
        if not is_old:
            recent = tiered.hot.bounds()
            if offset == "now" or (isinstance(offset, int) and offset >= recent.first):
                tiered.close()
                return recent
        return tiered.bounds()

    def pack(self, spans: Sequence[Span]) -> list[InputPartition]:
        """Distribute spans over tasks, without those that hold no record within the bounds."""
        cores = self.options.partitions or len(os.sched_getaffinity(0))
        wanted = [span for span in spans if self.options.where.may_match(span)]
        _OUTSIDE.inc(len(spans) - len(wanted))
        return [SpanPartition(tuple(task)) for task in pack(wanted, cores)]

    def fetch(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        if not isinstance(partition, SpanPartition):  # Spark's placeholder for "no partitions"
            return
        where, decoding = self.options.where, self.decoding
        names = self.columns.names if decoding is None else decoding.needed(self.columns)
        batches = _drained(
            self._fetched(partition.spans, [*names, *(one for one in where.columns if one not in names)])
        )
        if where.columns:
            batches = (where.matching(batch).select(names) for batch in batches)
        if decoding is not None:
            batches = (decoding.decoded(batch, self.columns) for batch in batches)
        yield from shaped(batches, self.columns)

    def _fetched(self, spans: Sequence[Span], names: Sequence[str]) -> Iterator[tuple[Span, list[pa.RecordBatch]]]:
        moves, end = 0, spans[-1].next if spans else 0
        while spans:
            at = first = spans[0].first
            try:
                # The parts of whole segments were not compared with the bounds when they were planned.
                wanted = filter(self.options.where.may_match, divided_spans(spans))
                for span, batches in fetch_in_order(wanted, columns=names, ahead=_AHEAD):
                    at = span.next
                    yield span, batches
            except NotFound as error:
                if self.options.is_node:
                    raise  # a node finds what it has moved
                moves = 1 if at > first else moves + 1
                spans = self._moved(at, end, moves, error)
            else:
                return

    def _moved(self, first: int, end: int, moves: int, error: NotFound) -> Sequence[Span]:
        """The current location of planned offsets, the first of which are missing.

        Never "no records": they were moved to the cold tier, or trimmed, and then a new read helps, or the
        object is lost.
        """
        try:
            trimmed = trimmed_meanwhile(first, retried(self.log.bounds), self.options.url)
            if trimmed is not None:
                raise trimmed from error
            if moves >= _MOVES or self.tiered is None:
                raise error
            found = retried(lambda: self.log.plan(Cursor(self.log.log_id, first), Limit(upto=end)))
            check_reaches(found, end, self.options.url)
            return found
        finally:
            self.close()

    def admit(self, cursor: Cursor, bounds: Bounds) -> tuple[Cursor, int]:
        """Where to begin, and how many records that skips."""
        return resume_point(cursor, self.log.log_id, bounds, fail_on_data_loss=self.options.fail_on_data_loss)


def pin(log: Any, position: int, options: ReadOptions, undo: ExitStack) -> None:
    """Pin the records from a position on for the time that ``hold`` asks for, if it does; ``undo`` releases them."""
    if options.hold is None:
        return
    if not hasattr(log, "hold"):
        raise InvalidInput(f"{options.url} has no holds: let a slot pin what is read, or read without hold.")
    undo.callback(_released, log.hold(position, options.hold))


def _released(hold: Hold) -> None:
    with suppress(StrandlineError):  # it expires by itself
        hold.release()


@contextmanager
def trimmed_while_planned(url: str) -> Iterator[None]:
    """``NotReady`` if a position is trimmed within the block: on a retry the beginning is higher, or it is refused."""
    try:
        yield
    except CursorExpired as error:
        raise NotReady(f"{url} was trimmed while a read of it was being planned; ask again.") from error


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


def check_reaches(spans: Sequence[Span], end: int, url: str) -> None:
    """``NotReady`` if a plan ends before an offset that the log has."""
    if not spans or spans[-1].next != end:
        reached = spans[-1].next if spans else "nothing"
        raise NotReady(f"{url} returned offsets up to {reached} instead of {end}; ask again.")


R = TypeVar("R")


def log_schema(options: ReadOptions) -> StructType:
    """All columns of a log, or of its decoded values."""
    if not options.decode:
        return SPARK_SCHEMA
    return _asked(options, lambda log: Decoding.of(log, options.bad_rows, options.url).spark_schema())


def asked_columns(options: ReadOptions, schema: StructType) -> tuple[pa.Schema, Decoding | None]:
    """The columns of a query in Arrow, and how they are decoded; ``InvalidInput`` for others than the log's."""
    if not options.decode:
        return check_schema(schema, SPARK_SCHEMA), None
    return _asked(options, lambda log: Decoding.planned(log, options.bad_rows, options.url, schema))


def _asked(options: ReadOptions, find: Callable[[Log], R]) -> R:
    """Open the log, and look up what its value format gives."""
    opened = OpenedLog(options, pa.schema([]))
    try:
        return retried(lambda: find(opened.log))
    finally:
        opened.close()
