"""Trimming of an object log: which objects are deleted, when, and which never are."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from strandline.errors import CursorExpired, InvalidInput, NotFound, SlotInvalid
from strandline.followers.consumer.consumer import Consumer
from strandline.log.object import slots
from strandline.log.object.head.edits import CHUNK, SPILL_AT
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.object.maintain import trimmer
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.records import record_batch
from strandline.model.retention import TIER_SLOT, Consumed, InvalidReason, MaxAge, MaxBytes, SlotLimits
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from tests.matrix_cases import sampled

WRITER = WriterId(UUID(int=1))
GRACE = 600.0


class Bench:
    """A log on a plain store with a clock of its own."""

    def __init__(self, retention: str = "consumed", limits: SlotLimits | None = None) -> None:
        self.clock = ManualClock()
        self.seeds = itertools.count()
        self.store = PlainStore()
        self.log = self.open(create=True, retention=retention, limits=limits)
        self.number = 0

    def open(self, store=None, **options) -> ObjectLog:
        chance = SeededChance(next(self.seeds))
        return open_log(store or self.store, env=Env(clock=self.clock, chance=chance), **options)

    def append(self, count: int = 1, size: int = 10) -> None:
        """Append batches of one record each."""
        for _ in range(count):
            value = f"{self.number}".encode().ljust(size, b".")
            batch = record_batch(timestamps=[0], ops=[0], keys=[None], values=[value])
            self.log.append(batch, writer=WRITER, number=self.number, compression="none").result(120)
            self.number += 1

    def objects(self) -> dict[str, bytes]:
        return {item.path: bytes(self.store.get(item.path).data) for item in self.store.list("")}

    def paths(self, prefix: str) -> list[str]:
        return [item.path for item in self.store.list(prefix)]

    def values(self) -> list[int]:
        return [int(value.strip(b".")) for batch in self.log.read() for value in batch["value"].to_pylist()]

    def trim_all(self) -> None:
        """Trim until nothing waits."""
        self.log.trim()
        self.clock.advance(GRACE)
        self.log.trim()


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- what is trimmed -------------------------------------------------------------------------------------------


def test_a_batch_goes_when_every_valid_slot_is_past_it(bench: Bench):
    bench.append(10)
    bench.log.slots.create("slow", 3)
    bench.log.slots.create("fast", 8)
    done = bench.log.trim()
    assert bench.log.bounds().first == done.floor == 3
    assert done.trimmed_records == 3
    assert bench.values() == list(range(3, 10))


def test_with_no_slot_nothing_goes(bench: Bench):
    bench.append(10)
    assert bench.log.trim().trimmed_records == 0
    assert bench.values() == list(range(10))


def test_what_only_holds_and_newcomers_are_past_is_not_consumed(bench: Bench):
    bench.append(10)
    bench.log.slots.create("newcomer", 8, lifetime=600)
    with bench.log.hold(7, 600):
        assert bench.log.trim().trimmed_records == 0
        bench.log.slots.create("consumer", 9)
        assert bench.log.trim().floor == 7  # they pin all the same
    bench.log.slots.claim("newcomer", "me")
    bench.log.slots.drop("consumer")
    assert bench.log.trim().floor == 8


def test_with_no_valid_slot_nothing_goes():
    bench = Bench("consumed", SlotLimits(idle_seconds=60))
    bench.append(10)
    bench.log.slots.create("idle", 0)
    bench.clock.advance(31)
    bench.log.trim()
    bench.clock.advance(31)
    assert [slot.invalid.reason for slot in bench.log.trim().invalidated] == [InvalidReason.IDLE_TIMEOUT]
    assert bench.values() == list(range(10))


def test_a_log_that_keeps_forever_is_never_trimmed():
    bench = Bench("forever")
    bench.append(5)
    bench.log.slots.create("done", 5)
    bench.clock.advance(10**9)
    bench.trim_all()
    assert bench.values() == list(range(5))


def test_a_batch_that_a_slot_is_in_the_middle_of_stays_whole(bench: Bench):
    batch = record_batch(timestamps=[0] * 4, ops=[0] * 4, keys=[None] * 4, values=[b"a", b"b", b"c", b"d"])
    bench.log.append(batch, writer=WRITER, number=0).result(120)
    bench.log.append(batch, writer=WRITER, number=1).result(120)
    bench.log.slots.create("middle", 6)
    bench.log.trim()
    assert bench.log.bounds().first == 4


def test_retention_by_age_deletes_batches_that_were_listed_too_long_ago():
    bench = Bench("age:1h")
    bench.append(3)
    bench.clock.advance(3000)
    bench.append(2)
    bench.clock.advance(601)
    bench.log.trim()
    assert bench.values() == [3, 4]
    bench.clock.advance(3600)
    bench.log.trim()
    assert (bench.log.bounds().first, bench.log.bounds().next) == (5, 5)


def test_bytes_keep_the_newest_batches_that_fit():
    bench = Bench("forever")
    bench.append(200)
    size = bench.log.head().tail[-1].size
    bench.log.set_retention(MaxBytes(150 * size + 1))
    bench.log.trim()
    assert bench.values() == list(range(50, 200))
    bench.log.set_retention(f"bytes:{size * 7}")
    bench.log.trim()
    assert bench.values() == list(range(193, 200))


@pytest.mark.parametrize("retention", ["age:1s", "bytes:1"])
def test_a_valid_slot_pins_against_every_policy(retention: str):
    bench = Bench(retention)
    bench.append(10)
    bench.log.slots.create("billing", 6)
    bench.clock.advance(100)
    bench.log.trim()
    assert bench.log.bounds().first == 6


# --- limits of slots -------------------------------------------------------------------------------------------


def test_a_slot_is_invalidated_only_strictly_beyond_its_lag():
    bench = Bench("bytes:1", SlotLimits(lag_bytes=1))
    bench.append(4)
    size = bench.log.head().tail[0].size
    bench.log.set_retention("bytes:1", SlotLimits(lag_bytes=3 * size))
    bench.log.slots.create("billing", 1)
    assert bench.log.trim().invalidated == []
    assert bench.log.bounds().first == 1
    bench.append(1)
    (gone,) = bench.log.trim().invalidated
    assert (gone.name, gone.invalid.reason) == ("billing", InvalidReason.HORIZON)
    assert bench.log.slots.get("billing").invalid == gone.invalid
    assert bench.log.bounds().first == 5


def test_bounded_logs_limit_the_lag_and_queues_do_not():
    assert Bench("age:1d").log.identity.limits == SlotLimits(lag_bytes=64 << 30)
    assert Bench("consumed").log.identity.limits == SlotLimits()
    assert Bench("forever").log.identity.limits == SlotLimits()


def test_a_lag_that_spans_chunks_is_measured_exactly():
    bench = Bench("forever", SlotLimits(lag_bytes=1))
    bench.append(3 * CHUNK + SPILL_AT)
    sizes = [entry.size for entry in bench.log.plan(Cursor(bench.log.log_id, 0))]
    for position in (0, 1, CHUNK - 1, CHUNK, CHUNK + 5, 2 * CHUNK, len(sizes) - 3):
        behind = sum(sizes[position:])
        for limit, ends in ((behind, False), (behind - 1, True)):
            name = f"at-{position}-{ends}"
            bench.log.set_retention("forever", SlotLimits(lag_bytes=limit))
            bench.log.slots.create(name, position)
            assert bool(bench.log.trim(dry_run=True).invalidated) is ends
            bench.log.slots.drop(name)


def test_a_slot_whose_position_is_trimmed_is_reported_for_that_first():
    bench = Bench("consumed", SlotLimits(lag_bytes=1, idle_seconds=1))
    bench.append(10)
    bench.log.slots.create("old", 0)
    cell = bench.log.slots.cell("old")
    backup = cell.read().value
    bench.log.set_retention("consumed", SlotLimits())
    bench.log.slots.claim("old", "me").advance(Cursor(bench.log.log_id, 9))
    bench.log.trim()
    restored = json.loads(bytes(bench.store.get("slots/old.json").data))
    del restored["checksum"]
    bench.store.put("slots/old.json", json.dumps({**restored, "position": backup.position}).encode())
    bench.clock.advance(100)
    bench.log.set_retention("consumed", SlotLimits(lag_bytes=1, idle_seconds=1))
    assert [slot.invalid.reason for slot in bench.log.trim().invalidated] == [InvalidReason.WAL_REMOVED]


def test_lag_is_checked_before_idleness():
    bench = Bench("consumed", SlotLimits(lag_bytes=1, idle_seconds=1))
    bench.append(3)
    bench.log.slots.create("both", 0)
    bench.clock.advance(100)
    assert [slot.invalid.reason for slot in bench.log.trim().invalidated] == [InvalidReason.HORIZON]


def test_a_holder_that_touches_its_slot_is_not_idle():
    bench = Bench("consumed", SlotLimits(idle_seconds=60))
    bench.append(3)
    bench.log.slots.create("quiet", 1)
    slot = bench.log.slots.claim("quiet", "me")
    for _ in range(5):
        bench.clock.advance(50)
        slot.touch()
        assert bench.log.trim().invalidated == []


def test_a_slot_that_moved_after_it_was_judged_stays_valid(bench: Bench):
    bench = Bench("consumed", SlotLimits(idle_seconds=60))
    bench.append(3)
    bench.log.slots.create("late", 1)
    slot = bench.log.slots.claim("late", "me")
    bench.clock.advance(31)
    bench.log.trim()
    bench.clock.advance(31)
    store = FaultyStore(bench.store)

    def wake_up(call: Call) -> None:
        if call.name == "put_if" and call.path == "slots/late.json" and call.stage == "before":
            slot.touch()

    store.hook(wake_up)
    assert bench.open(store).trim().invalidated == []
    assert bench.log.slots.get("late").invalid is None


def test_an_invalid_slot_ignores_acknowledgements_and_heals_by_a_reset_only():
    bench = Bench("bytes:1", SlotLimits(idle_seconds=60))
    bench.append(5)
    bench.log.slots.create("billing", 2)
    slot = bench.log.slots.claim("billing", "me")
    for _ in range(2):
        bench.clock.advance(31)
        bench.log.trim()
    before = bench.log.slots.get("billing")
    with pytest.raises(SlotInvalid, match="reset"):
        slot.advance(Cursor(bench.log.log_id, 5))
    bench.log.slots.claim("billing", "another")
    assert bench.log.slots.get("billing").invalid == before.invalid
    assert bench.log.slots.get("billing").position == 2
    with pytest.raises(CursorExpired):
        bench.log.slots.reset("billing", 2)
    healed = bench.log.slots.reset("billing", 5)
    assert (healed.invalid, healed.position, healed.holder) == (None, 5, None)
    assert bench.log.slots.floor() == 5


# --- what is deleted -------------------------------------------------------------------------------------------


def test_trimmed_batches_wait_for_the_grace_period(bench: Bench):
    bench.append(5)
    spans = bench.log.plan(bench.log.start())
    bench.log.slots.create("done", 4)
    bench.log.trim()
    bench.clock.advance(GRACE - 1)
    assert bench.log.trim().deleted == 0
    assert spans[0].fetch()[0].num_rows == 1  # a reader that had planned it
    bench.clock.advance(1)
    assert bench.log.trim().deleted == 4 + 1  # and the list of them
    assert len(bench.paths("batches/")) == 1
    assert bench.paths("trimmed/") == []
    with pytest.raises(NotFound):
        spans[0].fetch()
    assert bench.values() == [4]


@pytest.mark.matrix
def test_chunks_go_with_what_they_list(bench: Bench):
    total = 5 * CHUNK + SPILL_AT
    bench.append(total)
    bench.log.slots.create("done", 0)
    slot = bench.log.slots.claim("done", "me")
    for position in (CHUNK // 2, CHUNK + 3, 4 * CHUNK, total - 5, total):
        slot.advance(Cursor(bench.log.log_id, position))
        bench.trim_all()
        assert bench.values() == list(range(position, total))
        assert len(bench.paths("batches/")) == total - position
    assert bench.paths("chunks/") == []
    assert bench.log.head().trimmed == ()


def test_many_levels_of_chunks_are_trimmed_in_the_middle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strandline.log.object.head.edits.CHUNK", 3)
    monkeypatch.setattr("strandline.log.object.head.edits.SPILL_AT", 4)
    bench = Bench()
    bench.append(150)
    assert len(bench.log.head().levels) >= 3
    bench.log.slots.create("done", 0)
    slot = bench.log.slots.claim("done", "me")
    for position in (1, 2, 40, 41, 77, 100, 148, 150):
        slot.advance(Cursor(bench.log.log_id, position))
        bench.trim_all()
        assert bench.values() == list(range(position, 150))
        assert len(bench.paths("batches/")) == 150 - position
    assert bench.paths("chunks/") == []


def test_an_upload_that_was_never_listed_is_deleted_and_can_no_longer_be_listed(bench: Bench):
    bench.append(2)
    bench.store.put(f"batches/{0:016d}/{'a' * 32}.batch", b"orphan")
    for _ in range(2):
        bench.log.trim()
    assert len(bench.paths("batches/")) == 2
    assert bench.values() == [0, 1]


def test_an_upload_under_way_outlives_one_trim_and_is_repeated_after_two(bench: Bench):
    """The producer's own retry hides it: the record is listed, once, whatever the trimmer did."""
    for rounds in range(4):
        store = FaultyStore(bench.store)
        seen = []

        def trim(call: Call, rounds=rounds, seen=seen) -> None:
            if call.name == "put" and call.path.startswith("batches/") and call.stage == "after" and not seen:
                seen.append(call.path)
                for _ in range(rounds):
                    bench.log.trim()

        store.hook(trim)
        log = bench.open(store)
        batch = record_batch(timestamps=[0], ops=[0], keys=[None], values=[b"%d" % rounds])
        log.append(batch, writer=WriterId(UUID(int=100 + rounds)), number=0).result(120)
        uploads = [row for row in store.log if row.name == "put" and row.path.startswith("batches/")]
        assert len(uploads) == (1 if rounds < 2 else 2)
    assert bench.values() == [0, 1, 2, 3]
    bench.log.trim()
    bench.log.trim()
    assert len(bench.paths("batches/")) == 4


