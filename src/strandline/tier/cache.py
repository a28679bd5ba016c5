"""What the events of one metadata partition tell of segments: which one holds an offset, and which there are.

Pure: no I/O, no threads, no clock; whoever shares a cache locks it. The answers are those of Apache Kafka's cache of
remote log metadata, with one promise more: an offset that a finished copy holds, in the term asked for,
is always found.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import product
from typing import Final, Self, final
from uuid import UUID

import pyarrow as pa

from strandline.model.errors import CorruptData, InvalidInput
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentEvent,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.tier.cache_load import load
from strandline.tier.cache_tables import TERM_BITS, Content, Removed, dump, sort_key, term_key
from strandline.tier.columns import GONE, Columns
from strandline.tier.lifecycle import add_segment, advance_deletion, update_segment
from strandline.tier.terms import NONE, Starts, TermIndex

_REMEMBERED: Final = 4096
"""How many of the segments removed last are remembered, so that a retry of their last event is known as one."""
_FEW: Final = 1 << 16
"""Up to this many changes are kept beside the columns, whatever the columns have."""
_DIGEST: Final = 16
_ID_BITS: Final = 128
_PARTITION_BITS: Final = 31
_LOW: Final = (1 << 64) - 1
_FINISHED: Final = SegmentState.COPY_FINISHED.value


class _Partition:
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
        return self.deletion is not None and self.deletion.state is PartitionDeleteState.FINISHED

    def clear(self) -> None:
        self.loaded, self.added, self.terms = range(0), array("i"), {}


@final
class SegmentCache:
    """Everything that is known of the segments of one *metadata partition*, which has those of many partitions."""

    __slots__ = ("_columns", "_content", "_ids", "_left", "_numbered", "_partitions", "_removed")

    def __init__(self) -> None:
        self._removed: OrderedDict[SegmentId, Removed] = OrderedDict()
        self._take(Content())

    # --- events ------------------------------------------------------------------------------------------------

    def check(self, event: SegmentEvent) -> None:
        """:class:`InvalidInput` if applying the event would be refused; changes nothing."""
        match event:
            case SegmentUpdate():
                self._updatable(event)
            case SegmentMetadata():
                self._addable(event)
            case PartitionDelete():
                known = self._partitions.get(_key(event.partition))
                advance_deletion(None if known is None else known.deletion, event)

    def apply(self, event: SegmentEvent) -> bool:
        """Whether the event changed something: an exact retry of the last event does not.

        Raises:
            InvalidInput: the event is not the next step; nothing was changed.
        """
        match event:
            case SegmentUpdate():
                return self._update(event)
            case SegmentMetadata():
                return self._add(event)
            case PartitionDelete():
                return self._delete(event)

    def _addable(self, event: SegmentMetadata) -> bool:
        """Whether the segment is to be added; if not, it was added just so."""
        known = self._partitions.get(_key(event.segment.partition))
        row = NONE if known is None else self._row(known, event.segment.id)
        if known is not None and row != NONE:
            add_segment(self._columns.metadata(row, known.key), event)
            return False
        add_segment(self._stand_in(event.segment, b""), event)
        if known is not None and known.is_deleted:
            raise InvalidInput(
                f"Segment {event.segment} cannot be added: the deletion of its partition has finished. Nothing will "
                "read it; remove what was copied."
            )
        return True

    def _add(self, event: SegmentMetadata) -> bool:
        if not self._addable(event):
            return False
        columns, known = self._columns, self._partition(event.segment.partition)
        row = columns.append(known.number, event)
        known.added.append(row)
        self._ids[known.number << _ID_BITS | event.segment.id.int] = row
        for stretch in columns.stretches(row):
            index = self._index_of(known, columns.term[stretch])
            index.stretches.append(stretch)
            if index.size is not None:
                index.size += event.size
        self._count()
        return True

    def _updatable(self, event: SegmentUpdate) -> tuple[_Partition, int] | None:
        """The segment that the update is the next step of; None if that step was the last one."""
        known = self._partitions.get(_key(event.segment.partition))
        row = NONE if known is None else self._row(known, event.segment.id)
        if known is None or row == NONE:
            update_segment(self._stand_in(event.segment, event.custom_metadata), event)
            return None
        if (self._columns.state[row], event.state) in _STEPS:
            return known, row
        update_segment(self._columns.metadata(row, known.key), event)
        return None

    def _update(self, event: SegmentUpdate) -> bool:
        found = self._updatable(event)
        if found is None:
            return False
        (known, row), columns, state = found, self._columns, event.state
        was_found = columns.state[row] == _FINISHED
        columns.update(row, event)
        if state is SegmentState.DELETE_FINISHED:
            self._forget(known, row)
            self._removed[event.segment] = Removed(event.broker, event.event_timestamp, _digest(event.custom_metadata))
            if len(self._removed) > _REMEMBERED:
                self._removed.popitem(last=False)
        elif state is SegmentState.COPY_FINISHED:
            for stretch in columns.stretches(row):
                self._index_of(known, columns.term[stretch]).finish(stretch)
        elif was_found:
            for stretch in columns.stretches(row):
                self._index_of(known, columns.term[stretch]).withdraw(stretch)
        self._count()
        return True

    def _forget(self, known: _Partition, row: int) -> None:
        columns = self._columns
        columns.forget(row)
        self._ids.pop(known.number << _ID_BITS | columns.id_of(row), None)
        for stretch in columns.stretches(row):
            index = self._index_of(known, columns.term[stretch])
            if index.size is not None:
                index.size -= columns.size(row)

    def _delete(self, event: PartitionDelete) -> bool:
        known = self._partitions.get(_key(event.partition))
        before = None if known is None else known.deletion
        after = advance_deletion(before, event)
        if after is before:
            return False
        known = self._partition(event.partition)
        known.deletion = after
        if known.is_deleted:
            columns = self._columns
            for row in self._rows(known):
                columns.forget(row)
                self._ids.pop(known.number << _ID_BITS | columns.id_of(row), None)
            known.clear()
            self._count()
        return True

    def _stand_in(self, segment: SegmentId, custom: bytes | None) -> SegmentMetadata | None:
        """A segment that was removed, as far as it is remembered: none, if it is not.

        Its custom metadata is ``custom`` if it was the same; only the state, and what updates tell, are its own.
        """
        last = self._removed.get(segment)
        if last is None:
            return None
        return replace(
            _ANY,
            segment=segment,
            broker=last.broker,
            event_timestamp=last.event_timestamp,
            custom_metadata=custom if _digest(custom) == last.custom_digest else _other(custom),
            state=SegmentState.DELETE_FINISHED,
        )

    # --- reads -------------------------------------------------------------------------------------------------

    def segment_for(self, partition: TopicPartition, term: int, offset: int) -> SegmentMetadata | None:
        """The segment that holds the offset as this term wrote it, if its copy has finished; none if there is none.

        Costs the logarithm of the number of segments. Of several the one that starts last in the term answers, and
        one that is superseded only where no other holds the offset.
        """
        known = self._partitions.get(_key(partition))
        if known is None:
            return None
        index = known.terms.get(term) or self._index(known, term)
        stretch = NONE if index is None else index.find(offset)
        return None if stretch == NONE else self._columns.metadata(self._columns.row_of[stretch], known.key)

    def holding(self, partition: TopicPartition, offset: int) -> SegmentMetadata | None:
        """The segment to read an offset from that was written in whichever term: the highest of them answers.

        Costs what a lookup does, for each term that there is.
        """
        for term in reversed(self.terms(partition)):
            found = self.segment_for(partition, term, offset)
            if found is not None:
                return found
        return None

    def lowest(self, partition: TopicPartition) -> int | None:
        """The lowest offset that a lookup finds; none if there is nothing to be found."""
        known = self._partitions.get(_key(partition))
        if known is None:
            return None
        starts = [self._index_of(known, term).lowest() for term in self.terms(partition)]
        return min((start for start in starts if start != NONE), default=None)

    def reach(self, partition: TopicPartition) -> int | None:
        """The offset behind the last one that a lookup finds; none if there is nothing to be found."""
        known = self._partitions.get(_key(partition))
        if known is None:
            return None
        ends = [self._index_of(known, term).reach() for term in self.terms(partition)]
        return max((end + 1 for end in ends if end != NONE), default=None)

    def terms(self, partition: TopicPartition) -> list[int]:
        """The terms that there are segments of, and perhaps some that there were, ascending."""
        known = self._partitions.get(_key(partition))
        if known is None or known.is_deleted:
            return []
        keys, first, after = self._content.keys, term_key(known.number, 0), term_key(known.number + 1, 0)
        found = set(known.terms)
        at = bisect_left(keys, first)
        while at < len(keys) and keys[at] < after:
            found.add(keys[at] - first)
            at = bisect_right(keys, keys[at])
        return sorted(found)

    def readable(self, partition: TopicPartition) -> list[SegmentMetadata]:
        """The segments to read everything from, up to the first hole: sorted, each from the end of the one before."""
        found: list[SegmentMetadata] = []
        at = self.lowest(partition)
        while at is not None and (segment := self.holding(partition, at)) is not None:
            found.append(segment)
            at = segment.end + 1
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
        known = self._partitions.get(_key(partition))
        index = None if known is None else self._index(known, term)
        return None if index is None or index.highest == NONE else index.highest

    def segments(self, partition: TopicPartition, term: int | None = None) -> Iterator[SegmentMetadata]:
        """The segments that there are, or those that have the term, sorted by their start, in whichever state.

        They are those of now, and made while you go through them: one that is removed meanwhile may be left out.
        """
        known = self._partitions.get(_key(partition))
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
        known = self._partitions.get(_key(partition))
        if known is None:
            return iter(())
        return self._each(known, [row for row in self._silent(known) if self._is_spare(known, row)])

    def size(self, partition: TopicPartition, term: int) -> int:
        """The bytes of all segments that have the term, in whichever state; of one with two terms all count in both."""
        known = self._partitions.get(_key(partition))
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
        known = self._partitions.get(_key(partition))
        return None if known is None else known.deletion

    def get(self, segment: SegmentId) -> SegmentMetadata | None:
        """The segment, in whichever state; none if there is none, or if its deletion has finished."""
        known = self._partitions.get(_key(segment.partition))
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

    def _has_rows(self, known: _Partition) -> bool:
        state = self._columns.state
        return any(state[row] != GONE for rows in (known.added, known.loaded) for row in rows)

    def _rows(self, known: _Partition) -> list[int]:
        state = self._columns.state
        return [row for rows in (known.loaded, known.added) for row in rows if state[row] != GONE]

    def _each(self, known: _Partition, rows: Iterable[int]) -> Iterator[SegmentMetadata]:
        columns, key = self._columns, known.key
        in_order = sorted(rows)
        in_order.sort(key=columns.start)
        return (columns.metadata(row, key) for row in in_order if columns.state[row] != GONE)

    def _silent(self, known: _Partition) -> set[int]:
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

    def _is_spare(self, known: _Partition, row: int) -> bool:
        columns = self._columns
        if columns.state[row] != _FINISHED:
            return True
        stretches = columns.stretches(row)
        if any(columns.answers[stretch] for stretch in stretches):
            return False
        return all(self._index_of(known, columns.term[stretch]).is_spare(stretch) for stretch in stretches)

    # --- tables ------------------------------------------------------------------------------------------------

    def to_tables(self) -> dict[str, pa.Table]:
        """All of it, as columns: what :meth:`from_tables` makes of them answers the same to everything."""
        content = self._content
        highest = dict(zip(content.highest_keys, content.highest, strict=True))
        for known in self._numbered:
            for term, index in known.terms.items():
                if index.highest != NONE:
                    highest[term_key(known.number, term)] = index.highest
        deleted = {known.number for known in self._numbered if known.is_deleted}
        return dump(
            content,
            [(known.key, known.deletion) for known in self._numbered],
            ((key, offset) for key, offset in highest.items() if key >> TERM_BITS not in deleted),
            self._removed,
        )

    @classmethod
    def from_tables(cls, tables: Mapping[str, pa.Table]) -> Self:
        """The cache that gave these tables.

        Raises:
            CorruptData: no cache gave them.
        """
        content = load(tables)
        made = cls()
        made._take(content)
        made._removed.update(content.removed)
        for segment in content.removed:
            if made.get(segment) is not None:
                raise CorruptData(
                    f"A snapshot has segment {segment} both there and removed: replay the events instead."
                )
        return made

    def _take(self, content: Content) -> None:
        self._content = content
        self._columns: Columns = content.columns
        self._numbered = [
            _Partition(key, number, content.rows(number), deletion)
            for number, (key, deletion) in enumerate(zip(content.partitions, content.deletions, strict=True))
        ]
        self._partitions = {_key(known.key): known for known in self._numbered}
        self._ids: dict[int, int] = {}
        self._left = max(_FEW, len(content.columns) // 2)

    def _count(self) -> None:
        """After so many changes all goes into columns: what lies beside them is objects, and removed rows are waste."""
        self._left -= 1
        if self._left <= 0:
            self._take(load(self.to_tables()))

    # --- finding -----------------------------------------------------------------------------------------------

    def _partition(self, key: TopicPartition) -> _Partition:
        known = self._partitions.get(_key(key))
        if known is None:
            known = self._partitions[_key(key)] = _Partition(key, len(self._numbered), range(0), None)
            self._numbered.append(known)
        return known

    def _row(self, known: _Partition, segment: UUID) -> int:
        """The row of a segment that is there."""
        number = segment.int
        row = self._ids.get(known.number << _ID_BITS | number, NONE)
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

    def _index(self, known: _Partition, term: int) -> TermIndex | None:
        """What is known of a term, if anything is."""
        index = known.terms.get(term)
        if index is None and not known.is_deleted and term >= 0:
            index = self._load_index(term_key(known.number, term))
            if index is not None:
                known.terms[term] = index
        return index

    def _index_of(self, known: _Partition, term: int) -> TermIndex:
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


def _key(partition: TopicPartition) -> int:
    """A partition as a number, which is looked up in half of the time."""
    return partition.topic_id.int << _PARTITION_BITS | partition.partition


def _between(keys: array[int], key: int) -> slice:
    return slice(bisect_left(keys, key), bisect_right(keys, key))


def _digest(custom: bytes | None) -> bytes | None:
    """Enough to know custom metadata again, however large it is."""
    return None if custom is None else blake2b(custom, digest_size=_DIGEST).digest()


def _other(custom: bytes | None) -> bytes:
    return b"other" if custom is None else custom + b"?"


_ANY: Final = SegmentMetadata(
    segment=SegmentId(TopicPartition("", UUID(int=0), 0), UUID(int=0)),
    start=0,
    end=0,
    broker=0,
    max_timestamp=0,
    event_timestamp=0,
    terms=((0, 0),),
    size=0,
)


def _is_step(state: SegmentState, wanted: SegmentState) -> bool:
    event = SegmentUpdate(segment=_ANY.segment, broker=1, event_timestamp=0, state=wanted)
    try:
        update_segment(replace(_ANY, state=state), event)
    except InvalidInput:
        return False
    return True


# Asking the lifecycle takes the whole segment as a value, which most events can do without: it is asked once for all.
_STEPS: Final = frozenset(
    (state.value, wanted) for state, wanted in product(SegmentState, SegmentState) if _is_step(state, wanted)
)
