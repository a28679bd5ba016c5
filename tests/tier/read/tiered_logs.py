"""What tests of logs in two tiers are made of: a log of either kind, its cold tier, and what was appended to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import UUID

import pyarrow as pa

from strandline.log.contract import Log
from strandline.log.object import ObjectLog
from strandline.log.object.head.index import bytes_from
from strandline.log.object.log import open_log
from strandline.log.topic.contract import Topic
from strandline.log.topic.memory import MemoryTopic
from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.rewind import rewind
from strandline.model.cursor import Limit, Span
from strandline.model.head import WriterId
from strandline.model.records import Op, record_batch
from strandline.model.retention import TIER_SLOT, MaxBytes, SlotState
from strandline.model.segments import COLD_FILE, SegmentMetadata, SegmentState, TopicPartition
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.simdisk import SimulatedDisk
from strandline.tier.attachment import ColdCell
from strandline.tier.copy.segment_files import forget_tails, list_segments
from strandline.tier.copy.tierer import Tierer
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.read.cold_reader import ColdReader
from strandline.tier.read.tiered_log import TieredLog

Kind = Literal["object", "wal"]
KINDS: tuple[Kind, ...] = ("object", "wal")
WRITER = WriterId(UUID(int=9))
COUNTS = (3, 1, 4, 2, 5, 1, 2, 3)
"""How many records each batch has, by turns."""
TERMS = (1, 1, 1, 3, 3, 7, 7, 7)
"""The term of each batch, in logs that have terms."""
PARTITIONS = 3

Row = tuple[int, bytes]


def value_at(offset: int, history: int = 0) -> bytes:
    """What the record at an offset holds in one history of a log, which does not compress."""
    dice = SeededChance(offset + (history << 32))
    return b"%d:" % offset + b"".join(dice.uuid().bytes for _ in range(4))


def rows(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    """Offset and value of each record."""
    return [
        pair
        for batch in batches
        for pair in zip(batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True)
    ]


def fetched(spans: Sequence[Span]) -> list[Row]:
    """Offset and value of each record of a plan."""
    return rows(batch for span in spans for batch in span.fetch())


@dataclass(frozen=True)
class Backup:
    """A copy of a log at one moment: where it ended, and its files or objects."""

    end: int
    disk: SimulatedDisk
    objects: dict[str, Any]


class Tiers:
    """What outlives every process: a log, the store of its segments, and the topic of their events."""

    def __init__(
        self, kind: Kind, *, batches: int = 0, terms: bool = False, topic: Topic | None = None, **options: Any
    ) -> None:
        self.kind = kind
        self.clock = ManualClock()
        self.chance = SeededChance(1)
        self.plain = PlainStore(clock=self.clock)
        self.topic: Topic = topic or MemoryTopic(PARTITIONS)
        self.disk = SimulatedDisk()
        self.truth: list[Row] = []
        self.firsts: list[int] = []
        """Where each batch begins."""
        self.times: list[int] = []
        """When each batch was appended."""
        self.history = 0
        """How often the log went on differently."""
        self._kept = 0
        """How many batches are of earlier histories: each history has a writer of its own."""
        self.options: dict[str, Any] = {"background": False, "tail_bytes": 0, "roll_bytes": 0, **options}
        self._wal: WalLog | None = None
        if kind == "object":
            open_log(self.plain, create=True, env=Env(clock=self.clock, chance=self.chance))
        self.cell().attach("plain://cold", "plain://events", partitions=PARTITIONS)
        if kind == "wal":  # where it is told in truth
            self.disk.write_new(f"/srv/log/{COLD_FILE}", [self.plain.get(COLD_FILE).data])
        for number in range(batches):
            self.append(COUNTS[number % len(COUNTS)], term=TERMS[number % len(TERMS)] if terms else None)

    def copy(self) -> Tiers:
        """Another world, in which everything is the same."""
        twin: Tiers = object.__new__(Tiers)
        twin.__dict__.update(self.__dict__)
        twin.clock, twin.chance = ManualClock(now=self.clock.now()), SeededChance(2)
        twin.plain = PlainStore(clock=twin.clock)
        twin.plain._objects, twin.plain._writes = dict(self.plain._objects), self.plain._writes
        twin.topic = MemoryTopic(PARTITIONS)
        for partition in range(PARTITIONS):
            for message in published(self.topic, partition):
                twin.topic.publish(partition, message)
        twin.truth, twin.firsts, twin.times = list(self.truth), list(self.firsts), list(self.times)
        twin.disk, twin._wal = self.disk.fork(), None
        return twin

    # --- the hot tier ------------------------------------------------------------------------------------------

    def hot(self, store: ObjectStore | None = None) -> ObjectLog | WalLog:
        """The log itself; one in an object store is opened anew each time."""
        if self.kind == "object":
            return open_log(store or self.plain, env=Env(clock=self.clock, chance=self.chance))
        if self._wal is None:
            self._wal = WalLog.open(
                "/srv/log", env=Env(disk=self.disk, clock=self.clock, chance=self.chance), **self.options
            )
        return self._wal

    def reopen(self) -> None:
        """Let a process end as it pleases, and the next one begin."""
        forget_tails()
        if self._wal is not None:
            self.disk.kill()
            self._wal = None

    def append(self, count: int, *, term: int | None = None, like: int | None = None) -> None:
        """Append a batch, of records of this history, or ``like`` those that another one has there."""
        first, number = len(self.truth), len(self.firsts) - self._kept
        writer = WriterId(UUID(int=WRITER.int + self.history))
        values = [value_at(offset, self.history if like is None else like) for offset in range(first, first + count)]
        batch = record_batch(timestamps=range(count), ops=[Op.PUT] * count, keys=values, values=values)
        hot = self.hot()
        self.times.append(self.clock.now())
        if isinstance(hot, WalLog):
            hot.append_batch(batch, writer=writer, number=number, term=term).result(120)
        else:
            hot.append(batch, writer=writer, number=number).result(120)
        self.clock.advance(5)
        self.firsts.append(first)
        self.truth += enumerate(values, first)

    def rewind(self, to: int) -> None:
        """Cut the write-ahead log back to an offset, as a replica's is that follows another primary from there on."""
        if self._wal is not None:
            self._wal.close()
            self._wal = None
        rewind("/srv/log", to, quarantine=f"/srv/aside-{self.history}", env=Env(disk=self.disk))
        self._went_back(to)

    def backup(self) -> Backup:
        """A copy of the log itself, as a backup takes it: without segments, their events, and what says where."""
        kept = {path: found for path, found in self.plain._objects.items() if path not in (*self.objects(), COLD_FILE)}
        return Backup(len(self.truth), self.disk.fork(), kept)

    def restore(self, backup: Backup, *, slots: bool = True) -> None:
        """Put the copy in the log's place; in an object log perhaps without the objects of its slots."""
        self._wal = None
        self.disk = backup.disk.fork()
        self.disk.kill()
        for path in [path for path in self.plain._objects if path not in (*self.objects(), COLD_FILE)]:
            if slots or not path.startswith("slots/"):
                del self.plain._objects[path]
        self.plain._objects |= {
            path: found for path, found in backup.objects.items() if slots or not path.startswith("slots/")
        }
        self._went_back(backup.end)

    def _went_back(self, to: int) -> None:
        self.history += 1
        self.truth = self.truth[:to]
        self.firsts = [first for first in self.firsts if first < to]
        self.times = self.times[: len(self.firsts)]
        self._kept = len(self.firsts)

    def trim(self, upto: int | None = None, *, grace: float = 0.0, store: ObjectStore | None = None) -> int:
        """Let the hot tier forget up to an offset, or all it may; returns where it begins."""
        hot = self.hot(store)
        wanted = hot.bounds().next if upto is None else upto
        if isinstance(hot, WalLog):
            return hot.trim(wanted)
        head = hot.head()
        hot.set_retention(MaxBytes(max(1, bytes_from(head, max(wanted, head.floor), hot.chunks))))
        hot.trim(grace=grace)
        self.clock.advance(1)
        hot.trim(grace=grace)
        return hot.bounds().first

    # --- the cold tier -----------------------------------------------------------------------------------------

    @property
    def partition(self) -> TopicPartition:
        return TopicPartition("", self.hot().log_id, 0)

    def cell(self, store: ObjectStore | None = None) -> ColdCell:
        return ColdCell(store or self.plain, self.hot().log_id, env=Env(clock=self.clock, chance=self.chance))

    def manager(self, topic: Topic | None = None) -> MetadataManager:
        """A metadata manager without threads."""
        manager = MetadataManager.start(topic or self.topic, background=False, env=Env(clock=self.clock))
        manager.reconcile_assignment(range(PARTITIONS))
        return manager

    def tiered(
        self, *, manager: MetadataManager | None = None, store: ObjectStore | None = None, **options: Any
    ) -> TieredLog:
        """The log with its cold tier, as a process of its own has it."""

        def reader(_: ExitStack) -> ColdReader:
            return ColdReader(manager or self.manager(), store or self.plain, self.partition, Env(clock=self.clock))

        return TieredLog(self.hot(store), self.cell(store), reader, **options)

    def tierer(self, *, store: ObjectStore | None = None, topic: Topic | None = None, **options: Any) -> Tierer:
        """A tierer in a process of its own; small segments, of which some have several batches."""
        where = store or self.plain
        chosen: dict[str, Any] = {"target": 400, "grace": 0.0, "announced": self.cell(store), **options}
        return Tierer(
            self.hot(store), self.manager(topic), where, env=Env(clock=self.clock, chance=self.chance), **chosen
        )

    def tier(self, **options: Any) -> None:
        """Copy everything."""
        self.tierer(**options).run_once(everything=True)

    def segments(self) -> list[SegmentMetadata]:
        partition = self.partition
        return self.manager().current(partition, lambda cache: list(cache.segments(partition)))

    def finished(self) -> list[SegmentMetadata]:
        return [segment for segment in self.segments() if segment.state is SegmentState.COPY_FINISHED]

    def objects(self) -> list[str]:
        return [found.info.path for found in list_segments(self.plain, self.hot().log_id, 0)]


