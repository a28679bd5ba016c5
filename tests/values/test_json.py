"""The JSON codec: every bad row is found, and no other."""

from __future__ import annotations

import dataclasses
import datetime as dt
import pickle
from decimal import Decimal

import msgspec
import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import InvalidInput, SchemaRefused

UTC = dt.UTC
WIDE = pa.schema(
    {
        "i": pa.int32(),
        "u": pa.uint64(),
        "f": pa.float32(),
        "g": pa.float64(),
        "s": pa.string(),
        "b": pa.binary(),
        "fixed": pa.binary(2),
        "d": pa.date32(),
        "t": pa.timestamp("us", tz="UTC"),
        "ns": pa.timestamp("ns"),
        "time": pa.time64("us"),
        "x": pa.decimal128(10, 2),
        "l": pa.list_(pa.struct({"a": pa.int8(), "w": pa.timestamp("ms", tz="UTC")})),
        "m": pa.map_(pa.string(), pa.decimal128(5, 1)),
        "st": pa.struct({"q": pa.list_(pa.int64()), "z": pa.struct({"y": pa.bool_()})}),
    }
)
FULL = {
    "i": 1,
    "u": 2**64 - 1,
    "f": 1.5,
    "g": 2.5,
    "s": "é\n",
    "b": b"\xff",
    "fixed": b"ab",
    "d": dt.date(2020, 2, 29),
    "t": dt.datetime(2020, 1, 1, tzinfo=UTC),
    "ns": dt.datetime.fromisoformat("1999-01-01T01:01:01.000005"),
    "time": dt.time(1, 2, 3, 4),
    "x": Decimal("1.10"),
    "l": [None, {"a": 1, "w": None}, {"a": None, "w": dt.datetime(2020, 1, 1, 0, 0, 0, 5000, tzinfo=UTC)}],
    "m": [("a", Decimal("1.5")), ("b", None)],
    "st": {"q": [1, None], "z": {"y": True}},
}


def binary(*values: bytes | None) -> pa.Array:
    return pa.array(values, pa.binary())


def test_every_type_comes_back_as_it_was() -> None:
    codec = sl.values.Json(WIDE)
    rows = [FULL, {}, {"l": [], "m": [], "st": {"q": None, "z": None}}]
    batch = pa.RecordBatch.from_pylist(rows, schema=codec.schema)
    for part in (batch, batch.slice(1), batch.slice(0, 0)):
        decoded = codec.decode(codec.encode(part))
        assert decoded.bad.num_rows == 0
        assert decoded.columns.equals(part)


BAD = {
    "nothing": b"",
    "not JSON": b"x",
    "two objects": b"{} {}",
    "an array": b"[]",
    "null": b"null",
    "text that is not UTF-8": b'{"s":"\xff"}',
    "half a surrogate": b'{"s":"\\ud800"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "nested without end": b'{"unknown":' + b"[" * 100_000,
    "a fraction for an integer": b'{"i":1.0}',
    "an exponent for an integer": b'{"i":1e3}',
    "a boolean for an integer": b'{"i":true}',
    "text for an integer": b'{"i":"1"}',
    "an integer above int32": b'{"i":2147483648}',
    "an integer above uint64": b'{"u":18446744073709551616}',
    "a negative unsigned integer": b'{"u":-1}',
    "digits without end": b'{"u":' + b"1" * 5000 + b"}",
    "a number above float32": b'{"f":1e39}',
    "a number above float64": b'{"g":1e999}',
    "not Base64": b'{"b":"%"}',
    "too few bytes": b'{"fixed":"YQ=="}',
    "no such day": b'{"d":"2023-02-29"}',
    "a timestamp without its zone": b'{"t":"2020-01-01T00:00:00"}',
    "a timestamp with a zone too many": b'{"ns":"2020-01-01T00:00:00Z"}',
    "a decimal with too many digits": b'{"x":"123456789.00"}',
    "a decimal that would be rounded": b'{"x":1.001}',
    "a decimal of a billion digits": b'{"x":"1e999999999"}',
    "a decimal that is no number": b'{"x":"NaN"}',
    "a decimal with an exponent far below zero": b'{"x":1e-9999999}',
    "a decimal with such an exponent as text": b'{"x":"1e-9999999"}',
    "a day in the year 0": b'{"d":"0000-01-01"}',
    "a timestamp in the year 0": b'{"t":"0000-01-01T00:00:00Z"}',
    "a bad item of a list": b'{"l":[{"a":1},{"w":"yesterday"}]}',
    "a bad value of a map": b'{"m":{"a":1,"b":1e99}}',
    "a bad struct": b'{"st":{"z":1}}',
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_a_bad_row_is_named_and_null_and_its_neighbours_are_untouched(value: bytes) -> None:
    decoded = sl.values.Json(WIDE).decode(binary(b'{"i":1,"x":1}', None, value, b'{"i":2,"l":[{"a":1}]}'))
    assert decoded.bad.column("row").to_pylist() == [2]
    assert decoded.bad.column("reason")[0].as_py().endswith(".")
    assert decoded.columns.column("i").to_pylist() == [1, None, None, 2]
    assert decoded.columns.column("x").to_pylist() == [Decimal(1), None, None, None]
    assert [column[2].as_py() for column in decoded.columns.columns] == [None] * len(WIDE)


def test_bad_rows_are_exact_over_many_rows_whatever_kind_they_are() -> None:
    count = 10_000
    wrong = {7: b"x", 4095: b'{"x":"1.001"}', 4096: b'{"i":1.5}', 4097: b'{"m":{"a":1e99}}', count - 1: b""}
    values = [wrong.get(row, None if row % 5 == 0 else b'{"i":%d,"x":"1.5"}' % row) for row in range(count)]
    decoded = sl.values.Json(WIDE).decode(binary(*values))
    assert decoded.bad.column("row").to_pylist() == sorted(wrong)
    assert decoded.columns.column("i").to_pylist() == [
        None if row % 5 == 0 or row in wrong else row for row in range(count)
    ]


def test_values_that_join_to_valid_json_are_still_bad_each() -> None:
    values = [b'{"l":[{}', b"{}]}", b"{},{}", b'{"s":"', b'"}']
    assert sl.values.Json(WIDE).decode(binary(*values)).bad.column("row").to_pylist() == [0, 1, 2, 3, 4]


def test_unknown_fields_are_skipped_and_of_a_field_that_is_there_twice_the_last_counts() -> None:
    decoded = sl.values.Json(WIDE).decode(binary(b' {"i":1,"new":{"deep":[1,{}]},"i":2} '))
    assert decoded.bad.num_rows == 0
    assert decoded.columns.column("i").to_pylist() == [2]


def test_digits_finer_than_the_unit_are_cut_off() -> None:
    codec = sl.values.Json(pa.schema({"s": pa.timestamp("s", tz="UTC"), "us": pa.timestamp("us", tz="UTC")}))
    text = b'{"s":"1969-12-31T23:59:58.999999999Z","us":"2020-01-01T01:00:00.123456789+01:00"}'
    far = b'{"s":"9999-12-31T23:59:59.5Z"}'
    decoded = codec.decode(binary(text, far))
    assert decoded.bad.num_rows == 0
    assert decoded.columns.to_pylist() == [
        {
            "s": dt.datetime(1969, 12, 31, 23, 59, 58, tzinfo=UTC),
            "us": dt.datetime(2020, 1, 1, 0, 0, 0, 123456, tzinfo=UTC),
        },
        {"s": dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC), "us": None},
    ]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.null()])
