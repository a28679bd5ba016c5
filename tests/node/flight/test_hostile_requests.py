"""Small messages that make a node take much memory, time or room: they are refused, and others are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from strandline.errors import InvalidInput
from strandline.formats.json.fields import write_fields
from strandline.formats.node.wire import decode_error
from strandline.model.records import RECORD_SCHEMA
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.security import ClientSecurity
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.server.server import FlightNode
from strandline.node.messages import Caller, ReplicaProgress
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.formats.shared_headers import batch_with_shared_pairs, encapsulated, shared_columns, shared_pairs
from tests.matrix_cases import some
from tests.node.flight.attacked_node import MIB, Victim
from tests.node.flight.flight_double import Node
from tests.node.flight.raw_grpc import RawGrpc, Refused, field, flight_data, message_of
from tests.node.processes import Nest

TOKENS = """
app client token-of-the-app-1
second client token-of-the-second
third client token-of-the-third
other client token-of-the-other
replica-1 replica token-of-replica-1
replica-2 replica token-of-replica-2
ops admin token-of-the-admin
"""
APP, SECOND, THIRD = "token-of-the-app-1", "token-of-the-second", "token-of-the-third"
OTHER, REPLICA, OTHER_REPLICA, OPS = (
    "token-of-the-other",
    "token-of-replica-1",
    "token-of-replica-2",
    "token-of-the-admin",
)
SCHEMA = flight_data(message_of(RECORD_SCHEMA)[0], command=b"{}")


@pytest.fixture(scope="module")
def victim(nest: Nest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A node with tokens, and the limits that a node has by default."""
    with Victim(nest, tmp_path_factory.mktemp("victim"), token=OTHER, tokens=TOKENS) as victim:
        victim.check_serves()
        yield victim


def answer(victim: Victim, method: str, *messages: bytes, token: str = APP) -> bytes:
    """The last headers of the answer to these messages."""
    with RawGrpc(victim.url) as raw:
        stream = raw.call(method, token=token)
        with suppress(Refused):
            for message in messages:
                raw.send(stream, message)
        return ended(raw, stream)


def ended(raw: RawGrpc, stream: int) -> bytes:
    """The last headers of a call that the node ends before its caller does."""
    with suppress(Refused):  # another call than this one was ended
        raw.result(stream)
    return raw.ended[stream] if stream in raw.ended else ended(raw, stream)


def check_small(victim: Victim) -> None:
    """The node took little memory since the peak was forgotten."""
    assert victim.peak() - victim.resident() < 64 * MIB
    assert victim.peak() < victim.base + 192 * MIB
    victim.check_serves()


@pytest.mark.parametrize(
    "messages",
    [
        [flight_data(shared_pairs("schema", 2000, 500_000))],
        [flight_data(shared_pairs("message", 2000, 500_000))],
        [flight_data(shared_columns(1_900_000))],
        [SCHEMA, flight_data(batch_with_shared_pairs(2000, 500_000))],
        [SCHEMA, field(3, b"\x01" + encapsulated(batch_with_shared_pairs(2000, 500_000)))],
    ],
    ids=["metadata of the schema", "metadata of the message", "columns", "metadata of a batch", "a batch in pieces"],
)
def test_a_header_of_an_append_that_takes_a_thousand_times_its_bytes_is_refused(
    victim: Victim, messages: list[bytes]
) -> None:
    victim.forget_peak()
    found = answer(victim, "DoPut", *messages)
    assert b"The request cannot be read: a header of" in found
    check_small(victim)


@pytest.mark.parametrize("method", ["GetFlightInfo", "GetSchema", "DoAction", "DoGet", "DoPut", "DoExchange"])
def test_a_request_of_millions_of_fields_is_refused_unread(victim: Victim, method: str) -> None:
    paths = b"\x08\x01" + b"\x1a\x00" * (4 * MIB - 64)
    request = field(1, paths) + field(2, b"") if method in ("DoPut", "DoExchange") else paths
    victim.forget_peak()
    assert b"bytes is larger than the limit of 131,072" in answer(victim, method, request)
    check_small(victim)


@pytest.mark.parametrize("method", ["DoPut", "DoExchange"])
def test_a_message_of_millions_of_fields_is_refused_at_once(victim: Victim, method: str) -> None:
    assert b"it has more than 64 fields" in answer(victim, method, b"\x50\x01" * (4 * MIB - 64))


def test_a_caller_that_is_no_replica_uses_none_of_the_memory_for_acknowledgements(victim: Victim) -> None:
    ticket = flight_data(b"", command=b'{"replica": "replica-1"}')
    with ExitStack() as opened:
        for token in (APP, SECOND, THIRD, OPS, OTHER_REPLICA):
            raw = opened.enter_context(RawGrpc(victim.url))
            streams = [raw.call("DoExchange", token=token) for _ in range(8)]
            for stream in streams:
                raw.send(stream, ticket)
            for stream in streams:
                assert b"may not" in ended(raw, stream)
        with FlightUpstream(victim.url, security=ClientSecurity(token=REPLICA), timeout=10) as replica:
            replica.register(Caller("replica-1"), region=None)
            replica.acknowledge(Caller("replica-1", 1), ReplicaProgress(0, 0))


