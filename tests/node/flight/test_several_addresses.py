"""A log by the addresses of several nodes: who leads is found, and no answer is older than an earlier one."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import (
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    NotReady,
    TransientStorageError,
    Unsupported,
)
from strandline.log.contract import Log
from strandline.model.cursor import Bounds, Cursor
from strandline.node.flight.client.node_channels import addresses_of, near_first
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.server.server import FlightNode
from strandline.node.messages import NodeStatus
from strandline.testing.sinks import MemorySink
from tests.contracts.logs import append, fetched, writer_named
from tests.node.flight.flight_double import TABLE, Node, records, values_of
from tests.node.flight.recording_client import append as append_marked
from tests.node.flight.recording_client import mark_in, new_writer
from tests.node.processes import ClusterOfProcesses, Nest
from tests.node.test_log_contract import NodeLogContract


class OneOfSeveral(Node):
    """A node with a role and a watermark of its own, over the records of the first."""

    condition = "following"
    term = 1

    def __init__(self, folder: Path, first: Node | None = None) -> None:
        super().__init__(folder) if first is None else vars(self).update(vars(first), asked=[], at_wait={})

    @property
    def primary(self) -> Any:
        if self.condition != "leading":
            raise NotReady("another one leads")
        return self

    def status(self) -> NodeStatus:
        return NodeStatus("node", self.condition, None, self.term, "", self.log.end(), self.watermark)


class Served:
    """Three nodes of one log, and their servers; ``a`` leads."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.a = OneOfSeveral(folder / "log")
        self.nodes = [self.a, *(OneOfSeveral(folder, self.a) for _ in range(2))]
        _, self.b, self.c = self.nodes
        opened.callback(self.a.close)
        self.servers = [opened.enter_context(FlightNode(node, heartbeat_seconds=0.05)) for node in self.nodes]
        self.url = ",".join(server.url for server in self.servers).replace(",grpc://", ",")
        self.lead(self.a)
        self._opened = opened

    def lead(self, leader: OneOfSeveral | None) -> None:
        for node in self.nodes:
            node.condition = "leading" if node is leader else "following"

    def connect(self, **options: Any) -> RemoteLog:
        return self._opened.enter_context(RemoteLog(self.url, **{"failover_timeout": 0.2, **options}))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as opened:
        yield Served(tmp_path, opened)


def test_addresses_have_commas_between_them_and_one_scheme() -> None:
    assert addresses_of("grpc+tls://a:1,b:2,a:1") == ("grpc+tls://a:1", "grpc+tls://b:2")
    assert addresses_of("grpc://a:1,grpc://b:2") == ("grpc://a:1", "grpc://b:2")
    with pytest.raises(InvalidInput, match="mixes schemes"):
        addresses_of("grpc://a:1,grpc+tls://b:2")
    for url in ("grpc://a:1,", "grpc://a:1,b", "grpc://,a:1"):
        with pytest.raises(InvalidInput, match="is no address of a node"):
            sl.open(url)
    with pytest.raises(InvalidInput) as caught:
        sl.open("grpc://a:1,me:hunter2@b:2")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidInput, match=r"read_from= is for a node"):
        sl.open("memory://x", read_from="replicas")
    assert near_first(["grpc://a:1", "grpc://localhost:1", "grpc://b:1"])[0] == "grpc://localhost:1"


def test_appends_go_to_whoever_leads_and_follow_a_change(served: Served) -> None:
    log = served.connect()
    assert log.append(TABLE, writer=writer_named(1), number=0).receipt.first == 0
    served.lead(served.c)
    assert log.append(TABLE, writer=writer_named(1), number=1).receipt.first == 2
    assert log.append(TABLE).receipt.first == 4, "a node that does not lead has written nothing: it is asked elsewhere"
    assert [sum(each[0] == "append" for each in node.asked) for node in served.nodes] == [1, 0, 2]
    served.lead(None)
    with pytest.raises(NotReady, match="leads now"):
        log.append(TABLE, writer=writer_named(1), number=2)
    assert log.bounds() == Bounds(0, 6), "what is committed is read all the same"


def test_of_two_that_say_they_lead_the_higher_term_counts(served: Served) -> None:
    served.b.condition, served.b.term = "leading", 2
    served.connect().append(TABLE)
    assert [sum(each[0] == "append" for each in node.asked) for node in served.nodes] == [0, 1, 0]


