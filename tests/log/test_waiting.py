"""Waiting for a log by polling: rarely when it is idle, however short the calls are."""

import pytest

from strandline.log.object import open_log
from strandline.log.read.reading import HeadPoller
from strandline.model.cursor import Bounds
from strandline.model.head import WriterId
from strandline.storage.clock import CHANCE
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.plain import PlainStore
from strandline.testing.sinks import changes


class Looked:
    """A log that counts its polls."""

    def __init__(self, log):
        self.log, self.looks = log, 0

    def bounds(self) -> Bounds:
        self.looks += 1
        return self.log.bounds()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def log(clock):
    return open_log(PlainStore(), create=True, env=Env(clock=clock))


def append(log):
    log.append(changes(0, (b"k", b"v")).drop_columns("offset"), writer=WriterId(CHANCE.uuid()), number=0).result()


def idle(waiter, looked, clock, *, turn, seconds=60.0):
    """The number of polls in a minute of waiting."""
    end, began, before = looked.log.end(), clock.monotonic(), looked.looks
    while clock.monotonic() - began < seconds:
        assert not waiter.wait(looked.bounds, end, turn, clock)
    return looked.looks - before


def test_waiting_in_short_turns_polls_no_more_often_than_in_long_ones(log, clock):
    short, long = Looked(log), Looked(log)
    few = idle(HeadPoller(), long, clock, turn=60.0)
    assert few <= 60 * 4 + 30
    assert idle(HeadPoller(), short, clock, turn=0.05) <= few + 2


def test_a_record_after_a_long_wait_is_seen_within_a_quarter_of_a_second(log, clock):
    waiter, looked = HeadPoller(), Looked(log)
    idle(waiter, looked, clock, turn=0.05)
    end = log.end()
    append(log)
    began = clock.monotonic()
    while not waiter.wait(looked.bounds, end, 0.05, clock):
        pass
    assert clock.monotonic() - began <= 0.25


def test_after_something_came_it_polls_often_again(log, clock):
    waiter, looked = HeadPoller(), Looked(log)
    idle(waiter, looked, clock, turn=0.05)
    append(log)
    looked.looks = 0
    assert not waiter.wait(looked.bounds, log.end(), 0.05, clock)
    assert looked.looks > 3


def test_without_a_timeout_it_polls_at_once(log, clock):
    waiter, looked = HeadPoller(), Looked(log)
    idle(waiter, looked, clock, turn=0.05)
    end = log.end()
    append(log)
    assert waiter.wait(looked.bounds, end, 0.0, clock)
