"""Dumps a segment cache to Arrow tables, column by column, without a Python object per segment.

:mod:`strandline.tier.metadata.cache_load` loads them.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.model.segments import PartitionDelete, SegmentId, TopicPartition
from strandline.tier.metadata.columns import (
    BROKER,
    END,
    EVENT_TIMESTAMP,
    GONE,
    HIGH,
    LOW,
    MAX_TIMESTAMP,
    SIZE,
    START,
    WIDTH,
    SegmentColumns,
)
from strandline.tier.metadata.lifecycle import Removed

TERM_BITS: Final = 31

_ID: Final = pa.binary(16)
PARTITIONS: Final = pa.schema(
    [
        ("topic_id", _ID),
        ("partition", pa.int32()),
        ("name", pa.string()),
        ("deletion_state", pa.int8()),
        ("deletion_broker", pa.int32()),
        ("deletion_timestamp", pa.int64()),
    ]
)
"""The partitions, sorted; other tables refer to them by row. The deletion columns are null without a deletion."""
SEGMENTS: Final = pa.schema(
    [
        ("by_id", pa.int32()),
        ("partition", pa.int32()),
        ("id", _ID),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("broker", pa.int32()),
        ("max_timestamp", pa.int64()),
        ("event_timestamp", pa.int64()),
        ("size", pa.int32()),
        ("state", pa.int8()),
        ("no_transaction_index", pa.bool_()),
        ("custom_metadata", pa.large_binary()),
        ("terms", pa.list_(pa.int32())),
        ("term_starts", pa.list_(pa.int64())),
        ("term_answers", pa.list_(pa.bool_())),
    ]
)
"""The segments, sorted by partition and start.

