"""The tierer's decisions as pure functions: what to copy, what to clean up, what expires."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final
from uuid import UUID

from strandline.errors import Gap
from strandline.model.cursor import SECOND, Bounds
from strandline.model.retention import TIER_SLOT, Consumed, Forever, MaxAge, MaxBytes, Retention, SlotState
from strandline.model.segments import PartitionDelete, SegmentId, SegmentMetadata, SegmentState, TopicPartition
from strandline.model.times import TOLERANCE
from strandline.tier.copy.segment_files import SegmentObject

_MANY: Final = 16
"""This many small segments in a row are merged, even if they do not fill a segment."""


@dataclass(frozen=True, slots=True)
class KnownSegments:
    """All segments of a partition at one moment."""

    segments: tuple[SegmentMetadata, ...] = ()
    """By first offset."""
    unreferenced: tuple[SegmentMetadata, ...] = ()
    """Segments that no lookup finds; finished ones among them are superseded."""
    deletion: PartitionDelete | None = None

    @property
    def finished(self) -> list[SegmentMetadata]:
        """The readable segments."""
        return [segment for segment in self.segments if segment.state is SegmentState.COPY_FINISHED]

    @property
    def spare(self) -> set[SegmentId]:
        """The ids of the segments that no lookup finds."""
        return {segment.segment for segment in self.unreferenced}

    @property
    def answering(self) -> list[SegmentMetadata]:
        """The readable segments without superseded ones."""
        spare = self.spare
        return [segment for segment in self.finished if segment.segment not in spare]


def next_start(tiered: int | None, position: int, bounds: Bounds, partition: TopicPartition) -> int:
    """Where the next copy starts: at the end of the cold tier, or at the slot if that is empty.

    ``Gap`` if the log no longer has that offset.
    """
    start = position if tiered is None else tiered
    if start < bounds.first:
        raise Gap(
            f"The cold tier of {partition} ends at {start} but the log begins at {bounds.first}: the records between "
            "were deleted before they were copied. Restore the log, or continue in a new one."
        )
    return start


def check_follows(tiered: int | None, segment: SegmentMetadata) -> None:
    """``Gap`` if a segment does not start at the end of the cold tier: it would leave a gap or an overlap."""
    if tiered is not None and tiered != segment.start:
        raise Gap(
            f"Segment {segment.segment} begins at {segment.start} but the cold tier ends at {tiered}: another tierer "
            "copies, too; the segment was given up."
        )


def left_over(known: KnownSegments, retired: Collection[UUID] = ()) -> list[SegmentMetadata]:
    """The segments to clean up: unfinished copies, unfinished deletions, retired and superseded ones.

    Segments within a longer one that a compaction made are cleaned up, too. An unfinished copy is deleted, never
    finished: its tierer may be alive, find itself fenced, and delete the object. A segment finished meanwhile would
    then be listed without an object.
    """
    spare = known.spare.union(segment.segment for segment in contained(known.answering))
    return [
        segment
        for segment in known.segments
        if segment.state in (SegmentState.COPY_STARTED, SegmentState.DELETE_STARTED)
        or segment.segment.id in retired
        or (segment.state is SegmentState.COPY_FINISHED and segment.segment in spare)
    ]


def replaced(known: KnownSegments, left: Sequence[SegmentMetadata]) -> list[SegmentMetadata]:
    """Those of the segments to clean up that readers may have planned with, and whose records others hold.

    They were readable, and other segments hold their whole range in the same terms. Expired and diverged segments are
    not among them.
    """
    gone = {segment.segment for segment in left}
    rest = sorted((each for each in known.finished if each.segment not in gone), key=lambda each: each.start)
    starts, ends = [each.start for each in rest], list(accumulate((each.end for each in rest), max))

    def is_held(segment: SegmentMetadata) -> bool:
        at = segment.start
        for other in rest[bisect_left(ends, segment.start) : bisect_right(starts, segment.end)]:
            if other.start <= at <= other.end and _same_terms(segment, other, at, min(segment.end, other.end)):
                at = other.end + 1
        return at > segment.end

    states = (SegmentState.COPY_FINISHED, SegmentState.DELETE_STARTED)
    return [segment for segment in left if segment.state in states and is_held(segment)]


def within_grace(segments: Sequence[SegmentMetadata], grace: float, *, now: int, own: int) -> list[SegmentMetadata]:
    """The replaced segments whose deletion starts now, or started less than ``grace`` seconds ago.

    ``own`` is the tierer's time and ``now`` the cautious one, in microseconds. The clock of the tierer that started it
    may have been ahead: up to a grace period, that makes it longer. Further in the future, the grace period is over.
    """
    latest = own + max(TOLERANCE, int(grace * SECOND))

    def is_early(segment: SegmentMetadata) -> bool:
        if segment.state is SegmentState.COPY_FINISHED:
            return grace > 0
        started = segment.event_timestamp * 1000
        return started <= latest and now - started < grace * SECOND

    return [segment for segment in segments if is_early(segment)]


def contained(segments: Sequence[SegmentMetadata]) -> list[SegmentMetadata]:
    """The readable segments within a longer one that starts before them and has the same terms.

    A compaction stores a segment in place of several, and then deletes those. If it was interrupted, they are left.
    """
    found: list[SegmentMetadata] = []
    longest: SegmentMetadata | None = None
    for segment in sorted(segments, key=lambda each: (each.start, -each.end)):
        if longest is None or segment.end > longest.end:
            longest = segment
        elif segment.start > longest.start and _same_terms(longest, segment, segment.start, segment.end):
            found.append(segment)
    return found


def _same_terms(one: SegmentMetadata, other: SegmentMetadata, first: int, last: int) -> bool:
    """Whether two segments have the records of a range in the same terms."""
    places = {first, *(start for _, start in (*one.terms, *other.terms))}
    return all(one.term_at(place) == other.term_at(place) for place in places if first <= place <= last)


def merges(segments: Sequence[SegmentMetadata], target: int, *, everything: bool) -> list[list[SegmentMetadata]]:
    """Runs of adjacent segments to merge: each smaller than half the target, and about the target together.

    A run is merged when it fills a segment or is long, so that a record is rewritten only a few times, however often
    this is called. ``everything`` merges any two.
    """
    runs: list[list[SegmentMetadata]] = []
    run: list[SegmentMetadata] = []
    for segment in [*segments, None]:
        follows = segment is not None and segment.size < target // 2 and (not run or run[-1].end + 1 == segment.start)
        size = sum(each.size for each in run)
        if run and (segment is None or not follows or size + segment.size > target):
            is_worth = size >= target // 2 or len(run) >= _MANY or everything
            if len(run) > 1 and is_worth:
                runs.append(run)
            run = []
        if segment is not None and segment.size < target // 2:
            run.append(segment)
    return runs


def orphans(objects: Iterable[SegmentObject], known: Collection[UUID], *, grace: float, now: int) -> list[str]:
    """The paths of objects without an event that were written more than ``grace`` seconds ago.

    A copy is published before its object is stored. So an object that was listed before the events were read, and has
    no event, belongs to a deleted segment and was stored late by a slow tierer.
    """
    return [
        found.info.path for found in objects if found.id not in known and now - found.info.modified >= grace * SECOND
    ]


def pinned_from(slots: Iterable[SlotState], floor: int | None) -> int | None:
    """The lowest position that a consumer pins, in either tier; None without any.

    ``floor`` is the log's, which includes slots that are being created. The tierer's own slot pins the hot tier only:
    it is at the end of the cold tier.
    """
    states = list(slots)
    others = [state.position for state in states if state.pins and state.name != TIER_SLOT]
    mine = [state.position for state in states if state.pins and state.name == TIER_SLOT]
    if floor is not None and (not mine or floor < min(mine)):
        others.append(floor)
    return min(others, default=None)


def has_consumers(slots: Iterable[SlotState]) -> bool:
    """Whether a slot besides the tierer's can consume records: holds, and slots of newcomers, only pin them."""
    return any(state.pins and state.expires is None and state.name != TIER_SLOT for state in slots)


