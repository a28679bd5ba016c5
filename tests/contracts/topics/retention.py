"""Contract of topics that can be trimmed."""

from __future__ import annotations

from abc import abstractmethod

import pytest

from strandline.errors import CursorExpired
from strandline.log.topic.contract import Message, Topic
from strandline.model.cursor import Bounds
from tests.contracts.topics.contract import TopicContract
from tests.contracts.topics.hooks import SOON, by_partition, collect, numbered


class RetentionContract(TopicContract):
    """The contract of topics that can be trimmed: also what a reader of trimmed messages gets."""

    @abstractmethod
    def trim(self, topic: Topic, partition: int, upto: int) -> None:
        """Trim a partition up to an offset, at which a publish began."""

    def test_a_start_that_is_no_longer_retained_has_expired_and_assigns_nothing(self, topic: Topic) -> None:
        self.fill(topic, 0, 6)
        self.trim(topic, 0, 4)
        assert topic.bounds(0) == Bounds(4, 6)
        with pytest.raises(CursorExpired, match=r"artition 0\b"):
            topic.subscribe([(1, 0), (0, 3)])
        subscription, assignment = topic.subscribe([(1, 0)])
        with pytest.raises(CursorExpired):
            assignment.add(0, 0)
        assert assignment.partitions() == [1]
        assignment.add(0, 4)
        assert by_partition(collect(subscription, 2)) == {0: numbered(4, 6)}

    def test_all_of_a_partition_can_be_gone_and_its_end_stays(self, topic: Topic) -> None:
        self.fill(topic, 0, 3)
        self.trim(topic, 0, 3)
        assert topic.bounds(0) == Bounds(3, 3)
        subscription, _ = topic.subscribe([(0, 3)])
        self.fill(topic, 0, 1)
        assert by_partition(collect(subscription, 1)) == {0: numbered(3, 4)}

    def test_one_whose_next_message_was_deleted_expires_and_the_others_continue(self, topic: Topic) -> None:
        self.fill(topic, 1, 2)
        subscription, assignment = topic.subscribe([(0, 0), (1, 0), (2, 0)])
        assert by_partition(collect(subscription, 2)) == {1: numbered(0, 2)}
        self.fill(topic, 0, 6)
        self.trim(topic, 0, 4)
        self.fill(topic, 1, 2)
        self.fill(topic, 2, 2)
        messages: list[Message] = []

        def take_on() -> None:
            while True:
                messages.extend(subscription.take(SOON))

        with pytest.raises(CursorExpired, match=r"artition 0\b"):
            take_on()
        assert assignment.partitions() == [1, 2]
        messages += collect(subscription, 4 - len(messages))
        assert by_partition(messages) == {1: numbered(2, 4), 2: numbered(0, 2)}
        assignment.add(0, 4)
        assert by_partition(collect(subscription, 2)) == {0: numbered(4, 6)}
