"""Producers of a node's log: in the primary's process and over Flight, over lost answers and restarts."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import CommitTimedOut, SlotInvalid, TransientStorageError, Unsupported
from strandline.log.produce.shipper import Limits
from strandline.model.head import WriterId
from strandline.model.records import RECORD_SCHEMA
from strandline.node.flight.client.channel import Channel
from strandline.node.flight.wire.append_stream import AppendCommand, as_messages, write_command
from tests.contracts.logs import content
from tests.contracts.producers import ProducerContract
from tests.node.flight.cuttable_tcp import TcpProxy

SOON, NEVER = 30.0, 3600.0


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[sl.node.Primary]:
    with sl.node.Primary.open(tmp_path / "primary", policy="local") as primary:
        yield primary


@pytest.mark.matrix
class TestPrimary(ProducerContract):
    @pytest.fixture
    def log(self, primary: sl.node.Primary) -> Any:
        return primary


@pytest.mark.matrix
class TestRemoteLog(ProducerContract):
    @pytest.fixture
    def log(self, primary: sl.node.Primary) -> Iterator[Any]:
        with sl.open(primary.url) as log:
            yield log


def test_a_producer_goes_on_over_a_restart_of_its_node_and_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings: dict[str, Any] = {"policy": "local", "listen": ("127.0.0.1", port)}
    primary = sl.node.Primary.open(tmp_path / "a", **settings)
    with sl.open(primary.url) as log, log.producer(linger=0.0) as producer:
        producer.append(value=b"0").result(SOON)
        primary.close()
        meanwhile = [producer.append(value=b"%d" % number) for number in range(1, 50)]
        assert not any(handle.done() for handle in meanwhile)
        with sl.node.Primary.open(tmp_path / "a", **settings) as primary:
            assert [handle.result(SOON).first for handle in meanwhile] == list(range(1, 50))
            assert [value for _, value in content(primary)] == [b"%d" % number for number in range(50)]


def test_an_append_whose_answer_is_lost_on_the_way_is_listed_once(primary: sl.node.Primary) -> None:
    with TcpProxy() as line:
        line.lead_to(int(primary.url.rpartition(":")[2]))
        with (
            sl.node.RemoteLog(f"grpc://127.0.0.1:{line.port}", timeout=0.5) as log,
            log.producer(linger=NEVER) as producer,
        ):
            producer.append(value=b"a")
            producer.flush(SOON)
            line.hold("down")  # the node gets the append, and nobody gets its answer
            handle = producer.append(value=b"b")
            with pytest.raises(TimeoutError):
                producer.flush(0.0)
            assert primary.reading().wait(primary.cursor_at(1), SOON)
            line.cut()
            line.heal()
            producer.flush(SOON)
            assert handle.result(0).first == 1
    assert content(primary) == [(0, b"a"), (1, b"b")]


@pytest.mark.matrix
def test_a_producer_waits_for_the_commit_policy_and_says_if_it_was_not_satisfied(tmp_path: Path) -> None:
    with sl.node.Primary.open(tmp_path / "a", name="a", policy="ack_n(1)") as primary:
        primary.register_replica("b")
        shipper, writer, number, env = primary._shipping(None, None)
        shipper.retry_seconds = 0.0
        impatient = sl.Producer(shipper, Limits(), writer=writer, number=number, env=env)
        handle = impatient.append(value=b"a")
        with pytest.raises(CommitTimedOut):
            handle.result(SOON)
        with sl.node.Replica.open(tmp_path / "b", primary.url, name="b"):
            assert [receipt.first for receipt in impatient.retry(SOON)] == [0]
            impatient.close()
            with sl.open(primary.url) as log, log.producer(writer=impatient.writer) as producer:
                assert producer.append(value=b"b").result(SOON).first == 1
            assert content(primary) == [(0, b"a"), (1, b"b")]


def test_a_replica_produces_nothing_and_says_where_to(primary: sl.node.Primary, tmp_path: Path) -> None:
    with (
        sl.node.Replica.open(tmp_path / "b", primary.url, name="b") as replica,
        pytest.raises(Unsupported, match="b is a replica, and only the primary"),
    ):
        replica.producer()


@pytest.mark.matrix
@pytest.mark.parametrize("is_known", [True, False], ids=["its slot is known there", "its slot is not known there"])
def test_a_producer_and_a_consumer_of_several_nodes_go_on_over_a_failover(tmp_path: Path, *, is_known: bool) -> None:
    a = sl.node.Primary.open(tmp_path / "a", name="a", policy="local")
    poll = 0.05 if is_known else 3600.0  # how often the replica asks for slots
    with sl.node.Replica.open(tmp_path / "b", a.url, name="b", poll_seconds=poll) as b:
        url = f"{a.url},{b.url.removeprefix('grpc://')}"
        with sl.open(url) as log, log.producer(linger=0.0) as producer:
            handles = [producer.append(value=b"%d" % number) for number in range(20)]
            producer.flush(SOON)
            b.reading(after=a.end(), timeout=SOON)
            consumer = sl.Consumer(log, slot="workers", trim_every=None)
            if is_known:
                copies = b.node.log.slots
                holders = lambda: {state.holder for state in copies.list()}
                assert b.wait_until(lambda: consumer.holder in holders(), SOON)
            first = consumer.next_batch()
            assert first is not None
            consumer.ack_through(first.sequence)  # the replica may not hear of it
            a.close()
            handles += [producer.append(value=b"%d" % number) for number in range(20, 40)]
            b.promote(force=True)
            producer.flush(SOON)
            assert [handle.result(0).first for handle in handles] == list(range(40))
            if not is_known:
                with pytest.raises(SlotInvalid, match=f"last_acked={first.sequence} to continue"):
                    consumer.next_batch()
                consumer = sl.Consumer(log, slot="workers", last_acked=first.sequence, trim_every=None)
            values = [value for batch in consumer for value in batch.values]
            assert [*first.values, *values] == [b"%d" % number for number in range(40)]
            assert log.slots.get("workers").position == first.sequence + 1
            consumer.ack_through(39)
            consumer.close()
            assert log.slots.get("workers").position == 40


def test_an_append_whose_end_is_missing_is_not_appended_in_part(primary: sl.node.Primary) -> None:
    """To the server of gRPC, a connection that breaks may look like the end of the caller's messages."""
    command = write_command(AppendCommand((WriterId(UUID(int=7)), 0), rows=3))
    with sl.open(primary.url) as log:
        records = pa.Table.from_pylist([{"op": 0, "timestamp": 0, "value": b"1"}] * 2, RECORD_SCHEMA)
        failed = pytest.raises(TransientStorageError, match="2 of the 3 records")
        with closing(Channel(primary.url)) as channel, failed:
            channel.put(command, as_messages(records), records.schema, SOON)
        assert log.bounds().next == 0
        assert log.append(records, writer=WriterId(UUID(int=7)), number=0).receipt.count == 2


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(4))
def test_a_producer_whose_line_breaks_again_and_again_lists_each_record_once_and_in_order(
    primary: sl.node.Primary, seed: int
) -> None:
    with TcpProxy(seed) as line:
        line.lead_to(int(primary.url.rpartition(":")[2]))
        chance, stop, breaks = random.Random(seed), threading.Event(), itertools.count()

        enough = threading.Event()

        def break_it() -> None:
            while not stop.wait(chance.uniform(0.005, 0.05)):
                match chance.randrange(3):
                    case 0:
                        line.hang_up()
                    case 1:
                        line.hold("down", after=chance.randrange(200))
                    case _:
                        line.cut()
                stop.wait(chance.uniform(0.0, 0.05))
                line.heal()
                if next(breaks) == 10:
                    enough.set()

        breaking = threading.Thread(target=break_it, daemon=True)
        breaking.start()
        with sl.node.RemoteLog(f"grpc://127.0.0.1:{line.port}", timeout=1.0) as log:
            handles = []
            with log.producer(linger=0.0, batch_bytes=2000) as producer:
                while not enough.is_set():
                    handles += [producer.append(value=b"%d" % (len(handles) + more)) for more in range(50)]
                    producer.flush(SOON)
            stop.set()
            breaking.join(SOON)
    assert [handle.result(0).first for handle in handles] == list(range(len(handles)))
    assert [value for _, value in content(primary)] == [b"%d" % number for number in range(len(handles))]
