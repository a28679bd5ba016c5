"""Copies one segment: announce, store, verify, finish while the slot is held; or roll back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from strandline.errors import StrandlineError
from strandline.formats.segment.file import LARGEST_SEGMENT
from strandline.formats.segment.writer import EncodedSegment, SegmentWriter
from strandline.log.contract import Slot
from strandline.log.object.log import ObjectSpan
from strandline.log.read.planning import Fingerprinted, SpanWithTerm
from strandline.log.read.reading import fetch_in_order
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import Limit, Span
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState
from strandline.storage.clock import Chance, Clock
from strandline.tier.copy import planning
from strandline.tier.copy.ledger import Ledger
from strandline.tier.copy.retirement import Retirement
from strandline.tier.copy.segment_files import listed_batches, plan_segment, put_segment, segment_path, verify_segment

_LOGGER = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Copier:
    """Makes segments of one log. Used by one thread."""

    ledger: Ledger
    retirement: Retirement
    target: int
    """Target size of a segment in bytes."""
    clock: Clock
    chance: Chance

    def encode(
        self, start: int, spans: Sequence[Span], expected: int, stopping: Callable[[], bool]
    ) -> EncodedSegment | None:
        """A segment from the first of these spans, up to the target size; None if stopped.

        Listing times never fall within a segment: it ends before a batch with an earlier time than the one before it,
        as write-ahead logs have them once a clock that was ahead is set right.
        """
        now = self.clock.now()
        spans = spans[: planning.first_fall([listed_at(span, now) for span in spans])]
        writer = SegmentWriter(start, expected=min(expected, self.target))
        fingerprint: int | None = None
        for span, batches in fetch_in_order(spans):
            if stopping():
                return None
            size = sum(batch.nbytes for batch in batches)
            # Compression hardly ever makes it larger; an event cannot describe a larger segment.
            if writer.next > start and writer.size + size + (size >> 3) > LARGEST_SEGMENT - (64 << 20):
                break
            term = span.term if isinstance(span, SpanWithTerm) else 0
            writer.add(batches, term=term, listed=listed_at(span, now))
            fingerprint = span.fingerprint if isinstance(span, Fingerprinted) else None
            if writer.size >= self.target:
                break
        return self._finish(writer, fingerprint)

    def shorten(self, segment: SegmentMetadata, upto: int, fingerprint: int | None) -> EncodedSegment:
        """A copy of a segment below an offset; ``fingerprint`` is that of the log's cursor there."""
        writer = SegmentWriter(segment.start, expected=segment.size)
        for span in plan_segment(self.ledger.store, segment, segment.start, Limit(upto=upto)):
            for batch, listed in listed_batches(span):
                writer.add([batch], term=span.term, listed=listed)
        return self._finish(writer, fingerprint)

    def _finish(self, writer: SegmentWriter, fingerprint: int | None) -> EncodedSegment:
        partition = self.ledger.partition
        return writer.finish(
            log_id=partition.topic_id,
            partition=partition.partition,
            segment=self.chance.uuid(),
            fingerprint=fingerprint,
        )

    def copy(self, slot: Slot, encoded: EncodedSegment, *, follows: bool) -> SegmentMetadata:
        """Publish and store a segment; readable when this returns. A failed copy is rolled back.

        With ``follows``, the segment must start at the end of the cold tier.
        """
        facts = encoded.facts
        segment = SegmentMetadata(
            segment=SegmentId(self.ledger.partition, facts.segment),
            start=facts.start,
            end=facts.end,
            broker=0,
            max_timestamp=facts.max_timestamp,
            event_timestamp=0,  # set by the ledger, as is the broker
            terms=facts.terms,
            size=encoded.seal.size,
            custom_metadata=encoded.seal.encode(),
            no_transaction_index=True,
        )
        is_finishing = False
        try:
            segment = self.ledger.add(segment)
            put_segment(self.ledger.store, segment_path(segment.segment, segment.start), encoded)
            verify_segment(self.ledger.store, segment)
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
                self.retirement.remove(slot, [known], "removed")
            elif known is not None:
                self.ledger.remove(known)
            else:  # perhaps not published; then there is no object
                self.ledger.delete_object(segment)
        except StrandlineError as error:
            _LOGGER.warning("Segment %s failed (%s) and is removed later: %s", segment.segment, why, error)
        return None


def listed_at(span: Span, now: int) -> int:
    """When a span's batch was listed, in microseconds; ``now`` for logs without listing times."""
    if isinstance(span, ObjectSpan):
        return span.entry.listed
    if isinstance(span, WalSpan):
        # A write-ahead log seeks by milliseconds: the last microsecond of the millisecond is not later than it.
        return span.frame.timestamp * 1000 + 999
    return now