class PointedTopic:
    """Another topic, with something that happens before and after each publishing."""

    def __init__(self, inner: Topic, point: Callable[[], None]) -> None:
        self._inner, self._point = inner, point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, partition: int, payload: bytes) -> int:
        return self.publish_all(partition, [payload])[0]

    def publish_all(self, partition: int, payloads: Sequence[bytes]) -> list[int]:
        self._point()
        offsets = list(self._inner.publish_all(partition, payloads))
        self._point()
        return offsets


def published(topic: Topic, partition: int) -> list[bytes]:
    """Everything that a topic has of one partition."""
    stream, _ = topic.subscribe([(partition, 0)])
    found: list[bytes] = []
    while len(found) < topic.bounds(partition).next:
        found += [message.payload for message in stream.take(1.0)]
    stream.close()
    return found


class Settled:
    """A tiered log that copies, and forgets in its hot tier, before each look at it. Hides the tierer's own slot.

    So each batch becomes a segment of its own, and what is said of batches holds of row groups, too. ``kept`` batches
    stay hot. For the suites of logs, which own the log that they test.
    """

    def __init__(self, log: TieredLog, tierer: Tierer, *, kept: int) -> None:
        self.tiered, self.tierer, self._kept = log, tierer, kept

    def __getattr__(self, name: str) -> Any:
        if name in ("append", "bounds", "start", "position_of", "plan", "read"):
            self.settle()
        return getattr(self.tiered, name)

    def settle(self) -> None:
        self.tierer.run_once(everything=True, sweep=False)
        hot = self.tiered.hot
        (tiered,) = [state.position for state in hot.slots.list() if state.name == TIER_SLOT]
        spans = hot.plan(hot.start(), Limit(upto=tiered))
        if len(spans) > self._kept:
            forget(hot, spans[-self._kept].first if self._kept else tiered)

    def retain_from(self, offset: int) -> None:
        """Forget everything below an offset, at which a batch begins, in both tiers."""
        self.settle()
        gone = [segment for segment in self.tierer._ledger.known().finished if segment.end < offset]
        self.tierer._ledger.remove_all(gone, "expired")
        forget(self.tiered.hot, max(offset, self.tiered.hot.bounds().first))

    @property
    def slots(self) -> SettledSlots:
        return SettledSlots(self)


