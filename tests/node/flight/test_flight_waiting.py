"""Waiting for records at a node: the call waits there, and nobody can occupy the node by waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from strandline.errors import Fenced, InvalidInput, NotReady, Overloaded, TransientStorageError
from strandline.model.cursor import Cursor
from strandline.node.flight.client.channel import Channel
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity, ServerSecurity, Tokens
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.server.server import FlightNode
from tests.node.flight.flight_double import TABLE, Node, until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "log")
    yield node
    node.close()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def counted(log: RemoteLog) -> list[str]:
    """The names of the actions that a client calls from now on."""
    [channel], called = log._nodes.all, []
    real = channel.call

    def call(action: str, *args: Any, **options: Any) -> Any:
        called.append(action)
        return real(action, *args, **options)

    channel.call = call
    return called


def test_a_wait_is_one_call_that_ends_with_the_append(node: Node, opened: ExitStack) -> None:
    log = opened.enter_context(RemoteLog(opened.enter_context(FlightNode(node)).url))
    since, called = log.end(), counted(log)
    node.at_wait[3] = lambda: node.log.append_batch(TABLE).result(60)
    assert log.wait(since, 60)
    assert called == ["wait"]
    assert not log.wait(log.end(), 0.05)
    assert not log.wait(log.end(), 0)
    assert not log.wait(log.end(), -1)
    assert log.wait(since, 0)


def test_a_longer_wait_than_the_node_allows_is_asked_for_again(node: Node, opened: ExitStack) -> None:
    limits = ServerLimits(wait_seconds=0.01)
    log = opened.enter_context(RemoteLog(opened.enter_context(FlightNode(node, limits=limits)).url))
    since, called = log.end(), counted(log)
    node.at_wait[4] = lambda: node.log.append_batch(TABLE).result(60)
    assert log.wait(since, 60)
    assert called == ["wait"] * len(called)
    assert len(called) >= 4


def test_waits_are_bounded_for_one_caller_and_for_all_and_others_are_served(node: Node, opened: ExitStack) -> None:
    tokens = Tokens.parse("".join(f"app-{i} client token-of-application-{i}\n" for i in range(3)), "tokens")
    limits = ServerLimits(waits=3, waits_each=2)
    server = opened.enter_context(FlightNode(node, limits=limits, security=ServerSecurity(tokens=tokens)))
    pool = opened.enter_context(ThreadPoolExecutor(8))
    channels = [Channel(server.url, security=ClientSecurity(token=f"token-of-application-{i}")) for i in range(3)]
    for channel in channels:
        opened.callback(channel.close)
    past = {"past": Cursor(node.log.log_id, 0), "seconds": 9}

    def wait(caller: int) -> Any:
        return pool.submit(channels[caller].call, "wait", timeout=20, **past)

    first = [wait(0), wait(0)]
    until(lambda: node.waits >= 2 and server.calls == 2)
    with pytest.raises(Overloaded, match="2 of them of app-0, which is the limit"):
        wait(0).result(20)
    third = wait(1)
    until(lambda: server.calls == 3)
    with pytest.raises(Overloaded, match="3 calls wait for records"):
        wait(2).result(20)
    log = opened.enter_context(RemoteLog(server.url, security=ClientSecurity(token="token-of-application-2")))
    since = log.end()
    waiting = pool.submit(log.wait, since, 60)
    assert log.append(TABLE).receipt.first == 0, "it is served, and polls as long as it may not wait"
    assert waiting.result(60)
    for call in (*first, third):
        call.result(20)
    until(lambda: server.calls == 0)
    wait(2).result(20)


def test_a_wait_ends_when_its_caller_is_gone_and_when_the_node_stops(node: Node, opened: ExitStack) -> None:
    server = opened.enter_context(FlightNode(node, limits=ServerLimits(wait_seconds=600)))
    pool = opened.enter_context(ThreadPoolExecutor(2))
    channel = Channel(server.url)
    opened.callback(channel.close)
    past = {"past": Cursor(node.log.log_id, 0), "seconds": 600}
    with pytest.raises(TransientStorageError):
        channel.call("wait", timeout=0.3, **past)
    until(lambda: server.calls == 0)
    log = opened.enter_context(RemoteLog(server.url))
    waiting = pool.submit(log.wait, log.end(), 60)
    until(lambda: server.calls == 1)
    threading.Thread(target=server.close).start()
    with pytest.raises((NotReady, TransientStorageError)):
        waiting.result(30)


def test_a_wait_is_checked_at_the_door(node: Node, opened: ExitStack) -> None:
    tokens = Tokens.parse("app client token-of-the-app-1\n", "tokens")
    guarded = opened.enter_context(FlightNode(node, security=ServerSecurity(tokens=tokens)))
    with RemoteLog(guarded.url) as log, pytest.raises(Fenced, match="token"):
        log.wait(Cursor(node.log.log_id, 0), 5)
    channel = Channel(opened.enter_context(FlightNode(node)).url)
    opened.callback(channel.close)
    past = Cursor(node.log.log_id, 0)
    for fields in (
        {},
        {"past": "x"},
        {"past": past},
        {"past": past, "seconds": -1},
        {"past": past, "seconds": 1, "x": 1},
    ):
        with pytest.raises(InvalidInput, match="'wait'"):
            channel.call("wait", **fields)
    assert node.waits == 0


def test_a_node_that_cannot_wait_is_polled(node: Node, opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strandline.node.flight.client.remote_log.WAIT", "wait-of-a-later-version")
    log = opened.enter_context(RemoteLog(opened.enter_context(FlightNode(node)).url))
    since = log.end()
    assert not log.wait(since, 0.02)
    node.log.append_batch(TABLE).result(60)
    assert log.wait(since, 60)
