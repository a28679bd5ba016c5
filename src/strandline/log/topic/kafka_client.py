"""The Kafka client: its settings, and its errors as those of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from strandline.errors import InvalidInput, MissingExtra, NotFound, StorageError, StrandlineError, TransientStorageError

MILLISECONDS: Final = 1000

LARGEST: Final = 1_000_000
"""Default limit of a message in bytes (``message.max.bytes``)."""

_COMMON: Final = {
    # Reconnect within a second; the default may take ten.
    "reconnect.backoff.max.ms": 1000,
    # Errors are raised. The library would also print them, on each retry.
    "log_level": 2,
    "client.id": "strandline",
}

_EXACT_PRODUCER: Final = {
    "acks": "all",
    # A retry after a lost answer must not append twice, nor after later messages.
    "enable.idempotence": True,
}

_EXACT_CONSUMER: Final = {
    # The subscriber stores positions. The library requires a group name, but nothing is stored under it.
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # A deleted range must be reported, not skipped.
    "auto.offset.reset": "error",
    "allow.auto.create.topics": False,
    "enable.partition.eof": False,
    # Uncommitted transactions would stop a reader, and aborted ones leave gaps: nothing here
    # uses transactions, and without them offsets are dense.
    "isolation.level": "read_uncommitted",
}

_BOUNDED_CONSUMER: Final = {
    "group.id": "strandline",
    # Prefetch limit for all partitions of a subscription together; the rest stays in the log.
    "queued.max.messages.kbytes": 16 * 1024,
    "queued.min.messages": 10_000,
    # An added partition is fetched with the next request, which is sent only after the last was answered.
    "fetch.wait.max.ms": 100,
    "fetch.queue.backoff.ms": 50,
    "fetch.error.backoff.ms": 50,
}

FIXED: Final = frozenset({"bootstrap.servers", "message.timeout.ms", *_EXACT_PRODUCER, *_EXACT_CONSUMER})
"""Settings that a configuration may not contain: the topic's guarantees depend on them."""


def client() -> Any:
    """The module ``confluent_kafka``, or ``MissingExtra``."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra("Kafka topics need the extra 'kafka': pip install 'strandline[kafka]'.") from error
    return confluent_kafka


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration for the library; ``InvalidInput`` if it has a setting that the topic controls."""
    if taken := sorted(FIXED & config.keys()):
        raise InvalidInput(f"A Kafka topic decides {', '.join(taken)} itself: leave it out of the configuration.")
    if not config.get("group.id", True):  # the library would end the process
        raise InvalidInput("The setting group.id of Kafka's client may not be empty: leave it out, or name a group.")
    return dict(config)


def common_settings(bootstrap: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of every client."""
    return {**_COMMON, **config, "bootstrap.servers": bootstrap}


def producer_settings(bootstrap: str, config: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """A producer that appends each message once and in order, and gives up in time."""
    bounded = {"linger.ms": 0, **common_settings(bootstrap, config), "message.timeout.ms": int(timeout * MILLISECONDS)}
    return {**bounded, **_EXACT_PRODUCER}


def consumer_settings(bootstrap: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A consumer that reads from given offsets, with limited prefetch, and stores no position."""
    return {**_BOUNDED_CONSUMER, **common_settings(bootstrap, config), **_EXACT_CONSUMER}


_TOO_LARGE: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")

_NO_SUCH: Final = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC")

_NOT_ALLOWED: Final = (
    "_AUTHENTICATION",
    "SASL_AUTHENTICATION_FAILED",
    "TOPIC_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
)

_TRANSIENT: Final = (
    "_TRANSPORT",
    "_TIMED_OUT",
    "_TIMED_OUT_QUEUE",
    "_MSG_TIMED_OUT",
    "_ALL_BROKERS_DOWN",
    "_DESTROY_BROKER",  # the connection to a broker was dropped while a request waited for it
    "_RESOLVE",
    "_WAIT_COORD",
    "_PURGE_QUEUE",
    "_PURGE_INFLIGHT",
    "_UNKNOWN_PARTITION",  # the library's error while no broker has reported the partition
    "_LEADER_NOT_AVAILABLE",
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "BROKER_NOT_AVAILABLE",
    "REQUEST_TIMED_OUT",
    "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "OFFSET_NOT_AVAILABLE",
    "KAFKA_STORAGE_ERROR",
    "NOT_CONTROLLER",
)


def refusal(error: Any, what: str) -> StrandlineError:
    """The error of this package for a ``KafkaError`` of an operation."""
    name = error.name()
    words = f"{what} failed at Kafka: {error.str()} ({name})"
    if error.fatal():
        return StorageError(f"{words}: this client cannot continue; open the topic again.")
    if name in _TOO_LARGE:
        return InvalidInput(f"{words}: publish smaller messages, or raise max.message.bytes and message.max.bytes.")
    if name in _NO_SUCH:
        return NotFound(f"{words}: it was deleted or never created; open the topic with create, to make it.")
    if name in _NOT_ALLOWED:
        return StorageError(f"{words}: check the credentials, and what they are allowed to do with the topic.")
    if name in _TRANSIENT or error.retriable():
        return TransientStorageError(f"{words}: check that the broker runs and is reachable there, and try again.")
    return StorageError(f"{words}.")


def kafka_error(error: BaseException) -> Any:
    """The ``KafkaError`` within a ``KafkaException``."""
    return error.args[0]
