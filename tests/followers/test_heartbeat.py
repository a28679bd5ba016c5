"""Heartbeats of followers: a slot stays valid while its follower is idle or busy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import Fenced, TransientStorageError
from strandline.followers.run import follow
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.slots import heartbeat
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import SECOND, Cursor
from strandline.model.retention import SlotLimits
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.plain import PlainStore


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    looking = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        looking.wait(0.01)
    raise AssertionError("it did not come about")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    monkeypatch.setattr(heartbeat, "_TICK", 0.01)
    return ManualClock()


@pytest.fixture
def log(clock: ManualClock) -> ObjectLog:
    log = open_log(PlainStore(clock=clock), create=True, limits=SlotLimits(idle_seconds=30), env=Env(clock=clock))
    with log.producer() as producer:
        producer.produce([b"one"])
    return log


def survives(log: ObjectLog, clock: ManualClock, name: str) -> None:
    """Ten idle limits pass, in steps of a third, with a trim at each; the slot stays valid."""
    for _ in range(30):
        clock.advance(10)
        wait_for(lambda: clock.now() - log.slots.get(name).last_seen < 10 * SECOND)
        assert log.trim().invalidated == []


class Slow:
    """A sink that applies its first batch until it is released."""

    def __init__(self) -> None:
        self.at: Cursor | None = None
        self.busy, self.go_on = threading.Event(), threading.Event()

    def cursor(self, log_id) -> Cursor | None:
        return self.at

    def apply(self, batches: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        if batches.num_rows:
            self.busy.set()
            assert self.go_on.wait(120)
        self.at = upto


def test_a_follower_that_is_busy_with_one_batch_for_longer_than_the_limit_keeps_its_slot(log, clock):
    sink, stop = Slow(), threading.Event()
    thread = threading.Thread(target=follow, args=(log, sink, "busy"), kwargs={"stop": stop, "env": Env(clock=clock)})
    thread.start()
    try:
        assert sink.busy.wait(120)
        survives(log, clock, "busy")
    finally:
        stop.set()
        sink.go_on.set()
        clock.advance(1)
        thread.join(120)
    assert not thread.is_alive()
    assert (log.slots.get("busy").position, log.slots.get("busy").invalid) == (1, None)


@pytest.mark.parametrize("clock", [ManualClock(auto=False)])
def test_a_follower_that_has_nothing_to_do_keeps_its_slot_under_a_limit_of_half_a_minute(log, clock, monkeypatch):
    monkeypatch.setattr(heartbeat, "_TICK", 0.01)
    sink, stop = Slow(), threading.Event()
    sink.go_on.set()
    thread = threading.Thread(target=follow, args=(log, sink, "idle"), kwargs={"stop": stop, "env": Env(clock=clock)})
    thread.start()
    try:
        wait_for(lambda: [slot.position for slot in log.slots.list()] == [1] or clock.advance(1), seconds=120)
        survives(log, clock, "idle")
    finally:
        stop.set()
        wait_for(lambda: not thread.is_alive() or clock.advance(1), seconds=120)
    assert log.slots.get("idle").invalid is None


def test_a_consumer_that_is_busy_with_one_batch_keeps_its_slot_without_trimming(log, clock):
    with sl.Consumer(log, slot="queue", trim_every=None, env=Env(clock=clock)) as consumer:
        batch = consumer.next_batch()
        survives(log, clock, "queue")
        consumer.ack(batch.sequence)
    assert log.slots.get("queue").position == 1


def test_a_dead_consumer_is_invalidated(log, clock):
    consumer = sl.Consumer(log, slot="queue", trim_every=None, env=Env(clock=clock))
    consumer.close()
    found = []
    for _ in range(6):
        clock.advance(10)
        found += log.trim().invalidated
    assert [slot.name for slot in found] == ["queue"]


class Fickle:
    def __init__(self, *errors: Exception) -> None:
        self.errors, self.touched = list(errors), 0

    def advance(self, to: Cursor) -> None:
        raise AssertionError

    def touch(self) -> None:
        self.touched += 1
        if self.errors:
            raise self.errors.pop(0)


def test_a_heartbeat_that_fails_is_repeated(clock):
    slot = Fickle(TransientStorageError("once"))
    with SlotHeartbeat(slot, object(), env=Env(clock=clock)):
        clock.advance(60)
        wait_for(lambda: slot.touched == 2)


def test_a_slot_that_was_taken_over_gets_no_more_heartbeats(clock):
    slot = Fickle(Fenced("by another"))
    with SlotHeartbeat(slot, object(), env=Env(clock=clock)) as beating:
        clock.advance(60)
        wait_for(lambda: not beating._thread.is_alive())
    assert slot.touched == 1


def test_a_new_limit_counts_from_the_next_heartbeat_on(log, clock):
    log.slots.create("a", 0)
    with SlotHeartbeat(log.slots.claim("a", "me"), log, env=Env(clock=clock)) as beating:
        assert beating._every == 10
        open_log(log.store, env=Env(clock=clock)).set_retention("consumed", SlotLimits(idle_seconds=3))
        clock.advance(10)
        wait_for(lambda: beating._every == 1)