def test_foreign_objects_beside_the_log_are_left_alone(bench: Bench):
    bench.append(1)
    strange = ["batches/README", "batches/0/x.batch", "chunks/0000000000000000/notes.chunk", "mine/x"]
    for path in strange:
        bench.store.put(path, b"?")
    for _ in range(3):
        bench.log.trim(everything=True)
    assert set(strange) <= set(bench.paths(""))


def test_a_dry_run_changes_nothing_and_reports_what_would_be_done(bench: Bench):
    bench.append(10)
    bench.log.slots.create("done", 7)
    bench.log.hold(2, 30)
    bench.log.trim()
    bench.store.put(f"batches/{0:016d}/{'a' * 32}.batch", b"orphan")
    bench.clock.advance(31)
    before = bench.objects()
    told = bench.log.trim(dry_run=True)
    assert bench.objects() == before
    assert (told.floor, told.trimmed_records, len(told.expired)) == (7, 5, 1)
    assert told.orphans == 1
    done = bench.log.trim()
    assert (done.floor, done.trimmed_records, len(done.expired), done.deleted) == (7, 5, 1, told.deleted)


def test_a_late_orphan_is_found_when_everything_is_looked_through(bench: Bench):
    bench.append(1)
    for _ in range(3):
        bench.log.trim()
    bench.store.put(f"batches/{0:016d}/{'b' * 32}.batch", b"very late")
    assert bench.log.trim().orphans == 0
    assert bench.log.trim(everything=True).orphans == 1
    assert bench.values() == [0]


