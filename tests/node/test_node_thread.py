"""A node behind its server, with its thread: how it starts, what it does when that fails, and how it ends."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.errors import Fenced, InvalidInput, NotReady, StorageError
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity, ServerSecurity, Tokens
from strandline.node.flight.server.actions import NodeService
from strandline.node.messages import Caller
from strandline.node.node import Node
from strandline.node.node_folder import NodeFolder
from strandline.node.running import NodeConfig, RunningNode
from strandline.storage.clock import CLOCK
from strandline.storage.lease import Lease
from strandline.storage.objects.local import LocalStore
from tests.interrupts import interrupted_by_a_signal, interruptions

ONE = pa.table({"value": pa.array([b"one"], pa.binary())})
WAIT = 120.0

Begin = Callable[..., RunningNode]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts nodes, which do not outlive the test."""
    with ExitStack() as started:

        def begin(name: str, **more: object) -> RunningNode:
            config = NodeConfig(folder=str(tmp_path / name), name=name, **{"poll_seconds": 0.2, **more})
            return started.enter_context(RunningNode(config))

        yield begin


def lease_of(tmp_path: Path) -> dict[str, object]:
    return {"lease": f"file://{tmp_path}/lease", "lease_seconds": 1.0}


def holder(tmp_path: Path) -> str | None:
    state = Lease(LocalStore(str(tmp_path / "lease")), "lease", "who looks").read()
    return None if state is None else state.holder


def following(running: RunningNode) -> RunningNode:
    assert running.wait_until(lambda: running.condition == "following", WAIT), running.condition
    return running


