"""Every call that appends many values checks each of them, and keeps no buffer of the caller, on every kind of log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import InvalidInput
from strandline.log.memory import MemoryLog
from strandline.log.topic.logs import LogTopic, open_object_topic, open_wal_topic
from strandline.log.topic.memory import MemoryTopic
from strandline.node.api import Primary

Append = Callable[[Sequence[Any]], object]
Door = tuple[Append, Callable[[], list[bytes]]]
"""Appends values, and reads all of them."""


def read(log: Any) -> list[bytes]:
    return [value for batch in log.read() for value in batch.column("value").to_pylist()]


def topic_door(topic: Any) -> Door:
    def found() -> list[bytes]:
        bounds = topic.bounds(0)
        stream, _ = topic.subscribe([(0, 0)])
        values: list[bytes] = []
        while len(values) < bounds.next:
            values += [message.payload for message in stream.take(60)]
        return values

    return lambda values: topic.publish_all(0, values), found


@contextmanager
def producer_door(log: Any) -> Iterator[Door]:
    with log.producer(linger=0) as producer:
        yield (lambda values: producer.produce(values).result(120)), lambda: read(log)


@contextmanager
def memory_topic(_: Path) -> Iterator[Door]:
    yield topic_door(MemoryTopic(1))


@contextmanager
def wal_topic(folder: Path) -> Iterator[Door]:
    topic = open_wal_topic(str(folder / "topic"), 1)
    yield topic_door(topic)
    topic.close()


@contextmanager
def object_topic(folder: Path) -> Iterator[Door]:
    topic = open_object_topic(f"file://{folder}/topic", 1)
    yield topic_door(topic)
    topic.close()


@contextmanager
def topic_of_logs(_: Path) -> Iterator[Door]:
    topic = LogTopic([MemoryLog()])
    yield topic_door(topic)
    topic.close()


@contextmanager
def primary(folder: Path) -> Iterator[Door]:
    with Primary.open(folder / "a", name="a") as node:
        yield node.append_values, lambda: read(node.reading())


@contextmanager
def lsn_log(folder: Path) -> Iterator[Door]:
    with WriteAheadLog.open(str(folder / "wal")) as wal:
        yield wal.append_many, lambda: read(wal.log)


@contextmanager
def wal_producer(folder: Path) -> Iterator[Door]:
    with sl.open(f"wal://{folder}/log", create=True) as log, producer_door(log) as door:
        yield door


@contextmanager
def object_producer(folder: Path) -> Iterator[Door]:
    with sl.open(f"file://{folder}/log", create=True) as log, producer_door(log) as door:
        yield door


@contextmanager
def memory_producer(_: Path) -> Iterator[Door]:
    with producer_door(MemoryLog()) as door:
        yield door


@contextmanager
def queue_producer(folder: Path) -> Iterator[Door]:
    with producer_door(sl.open(f"file://{folder}/log", format="queue-v1")) as door:
        yield door


@contextmanager
def node_producer(folder: Path) -> Iterator[Door]:
    with Primary.open(folder / "a", name="a") as node, node.producer(linger=0) as producer:
        yield (lambda values: producer.produce(values).result(120)), lambda: read(node.reading())


COPYING = [memory_topic, wal_topic, object_topic, topic_of_logs, primary, lsn_log]
"""Calls that take buffers, and copy them."""
REFUSING = [wal_producer, object_producer, memory_producer, queue_producer, node_producer]
"""Producers take bytes alone, as they do for single records."""


def named(door: Any) -> str:
    return str(door.__name__)


@pytest.mark.parametrize("opened", COPYING + REFUSING, ids=named)
def test_one_value_that_is_no_bytes_is_refused_and_none_of_its_call_is_appended(opened, tmp_path):
    with opened(tmp_path) as (append, found):
        for value in (None, "text", 5, 1.5, [b"x"], (b"x",)):
            for values in ([value], [b"a", value, b"b"], (b"a", b"b", value)):
                with pytest.raises(InvalidInput, match="bytes"):
                    append(values)
        append([b"a", b"", b"c"])
        assert found() == [b"a", b"", b"c"]


@pytest.mark.parametrize("opened", COPYING, ids=named)
def test_a_buffer_of_the_caller_is_copied(opened, tmp_path):
    buffer = bytearray(b"first")
    values = [buffer, memoryview(buffer), b"plain"]
    with opened(tmp_path) as (append, found):
        append(values)
        buffer[:] = b"other"
        values[:] = [b"x"]
        assert found() == [b"first", b"first", b"plain"]
        assert {type(value) for value in found()} == {bytes}


@pytest.mark.parametrize("opened", REFUSING, ids=named)
def test_a_producer_refuses_a_buffer_that_may_change(opened, tmp_path):
    with opened(tmp_path) as (append, found):
        with pytest.raises(InvalidInput, match="bytes"):
            append([b"a", bytearray(b"b")])
        append([b"a"])
        assert found() == [b"a"]
