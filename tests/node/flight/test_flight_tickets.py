"""Spans of a plan carry a signed ticket: it allows reading what was planned, for a while, and nothing else."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow.flight as fl
import pytest

import strandline as sl
from strandline.errors import Fenced, NotReady
from strandline.formats.json.checked import encode_checked
from strandline.formats.node.ticket import ReadTicket, SpanTicket, TicketKey, encode_ticket, sign_ticket
from strandline.model.cursor import Cursor, Limit
from strandline.node.flight.client.channel import Channel
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity, ServerSecurity, Tokens
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.server.server import FlightNode
from strandline.node.flight.wire.errors import node_errors
from strandline.node.flight.wire.streams import schema_of_columns
from strandline.node.messages import Caller
from strandline.node.tickets import Tickets
from strandline.storage.clock import CHANCE
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM, Env
from strandline.testing.clock import ManualClock
from tests.contracts.logs import append, fetched
from tests.node.flight.flight_double import Node, records

TOKENS = "app client token-of-the-app-1\nb replica token-of-node-b-12\na replica token-of-node-a-12\n"
APP = ClientSecurity(token="token-of-the-app-1")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "log")
    for value in (b"a", b"b", b"c"):
        node.log.append_batch(records(value, value)).result(60)
    yield node
    node.close()


@pytest.fixture
def guarded(node: Node) -> Iterator[FlightNode]:
    with FlightNode(node, security=ServerSecurity(tokens=Tokens.parse(TOKENS, "tokens"))) as server:
        yield server


def planned(server: FlightNode, **limits: Any) -> list[Any]:
    with RemoteLog(server.url, security=APP) as log:
        return list(log.plan(Cursor(log.log_id, 2), Limit(**limits)))


def get(url: str, ticket: ReadTicket, signed: str | None) -> Any:
    channel = Channel(url)
    try:
        with node_errors(url, "a read"):
            return channel.get(
                encode_ticket(ticket), schema_of_columns(ticket.columns), timeout=10, signed=signed
            ).read_all()
    finally:
        channel.close()


def test_a_span_is_read_in_another_process_without_a_token(guarded: FlightNode) -> None:
    data = pickle.dumps(planned(guarded))
    assert b"token-of" not in data
    spans = pickle.loads(data)
    assert "token" not in repr(spans[0])
    assert spans[0].ticket not in repr(spans)
    assert fetched(spans)["value"].to_pylist() == [b"b", b"b", b"c", b"c"]
    both = spans[0].join(spans[1])
    assert both is not None
    assert fetched([both])["offset"].to_pylist() == [2, 3, 4, 5]


def test_a_ticket_allows_reading_that_range_and_nothing_else(node: Node, guarded: FlightNode) -> None:
    [span] = planned(guarded, batches=1)
    log_id = node.log.log_id
    assert get(guarded.url, ReadTicket(Cursor(log_id, 3), 4), span.ticket).num_rows == 1
    refused = [
        ReadTicket(),
        ReadTicket(Cursor(log_id, 2)),
        ReadTicket(Cursor(log_id, 2), 5),
        ReadTicket(Cursor(log_id, 1), 4),
        ReadTicket(Cursor(log_id, 2), 4, follow=True),
        ReadTicket(Cursor(UUID(int=1), 2), 4),
    ]
    for asked in refused:
        with pytest.raises(Fenced, match="allows reading offsets 2 to 3 of log"):
            get(guarded.url, asked, span.ticket)
    channel = Channel(guarded.url)
    calls = [
        lambda: list(channel.client.do_action(fl.Action("bounds", b"{}"), channel.options(10, span.ticket))),
        lambda: channel.client.get_flight_info(fl.FlightDescriptor.for_path("x"), channel.options(10, span.ticket)),
        lambda: list(channel.client.list_flights(b"", channel.options(10, span.ticket))),
    ]
    for call in calls:
        with pytest.raises(Fenced, match="reading and nothing else"), node_errors(guarded.url, "a call"):
            call()
    piece = b'{"snapshot": "s", "path": "p", "offset": 0, "limit": 1, "replica": "b", "term": 0}'
    with pytest.raises(Fenced, match="role replica"), node_errors(guarded.url, "a file"):
        channel.client.do_get(fl.Ticket(piece), channel.options(10, span.ticket)).read_all()
    channel.close()


def test_a_forged_or_altered_ticket_is_refused(node: Node, guarded: FlightNode) -> None:
    [span] = planned(guarded, batches=1)
    content, _, signature = span.ticket.partition(".")
    wider = json.loads(base64.urlsafe_b64decode(content + "=="))
    wider["next"] = 6
    altered = base64.urlsafe_b64encode(json.dumps(wider).encode()).decode().rstrip("=")
    forged = [
        f"{altered}.{signature}",
        f"{content}.{signature[:-2]}AA",
        content,
        f"{content}.",
        ".",
        "x" * 5000,
        "~~.~~",
        sign_ticket(SpanTicket(node.log.log_id, 0, 6, 1 << 60), bytes(32)),
    ]
    for ticket in forged:
        with pytest.raises(Fenced, match=r"not signed by a node of this log, or was altered, .*: plan the read again"):
            get(guarded.url, ReadTicket(Cursor(node.log.log_id, 2), 4), ticket)
    with pytest.raises(Fenced, match="no token that this node knows"):
        get(guarded.url, ReadTicket(Cursor(node.log.log_id, 2), 4), None)


def test_a_ticket_of_another_log_is_refused(node: Node, guarded: FlightNode, tmp_path: Path) -> None:
    with ExitStack() as opened:
        other = Node(tmp_path / "other")
        opened.callback(other.close)
        other.log.append_batch(records(b"secret")).result(60)
        security = ServerSecurity(tokens=Tokens.parse(TOKENS, "tokens"))
        elsewhere = opened.enter_context(FlightNode(other, security=security))
        [span] = planned(guarded, batches=1)
        with pytest.raises(Fenced, match="not signed by a node of this log"):
            replace(span, urls=(elsewhere.url,)).fetch()
        with pytest.raises(Fenced, match="not signed by a node of this log"):
            get(elsewhere.url, ReadTicket(Cursor(other.log.log_id, 0), 1), span.ticket)
        other.tickets.adopt(node.tickets.keys())
        with pytest.raises(Fenced, match="allows reading offsets 2 to 3 of log"):
            get(elsewhere.url, ReadTicket(Cursor(other.log.log_id, 0), 1), span.ticket)


def test_a_ticket_expires(tmp_path: Path) -> None:
    clock = ManualClock()
    tickets = Tickets(f"{tmp_path}/tickets.json", env=Env(disk=DISK, clock=clock, chance=CHANCE))
    with pytest.raises(NotReady, match="does not know the log's key"):
        tickets.verify("x.y")
    assert tickets.issue(UUID(int=1), 0, 1, "") is None
    tickets.rotate()
    signed = tickets.issue(UUID(int=1), 0, 1, "app")
    assert signed is not None
    clock.advance(tickets.seconds - 1)
    assert tickets.verify(signed).name == "app"
    clock.advance(5)
    with pytest.raises(Fenced, match="expired 4 s ago: plan the read again"):
        tickets.verify(signed)


def test_a_span_whose_ticket_has_expired_says_so(node: Node, guarded: FlightNode) -> None:
    node.tickets.seconds = 0.0
    [span] = planned(guarded, batches=1)
    with pytest.raises(Fenced, match="The ticket expired 0 s ago: plan the read again"):
        span.fetch()


def test_keys_outlast_a_restart_and_a_change_of_primary(tmp_path: Path) -> None:
    def tickets(name: str) -> Tickets:
        return Tickets(f"{tmp_path}/{name}.json", env=SYSTEM)

    a, b = tickets("a"), tickets("b")
    a.rotate()
    signed = a.issue(UUID(int=1), 0, 1, "")
    assert signed is not None
    b.adopt(a.keys())
    assert tickets("b").verify(signed) == tickets("a").verify(signed)
    c = tickets("c")
    c.rotate()  # it leads without ever having heard of a
    other = c.issue(UUID(int=1), 0, 1, "")
    a.adopt(c.keys())
    assert a.keys()[0] == c.keys()[0]
    assert other is not None
    assert tickets("a").verify(other)
    assert tickets("a").verify(signed), "its own are still good"
    Path(f"{tmp_path}/b.json").write_bytes(b"damaged")
    assert tickets("b").keys() == ()


class TestRotatedKeys:
    LOG = UUID(int=1)

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    def tickets(self, folder: Path, name: str, clock: ManualClock) -> Tickets:
        return Tickets(f"{folder}/{name}.json", env=Env(disk=DISK, clock=clock, chance=CHANCE))

    def test_a_former_key_verifies_for_the_lifetime_of_a_ticket_and_no_longer(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        a, b = self.tickets(tmp_path, "a", clock), self.tickets(tmp_path, "b", clock)
        a.rotate()
        b.adopt(a.keys())
        known_to_a_removed_node = a.keys()[0].key
        a.rotate()
        clock.advance(a.seconds / 2)
        b.adopt(a.keys())  # it was away for a while
        newcomer = self.tickets(tmp_path, "c", clock)
        newcomer.adopt(a.keys())
        nodes = (a, b, newcomer, self.tickets(tmp_path, "a", clock), self.tickets(tmp_path, "b", clock))
        forged = sign_ticket(SpanTicket(self.LOG, 0, 1, clock.now() + 60_000_000), known_to_a_removed_node)
        assert [node.verify(forged).next for node in nodes] == [1] * 5
        clock.advance(a.seconds / 2)
        forged = sign_ticket(SpanTicket(self.LOG, 0, 1, clock.now() + 60_000_000), known_to_a_removed_node)
        for node in nodes:
            with pytest.raises(Fenced, match="its key was replaced: plan the read again"):
                node.verify(forged)

    def test_a_ticket_that_claims_a_longer_life_than_this_node_gives_is_refused(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        tickets = self.tickets(tmp_path, "a", clock)
        tickets.rotate()
        [key] = tickets.keys()

        def lasting(seconds: float) -> str:
            return sign_ticket(SpanTicket(self.LOG, 0, 1, clock.now() + int(seconds * 1_000_000)), key.key)

        assert tickets.verify(lasting(tickets.seconds + 299)).next == 1, "clocks may differ by five minutes"
        with pytest.raises(Fenced, match="valid for another 7200 s, but this node accepts 3600 s"):
            tickets.verify(lasting(2 * tickets.seconds))

    def test_an_older_primary_that_lists_a_former_key_for_ever_does_not_prolong_it(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        new, old = TicketKey(bytes(31) + b"n"), TicketKey(bytes(31) + b"o")
        b = self.tickets(tmp_path, "b", clock)
        for _ in range(3):
            b.adopt([new, old])  # without times, as earlier versions send them
            clock.advance(b.seconds / 2)
        assert b.keys() == (new,)

    def test_a_key_that_was_rotated_while_the_clock_was_ahead_ends_with_a_ticket(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        tickets = self.tickets(tmp_path, "a", clock)
        tickets.rotate()
        former = tickets.keys()[0].key
        right = clock.now()
        clock.set_wall(right + 30 * 86_400_000_000)
        tickets.rotate()
        clock.set_wall(right)
        assert len(tickets.keys()) == 2
        clock.advance(tickets.seconds)
        for each in (tickets, self.tickets(tmp_path, "a", clock)):
            with pytest.raises(Fenced, match="its key was replaced"):
                each.verify(sign_ticket(SpanTicket(self.LOG, 0, 1, clock.now() + 60_000_000), former))

    @pytest.mark.parametrize("restarts", [True, False])
    def test_a_former_key_that_has_ended_does_not_verify_again_after_the_clock_went_back(
        self, tmp_path: Path, clock: ManualClock, restarts: bool
    ) -> None:
        tickets, right = self.tickets(tmp_path, "a", clock), clock.now()
        tickets.rotate()
        former = tickets.keys()[0].key
        tickets.rotate()
        clock.set_wall(right + 2 * 3_600_000_000)
        tickets = self.tickets(tmp_path, "a", clock) if restarts else tickets
        assert len(tickets.keys()) == 1
        clock.set_wall(right)
        for each in (tickets, self.tickets(tmp_path, "a", clock)):
            found = each.keys()
            assert former not in [known.key for known in found]

    def test_keys_that_an_earlier_version_stored_have_an_end(self, tmp_path: Path, clock: ManualClock) -> None:
        keys = [bytes([n]) * 32 for n in (1, 2)]
        content = encode_checked("strandline-ticket-keys", 1, {"keys": [key.hex() for key in keys]})
        Path(f"{tmp_path}/a.json").write_bytes(content)
        a = self.tickets(tmp_path, "a", clock)
        before = a.keys()
        assert [each.key for each in before] == keys
        clock.advance(a.seconds)
        assert a.keys() == before[:1]


def test_a_replica_that_was_removed_does_not_get_the_next_key(tmp_path: Path) -> None:
    with sl.node.Primary.open(tmp_path / "a", name="a") as a:
        for name in ("b", "c"):
            a.register_replica(name)
        role = a.node.primary

        def signing(name: str) -> bytes:
            return role.handover(Caller(name, role.term)).ticket_keys[0].key

        former = signing("c")
        a.unregister_replica("c")
        assert signing("b") != former
        with pytest.raises(sl.errors.NotFound, match="no replica 'c'"):
            signing("c")
        after = signing("b")
        a.rotate_keys()
        assert signing("b") not in (former, after)
    with sl.node.Primary.open(tmp_path / "a", name="a") as again:
        keys = again.node.node_folder.tickets.keys()
        assert keys[0].key not in (former, after), "a token may have been removed"
        assert len(keys) > 1


def test_callers_by_ticket_share_the_limits_of_who_planned_the_read(node: Node) -> None:
    limits = ServerLimits(calls_each=2)
    security = ServerSecurity(tokens=Tokens.parse(TOKENS, "tokens"))
    with FlightNode(node, security=security, limits=limits) as server, ExitStack() as opened:
        [span] = planned(server, batches=1)
        assert node.tickets.verify(span.ticket).name == "app"
        follower = opened.enter_context(RemoteLog(server.url, security=APP))
        for _ in range(2):
            stream = follower.read(follow=True)
            next(stream)
            opened.callback(stream.close)
        with pytest.raises(sl.errors.Overloaded, match="app has 2 calls"):
            span.fetch()


def test_a_span_that_one_node_planned_is_read_at_another_and_after_a_failover(tmp_path: Path) -> None:
    def settings(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "lease": f"file://{tmp_path}/lease",
            "policy": "ack_n(1)",
            "poll_seconds": 0.05,
            "server": ServerSecurity(tokens=Tokens.parse(TOKENS, "tokens")),
            "client": ClientSecurity(token=f"token-of-node-{name}-12"),
        }

    with ExitStack() as opened:
        a = opened.enter_context(sl.node.Primary.open(tmp_path / "a", **settings("a")))
        b = opened.enter_context(sl.node.Replica.open(tmp_path / "b", nodes={"a": a.url}, **settings("b")))
        log = opened.enter_context(RemoteLog(a.url, security=APP))
        a.register_replica("b")  # it may come a little later
        append(log, b"1", number=0)
        b.reading(after=log.end(), timeout=30)
        spans = log.plan(log.start())
        at_b = pickle.loads(pickle.dumps([replace(span, urls=(b.url,)) for span in spans]))
        assert fetched(at_b)["value"].to_pylist() == [b"1"]
        with RemoteLog(b.url, security=APP) as replica:
            planned_by_b = replica.plan(log.start())
        assert fetched([replace(span, urls=(a.url,)) for span in planned_by_b])["value"].to_pylist() == [b"1"]
        a.close()
        b.promote()
        b.wait_until(lambda: b.node.knows_committed, 1)
        assert b.node.node_folder.tickets.verify(spans[0].ticket)
