"""Ingests that are stopped at every operation of the target's disk or store, and started again."""

from __future__ import annotations

import contextlib
import itertools
import logging

import pytest

import strandline as sl
from strandline.errors import StrandlineError
from strandline.log.memory import MemoryLog
from strandline.log.object.log import open_log
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Crash, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.simdisk import crash_everywhere, fail_everywhere
from tests.ingestion.sources import append, changes, content, fill, position
from tests.log.wal.workload import open_on
from tests.matrix_cases import sampled, some

SOURCE = MemoryLog(env=Env(chance=SeededChance(5)))
fill(SOURCE, batches=3, count=10)
LIMITS = sl.followers.Batching(records=10)
SEEDS = itertools.count(100)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """A torn tail is told to the log each time, and there are many."""
    caplog.set_level(logging.ERROR)


def ingest_into_wal(disk, notes):
    """Ingest, between records of another writer, and note how far the target promised to have come."""
    log = open_on(disk, roll_bytes=1500)
    sl.ingest(SOURCE, log, batching=LIMITS, on_progress=lambda progress: notes.append(progress.next))
    log.close()


def check_wal(disk, notes):
    log = open_on(disk, roll_bytes=1500)
    held = log.bounds().next
    assert held == (position(SOURCE, log) or 0) >= max(notes, default=0)
    assert content(log).equals(content(SOURCE).slice(0, held).combine_chunks())
    disk.kill()


@pytest.mark.parametrize("every", sampled(60))
def test_a_crash_at_every_disk_operation_of_the_target_doubles_and_loses_nothing(every):
    explored = crash_everywhere(ingest_into_wal, check_wal, every=every)
    assert explored.states > 200 / every


@pytest.mark.parametrize("every", sampled(30))
def test_a_failing_disk_of_the_target_doubles_and_loses_nothing(every):
    explored = fail_everywhere(ingest_into_wal, check_wal, limit=3, every=every)
    assert explored.states > 50 / every


def object_target(store):
    """As a process of its own opens it: no two of them make the same names."""
    return open_log(store, create=True, env=Env(clock=ManualClock(), chance=SeededChance(next(SEEDS))))


def ingest_into_store(store):
    sl.ingest(SOURCE, object_target(store), batching=LIMITS, env=Env(clock=ManualClock()))


def operations():
    store = FaultyStore(PlainStore())
    ingest_into_store(store)
    return range(len(store.log))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", some(operations(), 4))
def test_a_crash_at_every_operation_of_the_store_doubles_and_loses_nothing(number, after):
    inner = PlainStore()
    crashing = FaultyStore(inner)
    crashing.crash_at(number, after=after)
    with contextlib.suppress(Crash):
        ingest_into_store(crashing)
    ingest_into_store(inner)
    assert content(object_target(inner)).equals(content(SOURCE))
    assert position(SOURCE, object_target(inner)) == 30


@pytest.mark.parametrize("seed", some(range(40), 3))
def test_a_store_that_loses_answers_delays_writes_and_throttles_doubles_and_loses_nothing(seed):
    store = FaultyStore(PlainStore(), seed=seed, faults=Faults(before=0.1, after=0.15, late=0.1, throttled=0.05))
    for _ in range(60):
        try:
            ingest_into_store(store)
        except StrandlineError:
            store.land_late()
        else:
            break
    store.heal()
    store.land_late()
    ingest_into_store(store)
    assert content(object_target(store)).equals(content(SOURCE))


@pytest.mark.parametrize("number", some(range(12), 3))
def test_a_crash_at_every_read_of_the_source_leaves_a_prefix_which_the_next_run_completes(number):
    inner = PlainStore()
    source = open_log(inner, create=True, env=Env(clock=ManualClock(), chance=SeededChance(4)))
    fill(source, batches=6, count=10)
    faulty = FaultyStore(inner)
    target = MemoryLog()
    faulty.crash_at(number)
    with contextlib.suppress(Crash):
        sl.ingest(open_log(faulty, env=Env(clock=ManualClock())), target, batching=LIMITS, env=Env(clock=ManualClock()))
    held = target.bounds().next
    assert held == (position(source, target) or 0)
    assert content(target).equals(content(source).slice(0, held).combine_chunks())
    sl.ingest(source, target)
    assert content(target).equals(content(source))


def test_other_writers_of_a_crashing_target_lose_nothing_either():
    inner = PlainStore()
    for number in range(0, 40, 5):
        crashing = FaultyStore(inner)
        crashing.crash_at(number)
        append(object_target(inner), changes(1, 5000 + number), writer=11, number=number // 5)
        try:
            ingest_into_store(crashing)
        except Crash:
            continue
    ingest_into_store(inner)
    target = object_target(inner)
    assert target.bounds().next == 30 + 8
    own = [row for row in content(target).to_pylist() if row not in content_of_others()]
    assert own == content(SOURCE).to_pylist()


def content_of_others():
    return [row for number in range(0, 40, 5) for row in changes(1, 5000 + number).to_pylist()]
