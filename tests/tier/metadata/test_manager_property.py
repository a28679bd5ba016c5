"""Random lives of two managers on one topic: every ready answer is a full replay's. Broken twins must be caught.

Nothing runs by itself: who publishes, steps, is assigned, saves, crashes and comes back is drawn from a seed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from strandline.errors import CommitTimedOut, InvalidInput, NotReady
from strandline.formats.segment.events import decode_event, encode_event
from strandline.model.segments import PartitionDelete, PartitionDeleteState, SegmentEvent, SegmentState
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Crash
from strandline.testing.simdisk import CrashMode, SimulatedDisk, crash_everywhere
from strandline.tier.metadata import manager as manager_module
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.metadata.state import (
    AppliedEvents,
    CatchingUp,
    MetadataPartition,
    PartitionCopy,
    Ready,
    Unassigned,
)
from tests.tier.metadata.manager_doubles import (
    Events,
    copied,
    delete,
    managed,
    place,
    replayed,
    segment,
    settled,
    story,
    update,
)

METADATA = 3
PLACES = [place(metadata, number, METADATA) for metadata in range(METADATA) for number in range(2)]
STEPS = 60
SEEDS = 25
FEW = 5


@dataclass
class Node:
    """One node: its disk outlives it, and so does what is known of it from outside."""

    events: Events
    clock: ManualClock = field(default_factory=ManualClock)
    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    targets: dict[int, int] = field(default_factory=dict)
    """What was there when each of its partitions was assigned."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.manager: MetadataManager = managed(self.events, self.disk, self.clock, snapshot_interval=10, patience=1)
        self.targets = {}

    def assign(self, wanted: set[int]) -> None:
        ends = {number: self.events.inner.bounds(number).next for number in wanted}
        self.targets = {number: self.targets.get(number, ends[number]) for number in wanted}
        self.manager.reconcile_assignment(wanted)


