"""``sl.tables`` on every format: described, verified, rebuilt, compacted and expired beside its follower."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import Conflict, Diverged, Fenced, InvalidInput, NotFound, SchemaRefused
from strandline.log.memory import MemoryLog
from strandline.model.records import record_batch
from strandline.storage.env import Env
from strandline.tables.files.columns import narrowed
from strandline.tables.iceberg.sink import IcebergSink
from strandline.tables.maintain.opening import existing
from strandline.tables.maintain.operations import describe, optimize, rebuild, vacuum, verify
from strandline.tables.sql.sqlite_transaction import SqliteTransaction
from strandline.testing.clock import ManualClock
from tests.matrix_cases import some

ORDER = pa.schema(
    {
        "id": pa.int64(),
        "city": pa.string(),
        "price": pa.decimal128(9, 2),
        "at": pa.timestamp("us", "UTC"),
        "tags": pa.list_(pa.string()),
    }
)


def extend(log: MemoryLog, count: int) -> None:
    first = log.end().next
    rows = range(first, first + count)
    batch = record_batch(
        timestamps=list(rows),
        ops=[1 if n % 7 == 6 else 0 for n in rows],
        keys=[b"k%d" % (n % 5) for n in rows],
        values=[
            json.dumps(
                {"id": n, "city": f"c{n % 3}", "price": "1.50", "at": "2026-01-01T00:00:00Z", "tags": ["a"]}
            ).encode()
            for n in rows
        ],
    )
    with log.producer() as producer:
        producer.append_batch(pa.Table.from_batches([batch]))


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    extend(log, 30)
    return log


class Iceberg:
    def __init__(self, tmp_path):
        place = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
        self.catalog = SqlCatalog("c", **place)

    def sink(self, **options):
        return sl.IcebergSink(self.catalog, "shop.orders", **options)

    def lose(self):
        self.catalog.load_table("shop.orders").delete("id = 29")

    def close(self):
        self.catalog.close()


class Delta:
    def __init__(self, tmp_path):
        self.address = str(tmp_path / "table")

    def sink(self, **options):
        return sl.DeltaSink(self.address, **options)

    def lose(self):
        DeltaTable(self.address).delete("id = 29")

    def close(self):
        pass


class Sqlite:
    def __init__(self, tmp_path):
        self.path = str(tmp_path / "shop.db")
        self.address = f"sqlite:{self.path}#orders"

    def sink(self, **options):
        return sl.SqliteSink(self.path, table="orders", **options)

    def lose(self):
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("DELETE FROM orders WHERE id = 29")

    def close(self):
        pass


class Postgres:
    def __init__(self, server, name):
        self.dsn = f"postgresql:///postgres?host={server.host}&port={server.port}"
        self.server, self.user, self.name = server, server.user, name
        with psycopg.connect(self.dsn, user=self.user) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        self.address = f"{self.dsn}#{name}.orders"

    def sink(self, **options):
        return sl.PostgresSink(self.dsn, table=f"{self.name}.orders", **options)

    def lose(self):
        with psycopg.connect(self.dsn, user=self.user) as connection:
            connection.execute(f"DELETE FROM {self.name}.orders WHERE id = 29")

    def close(self):
        pass


@contextmanager
def opened_place(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A place for tables of this kind."""
    found: Any
    if kind == "postgres":
        server = request.getfixturevalue("postgres")
        monkeypatch.setenv("PGUSER", server.user)
        found = Postgres(server, f"kept_{uuid4().hex}")
    else:
        found = {"delta": Delta, "iceberg": Iceberg, "sqlite": Sqlite}[kind](tmp_path)
    with closing(found):
        yield found


