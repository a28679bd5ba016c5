"""Self-describing values in tables: each brings columns, or is a dead letter, the same in all formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from strandline.errors import BadRecord


def one(**columns: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch(columns)
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def number(name: str, value: Any = 1) -> bytes:
    return one(**{name: pa.array([value])})


def delta(folder: Path, has_letters: bool, **options: Any) -> Any:
    return sl.DeltaSink(f"{folder}/table", dead_letters=f"{folder}/letters" if has_letters else None, **options)


def iceberg(folder: Path, has_letters: bool, **options: Any) -> Any:
    catalog = SqlCatalog("test", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace_if_not_exists("shop")
    return sl.IcebergSink(catalog, "shop.orders", dead_letters="shop.letters" if has_letters else None, **options)


def sqlite(folder: Path, has_letters: bool, **options: Any) -> Any:
    return sl.SqliteSink(f"{folder}/orders.db", table="orders", dead_letters=has_letters, **options)


@pytest.fixture(
    params=["sqlite", "delta", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("iceberg", "postgres"))]
)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Makes the sink of a table; again and again the same."""
    if request.param == "postgres":
        server, name = request.getfixturevalue("postgres"), f"orders_{uuid4().hex}"
        dsn = f"host={server.host} port={server.port} user={server.user} dbname=postgres"
        return lambda has_letters=True, **options: sl.PostgresSink(dsn, table=name, dead_letters=has_letters, **options)
    opened = {"sqlite": sqlite, "delta": delta, "iceberg": iceberg}[request.param]
    return lambda has_letters=True, **options: opened(tmp_path, has_letters, **options)


def columns(sink: Any) -> set[str]:
    return {name for name, _ in sink.size().columns if not name.startswith("_")}


def letters(sink: Any, log: Any) -> dict[int, str]:
    found = sl.tables.letters(sink, log)
    return dict(zip(found.column("offset").to_pylist(), found.column("reason").to_pylist(), strict=True))


def append(log: Any, *values: bytes) -> None:
    with log.producer() as producer:
        for value in values:
            producer.append(key=value[:1000], value=value).result(10)


HOSTILE = {
    "_offset": "begins with an underscore",
    "_key": "begins with an underscore",
    "a\0b": "has a NUL",
    "n" * 64: "more than 63 bytes",
}


def test_a_value_that_no_table_can_hold_is_a_dead_letter_and_a_new_field_is_a_column(make: Callable[..., Any]) -> None:
    log = sl.open(f"memory://{uuid4()}", create=True)
    wide = one(**{f"c{at}": pa.array([at]) for at in range(2000)})
    append(log, number("id"), *map(number, HOSTILE), wide, number("id", "text"), number("extra", 2.5), number("id", 2))
    sink = make(value=sl.values.Arrow(), mode="append")
    sl.follow(log, sink, upto="end")
    assert columns(sink) == {"id", "extra"}
    found = letters(sink, log)
    assert set(found) == {1, 2, 3, 4, 5, 6}
    for at, reason in enumerate([*HOSTILE.values(), "columns", "int64"], start=1):
        assert reason in found[at]
    # In later commits, too, by a follower that knows only the table.
    append(log, number("id", True), number("later", 1), number("id", 3))
    sink = make(value=sl.values.Arrow(), mode="append")
    sl.follow(log, sink, upto="end")
    assert columns(sink) == {"id", "extra", "later"}
    assert set(letters(sink, log)) == {1, 2, 3, 4, 5, 6, 9}
    assert sl.tables.replay_letters(sink, log).unreadable == 7, "each is compared with the table, not with the others"
    assert sl.tables.verify(sink, log).is_clean
    assert sink.size().rows == 5


@pytest.mark.matrix
def test_a_column_that_no_data_file_can_have_is_a_dead_letter(make: Callable[..., Any]) -> None:
    log = sl.open(f"memory://{uuid4()}", create=True)
    thin = pa.Array.from_buffers(pa.decimal128(3, 10), 1, [None, pa.py_buffer((7).to_bytes(16, "little"))])
    odd = {"thin": thin, "round": thin.view(pa.decimal128(5, -3)), "empty": pa.array([b""], pa.binary(0))}
    values = [one(**{name: column}) for name, column in odd.items()]
    append(log, number("id"), *values, one(lines=pa.ListArray.from_arrays([0, 1], thin)), number("id", 2))
    for _ in "ab":
        sink = make(value=sl.values.Arrow(), mode="append")
        assert sl.follow(log, sink, upto="end").next == 6
    assert sl.tables.verify(sink, log).is_clean
    assert sink.size().rows + len(letters(sink, log)) == 6


@pytest.mark.matrix
@pytest.mark.parametrize("tombstones", ["key", pytest.param(None, marks=pytest.mark.matrix)])
def test_records_before_the_first_with_the_key_are_dead_letters(make: Callable[..., Any], tombstones: Any) -> None:
    log = sl.open(f"memory://{uuid4()}", create=True)
    append(log, number("other"))
    options = {"value": sl.values.Arrow(), "mode": "latest", "key": "id", "tombstones": tombstones}
    with pytest.raises(BadRecord, match="It has no key"):
        sl.follow(log, make(has_letters=False, **options), upto="end")
    sl.follow(log, make(**options), upto="end")
    append(log, number("id"), number("other", 2), number("id", 2))
    sink = make(**options)
    sl.follow(log, sink, upto="end")
    assert set(letters(sink, log)) == {0, 2}
    assert columns(sink) == {"id", "other"}
    assert sl.tables.verify(sink, log).is_clean
    assert sink.size().rows == 2


@pytest.mark.matrix
def test_letters_bring_columns_when_they_are_replayed(make: Callable[..., Any]) -> None:
    log = sl.open(f"memory://{uuid4()}", create=True)
    append(log, number("id"), one(id=pa.array([2]), extra=pa.array(["x"]), name=pa.array(["y"])), number("id", "text"))
    sl.follow(log, make(value=sl.values.Arrow(max_columns=2), mode="append"), upto="end")
    sink = make(value=sl.values.Arrow(), mode="append")
    replayed = sl.tables.replay_letters(sink, log)
    assert (replayed.applied, replayed.unreadable) == (1, 1)
    assert columns(sink) == {"id", "extra", "name"}
    assert set(letters(sink, log)) == {2}
    assert sl.tables.verify(sink, log).is_clean


def test_without_dead_letters_a_new_field_is_a_column_and_a_hostile_one_stops_the_follower(
    make: Callable[..., Any],
) -> None:
    log = sl.open(f"memory://{uuid4()}", create=True)
    append(log, number("id"), number("extra", 2.5))
    sink = make(has_letters=False, value=sl.values.Arrow(), mode="append")
    sl.follow(log, sink, upto="end")
    assert columns(sink) == {"id", "extra"}
    append(log, number("_offset"))
    with pytest.raises(BadRecord, match="offset 2 cannot become a row: The value's field '_offset' begins with an"):
        sl.follow(log, sink, upto="end")


@pytest.mark.matrix
def test_the_limit_on_columns_is_that_of_the_table_and_not_of_a_batch(make: Callable[..., Any]) -> None:
    log = sl.open(f"memory://{uuid4()}", create=True)
    for at in range(4):
        append(log, number(f"c{at}"))
        sink = make(value=sl.values.Arrow(max_columns=3), mode="append")
        sl.follow(log, sink, upto="end")
    assert columns(sink) == {"c0", "c1", "c2"}
    assert "max_columns" in letters(sink, log)[3]
