"""State of all metadata partitions of a node: caches, positions and waiters, under one lock. No I/O.

The lock makes cache and position change together: an event is in the cache before the position passes it, no reader
sees the moment between, and a snapshot copies both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar, final

import pyarrow as pa

from strandline.errors import CorruptData, InvalidInput, LogClosed, NotReady, OutcomeUnknown, StrandlineError
from strandline.model.cursor import Bounds
from strandline.model.segments import SegmentEvent
from strandline.tier.metadata.cache import SegmentCache

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unassigned:
    """This node does not follow the metadata partition; another node may."""

    partition: int


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """This node follows the metadata partition and has not caught up."""

    partition: int
    why: str


@dataclass(frozen=True, slots=True)
class Ready(Generic[T_co]):
    """The answer, from at least all events published before the partition was assigned."""

    answer: T_co


Readiness = Unassigned | CatchingUp | Ready[T]
"""The outcome of a lookup."""

READY: Final = Ready(None)


def not_ready(readiness: Unassigned | CatchingUp) -> NotReady:
    """The readiness as a retryable error."""
    match readiness:
        case Unassigned(partition):
            return NotReady(
                f"Metadata partition {partition} is not assigned to this node, so the answer is unknown: ask a node "
                "that follows it, or try again when it is assigned to this one."
            )
        case CatchingUp(partition, why):
            return NotReady(f"Metadata partition {partition} is not ready: {why}.")


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """Position and assignment of one metadata partition, immutable."""

    next: int = 0
    """All events below it are applied to the cache."""
    assigned: bool = False
    target: int | None = None
    """The high-water mark to reach before the partition answers; None until following has (re)started."""
    trouble: str = ""
    """Why following stopped, if it did. Dropping and adding the partition, or a restart, clears it."""

    def readiness(self, partition: int) -> Readiness[None]:
        """Whether the partition answers."""
        if not self.assigned:
            return Unassigned(partition)
        if self.trouble:
            return CatchingUp(partition, self.trouble)
        if self.target is None:
            return CatchingUp(partition, "its high-water mark could not be fetched yet; ask again in a moment")
        if self.next < self.target:
            return CatchingUp(
                partition, f"it has applied {self.next} events of {self.target}; ask again when it has caught up"
            )
        return READY

    @property
    def is_waiting(self) -> bool:
        """Whether it is assigned and following has to (re)start."""
        return self.assigned and self.target is None and not self.trouble

    @property
    def is_followed(self) -> bool:
        """Whether events are applied."""
        return self.assigned and not self.trouble


def plan_replay(position: int, bounds: Bounds) -> tuple[int, str]:
    """Where to resume: at the applied position if the topic still has it.

    Otherwise the whole topic is replayed into an empty cache: the second value says why.

    >>> plan_replay(7, Bounds(3, 9)), plan_replay(0, Bounds(3, 9))
    ((7, ''), (3, ''))
    """
    if position > bounds.next:
        # Waiting for the end to reach the position would apply new events on top of those of another topic.
        return bounds.first, f"events up to {position} are applied and there are only {bounds.next}"
    if 0 < position < bounds.first:
        return bounds.first, f"events up to {position} are applied and those below {bounds.first} are deleted"
    return max(position, bounds.first), ""


Decoded = tuple[int, SegmentEvent | CorruptData]
"""An event's offset, and the event or the decoding error."""


class PartitionCopy(NamedTuple):
    """A consistent copy of one partition: its cache as immutable tables, and its position."""

    next: int
    tables: dict[str, pa.Table]


class AppliedEvents(NamedTuple):
    """The outcome of applying events."""

    applied: int
    refused: list[tuple[int, InvalidInput]]
    skipped: list[tuple[int, CorruptData]]
    gap: bool
    """Whether the events skip an offset: nothing at or after the gap was applied."""


@final
@dataclass(slots=True, eq=False)
class PositionWaiter:
    """A thread that waits until a partition is applied up to a position. Guarded by the state's lock."""

    partition: int
    since: int
    """The position when waiting began."""
    upto: int | None = None
    """None until the target is known."""
    error: StrandlineError | None = None
    woken: threading.Event = field(default_factory=threading.Event)


