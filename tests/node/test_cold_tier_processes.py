"""Nodes as processes, whose log has a cold tier: whatever is killed while it tiers, nothing is lost or twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import StrandlineError
from strandline.log.wal.read.reading import WalReader
from strandline.testing.sinks import MemorySink
from tests.node.flight.recording_client import Recorder, check, mark_in
from tests.node.processes import ClusterOfProcesses, Nest

Start = Callable[..., ClusterOfProcesses]
BUSY = {"pause": 0.01, "linger": 0.0, "target": 2000}
"""Settings of a tierer that copies all the time."""


@pytest.fixture
def start(nest: Nest, tmp_path: Path) -> Iterator[Start]:
    """Makes clusters, which do not outlive the test; what they logged is shown if it fails."""
    cold = {"cold": (tmp_path / "cold").as_uri(), "tiering": BUSY, "retention": "consumed"}
    with ExitStack() as made:
        yield lambda **options: made.enter_context(ClusterOfProcesses(nest, tmp_path, **cold, **options))


def hot_first(cluster: ClusterOfProcesses, name: str) -> int:
    return WalReader(cluster.data(name)).bounds().first


@pytest.mark.parametrize("times", [pytest.param(3, marks=pytest.mark.matrix), pytest.param(20, marks=pytest.mark.slow)])
def test_a_primary_that_is_killed_while_it_tiers_is_replaced_and_both_tiers_are_whole(start: Start, times: int) -> None:
    cluster = start(automatic=True)
    cluster.begin()
    with Recorder(cluster) as recorder:
        for _ in range(times):
            old = cluster.leader()
            before = hot_first(cluster, old)
            cluster.until(lambda: hot_first(cluster, old) > before, "it tiers and trims")  # noqa: B023 - waited for here
            cluster.kill(old)
            recorder.more()
            cluster.start(old)
            recorder.more()
    assert len(recorder.by) >= 2
    check(cluster, recorder, tiered=True)


@pytest.mark.matrix
def test_a_follower_reads_on_through_failovers_while_what_it_reads_moves_to_the_cold_tier(start: Start) -> None:
    cluster = start(automatic=True)
    cluster.begin()
    sink = MemorySink()
    stop = threading.Event()

    def follow() -> None:
        with sl.open(cluster.url) as log:
            while not stop.is_set():
                try:
                    sl.follow(log, sink, stop=stop)
                except StrandlineError as error:
                    if not error.retryable:
                        raise
                    stop.wait(0.05)

    thread = threading.Thread(target=follow)
    with Recorder(cluster) as recorder:
        recorder.more(60)
        thread.start()
        for _ in range(2):
            old = cluster.leader()
            cluster.kill(old)
            recorder.more()
            cluster.start(old)
            recorder.more()
    cluster.settled()
    end = cluster.clients[cluster.leader()].end().next
    cluster.until(lambda: not thread.is_alive() or (sink.at is not None and sink.at.next == end), "it has followed")
    stop.set()
    thread.join()
    found = check(cluster, recorder, tiered=True)
    assert [mark_in(value) for _, _, value in sink.rows() if value is not None] == found


@pytest.mark.matrix
def test_all_nodes_are_killed_at_once_and_both_tiers_are_whole(start: Start) -> None:
    cluster = start(automatic=True)
    leader = cluster.begin()
    with Recorder(cluster) as recorder:
        cluster.until(lambda: hot_first(cluster, leader) > 0, "it tiers and trims")
        recorder.more()
        for name in cluster.names:
            cluster.kill(name)
        for name in cluster.names:
            cluster.start(name)
        recorder.more(60)
    check(cluster, recorder, tiered=True)
