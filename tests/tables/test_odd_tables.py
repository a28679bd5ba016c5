"""Edges of tables: odd paths, append-only tables, deletion vectors, float keys, tables that began in the middle."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import InvalidInput
from strandline.log.memory import MemoryLog
from strandline.storage.disk import LocalDisk
from strandline.storage.env import Env
from strandline.tables.maintain.operations import describe, optimize, rebuild, vacuum, verify
from tests.matrix_cases import some


def extend(log: MemoryLog, rows: list[tuple[bytes, bytes]]) -> None:
    with log.producer() as producer:
        for key, value in rows:
            producer.append(key=key, value=value)


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    extend(log, [(b"k%d" % (n % 4), b"%d" % n) for n in range(20)])
    return log


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(["100%", "a b", "a?b", "a#b", "ü"], 2))
def test_a_table_in_a_folder_with_an_odd_name_is_followed_and_looked_after(tmp_path, log, name):
    place = str(tmp_path / name / "table")
    for end in (10, 20):
        sl.follow(log, sl.DeltaSink(place, mode="append"), upto=end)
    sink = sl.DeltaSink(place, mode="append")
    assert describe(sink, log).rows == 20
    assert optimize(sink) == 1
    vacuum(sink)
    rebuild(sink, log)
    assert verify(sink, log).is_clean
    done = CliRunner().invoke(app, ["table", "describe", place])
    assert done.exit_code == 0, done.output
    assert "20 rows" in done.output
    assert sorted(one.name for one in tmp_path.iterdir()) == [name]


@pytest.mark.parametrize("name", ["a%20b", "a\\b", "a\tb"])
def test_a_folder_that_deltalake_confuses_with_another_one_is_refused_at_the_door(tmp_path, name):
    for place in (str(tmp_path / name), (tmp_path / name).as_uri()):
        with pytest.raises(InvalidInput, match="name another folder"):
            sl.DeltaSink(place)
    with pytest.raises(InvalidInput):
        sl.DeltaSink(str(tmp_path / "table"), dead_letters=str(tmp_path / name))


@pytest.mark.parametrize("name", ["a b", "a%20b", "ü"])
def test_an_iceberg_location_with_odd_characters_is_taken_as_pyiceberg_takes_it(tmp_path, log, name):
    catalog = SqlCatalog("c", uri="sqlite:///:memory:", warehouse=f"file://{tmp_path}/{name}")
    for end in (10, 20):
        sl.follow(log, sl.IcebergSink(catalog, "shop.orders", mode="append"), upto=end)
    assert catalog.load_table("shop.orders").scan().to_arrow().num_rows == 20
    assert [one.name for one in tmp_path.iterdir()] == [name]
    catalog.close()


def test_an_iceberg_location_that_pyiceberg_would_cut_off_is_refused(tmp_path, log):
    catalog = SqlCatalog("c", uri="sqlite:///:memory:", warehouse=f"file://{tmp_path}/a?b")
    with pytest.raises(InvalidInput, match="choose another location"):
        sl.follow(log, sl.IcebergSink(catalog, "shop.orders"), upto="end")
    catalog.close()


# --- append-only tables ----------------------------------------------------------------------------------------------


def test_an_append_only_table_takes_all_changes_and_no_keyed_follower(tmp_path, log):
    for mode in ("append", "latest", "history"):
        place = str(tmp_path / mode)
        sl.follow(log, sl.DeltaSink(place, mode=mode), upto=10)
        DeltaTable(place).alter.set_table_properties({"delta.appendOnly": "true"})
        if mode == "append":
            sink = sl.DeltaSink(place, mode=mode)
            assert sl.follow(log, sink, upto="end").next == 20
            assert verify(sink, log).is_clean
            with pytest.raises(InvalidInput, match=r"delta\.appendOnly"):
                rebuild(sink, log)
            continue
        with pytest.raises(InvalidInput, match=r"delta\.appendOnly.*replaces rows"):
            sl.follow(log, sl.DeltaSink(place, mode=mode), upto="end")


def test_wider_columns_of_an_append_only_table_are_refused(tmp_path):
    log, place = MemoryLog(), str(tmp_path / "table")
    extend(log, [(b"a", b'{"n": 1}')])
    sl.follow(log, sl.DeltaSink(place, mode="append", value=sl.values.Json(pa.schema({"n": pa.int32()}))), upto="end")
    DeltaTable(place).alter.set_table_properties({"delta.appendOnly": "true"})
    extend(log, [(b"a", b'{"n": 2}')])
    wider = sl.DeltaSink(place, mode="append", value=sl.values.Json(pa.schema({"n": pa.int64()})))
    with pytest.raises(InvalidInput, match="written again"):
        sl.follow(log, wider, upto="end")


# --- deletion vectors ------------------------------------------------------------------------------------------------

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def z85(data: bytes) -> str:
    text = ""
    for (word,) in struct.iter_unpack(">I", data):
        text += "".join(_Z85[word // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return text


def delete_with_a_vector(place: str, rows: list[int]) -> None:
    """What Spark's DELETE does in a table with deletion vectors: no file is written again."""
    assert len(rows) % 2 == 0
    table = DeltaTable(place)
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16) + b"".join(struct.pack("<H", row) for row in rows)
    vector = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    (file,) = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    add = {
        "path": file["path"],
        "partitionValues": {},
        "size": file["size_bytes"],
        "modificationTime": file["modification_time"],
        "dataChange": True,
        "stats": json.dumps({"numRecords": file["num_records"]}),
        "deletionVector": {
            "storageType": "i",
            "pathOrInlineDv": z85(vector),
            "sizeInBytes": len(vector),
            "cardinality": len(rows),
        },
    }
    remove = {"path": file["path"], "deletionTimestamp": 1, "dataChange": True, "size": file["size_bytes"]}
    features = {
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors", "appendOnly", "invariants"],
    }
    actions = [
        {"commitInfo": {"operation": "DELETE", "timestamp": 1}},
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {**remove, "partitionValues": {}}},
        {"add": add},
    ]
    commit = Path(place, "_delta_log", f"{table.version() + 1:020d}.json")
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))