Log.register(Settled)  # from Python 3.12 on, a protocol does not look at what __getattr__ finds


@dataclass(frozen=True)
class SettledSlots:
    """The slots of such a log."""

    log: Settled

    def __getattr__(self, name: str) -> Any:
        if name in ("create", "reset"):
            self.log.settle()
        return getattr(self.log.tiered.slots, name)

    def list(self) -> Sequence[SlotState]:
        return [state for state in self.log.tiered.slots.list() if state.name != TIER_SLOT]

    def floor(self) -> int | None:
        floor = self.log.tiered.slots.floor()
        return floor if any(state.pins for state in self.list()) else None


def forget(hot: Log, upto: int) -> None:
    """Let a hot log begin at an offset, whatever its slots say."""
    if isinstance(hot, WalLog):
        hot.trim(upto, beyond_slots=True)
    elif isinstance(hot, ObjectLog):
        hot._lister.cell.update(hot.slots.op(), lambda head: replace(head, floor=max(head.floor, upto)))


LIMITS = [
    Limit(),
    *(Limit(records=count) for count in (1, 2, 4, 7, 100)),
    *(Limit(bytes=count) for count in (1, 700, 2000, 5000)),
    *(Limit(batches=count) for count in (1, 2, 3)),
    Limit(records=6, batches=2, bytes=3000),
]


class DyingProcess:
    """A process that dies at one point of all that it does to the store and to the topic; ``points`` counts them."""

    def __init__(self, tiers: Tiers, at: int | None) -> None:
        forget_tails()  # a new process has read nothing yet, and so each makes the same calls
        self.tiers, self.at, self.points = tiers, at, 0
        self.store = FaultyStore(tiers.plain, clock=tiers.clock)
        self.store.hook(self._called)
        self.topic = PointedTopic(tiers.topic, self.point)

    def _called(self, _: Call) -> None:
        self.point()

    def point(self) -> None:
        """Die here, if this is the point."""
        if self.points == self.at:
            raise Crash
        self.points += 1
