"""The broker that Kafka's client library brings for its own tests: no process, no disk, and errors on demand."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, Final, Self

import confluent_kafka

PRODUCER: Final = 0
PRODUCE: Final = 0
"""The number of the request in Kafka's protocol."""

LIST_OFFSETS: Final = 2


def _library() -> Any:
    """The C library below the Python package, which does not expose the functions of its mock cluster."""
    packages = Path(confluent_kafka.__file__).parent.parent
    beside = [
        *packages.glob("confluent_kafka.libs/librdkafka*.so*"),
        *packages.glob("confluent_kafka/.dylibs/librdkafka*"),
    ]
    library = ctypes.CDLL(str(beside[0] if beside else _system()))
    pointer = ctypes.c_void_p
    library.rd_kafka_new.restype = pointer
    library.rd_kafka_new.argtypes = [ctypes.c_int, pointer, ctypes.c_char_p, ctypes.c_size_t]
    library.rd_kafka_destroy.argtypes = [pointer]
    library.rd_kafka_mock_cluster_new.restype = pointer
    library.rd_kafka_mock_cluster_new.argtypes = [pointer, ctypes.c_int]
    library.rd_kafka_mock_cluster_destroy.argtypes = [pointer]
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    library.rd_kafka_mock_cluster_bootstraps.argtypes = [pointer]
    library.rd_kafka_mock_topic_create.argtypes = [pointer, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.rd_kafka_mock_broker_set_down.argtypes = [pointer, ctypes.c_int32]
    library.rd_kafka_mock_broker_set_up.argtypes = [pointer, ctypes.c_int32]
    library.rd_kafka_mock_push_request_errors_array.argtypes = [
        pointer,
        ctypes.c_int16,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_int),
    ]
    return library


def _system() -> str:
    return "librdkafka.1.dylib" if sys.platform == "darwin" else "librdkafka.so.1"


class MockCluster:
    """Brokers in this process's memory. A context manager."""

    def __init__(self, brokers: int = 1) -> None:
        self._library = _library()
        said = ctypes.create_string_buffer(512)
        self._client = self._library.rd_kafka_new(PRODUCER, None, said, len(said))
        if not self._client:
            raise RuntimeError(said.value.decode())
        self._cluster = self._library.rd_kafka_mock_cluster_new(self._client, brokers)
        self.bootstrap: str = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def create(self, topic: str, partition_count: int) -> None:
        """Make a topic: the mock does not do that for clients."""
        problem = self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partition_count, 1)
        assert problem == 0

    def fail(self, request: int, *errors: int) -> None:
        """Answer the next requests of a kind with these errors, one after the other."""
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, request, len(errors), (ctypes.c_int * len(errors))(*errors)
        )

    def down(self) -> None:
        """Stop the first broker from answering."""
        self._library.rd_kafka_mock_broker_set_down(self._cluster, 1)

    def up(self) -> None:
        """Let it answer again."""
        self._library.rd_kafka_mock_broker_set_up(self._cluster, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)