def test_an_append_without_an_answer_is_repeated_only_if_it_is_numbered(served: Served) -> None:
    log = served.connect(timeout=5.0)
    tried = threading.Semaphore(0)

    def fail_once(node: OneOfSeveral) -> None:
        real = node.append

        def append(*args: Any, **options: Any) -> Any:
            node.append = real
            real(*args, **options)  # it is written, and the answer is lost
            tried.release()
            raise TransientStorageError("the connection broke")

        node.append = append

    fail_once(served.a)
    commit = log.append(TABLE, writer=writer_named(1), number=0)
    assert (commit.receipt.first, log.bounds().next) == (0, 2)
    assert not commit.repeated, "it was this very append that came first"
    fail_once(served.a)
    with pytest.raises(TransientStorageError):
        log.append(TABLE)
    assert log.bounds().next == 4, "it was appended once, and not repeated"


def test_a_caller_that_may_not_append_is_told_so_at_once(served: Served) -> None:
    served.a.error = Fenced("'app' may not do this")
    with pytest.raises(Fenced, match="may not do this"):
        served.connect(failover_timeout=60.0).append(TABLE, writer=writer_named(1), number=0)


def test_a_primary_that_was_fenced_during_an_append_is_left_for_the_next_one(served: Served) -> None:
    log = served.connect()

    def fenced(*args: Any, **options: Any) -> Any:
        served.lead(served.b)
        raise Fenced("This node is not the primary any more")

    served.a.append = fenced
    assert log.append(TABLE, writer=writer_named(1), number=0).receipt.first == 0
    served.lead(served.a)
    with served.connect() as another, pytest.raises(Fenced):
        another.append(TABLE)  # it may be written or not: only a numbered one could be repeated


def test_no_answer_is_older_than_an_earlier_one(served: Served) -> None:
    served.a.log.append_batch(records(b"a", b"b")).result(60)
    served.a.log.append_batch(records(b"c", b"d")).result(60)
    log = served.connect()
    assert log.bounds().next == 4
    served.b.watermark = served.c.watermark = 2
    served.lead(None)
    served.servers[0].close()
    since = Cursor(log.log_id, 2)
    for call in (log.bounds, lambda: log.plan(since), log.end, lambda: log.cursor_at(4)):
        with pytest.raises(NotReady, match="lags: it ends"):
            call()
    assert served.connect().cursor_at(4).fingerprint is None, "its record is not committed there: it may yet be another"
    served.c.watermark = 4
    assert log.bounds().next == 4, "one of them has caught up"
    assert fetched(log.plan(since))["value"].to_pylist() == [b"c", b"d"]
    assert log.cursor_at(4).next == 4


def test_a_primary_that_lost_what_was_read_is_not_waited_for(served: Served) -> None:
    served.a.log.append_batch(records(b"a", b"b")).result(60)
    log = served.connect(failover_timeout=60.0)
    assert log.bounds().next == 2
    served.a.watermark = served.b.watermark = served.c.watermark = 1
    with pytest.raises(Diverged, match="a forced promotion or a restored folder lost them"):
        log.bounds()


def test_only_a_primary_can_say_that_a_cursor_diverged(served: Served) -> None:
    served.a.log.append_batch(records(b"a", b"b")).result(60)
    log = served.connect(read_from="replicas", failover_timeout=0.2)
    since = Cursor(log.log_id, 9)
    for node in served.nodes:
        node.watermark = 2
    for node in (served.b, served.c):
        node.reading = lambda node=node: Lagging(node)
    assert log.plan(Cursor(log.log_id, 1))[0].next == 2, "the leader knows"
    served.lead(None)
    with pytest.raises(NotReady, match="does not lead"):
        RemoteLog(served.url.split(",", 1)[1].join(["grpc://", ""]), failover_timeout=0.1).plan(since)


class Lagging:
    """A copy that has not got what a reader asks for."""

    def __init__(self, node: OneOfSeveral) -> None:
        self.node = node

    def bounds(self) -> Bounds:
        return Bounds(0, 2)

    def end(self) -> Cursor:
        return Cursor(self.node.log.log_id, 2)

    def plan(self, since: Cursor, limit: object) -> Any:
        raise Diverged("The cursor is past the log's end")


