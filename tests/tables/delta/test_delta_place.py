"""The place of a Delta table: VACUUM deletes what else is there, so nothing else may be."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

import strandline as sl
from strandline.errors import StorageError, TransientStorageError, WrongKind
from strandline.storage.disk import FolderRow, LocalDisk
from strandline.storage.env import Env
from strandline.storage.objects.urls import open_store
from strandline.tables.delta.commits import DeltaCommits
from tests.proxy import FaultyProxy, answer
from tests.servers import S3Server
from tests.tables.processes.test_follower_processes import World


def some_log() -> Any:
    log: Any = sl.log.MemoryLog()
    with log.producer() as producer:
        producer.append(key=b"a", value=b"1")
    return log


class Prefix:
    """A place in a bucket."""

    def __init__(self, url: str, options: dict[str, str]) -> None:
        self.url, self.options = url, options

    def names(self) -> set[str]:
        store: Any = open_store(self.url, self.options)
        return {one.path for one in store.list("")}

    def follow(self, name: str) -> sl.DeltaSink:
        sink = sl.DeltaSink(f"{self.url}/{name}", options=self.options)
        sl.follow(some_log(), sink, upto="end")
        return sink


@pytest.fixture
def prefix(s3_server: S3Server, s3_url: str) -> Prefix:
    return Prefix(s3_url, s3_server.options)


@pytest.mark.parametrize("name", ["outer/inner", "outer/a/b/inner"])
def test_a_table_within_the_prefix_of_another_one_is_refused(prefix: Prefix, name: str) -> None:
    prefix.follow("outer")
    before = prefix.names()
    with pytest.raises(WrongKind, match=r"is within the Delta table .*/outer, and a VACUUM of that would delete it"):
        prefix.follow(name)
    assert prefix.names() == before
    prefix.follow("outer-too")


@pytest.mark.matrix
@pytest.mark.parametrize("inner", ["table", "log"])
def test_a_table_around_other_objects_is_refused(prefix: Prefix, inner: str) -> None:
    if inner == "table":
        prefix.follow("shop/orders")
    else:
        sl.open(f"{prefix.url}/shop/orders", create=True, options=prefix.options)
    before = prefix.names()
    with pytest.raises(WrongKind, match=r"shop holds other files \(orders\)"):
        prefix.follow("shop")
    assert prefix.names() == before


def test_dead_letters_within_another_table_are_refused_too(prefix: Prefix) -> None:
    prefix.follow("outer")
    options = prefix.options
    sink = sl.DeltaSink(f"{prefix.url}/table", dead_letters=f"{prefix.url}/outer/letters", options=options)
    with pytest.raises(WrongKind, match="within the Delta table"):
        sl.follow(some_log(), sink, upto="end")


def test_what_a_failed_creation_left_is_no_obstacle(prefix: Prefix) -> None:
    log = some_log()
    sink = sl.DeltaSink(f"{prefix.url}/table", options=prefix.options)
    begun = sink.begin(since=log.start(), upto=log.end(), tasks=1)
    assert begun is not None
    for part in begun.parts:
        part.write(log.read(log.start()))
    assert prefix.names()
    prefix.follow("table")


@pytest.mark.matrix
def test_prefixes_above_that_may_not_be_read_are_not_looked_at_and_a_failing_store_is_no_answer(
    tmp_path: Path, s3_server: S3Server, s3_url: str, s3_proxy: FaultyProxy
) -> None:
    """The follower is a process of its own: the library holds Python's lock while it asks, and the proxy needs it."""
    world = World(tmp_path, "delta", "latest")
    world.extend(2)
    above = f"{s3_url.partition('//')[2]}/_delta_log"
    options = {**s3_server.options_through(s3_proxy.endpoint), "max_retries": "0"}
    world.orders = replace(world.orders, place=f"{s3_url}/table", options=options)
    s3_proxy.fail_next(answer(500, "InternalError"), containing=above, times=1_000)
    assert world.run() == "TransientStorageError\n"
    assert not Prefix(s3_url, s3_server.options).names()
    s3_proxy.heal()
    s3_proxy.fail_next(answer(403, "AccessDenied"), containing=above, times=1_000)
    assert world.run() == "ok 2\n"
    assert any(one.fault is not None and one.fault.status == 403 for one in s3_proxy.seen)


def test_a_vacuum_of_a_table_around_another_one_removes_nothing(prefix: Prefix) -> None:
    outer = prefix.follow("outer")
    write_deltalake(f"{outer.url}/a/inner", pa.table({"x": [1]}), storage_options=prefix.options)
    before = prefix.names()
    with pytest.raises(WrongKind, match=r"something else within the table .*a/inner/_delta_log/0+\.json"):
        sl.tables.vacuum(outer)
    assert prefix.names() == before


@pytest.mark.parametrize("what", ["table", "log"])
def test_a_vacuum_of_a_folder_around_something_else_removes_nothing(tmp_path: Path, what: str) -> None:
    outer = sl.DeltaSink(str(tmp_path / "outer"))
    sl.follow(some_log(), outer, upto="end")
    if what == "table":
        write_deltalake(tmp_path / "outer" / "inner", pa.table({"x": [1]}))
    else:
        sl.open(str(tmp_path / "log"), create=True)
        (tmp_path / "log").rename(tmp_path / "outer" / "log")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    for file in files:
        os.utime(file, (0, 0))
    with pytest.raises(WrongKind, match="nothing was removed"):
        sl.tables.vacuum(outer)
    assert all(file.exists() for file in files)


def test_a_vacuum_removes_data_files_deletion_vectors_and_unfinished_uploads(tmp_path: Path) -> None:
    sink = sl.DeltaSink(str(tmp_path / "table"))
    sl.follow(some_log(), sink, upto="end")
    names = ["part-0.parquet", "part-1.parquet#1", "deletion_vector_1.bin", "aB/part-2.parquet"]
    (tmp_path / "table" / "aB").mkdir()
    for name in names:
        (tmp_path / "table" / name).write_bytes(b"x")
        os.utime(tmp_path / "table" / name, (0, 0))
    sl.tables.vacuum(sink)
    assert [name for name in names if (tmp_path / "table" / name).exists()] == ["part-1.parquet#1"]


@pytest.mark.parametrize("name", ["file", "file/table"])
def test_a_table_where_a_file_is_is_refused_and_not_tried_again(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises((WrongKind, StorageError), match="file is a file") as refused:
        sl.follow(some_log(), sl.DeltaSink(str(tmp_path / name)), upto="end")
    assert not isinstance(refused.value, TransientStorageError)
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_follower_that_gives_up_a_new_table_leaves_the_files_of_another_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another follower may store its files in the folder between any two steps."""
    folder = tmp_path / "table"
    folder.mkdir()
    names = [f"part-{1:016d}-{job}-x.parquet" for job in ("mine", "other")]
    (folder / names[0]).write_bytes(b"x")

    class LateDisk(LocalDisk):
        def scan(self, path: str) -> list[FolderRow]:
            found = super().scan(path)
            (folder / names[1]).write_bytes(b"x")
            return found

    monkeypatch.setattr("strandline.tables.delta.commits.is_data_file", lambda _: True)
    table = DeltaCommits(str(folder), None, "default", {}, Env(disk=LateDisk()))  # type: ignore[arg-type]
    monkeypatch.setattr(table, "open", lambda: None)
    table.remove_uncommitted("mine")
    assert [path.name for path in folder.iterdir()] == [names[1]]
