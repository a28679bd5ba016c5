"""Segments in an object store: names, upload, verification, and reads of only the needed parts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CorruptData, InvalidInput, NotFound
from strandline.formats.checksum import crc32c, joined_crc32c
from strandline.formats.segment.batches import BatchRun
from strandline.formats.segment.file import (
    LISTED,
    ByteRange,
    Seal,
    SegmentFacts,
    SegmentTail,
    damaged_segment,
    decode_tail,
)
from strandline.formats.segment.records import decode_group
from strandline.log.read.planning import clipped, known_columns, plan_entries
from strandline.model.cursor import NO_LIMIT, Limit, RecordRange
from strandline.model.records import READ_SCHEMA
from strandline.model.segments import SegmentId, SegmentMetadata
from strandline.storage.metrics import fetching
from strandline.storage.objects.store import ObjectInfo, ObjectStore

_CHUNK_BYTES: Final = 8 << 20
"""Bytes per read during verification."""
_HOLE: Final = 16 << 10
"""Ranges no further apart are read in one request: unneeded bytes cost less than another request."""
_KEPT_TAILS: Final = 16 << 20
_NAME: Final = re.compile(r"[0-9a-f-]{36}/[0-9]+/[0-9]{20}-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.parquet")


def partition_prefix(log_id: UUID, partition: int) -> str:
    """The path prefix of all segments of a partition."""
    # By the log's id: its name may change.
    return f"{log_id}/{partition}/"


def segment_path(segment: SegmentId, start: int) -> str:
    """The path of a segment: ``<log>/<partition>/<start, 20 digits>-<segment id>.parquet``.

    A listing returns the segments of a partition in offset order.
    """
    partition = segment.partition
    return f"{partition_prefix(partition.topic_id, partition.partition)}{start:020d}-{segment.id}.parquet"


class SegmentObject(NamedTuple):
    """An object whose path is that of a segment."""

    info: ObjectInfo
    id: UUID


def list_segments(store: ObjectStore, log_id: UUID, partition: int) -> Iterator[SegmentObject]:
    """The objects of a partition with the path of a segment, by start; other objects are ignored."""
    for info in store.list(partition_prefix(log_id, partition)):
        found = _NAME.fullmatch(info.path)
        if found is not None:
            yield SegmentObject(info, UUID(found[1]))


def verify_segment(store: ObjectStore, segment: SegmentMetadata) -> SegmentFacts:
    """Read a whole segment, in small ranges; ``CorruptData`` unless size, checksum and facts agree with its events."""
    path = segment_path(segment.segment, segment.start)
    with _naming(store, path, segment.start, segment.end):
        facts = verify_stored(store, path, seal_of(segment))
    return _agreeing(facts, segment, f"{store.url}/{path}")


def verify_stored(store: ObjectStore, path: str, seal: Seal) -> SegmentFacts:
    """Read a whole segment, in small ranges, and return its facts; ``CorruptData`` unless it is as sealed."""
    where = f"{store.url}/{path}"
    checksum = at = 0
    data: bytes | memoryview = b""
    while at < seal.size:
        # The last range is the tail, so that it is not read twice.
        end = min(at + _CHUNK_BYTES, seal.size - seal.tail) if at < seal.size - seal.tail else seal.size
        data = read_range(store, path, at, end - at, f"it should have {seal.size} bytes")
        checksum, at = crc32c(data, checksum), end
    if checksum != seal.checksum or is_longer(store, path, seal.size):
        raise CorruptData(
            f"{where} is damaged: its {seal.size} bytes do not match their checksum. Restore the object, or "
            "remove the segment."
        )
    tail, _ = decode_tail(data, where, before=seal.size - seal.tail)
    return tail.facts


def check_stored(store: ObjectStore, segment: SegmentMetadata) -> None:
    """Read the tail of a segment's object again; ``NotFound``, or ``CorruptData`` if it is another one."""
    path = segment_path(segment.segment, segment.start)
    tail = _read_tail(store, path, seal_of(segment), (segment.start, segment.end))
    _agreeing(tail.facts, segment, tail.where)


