"""The queue API of object logs: slots, new consumers, retention, positions within batches, long backlogs."""

from __future__ import annotations

import contextlib
import json
from base64 import b64encode
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prometheus_client import REGISTRY

import strandline as sl
from strandline.compat.v1.log import QueueFormat, open_queue
from strandline.errors import (
    CursorExpired,
    Diverged,
    Fenced,
    InvalidInput,
    NotALog,
    SlotInvalid,
    UnsupportedVersion,
)
from strandline.followers.consumer.consumer import Consumer
from strandline.log.object import ObjectLog, open_log
from strandline.log.queue.log_queue import ObjectLogQueue
from strandline.model.cursor import Cursor
from strandline.model.head import QueueEntry, WriterId
from strandline.model.retention import Invalidation, InvalidReason, SlotLimits
from strandline.model.stamp import OpId
from strandline.storage.env import Env
from strandline.storage.objects.urls import open_store
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Crash, FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.logs import records
from tests.contracts.slots import append


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(clock: ManualClock) -> ObjectLog:
    """Ten records in batches of 3, 1, 4 and 2, listed ten seconds apart."""
    log = open_log(PlainStore(), create=True, retention="consumed", env=Env(clock=clock, chance=SeededChance(1)))
    fill(log, clock)
    return log


def fill(log: ObjectLog, clock: ManualClock) -> None:
    for number, count in enumerate((3, 1, 4, 2)):
        append(log, *[b"%d" % number] * count, number=number)
        clock.advance(10)


def opened(log: ObjectLog, slot: str = "default", **options: object) -> Consumer:
    return Consumer(log, slot=slot, **{"trim_every": None, **options})


def rest(consumer: Consumer) -> list[int]:
    return [batch.sequence for batch in consumer.batches()]


def invalidate(log: ObjectLog, name: str = "default") -> None:
    gone = Invalidation(InvalidReason.HORIZON, 1)
    log.slots.cell(name).update(OpId(uuid4()), lambda slot: replace(slot, invalid=gone))


class TestSlots:
    def test_opening_a_consumer_creates_its_slot_and_claims_it(self, log: ObjectLog) -> None:
        assert log.slots.list() == []
        opened(log, "billing", holder="node-1")
        (state,) = log.slots.list()
        assert (state.name, state.position, state.holder, state.epoch) == ("billing", 0, "node-1", 1)

    def test_a_new_holder_raises_the_epoch_and_the_same_one_fences_no_holder(self, log: ObjectLog) -> None:
        one = opened(log, holder="node-1")
        again = opened(log, holder="node-1")
        assert log.slots.get("default").epoch == 1
        assert one.next_batch() == again.next_batch()
        opened(log, holder="node-2")
        assert log.slots.get("default").epoch == 2
        with pytest.raises(Fenced, match="node-2"):
            one.next_batch()

    def test_each_consumer_is_a_new_holder_by_default(self, log: ObjectLog) -> None:
        assert opened(log).holder != opened(log).holder
        assert log.slots.get("default").epoch == 2

    def test_slots_are_independent(self, log: ObjectLog) -> None:
        one, two = opened(log, "one"), opened(log, "two")
        assert rest(one) == rest(two) == [0, 1, 2, 3]
        one.ack_through(2)
        two.ack_through(0)
        assert [(state.name, state.position) for state in log.slots.list()] == [("one", 8), ("two", 3)]
        assert rest(opened(log, "one")) == [3]
        assert rest(opened(log, "two")) == [1, 2, 3]

    def test_an_acknowledgement_moves_the_slot_past_the_batch(self, log: ObjectLog) -> None:
        consumer = opened(log)
        rest(consumer)
        for sequence, position in enumerate((3, 4, 8, 10)):
            consumer.ack(sequence)
            consumer.flush()
            assert log.slots.get("default").position == position

    def test_records_that_every_slot_has_acknowledged_are_trimmed_and_no_others(self, log: ObjectLog) -> None:
        one, two = opened(log, "one"), opened(log, "two")
        rest(one), rest(two)
        one.ack_through(2)
        two.ack_through(0)
        log.trim()
        assert log.bounds().first == 3
        assert rest(opened(log, "two")) == [1, 2, 3]
        with pytest.raises(CursorExpired):
            one.descriptors_between(0, 1)

    def test_a_consumer_of_a_trimmed_log_continues_where_it_was(self, log: ObjectLog) -> None:
        consumer = opened(log)
        assert consumer.next_batch().sequence == 0
        consumer.ack_through(0)
        log.trim()
        assert rest(consumer) == [1, 2, 3]
        consumer.ack_through(3)
        log.trim()
        assert log.bounds().first == log.bounds().next == 10
        assert consumer.next_batch() is None
        append(log, b"more", number=4)
        assert rest(consumer) == [4]
        assert len(consumer) == 1

    @pytest.mark.parametrize("name", ["", "a/b", "../x"])
    def test_a_name_that_no_slot_can_have_is_refused(self, log: ObjectLog, name: str) -> None:
        with pytest.raises(InvalidInput):
            opened(log, name)


