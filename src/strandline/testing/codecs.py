"""Contract suite for codecs of values."""
# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import datetime as dt
import pickle
import string
from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import InvalidInput
from strandline.values import Codec


class CodecContract(ABC):
    """Inherit it, and give a codec and values that are bad."""

    always_null = True
    """Whether a null comes back as a null in every column, as it does unless an encoding has defaults."""

    @abstractmethod
    def codec(self) -> Codec:
        """The codec; a new one each time."""

    @abstractmethod
    def bad_values(self) -> Sequence[bytes]:
        """Values that it cannot decode."""

    def good_row(self) -> dict[str, Any]:
        """A row to stand beside bad ones."""
        return {}

    def test_rows_come_back_as_they_were(self) -> None:
        codec = self.codec()

        @settings(max_examples=25, deadline=None, database=None)
        @given(st.lists(row_strategy(codec.schema, nulls=self.always_null), max_size=5))
        def check(rows: list[dict[str, Any]]) -> None:
            batch = pa.RecordBatch.from_pylist(rows, schema=codec.schema)
            decoded = codec.decode(codec.encode(batch))
            assert decoded.bad.num_rows == 0
            assert decoded.columns.to_pylist() == batch.to_pylist()
            assert decoded.columns.schema.equals(codec.schema)
            tail = batch.slice(1)
            assert codec.decode(codec.encode(tail)).columns.to_pylist() == tail.to_pylist()

        check()

    def test_one_value_is_encoded_as_a_row_is(self) -> None:
        codec, row = self.codec(), self.good_row()
        batch = pa.RecordBatch.from_pylist([row], schema=codec.schema)
        one = pa.array([codec.encode_one(row)], pa.binary())
        assert codec.decode(one).columns.to_pylist() == codec.decode(codec.encode(batch)).columns.to_pylist()

    def test_every_bad_row_is_named_and_no_other(self) -> None:
        codec = self.codec()
        good = codec.encode_one(self.good_row())
        expected = codec.decode(pa.array([good], pa.binary())).columns.to_pylist()[0]
        for bad in self.bad_values():
            for kind in (pa.binary(), pa.large_binary()):
                decoded = codec.decode(pa.array([good, bad, None, good, bad], kind))
                assert decoded.bad.column("row").to_pylist() == [1, 4], bad[:50]
                assert all(len(reason) > 1 for reason in decoded.bad.column("reason").to_pylist())
                nothing = dict.fromkeys(decoded.columns.schema.names)
                assert decoded.columns.to_pylist() == [expected, nothing, nothing, expected, nothing]
                decoded.columns.validate(full=True)

    @pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.null()])
    def test_null_values_and_no_values_are_never_bad(self, kind: pa.DataType) -> None:
        for count in (0, 3):
            decoded = self.codec().decode(pa.nulls(count, kind))
            assert decoded.bad.num_rows == 0
            assert decoded.columns.num_rows == count
            assert all(column.null_count == count for column in decoded.columns.columns)

    def test_a_part_of_an_array_is_decoded_as_that_part(self) -> None:
        codec = self.codec()
        good = codec.encode_one(self.good_row())
        values = pa.array([self.bad_values()[0], good, None, good], pa.binary())
        assert codec.decode(values.slice(1)).bad.num_rows == 0
        assert codec.decode(values.slice(0, 2)).bad.column("row").to_pylist() == [0]

    def test_a_codec_travels_and_equals_its_copy(self) -> None:
        codec = self.codec()
        copy = pickle.loads(pickle.dumps(codec))  # noqa: S301 - our own bytes
        assert copy == codec == self.codec()
        assert hash(copy) == hash(codec)
        assert codec != object()
        assert copy.schema.equals(codec.schema)
        assert isinstance(codec, Codec)
        good = codec.encode_one(self.good_row())
        assert copy.decode(pa.array([good], pa.binary())).columns.equals(
            codec.decode(pa.array([good], pa.binary())).columns
        )

    def test_what_is_no_array_of_bytes_is_refused(self) -> None:
        with pytest.raises(InvalidInput):
            self.codec().decode(pa.array([1]))

    @pytest.mark.parametrize("value", [3, "text", [], object()])
    def test_what_is_no_value_is_refused(self, value: Any) -> None:
        with pytest.raises(InvalidInput):
            self.codec().encode_one(value)


def row_strategy(schema: pa.Schema, *, nulls: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Rows of a schema, with nulls anywhere if they are wanted."""
    return st.fixed_dictionaries({field.name: _values(field.type, nulls=nulls) for field in schema})


def _values(kind: pa.DataType, *, nulls: bool) -> st.SearchStrategy[Any]:
    values = _present(kind, nulls=nulls)
    return st.none() | values if nulls else values


def _present(kind: pa.DataType, *, nulls: bool) -> st.SearchStrategy[Any]:  # noqa: C901, PLR0911, PLR0912 - one per type
    if pt.is_struct(kind):
        return st.fixed_dictionaries({field.name: _values(field.type, nulls=nulls) for field in kind})
    if pt.is_list(kind) or pt.is_large_list(kind):
        return st.lists(_values(kind.value_type, nulls=nulls), max_size=3)
    if pt.is_map(kind):
        names = st.text(string.ascii_letters, max_size=3)
        items = st.dictionaries(names, _values(kind.item_type, nulls=nulls), max_size=3)
        return items.map(lambda each: sorted(each.items()))
    if pt.is_boolean(kind):
        return st.booleans()
    if pt.is_signed_integer(kind):
        return st.integers(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)
    if pt.is_unsigned_integer(kind):
        return st.integers(0, 2**kind.bit_width - 1)
    if pt.is_floating(kind):
        return st.floats(allow_nan=False, allow_infinity=False, width=kind.bit_width)
    if pt.is_fixed_size_binary(kind):
        return st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    if pt.is_binary(kind) or pt.is_large_binary(kind):
        return st.binary(max_size=20)
    if pt.is_date32(kind):
        return st.dates()
    if pt.is_time(kind):
        step = 1000 if kind == pa.time32("s") else 1
        return st.integers(0, 86_399_999 // step).map(lambda part: _time_of_day(part * step))
    if pt.is_timestamp(kind):
        low = dt.datetime(1700, 1, 1, tzinfo=dt.UTC)
        moments = st.integers(0, 500 * 365 * 86_400_000).map(lambda ms: low + dt.timedelta(milliseconds=ms))
        if kind.unit == "s":
            moments = moments.map(lambda each: each.replace(microsecond=0))
        return moments if kind.tz else moments.map(lambda each: each.replace(tzinfo=None))
    if pt.is_decimal(kind):
        most, scale = 10**kind.precision - 1, kind.scale
        return st.integers(-most, most).map(lambda whole: Decimal(f"{whole}e{-scale}"))
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


def _time_of_day(milliseconds: int) -> dt.time:
    rest, milliseconds = divmod(milliseconds, 1000)
    minutes, seconds = divmod(rest, 60)
    return dt.time(*divmod(minutes, 60), seconds, milliseconds * 1000)
