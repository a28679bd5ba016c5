"""Reader of the cold tier: finds the segments of an offset range and plans spans over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar, final

from strandline.errors import Diverged, NotFound
from strandline.log.contract import Log
from strandline.log.read.planning import PlanBuilder, cursor_after
from strandline.model.cursor import Cursor, Limit
from strandline.model.retention import SlotState
from strandline.model.segments import SegmentMetadata, TopicPartition
from strandline.model.times import TOLERANCE
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ObjectStore
from strandline.tier.copy.history import is_same_record
from strandline.tier.copy.planning import first_since
from strandline.tier.copy.segment_files import (
    ColdSpan,
    SegmentSpan,
    listed_since,
    load_tail,
    plan_segment,
    segment_path,
)
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.manager import MetadataManager

T = TypeVar("T")

_AT_ONCE: Final = 64
"""Segments that one lookup returns: each lookup may cost a request to the event topic."""

_MANY_SPANS: Final = 4096
"""A plan with this many spans continues with whole segments."""

_TRIES: Final = 4
"""How often to plan again because a segment was deleted meanwhile."""


@dataclass(frozen=True, slots=True)
class HotStart:
    """The first offset of the hot tier, and the term of the record before it (None: unknown).

    Only segments up to that record in that term are of the log's history. Later segments are ignored: the log itself
    has their records, or diverged from them.
    """

    first: int
    term: int | None


@dataclass(frozen=True, slots=True)
class ColdPiece:
    """Offsets ``first`` up to ``next`` in the object of one segment, which may hold others too."""

    store: str
    """The address of the store."""
    path: str
    """The object's path in the store."""
    first: int
    next: int
    cut_before: bool
    """Whether the object also holds offsets below ``first``."""
    cut_behind: bool
    """Whether the object also holds offsets from ``next`` on."""