class TestNewcomers:
    def test_by_default_they_begin_with_what_is_retained(self, log: ObjectLog) -> None:
        assert rest(opened(log)) == [0, 1, 2, 3]

    def test_from_now_they_get_only_what_is_new(self, log: ObjectLog) -> None:
        consumer = opened(log, start="now")
        assert consumer.next_batch() is None
        append(log, b"new", number=4)
        assert rest(consumer) == [4]

    @pytest.mark.parametrize(("offset", "expected"), [(0, 0), (3, 1), (4, 2), (5, 2), (8, 3), (10, 4)])
    def test_from_an_offset_they_get_the_batch_that_holds_it_first(
        self, log: ObjectLog, offset: int, expected: int
    ) -> None:
        assert rest(opened(log, start=offset)) == list(range(expected, 4))
        assert log.slots.get("default").position == offset

    @pytest.mark.parametrize(("seconds", "expected"), [(-5, 0), (0, 0), (5, 1), (10, 1), (29, 3), (31, 4), (999, 4)])
    def test_from_a_time_they_get_what_was_listed_then_or_later(
        self, log: ObjectLog, seconds: int, expected: int
    ) -> None:
        began = datetime.fromtimestamp(log.head().tail[0].listed / 1e6, UTC)
        consumer = opened(log, start=began + timedelta(seconds=seconds))
        assert rest(consumer) == list(range(expected, 4))

    def test_from_a_cursor_such_as_a_snapshot_s(self, log: ObjectLog) -> None:
        assert rest(opened(log, start=Cursor(log.log_id, 8))) == [3]
        with pytest.raises(Diverged):
            opened(log, "other", start=Cursor(UUID(int=4711), 8))
        assert [state.name for state in log.slots.list()] == ["default"]

    def test_a_start_that_is_gone_or_not_there_yet_is_an_error_and_creates_nothing(self, log: ObjectLog) -> None:
        consumer = opened(log, "passing")
        rest(consumer)
        consumer.ack_through(1)
        log.trim()
        for gone in (3, "beginning"):
            with pytest.raises(CursorExpired):
                opened(log, start=gone)
        with pytest.raises(Diverged):
            opened(log, start=11)
        with pytest.raises(InvalidInput):
            opened(log, start="somewhere")
        assert [state.name for state in log.slots.list()] == ["passing"]

    def test_a_new_slot_begins_with_what_is_retained_by_default(self, log: ObjectLog) -> None:
        with opened(log, "passing") as consumer:
            rest(consumer)
            consumer.ack_through(1)
        log.trim()
        assert rest(opened(log, "default")) == rest(opened(log, "other", start="retained")) == [2, 3]

    def test_a_slot_that_exists_stays_where_it_is_whatever_the_start(self, log: ObjectLog) -> None:
        with opened(log) as consumer:
            rest(consumer)
            consumer.ack_through(0)
        for start in ("beginning", "retained", "now", 8):
            assert rest(opened(log, start=start)) == [1, 2, 3]

    def test_with_last_acked_the_slot_is_created_right_after_it(self, log: ObjectLog) -> None:
        assert rest(opened(log, last_acked=1, start="now")) == [2, 3]
        assert log.slots.get("default").position == 4


