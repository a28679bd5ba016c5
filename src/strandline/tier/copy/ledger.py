"""What is told of the segments of one log, and where their objects are: events and objects change together here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, final

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
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.store import ObjectStore
from strandline.storage.store_clock import cautious_now
from strandline.tier.copy import planning
from strandline.tier.copy.planning import Known
from strandline.tier.copy.segment_files import list_segments, segment_path

T = TypeVar("T")


class Segments(Protocol):
    """The part of the segment cache that the tierer asks."""

    def segments(self, partition: TopicPartition) -> Iterable[SegmentMetadata]:
        """All segments, by their first offset."""

    def unreferenced(self, partition: TopicPartition) -> Iterable[SegmentMetadata]:
        """The segments that no lookup finds: those that others have taken the place of are among them."""

    def deletion(self, partition: TopicPartition) -> PartitionDelete | None:
        """How far the partition's deletion is."""

    def reach(self, partition: TopicPartition) -> int | None:
        """The offset behind the last one that a lookup finds."""

    def holding(self, partition: TopicPartition, offset: int) -> SegmentMetadata | None:
        """The segment to read an offset from, in the highest term that has it."""

    def get(self, segment: SegmentId) -> SegmentMetadata | None:
        """One segment, in whichever state."""


class Registry(Protocol):
    """The part of the metadata manager that the tierer needs."""

    def current(self, partition: TopicPartition, question: Callable[[Segments], T]) -> T:
        """The answer from everything that was published before this call; ``NotReady`` if that is not known."""

    def add(self, segment: SegmentMetadata) -> None:
        """Tell of a segment whose copy starts."""

    def update(self, update: SegmentUpdate) -> None:
        """Tell that a segment went on."""

    def put_partition_delete(self, delete: PartitionDelete) -> None:
        """Tell how far a partition's deletion is."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One step: ``what`` is copied, removed, expired or swept."""

    what: str
    path: str
    first: int
    last: int
    size: int
    seconds: float = field(default=0.0, compare=False)
    """How long a copy took."""


