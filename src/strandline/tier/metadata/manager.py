"""The metadata manager: which segment holds this offset in this term, told from the events that all nodes follow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self, TypeVar

from strandline.errors import InvalidInput, LogClosed, NotReady, StrandlineError
from strandline.formats.segment.events import metadata_partition
from strandline.log.topic.common import check_partition
from strandline.log.topic.contract import Topic
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import Timeout, checked
from strandline.model.segments import (
    PartitionDelete,
    SegmentEvent,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.disk import DISK, Disk
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.tier.metadata.assignment import Assigner
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.event_follower import Follower
from strandline.tier.metadata.publisher import Publisher
from strandline.tier.metadata.readiness import CatchingUp, Gate, Ready, Unassigned, not_ready
from strandline.tier.metadata.snapshot import MetadataSnapshots
from strandline.tier.metadata.state import MetadataState, Taken, Waiter

T = TypeVar("T")

PATIENCE: Final = 30.0
"""Seconds that a write waits until this node has applied it."""

_LOGGER = logging.getLogger(__name__)
_ROUND: Final = 1.0
"""Seconds between two looks at what has to be tried again; also how long taking waits."""
_ROUTES: Final = 1 << 16
_BREATH: Final = 0.0005
"""Seconds between two partitions of a snapshot, for the follower and for readers."""
_PAUSE: Final = 0.01
"""Seconds that a manager without threads lets pass when there is nothing to do and somebody waits."""


@bound_to_process()
@checked
class MetadataManager:
    """Follows the segment events of the assigned metadata partitions, and answers from all of them or not at all.

    Safe in threads. Reads block for a moment at most; those that this node cannot know raise ``NotReady``, which is
    not "none". Writes return when the next read of this node sees them.
    """

    def __init__(
        self,
        events: Topic,
        snapshots: MetadataSnapshots | None,
        *,
        snapshot_interval: float = 60.0,
        patience: float = PATIENCE,
        background: bool = True,
        clock: Clock = CLOCK,
    ) -> None:
        """Use :meth:`start`."""
        self._events = events
        self._count = events.partition_count
        self._routes: dict[tuple[int, int], int] = {}
        """The metadata partitions of those asked for: finding one out costs as much as half a lookup."""
        self._snapshots = snapshots
        self._interval = snapshot_interval
        self._background = background
        self._clock = clock
        self._state = MetadataState(self._count, {} if snapshots is None else snapshots.load())
        self._subscription, assignment = events.subscribe()
        self._assigner = Assigner(events, assignment, self._state)
        self._publisher = Publisher(
            events, self._state, self._assigner, wait=self._wait, monotonic=clock.monotonic, patience=patience
        )
        self._follower = Follower(self._subscription, self._assigner, self._state, self._publisher.sent)
        self._due = clock.monotonic() + snapshot_interval
        self._saving = threading.Lock()
        self._closing = threading.Lock()
        self._closed = threading.Event()
        self._origin = Origin("The metadata manager", self)
        self._threads: list[threading.Thread] = []
        if background:
            self._threads = [
                threading.Thread(target=target, name=f"strandline-metadata-{name}", daemon=True)
                for name, target in (("follower", self._follow), ("keeper", self._keep))
            ]
            for thread in self._threads:
                thread.start()

    @classmethod
    def start(
        cls,
        events: Topic,
        snapshot_dir: Address | None = None,
        snapshot_interval: float = 60.0,
        *,
        patience: float = PATIENCE,
        background: bool = True,
        disk: Disk = DISK,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> Self:
        """A manager that has loaded its snapshot, if there is a usable one, and follows nothing yet.

        Args:
            events: the topic of segment events. It is not closed with the manager.
            snapshot_dir: this node's own folder for snapshots; None for none, so that each start replays everything.
            snapshot_interval: seconds between two snapshots, if anything was applied meanwhile.
            patience: seconds that a write waits until this node has applied it.
            background: whether threads follow and save. Without them nothing happens but in :meth:`step`, and in the
                calls that wait, which step themselves: for tests, and for one thread.
            disk: where the folder is.
            clock: tells when to save and how long to wait.
            chance: names temporary folders.
        """
        if not snapshot_interval > 0:
            raise InvalidInput(f"A snapshot cannot be taken every {snapshot_interval} seconds: use more than 0.")
        snapshots = None
        if snapshot_dir is not None:
            folder = as_address(snapshot_dir)
            snapshots = MetadataSnapshots(folder, events.partition_count, events.topic_id, disk, clock, chance)
        return cls(
            events,
            snapshots,
            snapshot_interval=snapshot_interval,
            patience=patience,
            background=background,
            clock=clock,
        )

    # --- which partitions --------------------------------------------------------------------------------------

    def reconcile_assignment(self, partitions: Iterable[int]) -> None:
        """Follow exactly these metadata partitions; calls are serialised.

        What is new goes on where it was applied, and is ready when everything is applied that is there now. If that
        cannot be found out the partition is assigned, not ready, and tried again: here, and by a timer.
        ``InvalidInput``, and nothing is changed, if there is no such partition.
        """
        wanted = {check_partition(partition, self._count) for partition in partitions}
        if self._closed.is_set():
            raise LogClosed("The metadata manager is closed: no partition was assigned. Start another one.")
        self._assigner.reconcile(wanted)

    def assigned_partitions(self) -> list[int]:
        """The metadata partitions that this node follows, ascending."""
        return self._state.those(lambda standing: standing.assigned)

    def committed_offset(self, partition: int) -> int:
        """The offset of the last event that was applied of a metadata partition; -1 is none."""
        return self._state.standing(check_partition(partition, self._count)).next - 1

    def metadata_partition(self, partition: TopicPartition) -> int:
        """The metadata partition that tells of a partition."""
        key = partition.topic_id.int, partition.partition
        number = self._routes.get(key)
        if number is None:
            number = metadata_partition(partition.topic_id, partition.partition, self._count)
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            self._routes[key] = number
        return number

    # --- reads -------------------------------------------------------------------------------------------------

    def ask(self, partition: TopicPartition, question: Callable[[SegmentCache], T]) -> Gate[T]:
        """The core of every read: the answer, or that this node does not follow it, or does not know enough yet.

        The question is asked under the lock that the follower needs: it is to be quick, to return values (a list
        rather than an iterator), and not to call the manager.
        """
        return self._state.ask(self.metadata_partition(partition), question)

    def current(
        self, partition: TopicPartition, question: Callable[[SegmentCache], T], *, timeout: Timeout = PATIENCE
    ) -> T:
        """The answer from everything that was published before this call.

        What decisions to delete or to tier are made on, and what looks for data. ``NotReady``, which is retryable,
        if it is not assigned, or was not applied in time; ``LogClosed`` after closing.
        """
        number = self.metadata_partition(partition)
        waiter = self._state.expect(number)
        try:
            try:
                end = self._events.bounds(number).next
            except StrandlineError as error:
                raise NotReady(
                    f"The high-water mark of metadata partition {number} cannot be fetched; try again: {error}"
                ) from error
            if end < waiter.since:
                self._assigner.replay(number, f"{waiter.since} events are applied and there are only {end}")
                raise not_ready(CatchingUp(number, "its topic was made anew and is replayed; ask again in a moment"))
            self._state.await_position(waiter, end)
            self._wait(waiter, timeout)
            if waiter.error is not None:
                raise waiter.error
            if not waiter.woken.is_set():
                raise not_ready(CatchingUp(number, f"it was not applied up to {end} in {timeout} s; ask again"))
        finally:
            self._state.release(waiter)
        match self._state.ask(number, question):
            case Ready(answer):
                return answer
            case gate:
                raise not_ready(gate)

    def segment_for(self, partition: TopicPartition, term: int, offset: int) -> SegmentMetadata | None:
        """The segment that holds an offset in a term; None if none does, or if this node does not follow it."""
        return self._known(partition, lambda cache: cache.segment_for(partition, term, offset), None)

    def highest_offset(self, partition: TopicPartition, term: int) -> int | None:
        """The highest offset of a term that was copied; None if none was, or if this node does not follow it."""
        return self._known(partition, lambda cache: cache.highest_offset(partition, term), None)

    def segments(self, partition: TopicPartition, term: int | None = None) -> list[SegmentMetadata]:
        """All segments, or those of a term, by their first offset; empty if this node does not follow it."""
        return self._known(partition, lambda cache: list(cache.segments(partition, term)), [])

    def unreferenced(self, partition: TopicPartition) -> list[SegmentMetadata]:
        """The segments that no lookup finds: being copied, being deleted, or superseded by others."""
        return self._known(partition, lambda cache: list(cache.unreferenced(partition)), [])

    def size(self, partition: TopicPartition, term: int) -> int:
        """The bytes of the segments of a term; 0 if this node does not follow it."""
        return self._known(partition, lambda cache: cache.size(partition, term), 0)

    def deletion(self, partition: TopicPartition) -> PartitionDelete | None:
        """How far its deletion is; None if it is not being deleted, or if this node does not follow it."""
        return self._known(partition, lambda cache: cache.deletion(partition), None)

    def get(self, segment: SegmentId) -> SegmentMetadata | None:
        """All that is known of one segment; None if that is nothing, or if this node does not follow it."""
        return self._known(segment.partition, lambda cache: cache.get(segment), None)

    def _known(self, partition: TopicPartition, question: Callable[[SegmentCache], T], none: T) -> T:
        match self.ask(partition, question):
            case Ready(answer):
                return answer
            case Unassigned():
                return none
            case CatchingUp() as gate:
                raise not_ready(gate)

    # --- writes ------------------------------------------------------------------------------------------------

    def add(self, segment: SegmentMetadata) -> None:
        """Tell of a segment whose copy starts; the next read of this node sees it.

        Raises:
            InvalidInput: its state is not copy started, or it is no next step. Found out before it was published,
                nothing was; otherwise another node was faster, and the event changed nothing.
            NotReady: the metadata partition is not assigned, or was taken away while it was waited for.
            CommitTimedOut: it is published, and this node had not applied it in time. To publish the same again does
                no harm.
            LogClosed, OutcomeUnknown: the manager is closed, or was while it was waited for.
        """
        self.publish_all((segment,))

    def update(self, update: SegmentUpdate) -> None:
        """Tell that a segment went on to another state; the next read of this node sees it. Raises as :meth:`add`."""
        self.publish_all((update,))

    def put_partition_delete(self, delete: PartitionDelete) -> None:
        """Tell how far a partition's deletion is; the next read of this node sees it. Raises as :meth:`add`."""
        self.publish_all((delete,))

    def publish_all(self, events: Sequence[SegmentEvent]) -> None:
        """Tell many things in one go, those of one partition in their order: they are waited for once.

        If one of them is refused before publishing, nothing is published. If some are when they are applied, the first
        of those errors is raised, and the others took effect. Raises as :meth:`add`.
        """
        for event in events:
            if isinstance(event, SegmentMetadata) and event.state is not SegmentState.COPY_STARTED:
                raise InvalidInput(
                    f"Segment {event.segment} cannot be added as {event.state}: add it as copy started, then update it."
                )
        rows: dict[int, list[SegmentEvent]] = {}
        for event in events:
            place = event.partition if isinstance(event, PartitionDelete) else event.segment.partition
            rows.setdefault(self.metadata_partition(place), []).append(event)
        self._publisher.publish(rows)

    # --- the work ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One round without waiting: take, apply, try again, save if it is time. False if nothing came.

        For a manager without threads; it has one thread then.
        """
        came = self._taken(0.0)
        self._tick()
        return came

    def _wait(self, waiter: Waiter, timeout: float) -> None:
        """Let time pass until the waiter was woken or the time is over."""
        if self._background:
            self._clock.wait(waiter.woken, timeout)
            return
        deadline = self._clock.monotonic() + timeout
        while not waiter.woken.is_set() and self._clock.monotonic() < deadline:
            if not self.step() and not waiter.woken.is_set():
                self._clock.sleep(_PAUSE)

    def _taken(self, timeout: float) -> bool:
        try:
            return self._follower.step(timeout)
        except StrandlineError as error:
            _LOGGER.warning("Segment events cannot be taken, and it is tried again: %s", error)
            if self._background:
                self._clock.wait(self._closed, _ROUND)
            return False

    def _tick(self) -> None:
        self._assigner.retry()
        if self._clock.monotonic() >= self._due:
            self._save()
            self._due = self._clock.monotonic() + self._interval

    def _save(self) -> None:
        """Take a snapshot if anything was applied since the last; if that fails, the next one has it all."""
        with self._saving:
            if self._snapshots is None or not self._state.is_unsaved:
                return
            try:
                taken = self._take()
                self._snapshots.save(taken)
            except Exception as error:  # noqa: BLE001 - the events are durable; what fails is only a short cut
                _LOGGER.warning("No snapshot of the segment cache was taken, and it is tried again: %s", error)
            else:
                self._state.saved(taken)

    def _take(self) -> dict[int, Taken]:
        taken = {}
        for partition in self._state.those(lambda standing: standing.next > 0):
            each = self._state.take(partition)
            if each is not None:
                taken[partition] = each
            self._clock.sleep(_BREATH)  # a lock that is taken again at once is never had by those who wait
        return taken

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self._taken(_ROUND)
            except Exception:
                _LOGGER.exception("Following segment events failed, and goes on.")
                self._clock.wait(self._closed, _ROUND)

    def _keep(self) -> None:
        while not self._clock.wait(self._closed, min(_ROUND, self._interval)):
            try:
                self._tick()
            except Exception:
                _LOGGER.exception("A round of the metadata manager failed, and it goes on.")

    def close(self) -> None:
        """Stop following, and take a last snapshot. Reads answer from what was applied; writes fail, waiting ones too.

        Closing twice is fine.
        """
        with self._closing:
            self._closed.set()
            self._state.close()
            self._subscription.close()
            for thread in self._threads:
                thread.join()
            self._threads = []
            self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