class TestLastAcked:
    @pytest.mark.parametrize("last", [4, 5, 99])
    @pytest.mark.parametrize("exists", [True, False])
    def test_a_batch_that_is_not_listed_yet_is_an_error_that_changes_nothing(
        self, log: ObjectLog, last: int, *, exists: bool
    ) -> None:
        holder = opened(log) if exists else None
        before = log.slots.list()
        with pytest.raises(InvalidInput, match=f"last_acked={last}"):
            opened(log, last_acked=last)
        assert log.slots.list() == before
        assert holder is None or rest(holder) == [0, 1, 2, 3]

    def test_so_it_is_on_an_empty_log(self) -> None:
        log = open_log(PlainStore(), create=True)
        with pytest.raises(InvalidInput, match="last_acked=0"):
            opened(log, last_acked=0)
        assert log.slots.list() == []

    @pytest.mark.parametrize("last", [0, 1, 2])
    def test_a_slot_that_is_further_is_rewound_and_its_holder_fenced(self, log: ObjectLog, last: int) -> None:
        log.set_retention("forever")
        old = opened(log)
        rest(old)
        old.ack_through(3)
        consumer = opened(log, last_acked=last)
        assert log.slots.get("default").position == (3, 4, 8)[last]
        assert log.slots.floor() == (3, 4, 8)[last]
        with pytest.raises(Fenced):
            old.flush()
        assert rest(consumer) == list(range(last + 1, 4))
        consumer.ack(last + 1)
        consumer.close()
        assert rest(opened(log)) == list(range(last + 2, 4))

    def test_no_replica_is_rewound_to_trimmed_records(self, log: ObjectLog) -> None:
        consumer = opened(log)
        rest(consumer)
        consumer.ack_through(2)
        log.trim()
        before = log.slots.get("default")
        for last in (0, 1):
            with pytest.raises(CursorExpired):
                opened(log, last_acked=last)
        assert log.slots.get("default") == before
        assert rest(opened(log, last_acked=2)) == [3]

    def test_a_race_with_the_former_holder_ends_right_after_last_acked(self) -> None:
        place = PlainStore()
        theirs = open_log(place, create=True, env=Env(chance=SeededChance(1)))
        fill(theirs, ManualClock())
        line = FaultyStore(place)
        ours = open_log(line, env=Env(clock=ManualClock(), chance=SeededChance(2)))
        opened(theirs, holder="former").close()
        moved = []

        def interfere(call: object) -> None:  # whenever we are about to claim, someone takes the slot and moves on
            if len(moved) < 3 and call.name == "put_if" and call.path.startswith("slots/") and call.stage == "before":
                moved.append(call)
                other = opened(theirs)
                found = other.next_descriptors(1)
                if found:
                    other.ack_through(found[0].sequence)

        line.hook(interfere)
        consumer = opened(ours, last_acked=0)
        line.unhook()
        assert len(moved) == 3
        assert rest(consumer) == [1, 2, 3]
        assert theirs.slots.get("default").position == 3


