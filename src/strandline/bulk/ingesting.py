"""Parallel ingest of a large source: tasks fetch and stage its records, one write per wave lists them in order.

The listed batches are those that :func:`strandline.ingest` would append, each numbered by its position in the source.
So both can continue each other, and cursors are translated as after any ingest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from os import PathLike
from typing import Annotated, Any, Final, cast

import pyarrow as pa

from strandline.errors import CorruptData, InvalidInput, StrandlineError, Unsupported
from strandline.ingestion.api import entered, open_source, open_target
from strandline.ingestion.history import proving_end
from strandline.ingestion.log_sink import TARGET, LogSink, pieces_of
from strandline.ingestion.run import Ingested, IngestProgress, pinned, resume_ingest
from strandline.ingestion.streams import MessageStream
from strandline.ingestion.value_formats import FormatFollower
from strandline.log.contract import READING, Log, require
from strandline.log.object import ObjectLog
from strandline.log.object.head.edits import BatchListing
from strandline.log.object.staging import MOST_BATCHES, StagedAppend
from strandline.log.read.planning import cursor_after, divided
from strandline.log.read.reading import fetch_in_order
from strandline.log.writers.source import source_writer
from strandline.model.addresses import Address, ParsedAddress
from strandline.model.arguments import ANY, checked
from strandline.model.cursor import Cursor, Limit, Span, Start
from strandline.model.head import SourceProof
from strandline.model.records import READ_SCHEMA
from strandline.storage.clock import CHANCE
from strandline.storage.env import SYSTEM
from strandline.storage.task_pool import TaskPool, ThreadPool
from strandline.tier.read.tiered_log import TieredLog, hot_tier

TASK_BYTES: Final = 64 << 20
"""About how many stored bytes of a log one task ingests."""
TASK_BATCHES: Final = 4096
"""How many batches of a log one task ingests, at most; each is a request."""
TASK_POSITIONS: Final = 500_000
"""How many positions of a stream one task ingests: their bytes are not known before."""
WAVE: Final = 4
"""Tasks per worker whose batches are listed together."""


@dataclass(frozen=True, slots=True)
class SourceRange:
    """A range of a source as a task reads it: planned spans of a log, or what opens a stream. Picklable."""

    source: tuple[Span, ...] | Callable[[], MessageStream]
    first: int
    next: int

    def read(self) -> Iterator[pa.RecordBatch]:
        """The records, in order."""
        if isinstance(self.source, tuple):
            for _, batches in fetch_in_order(self.source, columns=READ_SCHEMA.names):
                yield from batches
                batches.clear()
            return
        with contextlib.closing(self.source()) as stream:
            yield from stream.read(Cursor(stream.log_id, self.first), upto=self.next)


@dataclass(frozen=True, slots=True)
class IngestTask:
    """Stages the records of one range; returns the batches, in order. Staging it again gives the same records."""

    range: SourceRange
    number: int
    """Position after the last record before the range; below ``range.first`` if positions in between have no record."""
    append: StagedAppend
    is_whole: bool
    """Whether each source batch with an offset of its own becomes a batch of its own."""

    def __call__(self) -> list[BatchListing]:
        """Fetch, check and stage."""
        found: list[BatchListing] = []
        number = self.number
        for piece, behind in pieces_of(self._batches(), self.range.next, whole=self.is_whole):
            found.append(self.append.stage_numbered(piece, number, behind))
            number = behind
        return found

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """The source's batches; ``CorruptData`` unless they are of this range, in order."""
        last = self.range.first - 1
        for batch in self.range.read():
            if batch.num_rows:
                first, end = batch.column(0)[0].as_py(), batch.column(0)[-1].as_py()
                if first < last or end >= self.range.next or (first == last and not self.is_whole):
                    raise CorruptData(
                        f"The source gave offset {first} after {last}, of {self.range.first} up to {self.range.next}."
                    )
                last = end
                yield batch


