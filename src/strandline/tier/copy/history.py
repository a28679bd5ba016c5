"""Term history of the hot log, and comparison of its records with segments."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol, runtime_checkable

import pyarrow as pa

from strandline.errors import CursorExpired, NotFound
from strandline.log.contract import Log
from strandline.log.reading import read_between
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import Cursor, Limit
from strandline.model.segments import SegmentMetadata
from strandline.storage.store import ObjectStore
from strandline.tier.copy.agreement import TermHistory
from strandline.tier.copy.copier import listed_at
from strandline.tier.copy.segment_files import listed_batches, plan_segment


@runtime_checkable
class TermLookups(Protocol):
    """A log whose records have terms."""

    def term_at(self, offset: int) -> int | None:
        """The term of a record, possibly also of the last trimmed one; None if unknown."""

    def end_of_term(self, term: int) -> int:
        """The first retained offset of a term above this one; the log's end if there is none."""


def read_history(log: Log, upto: int | None = None) -> TermHistory:
    """The terms of the log's own records, or of those below an offset. One read of the log per term.

    All records of a log without terms have term 0.
    """
    while True:
        bounds = log.bounds()
        first, end = bounds.first, bounds.next if upto is None else min(upto, bounds.next)
        if not isinstance(log, TermLookups):
            return TermHistory(bounds, ((0, first),) if first < bounds.next else (), 0)
        starts = []
        before = log.term_at(first - 1) if first else None
        if before is not None:
            starts.append((before, first - 1))
        at = first if before is None else log.end_of_term(before)
        while at < end and (term := log.term_at(at)) is not None:
            starts.append((term, at))
            at = log.end_of_term(term)
        last = log.term_at(bounds.next - 1) if bounds.next else None
        if log.bounds().first == first:  # otherwise the log was trimmed meanwhile: once more
            return TermHistory(bounds, tuple(starts), last or 0)


def is_same_record(log: Log, store: ObjectStore, segment: SegmentMetadata, offset: int) -> bool:
    """Whether log and segment hold the same record at an offset, in the same batch as far as that is known.

    Diverged histories may have equal records at an offset, so batches are compared too: by the fingerprint of the
    segment's last batch, and in a write-ahead log by write time. True if the log has trimmed the record meanwhile.

    Reads one batch of the log, and one row group of the segment. ``NotFound`` if the segment's object is not there.
    """
    one = Limit(batches=1, upto=offset + 1)
    (span,) = plan_segment(store, segment, offset, one)
    ((cold, listed),) = listed_batches(span)
    try:
        fingerprint = log.cursor_at(offset + 1).fingerprint if offset == segment.end else None
        (own,) = log.plan(Cursor(log.log_id, offset), one)
        hot = own.fetch()
    except (CursorExpired, NotFound):
        if log.bounds().first > offset:
            return True
        raise
    known = span.tail().facts.fingerprint
    if None not in (fingerprint, known) and fingerprint != known:
        return False
    # An object log may set listing times back later: they prove nothing there.
    if isinstance(own, WalSpan) and listed_at(own, listed) != listed:
        return False
    return bool(pa.Table.from_batches(hot).equals(pa.Table.from_batches([cold])))


def first_difference(log: Log, store: ObjectStore, segment: SegmentMetadata, first: int, end: int) -> int | None:
    """The first offset from ``first`` up to ``end`` at which log and segment differ; None if all records are equal.

    Reads all of them, a row group at a time. Records that the log has trimmed meanwhile count as equal.
    """
    for span in plan_segment(store, segment, first, Limit(upto=end)):
        try:
            hot = pa.Table.from_batches(list(read_between(log, Cursor(log.log_id, span.first), span.next, None)))
        except (CursorExpired, NotFound):
            if log.bounds().first > span.first:
                continue
            raise
        cold = pa.Table.from_batches(span.fetch())
        if not hot.equals(cold):
            rows = range(1, cold.num_rows + 1)
            same = bisect_left(rows, True, key=lambda rows: not hot.slice(0, rows).equals(cold.slice(0, rows)))
            return span.first + same
    return None
