"""Statistics of data files: no reader that skips files by them loses a row, whatever the values; and files are skipped.

The rows are chosen by hand and given to the table by a transform. Each reader is asked with a condition, and compared
with its own answer to the same condition on all rows, which are compared with the chosen ones first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import strandline as sl
from strandline.log.memory import MemoryLog
from strandline.tables.files import data_files
from tests.tables.layouts.formats import PLACES, duck

LAST = "\U0010ffff"
DOTTED = "a.b"
EVE = datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)
NOON = datetime(2026, 1, 1, 12, 0, 0, 999, UTC)
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "whole": (pa.int64(), [0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1]),
    "small": (pa.int32(), [0, 2**31 - 1, -(2**31)]),
    "float": (pa.float64(), [0.0, -0.0, 1.5, -1e308, 5e-324, 1e16, math.inf, -math.inf, math.nan]),
    "narrow": (pa.float32(), [0.0, 0.10000000149011612, -3.4028234663852886e38]),
    "flag": (pa.bool_(), [True, False]),
    "text": (
        pa.string(),
        [
            "",
            "a",
            "z" * 64,
            "z" * 65,
            "z" * 64 + LAST + "z",
            LAST * 70,
            "z" * 63 + "\ud7ff" + "y",
            "x" * 5000,
            "é/=%\n\x00",
        ],
    ),
    "day": (pa.date32(), [date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(9999, 12, 31)]),
    "time": (
        pa.timestamp("us", "UTC"),
        [
            datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
            datetime(2026, 1, 1, tzinfo=UTC),
            datetime(9999, 12, 31, tzinfo=UTC),
        ],
    ),
    "naive": (pa.timestamp("us"), [EVE.replace(tzinfo=None), NOON.replace(tzinfo=None)]),
    "money": (pa.decimal128(12, 2), [Decimal("9999999999.99"), Decimal("-0.01"), Decimal("0.00")]),
    "exact": (
        pa.decimal128(38, 20),
        [Decimal("0.1"), Decimal("0." + "0" * 19 + "1"), Decimal("9" * 18 + "." + "9" * 20), Decimal("-" + "9" * 18)],
    ),
    "huge": (pa.decimal128(38, 0), [Decimal("9" * 38), Decimal("-" + "9" * 38), Decimal(2**53 + 1)]),
    DOTTED: (pa.int64(), [1, 2, 3]),
    "sp ace": (pa.string(), ["1", "2"]),
    "bytes": (pa.binary(), [b"", b"\xff", b"x" * 100]),
    "inside": (pa.struct({"x": pa.int64(), "y": pa.string()}), [{"x": 1, "y": "a"}, {"x": 2, "y": None}]),
    "list": (pa.list_(pa.int64()), [[], [1, None]]),
}
SCHEMA = pa.schema({name: kind for name, (kind, _) in VALUES.items()})
ROWS = 24
NESTED = ("inside", "list")


def row(n: int) -> dict[str, Any]:
    """Values in turn, and nulls between them."""
    return {name: [*values, None][(n * 7 // 3) % (len(values) + 1)] for name, (_, values) in VALUES.items()}


def chosen(names: list[str]) -> Callable[[pa.Table], pa.Table]:
    schema = pa.schema([SCHEMA.field(name) for name in names])

    def transformed(rows: pa.Table) -> pa.Table:
        offsets = rows["_offset"].to_pylist()
        found = pa.Table.from_pylist([row(offset) for offset in offsets], schema)
        return found.append_column("n", pa.array(offsets, pa.int64()))

    return transformed


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Any]:
    found = PLACES[request.param](tmp_path)
    yield found
    found.close()


def made(place: Any, names: list[str], *, file_rows: int = 2, rows: int = ROWS) -> None:
    """A table of the chosen rows, with so many in each file."""
    log = MemoryLog()
    empty = sl.values.Json(pa.schema({"none": pa.int64()}))
    sink = place.sink(mode="append", value=empty, transform=chosen(names))
    for _ in range(rows // file_rows):
        with log.producer() as producer:
            for _ in range(file_rows):
                producer.append(value=b"{}")
        sl.follow(log, sink, upto="end")


def check_rows(place: Any, names: list[str]) -> None:
    found = {one["n"]: one for one in place.rows().to_pylist()}
    assert len(found) == ROWS
    for n, one in found.items():
        for name in names:
            value, given = one[name], row(n)[name]
            assert repr(value) == repr(given) or value == given, (n, name)


def numbers(rows: pa.Table) -> list[int]:
    return sorted(rows["n"].to_pylist())


def asked() -> Iterator[tuple[str, Any, str]]:
    """A condition on each column: each of its values, and what is above and below one of them."""
    for name, (_, values) in VALUES.items():
        if name in NESTED:
            continue
        yield from ((name, value, "=") for value in values)
        yield from ((name, values[len(values) // 2], sign) for sign in "<>")


def duckdb(place: Any) -> None:
    extensions = ("delta",) if place.name == "delta" else ("avro", "iceberg")
    with closing(duck(*extensions)) as connection:
        connection.execute("SET timezone = 'UTC'")
        connection.execute(f"CREATE TEMP TABLE whole AS SELECT * FROM {place.scan()}")
        for name, value, sign in asked():
            if place.name == "delta" and name == DOTTED:
                continue  # its extension has no condition on such a column: it says so
            condition = f'WHERE "{name}" {sign} ? ORDER BY n'
            found = connection.execute(f"SELECT n FROM {place.scan()} {condition}", [value]).fetchall()
            assert found == connection.execute(f"SELECT n FROM whole {condition}", [value]).fetchall(), (name, value)


def arrow_condition(name: str, value: Any, sign: str) -> pc.Expression:
    field, one = pc.field(name), pa.scalar(value, VALUES[name][0])
    return {"=": field == one, "<": field < one, ">": field > one}[sign]


def deltalake(place: Any) -> None:
    dataset, rows = place.table().to_pyarrow_dataset(), place.rows()
    for name, value, sign in asked():
        condition = arrow_condition(name, value, sign)
        assert numbers(dataset.to_table(filter=condition)) == numbers(rows.filter(condition)), (name, value, sign)


def polars(place: Any) -> None:
    lazy = pl.scan_delta(place.address) if place.name == "delta" else pl.scan_iceberg(place.table())
    rows = lazy.collect()
    for name, value, sign in asked():
        field, one = pl.col(name), pl.lit(value, dtype=rows.schema[name])
        condition = {"=": field == one, "<": field < one, ">": field > one}[sign]
        found = sorted(lazy.filter(condition).collect()["n"].to_list())
        assert found == sorted(rows.filter(condition)["n"].to_list()), (name, value, sign)


def pyiceberg(place: Any) -> None:
    from pyiceberg.expressions import EqualTo, GreaterThan, LessThan

    table, rows = place.table(), place.rows()
    for name, value, sign in asked():
        if repr(value) == "nan" or name == DOTTED:  # its conditions take no NaN, and read no such column
            continue
        one = pa.scalar(value, VALUES[name][0]).as_py()  # a decimal with all places
        condition = {"=": EqualTo, "<": LessThan, ">": GreaterThan}[sign](name, one)
        expected = numbers(rows.filter(arrow_condition(name, value, sign)))
        assert numbers(table.scan(condition).to_arrow()) == expected, (name, value, sign)


READERS = {"delta": (deltalake, duckdb, polars), "iceberg": (pyiceberg, duckdb, polars)}


@pytest.mark.parametrize("reader", [0, *[pytest.param(at, marks=pytest.mark.matrix) for at in (1, 2)]])
def test_a_reader_that_skips_files_loses_no_row(place: Any, reader: int) -> None:
    names = list(VALUES)
    made(place, names)
    check_rows(place, names)
    READERS[place.name][reader](place)
    if place.name == "delta":
        place.table().create_checkpoint()
        READERS[place.name][reader](place)


def test_files_are_skipped_whatever_other_columns_there_are(place: Any) -> None:
    names = [name for name in VALUES if name not in ("float", "bytes")]
    made(place, names, file_rows=1, rows=6)
    expected = {"n": 5, "whole": 2**63 - 1, "money": Decimal("-0.01"), DOTTED: 3, "sp ace": "2"}
    for name, value in expected.items():
        if place.name == "delta":
            condition = pc.field(name) == pa.scalar(value, place.rows().schema.field(name).type)
            found = list(place.table().to_pyarrow_dataset().get_fragments(condition))
        else:
            from pyiceberg.expressions import EqualTo

            found = list(place.table().scan(EqualTo(name, value)).plan_files())
        matching = sum(one[name] == value for one in place.rows().to_pylist())
        assert len(found) == matching < 6, name


def test_a_long_text_ends_in_a_bound_that_is_above_it() -> None:
    texts = ["z" * 64 + LAST + "z", "z" * 63 + "\ud7ff" + "y", "z" * 60 + LAST * 9, "é" * 65]
    for text in texts:
        above = data_files.text_above(text)
        assert above is not None
        assert above.encode() > text.encode()
        assert len(above) <= 64
    assert data_files.text_above(LAST * 65) is None
