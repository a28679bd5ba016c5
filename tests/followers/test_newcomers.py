"""Slots of new followers: the slot of one that dies before it stored anything expires, that of a live one is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import Fenced
from strandline.followers.committer import begin
from strandline.followers.run import follow
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.object.slots import SlotKeeper
from strandline.log.slots import heartbeat
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.log.slots.pin import SlotPin
from strandline.log.wal.log import WalLog
from strandline.model.cursor import SECOND
from strandline.model.retention import NEWCOMER_SECONDS, Consumed, SlotLimits, SlotState
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.plain import PlainStore
from strandline.testing.simdisk import SimulatedDisk
from strandline.testing.sinks import MemorySink
from tests.followers.test_heartbeat import Fickle, Slow, wait_for


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    monkeypatch.setattr(heartbeat, "_TICK", 0.01)
    return ManualClock()


@pytest.fixture
def log(clock: ManualClock) -> ObjectLog:
    """A queue, without a limit for idle slots."""
    store = PlainStore(clock=clock)
    log = open_log(store, create=True, retention="consumed", limits=SlotLimits(), env=Env(clock=clock))
    with log.producer() as producer:
        producer.produce([b"one"])
    return log


def killed(log: sl.Log, name: str = "billing") -> SlotState:
    """A new follower that is killed before it has stored its first range: none of its threads runs any more."""
    begin(log, Slow(), name, start="beginning", holder="newcomer")
    (state,) = [state for state in log.slots.list() if state.name == name]
    assert (state.holder, state.position) == (None, 0)
    return state


def trim(log: ObjectLog, clock: ManualClock, seconds: float) -> None:
    """Trim, and again after some time: a slot counts as idle only if a trimmer saw it unchanged."""
    log.trim()
    clock.advance(seconds)
    log.trim()


def test_the_slot_of_a_newcomer_that_was_killed_pins_nothing_after_a_while(log: ObjectLog, clock: ManualClock) -> None:
    log.slots.claim(log.slots.create("other", 0).name, "reader").advance(log.end())
    killed(log)
    trim(log, clock, NEWCOMER_SECONDS - 1)
    assert (log.slots.floor(), log.bounds().first) == (0, 0)
    trim(log, clock, 2)
    assert [state.name for state in log.slots.list()] == ["other"]
    log.trim()
    assert log.bounds().first == 1


def test_the_name_can_be_used_again_and_its_epochs_continue(log: ObjectLog, clock: ManualClock) -> None:
    log.slots.create("billing", 0)
    former = log.slots.claim("billing", "former")
    log.slots.drop("billing")
    killed(log)
    trim(log, clock, NEWCOMER_SECONDS + 1)
    assert log.slots.list() == []
    killed(log)
    assert log.slots.claim("billing", "later").epoch > former.epoch
    trim(log, clock, 10 * NEWCOMER_SECONDS)
    assert [state.holder for state in log.slots.list()] == ["later"], "whoever has claimed it keeps it"


def test_a_newcomer_that_is_busy_with_its_first_batch_keeps_its_slot(log: ObjectLog, clock: ManualClock) -> None:
    sink, stop = Slow(), threading.Event()
    thread = threading.Thread(target=follow, args=(log, sink, "busy"), kwargs={"stop": stop, "env": Env(clock=clock)})
    thread.start()
    try:
        assert sink.busy.wait(10)
        for _ in range(40):
            clock.advance(NEWCOMER_SECONDS / 10)
            wait_for(lambda: clock.now() - log.slots.get("busy").last_seen < NEWCOMER_SECONDS / 10 * SECOND)
            log.trim()
    finally:
        stop.set()
        sink.go_on.set()
        clock.advance(1)
        thread.join(20)
    state = log.slots.get("busy")
    assert (state.position, state.expires, state.holder is not None) == (1, None, True)


def test_a_newcomer_after_one_that_was_killed_takes_its_slot(log: ObjectLog, clock: ManualClock) -> None:
    killed(log)
    sink = Slow()
    sink.go_on.set()
    follow(log, sink, "billing", upto="end", env=Env(clock=clock))
    trim(log, clock, 10 * NEWCOMER_SECONDS)
    assert log.slots.get("billing").position == 1


def test_a_slot_that_an_operator_created_never_expires(log: ObjectLog, clock: ManualClock) -> None:
    log.slots.create("planned", 0)
    trim(log, clock, 1000 * NEWCOMER_SECONDS)
    assert [state.name for state in log.slots.list()] == ["planned"]
    assert log.bounds().first == 0


@pytest.mark.parametrize("reopened", [False, True])
def test_the_slot_of_a_killed_newcomer_is_dropped_in_a_write_ahead_log_too(clock: ManualClock, reopened: bool) -> None:
    disk = SimulatedDisk()
    log = WalLog.open("/log", env=Env(disk=disk, clock=clock), background=False, roll_bytes=0)
    log.append_value(b"one").result(10)
    log.slots.create("planned", 1)
    killed(log)
    if reopened:
        disk.kill()
        log = WalLog.open("/log", env=Env(disk=disk, clock=clock), background=False, roll_bytes=0)
    clock.advance(NEWCOMER_SECONDS - 1)
    assert log.trim(Consumed()) == 0
    clock.advance(2)
    assert log.trim(Consumed()) == 1
    assert [state.name for state in log.slots.list()] == ["planned"]
    log.close()


# --- newcomers that begin with a snapshot ----------------------------------------------------------------------


@pytest.fixture
def snapshots(log: ObjectLog, tmp_path: Path) -> str:
    with sl.followers.AppendLogStore.open(tmp_path / "veteran") as veteran:
        veteran.apply(sl.log.READ_SCHEMA.empty_table(), since=log.start(), upto=log.end())
        veteran.export_to(str(tmp_path / "snapshot"))
    return str(tmp_path / "snapshot")


class Importing:
    """A kind of store; ``during`` is called while one is imported."""

    def __init__(self, during: Callable[[], object]) -> None:
        self._during = during

    def open(self, folder: str, **options: Any) -> sl.followers.AppendLogStore:
        return sl.followers.AppendLogStore.open(folder, **options)

    def import_from(self, snapshot: str, dest: str, **options: Any) -> sl.followers.AppendLogStore:
        self._during()
        return sl.followers.AppendLogStore.import_from(snapshot, dest, **options)


def test_a_bootstrap_that_fails_leaves_no_slot(log: ObjectLog, snapshots: str, tmp_path: Path) -> None:
    def fail() -> None:
        assert [state.name for state in log.slots.list()] == ["new"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sl.snapshots.bootstrap(snapshots, tmp_path / "new", Importing(fail), log=log, slot="new")
    assert log.slots.list() == []


def test_a_bootstrap_that_fails_leaves_a_slot_alone_that_was_there_or_was_claimed_meanwhile(
    log: ObjectLog, snapshots: str, tmp_path: Path
) -> None:
    def fail() -> None:
        log.slots.claim("new", "somebody")
        raise KeyboardInterrupt

    log.slots.create("old", 0)
    for slot, during in (("old", lambda: 1 // 0), ("new", fail)):
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
            sl.snapshots.bootstrap(snapshots, tmp_path / "new", Importing(during), log=log, slot=slot)
    assert {state.name: state.holder for state in log.slots.list()} == {"old": None, "new": "somebody"}


def test_the_slot_of_a_bootstrap_that_was_killed_goes_after_a_while(log: ObjectLog, clock: ManualClock) -> None:
    pin = SlotPin(log, "new", Env(clock=ManualClock()))  # nothing of it runs any more: its clock stands still
    pin.hold(log.start())
    trim(log, clock, NEWCOMER_SECONDS + 1)
    assert log.slots.list() == []


def test_the_slot_of_a_bootstrap_that_takes_long_is_kept_and_pins_for_good_once_the_store_is_there(
    log: ObjectLog, clock: ManualClock, snapshots: str, tmp_path: Path
) -> None:
    def take_long() -> None:
        log.trim()
        for _ in range(20):
            clock.advance(NEWCOMER_SECONDS / 10)
            wait_for(lambda: clock.now() - log.slots.get("new").last_seen < NEWCOMER_SECONDS / 10 * SECOND)
        log.trim()

    with sl.snapshots.bootstrap(
        snapshots, tmp_path / "new", Importing(take_long), log=log, slot="new", env=Env(clock=clock)
    ):
        trim(log, clock, 10 * NEWCOMER_SECONDS)
        assert log.slots.floor() == 1


# --- heartbeats ------------------------------------------------------------------------------------------------


def test_without_an_idle_limit_a_consumer_writes_nothing_until_there_is_one(log: ObjectLog, clock: ManualClock) -> None:
    with sl.Consumer(log, slot="queue", trim_every=None, env=Env(clock=clock)) as consumer:
        before = log.slots.cell("queue").read()
        for _ in range(20):
            clock.advance(60)
            assert consumer.next_descriptors(1) is not None
        assert log.slots.cell("queue").read() == before
        log.set_retention("consumed", SlotLimits(idle_seconds=90))
        clock.advance(20)
        consumer.next_descriptors(1)
        clock.advance(30)
        wait_for(lambda: log.slots.get("queue").last_seen == clock.now())


def test_a_log_without_slot_limits_gets_heartbeats(clock: ManualClock) -> None:
    slot = Fickle()
    with SlotHeartbeat(slot, object(), env=Env(clock=clock)):
        clock.advance(60)
        wait_for(lambda: slot.touched == 1)


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_of_two_newcomers_that_claim_a_slot_at_the_same_time_one_continues(
    log: ObjectLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """Both have stored the range or found it stored, and neither has claimed the slot yet."""
    newcomers = {
        name: begin(log, sl.DeltaSink(tmp_path / "table", mode="append"), "billing", start="beginning", holder=name)
        for name in ("first", "second")
    }
    records, end = pa.Table.from_batches(log.read(0)), log.end()
    claim, (outer, inner) = SlotKeeper.claim, order

    def claim_after_another(slots: SlotKeeper, name: str, holder: str) -> Any:
        monkeypatch.setattr(SlotKeeper, "claim", claim)
        newcomers[inner].apply(records, since=newcomers[inner].start, upto=end)
        return claim(slots, name, holder)

    monkeypatch.setattr(SlotKeeper, "claim", claim_after_another)
    newcomers[outer].apply(records, since=newcomers[outer].start, upto=end)
    newcomers[outer].check_holder()
    newcomers[outer].advance(end)
    with pytest.raises(Fenced):
        newcomers[inner].check_holder()
    assert [(slot.position, slot.holder) for slot in log.slots.list()] == [(end.next, outer)]


def test_a_follower_that_starts_while_its_sink_is_rebuilt_goes_on_from_the_new_rows(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read its cursor, then a rebuild took the sink back and its slot with it, and then it claims the slot."""
    with log.producer() as producer:
        producer.produce([b"two", b"three"])
    sink = MemorySink()
    follow(log, sink, slot="billing", upto="end")
    claim = SlotKeeper.claim

    def claim_after_a_rebuild(slots: SlotKeeper, name: str, holder: str) -> Any:
        monkeypatch.setattr(SlotKeeper, "claim", claim)
        sink.records, sink.at = [pa.Table.from_batches(log.read(0))[:1]], log.cursor_at(1)
        log.slots.reset("billing", 1)
        return claim(slots, name, holder)

    monkeypatch.setattr(SlotKeeper, "claim", claim_after_a_rebuild)
    follower = begin(log, sink, "billing", start="beginning", holder="second")
    assert follower.start == log.cursor_at(1)
    assert log.slots.get("billing").position == 1
    log.trim()
    follow(log, sink, slot="billing", upto="end")
    assert [value for _, _, value in sink.rows()] == [b"one", b"two", b"three"]
