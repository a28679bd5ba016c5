"""Doors of the cold tier that are given something that cannot have one: refused with one sentence, nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import InvalidInput, NotFound, Unsupported
from strandline.kv.log import LogKeyValue
from strandline.log.topic.memory import MemoryTopic
from strandline.log.wal.log import WalLog
from strandline.model.segments import COLD_FILE
from strandline.testing.plain import PlainStore
from strandline.testing.sinks import MemorySink
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.opening import cold_tier


def enter(log: Any) -> None:
    with sl.tier.tiering(log):
        pytest.fail("It was tiered.")


def tierer(log: Any) -> object:
    with MetadataManager.start(MemoryTopic(1), background=False) as manager:
        return sl.tier.Tierer(log, manager, PlainStore())


DOORS: dict[str, Callable[[Any], object]] = {
    "attach": sl.tier.attach,
    "tiering": enter,
    "tiered": sl.tier.tiered,
    "Tierer": tierer,
    "cold_tier": cold_tier,
}


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Callable[[Any], object]:
    return DOORS[request.param]


@pytest.fixture(scope="module")
def primary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sl.node.Primary]:
    with sl.node.Primary.open(tmp_path_factory.mktemp("node") / "orders") as opened:
        opened.append_values([b"order 1 is new"])
        yield opened


def test_a_primary_s_inner_log_is_tiered_by_its_node_only(
    door: Callable[[Any], object], primary: sl.node.Primary
) -> None:
    log = primary.node.primary.log
    with pytest.raises(Unsupported, match=r"belongs to the node in .*: run the node with --cold"):
        door(log)
    assert not (Path(log.folder) / COLD_FILE).exists()


def test_the_folder_of_a_node_s_log_cannot_have_a_cold_tier_either(primary: sl.node.Primary) -> None:
    reader = sl.log.WalReader(primary.node.primary.log.folder)
    for opened in (sl.tier.attach, sl.tier.tiered, cold_tier):
        with pytest.raises(Unsupported, match="belongs to the node"):
            opened(reader)


def test_a_log_over_the_network_and_what_is_no_log_cannot_have_a_cold_tier(
    door: Callable[[Any], object], primary: sl.node.Primary
) -> None:
    with sl.node.RemoteLog(primary.url) as remote:
        for log in (remote, primary, primary.reading(), "s3://bucket/orders", None):
            with pytest.raises(Unsupported, match=rf"^A {type(log).__name__} cannot (have a cold tier|be tiered): "):
                door(log)


def test_a_refused_call_can_be_caught_as_invalid_input() -> None:
    assert issubclass(Unsupported, InvalidInput)
    assert not Unsupported.retryable


def test_a_folder_that_only_looks_like_a_node_s_is_tiered(tmp_path: Path) -> None:
    with WalLog.open(str(tmp_path / "data-00000001")) as log:
        sl.tier.attach(log)
        with sl.tier.tiering(log) as tierer:
            tierer.run_once(everything=True)


def test_a_tiered_log_and_the_lsn_api_stand_for_the_log_itself(tmp_path: Path) -> None:
    sl.tier.attach(sl.open(str(tmp_path / "objects"), create=True))
    both = sl.open(str(tmp_path / "objects"))
    assert isinstance(both, sl.tier.TieredLog)
    assert sl.tier.attach(both) == cold_tier(both)
    assert sl.tier.tiered(both) is both  # type: ignore[type-var]
    with both, sl.tier.tiering(both) as tierer:
        tierer.run_once(everything=True)
    with sl.compat.WriteAheadLog.open(tmp_path / "wal") as wal:
        with pytest.raises(NotFound, match="has no cold tier"):
            cold_tier(wal)
        sl.tier.attach(wal)
        wal.append(b"order 1 is new")
        with sl.tier.tiering(wal) as tierer:
            assert len(tierer.run_once(everything=True).copied) == 1


def test_tiering_a_reader_of_a_write_ahead_log_is_refused_and_names_the_writing_process(tmp_path: Path) -> None:
    with sl.compat.WriteAheadLog.open(tmp_path / "wal") as wal:
        sl.tier.attach(wal)
        with pytest.raises(Unsupported, match=r"was opened for reading.*run it in the process that writes the log"):
            enter(sl.log.WalReader(str(tmp_path / "wal")))


def test_a_node_does_not_take_over_a_log_without_its_cold_tier(tmp_path: Path) -> None:
    with sl.compat.WriteAheadLog.open(tmp_path / "wal") as wal:
        wal.append(b"order 1 is new")
        sl.tier.attach(wal)
    with pytest.raises(InvalidInput, match=r"has a cold tier in .*: let the node have the same"):
        sl.node.Primary.open(tmp_path / "node", take_over=tmp_path / "wal")
    with sl.compat.WriteAheadLog.open(tmp_path / "wal") as wal:
        assert wal.current == 1


def test_following_something_that_is_no_log_is_refused_before_anything_is_begun(tmp_path: Path) -> None:
    with sl.compat.WriteAheadLog.open(tmp_path / "wal") as wal:
        with pytest.raises(Unsupported, match=r"^A WriteAheadLog cannot be followed: it has no bounds, end, plan"):
            sl.follow(wal, MemorySink(), upto="end")  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match=r"^A WriteAheadLog cannot be followed"):
            sl.snapshots.bootstrap("/nowhere", "/nowhere", sl.followers.AppendLogStore, log=wal)  # type: ignore[arg-type]


def test_a_primary_is_followed_as_every_log_is(primary: sl.node.Primary) -> None:
    for log in (primary, primary.reading()):
        assert sl.follow(log, MemorySink(), "billing", upto="end").next == 1
        primary.slots.drop("billing")


def test_what_is_no_log_is_not_read_as_keyed_values_and_what_only_reads_is_not_written_to(
    primary: sl.node.Primary, tmp_path: Path
) -> None:
    with (
        sl.compat.WriteAheadLog.open(tmp_path / "wal") as wal,
        pytest.raises(Unsupported, match=r"^A WriteAheadLog cannot be read as keyed values: it has no "),
    ):
        LogKeyValue(wal)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="a node's log for readers: append with the Primary"):
        LogKeyValue(primary.reading()).put("key", b"value")  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [7, None, b"s3://bucket/orders", object()], ids=["number", "none", "bytes", "object"])
def test_what_is_no_log_is_not_consumed(thing: Any) -> None:
    with pytest.raises(InvalidInput):
        sl.Consumer(thing)