class TestInvalidSlots:
    def test_opening_one_raises_an_error_with_the_repair_and_claims_nothing(self, log: ObjectLog) -> None:
        opened(log, holder="former").close()
        invalidate(log)
        before = log.slots.get("default")
        for options in ({}, {"last_acked": 1}, {"start": "now"}, {"holder": "former"}):
            with pytest.raises(SlotInvalid, match=r"horizon.*'strandline slots reset'"):
                opened(log, **options)
        assert log.slots.get("default") == before

    def test_an_explicit_reset_heals_it(self, log: ObjectLog) -> None:
        opened(log)
        invalidate(log)
        log.slots.reset("default", 4)
        assert rest(opened(log)) == [2, 3]

    def test_its_consumer_gets_an_error_at_the_next_read_and_acknowledgement(self, log: ObjectLog) -> None:
        consumer = opened(log)
        consumer.next_batch()
        invalidate(log)
        for call in (consumer.next_batch, lambda: consumer.ack_through(0), consumer.flush):
            with pytest.raises(SlotInvalid, match="reset"):
                call()
        assert consumer.next_to_ack == 0
        assert log.slots.get("default").position == 0

    def test_a_trimmed_position_is_reported_even_before_the_slot_is_invalidated(self, log: ObjectLog) -> None:
        opened(log)
        log._lister.cell.update(OpId(uuid4()), lambda head: replace(head, floor=4))
        for options in ({}, {"last_acked": 2}):
            with pytest.raises(SlotInvalid, match="wal-removed"):
                opened(log, **options)

    def test_the_consumer_of_a_dropped_slot_gets_an_error_and_the_next_one_creates_it_again(
        self, log: ObjectLog
    ) -> None:
        consumer = opened(log)
        rest(consumer)
        consumer.ack_through(2)
        log.slots.drop("default")
        for call in (consumer.next_batch, lambda: consumer.ack_through(3), consumer.flush):
            with pytest.raises(SlotInvalid, match="dropped"):
                call()
        again = opened(log)
        assert rest(again) == [0, 1, 2, 3]
        with pytest.raises(Fenced):
            consumer.flush()

    def test_a_consumer_that_reads_is_not_idle(self, clock: ManualClock) -> None:
        log = open_log(
            PlainStore(), create=True, retention="consumed", limits=SlotLimits(idle_seconds=60), env=Env(clock=clock)
        )
        fill(log, clock)
        consumer, other = opened(log, "alive"), opened(log, "gone")
        for _ in range(8):
            clock.advance(25)
            consumer.flush()
            log.trim()
        assert consumer.next_batch().sequence == 0
        with pytest.raises(SlotInvalid, match="idle-timeout"):
            other.next_batch()

    def test_reading_writes_nothing_where_no_slot_can_be_idle(self, log: ObjectLog, clock: ManualClock) -> None:
        line = FaultyStore(log.store)
        consumer = opened(open_log(line, env=Env(clock=clock)))
        line.log.clear()
        clock.advance(1e6)
        rest(consumer)
        consumer.flush()
        assert line.named("put", "put_if", "delete") == ()


def test_a_log_that_was_put_back_behind_its_consumer_is_not_taken_for_an_empty_one(log: ObjectLog) -> None:
    backup = bytes(log.store.get("head").data)
    for number in range(4, 7):
        append(log, b"later", number=number)
    consumer = opened(log)
    assert rest(consumer) == list(range(7))
    log.store.put("head", backup)
    for call in (consumer.next_batch, lambda: consumer.next_descriptors(1), lambda: next(consumer.batches())):
        with pytest.raises(Diverged, match="restored"):
            call()


def test_batches_can_be_fetched_in_another_process(tmp_path: Path) -> None:
    log = open_log(str(tmp_path), create=True)
    for number in range(3):
        append(log, b"%d" % number, number=number)
    consumer = opened(log)
    descriptors = consumer.next_descriptors(3)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(consumer.fetch_handle().fetch, descriptors))
    assert [batch.values for batch in found] == [[b"0"], [b"1"], [b"2"]]
    assert found == [consumer.fetch_handle().fetch(descriptor) for descriptor in descriptors]


class TestPositionsWithinBatches:
    """As a follower leaves them that shares the slot."""

    @pytest.mark.parametrize(("position", "first"), [(1, 0), (2, 0), (5, 2), (7, 2), (9, 3)])
    def test_the_batch_that_holds_the_position_comes_first_and_whole(
        self, log: ObjectLog, position: int, first: int
    ) -> None:
        log.slots.create("default", position)
        consumer = opened(log)
        batch = consumer.next_batch()
        assert (batch.sequence, consumer.next_to_ack) == (first, first)
        assert batch.records["offset"][0].as_py() == (0, 3, 4, 8)[first]
        consumer.ack_through(first)
        assert log.slots.get("default").position == (3, 4, 8, 10)[first]

    def test_a_last_acked_before_that_batch_leaves_the_position(self, log: ObjectLog) -> None:
        log.slots.create("default", 5)
        assert rest(opened(log, last_acked=1)) == [2, 3]
        assert log.slots.get("default").position == 5

    def test_a_slot_of_a_follower_can_be_taken_over(self, log: ObjectLog) -> None:
        log.slots.create("default", 0)
        log.slots.claim("default", "follower").advance(Cursor(log.log_id, 6))
        assert rest(opened(log)) == [2, 3]


