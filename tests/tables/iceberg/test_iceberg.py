"""The Iceberg sink: the contract in all modes, tables that others change, and who reads them."""

from __future__ import annotations

import pickle
import sqlite3
from contextlib import closing
from importlib import resources

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table.snapshots import Snapshot

import strandline as sl
from strandline.errors import (
    BadRecord,
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    NullKey,
    SchemaRefused,
    TransientStorageError,
)
from strandline.followers.run import Batching
from strandline.log.memory import MemoryLog
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.records import Op
from strandline.storage.clock import CHANCE, CLOCK
from strandline.storage.disk import LocalDisk
from strandline.storage.env import Env
from strandline.tables.apply import TableSink, apply_with
from strandline.tables.files.part import TablePart
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.tables.written import Written
from strandline.testing.clock import ManualClock
from strandline.testing.sinks import DELETE, LOG, changes, folded
from tests.contracts.tables import TableContract

ORDERS = pa.schema({"id": pa.int32(), "customer": pa.string()})


@pytest.fixture
def catalog(tmp_path):
    """A catalog in a SQLite file, as several processes would share it."""
    found = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    yield found
    found.close()


def table_of(catalog, name="shop.orders"):
    return catalog.load_table(name)


def rows_of(catalog, name="shop.orders"):
    return table_of(catalog, name).scan().to_arrow()


def apply(sink, first, *rows):
    upto = Cursor(LOG, first + len(rows))
    sink.apply(changes(first, *rows), since=upto.at(first), upto=upto)
    return upto


def latest_of(catalog):
    table = rows_of(catalog)
    rows = dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
    assert len(rows) == table.num_rows, "a key has two rows"
    return rows


class _Contract(TableContract):
    mode = "latest"
    steps = (
        (FollowedIceberg, "begin"),
        (FollowedIceberg, "open"),
        (TablePart, "write"),
        (FollowedIceberg, "commit"),
        (FollowedIceberg, "make_durable"),
    )

    @pytest.fixture
    def sink(self, catalog):
        return self.opened(catalog)

    def opened(self, catalog):
        sink = sl.IcebergSink(catalog, "shop.orders", mode=self.mode)
        sink.catalog = catalog
        return sink

    def again(self, sink):
        return self.opened(sink.catalog)

    def offsets(self, sink):
        table = rows_of(sink.catalog)
        return table["valid_from_offset" if self.mode == "history" else "offset"].to_pylist()


class TestLatest(_Contract):
    def content(self, sink):
        return latest_of(sink.catalog)

    def test_a_record_without_key_is_refused_and_no_table_is_left(self, sink):
        with pytest.raises(NullKey, match="offset 1 has no key"):
            self.apply(sink, 0, (b"a", b"1"), (None, b"2"))
        assert sink.cursor(LOG) is None

    def test_each_range_is_one_snapshot(self, sink):
        self.apply(sink, 0, (b"a", b"1"), (b"b", b"2"))
        self.apply(sink, 2, (b"a", b"3"))
        self.apply(sink, 3, (b"absent", DELETE))
        assert len(table_of(sink.catalog).metadata.snapshots) == 3


@pytest.mark.matrix
class TestAppend(_Contract):
    mode = "append"
    keeps_all = True

    def content(self, sink):
        rows = rows_of(sink.catalog).sort_by("offset").to_pylist()
        return folded([(row["key"], DELETE if row["op"] == Op.DELETE else row["value"]) for row in rows])


@pytest.mark.matrix
class TestHistory(_Contract):
    mode = "history"

    def content(self, sink):
        rows = rows_of(sink.catalog).to_pylist()
        return {row["key"]: row["value"] for row in rows if row["valid_to_offset"] is None}


