"""Loads the tables of a segment cache, column by column, with the checks that events get.

A state that no sequence of events leads to is :class:`CorruptData`; the manager then replays the events.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CorruptData, InvalidInput
from strandline.model.segments import PartitionDelete, PartitionDeleteState, SegmentId, SegmentState, TopicPartition
from strandline.tier.metadata.cache_tables import (
    HIGHEST,
    NULLABLE,
    SCHEMAS,
    SEGMENTS,
    TERM_BITS,
    CacheContent,
    ascending_pairs,
    big_endian,
    combined,
    holds_for_all,
    neighbours,
    sort_key,
)
from strandline.tier.metadata.columns import GONE, LOW, WIDTH
from strandline.tier.metadata.lifecycle import Removed

_BLOCK: Final = 1 << 12
_FINISHED: Final = SegmentState.COPY_FINISHED.value


def load(tables: Mapping[str, pa.Table]) -> CacheContent:
    """The content of the tables; ``CorruptData`` if no sequence of events leads to it."""
    content = CacheContent()
    try:
        found = {name: _table(tables, name) for name in SCHEMAS}
        content.partitions, content.deletions = _partitions(found["partitions"])
        content.removed = _removed(found["removed"], content.partitions)
        there = pa.array(
            [one is None or one.state is not PartitionDeleteState.FINISHED for one in content.deletions], pa.bool_()
        )
        highest = _highest(found["highest"], there)
        content.highest_keys, content.highest = (_numbers("q", numbers) for numbers in highest)
        _load_segments(content, {name: combined(found["segments"][name]) for name in SEGMENTS.names}, there, highest)
    except (InvalidInput, ValueError, TypeError, LookupError, OverflowError, pa.ArrowException) as error:
        raise CorruptData(f"{_BROKEN}: {str(error)[:200]} {_ADVICE}") from error
    return content


_BROKEN: Final = "A snapshot of segments is impossible"
_ADVICE: Final = "Replay the events instead."


def _refuse(what: str) -> CorruptData:
    return CorruptData(f"{_BROKEN}: {what}. {_ADVICE}")


def _require(condition: object, what: str) -> None:
    """Refuse the snapshot unless the condition, or every element of a boolean array, is true."""
    if not (holds_for_all(condition) if isinstance(condition, pa.Array) else condition):
        raise _refuse(what)


def _table(tables: Mapping[str, pa.Table], name: str) -> pa.Table:
    schema = SCHEMAS[name]
    if name not in tables:
        raise _refuse(f"there is no table of {name}")
    table = tables[name]
    if sorted(table.schema.names) != sorted(schema.names):
        raise _refuse(f"the table of {name} has the columns {', '.join(table.schema.names)[:200]}")
    table.validate(full=True)  # before casting, which reads it
    table = table.select(schema.names).cast(schema)
    for column in schema.names:
        _require(column in NULLABLE or table[column].null_count == 0, f"{column} in the table of {name} has gaps")
    return table


def _partitions(table: pa.Table) -> tuple[list[TopicPartition], list[PartitionDelete | None]]:
    partitions: list[TopicPartition] = []
    deletions: list[PartitionDelete | None] = []
    for row in table.to_pylist():
        partition = TopicPartition(row["name"], UUID(bytes=row["topic_id"]), row["partition"])
        partitions.append(partition)
        recorded = row["deletion_broker"], row["deletion_timestamp"]
        if row["deletion_state"] is None:
            _require(recorded == (None, None), f"{partition} has half of a deletion")
            deletions.append(None)
            continue
        _require(None not in recorded, f"{partition} has half of a deletion")
        state = PartitionDeleteState(row["deletion_state"])
        deletions.append(
            PartitionDelete(partition=partition, broker=recorded[0], event_timestamp=recorded[1], state=state)
        )
    ranks = [sort_key(partition) for partition in partitions]
    _require(all(before < after for before, after in pairwise(ranks)), "partitions are out of order")
    return partitions, deletions


def _removed(table: pa.Table, partitions: Sequence[TopicPartition]) -> dict[SegmentId, Removed]:
    removed: dict[SegmentId, Removed] = {}
    for row in table.to_pylist():
        _require(0 <= row["partition"] < len(partitions), "a removed segment has no partition")
        segment = SegmentId(partitions[row["partition"]], UUID(bytes=row["id"]))
        _require(segment not in removed, f"segment {segment} was removed twice")
        removed[segment] = Removed(row["broker"], row["event_timestamp"], row["custom_digest"])
    return removed


def _highest(table: pa.Table, there: pa.Array) -> tuple[pa.Array, pa.Array]:
    partition, term, offset = (combined(table[name]) for name in HIGHEST.names)
    _check_partition(partition, there)
    _require(pc.greater_equal(term, 0), "a term with a highest offset is below 0")
    _require(pc.greater_equal(offset, 0), "a highest offset is below 0")
    keys = _keys(partition, term)
    _require(_ascends(keys, strictly=True), "terms with a highest offset are out of order")
    return keys, offset


def _check_partition(partition: pa.Array, there: pa.Array) -> None:
    inside = pc.and_(pc.greater_equal(partition, 0), pc.less(partition, len(there)))
    _require(inside, "a partition is not in the table of partitions")
    _require(there.take(partition), "something is left of a partition whose deletion has finished")


def _load_segments(
    content: CacheContent, column: dict[str, pa.Array], there: pa.Array, highest: tuple[pa.Array, pa.Array]
) -> None:
    partition, start, end, state = (column[name] for name in ("partition", "start", "end", "state"))
    _check_partition(partition, there)
    _require(ascending_pairs(partition, start), "segments are out of order")
    _require(pc.and_(pc.greater_equal(start, 0), pc.less_equal(start, end)), "a segment ends before it starts")
    _require(pc.greater_equal(column["size"], 0), "a segment has less than no bytes")
    _require(pc.and_(pc.greater_equal(state, 0), pc.less(state, GONE)), "a segment is in no state")
    columns = content.columns
    columns.partition = _numbers("i", partition)
    columns.state = _numbers("b", state)
    columns.no_transaction_index = _numbers("b", column["no_transaction_index"].cast(pa.int8()))
    columns.load_custom(column["custom_metadata"])
    ids = big_endian(_numbers("q", column["id"], 16))
    recorded = ("start", "end", "max_timestamp", "event_timestamp", "broker", "size")
    columns.fixed = _side_by_side(
        [ids[0::2], ids[1::2], *(_numbers("q", column[name].cast(pa.int64())) for name in recorded)]
    )
    _load_ids(content, column["by_id"])
    _load_stretches(content, column, highest)


def _side_by_side(numbers: Sequence[array[int]]) -> array[int]:
    """Interleave the columns: the first number of each, then the second of each, and so on."""
    laid, width, count = array("q"), len(numbers), len(numbers[0])
    for at in range(0, count, _BLOCK):
        # In blocks that fit the processor's cache: twice as fast.
        part = array("q", bytes(8 * width * min(_BLOCK, count - at)))
        for place, column in enumerate(numbers):
            part[place::width] = column[at : at + _BLOCK]
        laid.extend(part)
    return laid


def _load_ids(content: CacheContent, rows: pa.Array) -> None:
    columns, count = content.columns, len(rows)
    _require(pc.and_(pc.greater_equal(rows, 0), pc.less(rows, count)), "the order of ids has rows that are not there")
    low = pa.Array.from_buffers(pa.uint64(), count, [None, pa.py_buffer(columns.fixed[LOW::WIDTH].tobytes())])
    ids = low.take(rows)
    # If all ids differ, so do the rows: the order is complete.
    if not _ascends(ids, strictly=True):
        _require(_ascends(ids), "ids are out of order")
        _require(pc.count_distinct(rows).as_py() == count, "the order of ids leaves rows out")
        same = ids.slice(1).filter(pc.equal(*neighbours(ids)))
        alike = rows.filter(pc.is_in(ids, same)).to_pylist()
        known = {(columns.partition[row], columns.id_of(row)) for row in alike}
        _require(len(known) == len(alike), "a segment is there twice")
    content.ids, content.id_rows = _numbers("Q", ids), _numbers("i", rows)


def _load_stretches(content: CacheContent, column: dict[str, pa.Array], highest: tuple[pa.Array, pa.Array]) -> None:
    columns = content.columns
    lists = [column[name] for name in ("terms", "term_starts", "term_answers")]
    counts = pc.list_value_length(lists[0])
    for other in lists[1:]:
        _require(pc.equal(counts, pc.list_value_length(other)), "a segment has more terms than starts of terms")
    _require(pc.greater(counts, 0), "a segment has no terms")
    term, recorded, answers = (combined(other.flatten()) for other in lists)
    _require(term.null_count + recorded.null_count + answers.null_count == 0, "a segment has a term that is null")
    row = pc.list_parent_indices(lists[0])
    same_row = pc.equal(*neighbours(row))
    _check_terms(term, recorded, same_row)
    columns.first = array("i", (0,))
    columns.first.extend(_numbers("i", pc.cumulative_sum(counts).cast(pa.int32())))
    columns.term, columns.term_start = _numbers("i", term), _numbers("q", recorded)
    columns.row_of = _numbers("i", row.cast(pa.int32()))
    columns.answers = _numbers("b", answers.cast(pa.int8()))

    start = pc.max_element_wise(recorded, column["start"].take(row))
    end = column["end"].take(row)
    followed = pa.concat_arrays([same_row, pa.array([False] * min(len(row), 1), pa.bool_())])
    following = pa.concat_arrays([recorded.slice(1), recorded.slice(max(len(recorded) - 1, 0))])
    end = pc.if_else(followed, pc.min_element_wise(end, pc.subtract(following, 1)), end)
    finished = pc.equal(column["state"].take(row), _FINISHED)
    holds = pc.and_(finished, pc.less_equal(start, end))
    _require(pc.or_(pc.invert(answers), holds), "a segment answers for what it does not hold")
    keys = _keys(column["partition"].take(row), term)
    _check_highest(keys.filter(holds), end.filter(holds), highest)

    order = None if _ascends(keys) else pc.sort_indices(keys)
    answering = _sorted_indices(answers, keys, start, order)
    answering_keys, answering_starts = keys.take(answering), start.take(answering)
    same_key = pc.equal(*neighbours(answering_keys))
    in_order = pc.less(*neighbours(answering_starts))
    _require(pc.or_(pc.invert(same_key), in_order), "two segments answer from the same offset of a term")
    before, after = end.take(answering), answering_starts
    reaches = pc.and_(same_key, pc.greater_equal(before.slice(0, max(len(before) - 1, 0)), after.slice(1)))
    reaching = answering.slice(0, max(len(answering) - 1, 0)).filter(reaches)
    hidden = pc.indices_nonzero(pc.and_not(holds, answers))
    overlapping = pa.concat_arrays([reaching.cast(pa.uint64()), hidden])
    overlapping = overlapping.take(pc.sort_indices(keys.take(overlapping)))
    content.keys = _numbers("q", keys if order is None else keys.take(order))
    content.stretches = _numbers("i", (pa.arange(0, len(keys)) if order is None else order).cast(pa.int32()))
    content.answering_keys, content.answering_starts = _numbers("q", answering_keys), _numbers("q", answering_starts)
    content.answering = _numbers("i", answering.cast(pa.int32()))
    content.overlapping_keys = _numbers("q", keys.take(overlapping))
    content.overlapping = _numbers("i", overlapping.cast(pa.int32()))


def _check_terms(term: pa.Array, recorded: pa.Array, same_row: pa.Array) -> None:
    _require(pc.and_(pc.greater_equal(term, 0), pc.greater_equal(recorded, 0)), "a term is, or starts, below 0")
    ascends = pc.and_(pc.less(*neighbours(term)), pc.less_equal(*neighbours(recorded)))
    _require(pc.or_(pc.invert(same_row), ascends), "the terms of a segment are out of order")


def _check_highest(keys: pa.Array, end: pa.Array, highest: tuple[pa.Array, pa.Array]) -> None:
    known_keys, offsets = highest
    at = pc.index_in(keys, known_keys)
    _require(at.null_count == 0, "a term with a finished copy has no highest offset")
    _require(pc.less_equal(end, offsets.take(at)), "a highest offset is below that of a finished copy")


def _sorted_indices(which: pa.Array, keys: pa.Array, start: pa.Array, order: pa.Array | None) -> pa.Array:
    """The answering stretches, by key and start."""
    chosen = pc.indices_nonzero(which) if order is None else order.filter(which.take(order))
    if ascending_pairs(keys.take(chosen), start.take(chosen)):
        return chosen
    chosen = chosen.take(pc.sort_indices(start.take(chosen)))
    return chosen.take(pc.sort_indices(keys.take(chosen)))


def _keys(partition: pa.Array, term: pa.Array) -> pa.Array:
    return pc.bit_wise_or(pc.shift_left(partition.cast(pa.int64()), TERM_BITS), term.cast(pa.int64()))


def _ascends(values: pa.Array, *, strictly: bool = False) -> bool:
    return holds_for_all((pc.less if strictly else pc.less_equal)(*neighbours(values)))


def _numbers(code: str, values: pa.Array, width: int | None = None) -> array[int]:
    numbers = array(code)
    size = numbers.itemsize if width is None else width
    data = values.buffers()[1]
    if data is not None:
        numbers.frombytes(memoryview(data)[values.offset * size : (values.offset + len(values)) * size])
    return numbers
