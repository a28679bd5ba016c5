"""The segments of one log: changes events and objects together, in the safe order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from strandline.errors import InvalidInput
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

_BROKER: Final = 0
"""Events name the node that published them by a number, which other programs have and tierers have not."""


def known_segments(registry: MetadataManager, partition: TopicPartition) -> KnownSegments:
    """All segments of a log, with every event that was published before."""

    def ask(cache: SegmentCache) -> KnownSegments:
        return KnownSegments(
            tuple(cache.segments(partition)), tuple(cache.unreferenced(partition)), cache.deletion(partition)
        )

    return registry.current(partition, ask)


@final
@dataclass(frozen=True, slots=True)
class Ledger:
    """The segments of one partition. Every read sees all events published before it.

    A segment is published before its object is stored, and its deletion before its object is deleted: no object stays
    unlisted, and no reader is sent to a deleted one.
    """

    registry: MetadataManager
    store: ObjectStore
    partition: TopicPartition
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

    @contextlib.contextmanager
    def _unless_done(self, segment: SegmentMetadata) -> Iterator[None]:
        """Ignore that another tierer deletes the same segment."""
        try:
            yield
        except InvalidInput:
            known = self.get(segment.segment)
            if known is not None and known.state is not SegmentState.DELETE_STARTED:
                raise

    def sweep(self, grace: float) -> list[str]:
        """Delete objects without an event, written more than ``grace`` seconds ago; returns their paths."""
        # Listed before the events are read: see planning.orphans.
        found = list(list_segments(self.store, self.partition.topic_id, self.partition.partition))
        known = {segment.segment.id for segment in self.known().segments} if found else set()
        now = cautious_now(self.store, "clock/now", clock=self.env.clock) if found else 0
        gone = planning.orphans(found, known, grace=grace, now=now)
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
