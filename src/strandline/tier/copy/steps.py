"""Results of the tierer: each finished step, a round, a compaction."""

from __future__ import annotations

from dataclasses import dataclass, field

from strandline.model.segments import SegmentMetadata


@dataclass(frozen=True, slots=True)
class TieringStep:
    """One finished step of the tierer: ``what`` is copied, removed, retired, expired, swept,
    merged, erased or replaced.
    """

    what: str
    path: str
    first: int
    last: int
    size: int
    seconds: float = field(default=0.0, compare=False)
    """Duration of a copy."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round."""

    copied: tuple[SegmentMetadata, ...] = ()
    removed: tuple[SegmentMetadata, ...] = ()
    """Leftovers of crashes and superseded segments."""
    expired: tuple[SegmentMetadata, ...] = ()
    swept: tuple[str, ...] = ()
    """Objects without an event."""
    retired: tuple[SegmentMetadata, ...] = ()
    """Segments that diverged from the log; their common part is in other segments."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of a compaction."""

    made: tuple[SegmentMetadata, ...] = ()
    """The new segments."""
    replaced: tuple[SegmentMetadata, ...] = ()
    """The segments that the new ones replace; deleted."""
    erased: int = 0
    """Records whose values were erased."""
    held_back: int = 0
    """Segments whose records the hot tier still has: what they hold of purged keys is erased after it is trimmed."""
