"""A partition of a Kafka topic as the source of an ingest."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any, Final, final
from uuid import UUID, uuid5

import pyarrow as pa

from strandline.errors import CursorExpired, Diverged, InvalidInput, NotFound, TransientStorageError
from strandline.ingestion.streams import MessageStream, Taken, message_batch
from strandline.log.topic.kafka_client import (
    check_config,
    client,
    common_settings,
    consumer_settings,
    kafka_error,
    refusal,
)
from strandline.model.addresses import refuse_credentials, split_address
from strandline.model.arguments import Duration, checked
from strandline.model.cursor import Bounds
from strandline.model.records import Op
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

_NAMESPACE: Final = UUID("b2a1c2f0-3f0c-5a50-8c0e-6d1a9d6b7e52")
_AT_ONCE: Final = 2000
_POLL: Final = 0.1
_MILLISECOND: Final = 1000
_LATEST: Final = (1 << 63) - 1
_GONE: Final = ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE")
_TRUNCATED: Final = "_LOG_TRUNCATION"
_EOF: Final = "_PARTITION_EOF"

# Records of aborted transactions are not part of the topic; gaps are allowed here.
_READING: Final = {"isolation.level": "read_committed", "enable.partition.eof": True}


def parse_kafka(address: str) -> tuple[str, str, int | None]:
    """Brokers, topic and partition of an address.

    >>> parse_kafka("kafka://one:9092,two:9092/orders/3"), parse_kafka("kafka://one:9092/orders")
    (('one:9092,two:9092', 'orders', 3), ('one:9092', 'orders', None))
    """
    refuse_credentials(address, "give them by config (sasl.username, sasl.password)")
    place = split_address(address)
    parts = place.path.strip("/").split("/")
    is_partition = len(parts) == 1 or (len(parts) == 2 and parts[1].isdecimal())  # noqa: PLR2004
    if not place.netloc or not parts[0] or not is_partition:
        raise InvalidInput(f"{address!r} names no topic: write kafka://host:port/topic or kafka://host:port/topic/0.")
    return place.netloc, parts[0], int(parts[1]) if len(parts) > 1 else None


@bound_to_process()
@final
class KafkaPartition(MessageStream):
    """A partition of a topic, read in order. A message without a value is a delete; timestamps are those of Kafka.

    Its identity is that of the cluster, with the names of topic and partition. No position is stored in Kafka.
    """

    @checked
    def __init__(
        self, address: str, *, config: Mapping[str, Any] | None = None, timeout: Duration = 30.0, env: Env = SYSTEM
    ) -> None:
        """Open ``kafka://host:port/topic/partition``; the partition may be left out if the topic has only one.

        ``NotFound`` if there is no such topic or partition, ``TransientStorageError`` if no broker answers in time.
        """
        bootstrap, topic, partition = parse_kafka(address)
        self._kafka = client()
        self._timeout = timeout
        self._env = env
        super().__init__()
        self._topic = topic
        self._settings = common_settings(bootstrap, check_config(config or {}))
        self._topic_id: str | None = None
        settings = {**consumer_settings(bootstrap, config or {}), **_READING}
        try:
            self._consumer = self._kafka.Consumer(settings)
        except self._kafka.KafkaException as error:
            raise InvalidInput(f"Kafka's client refuses its configuration: {kafka_error(error).str()}.") from error
        try:
            found = self._found(bootstrap)
        except BaseException:
            self._consumer.close()
            raise
        self._partition = self._chosen(found, partition, bootstrap)
        self.name = f"Partition {self._partition} of topic {topic}"
        self._log_id = uuid5(_NAMESPACE, f"{found.cluster_id}/{topic}/{self._partition}")
        self._at = -1
        """The position of the next message that is not taken yet."""
        self._early: list[Any] = []
        """Messages that were read, but not taken yet."""
        self._closed = False
        self._origin = Origin(self.name, self)

    def _found(self, bootstrap: str) -> Any:
        what = f"Asking {bootstrap} for topic {self._topic}"
        try:
            found = self._consumer.list_topics(self._topic, timeout=self._timeout)
        except self._kafka.KafkaException as error:
            raise refusal(kafka_error(error), what) from error
        failure = found.topics[self._topic].error
        if failure is None:
            return found
        if isinstance(refusal(failure, what), NotFound):
            raise NotFound(f"There is no topic {self._topic} at {bootstrap}: check its name.")
        raise refusal(failure, what)

    def _chosen(self, found: Any, partition: int | None, bootstrap: str) -> int:
        count = len(found.topics[self._topic].partitions)
        if partition is None and count == 1:
            return 0
        if partition is None or partition >= count:
            self._consumer.close()
            wrong = f"has no partition {partition}" if partition is not None else f"has {count} partitions"
            raise NotFound(
                f"Topic {self._topic} at {bootstrap} {wrong}: ingest each of them by its own address, "
                f"kafka://{bootstrap}/{self._topic}/0 up to /{count - 1}."
            )
        return partition

    def __repr__(self) -> str:
        return f"KafkaPartition({self._topic!r}, {self._partition})"

    @property
    def log_id(self) -> UUID:
        """The identity of the partition in its cluster."""
        return self._log_id

    def _place(self, offset: int) -> Any:
        return self._kafka.TopicPartition(self._topic, self._partition, offset)

    def bounds(self) -> Bounds:
        """The first retained offset and the end of what is committed, from the partition's leader.

        Messages of an open transaction, and all behind them, are not there yet.
        """
        deadline = self._env.clock.monotonic() + self._timeout
        while True:
            left = max(_POLL, deadline - self._env.clock.monotonic())
            try:
                found = self._consumer.get_watermark_offsets(self._place(0), timeout=left)
            except self._kafka.KafkaException as error:
                reason = refusal(kafka_error(error), f"Asking for the bounds of {self.name}")
                # A partition that is new, or whose broker was lost, has no leader for a moment.
                if not isinstance(reason, TransientStorageError) or self._env.clock.monotonic() > deadline:
                    raise reason from error
                self._env.clock.sleep(_POLL)
            else:
                if found is None:
                    raise TransientStorageError(f"Kafka did not return the bounds of {self.name} in time: try again.")
                return Bounds(*found)

    def incarnation(self) -> str:
        """The id of the topic, which one that is created again does not have; empty if the brokers know none."""
        if self._topic_id is None:
            self._topic_id = self._asked_topic_id()
        return self._topic_id

    def _asked_topic_id(self) -> str:
        what = f"Asking for the id of topic {self._topic}"
        admin = self._kafka.admin.AdminClient(self._settings)
        topics = self._kafka.TopicCollection([self._topic])
        try:
            found = admin.describe_topics(topics, request_timeout=self._timeout)[self._topic].result(self._timeout)
        except self._kafka.KafkaException as error:
            reason = refusal(kafka_error(error), what)
            if isinstance(reason, TransientStorageError):
                raise reason from error
            return ""  # an old broker has no ids, and another may refuse the question
        except concurrent.futures.TimeoutError as error:
            raise TransientStorageError(f"{what} took longer than {self._timeout:g} s: try again.") from error
        number = found.topic_id
        words = (number.get_most_significant_bits(), number.get_least_significant_bits())
        return f"{words[0]:x}-{words[1]:x}" if any(words) else ""

    def _forget(self) -> None:
        super()._forget()
        self._topic_id = None

    def take(self, since: int, *, upto: int, records: int, size: int) -> Taken:
        """The next messages from an offset on, and the offset behind them."""
        if since != self._at:
            self._early = []
            self._consumer.assign([self._place(since)])
            self._at = since
        deadline = self._env.clock.monotonic() + self._timeout
        taken: list[Any] = []
        bytes_taken = 0
        while len(taken) < records and bytes_taken < size and self._at < upto:
            found = self._early or self._polled(wait=not taken)
            if not found and taken:
                break
            if not found and self._env.clock.monotonic() > deadline:
                raise TransientStorageError(
                    f"Kafka sent no message of {self.name} within {self._timeout:g} s: try again."
                )
            self._early = self._sorted(found, upto, taken)
            bytes_taken = sum(len(message) for message in taken)
        following = min(self._at, upto)
        return Taken(
            _batch(taken), following, _mark(taken[-1]) if taken and taken[-1].offset() == following - 1 else ""
        )

    def _polled(self, *, wait: bool) -> list[Any]:
        first = self._consumer.poll(_POLL if wait else 0)
        return [] if first is None else [first, *self._consumer.consume(_AT_ONCE, 0)]

    def _sorted(self, found: Sequence[Any], upto: int, taken: list[Any]) -> list[Any]:
        """Take the messages below ``upto``; returns the others."""
        for index, message in enumerate(found):
            if (error := message.error()) is not None:
                self._note(error, message, upto)
                continue
            if message.offset() >= upto:
                self._at = upto
                return list(found[index:])
            if message.offset() >= self._at:
                taken.append(message)
                self._at = message.offset() + 1
        return []

    def _note(self, error: Any, message: Any, upto: int) -> None:
        if error.name() == _EOF:
            # Only markers of transactions, and aborted messages, are between the last message and the end.
            self._at = max(self._at, min(message.offset(), upto))
            return
        if error.name() == _TRUNCATED:
            self._at = -1
            raise Diverged(f"{self.name} lost its end, and has grown differently since: ingest it into another log.")
        if error.name() in _GONE:
            self._at = -1
            raise CursorExpired(f"{self.name} no longer has the requested offset: it was deleted meanwhile.")
        reason = refusal(error, f"Reading {self.name}")
        if not isinstance(reason, TransientStorageError):  # the library retries by itself
            self._at = -1
            raise reason

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            self._consumer.close()


def _mark(message: Any) -> str:
    """Offset, leader epoch and time: messages that were lost and produced again are of a later epoch."""
    return f"{message.offset()}/{message.leader_epoch()}/{message.timestamp()[1]}"


def _batch(messages: list[Any]) -> pa.RecordBatch:
    keys, values = [message.key() for message in messages], [message.value() for message in messages]
    return message_batch(
        {
            "offset": [message.offset() for message in messages],
            # A producer may have written any number.
            "timestamp": [min(max(0, message.timestamp()[1]) * _MILLISECOND, _LATEST) for message in messages],
            "op": [
                int(Op.DELETE if value is None and key is not None else Op.PUT)
                for key, value in zip(keys, values, strict=True)
            ],
            "key": keys,
            "value": values,
            "headers": [message.headers() for message in messages],
        }
    )