def test_it_is_a_table_sink_whose_parts_travel_to_workers(catalog):
    sink = sl.IcebergSink(catalog, "shop.orders")
    assert isinstance(sink, TableSink)
    records = changes(0, *[(b"%d" % (n % 50), b"v%d" % n) for n in range(200)])

    def elsewhere(parts):
        assert len(parts) == 4
        return [pickle.loads(pickle.dumps(part)).write(records.to_batches()) for part in parts]

    written = apply_with(sink, elsewhere, since=Cursor(LOG, 0), upto=Cursor(LOG, 200), tasks=4)
    assert all(isinstance(one, Written) for one in written)
    assert len(table_of(catalog).inspect.files()) == 4
    assert latest_of(catalog) == {b"%d" % n: b"v%d" % (150 + n) for n in range(50)}
    apply(sink, 200, (b"7", b"new"))
    assert len(table_of(catalog).inspect.files()) == 4  # one of them was written again
    assert latest_of(catalog)[b"7"] == b"new"


def test_history_keeps_every_version_and_a_delete_closes_it(catalog):
    sink = sl.IcebergSink(catalog, "shop.orders", mode="history")
    apply(sink, 0, (b"a", b"1"), (b"b", b"2"))
    apply(sink, 2, (b"a", b"3"), (b"b", DELETE))
    rows = rows_of(catalog).sort_by("valid_from_offset").to_pylist()
    assert [(row["value"], row["valid_from_offset"], row["valid_to_offset"]) for row in rows] == [
        (b"1", 0, 2),
        (b"2", 1, 3),
        (b"3", 2, None),
    ]


def test_values_become_typed_columns_and_new_fields_new_ones_in_the_same_snapshot(catalog):
    apply(
        sl.IcebergSink(catalog, "shop.orders", value=sl.values.Json(ORDERS)), 0, (b"a", b'{"id": 7, "customer": "Ann"}')
    )
    wider = pa.schema({"id": pa.int64(), "customer": pa.string(), "tags": pa.list_(pa.string())})
    sink = sl.IcebergSink(catalog, "shop.orders", value=sl.values.Json(wider))
    apply(sink, 1, (b"b", b'{"id": 5000000000, "tags": ["x"]}'))
    assert len(table_of(catalog).metadata.snapshots) == 2
    rows = rows_of(catalog).sort_by("_offset").select(["id", "customer", "tags"]).to_pylist()
    assert rows == [
        {"id": 7, "customer": "Ann", "tags": None},
        {"id": 5_000_000_000, "customer": None, "tags": ["x"]},
    ]
    apply(sink, 2, (b"a", b'{"id": 8}'))
    changed = sl.IcebergSink(catalog, "shop.orders", value=sl.values.Json(pa.schema({"id": pa.string()})))
    with pytest.raises(SchemaRefused, match="'id'"):
        apply(changed, 3, (b"b", b'{"id": "x"}'))


def test_letters_that_somebody_deleted_stay_deleted_and_the_follower_goes_on(catalog):
    def sink():
        return sl.IcebergSink(catalog, "shop.orders", value=sl.values.Json(ORDERS), dead_letters="shop.letters")

    apply(sink(), 0, (b"1", b'{"id": 1}'), (b"2", b"bad"), (b"3", b"bad"))
    catalog.load_table("shop.letters").delete("offset = 1")
    apply(sink(), 3, (b"4", b'{"id": 4}'), (b"5", b"bad"))
    assert sorted(catalog.load_table("shop.letters").scan().to_arrow()["offset"].to_pylist()) == [2, 4]


def test_a_type_that_iceberg_lacks_is_refused_and_not_tried_again(catalog):
    sink = sl.IcebergSink(catalog, "shop.orders", value=sl.values.Json(pa.schema({"at": pa.timestamp("ns")})))
    with pytest.raises(SchemaRefused, match="'at'"):
        apply(sink, 0, (b"a", b'{"at": "2026-01-01T00:00:00"}'))


def test_the_dead_letters_of_another_table_are_refused_and_none_is_lost(catalog):
    def following(table):
        return sl.IcebergSink(catalog, table, value=sl.values.Json(ORDERS), dead_letters="shop.letters")

    apply(following("shop.orders"), 0, (b"1", b'{"id": 1}'), (b"2", b"bad"), (b"3", b'{"id": 3}'))
    with pytest.raises(Diverged):
        apply(following("shop.others"), 0, (b"1", b"bad, too"), (b"2", b'{"id": 2}'))
    assert rows_of(catalog, "shop.letters").column("offset").to_pylist() == [1]


