"""The reading half of the segment cache: what is known, and how it is found."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final
from uuid import UUID

from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    TopicPartition,
)
from strandline.tier.metadata.cache_tables import Content, sort_key, term_key
from strandline.tier.metadata.columns import GONE, Columns
from strandline.tier.metadata.terms import NONE, Starts, TermIndex

ID_BITS: Final = 128
_PARTITION_BITS: Final = 31
_LOW: Final = (1 << 64) - 1
_FINISHED: Final = SegmentState.COPY_FINISHED.value


class Partition:
    """What there is of one partition."""

    __slots__ = ("added", "deletion", "key", "loaded", "number", "terms")

    def __init__(self, key: TopicPartition, number: int, loaded: range, deletion: PartitionDelete | None) -> None:
        self.key = key
        self.number = number
        self.loaded = loaded
        """Its rows that were loaded, sorted by start."""
        self.added = array("i")
        """Its later rows."""
        self.terms: dict[int, TermIndex] = {}
        """Those that somebody asked for, or told of."""
        self.deletion = deletion

    @property
    def is_deleted(self) -> bool:
        """Whether its deletion has finished."""
        return self.deletion is not None and self.deletion.state is PartitionDeleteState.FINISHED

    def clear(self) -> None:
        """Forget all segments; the deletion stays known."""
        self.loaded, self.added, self.terms = range(0), array("i"), {}


class CacheReading:
    """What can be asked of a cache. Changes nothing but indexes that are loaded when somebody needs them."""

    __slots__ = ("_columns", "_content", "_ids", "_numbered", "_partitions")

    _columns: Columns
    _content: Content
    _ids: dict[int, int]
    """The rows of segments that were added since the content was loaded, by partition and id."""
    _numbered: list[Partition]
    _partitions: dict[int, Partition]

    def segment_for(self, partition: TopicPartition, term: int, offset: int) -> SegmentMetadata | None:
        """The segment that holds the offset as this term wrote it, if its copy has finished; none if there is none.

        Costs the logarithm of the number of segments. Of several the one that starts last in the term answers, and
        one that is superseded only where no other holds the offset.
        """
        known = self._partitions.get(key_of(partition))
        if known is None:
            return None
        index = known.terms.get(term) or self._index(known, term)
        stretch = NONE if index is None else index.find(offset)
        return None if stretch == NONE else self._columns.metadata(self._columns.row_of[stretch], known.key)

    def holding(self, partition: TopicPartition, offset: int, upto_term: int | None = None) -> SegmentMetadata | None:
        """The segment to read an offset from, in the highest term that has it and is not above ``upto_term``.

        Costs what a lookup does, for each term that there is.
        """
        for term in reversed(self._terms_upto(partition, upto_term)):
            found = self.segment_for(partition, term, offset)
            if found is not None:
                return found
        return None

    def behind(self, segment: SegmentMetadata, offset: int, upto_term: int | None = None) -> int:
        """Up to which offset to read on in a segment that holds this one: there another has records of a later term.

        That is how a log went on whose leader changed: what the former one had beyond that was never in it. Terms above
        ``upto_term`` are not looked at.
        """
        known = self._partitions.get(key_of(segment.segment.partition))
        end = segment.end
        for term in () if known is None else self._terms_upto(known.key, upto_term):
            start = NONE if known is None else self._index_of(known, term).next_start(offset)
            if start != NONE and start <= end and term > segment.term_at(start):
                end = start - 1
        return end + 1

    def lowest(self, partition: TopicPartition, upto_term: int | None = None) -> int | None:
        """The lowest offset that a lookup finds, in terms up to ``upto_term``; none if there is nothing to be found."""
        known = self._partitions.get(key_of(partition))
        if known is None:
            return None
        starts = [self._index_of(known, term).lowest() for term in self._terms_upto(partition, upto_term)]
        return min((start for start in starts if start != NONE), default=None)

    def reach(self, partition: TopicPartition) -> int | None:
        """The offset behind the last one that a lookup finds; none if there is nothing to be found."""
        known = self._partitions.get(key_of(partition))
        if known is None:
            return None
        ends = [self._index_of(known, term).reach() for term in self.terms(partition)]
        return max((end + 1 for end in ends if end != NONE), default=None)

    def terms(self, partition: TopicPartition) -> list[int]:
        """The terms that there are segments of, and perhaps some that there were, ascending."""
        known = self._partitions.get(key_of(partition))
        if known is None or known.is_deleted:
            return []
        keys, first, after = self._content.keys, term_key(known.number, 0), term_key(known.number + 1, 0)
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
        """The segments to read everything below ``end`` from, up to the first hole: sorted, each behind the last."""
        found: list[SegmentMetadata] = []
        at = self.lowest(partition, upto_term)
        while (
            at is not None
            and (end is None or at < end)
            and (segment := self.holding(partition, at, upto_term)) is not None
        ):
            found.append(segment)
            at = self.behind(segment, at, upto_term)
        return found

    def next_segment(self, partition: TopicPartition, term: int, offset: int) -> SegmentMetadata | None:
        """The first segment with a transaction index, from the one that holds the offset on, each following the last.

        None if there is none before the end of the term or a gap in it.
        """
        found = self.segment_for(partition, term, offset)
        while found is not None and found.no_transaction_index:
            found = self.segment_for(partition, term, found.end + 1)
        return found

    def highest_offset(self, partition: TopicPartition, term: int) -> int | None:
        """The highest offset of the term that a finished copy has had: it does not fall when that is deleted."""
        known = self._partitions.get(key_of(partition))
        index = None if known is None else self._index(known, term)
        return None if index is None or index.highest == NONE else index.highest

    def segments(self, partition: TopicPartition, term: int | None = None) -> Iterator[SegmentMetadata]:
        """The segments that there are, or those that have the term, sorted by their start, in whichever state.

        They are those of now, and made while you go through them: one that is removed meanwhile may be left out.
        """
        known = self._partitions.get(key_of(partition))
        if known is None:
            return iter(())
        if term is None:
            return self._each(known, self._rows(known))
        index = self._index(known, term)
        row_of = self._columns.row_of
        return self._each(known, () if index is None else [row_of[stretch] for stretch in index.stretches])

    def unreferenced(self, partition: TopicPartition) -> Iterator[SegmentMetadata]:
        """The segments that no lookup finds, sorted by their start: being copied, being deleted, or superseded.

        A superseded one counts only while others, not superseded themselves, hold each of its offsets in each of its
        terms: so that whoever removes it makes nothing unreadable.
        """
        known = self._partitions.get(key_of(partition))
        if known is None:
            return iter(())
        return self._each(known, [row for row in self._silent(known) if self._is_spare(known, row)])

    def size(self, partition: TopicPartition, term: int) -> int:
        """The bytes of all segments that have the term, in whichever state; of one with two terms all count in both."""
        known = self._partitions.get(key_of(partition))
        index = None if known is None else self._index(known, term)
        if index is None:
            return 0
        if index.size is None:
            columns = self._columns
            rows = [columns.row_of[stretch] for stretch in index.stretches]
            index.size = sum(columns.size(row) for row in rows if columns.state[row] != GONE)
        return index.size

    def deletion(self, partition: TopicPartition) -> PartitionDelete | None:
        """How far the deletion of the partition is; none if nobody wants it. One that has finished stays known."""
        known = self._partitions.get(key_of(partition))
        return None if known is None else known.deletion

    def get(self, segment: SegmentId) -> SegmentMetadata | None:
        """The segment, in whichever state; none if there is none, or if its deletion has finished."""
        known = self._partitions.get(key_of(segment.partition))
        row = NONE if known is None else self._row(known, segment.id)
        return None if known is None or row == NONE else self._columns.metadata(row, known.key)

    def partitions(self) -> list[TopicPartition]:
        """The partitions that have segments, or whose deletion has begun and not finished; sorted by id and number."""
        there = [
            known.key
            for known in self._numbered
            if not known.is_deleted and (known.deletion is not None or self._has_rows(known))
        ]
        return sorted(there, key=sort_key)

    def _has_rows(self, known: Partition) -> bool:
        state = self._columns.state
        return any(state[row] != GONE for rows in (known.added, known.loaded) for row in rows)

    def _rows(self, known: Partition) -> list[int]:
        state = self._columns.state
        return [row for rows in (known.loaded, known.added) for row in rows if state[row] != GONE]

    def _each(self, known: Partition, rows: Iterable[int]) -> Iterator[SegmentMetadata]:
        columns, key = self._columns, known.key
        in_order = sorted(rows)
        in_order.sort(key=columns.start)
        return (columns.metadata(row, key) for row in in_order if columns.state[row] != GONE)

    def _silent(self, known: Partition) -> set[int]:
        """The rows that do not answer in each of their terms: few, and found without a look at each row."""
        columns = self._columns
        answers = columns.answers.tobytes()
        found = set()
        at = answers.find(0)
        while at >= 0:
            row = columns.row_of[at]
            if columns.partition[row] == known.number and columns.state[row] != GONE:
                found.add(row)
            at = answers.find(0, at + 1)
        return found

    def _is_spare(self, known: Partition, row: int) -> bool:
        columns = self._columns
        if columns.state[row] != _FINISHED:
            return True
        stretches = columns.stretches(row)
        if any(columns.answers[stretch] for stretch in stretches):
            return False
        return all(self._index_of(known, columns.term[stretch]).is_spare(stretch) for stretch in stretches)

    # --- finding -----------------------------------------------------------------------------------------------

    def _partition(self, key: TopicPartition) -> Partition:
        known = self._partitions.get(key_of(key))
        if known is None:
            known = self._partitions[key_of(key)] = Partition(key, len(self._numbered), range(0), None)
            self._numbered.append(known)
        return known

    def _row(self, known: Partition, segment: UUID) -> int:
        """The row of a segment that is there."""
        number = segment.int
        row = self._ids.get(known.number << ID_BITS | number, NONE)
        if row != NONE:
            return row
        content, columns = self._content, self._columns
        low = number & _LOW
        at = bisect_left(content.ids, low)
        while at < len(content.ids) and content.ids[at] == low:
            row = content.id_rows[at]
            if columns.id_of(row) == number and columns.partition[row] == known.number:
                return row if columns.state[row] != GONE else NONE
            at += 1
        return NONE

    def _index(self, known: Partition, term: int) -> TermIndex | None:
        """What is known of a term, if anything is."""
        index = known.terms.get(term)
        if index is None and not known.is_deleted and term >= 0:
            index = self._load_index(term_key(known.number, term))
            if index is not None:
                known.terms[term] = index
        return index

    def _index_of(self, known: Partition, term: int) -> TermIndex:
        index = known.terms.get(term) or self._index(known, term)
        if index is None:
            index = known.terms[term] = TermIndex(self._columns)
        return index

    def _load_index(self, key: int) -> TermIndex | None:
        content = self._content
        mine, answering = _between(content.keys, key), _between(content.answering_keys, key)
        top = _between(content.highest_keys, key)
        highest = content.highest[top]
        if mine.start == mine.stop and not highest:
            return None
        return TermIndex(
            content.columns,
            highest=highest[0] if highest else NONE,
            stretches=content.stretches[mine],
            starts=Starts(content.answering_starts[answering], content.answering[answering]),
            overlapping=content.overlapping[_between(content.overlapping_keys, key)],
        )


def key_of(partition: TopicPartition) -> int:
    """A partition as a number, which is looked up in half of the time."""
    return partition.topic_id.int << _PARTITION_BITS | partition.partition


def _between(keys: array[int], key: int) -> slice:
    return slice(bisect_left(keys, key), bisect_right(keys, key))
