"""What the tierer does next, as pure functions over values: what to copy, what is left over, what expires."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from strandline.errors import Gap
from strandline.model.cursor import SECOND, Bounds
from strandline.model.retention import Consumed, Forever, MaxAge, MaxBytes, Retention
from strandline.model.segments import PartitionDelete, SegmentMetadata, SegmentState, TopicPartition
from strandline.model.slots import SlotState
from strandline.model.times import TOLERANCE
from strandline.tier.copy.segment_files import SegmentObject


@dataclass(frozen=True, slots=True)
class Known:
    """All that the events told of a partition, at one moment."""

    segments: tuple[SegmentMetadata, ...] = ()
    """By their first offset."""
    unreferenced: tuple[SegmentMetadata, ...] = ()
    """Those that no lookup finds: if they are finished, others have taken their place."""
    deletion: PartitionDelete | None = None

    @property
    def finished(self) -> list[SegmentMetadata]:
        """The segments that can be read."""
        return [segment for segment in self.segments if segment.state is SegmentState.COPY_FINISHED]


def next_start(tiered: int | None, position: int, bounds: Bounds, partition: TopicPartition) -> int:
    """Where the next copy begins: behind what is tiered, or at the slot if nothing is (any more).

    ``Gap`` if the log no longer has what comes next.
    """
    start = position if tiered is None else tiered
    if start < bounds.first:
        raise Gap(
            f"The cold tier of {partition} ends at {start} and the log begins at {bounds.first}: what is between was "
            "deleted before it was copied. Restore the log, or go on in a new one."
        )
    return start


def check_follows(tiered: int | None, segment: SegmentMetadata) -> None:
    """Refuse a segment that is not right behind what is tiered: it would leave a hole, or hold a range twice."""
    if tiered is not None and tiered != segment.start:
        raise Gap(
            f"Segment {segment.segment} begins at {segment.start} and the cold tier ends at {tiered}: somebody else "
            "copies, too; the segment was given up."
        )


def left_over(known: Known) -> list[SegmentMetadata]:
    """What somebody began and did not end, and what others took the place of: all of it goes.

    A copy that is under way is removed and not finished: who began it may be alive, find itself fenced, and remove its
    object; a segment that was finished meanwhile would then be told of and not be there.
    """
    spare = {segment.segment for segment in known.unreferenced}
    return [
        segment
        for segment in known.segments
        if segment.state in (SegmentState.COPY_STARTED, SegmentState.DELETE_STARTED)
        or (segment.state is SegmentState.COPY_FINISHED and segment.segment in spare)
    ]


def without(known: Known, removed: Collection[SegmentMetadata]) -> list[SegmentMetadata]:
    """The segments that can be read once these have been removed."""
    gone = {segment.segment for segment in removed}
    return [segment for segment in known.finished if segment.segment not in gone]


def orphans(objects: Iterable[SegmentObject], known: Collection[UUID], *, grace: float, now: int) -> list[str]:
    """The paths of objects that no event knows, and that were written longer than ``grace`` seconds ago.

    A copy is told of before its object is put: what was listed before the events were read, and is in none, was
    deleted, and put (again) by somebody slow.
    """
    return [
        found.info.path for found in objects if found.id not in known and now - found.info.modified >= grace * SECOND
    ]


def pinned_from(slots: Iterable[SlotState], own: str, floor: int | None) -> int | None:
    """The lowest position that a consumer needs, in whichever tier; None without any.

    ``floor`` is the log's, which knows also of slots that are being created. The tierer's own slot pins the hot tier
    only: it stands behind all that is tiered.
    """
    states = list(slots)
    others = [state.position for state in states if state.pins and state.name != own]
    mine = [state.position for state in states if state.pins and state.name == own]
    if floor is not None and (not mine or floor < min(mine)):
        others.append(floor)
    return min(others, default=None)


def expired(
    known: Known,
    retention: Retention,
    upto: int,
    *,
    is_pinned: bool,
    listed: Callable[[SegmentMetadata], int],
    now: int,
) -> list[SegmentMetadata]:
    """The segments that a policy no longer keeps: oldest first, without a hole, and wholly below ``upto``.

    ``is_pinned`` says whether somebody has a slot at all, without which nothing is consumed. ``listed`` tells when the
    last batch of a segment was listed (microseconds); it is asked of as few as need be.
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
            case Consumed() if not is_pinned:
                break
            case MaxAge(seconds) if written_time(segments, at, listed, now) >= now - seconds * SECOND:
                break
            case MaxBytes(most) if size <= most:
                break
        gone.append(segment)
        size -= segment.size
    return gone


@dataclass(frozen=True, slots=True)
class Uncopied:
    """What lies behind the cold tier: how many bytes, and when the first of its batches was listed (microseconds).

    ``watched`` is for how many seconds the tierer itself has seen that batch wait, by a clock that never jumps.
    """

    size: int
    listed: int | None
    watched: float = 0.0


def is_due(uncopied: Uncopied, *, target: int, linger: float, now: int, everything: bool) -> bool:
    """Whether a segment is to be made of it: if it fills one, or if the first of it has waited for so many seconds.

    The clock of who listed it may have been ahead: then what the tierer saw counts.
    """
    if uncopied.listed is None:
        return False
    waited = now - uncopied.listed >= linger * SECOND or uncopied.watched >= linger
    return everything or uncopied.size >= target or waited


def written_time(
    segments: Sequence[SegmentMetadata], at: int, listed: Callable[[SegmentMetadata], int], now: int
) -> int:
    """When the last batch of a segment was listed, as far as that can be believed (microseconds).

    A time ahead of the present is from a clock that was wrong. Then the segment is no younger than its copy, nor than
    the ones behind it; if all of these are ahead, too, it counts as of now.
    """
    for segment in segments[at:]:
        for time in (listed(segment), segment.event_timestamp * 1000):
            if time <= now + TOLERANCE:
                return time
    return now
