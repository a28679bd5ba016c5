"""Every public call that opens or makes something takes its place as text or as a path object, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.compat.spool.export import export_spool
from strandline.errors import AlreadyExists, InvalidInput, NotALog, NotFound, NotReady
from strandline.log.folders import contents
from strandline.log.topic.logs import open_object_topic, open_wal_topic
from strandline.log.topic.memory import MemoryTopic
from strandline.log.wal.log import WalLog
from strandline.snapshots.sealed import check_snapshot, newest_snapshot, next_number, read_snapshot, trim
from strandline.storage.disk import DISK
from strandline.storage.objects.urls import open_store

REFUSED = [b"bytes", 7, None, "", "a\0b", "\ud800", 1.5, ["list"], object()]


def using(opened: Any, call: Callable[[Any], Any]) -> Any:
    with contextlib.closing(opened):
        return call(opened)


CALLS: dict[str, Callable[[Any], Any]] = {
    "sl.open": lambda place: sl.open(place, create=True),
    "sl.open of a queue": lambda place: sl.open(place, format="queue-v1"),
    "open_store": open_store,
    "Consumer": sl.Consumer,
    "WriteAheadLog.open": sl.compat.WriteAheadLog.open,
    "WalLog.open": WalLog.open,
    "WalReader": sl.log.WalReader,
    "export_spool": lambda place: using(sl.compat.WriteAheadLog.open("log"), lambda wal: export_spool(wal.log, place)),
    "contents": lambda place: contents(place, disk=DISK),
    "Primary.open": sl.node.Primary.open,
    "Replica.open": lambda place: sl.node.Replica.open(place, "grpc://127.0.0.1:1"),
    "NodeConfig": lambda place: sl.node.NodeConfig(folder=place, name="a", lead=True),
    "DeltaSink": sl.DeltaSink,
    "SqliteSink": lambda place: sl.SqliteSink(place, table="a"),
    "open_wal_topic": lambda place: open_wal_topic(place, 1),
    "open_object_topic": lambda place: open_object_topic(place, 1),
    "AppendLogStore.open": sl.followers.AppendLogStore.open,
    "AppendLogStore.import_from": lambda place: sl.followers.AppendLogStore.import_from(place, "dest"),
    "AppendLogStore.import_from into": lambda place: sl.followers.AppendLogStore.import_from("snapshot", place),
    "AppendLogStore.export_to": lambda place: using(
        sl.followers.AppendLogStore.open("fold"), lambda fold: fold.export_to(place)
    ),
    "RocksStore.open": sl.followers.RocksStore.open,
    "RocksStore.import_from": lambda place: sl.followers.RocksStore.import_from(place, "dest"),
    "RocksStore.import_from into": lambda place: sl.followers.RocksStore.import_from("snapshot", place),
    "RocksStore.export_to": lambda place: using(
        sl.followers.RocksStore.open("rocks"), lambda fold: fold.export_to(place)
    ),
    "Exports.request": lambda place: sl.followers.Exports().request(place),
    "Artifacts": sl.snapshots.Artifacts,
    "Artifacts.publish": lambda place: sl.snapshots.Artifacts("memory://paths").publish(place),
    "Artifacts.fetch": lambda place: sl.snapshots.Artifacts("memory://paths").fetch(place),
    "Artifacts.export": lambda place: sl.snapshots.Artifacts("memory://paths").export(
        sl.followers.MemoryStore(), scratch=place
    ),
    "bootstrap": lambda place: sl.snapshots.bootstrap(place, "dest", sl.followers.AppendLogStore),
    "bootstrap into": lambda place: sl.snapshots.bootstrap("snapshots", place, sl.followers.AppendLogStore),
    "read_snapshot": read_snapshot,
    "check_snapshot": check_snapshot,
    "newest_snapshot": newest_snapshot,
    "next_number": next_number,
    "trim": lambda place: trim(place, keep=1),
    "RemoteLog": sl.node.RemoteLog,
}
NONE_IS_A_MEANING: dict[str, Callable[[Any], Any]] = {
    "Primary.open, to take over": lambda place: sl.node.Primary.open("node", take_over=place),
    "MetadataManager.start": lambda place: sl.tier.MetadataManager.start(MemoryTopic(1), snapshot_dir=place),
    "attach": lambda place: sl.tier.attach(sl.open("memory://attached", create=True), place),
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("call", [*CALLS, *NONE_IS_A_MEANING])
def test_what_is_neither_text_nor_a_path_object_is_refused_in_one_sentence(call: str, tmp_path: Path) -> None:
    for bad in REFUSED:
        if bad is None and call in NONE_IS_A_MEANING:
            continue
        with pytest.raises(InvalidInput) as refused:
            (CALLS | NONE_IS_A_MEANING)[call](bad)
        sentence = str(refused.value)
        assert sentence.endswith(".")
        assert "\n" not in sentence
    assert {path.name for path in tmp_path.iterdir()} <= {"log", "fold", "rocks"}


@pytest.mark.parametrize("call", [name for name in CALLS if name != "RemoteLog"])
def test_a_path_object_does_what_its_text_does(call: str, tmp_path: Path) -> None:
    def outcome(place: Any) -> tuple[Any, ...]:
        try:
            made = CALLS[call](place)
        except (AlreadyExists, NotALog, NotFound, NotReady, InvalidInput) as error:
            return type(error), str(error).replace(str(Path(place).parent), "…")
        if hasattr(made, "close"):
            made.close()
        return type(made), None

    assert outcome(tmp_path / "a" / "place") == outcome(str(tmp_path / "b" / "place"))


@pytest.mark.parametrize("call", ["sl.open", "Consumer", "DeltaSink", "Artifacts", "RemoteLog"])
def test_an_address_in_a_path_object_is_refused_and_makes_no_folder(call: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="as text"):
        CALLS[call](Path("s3://bucket/orders"))
    assert list(tmp_path.iterdir()) == []


def test_a_path_object_and_its_text_open_the_same_folder(tmp_path: Path) -> None:
    producer = sl.open(tmp_path / "orders", create=True).producer()
    producer.append(value=b"1").result(120)
    producer.close()
    assert sl.open(str(tmp_path / "orders")).bounds().next == 1
    consumer = sl.Consumer(tmp_path / "orders")
    assert consumer.next_batch() is not None
    consumer.close()
    sink = sl.DeltaSink(tmp_path / "table")
    assert sl.follow(sl.open(tmp_path / "orders"), sl.DeltaSink(tmp_path / "keyless", mode="append"), upto="end").next
    assert repr(sink) == repr(sl.DeltaSink(str(tmp_path / "table")))
