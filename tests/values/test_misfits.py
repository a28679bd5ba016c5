"""Values that do not fit: the quick test never refuses what Arrow takes, and a column of them costs one look each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import strandline as sl
from strandline.tables.rows.types import stored
from strandline.values.codecs import columns
from strandline.values.codecs.columns import ColumnShape, convert
from strandline.values.codecs.exact import misfit_of
from tests.matrix_cases import some

_TWO = st.integers(0, 99).map("{:02}".format)
_TEXTS = st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["2024", "0001", "0000", "1677", "2262", "3000", "9999", "24", "-2024", "+2024", " 2024"]),
    st.sampled_from(["-", "", "/"]) | st.just("-"),
    _TWO | st.just("02"),
    st.just("-"),
    _TWO | st.sampled_from(["29", "30"]),
    st.sampled_from(["T", " ", "", "t"]) | st.just("T"),
    _TWO | st.just("23") | st.just(""),
    st.sampled_from(["", ":59", ":60", "59"]),
    st.sampled_from(["", ":59", ":60"]),
    st.sampled_from(["", ".", ".1", ".123", ".1234", ".123456", ".1234567", ".123456789", ".1234567890", ",5"]),
    st.sampled_from(["", "Z", "z", "+01", "+0130", "-01:30", "+24:00", "+1", "+01:60", "Z "]),
)
_EDGES = st.builds(
    lambda day, minute, zone: f"{day}T{minute // 60:02}:{minute % 60:02}:00{zone}",
    st.sampled_from(["0001-01-01", "9999-12-31", "1677-09-22", "1677-09-23", "2262-04-09", "2262-04-10"]),
    st.integers(0, 1439),
    st.sampled_from(["Z", "+00:01", "-00:01", "+0130", "-23", "+23:59", "-23:59", "+24:00", "-12:60", "+99"]),
)
_DECIMALS = st.decimals(allow_nan=True, allow_infinity=True) | st.builds(
    lambda whole, exponent: Decimal(whole).scaleb(exponent), st.integers(-(10**7), 10**7), st.integers(-9, 6)
)
CENTS, LONG_CENTS, HUNDREDS = pa.decimal128(10, 2), pa.decimal256(50, 2), pa.decimal128(10, -2)
_INTEGERS = st.integers(-(2**70), 2**70)
CASES: list[tuple[pa.DataType, pa.DataType | None, st.SearchStrategy[Any]]] = [
    *[
        (pa.timestamp(unit, zone), pa.string(), _TEXTS | st.text(max_size=12))
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC")
    ],
    *[(pa.timestamp(unit, "UTC"), pa.string(), _EDGES) for unit in ("us", "ns")],
    *[(pa.timestamp(unit, "UTC"), None, st.datetimes(timezones=st.timezones())) for unit in ("ns", "us")],
    (pa.timestamp("ns"), None, st.datetimes()),
    (pa.date32(), pa.string(), _TEXTS | st.text(max_size=12) | st.dates().map(str)),
    (pa.decimal128(5, 2), None, _DECIMALS),
    (pa.decimal256(40, 3), None, _DECIMALS),
    (pa.decimal128(5, -2), None, _DECIMALS),
    (pa.uint64(), None, _INTEGERS),
    (pa.int8(), None, _INTEGERS),
    (pa.float32(), None, st.floats()),
    (pa.time64("us"), pa.int64(), _INTEGERS),
    (pa.time32("ms"), pa.int32(), _INTEGERS),
    (pa.date32(), pa.int32(), _INTEGERS),
]


@pytest.mark.parametrize(("kind", "via", "values"), some(CASES, 2), ids=lambda part: str(part)[:30])
def test_what_is_refused_at_once_arrow_refuses_too(
    kind: pa.DataType, via: pa.DataType | None, values: st.SearchStrategy[Any]
) -> None:
    shape = ColumnShape(pa.field("x", kind), lambda row: row, via=via)
    misfit = misfit_of(kind, via, None)
    assert misfit is not None

    @settings(max_examples=300, deadline=None, database=None)
    @given(values)
    def check(value: Any) -> None:
        if misfit(value) is None:
            return
        with pytest.raises((pa.ArrowException, ArithmeticError, TypeError, ValueError)):
            convert(shape, [value])

    check()


@pytest.mark.parametrize("kind", some([pa.decimal128(5, 2), pa.decimal128(38, 10), pa.decimal256(40, 3)], 1), ids=str)
def test_a_decimal_is_stored_exactly_or_not_at_all(kind: pa.DataType) -> None:
    shape = ColumnShape(pa.field("x", kind), lambda row: row)
    many = st.builds(
        lambda whole, exponent: Decimal(f"{whole}e{exponent}"), st.integers(-(10**50), 10**50), st.integers(-90, 6)
    )

    @settings(max_examples=300, deadline=None, database=None)
    @given(_DECIMALS | many)
    @example(Decimal("1.5E-40"))
    def check(value: Decimal) -> None:
        with suppress(pa.ArrowException, ArithmeticError, ValueError):
            assert convert(shape, [value])[0].as_py() == value

    check()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *[
            (make, kind)
            for make in (sl.values.Json, sl.values.MessagePack, sl.values.Arrow, sl.values.Avro)
            for kind in (CENTS, LONG_CENTS)
        ],
        *[
            (make, HUNDREDS) for make in (sl.values.Json, sl.values.MessagePack, sl.values.Arrow)
        ],  # Avro has no such decimals
    ],
)
def test_a_decimal_that_ends_the_process_in_arrow_is_refused_before_arrow_sees_it(
    make: Callable[[pa.Schema], Any], kind: pa.DataType
) -> None:
    codec = make(pa.schema({"x": kind}))
    for text in ("1e-9999999", "-1e-2000001", "1e-999999999"):
        with pytest.raises(sl.errors.InvalidInput, match="does not fit"):
            codec.encode_one({"x": Decimal(text)})
    zero = codec.decode(pa.array([codec.encode_one({"x": Decimal("0e-9999999")})], pa.binary()))
    assert zero.columns.column("x").to_pylist() == [0]


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_a_time_that_a_table_would_wrap_around_is_a_bad_row(unit: str) -> None:
    far = pa.record_batch({"at": pa.array([2**62], pa.timestamp(unit))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, far.schema) as writer:
        writer.write_batch(far)
    assert sl.values.Arrow().decode(pa.array([bytes(sink.getvalue())], pa.binary())).bad.num_rows == 1
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        stored(pa.Table.from_batches([far]))


def test_nanoseconds_inside_of_a_list_are_cut_off_as_those_of_a_column() -> None:
    rows = pa.table({"at": pa.array([[1_999]], pa.list_(pa.timestamp("ns")))})
    assert stored(rows).column("at").cast(pa.list_(pa.int64())).to_pylist() == [[1]]


BAD: list[tuple[pa.DataType, list[bytes]]] = [
    (
        pa.timestamp("us", "UTC"),
        [b'"yesterday"', b'"2024-02-30T00:00:00Z"', b'"2024-02-01T00:00:00"', b'"2024-02-01T24:00Z"'],
    ),
    (pa.timestamp("ms"), [b'"2024-02-01T00:00:00Z"', b'""', b'"2024-02-01T00:00:00.1234567890"']),
    (pa.timestamp("ns", "UTC"), [b'"3000-01-01T00:00:00Z"', b'"2262-05-01T00:00:00Z"', b'"1677-01-01T00:00:00Z"']),
    (
        pa.timestamp("us", "UTC"),
        [b'"9999-12-31T23:59:59-23:59"', b'"0001-01-01T00:00:00+00:01"', b'"2024-01-01T00:00+24"'],
    ),
    (pa.date32(), [b'"2024-13-01"', b'"20240101"']),
    (pa.decimal128(5, 2), [b'"1234.5"', b'"0.001"', b'"1.5E-40"', b'"NaN"', b'"1e999999999"', b"1e-400"]),
    (pa.uint64(), [b"99999999999999999999"]),
]


@pytest.mark.parametrize(("kind", "texts"), BAD, ids=lambda part: str(part)[:20])
@pytest.mark.parametrize("wrap", [lambda kind: kind, pa.list_], ids=["plain", "list"])
def test_a_column_of_misfits_is_converted_twice_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, texts: list[bytes], wrap: Callable[[pa.DataType], pa.DataType]
) -> None:
    calls = []

    def counted(shape: ColumnShape, values: list[Any]) -> pa.Array:
        calls.append(len(values))
        return convert(shape, values)

    monkeypatch.setattr(columns, "convert", counted)
    form = b'{"x":%s}' if wrap is not pa.list_ else b'{"x":[%s]}'
    values = [form % text for text in texts] * 50
    decoded = sl.values.Json(pa.schema({"x": wrap(kind)})).decode(pa.array([*values, b"{}"], pa.binary()))
    assert decoded.bad.column("row").to_pylist() == list(range(len(values)))
    assert all("'x" in reason for reason in decoded.bad.column("reason").to_pylist())
    assert len(calls) <= 2


def test_a_long_list_of_what_only_arrow_refuses_takes_few_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(shape: ColumnShape, values: list[Any]) -> pa.Array:
        calls.append(len(values))
        return convert(shape, values)

    monkeypatch.setattr(columns, "convert", counted)
    monkeypatch.setattr(columns, "misfit_of", lambda *_: None)
    values = [b'{"x":[[1,300,7]]}', b'{"x":[[5],[' + b"300," * 2000 + b"1]]}", b"{}", b'{"x":[[6]]}']
    decoded = sl.values.Json(pa.schema({"x": pa.list_(pa.list_(pa.float32()))})).decode(pa.array(values, pa.binary()))
    assert not decoded.bad.num_rows
    values = [value.replace(b"300", b"3e300") for value in values]
    decoded = sl.values.Json(pa.schema({"x": pa.list_(pa.list_(pa.float32()))})).decode(pa.array(values, pa.binary()))
    assert decoded.bad.column("row").to_pylist() == [0, 1]
    assert decoded.columns.column("x").to_pylist() == [None, None, None, [[6.0]]]
    assert len(calls) < 50


def test_digits_finer_than_the_unit_and_far_years_stand_beside_each_other() -> None:
    texts = ["2024-01-01T00:00:00.123456789Z", "3000-01-01T00:00:00Z", "1969-12-31T23:59:59.9999999-01:00"]
    values = pa.array([b'{"at":"%s"}' % text.encode() for text in texts], pa.binary())
    for unit, parts in (("s", (0, 0, 0)), ("ms", (123, 0, 999)), ("us", (123_456, 0, 999_999))):
        decoded = sl.values.Json(pa.schema({"at": pa.timestamp(unit, "UTC")})).decode(values)
        assert decoded.bad.num_rows == 0
        scale = {"s": 1, "ms": 1000, "us": 1_000_000}[unit]
        numbers = decoded.columns.column("at").view(pa.int64()).to_pylist()
        assert tuple(number % scale for number in numbers) == parts
        assert [number // scale for number in numbers] == [1_704_067_200, 32_503_680_000, 3599]
