"""What the hot tier tells of its history: the terms of its records, and the records themselves where tiers meet."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import pyarrow as pa

from strandline.log.contract import Log
from strandline.model.cursor import Cursor, Limit
from strandline.model.errors import CursorExpired, NotFound
from strandline.model.segments import SegmentMetadata
from strandline.storage.store import ObjectStore
from strandline.tier.agreement import TermHistory
from strandline.tier.segment_files import plan_segment


@runtime_checkable
class Termed(Protocol):
    """A log whose records have terms."""

    def term_at(self, offset: int) -> int | None:
        """The term of a record, and perhaps of the last one that was forgotten; None if it is not known."""

    def end_of_term(self, term: int) -> int:
        """The first retained offset of a term above this one; the log's end if there is none."""


def read_history(log: Log, upto: int | None = None) -> TermHistory:
    """The terms of everything that the log itself has, or of what it has below an offset.

    Costs a look at the log for each term that there is. All records of a log without terms are of term 0.
    """
    while True:
        bounds = log.bounds()
        first, end = bounds.first, bounds.next if upto is None else min(upto, bounds.next)
        if not isinstance(log, Termed):
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
        if log.bounds().first == first:  # otherwise some of it was pruned meanwhile: once more
            return TermHistory(bounds, tuple(starts), last or 0)


def is_same_record(log: Log, store: ObjectStore, segment: SegmentMetadata, offset: int) -> bool:
    """Whether log and segment hold the same record at an offset; also if the log has forgotten it meanwhile.

    Reads one batch of the log, and one row group of the segment. ``NotFound`` if the segment's object is not there.
    """
    one = Limit(batches=1, upto=offset + 1)
    cold = [batch for span in plan_segment(store, segment, offset, one) for batch in span.fetch()]
    try:
        hot = [batch for span in log.plan(Cursor(log.log_id, offset), one) for batch in span.fetch()]
    except (CursorExpired, NotFound):
        if log.bounds().first > offset:
            return True
        raise
    return bool(pa.Table.from_batches(hot).equals(pa.Table.from_batches(cold)))