def test_bad_records_become_dead_letters_each_once(catalog, monkeypatch):
    def sink():
        return sl.IcebergSink(catalog, "shop.orders", value=sl.values.Json(ORDERS), dead_letters="shop.letters")

    with pytest.raises(BadRecord, match="offset 0"):
        apply(sl.IcebergSink(catalog, "shop.other", value=sl.values.Json(ORDERS)), 0, (b"a", b"{"))
    apply(sink(), 0, (b"a", b'{"id": 7}'), (b"b", b"{"))
    commit = FollowedIceberg.commit

    def crashing(self, *arguments, **options):
        if self.where == "shop.orders":
            raise KeyboardInterrupt
        commit(self, *arguments, **options)

    with monkeypatch.context() as patch:  # between the letters and the rows
        patch.setattr(FollowedIceberg, "commit", crashing)
        with pytest.raises(KeyboardInterrupt):
            apply(sink(), 2, (b"c", b"no"), (b"d", b'{"id": 8}'))
    assert sink().cursor(LOG) == Cursor(LOG, 2)
    apply(sink(), 2, (b"c", b"no"), (b"d", b'{"id": 8}'))
    assert sorted(rows_of(catalog, "shop.letters")["offset"].to_pylist()) == [1, 2]
    assert sorted(rows_of(catalog)["id"].to_pylist()) == [7, 8]


# --- who reads it ----------------------------------------------------------------------------------------------------


def test_polars_and_duckdb_read_what_pyiceberg_reads(catalog):
    sink = sl.IcebergSink(catalog, "shop.orders", value=sl.values.Json(ORDERS))
    apply(sink, 0, *[(b"%d" % n, b'{"id": %d, "customer": "c%d"}' % (n, n)) for n in range(20)])
    apply(sink, 20, (b"3", DELETE), (b"4", b'{"id": 40, "customer": "new"}'))
    table = table_of(catalog)
    expected = sorted(rows_of(catalog)["id"].to_pylist())
    assert sorted([n for n in range(20) if n not in {3, 4}] + [40]) == expected
    assert sorted(pl.scan_iceberg(table).collect()["id"].to_list()) == expected
    with closing(duckdb.connect()) as connection:
        for one in ("avro", "iceberg"):
            folder = resources.files(f"duckdb_extension_{one}") / "extensions" / f"v{duckdb.__version__}"
            connection.load_extension(str(folder / f"{one}.duckdb_extension"))
        found = connection.execute(
            f"SELECT id FROM iceberg_scan('{table.metadata_location.removeprefix('file://')}')"
        ).fetchall()
    assert sorted(one for (one,) in found) == expected


def test_statistics_let_readers_skip_files(catalog):
    sink = sl.IcebergSink(catalog, "shop.orders", mode="append", value=sl.values.Json(ORDERS))
    apply(sink, 0, (b"a", b'{"id": 1}'))
    apply(sink, 1, (b"a", b'{"id": 1000}'))
    assert len(list(table_of(catalog).scan().plan_files())) == 2
    assert len(list(table_of(catalog).scan("id = 1000").plan_files())) == 1
    assert table_of(catalog).scan("id = 1000").to_arrow()["_offset"].to_pylist() == [1]


# --- several followers -----------------------------------------------------------------------------------------------


