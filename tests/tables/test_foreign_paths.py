"""Tables whose history names files elsewhere, or with symbolic links in their folders: nothing outside is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import CorruptData, StrandlineError, WrongKind
from strandline.log.memory import MemoryLog
from strandline.tables.maintain.operations import optimize, rebuild, vacuum, verify
from tests.matrix_cases import some
from tests.tables.maintain.test_maintenance_formats import Iceberg, extend

SECRET = b"the secret of somebody else"


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    extend(log, 20)
    return log


@pytest.fixture
def victim(tmp_path: Path, log: MemoryLog) -> Path:
    """A data file outside of the table, with the table's columns."""
    folder = tmp_path / "victim"
    folder.mkdir()
    sl.follow(log, sl.DeltaSink(tmp_path / "made", mode="append"), upto=5)
    (made,) = DeltaTable(tmp_path / "made").file_uris()
    rows = pq.read_table(made)
    at = rows.schema.get_field_index("value")
    rows = rows.set_column(at, rows.schema.field(at), pa.array([SECRET] * rows.num_rows, pa.binary()))
    pq.write_table(rows, folder / "secret.parquet")
    return folder / "secret.parquet"


def forged(table: Path, log_id: UUID, path: str, *, kind: str = "add") -> None:
    """A commit of somebody who may write to the table's folder, which looks like one of its follower."""
    newest = max((table / "_delta_log").glob("*.json"))
    version = int(newest.stem) + 1
    actions = [json.loads(line) for line in newest.read_text().splitlines()]
    kept = [action for action in actions if "txn" in action or "commitInfo" in action]
    for action in kept:
        if "txn" in action and str(action["txn"]["appId"]).count("/") == 3:
            action["txn"]["version"] = version
    added = {"path": path, "partitionValues": {}, "size": 1000, "modificationTime": 1, "dataChange": True}
    removed = {"path": path, "deletionTimestamp": 1, "dataChange": True, "size": 1000}
    forged = [*kept, {kind: added if kind == "add" else removed}]
    (newest.parent / f"{version:020d}.json").write_text("\n".join(map(json.dumps, forged)))


def jobs(sink: Any, log: MemoryLog) -> list[Any]:
    found = [lambda: sl.follow(log, sink, upto="end"), lambda: verify(sink, log), sink.rows]
    return [*found, lambda: optimize(sink)] if sink.mode == "append" else found


PATHS = [
    "../victim/secret.parquet",
    "..%2Fvictim%2Fsecret.parquet",
    "{victim}",
    "file://{victim}",
    "sub/%252e%252e/../x",
]


@pytest.mark.parametrize("path", some(PATHS, 3))
@pytest.mark.parametrize("mode", some(["append", "latest"], 1))
def test_a_data_file_outside_of_a_delta_table_is_never_read(log, tmp_path, victim, path, mode):
    table = tmp_path / "table"
    sl.follow(log, sl.DeltaSink(table, mode=mode), upto=10)
    forged(table, log.log_id, path.format(victim=victim))
    for job in jobs(sl.DeltaSink(table, mode=mode), log):
        with pytest.raises(CorruptData, match="not within the table's own folder"):
            job()
    assert victim.exists()
    if path.startswith("..%2F"):  # deltalake cannot remove a file of that name
        sink = sl.DeltaSink(table, mode=mode)
        for job in (lambda: sl.follow(log, sink, upto="end", repair=True), lambda: rebuild(sink, log)):
            with pytest.raises(CorruptData, match=r"remove the table to build it again\.$"):
                job()
        return
    sl.follow(log, sl.DeltaSink(table, mode=mode), upto="end", repair=True)
    assert verify(sl.DeltaSink(table, mode=mode), log).is_clean
    assert not any(SECRET in file.read_bytes() for file in table.glob("*.parquet"))


@pytest.mark.parametrize("name", ["part%20x.parquet", "day=a%2520b/x.parquet"])
def test_a_file_with_an_encoded_name_is_removed_with_the_rows_that_replace_it(log, tmp_path, name):
    sink = sl.DeltaSink(tmp_path / "table")
    sl.follow(log, sink, upto=10)
    (made,) = (tmp_path / "table").glob("*.parquet")
    (tmp_path / "table" / "day=a%20b").mkdir()
    forged(tmp_path / "table", log.log_id, made.name, kind="remove")
    forged(tmp_path / "table", log.log_id, name)
    made.rename(tmp_path / "table" / unquote(name))
    sink = sl.DeltaSink(tmp_path / "table")
    sink.adopt(log.log_id)
    sl.follow(log, sink, upto="end")
    assert verify(sink, log).is_clean


