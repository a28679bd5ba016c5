"""Contract of assignments that change while a subscription is read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from strandline.log.topic.contract import Message, Topic, TopicSubscription
from strandline.testing.stores import together
from tests.contracts.topics.hooks import SOON, TopicOwner, by_partition, collect, numbered


class AssigningContract(TopicOwner):
    """Contract of assignments that change while a subscription is read."""

    def test_assigned_partitions_are_listed_in_order(self) -> None:
        topic = self.make_topic(12)
        _, assignment = topic.subscribe([(7, 0), (11, 0)])
        for partition in (10, 2, 9, 0):
            assignment.add(partition, 0)
        assert assignment.partitions() == [0, 2, 7, 9, 10, 11]
        assignment.remove(9)
        assert assignment.partitions() == [0, 2, 7, 10, 11]
        topic.close()

    def test_a_partition_added_mid_stream_gives_its_backlog_before_what_is_published_between(
        self, topic: Topic
    ) -> None:
        self.fill(topic, 0, 3)
        self.fill(topic, 1, 4)
        subscription, assignment = topic.subscribe([(0, 0)])
        assert by_partition(collect(subscription, 3)) == {0: numbered(0, 3)}
        self.fill(topic, 0, 1)
        assignment.add(1, 1)
        self.fill(topic, 1, 1)
        self.fill(topic, 0, 1)
        assert by_partition(collect(subscription, 6)) == {0: numbered(3, 5), 1: numbered(1, 5)}
        assert self.receives_nothing(subscription)

    def test_adding_a_partition_wakes_a_waiting_take(self, topic: Topic) -> None:
        self.fill(topic, 1, 2)
        subscription, assignment = topic.subscribe([(0, 0)])
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(collect, subscription, 2)
            assignment.add(1, 0)
            assert by_partition(taken.result(SOON)) == {1: numbered(0, 2)}

    def test_partitions_come_and_go_without_a_hole_while_others_publish(self, topic: Topic) -> None:
        over = threading.Event()
        subscription, assignment = topic.subscribe([(0, 0)])
        found: dict[int, list[int]] = {0: [], 1: []}

        def publish() -> None:
            while not over.is_set():
                topic.publish(1, b"x")
                topic.publish_all(0, [b"x", b"x"])

        def follow() -> None:
            try:
                for _ in range(self.publishes // 4):
                    assignment.add(1, len(found[1]))
                    seen = len(found[1])
                    while len(found[1]) < seen + 2:
                        messages = subscription.take(SOON)
                        assert messages, "nothing comes any more"
                        for message in messages:
                            found[message.partition].append(message.offset)
                    assignment.remove(1)
                    assert all(message.partition == 0 for message in self._noted(subscription, found))
            finally:
                over.set()

        together(publish, follow)
        assert all(offsets == list(range(len(offsets))) for offsets in found.values())

    def _noted(self, subscription: TopicSubscription, found: dict[int, list[int]]) -> Sequence[Message]:
        messages = subscription.take(self.quiet)
        for message in messages:
            found[message.partition].append(message.offset)
        return messages

    def test_adding_one_that_is_there_changes_nothing(self, topic: Topic) -> None:
        self.fill(topic, 0, 4)
        subscription, assignment = topic.subscribe([(0, 1), (0, 3)])
        assert by_partition(collect(subscription, 3)) == {0: numbered(1, 4)}
        for start in (0, 3, 1 << 40):
            assignment.add(0, start)
        assert assignment.partitions() == [0]
        assert self.receives_nothing(subscription)
        self.fill(topic, 0, 1)
        assert by_partition(collect(subscription, 1)) == {0: numbered(4, 5)}

    def test_nothing_of_a_removed_partition_is_delivered(self, topic: Topic) -> None:
        self.fill_at_once(topic, 0, 3)
        self.fill_at_once(topic, 1, 30_000)
        subscription, assignment = topic.subscribe([(0, 0), (1, 0)])
        first = subscription.take(SOON)
        assignment.remove(1)
        self.fill(topic, 1, 1)
        given = [message for message in first if message.partition == 0]
        assert by_partition([*given, *collect(subscription, 3 - len(given))]) == {0: numbered(0, 3)}
        self.fill(topic, 0, 1)
        assert by_partition(collect(subscription, 1)) == {0: numbered(3, 4)}
        assert self.receives_nothing(subscription)

    def test_removing_what_is_not_assigned_is_fine(self, topic: Topic) -> None:
        _, assignment = topic.subscribe([(0, 0)])
        for partition in (1, 1, 99):
            assignment.remove(partition)
        assert assignment.partitions() == [0]

    def test_a_removed_partition_can_be_added_again_from_anywhere(self, topic: Topic) -> None:
        self.fill(topic, 0, 6)
        subscription, assignment = topic.subscribe([(0, 0)])
        collect(subscription, 6)
        for start in (2, 0, 5):
            assignment.remove(0)
            assignment.add(0, start)
            assert by_partition(collect(subscription, 6 - start)) == {0: numbered(start, 6)}
