"""A client's side of the wire: appending, reading, and looking."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from strandline.errors import (
    CorruptData,
    CursorExpired,
    InvalidInput,
    NotReady,
    OutOfOrder,
    TransientStorageError,
)
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, with_offsets
from strandline.node.flight.client.channel import Channel
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.server.server import FlightNode
from strandline.node.flight.wire.protocol import SERVICE
from tests.forking import in_a_child
from tests.node.flight.flight_double import OUTCOMES, TABLE, Node, records, values_of


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path / "log")
    yield node
    node.close()


@pytest.fixture
def remote(node):
    with FlightNode(node, heartbeat_seconds=0.05) as server, RemoteLog(server.url) as remote:
        yield remote


def test_an_append_is_one_batch_of_the_log_and_says_where_it_is(node, remote):
    commit = remote.append(pa.concat_tables([TABLE, TABLE]), policy="ack_n(1)", timeout=1.5)
    assert (commit.receipt.first, commit.receipt.count) == (0, 4)
    assert node.asked == [("append", None, "ack_n(1)", 1.5)]
    assert len(node.log.plan(node.log.start())) == 1


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_every_outcome_comes_through(node, remote, outcome):
    node.outcome = outcome
    assert remote.append(TABLE).outcome == outcome


def test_a_numbered_append_again_is_a_no_op(node, remote):
    writer = WriterId(node.log.log_id)
    first = remote.append(TABLE, writer=writer, number=0)
    assert remote.append(TABLE, writer=writer, number=0).receipt == first.receipt
    assert remote.bounds() == Bounds(0, 2)
    with pytest.raises(OutOfOrder):
        remote.append(TABLE, writer=writer, number=5)


def test_an_append_in_many_messages_is_still_one(node, remote, monkeypatch):
    monkeypatch.setattr("strandline.node.flight.wire.append_stream.PART_BYTES", 1000)
    values = [bytes([index]) * (5_000 if index % 10 == 7 else 400) for index in range(50)]
    assert remote.append(records(*values)).receipt.count == 50
    assert len(node.log.plan(node.log.start())) == 1
    assert values_of(remote.read()) == values


def test_an_invalid_append_is_refused_and_nothing_is_written(node, remote):
    for table in (
        pa.table({"other": [1]}),
        pa.table({"value": pa.array([], pa.binary())}),
        pa.table({"value": pa.array([b"a"]).dictionary_encode()}),
        pa.table({"value": pa.array([[b"a"]])}),
    ):
        with pytest.raises(InvalidInput):
            remote.append(table)
    for options in ({"timeout": -1.0}, {"timeout": float("nan")}, {"timeout": 10.0**9}):
        with pytest.raises(InvalidInput):
            remote.append(TABLE, **options)
    assert remote.bounds() == Bounds(0, 0)


def test_an_append_over_the_limits_is_refused_with_a_sentence(node):
    limits = ServerLimits(message_bytes=10_000, append_bytes=30_000)
    with FlightNode(node, limits=limits) as server, RemoteLog(server.url) as remote:
        with pytest.raises(InvalidInput, match="message larger than max"):
            remote.append(records(bytes(100_000)))
        with pytest.raises(InvalidInput, match="append it in parts"):
            remote.append(pa.Table.from_batches([records(bytes(9_000))] * 4))
        assert remote.append(records(bytes(9_000))).receipt.count == 1


def test_a_compressed_answer_is_refused_and_never_unpacked():
    def answer(requests, context):
        next(requests)
        context.set_compression(grpc.Compression.Gzip)
        yield fl.Result(pa.py_buffer(bytes(1 << 20))).serialize()

    methods = {"DoAction": grpc.stream_stream_rpc_method_handler(answer)}
    with ThreadPoolExecutor(1) as pool:
        liar = grpc.server(pool)
        liar.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        port = liar.add_insecure_port("127.0.0.1:0")
        liar.start()
        with RemoteLog(f"grpc://127.0.0.1:{port}") as remote, pytest.raises(InvalidInput, match="cannot do 'bounds'"):
            remote.bounds()
        liar.stop(None)


def test_reading_gives_offsets_from_any_cursor_on(node, remote):
    remote.append(records(b"a", b"b"))
    remote.append(records(b"c"))
    batches = list(remote.read())
    assert all(batch.schema == READ_SCHEMA for batch in batches)
    assert values_of(batches) == [b"a", b"b", b"c"]
    assert values_of(remote.read(Cursor(remote.log_id, 1))) == [b"b", b"c"]
    assert [batch.to_pylist() for batch in remote.read(columns=["offset"], upto=1)] == [[{"offset": 0}]]
    with pytest.raises(NotReady):
        list(remote.read(upto=99))
    node.log.append_batch(records(b"d")).result(120)
    node.log.trim(3)
    with pytest.raises(CursorExpired):
        list(remote.read(Cursor(remote.log_id, 0)))


def test_a_start_that_does_not_depend_on_the_log_takes_no_request(remote, monkeypatch):
    remote.append(records(b"a", b"b", b"c"))
    asked = []
    ask = Channel.ask

    def noted(self, action, *arguments, **options):
        asked.append(action)
        return ask(self, action, *arguments, **options)

    monkeypatch.setattr(Channel, "ask", noted)
    assert [remote.position_of(start) for start in (2, "beginning")] == [2, 0]
    assert not asked
    assert values_of(remote.read(2)) == [b"c"]
    assert asked == ["cursor-at"]
    assert remote.position_of("now") == 3


def test_following_goes_on_and_ends_when_the_reader_leaves(node, remote):
    remote.append(records(b"a"))
    reader = remote.read(follow=True)
    assert values_of([next(reader)]) == [b"a"]
    remote.append(records(b"b"))
    assert values_of([next(reader)]) == [b"b"]
    reader.close()


def test_a_follower_of_an_idle_log_gets_heartbeats(node):
    def hears(timeout):
        with FlightNode(node, heartbeat_seconds=0.02) as server, RemoteLog(server.url, timeout=timeout) as remote:
            since = Cursor(remote.log_id, remote.bounds().next)
            reader = remote.read(since, follow=True)
            waits = 10 * timeout  # of 0.2 s each: twice the timeout
            node.at_wait.clear()
            node.at_wait[node.waits + int(waits)] = lambda: node.log.append_batch(records(b"late")).result(120)
            with contextlib.closing(reader):
                return values_of([next(reader)]) == [b"late"]

    for timeout in (0.5, 2.0):
        with contextlib.suppress(TransientStorageError):  # a busy machine may be silent for half a second
            assert hears(timeout)
            return
    assert hears(15.0)


def test_the_topology_and_promotion_come_through(node, remote):
    assert remote.topology() == node.topology(None)
    assert remote.promote(force=True) == node.topology(None)
    assert ("promote", True) in node.asked


class Liar(fl.FlightServerBase):
    """Streams whatever it was told, with no or any note."""

    def __init__(self, batches, notes):
        self.batches, self.notes = batches, notes
        super().__init__("grpc://127.0.0.1:0")

    def do_get(self, context, ticket):
        return fl.GeneratorStream(self.batches[0].schema, iter(zip(self.batches, self.notes, strict=True)))

    def do_action(self, context, action):
        return self.notes


def test_bytes_that_are_no_answer_of_a_node_are_corrupt(node):
    batch = pa.record_batch({"x": [1]})
    with Liar([batch], [b"nonsense"]) as liar, RemoteLog(f"grpc://127.0.0.1:{liar.port}") as remote:
        with pytest.raises(CorruptData, match="instead of"):
            list(remote.read())
        with pytest.raises(CorruptData):
            remote.bounds()
    numbered = with_offsets([records(b"a")], 0)
    with (
        Liar(numbered, [b"nonsense"]) as liar,
        RemoteLog(f"grpc://127.0.0.1:{liar.port}") as remote,
        pytest.raises(CorruptData, match="note"),
    ):
        list(remote.read())


def test_a_larger_message_than_allowed_is_refused_by_the_client(node, monkeypatch):
    monkeypatch.setattr("strandline.node.flight.client.channel.MESSAGE_BYTES", 100_000)
    node.log.append_batch(records(bytes(1 << 20))).result(120)
    with FlightNode(node) as server:
        channel = Channel(server.url)
        with pytest.raises(fl.FlightError):
            channel.get(b"{}", READ_SCHEMA, timeout=5).read_chunk()
        channel.close()


def test_a_connection_is_not_used_in_a_forked_child(remote):
    remote.bounds()
    assert in_a_child(remote.bounds).startswith("UsedAcrossFork")
    remote.bounds()


def test_a_node_that_goes_away_in_mid_read_is_transient(node):
    with FlightNode(node, heartbeat_seconds=0.05) as server, RemoteLog(server.url) as remote:
        remote.append(records(b"a"))
        reader = remote.read(follow=True)
        next(reader)
        server.close()
        with pytest.raises((NotReady, TransientStorageError)):
            next(reader)
