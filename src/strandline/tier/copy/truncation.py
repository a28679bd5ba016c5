"""Truncation of the cold tier: segments of another history than the log's are cut where the two part.

What such a segment holds of the log's own history is stored again as a segment of its own, before the old one goes: it
may be nowhere else. So whatever dies on the way, nothing that the log had is missing, and the next round goes on.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import final

from strandline.errors import Diverged, InvalidInput
from strandline.log.contract import Log, Slot
from strandline.model.cursor import Bounds
from strandline.model.segments import SegmentMetadata
from strandline.tier.copy.agreement import Cut, TermHistory, lowest_parting, plan_cuts
from strandline.tier.copy.copier import Copier
from strandline.tier.copy.history import first_difference, is_same_record, read_history
from strandline.tier.copy.ledger import Ledger

_LOGGER = logging.getLogger(__name__)


@final
class Truncation:
    """Compares the cold tier of a log with the log itself, and cuts it. One thread uses it."""

    def __init__(self, log: Log, ledger: Ledger, copier: Copier) -> None:
        """Nothing is looked at yet."""
        self._log = log
        self._ledger = ledger
        self._copier = copier

    def parting(self, segments: Sequence[SegmentMetadata]) -> int | None:
        """The offset from which on the terms of the log are not those of the segments; None if they are everywhere."""
        return lowest_parting(segments, self._history(segments)) if segments else None

    def plan(self, segments: Sequence[SegmentMetadata]) -> list[Cut]:
        """Where segments are to be cut because the log went on there in a later term.

        ``Diverged`` if the log is the older one, ``NotReady`` if it ends before the cold tier does, ``Gap`` if it has
        forgotten what would have to be copied instead.
        """
        return plan_cuts(segments, self._history(segments), self._ledger.partition)

    def _history(self, segments: Sequence[SegmentMetadata]) -> TermHistory:
        return read_history(self._log, max(segment.end for segment in segments) + 1)

    def plan_at(self, segments: Sequence[SegmentMetadata], to: int) -> list[Cut]:
        """The same at an offset that somebody has chosen; ``InvalidInput`` if the log does not go on from there."""
        bounds = self._log.bounds()
        if not bounds.first <= to <= bounds.next:
            raise InvalidInput(
                f"The cold tier cannot be truncated to offset {to}: the log itself has {bounds.first} up to "
                f"{bounds.next}, and what comes behind has to be copied from there. Nothing was changed."
            )
        before = [segment for segment in segments if segment.start < to]
        parted = self._parted(max(before, key=lambda segment: segment.end), to, bounds) if before else None
        if parted is not None:
            raise InvalidInput(
                f"The cold tier cannot be truncated to offset {to}: it parts from the log at {parted} already. "
                "Truncate it to that. Nothing was changed."
            )
        return [
            Cut(segment, max(to, segment.start), spare=segment.start >= to) for segment in segments if segment.end >= to
        ]

    def cut(self, slot: Slot, cuts: Sequence[Cut]) -> list[SegmentMetadata]:
        """Make the cuts; returns the segments that were removed. The slot pins everything behind them."""
        for piece in cuts:
            _LOGGER.warning(
                "Segment %s is of another history than the log from offset %d on, and is cut there.",
                piece.segment.segment, piece.at,
            )  # fmt: skip
            if not piece.spare:
                fingerprint = self._log.cursor_at(piece.at).fingerprint
                shortened = self._copier.shorten(piece.segment, piece.at, fingerprint)
                self._copier.copy(slot, shortened, follows=False)
            slot.touch()  # who took over may count on what is about to be removed
            self._ledger.remove_all([piece.segment], "retired")
        return [piece.segment for piece in cuts]

    # --- records -----------------------------------------------------------------------------------------------

    def parted(self, last: SegmentMetadata) -> int | None:
        """The offset from which on the log has other records than the cold tier, though in the same terms.

        None if the last record that both have is the same, and in the same batch. That a log was restored from an older
        copy, and went on in the same term, cannot be told by terms.
        """
        return self._parted(last, last.end + 1, self._log.bounds())

    def parted_before(self, cuts: Sequence[Cut]) -> int | None:
        """The same for what would be left of segments that are to be cut."""
        bounds = self._log.bounds()
        found = (self._parted(piece.segment, piece.at, bounds) for piece in cuts if not piece.spare)
        return next((parted for parted in found if parted is not None), None)

    def _parted(self, segment: SegmentMetadata, end: int, bounds: Bounds) -> int | None:
        at = min(end - 1, segment.end, bounds.next - 1)
        if at < max(bounds.first, segment.start) or (at == segment.end and self._is_same(segment, at)):
            return None
        # Within a segment nothing tells batches apart: a single record that is equal proves nothing.
        parted = self._find_parting(bounds.first, at + 1)
        return None if parted > at else parted

    def diverged(self, parted: int) -> Diverged:
        """The error for a log that went on differently within a term."""
        return Diverged(
            f"The log of {self._ledger.partition} has another record at offset {parted} than its cold tier, in the "
            "same term: it was restored from an older copy and went on. Restore a newer copy; or, if the log is to "
            f"stay as it is, remove the other records with 'strandline tier truncate --to {parted}'."
        )

    def _is_same(self, segment: SegmentMetadata, offset: int) -> bool:
        return is_same_record(self._log, self._ledger.store, segment, offset)

    def _find_parting(self, low: int, end: int) -> int:
        """The first offset from ``low`` on at which the log has another record than the cold tier; ``end`` if none.

        Two histories that parted have no batch in common any more, but may have equal records. So the first segment
        with another end is looked for, and in that the first record that differs. If none does, it is the segment's
        first: its records are the same, and of other batches.
        """
        segments = sorted(self._ledger.known().finished, key=lambda segment: segment.end)
        segments = [segment for segment in segments if segment.end >= low and segment.start < end]
        whole = [segment for segment in segments if segment.end < end]
        at = bisect_left(whole, True, key=lambda segment: not self._is_same(segment, segment.end))
        for segment in segments[at:]:
            first, behind = max(low, segment.start), min(end, segment.end + 1)
            found = first_difference(self._log, self._ledger.store, segment, first, behind)
            if found is not None or at < len(whole):
                return first if found is None else found
        return end
