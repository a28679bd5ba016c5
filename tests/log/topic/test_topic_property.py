"""Publishing, adding, removing and taking in any order: each partition delivers its suffix once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import CursorExpired
from strandline.log.memory import MemoryLog
from strandline.log.topic.contract import Message, Topic
from strandline.log.topic.logs import LogTopic, open_object_topic
from strandline.log.topic.memory import MemoryTopic
from tests.matrix_cases import examples

PARTITIONS = 3

Step = tuple[Literal["publish", "add", "remove", "take", "trim"], int, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(["publish", "publish", "add", "remove", "take", "take", "trim"]),
        st.integers(0, PARTITIONS - 1),
        st.integers(0, 9),
    ),
    max_size=60,
)


class Follower:
    """A subscription and the state that it must have."""

    def __init__(self, topic: Topic, trim: Callable[[int, int], None]) -> None:
        self.topic, self.cut = topic, trim
        self.published: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        self.firsts = [0] * PARTITIONS
        self.next: dict[int, int] = {}
        self.stream, self.assignment = topic.subscribe()

    def publish(self, partition: int, count: int) -> None:
        log = self.published[partition]
        payloads = [b"%d/%d" % (partition, len(log) + index) for index in range(count)]
        if count == 1:
            assert self.topic.publish(partition, payloads[0]) == len(log)
        else:
            assert self.topic.publish_all(partition, payloads) == list(range(len(log), len(log) + count))
        log += payloads

    def add(self, partition: int, start: int) -> None:
        if partition in self.next:
            self.assignment.add(partition, start)
        elif start < self.firsts[partition]:
            with pytest.raises(CursorExpired):
                self.assignment.add(partition, start)
        else:
            self.assignment.add(partition, start)
            self.next[partition] = start

    def remove(self, partition: int, _: int) -> None:
        self.assignment.remove(partition)
        self.next.pop(partition, None)

    def trim(self, partition: int, upto: int) -> None:
        log = self.published[partition]
        if self.firsts[partition] < upto <= len(log):
            self.cut(partition, upto)
            self.firsts[partition] = upto

    def take(self, *_: int) -> list[Message]:
        gone = {partition for partition, start in self.next.items() if start < self.firsts[partition]}
        try:
            messages = self.stream.take(0.0)
        except CursorExpired:
            (partition,) = set(self.next) - set(self.assignment.partitions())
            assert partition in gone
            del self.next[partition]
            return self.take()
        for partition, offset, payload in messages:
            assert offset == self.next[partition]
            assert payload == self.published[partition][offset]
            self.next[partition] += 1
        return messages

    def finish(self) -> None:
        while self.take():
            pass
        for partition, position in self.next.items():
            assert position >= len(self.published[partition])
        assert self.assignment.partitions() == sorted(self.next)
        assert [self.topic.bounds(partition).next for partition in range(PARTITIONS)] == list(map(len, self.published))


def run(follower: Follower, program: list[Step]) -> None:
    for name, partition, number in program:
        getattr(follower, name)(partition, number)
        assert follower.assignment.partitions() == sorted(follower.next)
    follower.finish()
    follower.topic.close()


@given(steps)
@settings(max_examples=examples(200), deadline=None)
def test_in_memory_each_partition_gives_exactly_the_suffix_from_its_start(program: list[Step]) -> None:
    topic = MemoryTopic(PARTITIONS)
    run(Follower(topic, topic.trim), program)


@given(steps)
@settings(max_examples=examples(60), deadline=None)
def test_on_logs_each_partition_gives_exactly_the_suffix_from_its_start(program: list[Step]) -> None:
    logs = [MemoryLog() for _ in range(PARTITIONS)]
    run(Follower(LogTopic(logs), lambda partition, upto: logs[partition].trim(upto)), program)


@given(steps)
@settings(max_examples=examples(15), deadline=None)
def test_of_another_node_each_partition_gives_exactly_the_suffix_from_its_start(program: list[Step]) -> None:
    url = f"memory://topic-{uuid4().hex}"
    here, there = open_object_topic(url, PARTITIONS), open_object_topic(url, PARTITIONS)
    follower = Follower(there, lambda *_: None)
    follower.topic = here
    run(follower, [step for step in program if step[0] != "trim"])
