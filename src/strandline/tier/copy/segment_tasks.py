"""Encoding of spans as segments, and tasks that make segments on any machine: encode, store, verify.

Nothing is published. See :class:`Backlog`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import pyarrow.compute as pc

from strandline.errors import CorruptData, NotFound
from strandline.formats.segment.file import LARGEST_SEGMENT, Seal, SegmentFacts
from strandline.formats.segment.writer import EncodedSegment, SegmentWriter
from strandline.log.object.log import ObjectSpan
from strandline.log.read.erased_records import erased
from strandline.log.read.reading import fetch_in_order
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import Span
from strandline.model.segments import SegmentId, SegmentMetadata
from strandline.storage.objects.store import ObjectStore
from strandline.tier.copy.erasure import PurgedKeys
from strandline.tier.copy.segment_files import (
    ColdSpan,
    listed_batches,
    load_tail,
    plan_segment,
    segment_path,
    verify_stored,
)


def add_spans(
    writer: SegmentWriter, spans: Sequence[Span], now: int, is_enough: Callable[[], bool] = lambda: False
) -> int | None:
    """Fetch spans and add them to a segment until ``is_enough``, as many as an event can describe.

    Returns the fingerprint of the last one, if it has one. ``now`` is the listing time of logs without listing times
    (microseconds).
    """
    start, fingerprint = writer.next, None
    for span, batches in fetch_in_order(spans):
        size = sum(batch.nbytes for batch in batches)
        # Compression hardly ever makes it larger; an event cannot describe a larger segment.
        if writer.next > start and writer.size + size + (size >> 3) > LARGEST_SEGMENT - (64 << 20):
            break
        term, fingerprint = getattr(span, "term", 0), getattr(span, "fingerprint", None)
        writer.add(batches, term=term, listed=listed_at(span, now), runs=[(span.next - span.first, fingerprint)])
        if is_enough():
            break
    return fingerprint


def finished(writer: SegmentWriter, segment: SegmentId, fingerprint: int | None) -> EncodedSegment:
    """The file of a segment; ``fingerprint`` is that of the batch with its last record."""
    partition = segment.partition
    return writer.finish(
        log_id=partition.topic_id, partition=partition.partition, segment=segment.id, fingerprint=fingerprint
    )


def listed_at(span: Span, now: int) -> int:
    """When a span's batch was listed, in microseconds; ``now`` for logs without listing times."""
    if isinstance(span, ObjectSpan):
        return span.entry.listed
    if isinstance(span, WalSpan):
        # A write-ahead log seeks by milliseconds: the last microsecond of the millisecond is not later than it.
        return span.frame.timestamp * 1000 + 999
    return now


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment whose object is stored and verified, and which no event names yet."""

    facts: SegmentFacts
    seal: Seal
    erased: int = 0
    """How many records lost their values."""


def stored(store: ObjectStore, segment: SegmentId, encoded: EncodedSegment, erased: int = 0) -> StoredSegment:
    """Store a segment, and read it again."""
    path = segment_path(segment, encoded.facts.start)
    store.put(path, encoded.parts)
    verify_stored(store, path, encoded.seal)
    return StoredSegment(encoded.facts, encoded.seal, erased)


@final
@dataclass(frozen=True, slots=True)
class CopyTask:
    """Makes a segment of some spans of a log; of fewer than given, if it would be too large for an event."""

    store: ObjectStore
    segment: SegmentId
    spans: tuple[Span, ...]
    now: int
    """The listing time of logs without listing times, in microseconds."""

    def __call__(self) -> StoredSegment:
        """Encode, store and verify it."""
        writer = SegmentWriter(self.spans[0].first, expected=sum(span.size for span in self.spans))
        fingerprint = add_spans(writer, self.spans, self.now)
        return stored(self.store, self.segment, finished(writer, self.segment, fingerprint))


@final
@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Makes one segment of adjacent ones, without the values of purged keys; None if there is nothing to do.

    There is nothing to do for a single segment without such values, and for segments whose listing times fall: a
    segment is searched by them.
    """

    store: ObjectStore
    segment: SegmentId
    sources: tuple[SegmentMetadata, ...]
    purged: PurgedKeys

    def __call__(self) -> StoredSegment | None:
        """Encode, store and verify it."""
        if len(self.sources) == 1 and not _has_hits(self.store, self.sources[0], self.purged):
            return None
        writer = SegmentWriter(self.sources[0].start, expected=sum(source.size for source in self.sources))
        count, latest = 0, 0
        for source in self.sources:
            for span in plan_segment(self.store, source, source.start):
                for batch, listed, runs in listed_batches(span):
                    if listed < latest:
                        return None
                    latest = listed
                    hits = self.purged.hits(batch)
                    count += 0 if hits is None else pc.sum(hits).as_py()
                    kept = batch if hits is None else erased(batch, hits)
                    writer.add([kept], term=span.term, listed=listed, runs=runs)
        if len(self.sources) == 1 and not count:
            return None
        fingerprint = load_tail(self.store, self.sources[-1]).facts.fingerprint
        return stored(self.store, self.segment, finished(writer, self.segment, fingerprint), count)


def may_have_hits(store: ObjectStore, segment: SegmentMetadata, purged: PurgedKeys) -> bool:
    """Whether a replaced segment has values of purged keys; one that cannot be read may have."""
    try:
        return _has_hits(store, segment, purged)
    except (CorruptData, NotFound):
        return True


def _has_hits(store: ObjectStore, source: SegmentMetadata, purged: PurgedKeys) -> bool:
    """Whether a segment has values to erase; reads keys where statistics allow it, values where keys match."""
    spans = plan_segment(store, source, source.start) if len(purged) else ()
    return any(
        purged.hits(batch) is not None
        for span in spans
        if _may_hit(span, purged)
        if any(purged.hits(keys) is not None for keys in span.fetch(["offset", "op", "key"]))
        for batch in span.fetch()
    )


def _may_hit(span: ColdSpan, purged: PurgedKeys) -> bool:
    keys = span.tail().statistics(span.group, "key")
    return keys is None or purged.may_hit(bytes(keys[0]), bytes(keys[1]))