def test_replicas_are_read_if_asked_for_and_the_leader_if_there_are_none(served: Served) -> None:
    served.a.log.append_batch(records(b"a")).result(60)
    read = {id(node): 0 for node in served.nodes}

    def counted(node: OneOfSeveral) -> None:
        real = node.reading

        def reading() -> Any:
            read[id(node)] += 1
            return real()

        node.reading = reading

    for node in served.nodes:
        counted(node)
    log = served.connect(read_from="replicas")
    spans = log.plan(log.start())
    assert read[id(served.a)] == 0
    served.lead(served.b)
    assert fetched(pickle.loads(pickle.dumps(spans)))["value"].to_pylist() == [b"a"]
    for server in served.servers[1:]:
        server.close()
    assert log.bounds().next == 1
    assert read[id(served.a)] == 1
    assert fetched(spans)["value"].to_pylist() == [b"a"], "a span is read wherever it can be"


def test_what_was_appended_here_is_read_here_although_replicas_lag(served: Served) -> None:
    served.b.watermark = served.c.watermark = 0
    log = served.connect(read_from="replicas")
    assert log.bounds().next == 0
    log.append(TABLE)
    assert log.bounds().next == 2


def test_a_stream_goes_on_at_another_node_without_a_gap_and_nothing_twice(served: Served) -> None:
    served.a.log.append_batch(records(b"a")).result(60)
    log = served.connect(failover_timeout=30.0)
    stream = log.read(follow=True, columns=["value"])
    assert next(stream).to_pydict() == {"value": [b"a"]}
    served.lead(served.b)
    served.servers[0].close()
    served.a.log.append_batch(records(b"b", b"c")).result(60)
    assert values_of([next(stream)]) == [b"b", b"c"]
    stream.close()
    assert values_of(log.read()) == [b"a", b"b", b"c"]
    assert values_of(log.read(1, upto=2)) == [b"b"]
    with pytest.raises(NotReady, match="does not reach offset 9"):
        list(log.read(upto=9))


def test_what_concerns_one_node_takes_its_own_address(served: Served) -> None:
    log = served.connect()
    for call in (log.promote, log.rebootstrap):
        with pytest.raises(Unsupported, match="concerns one node"):
            call()
    assert log.status().condition == "leading"
    assert log.topology().primary == "primary"


def test_addresses_of_two_logs_are_refused(tmp_path: Path) -> None:
    with ExitStack() as opened:
        urls = []
        for name in "ab":
            node = OneOfSeveral(tmp_path / name)
            opened.callback(node.close)
            urls.append(opened.enter_context(FlightNode(node)).url)
        log = opened.enter_context(RemoteLog(",".join(urls)))
        with pytest.raises(InvalidInput, match="give addresses of one log"):
            log.bounds()


# --- real nodes --------------------------------------------------------------------------------------------------


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[sl.node.Primary]:
    with sl.node.Primary.open(tmp_path / "primary", policy="local") as primary:
        yield primary


@pytest.mark.matrix
class TestSeveralAddresses(NodeLogContract):
    """The other address is that of a node that is down."""

    @pytest.fixture
    def log(self, primary: sl.node.Primary) -> Iterator[Log]:
        with sl.node.RemoteLog(f"grpc://127.0.0.1:1,{primary.url}") as log:
            yield log


def test_a_follower_and_a_writer_go_on_after_a_promotion(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"lease": f"file://{tmp_path}/lease", "policy": "ack_n(1)", "poll_seconds": 0.1}
    with ExitStack() as opened:
        a = opened.enter_context(sl.node.Primary.open(tmp_path / "a", name="a", **shared))
        c = opened.enter_context(sl.node.Replica.open(tmp_path / "c", name="c", nodes={"a": a.url}, **shared))
        nodes = {"a": a.url, "c": c.url}
        b = opened.enter_context(sl.node.Replica.open(tmp_path / "b", name="b", nodes=nodes, **shared))
        log = opened.enter_context(sl.open(",".join(node.url for node in (a, b, c))))
        append(log, b"1", number=0)
        for replica in (b, c):
            replica.reading(after=log.end(), timeout=30)
        sink = MemorySink()
        assert sl.follow(log, sink, upto="end").next == 1
        assert a.wait_until(lambda: a.commit_watermark(2) == 1, 30), "both have acknowledged it"
        a.close()
        b.promote()
        append(log, b"2", number=1)
        assert sl.follow(log, sink, upto="end").next == 2
        assert log.topology().primary == "b"