@final
@dataclass(frozen=True, slots=True)
class ColdReader:
    """Reads finished segments. Stateless and thread-safe.

    Every lookup sees all events published before it: no published segment is missed; ``NotReady`` if this node has not
    caught up.
    """

    registry: MetadataManager
    store: ObjectStore
    partition: TopicPartition
    """The log's name in the events."""
    env: Env = SYSTEM

    def first(self, hot: HotStart) -> int:
        """The first offset in segments, if they reach up to the hot tier; otherwise the start of the hot tier."""
        lowest = self._from_history(hot, lambda cache: cache.lowest(self.partition, hot.term))
        return hot.first if lowest is None else min(lowest, hot.first)

    def _reaches(self, cache: SegmentCache, hot: HotStart) -> bool:
        """Whether a segment holds the record before the hot tier, in its term."""
        before = hot.first - 1
        if hot.term is None:
            return cache.holding(self.partition, before) is not None
        return cache.segment_for(self.partition, hot.term, before) is not None

    def holding(self, offset: int, hot: HotStart) -> SegmentMetadata | None:
        """The segment to read an offset below the hot tier from; None without one."""
        return self._from_history(hot, lambda cache: cache.holding(self.partition, offset, hot.term))

    def _from_history(self, hot: HotStart, question: Callable[[SegmentCache], T]) -> T | None:
        """The answer of the segments, if they are of the log's history."""
        return self.registry.current(
            self.partition, lambda cache: question(cache) if self._reaches(cache, hot) else None
        )

    def pieces(self, first: int, following: Iterable[tuple[SegmentMetadata, int]]) -> list[ColdPiece]:
        """The objects to read the offsets from ``first`` on from."""
        pieces = []
        for segment, behind_it in following:
            path = segment_path(segment.segment, segment.start)
            cuts = segment.start < first, segment.end >= behind_it
            pieces.append(ColdPiece(self.store.url, path, first, behind_it, *cuts))
            first = behind_it
        return pieces

    def following(
        self, first: int, end: int | None, hot: HotStart | None, most: int | None = None
    ) -> list[tuple[SegmentMetadata, int]]:
        """The segments to read from an offset on, each with its end, as of one moment: in order and without a gap.

        Up to ``end`` and the hot tier; without a ``hot`` start, divergence from the log is not checked.
        """
        partition = self.partition
        ends = [stop for stop in (end, None if hot is None else hot.first) if stop is not None]
        stop, term = min(ends, default=None), None if hot is None else hot.term

        def look(cache: SegmentCache) -> list[tuple[SegmentMetadata, int]]:
            found: list[tuple[SegmentMetadata, int]] = []
            at = first
            if hot is not None and not self._reaches(cache, hot):
                return found
            while (stop is None or at < stop) and (most is None or len(found) < most):
                segment = cache.holding(partition, at, term)
                if segment is None:
                    break
                at = cache.end_of_reading(segment, at, term)
                found.append((segment, at if stop is None else min(at, stop)))
            return found

        return self.registry.current(partition, look)

    def plan(self, since: Cursor, limit: Limit, hot: HotStart) -> list[ColdSpan | SegmentSpan]:
        """Spans from a cursor on, in order and without a gap, up to the hot tier and within the limit.

        A plan without a limit that has thousands of row groups continues with whole segments, which need no requests.
        Empty if no segment has the offset. ``Diverged`` if the record before it is of another term.
        """
        self.check_cursor(since, hot)
        planned: PlanBuilder[ColdSpan | SegmentSpan] = PlanBuilder(limit)
        tries = 0
        is_large = False
        while segments := self.following(since.next, limit.upto, hot, _MANY_SPANS if is_large else _AT_ONCE):
            try:
                for segment, upto in segments:
                    is_large = limit.is_bounded_by_offset_only and len(planned.spans) >= _MANY_SPANS
                    if is_large:
                        found = self._whole(segment, since.next, upto)
                    else:
                        found = plan_segment(self.store, segment, since.next, replace(planned.rest, upto=upto))
                    if not planned.add(found) or planned.is_full or found[-1].next < upto:
                        return planned.spans
                    since = cursor_after(since, found[-1])
            except NotFound:
                # Expired since the lookup, and another lookup sees that; if it does not, the object is missing.
                tries += 1
                if tries >= _TRIES:
                    raise
        return planned.spans

    def _whole(self, segment: SegmentMetadata, first: int, end: int) -> Sequence[ColdSpan | SegmentSpan]:
        """The segment as one span, if all of it is needed and of one term; otherwise its row groups."""
        if (first, end) == (segment.start, segment.end + 1) and len(segment.terms) == 1:
            return [SegmentSpan(self.store, segment, first, end, segment.size, segment.terms[0][0])]
        return plan_segment(self.store, segment, first, Limit(upto=end))

    def check_cursor(self, since: Cursor, hot: HotStart) -> None:
        """``Diverged`` if the record before the cursor is in a segment and of another term, or of another batch.

        If the record before the cursor is deleted, ``Diverged`` only for a term above that of the next record.
        """
        if not since.term and since.fingerprint is None:
            return
        before = self.holding(since.next - 1, hot) if since.next else None
        if before is not None:
            if since.term:
                check_term(since, before.term_at(since.next - 1))
            self._check_batch(since, before)
            return
        there = self.holding(since.next, hot)
        if there is not None and (term := there.term_at(since.next)) < since.term:
            raise Diverged(
                f"The cursor at {since.next} is of term {since.term}, and the record there is of term {term}: the "
                "consumer followed a primary that was replaced, and has to bootstrap again."
            )

    def _check_batch(self, since: Cursor, before: SegmentMetadata) -> None:
        if since.fingerprint is None:
            return
        if load_tail(self.store, before).fingerprint_at(since.next - 1) not in (None, since.fingerprint):
            raise Diverged(
                f"The record at offset {since.next - 1}, the last one that the consumer at this cursor has applied, is "
                f"in another batch than it was then, by the segment {before.segment}: the log was restored from a "
                "copy, and has grown differently since. Build the consumer's state again, from the beginning or from a "
                "snapshot of this log."
            )

    def cursor_at(self, cursor: Cursor, hot: HotStart) -> Cursor:
        """The cursor with term and fingerprint of the record before it, as far as a segment has them."""
        before = self.holding(cursor.next - 1, hot)
        if before is None:
            return cursor
        fingerprint = load_tail(self.store, before).fingerprint_at(cursor.next - 1)
        return Cursor(cursor.log_id, cursor.next, before.term_at(cursor.next - 1), fingerprint)

    def check_slot(self, slot: SlotState, log: Log) -> None:
        """``Diverged`` if the log's trimmed records were copied to other segments than the current ones.

        The tierer's slot and the log are restored together: the segment that ends at the slot must be the one that the
        slot was advanced for. If it is not, the histories diverge below the slot; the trimmed records are still common
        if the log's first record is.
        """
        if slot.fingerprint is None or not slot.position:
            return
        before = slot.position - 1
        segment = self.registry.current(self.partition, lambda cache: cache.holding(self.partition, before))
        if segment is None or segment.end != before:
            return
        known = load_tail(self.store, segment).facts.fingerprint
        if known not in (None, slot.fingerprint) and not self._has_first(log, slot.position):
            raise Diverged(
                f"The log's records below offset {slot.position} were copied to another segment than the one that "
                f"ends there now, {segment.segment}: the log was restored from a copy, and its cold tier has another "
                "history. Restore the copy of the log that the cold tier was made of, or the objects and events that "
                "belong to this one."
            )

    def _has_first(self, log: Log, end: int) -> bool:
        """Whether a segment holds the log's first record, if that is below ``end``."""
        first = log.bounds().first
        if first >= end:
            return False
        segment = self.registry.current(self.partition, lambda cache: cache.holding(self.partition, first))
        return segment is not None and is_same_record(log, self.store, segment, first)

    def listed_since(self, time: int, hot: HotStart) -> int | None:
        """The first offset below the hot tier that was listed at ``time`` (microseconds) or later; None without any.

        The hot tier begins with such a record. A record with a time after now was listed by a wrong clock: it counts as
        listed when the next one with a plausible time was.
        """
        for left in reversed(range(_TRIES)):
            segments = self._readable(hot)
            try:
                return self._listed_since(segments, time, self.env.clock.now() + TOLERANCE)
            except NotFound:
                if not left:  # otherwise it may have expired since the lookup
                    raise
        raise AssertionError("unreachable: the last try raises")

    def _listed_since(self, segments: Sequence[SegmentMetadata], time: int, latest: int) -> int | None:
        def last_listed(segment: SegmentMetadata) -> int:
            tail = load_tail(self.store, segment)
            return tail.group(len(tail) - 1).listed

        at = first_since(time, latest, len(segments), lambda place: last_listed(segments[place]))
        unknown: int | None = None
        for segment in segments[at:]:
            found = listed_since(self.store, segment, min(time, latest + 1))
            if found != segment.start:
                unknown = None  # an earlier record is between
            if found is None:
                continue
            unknown = found if unknown is None else unknown
            if last_listed(segment) <= latest or found != listed_since(self.store, segment, latest + 1):
                break
        return unknown

    def _readable(self, hot: HotStart) -> list[SegmentMetadata]:
        return self._from_history(hot, lambda cache: cache.readable(self.partition, hot.first, hot.term)) or []


def check_term(since: Cursor, term: int) -> None:
    """``Diverged`` if the cursor does not have the term of the record before it."""
    if since.term != term:
        raise Diverged(
            f"The cursor at {since.next} is of term {since.term}, and the record before it is of term {term}: the "
            "consumer followed a primary that was replaced, and has to bootstrap again."
        )