@pytest.fixture(params=["iceberg", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with opened_place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


def modes(place):
    return ("latest", "append", "history") if isinstance(place, Iceberg) else ("latest", "append")


@pytest.mark.matrix
def test_a_table_is_followed_and_built_again_only_with_the_key_that_it_was_made_with(place, log):
    options = {"value": sl.values.Json(ORDER)}
    sl.follow(log, place.sink(key="city", **options), upto="end")
    assert verify(place.sink(key="city", **options), log).is_clean
    extend(log, 10)
    for key in ((), "id", ("city", "id")):
        sink = place.sink(key=key, **options)
        for job in (lambda sink: sl.follow(log, sink, upto="end"), lambda sink: rebuild(sink, log)):
            with pytest.raises(InvalidInput, match=r"made with .*city"):
                job(sink)
    sl.follow(log, place.sink(key="city", **options), upto="end")
    assert verify(place.sink(key="city", **options), log).is_clean


@pytest.mark.parametrize("mode", some(["latest", "append", "history"], 1))
def test_a_table_is_described_verified_and_built_again(place, log, mode):
    if mode not in modes(place):
        return
    options = {"mode": mode, "value": sl.values.Json(ORDER)}
    sink = place.sink(**options)
    with pytest.raises(NotFound):
        describe(sink)
    for end in (10, 20, 30):
        sl.follow(log, sink, upto=end)
    found = describe(sink, log)
    assert (found.kind, found.cursor) == (mode, log.end())
    assert found.rows == {"latest": 4, "append": 30}.get(mode, found.rows)
    assert found.bytes > 0
    check = verify(sink, log)
    assert check.is_clean, check.first
    assert check.rows == found.rows
    place.lose()
    if isinstance(place, Iceberg):
        with pytest.raises(Diverged):
            verify(place.sink(**options), log)
        sink = place.sink(**options)
        sink.adopt(log.log_id)
    check = verify(sink, log)
    assert (check.missing, check.extra) == (1, 0)
    assert "29" in check.first[0]
    rebuild(place.sink(**options), log)
    assert verify(place.sink(**options), log).is_clean
    extend(log, 10)
    if not isinstance(place, Iceberg):  # whose followers take over what a rebuild committed
        with pytest.raises(Fenced):
            sink.apply(pa.Table.from_batches(list(log.read(30))), since=log.cursor_at(30), upto=log.end())
    sl.follow(log, place.sink(**options), upto="end")
    assert verify(place.sink(**options), log).is_clean


def test_a_table_that_began_in_the_middle_is_verified_and_rebuilt_from_there(place, log):
    sink = place.sink(value=sl.values.Json(ORDER))
    sl.follow(log, sink, start=22, upto="end")
    assert sink.start() == 22
    assert verify(sink, log).is_clean
    rebuild(sink, log)
    assert sink.start() == 22
    assert verify(sink, log).is_clean


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", "latest"])
def test_values_of_a_wider_schema_that_a_table_cannot_hold_are_named(place, log, mode):
    narrow = sl.values.Json(pa.schema({"id": pa.int32(), "city": pa.string()}))
    wide = sl.values.Json(
        pa.schema({"id": pa.int64(), "city": pa.string(), "tags": pa.list_(pa.string()), "x": pa.bool_()})
    )
    sl.follow(log, place.sink(mode=mode, value=narrow), upto="end")
    with pytest.raises(SchemaRefused, match=r"values of tags \(list.*\), for which.*'strandline table rebuild'"):
        verify(place.sink(mode=mode, value=wide), log)
    assert rebuild(place.sink(mode=mode, value=wide), log) == log.end()
    assert verify(place.sink(mode=mode, value=wide), log).is_clean


def told_changes(place):
    """What the history of a table tells of changes, the oldest first."""
    if isinstance(place, Delta):
        found = [one.get("strandline.change") for one in reversed(DeltaTable(place.address).history())]
    else:
        snapshots = place.catalog.load_table("shop.orders").metadata.snapshots
        found = [one.summary.additional_properties.get("strandline.change") for one in snapshots]
    return [one for one in found if one]


@pytest.mark.parametrize("kind", [Delta, Iceberg])
def test_the_history_tells_changed_columns_and_rebuilds(kind, tmp_path, log):
    place = kind(tmp_path)
    for columns in ({"id": pa.int32()}, {"id": pa.int32(), "city": pa.string()}, {"id": pa.int64()}):
        sl.follow(log, place.sink(mode="append", value=sl.values.Json(pa.schema(columns))), upto="end")
        extend(log, 5)
    rebuild(
        place.sink(mode="append", value=sl.values.Json(pa.schema({"id": pa.int64(), "x": pa.bool_()}))), log, start=10
    )
    *columns, last = told_changes(place)
    assert [one.split(" (")[0] for one in columns] == ["new columns: city", "wider columns: id"]
    assert last.startswith("all rows built again from offset 10 up to 45")
    assert ("x (bool)" in last) is (kind is Iceberg)  # Delta's commit has the columns themselves
    place.close()


def test_values_that_are_too_wide_for_a_column_are_named():
    rows = pa.table({"id": pa.array([1, 1 << 40]), "x": pa.nulls(2)})
    with pytest.raises(SchemaRefused, match=r"values of id \(int64; the table has int32\), for which"):
        narrowed(rows, pa.schema({"id": pa.int32()}))
    assert narrowed(rows.slice(0, 1), pa.schema({"id": pa.int32()})).schema == pa.schema({"id": pa.int32()})


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", "latest", "history"])
def test_a_table_is_compared_after_its_log_has_evolved_and_before_it_has_new_records(place, tmp_path, mode):
    if mode not in modes(place):
        return
    log = sl.open(tmp_path / "log", create=True, value=sl.values.Json(pa.schema({"id": pa.int32()})))
    with log.producer() as producer:
        producer.append(key=b"k", value={"id": 1}).result()
    sl.follow(log, place.sink(mode=mode, value="log"), upto="end")
    log.evolve_value(sl.values.Json(pa.schema({"id": pa.int64(), "gift": pa.bool_()})))
    assert verify(place.sink(mode=mode, value="log"), log).is_clean
    with log.producer() as producer:
        producer.append(key=b"l", value={"id": 1 << 40, "gift": True}).result()
    assert verify(place.sink(mode=mode, value="log"), log).is_clean
    sl.follow(log, place.sink(mode=mode, value="log"), upto="end")
    assert verify(place.sink(mode=mode, value="log"), log).rows == 2


@pytest.mark.matrix
def test_a_follower_that_adds_a_column_while_a_comparison_begins_makes_no_difference(place, tmp_path, monkeypatch):
    log = sl.open(tmp_path / "log", create=True, value=sl.values.Json(pa.schema({"id": pa.int32()})))
    with log.producer() as producer:
        producer.append(key=b"k", value={"id": 1}).result()
    sl.follow(log, place.sink(value="log"), upto="end")
    sink, meet, events = place.sink(value="log"), type(place.sink()).meet, [True]

    def late(self, met):
        meet(self, met)
        while events:
            events.pop()
            log.evolve_value(sl.values.Json(pa.schema({"id": pa.int64(), "gift": pa.bool_()})))
            with log.producer() as producer:
                producer.append(key=b"l", value={"id": 2, "gift": True}).result()
            sl.follow(log, place.sink(value="log"), upto="end")

    monkeypatch.setattr(type(sink), "meet", late)
    found = verify(sink, log)
    assert (found.is_clean, found.rows) == (True, 2), found.first


def test_a_rebuild_refuses_a_table_of_another_log(place, log):
    sl.follow(log, place.sink(value=sl.values.Json(ORDER)), upto="end")
    other = MemoryLog()
    extend(other, 40)
    with pytest.raises(Diverged):
        rebuild(place.sink(value=sl.values.Json(ORDER)), other)
    assert verify(place.sink(value=sl.values.Json(ORDER)), log).is_clean


@pytest.mark.matrix
def test_a_rebuild_stores_each_dead_letter_once(place):
    log = MemoryLog()
    with log.producer() as producer:
        for value in (b'{"id": 1}', b"no JSON", b'{"id": 2}', b"{"):
            producer.append(key=value, value=value)
    letters = {"dead_letters": "shop.letters"} if isinstance(place, Iceberg) else {"dead_letters": True}
    options = {"value": sl.values.Json(ORDER), "mode": "append", **letters}
    sl.follow(log, place.sink(**options), upto="end")
    rebuild(place.sink(**options), log)
    assert verify(place.sink(**options), log).rows == 2
    if isinstance(place, Iceberg):
        assert place.catalog.load_table("shop.letters").scan().to_arrow()["offset"].to_pylist() == [1, 3]
    elif isinstance(place, Sqlite):
        with closing(sqlite3.connect(place.path)) as connection:
            found = connection.execute('SELECT "offset" FROM orders_dead_letters ORDER BY 1').fetchall()
        assert found == [(1,), (3,)]


@pytest.mark.matrix
def test_files_of_an_iceberg_table_are_joined_and_snapshots_expire_but_for_the_proof(tmp_path, log):
    place = Iceberg(tmp_path)
    sink = place.sink(mode="append", value=sl.values.Json(ORDER))
    for end in range(5, 31, 5):
        sl.follow(log, sink, upto=end)
    assert describe(sink).files == 6
    assert optimize(place.sink(mode="append", value=sl.values.Json(ORDER))) == 5
    assert describe(sink).files == 1
    assert verify(sink, log).is_clean
    extend(log, 5)
    sl.follow(log, sink, upto="end")
    assert vacuum(sink) == 0
    later = ManualClock(now=int((datetime.now(UTC) + timedelta(days=30)).timestamp() * 1e6))
    assert sink.vacuumed(1, env=Env(clock=later)) == 6, "the files that were joined"
    assert len(place.catalog.load_table("shop.orders").snapshots()) == 1
    assert verify(place.sink(mode="append", value=sl.values.Json(ORDER)), log).is_clean
    extend(log, 5)
    sl.follow(log, place.sink(mode="append", value=sl.values.Json(ORDER)), upto="end")
    with pytest.raises(InvalidInput, match="has no files to join"):
        optimize(place.sink(mode="latest"))
    place.close()


def test_a_compaction_beside_its_follower_loses_no_row(tmp_path, log, monkeypatch):
    place = Iceberg(tmp_path)
    options = {"mode": "append", "value": sl.values.Json(ORDER)}
    for end in (10, 20):
        sl.follow(log, place.sink(**options), upto=end)
    begin = IcebergSink.begin

    def beside(self, **arguments):
        found = begin(self, **arguments)
        monkeypatch.undo()
        optimize(place.sink(**options))
        return found

    monkeypatch.setattr(IcebergSink, "begin", beside)
    sl.follow(log, place.sink(**options), upto=30)
    assert verify(place.sink(**options), log).is_clean
    place.close()


def test_databases_say_that_they_need_neither_optimize_nor_vacuum(tmp_path, log):
    sink = Sqlite(tmp_path).sink(mode="append")
    sl.follow(log, sink, upto="end")
    for upkeep in (optimize, vacuum):
        with pytest.raises(InvalidInput, match="The database keeps"):
            upkeep(sink)


def test_a_commit_during_a_comparison_is_told_from_a_difference(tmp_path, log, monkeypatch):
    place = Sqlite(tmp_path)
    sl.follow(log, place.sink(), upto=20)
    compared = SqliteTransaction.compared

    def meanwhile(self, expected, schema):
        rows = list(expected)
        sl.follow(log, place.sink(), upto=30)
        return compared(self, rows, schema)

    monkeypatch.setattr(SqliteTransaction, "compared", meanwhile)
    with pytest.raises(Conflict, match="try again"):
        verify(place.sink(), log)


# --- by address ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("kind", ["delta", "sqlite", "postgres"])
def test_a_table_is_found_by_its_address_with_what_it_records(tmp_path, log, kind, soft, request, monkeypatch):
    with opened_place(kind, request, tmp_path, monkeypatch) as place:
        sl.follow(log, place.sink(value=sl.values.Json(ORDER), mode="marked" if soft else "latest"), upto="end")
        found = existing(place.address, value=sl.values.Json(ORDER))
        assert verify(found, log).is_clean
        assert describe(found, log).cursor == log.end()
        with pytest.raises(InvalidInput, match="opened without their codec"):
            sl.follow(log, existing(place.address), upto="end")


def test_addresses_that_name_no_table_and_passwords_are_refused(tmp_path):
    for address in ("sqlite:x.db", "iceberg://catalog", "postgresql://host/db", "postgresql://me:secret@host/db#t"):
        with pytest.raises(InvalidInput) as caught:
            existing(address)
        assert "secret" not in str(caught.value)
    with pytest.raises(NotFound):
        existing(f"sqlite:{tmp_path}/x.db#orders")
    for call in (verify, sl.tables.replay_letters, sl.tables.letters):
        with pytest.raises(InvalidInput, match="sink is a MaintainedTable"):
            call(str(tmp_path / "table"), str(tmp_path / "log"))


@pytest.mark.matrix
def test_the_command_line_looks_after_a_table_in_sqlite_and_in_an_iceberg_catalog(tmp_path, monkeypatch):
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        for n in range(8):
            producer.append(key=b"k%d" % (n % 3), value=b"%d" % n)
    warehouse = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    for name, value in {**warehouse, "type": "sql"}.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__KEPT__{name.upper()}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # it was read when the library was imported
    catalog = SqlCatalog("kept", **warehouse)
    sl.follow(log, sl.IcebergSink(catalog, "shop.orders"), upto="end")
    catalog.close()
    place = Sqlite(tmp_path)
    sl.follow(log, place.sink(), upto="end")
    for address in (place.address, "iceberg://kept/shop.orders"):
        for command, answer in (
            (["describe", address, str(tmp_path / "log")], "3 rows"),
            (["verify", address, str(tmp_path / "log")], "each is as the log says"),
            (["repair", address, str(tmp_path / "log")], "at offset 8"),
            (["rebuild", address, str(tmp_path / "log"), "--yes"], "3 rows were built again"),
            (["verify", address, str(tmp_path / "log")], "each is as the log says"),
        ):
            done = CliRunner().invoke(app, ["table", *command])
            assert (done.exit_code, answer in done.output) == (0, True), done.output