def overtaken(monkeypatch, slow, quick):
    """What ``slow`` commits next comes behind a commit of ``quick``."""
    commit = FollowedIceberg.commit

    def behind(self, *arguments, **options):
        if self is slow._followed:
            monkeypatch.setattr(FollowedIceberg, "commit", commit)
            quick()
        commit(self, *arguments, **options)

    monkeypatch.setattr(FollowedIceberg, "commit", behind)


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("mode", ["append", pytest.param("latest", marks=pytest.mark.matrix)])
def test_of_two_followers_that_looked_at_the_same_table_only_one_commits(catalog, monkeypatch, is_new, mode):
    first = 0 if is_new else 1
    if not is_new:
        apply(sl.IcebergSink(catalog, "shop.orders", mode=mode), 0, (b"a", b"1"))
    slow, quick = (sl.IcebergSink(catalog, "shop.orders", mode=mode) for _ in range(2))
    overtaken(monkeypatch, slow, lambda: apply(quick, first, (b"b", b"quick")))
    with pytest.raises(Fenced, match="one follower per table"):
        apply(slow, first, (b"b", b"slow"), (b"c", b"slow"))
    values = rows_of(catalog)["value"].to_pylist()
    assert sorted(values) == sorted([b"quick"] if is_new else [b"1", b"quick"])


def test_a_compaction_at_the_same_moment_does_not_stop_a_follower(catalog, monkeypatch):
    sink = sl.IcebergSink(catalog, "shop.orders")
    apply(sink, 0, (b"a", b"1"))
    overtaken(monkeypatch, sink, lambda: compacted(catalog))
    apply(sink, 1, (b"a", b"2"), (b"b", b"3"))
    assert latest_of(catalog) == {b"a": b"2", b"b": b"3"}


# --- tables that others change ---------------------------------------------------------------------------------------


def compacted(catalog):
    """What other engines do: the same rows in other files, in a snapshot that says so."""
    from pyiceberg.io.pyarrow import _dataframe_to_data_files
    from pyiceberg.table.snapshots import Operation, Summary
    from pyiceberg.table.update.snapshot import _OverwriteFiles

    table = table_of(catalog)
    rows = table.scan().to_arrow()
    transaction = table.transaction()
    old = [task.file for task in table.scan().plan_files()]

    class Replacing(_OverwriteFiles):
        def _summary(self, *arguments):
            found = super()._summary(*arguments)
            return Summary(Operation.REPLACE, **found.additional_properties)

    with Replacing(Operation.OVERWRITE, transaction, table.io) as update:
        for file in old:
            update.delete_data_file(file)
        for file in _dataframe_to_data_files(table.metadata, rows, table.io):
            update.append_data_file(file)
    transaction.commit_transaction()


def test_expiry_keeps_the_snapshot_that_proves_the_cursor_below_a_compaction(catalog):
    sink = sl.IcebergSink(catalog, "shop.orders")
    for first in range(3):
        apply(sink, first, (b"k%d" % first, b"1"))
    compacted(catalog)
    later = ManualClock(now=CLOCK.now() + 30 * 86_400_000_000)
    before = len(table_of(catalog).snapshots())
    sink.vacuumed(1, env=Env(clock=later))
    assert len(table_of(catalog).snapshots()) == before - 2
    again = sl.IcebergSink(catalog, "shop.orders")
    assert again.resume(LOG) == Cursor(LOG, 3)
    apply(again, 3, (b"k3", b"1"))
    assert len(latest_of(catalog)) == 4


def rolled_back(catalog):
    table = table_of(catalog)
    table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()


def rows_added(catalog):
    table_of(catalog).append(rows_of(catalog).slice(0, 1))


def overwritten(catalog):
    table_of(catalog).overwrite(rows_of(catalog).slice(0, 1))


def rows_deleted(catalog):
    table_of(catalog).delete("offset = 1")


def created_again(catalog):
    schema = table_of(catalog).schema()
    catalog.drop_table("shop.orders")
    catalog.create_table("shop.orders", schema)


def column_added(catalog):
    from pyiceberg.types import StringType

    with table_of(catalog).update_schema() as update:
        update.add_column("extra", StringType())


def partitioned(catalog):
    from pyiceberg.transforms import IdentityTransform

    with table_of(catalog).update_spec() as update:
        update.add_field("offset", IdentityTransform())


def dropped(catalog):
    catalog.drop_table("shop.orders")


