"""What the events of one metadata partition tell of segments: which one holds an offset, and which there are.

Pure: no I/O, no threads, no clock; whoever shares a cache locks it. The answers are those of Apache Kafka's cache of
remote log metadata, with one promise more: an offset that a finished copy holds, in the term asked for,
is always found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import product
from typing import Final, Self, final
from uuid import UUID

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
from strandline.tier.metadata.cache_reading import ID_BITS, CacheReading, Partition, key_of
from strandline.tier.metadata.cache_tables import TERM_BITS, Content, Removed, dump, term_key
from strandline.tier.metadata.lifecycle import add_segment, advance_deletion, update_segment
from strandline.tier.metadata.terms import NONE

_REMEMBERED: Final = 4096
"""How many of the segments removed last are remembered, so that a retry of their last event is known as one."""
_FEW: Final = 1 << 16
"""Up to this many changes are kept beside the columns, whatever the columns have."""
_DIGEST: Final = 16
_FINISHED: Final = SegmentState.COPY_FINISHED.value


@final
class SegmentCache(CacheReading):
    """Everything that is known of the segments of one *metadata partition*, which has those of many partitions."""

    __slots__ = ("_left", "_removed")

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
                known = self._partitions.get(key_of(event.partition))
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
        known = self._partitions.get(key_of(event.segment.partition))
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
        self._ids[known.number << ID_BITS | event.segment.id.int] = row
        for stretch in columns.stretches(row):
            index = self._index_of(known, columns.term[stretch])
            index.stretches.append(stretch)
            if index.size is not None:
                index.size += event.size
        self._count()
        return True

    def _updatable(self, event: SegmentUpdate) -> tuple[Partition, int] | None:
        """The segment that the update is the next step of; None if that step was the last one."""
        known = self._partitions.get(key_of(event.segment.partition))
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

    def _forget(self, known: Partition, row: int) -> None:
        columns = self._columns
        columns.forget(row)
        self._ids.pop(known.number << ID_BITS | columns.id_of(row), None)
        for stretch in columns.stretches(row):
            index = self._index_of(known, columns.term[stretch])
            if index.size is not None:
                index.size -= columns.size(row)

    def _delete(self, event: PartitionDelete) -> bool:
        known = self._partitions.get(key_of(event.partition))
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
                self._ids.pop(known.number << ID_BITS | columns.id_of(row), None)
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
        self._columns = content.columns
        self._numbered = [
            Partition(key, number, content.rows(number), deletion)
            for number, (key, deletion) in enumerate(zip(content.partitions, content.deletions, strict=True))
        ]
        self._partitions = {key_of(known.key): known for known in self._numbered}
        self._ids = {}
        self._left = max(_FEW, len(content.columns) // 2)

    def _count(self) -> None:
        """After so many changes all goes into columns: what lies beside them is objects, and removed rows are waste."""
        self._left -= 1
        if self._left <= 0:
            self._take(load(self.to_tables()))


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