@checked
def ingest(
    source: Address | Log,
    target: Address | Annotated[ObjectLog | TieredLog, ANY],
    *,
    pool: TaskPool | None = None,
    start: Start = "beginning",
    skip_trimmed: bool = False,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[IngestProgress], None] = lambda _: None,
) -> Ingested:
    """Append every record of a large source to an object log in parallel, exactly once and in order.

    Up to the source's end as of now. Its records are staged by the tasks of a ``pool`` (threads of this process, or
    ``sl.spark.executors(spark)``) and listed in waves, each in one conditional write that also moves the position.
    Killed at any moment and called again, it continues there; so does :func:`strandline.ingest`, which then follows the
    source. Arguments and errors are those of that function; the source is pinned meanwhile. Of several runs at once,
    each counts only the records that it listed itself. A stream of Kafka or NATS
    has to be given by its address, because each task opens it.

    ``Unsupported`` for a target that is no object log: ingest into one, or without a pool.
    """
    with contextlib.ExitStack() as held:
        if isinstance(source, MessageStream):
            raise InvalidInput("Give a stream by its address, such as kafka://host:port/topic/0: each task opens it.")
        if isinstance(target, (str, PathLike)):
            place = ParsedAddress.of(target)
            if place.is_wal or place.is_node:  # before a log of another kind is created there
                raise _no_object_log(place.text)
        copied: Log = entered(source, open_source, source_options, held)
        is_stream = isinstance(copied, MessageStream)
        reopen = partial(open_source, cast("Address", source), **(source_options or {})) if is_stream else None
        hot = hot_tier(entered(target, open_target, target_options, held))
        if not isinstance(hot, ObjectLog):
            raise _no_object_log(repr(target))
        require(copied, "ingested", *READING)
        require(hot, "the target of an ingest", *TARGET)
        if copied.log_id == hot.log_id:
            raise InvalidInput("A log cannot be ingested into itself: choose another target.")
        formats = FormatFollower(copied, hot)
        formats.match()
        sink = LogSink(hot)
        resume_ingest(copied, hot, sink, skip_trimmed=skip_trimmed)
        stored, known = sink.last_append(copied.log_id), sink.cursor(copied.log_id)
        first = copied.cursor_at(copied.position_of(start)) if known is None else known
        end = proving_end(copied)
        if first.next > end.next:
            raise InvalidInput(
                f"start is {first.next:,}, and the source ends at {end.next:,}: begin earlier, or try again later."
            )
        held.enter_context(pinned(copied, first.next, env=SYSTEM))
        job = _IngestJob(copied, hot, pool or ThreadPool(), reopen, formats, on_progress)
        reached, records = job.run(first, None if stored is None else stored.number, end)
        last = sink.last_append(copied.log_id)
        return Ingested(reached, None if last is None else hot.cursor_at(last.first + last.count), records)


def _no_object_log(target: str) -> Unsupported:
    return Unsupported(
        f"Only an object log takes batches of many workers, and {target} is none: ingest with one worker ('strandline "
        "ingest' without --workers)."
    )


@dataclass(frozen=True, slots=True)
class _IngestJob:
    source: Log
    target: ObjectLog
    pool: TaskPool
    reopen: Callable[[], MessageStream] | None
    formats: FormatFollower
    report: Callable[[IngestProgress], None]

    def run(self, at: Cursor, known: int | None, later: Cursor) -> tuple[Cursor, int]:
        """Ingest wave after wave up to ``later``; returns the cursor that was reached, and how many records this run
        appended.
        """
        end = later.next
        append = StagedAppend(
            self.target.store, self.target.log_id, source_writer(str(self.source.log_id)), CHANCE.uuid().hex
        )
        is_whole = self.source.counts_batches
        records = 0
        try:
            while at.next < end and (ranges := self._ranges(at, end)):
                numbers = [at.next if known is None else known, *(one.first for one in ranges[1:])]
                tasks = [IngestTask(*each, append, is_whole) for each in zip(ranges, numbers, strict=True)]
                title = f"ingest of offsets {at.next:,} to {ranges[-1].next - 1:,}"
                found = dict(self.pool.run(tasks, title))
                staged = _joined([found[number] for number in range(len(tasks))])
                batches = [batch for part in staged for batch in part]
                upto = ranges[len(staged) - 1].next
                # Positions without records behind the last batch are passed over by the next one.
                held = [one for one, part in zip(ranges, staged, strict=False) if part]
                known = held[-1].next if held else known
                self.formats.match()
                if held and known is not None:
                    proof = SourceProof.at(self._after(held[-1], at)) or SourceProof.at(later)
                    records += append.commit_numbered(batches, upto=known, proof=proof)
                append.discard()
                at = self._after(ranges[len(staged) - 1], at) if self.reopen is None else at.at(upto)
                self.report(IngestProgress(at.next, end, records))
        except BaseException:
            with contextlib.suppress(StrandlineError):
                append.discard()
            raise
        return at, records

    def _after(self, part: SourceRange, at: Cursor) -> Cursor:
        return cursor_after(at, part.source[-1]) if isinstance(part.source, tuple) else self.source.cursor_at(part.next)

    def _ranges(self, at: Cursor, end: int) -> Sequence[SourceRange]:
        count = WAVE * self.pool.count
        if self.reopen is not None:
            upto = min(end, at.next + count * TASK_POSITIONS)
            cuts = [*range(at.next, upto, TASK_POSITIONS), upto]
            return [SourceRange(self.reopen, first, behind) for first, behind in pairwise(cuts)]
        # Batches of a queue are not joined, and one commit lists at most this many.
        most = min(count * TASK_BATCHES, MOST_BATCHES)
        spans = self.source.plan(at, Limit(bytes=count * TASK_BYTES, batches=most, upto=end))
        tasks = max(-(-sum(span.size for span in spans) // TASK_BYTES), -(-len(spans) // TASK_BATCHES))
        wanted = max(1, min(count, tasks))
        groups = [group for group in divided(spans, wanted) if group]
        return [SourceRange(tuple(group), group[0].first, group[-1].next) for group in groups]


def _joined(staged: Sequence[list[BatchListing]]) -> Sequence[list[BatchListing]]:
    """The parts that can be listed together: all up to and including the first one without records.

    Behind that one, the number of the next batch differs from the one that its task was given.

    >>> _joined([["a"], [], ["b"]]), _joined([["a"], []]), _joined([[], ["b"]])
    ([['a'], []], [['a'], []], [[]])
    """
    for number, part in enumerate(staged):
        if not part:
            return staged[: number + 1]
    return staged
