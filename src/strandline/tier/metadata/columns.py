"""Column store of segments: arrays of numbers instead of an object per segment. Pure.

A row is a segment and keeps its number: rows are appended and never reused, so an iteration over rows stays valid while
rows are removed. A *stretch* is the part of a segment that one term wrote; the stretches of a row are adjacent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final
from uuid import UUID, SafeUUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState, SegmentUpdate, TopicPartition

GONE: Final = SegmentState.DELETE_FINISHED.value
"""State of removed rows."""
HIGH, LOW, START, END, MAX_TIMESTAMP, EVENT_TIMESTAMP, BROKER, SIZE = range(8)
"""Positions of a row's eight numbers. The first two are the halves of the id, as signed integers."""
WIDTH: Final = 8
_HALF: Final = (1 << 64) - 1
_SIGN: Final = 1 << 63
_STATES: Final = tuple(SegmentState)
_FLAGS: Final = (False, True)


class SegmentColumns:
    """The segments by row."""

    __slots__ = (
        "_custom_bounds",
        "_custom_data",
        "_custom_there",
        "answers",
        "changed_custom",
        "first",
        "fixed",
        "loaded_custom",
        "no_transaction_index",
        "partition",
        "row_of",
        "state",
        "term",
        "term_start",
    )

    def __init__(self) -> None:
        self.partition = array("i")
        """The number of its partition in the cache."""
        self.fixed = array("q")
        """Eight adjacent numbers per row: a lookup costs one cache miss instead of eight."""
        self.state = array("b")
        self.no_transaction_index = array("b")
        self.first = array("i", (0,))
        """The row's first stretch; the next row's first stretch ends it."""

        # Of stretches, and not of rows:
        self.term = array("i")
        self.term_start = array("q")
        """Start of the term according to the segment: possibly before the segment itself."""
        self.row_of = array("i")
        self.answers = array("b")
        """Whether lookups in its term find it: finished and not superseded."""

        self.load_custom(pa.nulls(0, pa.large_binary()))
        self.changed_custom: dict[int, bytes | None] = {}
        """Custom metadata of rows that were added or changed after loading."""

    def __len__(self) -> int:
        return len(self.state)

    def append(self, partition: int, event: SegmentMetadata) -> int:
        """Append a row; returns its number."""
        row = len(self.state)
        number = event.segment.id.int
        self.partition.append(partition)
        self.fixed.extend(
            (
                (number >> 64 ^ _SIGN) - _SIGN,
                (number & _HALF ^ _SIGN) - _SIGN,
                event.start,
                event.end,
                event.max_timestamp,
                event.event_timestamp,
                event.broker,
                event.size,
            )
        )
        self.state.append(event.state.value)
        self.no_transaction_index.append(event.no_transaction_index)
        for term, start in event.terms:
            self.term.append(term)
            self.term_start.append(start)
            self.row_of.append(row)
            self.answers.append(0)
        self.first.append(len(self.term))
        if event.custom_metadata is not None:
            self.changed_custom[row] = event.custom_metadata
        return row

    def update(self, row: int, event: SegmentUpdate) -> None:
        """Overwrite a row with the fields of an update."""
        self.fixed[row * WIDTH + EVENT_TIMESTAMP] = event.event_timestamp
        self.fixed[row * WIDTH + BROKER] = event.broker
        self.state[row] = event.state.value
        if event.custom_metadata is not None or row < len(self.loaded_custom):
            self.changed_custom[row] = event.custom_metadata
        else:
            self.changed_custom.pop(row, None)

    def forget(self, row: int) -> None:
        """Mark the row as removed."""
        self.state[row] = GONE
        self.changed_custom.pop(row, None)

    def stretches(self, row: int) -> range:
        """The stretches of a row, in the order of their terms."""
        return range(self.first[row], self.first[row + 1])

    def start_of(self, stretch: int) -> int:
        """The first offset that the segment has of this term."""
        return max(self.term_start[stretch], self.fixed[self.row_of[stretch] * WIDTH + START])

    def end_of(self, stretch: int) -> int:
        """The last offset that the segment has of this term; below the first if it has none."""
        row = self.row_of[stretch]
        end = self.fixed[row * WIDTH + END]
        if stretch + 1 < self.first[row + 1]:
            before_next = self.term_start[stretch + 1] - 1
            return min(before_next, end)
        return end

    def id_of(self, row: int) -> int:
        """The segment's id, as a number."""
        high, low = self.fixed[row * WIDTH : row * WIDTH + 2]
        return (high & _HALF) << 64 | low & _HALF

    def start(self, row: int) -> int:
        """The segment's first offset."""
        return self.fixed[row * WIDTH + START]

    def size(self, row: int) -> int:
        """The segment's bytes."""
        return self.fixed[row * WIDTH + SIZE]

    def custom(self, row: int) -> bytes | None:
        """The segment's custom metadata."""
        if row in self.changed_custom:
            return self.changed_custom[row]
        if row < len(self.loaded_custom) and self._custom_there[row]:
            return self._custom_data[self._custom_bounds[row] : self._custom_bounds[row + 1]].tobytes()
        return None

    def load_custom(self, loaded: pa.LargeBinaryArray) -> None:
        """Set the custom metadata of all current rows."""
        _, bounds, data = loaded.buffers()
        self.loaded_custom = loaded
        self._custom_there = array("b")
        self._custom_bounds = array("q")
        self._custom_data = memoryview(b"" if data is None else data)
        if loaded.null_count < len(loaded):
            self._custom_there.frombytes(memoryview(pc.is_valid(loaded).cast(pa.int8()).buffers()[1])[: len(loaded)])
            self._custom_bounds.frombytes(memoryview(bounds)[8 * loaded.offset : 8 * (loaded.offset + len(loaded) + 1)])
        else:
            self._custom_there.frombytes(bytes(len(loaded)))

    def metadata(self, row: int, partition: TopicPartition) -> SegmentMetadata:
        """The segment as a value."""
        first, beyond = self.first[row], self.first[row + 1]
        if beyond - first == 1:
            terms: tuple[tuple[int, int], ...] = ((self.term[first], self.term_start[first]),)
        else:
            terms = tuple(zip(self.term[first:beyond], self.term_start[first:beyond], strict=True))
        high, low, start, end, max_timestamp, event_timestamp, broker, size = self.fixed[
            row * WIDTH : row * WIDTH + WIDTH
        ]
        # Checked when it was applied or loaded. Checking again would be half the cost of a lookup.
        segment: SegmentId = _NEW(SegmentId)
        _SET_PARTITION(segment, partition)
        number: UUID = _NEW(UUID)
        _SET_INT(number, (high & _HALF) << 64 | low & _HALF)
        _SET_IS_SAFE(number, SafeUUID.unknown)
        _SET_ID(segment, number)
        made: SegmentMetadata = _NEW(SegmentMetadata)
        _SET_SEGMENT(made, segment)
        _SET_START(made, start)
        _SET_END(made, end)
        _SET_BROKER(made, broker)
        _SET_MAX_TIMESTAMP(made, max_timestamp)
        _SET_EVENT_TIMESTAMP(made, event_timestamp)
        _SET_TERMS(made, terms)
        _SET_SIZE(made, size)
        _SET_CUSTOM(made, self.custom(row))
        _SET_STATE(made, _STATES[self.state[row]])
        _SET_NO_INDEX(made, _FLAGS[self.no_transaction_index[row]])
        return made


_NEW: Final[Callable[[type[Any]], Any]] = object.__new__


def _setter(kind: type[Any], name: str) -> Callable[[Any, Any], None]:
    """Setter of one field of a frozen value under construction."""
    setter: Callable[[Any, Any], None] = getattr(kind, name).__set__
    return setter


_SET_INT = _setter(UUID, "int")
_SET_IS_SAFE = _setter(UUID, "is_safe")
_SET_PARTITION = _setter(SegmentId, "partition")
_SET_ID = _setter(SegmentId, "id")
(
    _SET_SEGMENT, _SET_START, _SET_END, _SET_BROKER, _SET_MAX_TIMESTAMP, _SET_EVENT_TIMESTAMP, _SET_TERMS, _SET_SIZE,
    _SET_CUSTOM, _SET_STATE, _SET_NO_INDEX,
) = (_setter(SegmentMetadata, field.name) for field in fields(SegmentMetadata))  # fmt: skip
