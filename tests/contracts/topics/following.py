"""Contract of subscriptions: backlog, then new messages, each once and in order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from strandline.log.topic.contract import Message, Topic
from strandline.testing.stores import together
from tests.contracts.topics.hooks import SOON, TopicOwner, by_partition, collect, numbered


class FollowingContract(TopicOwner):
    """Contract of subscriptions: backlog, then new messages, each once and in order."""

    def test_a_subscription_replays_from_its_start_inclusive_and_then_follows(self, topic: Topic) -> None:
        self.fill(topic, 0, 5)
        self.fill_at_once(topic, 1, 4)
        subscription, assignment = topic.subscribe([(0, 2), (1, 0)])
        assert assignment.partitions() == [0, 1]
        assert by_partition(collect(subscription, 7)) == {0: numbered(2, 5), 1: numbered(0, 4)}
        self.fill(topic, 0, 2)
        self.fill_at_once(topic, 1, 3)
        self.fill(topic, 2, 1)
        assert by_partition(collect(subscription, 5)) == {0: numbered(5, 7), 1: numbered(4, 7)}
        assert self.receives_nothing(subscription)

    def test_a_start_within_what_was_published_at_once_begins_there(self, topic: Topic) -> None:
        self.fill_at_once(topic, 0, 10)
        for start in (0, 4, 9):
            subscription, _ = topic.subscribe([(0, start)])
            assert by_partition(collect(subscription, 10 - start)) == {0: numbered(start, 10)}
            subscription.close()

    def test_a_waiting_take_is_woken_by_a_publish(self, topic: Topic) -> None:
        subscription, _ = topic.subscribe([(0, 0), (2, 0)])
        with ThreadPoolExecutor(1) as pool:
            for turn in range(4):
                taken = pool.submit(collect, subscription, 1, seconds=SOON)
                topic.publish(2, b"%d" % turn)
                assert taken.result(SOON) == [Message(2, turn, b"%d" % turn)]

    def test_nothing_comes_of_nothing(self, topic: Topic) -> None:
        subscription, assignment = topic.subscribe()
        self.fill(topic, 0, 1)
        assert assignment.partitions() == []
        assert subscription.take(0.0) == []
        assert self.receives_nothing(subscription)

    def test_a_start_past_the_end_waits_for_it(self, topic: Topic) -> None:
        self.fill(topic, 0, 2)
        subscription, assignment = topic.subscribe([(0, 5), (1, 3)])
        self.fill(topic, 0, 2)
        self.fill_at_once(topic, 1, 2)
        assert self.receives_nothing(subscription)
        self.fill_at_once(topic, 0, 3)
        self.fill(topic, 1, 2)
        assert by_partition(collect(subscription, 3)) == {0: numbered(5, 7), 1: numbered(3, 4)}
        assert assignment.partitions() == [0, 1]
        assert self.receives_nothing(subscription)

    def test_every_message_comes_once_and_in_order_whatever_publishes_meanwhile(self, topic: Topic) -> None:
        self.fill(topic, 0, 3)
        expected: dict[int, dict[int, bytes]] = {0: dict(numbered(0, 3)), 1: {}, 2: {}}

        def publish(name: int) -> None:
            for turn in range(self.publishes):
                for partition in range(3):
                    payloads = [b"%d/%d/%d" % (name, turn, part) for part in range(3)]
                    offsets = topic.publish_all(partition, payloads[:2])
                    offsets.append(topic.publish(partition, payloads[2]))
                    expected[partition].update(zip(offsets, payloads, strict=True))

        subscription, _ = topic.subscribe([(partition, 0) for partition in range(3)])
        messages: list[Message] = []
        total = 3 + 3 * 9 * self.publishes
        together(
            *[lambda name=name: publish(name) for name in range(3)],
            lambda: messages.extend(collect(subscription, total, seconds=2 * SOON)),
        )
        found = by_partition(messages)
        for partition in range(3):
            assert found[partition] == sorted(expected[partition].items())
            assert [offset for offset, _ in found[partition]] == list(range(len(found[partition])))
            for name in range(3):
                mine = [payload for _, payload in found[partition] if payload.startswith(b"%d/" % name)]
                assert mine == [b"%d/%d/%d" % (name, turn, part) for turn in range(self.publishes) for part in range(3)]
        assert self.receives_nothing(subscription)

    def test_subscriptions_do_not_take_from_each_other(self, topic: Topic) -> None:
        self.fill(topic, 0, 4)
        one, _ = topic.subscribe([(0, 0)])
        two, _ = topic.subscribe([(0, 1)])
        assert by_partition(collect(one, 4)) == {0: numbered(0, 4)}
        one.close()
        self.fill(topic, 0, 1)
        assert by_partition(collect(two, 4)) == {0: numbered(1, 5)}

    def test_a_slow_subscriber_loses_nothing_and_is_given_some_thousands_at_a_time(self, topic: Topic) -> None:
        slow, _ = topic.subscribe([(0, 0), (1, 0)])
        for _ in range(6):
            self.fill_at_once(topic, 0, 4000)
            self.fill_at_once(topic, 1, 500)
        messages: list[Message] = []
        while len(messages) < 27_000:
            taken = slow.take(SOON)
            assert 0 < len(taken) <= 10_000
            messages += taken
        assert by_partition(messages) == {0: numbered(0, 24_000), 1: numbered(0, 3000)}