def test_trimmers_that_are_many_do_no_more_than_one(bench: Bench):
    bench.append(4)
    bench.log.slots.create("done", 3)
    assert not bench.log.trim(pause=100).skipped
    before = bench.objects()
    bench.clock.advance(99)
    assert bench.open().trim(pause=100).skipped
    assert bench.objects() == before
    bench.clock.advance(1)
    assert not bench.open().trim(pause=100).skipped


# --- races -----------------------------------------------------------------------------------------------------


def during_trim(bench: Bench, act: Callable[[], object]) -> ObjectLog:
    """The log on a store that calls a function once during a trim, just before the floor moves."""
    store = FaultyStore(bench.store)
    happened = []

    def meddle(call: Call) -> None:
        if call.name == "put_if" and call.path == "head" and call.stage == "before" and not happened:
            happened.append(act())

    store.hook(meddle)
    return bench.open(store)


def test_a_slot_created_while_a_trim_is_planned_is_not_trimmed_away(bench: Bench):
    bench.append(10)
    bench.log.slots.create("fast", 8)
    during_trim(bench, lambda: bench.log.slots.create("slow", 2)).trim()
    assert bench.log.bounds().first == 2


def test_a_slot_rewound_while_a_trim_is_planned_is_not_trimmed_away(bench: Bench):
    bench.append(10)
    bench.log.slots.create("billing", 8)
    during_trim(bench, lambda: bench.log.slots.reset("billing", 1)).trim()
    assert bench.log.bounds().first == 1


