"""The segment cache of one metadata partition: segment events in, lookups by term and offset out.

Pure: no I/O, no threads, no clock; threads that share a cache lock it. Lookups answer as Apache Kafka's cache of remote
log metadata does, with one guarantee more: an offset that a finished copy holds in the requested term is always found.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, Self, final

import pyarrow as pa

from strandline.errors import CorruptData, InvalidInput
from strandline.model.segments import (
    PartitionDelete,
    SegmentEvent,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.tier.metadata.cache_load import load
from strandline.tier.metadata.cache_rows import CacheRows, Partition
from strandline.tier.metadata.cache_tables import TERM_BITS, dump, term_key
from strandline.tier.metadata.columns import GONE
from strandline.tier.metadata.lifecycle import (
    UPDATE_STEPS,
    Removed,
    add_segment,
    advance_deletion,
    check_removed,
    update_segment,
)
from strandline.tier.metadata.terms import NONE

_REMEMBERED: Final = 4096
"""How many removed segments are remembered, to recognise a retry of their last event."""
_FINISHED: Final = SegmentState.COPY_FINISHED.value


@final
class SegmentCache:
    """All known segments of one metadata partition, which serves many log partitions."""

    __slots__ = ("_removed", "_rows")

    def __init__(self) -> None:
        self._removed: OrderedDict[SegmentId, Removed] = OrderedDict()
        self._rows = CacheRows()

    def segment_for(self, partition: TopicPartition, term: int, offset: int) -> SegmentMetadata | None:
        """The finished segment that holds the offset in this term, or None. Logarithmic in the number of segments.

        Of several, the segment that starts last in the term wins; a superseded one only where no other has the offset.
        """
        known = self._rows.known(partition)
        index = known.terms.get(term) or self._rows.index(known, term)
        stretch = NONE if index is None else index.find(offset)
        return None if stretch == NONE else self._rows.columns.metadata(self._rows.columns.row_of[stretch], known.key)

    def holding(self, partition: TopicPartition, offset: int, upto_term: int | None = None) -> SegmentMetadata | None:
        """The segment to read an offset from, in the highest term up to ``upto_term``. One lookup per term."""
        for term in reversed(self._terms_upto(partition, upto_term)):
            found = self.segment_for(partition, term, offset)
            if found is not None:
                return found
        return None

    def end_of_reading(self, segment: SegmentMetadata, offset: int, upto_term: int | None = None) -> int:
        """The offset at which to stop reading a segment that holds ``offset``: there a later term takes over.

        After a failover the log continues in the later term; the older records beyond that point were never
        committed. Terms above ``upto_term`` are ignored.
        """
        known = self._rows.known(segment.segment.partition)
        end = segment.end
        for term in self._terms_upto(known.key, upto_term):
            start = self._rows.index_of(known, term).next_start(offset)
            if start != NONE and start <= end and term > segment.term_at(start):
                end = start - 1
        return end + 1

    def lowest(self, partition: TopicPartition, upto_term: int | None = None) -> int | None:
        """The lowest offset that a lookup finds, in terms up to ``upto_term``; None without segments."""
        known = self._rows.known(partition)
        starts = [self._rows.index_of(known, term).lowest() for term in self._terms_upto(partition, upto_term)]
        return min((start for start in starts if start != NONE), default=None)

    def reach(self, partition: TopicPartition) -> int | None:
        """The offset after the last one that a lookup finds; None without segments."""
        known = self._rows.known(partition)
        ends = [self._rows.index_of(known, term).reach() for term in self.terms(partition)]
        return max((end + 1 for end in ends if end != NONE), default=None)

    def terms(self, partition: TopicPartition) -> list[int]:
        """The terms of all segments, ascending; may include terms of removed segments."""
        known = self._rows.known(partition)
        if known.is_deleted:
            return []
        keys, first, after = self._rows.content.keys, term_key(known.number, 0), term_key(known.number + 1, 0)
        found = set(known.terms)
        at = bisect_left(keys, first)
        while at < len(keys) and keys[at] < after:
            found.add(keys[at] - first)
            at = bisect_right(keys, keys[at])
        return sorted(found)

    def _terms_upto(self, partition: TopicPartition, term: int | None) -> list[int]:
        terms = self.terms(partition)
        return terms if term is None else terms[: bisect_right(terms, term)]

    def readable(
        self, partition: TopicPartition, end: int | None = None, upto_term: int | None = None
    ) -> list[SegmentMetadata]:
        """The segments that hold everything below ``end``, in order, up to the first gap."""
        found: list[SegmentMetadata] = []
        at = self.lowest(partition, upto_term)
        while (
            at is not None
            and (end is None or at < end)
            and (segment := self.holding(partition, at, upto_term)) is not None
        ):
            found.append(segment)
            at = self.end_of_reading(segment, at, upto_term)
        return found

    def highest_offset(self, partition: TopicPartition, term: int) -> int | None:
        """The highest offset of the term that any finished copy ever had: deletion does not lower it."""
        index = self._rows.index(self._rows.known(partition), term)
        return None if index is None or index.highest == NONE else index.highest

    def segments(self, partition: TopicPartition, term: int | None = None) -> Iterator[SegmentMetadata]:
        """All segments, or those with the term, in any state, sorted by start.

        Fixed at the call and built lazily: a segment removed during the iteration may be missing.
        """
        known = self._rows.known(partition)
        if term is None:
            return self._rows.each(known, self._rows.rows(known))
        index = self._rows.index(known, term)
        row_of = self._rows.columns.row_of
        return self._rows.each(known, () if index is None else [row_of[stretch] for stretch in index.stretches])

    def unreferenced(self, partition: TopicPartition) -> Iterator[SegmentMetadata]:
        """The segments that no lookup finds, sorted by start: being copied, being deleted, or superseded.

        A superseded segment counts only if other segments, not superseded themselves, hold each of its offsets in each
        of its terms: removing it makes nothing unreadable.
        """
        known = self._rows.known(partition)
        return self._rows.each(known, [row for row in self._rows.hidden(known) if self._rows.is_spare(known, row)])

    def size(self, partition: TopicPartition, term: int) -> int:
        """Total bytes of the segments with the term, in any state; a segment with two terms counts fully in both."""
        index = self._rows.index(self._rows.known(partition), term)
        if index is None:
            return 0
        if index.size is None:
            columns = self._rows.columns
            rows = [columns.row_of[stretch] for stretch in index.stretches]
            index.size = sum(columns.size(row) for row in rows if columns.state[row] != GONE)
        return index.size

    def deletion(self, partition: TopicPartition) -> PartitionDelete | None:
        """State of the partition's deletion; None if none was requested. A finished deletion stays known."""
        return self._rows.known(partition).deletion

    def get(self, segment: SegmentId) -> SegmentMetadata | None:
        """The segment, in any state; None if unknown or if its deletion has finished."""
        known = self._rows.known(segment.partition)
        row = self._rows.row(known, segment.id)
        return None if row == NONE else self._rows.columns.metadata(row, known.key)

    def check(self, event: SegmentEvent) -> None:
        """Raise :class:`InvalidInput` if :meth:`apply` would refuse the event; changes nothing."""
        self._change_by(event)

    def apply(self, event: SegmentEvent) -> bool:
        """Apply an event; False for an exact retry of the last event, which changes nothing.

        Raises:
            InvalidInput: the event is not the next step; nothing was changed.
        """
        change = self._change_by(event)
        if change is None:
            return False
        change()
        if self._rows.is_crowded():
            self._rows.replace_content(load(self.to_tables()))
        return True

    def _change_by(self, event: SegmentEvent) -> Callable[[], None] | None:
        """What an event changes; None for an exact retry. ``InvalidInput`` if it is not the next step."""
        if isinstance(event, PartitionDelete):
            known = self._rows.known(event.partition)
            after = advance_deletion(known.deletion, event)
            return None if after is known.deletion else partial(self._delete, event.partition, after)
        known = self._rows.known(event.segment.partition)
        row = self._rows.row(known, event.segment.id)
        if isinstance(event, SegmentUpdate):
            if row == NONE:
                check_removed(self._removed.get(event.segment), event)
            elif (self._rows.columns.state[row], event.state) in UPDATE_STEPS:
                return partial(self._update, known, row, event)
            else:
                update_segment(self._rows.columns.metadata(row, known.key), event)
            return None
        if row != NONE:
            add_segment(self._rows.columns.metadata(row, known.key), event)
            return None
        check_removed(self._removed.get(event.segment), event)
        if known.is_deleted:
            raise InvalidInput(
                f"Segment {event.segment} cannot be added: the deletion of its partition has finished. Nothing will "
                "read it; remove what was copied."
            )
        return partial(self._rows.add, event)

    def _update(self, known: Partition, row: int, event: SegmentUpdate) -> None:
        columns, state = self._rows.columns, event.state
        was_found = columns.state[row] == _FINISHED
        columns.update(row, event)
        if state is SegmentState.DELETE_FINISHED:
            self._rows.forget(known, row)
            self._removed[event.segment] = Removed.by(event)
            if len(self._removed) > _REMEMBERED:
                self._removed.popitem(last=False)
        elif state is SegmentState.COPY_FINISHED:
            for stretch in columns.stretches(row):
                self._rows.index_of(known, columns.term[stretch]).finish(stretch)
        elif was_found:
            for stretch in columns.stretches(row):
                self._rows.index_of(known, columns.term[stretch]).withdraw(stretch)

    def _delete(self, partition: TopicPartition, deletion: PartitionDelete) -> None:
        known = self._rows.partition(partition)
        known.deletion = deletion
        if known.is_deleted:
            self._rows.clear(known)

    def to_tables(self) -> dict[str, pa.Table]:
        """The whole cache as tables; :meth:`from_tables` restores an equal cache."""
        content = self._rows.content
        highest = dict(zip(content.highest_keys, content.highest, strict=True))
        for known in self._rows.numbered:
            for term, index in known.terms.items():
                if index.highest != NONE:
                    highest[term_key(known.number, term)] = index.highest
        deleted = {known.number for known in self._rows.numbered if known.is_deleted}
        return dump(
            content,
            [(known.key, known.deletion) for known in self._rows.numbered],
            ((key, offset) for key, offset in highest.items() if key >> TERM_BITS not in deleted),
            self._removed,
        )

    @classmethod
    def from_tables(cls, tables: Mapping[str, pa.Table]) -> Self:
        """The cache that :meth:`to_tables` dumped. ``CorruptData`` if no sequence of events leads to these tables."""
        content = load(tables)
        made = cls()
        made._rows.replace_content(content)
        made._removed.update(content.removed)
        for segment in content.removed:
            if made.get(segment) is not None:
                raise CorruptData(
                    f"A snapshot has segment {segment} both as present and as removed: replay the events instead."
                )
        return made