def seal_of(segment: SegmentMetadata) -> Seal:
    """The seal in a segment's events; ``CorruptData`` if there is no valid one."""
    seal = Seal.decode(segment.custom_metadata, f"Segment {segment.segment}")
    if seal.size != segment.size:
        raise CorruptData(
            f"Segment {segment.segment} has {segment.size} bytes by its events and {seal.size} by its seal: remove it."
        )
    return seal


def _agreeing(facts: SegmentFacts, segment: SegmentMetadata, where: str) -> SegmentFacts:
    partition = segment.segment.partition
    published = SegmentFacts(
        log_id=partition.topic_id,
        partition=partition.partition,
        segment=segment.segment.id,
        start=segment.start,
        end=segment.end,
        terms=segment.terms,
        max_timestamp=segment.max_timestamp,
    )
    if facts != published:
        raise CorruptData(f"{where} holds {facts}, but its events say {published}: restore the object.")
    return facts


def is_longer(store: ObjectStore, path: str, size: int) -> bool:
    """Whether an object has more bytes than ``size``."""
    try:
        store.get_range(path, size, 1)
    except InvalidInput:
        return False
    return True


def read_range(store: ObjectStore, path: str, start: int, size: int, why: str) -> bytes | memoryview:
    """Bytes of an object, all or ``CorruptData``, which says ``why`` they should be there."""
    try:
        return store.get_range(path, start, size)
    except InvalidInput as error:
        raise CorruptData(
            f"{store.url}/{path} is damaged: it ends before byte {start + size}, and {why}. Restore the object."
        ) from error


@contextlib.contextmanager
def _naming(store: ObjectStore, path: str, first: int, last: int) -> Iterator[None]:
    """Name the segment and its offsets if its object is missing."""
    try:
        yield
    except NotFound as error:
        raise NotFound(
            f"The segment {store.url}/{path} is missing (offsets {first} to {last}): if retention has removed it since "
            "this was planned, plan again; otherwise restore it, or bootstrap the consumer past it."
        ) from error


@dataclass(frozen=True, slots=True)
class ColdSpan:
    """Offsets ``first`` up to ``next`` of one row group of a segment. Picklable: it has its store's address.

    Fetching reads the segment's tail, once per process, and the requested columns. Everything read is verified.
    """

    store: ObjectStore
    path: str
    seal: Seal
    group: int
    first: int
    next: int
    term: int
    """The term of its records."""
    size: int
    """The bytes of the row group."""
    fingerprint: int | None = None
    """Fingerprint of the batch with its last record; None: unknown."""

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and verify the requested columns; returns the span's records with offsets."""
        names = READ_SCHEMA.names if columns is None else known_columns(columns)
        # A record's position determines its offset; the column is for other readers.
        stored = [name for name in names if name != "offset"] or ["op"]
        with fetching() as count:
            tail = self.tail()
            group = tail.group(self.group)
            ranges = tail.ranges(self.group, stored)
            batches = decode_group(tail, self.group, stored, self.pieces(ranges))
            count(group.next - group.first, sum(piece.size for piece in ranges))
        numbered = clipped(numbered_batches(batches, group.first), self.first, self.next)
        return [batch.select(names) for batch in numbered]

    def record_range(self) -> RecordRange:
        """The timestamps and keys of the row group, by its statistics."""
        oldest, newest = self.tail().statistics(self.group, "timestamp") or (None, None)
        keys = self.tail().statistics(self.group, "key")
        lowest, highest = (None, None) if keys is None else map(bytes, keys)
        return RecordRange(oldest, newest, lowest, highest)

    def tail(self) -> SegmentTail:
        """The segment's tail."""
        return _tail(self.store, self.path, self.seal, (self.first, self.next - 1))

    def pieces(self, ranges: Iterable[ByteRange]) -> list[tuple[ByteRange, bytes | memoryview]]:
        """Each range of the segment with its bytes."""
        with _naming(self.store, self.path, self.first, self.next - 1):
            return fetch_ranges(self.store, self.path, ranges)


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A whole segment of one term, whose row groups are planned when they are read: for plans with very many."""

    store: ObjectStore
    segment: SegmentMetadata
    first: int
    next: int
    size: int
    """The bytes of the segment."""
    term: int
    """The term of its records."""

    def parts(self) -> list[ColdSpan]:
        """Its row groups; reads the segment's tail."""
        return plan_segment(self.store, self.segment, self.segment.start)

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """All records of the segment; :meth:`parts` need less memory."""
        return [batch for part in self.parts() for batch in part.fetch(columns)]


