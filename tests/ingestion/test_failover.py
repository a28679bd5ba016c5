"""Ingests into and out of nodes as processes whose primary is killed meanwhile."""

from __future__ import annotations

import contextlib
import threading
from contextlib import ExitStack

import pytest

import strandline as sl
from strandline.log.memory import MemoryLog
from tests.ingestion.sources import append, changes, content, position
from tests.node.processes import ClusterOfProcesses

pytestmark = pytest.mark.matrix
SMALL = sl.followers.Batching(records=100)


@pytest.fixture
def start(nest, tmp_path):
    with ExitStack() as made:
        yield lambda **options: made.enter_context(ClusterOfProcesses(nest, tmp_path, **options))


def address(cluster):
    return ",".join(f"127.0.0.1:{cluster.lines[name].port}" for name in cluster.names)


@contextlib.contextmanager
def ingesting(source, target):
    """An ingest that follows, in a thread; raises what it raised."""
    stop, failures = threading.Event(), []

    def run():
        try:
            sl.ingest(source, target, follow=True, stop=stop, batching=SMALL)
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failures
    finally:
        stop.set()
        thread.join(120)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def grow(source, count, number):
    for each in range(number, number + count):
        append(source, changes(50, each * 50), number=each)


def test_the_primary_of_the_target_is_killed_again_and_again_and_nothing_is_doubled_or_lost(start):
    cluster = start(automatic=True)
    cluster.begin()
    source = MemoryLog()
    grow(source, 20, 0)
    with sl.open(f"grpc://{address(cluster)}") as target:
        with ingesting(source, target) as failures:
            for turn in range(3):
                old = cluster.leader()
                grow(source, 20, 20 + 20 * turn)
                wanted = 500 + 700 * turn
                cluster.until(lambda n=wanted: failures or (position(source, target) or 0) >= n, "it goes on")
                cluster.kill(old)
                cluster.until(lambda: failures or cluster.leader(), "another one leads")
                cluster.start(old)
            cluster.until(lambda: failures or position(source, target) == 4000, "everything is ingested")
        assert content(target).equals(content(source))
        assert sl.ingest(source, target).records == 0


def test_the_primary_of_the_source_is_killed_and_the_copy_lacks_and_doubles_nothing(start, tmp_path):
    cluster = start(automatic=True)
    cluster.begin()
    copy = sl.open(tmp_path / "copy", create=True)
    with sl.open(f"grpc://{address(cluster)}") as source:
        grow(source, 10, 0)
        with ingesting(source, copy) as failures:
            cluster.until(lambda: failures or position(source, copy), "it has begun")
            old = cluster.leader()
            cluster.kill(old)
            grow(source, 10, 10)
            cluster.start(old)
            cluster.until(lambda: failures or position(source, copy) == 1000, "everything is ingested")
        assert content(copy).equals(content(source))
