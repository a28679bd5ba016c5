"""What a node knows of all metadata partitions: caches, positions and who waits for them, under one lock. No I/O.

The lock is what makes a cache and its position one thing: an event is in the cache before the position passes it,
nobody sees the moment between, and a snapshot takes both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar, final

import pyarrow as pa

from strandline.errors import (
    CorruptData,
    InvalidInput,
    LogClosed,
    NotReady,
    OutcomeUnknown,
    StrandlineError,
)
from strandline.model.cursor import Bounds
from strandline.model.segments import SegmentEvent
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.readiness import (
    Begin,
    CatchingUp,
    Gate,
    Ready,
    Standing,
    Unassigned,
    not_ready,
    plan_begin,
)

T = TypeVar("T")

Decoded = tuple[int, SegmentEvent | CorruptData]
"""An event's offset, and the event or why it is none."""


class Taken(NamedTuple):
    """One partition at one moment: immutable tables of its cache, and the position to which they belong."""

    next: int
    tables: dict[str, pa.Table]


class Absorbed(NamedTuple):
    """What became of events."""

    applied: int
    refused: list[tuple[int, InvalidInput]]
    skipped: list[tuple[int, CorruptData]]
    gap: bool
    """Whether they do not go on where the position is: then nothing at or behind the hole was applied."""


@final
class Waiter:
    """One who waits until a partition was applied up to a position. Belongs to its state's lock."""

    __slots__ = ("error", "partition", "since", "upto", "woken")

    def __init__(self, partition: int, since: int) -> None:
        """Wait for nothing yet; ``since`` is what was applied when it began."""
        self.partition = partition
        self.since = since
        self.upto: int | None = None
        self.error: StrandlineError | None = None
        self.woken = threading.Event()


