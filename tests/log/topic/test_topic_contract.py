"""The contract of topics, on every topic that needs no broker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from strandline.log.memory import MemoryLog
from strandline.log.topic.contract import Topic
from strandline.log.topic.logs import LogTopic, open_object_topic, open_wal_topic
from strandline.log.topic.memory import MemoryTopic
from strandline.model.stamp import OpId
from tests.contracts.topics import RetentionContract


class TestMemoryTopic(RetentionContract):
    publishes = 300

    def make_topic(self, partition_count: int) -> MemoryTopic:
        return MemoryTopic(partition_count)

    def trim(self, topic: Topic, partition: int, upto: int) -> None:
        topic.trim(partition, upto)


@pytest.mark.matrix
class TestTopicOnAnyLogs(RetentionContract):
    """Nothing is used of the logs but their contract."""

    def make_topic(self, partition_count: int) -> LogTopic:
        return LogTopic([MemoryLog() for _ in range(partition_count)])

    def trim(self, topic: Topic, partition: int, upto: int) -> None:
        topic.logs[partition].trim(upto)


class TestWalTopic(RetentionContract):
    publishes = 10
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_topic(self, partition_count: int) -> LogTopic:
        return open_wal_topic(str(self.folder / uuid4().hex), partition_count, **self.options)

    def trim(self, topic: Topic, partition: int, upto: int) -> None:
        topic.logs[partition].trim(upto, beyond_slots=True)


@pytest.mark.matrix
class TestWalTopicFromItsFiles(TestWalTopic):
    """Nothing is in memory, and each group has a file of its own."""

    options: ClassVar = {"tail_bytes": 0, "roll_bytes": 0}


class ObjectTopicContract(RetentionContract):
    publishes = 10

    def trim(self, topic: Topic, partition: int, upto: int) -> None:
        topic.logs[partition]._lister.cell.update(OpId(uuid4()), lambda head: replace(head, floor=upto))


@pytest.mark.matrix
class TestObjectTopicInMemory(ObjectTopicContract):
    def make_topic(self, partition_count: int) -> LogTopic:
        return open_object_topic(f"memory://topic-{uuid4().hex}", partition_count)


@pytest.mark.matrix
class TestObjectTopicInFolder(ObjectTopicContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_topic(self, partition_count: int) -> LogTopic:
        return open_object_topic(f"file://{self.folder}/{uuid4().hex}", partition_count)


class TwoNodes:
    """A topic that is published to on one node and followed on another."""

    def __init__(self, url: str, partition_count: int) -> None:
        self.here = open_object_topic(url, partition_count)
        self.there = open_object_topic(url, partition_count, create=False)
        self.logs = self.there.logs
        self.partition_count, self.topic_id = self.there.partition_count, self.there.topic_id
        self.publish, self.publish_all = self.here.publish, self.here.publish_all
        self.bounds, self.subscribe = self.there.bounds, self.there.subscribe

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.mark.matrix
class TestObjectTopicSeenByAnotherNode(ObjectTopicContract):
    def make_topic(self, partition_count: int) -> Topic:
        return TwoNodes(f"memory://topic-{uuid4().hex}", partition_count)
