"""Topic in Kafka."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, final
from uuid import UUID

from strandline.errors import InvalidInput, LogClosed, NotFound, TransientStorageError
from strandline.log.topic.contract import NO_TOPIC, begun, check_count, check_partition
from strandline.log.topic.kafka_client import (
    LARGEST,
    check_config,
    client,
    common_settings,
    consumer_settings,
    kafka_error,
    producer_settings,
    refusal,
)
from strandline.log.topic.kafka_stream import KafkaSubscription
from strandline.model.addresses import refuse_credentials
from strandline.model.arguments import Duration, Named, Signed, checked
from strandline.model.cursor import Bounds
from strandline.model.records import values_bytes
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

CREATED_WITH: Final = {"cleanup.policy": "delete", "retention.ms": "-1"}
"""Settings of a new topic: no compaction, which would leave gaps, and no retention by age."""

_SLACK: Final = 2.0
"""Seconds that a publish waits longer than the library, whose error is more specific."""

_STEP: Final = 0.05
"""Seconds between two checks of messages in flight."""


class _Batch:
    def __init__(self, count: int) -> None:
        self.offsets = [-1] * count
        self.error: Any = None
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._left = count

    def report(self, index: int, error: Any, message: Any) -> None:
        """Delivery report of one message: in the listening thread, or in a closing one."""
        with self._lock:
            if error is None:
                self.offsets[index] = message.offset()
            elif self.error is None:
                self.error = error
            self._left -= 1
            if not self._left:
                self.done.set()


class _Sender:
    """The library's producer, and the thread that polls its delivery reports."""

    def __init__(self, producer: Any) -> None:
        self.producer = producer
        self._over = threading.Event()
        # The thread refers to the producer, not to the topic: an unclosed topic can be garbage-collected.
        self._thread = threading.Thread(
            target=self._listen, args=(producer, self._over), name="strandline-kafka", daemon=True
        )
        self._thread.start()

    @staticmethod
    def _listen(producer: Any, over: threading.Event) -> None:
        while not over.is_set():
            producer.poll(_STEP)

    def listen_after_close(self, timeout: float) -> None:
        """Poll delivery reports after the thread has ended, for messages that were sent while this was closing."""
        if self._over.is_set():
            self.producer.flush(timeout)

    def close(self, timeout: float) -> None:
        """Deliver the messages in flight, within the time; fail the rest."""
        self.producer.flush(timeout)
        self.producer.purge()
        self._over.set()
        self._thread.join()
        self.producer.flush(_SLACK)  # reports the purged messages