def mostly_in_the_matrix(name, kinds, default):
    """The default suite takes some of them."""
    cases = [pytest.param(kind, marks=[] if kind in default else [pytest.mark.matrix]) for kind in kinds]
    return pytest.mark.parametrize(name, cases, ids=[kind.__name__ for kind in kinds])


CHANGES = [rolled_back, rows_added, overwritten, rows_deleted, created_again, column_added, partitioned]


@pytest.mark.matrix
@mostly_in_the_matrix("change", [*CHANGES, dropped], [rolled_back, rows_added, created_again, column_added, dropped])
def test_a_running_follower_stops_at_a_table_that_others_changed(catalog, change):
    sink = sl.IcebergSink(catalog, "shop.orders")
    apply(sink, 0, (b"a", b"1"))
    apply(sink, 1, (b"b", b"2"))
    change(catalog)
    with pytest.raises(Diverged):
        apply(sink, 2, (b"c", b"3"))


@pytest.mark.matrix
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_starting_follower_stops_at_a_table_that_others_changed(catalog, change):
    apply(sl.IcebergSink(catalog, "shop.orders"), 0, (b"a", b"1"))
    apply(sl.IcebergSink(catalog, "shop.orders"), 1, (b"b", b"2"))
    change(catalog)
    with pytest.raises(Diverged):
        sl.IcebergSink(catalog, "shop.orders").cursor(LOG)


def properties_changed(catalog):
    with table_of(catalog).transaction() as transaction:
        transaction.set_properties({"owner": "somebody"})


def expired(catalog):
    table = table_of(catalog)
    old = [one.snapshot_id for one in table.metadata.snapshots if one != table.metadata.current_snapshot()]
    table.maintenance.expire_snapshots().by_ids(old).commit()


@mostly_in_the_matrix("job", [compacted, properties_changed, expired], [compacted])
def test_maintenance_does_not_stop_a_follower(catalog, job):
    sink = sl.IcebergSink(catalog, "shop.orders")
    apply(sink, 0, (b"a", b"1"))
    apply(sink, 1, (b"b", b"2"))
    job(catalog)
    apply(sink, 2, (b"a", b"3"))
    assert sl.IcebergSink(catalog, "shop.orders").cursor(LOG) == Cursor(LOG, 3)
    assert latest_of(catalog) == {b"a": b"3", b"b": b"2"}


def test_an_expired_snapshot_of_ours_behind_a_compaction_is_unknown_and_can_be_adopted(catalog):
    apply(sl.IcebergSink(catalog, "shop.orders"), 0, (b"a", b"1"), (b"b", b"2"))
    compacted(catalog)
    expired(catalog)
    with pytest.raises(Diverged, match="has expired"):
        sl.IcebergSink(catalog, "shop.orders").cursor(LOG)
    sink = sl.IcebergSink(catalog, "shop.orders")
    assert sink.adopt(LOG) == Cursor(LOG, 2)
    apply(sink, 2, (b"a", b"3"))
    assert latest_of(catalog) == {b"a": b"3", b"b": b"2"}
    with pytest.raises(NotFound):
        sl.IcebergSink(catalog, "shop.other").adopt(LOG)


@pytest.fixture
def log():
    log = MemoryLog()
    for first in (0, 2, 4):
        rows = [(b"%d" % (number % 3), b"%d" % number) for number in (first, first + 1)]
        log.append(changes(0, *rows).drop_columns("offset"), writer=WriterId(CHANCE.uuid()), number=0).result()
    return log


@mostly_in_the_matrix("change", [rolled_back, rows_deleted, rows_added], [rows_deleted])
def test_repair_goes_back_to_the_last_snapshot_that_is_right_and_follows_on(catalog, log, change):
    for end in (2, 4):
        sl.follow(log, sl.IcebergSink(catalog, "shop.orders"), "s", upto=end, batching=Batching(records=2))
    change(catalog)
    with pytest.raises(Diverged):
        sl.follow(log, sl.IcebergSink(catalog, "shop.orders"), "s", upto="end")
    assert sl.follow(log, sl.IcebergSink(catalog, "shop.orders"), "s", upto="end", repair=True).next == 6
    assert latest_of(catalog) == {b"0": b"3", b"1": b"4", b"2": b"5"}


