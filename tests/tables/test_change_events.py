"""Tables of change events: odd events, tombstones and purges give the same rows in each format and by any cuts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog

import strandline as sl
from strandline.errors import BadRecord
from strandline.followers.run import Batching
from tests.matrix_cases import some

ROW = pa.schema({"id": pa.int64(), "name": pa.string()})


def event(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


DEBEZIUM: list[tuple[bytes, bytes | sl.Op | None]] = [
    (b"1", event(op="c", after={"id": 1, "name": "secret"})),
    (b"2", event(op="c", after={"id": 2, "name": "b"})),
    (b"2", event(op="u", before={"id": 2}, after={"id": 2, "name": "bb"})),
    (b"2", event(op="d", before={"id": 2})),
    (b"2", None),
    (b"3", event(op="c", after={"id": 3})),
    (b"3", event(op=None, after={"id": 3})),
    (b"3", event(op="d")),
    (b"4", event(schema={"type": "struct"}, payload={"op": "r", "after": {"id": 4, "name": "d"}})),
    (b"4", event(schema=None, payload=None)),
    (b"5", event(op="u", before={"id": "no number"}, after={"id": 5})),
    (b"6", event(op="c", after={"id": 6, "added": {"later": 1}})),
    (b"1", sl.Op.PURGE),
    (b"4", b"null"),
    (b"4", b"[]"),
    (b"4", event(op="t")),
]
BEFORE_AFTER: list[tuple[bytes, bytes | sl.Op | None]] = [
    (b"1", event(after={"id": 1, "name": "secret"})),
    (b"2", event(after={"id": 2, "name": "b"})),
    (b"2", event(before={"id": 2}, after={"id": 2, "name": "bb"})),
    (b"2", event(before={"id": 2}, after=None)),
    (b"3", event(after={"id": 3}, before=None)),
    (b"3", None),
    (b"4", event(after={"id": 4, "name": "d"})),
    (b"4", event(before=None, after=None)),
    (b"6", event(after={"id": 6, "added": 1})),
    (b"1", sl.Op.PURGE),
]
FEEDS: dict[str, tuple[Any, list[tuple[bytes, bytes | sl.Op | None]], list[int]]] = {
    "debezium": (sl.values.Debezium(sl.values.Json(ROW)), DEBEZIUM, [6, 9, 10, 13, 14, 15]),
    "before-after": (sl.values.BeforeAfter(sl.values.Json(ROW)), BEFORE_AFTER, [7]),
}
"""Codec, records, and the offsets of those that are bad."""
ALIVE = {(b"4", 4, "d"), (b"6", 6, None)}


class Tables:
    """Tables of one format in a folder."""

    def __init__(self, folder: Path, format_: str) -> None:
        self.folder, self.format = folder, format_
        self.catalog = InMemoryCatalog("t", warehouse=f"file://{folder}/warehouse")

    def sink(self, **options: Any) -> Any:
        if self.format == "delta":
            return sl.DeltaSink(f"{self.folder}/table", dead_letters=f"{self.folder}/letters", **options)
        if self.format == "iceberg":
            return sl.IcebergSink(self.catalog, "shop.t", dead_letters="shop.letters", **options)
        return sl.SqliteSink(f"{self.folder}/shop.db", table="t", dead_letters=True, **options)

    def rows(self, **options: Any) -> list[dict[str, Any]]:
        if self.format != "sqlite":
            found: list[dict[str, Any]] = self.sink(**options).rows().to_pylist()
            return found
        return self.selected("t")

    def letters(self) -> list[int]:
        if self.format == "delta":
            offsets = sl.DeltaSink(f"{self.folder}/letters", mode="append").rows().column("offset").to_pylist()
        elif self.format == "iceberg":
            offsets = self.catalog.load_table("shop.letters").scan().to_arrow().column("offset").to_pylist()
        else:
            offsets = [row["offset"] for row in self.selected("t_dead_letters")]
        return sorted(offsets)

    def selected(self, table: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(f"{self.folder}/shop.db")) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]


@pytest.fixture(params=some(["delta", "iceberg", "sqlite"], 2))
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tables]:
    found = Tables(tmp_path, request.param)
    yield found
    found.catalog.close()


def followed(tables: Tables, feed: str, records: int, **options: Any) -> list[dict[str, Any]]:
    """The rows of a table whose follower is started anew at each third of the log; it equals the log."""
    codec, changes, bad = FEEDS[feed]
    log: Any = sl.log.MemoryLog()
    options["value"] = codec
    for number, (key, value) in enumerate(changes):
        with log.producer() as producer:
            if isinstance(value, sl.Op):
                producer.append(key=key, op=value)
            else:
                producer.append(key=key, value=value)
        if number % 3 == 0 or number == len(changes) - 1:
            sl.follow(log, tables.sink(**options), upto="end", batching=Batching(records=records))
    check = sl.tables.verify(tables.sink(**options), log)
    assert check.is_clean, check.first
    assert tables.letters() == bad
    rows = tables.rows(**options)
    before = sorted(map(repr, rows))
    sl.tables.rebuild(tables.sink(**options), log)
    assert sorted(map(repr, tables.rows(**options))) == before
    assert tables.letters() == bad
    return rows


def named(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["_key"], row["id"], row["name"]


@pytest.mark.matrix
@pytest.mark.parametrize("records", some([100, 1], 1))
@pytest.mark.parametrize("feed", FEEDS)
def test_the_latest_rows_are_those_that_no_event_deleted(tables: Tables, feed: str, records: int) -> None:
    assert {named(row) for row in followed(tables, feed, records)} == ALIVE


@pytest.mark.matrix
@pytest.mark.parametrize("feed", FEEDS)
def test_a_purge_empties_a_row_that_a_delete_would_only_mark(tables: Tables, feed: str) -> None:
    rows = followed(tables, feed, 2, mode="marked")
    assert {named(row) for row in rows if not row["_deleted"]} == ALIVE
    gone = {row["_key"]: row["name"] for row in rows if row["_deleted"]}
    assert gone == {b"1": None, b"2": "bb", b"3": None}


@pytest.mark.parametrize("feed", FEEDS)
def test_every_change_has_the_operation_of_its_event_and_a_purge_its_own(tables: Tables, feed: str) -> None:
    ops = {row["_offset"]: row["_op"] for row in followed(tables, feed, 2, mode="append")}
    _, changes, bad = FEEDS[feed]
    assert ops.keys() == set(range(len(changes))) - set(bad)
    purge = next(offset for offset, (_, value) in enumerate(changes) if value is sl.Op.PURGE)
    assert (ops[0], ops[3], ops[purge]) == (sl.Op.PUT, sl.Op.DELETE, sl.Op.PURGE)


@pytest.mark.matrix
@pytest.mark.parametrize("feed", FEEDS)
def test_versions_end_with_the_events_that_delete_them(tmp_path: Path, feed: str) -> None:
    tables = Tables(tmp_path, "delta")
    rows = followed(tables, feed, 2, mode="history")
    assert {named(row) for row in rows if row["_valid_to_offset"] is None} == ALIVE
    purge = next(offset for offset, (_, value) in enumerate(FEEDS[feed][1]) if value is sl.Op.PURGE)
    assert [row["_valid_to_offset"] for row in rows if row["_key"] == b"1"] == [purge]
    tables.catalog.close()


@pytest.mark.parametrize("share", some([0.29, 0.07, 0.57, 0.58, 1.0], 2))
def test_exactly_the_allowed_share_of_records_may_be_bad(tables: Tables, share: float) -> None:
    """By floats, 0.29 of 100 is less than 29."""
    options = {"mode": "append", "value": sl.values.Json(ROW), "max_bad_share": share}
    most = round(share * 100)
    log: Any = sl.log.MemoryLog()
    for bad in (most, min(most + 1, 100)):
        with log.producer() as producer:
            for number in range(100):
                producer.append(key=b"k", value=b"bad" if number < bad else b"{}")
    first = Batching(records=100)
    if share < 1:
        with pytest.raises(BadRecord, match=f"{most + 1} of 100 records"):
            sl.follow(log, tables.sink(**options), upto="end", batching=first)
        assert tables.sink(**options).cursor(log.log_id).next == 100
        with pytest.raises(BadRecord, match=f"{most + 1} of 100 records"):
            sl.follow(log, tables.sink(**options), upto="end", batching=first)
    else:
        assert sl.follow(log, tables.sink(**options), upto="end", batching=first).next == 200
    assert len(tables.letters()) == (most if share < 1 else 200)


def test_records_that_a_table_has_already_do_not_dilute_the_bad_ones(tables: Tables) -> None:
    options = {"mode": "append", "value": sl.values.Json(ROW), "max_bad_share": 0.4}
    log: Any = sl.log.MemoryLog()
    with log.producer() as producer:
        for value in (*[b"{}"] * 8, b"bad", b"{}"):
            producer.append(key=b"k", value=value)
    records = pa.Table.from_batches(log.read(log.start()))
    at = log.cursor_at(8)
    tables.sink(**options).apply(records.slice(0, 8), since=log.start(), upto=at)
    with pytest.raises(BadRecord, match="1 of 2 records"):
        tables.sink(**options).apply(records, since=log.start(), upto=log.end())
    assert tables.sink(**options).cursor(log.log_id).next == 8


def test_a_rebuild_has_the_same_bound_for_bad_records(tables: Tables) -> None:
    log: Any = sl.log.MemoryLog()
    with log.producer() as producer:
        for value in (b"{}", b"bad"):
            producer.append(key=b"k", value=value)
    options = {"mode": "append", "value": sl.values.Json(ROW)}
    sl.follow(log, tables.sink(**options), upto="end")
    with pytest.raises(BadRecord, match="1 of 2 records"):
        sl.tables.rebuild(tables.sink(**options, max_bad_share=0.4), log)
    sl.tables.rebuild(tables.sink(**options, max_bad_share=0.5), log)
