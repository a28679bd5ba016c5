"""Each metric of docs/metrics.md counts what its description says, and every metric is documented."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Self

import pytest
from prometheus_client import REGISTRY

import strandline as sl
from strandline.errors import TransientStorageError
from strandline.log.object.log import ObjectLog, open_log
from strandline.model.retention import SlotLimits
from strandline.storage import metrics
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Call, FaultyStore
from strandline.testing.plain import PlainStore

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


class Moved:
    """The change of metrics within a block."""

    def __init__(self, *names: str, **labels: str) -> None:
        self._names, self._labels = names, labels

    def __enter__(self) -> Self:
        self._before = [value(name, **self._labels) for name in self._names]
        return self

    def __exit__(self, *_: object) -> None:
        after = [value(name, **self._labels) for name in self._names]
        self.by = [now - then for now, then in zip(after, self._before, strict=True)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def place() -> PlainStore:
    return PlainStore()


@pytest.fixture
def log(place: PlainStore, clock: ManualClock) -> ObjectLog:
    return open_log(place, create=True, retention="consumed", env=Env(clock=clock))


def produce(log: ObjectLog, *values: bytes) -> None:
    with log.producer() as producer:
        producer.produce(values)


def test_listings_of_producers_are_counted_and_timed(log: ObjectLog):
    names = ("strandline_batches_written_total", "strandline_records_written_total", "strandline_flush_seconds_count")
    with Moved(*names, "strandline_bytes_written_total") as moved:
        produce(log, b"a", b"b")
    assert moved.by[:3] == [1, 2, 1]
    assert moved.by[3] > 100


def test_fetches_are_counted_and_timed(log: ObjectLog):
    produce(log, b"a", b"b", b"c")
    names = ("strandline_batches_fetched_total", "strandline_records_fetched_total", "strandline_fetch_seconds_count")
    with Moved(*names, "strandline_bytes_fetched_total") as moved:
        list(log.read())
    assert moved.by == [1, 3, 1, log.head().tail[0].size]


def test_trims_are_counted_and_timed(log: ObjectLog, place: PlainStore):
    produce(log, b"a", b"b")
    size = log.head().tail[0].size
    log.slots.create("done", 2)
    place.put(f"batches/{0:016d}/{'a' * 32}.batch", b"orphan")
    names = ("strandline_batches_trimmed_total", "strandline_records_trimmed_total", "strandline_trim_seconds_count")
    orphans = ("strandline_orphans_deleted_total", "strandline_orphan_bytes_deleted_total")
    with Moved(*names, "strandline_bytes_trimmed_total", *orphans) as moved:
        for _ in range(2):
            log.trim(grace=0)
    assert moved.by == [1, 2, 2, size, 1, len(b"orphan")]


def test_head_writes_are_counted_by_role(log: ObjectLog):
    for role, act in (
        ("producer", lambda: produce(log, b"a")),
        ("consumer", lambda: log.slots.create("s", 0)),
        ("trimmer", log.trim),
    ):
        with Moved("strandline_head_writes_total", role=role) as moved:
            act()
        assert moved.by[0] > 0, role


def test_lost_races_are_counted_by_role(log: ObjectLog, place: PlainStore, clock: ManualClock):
    line, raced = FaultyStore(place), []

    def race(call: Call) -> None:
        if call.name == "put_if" and call.path == "head" and call.stage == "before" and not raced:
            raced.append(call)
            produce(log, b"faster")

    line.hook(race)
    slower = open_log(line, env=Env(clock=clock))
    with Moved("strandline_head_conflicts_total", role="producer") as moved:
        produce(slower, b"slower")
    assert moved.by == [1]


def test_an_invalidated_slot_is_counted_by_reason(log: ObjectLog, clock: ManualClock):
    log.set_retention("consumed", SlotLimits(idle_seconds=5))
    log.slots.create("idle", 0)
    clock.advance(3)
    log.trim()
    clock.advance(3)
    with Moved("strandline_slot_invalidations_total", reason="idle-timeout") as moved:
        log.trim()
    assert moved.by == [1]


def test_a_consumer_s_numbers_move(log: ObjectLog, place: PlainStore, clock: ManualClock):
    for number in range(3):
        produce(log, b"%d" % number)
    clock.advance(7)
    labels = {"log": log.url, "slot": "watched"}
    names = ("strandline_descriptors_total", "strandline_acknowledgements_total", "strandline_dead_letters_total")
    place.delete(log.head().tail[2].location)
    quiet = {"on_poison": "dead-letter", "trim_every": None, "env": Env(clock=clock)}
    with Moved(*names) as moved, sl.Consumer(log, slot="watched", **quiet) as consumer:
        assert len(consumer.next_descriptors(1)) == 1
        assert value("strandline_queue_length", **labels) == 3
        assert value("strandline_lag_records", **labels) == 3
        assert value("strandline_lag_bytes", **labels) == sum(entry.size for entry in log.head().tail)
        consumer.ack_through(0)
        assert value("strandline_queue_length", **labels) == 2
        assert consumer.next_batch().values == [b"1"]
        assert value("strandline_lag_seconds", **labels) == pytest.approx(7)
        assert consumer.next_batch() is None  # the third one was set aside, and counts as acknowledged in its turn
        consumer.ack(1)
    assert moved.by == [1, 3, 1]


def test_applied_rejected_and_failed_updates_and_resyncs_of_watches_are_counted():
    kv, stop = sl.kv.MemoryKeyValue(), threading.Event()

    class Flaky(sl.followers.MemoryStore):
        failed = False

        def apply(self, records, *, since, upto):
            if not self.failed:
                self.failed = True
                raise TransientStorageError("once")
            super().apply(records, since=since, upto=upto)

    store = Flaky()
    for key in ("a", "b", "bad"):
        kv.put(key, b"")

    def parse(update: sl.kv.Update) -> sl.kv.Update | None:
        return None if update.key == b"bad" else update

    def watch() -> None:
        sl.watch_applied(kv, len, parse=parse, store=store, reader=kv, stop=stop, on_applied=lambda _: stop.set())
        stop.clear()

    names = ("updates_applied", "updates_rejected", "store_failures", "resyncs")
    with Moved(*(f"strandline_{name}_total" for name in names)) as moved:
        watch()
    assert moved.by == [2, 1, 1, 0]
    kv.put("c", b"")
    kv.trim(4)
    with Moved("strandline_resyncs_total") as moved:
        watch()
    assert moved.by == [1]


def test_every_name_is_documented_and_every_documented_name_is_there():
    text = DOCUMENT.read_text()
    documented = set()
    for row in re.findall(r"^\| (`strandline_[^|]*) \|", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            documented.add(name.replace("…", "strandline"))
    known = {
        metric.describe()[0].name
        for metric in vars(metrics).values()
        if hasattr(metric, "describe") and not isinstance(metric, type)
    }
    assert {name for name in documented if not name.startswith("strandline_spark_")} == known
