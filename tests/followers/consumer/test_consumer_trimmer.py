"""The background trimmer of a consumer: runs at its interval, survives failures, and ends with the consumer."""

from __future__ import annotations

import gc
import logging
import threading

import pytest

from strandline.errors import Fenced, StorageError
from strandline.followers.consumer.consumer import Consumer
from strandline.log.object import ObjectLog, open_log
from strandline.log.queue.log_queue import ObjectLogQueue
from strandline.model.retention import SlotLimits
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.slots import append

SOON = 120.0


class Watched(ObjectLogQueue):
    """A queue that signals the end of a round."""

    def __init__(self, log: ObjectLog) -> None:
        super().__init__(log)
        self.rounds = threading.Semaphore(0)

    def trim(self, pause: float = 0.0) -> None:
        try:
            super().trim(pause)
        finally:
            self.rounds.release()


@pytest.fixture
def line() -> FaultyStore:
    log = open_log(PlainStore(), create=True, retention="consumed", env=Env(clock=ManualClock()))
    for number in range(4):
        append(log, b"%d" % number, number=number)
    return FaultyStore(log.store)


@pytest.fixture
def queue(line: FaultyStore) -> Watched:
    return Watched(open_log(line, env=Env(clock=ManualClock())))


@pytest.fixture
def clock() -> ManualClock:
    """Moves only the trimmer: the log has a clock of its own."""
    return ManualClock(auto=False)


def a_round(queue: Watched, clock: ManualClock, seconds: float = 300.0) -> None:
    assert clock.wait_until_blocked(1)
    clock.advance(seconds)
    assert queue.rounds.acquire(timeout=SOON)


def test_every_five_minutes_the_log_is_trimmed(queue: Watched, clock: ManualClock) -> None:
    with Consumer(queue, env=Env(clock=clock)) as consumer:
        consumer.next_descriptors(4)
        consumer.ack_through(1)
        assert clock.wait_until_blocked(1)
        clock.advance(299.0)
        assert queue._log.bounds().first == 0
        a_round(queue, clock, 1.0)
        assert queue._log.bounds().first == 2
        consumer.ack_through(3)
        a_round(queue, clock)
        assert queue._log.bounds().first == 2  # by the log's own clock someone has just done it
        queue._log.env.clock.advance(150.0)
        a_round(queue, clock)
        assert queue._log.bounds().first == 4


def test_the_interval_can_be_set(queue: Watched, clock: ManualClock) -> None:
    with Consumer(queue, env=Env(clock=clock), trim_every=7.0):
        for _ in range(3):
            a_round(queue, clock, 7.0)


