"""Topics whose partitions are logs: write-ahead logs on the local disk, or object logs that nodes share; publishers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, final
from uuid import UUID, uuid5

import pyarrow as pa

from strandline.errors import (
    AlreadyExists,
    InvalidInput,
    LogClosed,
    NotALog,
    NotFound,
    OutcomeUnknown,
    TransientStorageError,
)
from strandline.formats.topic import decode_topic, encode_topic
from strandline.log.contract import Log, Receipt
from strandline.log.folders import FolderKind, check_new, check_new_in_store
from strandline.log.object.log import open_log
from strandline.log.topic.contract import NO_TOPIC, begun, check_count, check_partition
from strandline.log.topic.subscription import LogTopicSubscription, Pieces, Polling
from strandline.log.wal.log import ROLL_BYTES, WalLog
from strandline.log.writers import InDoubt, NumberedWriter, Refused
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import Positive, checked
from strandline.model.cursor import Bounds
from strandline.model.records import MAX_RECORD_BYTES, Op, record_batch
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.closing import Closing
from strandline.storage.disk import DISK, Disk, make_own_folder, replace_file
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.retry import Backoff
from strandline.storage.store import ABSENT, ObjectStore
from strandline.storage.urls import local_folder, open_store

_TOGETHER: Final = 8 << 20
"""Bytes of several callers in one batch."""

_BACKOFF: Final = Backoff(attempts=4)


class TopicPublisher(Protocol):
    """The publisher of one partition's log in this process. Safe in threads."""

    def publish(self, values: Sequence[bytes]) -> int:
        """Append at least one message, contiguously; returns the first offset when they are durable."""


@final
class WalPublisher:
    """Publishes to a write-ahead log; appends that arrive during a sync share the next one."""

    def __init__(self, log: WalLog) -> None:
        self._log = log
        self._add = log.add_value

    def publish(self, values: Sequence[bytes]) -> int:
        """Append messages as one frame; a single one shares a frame with those of other callers."""
        if len(values) == 1:
            group, offset = self._add(values[0])
            group.wait()
            return offset
        return _place(self._log.append_batch(_batch(values, self._log.clock.now())).result())


class _Waiting:
    """Messages that a caller waits for to be durable."""

    __slots__ = ("error", "first", "size", "values")

    def __init__(self, values: Sequence[bytes]) -> None:
        self.values = values
        self.size = sum(map(len, values))
        self.first: int | None = None
        self.error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        return self.first is not None or self.error is not None


@final
class BatchingPublisher:
    """Publishes to any log as a numbered writer: a lost answer duplicates nothing.

    One batch is sent at a time. Messages that arrive meanwhile, from any thread, share the next one. A batch with an
    unknown outcome is sent again under the same number, a few times; if that does not help, its callers get the
    error, it may or may not be in the log, and a new writer id is used from then on.
    """

    def __init__(self, log: Log, *, clock: Clock, chance: Chance, backoff: Backoff = _BACKOFF) -> None:
        self._clock = clock
        self._writer = NumberedWriter(log, clock=clock, chance=chance, retries=backoff)
        self._changed = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._sending = False

    def publish(self, values: Sequence[bytes]) -> int:
        """Append messages; a thread that finds no batch in flight sends the queue, the others wait for it."""
        _check(values)  # before queueing: an invalid message must not fail the others in its batch
        mine = _Waiting(values)
        with self._changed:
            self._queue.append(mine)
            try:
                while self._sending and not mine.is_settled:
                    self._changed.wait()
            except BaseException:
                if mine in self._queue:
                    self._queue.remove(mine)  # an interrupted caller does not expect it to be published later
                raise
            if sends := not mine.is_settled:
                self._sending = True
        if sends:
            self._send_until(mine)
        if mine.error is not None:
            raise mine.error
        if mine.first is None:
            raise AssertionError("a settled message has an offset or an error")
        return mine.first

    def _send_until(self, mine: _Waiting) -> None:
        try:
            while not mine.is_settled:
                self._send()
        finally:
            with self._changed:
                self._sending = False
                self._changed.notify_all()

    def _send(self) -> None:
        """Append one batch of the longest-waiting messages."""
        waiting = self._next()
        values = [payload for each in waiting for payload in each.values]
        try:
            first = self._append(values)
        except BaseException as error:
            with self._changed:
                for each in waiting:
                    each.error = error
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise
            return
        with self._changed:
            for each in waiting:
                each.first = first
                first += len(each.values)
            self._changed.notify_all()

    def _next(self) -> list[_Waiting]:
        with self._changed:
            waiting = [self._queue.popleft()]
            size = waiting[0].size
            while self._queue and (size := size + self._queue[0].size) <= _TOGETHER:
                waiting.append(self._queue.popleft())
            return waiting

    def _append(self, values: Sequence[bytes]) -> int:
        match self._writer.append(_batch(values, self._clock.now())):
            case Refused(error) | InDoubt(error):
                raise error
            case receipt:
                return _place(receipt)


