"""A proposed schema decodes what it was made of, and says what it could not decide."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strandline as sl
from strandline.errors import InvalidInput
from strandline.values.proposal import SchemaProposal, propose
from strandline.values.schema.json_schema_text import json_schema_of


def proposed(*values: Any) -> SchemaProposal:
    return propose([one if isinstance(one, bytes) else json.dumps(one).encode() for one in values], "a test")


def kind(*values: Any) -> pa.DataType:
    """The type that is proposed for a field with these values."""
    return proposed(*({"v": value} for value in values)).schema.field("v").type


def left_out(*values: Any) -> str:
    """Why a field with these values is left out."""
    found = proposed(*({"v": value, "ok": 1} for value in values))
    assert found.schema.names == ["ok"]
    assert any("'v" in note for note in found.notes)
    return str(found.document["x-left-out"]["v"]["description"])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1, 2], pa.int64()),
        ([1, 2**62], pa.int64()),
        ([0, 2**63], pa.uint64()),
        ([-1, 2**63], pa.float64()),
        ([10**25], pa.float64()),
        ([1, 1.5], pa.float64()),
        ([True, None], pa.bool_()),
        (["9.50", "10"], pa.string()),
        (["007"], pa.string()),
        (["2026-01-31"], pa.date32()),
        (["2026-01-31", "soon"], pa.string()),
        (["2026-02-31"], pa.string()),
        (["10:30:00", "10:30:00.5"], pa.time64("us")),
        (["2026-01-31T10:00:00Z", "2026-01-31T10:00:00.123456+02:00"], pa.timestamp("us", "UTC")),
        (["2026-01-31T10:00:00"], pa.string()),
        (["2026-01-31T10:00:00Z", "2026-01-31T10:00:00"], pa.string()),
        (["2026-01-31T10:00:00.123456789Z"], pa.string()),
        ([1767225600000], pa.int64()),
        ([[], [1], [None]], pa.list_(pa.int64())),
        ([{"a": 1}, {"b": "x"}], pa.struct({"a": pa.int64(), "b": pa.string()})),
        ([{"10": 1}, {"11": 1, "12": 2}], pa.map_(pa.string(), pa.int64())),
        ([{f"k{number}": 1.5} for number in range(40)], pa.map_(pa.string(), pa.float64())),
        ([{f"k{number}": "x" for number in range(40)}], pa.struct({f"k{number}": pa.string() for number in range(40)})),
    ],
)
def test_the_type_is_the_narrowest_that_all_values_have_and_none_is_a_guess(
    values: list[Any], wanted: pa.DataType
) -> None:
    assert kind(*values) == wanted


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1, "x"], "its values are integer (1) and string (1), and"),
        ([True, 1], "boolean (1) and integer (1)"),
        ([{"a": 1}, [1]], "object (1) and array (1)"),
        ([None], "null wherever it is there (1 of 1 objects)"),
        ([[]], "an empty list"),
        ([[None], []], "null wherever it is there"),
        ([[1, "x"]], "of its items"),
        ([{}], "an empty object"),
        ([{"a": None}], "none of its fields"),
    ],
)
def test_a_field_without_one_type_is_left_out_and_named(values: list[Any], why: str) -> None:
    assert why in left_out(*values)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("9.50", '"format": "decimal128(12, 2)" is exact'),
        (1767225600, "may be a time in seconds since 1970 (2026-01-01 to 2026-01-01), or a number"),
        (1767225600000, "may be a time in milliseconds"),
        (1767225600000000, "may be a time in microseconds"),
        ("2026-01-31T10:00:00", "a time without a zone"),
        ("2026-01-31T10:00:00.123456789Z", "finer than a microsecond"),
        ("2026-01-31 10:00:00.1234567Z", "finer than a microsecond"),
        ("23:59:59.9999999", "finer than a microsecond"),
        (10**25, "more than 64 bits"),
        ({"10": 1, "11": 2}, "read as a map"),
    ],
)
def test_what_is_ambiguous_is_said_with_the_field(value: Any, said: str) -> None:
    notes = proposed({"outer": {"v": value}}).notes
    assert any(said in note and "'outer.v'" in note for note in notes)


def test_a_format_that_a_note_suggests_can_be_written_into_the_schema() -> None:
    found = proposed({"price": "9.50", "at": "2026-01-31T10:00:00"})
    document = json.loads(found.text)
    document["properties"]["price"]["format"] = "decimal128(12, 2)"
    document["properties"]["at"]["format"] = "timestamp[us]"
    codec = sl.values.Json(document)
    assert codec.schema.types == [pa.decimal128(12, 2), pa.timestamp("us")]
    assert codec.decode(pa.array([b'{"price": "9.50", "at": "2026-01-31T10:00:00"}'])).bad.num_rows == 0


def test_what_the_schema_cannot_decode_is_counted() -> None:
    hostile = [b"no JSON", b"[1]", b"\xff", b"", b'{"deep":' * 3000 + b"1" + b"}" * 3000, b'{"id": NaN}']
    found = proposed({"id": 1}, *hostile)
    assert (found.values, found.unfit) == (7, 6)
    assert any(note.startswith("6 of 7 values do not fit, and will be dead letters") for note in found.notes)


def test_a_value_that_no_codec_reads_says_nothing_of_the_schema() -> None:
    found = proposed({"id": 1}, b'{"id": "\\ud800", "more": 1}')
    assert found.schema == pa.schema({"id": pa.int64()})
    assert found.unfit == 1


def test_nulls_and_repeated_names_are_said() -> None:
    found = propose([None, b'{"id": 1, "id": 2}'], "a test")
    assert found.values == 1
    assert found.notes[0].startswith("1 records have no value")
    assert "'id' (1): the last one counts" in found.notes[1]


@pytest.mark.parametrize("name", ["", "_key", "x" * 300, "a\x1b[2J", "ID"])
def test_a_name_that_no_column_can_have_is_left_out(name: str) -> None:
    found = proposed({"id": 1, name: 1}, {"id": 2})
    assert found.schema.names == ["id"]
    assert len(found.notes) == 1
    assert found.notes[0].isprintable()
    assert json.loads(found.text)["properties"].keys() == {"id"}


def test_a_name_that_is_no_text_makes_no_bad_note() -> None:
    found = proposed({"id": 1, "\ud800": 1}, {"id": 2})
    assert found.schema.names == ["id"]
    assert all(note.isprintable() for note in found.notes)


def test_ten_thousand_names_give_a_schema_of_bounded_size() -> None:
    found = proposed(*({f"f{number}-{row}": 1 for number in range(100)} for row in range(100)), {"id": 1}, {"id": 2})
    assert len(found.schema) == 1000
    assert found.schema.names[0] == "f0-0"
    assert "id" in found.schema.names
    assert len(found.notes) <= 101
    assert len(found.text) < 200_000
    assert found.unfit == 0


def test_deep_nesting_gives_a_schema_as_deep_as_a_table_takes() -> None:
    deep: Any = 1
    for _ in range(60):
        deep = {"a": deep, "b": 1}
    found = proposed({"deep": deep})
    assert found.unfit == 0
    assert any("deeper than 30 levels" in note for note in found.notes)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "no value to infer a schema from in a test. "),
        ([None], "all are null"),
        ([b"[1]", b"2"], "No value of a test is a JSON object, of 2 that were looked at"),
        ([b'{"a": null}'], "No field of a test has a type that could be proposed: The field 'a' is left out"),
        ([b"{}"], "No field of a test"),
    ],
)
def test_a_sample_without_fields_is_refused_in_a_sentence(values: list[bytes | None], said: str) -> None:
    with pytest.raises(InvalidInput, match=said.replace(".", r"\.")):
        propose(values, "a test")


NAMES = st.sampled_from(["a", "b", "C", "c", "_d", "", "é", "x y", "10", "11", "\x00"])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["2026-01-31", "2026-01-31T10:00:00Z", "2026-01-31T10:00:00", "10:00:00", "9.50", "-1"]),
    st.dates().map(str),
)
VALUES = st.dictionaries(
    NAMES,
    st.recursive(LEAVES, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(NAMES, inside, max_size=4)),
    max_size=6,
)


@given(st.lists(VALUES, min_size=1, max_size=8))
def test_every_value_of_the_sample_decodes_with_the_saved_proposal(values: list[dict[str, Any]]) -> None:
    sample = [json.dumps(value).encode() for value in values]
    try:
        found = propose(sample, "a test")
    except InvalidInput:
        return  # no field could be proposed
    codec = sl.values.Json(found.text)
    assert codec.schema == found.schema
    assert codec.constraints == {}
    assert codec.decode(pa.array(sample, pa.binary())).bad.num_rows == found.unfit == 0


@pytest.mark.parametrize(
    "kind_",
    [
        *(pa.bool_(), pa.int8(), pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.string(), pa.binary()),
        *(pa.date32(), pa.time64("us"), pa.time32("ms"), pa.timestamp("us", "UTC"), pa.timestamp("ms")),
        *(pa.timestamp("ns", "+01:00"), pa.decimal128(12, 2), pa.decimal256(60, 2), pa.binary(16)),
        *(pa.list_(pa.decimal128(3, 1)), pa.map_(pa.string(), pa.date32())),
        pa.struct({"a": pa.int32(), "b": pa.list_(pa.struct({"c": pa.timestamp("s")}))}),
    ],
)
def test_columns_written_as_a_json_schema_are_the_same_columns(kind_: pa.DataType) -> None:
    schema = pa.schema({"v": kind_})
    assert sl.values.as_schema(json.dumps(json_schema_of(schema))) == sl.values.as_schema(schema)
    assert sl.values.Json(json_schema_of(schema)).constraints == {}
