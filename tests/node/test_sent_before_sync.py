"""What is sent while the primary's disk syncs it: nothing is done with it before that is said to be durable."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from strandline.errors import CorruptData, NotReady
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch
from strandline.model.node import Heartbeat
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.server.server import FlightNode
from strandline.node.lead.feed import TAKEN_BYTES, LogFeed
from strandline.node.lead.policies import AckN
from strandline.node.messages import Reached
from strandline.node.node import Node
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions
from strandline.node.replicate import incoming as arrivals
from strandline.node.replicate.incoming import IncomingBatches
from strandline.storage.env import Env
from strandline.testing.faulty import Crash
from strandline.testing.simdisk import CrashMode
from tests.cluster.machine import WatchedDisk
from tests.log.wal.workload import HeldSyncs
from tests.node.flight.flight_double import until
from tests.node.nodes_by_hand import Cluster, records

SOON = 120.0
LOG = UUID(int=3)


def heartbeat(durable):
    return Heartbeat(term=1, term_start=0, durable=durable, committed=0, epoch=1)


class TestWhatAFeedGives:
    @pytest.fixture
    def disk(self):
        return HeldSyncs()

    @pytest.fixture
    def log(self, tmp_path, disk):
        with WalLog.open(str(tmp_path / "log"), env=Env(disk=disk)) as log:
            yield log
            disk.release()

    def feed(self, log, *, is_awaited=True):
        self.sent = []
        feed = LogFeed(
            log, log.end(), lambda: heartbeat(log.bounds().next), self.sent.append, is_awaited=lambda: is_awaited
        )
        log.append_batch(records(b"before")).result(SOON)
        assert ends(feed.take(SOON)) == [1]
        return feed

    def test_is_what_is_being_synced_and_then_that_it_is_durable(self, log, disk):
        feed = self.feed(log)
        disk.hold()
        handle = log.append_batch(records(b"a", b"b"))
        assert ends(feed.take(SOON)) == [3]
        assert (feed.heartbeat.durable, self.sent) == (1, [1, 3])
        assert feed.take(0.01) == []
        assert feed.heartbeat.durable == 1
        with ThreadPoolExecutor() as pool:
            word = pool.submit(feed.take, 100 * SOON)
            disk.release()
            assert word.result(SOON) == []
        assert feed.heartbeat.durable == 3
        handle.result(SOON)
        assert feed.take(0.01) == []

    def test_is_durable_at_once_if_it_was_so_before_the_wait(self, log, disk):
        feed = self.feed(log)
        disk.hold()
        handle = log.append_batch(records(b"a"))
        assert ends(feed.take(SOON)) == [2]
        disk.release()
        handle.result(SOON)
        with ThreadPoolExecutor() as pool:
            assert pool.submit(feed.take, 100 * SOON).result(SOON) == []
        assert feed.heartbeat.durable == 2

    def test_is_durable_when_nobody_waits_for_replicas(self, log, disk):
        feed = self.feed(log, is_awaited=False)
        disk.hold()
        handle = log.append_batch(records(b"a"))
        assert disk.waiting.wait(SOON)
        assert feed.take(0.01) == []
        disk.release()
        handle.result(SOON)
        assert ends(feed.take(SOON)) == [2]
        assert feed.heartbeat.durable == 2

    def test_is_a_little_of_a_large_group_and_the_rest_when_that_is_durable(self, tmp_path, disk):
        with (
            WalLog.open(str(tmp_path / "log"), background=False, env=Env(disk=disk)) as log,
            ThreadPoolExecutor() as pool,
        ):
            feed = self.feed(log)
            handles = [log.append_batch(records(b"x" * (TAKEN_BYTES // 3))) for _ in range(5)]
            disk.hold()
            committing = pool.submit(handles[-1].result)
            assert ends(feed.take(SOON)) == [2, 3]
            assert feed.take(0.01) == []
            disk.release()
            committing.result(SOON)
            taken = []
            while len(taken) < 3:
                taken += ends(feed.take(SOON))
            assert taken == [4, 5, 6]


def ends(batches):
    return [batch.next for batch in batches]


class Scripted:
    """A feed that gives what a test says."""

    def __init__(self, *turns):
        self.turns, self.heartbeat = list(turns), heartbeat(0)

    def wait(self, timeout):
        del timeout
        return 0

    def take(self, timeout):
        del timeout
        if not self.turns:
            return []
        durable, batches = self.turns.pop(0)
        self.heartbeat = heartbeat(durable)
        return batches

    def close(self):
        """Nothing to let go of."""


def arriving(first, size=1):
    return LogBatch(first, 1, 0, None, (records(b"v" * size),))


def arrivals_of(*turns):
    return IncomingBatches(LOG, Scripted(*turns), lambda: 1, lambda *_: True)


def given(found, since):
    return ends(found.arrived(Cursor(LOG, since, 1)))


class TestWhatArrives:
    def test_is_kept_until_the_primary_says_that_its_disk_has_it(self):
        found = arrivals_of((0, [arriving(0), arriving(1)]), (0, []), (1, []), (2, [arriving(2)]), (3, []))
        assert given(found, 0) == []
        assert not found.wait(Cursor(LOG, 0), 1)
        assert found.wait(Cursor(LOG, 0), 1)
        assert given(found, 0) == [1]
        assert found.wait(Cursor(LOG, 1), 1)
        assert given(found, 1) == [2]
        assert found.wait(Cursor(LOG, 2), 1)
        assert given(found, 2) == [3]

    def test_is_waited_for_once_more_when_it_is_ahead(self):
        found = arrivals_of((0, [arriving(0)]), (1, []))
        assert found.wait(Cursor(LOG, 0), 1)
        assert given(found, 0) == [1]

    def test_is_all_given_that_the_disk_has(self):
        found = arrivals_of((2, [arriving(0), arriving(1), arriving(2)]))
        assert given(found, 0) == [1, 2]

    def test_is_not_kept_without_end(self, monkeypatch):
        monkeypatch.setattr(arrivals, "AHEAD_BYTES", 1000)
        assert given(arrivals_of((0, [arriving(0, 2000)])), 0) == []
        with pytest.raises(CorruptData, match="everything below 0 durable has sent everything below 2"):
            given(arrivals_of((0, [arriving(0, 600), arriving(1, 600)])), 0)


class TestWhatIsLost:
    """A primary loses its power while its disk syncs something that its replica was sent, and leads on in its term."""

    def test_records_that_the_primary_lost_are_on_no_node(self):
        pair = self.tell()
        assert pair.content("b") == [(0, b"kept")]
        pair.start("a", lead=True)
        pair.append(b"written instead")
        pair.settled("b")
        assert pair.content("b") == pair.content("a") == [(0, b"kept"), (1, b"written instead")]
        pair.close()

    def test_would_be_on_a_replica_that_does_not_wait_for_the_primarys_durable_end(self, monkeypatch):
        def at_once(self, heartbeat):
            del heartbeat
            received, self._received = self._received, ()
            return received

        monkeypatch.setattr(IncomingBatches, "_durable", at_once)
        pair = self.tell()
        assert pair.nodes["b"].condition == "diverged"
        assert pair.content("b") == [(0, b"kept"), (1, b"lost")]
        with pytest.raises(NotReady, match=r"a led last, but b has more records \(everything below 2, against 1\)"):
            pair.start("a", lead=True)
        pair.close()

    def tell(self):
        disk = WatchedDisk(1)
        disks = {"a": disk, "b": WatchedDisk(2)}
        pair = Cluster(Path("/nodes"), policy="ack_n(1)", leased=False, names="ab", disks=disks)
        pair.start("a", create=True, lead=True)
        pair.start("b")
        pair.settled("b")
        pair.append(b"kept")
        pair.settled("b")
        primary = pair.nodes["a"].primary
        seen = []

        def syncing():
            disk.asked = None
            for _ in range(5):
                pair.nodes["b"].step()
            seen.append((primary.log.bounds().next, primary.registry.replica("b").sent))
            disk.stop(len(disk.calls))

        handle = primary.submit(records(b"lost"))
        disk.asked = syncing
        with pytest.raises(Crash):
            handle._handle.result()
        assert seen == [(1, 2)]
        del pair.nodes["a"]
        disk.crash(CrashMode.NOTHING)
        pair.nodes["b"].replica.disconnect()
        return pair


def stepped(node, stop):
    """Let a node do one thing after the other until it is told to stop."""
    while not stop.is_set():
        stop.wait(node.step())


class TestOverFlight:
    def test_an_append_is_on_its_way_while_the_primarys_disk_syncs_it(self, tmp_path):
        disk = HeldSyncs()
        with ExitStack() as opened:
            a = opened.enter_context(
                Node(
                    NodeFolder.open(str(tmp_path / "a"), "a", env=Env(disk=disk)),
                    NodeOptions(),
                    connect=FlightUpstream,
                    create=True,
                    lead=True,
                )
            )
            server = opened.enter_context(FlightNode(SimpleNamespace(node=a), heartbeat_seconds=0.05))
            copy = NodeFolder.open(str(tmp_path / "b"), "b")
            b = opened.enter_context(Node(copy, NodeOptions(), connect=FlightUpstream, upstream=server.url))
            stop = threading.Event()
            pool = opened.enter_context(ThreadPoolExecutor())
            pool.submit(stepped, b, stop)
            opened.callback(stop.set)
            opened.callback(disk.release)
            primary = a.primary
            until(lambda: b.condition == "following")
            primary.append(records(b"before"), policy=AckN(1), timeout=SOON).ensure()
            disk.hold()
            appending = pool.submit(primary.append, records(b"a"), policy=AckN(1), timeout=SOON)
            until(lambda: b.position.next == 1 and b.replica._follower.log._received)
            assert primary.log.bounds().next == b.position.next == 1
            assert primary.registry.replica("b").sent == 2
            disk.release()
            assert isinstance(appending.result(SOON).outcome, Reached)
            assert primary.log.bounds().next == 2
            until(lambda: b.position.next == 2)  # it acknowledges first
