"""Calls that need a local folder refuse an address: it would create a folder called ``s3:``."""

import pytest

import strandline as sl
from strandline.errors import InvalidInput

DOORS = {
    "wal": sl.compat.WriteAheadLog.open,
    "wal, migrating": lambda place: sl.compat.WriteAheadLog.open(place, migrate=True),
    "wal reader": sl.log.WalReader,
    "append-log store": sl.followers.AppendLogStore.open,
    "rocksdb store": sl.followers.RocksStore.open,
    "primary": lambda place: sl.node.Primary.open(place, name="a"),
    "take over": lambda place: sl.node.Primary.open("node", name="a", take_over=place),
    "replica": lambda place: sl.node.Replica.open(place, name="b", upstream="grpc://127.0.0.1:1"),
    "import": lambda place: sl.followers.AppendLogStore.import_from("snapshot", place),
    "export": lambda place: sl.followers.MemoryStore().export_to(place),
    "bootstrap": lambda place: sl.snapshots.bootstrap(
        "snapshots", place, sl.followers.AppendLogStore, log=sl.log.MemoryLog()
    ),
}


@pytest.mark.parametrize(
    "place", ["file:///data/orders", "s3://user:hidden@bucket/orders", " S3://hidden/x", "wal://x"]
)
@pytest.mark.parametrize("door", DOORS)
def test_an_address_is_no_folder(tmp_path, monkeypatch, door, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="is an address: give a path") as caught:
        DOORS[door](place)
    assert "hidden" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
