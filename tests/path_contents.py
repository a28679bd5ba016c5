"""One real example of everything that a path may lead to, for tests of who recognises what."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import strandline as sl
from strandline.compat.spool.format import encode_record_frame
from strandline.log.topic.logs import open_object_topic
from strandline.node.node_folder import NodeFolder


def object_log(path: Path) -> None:
    with sl.open(str(path), create=True) as log, log.producer() as producer:
        producer.append(key=b"k", value=b"v").result(120)


def wal(path: Path) -> None:
    with sl.compat.WriteAheadLog.open(path) as log:
        log.append_many([b"one", b"two"])


def queue_v1(path: Path) -> None:
    queue = sl.open(str(path), format="queue-v1")
    with queue.producer() as producer:
        producer.produce([b"one"])


def topic(path: Path) -> None:
    open_object_topic(path.as_uri(), partition_count=1, create=True).close()


def node(path: Path) -> None:
    with NodeFolder.open(str(path), "a") as home:
        home.remember(generation=1)
        wal(Path(home.data(1)))


def append_log_store(path: Path) -> None:
    store = sl.followers.AppendLogStore.open(str(path))
    cursor = sl.Cursor(UUID(int=1), 0)
    store.apply(sl.log.READ_SCHEMA.empty_table(), since=cursor, upto=cursor.at(1))
    store.close()


def rocksdb_store(path: Path) -> None:
    sl.followers.RocksStore.open(str(path)).close()


def snapshot(path: Path) -> None:
    fold = path.with_name(f"{path.name}-fold")
    append_log_store(fold)
    store = sl.followers.AppendLogStore.open(str(fold))
    store.export_to(str(path))
    store.close()
    shutil.rmtree(fold)


def delta_table(path: Path) -> None:
    (path / "_delta_log").mkdir(parents=True)


def spool(path: Path) -> None:
    path.write_bytes(b"".join(encode_record_frame(1, 1, 0, b"one")))


def spool_beside(path: Path) -> None:
    spool(path.with_name(f"{path.name}.logical.wal"))


def empty(path: Path) -> None:
    path.mkdir()


def file(path: Path) -> None:
    path.write_text("something else")


def absent(path: Path) -> None:
    assert not path.exists()


def something_else(path: Path) -> None:
    path.mkdir()
    (path / "letter.txt").write_text("Dear reader")


def over(path: Path, *makers: Callable[[Path], None]) -> None:
    """Several things in one folder: nothing makes them there, and so they are copied, each over those before."""
    for make in makers:
        other = path.with_name(f"{path.name}-other")
        make(other)
        shutil.copytree(other, path, dirs_exist_ok=True)
        shutil.rmtree(other)


def wal_and_append_log_store(path: Path) -> None:
    over(path, wal, append_log_store)


def object_log_and_node(path: Path) -> None:
    over(path, object_log, node)


def object_log_over_wal(path: Path) -> None:
    """The identity of one and the frames of the other."""
    over(path, wal, object_log)


def state_of(path: Path) -> dict[str, bytes | None]:
    """Every name below a path's folder, with what is in it: what must be the same afterwards."""
    return {
        str(found.relative_to(path)): found.read_bytes() if found.is_file() else None
        for found in sorted(path.rglob("*"))
    }