def test_a_table_that_was_dropped_between_runs_is_built_again_from_the_beginning(catalog, log):
    sink = sl.IcebergSink(catalog, "shop.orders")
    sl.follow(log, sink, "s", upto=3)
    dropped(catalog)
    assert sl.follow(log, sink, "s", upto="end").next == 6
    assert latest_of(catalog) == {b"0": b"3", b"1": b"4", b"2": b"5"}


def test_a_table_of_somebody_else_is_left_alone(catalog):
    catalog.create_namespace("shop")
    catalog.create_table("shop.orders", pa.schema({"x": pa.int64()}))
    with pytest.raises(Diverged, match="no log at all"):
        apply(sl.IcebergSink(catalog, "shop.orders"), 0, (b"a", b"1"))
    assert table_of(catalog).schema().column_names == ["x"]


def test_another_mode_or_name_than_the_tables_is_refused(catalog):
    apply(sl.IcebergSink(catalog, "shop.orders"), 0, (b"a", b"1"))
    with pytest.raises(InvalidInput, match="mode 'latest'"):
        sl.IcebergSink(catalog, "shop.orders", mode="append").cursor(LOG)
    with pytest.raises(Diverged, match="as 'other'"):
        sl.IcebergSink(catalog, "shop.orders", name="other").cursor(LOG)
    for name in ("orders", "shop.", ".orders"):
        with pytest.raises(InvalidInput, match=r"namespace\.table"):
            sl.IcebergSink(catalog, name)
    with pytest.raises(InvalidInput, match="catalog"):
        sl.IcebergSink(object(), "shop.orders")


def test_a_table_of_an_in_memory_catalog(tmp_path, log):
    with closing(InMemoryCatalog("m", warehouse=f"file://{tmp_path}")) as catalog:
        assert sl.follow(log, sl.IcebergSink(catalog, "shop.orders"), upto="end").next == 6
        assert latest_of(catalog) == {b"0": b"3", b"1": b"4", b"2": b"5"}


# --- crashes and costs -----------------------------------------------------------------------------------------------


class Watching(LocalDisk):
    """A disk that notes which files and folders are synced."""

    def __init__(self, synced):
        super().__init__()
        self._synced = synced

    def sync_file(self, path):
        self._synced.add(path)
        super().sync_file(path)

    def sync_folder(self, path):
        self._synced.add(path)
        super().sync_folder(path)

    def write_new(self, path, parts):
        self._synced.add(path)
        super().write_new(path, parts)


@pytest.fixture
def synced():
    return set()


def test_a_commit_is_on_disk_before_apply_returns(catalog, tmp_path, synced):
    apply(sl.IcebergSink(catalog, "shop.orders", env=Env(disk=Watching(synced))), 0, (b"a", b"1"))
    root = tmp_path / "warehouse" / "shop" / "orders"
    files = {str(path) for path in root.rglob("*") if path.is_file()}
    assert files
    assert files <= synced
    assert {str(root), str(root / "metadata"), str(root.parent)} <= synced


def test_a_commit_whose_process_died_before_its_sync_is_synced_before_its_cursor_is_told(
    catalog, tmp_path, monkeypatch, synced
):
    def killed(self, table, snapshot_id, *, is_own):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FollowedIceberg, "make_durable", killed)
        with pytest.raises(KeyboardInterrupt):
            apply(sl.IcebergSink(catalog, "shop.orders"), 0, (b"a", b"1"))
    sink = sl.IcebergSink(catalog, "shop.orders", env=Env(disk=Watching(synced)))
    assert sink.cursor(LOG) == Cursor(LOG, 1)
    metadata = tmp_path / "warehouse" / "shop" / "orders" / "metadata"
    newest = str(table_of(catalog).metadata_location).removeprefix("file://")
    assert {newest, *map(str, metadata.glob("*.avro")), str(metadata)} <= synced
    synced.clear()
    assert sink.cursor(LOG) == Cursor(LOG, 1)
    apply(sink, 1, (b"b", b"2"))
    synced.clear()
    assert sink.cursor(LOG) == Cursor(LOG, 2)
    assert not synced, "what this sink has committed is on disk"