class World:
    """Two nodes, one topic, and what a full replay says."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.events = Events(METADATA)
        self.nodes = [Node(self.events), Node(self.events)]
        self.done: Counter[str] = Counter()

    def run(self, steps: int = STEPS) -> None:
        acts = [
            (self.tell, 6), (self.write, 4), (self.follow, 6), (self.assign, 3), (self.save, 2),
            (self.crash, 1), (self.close, 1), (self.blink, 2),
        ]  # fmt: skip
        choices, weights = zip(*acts, strict=True)
        for _ in range(steps):
            node = self.chance.choice(self.nodes)
            act = self.chance.choices(choices, weights)[0]
            try:
                act(node)
            except Crash:
                self.done["died within"] += 1
                self.lost(node)
            self.done[act.__name__] += 1
            self.check()
        self.events.unknown = set()
        for node in self.nodes:
            self.settle(node)
        self.check(ready=True)

    def settle(self, node: Node) -> None:
        while True:
            node.assign(set(range(METADATA)))
            try:
                settled(node.manager)
            except Crash:
                self.lost(node)
            else:
                return

    # --- what happens ------------------------------------------------------------------------------------------

    def event(self) -> SegmentEvent:
        """Something that may or may not be a next step."""
        where = self.chance.choice(PLACES)
        if self.chance.random() < 0.05:
            return delete(where, self.chance.choice(list(PartitionDeleteState)), broker=self.chance.randrange(2))
        told = segment(where, self.chance.randrange(6), broker=self.chance.randrange(2))
        if self.chance.random() < 0.4:
            return told
        states = [SegmentState.COPY_FINISHED, SegmentState.DELETE_STARTED, SegmentState.DELETE_FINISHED]
        return update(told, self.chance.choices(states, [5, 1, 1])[0], broker=self.chance.randrange(2))

    def tell(self, node: Node) -> None:
        """Somebody else publishes; sometimes it is no event."""
        if self.chance.random() < 0.05:
            self.events.inner.publish(self.chance.randrange(METADATA), b"no event")
        for _ in range(self.chance.randrange(1, 5)):
            self.events.tell(self.event())

    def write(self, node: Node) -> None:
        """A node publishes, sometimes while the other one does."""
        event = self.event()
        if self.chance.random() < 0.3:
            self.events.before_publish = lambda: self.events.tell(self.event())
        try:
            node.manager.publish_all([event])
        except (InvalidInput, NotReady, CommitTimedOut) as error:
            self.done[type(error).__name__] += 1
        else:
            self.done["written"] += 1
            if self.events.home(event) not in self.events.unknown:
                assert self.sees(node.manager, event), "a write that returned is visible"
        finally:
            self.events.before_publish = lambda: None

    def sees(self, manager: MetadataManager, event: SegmentEvent) -> bool:
        if isinstance(event, PartitionDelete):
            return manager.deletion(event.partition) == event
        found = manager.get(event.segment)
        if event.state is SegmentState.DELETE_FINISHED:
            return found is None
        return found is not None and (found.state, found.broker) == (event.state, event.broker)

    def follow(self, node: Node) -> None:
        node.manager.step()

    def assign(self, node: Node) -> None:
        node.assign({number for number in range(METADATA) if self.chance.random() < 0.6})

    def save(self, node: Node) -> None:
        node.clock.advance(11)
        node.manager.step()

    def blink(self, node: Node) -> None:
        """High-water marks cannot be fetched for a while."""
        self.events.unknown = {number for number in range(METADATA) if self.chance.random() < 0.3}

    def crash(self, node: Node) -> None:
        """Lose power, perhaps while a snapshot is taken."""
        if self.chance.random() < 0.8:
            self.events.tell(self.event())
            node.disk.stop(len(node.disk.calls) + self.chance.randrange(12))
            self.save(node)
        self.lost(node)

    def lost(self, node: Node) -> None:
        node.disk.crash(self.chance.choice(list(CrashMode)))
        self.begin(node)

    def begin(self, node: Node) -> None:
        node.start()
        if self.chance.random() < 0.7:
            self.assign(node)

    def close(self, node: Node) -> None:
        node.manager.close()
        self.check()
        self.begin(node)

    # --- what holds --------------------------------------------------------------------------------------------

    def history(self, partition: int) -> list[SegmentEvent]:
        stream, _ = self.events.inner.subscribe([(partition, 0)])
        told: list[SegmentEvent] = []
        while messages := stream.take(0):
            for message in messages:
                # What cannot be decoded changes nothing, as this does not: a refused event in its place.
                nothing = update(segment(PLACES[0], 999))
                told.append(nothing if message.payload == b"no event" else decode_event(message.payload, "a test"))
        stream.close()
        return told

    def check(self, *, ready: bool = False) -> None:
        histories = [self.history(number) for number in range(METADATA)]
        for node in self.nodes:
            for number in range(METADATA):
                applied = node.manager.committed_offset(number) + 1
                assert applied <= len(histories[number])
                cache = replayed(histories[number][:applied])
                for where in PLACES[2 * number : 2 * number + 2]:
                    match node.manager.ask(where, story(where)):
                        case Ready(answer):
                            assert number in node.targets, "only what is assigned is answered"
                            assert applied >= node.targets[number], "what was there when it was assigned is in it"
                            assert answer == story(where)(cache), "an answer is a full replay's"
                            self.done["ready"] += 1
                        case Unassigned():
                            assert number not in node.targets
                            assert node.manager.segments(where) == []
                        case CatchingUp():
                            assert not ready


def lives(seeds: range) -> Counter[str]:
    done: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        done += world.done
    return done


def shown(done: Counter[str], seeds: range) -> None:
    """Each kind of trouble must really have come up, or the run has shown nothing."""
    for what in ("crash", "close", "assign", "save", "written", "InvalidInput", "NotReady", "ready", "died within"):
        assert done[what] > len(seeds) / 5, what


@pytest.mark.matrix
def test_every_ready_answer_is_a_full_replay_s(caplog):
    caplog.set_level("CRITICAL")
    shown(lives(range(FEW)), range(FEW))


@pytest.mark.matrix
def test_every_ready_answer_is_a_full_replay_s_in_the_whole_matrix(caplog):
    caplog.set_level("CRITICAL")
    shown(lives(range(FEW, SEEDS)), range(FEW, SEEDS))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_same_for_many_more_lives(caplog):
    caplog.set_level("CRITICAL")
    lives(range(SEEDS, 60 * SEEDS))


# --- broken twins ----------------------------------------------------------------------------------------------


def caught(monkeypatch: pytest.MonkeyPatch, twin: type[MetadataPartition], seeds: int = 300) -> str:
    monkeypatch.setattr(manager_module, "MetadataPartition", twin)
    for seed in range(seeds):
        try:
            World(seed).run()
        except AssertionError as error:
            return str(error)
    return ""


class Torn(MetadataPartition):
    """What the lock hides comes to light: between cache and position the process may save and die."""

    cache_first: bool

    def absorb(self, events):
        done = AppliedEvents(0, [], [], gap=False)
        for event in events:
            before = self.next
            if self.is_followed and before == event[0]:
                if self.cache_first:
                    done = super().absorb([event])
                after = event[0] + 1
                self.next = before if self.cache_first else after
                tear(self)
                self.next = after if self.cache_first else before
            if not self.cache_first or self.next == before:
                done = super().absorb([event])
        return done


class CacheFirst(Torn):
    """The right order: what is saved between is applied again, which changes nothing."""

    cache_first = True


class PositionFirst(Torn):
    """The wrong order: what is saved between has the position, and not the event."""

    cache_first = False


TEARS = random.Random(5)
SAVERS: dict[int, MetadataManager] = {}


def tear(partition: MetadataPartition) -> None:
    """Now and then: save, and die."""
    if TEARS.random() < 0.05 and id(partition) in SAVERS:
        SAVERS[id(partition)]._rounds.save()
        raise Crash("between cache and position")


@pytest.fixture
def torn(monkeypatch):
    real = MetadataManager.__init__

    def init(self, *args, **options):
        real(self, *args, **options)
        SAVERS.update((id(each), self) for each in self._partitions)

    monkeypatch.setattr(MetadataManager, "__init__", init)
    TEARS.seed(5)
    yield
    SAVERS.clear()


def test_a_position_that_goes_before_the_cache_is_caught(monkeypatch, torn, caplog):
    caplog.set_level("CRITICAL")
    assert "full replay" in caught(monkeypatch, PositionFirst)


@pytest.mark.matrix
def test_a_cache_that_goes_before_the_position_is_not_harmed_by_the_same(monkeypatch, torn, caplog):
    caplog.set_level("CRITICAL")
    assert caught(monkeypatch, CacheFirst, 10) == ""


class OldTarget(MetadataPartition):
    """The readiness target of the first assignment is kept for later ones."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.first: int | None = None

    def set_target(self, target):
        self.first = target if self.first is None else self.first
        super().set_target(None if target is None else self.first)


