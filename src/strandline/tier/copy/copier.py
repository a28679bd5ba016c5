"""Copying one segment: told of, stored, read back, and finished while the slot is held; or taken back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import final

from strandline.errors import StrandlineError
from strandline.formats.segment.file import LARGEST_SEGMENT
from strandline.formats.segment.writer import EncodedSegment, SegmentWriter
from strandline.log.contract import Slot
from strandline.log.fetch import fetch_in_order
from strandline.log.object.span import ObjectSpan
from strandline.log.planning import Fingerprinted, SpanWithTerm
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import Limit, Span
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState
from strandline.storage.clock import Chance, Clock
from strandline.tier.copy import planning
from strandline.tier.copy.ledger import Ledger
from strandline.tier.copy.segment_files import listed_batches, plan_segment, put_segment, segment_path, verify_segment

_LOGGER = logging.getLogger(__name__)


@final
class Copier:
    """Makes segments of one log. One thread uses it."""

    def __init__(self, ledger: Ledger, *, target: int, clock: Clock, chance: Chance) -> None:
        """A segment has about ``target`` bytes."""
        self._ledger = ledger
        self._target = target
        self._clock, self._chance = clock, chance

    # --- encoding ----------------------------------------------------------------------------------------------

    def encode(
        self, start: int, spans: Sequence[Span], expected: int, stopping: Callable[[], bool]
    ) -> EncodedSegment | None:
        """A segment of as many of these spans as it should have; None if it was stopped."""
        writer = SegmentWriter(start, expected=min(expected, self._target))
        fingerprint: int | None = None
        for span, batches in fetch_in_order(spans):
            if stopping():
                return None
            size = sum(batch.nbytes for batch in batches)
            # Compressed it may be less, and is hardly more: an event cannot tell of a larger one.
            if writer.next > start and writer.size + size + (size >> 3) > LARGEST_SEGMENT - (64 << 20):
                break
            term = span.term if isinstance(span, SpanWithTerm) else 0
            writer.add(batches, term=term, listed=listed_at(span, self._clock.now()))
            fingerprint = span.fingerprint if isinstance(span, Fingerprinted) else None
            if writer.size >= self._target:
                break
        return self._finish(writer, fingerprint)

    def shorten(self, segment: SegmentMetadata, upto: int, fingerprint: int | None) -> EncodedSegment:
        """A segment of what another one holds below an offset, where the log's own cursor has this fingerprint."""
        writer = SegmentWriter(segment.start, expected=segment.size)
        for span in plan_segment(self._ledger.store, segment, segment.start, Limit(upto=upto)):
            for batch, listed in listed_batches(span):
                writer.add([batch], term=span.term, listed=listed)
        return self._finish(writer, fingerprint)

    def _finish(self, writer: SegmentWriter, fingerprint: int | None) -> EncodedSegment:
        partition = self._ledger.partition
        return writer.finish(
            log_id=partition.topic_id,
            partition=partition.partition,
            segment=self._chance.uuid(),
            fingerprint=fingerprint,
        )

    # --- storing -----------------------------------------------------------------------------------------------

    def copy(self, slot: Slot, encoded: EncodedSegment, *, follows: bool) -> SegmentMetadata:
        """Store a segment and tell of it; it can be read when this returns. What fails is taken back.

        If it ``follows``, it has to begin where the cold tier ends.
        """
        facts = encoded.facts
        segment = SegmentMetadata(
            segment=SegmentId(self._ledger.partition, facts.segment),
            start=facts.start,
            end=facts.end,
            broker=0,
            max_timestamp=facts.max_timestamp,
            event_timestamp=0,  # both are told by the ledger
            terms=facts.terms,
            size=encoded.seal.size,
            custom_metadata=encoded.seal.encode(),
            no_transaction_index=True,
        )
        try:
            segment = self._ledger.add(segment)
            put_segment(self._ledger.store, segment_path(segment.segment, segment.start), encoded)
            verify_segment(self._ledger.store, segment)
            # After the add is visible and before it is finished: whoever takes over from here on sees the copy.
            slot.touch()
            if follows:
                planning.check_follows(self._ledger.reach(), segment)
            return self._ledger.went_on(segment, SegmentState.COPY_FINISHED)
        except StrandlineError as error:
            finished = self._given_up(segment, error)
            if finished is not None:
                return finished
            if not error.retryable:
                slot.touch()  # if somebody has taken over, that is why it failed, and what is said
            raise

    def _given_up(self, segment: SegmentMetadata, why: StrandlineError) -> SegmentMetadata | None:
        """Take back a copy that failed; the segment if it turns out to be finished, only its answer having been lost.

        What cannot be taken back now is left over, for the next round.
        """
        try:
            known = self._ledger.get(segment.segment)
            if known is not None and known.state is SegmentState.COPY_FINISHED:
                return known
            if known is not None:
                self._ledger.remove(known)
            else:  # it may not have been told of; its object is not there then
                self._ledger.forget_object(segment)
        except StrandlineError as error:
            _LOGGER.warning("Segment %s failed (%s) and is removed later: %s", segment.segment, why, error)
        return None


def listed_at(span: Span, now: int) -> int:
    """When a span's batch was listed, in microseconds; a log that does not tell lists it now."""
    if isinstance(span, ObjectSpan):
        return span.entry.listed
    if isinstance(span, WalSpan):
        # Such a log counts milliseconds, and seeks by them: all of its last one is not later than itself.
        return span.frame.timestamp * 1000 + 999
    return now
