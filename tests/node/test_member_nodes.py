"""Members that change on nodes with real servers: whose certificate and token counts, and what callers are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from strandline.errors import Fenced, InvalidInput, NotReady
from strandline.formats.json.checked import encode_checked
from strandline.formats.node.state import KIND, VERSION, decode_node, encode_node
from strandline.model.node import Membership, NodeState
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity, Role, ServerSecurity, Tokens
from strandline.node.members.rules import CancelChange, SetPolicy, members_of
from strandline.node.messages import Caller
from strandline.node.running import NodeConfig, RunningNode

WAIT = 120.0
Begin = Callable[..., RunningNode]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts nodes, which do not outlive the test."""
    with ExitStack() as started:

        def begin(name: str, **more: object) -> RunningNode:
            config = NodeConfig(folder=str(tmp_path / name), name=name, **{"poll_seconds": 0.1, **more})
            return started.enter_context(RunningNode(config))

        yield begin


def becomes(running: RunningNode, condition: str) -> RunningNode:
    assert running.wait_until(lambda: running.condition == condition, WAIT), running.condition
    return running


def test_the_certificate_of_a_node_is_a_replica_s_from_when_it_is_added_until_it_is_removed(
    begin, certificate_folder, caplog
):
    def read(name: str) -> bytes:
        return (certificate_folder / name).read_bytes()

    def client(name: str) -> ClientSecurity:
        return ClientSecurity(read("ca.pem"), read(f"{name}.pem"), read(f"{name}.key"))

    server = ServerSecurity(
        read("node.pem"), read("node.key"), read("ca.pem"), identities={"replica-2": frozenset({Role.ADMIN})}
    )
    a = begin("a", lead=True, create=True, server=server, client=client("node"))
    b = becomes(begin("replica-1", upstream=a.url, client=client("replica-1")), "fenced")
    assert "node add URL replica-1=NODE_URL" in caplog.text
    with RemoteLog(a.url, security=client("replica-1")) as log, pytest.raises(Fenced, match="takes the role admin"):
        log.change_members(SetPolicy("local"))
    with RemoteLog(a.url, security=client("by-other-name")) as admin:
        assert admin.add_node("replica-1", b.url, timeout=WAIT).members.nodes[1].url == b.url
        becomes(b, "following")
        assert admin.set_policy("ack_n(1)", timeout=WAIT).former is None
        assert b.wait_until(lambda: b.node.node_folder.state.membership == a.status().membership, WAIT)
        assert admin.topology().policy == "ack_n(1)"
        with pytest.raises(InvalidInput, match="cannot be reached with 0 replicas"):
            admin.remove_node("replica-1", timeout=0)
        admin.set_policy("local", timeout=WAIT)
        assert admin.remove_node("replica-1", timeout=WAIT).members == members_of({"a": a.url}, "local")
        becomes(b, "fenced")
        assert not admin.topology().members
        # Its certificate is a client's now, and tells no term; but it learns that it was removed.
        with FlightUpstream(a.url, security=client("replica-1")) as upstream:
            with pytest.raises(Fenced, match="takes the role replica"):
                upstream.report(Caller("replica-1", 9))
            assert upstream.report(Caller("replica-1", 0)).term == 1
        b.node._candidacy.learn()
        assert "replica-1" not in b._addresses()


def test_a_token_is_sent_to_the_address_of_a_node_that_was_added(begin, tmp_path):
    words = {name: f"the-token-of-{name}-and-no-other" for name in "ab"}
    tokens = Tokens.parse("".join(f"{name} replica {word}\n" for name, word in words.items()), "the test")
    shared = {
        "server": ServerSecurity(tokens=tokens), "lease": f"file://{tmp_path}/lease", "lease_seconds": 1.0,
    }  # fmt: skip
    a = begin("a", create=True, client=ClientSecurity(token=words["a"]), **shared)
    assert a.wait_until(lambda: a.node.is_primary, WAIT)
    b = becomes(begin("b", nodes={"a": a.url}, client=ClientSecurity(token=words["b"]), **shared), "following")
    known = Membership(1, 1, members_of({"a": a.url, "b": b.url, "c": "grpc://127.0.0.1:9"}, "local"))
    with pytest.raises(InvalidInput, match="its token was not sent there"):
        b.config.check_reaching("grpc://127.0.0.1:9", b._addresses())
    b.node.node_folder.remember(membership=known)
    b.config.check_reaching("grpc://127.0.0.1:9/", b._addresses())
    assert "c" in b._addresses()
    assert "d" not in b._addresses()


def test_a_change_over_the_network_is_checked(begin):
    a = begin("a", lead=True, create=True)
    with RemoteLog(a.url) as log:
        channel = log._nodes.only("A test")
        for fields, why in (
            ({"change": "grow"}, "Invalid value 'grow'"),
            ({"change": "add", "name": "../b", "url": "grpc://b:1"}, "no plain name"),
            ({"change": "add", "name": "b", "url": "ftp://b"}, "grpc"),
            ({"change": "add", "name": "b", "url": "grpc://b:1", "vote": True}, "unknown field `vote`"),
            ({"change": "policy", "policy": "x" * 20_000}, "length <= 16384"),
            ({"change": "policy", "policy": "what"}, "no commit policy"),
            ({"change": "cancel"}, "missing required field `term`"),
        ):
            with pytest.raises(InvalidInput, match=why):
                channel.ask("change-members", **fields)
        with pytest.raises(InvalidInput, match="nothing to take back"):
            log.change_members(CancelChange(1, 1))
        assert log.topology().membership is None


def test_a_change_that_does_not_end_in_time_says_so_and_goes_on(begin):
    a = begin("a", lead=True, create=True)
    b = becomes(begin("b", upstream=a.url), "following")
    with RemoteLog(a.url) as log:
        log.add_node("b", b.url, timeout=WAIT)
        assert a.wait_until(lambda: b.status().membership == a.status().membership, WAIT)
        a.node.primary.membership.complete = lambda _: False
        with pytest.raises(NotReady, match="goes on by itself"):
            log.set_policy("ack_n(1)", timeout=0)
        assert log.topology().membership.former is not None
        del a.node.primary.membership.complete
        assert log.set_policy("ack_n(1)", timeout=WAIT).former is None
        log.set_policy("quorum(a,b)", timeout=WAIT)
        with pytest.raises(NotReady, match="does not follow yet"):
            log.add_node("c", "grpc://127.0.0.1:9", timeout=0.5)


def test_the_state_of_an_earlier_version_has_no_record():
    state = NodeState("a", membership=Membership(2, 3, members_of({"a": "x"}, "local"), members_of({"b": ""}, "local")))
    assert decode_node(encode_node(state), "here") == state
    fields = asdict(NodeState("a"))
    del fields["membership"]
    assert decode_node(encode_checked(KIND, VERSION, fields), "here") == NodeState("a")