def test_null_values_are_rows_of_nulls_in_every_type_of_array(kind: pa.DataType) -> None:
    decoded = sl.values.Json(WIDE).decode(pa.nulls(3, kind))
    assert decoded.bad.num_rows == 0
    assert decoded.columns.equals(pa.RecordBatch.from_pylist([{}, {}, {}], schema=WIDE))
    assert sl.values.Json(WIDE).decode(pa.nulls(0, kind)).columns.num_rows == 0


@pytest.mark.parametrize("codec", [sl.values.Json(WIDE), sl.values.Raw()])
def test_an_array_that_is_not_of_bytes_is_refused(codec: sl.values.Codec) -> None:
    with pytest.raises(InvalidInput, match="not int64"):
        codec.decode(pa.array([1]))


def test_a_codec_travels_and_equals_its_copy() -> None:
    codec = sl.values.Json(WIDE)
    copy = pickle.loads(pickle.dumps(codec))
    assert copy == codec
    assert hash(copy) == hash(codec)
    assert copy != sl.values.Json(pa.schema({"i": pa.int32()}))
    assert isinstance(codec, sl.values.Codec)


@dataclasses.dataclass
class Line:
    sku: str
    count: int


class Order(msgspec.Struct, rename="camel"):
    order_id: int
    lines: list[Line]
    paid_at: dt.datetime | None = None


def test_one_value_may_be_a_mapping_a_dataclass_or_a_struct() -> None:
    codec = sl.values.Json(Order)
    order = Order(7, [Line("a", 2)], dt.datetime(2020, 1, 1, tzinfo=UTC))
    encoded = codec.encode_one(order)
    assert encoded == b'{"orderId":7,"lines":[{"sku":"a","count":2}],"paidAt":"2020-01-01T00:00:00Z"}'
    assert codec.encode_one({"orderId": 7, "lines": [Line("a", 2)], "paidAt": order.paid_at}) == encoded
    assert sl.values.Json(Line).encode_one(Line("a", 2)) == b'{"sku":"a","count":2}'


@pytest.mark.parametrize(
    "value",
    [
        {"i": "1"},
        {"typo": 1},
        {"g": float("nan")},
        {"f": 1e300},
        {"x": Decimal("1.001")},
        {"t": dt.datetime.fromisoformat("2020-01-01")},
        {"u": 2**64},
        {"ns": 5},
        3,
        None,
        object(),
    ],
)
def test_a_value_that_would_be_a_bad_row_is_refused_when_it_is_encoded(value: object) -> None:
    with pytest.raises(InvalidInput, match="does not fit the schema"):
        sl.values.Json(WIDE).encode_one(value)


@pytest.mark.parametrize("column", ["f", "g"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_does_not_have_are_refused(column: str, number: float) -> None:
    with pytest.raises(InvalidInput, match=f"'{column}' holds a NaN or an infinity"):
        sl.values.Json(WIDE).encode(pa.table({column: pa.array([number], WIDE.field(column).type)}))


def test_a_column_that_the_schema_does_not_have_is_refused() -> None:
    with pytest.raises(SchemaRefused, match="'typo' is not in the schema"):
        sl.values.Json(WIDE).encode(pa.table({"typo": [1]}))
