"""Term history of the hot log, and divergence of segments from it, by terms and by records.

A term has one writer, so offset and term identify a record. Where a log and a segment have an offset in different
terms, one of the two is of an abandoned history: the one with the lower last term. A log that is truncated must
continue in a new term, as a promoted replica does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import pyarrow as pa

from strandline.errors import CursorExpired, Diverged, Gap, NotFound, NotReady
from strandline.log.contract import Log
from strandline.log.read.erased_records import same_unless_erased
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import Bounds, Cursor, Limit
from strandline.model.segments import SegmentMetadata, TopicPartition
from strandline.storage.objects.store import ObjectStore
from strandline.tier.copy.segment_files import listed_batches, plan_segment
from strandline.tier.copy.segment_tasks import listed_at


def _start(term: tuple[int, int]) -> int:
    return term[1]


@final
@dataclass(frozen=True, slots=True)
class TermHistory:
    """The terms of a log by offset: what Kafka calls its leader epochs."""

    bounds: Bounds
    """The offsets in the log itself."""
    starts: tuple[tuple[int, int], ...]
    """Each term with its first offset, ascending. The first one starts at the log's start, or one below if the term of
    the last trimmed record is known."""
    last_term: int
    """The term of the log's last record; 0 if unknown."""

    @property
    def first(self) -> int:
        """The lowest offset whose term is known."""
        return self.starts[0][1] if self.starts else self.bounds.next

    def term_at(self, offset: int) -> int:
        """The term of a record."""
        at = bisect_right(self.starts, offset, key=_start) - 1
        return self.starts[max(at, 0)][0] if self.starts else 0


@dataclass(frozen=True, slots=True)
class SegmentCut:
    """A segment that diverges from the log at offset ``at``."""

    segment: SegmentMetadata
    at: int
    spare: bool
    """Whether other segments hold its offsets below that."""


def divergence(segment: SegmentMetadata, history: TermHistory) -> int | None:
    """The first offset at which a segment diverges from the log; None if all known terms agree."""
    at = max(segment.start, history.first)
    if at > segment.end:
        return None
    within = (bisect_right(history.starts, offset, key=_start) for offset in (at, segment.end))
    known = history.starts[slice(*within)]
    changes = {at, history.bounds.next, *(start for _, start in (*segment.terms, *known))}
    for offset in sorted(change for change in changes if at <= change <= segment.end):
        if offset >= history.bounds.next or segment.term_at(offset) != history.term_at(offset):
            return offset
    return None


def lowest_divergence(segments: Iterable[SegmentMetadata], history: TermHistory) -> int | None:
    """The lowest offset at which any segment diverges from the log; None if all agree."""
    found = (divergence(segment, history) for segment in segments)
    return min((at for at in found if at is not None), default=None)


def plan_cuts(segments: Sequence[SegmentMetadata], history: TermHistory, partition: TopicPartition) -> list[SegmentCut]:
    """Where to cut finished segments so that only the log's own history is left.

    ``Diverged`` if a diverging segment has the log's last term or a later one: the log is the stale one. ``NotReady``
    if the log ends below the cold tier without a later term. ``Gap`` if the log has trimmed records that would have to
    be copied again.
    """
    found = [(segment, divergence(segment, history)) for segment in segments]
    agreeing = [segment for segment, at in found if at is None]
    cuts = []
    for segment, at in found:
        if at is None:
            continue
        _check_older(segment, at, history, partition)
        if not _covers(agreeing, at, history.bounds.first):
            raise Gap(
                f"The log of {partition} begins behind a record of term {history.term_at(at)}, which its cold tier has "
                f"in term {segment.term_at(at)}: the log's records there were deleted before they were copied. "
                "Restore the log, or continue in a new one."
            )
        cuts.append(SegmentCut(segment, at, _covers(agreeing, segment.start, at)))
    return cuts


def _check_older(segment: SegmentMetadata, at: int, history: TermHistory, partition: TopicPartition) -> None:
    """Refuse to cut a segment whose last term is not below the log's."""
    term = segment.terms[-1][0]
    # The last terms decide, not those at the divergence: the leader of a term decides about all offsets before it.
    if history.last_term > term:
        return
    end = history.bounds.next
    if at >= end:
        raise NotReady(
            f"The log of {partition} ends at {end}, but its cold tier has offset {at} in term {term}: the log "
            "was restored from an older copy, or truncated. Restore a newer copy; or continue in a later term; or "
            f"remove the records that are only in segments with 'strandline tier truncate --from {end}'. "
            "Nothing was changed."
        )
    raise Diverged(
        f"The log of {partition} has offset {at} in term {history.term_at(at)} and ends in term {history.last_term}, "
        f"but its cold tier has term {term} there: the log was replaced by another one, or was restored from a copy "
        "of an older one. Tier the later one, or let this one continue in a later term. Nothing was changed."
    )


def _covers(segments: Iterable[SegmentMetadata], first: int, end: int) -> bool:
    """Whether segments, sorted by start, hold all offsets from ``first`` up to ``end``."""
    for segment in segments:
        if segment.start <= first <= segment.end:
            first = segment.end + 1
    return first >= end


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

    Diverged histories may have equal records at an offset, so batches are compared too: by their fingerprints,
    or, where those are not known, by write time in a write-ahead log. True if the log has trimmed
    the record meanwhile.

    Reads one batch of the log, and one row group of the segment. ``NotFound`` if the segment's object is not there.
    """
    one = Limit(batches=1, upto=offset + 1)
    (span,) = plan_segment(store, segment, offset, one)
    ((cold, listed, _),) = listed_batches(span)
    try:
        fingerprint = log.cursor_at(offset + 1).fingerprint
        (own,) = log.plan(Cursor(log.log_id, offset), one)
        hot = own.fetch()
    except (CursorExpired, NotFound):
        if log.bounds().first > offset:
            return True
        raise
    known = span.fingerprint
    if fingerprint is not None and known is not None:
        if fingerprint != known:
            return False
    # An object log may set listing times back later: they prove nothing there.
    elif isinstance(own, WalSpan) and listed_at(own, listed) != listed:
        return False
    return same_unless_erased(pa.Table.from_batches(hot), pa.Table.from_batches([cold]))


def first_difference(log: Log, store: ObjectStore, segment: SegmentMetadata, first: int, end: int) -> int | None:
    """The first offset from ``first`` up to ``end`` at which log and segment differ; None if all records are equal.

    Reads all of them, a row group at a time. Records that the log has trimmed meanwhile count as equal.
    """
    for span in plan_segment(store, segment, first, Limit(upto=end)):
        try:
            hot = pa.Table.from_batches(list(log.read(Cursor(log.log_id, span.first), upto=span.next)))
        except (CursorExpired, NotFound):
            if log.bounds().first > span.first:
                continue
            raise
        cold = pa.Table.from_batches(span.fetch())
        if not same_unless_erased(hot, cold):
            rows = range(1, cold.num_rows + 1)
            return span.first + bisect_left(
                rows, True, key=lambda rows: not same_unless_erased(hot.slice(0, rows), cold.slice(0, rows))
            )
    return None