class MetadataState:
    """Caches and positions of the metadata partitions of one topic. Safe in threads; nothing blocks but for the lock.

    Questions are asked under the lock: they must be quick, and return values rather than iterators over a cache.
    """

    def __init__(self, count: int, held: Mapping[int, tuple[int, SegmentCache]] | None = None) -> None:
        """Begin with nothing assigned, and with what a snapshot held."""
        held = held or {}
        self._lock = threading.RLock()
        self._caches = [held[number][1] if number in held else SegmentCache() for number in range(count)]
        self._standings = [Standing(held[number][0] if number in held else 0) for number in range(count)]
        self._waiters: list[list[Waiter]] = [[] for _ in range(count)]
        # What was refused since the oldest waiter of a partition began: an event may be applied before the one who
        # published it has heard its offset.
        self._refused: list[dict[int, InvalidInput]] = [{} for _ in range(count)]
        self._saved = self._positions()
        self._closed = False

    # --- asking ------------------------------------------------------------------------------------------------

    def ask(self, partition: int, question: Callable[[SegmentCache], T]) -> Gate[T]:
        """The answer, or why there is none."""
        with self._lock:
            gate = self._standings[partition].gate(partition)
            return Ready(question(self._caches[partition])) if isinstance(gate, Ready) else gate

    def standing(self, partition: int) -> Standing:
        """Where a partition stands."""
        return self._standings[partition]

    def those(self, choose: Callable[[Standing], bool]) -> list[int]:
        """The partitions whose standing is chosen, ascending."""
        with self._lock:
            return [number for number, standing in enumerate(self._standings) if choose(standing)]

    # --- assigning: one thread at a time -----------------------------------------------------------------------

    def assign(self, partition: int) -> None:
        """It is assigned from now on, and answers nothing before :meth:`aim`."""
        with self._lock:
            self._standings[partition] = self._standings[partition].assign()

    def drop(self, partition: int) -> None:
        """It answers nothing from now on, nothing more is applied, and who waits for it is told."""
        with self._lock:
            self._standings[partition] = self._standings[partition].drop()
            self._fail(
                self._waiters[partition],
                lambda number: NotReady(
                    f"Metadata partition {number} was taken from this node: whether the event was accepted is not "
                    "known here. Try again on a node that follows it: what was done already is not done twice."
                ),
            )

    def resume(self, partition: int, bounds: Bounds) -> Begin:
        """Where to go on; if what was applied cannot be of this topic, or is too old, it is forgotten first."""
        with self._lock:
            begin = plan_begin(self._standings[partition].next, bounds)
            if begin.replay:
                self._forget(partition)
            self._standings[partition] = self._standings[partition].unaim().advance(begin.start)
            return begin

    def aim(self, partition: int, target: int) -> None:
        """The high-water mark is known: when everything below it is applied, it is ready."""
        with self._lock:
            self._standings[partition] = self._standings[partition].aim(target)

    def unaim(self, partition: int) -> None:
        """It has to be begun again, and answers nothing until then."""
        with self._lock:
            self._standings[partition] = self._standings[partition].unaim()

    def forget(self, partition: int) -> None:
        """What was applied is worth nothing: it has to be begun again, from the first event."""
        with self._lock:
            self._forget(partition)

    def _forget(self, partition: int) -> None:
        self._caches[partition] = SegmentCache()
        self._standings[partition] = self._standings[partition].forget()

    # --- following ---------------------------------------------------------------------------------------------

    def absorb(self, partition: int, events: Iterable[Decoded]) -> Absorbed:
        """Apply events that come next. Those applied before are passed over; so are all of a dropped partition.

        What the cache fails at for another reason than the event leaves nothing that could be trusted: the partition
        is emptied and stopped, and the error raised.
        """
        with self._lock:
            if not self._standings[partition].is_followed:
                return Absorbed(0, [], [], gap=False)
            try:
                return self._absorb(partition, events)
            except Exception as error:
                # Half an event may be in the cache, and neither a reader nor a snapshot may have it.
                self._forget(partition)
                self._stop(partition, f"applying an event failed ({error!r}); drop it and add it again to replay it")
                raise

    def _absorb(self, partition: int, events: Iterable[Decoded]) -> Absorbed:
        apply, begin = self._caches[partition].apply, self._standings[partition].next
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
        return Absorbed(at - begin - len(skipped) - len(refused), refused, skipped, gap)

    def _passed(self, partition: int, upto: int, refused: Sequence[tuple[int, InvalidInput]]) -> None:
        """The cache has it: now the position may say so, and who waits for it may go on."""
        self._standings[partition] = self._standings[partition].advance(upto)
        waiters = self._waiters[partition]
        if waiters:
            self._refused[partition].update(refused)
            for waiter in waiters:
                if waiter.upto is not None and waiter.upto <= upto:
                    waiter.woken.set()

    def stop(self, partition: int, offset: int, why: str) -> bool:
        """The event that comes next cannot be applied by this program: nothing is answered from here on.

        False, and nothing is changed, if it does not come next.
        """
        with self._lock:
            standing = self._standings[partition]
            if not standing.is_followed or standing.next != offset:
                return False
            self._stop(partition, why)
            return True

    def _stop(self, partition: int, why: str) -> None:
        self._standings[partition] = self._standings[partition].stop(why)
        self._fail(self._waiters[partition], lambda number: not_ready(CatchingUp(number, why)))

    # --- waiting -----------------------------------------------------------------------------------------------

    def expect(self, partition: int, check: Callable[[SegmentCache], None] | None = None) -> Waiter:
        """Begin to wait, before it is known for what: from now on what is refused is remembered.

        ``check`` is given the cache if that is ready. ``NotReady`` if it is not assigned or cannot go on,
        ``LogClosed`` after closing, and what the check raises: then nobody waits.
        """
        with self._lock:
            if self._closed:
                raise LogClosed("The metadata manager is closed; nothing was published. Start another one.")
            standing = self._standings[partition]
            gate = standing.gate(partition)
            if isinstance(gate, Unassigned) or (isinstance(gate, CatchingUp) and standing.trouble):
                raise not_ready(gate)
            if isinstance(gate, Ready) and check is not None:
                check(self._caches[partition])
            waiter = Waiter(partition, standing.next)
            self._waiters[partition].append(waiter)
            return waiter

    def await_position(self, waiter: Waiter, upto: int) -> None:
        """Wake the waiter when everything below ``upto`` was applied, at once if it was."""
        with self._lock:
            waiter.upto = upto
            if self._standings[waiter.partition].next >= upto:
                waiter.woken.set()

    def refusals(self, waiter: Waiter, offsets: Sequence[int]) -> list[InvalidInput]:
        """Why events at these offsets were refused, in their order."""
        with self._lock:
            refused = self._refused[waiter.partition]
            return [refused[offset] for offset in offsets if offset in refused] if refused else []

    def release(self, waiter: Waiter) -> None:
        """Wait no longer, and forget what was remembered for this waiter alone."""
        with self._lock:
            waiters, refused = self._waiters[waiter.partition], self._refused[waiter.partition]
            waiters.remove(waiter)
            if refused:
                oldest = min((other.since for other in waiters), default=None)
                for offset in [offset for offset in refused if oldest is None or offset < oldest]:
                    del refused[offset]

    def close(self) -> None:
        """Nobody waits any longer, and nothing more is expected; questions are answered as before."""
        with self._lock:
            self._closed = True
            for waiters in self._waiters:
                self._fail(
                    waiters,
                    lambda number: OutcomeUnknown(
                        f"The metadata manager was closed before metadata partition {number} had been applied so far: "
                        "an event that was being published may be there. Look it up, or publish the same again."
                    ),
                )

    def _fail(self, waiters: Sequence[Waiter], error: Callable[[int], StrandlineError]) -> None:
        for waiter in waiters:
            if not waiter.woken.is_set():
                waiter.error = error(waiter.partition)
                waiter.woken.set()

    # --- snapshots ---------------------------------------------------------------------------------------------

    def _positions(self) -> list[int]:
        return [standing.next for standing in self._standings]

    @property
    def is_unsaved(self) -> bool:
        """Whether any partition moved since the last snapshot."""
        with self._lock:
            return self._positions() != self._saved

    def take(self, partition: int) -> Taken | None:
        """A partition's cache with the very position that it has; None if it has none.

        One partition at a time: each stands for itself, and the follower waits for no more than one.
        """
        with self._lock:
            position = self._standings[partition].next
            return Taken(position, self._caches[partition].to_tables()) if position else None

    def saved(self, taken: Mapping[int, Taken]) -> None:
        """What was taken is stored durably."""
        with self._lock:
            self._saved = [taken[number].next if number in taken else 0 for number in range(len(self._standings))]