def expired(
    known: KnownSegments,
    retention: Retention,
    upto: int,
    *,
    is_consumed: bool,
    listed: Callable[[SegmentMetadata], int],
    now: int,
) -> list[SegmentMetadata]:
    """The segments that the policy no longer keeps: oldest first, contiguous, and wholly below ``upto``.

    ``is_consumed``: whether there are consumers, without which nothing counts as consumed. ``listed`` gives the time at
    which the last batch of a segment was listed (microseconds); it is called for as few segments as possible.
    """
    segments = known.finished
    gone: list[SegmentMetadata] = []
    size = sum(segment.size for segment in segments)
    for at, segment in enumerate(segments):
        if segment.end >= upto:
            break
        match retention:
            case Forever():
                break
            case Consumed() if not is_consumed:
                break
            case MaxAge(seconds) if written_time(segments, at, listed, now) >= now - seconds * SECOND:
                break
            case MaxBytes(most) if size <= most:
                break
        gone.append(segment)
        size -= segment.size
    return gone


def has_waited(listed: int, linger: float, now: int, watched: float = 0.0) -> bool:
    """Whether a batch that was listed at a time (microseconds) has waited ``linger`` seconds for its copy.

    The clock of the log's writer may be ahead: then the seconds count for which the tierer has ``watched`` it wait, by
    its monotonic clock.
    """
    return now - listed >= linger * SECOND or watched >= linger


def written_time(
    segments: Sequence[SegmentMetadata], at: int, listed: Callable[[SegmentMetadata], int], now: int
) -> int:
    """When the last batch of a segment was listed, in microseconds, corrected for wrong clocks.

    A time in the future is from a wrong clock. Then the segment's copy time counts, or the times of the segments after
    it; if all of these are in the future, ``now``.
    """
    for segment in segments[at:]:
        for time in (listed(segment), segment.event_timestamp * 1000):
            if time <= now + TOLERANCE:
                return time
    return now


def first_fall(times: Sequence[int]) -> int:
    """Number of times before the first one that is earlier than its predecessor.

    >>> first_fall([1, 1, 5, 2, 3])
    3
    """
    return next((place for place, (earlier, later) in enumerate(pairwise(times), 1) if later < earlier), len(times))


def first_since(time: int, latest: int, count: int, listed: Callable[[int], int]) -> int:
    """The first of ``count`` segments that was written up to a time or later; ``count`` if there is none.

    ``listed`` returns when the last batch of each was listed. A time after ``latest`` is from a wrong clock: such a
    segment counts as written when the next one with a plausible time was. Plausible times are in order.

    >>> first_since(5, 9, 4, [3, 99, 4, 6].__getitem__)
    3
    """

    def is_since(at: int) -> bool:
        known = (listed(place) for place in range(at, count))
        return next((when >= time for when in known if when <= latest), True)

    return bisect_left(range(count), True, key=is_since)
