"""Truncation of the cold tier: segments that diverge from the log are cut at the divergence.

The part below the divergence is stored as a new segment before the old one is deleted: it may be the only copy. After a
crash at any point no record of the log is missing, and the next round continues.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from strandline.errors import Diverged, InvalidInput
from strandline.log.contract import Slot
from strandline.model.cursor import Bounds
from strandline.model.segments import SegmentMetadata
from strandline.tier.copy.copier import Copier
from strandline.tier.copy.history import (
    SegmentCut,
    TermHistory,
    first_difference,
    is_same_record,
    lowest_divergence,
    plan_cuts,
    read_history,
)
from strandline.tier.copy.ledger import Ledger

_LOGGER = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Truncation:
    """Compares the cold tier with its log, and truncates it. Used by one thread."""

    ledger: Ledger
    copier: Copier

    def term_divergence(self, segments: Sequence[SegmentMetadata]) -> int | None:
        """The lowest offset at which terms of segments and log differ; None if none do."""
        return lowest_divergence(segments, self._history(segments)) if segments else None

    def plan(self, segments: Sequence[SegmentMetadata]) -> list[SegmentCut]:
        """The cuts at which the log continued in a later term.

        ``Diverged`` if the log is the stale one, ``NotReady`` if it ends below the cold tier, ``Gap`` if it has trimmed
        records that would have to be copied again.
        """
        return plan_cuts(segments, self._history(segments), self.ledger.partition)

    def _history(self, segments: Sequence[SegmentMetadata]) -> TermHistory:
        return read_history(self.ledger.log, max(segment.end for segment in segments) + 1)

    def plan_at(self, segments: Sequence[SegmentMetadata], to: int) -> list[SegmentCut]:
        """The cuts at a chosen offset; ``InvalidInput`` if the log does not continue there."""
        bounds = self.ledger.log.bounds()
        if not bounds.first <= to <= bounds.next:
            raise InvalidInput(
                f"The cold tier cannot be truncated to offset {to}: the log itself has {bounds.first} up to "
                f"{bounds.next}, and later records have to be copied from there. Nothing was changed."
            )
        before = [segment for segment in segments if segment.start < to]
        diverged_at = (
            self._record_divergence(max(before, key=lambda segment: segment.end), to, bounds) if before else None
        )
        if diverged_at is not None:
            raise InvalidInput(
                f"The cold tier cannot be truncated to offset {to}: it diverges from the log at {diverged_at} already. "
                "Truncate it to that. Nothing was changed."
            )
        return [
            SegmentCut(segment, max(to, segment.start), spare=segment.start >= to)
            for segment in segments
            if segment.end >= to
        ]

    def cut(self, slot: Slot, cuts: Sequence[SegmentCut]) -> list[SegmentMetadata]:
        """Make the cuts, the last segment first; returns the deleted segments. The slot pins the log from the cuts on.

        A tierer that takes over in between may have the deleted records in its log. It copies from the end of the cold
        tier on, so that it copies them again; it would never fill a hole before that end.
        """
        for piece in sorted(cuts, key=lambda piece: piece.segment.end, reverse=True):
            _LOGGER.warning(
                "Segment %s diverges from the log at offset %d and is cut there.",
                piece.segment.segment, piece.at,
            )  # fmt: skip
            if not piece.spare:
                fingerprint = self.ledger.log.cursor_at(piece.at).fingerprint
                shortened = self.copier.shorten(piece.segment, piece.at, fingerprint)
                self.copier.copy(slot, shortened, follows=False)
            self.ledger.retire(slot, [piece.segment], "retired")
        return [piece.segment for piece in cuts]

    def record_divergence(self, last: SegmentMetadata) -> int | None:
        """The first offset with different records in log and cold tier, in the same terms; None if they agree.

        They agree if the last common record is the same and in the same batch. Terms do not show that a log was
        restored from an older copy and continued in the same term.
        """
        return self._record_divergence(last, last.end + 1, self.ledger.log.bounds())

    def record_divergence_before(self, cuts: Sequence[SegmentCut]) -> int | None:
        """The first offset at which a segment, up to its cut, has other records than the log; None if none has."""
        bounds = self.ledger.log.bounds()
        found = (self._record_divergence(piece.segment, piece.at, bounds) for piece in cuts if not piece.spare)
        return next((diverged_at for diverged_at in found if diverged_at is not None), None)

    def _record_divergence(self, segment: SegmentMetadata, end: int, bounds: Bounds) -> int | None:
        at = min(end - 1, segment.end, bounds.next - 1)
        if at < max(bounds.first, segment.start) or (at == segment.end and self._is_same(segment, at)):
            return None
        # Batches are not distinguished within a segment: one equal record proves nothing.
        diverged_at = self._find_divergence(bounds.first, at + 1)
        return None if diverged_at > at else diverged_at

    def diverged(self, diverged_at: int) -> Diverged:
        """The error for a divergence within a term."""
        return Diverged(
            f"The log of {self.ledger.partition} has another record at offset {diverged_at} than its cold tier, in "
            "the same term: it was restored from an older copy and appended to. Restore a newer copy; or, if the log "
            f"should stay as it is, remove the other records with 'strandline tier truncate --from {diverged_at}'."
        )

    def _is_same(self, segment: SegmentMetadata, offset: int) -> bool:
        return is_same_record(self.ledger.log, self.ledger.store, segment, offset)

    def _find_divergence(self, low: int, end: int) -> int:
        """The first offset from ``low`` on with different records in log and cold tier; ``end`` if there is none.

        Diverged histories share no later batch, but may have equal records. So this finds the first segment with a
        different last record, and in it the first different record; if all are equal, the segment's first offset: equal
        records of other batches.
        """
        segments = sorted(self.ledger.known().finished, key=lambda segment: segment.end)
        segments = [segment for segment in segments if segment.end >= low and segment.start < end]
        whole = [segment for segment in segments if segment.end < end]
        at = bisect_left(whole, True, key=lambda segment: not self._is_same(segment, segment.end))
        for segment in segments[at:]:
            first, behind = max(low, segment.start), min(end, segment.end + 1)
            found = first_difference(self.ledger.log, self.ledger.store, segment, first, behind)
            if found is not None or at < len(whole):
                return first if found is None else found
        return end
