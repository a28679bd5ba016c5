"""The segments of one log: changes events and objects together, in the safe order. None is deleted that a successor
of this tierer relies on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final
from uuid import UUID

from strandline.errors import InvalidInput
from strandline.log.contract import Log, Slot
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore, cautious_now
from strandline.tier.copy import planning
from strandline.tier.copy.planning import KnownSegments
from strandline.tier.copy.rounds import TieringStep
from strandline.tier.copy.segment_files import list_segments, segment_path
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.read.tiered_slots import TierableSlots

_BROKER: Final = 0
"""Events name the node that published them by a number, which other programs have and tierers have not."""
_NOTED: Final = 1000
"""How many segments are noted at a time."""


def known_segments(registry: MetadataManager, partition: TopicPartition) -> KnownSegments:
    """All segments of a log, with every event that was published before."""
    return registry.current(
        partition,
        lambda cache: KnownSegments(
            tuple(cache.segments(partition)), tuple(cache.unreferenced(partition)), cache.deletion(partition)
        ),
    )


@final
@dataclass(frozen=True, slots=True)
class Ledger:
    """The segments of one partition. Every read sees all events published before it.

    A segment is published before its object is stored, and its deletion before its object is deleted: no object stays
    unlisted, and no reader is sent to a deleted one.

    The tierers of a replicated log have logs of their own, and a segment that diverges from one of them may be the only
    copy of another one's records: there :meth:`retire` notes a deletion durably before it is published, in the cell
    that the next tierer claims first (:mod:`strandline.tier.claim`).
    """

    registry: MetadataManager
    store: ObjectStore
    partition: TopicPartition
    log: Log
    grace: float
    """For how many seconds the objects of replaced segments stay, for readers that planned with them."""
    progress: Callable[[TieringStep], None] | None
    env: Env

    def known(self) -> KnownSegments:
        """All segments. Linear in their number: once per round."""
        return known_segments(self.registry, self.partition)

    def reach(self) -> int | None:
        """The end of the readable offsets; None without any. Constant cost."""
        return self.registry.current(self.partition, lambda cache: cache.reach(self.partition))

    def last(self) -> SegmentMetadata | None:
        """The last readable segment; None without any. Constant cost."""
        partition = self.partition

        def ask(cache: SegmentCache) -> SegmentMetadata | None:
            reach = cache.reach(partition)
            return None if reach is None else cache.holding(partition, reach - 1)

        return self.registry.current(partition, ask)

    def deletion(self) -> PartitionDelete | None:
        """State of the partition's deletion."""
        return self.registry.current(self.partition, lambda cache: cache.deletion(self.partition))

    def get(self, segment: SegmentId) -> SegmentMetadata | None:
        """One segment, in any state; None if unknown."""
        return self.registry.current(self.partition, lambda cache: cache.get(segment))

    def new_id(self) -> SegmentId:
        """The id of a segment that is about to be made."""
        return SegmentId(self.partition, self.env.chance.uuid())

    def add(self, segment: SegmentMetadata) -> SegmentMetadata:
        """Publish a segment whose copy starts now."""
        published = replace(segment, event_timestamp=self._now())
        self.registry.add(published)
        return published

    def publish_state(self, segment: SegmentMetadata, state: SegmentState) -> SegmentMetadata:
        """Publish a segment's next state."""
        now = self._now()
        self.registry.update(
            SegmentUpdate(
                segment=segment.segment,
                broker=_BROKER,
                event_timestamp=now,
                state=state,
                custom_metadata=segment.custom_metadata,  # an update without it clears it
            )
        )
        return replace(segment, broker=_BROKER, event_timestamp=now, state=state)

    def publish_deletion(self, state: PartitionDeleteState) -> None:
        """Publish the state of the partition's deletion."""
        self.registry.put_partition_delete(
            PartitionDelete(partition=self.partition, broker=_BROKER, event_timestamp=self._now(), state=state)
        )

    def report(self, what: str, segment: SegmentMetadata, seconds: float = 0.0) -> None:
        """Report a finished step to ``on_progress``."""
        if self.progress is not None:
            path = segment_path(segment.segment, segment.start)
            self.progress(TieringStep(what, path, segment.start, segment.end, segment.size, seconds))

    def _now(self) -> int:
        return self.env.clock.now() // 1000

    def remove_all(self, segments: Sequence[SegmentMetadata], what: str) -> list[SegmentMetadata]:
        """Delete segments, oldest first."""
        for segment in segments:
            self.remove(segment)
            self.report(what, segment)
        return list(segments)

    def remove(self, segment: SegmentMetadata) -> None:
        """Delete a segment: publish the deletion, delete the object, publish that it is deleted."""
        segment = self.withdraw(segment)
        self.delete_object(segment)
        with self._unless_done(segment):
            self.publish_state(segment, SegmentState.DELETE_FINISHED)

    def withdraw(self, segment: SegmentMetadata) -> SegmentMetadata:
        """Publish that a segment is being deleted: no lookup finds it any more, and its object stays for now."""
        with self._unless_done(segment):
            if segment.state is not SegmentState.DELETE_STARTED:
                return self.publish_state(segment, SegmentState.DELETE_STARTED)
        return segment

    def delete_object(self, segment: SegmentMetadata) -> None:
        """Delete the object of a segment, if it exists."""
        self.store.delete(segment_path(segment.segment, segment.start))

    def clean_up(self, slot: Slot, known: KnownSegments) -> tuple[list[SegmentMetadata], list[SegmentMetadata]]:
        """Remove what is left over; returns the segments not to rely on, and those of them that were deleted.

        To be called after the slot was claimed, and touched since the segments were read.
        """
        slots = self.log.slots
        noted = slots.retired() if isinstance(slots, TierableSlots) else ()
        left = planning.left_over(known, noted)
        return left, self.retire(slot, left, "removed", noted=noted, kept=self._replaced(known, left))

    def _replaced(self, known: KnownSegments, left: Sequence[SegmentMetadata]) -> list[SegmentMetadata]:
        """The left over segments whose objects readers may still need."""
        held, own = planning.replaced(known, left), self.env.clock.now()
        kept = planning.within_grace(held, self.grace, now=own, own=own)
        if len(kept) == len(held):
            return kept
        # Only if some are due, since it takes requests: a single clock that is ahead deletes nothing early.
        now = cautious_now(self.store, "clock/now", clock=self.env.clock)
        return planning.within_grace(held, self.grace, now=now, own=own)

    def retire(
        self,
        slot: Slot,
        segments: Sequence[SegmentMetadata],
        what: str,
        *,
        noted: Collection[UUID] = (),
        kept: Collection[SegmentMetadata] = (),
    ) -> list[SegmentMetadata]:
        """Delete left over or diverged segments, the noted ones first; returns the deleted ones.

        ``Fenced`` if another tierer has taken over. The ``kept`` ones are only withdrawn: readers that planned with
        them read their objects for some time.
        """
        stay = {each.segment for each in kept}
        slots = self.log.slots
        in_order = sorted(segments, key=lambda segment: segment.segment.id not in noted)
        for first in range(0, len(in_order), _NOTED):
            some = in_order[first : first + _NOTED]
            # Also copies that did not finish: the event that finishes one may still arrive.
            new = {each.segment.id for each in some if each.state is not SegmentState.DELETE_STARTED}.difference(noted)
            if new and isinstance(slots, TierableSlots):
                slots.retire(slot, [each.segment.id for each in some])
            elif new:
                slot.touch()
            for each in some:
                if each.segment in stay and each.state is not SegmentState.DELETE_STARTED:
                    self.report("replaced", self.withdraw(each))
            self.remove_all([each for each in some if each.segment not in stay], what)
        return [each for each in in_order if each.segment not in stay]

    @contextlib.contextmanager
    def _unless_done(self, segment: SegmentMetadata) -> Iterator[None]:
        """Ignore that another tierer deletes the same segment."""
        try:
            yield
        except InvalidInput:
            known = self.get(segment.segment)
            if known is not None and known.state is not SegmentState.DELETE_STARTED:
                raise

    def sweep(self) -> list[str]:
        """Delete objects without an event, written more than the grace period ago; returns their paths."""
        # Listed before the events are read: see planning.orphans.
        found = list(list_segments(self.store, self.partition.topic_id, self.partition.partition))
        known = {segment.segment.id for segment in self.known().segments} if found else set()
        now = cautious_now(self.store, "clock/now", clock=self.env.clock) if found else 0
        gone = planning.orphans(found, known, grace=self.grace, now=now)
        for path in gone:
            self.store.delete(path)
            if self.progress is not None:
                self.progress(TieringStep("swept", path, 0, 0, 0))
        return gone

    def delete_partition(self) -> bool:
        """Continue the partition's deletion; False if none was requested."""
        deletion = self.deletion()
        if deletion is None:
            return False
        if deletion.state is PartitionDeleteState.MARKED:
            self.publish_deletion(PartitionDeleteState.STARTED)
        if deletion.state is not PartitionDeleteState.FINISHED:
            self.remove_all(self.known().segments, "removed")
            for found in list(list_segments(self.store, self.partition.topic_id, self.partition.partition)):
                self.store.delete(found.info.path)
            self.publish_deletion(PartitionDeleteState.FINISHED)
        return True