class TestStarting:
    def test_the_lease_has_its_holders_address_though_the_port_was_free_to_choose(self, begin, tmp_path):
        a = begin("a", create=True, **lease_of(tmp_path))
        assert a.wait_until(lambda: a.node.is_primary, WAIT)
        assert holder(tmp_path) == f"a {a.url}"
        with RemoteLog(a.url) as log:
            assert log.topology().primary == "a"

    def test_an_advertised_address_is_stored_in_the_lease(self, begin, tmp_path):
        a = begin("a", create=True, url="grpc://a.example:7450", **lease_of(tmp_path))
        assert a.wait_until(lambda: a.node.is_primary, WAIT)
        assert holder(tmp_path) == "a grpc://a.example:7450"

    def test_until_the_node_is_open_its_server_says_not_ready(self, begin, monkeypatch):
        refused = []

        def opened(*args, connect, **options):
            with RemoteLog(connect.__self__.server.url) as log:
                calls = (log.bounds, log.status, log.promote, log.rebootstrap, log.topology, lambda: log.append(ONE))
                for call in calls:
                    with pytest.raises(NotReady, match="a is starting"):
                        call()
                    refused.append(call)
            return Node(*args, connect=connect, **options)

        monkeypatch.setattr("strandline.node.running.Node", opened)
        a = begin("a", lead=True, create=True)
        assert isinstance(a, NodeService)
        assert len(refused) == 6

    def test_a_folder_that_another_node_runs_in_is_refused_before_anything_else(self, begin, tmp_path):
        begin("a", lead=True, create=True)
        with pytest.raises(Fenced, match="running already"):
            begin("a", lead=True)

    def test_a_port_that_is_taken_is_an_error_with_a_sentence_and_leaves_the_folder_free(self, begin, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(StorageError, match=f"127.0.0.1:{port}"):
                begin("a", lead=True, create=True, listen=("127.0.0.1", port))
        NodeFolder.open(str(tmp_path / "a"), "a").close()

    def test_a_node_that_cannot_be_opened_leaves_its_port_and_its_folder_free(self, begin, tmp_path):
        begin("a", create=True, **lease_of(tmp_path)).wait_until(lambda: holder(tmp_path) is not None, WAIT)
        host = "127.0.0.2"  # no other program of a busy machine takes ports there
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        with pytest.raises(InvalidInput, match="There has been a primary") as refused:
            begin("b", create=True, listen=(host, port), **lease_of(tmp_path))
        NodeFolder.open(str(tmp_path / "b"), "b").close()
        socket.create_server((host, port)).close()
        del refused  # it kept everything alive until here


LEASED = {"lease": "memory://never-used"}
WRONG = [
    ({"name": "a b"}, "cannot name"),
    ({"policy": "most"}, "no commit policy"),
    ({"lead": False}, "no primary to follow: name a lease or an upstream, or let it lead"),
    ({"upstream": "grpc://b:1"}, "leads or follows"),
    ({**LEASED}, "The lease decides which node leads"),
    ({"lead": False, "upstream": "b:1"}, "no address of a node"),
    ({"lead": False, "upstream": "grpc://b:1", "create": True}, "gets its log from there"),
    ({"automatic": True}, "only with a lease and the policy quorum"),
    ({**LEASED, "lead": False, "automatic": True, "policy": "ack_n(1)"}, "only with a lease and the policy quorum"),
    ({**LEASED, "lead": False, "automatic": True, "policy": "quorum(a,b,c)"}, "no address of b, c"),
    ({"lead": False, "lease": "ftp://x/y"}, "unknown scheme"),
    ({"listen": ("127.0.0.1", 70000)}, "from 0 up to 65535"),
    ({"listen": ("0.0.0.0", 1)}, "can be reached by other machines"),
    ({"listen": ("0.0.0.0", 1), "insecure": True}, "give the address at which they reach"),
    ({"nodes": {"b": "http://b:1"}}, "no address of a node"),
    ({"poll_seconds": 0.0}, "poll_seconds"),
    ({"lease_seconds": float("nan")}, "lease_seconds"),
    ({"url": "nowhere"}, "no address of a node"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "why"), WRONG, ids=[why for _, why in WRONG])
def test_impossible_settings_are_refused_before_anything_is_opened(tmp_path, wrong, why):
    with pytest.raises(InvalidInput, match=why):
        NodeConfig(**{"folder": str(tmp_path / "a"), "name": "a", "lead": True, **wrong})
    assert list(tmp_path.iterdir()) == []


class TestEnding:
    def test_closing_frees_port_folder_and_lease_at_once(self, begin, tmp_path):
        a = begin("a", create=True, **lease_of(tmp_path))
        assert a.wait_until(lambda: a.node.is_primary, WAIT)
        a.close()
        a.close()
        assert holder(tmp_path) is None
        again = begin("a", listen=("127.0.0.1", a.server.port), **lease_of(tmp_path))
        assert again.wait_until(lambda: again.node.is_primary, WAIT)
        assert again.node.primary.term == 2

    def test_closing_does_not_wait_forever_for_a_call_that_never_ends(self, begin):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            b = begin("b", upstream=f"grpc://127.0.0.1:{silent.getsockname()[1]}", timeout=3.0)
            silent.accept()
            b.close()
        b._thread.join(WAIT)  # its work is over a moment before it has ended
        assert not b._thread.is_alive()

    def test_interrupted_anywhere_the_folder_is_free_once_it_is_closed_again(self, begin, tmp_path):
        nodes = [begin("a0", lead=True, create=True)]

        def close() -> None:
            nodes[-1].close()

        for place in interruptions(close, within="strandline.node"):
            close()
            NodeFolder.open(str(tmp_path / f"a{place}"), f"a{place}").close()
            nodes.append(begin(f"a{place + 1}", lead=True, create=True))
        assert len(nodes) > 2

    def test_interrupted_while_its_thread_is_busy_it_ends_by_itself(self, begin, tmp_path, monkeypatch):
        a = begin("a", lead=True, create=True)
        a.wait_until(lambda: a.node.is_primary, WAIT)
        is_busy, goes_on = threading.Event(), threading.Event()
        step = a.node.step

        def busy() -> float:
            is_busy.set()
            goes_on.wait(WAIT)
            return step()

        monkeypatch.setattr(a.node, "step", busy)
        assert is_busy.wait(WAIT)
        with interrupted_by_a_signal():
            a.close()
        with interrupted_by_a_signal():
            a.close()
        with pytest.raises(Fenced):
            NodeFolder.open(str(tmp_path / "a"), "a")
        goes_on.set()
        deadline = CLOCK.monotonic() + WAIT
        while True:
            try:
                NodeFolder.open(str(tmp_path / "a"), "a").close()
            except Fenced:
                assert CLOCK.monotonic() < deadline, "nobody lets go of the folder"
            else:
                break

    def test_closing_does_not_wait_until_a_promotion_has_the_lease(self, begin, tmp_path, monkeypatch):
        shared = {**lease_of(tmp_path), "lease_seconds": 8.0}
        a = begin("a", create=True, **shared)
        assert a.wait_until(lambda: a.node.is_primary, WAIT)
        b = following(begin("b", nodes={"a": a.url}, **shared))
        assert b.wait_until(lambda: b.node.node_folder.state.adopted > 0, WAIT)
        is_waiting = threading.Event()
        monkeypatch.setattr(b.node._lease, "try_acquire", is_waiting.set)
        refused = []

        def promote() -> None:
            with pytest.raises(NotReady) as caught:
                b.promote()
            refused.append(str(caught.value))

        asking = threading.Thread(target=promote)
        asking.start()
        assert is_waiting.wait(WAIT)
        b.close()
        asking.join(WAIT)
        assert refused == ["b stops while it waits for the lease: it does not lead."]

    def test_closing_right_before_the_thread_sleeps_wakes_it(self, begin):
        a = begin("a", lead=True, create=True, poll_seconds=60.0)

        class ClearedLate(threading.Event):
            def clear(self) -> None:
                if not a._stop.is_set():
                    a._stop.set()  # as close() does, in another thread
                    self.set()
                super().clear()

        former, a._wake = a._wake, ClearedLate()
        former.set()  # it sleeps on either of them
        a._wake.set()
        assert a._ended.wait(30.0)

    def test_a_call_to_a_closed_node_is_refused(self, begin):
        a = begin("a", lead=True, create=True)
        a.close()
        with pytest.raises(NotReady, match="a has stopped"):
            a.promote()


class TestFailing:
    @pytest.fixture
    def failed(self, begin, tmp_path, monkeypatch, caplog) -> RunningNode:
        """A primary whose thread ended with an error that nobody thought of."""
        a = begin("a", create=True, **lease_of(tmp_path))
        assert a.wait_until(lambda: a.node.is_primary, WAIT)
        with RemoteLog(a.url) as log:
            log.append(ONE)

        def fail() -> float:
            raise ZeroDivisionError("nobody thought of this")

        caplog.set_level(logging.CRITICAL, logger="strandline.node")
        monkeypatch.setattr(a.node, "step", fail)
        a._thread.join(WAIT)
        return a

    def test_it_keeps_the_error_and_reports_it_to_callers(self, failed):
        assert isinstance(failed.failure, ZeroDivisionError)
        assert failed.condition == "failed"
        with RemoteLog(failed.url) as log, FlightUpstream(failed.url) as node:
            assert (log.status().condition, log.status().trouble) == ("failed", repr(failed.failure))
            assert node.report(Caller("b")).unhealthy == "failed"
            with pytest.raises(NotReady, match="nobody thought of this"):
                log.promote()

    def test_it_steps_down_at_once_and_another_one_may_have_the_lease(self, failed, tmp_path):
        assert holder(tmp_path) is None
        with RemoteLog(failed.url) as log, pytest.raises(Fenced):
            log.append(ONE)

    def test_its_records_can_still_be_read(self, failed):
        with RemoteLog(failed.url) as log:
            assert sum(batch.num_rows for batch in log.read()) == 1


class TestAsking:
    def test_a_replica_that_follows_is_promoted_and_the_old_primary_refuses_from_then(self, begin):
        a = begin("a", lead=True, create=True)
        b = following(begin("b", upstream=a.url, nodes={"a": a.url}))
        with RemoteLog(a.url) as old, RemoteLog(b.url) as new:
            written = old.append(ONE)
            b.node.replica.watermark.readable(after=written.bookmark, timeout=WAIT)
            assert new.promote().term > written.bookmark.term
            with pytest.raises((Fenced, NotReady)):
                old.append(ONE)
            assert new.append(ONE).bookmark.next == 2
        assert (a.node.is_primary, b.node.is_primary) == (False, True)

    def test_a_replica_that_could_not_begin_to_lead_follows_with_the_log_of_a_follower(
        self, begin, tmp_path, monkeypatch
    ):
        a = begin("a", lead=True, create=True)
        b = following(begin("b", upstream=a.url, nodes={"a": a.url}))
        with RemoteLog(a.url) as log:
            b.node.replica.watermark.readable(after=log.append(ONE).bookmark, timeout=WAIT)

        def full(*_: object, **__: object) -> None:
            raise StorageError("the disk is full")

        monkeypatch.setattr("strandline.node.lead.begin.PrimaryRole", full)
        with pytest.raises(StorageError, match="the disk is full"):
            b.promote(force=True)
        assert not [each for each in threading.enumerate() if each.name.startswith(f"strandline-wal {tmp_path / 'b'}")]
        assert b.node.log.end().next == 1

    def test_a_replica_builds_its_copy_again_when_it_is_asked_to(self, begin, tmp_path):
        a = begin("a", lead=True, create=True)
        b = following(begin("b", upstream=a.url))
        with RemoteLog(a.url) as primary, RemoteLog(b.url) as replica:
            written = primary.append(ONE)
            b.node.replica.watermark.readable(after=written.bookmark, timeout=WAIT)
            before = b.node.node_folder.state.generation
            replica.rebootstrap()
            assert b.wait_until(
                lambda: b.node.node_folder.state.generation > before and b.condition == "following", WAIT
            )
            assert sum(batch.num_rows for batch in replica.read()) == 1
            with pytest.raises(NotReady, match="a is the primary, and no replica"):
                primary.rebootstrap()

    def test_roles_are_changed_by_the_control_thread_and_not_by_the_caller(self, begin, monkeypatch):
        a = begin("a", lead=True, create=True)
        seen = []
        monkeypatch.setattr(a.node, "promote", lambda **_: seen.append(threading.current_thread()))
        monkeypatch.setattr(a.node, "rebootstrap", lambda: seen.append(threading.current_thread()))
        a.promote()
        a.rebootstrap()
        assert seen == [a._thread, a._thread]

    def test_an_error_of_a_job_is_raised_where_it_was_asked(self, begin):
        a = begin("a", lead=True, create=True)
        with pytest.raises(ZeroDivisionError):
            a._on_control_thread(lambda: 1 // 0)
        assert a.failure is None


def test_nodes_know_one_another_by_their_tokens_and_nobody_else(begin):
    words = {name: f"the-token-of-{name}-and-no-other" for name in ("a", "b", "ops")}
    tokens = Tokens.parse(
        f"a replica {words['a']}\nb replica {words['b']}\nops client,admin {words['ops']}", "the test"
    )
    server = ServerSecurity(tokens=tokens)
    a = begin("a", lead=True, create=True, server=server, client=ClientSecurity(token=words["a"]))
    following(begin("b", upstream=a.url, server=server, client=ClientSecurity(token=words["b"])))
    with RemoteLog(a.url, security=ClientSecurity(token=words["ops"])) as log:
        assert [member.name for member in log.topology().members] == ["b"]
    with RemoteLog(a.url) as log, pytest.raises(Fenced, match="no token"):
        log.topology()


def test_a_token_is_not_sent_to_an_address_that_only_the_lease_names(begin, tmp_path, caplog):
    token = ClientSecurity(token="the-token-of-b-and-no-other")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        url = f"grpc://127.0.0.1:{stranger.getsockname()[1]}"
        forged = Lease(LocalStore(str(tmp_path / "lease")), "lease", f"a {url}", seconds=WAIT)
        assert forged.try_acquire()
        b = begin("b", client=token, **lease_of(tmp_path))
        assert b.wait_until(lambda: "its token was not sent there" in caplog.text, WAIT), b.condition
        with pytest.raises(BlockingIOError):
            stranger.accept()
        assert f"The lease names {url} as the primary, which is none of the addresses" in caplog.text


def test_a_token_is_sent_to_a_node_that_the_lease_and_the_settings_name(begin, tmp_path):
    words = {name: f"the-token-of-{name}-and-no-other" for name in ("a", "b")}
    tokens = Tokens.parse("".join(f"{name} replica {word}\n" for name, word in words.items()), "the test")
    shared = {"server": ServerSecurity(tokens=tokens), **lease_of(tmp_path)}
    a = begin("a", create=True, client=ClientSecurity(token=words["a"]), **shared)
    assert a.wait_until(lambda: a.node.is_primary, WAIT)
    following(begin("b", nodes={"a": f"{a.url}/"}, client=ClientSecurity(token=words["b"]), **shared))
