"""What the library creates on the local disk belongs to its owner alone, and no lock stops it without a word."""

from __future__ import annotations

import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from strandline.errors import InvalidInput, StorageError
from strandline.model.records import record_batch
from strandline.storage.disk import LocalDisk
from strandline.storage.env import Env
from strandline.storage.file_append import SETTING, parse_umask
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import ABSENT, Match
from strandline.testing.clock import ManualClock
from tests import path_contents

MADE = [
    path_contents.object_log,
    path_contents.wal,
    path_contents.queue_v1,
    path_contents.topic,
    path_contents.node,
    path_contents.append_log_store,
    path_contents.snapshot,
]
FOLDERS, FILES = 0o700, 0o600


@pytest.fixture(autouse=True)
def _an_open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(below: Path) -> tuple[set[int], set[int]]:
    found = [below, *below.rglob("*")]
    both = [
        {stat.S_IMODE(path.lstat().st_mode) for path in found if path.is_dir()},
        {stat.S_IMODE(path.lstat().st_mode) for path in found if not path.is_dir()},
    ]
    return both[0], both[1]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_new_folders_and_files_are_their_owner_s_alone(tmp_path, make):
    make(tmp_path / "above" / "place")
    assert modes(tmp_path / "above") == ({FOLDERS}, {FILES})


def test_a_rocksdb_store_is_in_a_folder_of_its_owner_s_alone(tmp_path):
    path_contents.rocksdb_store(tmp_path / "above" / "place")
    assert modes(tmp_path / "above")[0] == {FOLDERS}


@pytest.mark.parametrize(
    ("umask", "folders", "files"), [(None, FOLDERS, FILES), pytest.param("027", 0o750, 0o640, marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_tables_have_the_modes_of_all_other_files(tmp_path, monkeypatch, kind, umask, folders, files):
    if umask is not None:
        monkeypatch.setenv(SETTING, umask)
    above = tmp_path / "above"
    catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{above}")

    def sink():
        if kind == "delta":
            return sl.DeltaSink(above / "table", mode="append")
        return sl.IcebergSink(catalog, "shop.orders", mode="append")

    with closing(catalog), sl.open(str(tmp_path / "log"), create=True) as log:
        for number in range(21 if kind == "delta" else 2):  # the library writes a checkpoint then
            log.append(batch(), writer=sl.log.WriterId(UUID(int=1)), number=number).result(120)
            sl.follow(log, sink(), upto="end")
        sl.tables.optimize(sink())
    made = [path for path in above.rglob("*") if path.is_dir() and path.name != "shop"]  # the catalog's
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in made} == {folders}
    assert {stat.S_IMODE(path.stat().st_mode) for path in above.rglob("*") if path.is_file()} == {files}


@pytest.mark.parametrize(
    ("umask", "folders", "files"), [("027", 0o750, 0o640), ("007", 0o770, 0o660), ("0", 0o777, 0o666)]
)
def test_folders_and_files_are_shared_by_a_umask_of_their_own(tmp_path, monkeypatch, umask, folders, files):
    monkeypatch.setenv(SETTING, umask)
    path_contents.wal(tmp_path / "place")
    path_contents.object_log(tmp_path / "other")
    assert modes(tmp_path / "place") == modes(tmp_path / "other") == ({folders}, {files})


@pytest.mark.parametrize("text", ["", "x", "8", "-1", "1000", "700", "777"])
def test_what_is_no_umask_is_refused_by_name(text):
    with pytest.raises(InvalidInput, match=SETTING):
        parse_umask(text)


def test_existing_files_keep_their_mode(tmp_path):
    folder = tmp_path / "place"
    folder.mkdir(mode=0o755)
    path_contents.wal(folder)
    (folder / "mark").chmod(0o644)
    path_contents.wal(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / "mark").stat().st_mode) == 0o644


def test_a_stranger_s_lock_ends_in_an_error_that_names_it_and_changes_nothing(tmp_path):
    store = LocalStore(str(tmp_path), env=Env(disk=LocalDisk(clock=ManualClock())))
    version = store.put_if("head", b"one", ABSENT)
    version = store.put_if("head", b"two", Match(version))
    with (tmp_path / ".~lock-head").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"\.~lock-head was held by another process for 60 s"):
            store.put_if("head", b"three", Match(version))
    assert store.get("head").data == b"two"
    store.put_if("head", b"three", Match(version))


def test_an_append_while_a_stranger_holds_the_lock_is_delayed_and_not_lost(tmp_path):
    with sl.open(str(tmp_path / "log"), create=True) as log:
        log.append(batch(), writer=sl.log.WriterId(UUID(int=1)), number=0).result(120)
        with (tmp_path / "log" / ".~lock-head").open() as held, ThreadPoolExecutor(1) as pool:
            fcntl.flock(held, fcntl.LOCK_EX)
            appended = pool.submit(log.append, batch(), writer=sl.log.WriterId(UUID(int=1)), number=1)
            with pytest.raises(TimeoutError):
                appended.result(0.1).result(0.1)
            fcntl.flock(held, fcntl.LOCK_UN)
            appended.result(120).result(120)
        assert log.bounds().next == 2


def batch():
    return record_batch(timestamps=[1], ops=[sl.Op.PUT], keys=[b"k"], values=[b"v"])


def test_a_link_that_leads_to_itself_is_listed_and_stops_no_log_beside_it(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (row,) = LocalDisk().scan(str(tmp_path))
    assert (row.name, row.is_link, row.is_folder) == ("loop", True, False)
    assert sl.open(f"file://{tmp_path}/log", create=True).bounds().next == 0