def test_appends_and_spills_during_a_trim_lose_nothing(bench: Bench):
    bench.append(SPILL_AT)
    bench.log.slots.create("billing", CHUNK + 2)
    during_trim(bench, lambda: bench.append(5)).trim()
    assert bench.values() == list(range(CHUNK + 2, SPILL_AT + 5))
    bench.trim_all()
    assert len(bench.paths("batches/")) == SPILL_AT + 5 - CHUNK - 2


def test_two_trimmers_at_once_delete_each_object_once_and_nothing_else(bench: Bench):
    bench.append(CHUNK + SPILL_AT)
    bench.log.slots.create("billing", CHUNK)
    during_trim(bench, bench.log.trim).trim()
    bench.clock.advance(GRACE)
    during_trim(bench, bench.log.trim).trim()
    assert bench.values() == list(range(CHUNK, CHUNK + SPILL_AT))
    assert len(bench.paths("batches/")) == SPILL_AT


def test_a_reset_pins_before_its_cell_is_written(bench: Bench):
    bench.append(10)
    bench.log.slots.create("billing", 8)
    store = FaultyStore(bench.store)

    def die(call: Call) -> None:
        if call.name == "put_if" and call.path == "slots/billing.json" and call.stage == "before":
            raise Crash

    store.hook(die)
    with pytest.raises(Crash):
        bench.open(store).slots.reset("billing", 1)
    bench.trim_all()
    assert bench.log.bounds().first == 1
    bench.log.slots.claim("billing", "a new holder")  # nobody can finish that reset any more
    bench.trim_all()
    assert bench.log.bounds().first == 8


