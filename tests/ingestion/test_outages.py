"""Ingests that follow a source over outages of the source's server, and of the target."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import strandline as sl
from strandline.errors import Diverged, OutOfOrder, StrandlineError, TransientStorageError
from strandline.ingestion import run as ingestion
from strandline.log.memory import MemoryLog
from strandline.storage.retry import Backoff
from tests.ingestion import test_jetstream as jetstream
from tests.ingestion import test_kafka as kafka
from tests.ingestion.sources import append, changes, content, fill, position
from tests.servers import KafkaServer, Mortal, NatsServer, started


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def following(source: Any, target: Any, **options: Any) -> Iterator[threading.Event]:
    """An ingest in a thread; leaving the block stops it, and raises what ended it before."""
    stop, failed = threading.Event(), []

    def work() -> None:
        try:
            sl.ingest(source, target, follow=True, stop=stop, **options)
        except StrandlineError as error:
            failed.append(error)
            stop.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(120)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def interrupted(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    return lambda: "was interrupted, and is tried again" in caplog.text


class _FailingAppends:
    """A log whose appends fail while ``failing`` is set; ``lost``: after they have been stored."""

    def __init__(self, *, lost: bool) -> None:
        self._log = MemoryLog()
        self._lost = lost
        self.failing = threading.Event()
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, *batch: Any, **numbered: Any) -> Any:
        if not self.failing.is_set():
            return self._log.append(*batch, **numbered)
        self.failures += 1
        if self._lost:
            self._log.append(*batch, **numbered).result()
        raise TransientStorageError("The store is away.")


@pytest.mark.parametrize("lost", [False, True])
def test_a_target_that_is_away_for_longer_than_an_append_is_tried_is_followed_into_when_it_is_back(
    monkeypatch, caplog, lost
):
    monkeypatch.setattr("strandline.ingestion.log_sink.RETRIES", Backoff(attempts=2, base=0.01))
    source, target = MemoryLog(), _FailingAppends(lost=lost)
    fill(source, batches=2)
    with following(source, target):
        eventually(lambda: target.bounds().next == 50)
        target.failing.set()
        append(source, changes(25, 50), number=2)
        eventually(interrupted(caplog))
        append(source, changes(25, 75), number=3)  # the next try has another range than the failed one
        target.failing.clear()
        eventually(lambda: target.bounds().next >= 100)
    assert content(target).equals(content(source))
    assert position(source, target) == 100
    assert target.failures


def test_an_outage_without_end_ends_the_ingest_with_its_reason(monkeypatch):
    monkeypatch.setattr("strandline.ingestion.log_sink.RETRIES", Backoff(attempts=1, base=0.01))
    monkeypatch.setattr(ingestion, "PATIENCE", Backoff(attempts=3, base=0.01))
    source, target = MemoryLog(), _FailingAppends(lost=False)
    fill(source)
    target.failing.set()
    with pytest.raises(TransientStorageError, match="The store is away"):
        sl.ingest(source, target, follow=True)
    assert target.failures == 3


def test_an_error_that_trying_again_cannot_mend_ends_the_ingest_at_once(monkeypatch):
    class Overtaken(_FailingAppends):
        def append(self, *batch: Any, **numbered: Any) -> Any:
            self.failures += 1
            raise OutOfOrder("Another ingest was faster.")

    source, target = MemoryLog(), Overtaken(lost=False)
    fill(source)
    with pytest.raises(StrandlineError, match="was faster"):
        sl.ingest(source, target, follow=True)
    assert target.failures == 1


class _AwaySometimes:
    """A log that cannot be read while ``away`` is set."""

    def __init__(self, log: Any) -> None:
        self.log = log
        self.away = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.away.is_set() and name in ("plan", "wait", "bounds", "end"):
            raise TransientStorageError("The source is away.")
        return getattr(self.log, name)


@pytest.mark.parametrize("ends_alike", [False, True])
def test_a_source_that_returns_with_another_history_is_not_continued(tmp_path, caplog, ends_alike):
    place, backup = tmp_path / "source", tmp_path / "backup"
    source = sl.open(place, create=True)
    append(source, changes(25), number=0)
    shutil.copytree(place, backup)
    append(source, changes(25, 25), number=1)
    seen, target = _AwaySometimes(source), MemoryLog()

    def outage(stop: threading.Event) -> None:
        eventually(lambda: target.bounds().next == 50 or stop.is_set())
        seen.away.set()
        eventually(interrupted(caplog))
        shutil.rmtree(place)
        shutil.copytree(backup, place)
        restored = sl.open(place)
        # With the same record at the end, only the cursor that the ingest remembers tells them apart.
        append(restored, changes(24, 100), writer=8, number=0)
        append(restored, changes(1, 49 if ends_alike else 124), writer=8, number=1)
        append(restored, changes(10, 125), writer=8, number=2)
        seen.log = restored
        seen.away.clear()
        eventually(lambda: stop.is_set() or target.bounds().next > 50)

    with pytest.raises(Diverged), following(seen, target) as stop:
        outage(stop)
    assert target.bounds().next == 50


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    with started(NatsServer()) as server:
        yield server


@pytest.fixture
def broker() -> Iterator[KafkaServer]:
    broker = KafkaServer()
    broker.session_seconds = 6.0  # so long a killed one is kept out when it is started again
    with started(broker) as server:
        yield server


def _survives(
    server: Mortal, source: str, target: MemoryLog, publish: Callable[[int, int], None], caplog: Any, **options: Any
) -> None:
    with following(source, target, source_options={"timeout": 2.0, **options}) as stop:
        publish(10, 0)
        eventually(lambda: target.bounds().next == 10)
        server.kill()
        eventually(lambda: interrupted(caplog)() or stop.is_set())
        server.revive()
        publish(5, 10)
        eventually(lambda: target.bounds().next == 15 or stop.is_set())
    assert [row["key"].rpartition(b".")[2] for row in content(target).to_pylist()] == [
        b"k%d" % number for number in range(15)
    ]


@pytest.mark.matrix
def test_a_killed_nats_server_is_followed_again_when_it_is_back(nats, caplog):
    pytest.importorskip("nats")
    jetstream.with_stream(nats.url, lambda js: js.add_stream(name="orders", subjects=["orders.>"]))
    _survives(
        nats,
        f"{nats.url}/orders",
        MemoryLog(),
        lambda count, first: jetstream.publish(nats.url, "orders", count, first),
        caplog,
    )


@pytest.mark.matrix
def test_a_killed_kafka_broker_is_followed_again_when_it_is_back(broker, caplog):
    pytest.importorskip("confluent_kafka")
    kafka.create(broker, "orders")
    _survives(
        broker,
        f"kafka://{broker.bootstrap}/orders",
        MemoryLog(),
        lambda count, first: kafka.produce(broker, "orders", count, first=first),
        caplog,
    )
