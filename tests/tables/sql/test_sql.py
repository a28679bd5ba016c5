"""Tables in SQLite and PostgreSQL: the contract, typed columns, dead letters, stale followers and changed tables."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager
from decimal import Decimal
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import (
    BadRecord,
    CorruptData,
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    NullKey,
    SchemaRefused,
    TransientStorageError,
    UsedAcrossFork,
    WrongKind,
)
from strandline.log.memory import MemoryLog
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, Op, record_batch, with_offsets
from strandline.storage.clock import CHANCE
from strandline.tables.rows.kinds import RAW, merge_latest
from strandline.tables.rows.shape import TableShape
from strandline.tables.sql import columns
from strandline.tables.sql import postgres as postgres_tables
from strandline.tables.sql.sink import SqlSink
from strandline.tables.sql.sqlite_transaction import SqliteTransaction
from strandline.testing.sinks import DELETE, LOG, changes
from strandline.testing.stores import together
from tests.contracts.tables import TableContract
from tests.forking import in_a_child
from tests.matrix_cases import some

ORDERS = pa.schema({"id": pa.int32(), "customer": pa.string(), "price": pa.float64()})


class Sqlite:
    """A SQLite file: how a test makes sinks in it, and looks into it as any other program does."""

    offsets_type, number_type = "INTEGER", "INTEGER"

    def __init__(self, path):
        self.path = str(path)

    def sink(self, table="orders", **options):
        return sl.SqliteSink(self.path, table=table, **options)

    def query(self, statement):
        with closing(sqlite3.connect(self.path)) as connection, connection:
            return connection.execute(statement).fetchall()

    def columns(self, table="orders"):
        return {row[1]: row[2] for row in self.query(f'PRAGMA table_info("{table}")')}

    def has_table(self, table="orders"):
        return os.path.exists(self.path) and bool(self.columns(table))


class Postgres:
    """A schema of its own on the server."""

    offsets_type, number_type = "bigint", "integer"

    def __init__(self, server, name):
        place = f"host={server.host} port={server.port} user={server.user} dbname=postgres"
        self.dsn = f"{place} options='-c search_path={name}'"
        self.name = name
        self.query(f"CREATE SCHEMA {name}")
        self.sinks = []

    def sink(self, table="orders", **options):
        self.sinks.append(sl.PostgresSink(self.dsn, table=table, **options))
        return self.sinks[-1]

    def query(self, statement):
        with psycopg.connect(self.dsn) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def columns(self, table="orders"):
        return dict(
            self.query(
                "SELECT column_name, data_type FROM information_schema.columns "
                f"WHERE table_name = '{table}' AND table_schema = '{self.name}'"
            )
        )

    def has_table(self, table="orders"):
        return bool(self.columns(table))

    def close(self):
        for sink in self.sinks:
            sink.close()


_NUMBERS = iter(range(1, 10_000))


@pytest.fixture(params=["sqlite", "postgres"])
def database(request, tmp_path):
    if request.param == "sqlite":
        yield Sqlite(tmp_path / "tables.db")
        return
    found = Postgres(request.getfixturevalue("postgres"), f"tables_{next(_NUMBERS)}")
    yield found
    found.close()


def latest_of(database, table="orders"):
    rows = database.query(f'SELECT key, value FROM "{table}"')
    return {bytes(key): None if value is None else bytes(value) for key, value in rows}


class _Contract(TableContract):
    mode = "latest"
    names = ("create", "stage", "lock", "read_table", "merge", "store")
    locked = frozenset({"create", "merge", "store"})

    @pytest.fixture
    def sink(self, database, monkeypatch):
        session = SqliteTransaction if isinstance(database, Sqlite) else postgres_tables.PostgresTransaction
        monkeypatch.setattr(type(self), "steps", [(session, name) for name in self.names])
        return self.opened(database)

    def opened(self, database):
        sink = database.sink(mode=self.mode)
        sink.database = database
        return sink

    def again(self, sink):
        return self.opened(sink.database)

    def offsets(self, sink):
        return [offset for (offset,) in sink.database.query('SELECT "offset" FROM orders')]

    def content(self, sink):
        if self.mode == "latest":
            return latest_of(sink.database)
        newest = {}
        for key, value, op in sink.database.query('SELECT key, value, op FROM orders ORDER BY "offset"'):
            if op == Op.PUT:
                newest[bytes(key)] = None if value is None else bytes(value)
            else:
                newest.pop(bytes(key), None)
        return newest


class TestLatest(_Contract):
    def test_a_record_without_key_is_refused_with_its_position_and_nothing_is_applied(self, sink):
        at = self.apply(sink, 0, (b"a", b"1"))
        with pytest.raises(NullKey, match="offset 2 has no key"):
            self.apply(sink, 1, (b"b", b"2"), (None, b"3"))
        assert sink.cursor(LOG) == at
        assert self.content(sink) == {b"a": b"1"}


@pytest.mark.matrix
class TestAppend(_Contract):
    mode = "append"
    keeps_all = True


def apply(sink, first, *rows):
    upto = Cursor(LOG, first + len(rows))
    sink.apply(changes(first, *rows), since=upto.at(first), upto=upto)
    return upto


def typed(database, schema=ORDERS, **options):
    return database.sink(value=sl.values.Json(schema), **options)


# --- columns ---------------------------------------------------------------------------------------------------------


def test_values_become_typed_columns(database):
    apply(typed(database), 0, (b"a", b'{"id": 7, "customer": "Ann", "price": 2.5}'), (b"b", b"{}"))
    assert database.query('SELECT id, customer, price, "_offset" FROM orders ORDER BY "_offset"') == [
        (7, "Ann", 2.5, 0),
        (None, None, None, 1),
    ]
    assert {name: database.columns()[name] for name in ("id", "_offset")} == {
        "id": database.number_type,
        "_offset": database.offsets_type,
    }


def test_new_fields_add_columns_and_wider_numbers_widen_them(database):
    apply(typed(database), 0, (b"a", b'{"id": 7}'))
    wider = pa.schema({"id": pa.int64(), "vip": pa.bool_(), "price": pa.float64()})
    apply(typed(database, wider), 1, (b"b", b'{"id": 5000000000, "vip": true}'))
    rows = database.query('SELECT id, vip, customer FROM orders ORDER BY "_offset"')
    assert rows == [(7, None, None), (5_000_000_000, True, None)]
    apply(typed(database), 2, (b"b", b'{"id": 8, "customer": "Bob"}'))  # a follower that was not updated yet
    assert database.query("SELECT id, vip, customer FROM orders WHERE id = 8") == [(8, None, "Bob")]


def test_a_field_of_another_type_is_refused_and_nothing_is_applied(database):
    at = apply(typed(database), 0, (b"a", b'{"id": 7}'))
    changed = typed(database, pa.schema({"id": pa.string()}))
    with pytest.raises(SchemaRefused, match="'id'"):
        apply(changed, 1, (b"b", b'{"id": "x"}'))
    assert changed.cursor(LOG) == at


EVERYTHING = pa.table(
    {
        "b": pa.array([True, None]),
        "i8": pa.array([-8, None], pa.int8()),
        "u16": pa.array([65535, None], pa.uint16()),
        "u32": pa.array([2**32 - 1, None], pa.uint32()),
        "u64": pa.array([2**64 - 1, None], pa.uint64()),
        "f32": pa.array([1.5, None], pa.float32()),
        "d": pa.array([10_957, None], pa.int32()).cast(pa.date32()),
        "t": pa.array([1_000_001, None], pa.int64()).cast(pa.time64("us")),
        "at": pa.array([1_000_001, None], pa.int64()).cast(pa.timestamp("us")),
        "zoned": pa.array([1_000_001, None], pa.int64()).cast(pa.timestamp("us", "Europe/Berlin")),
        "money": pa.array([None, None], pa.decimal128(10, 2)),
        "tags": pa.array([["x", "y"], None]),
        "address": pa.array([{"zip": "1", "geo": b"\1"}, None], pa.struct({"zip": pa.string(), "geo": pa.binary()})),
        'odd "name" %s $1': pa.array(["ü", None]),
    }
)


def with_everything(rows):
    return pa.concat_tables([EVERYTHING.slice(0, rows.num_rows)]).add_column(0, "_offset", rows.column("_offset"))


def test_every_type_of_column_is_stored_and_nulls_stay_null(database):
    sink = database.sink(mode="append", transform=with_everything)
    sink.apply(changes(0, (b"a", b"1"), (b"b", b"2")), since=Cursor(LOG, 0), upto=Cursor(LOG, 2))
    full, empty = (
        [None if one is None else str(one) for one in row]
        for row in database.query('SELECT * FROM orders ORDER BY "_offset"')
    )
    assert empty == ["1", *[None] * EVERYTHING.num_columns]
    b, i8, u16, u32, u64, f32, d, t, at, zoned, money, tags, address, odd = full[1:]
    assert b in {"True", "1"}
    assert [i8, u16, u32, u64, f32, d] == ["-8", "65535", str(2**32 - 1), str(2**64 - 1), "1.5", "2000-01-01"]
    assert (t, at[:26], zoned[:26]) == ("00:00:01.000001", "1970-01-01 00:00:01.000001", "1970-01-01 00:00:01.000001")
    assert money is None
    assert (eval(tags), eval(address), odd) == (["x", "y"], {"zip": "1", "geo": "AQ=="}, "ü")


def test_headers_are_stored_as_json(database):
    record = changes(0, (b"a", b"1"))
    headers = pa.array([[("source", b"x"), ("source", b"y")]], record.schema.field("headers").type)
    database.sink().apply(
        record.set_column(5, READ_SCHEMA.field("headers"), headers), since=Cursor(LOG, 0), upto=Cursor(LOG, 1)
    )
    ((found,),) = database.query("SELECT headers FROM orders")
    assert (eval(found) if isinstance(found, str) else found) == [["source", "eA=="], ["source", "eQ=="]]


def test_the_key_of_a_row_may_be_fields_of_its_value(database):
    sink = typed(database, key="id")
    apply(sink, 0, (b"x", b'{"id": 1, "price": 1.0}'), (b"y", b'{"id": 1, "price": 2.0}'), (b"x", b'{"id": 2}'))
    assert database.query("SELECT id, price FROM orders ORDER BY id") == [(1, 2.0), (2, None)]


@pytest.mark.parametrize("fields", [["a", "A"], ["a\0b"], [""]])
def test_names_that_a_database_confuses_are_refused_before_anything_is_stored(database, fields):
    with pytest.raises((SchemaRefused, InvalidInput)):
        typed(database, pa.schema([pa.field(name, pa.string()) for name in fields]))


def test_postgres_refuses_names_that_it_would_cut_or_keeps_for_itself(postgres):
    for name in ("x" * 64, "ctid"):
        with pytest.raises(SchemaRefused):
            sl.PostgresSink("dbname=x", table="orders", value=sl.values.Json(pa.schema({name: pa.string()})))
    with pytest.raises(InvalidInput, match="names no table"):
        sl.PostgresSink("dbname=x", table="a.b.c")


# --- bad rows --------------------------------------------------------------------------------------------------------


def test_a_bad_record_is_refused_and_nothing_is_applied(database):
    sink = typed(database)
    with pytest.raises(BadRecord, match="offset 1"):
        apply(sink, 0, (b"a", b'{"id": 7}'), (b"b", b"{"))
    assert sink.cursor(LOG) is None


def test_bad_records_become_dead_letters_in_the_same_transaction(database):
    sink = typed(database, dead_letters=True)
    apply(sink, 0, (b"a", b'{"id": 7}'), (b"b", b"{"), (None, b'{"id": 8}'))
    apply(sink, 3, (b"c", b"not json"), (b"a", b'{"id": 9}'))
    letters = database.query('SELECT "offset", key, value, reason FROM orders_dead_letters ORDER BY "offset"')
    assert [(offset, value and bytes(value)) for offset, _, value, _ in letters] == [
        (1, b"{"),
        (2, b'{"id": 8}'),
        (3, b"not json"),
    ]
    assert all(reason for *_, reason in letters)
    assert database.query("SELECT id FROM orders") == [(9,)]


def test_dead_letters_delivered_twice_are_there_once(database):
    for _ in range(2):
        apply(typed(database, dead_letters=True), 0, (b"a", b"{"))
    assert len(database.query("SELECT * FROM orders_dead_letters")) == 1


def test_a_failure_after_the_dead_letters_leaves_neither_rows_nor_letters(database, monkeypatch):
    sink = typed(database, dead_letters=True)
    at = apply(sink, 0, (b"a", b'{"id": 7}'))
    session = type(database).__name__
    kind = postgres_tables.PostgresTransaction if session == "Postgres" else SqliteTransaction
    monkeypatch.setattr(kind, "store", lambda *_: False)
    with pytest.raises(Fenced):
        apply(sink, 1, (b"b", b'{"id": 8}'), (b"c", b"{"))
    monkeypatch.undo()
    assert database.query("SELECT id FROM orders") == [(7,)]
    assert database.query("SELECT * FROM orders_dead_letters") == []
    assert database.sink(value=sl.values.Json(ORDERS)).cursor(LOG) == at


def test_what_postgres_cannot_store_is_a_bad_record(postgres):
    database = Postgres(postgres, f"tables_{next(_NUMBERS)}")
    sink = typed(database, dead_letters=True)
    apply(sink, 0, (b"a", b'{"customer": "x\\u0000y"}'), (b"k" * 5000, b'{"id": 1}'), (b"c", b'{"id": 2}'))
    early = record_batch(timestamps=[-(2**62)], ops=[0], keys=[b"d"], values=[b"{}"])
    upto = Cursor(LOG, 4)
    database.query("ALTER TABLE orders_dead_letters DROP COLUMN timestamp_us")  # as earlier versions have made it
    sink.apply(pa.Table.from_batches(with_offsets([early], 3), READ_SCHEMA), since=upto.at(3), upto=upto)
    assert database.query("SELECT id FROM orders") == [(2,)]
    assert database.query('SELECT "offset", timestamp_us FROM orders_dead_letters ORDER BY 1') == [
        *[(0, None), (1, None)],
        (3, -(2**62)),
    ]
    database.close()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "kinds",
    [
        [pa.int64()] * 970,  # 8 bytes each
        [pa.int64()] * 1_000,
        pytest.param([pa.string()] * 430, marks=pytest.mark.matrix),  # 18 bytes each: the values are stored elsewhere
        pytest.param([pa.string()] * 460, marks=pytest.mark.matrix),
        pytest.param([pa.bool_(), pa.int64()] * 480, marks=pytest.mark.matrix),  # with gaps
        pytest.param([pa.bool_(), pa.int64()] * 520, marks=pytest.mark.matrix),
        pytest.param([pa.decimal128(38, 5)] * 500, marks=pytest.mark.matrix),
    ],
    ids=lambda kinds: f"{len(kinds)} {kinds[0]}",
)
def test_a_row_that_is_longer_than_a_page_is_a_bad_record(postgres, kinds):
    database = Postgres(postgres, f"tables_{next(_NUMBERS)}")
    schema = pa.schema([(f"c{at}", kind) for at, kind in enumerate(kinds)])
    codec = sl.values.Arrow(schema, max_columns=1_500)
    values = {pa.string(): "x" * 60, pa.int64(): 7, pa.bool_(): True, pa.decimal128(38, 5): Decimal("1.5")}
    [row] = codec.encode(pa.RecordBatch.from_pylist([{one.name: values[one.type] for one in schema}], schema))
    sink = database.sink(value=codec, dead_letters=True)
    apply(sink, 0, (b"a", row.as_py()), (b"b", codec.encode_one({"c0": values[kinds[0]]})))
    is_long = len(kinds) not in (970, 430, 960)
    assert database.query("SELECT count(*) FROM orders") == [(1 if is_long else 2,)]
    reasons = database.query("SELECT reason FROM orders_dead_letters")
    assert [("Its row is longer than" in reason) for (reason,) in reasons] == [True] * is_long
    database.close()


def test_numbers_that_json_lacks_are_bad_records_in_lists_of_postgres(postgres):
    database = Postgres(postgres, f"tables_{next(_NUMBERS)}")
    codec = sl.values.Arrow(
        pa.schema({"names": pa.list_(pa.string()), "at": pa.list_(pa.float64()), "f": pa.float64()})
    )
    odd = [{"at": [1.5, odd]} for odd in (float("nan"), float("inf"), -float("inf"))]
    fine = [{"names": ["NaN", 'a",Infinity,"b', "\\"], "f": float("nan")}, {"at": [1e308]}]
    sink = database.sink(value=codec, dead_letters=True)
    apply(sink, 0, *[(b"%d" % at, codec.encode_one(one)) for at, one in enumerate([*odd, *fine])])
    assert database.query("SELECT _offset, names FROM orders ORDER BY 1") == [(3, fine[0]["names"]), (4, None)]
    assert database.query("SELECT count(*) FROM orders_dead_letters") == [(3,)]
    database.close()


def test_letters_for_which_there_is_no_memory_are_not_called_damaged(monkeypatch):
    def full(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(columns.pa, "table", full)
    with pytest.raises(MemoryError):
        columns.letters_of([()] * len(columns.STORED_LETTERS))


# --- several followers -----------------------------------------------------------------------------------------------


def test_a_follower_that_was_replaced_is_fenced_and_changes_nothing(database):
    stale = database.sink()
    apply(stale, 0, (b"a", b"1"))
    apply(database.sink(), 1, (b"b", b"2"))
    with pytest.raises(Fenced, match="one follower per table"):
        apply(stale, 2, (b"c", b"3"))
    assert latest_of(database) == {b"a": b"1", b"b": b"2"}


def test_a_follower_that_was_replaced_is_fenced_also_if_its_range_is_stored_already(database):
    stale = database.sink()
    apply(stale, 0, (b"a", b"1"))
    upto = apply(database.sink(), 1, (b"b", b"2"))
    with pytest.raises(Fenced):
        apply(stale, 1, (b"b", b"ghost"))
    assert latest_of(database) == {b"a": b"1", b"b": b"2"}
    assert stale.cursor(LOG) == upto


@pytest.mark.parametrize("is_new", [True, False])
def test_of_two_followers_that_looked_at_the_same_table_only_one_commits(database, monkeypatch, is_new):
    if not is_new:
        apply(database.sink(), 0, (b"a", b"1"))
    slow, quick = database.sink(), database.sink()
    first = 0 if is_new else 1
    commit = SqlSink._commit

    def overtaken(self, *arguments):
        if self is slow:
            apply(quick, first, (b"b", b"quick"))
        return commit(self, *arguments)

    monkeypatch.setattr(SqlSink, "_commit", overtaken)
    with pytest.raises(Fenced):
        apply(slow, first, (b"b", b"slow"))
    assert latest_of(database)[b"b"] == b"quick"
    assert len(latest_of(database)) == 1 + (not is_new)


def test_a_fenced_follower_stays_so_until_it_starts_again(database):
    sink = database.sink()
    apply(sink, 0, (b"a", b"1"))
    apply(database.sink(), 1, (b"b", b"2"))
    for _ in range(2):
        with pytest.raises(Fenced):
            apply(sink, 2, (b"c", b"3"))
    assert sink.resume(LOG) == Cursor(LOG, 2)
    apply(sink, 2, (b"c", b"3"))
    assert latest_of(database) == {b"a": b"1", b"b": b"2", b"c": b"3"}


def test_a_commit_whose_answer_was_lost_is_found_by_the_next_look(database, monkeypatch):
    sink = database.sink()
    apply(sink, 0, (b"a", b"1"))
    writing = type(sink._database).writing

    @contextmanager
    def unanswered(self):
        with writing(self) as session:
            yield session
        raise TransientStorageError("The answer was lost.")

    look, looks = type(sink._database).read_table, []

    def unreachable(self):
        looks.append(look(self))
        if len(looks) > 1:
            raise TransientStorageError("The line is down.")
        return looks[0]

    with monkeypatch.context() as patch:
        patch.setattr(type(sink._database), "writing", unanswered)
        patch.setattr(type(sink._database), "read_table", unreachable)
        with pytest.raises(TransientStorageError):
            apply(sink, 1, (b"b", b"2"))
    assert sink.cursor(LOG) == Cursor(LOG, 2)
    apply(sink, 1, (b"b", b"2"))
    apply(sink, 2, (b"c", b"3"))
    assert latest_of(database) == {b"a": b"1", b"b": b"2", b"c": b"3"}


# --- soft deletes and bad records -------------------------------------------------------------------------------------

SOFT = [
    *[(b"a", Op.PUT), (b"b", Op.PUT), (b"c", Op.PUT), (b"a", Op.DELETE), (b"b", Op.PURGE), (b"x", Op.DELETE)],
    *[(b"d", Op.PUT), (b"d", Op.DELETE), (b"e", Op.PUT), (b"e", Op.PURGE), (b"a", Op.PUT), (b"c", Op.DELETE)],
    *[(b"c", Op.PURGE), (b"b", Op.DELETE), (b"e", Op.PUT), (b"a", Op.PURGE), (b"a", Op.DELETE)],
]


@pytest.mark.parametrize("step", some([1, 2, 3, 5, 17], 2))
def test_soft_deletes_mark_the_same_rows_as_in_every_other_table(database, step):
    batch = record_batch(
        timestamps=list(range(len(SOFT))),
        ops=[op for _, op in SOFT],
        keys=[key for key, _ in SOFT],
        values=[b"v%d" % n if op is Op.PUT else None for n, (_, op) in enumerate(SOFT)],
    )
    records = pa.Table.from_batches(with_offsets([batch], 0))
    shape = TableShape("latest", soft_deletes=True)
    truth = merge_latest(shape.schema().empty_table(), records, RAW, shape.schema())
    sink = database.sink(mode="marked")
    for first in range(0, len(SOFT), step):
        upto = Cursor(LOG, min(first + step, len(SOFT)))
        sink.apply(records.slice(first, step), since=upto.at(first), upto=upto)
    found = database.query('SELECT key, value, "offset", deleted FROM orders')
    rows = sorted((bytes(k), None if v is None else bytes(v), o, bool(d)) for k, v, o, d in found)
    assert rows == sorted((r["key"], r["value"], r["offset"], r["deleted"]) for r in truth.to_pylist())
    with pytest.raises(InvalidInput, match="mode 'marked': open it with that"):
        database.sink().cursor(LOG)


def test_more_bad_records_than_allowed_stop_a_commit(database):
    bad = {"value": sl.values.Json(ORDERS), "dead_letters": True}
    rows = [(b"a", b'{"id": 1}'), (b"b", b"no JSON")]
    with pytest.raises(BadRecord, match=r"1 of 2 records.*offset 1"):
        apply(database.sink(max_bad_share=0.4, **bad), 0, *rows)
    assert not database.has_table()
    apply(database.sink(max_bad_share=0.5, **bad), 0, *rows)
    assert database.has_table()
    with pytest.raises(InvalidInput, match="max_bad_share"):
        database.sink(max_bad_share=2)


# --- tables that others change ---------------------------------------------------------------------------------------


def dropped(database):
    database.query("DROP TABLE orders")


def created_again(database):
    rows = database.query('SELECT key, value, "offset" FROM orders')
    dropped(database)
    kind = "bytea" if isinstance(database, Postgres) else "BLOB"
    number = "bigint" if isinstance(database, Postgres) else "INTEGER"
    database.query(f'CREATE TABLE orders (key {kind} PRIMARY KEY, value {kind}, "offset" {number})')
    assert rows


def column_dropped(database):
    database.query("ALTER TABLE orders DROP COLUMN headers")


def column_renamed(database):
    database.query("ALTER TABLE orders RENAME COLUMN value TO payload")


def needed_column_added(database):
    if isinstance(database, Postgres):
        database.query("ALTER TABLE orders ADD COLUMN extra text NOT NULL DEFAULT 'x'")
        database.query("ALTER TABLE orders ALTER COLUMN extra DROP DEFAULT")
    else:
        column_renamed(database)


def cursor_removed(database):
    database.query("DELETE FROM strandline_cursors")


def cursor_moved_back(database):
    other = f"{LOG}/0/1"
    database.query(f"UPDATE strandline_cursors SET next = 1, cursor = '{other}'")


def cursors_dropped(database):
    database.query("DROP TABLE strandline_cursors")


CHANGES = [
    *(created_again, column_dropped, column_renamed, needed_column_added, cursor_removed, cursors_dropped),
    *(dropped, cursor_moved_back),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_running_follower_stops_at_a_table_that_others_changed(database, change):
    sink = database.sink()
    apply(sink, 0, (b"a", b"1"), (b"b", b"2"))
    change(database)
    with pytest.raises(Diverged):
        apply(sink, 2, (b"c", b"3"))
    with pytest.raises(Diverged):
        sink.cursor(LOG)


@pytest.mark.matrix
@pytest.mark.parametrize("change", CHANGES[:6], ids=lambda change: change.__name__)
def test_a_starting_follower_stops_at_a_table_that_others_changed(database, change):
    apply(database.sink(), 0, (b"a", b"1"), (b"b", b"2"))
    change(database)
    with pytest.raises(Diverged):
        database.sink().cursor(LOG)
    with pytest.raises(Diverged, match="cannot be repaired"):
        database.sink().repair(LOG, lambda _: True)


def test_a_table_that_was_dropped_between_runs_is_built_again_from_the_beginning(database):
    log = MemoryLog()
    rows = changes(0, *[(b"%d" % (number % 2), b"%d" % number) for number in range(5)])
    log.append(rows.drop_columns("offset"), writer=WriterId(CHANCE.uuid()), number=0).result()
    sink = database.sink(dead_letters=True)
    sl.follow(log, sink, "s", upto="end")
    dropped(database)
    assert sl.follow(log, sink, "s", upto="end").next == 5
    assert latest_of(database) == {b"0": b"4", b"1": b"3"}


def test_a_cursor_row_that_somebody_else_wrote_is_corrupt(database):
    apply(database.sink(), 0, (b"a", b"1"))
    database.query("UPDATE strandline_cursors SET next = 7")
    with pytest.raises(CorruptData, match="strandline_cursors"):
        database.sink().cursor(LOG)


def test_a_table_of_somebody_else_is_left_alone(database):
    database.query("CREATE TABLE orders (x integer)")
    with pytest.raises(Diverged, match="no log at all"):
        apply(database.sink(), 0, (b"a", b"1"))
    assert list(database.columns()) == ["x"]


def test_indexes_and_columns_that_may_be_null_do_not_stop_a_follower(database):
    sink = database.sink()
    apply(sink, 0, (b"a", b"1"))
    database.query("ALTER TABLE orders ADD COLUMN note text")
    database.query('CREATE INDEX by_offset ON orders ("offset")')
    apply(sink, 1, (b"a", b"2"), (b"b", b"3"))
    assert latest_of(database) == {b"a": b"2", b"b": b"3"}


def test_another_mode_or_name_than_the_tables_is_refused(database):
    apply(database.sink(), 0, (b"a", b"1"))
    with pytest.raises(InvalidInput, match="mode 'latest'"):
        database.sink(mode="append").cursor(LOG)
    with pytest.raises(Diverged, match="as 'other'"):
        database.sink(name="other").cursor(LOG)


def test_a_view_is_no_table(database):
    database.query("CREATE VIEW orders AS SELECT 1 AS x")
    with pytest.raises(InvalidInput, match="of its own"):
        database.sink().cursor(LOG)


def test_a_table_that_its_owner_knows_to_be_right_can_be_adopted(postgres):
    database = Postgres(postgres, f"tables_{next(_NUMBERS)}")
    sink = database.sink()
    at = apply(sink, 0, (b"a", b"1"))
    database.query("CREATE TABLE copy (LIKE orders INCLUDING ALL)")
    database.query("INSERT INTO copy SELECT * FROM orders")
    database.query("DROP TABLE orders")
    database.query("ALTER TABLE copy RENAME TO orders")
    with pytest.raises(Diverged, match="created again"):
        database.sink().cursor(LOG)
    assert database.sink().adopt(LOG) == at
    apply(database.sink(), 1, (b"b", b"2"))
    assert latest_of(database) == {b"a": b"1", b"b": b"2"}
    with pytest.raises(NotFound):
        database.sink("other").adopt(LOG)
    database.close()


def test_a_dump_of_sqlite_that_was_loaded_again_is_followed_on(tmp_path):
    database = Sqlite(tmp_path / "a.db")
    at = apply(database.sink(), 0, (b"a", b"1"))
    with closing(sqlite3.connect(database.path)) as old, closing(sqlite3.connect(tmp_path / "b.db")) as new:
        new.executescript("\n".join(old.iterdump()))
    copy = Sqlite(tmp_path / "b.db")
    assert copy.sink().cursor(LOG) == at
    apply(copy.sink(), 1, (b"b", b"2"))
    assert latest_of(copy) == {b"a": b"1", b"b": b"2"}


def test_an_older_copy_of_a_sqlite_file_is_noticed_by_a_running_follower(tmp_path):
    database = Sqlite(tmp_path / "a.db")
    sink = database.sink()
    apply(sink, 0, (b"a", b"1"))
    with closing(sqlite3.connect(database.path)) as old, closing(sqlite3.connect(tmp_path / "backup.db")) as backup:
        old.backup(backup)
    apply(sink, 1, (b"b", b"2"))
    os.replace(tmp_path / "backup.db", database.path)
    with pytest.raises(Diverged, match="older copy"):
        apply(sink, 2, (b"c", b"3"))
    assert database.sink().cursor(LOG) == Cursor(LOG, 1)


def test_a_sqlite_file_that_is_replaced_during_a_commit_is_not_taken_for_stored(tmp_path, monkeypatch):
    database = Sqlite(tmp_path / "a.db")
    sink = database.sink()
    apply(sink, 0, (b"a", b"1"))
    with closing(sqlite3.connect(database.path)) as old, closing(sqlite3.connect(tmp_path / "backup.db")) as backup:
        old.backup(backup)
    store = SqliteTransaction.store

    def replaced(self, *arguments):
        os.replace(tmp_path / "backup.db", database.path)
        return store(self, *arguments)

    monkeypatch.setattr(SqliteTransaction, "store", replaced)
    with pytest.raises(Diverged, match="replaced while it was committed to"):
        apply(sink, 1, (b"b", b"2"))


def test_places_that_are_no_sqlite_database_are_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"no database, but long enough to be looked at as one" * 100)
    for place in (tmp_path, tmp_path / "text"):
        with pytest.raises(WrongKind):
            sl.SqliteSink(place, table="orders").cursor(LOG)
    assert sl.SqliteSink(tmp_path / "absent" / "a.db", table="orders").cursor(LOG) is None
    assert not (tmp_path / "absent").exists()


def test_only_the_owner_reads_a_new_sqlite_file(tmp_path):
    apply(sl.SqliteSink(tmp_path / "own" / "a.db", table="orders"), 0, (b"a", b"1"))
    assert (tmp_path / "own" / "a.db").stat().st_mode & 0o077 == 0


def test_neither_errors_nor_the_sink_show_the_password(tmp_path):
    sink = sl.PostgresSink("host=127.0.0.1 port=1 password=hunter2 dbname=x", table="orders")
    with pytest.raises(TransientStorageError) as refused:
        sink.cursor(LOG)
    assert "hunter2" not in f"{sink!r} {refused.value}"
    with pytest.raises(InvalidInput) as unreadable:
        sl.PostgresSink("password=hunter2 x", table="orders")
    assert "hunter2" not in str(unreadable.value)


def test_a_postgres_sink_is_refused_in_a_forked_child(postgres):
    database = Postgres(postgres, f"tables_{next(_NUMBERS)}")
    sink = database.sink()
    apply(sink, 0, (b"a", b"1"))

    def used():
        with pytest.raises(UsedAcrossFork):
            sink.cursor(LOG)

    in_a_child(used)
    apply(sink, 1, (b"b", b"2"))
    database.close()


def test_several_tables_share_a_database(database):
    apply(database.sink("orders"), 0, (b"a", b"1"))
    other = Cursor(UUID(int=9), 1)
    database.sink("customers").apply(changes(0, (b"x", b"9")), since=other.at(0), upto=other)
    assert latest_of(database) == {b"a": b"1"}
    assert latest_of(database, "customers") == {b"x": b"9"}
    assert len(database.query("SELECT * FROM strandline_cursors")) == 2


def test_a_table_in_a_schema_of_postgres(postgres):
    database = Postgres(postgres, f"tables_{next(_NUMBERS)}")
    database.query("CREATE SCHEMA shop")
    apply(database.sink("shop.orders"), 0, (b"a", b"1"))
    assert len(database.query("SELECT * FROM shop.orders")) == len(database.query("TABLE shop.strandline_cursors")) == 1
    database.close()


# --- crashes ---------------------------------------------------------------------------------------------------------

STEPS = ["stage", "lock", "read_table", "merge", "put_dead_letters", "store"]

FOLLOWER = """
import os, signal, sys
import strandline as sl
from strandline.log.memory import MemoryLog
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.testing.sinks import LOG, changes
from strandline.tables.sql.postgres_transaction import PostgresTransaction
from strandline.tables.sql.sqlite_transaction import SqliteTransaction

