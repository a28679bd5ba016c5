"""State of a metadata partition on a node: its cache, its position, and the threads that wait, under one lock. No I/O.

The lock makes cache and position change together: an event is in the cache before the position passes it, no reader
sees the moment between, and a snapshot copies both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar, final

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
    """A thread that waits until a partition is applied up to a position. Guarded by the partition's lock."""

    since: int
    """The position when waiting began."""
    upto: int | None = None
    """None until the target is known."""
    error: StrandlineError | None = None
    woken: threading.Event = field(default_factory=threading.Event)


class MetadataPartition:
    """Cache and position of one metadata partition of a topic. Thread-safe; blocks only for its lock.

    Lookups run under the lock: they must be quick, and return values rather than iterators over the cache.
    """

    def __init__(self, number: int, position: int = 0, cache: SegmentCache | None = None) -> None:
        """Start unassigned, with the position and cache of a snapshot, if there is one."""
        self.number = number
        self.next = self.saved = position
        """All events below ``next`` are applied to the cache, and all below ``saved`` are in a snapshot."""
        self.assigned = False
        self.target: int | None = None
        """The high-water mark to reach before the partition answers; None until following has (re)started."""
        self.trouble = ""
        """Why following stopped, if it did. Dropping and adding the partition, or a restart, clears it."""
        self._cache = cache or SegmentCache()
        self._lock = threading.RLock()
        self._waiters: list[PositionWaiter] = []
        # Refusals since the oldest waiter began: an event may be applied before its publisher knows its offset.
        self._refused: dict[int, InvalidInput] = {}
        self._closed = False

    @property
    def readiness(self) -> Readiness[None]:
        """Whether the partition answers."""
        if not self.assigned:
            return Unassigned(self.number)
        if self.trouble:
            return CatchingUp(self.number, self.trouble)
        if self.target is None:
            return CatchingUp(self.number, "its high-water mark could not be fetched yet; ask again in a moment")
        if self.next < self.target:
            return CatchingUp(
                self.number, f"it has applied {self.next} events of {self.target}; ask again when it has caught up"
            )
        return Ready(None)

    @property
    def is_waiting(self) -> bool:
        """Whether it is assigned and following has to (re)start."""
        return self.is_followed and self.target is None

    @property
    def is_followed(self) -> bool:
        """Whether events are applied."""
        return self.assigned and not self.trouble

    def ask(self, question: Callable[[SegmentCache], T]) -> Readiness[T]:
        """The answer, or why there is none."""
        with self._lock:
            readiness = self.readiness
            return Ready(question(self._cache)) if isinstance(readiness, Ready) else readiness

    # --- assignment: one thread at a time ----------------------------------------------------------------------

    def assign(self) -> None:
        """Assign the partition; it answers nothing before it has a target."""
        with self._lock:
            self.assigned, self.target, self.trouble = True, None, ""

    def drop(self) -> None:
        """Unassign the partition: it answers nothing, and its waiters fail with ``NotReady``; its position stays."""
        with self._lock:
            self.assigned, self.target, self.trouble = False, None, ""
            self._fail(
                lambda: NotReady(
                    f"Metadata partition {self.number} was unassigned from this node: whether the event was accepted "
                    "is not known here. Try again on a node that follows it: an applied event is not applied twice."
                )
            )

    def resume(self, bounds: Bounds) -> tuple[int, str]:
        """As :func:`plan_replay`; discards the cache first if its position is not in the topic any more."""
        with self._lock:
            start, replay = plan_replay(self.next, bounds)
            if replay:
                self.forget()
            self.next, self.target = start, None
            return start, replay

    def set_target(self, target: int | None) -> None:
        """Set the high-water mark that makes the partition ready; with None it answers nothing until a restart."""
        self.target = target

    def forget(self) -> None:
        """Discard the cache: the partition is replayed from the first event."""
        with self._lock:
            self._cache, self.next, self.target = SegmentCache(), 0, None

    def absorb(self, events: Iterable[Decoded]) -> AppliedEvents:
        """Apply the next events; skips events applied before, and all events while unassigned.

        If the cache fails for a reason other than the event, its content cannot be trusted: the partition is emptied
        and stopped, and the error raised.
        """
        with self._lock:
            if not self.is_followed:
                return AppliedEvents(0, [], [], gap=False)
            try:
                return self._absorb(events)
            except Exception as error:
                # Half an event may be in the cache; neither a reader nor a snapshot may see it.
                self.forget()
                self._stop(f"applying an event failed ({error!r}); drop it and add it again to replay it")
                raise

    def _absorb(self, events: Iterable[Decoded]) -> AppliedEvents:
        at, gap = self.next, False
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
                    self._cache.apply(event)
                except InvalidInput as error:
                    refused.append((offset, error))
            at += 1
        applied = at - self.next - len(skipped) - len(refused)
        self.next = at  # after the cache
        if self._waiters:
            self._refused.update(refused)
            for waiter in self._waiters:
                if waiter.upto is not None and waiter.upto <= at:
                    waiter.woken.set()
        return AppliedEvents(applied, refused, skipped, gap)

    def stop(self, offset: int, why: str) -> bool:
        """Stop at the next event, which this version cannot apply. False, and no change, if ``offset`` is not that."""
        with self._lock:
            if not self.is_followed or self.next != offset:
                return False
            self._stop(why)
            return True

    def _stop(self, why: str) -> None:
        self.trouble = why
        self._fail(lambda: not_ready(CatchingUp(self.number, why)))

    @contextmanager
    def expecting(self, check: Callable[[SegmentCache], None] | None = None) -> Iterator[PositionWaiter]:
        """A waiter whose target is not known yet, within the block; refusals are remembered meanwhile.

        ``check`` gets the cache if the partition is ready. ``NotReady`` if it is not assigned or has stopped,
        ``LogClosed`` after closing, or what the check raises.
        """
        with self._lock:
            if self._closed:
                raise LogClosed("The metadata manager is closed; nothing was published. Start another one.")
            readiness = self.readiness
            if not isinstance(readiness, Ready) and not self.is_followed:
                raise not_ready(readiness)
            if isinstance(readiness, Ready) and check is not None:
                check(self._cache)
            waiter = PositionWaiter(self.next)
            self._waiters.append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.remove(waiter)
                oldest = min((other.since for other in self._waiters), default=None)
                for offset in [offset for offset in self._refused if oldest is None or offset < oldest]:
                    del self._refused[offset]

    def wake_at(self, waiter: PositionWaiter, upto: int) -> None:
        """Wake the waiter when all events below ``upto`` are applied; at once if they are."""
        with self._lock:
            waiter.upto = upto
            if self.next >= upto:
                waiter.woken.set()

    def refusals(self, offsets: Sequence[int]) -> list[InvalidInput]:
        """The refusals of events at these offsets, in order."""
        with self._lock:
            return [self._refused[offset] for offset in offsets if offset in self._refused]

    def close(self) -> None:
        """Fail all waiters and refuse new ones; lookups still answer."""
        with self._lock:
            self._closed = True
            self._fail(
                lambda: OutcomeUnknown(
                    f"The metadata manager was closed before metadata partition {self.number} was applied up to its "
                    "event: the event may be published. Look it up, or publish the same again."
                )
            )

    def _fail(self, error: Callable[[], StrandlineError]) -> None:
        for waiter in self._waiters:
            if not waiter.woken.is_set():
                waiter.error = error()
                waiter.woken.set()

    def take(self) -> PartitionCopy | None:
        """A consistent copy of the partition; None if nothing was applied."""
        with self._lock:
            return PartitionCopy(self.next, self._cache.to_tables()) if self.next else None