def test_a_claim_by_the_same_holder_leaves_a_reset_under_way_alone(bench: Bench):
    bench.append(10)
    bench.log.slots.create("billing", 8)
    bench.log.slots.claim("billing", "me")
    store = FaultyStore(bench.store)

    def meddle(call: Call) -> None:
        if call.name == "put_if" and call.path == "slots/billing.json" and call.stage == "before":
            bench.log.slots.claim("billing", "me")
            bench.log.trim()

    store.hook(meddle)
    bench.open(store).slots.reset("billing", 1)
    assert bench.log.slots.get("billing").position == 1
    assert bench.log.bounds().first <= 1


def test_a_slot_dropped_and_created_again_keeps_its_old_holder_fenced(bench: Bench):
    bench.append(10)
    bench.log.slots.create("billing", 3)
    old = bench.log.slots.claim("billing", "old")
    bench.log.slots.drop("billing")
    with pytest.raises(SlotInvalid, match="dropped"):
        old.advance(Cursor(bench.log.log_id, 9))
    assert bench.log.slots.list() == []
    again = bench.log.slots.create("billing", 2)
    assert again.epoch > old.epoch
    with pytest.raises(Exception, match="epoch"):
        old.advance(Cursor(bench.log.log_id, 9))
    assert bench.log.slots.get("billing").position == 2


