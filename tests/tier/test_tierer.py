"""The tierer: every record in exactly one segment, whatever dies, fails or takes over on the way."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import (
    CorruptData,
    Fenced,
    Gap,
    InvalidInput,
    NotReady,
    OutcomeUnknown,
    StrandlineError,
    TransientStorageError,
)
from strandline.log.contract import Log
from strandline.log.object import ObjectLog
from strandline.log.object.log import open_log
from strandline.log.topic.contract import Assignment, Topic, TopicSubscription
from strandline.log.topic.memory import MemoryTopic
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import WriterId
from strandline.model.records import Op, record_batch
from strandline.model.retention import TIER_SLOT as SLOT
from strandline.model.retention import Consumed, MaxAge, MaxBytes
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState, TopicPartition
from strandline.storage.env import Env
from strandline.storage.objects.store import Payload
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.tier.attachment import ColdCell
from strandline.tier.copy.planning import written_time
from strandline.tier.copy.rounds import TieringStep
from strandline.tier.copy.segment_files import (
    forget_tails,
    list_segments,
    listed_since,
    plan_segment,
    segment_path,
    verify_segment,
)
from strandline.tier.copy.tierer import Tierer
from strandline.tier.metadata.manager import MetadataManager
from tests.matrix_cases import parts, some

TARGET = 8_000
BATCHES = 8
WRITER = WriterId(UUID(int=9))


def batch_of(number: int, count: int = 20) -> pa.RecordBatch:
    dice = SeededChance(number)
    return record_batch(
        timestamps=[1_000_000 * number + n for n in range(count)],
        ops=[Op.PUT] * count,
        keys=[b"k%d" % n for n in range(count)],
        values=[b"".join(dice.uuid().bytes for _ in range(6)) for _ in range(count)],
    )


def fill(log: Log, batches: int = BATCHES, first: int = 0) -> None:
    for number in range(first, first + batches):
        log.append(batch_of(number), writer=WRITER, number=number).result(120)


class HookedTopic:
    """Another topic, with something that happens before and after each publishing."""

    def __init__(self, inner: Topic, hook: Callable[[], None]) -> None:
        self._inner, self._hook = inner, hook
        self.partition_count = inner.partition_count
        self.topic_id = inner.topic_id

    def publish(self, partition: int, payload: bytes) -> int:
        return self.publish_all(partition, [payload])[0]

    def publish_all(self, partition: int, payloads: list[bytes]) -> list[int]:
        self._hook()
        offsets = list(self._inner.publish_all(partition, payloads))
        self._hook()
        return offsets

    def bounds(self, partition: int) -> Bounds:
        return self._inner.bounds(partition)

    def subscribe(self, starts: list[tuple[int, int]] = ()) -> tuple[TopicSubscription, Assignment]:  # type: ignore[assignment]
        return self._inner.subscribe(starts)

    def close(self) -> None:
        return


@dataclass
class World:
    """A store with a log and its cold tier, and a topic: what outlives every process."""

    clock: ManualClock = field(default_factory=ManualClock)
    chance: SeededChance = field(default_factory=lambda: SeededChance(1))
    plain: PlainStore = field(init=False)
    topic: MemoryTopic = field(default_factory=lambda: MemoryTopic(3))
    points: int = 0
    at: int = -1
    action: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.plain = PlainStore(clock=self.clock)
        log = open_log(self.plain, create=True, env=Env(clock=self.clock, chance=self.chance))
        ColdCell(self.plain, log.log_id, env=Env(clock=self.clock, chance=self.chance)).attach("plain://", "memory://")
        fill(log)

    def point(self) -> None:
        """Called before and after everything that a tierer does to the world."""
        if self.points == self.at and self.action is not None:
            action, self.action = self.action, None
            self.points += 1
            action()
        self.points += 1

    def log(self) -> ObjectLog:
        return open_log(self.plain, env=Env(clock=self.clock, chance=self.chance))

    def tierer(self, *, hooked: bool = False, store: FaultyStore | None = None, **options: object) -> Tierer:
        """A tierer in a process of its own: everything but the world is new."""
        forget_tails()
        faulty = store or FaultyStore(self.plain)
        if hooked:
            faulty.hook(lambda _: self.point())
        log = open_log(faulty, env=Env(clock=self.clock, chance=self.chance))
        events: Topic = HookedTopic(self.topic, self.point) if hooked else self.topic  # type: ignore[assignment]
        manager = MetadataManager.start(events, background=False, env=Env(clock=self.clock))
        manager.reconcile_assignment(range(3))
        announced = ColdCell(faulty, log.log_id, env=Env(clock=self.clock, chance=self.chance))
        chosen = {"target": TARGET, "grace": 0.0, "name": "orders", "announced": announced, **options}
        return Tierer(log, manager, faulty, env=Env(clock=self.clock, chance=self.chance), **chosen)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Let the log itself forget all that the cold tier has."""
        log = self.log()
        log.set_retention(MaxBytes(1))
        log.trim(grace=0.0)

    def segments(self) -> list[SegmentMetadata]:
        manager = MetadataManager.start(self.topic, background=False, env=Env(clock=self.clock))
        manager.reconcile_assignment(range(3))
        partition = Tierer(self.log(), manager, self.plain).partition
        return manager.current(partition, lambda cache: list(cache.segments(partition)))

    def finished(self) -> list[SegmentMetadata]:
        return [segment for segment in self.segments() if segment.state is SegmentState.COPY_FINISHED]

    def objects(self) -> list[str]:
        return [found.info.path for found in list_segments(self.plain, self.log().log_id, 0)]