@bound_to_process()
@final
@checked
class KafkaTopic(Closing):
    """A topic of a Kafka broker. Satisfies :class:`~strandline.log.topic.contract.Topic`; safe in threads.

    A publish returns when all in-sync replicas have the message; a retry after a lost answer appends it
    once. No call except a take waits longer than about ``timeout`` seconds. Offsets are dense only if the topic is not
    compacted, and not written in transactions: a missing offset is ``Gap``.
    """

    def __init__(
        self,
        bootstrap: Named,
        name: Named,
        partition_count: int,
        *,
        config: Mapping[str, Any] | None = None,
        create: bool = True,
        replication_factor: Signed = -1,
        timeout: Duration = 30.0,
        env: Env = SYSTEM,
    ) -> None:
        """Open a topic, and create it if it is missing.

        Args:
            bootstrap: Addresses of brokers, ``host:port``, separated by commas.
            name: The topic's name.
            partition_count: How many partitions it has; ``InvalidInput``, naming both, if it has another number.
            config: More settings of the client library, such as ``security.protocol``, limits and timeouts.
            create: Whether to create a missing topic, without retention by age or compaction; else ``NotFound``.
            replication_factor: Number of replicas of a new topic; -1 for the broker's default.
            timeout: Seconds after which a call gives up with ``TransientStorageError``.
            env: The clock, for tests.
        """
        refuse_credentials(f"kafka://{bootstrap}", "give them by config (sasl.username, sasl.password)")
        self._kafka = client()
        self._name = name
        self._bootstrap = bootstrap
        self.partition_count = check_count(partition_count)
        self._config = check_config(config or {})
        self._largest = int(self._config.get("message.max.bytes", LARGEST))
        self._timeout = timeout
        self._env = env
        self._lock = threading.Lock()
        self._subscriptions: set[KafkaSubscription] = set()
        self._sender: _Sender | None = None
        self._closed = False
        self._topic_id: UUID | None = None
        # A client for queries only. Never closed, since a thread may be using it: it ends when it is garbage-collected.
        self._query_client: Any = self._made(self._kafka.Consumer, consumer_settings(bootstrap, self._config))
        self._prepare(create=create, replication_factor=replication_factor)
        self._origin = Origin(f"The topic {name}", self)

    @property
    def topic_id(self) -> UUID:
        """The broker's id of the topic, which a recreated topic does not share; 0 if the broker has none."""
        if self._topic_id is None:
            self._topic_id = self._identified()
        return self._topic_id

    def _made(self, kind: Any, settings: Mapping[str, Any]) -> Any:
        """A client of the library; ``InvalidInput`` if it refuses its settings."""
        try:
            return kind(settings)
        except self._kafka.KafkaException as error:
            raise InvalidInput(f"Kafka's client refuses its configuration: {kafka_error(error).str()}.") from error

    def _prepare(self, *, create: bool, replication_factor: int) -> None:
        found = self._counted()
        if not found:
            if not create:
                raise NotFound(f"There is no topic {self._name} at {self._bootstrap}: open it with create, to make it.")
            self._create(replication_factor)
            found = self._appeared()
        if found != self.partition_count:
            raise InvalidInput(
                f"Topic {self._name} at {self._bootstrap} has {found} partitions and {self.partition_count} are "
                f"configured: configure {found}, or use another topic."
            )

    def _counted(self) -> int:
        """Number of partitions on the broker; 0 if there is no such topic."""
        try:
            topic = self._query_client.list_topics(self._name, timeout=self._timeout).topics[self._name]
        except self._kafka.KafkaException as error:
            raise refusal(kafka_error(error), f"Asking {self._bootstrap} for topic {self._name}") from error
        if topic.error is None:
            return len(topic.partitions)
        reason = refusal(topic.error, f"Asking {self._bootstrap} for topic {self._name}")
        if isinstance(reason, NotFound):
            return 0
        raise reason

    def _create(self, replication_factor: int) -> None:
        admin = self._made(self._kafka.admin.AdminClient, common_settings(self._bootstrap, self._config))
        wanted = self._kafka.admin.NewTopic(
            self._name, self.partition_count, replication_factor=replication_factor, config=CREATED_WITH
        )
        seconds = self._timeout
        made = admin.create_topics([wanted], operation_timeout=seconds, request_timeout=seconds)[self._name]
        try:
            made.result(seconds + _SLACK)
        except self._kafka.KafkaException as error:
            # Another node may have created it just now: its number of partitions is read.
            if kafka_error(error).name() != "TOPIC_ALREADY_EXISTS":
                raise refusal(kafka_error(error), f"Creating topic {self._name} at {self._bootstrap}") from error
        except TimeoutError as error:
            raise self._silent(f"creating topic {self._name}") from error

    def _appeared(self) -> int:
        """Number of partitions, as soon as the broker knows of the new topic."""
        deadline = self._env.clock.monotonic() + self._timeout
        while not (found := self._counted()):
            if self._env.clock.monotonic() > deadline:
                raise self._silent(f"creating topic {self._name}")
            self._env.clock.sleep(_STEP)
        return found

    def _identified(self) -> UUID:
        admin = self._made(self._kafka.admin.AdminClient, common_settings(self._bootstrap, self._config))
        asked = self._kafka.TopicCollection([self._name])
        found = admin.describe_topics(asked, request_timeout=self._timeout)[self._name]
        try:
            topic_id = found.result(self._timeout + _SLACK).topic_id
        except (self._kafka.KafkaException, TimeoutError):
            return NO_TOPIC  # older brokers have no topic ids
        high, low = topic_id.get_most_significant_bits(), topic_id.get_least_significant_bits()
        return UUID(int=(high % (1 << 64)) << 64 | low % (1 << 64))

    def _silent(self, what: str) -> TransientStorageError:
        return TransientStorageError(
            f"Kafka at {self._bootstrap} did not finish {what} within {self._timeout:g} s: check that it runs, and try "
            "again."
        )

    def publish(self, partition: int, payload: bytes) -> int:
        """Append a message and return its offset when all in-sync replicas have it.

        ``TransientStorageError`` if that is not known in time; the message may have landed, but does not land later.
        """
        return self.publish_all(partition, (payload,))[0]

    def publish_all(self, partition: int, values: Sequence[bytes]) -> list[int]:
        """Append messages in their order, and wait once for all; messages of other publishers may be in between."""
        check_partition(partition, self.partition_count)
        values = values_bytes(values)
        if (longest := max(map(len, values), default=0)) > self._largest:
            raise InvalidInput(
                f"A message of {longest} bytes is more than the {self._largest} that Kafka is configured to "
                "take: publish smaller ones, or raise message.max.bytes and the topic's max.message.bytes."
            )
        sender = self._sending()
        if not values:
            return []
        batch = _Batch(len(values))
        what = f"Publishing to partition {partition} of topic {self._name}"
        self._produce(sender.producer, partition, values, batch, what)
        sender.listen_after_close(self._timeout)
        if not self._env.clock.wait(batch.done, self._timeout + _SLACK):
            raise self._silent(f"publishing to partition {partition} of topic {self._name}")
        if batch.error is not None:
            raise refusal(batch.error, what)
        return batch.offsets

    def _produce(self, producer: Any, partition: int, values: Sequence[bytes], batch: _Batch, what: str) -> None:
        deadline = self._env.clock.monotonic() + self._timeout
        for index, payload in enumerate(values):
            report = partial(batch.report, index)
            while True:
                try:
                    producer.produce(self._name, payload, partition=partition, on_delivery=report)
                    break
                except BufferError as error:  # no room until some messages in flight were delivered
                    if self._env.clock.monotonic() > deadline:
                        raise self._silent(f"publishing to partition {partition} of topic {self._name}") from error
                    self._env.clock.sleep(_STEP)
                except self._kafka.KafkaException as error:
                    raise refusal(kafka_error(error), what) from error

    def _sending(self) -> _Sender:
        with self._lock:
            if self._closed:
                raise LogClosed(f"The topic {self._name} is closed: nothing was published.")
            if self._sender is None:
                settings = producer_settings(self._bootstrap, self._config, self._timeout)
                self._sender = _Sender(self._made(self._kafka.Producer, settings))
            return self._sender

    def bounds(self, partition: int) -> Bounds:
        """The first retained offset and the high-water mark, from the partition's leader."""
        check_partition(partition, self.partition_count)
        return self._bounds(partition, self._timeout)

    def _bounds(self, partition: int, timeout: float) -> Bounds:
        query_client = self._query_client
        if query_client is None:
            raise LogClosed(f"The topic {self._name} is closed: its bounds are not known.")
        place = self._kafka.TopicPartition(self._name, partition)
        deadline = self._env.clock.monotonic() + timeout
        while True:
            left = max(deadline - self._env.clock.monotonic(), _STEP)
            try:
                found = query_client.get_watermark_offsets(place, timeout=left)
            except self._kafka.KafkaException as error:
                reason = refusal(
                    kafka_error(error), f"Asking for the bounds of partition {partition} of topic {self._name}"
                )
                # A partition that is new, or whose broker was lost, has no leader for a moment.
                if not isinstance(reason, TransientStorageError) or self._env.clock.monotonic() + _STEP > deadline:
                    raise reason from error
                self._env.clock.sleep(_STEP)
            else:
                if found is None:
                    raise self._silent(f"reporting the bounds of partition {partition} of topic {self._name}")
                return Bounds(*found)

    def subscribe(self, starts: Sequence[tuple[int, int]] = ()) -> tuple[KafkaSubscription, KafkaSubscription]:
        """Follow partitions, each from an offset on; a consumer of its own that stores no position in Kafka."""
        with self._lock:
            if self._closed:
                raise LogClosed(f"The topic {self._name} is closed: there is nothing to follow.")
            subscription = KafkaSubscription(
                self._name,
                self.partition_count,
                self._made(self._kafka.Consumer, consumer_settings(self._bootstrap, self._config)),
                bounds=self._bounds,
                timeout=self._timeout,
                env=self._env,
                forget=self._forget,
            )
            self._subscriptions.add(subscription)
        return begun(subscription, starts)

    def _forget(self, subscription: KafkaSubscription) -> None:
        with self._lock:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End all subscriptions, deliver messages in flight, and disconnect."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            subscriptions, sender = tuple(self._subscriptions), self._sender
            self._sender = None
            self._query_client = None
        for subscription in subscriptions:
            subscription.close()
        if sender is not None:
            sender.close(self._timeout)