ADD = {"change": "add", "name": "x", "url": "grpc://127.0.0.1:1", "force": True}
WRONG_CHANGES: list[dict[str, object]] = [
    {},
    {"change": "burn"},
    {"change": ["add"]},
    {**ADD, "name": "../x"},
    {**ADD, "name": {"a": 1}},
    {**ADD, "name": "x" * 60_000},
    {**ADD, "url": "file:///etc"},
    {**ADD, "url": f"grpc://{'h' * 4000}:1"},
    {**ADD, "force": 1},
    {**ADD, "epoch": 1},
    {"change": "policy", "policy": None, "force": True},
    {"change": "policy", "policy": "quorum(mallory)", "force": True},
    {"change": "policy", "policy": f"ack_n({'9' * 4000})", "force": True},
    {"change": "policy", "policy": "quorum(" * 2000, "force": True},
    {"change": "remove", "name": "a", "force": True},
    {"change": "cancel", "force": True},
    *({"change": "cancel", "term": term, "number": 1, "force": True} for term in (-1, 0, 1.5, "1", True, 1 << 63, [1])),
]


@pytest.mark.parametrize(
    "token", [None, "no-token-of-anybody", APP, REPLICA], ids=["none", "wrong", "client", "replica"]
)
def test_only_an_administrator_changes_the_members_of_a_log(victim: Victim, token: str | None) -> None:
    for change in (
        ADD,
        {"change": "cancel", "term": 1, "number": 1},
        {"change": "policy", "policy": "local", "force": True},
    ):
        with pytest.raises((fl.FlightUnauthenticatedError, fl.FlightUnauthorizedError)):
            victim.act("change-members", change, token=token)
    check_unchanged(victim)


def test_no_request_of_an_administrator_that_is_wrong_changes_the_members(victim: Victim) -> None:
    raw = [
        b"[" * 60_000,
        b'{"force":' + b"1" * 60_000 + b"}",
        b'{"change":"policy","policy":"\\ud800"}',
        b"\xff",
        b"[]",
    ]
    for body in [*raw, *(write_fields(change) for change in WRONG_CHANGES)]:
        with pytest.raises(fl.FlightError) as raised:
            victim.act("change-members", body, token=OPS)
        assert isinstance(decode_error(raised.value.extra_info), InvalidInput), body
        assert len(str(raised.value)) < 2000
    check_unchanged(victim)


def check_unchanged(victim: Victim) -> None:
    with victim.connect() as log:
        assert log.topology().membership is None
    victim.check_serves()


def test_silent_calls_of_all_clients_leave_room_for_replicas_and_administrators(victim: Victim) -> None:
    with ExitStack() as opened:
        for token in (APP, SECOND, THIRD):
            raw = opened.enter_context(RawGrpc(victim.url))
            for _ in range(16):
                raw.call("DoPut", token=token)
            asked = raw.call("ListActions")
            ended(raw, asked)  # refused: by then all before it have come
        with FlightUpstream(victim.url, security=ClientSecurity(token=REPLICA), timeout=10) as replica:
            replica.register(Caller("replica-1"), region=None)
            replica.acknowledge(Caller("replica-1", 1), ReplicaProgress(0, 0))
        victim.act("status", {}, token=OPS)


@pytest.mark.slow
def test_feeds_that_are_not_read_hold_a_bounded_share(nest: Nest, tmp_path: Path) -> None:
    limits = {"reading_bytes": 48 * MIB, "reading_bytes_each": 32 * MIB, "idle_seconds": 4.0}
    with ExitStack() as opened:
        victim = opened.enter_context(Victim(nest, tmp_path, token=OTHER, tokens=TOKENS, server_limits=limits))
        with victim.connect(timeout=60) as log:
            log_id = log.log_id
            for _ in range(3):
                log.append(pa.table({"value": pa.array([bytes(40 * MIB)], pa.binary())}), timeout=60).ensure()
        with FlightUpstream(victim.url, security=ClientSecurity(token=REPLICA), timeout=10) as replica:
            replica.register(Caller("replica-1"), region=None)
        command = f'{{"replica": "replica-1", "term": 1, "since": "{log_id}/0/0"}}'.encode()
        victim.forget_peak()
        before = victim.resident()
        raws = [opened.enter_context(RawGrpc(victim.url, receive=1000)) for _ in range(8)]
        streams = [raw.call("DoExchange", token=REPLICA) for raw in raws]
        for raw, stream in zip(raws, streams, strict=True):
            raw.send(stream, flight_data(b"", command=command))
        answers = [ended(raw, stream) for raw, stream in zip(raws, streams, strict=True)]
        # On a slow machine one feed may be served after another was ended.
        refused = [b"no memory for" in found for found in answers]
        assert any(refused)
        assert all(is_refused or b"CANCELLED" in found for is_refused, found in zip(refused, answers, strict=True))
        assert victim.peak() - before < 240 * MIB
        victim.check_serves()


@pytest.mark.parametrize("message", some([b"", field(3, b"\0")], 1), ids=["nothing", "pieces of nothing"])
def test_an_append_of_messages_that_carry_nothing_ends(victim: Victim, message: bytes) -> None:
    with RawGrpc(victim.url) as raw:
        stream = raw.call("DoPut", token=APP)
        raw.send(stream, SCHEMA)
        with suppress(Refused):
            for _ in range(6000):
                raw.send(stream, message)
        assert b"in more than 4096 messages" in ended(raw, stream)


@pytest.mark.matrix
def test_an_append_that_is_sent_for_too_long_ends(tmp_path: Path) -> None:
    node, clock = Node(tmp_path / "log"), ManualClock()
    limits = ServerLimits(append_seconds=100, idle_seconds=1e6, silent_seconds=1e6)
    with FlightNode(node, limits=limits, env=Env(clock=clock)) as server, RawGrpc(server.url) as raw:
        stream = raw.call("DoPut")
        raw.send(stream, SCHEMA)
        while stream not in raw.ended:
            clock.advance(10)
            with suppress(Refused):
                raw.send(stream, b"")
                asked = raw.call("ListActions")
                raw.send(asked, b"", last=True)
                raw.result(asked)
        assert b"has taken more than 100 s to be sent" in raw.ended[stream]
    node.close()