@pytest.fixture
def world() -> Iterator[World]:
    forget_tails()
    yield World()
    forget_tails()


def cold(store: PlainStore, segments: list[SegmentMetadata]) -> pa.Table:
    spans = [span for segment in segments for span in plan_segment(store, segment, segment.start)]
    return pa.Table.from_batches([batch for span in spans for batch in span.fetch()])


def readable(world: World) -> None:
    """What is finished follows without a hole or a repetition, can be read, and is what was appended."""
    segments = world.finished()
    assert [segment.start for segment in segments[1:]] == [segment.end + 1 for segment in segments[:-1]]
    for segment in segments:
        verify_segment(world.plain, segment)
    if segments:
        first, end = segments[0].start, segments[-1].end + 1
        truth = pa.Table.from_batches([batch_of(number) for number in range(end // 20)])
        found = cold(world.plain, segments)
        assert found["offset"].to_pylist() == list(range(first, end))
        assert found.drop(["offset"]).equals(truth.slice(first))


def clean(world: World) -> None:
    """All records are in the cold tier, and nothing else is in the store or in the events."""
    readable(world)
    segments = world.segments()
    assert {segment.state for segment in segments} == {SegmentState.COPY_FINISHED}
    assert (segments[0].start, segments[-1].end + 1) == (0, world.log().bounds().next)
    assert world.objects() == [segment_path(segment.segment, segment.start) for segment in segments]
    assert world.log().slots.get(SLOT).position == segments[-1].end + 1


# --- copying ---------------------------------------------------------------------------------------------------


def test_small_batches_become_few_large_segments(world: World) -> None:
    done = world.tierer().run_once(everything=True)
    clean(world)
    assert 1 < len(done.copied) <= BATCHES / 2
    assert [segment.terms for segment in done.copied] == [((0, segment.start),) for segment in done.copied]
    assert done.removed == done.expired == done.swept == ()


def test_records_that_do_not_fill_a_segment_wait_for_the_linger_time(world: World) -> None:
    tierer = world.tierer(target=1 << 20, linger=60.0)
    assert tierer.run_once().copied == ()
    world.clock.advance(59)
    assert tierer.run_once().copied == ()
    world.clock.advance(1.1)
    assert len(tierer.run_once().copied) == 1
    clean(world)


@pytest.mark.parametrize("skew", [10 * 365 * 86400, -365 * 86400])
def test_batches_of_a_producer_with_a_wrong_clock_are_copied_when_the_tierer_saw_them_wait(
    world: World, skew: int
) -> None:
    tierer = world.tierer(target=1 << 20, linger=60.0)
    world.clock.set_wall(world.clock.now() - skew * 1_000_000)  # all that is listed is now ahead, or behind
    if skew > 0:
        assert tierer.run_once().copied == ()
        world.clock.advance(59)
        assert tierer.run_once().copied == ()
        world.clock.advance(1.1)
    assert len(tierer.run_once().copied) == 1
    clean(world)


def test_a_segment_of_times_ahead_expires_by_its_copy_or_by_what_comes_behind(world: World) -> None:
    first, second = (finished_at(listed, copied) for listed, copied in ((9000, 8_000_000), (8500, 200)))
    times = {first.segment: 9_000_000_000, second.segment: 8_500_000_000}
    listed, now = (lambda segment: times[segment.segment]), 1_000_000_000
    assert written_time([first, second], 0, listed, now) == 200_000
    assert written_time([first], 0, listed, now) == now
    assert written_time([second], 0, lambda _: 100, now) == 100


def finished_at(listed: int, copied: int) -> SegmentMetadata:
    segment = SegmentId(TopicPartition("t", UUID(int=1), 0), UUID(int=listed))
    return SegmentMetadata(
        segment=segment, start=0, end=1, broker=0, max_timestamp=0, event_timestamp=copied, terms=((0, 0),), size=1
    )


@pytest.mark.matrix
def test_no_range_is_copied_twice(world: World) -> None:
    world.tierer().run_once(everything=True)
    before = world.segments()
    assert world.tierer().run_once(everything=True).copied == ()
    assert world.segments() == before
    fill(world.log(), 3, BATCHES)
    assert world.tierer().run_once(everything=True).copied[0].start == before[-1].end + 1
    clean(world)


def test_the_slot_pins_the_log_from_what_is_not_copied_on(world: World) -> None:
    world.tierer().run_once()
    position = world.log().slots.get(SLOT).position
    assert 0 < position == world.finished()[-1].end + 1 <= world.log().bounds().next
    assert world.log().slots.floor() == position


def test_progress_is_reported(world: World) -> None:
    told: list[TieringStep] = []
    done = world.tierer(on_progress=told.append).run_once(everything=True)
    assert [(step.what, step.first, step.last, step.size) for step in told] == [
        ("copied", segment.start, segment.end, segment.size) for segment in done.copied
    ]


def test_a_write_ahead_log_is_copied_with_its_terms_and_times(tmp_path: Path) -> None:
    clock, store = ManualClock(), PlainStore()
    manager = MetadataManager.start(MemoryTopic(2), background=False, env=Env(clock=clock))
    manager.reconcile_assignment(range(2))
    with WalLog.open(str(tmp_path), env=Env(clock=clock)) as log:
        times = []
        for number, term in enumerate([1, 1, 3, 3, 7]):
            times.append(clock.now())
            log.append_batch(batch_of(number), term=term).result(120)
            clock.advance(5)
        tierer = Tierer(log, manager, store, env=Env(clock=clock, chance=SeededChance(3)))
        (segment,) = tierer.run_once(everything=True).copied
        assert segment.terms == ((1, 0), (3, 40), (7, 80))
        assert cold(store, [segment]).equals(pa.Table.from_batches(log.read()))
        assert manager.segment_for(tierer.partition, 3, 50).segment == segment.segment
        assert manager.segment_for(tierer.partition, 1, 50) is None
        for time in (moment + shift for moment in times for shift in (-1000, -1, 0, 1, 1000)):
            listed = log._catalog.written_since(time // 1000, 0, 100, now=1 << 62)
            assert listed_since(store, segment, time) == listed
        assert tierer.run_once(everything=True).copied == ()


def test_a_gap_between_the_tiers_is_reported_and_not_skipped(world: World) -> None:
    world.tierer().run_once()
    log = world.log()
    assert log.slots.get(SLOT).position < log.bounds().next  # there is something left to copy
    log.slots.drop(SLOT)
    log.slots.create("consumer", log.bounds().next)
    log.set_retention("consumed")
    log.trim()
    with pytest.raises(Gap, match="deleted before they were copied"):
        world.tierer().run_once(everything=True)


def test_unassigned_events_are_not_taken_for_an_empty_cold_tier(world: World) -> None:
    world.tierer().run_once(everything=True)
    manager = MetadataManager.start(world.topic, background=False, env=Env(clock=world.clock))
    tierer = Tierer(world.log(), manager, world.plain, env=Env(clock=world.clock))
    with pytest.raises(NotReady):
        tierer.run_once(everything=True)
    clean(world)


# --- crashes, failures and rivals at every point ---------------------------------------------------------------


def copy_and_expire(world: World) -> None:
    """All that a tierer ever does: it copies everything, and when the log has forgotten that, lets most of it go."""
    tierer = world.tierer(hooked=True, retention=MaxBytes(TARGET))
    tierer.run_once(everything=True)
    world.forget()
    assert tierer.run_once().expired


def points_of_all() -> int:
    world = World()
    copy_and_expire(world)
    return world.points


def points_of_a_copy() -> int:
    world = World()
    world.tierer(hooked=True).run_once(everything=True)
    return world.points


POINTS = points_of_a_copy()
ALL_POINTS = points_of_all()
PARTS = parts(21, kept=7)
"""Each takes every 21st point: one of them always, two in the matrix, and the others if there is time."""


def crashed() -> None:
    raise Crash


@pytest.mark.parametrize("part", PARTS)
def test_after_a_crash_at_any_point_the_next_tierer_reaches_a_clean_state(part: int) -> None:
    for at in range(part, ALL_POINTS, len(PARTS)):
        world = World(at=at, action=crashed)
        with pytest.raises(Crash):
            copy_and_expire(world)
        readable(world)
        world.tierer().run_once(everything=True)
        readable(world)
        segments = world.segments()
        assert {segment.state for segment in segments} == {SegmentState.COPY_FINISHED}
        assert world.objects() == [segment_path(segment.segment, segment.start) for segment in segments]
        assert world.log().slots.get(SLOT).position == segments[-1].end + 1 == world.log().bounds().next


@pytest.mark.matrix
@pytest.mark.parametrize("part", PARTS)
def test_a_rival_that_takes_over_at_any_point_leaves_every_range_once(part: int) -> None:
    for at in range(part, POINTS, len(PARTS)):
        world = World(at=at)
        rival = world.tierer()
        world.action = lambda rival=rival: rival.run_once(everything=True)
        slow = world.tierer(hooked=True)
        outcome: StrandlineError | None = None
        try:
            slow.run_once(everything=True)
        except Fenced as error:
            outcome = error
        readable(world)
        if outcome is not None:
            with pytest.raises(Fenced):
                slow.run_once(everything=True)
        world.tierer().run_once(everything=True)
        clean(world)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("stage", some(["before", "after"], 1))
def test_a_failure_at_any_call_of_the_store_is_made_good_by_the_next_round(stage: str, part: int) -> None:
    calm = World()
    counted = FaultyStore(calm.plain)
    calm.tierer(store=counted).run_once(everything=True)
    for number in range(part, len(counted.log), len(PARTS)):
        world = World()
        faulty = FaultyStore(world.plain)
        tierer = world.tierer(store=faulty)

        def fail(call: Call, wanted: int = number) -> None:
            if (call.number, call.stage) == (wanted, stage):
                raise TransientStorageError("The line broke.")

        faulty.hook(fail)
        for _ in range(2):
            with contextlib.suppress(TransientStorageError, OutcomeUnknown, Fenced):
                tierer.run_once(everything=True)
            readable(world)
        world.tierer().run_once(everything=True)
        clean(world)


def test_a_fenced_tierer_removes_its_object(world: World) -> None:
    faulty = FaultyStore(world.plain)
    slow = world.tierer(store=faulty)
    other = world.log()

    def take_over(call: Call) -> None:
        if call.name == "put" and call.stage == "after":
            faulty.unhook()
            other.slots.claim(SLOT, "somebody else")

    faulty.hook(take_over)
    with pytest.raises(Fenced):
        slow.run_once(everything=True)
    assert world.objects() == []
    assert world.segments() == []


def test_a_tierer_that_is_late_does_not_take_a_rival_s_copy_for_left_over(world: World) -> None:
    faulty = FaultyStore(world.plain)
    rival, late = world.tierer(store=faulty), world.tierer()
    late.run_once()
    fill(world.log(), BATCHES, BATCHES)
    copying, go_on = threading.Event(), threading.Event()

    def pause(call: Call) -> None:
        if call.name == "put" and call.stage == "after" and not copying.is_set():
            copying.set()
            assert go_on.wait(120)

    faulty.hook(pause)
    thread = threading.Thread(target=lambda: rival.run_once(everything=True))
    registry = late._ledger.registry
    ask, update = registry.current, registry.update

    def asked(*arguments: Any) -> Any:  # the rival takes over, and is in the middle of a copy when the late one looks
        if not copying.is_set():
            thread.start()
            assert copying.wait(120)
        return ask(*arguments)

    def updated(*arguments: Any) -> None:  # and finishes it before the late one tells that it removes it
        go_on.set()
        thread.join(120)
        update(*arguments)

    registry.current, registry.update = asked, updated
    try:
        with pytest.raises(Fenced):
            late.run_once(everything=True)
    finally:
        go_on.set()
        thread.join(120)
    clean(world)


def test_a_copy_is_published_before_its_object_is_put(world: World) -> None:
    faulty = FaultyStore(world.plain)
    told = []

    def look(call: Call) -> None:
        if call.name == "put" and call.stage == "before":
            known = {segment_path(segment.segment, segment.start): segment.state for segment in world.segments()}
            told.append(known[call.path])

    tierer = world.tierer(store=faulty)
    faulty.hook(look)
    tierer.run_once(everything=True)
    assert set(told) == {SegmentState.COPY_STARTED}


def test_a_damaged_copy_is_removed_and_reported(world: World) -> None:
    class Lying(FaultyStore):
        def put(self, path: str, data: Payload) -> None:
            super().put(path, data if path.endswith(".json") else b"".join(data)[:-100] + bytes(100))

    with pytest.raises(CorruptData):
        world.tierer(store=Lying(world.plain)).run_once(everything=True)
    assert world.objects() == []
    assert world.segments() == []
    assert world.log().slots.get(SLOT).position == 0
    world.tierer().run_once(everything=True)
    clean(world)


def test_an_object_that_lands_late_is_swept_after_its_grace(world: World) -> None:
    faulty = FaultyStore(world.plain)
    tierer = world.tierer(store=faulty, grace=100.0)
    faulty.delay_next("put")
    with pytest.raises(TransientStorageError):
        tierer.run_once(everything=True)
    faulty.land_late()
    (late,) = world.objects()
    done = tierer.run_once(everything=True)
    assert done.swept == ()
    assert late in world.objects()
    world.clock.advance(101)
    assert tierer.run_once(everything=True).swept == (late,)
    clean(world)


def test_a_lost_answer_to_the_finish_is_not_taken_for_a_failure(world: World) -> None:
    lost = []

    class Losing(HookedTopic):
        def publish_all(self, partition: int, payloads: list[bytes]) -> list[int]:
            offsets = super().publish_all(partition, payloads)
            if len(lost) < 2:
                lost.append(payloads)
                if len(lost) == 2:
                    raise TransientStorageError("The answer was lost.")
            return offsets

    topic = Losing(world.topic, lambda: None)
    manager = MetadataManager.start(topic, background=False, env=Env(clock=world.clock))  # type: ignore[arg-type]
    manager.reconcile_assignment(range(3))
    Tierer(world.log(), manager, world.plain, target=TARGET, env=Env(clock=world.clock)).run_once(everything=True)
    clean(world)


# --- retention -------------------------------------------------------------------------------------------------


def test_the_oldest_segments_go_until_the_rest_is_small_enough(world: World) -> None:
    world.tierer().run_once(everything=True)
    segments = world.finished()
    assert world.tierer(retention=MaxBytes(1)).run_once().expired == ()  # the log itself has all of it
    world.forget()
    most = sum(segment.size for segment in segments[2:])
    done = world.tierer(retention=MaxBytes(most)).run_once()
    assert [segment.segment for segment in done.expired] == [segment.segment for segment in segments[:2]]
    assert [segment.segment for segment in world.segments()] == [segment.segment for segment in segments[2:]]
    readable(world)
    assert len(world.objects()) == len(segments) - 2


def test_segments_go_by_when_their_last_batch_was_listed(world: World) -> None:
    world.tierer().run_once(everything=True)
    old = len(world.finished())
    world.clock.advance(100)
    world.forget()
    fill(world.log(), 4, BATCHES)
    tierer = world.tierer(retention=MaxAge(50))
    done = tierer.run_once(everything=True)
    assert len(done.expired) == old
    assert world.finished()
    readable(world)
    world.clock.advance(51)
    tierer.run_once()
    assert world.finished()
    world.forget()
    tierer.run_once()
    assert world.segments() == []
    fill(world.log(), 4, BATCHES + 4)  # with nothing left, it goes on at the slot
    assert tierer.run_once(everything=True).copied[0].start == (BATCHES + 4) * 20


def test_a_consumer_s_slot_pins_the_cold_tier_and_the_tierer_s_own_does_not(world: World) -> None:
    log = world.log()
    log.slots.create("billing", 0)
    world.tierer().run_once(everything=True)
    world.forget()
    segments = world.finished()
    for retention in (MaxBytes(1), MaxAge(1), Consumed()):
        world.clock.advance(10)
        assert world.tierer(retention=retention).run_once().expired == ()
    slot = log.slots.claim("billing", "me")
    slot.advance(Cursor(log.log_id, segments[1].end))  # it still needs the last record of the second
    assert [gone.start for gone in world.tierer(retention=Consumed()).run_once().expired] == [0]
    slot.advance(Cursor(log.log_id, segments[1].end + 1))
    assert len(world.tierer(retention=Consumed()).run_once().expired) == 1
    log.slots.drop("billing")
    assert world.tierer(retention=Consumed()).run_once().expired == ()
    assert len(world.tierer(retention=MaxBytes(1)).run_once().expired) == len(segments) - 2


def test_segments_that_only_a_hold_is_past_are_not_consumed(world: World) -> None:
    log = world.log()
    world.tierer().run_once(everything=True)
    world.forget()
    segments = world.finished()
    with log.hold(segments[-1].start, 600, retained_from=0):
        assert world.tierer(retention=Consumed()).run_once().expired == ()
        log.slots.create("billing", segments[1].start, retained_from=0)
        assert len(world.tierer(retention=Consumed()).run_once().expired) == 1


# --- the partition's end, and the service ----------------------------------------------------------------------


def test_deleting_the_partition_removes_everything_and_nothing_is_copied_afterwards(world: World) -> None:
    tierer = world.tierer()
    tierer.run_once(everything=True)
    tierer.delete_partition()
    assert world.objects() == world.segments() == []
    tierer.delete_partition()
    assert world.tierer().run_once(everything=True).copied == ()
    assert world.log().slots.list() == []


def test_the_partition_is_not_deleted_while_a_slot_needs_what_only_segments_have(world: World) -> None:
    tierer = world.tierer()
    tierer.run_once(everything=True)
    log = world.log()
    log.slots.create("billing", 3)
    log.set_retention("consumed")
    log.trim(grace=0)
    assert log.bounds().first > 3
    before = world.segments()
    with pytest.raises(InvalidInput, match=r"needs offset 3, but the log itself begins at"):
        tierer.delete_partition()
    assert world.segments() == before
    tierer.delete_partition(force=True)
    assert world.objects() == world.segments() == []


def test_the_policy_of_the_cold_tier_has_the_syntax_of_a_logs_policy(world: World) -> None:
    world.tierer(retention="bytes:1GiB").run_once(everything=True)
    with pytest.raises(InvalidInput, match="retention"):
        world.tierer(retention="a while")


def test_a_service_copies_until_it_is_stopped(world: World) -> None:
    stop = threading.Event()
    told = []

    def progress(step: TieringStep) -> None:
        told.append(step)
        if len(told) == 2:
            stop.set()

    tierer = world.tierer(on_progress=progress)
    tierer.run(stop)
    assert len(world.finished()) == 2
    readable(world)


def test_a_service_goes_on_after_what_passes_and_ends_when_it_is_fenced(world: World) -> None:
    faulty = FaultyStore(world.plain)
    rival = world.tierer()
    told = []

    def progress(step: TieringStep) -> None:
        told.append(step)
        rival.run_once(everything=True)

    tierer = world.tierer(store=faulty, on_progress=progress)
    faulty.fail_next("get_range", times=3)
    with pytest.raises(Fenced):
        tierer.run(threading.Event())
    assert told
    world.tierer().run_once(everything=True)
    clean(world)


@pytest.mark.parametrize("options", [{"target": 0}, {"target": 1 << 31}, {"linger": -1.0}, {"grace": -1.0}])
def test_options_that_cannot_work_are_refused(world: World, options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        world.tierer(**options)