@pytest.mark.matrix
@pytest.mark.parametrize("step", ["begin", "data_files", "commit", "_committed"])
def test_a_crash_at_any_step_leaves_the_table_at_its_cursor_or_behind_the_range(catalog, monkeypatch, step):
    apply(sl.IcebergSink(catalog, "shop.orders"), 0, (b"a", b"1"))
    owner = FollowedIceberg
    done = getattr(owner, step)

    def crashing(self, *arguments, **options):
        done(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, crashing)
        with pytest.raises(KeyboardInterrupt):
            apply(sl.IcebergSink(catalog, "shop.orders"), 1, (b"a", b"2"), (b"b", b"3"))
    is_stored = step in {"commit", "_committed"}
    assert sl.IcebergSink(catalog, "shop.orders").cursor(LOG) == Cursor(LOG, 3 if is_stored else 1)
    apply(sl.IcebergSink(catalog, "shop.orders"), 1, (b"a", b"2"), (b"b", b"3"))
    assert latest_of(catalog) == {b"a": b"2", b"b": b"3"}


@pytest.mark.matrix
def test_manifests_do_not_grow_with_the_number_of_commits(catalog):
    sink = sl.IcebergSink(catalog, "shop.orders")
    counts = []
    for number in range(8):
        apply(sink, number, (b"a", b"%d" % number))
        table = table_of(catalog)
        counts.append(len(table.current_snapshot().manifests(table.io)))
    assert counts[-1] == counts[2]


def test_the_catalogs_own_file_is_untouched_by_a_refused_commit(catalog, tmp_path, monkeypatch):
    sink = sl.IcebergSink(catalog, "shop.orders")
    apply(sink, 0, (b"a", b"1"))

    def rows():
        with closing(sqlite3.connect(tmp_path / "catalog.db")) as connection:
            return connection.execute("SELECT * FROM iceberg_tables").fetchall()

    before = rows()
    with pytest.raises(NullKey):
        apply(sink, 1, (None, b"2"))
    assert rows() == before


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc of size 64 failed")])
def test_a_commit_without_memory_is_no_failure_of_the_store(catalog, monkeypatch, error):
    sink = sl.IcebergSink(catalog, "shop.orders")
    apply(sink, 0, (b"a", b"1"))

    def full(*_, **__):
        raise error

    monkeypatch.setattr(SqlCatalog, "commit_table", full)
    with pytest.raises(MemoryError):
        apply(sink, 1, (b"b", b"2"))
    monkeypatch.undo()
    apply(sink, 1, (b"b", b"2"))
    assert latest_of(catalog) == {b"a": b"1", b"b": b"2"}


def test_a_manifest_that_cannot_be_read_after_a_commit_is_an_error_that_may_be_retried(catalog, monkeypatch):
    sink = sl.IcebergSink(catalog, "shop.orders", mode="append")
    apply(sink, 0, (b"a", b"1"))
    commit, manifests, landed = SqlCatalog.commit_table, Snapshot.manifests, []

    def committed(*arguments, **options):
        landed.append(commit(*arguments, **options))
        return landed[-1]

    def read(*arguments, **options):
        if landed:
            raise OSError("The disk failed.")
        return manifests(*arguments, **options)

    monkeypatch.setattr(SqlCatalog, "commit_table", committed)
    monkeypatch.setattr(Snapshot, "manifests", read)
    with pytest.raises(TransientStorageError, match="The disk failed"):
        apply(sink, 1, (b"b", b"2"))
    monkeypatch.undo()
    apply(sink, 1, (b"b", b"2"), (b"c", b"3"))
    assert sorted(rows_of(catalog)["offset"].to_pylist()) == [0, 1, 2]