@pytest.mark.parametrize("mode", ["latest", "append"])
def test_a_data_file_behind_a_link_is_never_read(log, tmp_path, victim, mode):
    table = tmp_path / "table"
    sl.follow(log, sl.DeltaSink(table, mode=mode), upto=10)
    (table / "within").symlink_to(victim.parent)
    (table / "linked.parquet").symlink_to(victim)
    for path in ("within/secret.parquet", "linked.parquet"):
        forged(table, log.log_id, path)
    for job in jobs(sl.DeltaSink(table, mode=mode), log)[mode == "append" :]:  # a follower that appends reads nothing
        with pytest.raises(CorruptData, match="behind a symbolic link"):
            job()


def test_a_vacuum_deletes_nothing_outside_of_a_delta_table(log, tmp_path, victim):
    table, sink = tmp_path / "table", sl.DeltaSink(tmp_path / "table")
    sl.follow(log, sink, upto=10)
    forged(table, log.log_id, "../victim/secret.parquet", kind="remove")
    os.utime(victim, (1, 1))
    vacuum(sink, 1)
    assert victim.exists()
    link = table / "within"
    link.symlink_to(victim.parent)
    with pytest.raises(WrongKind, match="symbolic link"):
        vacuum(sink, 1)
    assert victim.exists()
    link.unlink()
    vacuum(sink, 1)


def test_a_history_behind_a_link_is_neither_read_nor_written(log, tmp_path):
    sink = sl.DeltaSink(tmp_path / "victim")
    sl.follow(log, sink, upto=10)
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "_delta_log").symlink_to(tmp_path / "victim" / "_delta_log")
    for job in (*jobs(sl.DeltaSink(tmp_path / "table"), log), lambda: vacuum(sl.DeltaSink(tmp_path / "table"), 1)):
        with pytest.raises(WrongKind, match="symbolic link"):
            job()
    running = sl.DeltaSink(tmp_path / "victim")
    sl.follow(log, running, upto=15)
    assert verify(running, log).is_clean
    (tmp_path / "victim" / "_delta_log").rename(tmp_path / "elsewhere")
    (tmp_path / "victim" / "_delta_log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WrongKind, match="symbolic link"):
        sl.follow(log, running, upto="end")


def test_a_folder_that_is_itself_a_link_is_a_table_like_any_other(log, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "table").symlink_to(tmp_path / "real")
    sink = sl.DeltaSink(tmp_path / "table")
    for end in (5, 10, 20):
        sl.follow(log, sink, upto=end)
    assert verify(sink, log).is_clean
    vacuum(sink, 1)


def test_a_data_file_outside_of_an_iceberg_table_is_never_read(log, tmp_path, victim):
    place = Iceberg(tmp_path)
    sl.follow(log, place.sink(mode="append"), upto=10)
    table = place.catalog.load_table("shop.orders")
    table.add_files([f"file://{victim}"], check_duplicate_files=False)
    sink = place.sink(mode="append")
    sink.adopt(log.log_id)
    for job in (lambda: verify(sink, log), lambda: optimize(sink), lambda: rebuild(sink, log), sink.rows):
        with pytest.raises(CorruptData, match="not within the table's own folder"):
            job()
    assert victim.exists()
    sl.follow(log, place.sink(mode="append"), upto="end", repair=True)
    assert verify(place.sink(mode="append"), log).is_clean
    place.close()


def test_an_iceberg_table_whose_data_folder_is_a_link_is_neither_read_nor_vacuumed(log, tmp_path):
    place = Iceberg(tmp_path)
    sl.follow(log, place.sink(), upto=10)
    data = Path(place.catalog.load_table("shop.orders").metadata.location.removeprefix("file://"), "data")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptData, match="behind a symbolic link"):
        verify(place.sink(), log)
    with pytest.raises(WrongKind, match="symbolic link"):
        vacuum(place.sink(), 1)
    assert list((tmp_path / "elsewhere").iterdir())
    place.close()


def test_a_commit_that_was_forged_is_an_error_of_this_package_at_the_start_of_a_follower(log, tmp_path):
    table = tmp_path / "table"
    sl.follow(log, sl.DeltaSink(table), upto=10)
    forged(table, log.log_id, "a\u0000b.parquet")
    with pytest.raises(StrandlineError):
        sl.follow(log, sl.DeltaSink(table), upto="end")
