"""Self-describing values: many schemas in one batch, in time and memory of their own fields."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.values.codecs import arrow
from strandline.values.schema.evolution import conform_columns

LEAVES: list[tuple[pa.DataType, Any]] = [
    (pa.int8(), 1), (pa.int64(), 2**40), (pa.uint16(), 7), (pa.float32(), 0.5), (pa.float64(), 0.1), (pa.string(), "x"),
    (pa.large_string(), "y"), (pa.bool_(), True), (pa.timestamp("ms"), 0), (pa.date32(), 0),
]  # fmt: skip


def encoded(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    return bytes(sink.getvalue())


def one(**columns: pa.Array) -> bytes:
    return encoded(pa.record_batch(columns))


def any_type(chance: random.Random, depth: int = 0) -> tuple[pa.DataType, Any]:
    """A type, and a value of it."""
    kind, value = chance.choice(LEAVES)
    if depth == 2 or chance.random() < 0.4:
        return kind, None if chance.random() < 0.2 else value
    parts = {name: any_type(chance, depth + 1) for name in chance.sample("abc", 2)}
    inner, item = parts[next(iter(parts))]
    made: list[tuple[pa.DataType, Any]] = [
        (pa.struct([(name, part[0]) for name, part in parts.items()]), {name: part[1] for name, part in parts.items()}),
        (pa.list_(inner), [item, None][: chance.randrange(3)]),
        (pa.map_(pa.string(), inner), [("k", item), ("l", None)][: chance.randrange(3)]),
    ]  # fmt: skip
    kind, value = chance.choice(made)
    return kind, None if chance.random() < 0.2 else value


@pytest.mark.parametrize("seed", range(5))
def test_columns_of_many_schemas_are_those_of_each_value_cast_by_itself(seed: int) -> None:
    chance = random.Random(seed)
    rows = []
    for _ in range(60):
        fields = {name: any_type(chance) for name in chance.sample("tuvw", 2)}
        arrays = {name: pa.array([value], kind) for name, (kind, value) in fields.items()}
        rows.append(pa.record_batch(arrays))
    values = [encoded(row) for row in rows]
    decoded = sl.values.Arrow().decode(pa.array([None, *values], pa.binary()))
    decoded.columns.validate(full=True)
    bad = set(decoded.bad.column("row").to_pylist())
    assert 0 < len(bad) < len(rows)
    for at, row in enumerate(rows, start=1):
        if at not in bad:
            expected = conform_columns(row, decoded.columns.schema)
            assert decoded.columns.slice(at, 1).to_pylist() == expected.to_pylist()


@pytest.mark.timeout(60)  # minutes, if each value is cast to the columns of all
@pytest.mark.parametrize("nested", [False, True], ids=["columns", "inside of a struct"])
def test_values_that_each_bring_a_new_field_take_time_and_memory_of_their_bytes(nested: bool) -> None:
    def value(number: int) -> bytes:
        name = f"c{number}"
        return one(s=pa.array([{name: 1}])) if nested else one(**{name: pa.array([1])})

    values = pa.array([value(number) for number in range(2000)], pa.binary())
    decoded = sl.values.Arrow().decode(values)
    assert decoded.columns.nbytes <= arrow.MAX_COLUMNS * len(values) * 9 + (1 << 20)
    fields = decoded.columns.schema.field("s").type.num_fields + 1 if nested else decoded.columns.num_columns
    assert fields == arrow.MAX_COLUMNS
    assert decoded.bad.num_rows == 2000 - arrow.MAX_COLUMNS + nested
    assert "max_columns" in decoded.bad.column("reason")[0].as_py()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *[(name, "begins with an underscore") for name in ("_offset", "_key", "_op", "_timestamp", "_error", "_x")],
        ("a\0b", "has a NUL"),
        ("n" * 64, "more than 63 bytes"),
        ("é" * 32, "more than 63 bytes"),
        ("", "has no name"),
    ],
)
def test_a_field_that_no_table_can_have_is_a_bad_row(name: str, why: str) -> None:
    values = [one(a=pa.array([1])), one(**{name: pa.array([1])}), one(a=pa.array([2]))]
    decoded = sl.values.Arrow().decode(pa.array(values, pa.binary()))
    assert decoded.columns.to_pylist() == [{"a": 1}, {"a": None}, {"a": 2}]
    [bad] = decoded.bad.to_pylist()
    assert bad["row"] == 1
    assert why in bad["reason"]


def test_names_and_columns_have_limits_that_can_be_set() -> None:
    values = [one(a=pa.array([1])), one(bb=pa.array([1])), one(long=pa.array([1])), one(c=pa.array([1]))]
    codec = sl.values.Arrow(max_columns=2, max_name=2)
    assert codec.decode(pa.array(values, pa.binary())).bad.column("row").to_pylist() == [2, 3]
    assert codec != sl.values.Arrow(max_columns=2)


def test_a_date_that_python_does_not_have_is_a_bad_row_wherever_it_is() -> None:
    far = pa.array([[2**31 - 1]], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
    near = pa.array([[0]], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
    decoded = sl.values.Arrow().decode(pa.array([one(a=far), one(a=near)], pa.binary()))
    assert [bad["reason"] for bad in decoded.bad.to_pylist()] == ["The field 'a[]' is outside of the years 1 to 9999."]


def test_a_value_with_wide_empty_bytes_does_not_make_all_other_rows_as_wide() -> None:
    codec = sl.values.Arrow()
    sink = pa.BufferOutputStream()
    wide = pa.record_batch({"wide": pa.array([b"x" * 100_000], pa.binary(100_000))})
    with pa.ipc.new_stream(sink, wide.schema) as writer:
        writer.write_batch(wide)
    decoded = codec.decode(pa.array([bytes(sink.getvalue()), *[codec.encode_one({"id": 1})] * 1000], pa.binary()))
    assert decoded.columns.schema.names == ["id"]
    assert decoded.columns.nbytes < 100_000
    assert "3,125 new fields" in decoded.bad.column("reason")[0].as_py()
    hashes = pa.record_batch({"hash": pa.array([b"x" * 64], pa.binary(64))})
    assert sl.values.Arrow(max_columns=2).decode(sl.values.Arrow().encode(hashes)).bad.num_rows == 0
    assert sl.values.Arrow(max_columns=1).decode(sl.values.Arrow().encode(hashes)).bad.num_rows == 1