@final
class Ledger:
    """The segments of one partition. Every answer is from all events that were published before the question.

    A segment is told of before its object is put, and its deletion before its object goes: no object is unknown for
    good, and nobody is sent to one that is gone.
    """

    def __init__(
        self,
        registry: Registry,
        store: ObjectStore,
        partition: TopicPartition,
        *,
        broker: int = 0,
        on_progress: Callable[[Progress], None] | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        """Tell the registry, as the node of this number; the objects are in ``store``."""
        self.partition = partition
        self.store = store
        self._registry = registry
        self._broker = broker
        self._progress = on_progress
        self._clock = clock

    # --- looking -----------------------------------------------------------------------------------------------

    def known(self) -> Known:
        """All segments. Costs as much as there are: for a look once a round."""
        partition = self.partition

        def ask(cache: Segments) -> Known:
            return Known(
                tuple(cache.segments(partition)), tuple(cache.unreferenced(partition)), cache.deletion(partition)
            )

        return self._registry.current(partition, ask)

    def reach(self) -> int | None:
        """The offset behind all that can be read; None if nothing can. Costs the same however much there is."""
        return self._registry.current(self.partition, lambda cache: cache.reach(self.partition))

    def last(self) -> SegmentMetadata | None:
        """The segment that ends the cold tier; None if nothing can be read. Costs the same however much there is."""
        partition = self.partition

        def ask(cache: Segments) -> SegmentMetadata | None:
            reach = cache.reach(partition)
            return None if reach is None else cache.holding(partition, reach - 1)

        return self._registry.current(partition, ask)

    def deletion(self) -> PartitionDelete | None:
        """How far the partition's deletion is."""
        return self._registry.current(self.partition, lambda cache: cache.deletion(self.partition))

    def get(self, segment: SegmentId) -> SegmentMetadata | None:
        """One segment, in whichever state; None if it is not known."""
        return self._registry.current(self.partition, lambda cache: cache.get(segment))

    # --- telling -----------------------------------------------------------------------------------------------

    def add(self, segment: SegmentMetadata) -> SegmentMetadata:
        """Tell of a segment whose copy starts now."""
        told = replace(segment, broker=self._broker, event_timestamp=self._now())
        self._registry.add(told)
        return told

    def went_on(self, segment: SegmentMetadata, state: SegmentState) -> SegmentMetadata:
        """Tell that a segment went on."""
        now = self._now()
        self._registry.update(
            SegmentUpdate(
                segment=segment.segment,
                broker=self._broker,
                event_timestamp=now,
                state=state,
                custom_metadata=segment.custom_metadata,  # what an update does not repeat is forgotten
            )
        )
        return replace(segment, broker=self._broker, event_timestamp=now, state=state)

    def tell_deletion(self, state: PartitionDeleteState) -> None:
        """Tell how far the partition's deletion is."""
        self._registry.put_partition_delete(
            PartitionDelete(partition=self.partition, broker=self._broker, event_timestamp=self._now(), state=state)
        )

    def tell(self, what: str, segment: SegmentMetadata, seconds: float = 0.0) -> None:
        """Tell whoever looks on what was done with a segment."""
        if self._progress is not None:
            path = segment_path(segment.segment, segment.start)
            self._progress(Progress(what, path, segment.start, segment.end, segment.size, seconds))

    def _now(self) -> int:
        return self._clock.now() // 1000

    # --- removing ----------------------------------------------------------------------------------------------

    def remove_all(self, segments: Sequence[SegmentMetadata], what: str) -> list[SegmentMetadata]:
        """Delete segments, oldest first."""
        for segment in segments:
            self.remove(segment)
            self.tell(what, segment)
        return list(segments)

    def remove(self, segment: SegmentMetadata) -> None:
        """Delete a segment: first its readers are told, then the object goes, then it is forgotten."""
        with self._unless_done(segment):
            if segment.state is not SegmentState.DELETE_STARTED:
                segment = self.went_on(segment, SegmentState.DELETE_STARTED)
        self.forget_object(segment)
        with self._unless_done(segment):
            self.went_on(segment, SegmentState.DELETE_FINISHED)

    def forget_object(self, segment: SegmentMetadata) -> None:
        """Delete the object of a segment; one that is not there is fine."""
        self.store.delete(segment_path(segment.segment, segment.start))

    @contextlib.contextmanager
    def _unless_done(self, segment: SegmentMetadata) -> Iterator[None]:
        """Let it pass that somebody else removes the same segment."""
        try:
            yield
        except InvalidInput:
            known = self.get(segment.segment)
            if known is not None and known.state is not SegmentState.DELETE_STARTED:
                raise

    def sweep(self, grace: float) -> list[str]:
        """Delete objects that no event knows, written longer than ``grace`` seconds ago; returns their paths."""
        # Listed before the events are read: see planning.orphans.
        found = list(list_segments(self.store, self.partition.topic_id, self.partition.partition))
        known = {segment.segment.id for segment in self.known().segments} if found else set()
        now = cautious_now(self.store, "clock/now", clock=self._clock) if found else 0
        gone = planning.orphans(found, known, grace=grace, now=now)
        for path in gone:
            self.store.delete(path)
            if self._progress is not None:
                self._progress(Progress("swept", path, 0, 0, 0))
        return gone

    def delete_partition(self) -> bool:
        """Go on with the partition's deletion, if it was asked for; whether it was."""
        deletion = self.deletion()
        if deletion is None:
            return False
        if deletion.state is PartitionDeleteState.MARKED:
            self.tell_deletion(PartitionDeleteState.STARTED)
        if deletion.state is not PartitionDeleteState.FINISHED:
            self.remove_all(self.known().segments, "removed")
            for found in list(list_segments(self.store, self.partition.topic_id, self.partition.partition)):
                self.store.delete(found.info.path)
            self.tell_deletion(PartitionDeleteState.FINISHED)
        return True