@pytest.mark.matrix
@pytest.mark.timeout(240)
@pytest.mark.parametrize("read_from", ["primary", "replicas"])
def test_the_leader_is_killed_while_a_follower_follows_and_a_writer_appends(tmp_path: Path, read_from: Any) -> None:
    with (
        Nest() as nest,
        ClusterOfProcesses(nest, tmp_path, automatic=True) as cluster,
        ThreadPoolExecutor(2) as pool,
        ExitStack() as stopping,
    ):
        cluster.begin()
        ports = {name: cluster.lines[name].port for name in cluster.names}
        url = "grpc://" + ",".join(f"127.0.0.1:{port}" for port in ports.values())
        stop, sink, writer, written = threading.Event(), MemorySink(), new_writer(), []
        stopping.callback(stop.set)
        log = stopping.enter_context(sl.node.RemoteLog(url, timeout=2.0, failover_timeout=60.0, read_from=read_from))

        def write() -> None:
            while not stop.is_set():
                append_marked(log, writer, len(written), count=3, timeout=20.0).ensure()
                written.append(len(written))

        def more(count: int = 20) -> None:
            enough = len(written) + count
            cluster.until(lambda: writing.done() or len(written) >= enough, "more is written")
            assert not writing.done(), writing.result()

        def follow() -> None:
            while not stop.is_set():
                with contextlib.suppress(NotFound):  # a slot younger than a heartbeat interval is created again
                    sl.follow(log, sink, "billing", stop=stop)

        writing = pool.submit(write)
        following = pool.submit(follow)
        for _ in range(2):
            more()
            killed = cluster.leader()
            cluster.kill(killed)
            more()
            cluster.start(killed)
        stop.set()
        writing.result(60)
        following.result(60)
        assert [slot.position for slot in log.slots.list()] == [sink.at.next], "its slot is that of the first primary"
        sl.follow(log, sink, "billing", upto="end")
        found = [mark_in(value) for _, _, value in sink.rows()]
        assert [(mark.number, mark.index) for mark in found] == [
            (number, index) for number in written for index in range(3)
        ]


def test_a_stream_does_not_go_on_in_a_log_that_was_rewound_and_is_longer_again(tmp_path: Path) -> None:
    """Three of the five records that were read are on the node that leads next, and others follow them there."""
    first = sl.node.Primary.open(tmp_path / "a", name="a")
    first.append_values([b"0", b"1", b"2"])
    with sl.node.Replica.open(tmp_path / "b", first.url, name="b") as replica:
        assert replica.wait_until(lambda: replica.committed == 3, 60.0)
    first.append_values([b"3", b"4"])
    replica = sl.node.Replica.open(tmp_path / "b", "grpc://127.0.0.1:9", name="b")
    with RemoteLog(f"{first.url},{replica.url}", failover_timeout=60.0) as remote:
        stream = remote.read(follow=True, columns=["value"])
        assert [next(stream).column("value").to_pylist() for _ in range(2)] == [[b"0", b"1", b"2"], [b"3", b"4"]]
        first.close()
        with replica.promote(force=True) as second:
            second.append_values([b"other 3", b"other 4", b"other 5"])
            with pytest.raises(Diverged, match="term"):
                next(stream)


def test_a_span_is_not_read_from_a_log_that_was_rewound_and_is_longer_again(tmp_path: Path) -> None:
    first = sl.node.Primary.open(tmp_path / "a", name="a")
    first.append_values([b"0", b"1", b"2"])
    with sl.node.Replica.open(tmp_path / "b", first.url, name="b") as replica:
        assert replica.wait_until(lambda: replica.committed == 3, 60.0)
    first.append_values([b"3", b"4"])
    with RemoteLog(first.url) as remote:
        both, lost = remote.plan(remote.start())
    first.close()
    with sl.node.Replica.open(tmp_path / "b", "grpc://127.0.0.1:9", name="b") as replica:
        second = replica.promote(force=True)
        second.append_values([b"other 3", b"other 4", b"other 5"])
        there = (second.url,)
        assert [batch.num_rows for batch in replace(both, urls=there).fetch()] == [3]
        with pytest.raises(Diverged, match=r"planned in term 1, and are of term \d+ there"):
            replace(lost, urls=there).fetch()