``term_answers``: whether lookups in that term find it, finished and not superseded. ``by_id`` lists the rows of the
table in the order of the lower halves of their ids: sorting would be most of the cost of loading.
"""
HIGHEST: Final = pa.schema([("partition", pa.int32()), ("term", pa.int32()), ("offset", pa.int64())])
"""The highest offset of each term that ever had a finished copy, sorted."""
REMOVED: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("id", _ID),
        ("broker", pa.int32()),
        ("event_timestamp", pa.int64()),
        ("custom_digest", pa.binary()),
    ]
)
"""The segments removed last, oldest first."""
SCHEMAS: Final = {"partitions": PARTITIONS, "segments": SEGMENTS, "highest": HIGHEST, "removed": REMOVED}
NULLABLE: Final = {"deletion_state", "deletion_broker", "deletion_timestamp", "custom_metadata", "custom_digest"}


@dataclass(slots=True)
class CacheContent:
    """The loaded tables as arrays, without an object per segment. Keys are :func:`term_key` values."""

    partitions: Sequence[TopicPartition] = ()
    deletions: Sequence[PartitionDelete | None] = ()
    columns: SegmentColumns = field(default_factory=SegmentColumns)
    removed: Mapping[SegmentId, Removed] = field(default_factory=dict)
    keys: array[int] = field(default_factory=lambda: array("q"))
    """Of all stretches, sorted."""
    stretches: array[int] = field(default_factory=lambda: array("i"))
    answering_keys: array[int] = field(default_factory=lambda: array("q"))
    """Of the stretches that lookups find, sorted by key and start."""
    answering: array[int] = field(default_factory=lambda: array("i"))
    answering_starts: array[int] = field(default_factory=lambda: array("q"))
    overlapping_keys: array[int] = field(default_factory=lambda: array("q"))
    """Of the stretches that are superseded or reach into the next, sorted."""
    overlapping: array[int] = field(default_factory=lambda: array("i"))
    highest_keys: array[int] = field(default_factory=lambda: array("q"))
    highest: array[int] = field(default_factory=lambda: array("q"))
    ids: array[int] = field(default_factory=lambda: array("Q"))
    """The lower halves of all ids, sorted."""
    id_rows: array[int] = field(default_factory=lambda: array("i"))

    def rows(self, partition: int) -> range:
        """The rows of a partition, sorted by start."""
        column = self.columns.partition
        loaded = len(self.ids)
        return range(bisect_left(column, partition, 0, loaded), bisect_right(column, partition, 0, loaded))


def term_key(partition: int, term: int) -> int:
    """One number for a term of a partition, in the order of both."""
    return partition << TERM_BITS | term


def dump(
    content: CacheContent,
    partitions: Sequence[tuple[TopicPartition, PartitionDelete | None]],
    highest: Iterable[tuple[int, int]],
    removed: Mapping[SegmentId, Removed],
) -> dict[str, pa.Table]:
    """The tables of the loaded content and of the changes since.

    Partitions are in the order of their numbers; ``highest`` has keys of terms, with the offset.
    """
    order = sorted(range(len(partitions)), key=lambda at: sort_key(partitions[at][0]))
    place = array("i", bytes(4 * len(order)))
    for at, number in enumerate(order):
        place[number] = at
    places = {partitions[number][0]: place[number] for number in order}
    tops = sorted((place[key >> TERM_BITS], key & (1 << TERM_BITS) - 1, offset) for key, offset in highest)
    return {
        "partitions": _partition_table([partitions[number] for number in order]),
        "segments": _segment_table(content, _arrow(pa.int32(), place)),
        "highest": pa.table([[top[at] for top in tops] for at in range(3)], schema=HIGHEST),
        "removed": pa.table(
            [
                [places[segment.partition] for segment in removed],
                [segment.id.bytes for segment in removed],
                [last.broker for last in removed.values()],
                [last.event_timestamp for last in removed.values()],
                [last.custom_digest for last in removed.values()],
            ],
            schema=REMOVED,
        ),
    }


def sort_key(partition: TopicPartition) -> tuple[int, int]:
    """The order of partitions: two with equal keys are equal."""
    return partition.topic_id.int, partition.partition


def _partition_table(partitions: Sequence[tuple[TopicPartition, PartitionDelete | None]]) -> pa.Table:
    deletions = [deletion for _, deletion in partitions]
    return pa.table(
        [
            [partition.topic_id.bytes for partition, _ in partitions],
            [partition.partition for partition, _ in partitions],
            [partition.name for partition, _ in partitions],
            [None if deletion is None else deletion.state.value for deletion in deletions],
            [None if deletion is None else deletion.broker for deletion in deletions],
            [None if deletion is None else deletion.event_timestamp for deletion in deletions],
        ],
        schema=PARTITIONS,
    )


def _segment_table(content: CacheContent, place: pa.Array) -> pa.Table:
    columns = content.columns
    first = _arrow(pa.int32(), columns.first)
    ids = array("q", bytes(16 * len(columns)))
    ids[0::2], ids[1::2] = columns.fixed[HIGH::WIDTH], columns.fixed[LOW::WIDTH]
    table = pa.table(
        [
            _by_id(content),
            place.take(_arrow(pa.int32(), columns.partition)),
            _arrow(_ID, big_endian(ids), len(columns)),
            _fixed(columns, START),
            _fixed(columns, END),
            _fixed(columns, BROKER).cast(pa.int32()),
            _fixed(columns, MAX_TIMESTAMP),
            _fixed(columns, EVENT_TIMESTAMP),
            _fixed(columns, SIZE).cast(pa.int32()),
            _arrow(pa.int8(), columns.state),
            _arrow(pa.int8(), columns.no_transaction_index).cast(pa.bool_()),
            _custom(columns),
            pa.ListArray.from_arrays(first, _arrow(pa.int32(), columns.term)),
            pa.ListArray.from_arrays(first, _arrow(pa.int64(), columns.term_start)),
            pa.ListArray.from_arrays(first, _arrow(pa.int8(), columns.answers).cast(pa.bool_())),
        ],
        schema=SEGMENTS,
    )
    there = pc.not_equal(combined(table["state"]), GONE)
    partition, start = combined(table["partition"]), combined(table["start"])
    if holds_for_all(there) and ascending_pairs(partition, start):
        return table
    # Twice by one column is faster than once by two, and both sorts are stable: the older one stays first.
    rows = pc.indices_nonzero(there).cast(pa.int32())
    rows = rows.take(pc.sort_indices(start.take(rows)))
    rows = rows.take(pc.sort_indices(partition.take(rows)))
    by_id = combined(table["by_id"])
    by_id = pc.inverse_permutation(rows, max_index=len(columns) - 1).take(by_id.filter(there.take(by_id)))
    return table.take(rows).set_column(0, SEGMENTS.field("by_id"), by_id)


def _fixed(columns: SegmentColumns, which: int) -> pa.Array:
    return _arrow(pa.int64(), columns.fixed[which::WIDTH])


def _by_id(content: CacheContent) -> pa.Array:
    """The rows in the order of the lower halves of their ids: quick, since loaded rows are sorted."""
    columns, loaded = content.columns, len(content.id_rows)
    added = pa.arange(loaded, len(columns)).cast(pa.int32())
    rows = pa.concat_arrays([_arrow(pa.int32(), content.id_rows), added])
    return rows.take(pc.sort_indices(_arrow(pa.uint64(), columns.fixed[LOW::WIDTH]).take(rows)))


def _custom(columns: SegmentColumns) -> pa.Array:
    loaded, changed = columns.loaded_custom, columns.changed_custom
    added = len(columns) - len(loaded)
    if not changed:
        return pa.concat_arrays([loaded, pa.nulls(added, pa.large_binary())])
    where = array("q", range(len(loaded)))
    where.extend(repeat(-1, added))
    for at, row in enumerate(changed):
        where[row] = len(loaded) + at
    values = pa.concat_arrays([loaded, pa.array(changed.values(), pa.large_binary())])
    places = _arrow(pa.int64(), where)
    return values.take(pc.if_else(pc.less(places, 0), None, places))


def neighbours(values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Each value but the last, and its successor."""
    return values.slice(0, max(len(values) - 1, 0)), values.slice(1)


def ascending_pairs(first: pa.Array, second: pa.Array) -> bool:
    """Whether the pairs are sorted by first, then second."""
    same = pc.and_(pc.equal(*neighbours(first)), pc.less_equal(*neighbours(second)))
    return holds_for_all(pc.or_(pc.less(*neighbours(first)), same))


def holds_for_all(truths: pa.Array) -> bool:
    """Whether all are true; none may be null."""
    return pc.all(truths, min_count=0).as_py() is True


def combined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def big_endian(numbers: array[int]) -> array[int]:
    """Convert between the machine's byte order and big-endian, in place."""
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _arrow(kind: pa.DataType, numbers: array[int], length: int | None = None) -> pa.Array:
    # Copied: while Arrow held the array's own memory, the array could not grow.
    count = len(numbers) if length is None else length
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(numbers.tobytes())])
