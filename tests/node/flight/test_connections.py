"""Connections without credentials: they keep nobody out, and end soon."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from strandline.errors import TransientStorageError
from strandline.model.cursor import Bounds
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity, ServerSecurity, Tokens
from strandline.node.flight.server.admission import ConnectionGuard, superfluous
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.server.server import FlightNode
from strandline.storage.connections import connections_at, end_connection, peer_name
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.node.flight.flight_double import Node

LIMITS = ServerLimits(connections_unknown=4, authenticate_seconds=5.0)
WAIT = 60.0


def within_moments(log: RemoteLog) -> Bounds:
    """The bounds of a log, as soon as the node has looked at its connections."""
    turn = threading.Event()
    for _ in range(100):
        with suppress(TransientStorageError):
            return log.bounds()
        turn.wait(0.05)
    raise AssertionError("the node does not answer for five seconds")


def test_beyond_the_limit_the_address_with_the_most_unknown_connections_loses_its_oldest() -> None:
    flood = {f"10.0.0.1:{port}": float(port) for port in range(5)}
    assert superfluous(flood, LIMITS, 4.5) == ["10.0.0.1:0"], "callers behind one NAT may use the whole limit"
    honest = {"10.0.0.2:1": 0.0, "10.0.0.3:1": 0.0}
    assert superfluous(honest | flood, LIMITS, 4.5) == [f"10.0.0.1:{port}" for port in range(3)]
    many = {f"10.0.0.{host}:1": float(host) for host in range(6)}
    assert sorted(superfluous(many, LIMITS, 4.5)) == ["10.0.0.0:1", "10.0.0.1:1"]
    subscriber = {f"2001:db8::{host}:7": 1.0 for host in range(1, 6)}
    assert "::1:7" not in superfluous({"::1:7": 0.0} | subscriber, LIMITS, 4.5), "a /64 network is one caller's"
    assert superfluous({"::1:7": 0.0}, LIMITS, 4.9) == []
    assert superfluous({"::1:7": 0.0}, LIMITS, 5.0) == ["::1:7"], "it had its time to authenticate"


def test_a_connection_with_an_admitted_call_is_never_ended() -> None:
    clock = ManualClock()
    guard = ConnectionGuard(LIMITS, env=Env(clock=clock))
    peers = [f"10.0.0.1:{port}" for port in range(9)]
    for peer in peers:
        guard.admitted(peer)
    assert guard.judge(peers, set(peers)) == []
    clock.advance(3600)
    assert guard.judge(peers, set(peers)) == []
    guard.judge([], set(peers))  # all closed: the same ports may be another caller's now
    assert guard.judge(peers[:1], set()) == []
    clock.advance(5)
    assert guard.judge(peers[:1], set()) == peers[:1]


def test_a_call_that_is_admitted_while_connections_are_listed_counts() -> None:
    clock = ManualClock()
    guard = ConnectionGuard(LIMITS, env=Env(clock=clock))
    guard.admitted("10.0.0.1:7")  # after the list of known ones was taken, and not yet in that of open ones
    assert guard.judge([], set()) == []
    clock.advance(3600)
    assert guard.judge(["10.0.0.1:7"], {"10.0.0.1:7"}) == []


def test_a_process_sees_the_connections_that_it_has_accepted_at_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as opened:
        port = server.getsockname()[1]
        client = opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT))
        opened.enter_context(server.accept()[0])
        peer = peer_name(*client.getsockname())
        found = connections_at(port)
        assert list(found) == list(connections_at(port, {"127.0.0.1"})) == [peer]
        assert connections_at(port, {"127.0.0.2"}) == {}
        end_connection("10.0.0.1:1", found[peer])  # its number is another connection's now
        end_connection(peer, found[peer])
        assert client.recv(1) == b""


@contextmanager
def no_free_file_number() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_a_free_file_number_forgets_no_admitted_caller() -> None:
    clock = ManualClock()
    guard = ConnectionGuard(LIMITS, env=Env(clock=clock))
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as opened:
        port = server.getsockname()[1]
        client = opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT))
        accepted = opened.enter_context(server.accept()[0])
        guard.admitted(peer_name(*client.getsockname()))
        with no_free_file_number():
            guard.end_unknown(port)
        for _ in range(2):
            guard.end_unknown(port)
            clock.advance(3600)
        accepted.sendall(b"open")
        assert client.recv(4) == b"open"


def test_connections_without_a_token_keep_no_caller_with_one_out(tmp_path: Path) -> None:
    node = Node(tmp_path / "log")
    tokens = Tokens.parse("app client token-of-the-app-1", "the test")
    limits = ServerLimits(connections=24, connections_unknown=6, authenticate_seconds=1.0)
    with ExitStack() as opened:
        opened.callback(node.close)
        server = opened.enter_context(FlightNode(node, security=ServerSecurity(tokens=tokens), limits=limits))
        log = opened.enter_context(RemoteLog(server.url, security=ClientSecurity(token="token-of-the-app-1")))
        log.bounds()
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", server.port), WAIT)) for _ in range(100)]
        newcomer = opened.enter_context(RemoteLog(server.url, security=ClientSecurity(token="token-of-the-app-1")))
        assert within_moments(newcomer) == log.bounds(), "it has a place among those that are reserved"
        for one in silent:
            one.settimeout(WAIT)
            while one.recv(1 << 16):
                pass  # the node ends it
        assert newcomer.bounds() == log.bounds()