kind, place, step, how = sys.argv[1:]
if kind == "sqlite":
    session, sink = SqliteTransaction, sl.SqliteSink(place, table="orders", dead_letters=True)
else:
    session, sink = PostgresTransaction, sl.PostgresSink(place, table="orders", dead_letters=True)
done = getattr(session, step)

def ended(self, *arguments, **options):
    found = done(self, *arguments, **options)
    if how == "stop":
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

setattr(session, step, ended)
at = Cursor(LOG, 1)
sink.apply(changes(1, (b"b", b"2"), (None, b"3")), since=at, upto=at.at(3))
"""


@contextmanager
def follower(database, step, how):
    kind, place = ("sqlite", database.path) if isinstance(database, Sqlite) else ("postgres", database.dsn)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FOLLOWER, kind, place, step, how], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.matrix
@pytest.mark.parametrize("step", STEPS)
def test_a_follower_killed_at_any_step_leaves_the_table_as_it_was(database, step):
    sink = database.sink(dead_letters=True)
    apply(sink, 0, (b"a", b"1"))
    with follower(database, step, "kill") as process:
        assert process.wait(60) == -signal.SIGKILL
    assert latest_of(database) == {b"a": b"1"}
    assert database.query("SELECT * FROM orders_dead_letters") == []
    apply(sink, 1, (b"b", b"2"), (None, b"3"))
    assert latest_of(database) == {b"a": b"1", b"b": b"2"}
    assert len(database.query("SELECT * FROM orders_dead_letters")) == 1


@pytest.mark.matrix
def test_a_follower_that_was_suspended_is_fenced_when_it_wakes_up(database):
    apply(database.sink(dead_letters=True), 0, (b"a", b"1"))
    step = "stage"  # it has sent its rows, and holds no lock yet
    with follower(database, step, "stop") as process:
        assert process.stdout.readline() == "stopping\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # or it would be told to go on before it has stopped
        apply(database.sink(dead_letters=True), 1, (b"b", b"other"))
        os.kill(process.pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=60)
    assert "Fenced" in errors
    assert latest_of(database) == {b"a": b"1", b"b": b"other"}
    assert database.query("SELECT * FROM orders_dead_letters") == []


@pytest.mark.matrix
def test_a_follower_that_is_suspended_in_its_commit_delays_others_and_they_say_so(postgres, monkeypatch):
    monkeypatch.setattr(postgres_tables, "LOCK_SECONDS", 1)
    database = Postgres(postgres, f"tables_{next(_NUMBERS)}")
    sink = database.sink(dead_letters=True)
    apply(sink, 0, (b"a", b"1"))
    with follower(database, "merge", "stop") as process:
        assert process.stdout.readline() == "stopping\n"
        with pytest.raises(TransientStorageError, match="lock timeout"):
            apply(sink, 1, (b"b", b"other"))
        locks = database.query("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted")
        assert locks == [(1,)]
        process.kill()  # as the server does after a minute of silence
    monkeypatch.setattr(postgres_tables, "LOCK_SECONDS", 30)
    apply(sink, 1, (b"b", b"other"))
    assert latest_of(database) == {b"a": b"1", b"b": b"other"}
    database.close()


def test_deletes_and_puts_of_one_range_are_merged_by_offset(database):
    sink = database.sink()
    apply(sink, 0, *[(b"%d" % (n % 7), DELETE if n % 3 == 0 else b"v%d" % n) for n in range(500)])
    apply(sink, 500, (b"1", DELETE), (b"1", b"again"), (b"2", b"x"), (b"2", DELETE))
    found = latest_of(database)
    assert found[b"1"] == b"again"
    assert b"2" not in found


def test_tables_that_begin_at_once_in_a_new_database_all_begin(postgres, tmp_path):
    """PostgreSQL's CREATE TABLE IF NOT EXISTS may fail when two transactions create the table of cursors at once."""
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        producer.append(key=b"k", value=b"v").result(60)
    for attempt in range(4):
        with psycopg.connect(dsn_of(postgres), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE new_{attempt}")
        dsn = dsn_of(postgres, f"new_{attempt}")
        sinks = [sl.PostgresSink(dsn, table=f"t{number}", mode="append") for number in range(8)]
        together(*(lambda sink=sink: sl.follow(log, sink, upto="end") for sink in sinks))
        assert [sink.size().rows for sink in sinks] == [1] * 8


def dsn_of(postgres, database="postgres"):
    return f"host={postgres.host} port={postgres.port} user={postgres.user} dbname={database}"
