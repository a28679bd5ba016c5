"""Merging changes into rows: equal to the plainest possible truth, in whatever cuts the changes come."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.model.records import READ_SCHEMA, Op, record_batch, with_offsets
from strandline.tables.rows.kinds import RAW, in_offset_order, merge_history, merge_latest
from strandline.tables.rows.shape import TableShape

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Change = tuple[bytes, Op, bytes | None]

changes_of = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b", b"c"]),
        st.sampled_from([Op.PUT, Op.PUT, Op.DELETE, Op.PURGE]),
        st.sampled_from([b"1", b"2", None]),
    ),
    max_size=12,
)


def table_of(changes: list[Change], first: int = 0) -> pa.Table:
    if not changes:
        return READ_SCHEMA.empty_table()
    batch = record_batch(
        timestamps=[first + n for n in range(len(changes))],
        ops=[change[1] for change in changes],
        keys=[change[0] for change in changes],
        values=[change[2] if change[1] is Op.PUT else None for change in changes],
    )
    return pa.Table.from_batches(with_offsets([batch], first))


def time(offset: int) -> datetime:
    return EPOCH + timedelta(microseconds=offset)


def true_latest(changes: list[Change], *, soft: bool) -> dict[bytes, tuple[Any, ...]]:
    rows: dict[bytes, tuple[Any, ...]] = {}
    for offset, (key, op, value) in enumerate(changes):
        if op is Op.PUT:
            rows[key] = (value, offset, False)
        elif not soft:
            rows.pop(key, None)
        elif key in rows:
            kept = None if op is Op.PURGE else rows[key][0]
            rows[key] = (kept, offset, True)
    return rows


def true_history(changes: list[Change]) -> list[tuple[Any, ...]]:
    """Key, value, first offset, end offset (None: current)."""
    versions: list[list[Any]] = []
    current: dict[bytes, list[Any]] = {}
    for offset, (key, op, value) in enumerate(changes):
        if key in current:
            current.pop(key)[3] = offset
        if op is Op.PUT:
            current[key] = [key, value, offset, None]
            versions.append(current[key])
    return sorted(map(tuple, versions), key=lambda version: version[2])


def pieces(changes: list[Change], cuts: list[int]) -> list[tuple[int, list[Change]]]:
    edges = sorted({0, len(changes), *[cut % (len(changes) + 1) for cut in cuts]})
    return [(low, changes[low:high]) for low, high in pairwise(edges)]


CUTS = st.lists(st.integers(0, 12), max_size=4)


@pytest.mark.parametrize("soft", [False, True])
@given(changes=changes_of, cuts=CUTS)
def test_the_latest_rows_are_those_of_a_dictionary_in_any_cuts(soft, changes, cuts):
    shape = TableShape("latest", soft_deletes=soft)
    rows = shape.schema().empty_table()
    for first, piece in pieces(changes, cuts):
        rows = merge_latest(rows, table_of(piece, first), RAW, shape.schema())
    found = {row["key"]: (row["value"], row["offset"], row.get("deleted", False)) for row in rows.to_pylist()}
    assert len(found) == rows.num_rows, "a key has two rows"
    assert found == true_latest(changes, soft=soft)


@given(changes=changes_of, cuts=CUTS)
def test_a_history_has_each_version_with_its_begin_and_end_in_any_cuts(changes, cuts):
    shape = TableShape("history")
    current, closed = shape.schema().empty_table(), []
    for first, piece in pieces(changes, cuts):
        current, ended = merge_history(current, table_of(piece, first), RAW, shape.schema())
        closed.append(ended)
    rows = pa.concat_tables([current, *closed]).to_pylist()
    found = sorted(
        [(row["key"], row["value"], row["valid_from_offset"], row["valid_to_offset"]) for row in rows],
        key=lambda version: version[2],
    )
    assert found == true_history(changes)
    for row in rows:
        assert row["valid_from"] == time(row["valid_from_offset"])
        assert row["valid_to"] == (None if row["valid_to_offset"] is None else time(row["valid_to_offset"]))


@given(changes=changes_of)
def test_ended_versions_among_the_current_ones_are_passed_on_as_they_are(changes):
    """As OPTIMIZE leaves them, which joins files of both."""
    shape = TableShape("history")
    empty = shape.schema().empty_table()
    merged = merge_history(empty, table_of(changes), RAW, shape.schema())
    mixed = pa.concat_tables(merged)
    again = merge_history(mixed, READ_SCHEMA.empty_table(), RAW, shape.schema())
    assert again[0].equals(merged[0])
    assert again[1].sort_by("valid_from_offset").equals(merged[1].sort_by("valid_from_offset"))


def huge_changes(keys: list[bytes], offsets: list[int] | None = None) -> pa.Table:
    """Puts of 300 MiB each, all of one buffer: an array of them would hold more than its 2 GiB."""
    value = pa.array([bytes(300 << 20)], pa.binary())
    count = len(keys)
    offsets = list(range(count)) if offsets is None else offsets
    columns = {
        "offset": pa.array(offsets, pa.int64()),
        "timestamp": pa.array(offsets, pa.int64()).cast(READ_SCHEMA.field("timestamp").type),
        "op": pa.array([0] * count, pa.int8()),
        "key": pa.array(keys, pa.binary()),
        "value": pa.chunked_array([value] * count),
        "headers": pa.nulls(count, READ_SCHEMA.field("headers").type),
    }
    return pa.table({name: columns[name] for name in READ_SCHEMA.names}).cast(READ_SCHEMA)


def test_more_values_than_an_array_can_hold_are_merged():
    changes = huge_changes([b"a", b"b", b"a", b"c", b"d", b"e", b"f", b"g"])
    assert changes.column("value").nbytes > 1 << 31
    shape = TableShape("history")
    current, closed = merge_history(shape.schema().empty_table(), changes, RAW, shape.schema())
    assert (current.num_rows, closed.num_rows) == (7, 1)
    assert closed.column("valid_to_offset").to_pylist() == [2]
    current, closed = merge_history(current, table_of([(b"c", Op.DELETE, None)], 8), RAW, shape.schema())
    assert (current.num_rows, closed.column("valid_to_offset").to_pylist()) == (6, [8])


@pytest.mark.slow
def test_more_values_than_an_array_can_hold_are_put_in_order_and_split():
    changes = huge_changes([b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"], [3, 1, 0, 2, 7, 6, 5, 4])
    ordered = in_offset_order([changes], RAW)
    assert ordered.column("key").to_pylist() == [b"c", b"b", b"d", b"a", b"h", b"g", b"f", b"e"]
    assert ordered.column("value").nbytes == changes.column("value").nbytes
    soft = TableShape("latest", soft_deletes=True)
    rows = merge_latest(soft.schema().empty_table(), ordered, RAW, soft.schema())
    deleted = merge_latest(
        rows, table_of([(b"%c" % one, Op.DELETE, None) for one in b"abcdefgh"], 8), RAW, soft.schema()
    )
    assert deleted.column("deleted").to_pylist() == [True] * 8
    assert deleted.column("value").nbytes > 1 << 31