def _place(receipt: Receipt) -> int:
    if receipt.first is None:
        raise OutcomeUnknown(
            f"{receipt.count} messages are in the log, but at unknown offsets: read the end of the log before "
            "they are published again."
        )
    return receipt.first


def _check(values: Sequence[bytes]) -> None:
    for payload in values:
        if not isinstance(payload, bytes):
            raise InvalidInput(f"A payload is bytes, not {type(payload).__name__}.")
        if len(payload) > MAX_RECORD_BYTES:
            raise InvalidInput(f"A payload of {len(payload):,} bytes is over the limit of {MAX_RECORD_BYTES:,}.")


def _batch(values: Sequence[bytes], now: int) -> pa.RecordBatch:
    count = len(values)
    return record_batch(timestamps=[now] * count, ops=[int(Op.PUT)] * count, keys=[None] * count, values=values)


_IDENTITY: Final = "topic.json"
_NEW: Final = ".new"
_TAIL_BYTES: Final = 4 << 20
IN_MEMORY: Final = Pieces(batches=1024, workers=1)


@bound_to_process()
@checked
class LogTopic(Closing):
    """A topic of one log for each partition. Satisfies :class:`~strandline.log.topic.contract.Topic`; safe in threads.

    A payload is a record's value. Messages published together are one batch of the log, and contiguous.
    Subscriptions read the logs in pieces, and hold the rest of one piece at most. A publish in this process wakes
    them; with ``polling`` they also poll for messages of other processes.
    """

    def __init__(
        self,
        logs: Sequence[Log],
        *,
        publishers: Sequence[TopicPublisher] | None = None,
        pieces: Pieces | None = None,
        polling: Polling | None = Polling(),  # noqa: B008 - a value that cannot change
        release: Callable[[], None] | None = None,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """Make the logs a topic, in their order; the same logs opened elsewhere are the same topic.

        ``publishers`` append the messages; by default each log is appended to under a new writer id. ``release`` is
        called once when the topic is closed.
        """
        check_count(len(logs))
        self.logs = tuple(logs)
        """The log of each partition, for retention and verification. Publish through the topic."""
        self.partition_count = len(self.logs)
        self._publishers: tuple[TopicPublisher, ...] = (
            tuple(BatchingPublisher(log, clock=clock, chance=chance) for log in logs)
            if publishers is None
            else tuple(publishers)
        )
        self._pieces = pieces or Pieces()
        self._polling = polling
        self._release = release
        self._clock = clock
        self._lock = threading.Lock()
        self._subscriptions: frozenset[LogTopicSubscription] = frozenset()
        self._closed = False
        self._origin = Origin(f"The topic of {self.logs[0]!r}", self)

    @property
    def topic_id(self) -> UUID:
        """Identifies the topic: derived from the ids of its logs."""
        return uuid5(NO_TOPIC, "/".join(str(log.log_id) for log in self.logs))

    def publish(self, partition: int, payload: bytes) -> int:
        """Append a message and return its offset when it is durable."""
        return self._append(partition, (payload,))

    def publish_all(self, partition: int, values: Sequence[bytes]) -> list[int]:
        """Append messages as one batch, all or none, and return their offsets when they are durable."""
        if not values:
            check_partition(partition, self.partition_count)
            return []
        first = self._append(partition, values)
        return list(range(first, first + len(values)))

    def _append(self, partition: int, values: Sequence[bytes]) -> int:
        publisher = self._publishers[check_partition(partition, self.partition_count)]
        if self._closed:
            raise LogClosed("The topic is closed: nothing was published; open it again.")
        try:
            return publisher.publish(values)
        finally:
            self._wake(partition)  # also after an error: the messages may be in the log

    def _wake(self, partition: int) -> None:
        for subscription in self._subscriptions:
            subscription.published(partition)

    def bounds(self, partition: int) -> Bounds:
        """The first retained offset and the high-water mark."""
        return self.logs[check_partition(partition, self.partition_count)].bounds()

    def subscribe(self, starts: Sequence[tuple[int, int]] = ()) -> tuple[LogTopicSubscription, LogTopicSubscription]:
        """Follow partitions, each from an offset on."""
        subscription = LogTopicSubscription(
            self.logs, pieces=self._pieces, polling=self._polling, closed=self._forget, clock=self._clock
        )
        with self._lock:
            if self._closed:
                raise LogClosed("The topic is closed: there is nothing to follow; open it again.")
            # Before it reads a log for the first time: later publishes wake it.
            self._subscriptions |= {subscription}
        return begun(subscription, starts)

    def _forget(self, subscription: LogTopicSubscription) -> None:
        with self._lock:
            self._subscriptions -= {subscription}

    def close(self) -> None:
        """End all subscriptions, and close the logs if the topic has opened them. Idempotent."""
        with self._lock:
            self._closed = True
            subscriptions = self._subscriptions
            release, self._release = self._release, None
        for subscription in subscriptions:
            subscription.close()
        if release is not None:
            release()


@checked
def open_wal_topic(
    folder: Address,
    partition_count: int,
    *,
    create: bool = True,
    roll_bytes: Positive = ROLL_BYTES,
    tail_bytes: int = _TAIL_BYTES,
    disk: Disk = DISK,
    clock: Clock = CLOCK,
    chance: Chance = CHANCE,
) -> LogTopic:
    """Open the topic in a folder, each partition a write-ahead log in a folder of its own, and create it if needed.

    Published messages are durable; publishes that arrive during a sync share the next one. One process has it open at a
    time. ``InvalidInput``, naming both, if it has another number of partitions, ``NotALog`` if there is none and
    ``create`` is false, ``Fenced`` while another process has it open.
    """
    check_count(partition_count)
    folder = as_address(folder)
    path = f"{folder}/{_IDENTITY}"
    found: int | None = None
    with contextlib.suppress(NotFound):
        found = decode_topic(disk.read(path), path)
    if found is not None:
        _check_same(folder, found, partition_count)
    elif create:
        check_new(folder, FolderKind.TOPIC, disk=disk)
        make_own_folder(folder, disk=disk)
    else:
        raise _no_topic(folder)
    with contextlib.ExitStack() as held:
        logs = [
            held.enter_context(
                WalLog.open(
                    f"{folder}/{_name(partition)}",
                    create=found is None,
                    roll_bytes=roll_bytes,
                    tail_bytes=tail_bytes,
                    disk=disk,
                    clock=clock,
                    chance=chance,
                )
            )
            for partition in range(partition_count)
        ]
        if found is None:
            # Last: an existing topic is complete, and a missing log is damage.
            replace_file(disk, path, encode_topic(partition_count), temporary=path + _NEW)
        return LogTopic(
            logs,
            publishers=[WalPublisher(log) for log in logs],
            pieces=IN_MEMORY,
            polling=None,  # nobody else can write the logs
            release=held.pop_all().close,
            clock=clock,
        )


@checked
def open_object_topic(
    url: Address,
    partition_count: int,
    *,
    create: bool = True,
    options: Mapping[str, str] | None = None,
    polling: Polling | None = None,
    clock: Clock = CLOCK,
    chance: Chance = CHANCE,
) -> LogTopic:
    """Open the topic at an address, each partition an object log below it, and create it if needed.

    Any number of nodes may have it open at once, and all see each other's messages; they need no broker. A lost
    answer of the store duplicates nothing. ``InvalidInput``, naming both, if it has another number of partitions,
    ``NotALog`` if there is none and ``create`` is false.
    """
    check_count(partition_count)
    url = as_address(url)
    store = open_store(url, options)
    found = _read_count(store)
    if found is not None:
        _check_same(url, found, partition_count)
    elif not create:
        raise _no_topic(url)
    elif (folder := local_folder(url)) is not None:
        check_new(folder, FolderKind.TOPIC, disk=DISK)
    else:
        check_new_in_store(store, FolderKind.TOPIC)
    logs = [
        open_log(
            f"{url.rstrip('/')}/{_name(partition)}", create=found is None, options=options, clock=clock, chance=chance
        )
        for partition in range(partition_count)
    ]
    if found is None:
        # Last, as above; of several concurrent creators one decides, and the others read its number.
        _check_same(url, _create(store, partition_count), partition_count)
    return LogTopic(logs, polling=polling or Polling(), clock=clock, chance=chance)


def _read_count(store: ObjectStore) -> int | None:
    try:
        return decode_topic(store.get(_IDENTITY).data, f"{store.url}/{_IDENTITY}")
    except NotFound:
        return None


def _create(store: ObjectStore, partition_count: int) -> int:
    """Store the number of partitions if none is stored; returns the stored number."""
    try:
        store.put_if(_IDENTITY, encode_topic(partition_count), ABSENT)
    except (AlreadyExists, TransientStorageError):
        found = _read_count(store)
        if found is None:
            raise
        return found
    return partition_count


def _name(partition: int) -> str:
    return f"partition-{partition:05}"


def _check_same(where: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise InvalidInput(
            f"The topic at {where} has {found} partitions, but {wanted} were requested: the number is fixed at "
            "creation; configure that one, or use another address."
        )


def _no_topic(where: str) -> NotALog:
    return NotALog(f"There is no topic at {where}: check the address, or create one with create=True.")
