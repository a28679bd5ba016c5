"""Encodes spans of a log as a segment, wherever that runs: in the tierer, or in a task on another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strandline.formats.segment.file import LARGEST_SEGMENT
from strandline.formats.segment.writer import EncodedSegment, SegmentWriter
from strandline.log.object.log import ObjectSpan
from strandline.log.read.reading import fetch_in_order
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import Span
from strandline.model.segments import SegmentId


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
