"""One log into many tables on Spark: one job for all of them, and each table exact at its own cursor."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from strandline.errors import BadRecord, InvalidInput
from strandline.model.records import Op
from strandline.spark import Following, follow
from tests.followers.routes.test_route_follower import position
from tests.spark.helpers import Change, append, delete, new_log, put

NOW = {"availableNow": True}
VALUES = sl.values.Json(pa.schema({"x": pa.int64()}))
KINDS = {"orders": "latest", "stock": "history", "clicks": "append", "users": "marked"}


class Killed(BaseException):
    """Stands for a driver that died: nothing of that run is used afterwards."""


def run(spark, log, tables, **options) -> Following:
    """One run over all that is there now, to its end."""
    following = follow(spark, log, tables, trigger=NOW, **{"place": "executors", **options})
    assert following.await_termination(600)
    return following


def changes(seed: int, count: int, names: str | list[str], first: int = 0) -> list[Change]:
    """Random changes of some tables; ``x`` tells the place of each."""
    chance = random.Random(seed)
    found: list[Change] = []
    for number in range(first, first + count):
        key = f"{chance.choice(names)}/{chance.randrange(6)}".encode()
        found.append(delete(key) if chance.random() < 0.15 else put(key, json.dumps({"x": number}).encode()))
    return found


def rule(folder: Path, make: Callable[[str], object] | None = None, **options) -> sl.tables.Route:
    """Tables by the first part of the key."""

    def sink(name: str) -> sl.DeltaSink:
        return sl.DeltaSink(str(folder / name), mode=KINDS.get(name, "latest"), value=VALUES)

    return sl.tables.by(key_until=b"/", sink=make or sink, names=str(folder / "names"), **options)


def expected(done: list[Change], name: str, kind: str) -> list[tuple[int, int | None]]:
    """Offset and value of each row of a table, by the plainest means."""
    own = [(offset, key, value) for offset, (key, value, *_) in enumerate(done) if key.startswith(f"{name}/".encode())]
    as_number = [(offset, key, None if value is None else json.loads(value)["x"]) for offset, key, value in own]
    if kind in ("append", "history"):
        return [(offset, x) for offset, _, x in as_number]
    last = {key: (offset, x) for offset, key, x in as_number}
    once = {key for _, key, x in as_number if x is not None}
    kept = once if kind == "marked" else {key for key, (_, x) in last.items() if x is not None}
    return sorted(last[key] for key in kept)


def held(folder: Path, name: str, kind: str) -> list[tuple[int, int | None]]:
    rows = DeltaTable(str(folder / name)).to_pyarrow_table().to_pylist()
    if kind == "marked":  # a deleted row keeps its last values
        return sorted((row["_offset"], None if row["_deleted"] else row["x"]) for row in rows)
    return sorted((row["_valid_from_offset" if kind == "history" else "_offset"], row["x"]) for row in rows)


def check(log, folder: Path, done: list[Change], names: list[str]) -> None:
    for name in names:
        kind = KINDS.get(name, "latest")
        truth = expected(done, name, kind)
        if kind == "history":  # a delete ends a version, and is none
            truth = [one for one in truth if one[1] is not None]
        assert held(folder, name, kind) == truth, name
        assert sl.tables.verify(sl.tables.existing(str(folder / name), value=VALUES), log).is_clean, name


@pytest.fixture
def log(tmp_path) -> Iterator[sl.Log]:
    with new_log(tmp_path) as log:
        yield log


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "tables"


@pytest.fixture
def catalog(tmp_path) -> Iterator[SqlCatalog]:
    found = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    yield found
    found.close()


def test_tables_of_every_kind_are_written_by_one_job_for_each_range(spark, log, folder):
    names = list(KINDS)
    done = changes(1, 60, names)
    append(log, done[:30])
    append(log, done[30:])
    first = run(spark, log, rule(folder), slot="s")
    assert first.cursor().next == position(log, "s") == 60
    check(log, folder, done, names)
    more = changes(2, 40, [*names, "new"], first=60)
    append(log, more)
    following = run(spark, log, rule(folder), slot="s")
    check(log, folder, [*done, *more], [*names, "new"])
    tables = {one.name: one for one in following.progress().tables}
    assert set(tables) == {*names, "new"}
    assert sum(one.records for one in tables.values()) == 40
    assert all(one.commits == 1 and one.next == 100 for one in tables.values())
    assert "<td>new</td>" in following._repr_html_()
    cut = sl.tables.cut([str(folder / name) for name in [*names, "new"]])
    assert cut.next == 100


def test_a_route_costs_one_job_for_each_trigger_and_not_one_for_each_table(spark, log, folder):
    append(log, changes(1, 40, list(KINDS)))
    run(spark, log, rule(folder))  # creates the tables
    append(log, changes(2, 40, list(KINDS), first=40))
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup(None))
    run(spark, log, rule(folder))
    assert len(set(tracker.getJobIdsForGroup(None)) - before) <= 1


def test_small_triggers_of_a_route_start_no_job(spark, log, folder):
    append(log, changes(1, 40, list(KINDS)))
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup(None))
    run(spark, log, rule(folder), place="auto")
    assert set(tracker.getJobIdsForGroup(None)) == before
    check(log, folder, changes(1, 40, list(KINDS)), list(KINDS))


@pytest.mark.parametrize("place", ["executors", pytest.param("driver", marks=pytest.mark.matrix)])
def test_a_table_that_cannot_decode_its_records_stops_no_other(spark, log, folder, place):
    done = changes(1, 30, list(KINDS))
    append(log, done)
    append(log, [put(b"orders/1", b"no JSON")])
    append(log, more := changes(2, 20, list(KINDS), first=31))
    following = follow(spark, log, rule(folder), trigger=NOW, place=place, slot="s")
    with pytest.raises(BadRecord) as raised:
        following.await_termination(600)
    assert "orders" in "".join(raised.value.__notes__)
    done = [*done, put(b"orders/1", b'{"x": 0}'), *more]
    check(log, folder, done, ["stock", "clicks", "users"])
    tables = {one.name: one for one in following.progress().tables}
    assert (tables["orders"].state, tables["stock"].next) == ("failing", 51)
    assert position(log, "s") == tables["orders"].next <= 30

    def repaired(name: str) -> sl.DeltaSink:
        letters = {"dead_letters": str(folder / "letters"), "max_bad_share": 1} if name == "orders" else {}
        return sl.DeltaSink(str(folder / name), mode=KINDS[name], value=VALUES, **letters)

    assert run(spark, log, rule(folder, repaired), slot="s", place=place).cursor().next == 51
    assert position(log, "s") == 51
    good = [change if offset != 30 else put(b"none/1", None) for offset, change in enumerate(done)]
    check(log, folder, good, list(KINDS))


@pytest.mark.parametrize("step", ["planned", "written", "committed"])
@pytest.mark.parametrize("time", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_driver_that_dies_at_any_step_leaves_what_the_next_one_continues(spark, log, folder, step, time):
    names = [*KINDS, "x", "y"]
    done = []
    for first in range(0, 60, 20):
        done += (part := changes(first, 20, names, first=first))
        append(log, part)
    seen: list[str] = []

    def dying(now: str) -> None:
        seen.append(now)
        if seen.count(step) == time:
            raise Killed(step)

    options = {"maxBatchesPerTrigger": "1"}
    with pytest.raises(Killed):
        run(spark, log, rule(folder), slot="s", on_step=dying, options=options)
    for name in names:
        if DeltaTable.is_deltatable(str(folder / name)):
            upto = sl.tables.describe(sl.tables.existing(str(folder / name), value=VALUES), log).cursor.next
            assert position(log, "s") <= upto
            kind = KINDS.get(name, "latest")
            if kind != "history":
                assert held(folder, name, kind) == expected(done[:upto], name, kind)
    run(spark, log, rule(folder), slot="s", options=options)
    check(log, folder, done, names)
    assert position(log, "s") == 60


def test_delta_and_iceberg_tables_in_one_route(spark, log, folder, catalog):
    done = changes(1, 60, ["orders", "stock"])
    append(log, done)
    tables = [
        sl.DeltaSink(str(folder / "orders"), value=VALUES).taking(sl.tables.where(key_prefix=b"orders/")),
        sl.IcebergSink(catalog, "shop.stock", value=VALUES).taking(sl.tables.where(key_prefix=b"stock/")),
    ]
    run(spark, log, tables, slot="s")
    assert held(folder, "orders", "latest") == expected(done, "orders", "latest")
    assert sl.tables.verify(tables[1], log).is_clean
    rows = catalog.load_table("shop.stock").scan().to_arrow().to_pylist()
    assert sorted((row["_offset"], row["x"]) for row in rows) == expected(done, "stock", "latest")
    cut = sl.tables.cut(tables)
    assert (cut.next, set(cut.versions)) == (60, {tables[0].where, tables[1].where})


def test_records_of_no_table_go_to_a_table_of_their_own_or_end_the_pipeline(spark, log, folder):
    append(log, [*changes(1, 20, ["orders"]), put(None, b"?"), (b"no separator", None, Op.PURGE)])
    with pytest.raises(BadRecord, match="2 records are for no table of the route"):
        run(spark, log, rule(folder), slot="s")
    rest = sl.DeltaSink(str(folder / "rest"), mode="append")
    following = run(spark, log, rule(folder, unrouted=rest), slot="s")
    assert DeltaTable(str(folder / "rest")).to_pyarrow_table()["offset"].to_pylist() == [20, 21]
    assert following.progress().unrouted == 2


def test_a_transform_of_spark_is_refused_for_a_route(spark, log, folder):
    with pytest.raises(InvalidInput, match="give each of its sinks a transform"):
        follow(spark, log, rule(folder), transform="SELECT * FROM changes")