@pytest.mark.parametrize("mode", ["latest", "history", "append"])
def test_rows_that_a_deletion_vector_deleted_never_come_back(tmp_path, log, mode):
    place = str(tmp_path / "table")
    sl.follow(log, sl.DeltaSink(place, mode=mode), upto=4)
    delete_with_a_vector(place, [0, 1])
    with pytest.raises(sl.errors.Diverged):
        sl.follow(log, sl.DeltaSink(place, mode=mode), upto="end")
    sl.DeltaSink(place, mode=mode).adopt(log.log_id)
    sink = sl.DeltaSink(place, mode=mode)
    if mode == "append":  # no file is written again
        assert sl.follow(log, sink, upto="end").next == 20
        assert pa.table(DeltaTable(place).deletion_vectors()).num_rows == 1
        with pytest.raises(InvalidInput, match="deletion vectors"):
            optimize(sink)
    else:
        with pytest.raises(InvalidInput, match="would bring the rows back"):
            sl.follow(log, sink, upto="end")
    rebuild(sink, log)
    assert pa.table(DeltaTable(place).deletion_vectors()).num_rows == 0
    assert verify(sink, log).is_clean


# --- float keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", some([pa.float32(), pa.float64()], 1), ids=str)
def test_both_zeros_are_one_key_and_so_are_all_nans(tmp_path, width):
    log = MemoryLog()
    extend(log, [(b"", b'{"x": 0.0, "n": 1}'), (b"", b'{"x": 0.1, "n": 2}')])
    extend(log, [(b"", b'{"x": -0.0, "n": 3}'), (b"", b'{"x": 0.1, "n": 4}')])
    value = sl.values.Json(pa.schema({"x": width, "n": pa.int64()}))
    catalog = SqlCatalog("c", uri="sqlite:///:memory:", warehouse=f"file://{tmp_path}/warehouse")
    options = {"value": value, "key": "x"}
    for end in (2, 4):
        sl.follow(log, sl.DeltaSink(str(tmp_path / "delta"), **options), upto=end)
        sl.follow(log, sl.IcebergSink(catalog, "shop.orders", **options), upto=end)
        sl.follow(log, sl.SqliteSink(str(tmp_path / "shop.db"), table="t", **options), upto=end)
    delta = DeltaTable(str(tmp_path / "delta")).to_pyarrow_table()
    iceberg = catalog.load_table("shop.orders").scan().to_arrow()
    for found in (delta, iceberg):
        assert sorted(found["n"].to_pylist()) == [3, 4]
    import sqlite3

    database = sqlite3.connect(tmp_path / "shop.db")
    assert database.execute("SELECT n FROM t ORDER BY n").fetchall() == [(3,), (4,)]
    database.close()
    catalog.close()


# --- tables that began in the middle ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_a_table_that_began_in_the_middle_is_verified_and_rebuilt_from_there(tmp_path, log, mode):
    sink = sl.DeltaSink(str(tmp_path / "table"), mode=mode)
    sl.follow(log, sink, start=18, upto="end")
    assert sink.start() == 18
    extend(log, [(b"k1", b"new")])
    sl.follow(log, sink, upto="end")
    assert verify(sink, log).is_clean
    rows = sink.rows().num_rows
    rebuild(sink, log)
    assert verify(sink, log).is_clean
    assert sink.rows().num_rows == rows


def test_the_start_of_a_table_that_did_not_record_it_is_found_in_its_first_commit(tmp_path, log):
    place = str(tmp_path / "table")
    sl.follow(log, sl.DeltaSink(place, mode="append"), start=18, upto="end")
    first = Path(place, "_delta_log", f"{0:020d}.json")
    text = first.read_text()
    assert '"strandline.start":"18"' in text
    first.write_text(text.replace('"strandline.start":"18"', '"other":"1"'))
    sink = sl.DeltaSink(place, mode="append")
    assert sink.start() == 18
    assert verify(sink, log).is_clean


# --- durability ------------------------------------------------------------------------------------------------------


def test_joined_files_are_on_the_disk_before_optimize_returns(tmp_path, log):
    synced: list[str] = []

    class Watched(LocalDisk):
        def sync_file(self, path: str) -> None:
            synced.append(path)
            super().sync_file(path)

    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append", env=Env(disk=Watched()))
    for end in (10, 20):
        sl.follow(log, sink, upto=end)
    synced.clear()
    optimize(sink)
    (file,) = DeltaTable(sink.url).file_uris()
    version = DeltaTable(sink.url).version()
    assert Path(file).name in {Path(path).name for path in synced}
    assert f"{version:020d}.json" in {Path(path).name for path in synced}
