"""The cold half of a log: which of its records are in segments, and spans that read them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar, final

from strandline.errors import Diverged, NotFound
from strandline.log.contract import Log
from strandline.log.planning import Gathering, behind
from strandline.model.cursor import Cursor, Limit
from strandline.model.segments import SegmentMetadata, TopicPartition
from strandline.model.slots import SlotState
from strandline.storage.store import ObjectStore
from strandline.tier.copy.history import is_same_record
from strandline.tier.copy.segment_files import ColdSpan, listed_since, load_tail, plan_segment, segment_path
from strandline.tier.metadata.cache import SegmentCache

T = TypeVar("T")

_AT_ONCE: Final = 64
"""How many segments are asked for in one go: each question may cost a look at the topic of events."""
_TRIES: Final = 4
"""How often a plan is made anew because a segment was removed meanwhile."""


class Registry(Protocol):
    """The part of the metadata manager that readers need."""

    def current(self, partition: TopicPartition, question: Callable[[SegmentCache], T]) -> T:
        """The answer from everything that was published before this call; ``NotReady`` if that is not known."""


@dataclass(frozen=True, slots=True)
class Seam:
    """Where the hot tier begins, and in which term the record before it was written (None: that is not known).

    Only segments that hold that record in that term are of the log's history. Those behind it are not looked at: the
    log itself has what they hold, or has gone on differently.
    """

    first: int
    term: int | None


@dataclass(frozen=True, slots=True)
class ColdPiece:
    """Offsets ``first`` up to ``next``, to be read from the object of one segment, which may hold others, too."""

    store: str
    """The address of the store."""
    path: str
    """Where in it the object is."""
    first: int
    next: int
    cut_before: bool
    """Whether the object also holds offsets below ``first``."""
    cut_behind: bool
    """Whether the object also holds offsets from ``next`` on."""


@final
class ColdReader:
    """Reads what finished segments hold. Stateless but for what the registry knows; safe in threads.

    Every answer is from all events that were published before the question: a segment that somebody has told of is
    never missed, and what cannot be known is ``NotReady``.
    """

    def __init__(self, registry: Registry, store: ObjectStore, partition: TopicPartition) -> None:
        """The segments of one log, in this store."""
        self._registry = registry
        self._store = store
        self._partition = partition

    def first(self, seam: Seam) -> int:
        """The first offset that segments hold, if they go on up to the seam; the seam itself if they do not."""

        def look(cache: SegmentCache) -> int:
            lowest = cache.lowest(self._partition, seam.term)
            is_below = lowest is not None and lowest < seam.first and self._reaches(cache, seam)
            return lowest if is_below and lowest is not None else seam.first

        return self._registry.current(self._partition, look)

    def _reaches(self, cache: SegmentCache, seam: Seam) -> bool:
        """Whether a segment holds the record before the seam, in its term."""
        before = seam.first - 1
        if seam.term is None:
            return cache.holding(self._partition, before) is not None
        return cache.segment_for(self._partition, seam.term, before) is not None

    def holding(self, offset: int, seam: Seam) -> SegmentMetadata | None:
        """The segment to read an offset below the seam from; None if none has it."""

        def look(cache: SegmentCache) -> SegmentMetadata | None:
            return cache.holding(self._partition, offset, seam.term) if self._reaches(cache, seam) else None

        return self._registry.current(self._partition, look)

    def pieces(self, first: int, following: Iterable[tuple[SegmentMetadata, int]]) -> list[ColdPiece]:
        """Which objects have the offsets from ``first`` on that these segments are to be read for."""
        pieces = []
        for segment, behind_it in following:
            path = segment_path(segment.segment, segment.start)
            cuts = segment.start < first, segment.end >= behind_it
            pieces.append(ColdPiece(self._store.url, path, first, behind_it, *cuts))
            first = behind_it
        return pieces

    def following(
        self, first: int, end: int | None, seam: Seam | None, most: int | None = None
    ) -> list[tuple[SegmentMetadata, int]]:
        """The segments to read from an offset on, and up to where, as of one moment: in order and without a hole.

        They go up to ``end`` and the seam; without a seam, whether they are of the log's history is not looked at.
        """
        partition = self._partition
        ends = [stop for stop in (end, None if seam is None else seam.first) if stop is not None]
        stop, term = min(ends, default=None), None if seam is None else seam.term

        def look(cache: SegmentCache) -> list[tuple[SegmentMetadata, int]]:
            found: list[tuple[SegmentMetadata, int]] = []
            at = first
            if seam is not None and not self._reaches(cache, seam):
                return found
            while (stop is None or at < stop) and (most is None or len(found) < most):
                segment = cache.holding(partition, at, term)
                if segment is None:
                    break
                at = cache.behind(segment, at, term)
                found.append((segment, at if stop is None else min(at, stop)))
            return found

        return self._registry.current(partition, look)

    def is_same_record(self, log: Log, segment: SegmentMetadata, offset: int) -> bool:
        """Whether the log has the same record at an offset as a segment that holds it."""
        return is_same_record(log, self._store, segment, offset)

    def plan(self, since: Cursor, limit: Limit, seam: Seam) -> list[ColdSpan]:
        """Spans from a cursor on, in order and without a hole, as far as the seam and the limit allow.

        Empty if no segment has the offset. ``Diverged`` if the record before it is of another term.
        """
        self.check_cursor(since, seam)
        planned: Gathering[ColdSpan] = Gathering(limit)
        tries = 0
        while segments := self.following(since.next, limit.upto, seam, _AT_ONCE):
            try:
                for segment, upto in segments:
                    found = plan_segment(self._store, segment, since.next, replace(planned.rest, upto=upto))
                    if not planned.add(found) or planned.is_full or found[-1].next < upto:
                        return planned.spans
                    since = behind(since, found[-1])
            except NotFound:
                # Expired since the look; another look knows that. If it does not, the object is really missing.
                tries += 1
                if tries >= _TRIES:
                    raise
        return planned.spans

    def check_cursor(self, since: Cursor, seam: Seam) -> None:
        """``Diverged`` if the record before the cursor is in a segment and of another term.

        If that record is gone, only what cannot be is refused: a term above that of the record behind it.
        """
        if not since.term:
            return
        before = self.holding(since.next - 1, seam) if since.next else None
        if before is not None:
            check_term(since, before.term_at(since.next - 1))
            return
        there = self.holding(since.next, seam)
        if there is not None and (term := there.term_at(since.next)) < since.term:
            raise Diverged(
                f"The cursor at {since.next} is of term {since.term}, and the record there is of term {term}: the "
                "consumer followed a primary that was replaced, and has to bootstrap again."
            )

    def check_slot(self, slot: SlotState, log: Log) -> None:
        """``Diverged`` if what the log has forgotten was copied to other segments than those that there are now.

        The tierer's slot and the log are restored together: the segment that ends where the slot stands must be the one
        that it was moved behind. If it is not, the two histories have parted below the slot; what the log has forgotten
        is still of both if its first record is.
        """
        if slot.fingerprint is None or not slot.position:
            return
        before = slot.position - 1
        segment = self._registry.current(self._partition, lambda cache: cache.holding(self._partition, before))
        if segment is None or segment.end != before:
            return
        known = load_tail(self._store, segment).facts.fingerprint
        if known not in (None, slot.fingerprint) and not self._has_first(log, slot.position):
            raise Diverged(
                f"The log's records below offset {slot.position} were copied to another segment than the one that "
                f"ends there now, {segment.segment}: the log was restored from a copy, and its cold tier has another "
                "history. Restore the copy of the log that the cold tier was made of, or the objects and events that "
                "belong to this one."
            )

    def _has_first(self, log: Log, end: int) -> bool:
        """Whether a segment holds the log's own first record, if that is below ``end``."""
        first = log.bounds().first
        if first >= end:
            return False
        segment = self._registry.current(self._partition, lambda cache: cache.holding(self._partition, first))
        return segment is not None and self.is_same_record(log, segment, first)

    def listed_since(self, time: int, seam: Seam) -> int | None:
        """The first offset below the seam that was listed at a time (microseconds) or later; None if none was."""

        def last_listed(segment: SegmentMetadata) -> int:
            tail = load_tail(self._store, segment)
            return tail.group(len(tail) - 1).listed

        for left in reversed(range(_TRIES)):
            segments = self._readable(seam)
            try:
                at = bisect_left(segments, time, key=last_listed)
                return None if at == len(segments) else listed_since(self._store, segments[at], time)
            except NotFound:
                if not left:  # otherwise it has perhaps expired since the look, and another look knows that
                    raise
        raise AssertionError("it was not tried")

    def _readable(self, seam: Seam) -> list[SegmentMetadata]:
        def look(cache: SegmentCache) -> list[SegmentMetadata]:
            reaches = self._reaches(cache, seam)
            return cache.readable(self._partition, seam.first, seam.term) if reaches else []

        return self._registry.current(self._partition, look)


def check_term(since: Cursor, term: int) -> None:
    """Refuse a cursor that is not of the term of the record before it."""
    if since.term != term:
        raise Diverged(
            f"The cursor at {since.next} is of term {since.term}, and the record before it is of term {term}: the "
            "consumer followed a primary that was replaced, and has to bootstrap again."
        )
