"""Publishes one segment: announce, store, verify, finish while the slot is held; or roll back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from strandline.errors import StrandlineError
from strandline.formats.segment.writer import EncodedSegment, SegmentWriter
from strandline.log.contract import Slot
from strandline.model.cursor import Limit, Span
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState
from strandline.tier.copy import planning
from strandline.tier.copy.ledger import Ledger
from strandline.tier.copy.segment_files import check_stored, listed_batches, plan_segment, segment_path, verify_segment
from strandline.tier.copy.segment_tasks import StoredSegment, add_spans, finished, listed_at

_LOGGER = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Copier:
    """Makes segments of one log. Used by one thread."""

    ledger: Ledger
    target: int
    """Target size of a segment in bytes."""

    def encode(self, spans: Sequence[Span], expected: int, stopping: Callable[[], bool]) -> EncodedSegment | None:
        """A segment from the first of these spans, up to the target size; None if stopped.

        Listing times never fall within a segment: it ends before a batch with an earlier time than the one before it,
        as write-ahead logs have them once a clock that was ahead is set right.
        """
        now = self.ledger.env.clock.now()
        spans = spans[: planning.first_fall([listed_at(span, now) for span in spans])]
        writer = SegmentWriter(spans[0].first, expected=min(expected, self.target))
        fingerprint = add_spans(writer, spans, now, lambda: stopping() or writer.size >= self.target)
        return None if stopping() else finished(writer, self.ledger.new_id(), fingerprint)

    def shorten(self, segment: SegmentMetadata, upto: int, fingerprint: int | None) -> EncodedSegment:
        """A copy of a segment below an offset; ``fingerprint`` is that of the log's cursor there."""
        writer = SegmentWriter(segment.start, expected=segment.size)
        for span in plan_segment(self.ledger.store, segment, segment.start, Limit(upto=upto)):
            for batch, listed, _ in listed_batches(span):
                # Its batches are not those of the log, if the log was restored from a copy and has equal records.
                writer.add([batch], term=span.term, listed=listed)
        return finished(writer, self.ledger.new_id(), fingerprint)

    def copy(self, slot: Slot, encoded: EncodedSegment, *, follows: bool) -> SegmentMetadata:
        """Publish and store a segment; readable when this returns. A failed copy is rolled back.

        With ``follows``, the segment must start at the end of the cold tier.
        """

        def store(segment: SegmentMetadata) -> None:
            self.ledger.store.put(segment_path(segment.segment, segment.start), encoded.parts)
            verify_segment(self.ledger.store, segment)

        return self._publish(slot, encoded, store, follows=follows)

    def list_stored(self, slot: Slot, stored: StoredSegment, *, follows: bool) -> SegmentMetadata:
        """Publish a segment whose object a task has stored and verified; otherwise as :meth:`copy`.

        ``NotFound`` if the object is gone: a sweep of another tierer took it for one that nobody needs.
        """
        return self._publish(slot, stored, lambda segment: check_stored(self.ledger.store, segment), follows=follows)

    def discard(self, stored: StoredSegment) -> None:
        """Delete the object of a task whose segment is not published; if that fails, a later sweep does."""
        segment = SegmentId(self.ledger.partition, stored.facts.segment)
        try:
            self.ledger.store.delete(segment_path(segment, stored.facts.start))
        except StrandlineError as error:
            _LOGGER.warning("The object of segment %s is not needed, and is deleted later: %s", segment, error)

    def _publish(
        self,
        slot: Slot,
        made: EncodedSegment | StoredSegment,
        store: Callable[[SegmentMetadata], object],
        *,
        follows: bool,
    ) -> SegmentMetadata:
        facts, seal = made.facts, made.seal
        segment = SegmentMetadata(
            segment=SegmentId(self.ledger.partition, facts.segment),
            start=facts.start,
            end=facts.end,
            broker=0,
            max_timestamp=facts.max_timestamp,
            event_timestamp=0,  # set by the ledger
            terms=facts.terms,
            size=seal.size,
            custom_metadata=seal.encode(),
            no_transaction_index=True,
        )
        is_finishing = False
        try:
            segment = self.ledger.add(segment)
            store(segment)
            # After the add is visible and before the finish: a successor that takes over from here on sees the copy.
            slot.touch()
            if follows:
                planning.check_follows(self.ledger.reach(), segment)
            is_finishing = True
            return self.ledger.publish_state(segment, SegmentState.COPY_FINISHED)
        except StrandlineError as error:
            finished = self._roll_back(segment, error, slot if is_finishing else None)
            if finished is not None:
                return finished
            if not error.retryable:
                slot.touch()  # if another tierer took over, Fenced is the cause to report
            raise

    def _roll_back(self, segment: SegmentMetadata, why: StrandlineError, slot: Slot | None) -> SegmentMetadata | None:
        """Remove a failed copy; returns the segment if it is finished and only the answer was lost.

        With a ``slot``, the event that finishes it may still arrive, and a successor rely on it. A copy that cannot be
        removed now is removed by the next round.
        """
        try:
            known = self.ledger.get(segment.segment)
            if known is not None and known.state is SegmentState.COPY_FINISHED:
                return known
            if known is not None and slot is not None:
                self.ledger.retire(slot, [known], "removed")
            elif known is not None:
                self.ledger.remove(known)
            else:  # perhaps not published; then there is no object
                self.ledger.delete_object(segment)
        except StrandlineError as error:
            _LOGGER.warning("Segment %s failed (%s) and is removed later: %s", segment.segment, why, error)
        return None