class MetadataState:
    """Caches and positions of the metadata partitions of one topic. Thread-safe; blocks only for the lock.

    Lookups run under the lock: they must be quick, and return values rather than iterators over a cache.
    """

    def __init__(self, count: int, held: Mapping[int, tuple[int, SegmentCache]] | None = None) -> None:
        """Start unassigned, with the caches and positions of a snapshot."""
        held = held or {}
        self._lock = threading.RLock()
        self._caches = [held[number][1] if number in held else SegmentCache() for number in range(count)]
        self._progress = [PartitionProgress(held[number][0] if number in held else 0) for number in range(count)]
        self._waiters: list[list[PositionWaiter]] = [[] for _ in range(count)]
        # Refusals since the oldest waiter of a partition began: an event may be applied before its publisher
        # knows its offset.
        self._refused: list[dict[int, InvalidInput]] = [{} for _ in range(count)]
        self._saved = self._positions()
        self._closed = False

    def ask(self, partition: int, question: Callable[[SegmentCache], T]) -> Readiness[T]:
        """The answer, or why the partition has none."""
        with self._lock:
            readiness = self._progress[partition].readiness(partition)
            return Ready(question(self._caches[partition])) if isinstance(readiness, Ready) else readiness

    def progress(self, partition: int) -> PartitionProgress:
        """Position and assignment of a partition."""
        return self._progress[partition]

    def partitions_where(self, choose: Callable[[PartitionProgress], bool]) -> list[int]:
        """The partitions that the predicate selects, ascending."""
        with self._lock:
            return [number for number, progress in enumerate(self._progress) if choose(progress)]

    # --- assignment: one thread at a time ----------------------------------------------------------------------

    def _change(self, partition: int, **changes: Any) -> None:
        self._progress[partition] = replace(self._progress[partition], **changes)

    def assign(self, partition: int) -> None:
        """Assign a partition; it answers nothing before :meth:`set_target`."""
        with self._lock:
            self._change(partition, assigned=True, target=None, trouble="")

    def drop(self, partition: int) -> None:
        """Unassign a partition: it answers nothing, applies nothing, and its waiters fail with ``NotReady``.

        Its position stays for a later assignment.
        """
        with self._lock:
            self._change(partition, assigned=False, target=None, trouble="")
            self._fail(
                self._waiters[partition],
                lambda number: NotReady(
                    f"Metadata partition {number} was unassigned from this node: whether the event was accepted is not "
                    "known here. Try again on a node that follows it: an applied event is not applied twice."
                ),
            )

    def resume(self, partition: int, bounds: Bounds) -> tuple[int, str]:
        """As :func:`plan_replay`; discards the cache first if its position is not in the topic any more."""
        with self._lock:
            start, replay = plan_replay(self._progress[partition].next, bounds)
            if replay:
                self.forget(partition)
            self._change(partition, next=start, target=None)
            return start, replay

    def set_target(self, partition: int, target: int | None) -> None:
        """Set the high-water mark: the partition is ready when all events below it are applied.

        None marks the partition for a restart; it answers nothing until then.
        """
        with self._lock:
            self._change(partition, target=target)

    def forget(self, partition: int) -> None:
        """Discard the cache: the partition is replayed from the first event."""
        with self._lock:
            self._caches[partition] = SegmentCache()
            self._change(partition, next=0, target=None)

    def absorb(self, partition: int, events: Iterable[Decoded]) -> AppliedEvents:
        """Apply the next events; skips events applied before, and all events of an unassigned partition.

        If the cache fails for a reason other than the event, its content cannot be trusted: the partition is emptied
        and stopped, and the error raised.
        """
        with self._lock:
            if not self._progress[partition].is_followed:
                return AppliedEvents(0, [], [], gap=False)
            try:
                return self._absorb(partition, events)
            except Exception as error:
                # Half an event may be in the cache; neither a reader nor a snapshot may see it.
                self.forget(partition)
                self._stop(partition, f"applying an event failed ({error!r}); drop it and add it again to replay it")
                raise

    def _absorb(self, partition: int, events: Iterable[Decoded]) -> AppliedEvents:
        apply, begin = self._caches[partition].apply, self._progress[partition].next
        at, gap = begin, False
        refused: list[tuple[int, InvalidInput]] = []
        skipped: list[tuple[int, CorruptData]] = []
        for offset, event in events:
            if offset != at:
                if offset < at:
                    continue
                gap = True
                break
            if isinstance(event, CorruptData):
                skipped.append((offset, event))
            else:
                try:
                    apply(event)
                except InvalidInput as error:
                    refused.append((offset, error))
            at += 1
        self._passed(partition, at, refused)
        return AppliedEvents(at - begin - len(skipped) - len(refused), refused, skipped, gap)

    def _passed(self, partition: int, upto: int, refused: Sequence[tuple[int, InvalidInput]]) -> None:
        """Advance the position after the cache, and wake the waiters."""
        self._change(partition, next=upto)
        waiters = self._waiters[partition]
        if waiters:
            self._refused[partition].update(refused)
            for waiter in waiters:
                if waiter.upto is not None and waiter.upto <= upto:
                    waiter.woken.set()

    def stop(self, partition: int, offset: int, why: str) -> bool:
        """Stop at the next event, which this version cannot apply; the partition answers nothing from here on.

        False, and no change, if ``offset`` is not the next event.
        """
        with self._lock:
            progress = self._progress[partition]
            if not progress.is_followed or progress.next != offset:
                return False
            self._stop(partition, why)
            return True

    def _stop(self, partition: int, why: str) -> None:
        self._change(partition, trouble=why)
        self._fail(self._waiters[partition], lambda number: not_ready(CatchingUp(number, why)))

    def expect(self, partition: int, check: Callable[[SegmentCache], None] | None = None) -> PositionWaiter:
        """Register a waiter before its target is known; refusals are remembered from now on.

        ``check`` gets the cache if the partition is ready. ``NotReady`` if it is not assigned or has stopped,
        ``LogClosed`` after closing, or what the check raises: then no waiter is registered.
        """
        with self._lock:
            if self._closed:
                raise LogClosed("The metadata manager is closed; nothing was published. Start another one.")
            progress = self._progress[partition]
            readiness = progress.readiness(partition)
            if isinstance(readiness, Unassigned) or (isinstance(readiness, CatchingUp) and progress.trouble):
                raise not_ready(readiness)
            if isinstance(readiness, Ready) and check is not None:
                check(self._caches[partition])
            waiter = PositionWaiter(partition, progress.next)
            self._waiters[partition].append(waiter)
            return waiter

    def wake_at(self, waiter: PositionWaiter, upto: int) -> None:
        """Wake the waiter when all events below ``upto`` are applied; at once if they are."""
        with self._lock:
            waiter.upto = upto
            if self._progress[waiter.partition].next >= upto:
                waiter.woken.set()

    def refusals(self, waiter: PositionWaiter, offsets: Sequence[int]) -> list[InvalidInput]:
        """The refusals of events at these offsets, in order."""
        with self._lock:
            refused = self._refused[waiter.partition]
            return [refused[offset] for offset in offsets if offset in refused] if refused else []

    def release(self, waiter: PositionWaiter) -> None:
        """Remove a waiter, and the refusals remembered for it alone."""
        with self._lock:
            waiters, refused = self._waiters[waiter.partition], self._refused[waiter.partition]
            waiters.remove(waiter)
            if refused:
                oldest = min((other.since for other in waiters), default=None)
                for offset in [offset for offset in refused if oldest is None or offset < oldest]:
                    del refused[offset]

    def close(self) -> None:
        """Fail all waiters and refuse new ones; lookups still answer."""
        with self._lock:
            self._closed = True
            for waiters in self._waiters:
                self._fail(
                    waiters,
                    lambda number: OutcomeUnknown(
                        f"The metadata manager was closed before metadata partition {number} was applied up to its "
                        "event: the event may be published. Look it up, or publish the same again."
                    ),
                )

    def _fail(self, waiters: Sequence[PositionWaiter], error: Callable[[int], StrandlineError]) -> None:
        for waiter in waiters:
            if not waiter.woken.is_set():
                waiter.error = error(waiter.partition)
                waiter.woken.set()

    def _positions(self) -> list[int]:
        return [progress.next for progress in self._progress]

    @property
    def is_unsaved(self) -> bool:
        """Whether any position moved since the last snapshot."""
        with self._lock:
            return self._positions() != self._saved

    def take(self, partition: int) -> PartitionCopy | None:
        """A consistent copy of a partition; None if nothing was applied.

        One partition per call, so the follower waits for one copy at most.
        """
        with self._lock:
            position = self._progress[partition].next
            return PartitionCopy(position, self._caches[partition].to_tables()) if position else None

    def saved(self, taken: Mapping[int, PartitionCopy]) -> None:
        """Record that these copies are stored durably."""
        with self._lock:
            self._saved = [taken[number].next if number in taken else 0 for number in range(len(self._progress))]
