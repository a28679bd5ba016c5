"""Rows of a segment cache: log partitions, their segments in columns, and the term indexes, loaded on first use.

Pure, as the cache is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final
from uuid import UUID

from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentMetadata,
    SegmentState,
    TopicPartition,
)
from strandline.tier.metadata.cache_tables import CacheContent, term_key
from strandline.tier.metadata.columns import GONE
from strandline.tier.metadata.terms import NONE, Starts, TermIndex

_FEW: Final = 1 << 16
"""Up to this many changes stay outside the columns, whatever the columns hold."""
_ID_BITS: Final = 128
_PARTITION_BITS: Final = 31
_LOW: Final = (1 << 64) - 1
_FINISHED: Final = SegmentState.COPY_FINISHED.value


class Partition:
    """The rows and term indexes of one log partition."""

    __slots__ = ("added", "deletion", "key", "loaded", "number", "terms")

    def __init__(self, key: TopicPartition, number: int, loaded: range, deletion: PartitionDelete | None) -> None:
        self.key = key
        self.number = number
        self.loaded = loaded
        """Rows from the loaded content, sorted by start."""
        self.added = array("i")
        """Rows added since."""
        self.terms: dict[int, TermIndex] = {}
        """Indexes are loaded on first use."""
        self.deletion = deletion

    @property
    def is_deleted(self) -> bool:
        """Whether the deletion of the partition has finished."""
        return self.deletion is not None and self.deletion.state is PartitionDeleteState.FINISHED

    def clear(self) -> None:
        """Drop all segments; the deletion stays."""
        self.loaded, self.added, self.terms = range(0), array("i"), {}


class CacheRows:
    """The segments of all log partitions, as rows of columns, with an index for each term."""

    __slots__ = ("_ids", "_left", "_partitions", "columns", "content", "numbered")

    def __init__(self) -> None:
        """Begin without segments."""
        self.replace_content(CacheContent())

    def known(self, key: TopicPartition) -> Partition:
        """The partition; an empty one, which is not kept, if nothing is known of it."""
        return self._partitions.get(_key_of(key)) or Partition(key, NONE, range(0), None)

    def partition(self, key: TopicPartition) -> Partition:
        """The partition, numbered and kept from now on."""
        known = self.known(key)
        if known.number == NONE:
            known.number = len(self.numbered)
            self._partitions[_key_of(key)] = known
            self.numbered.append(known)
        return known

    def row(self, known: Partition, segment: UUID) -> int:
        """The row of a segment, or NONE."""
        number = segment.int
        row = self._ids.get(known.number << _ID_BITS | number, NONE)
        if row != NONE:
            return row
        content, columns = self.content, self.columns
        low = number & _LOW
        at = bisect_left(content.ids, low)
        while at < len(content.ids) and content.ids[at] == low:
            row = content.id_rows[at]
            if columns.id_of(row) == number and columns.partition[row] == known.number:
                return row if columns.state[row] != GONE else NONE
            at += 1
        return NONE

    def index(self, known: Partition, term: int) -> TermIndex | None:
        """The index of a term, if the term is known."""
        index = known.terms.get(term)
        if index is None and not known.is_deleted and term >= 0:
            index = self._load_index(term_key(known.number, term))
            if index is not None:
                known.terms[term] = index
        return index

    def index_of(self, known: Partition, term: int) -> TermIndex:
        """The index of a term, made if the term is new."""
        index = known.terms.get(term) or self.index(known, term)
        if index is None:
            index = known.terms[term] = TermIndex(self.columns)
        return index

    def _load_index(self, key: int) -> TermIndex | None:
        content = self.content
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

    def rows(self, known: Partition) -> list[int]:
        """The rows of a partition's segments."""
        state = self.columns.state
        return [row for rows in (known.loaded, known.added) for row in rows if state[row] != GONE]

    def each(self, known: Partition, rows: Iterable[int]) -> Iterator[SegmentMetadata]:
        """The segments in these rows, sorted by start; one that is removed meanwhile is left out."""
        columns, key = self.columns, known.key
        in_order = sorted(rows)
        in_order.sort(key=columns.start)
        return (columns.metadata(row, key) for row in in_order if columns.state[row] != GONE)

    def hidden(self, known: Partition) -> set[int]:
        """The rows that some lookup does not find: few, and found by a byte search instead of a scan."""
        columns = self.columns
        answers = columns.answers.tobytes()
        found = set()
        at = answers.find(0)
        while at >= 0:
            row = columns.row_of[at]
            if columns.partition[row] == known.number and columns.state[row] != GONE:
                found.add(row)
            at = answers.find(0, at + 1)
        return found

    def is_spare(self, known: Partition, row: int) -> bool:
        """Whether no lookup needs the segment in this row."""
        columns = self.columns
        if columns.state[row] != _FINISHED:
            return True
        stretches = columns.stretches(row)
        if any(columns.answers[stretch] for stretch in stretches):
            return False
        return all(self.index_of(known, columns.term[stretch]).is_spare(stretch) for stretch in stretches)

    def add(self, segment: SegmentMetadata) -> None:
        """Add a segment that is not there yet."""
        columns, known = self.columns, self.partition(segment.segment.partition)
        row = columns.append(known.number, segment)
        known.added.append(row)
        self._ids[known.number << _ID_BITS | segment.segment.id.int] = row
        for stretch in columns.stretches(row):
            index = self.index_of(known, columns.term[stretch])
            index.stretches.append(stretch)
            if index.size is not None:
                index.size += segment.size

    def clear(self, known: Partition) -> None:
        """Remove all segments of a partition."""
        for row in self.rows(known):
            self.columns.forget(row)
            self._ids.pop(known.number << _ID_BITS | self.columns.id_of(row), None)
        known.clear()

    def forget(self, known: Partition, row: int) -> None:
        """Remove the segment in a row."""
        columns = self.columns
        columns.forget(row)
        self._ids.pop(known.number << _ID_BITS | columns.id_of(row), None)
        for stretch in columns.stretches(row):
            index = self.index_of(known, columns.term[stretch])
            if index.size is not None:
                index.size -= columns.size(row)

    def replace_content(self, content: CacheContent) -> None:
        """Replace all rows by this content."""
        self.content = content
        self.columns = content.columns
        self.numbered = [
            Partition(key, number, content.rows(number), deletion)
            for number, (key, deletion) in enumerate(zip(content.partitions, content.deletions, strict=True))
        ]
        self._partitions = {_key_of(known.key): known for known in self.numbered}
        self._ids: dict[int, int] = {}
        """Rows of the segments added since the content was loaded, by partition number and id."""
        self._left = max(_FEW, len(content.columns) // 2)

    def is_crowded(self) -> bool:
        """Count a change; whether the columns should be rebuilt: changes are objects, removed rows waste memory."""
        self._left -= 1
        return self._left <= 0


def _key_of(partition: TopicPartition) -> int:
    """A partition as a number: a dict lookup takes half the time."""
    return partition.topic_id.int << _PARTITION_BITS | partition.partition


def _between(keys: array[int], key: int) -> slice:
    return slice(bisect_left(keys, key), bisect_right(keys, key))
