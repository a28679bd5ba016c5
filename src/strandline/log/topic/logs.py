"""Topics whose partitions are logs: write-ahead logs on the local disk, or object logs that nodes share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID, uuid5

from strandline.errors import AlreadyExists, InvalidInput, LogClosed, NotALog, NotFound, TransientStorageError
from strandline.formats.topic import decode_topic, encode_topic
from strandline.log.contract import Log
from strandline.log.folders import FolderKind, check_new, check_new_in_store
from strandline.log.object.log import open_log
from strandline.log.topic.contract import NO_TOPIC, begun, check_count, check_partition
from strandline.log.topic.publishers import BatchingPublisher, TopicPublisher, WalPublisher
from strandline.log.topic.subscription import LogTopicSubscription, Polling, ReadSize
from strandline.log.wal.log import ROLL_BYTES, WalLog
from strandline.model.addresses import Address, ParsedAddress, as_address
from strandline.model.arguments import checked
from strandline.model.cursor import Bounds
from strandline.model.records import values_bytes
from strandline.storage.closing import Closing
from strandline.storage.disk import DISK, make_own_folder, replace_file
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.objects.store import ABSENT, ObjectStore
from strandline.storage.objects.urls import open_store

_IDENTITY: Final = "topic.json"
_NEW: Final = ".new"
_TAIL_BYTES: Final = 4 << 20
IN_MEMORY: Final = ReadSize(batches=1024, workers=1)


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
        pieces: ReadSize | None = None,
        polling: Polling | None = Polling(),  # noqa: B008 - a value that cannot change
        release: Callable[[], None] | None = None,
        env: Env = SYSTEM,
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
            tuple(BatchingPublisher(log, env=env) for log in logs) if publishers is None else tuple(publishers)
        )
        self._pieces = pieces or ReadSize()
        self._polling = polling
        self._release = release
        self._env = env
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
        values = values_bytes(values)
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
            self.logs, pieces=self._pieces, polling=self._polling, closed=self._forget, env=self._env
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
    roll_bytes: int = ROLL_BYTES,
    tail_bytes: int = _TAIL_BYTES,
    env: Env = SYSTEM,
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
        found = decode_topic(env.disk.read(path), path)
    if found is not None:
        _check_same(folder, found, partition_count)
    elif create:
        check_new(folder, FolderKind.TOPIC, disk=env.disk)
        make_own_folder(folder, disk=env.disk)
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
                    env=env,
                )
            )
            for partition in range(partition_count)
        ]
        if found is None:
            # Last: an existing topic is complete, and a missing log is damage.
            replace_file(env.disk, path, encode_topic(partition_count), temporary=path + _NEW)
        return LogTopic(
            logs,
            publishers=[WalPublisher(log) for log in logs],
            pieces=IN_MEMORY,
            polling=None,  # no other process can write the logs
            release=held.pop_all().close,
            env=env,
        )


@checked
def open_object_topic(
    url: Address,
    partition_count: int,
    *,
    create: bool = True,
    options: Mapping[str, str] | None = None,
    polling: Polling | None = None,
    env: Env = SYSTEM,
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
    elif (folder := ParsedAddress.of(url).folder) is not None:
        check_new(folder, FolderKind.TOPIC, disk=DISK)
    else:
        check_new_in_store(store, FolderKind.TOPIC)
    logs = [
        open_log(partition_address(url, partition), create=found is None, options=options, env=env)
        for partition in range(partition_count)
    ]
    if found is None:
        # Last, as above; of several concurrent creators one decides, and the others read its number.
        _check_same(url, _create(store, partition_count), partition_count)
    return LogTopic(logs, polling=polling or Polling(), env=env)


def topic_partitions(url: Address, options: Mapping[str, str] | None = None) -> int:
    """How many partitions the topic at an address has, in a store or a folder; ``NotFound`` if there is none."""
    place = ParsedAddress.of(url)
    url, folder = place.text, place.folder if place.is_wal else None
    found = _read_count(open_store(url if folder is None else folder, options))
    if found is None:
        raise _no_topic(url)
    return found


def partition_address(url: str, partition: int) -> str:
    """The address of a partition's log."""
    return f"{url.rstrip('/')}/{_name(partition)}"


def _read_count(store: ObjectStore) -> int | None:
    try:
        return decode_topic(store.get(_IDENTITY).data, f"{store.url}/{_IDENTITY}")
    except NotFound:
        return None


def _create(store: ObjectStore, partition_count: int) -> int:
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
    return NotALog(f"There is no topic at {where}: check the address, or open it with create, to make it.")