class TestBatches:
    def test_offsets_and_absent_values_are_given_as_they_are(self, log: ObjectLog) -> None:
        with log.producer() as producer:
            producer.append(key=b"k", value=b"v")
            producer.append(key=b"k", op=1)
        (batch,) = opened(log, start=10).batches()
        assert batch.values == [b"v", None]
        assert batch.records["offset"].to_pylist() == [10, 11]
        assert batch.metadata == ()

    def test_a_batch_without_metadata_leaves_the_lag(self, log: ObjectLog) -> None:
        consumer = opened(log)
        consumer.next_batch()
        assert consumer.lag is None

    def test_a_descriptor_of_another_kind_of_queue_is_refused(self, log: ObjectLog) -> None:
        consumer = opened(log)
        with pytest.raises(InvalidInput, match="another queue"):
            consumer.fetch_handle().fetch(QueueEntry(0, "x"))

    def test_by_default_every_hundredth_acknowledgement_is_durable(self, clock: ManualClock) -> None:
        place = PlainStore()
        log = open_log(place, create=True, env=Env(clock=clock))
        for number in range(250):  # more than the head keeps: most are found through chunks
            append(log, b"%d" % number, number=number)
        line = FaultyStore(place)
        consumer = opened(open_log(line, env=Env(clock=clock)))
        descriptors = consumer.next_descriptors(1000)
        assert [found.sequence for found in descriptors] == list(range(250))
        assert len(consumer) == 250
        line.log.clear()
        durable = []
        for descriptor in descriptors:
            consumer.ack(descriptor.sequence)
            if line.log:
                durable.append(descriptor.sequence)
                line.log.clear()
        assert durable == [99, 199]
        assert len(consumer) == 50
        assert rest(opened(log)) == list(range(200, 250))
        again = opened(log, last_acked=69)
        assert again.next_batch().values == [b"70"]
        assert [found.sequence for found in again.descriptors_between(60, 130)] == list(range(60, 131))

    def test_opening_and_reading_cost_the_same_however_long_the_backlog(self) -> None:
        costs = []
        for length in (120, 480):
            place = PlainStore()
            log = open_log(place, create=True, env=Env(clock=ManualClock()))
            for number in range(length):
                append(log, b"x", number=number)
            line = FaultyStore(place)
            consumer = opened(open_log(line, env=Env(clock=ManualClock())), last_acked=length // 2)
            consumer.next_batch()
            consumer.ack_through(length // 2 + 1)
            costs.append(len(line.log))
        assert costs[0] == costs[1]

    def test_about_so_many_bytes_are_read_ahead(self, clock: ManualClock) -> None:
        place = PlainStore()
        log = open_log(place, create=True, env=Env(clock=clock))
        for number in range(12):
            append(log, bytes(10_000), number=number)
        line = FaultyStore(place)
        consumer = opened(open_log(line, env=Env(clock=clock)))

        def reads() -> int:
            return sum(row.path.startswith("batches/") for row in line.log)

        for ahead, most in ((1, 1), (25_000, 2), (64 << 20, 8)):
            consumer = opened(open_log(line, env=Env(clock=clock)))
            line.log.clear()
            for count, _ in enumerate(consumer.batches(parallel=8, ahead=ahead), 1):
                assert reads() <= count + most
            assert reads() == 12


class TestDeadLetters:
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    def test_a_dead_letter_exists_only_with_the_bytes_that_it_names(self, log: ObjectLog, *, after: bool) -> None:
        (entry, *_) = log.head().tail
        whole = bytes(log.store.get(entry.location).data)
        log.store.put(entry.location, whole[:-1])
        for number in range(8):
            line = FaultyStore(log.store)
            consumer = opened(open_log(line, env=log.env), on_poison="dead-letter")
            line.crash_at(len(line.log) + number, after=after)
            with contextlib.suppress(Crash):
                consumer.next_batch()
            for item in log.store.list("dead-letter/default/"):
                if item.path.endswith(".json"):
                    letter = json.loads(bytes(log.store.get(item.path).data))
                    assert bytes(log.store.get(letter["bytes"]).data) == whole[:-1]
                    log.store.delete(letter["bytes"])
                    log.store.delete(item.path)
            assert log.slots.get("default").position == 0

    def test_each_slot_has_its_own_and_trimming_leaves_them(self, log: ObjectLog) -> None:
        for entry in log.head().tail:
            log.store.delete(entry.location)
        for slot in ("one", "two"):
            with opened(log, slot, on_poison="dead-letter") as consumer:
                assert consumer.next_batch() is None
                assert consumer.dead_letters == 4
        log.trim()
        log.trim(grace=0.0, everything=True)
        assert log.bounds().first == 10
        names = [item.path for item in log.store.list("dead-letter/")]
        assert names == [f"dead-letter/{slot}/{number:020d}.json" for slot in ("one", "two") for number in range(4)]

    def test_a_dead_letter_describes_its_batch_in_full(self, clock: ManualClock) -> None:
        log = open_log(PlainStore(), create=True)
        with log.producer() as producer:
            producer.produce([b"a"], b"\xff payload")
        (entry,) = log.head().tail
        log.store.delete(entry.location)
        consumer = opened(open_log(log.store, env=Env(clock=clock)), on_poison="dead-letter")
        assert consumer.next_batch() is None
        letter = json.loads(bytes(log.store.get(f"dead-letter/default/{0:020d}.json").data))
        assert letter["at"] == clock.now()
        assert letter["descriptor"]["metadata"] == [
            {"start": 0, "ingested": entry.metadata[0].ingested, "payload": b64encode(b"\xff payload").decode()}
        ]
        assert letter["descriptor"]["writer"] == str(entry.writer)
        for name in ("sequence", "location", "first", "count", "size", "number", "listed"):
            assert letter["descriptor"][name] == getattr(entry, name)

    def test_a_batch_of_a_newer_version_is_not_poison(self, log: ObjectLog) -> None:
        (entry, *_) = log.head().tail
        whole = bytearray(bytes(log.store.get(entry.location).data))
        whole[-2:] = (99).to_bytes(2, "little")
        log.store.put(entry.location, bytes(whole))
        consumer = opened(log, on_poison="dead-letter")
        with pytest.raises(UnsupportedVersion, match="upgrade"):
            consumer.next_batch()
        assert (consumer.next_to_read, consumer.dead_letters) == (0, 0)


class TestGauges:
    def test_the_conflict_rate_counts_writes_of_the_slot(self, log: ObjectLog) -> None:
        consumer = opened(log)  # 1 write: the claim
        consumer.next_descriptors(4)
        for sequence in range(3):
            consumer.ack_through(sequence)  # 3 more
        assert consumer.conflict_rate == 0.0
        opened(log)
        with pytest.raises(Fenced):
            consumer.ack_through(3)  # the fifth loses
        assert consumer.conflict_rate == 20.0


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"strandline_{name}", labels) or 0.0


class TestMetrics:
    def test_the_metrics_of_a_consumer_count_its_calls(self, log: ObjectLog) -> None:
        names = ("acknowledgements_total", "descriptors_total", "dead_letters_total")
        before = [sample(name) for name in names]
        log.store.delete(log.head().tail[3].location)
        consumer = opened(log, on_poison="dead-letter")
        consumer.next_descriptors(2)
        assert consumer.next_batch().sequence == 2
        assert consumer.next_batch() is None
        consumer.ack(0)
        consumer.ack(1)
        assert sample("acknowledgements_total") == before[0]  # nothing is durable yet
        consumer.ack(2)
        consumer.flush()
        assert [sample(name) - then for name, then in zip(names, before, strict=True)] == [4, 2, 1]

    def test_its_gauges_show_what_it_last_saw(self, clock: ManualClock) -> None:
        log = open_log(PlainStore(f"plain://{uuid4().hex}"), create=True)
        for number in range(3):
            with log.producer() as producer:
                producer.produce([b"x"] * (number + 1))
        labels = {"log": log.url, "slot": "gauged"}
        sizes = [entry.size for entry in log.head().tail]
        consumer = opened(open_log(log.store, env=Env(clock=clock)), "gauged", env=Env(clock=clock))
        (first,) = consumer.descriptors_between(0, 0)
        clock.set_wall(first.metadata[0].ingested + 7_000_000)
        consumer.next_batch()
        assert sample("queue_length", **labels) == 3
        assert sample("lag_records", **labels) == 6
        assert sample("lag_bytes", **labels) == sum(sizes)
        assert sample("lag_seconds", **labels) == 7.0
        consumer.ack_through(0)
        assert sample("queue_length", **labels) == len(consumer) == 2
        consumer.flush()
        assert sample("lag_records", **labels) == 5
        assert sample("lag_bytes", **labels) == sum(sizes[1:])


class TestPlaces:
    def test_an_address_an_opened_log_and_a_queue_are_places(self, log: ObjectLog) -> None:
        url = f"memory://places-{uuid4().hex}"
        with sl.open(url, create=True).producer() as producer:
            producer.produce([b"a"])
        for place in (url, sl.open(url), ObjectLogQueue(sl.open(url))):
            assert sl.Consumer(place, trim_every=None).next_batch().values == [b"a"]

    def test_the_consumer_is_a_public_name(self) -> None:
        assert sl.Consumer is Consumer

    def test_a_queue_of_version_1_is_one_too(self) -> None:
        url = f"memory://places-{uuid4().hex}"
        with open_queue(open_store(url), manifest="m/manifest", data="m").producer() as producer:
            producer.produce([b"a"], b"payload")
        paths = {"manifest": "m/manifest", "data": "m"}
        for place, options in ((url, {"format": QueueFormat(**paths)}), (open_queue(url, **paths), {})):
            batch = sl.Consumer(place, trim_every=None, **options).next_batch()
            assert (batch.values, batch.metadata[0].payload) == ([b"a"], b"payload")

    def test_where_there_is_no_log_there_is_no_consumer(self) -> None:
        with pytest.raises(NotALog):
            sl.Consumer(f"memory://nowhere-{uuid4().hex}")

    def test_anything_else_is_refused(self) -> None:
        for place, options in ((4711, {}), (object(), {}), ("memory://x", {"format": "queue-v9"})):
            with pytest.raises(InvalidInput):
                sl.Consumer(place, **options)

    def test_a_queue_that_was_not_claimed_raises(self, log: ObjectLog) -> None:
        with pytest.raises(InvalidInput, match="not claimed"):
            ObjectLogQueue(log).peek(0)


class TestVersion1:
    def test_a_last_acked_ahead_of_an_empty_queue_is_accepted(self) -> None:
        queue = open_queue(PlainStore())
        consumer = Consumer(queue, last_acked=7, trim_every=None)
        assert consumer.next_to_ack == 8
        for number in range(10):
            queue.append(records(b"%d" % number), writer=WriterId(uuid4()), number=0).result(120)
        assert [batch.sequence for batch in consumer.batches()] == [8, 9]
        consumer.ack_through(8)
        assert Consumer(queue, trim_every=None).next_to_ack == 9

    def test_a_last_acked_ahead_of_a_queue_that_holds_something_is_refused(self) -> None:
        queue = open_queue(PlainStore())
        queue.append(records(b"0"), writer=WriterId(uuid4()), number=0).result(120)
        with pytest.raises(Diverged):
            Consumer(queue, last_acked=1, trim_every=None)

    @pytest.mark.parametrize("options", [{"slot": "billing"}, {"start": "now"}, {"start": 0}])
    def test_it_has_one_slot_that_begins_with_what_is_listed(self, options: dict[str, object]) -> None:
        with pytest.raises(InvalidInput, match="one slot"):
            Consumer(open_queue(PlainStore()), **options)


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"on_poison": "ignore"}, "'raise' or 'dead-letter', not 'ignore'"),
            ({"last_acked": -1}, "last_acked is a whole number from 0"),
            ({"trim_every": 0}, "trim_every is a number of seconds above 0"),
            ({"trim_every": -1.0}, "trim_every is a number of seconds above 0"),
            ({"ack_every": 0}, "ack_every is a whole number from 1"),
        ],
    )
    def test_options_that_can_never_work_are_refused_before_anything_is_claimed(
        self, log: ObjectLog, options: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(InvalidInput, match=said):
            Consumer(log, **options)
        assert log.slots.list() == []
