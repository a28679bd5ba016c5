"""Contract of publishes and of the bounds of a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strandline.errors import InvalidInput
from strandline.log.topic.contract import Message, Topic
from strandline.model.cursor import Bounds
from tests.contracts.topics.hooks import TopicOwner, collect


class PublishingContract(TopicOwner):
    """Contract of publishes and of the bounds of a partition."""

    def test_it_satisfies_the_protocol(self, topic: Topic) -> None:
        assert isinstance(topic, Topic)

    @pytest.mark.parametrize("partition_count", [1, 2, 7])
    def test_it_has_as_many_partitions_as_it_was_made_with(self, partition_count: int) -> None:
        topic = self.make_topic(partition_count)
        assert topic.partition_count == partition_count
        assert topic.publish(partition_count - 1, b"last") == 0
        topic.close()

    @pytest.mark.parametrize("partition_count", [0, -1])
    def test_there_is_no_topic_without_a_partition(self, partition_count: int) -> None:
        with pytest.raises(InvalidInput):
            self.make_topic(partition_count)

    def test_offsets_are_dense_from_0_in_each_partition(self, topic: Topic) -> None:
        assert [topic.publish(partition, b"x") for partition in (0, 2, 0, 0, 2)] == [0, 0, 1, 2, 1]
        assert topic.publish_all(0, [b"a", b"b", b"c"]) == [3, 4, 5]
        assert topic.publish_all(1, [b"d"]) == [0]
        assert topic.publish(0, b"e") == 6

    @pytest.mark.parametrize("value", [None, "text", 5, [b"x"]], ids=["none", "text", "number", "list"])
    def test_a_message_that_is_no_bytes_is_refused_alone_and_among_others(self, topic: Topic, value: Any) -> None:
        calls: list[Callable[[], object]] = [
            lambda: topic.publish(0, value),
            lambda: topic.publish_all(0, [value]),
            lambda: topic.publish_all(0, [b"before", value, b"after"]),
        ]
        for call in calls:
            with pytest.raises(InvalidInput, match="bytes"):
                call()
        assert topic.bounds(0) == Bounds(0, 0)

    def test_a_buffer_is_copied_and_may_change_after_the_call(self, topic: Topic) -> None:
        buffer: Any = bytearray(b"first")
        view: Any = memoryview(buffer)
        topic.publish(0, buffer)
        topic.publish_all(0, [buffer, view])
        buffer[:] = b"other"
        subscription, _ = topic.subscribe([(0, 0)])
        messages = collect(subscription, 3)
        assert [message.payload for message in messages] == [b"first"] * 3
        assert all(type(message.payload) is bytes for message in messages)

    def test_publishing_nothing_changes_nothing(self, topic: Topic) -> None:
        assert topic.publish_all(1, []) == []
        assert topic.bounds(1) == Bounds(0, 0)

    @pytest.mark.parametrize("partition", [3, -1, 1 << 40])
    def test_a_partition_that_is_not_there_is_refused_wherever_it_is_named(self, topic: Topic, partition: int) -> None:
        subscription, assignment = topic.subscribe([(0, 0)])
        calls: list[Callable[[], object]] = [
            lambda: topic.publish(partition, b"x"),
            lambda: topic.publish_all(partition, [b"x"]),
            lambda: topic.publish_all(partition, []),
            lambda: topic.bounds(partition),
            lambda: topic.subscribe([(0, 0), (partition, 0)]),
            lambda: assignment.add(partition, 0),
        ]
        for call in calls:
            with pytest.raises(InvalidInput, match=str(partition)):
                call()
        assert assignment.partitions() == [0]
        assert [topic.bounds(each) for each in range(3)] == [Bounds(0, 0)] * 3
        subscription.close()

    def test_a_negative_offset_is_refused_and_assigns_nothing(self, topic: Topic) -> None:
        _, assignment = topic.subscribe()
        with pytest.raises(InvalidInput):
            assignment.add(0, -1)
        with pytest.raises(InvalidInput):
            topic.subscribe([(0, -1)])
        assert assignment.partitions() == []

    def test_an_empty_partition_has_the_bounds_0_and_0(self, topic: Topic) -> None:
        topic.publish(1, b"x")
        assert [topic.bounds(partition) for partition in range(3)] == [Bounds(0, 0), Bounds(0, 1), Bounds(0, 0)]

    def test_the_high_water_mark_is_behind_whatever_a_publish_returned(self, topic: Topic) -> None:
        for _ in range(5):
            offset = topic.publish(0, b"x")
            assert topic.bounds(0) == Bounds(0, offset + 1)
        last = topic.publish_all(0, [b"x"] * 3)[-1]
        assert topic.bounds(0) == Bounds(0, last + 1)

    @pytest.mark.parametrize("payload", [b"", b"\0", bytes(range(256)) * 400], ids=["empty", "zero", "large"])
    def test_any_bytes_are_delivered_as_they_were_published(self, topic: Topic, payload: bytes) -> None:
        topic.publish(1, payload)
        topic.publish_all(1, [payload, b"other", payload])
        subscription, _ = topic.subscribe([(1, 0)])
        messages = collect(subscription, 4)
        assert messages == [Message(1, at, found) for at, found in enumerate([payload, payload, b"other", payload])]
        assert all(type(message.payload) is bytes for message in messages)
