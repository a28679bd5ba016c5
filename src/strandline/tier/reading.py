"""The cold half of a log: which of its records are in segments, and spans that read them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar, final

from strandline.log.planning import Gathering, behind
from strandline.model.cursor import Cursor, Limit
from strandline.model.errors import Diverged, NotFound
from strandline.model.segments import SegmentMetadata, TopicPartition
from strandline.storage.store import ObjectStore
from strandline.tier.cache import SegmentCache
from strandline.tier.segment_files import ColdSpan, listed_since, load_tail, plan_segment, segment_path

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

    def first(self, upto: int) -> int:
        """The first offset that segments hold, if they go on up to ``upto``; that itself if they do not."""
        partition = self._partition

        def look(cache: SegmentCache) -> int:
            lowest = cache.lowest(partition)
            reaches = lowest is not None and lowest < upto and cache.holding(partition, upto - 1) is not None
            return lowest if reaches and lowest is not None else upto

        return self._registry.current(partition, look)

    def holding(self, offset: int) -> SegmentMetadata | None:
        """The segment to read an offset from; None if none has it."""
        return self._registry.current(self._partition, lambda cache: cache.holding(self._partition, offset))

    def pieces(self, first: int, end: int) -> list[ColdPiece]:
        """Which objects have the offsets from ``first`` on, as of one moment: in order, each offset once, no hole.

        They go up to ``end``, or as far as segments do; empty if no segment has the first. No object is looked at.
        """
        pieces = []
        for segment, behind_it in self._following(first, end):
            path = segment_path(segment.segment, segment.start)
            cuts = segment.start < first, segment.end >= behind_it
            pieces.append(ColdPiece(self._store.url, path, first, behind_it, *cuts))
            first = behind_it
        return pieces

    def _following(self, first: int, end: int | None, most: int | None = None) -> list[tuple[SegmentMetadata, int]]:
        """The segments to read from an offset on, and up to where, as of one moment: in order and without a hole."""
        partition = self._partition

        def look(cache: SegmentCache) -> list[tuple[SegmentMetadata, int]]:
            found: list[tuple[SegmentMetadata, int]] = []
            at = first
            while (end is None or at < end) and (most is None or len(found) < most):
                segment = cache.holding(partition, at)
                if segment is None:
                    break
                at = cache.behind(segment, at)
                found.append((segment, at if end is None else min(at, end)))
            return found

        return self._registry.current(partition, look)

    def plan(self, since: Cursor, limit: Limit) -> list[ColdSpan]:
        """Spans from a cursor on, in order and without a hole, as far as segments go and the limit allows.

        Empty if no segment has the offset. ``Diverged`` if the record before it is of another term.
        """
        self.check_cursor(since)
        planned: Gathering[ColdSpan] = Gathering(limit)
        tries = 0
        while segments := self._following(since.next, limit.upto, _AT_ONCE):
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

    def check_cursor(self, since: Cursor) -> None:
        """``Diverged`` if the record before the cursor is in a segment and of another term.

        If that record is gone, only what cannot be is refused: a term above that of the record behind it.
        """
        if not since.term:
            return
        before = self.holding(since.next - 1) if since.next else None
        if before is not None:
            check_term(since, before.term_at(since.next - 1))
            return
        there = self.holding(since.next)
        if there is not None and (term := there.term_at(since.next)) < since.term:
            raise Diverged(
                f"The cursor at {since.next} is of term {since.term}, and the record there is of term {term}: the "
                "consumer followed a primary that was replaced, and has to bootstrap again."
            )

    def listed_since(self, time: int) -> int | None:
        """The first offset in segments that was listed at a time (microseconds) or later; None if none was."""

        def last_listed(segment: SegmentMetadata) -> int:
            tail = load_tail(self._store, segment)
            return tail.group(len(tail) - 1).listed

        for left in reversed(range(_TRIES)):
            segments = self._registry.current(self._partition, lambda cache: cache.readable(self._partition))
            try:
                at = bisect_left(segments, time, key=last_listed)
                return None if at == len(segments) else listed_since(self._store, segments[at], time)
            except NotFound:
                if not left:  # otherwise it has perhaps expired since the look, and another look knows that
                    raise
        raise AssertionError("it was not tried")


def check_term(since: Cursor, term: int) -> None:
    """Refuse a cursor that is not of the term of the record before it."""
    if since.term != term:
        raise Diverged(
            f"The cursor at {since.next} is of term {since.term}, and the record before it is of term {term}: the "
            "consumer followed a primary that was replaced, and has to bootstrap again."
        )