def listed_batches(span: ColdSpan) -> Iterator[tuple[pa.RecordBatch, int, list[BatchRun]]]:
    """The records of a span with offsets, in runs; with each its listing time (microseconds), and its batches."""
    stored = [*(name for name in READ_SCHEMA.names if name != "offset"), LISTED]
    tail = span.tail()
    found = decode_group(tail, span.group, stored, span.pieces(tail.ranges(span.group, stored)))
    for batch in clipped(numbered_batches(found, tail.group(span.group).first), span.first, span.next):
        runs = pc.run_end_encode(batch.column(LISTED).cast(pa.int64()))
        at, first = 0, batch.column(0)[0].as_py()
        for end, listed in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
            yield (
                batch.select(READ_SCHEMA.names).slice(at, end - at),
                listed,
                tail.batches.runs(first + at, first + end),
            )
            at = end


def plan_segment(store: ObjectStore, segment: SegmentMetadata, since: int, limit: Limit = NO_LIMIT) -> list[ColdSpan]:
    """Spans over a segment's offsets from ``since`` on, one per row group, within the limit but at least one.

    Row groups are to this plan what batches are to others. Reads the segment's tail, unless it is cached.
    """
    tail = load_tail(store, segment)
    path, seal = segment_path(segment.segment, segment.start), seal_of(segment)
    groups = (tail.group(number) for number in tail.groups(since, segment.end + 1))
    return [
        ColdSpan(store, path, seal, group.number, first, end, group.term, group.size, tail.fingerprint_at(end - 1))
        for group, first, end in plan_entries(groups, since, limit)
    ]


def load_tail(store: ObjectStore, segment: SegmentMetadata) -> SegmentTail:
    """The tail of a segment; cached in this process."""
    path = segment_path(segment.segment, segment.start)
    tail = _tail(store, path, seal_of(segment), (segment.start, segment.end))
    _agreeing(tail.facts, segment, tail.where)
    return tail


def listed_since(store: ObjectStore, segment: SegmentMetadata, time: int) -> int | None:
    """The first offset of the first batch in a segment that was listed at a time (microseconds) or later."""
    tail = load_tail(store, segment)
    number = tail.listed_since(time)
    if number is None:
        return None
    offset = tail.group(number).first
    path = segment_path(segment.segment, segment.start)
    for batch in decode_group(tail, number, [LISTED], fetch_ranges(store, path, tail.ranges(number, [LISTED]))):
        before = pc.sum(pc.less(batch.column(0).cast(pa.int64()), time)).as_py()
        offset += before
        if before < batch.num_rows:
            break
    return offset


def fetch_ranges(
    store: ObjectStore, path: str, ranges: Iterable[ByteRange]
) -> list[tuple[ByteRange, bytes | memoryview]]:
    """Each range with its bytes; adjacent ranges are read in one request."""
    runs: list[list[ByteRange]] = []
    for piece in sorted(ranges, key=lambda piece: piece.start):
        if runs and piece.start - runs[-1][-1].next <= _HOLE:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    found: list[tuple[ByteRange, bytes | memoryview]] = []
    for run in runs:
        start = run[0].start
        data = memoryview(read_range(store, path, start, run[-1].next - start, "a row group is there"))
        found += [(piece, data[piece.start - start : piece.next - start]) for piece in run]
    return found