def test_a_round_that_fails_is_logged_and_the_next_one_comes(
    queue: Watched, clock: ManualClock, line: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with Consumer(queue, env=Env(clock=clock)) as consumer:
        consumer.next_descriptors(4)
        consumer.ack_through(1)
        with caplog.at_level(logging.WARNING), line.down():
            a_round(queue, clock)
            assert clock.wait_until_blocked(1)
        (record,) = [record for record in caplog.records if "Trimming" in record.message]
        assert "is down" in record.message
        assert "tried again in 300 s" in record.message
        a_round(queue, clock)
        assert queue._log.bounds().first == 2


def test_closing_stops_it_at_once(queue: Watched, clock: ManualClock) -> None:
    consumer = Consumer(queue, env=Env(clock=clock))
    assert consumer._threads.trimmer.is_alive()
    consumer.close()
    assert not consumer._threads.trimmer.is_alive()
    clock.advance(3000.0)
    assert not queue.rounds.acquire(blocking=False)


def test_closing_stops_it_even_if_the_flush_fails(queue: Watched, clock: ManualClock, line: FaultyStore) -> None:
    consumer = Consumer(queue, env=Env(clock=clock))
    consumer.next_batch()
    consumer.ack(0)
    with line.down(), pytest.raises(StorageError):
        consumer.close()
    assert not consumer._threads.trimmer.is_alive()
    consumer.close()
    assert Consumer(queue, trim_every=None).next_to_ack == 1


def test_a_fenced_consumer_s_is_stopped_too(queue: Watched, clock: ManualClock) -> None:
    consumer = Consumer(queue, env=Env(clock=clock))
    consumer.next_batch()
    consumer.ack(0)
    Consumer(open_log(queue._log.store), trim_every=None)
    with pytest.raises(Fenced):
        consumer.close()
    assert not consumer._threads.trimmer.is_alive()


def test_a_consumer_that_was_never_closed_stops_its_trimmer(queue: Watched, clock: ManualClock) -> None:
    consumer = Consumer(queue, env=Env(clock=clock))
    thread = consumer._threads.trimmer
    del consumer
    gc.collect()
    thread.join(SOON)
    assert not thread.is_alive()


def new_threads(before: set[threading.Thread]) -> list[str]:
    return sorted(thread.name for thread in set(threading.enumerate()) - before)


def test_a_consumer_of_a_log_that_limits_nothing_has_no_heartbeat(queue: Watched) -> None:
    before = set(threading.enumerate())
    with Consumer(queue, trim_every=None):
        assert new_threads(before) == []
    with Consumer(queue):
        assert new_threads(before) == ["strandline-trimmer"]


def test_a_consumer_under_an_idle_limit_has_a_heartbeat_until_it_is_closed() -> None:
    log = open_log(PlainStore(), create=True, limits=SlotLimits(idle_seconds=30))
    before = set(threading.enumerate())
    with Consumer(log, trim_every=None):
        assert new_threads(before) == ["strandline-heartbeat"]
    assert new_threads(before) == []


def test_a_limit_that_is_set_later_starts_the_heartbeat_at_a_read(queue: Watched, clock: ManualClock) -> None:
    before = set(threading.enumerate())
    with Consumer(queue, trim_every=None, env=Env(clock=clock)) as consumer:
        open_log(queue._log.store).set_retention("consumed", limits=SlotLimits(idle_seconds=30))
        consumer.next_descriptors(1)
        assert new_threads(before) == []  # it was asked a moment ago
        clock.advance(20.0)
        consumer.next_descriptors(1)
        assert new_threads(before) == ["strandline-heartbeat"]
    assert new_threads(before) == []


def test_a_limit_that_is_set_later_starts_the_heartbeat_of_a_busy_consumer(queue: Watched, clock: ManualClock) -> None:
    before = set(threading.enumerate())
    with Consumer(queue, env=Env(clock=clock)):
        open_log(queue._log.store).set_retention("consumed", limits=SlotLimits(idle_seconds=30))
        assert clock.wait_until_blocked(1)
        clock.advance(20.0)
        looking = threading.Event()
        while new_threads(before) != ["strandline-heartbeat", "strandline-trimmer"]:
            looking.wait(0.01)
    assert new_threads(before) == []


def test_a_dropped_consumer_ends_a_heartbeat_that_was_started_later(queue: Watched, clock: ManualClock) -> None:
    consumer = Consumer(queue, trim_every=None, env=Env(clock=clock))
    open_log(queue._log.store).set_retention("consumed", limits=SlotLimits(idle_seconds=30))
    clock.advance(20.0)
    others = set(threading.enumerate())  # of consumers that other tests have left
    consumer.next_descriptors(1)
    (thread,) = [each for each in set(threading.enumerate()) - others if each.name == "strandline-heartbeat"]
    del consumer
    gc.collect()
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_round_updates_when_the_slot_was_last_seen(queue: Watched, clock: ManualClock) -> None:
    with Consumer(queue, env=Env(clock=clock)):
        before = queue._log.slots.get("default").last_seen
        queue._log.env.clock.advance(100.0)
        a_round(queue, clock)
        assert queue._log.slots.get("default").last_seen == before + 100_000_000


def test_a_round_of_a_fenced_consumer_trims_and_leaves_the_slot_alone(queue: Watched, clock: ManualClock) -> None:
    consumer = Consumer(queue, env=Env(clock=clock))
    with Consumer(open_log(queue._log.store, env=Env(clock=ManualClock())), trim_every=None) as other:
        other.next_descriptors(4)
        other.ack_through(2)
        before = queue._log.slots.get("default")
        a_round(queue, clock)
        assert queue._log.slots.get("default") == before
        assert queue._log.bounds().first == 3
    consumer.close()
