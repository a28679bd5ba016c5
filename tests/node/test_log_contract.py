"""The log contract on nodes: in the process of a primary, and over Flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import ExpectationFailed, Fenced, InvalidInput, NotFound, NotReady, Unsupported
from strandline.log.contract import Log
from strandline.log.wal import slots as wal_slots
from strandline.model.addresses import CONSUMER_SUFFIX
from strandline.model.head import WriterId
from strandline.model.retention import InvalidReason
from strandline.node.lead import slots
from strandline.testing.sinks import MemorySink
from tests.contracts.logs import LogContract, append, fetched, records, writer_named


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[sl.node.Primary]:
    with sl.node.Primary.open(tmp_path / "primary", policy="local") as primary:
        yield primary


class NodeLogContract(LogContract):
    appends = 20

    @pytest.fixture(autouse=True)
    def _owner(self, primary: sl.node.Primary) -> None:
        self.primary = primary

    def retain_from(self, log: Log, offset: int) -> None:
        self.primary.node.primary.log.trim(offset, beyond_slots=True)

    def invalidate(self, log: Log, name: str) -> None:
        slots = self.primary.node.primary.log.slots
        slots.invalidate(name + CONSUMER_SUFFIX, InvalidReason.HORIZON)


@pytest.mark.matrix  # TestRemoteLog asks a primary for the same, and over Flight
class TestPrimary(NodeLogContract):
    @pytest.fixture
    def log(self, primary: sl.node.Primary) -> Log:
        return primary


class TestRemoteLog(NodeLogContract):
    @pytest.fixture
    def log(self, primary: sl.node.Primary) -> Iterator[Log]:
        with sl.node.RemoteLog(primary.url) as log:
            yield log


def test_a_slot_of_a_consumer_pins_what_the_primary_would_trim_and_survives_its_restart(tmp_path: Path) -> None:
    with sl.node.Primary.open(tmp_path / "a", policy="local") as primary, sl.node.RemoteLog(primary.url) as log:
        for number in range(5):
            append(log, b"a", b"b", number=number)
        log.slots.create("billing", 0)
        former = log.slots.claim("billing", "former")
        log.slots.claim("billing", "worker").advance(log.cursor_at(4))
        with pytest.raises(Fenced, match=r"^Slot 'billing' "):
            former.advance(log.end())
        assert primary.trim(10) == 4
    with sl.node.Primary.open(tmp_path / "a", policy="local") as primary, sl.node.RemoteLog(primary.url) as log:
        assert [(slot.name, slot.position, slot.holder) for slot in log.slots.list()] == [("billing", 4, "worker")]
        assert primary.trim(10) == 4
        log.slots.drop("billing")
        assert primary.trim(10) == 10


def test_a_consumer_neither_sees_nor_changes_the_slot_of_a_replica(primary: sl.node.Primary) -> None:
    primary.register_replica("b")
    with sl.node.RemoteLog(primary.url) as log:
        assert log.slots.list() == []
        for change in (log.slots.drop, lambda name: log.slots.claim(name, "me"), lambda name: log.slots.reset(name, 0)):
            with pytest.raises(NotFound, match="no slot 'b'"):
                change("b")
        assert log.slots.create("b", 0).name == "b"
        log.slots.drop("b")
    assert [member.name for member in primary.topology().members] == ["b"]
    with pytest.raises(InvalidInput, match="cannot name a replica"):
        primary.register_replica("b.consumer")


def test_a_caller_cannot_create_slots_without_end(primary: sl.node.Primary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MOST_SLOTS", 2)
    with sl.node.RemoteLog(primary.url) as log:
        log.slots.create("a", 0)
        log.slots.create("b", 0)
        with pytest.raises(InvalidInput, match="slots, which is the most"):
            log.slots.create("c", 0)


def test_dropped_slots_are_forgotten_in_the_end_and_their_holders_stay_fenced(
    primary: sl.node.Primary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal_slots, "MOST_DROPPED", 4)
    slots = primary.node.primary.slots
    slots.create("billing", 0)
    for holder in ("one", "two", "three"):
        claimed = slots.claim("billing", holder)
    slots.drop("billing")
    for number in range(20):
        slots.create(f"ingest-{number}", 0)
        slots.drop(f"ingest-{number}")
    assert len(slots.copies()) == 4, "replicas fetch all of them every second"
    slots.create("billing", 0)
    assert slots.claim("billing", "four").epoch > claimed.epoch


def test_an_append_that_expects_another_end_does_not_let_an_empty_log_begin_there(primary: sl.node.Primary) -> None:
    with sl.node.RemoteLog(primary.url) as log:
        with pytest.raises(ExpectationFailed, match="ends at 0"):
            log.append(records(b"x"), writer=writer_named(1), number=0, expect=5)
        assert log.append(records(b"x"), writer=writer_named(1), number=0, expect=0).result().first == 0


def test_a_table_follows_a_node_with_a_slot(primary: sl.node.Primary) -> None:
    with sl.node.RemoteLog(primary.url) as log:
        for number in range(20):
            append(log, b"%d" % number, number=number)
        sink = MemorySink()
        assert sl.follow(log, sink, "billing", upto="end").next == 20
        assert log.slots.get("billing").position == 20
        append(log, b"20", number=20)
        assert sl.follow(primary, sink, "billing", upto="end").next == 21
        assert log.slots.get("billing").position == 21


def test_what_a_replica_cannot_do_says_why(primary: sl.node.Primary, tmp_path: Path) -> None:
    with sl.node.Replica.open(tmp_path / "b", primary.url, name="b") as replica:
        commit = primary.append(records(b"x"))
        replica.reading(after=commit.bookmark, timeout=30)
        with pytest.raises(Unsupported, match="b is a replica, and only the primary"):
            replica.append(records(b"x"), writer=WriterId(commit.bookmark.log_id), number=0)
        with pytest.raises(NotReady, match="b is no primary: ask primary"):
            replica.slots.create("billing", 0)
        assert [batch.num_rows for batch in replica.read("beginning")] == [1]
        assert sl.follow(replica, MemorySink(), upto="end").next == 1
        with sl.node.RemoteLog(replica.url) as log:
            assert fetched(log.plan(log.start()))["offset"].to_pylist() == [0]
            with pytest.raises(NotReady):
                log.slots.create("billing", 0)
