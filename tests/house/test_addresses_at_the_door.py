"""Addresses that cannot be parsed, at every public call that takes one: one error of ours, and nothing is created."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

import strandline as sl
from strandline.errors import InvalidInput

BROKEN = ["g://[", "s3://[", "file://[", "s3://[::1", "grpc://[", "kafka://[/topic", "nats://[", "s3://\uff03.com/x"]
PORTS = ["grpc://host:x", "grpc://host:99999999", "grpc://host:-1", "grpc://[::1]:x", "grpc://host"]
MORE = ["GRPC://host:1", "grpc://h\u00f6st:1", "grpc://host:1\n", "grpc://host:1/orders", "grpc://host:1?log=orders"]
"""Addresses of nodes that Arrow Flight cannot parse, or of which it would leave something out."""
LOG = UUID(int=1)

DOORS: dict[str, Callable[[str, Path], object]] = {
    "open": lambda address, _: sl.open(address),
    "create": lambda address, _: sl.open(address, create=True),
    "queue": lambda address, _: sl.open(address, format="queue-v1"),
    "consumer": lambda address, _: sl.Consumer(address, slot="billing"),
    "table": lambda address, _: sl.DeltaSink(address).cursor(LOG),
    "remote log": lambda address, _: sl.node.RemoteLog(address),
    "replica": lambda address, folder: sl.node.Replica.open(folder / "node", address, name="b"),
    "lease": lambda address, folder: sl.node.Primary.open(folder / "node", lease=address),
    "segments": lambda address, folder: sl.tier.attach(sl.open(folder / "log"), address),
    "events": lambda address, folder: sl.tier.attach(sl.open(folder / "log"), "memory://cold", address),
    "key-value store": lambda address, _: sl.kv.NatsKeyValue.connect(address, "orders", timeout=0.1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("addresses")
    sl.open(made / "log", create=True).close()
    return made


@pytest.mark.parametrize("address", BROKEN)
@pytest.mark.parametrize("door", DOORS)
def test_an_address_that_cannot_be_parsed_is_refused(door: str, address: str, folder: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        DOORS[door](address, folder)
    assert "\n" not in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["log"]


@pytest.mark.parametrize("address", PORTS + MORE)
@pytest.mark.parametrize("door", ["remote log", "replica"])
def test_a_node_s_address_needs_a_port_that_can_be_one(door: str, address: str, folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no address of a node: use grpc://host:port"):
        DOORS[door](address, folder)


@pytest.mark.parametrize("address", ["wal:{path}", "wal:orders", "file:orders", "file:{path}", "WAL:/x", "s3:bucket/x"])
@pytest.mark.parametrize("door", ["open", "create", "queue", "consumer", "table", "replica"])
def test_an_address_without_its_slashes_is_no_relative_path(
    door: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"(?i)(begins with (wal|file|s3)://, not with|no address of a node)"):
        DOORS[door](address.format(path=tmp_path / "orders"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_may_be_called_as_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sl.open("./wal:orders", create=True).close()
    assert [path.name for path in tmp_path.iterdir()] == ["wal:orders"]


@pytest.mark.parametrize("scheme", ["file", "wal"])
@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("{path}#1", "write %23"),
        ("{path}?x=1", "write %3F"),
        ("elsewhere{path}", "names (the machine 'elsewhere'|no folder)"),
    ],
)
def test_a_part_of_an_address_that_names_no_folder_is_refused(
    scheme: str, written: str, why: str, tmp_path: Path
) -> None:
    address = f"{scheme}://{written.format(path=tmp_path / 'orders')}"
    with pytest.raises(InvalidInput, match=why):
        sl.open(address, create=True)
    assert not list(tmp_path.iterdir())