def numbered_batches(batches: Iterable[pa.RecordBatch], first: int) -> list[pa.RecordBatch]:
    """Batches with a column of offsets from ``first`` on."""
    numbered = []
    offset = READ_SCHEMA.field("offset")
    for batch in batches:
        schema = pa.schema([offset, *batch.schema])
        offsets = pa.arange(first, first + batch.num_rows)
        numbered.append(pa.RecordBatch.from_arrays([offsets, *batch.columns], schema=schema))
        first += batch.num_rows
    return numbered


def read_whole_group(span: ColdSpan) -> list[pa.RecordBatch]:
    """The records of a span, as :meth:`ColdSpan.fetch` returns them, with every column verified, for verifications."""
    tail = span.tail()
    group = tail.group(span.group)
    batches = decode_group(tail, span.group, (*READ_SCHEMA.names, LISTED), span.pieces(tail.chunks(span.group)))
    stored = pa.concat_arrays([batch.column(0) for batch in batches])
    if not stored.equals(pa.arange(group.first, group.next)):
        raise damaged_segment(tail.where, f"its offsets from {group.first} on do not follow each other")
    return [batch.select(READ_SCHEMA.names) for batch in clipped(batches, span.first, span.next)]


def check_between_columns(span: ColdSpan) -> None:
    """Verify the bytes of a segment that belong to no column, such as the page index; ``CorruptData``.

    The columns are not read: their checksums in the tail, joined with those of the bytes between, are the checksum of
    the whole object in the events.
    """
    tail, seal = span.tail(), span.seal
    columns = sorted((chunk for number in range(len(tail)) for chunk in tail.chunks(number)), key=lambda one: one.start)
    borders = [ByteRange(0, 0, 0), *columns, ByteRange(seal.size - seal.tail, 0, 0)]
    checksum = 0
    for before, after in pairwise(borders):
        size = after.start - before.next
        if size < 0:
            raise damaged_segment(tail.where, "its columns overlap")
        between = read_range(span.store, span.path, before.next, size, "it has a tail") if size else b""
        checksum = joined_crc32c(crc32c(between, checksum), after.checksum, after.size)
    if joined_crc32c(checksum, seal.tail_checksum, seal.tail) != seal.checksum:
        raise damaged_segment(tail.where, "the checksum of the bytes between its columns is wrong")
    if is_longer(span.store, span.path, seal.size):
        raise damaged_segment(tail.where, f"it has more than its {seal.size} bytes")


_TAILS: Final[dict[tuple[str, str, Seal], SegmentTail]] = {}
"""The tails last used in this process, the latest last.

Without a lock, which a fork could leave held in the child: each step on the dictionary is atomic, and the worst of a
race is a tail that is read twice.
"""


def forget_tails() -> None:
    """Clear the cache of tails."""
    _TAILS.clear()


def _tail(store: ObjectStore, path: str, seal: Seal, offsets: tuple[int, int]) -> SegmentTail:
    key = (store.url, path, seal)
    tail = _TAILS.pop(key, None)
    if tail is not None:
        _TAILS[key] = tail
        return tail
    tail = _read_tail(store, path, seal, offsets)
    _TAILS[key] = tail
    # Only behind a read: thousands of small ones may be kept, and to add them all up takes longer than to find one.
    while sum(seal.tail for _, _, seal in list(_TAILS)) > _KEPT_TAILS:
        oldest = next(iter(list(_TAILS)))
        if oldest == key:
            break
        _TAILS.pop(oldest, None)
    return tail


def _read_tail(store: ObjectStore, path: str, seal: Seal, offsets: tuple[int, int]) -> SegmentTail:
    where = f"{store.url}/{path}"
    with _naming(store, path, *offsets):
        data = read_range(store, path, seal.size - seal.tail, seal.tail, f"it should have {seal.size} bytes")
    if crc32c(data, 0) != seal.tail_checksum:
        raise CorruptData(f"{where} is damaged: the checksum of its tail is wrong. Restore the object.")
    return decode_tail(data, where, before=seal.size - seal.tail)[0]