@pytest.mark.parametrize("every", sampled(12))
@pytest.mark.parametrize("action", ["create", "reset", "drop", "hold", "release", "trim", "trim-late"])
def test_death_at_any_operation_leaves_a_log_that_continues(action: str, every: int, monkeypatch: pytest.MonkeyPatch):
    """At every store operation of an action, before it and after: then everything still works and nothing is lost."""
    monkeypatch.setattr("strandline.log.object.head.edits.CHUNK", 3)
    monkeypatch.setattr("strandline.log.object.head.edits.SPILL_AT", 4)
    stage, number = 0, 1  # operation 0 opens the log
    while True:
        bench = Bench("consumed")
        bench.append(30)
        bench.log.slots.create("keeper", 5)
        bench.log.slots.create("billing", 19)
        held = bench.log.hold(7, 60)
        if action == "trim-late":
            for _ in range(3):
                bench.log.trim()  # what is there now is looked through: it can only go by being trimmed
        if action.startswith("trim"):
            bench.log.slots.reset("keeper", 17)
            held.release()
        if action == "trim-late":
            bench.log.trim()
            bench.clock.advance(GRACE)
        store = FaultyStore(bench.store)
        died = []

        def die(call: Call, at=(number, ("before", "after")[stage]), died=died) -> None:
            if (call.number, call.stage) == at:
                died.append(call)
                raise Crash

        log = bench.open(store)
        store.hook(die)
        act = {
            "create": lambda log=log: log.slots.create("new", 6),
            "reset": lambda log=log: log.slots.reset("billing", 6),
            "drop": lambda log=log: log.slots.drop("billing"),
            "hold": lambda log=log: log.hold(6, 60),
            "release": lambda log=log, held=held: type(held)(log.slots, held.name, 1).release(),
            "trim": log.trim,
            "trim-late": log.trim,
        }[action]
        with contextlib.suppress(Crash):
            act()
        bench.log = bench.open()  # who goes on knows only what is stored
        floor = bench.log.slots.floor()
        assert floor is not None
        bench.append(3)
        bench.trim_all()
        bench.trim_all()
        first = bench.log.bounds().first
        assert first <= min([floor, *(slot.position for slot in bench.log.slots.list() if slot.pins)])
        assert bench.values() == list(range(first, bench.number))
        listed = {entry.entry.location for entry in bench.log.plan(bench.log.start())}
        assert set(bench.paths("batches/")) == listed
        if not died and stage == 0:  # what the store refuses has no answer that could be lost
            assert number > len(store.log) // 2
            break
        stage, number = (1, number) if stage == 0 else (0, number + every)


# --- broken twins of what only a few histories would show ------------------------------------------------------


def test_a_claim_that_takes_away_another_s_pin_lets_a_trim_pass_the_slot(bench: Bench, monkeypatch):
    def greedy(keeper: slots.SlotKeeper, name: str, holder: str, **options: bool) -> object:
        claimed = honest(keeper, name, holder, **options)
        keeper.head.update(keeper.op(), lambda head: replace(head, slots={**head.slots, name: None}))
        return claimed

    honest = slots.SlotKeeper.claim
    monkeypatch.setattr(slots.SlotKeeper, "claim", greedy)
    with pytest.raises(AssertionError):
        test_a_claim_by_the_same_holder_leaves_a_reset_under_way_alone(bench)


@pytest.mark.matrix
def test_deleting_a_chunk_before_what_it_lists_leaves_objects_behind(monkeypatch):
    honest = trimmer.objects_of
    monkeypatch.setattr(trimmer, "objects_of", lambda cut, chunks: reversed(list(honest(cut, chunks))))
    with pytest.raises(AssertionError):
        test_death_at_any_operation_leaves_a_log_that_continues("trim-late", 1, monkeypatch)


# --- holds, newcomers, retention -------------------------------------------------------------------------------


def test_a_hold_keeps_what_a_reader_needs_and_ends_by_itself(bench: Bench):
    bench.append(10)
    bench.log.slots.create("done", 10)
    hold = bench.log.hold(2, 30)
    bench.log.trim()
    assert bench.log.bounds().first == 2
    bench.clock.advance(29)
    hold.renew(4)
    bench.clock.advance(29)
    bench.log.trim()
    assert bench.log.bounds().first == 4
    bench.clock.advance(29)
    assert bench.log.trim().expired == []
    bench.clock.advance(1)
    assert bench.log.trim().expired == [hold.name]
    assert bench.log.bounds().first == 10
    with pytest.raises(SlotInvalid):
        hold.renew(5)
    assert [slot.name for slot in bench.log.slots.list()] == ["done"]
    assert bench.paths("slots/") == ["slots/done.json"]


def test_a_hold_that_is_renewed_in_the_last_moment_holds(bench: Bench):
    bench.append(10)
    bench.log.slots.create("done", 10)
    hold = bench.log.hold(2, 30)
    bench.clock.advance(31)
    store = FaultyStore(bench.store)

    def renew(call: Call) -> None:
        if call.name == "put_if" and call.path == f"slots/{hold.name}.json" and call.stage == "before":
            hold.renew(2)

    store.hook(renew)
    assert bench.open(store).trim().expired == []
    assert bench.log.bounds().first == 2