@pytest.mark.matrix
def test_a_target_that_is_not_fetched_again_is_caught(monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    assert "what was there when it was assigned" in caught(monkeypatch, OldTarget)


class HalfSnapshot(MetadataPartition):
    """The snapshot has the position of now, and the cache of the snapshot before."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.before: PartitionCopy | None = None

    def take(self):
        now = super().take()
        if now is None:
            return None
        before, self.before = self.before or now, now
        return PartitionCopy(now.next, before.tables)


def test_a_snapshot_of_the_position_without_its_cache_is_caught(monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    assert "full replay" in caught(monkeypatch, HalfSnapshot)


class Stale(MetadataPartition):
    """What a dropped partition once held is served when it is assigned again, before it is aimed."""

    def ask(self, question):
        gate = super().ask(question)
        return Ready(question(self._cache)) if isinstance(gate, Unassigned) else gate


def test_an_answer_for_a_partition_that_is_not_followed_is_caught(monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    assert "only what is assigned" in caught(monkeypatch, Stale)


# --- crash points ----------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(
    "reach",
    [
        pytest.param({"modes": (CrashMode.NOTHING,), "seeds": (0,), "limit": 1}, id="few"),
        pytest.param({"seeds": (0, 1), "limit": 4}, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_wherever_a_snapshot_is_cut_short_the_next_manager_is_right(reach, caplog):
    """Notes are positions of snapshots that were taken: a later start never falls behind the last one."""
    caplog.set_level("CRITICAL")
    where = PLACES[2]
    told = [event for number in range(3) for event in copied(where, number)]

    def topic() -> Events:
        events = Events(METADATA)
        for event in told:
            events.inner.publish(1, encode_event(event))
        return events

    def workload(disk: SimulatedDisk, notes: list[int]) -> None:
        manager = managed(topic(), disk)
        manager.reconcile_assignment([1])
        taken = manager._subscription.take(0)
        for upto in range(manager.committed_offset(1) + 3, len(told) + 1, 2):
            manager._follower._apply(1, [each for each in taken if each.offset < upto])
            manager._rounds.save()
            if not manager._rounds.is_unsaved:
                notes.append(manager.committed_offset(1))

    def check(disk: SimulatedDisk, notes: list[int]) -> None:
        events = topic()
        manager = managed(events, disk)
        resumed = manager.committed_offset(1) + 1
        assert resumed > max(notes, default=-1)
        manager.reconcile_assignment([1])
        settled(manager)
        assert events.delivered[1] == len(told) - resumed
        assert manager.ask(where, story(where)) == Ready(story(where)(replayed(told)))

    assert crash_everywhere(workload, check, **reach).states > 20
