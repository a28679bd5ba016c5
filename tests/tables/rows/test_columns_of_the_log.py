"""Tables with ``value="log"``: the columns that the log names, version by version, and never by accident."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.memory import InMemoryCatalog

import strandline as sl
from strandline.errors import InvalidInput, SchemaRefused, Unsupported
from tests.matrix_cases import some

FIRST = sl.values.Json(pa.schema({"id": pa.int32()}))
SECOND = sl.values.Json(pa.schema({"id": pa.int64(), "note": pa.string()}))


class _Delta:
    def __init__(self, tmp_path: Path) -> None:
        self.url = str(tmp_path / "table")

    def sink(self, **options: Any) -> Any:
        return sl.DeltaSink(self.url, **options)

    def rows(self) -> list[dict[str, Any]]:
        return DeltaTable(self.url).to_pyarrow_table().to_pylist()


class _Iceberg(_Delta):
    def __init__(self, tmp_path: Path) -> None:
        self.catalog = InMemoryCatalog("t", warehouse=f"file://{tmp_path}/warehouse")

    def sink(self, **options: Any) -> Any:
        return sl.IcebergSink(self.catalog, "shop.orders", **options)

    def rows(self) -> list[dict[str, Any]]:
        return self.catalog.load_table("shop.orders").scan().to_arrow().to_pylist()


class _Sqlite(_Delta):
    def sink(self, **options: Any) -> Any:
        return sl.SqliteSink(self.url, table="orders", **options)

    def rows(self) -> list[dict[str, Any]]:
        database = sqlite3.connect(self.url)
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("SELECT * FROM orders")]


KINDS = [_Delta, _Iceberg, _Sqlite]


def test_a_log_without_columns_makes_no_table(tmp_path):
    from strandline.values.recorded import as_version

    log = sl.log.MemoryLog()
    log._values = (as_version(sl.values.Arrow()),)  # as a former release recorded it
    with pytest.raises(InvalidInput, match=r"has no columns: record a schema with the log's evolve_value"):
        sl.follow(log, sl.DeltaSink(str(tmp_path / "table"), value="log"), upto="end")


def append(log: Any, *values: Any) -> None:
    with log.producer() as producer:
        for value in values:
            producer.append(key=b"k", value=value)


def seen(table: _Delta, *names: str) -> list[tuple[Any, ...]]:
    rows = sorted(table.rows(), key=lambda row: row.get("_offset", row.get("offset", 0)))
    return [tuple(row[name] for name in names) for row in rows]


@pytest.mark.parametrize("kind", some(KINDS, 1))
def test_a_table_has_the_fields_that_its_log_names_and_takes_a_new_version_while_it_runs(
    tmp_path: Path, kind: type[_Delta]
) -> None:
    log, table = sl.open(f"{tmp_path}/log", create=True, value=FIRST), kind(tmp_path)
    append(log, {"id": 1})
    sink = table.sink(mode="append", value="log")
    sl.follow(log, sink, upto="end")
    assert seen(table, "id", "_offset") == [(1, 0)]
    log.evolve_value(SECOND)
    append(log, {"id": 1 << 40, "note": "n"})
    since, upto = sink.cursor(log.log_id), log.end()
    sink.apply(pa.Table.from_batches(log.read(1)), since=since, upto=upto)  # a follower that was not started again
    assert seen(table, "id", "note", "_offset") == [(1, None, 0), (1 << 40, "n", 1)]
    append(log, {"id": 3})
    sl.follow(log, table.sink(mode="append", value="log"), upto="end")
    assert seen(table, "id") == [(1,), (1 << 40,), (3,)]


@pytest.mark.parametrize("kind", some(KINDS, 1))
def test_a_table_of_plain_records_keeps_its_columns_when_its_log_names_a_codec(
    tmp_path: Path, kind: type[_Delta], caplog: pytest.LogCaptureFixture
) -> None:
    log, table = sl.open(f"{tmp_path}/log", create=True), kind(tmp_path)
    append(log, b"old")
    sl.follow(log, table.sink(mode="append", value="log"), upto="end")
    log.evolve_value(FIRST)
    append(log, {"id": 1})
    with caplog.at_level(logging.WARNING):
        sl.follow(log, table.sink(mode="append", value="log"), upto="end")
    assert "keeps the columns of records" in caplog.text
    append(log, {"id": 2})
    sl.follow(log, table.sink(mode="append"), upto="end")
    assert seen(table, "value") == [(b"old",), (b'{"id":1}',), (b'{"id":2}',)]
    append(log, {"id": 3})
    with pytest.raises(SchemaRefused):  # only a codec that is given refuses the table
        sl.follow(log, table.sink(mode="append", value=FIRST), upto="end")


def test_without_value_a_table_of_a_typed_log_has_the_records_own_columns(tmp_path: Path) -> None:
    log, table = sl.open(f"{tmp_path}/log", create=True, value=FIRST), _Delta(tmp_path)
    append(log, {"id": 1})
    sl.follow(log, table.sink(), upto="end")
    assert seen(table, "key", "value") == [(b"k", b'{"id":1}')]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_that_has_not_met_its_log_says_so(tmp_path: Path, kind: type[_Delta]) -> None:
    log, table = sl.open(f"{tmp_path}/log", create=True, value=FIRST), kind(tmp_path)
    with pytest.raises(InvalidInput, match=r"pass the sink to sl\.follow"):
        table.sink(value="log").cursor(log.log_id)
    with pytest.raises(InvalidInput):
        table.sink(value="logs")
    with sl.open("grpc://127.0.0.1:1") as node, pytest.raises(Unsupported, match="Give the codec"):
        table.sink(value="log").meet(node)


def test_verify_and_rebuild_decode_as_the_log_says(tmp_path: Path) -> None:
    log, table = sl.open(f"{tmp_path}/log", create=True, value=FIRST), _Delta(tmp_path)
    append(log, {"id": 1}, {"id": 2})
    sl.follow(log, table.sink(value="log"), upto="end")
    found = sl.tables.existing(table.url, value="log")
    assert sl.tables.verify(found, log).is_clean
    log.evolve_value(SECOND)
    assert sl.tables.rebuild(sl.tables.existing(table.url, value="log"), log).next == 2
    assert seen(table, "id", "note") == [(2, None)]
    assert sl.tables.describe(sl.tables.existing(table.url, value="log"), log).cursor.next == 2


def _only_ids(changes: pa.Table) -> pa.Table:
    return changes.select(["id"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_that_drops_the_records_columns_goes_on_getting_the_values_fields(
    tmp_path: Path, kind: type[_Delta]
) -> None:
    log, table = sl.open(f"{tmp_path}/log", create=True, value=FIRST), kind(tmp_path)
    for number in (1, 2):
        append(log, {"id": number})
        sl.follow(log, table.sink(mode="append", value="log", transform=_only_ids), upto="end")
    assert sorted(row["id"] for row in table.rows()) == [1, 2]