def test_trimmed_bytes_are_those_of_the_batches_also_within_a_chunk(bench: Bench):
    bench.append(3 * SPILL_AT)
    assert bench.log.head().levels[0][0].next > 2, "the first records are in a chunk"
    sizes = {item.path: item.size for item in bench.store.list("batches/")}
    bench.log.slots.create("reader", 0)
    slot = bench.log.slots.claim("reader", "test")
    told = []
    for upto in (2, 5, SPILL_AT + 1, 3 * SPILL_AT):
        slot.advance(bench.log.cursor_at(upto))
        assert bench.log.trim(dry_run=True).trimmed_bytes > 0
        told.append(bench.log.trim().trimmed_bytes)
    assert all(size > 0 for size in told)
    assert sum(told) == sum(sizes.values())
    assert told[1] == told[0] // 2 * 3


def test_holds_of_readers_that_died_are_removed_by_a_full_trim(bench: Bench):
    bench.append(3)
    hold = bench.log.hold(1, 30)
    store = FaultyStore(bench.store)

    def die(call: Call) -> None:
        if call.name == "delete" and call.stage == "before":
            raise Crash

    store.hook(die)
    with pytest.raises(Crash):
        type(hold)(bench.open(store).slots, hold.name, 30).release()
    other = bench.log.hold(1, 30)
    assert len(bench.paths("slots/")) == 2
    bench.log.trim(everything=True)
    assert bench.paths("slots/") == [f"slots/{other.name}.json"]


def test_a_released_hold_holds_nothing(bench: Bench):
    bench.append(3)
    bench.log.slots.create("done", 3)
    with bench.log.hold(1, 30):
        bench.log.trim()
        assert bench.log.bounds().first == 1
    bench.log.trim()
    assert bench.log.bounds().first == 3


def test_a_time_is_found_by_when_batches_were_listed():
    bench = Bench("forever")
    times = []
    for _ in range(CHUNK + SPILL_AT):
        bench.clock.advance(10)
        bench.append()
        times.append(datetime.fromtimestamp(bench.clock.now() / 1e6, UTC))
    for offset in (0, 1, CHUNK - 1, CHUNK, CHUNK + 40):
        assert bench.log.position_of(times[offset]) == offset
        assert bench.log.position_of(times[offset] + timedelta(seconds=1)) == offset + 1
    assert bench.log.position_of(times[-1] + timedelta(days=1)) == bench.log.bounds().next
    with pytest.raises(InvalidInput, match="time zone"):
        bench.log.position_of(datetime(2026, 1, 1))  # noqa: DTZ001


def test_retention_is_changed_durably_and_never_by_opening():
    bench = Bench("age:1h")
    assert bench.open().identity.retention == MaxAge(3600)
    with pytest.raises(InvalidInput, match="set_retention"):
        bench.open(retention="consumed")
    bench.log.set_retention("consumed")
    assert bench.open(retention="consumed").identity.retention == Consumed()


def test_an_answer_lost_while_retention_is_changed_changes_it_once(bench: Bench):
    store = FaultyStore(bench.store)
    store.lose_answers(1)
    log = bench.open(store)
    log.set_retention("age:1d")
    assert bench.open().identity.retention == MaxAge(86400)


def test_reading_what_is_trimmed_meanwhile_raises_cursor_expired(bench: Bench):
    bench.append(SPILL_AT)
    reading = bench.log.read(bench.log.start())
    next(reading)
    bench.log.slots.create("done", SPILL_AT)
    bench.trim_all()
    with pytest.raises(CursorExpired):
        list(reading)


# --- with a cold tier ------------------------------------------------------------------------------------------


def test_a_log_is_trimmed_up_to_the_tierer_s_slot_whatever_its_followers_need(bench: Bench):
    bench.append(6)
    bench.log.slots.create("follower", 1)
    bench.log.slots.create(TIER_SLOT, 4)
    bench.log.set_retention("consumed")
    bench.trim_all()
    assert bench.log.bounds().first == 4
    assert [slot.pins for slot in bench.log.slots.list()] == [True, True]
    assert bench.log.slots.floor() == 1


def test_a_consumer_that_reads_no_cold_tier_keeps_the_hot_one(bench: Bench):
    bench.append(6)
    with Consumer(bench.log, slot="queue") as consumer:
        for _ in range(2):
            consumer.ack(consumer.next_batch().sequence)
        consumer.flush()
        bench.log.slots.create(TIER_SLOT, 5)
        bench.log.set_retention("consumed")
        bench.trim_all()
        assert bench.log.bounds().first == 2
        assert consumer.next_batch().sequence == 2
    bench.log.slots.claim("queue", "a follower")
    bench.trim_all()
    assert bench.log.bounds().first == 5
