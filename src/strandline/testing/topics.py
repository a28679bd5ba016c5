"""Contract suite for topics: inherit the class, define how a topic is created, and run it with ``pytest``."""
# ruff: noqa: D102, PLR2004 - the name of a test is its sentence, and its numbers are its example

from __future__ import annotations

import gc
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from strandline.errors import CursorExpired, InvalidInput, StrandlineError
from strandline.log.topic.contract import Message, Topic, TopicSubscription
from strandline.model.cursor import Bounds
from strandline.storage.clock import CLOCK
from strandline.testing.stores import together

SOON = 120.0
"""Real seconds as a generous time limit."""

FOREVER = 3600.0
"""Longer than a test may run: a wait that returns earlier was woken."""


def collect(subscription: TopicSubscription, count: int, *, seconds: float = SOON) -> list[Message]:
    """The next messages of a subscription, exactly so many; fails with their number if fewer arrive."""
    messages: list[Message] = []
    deadline = CLOCK.monotonic() + seconds
    while len(messages) < count and (left := deadline - CLOCK.monotonic()) > 0:
        messages += subscription.take(left)
    assert len(messages) == count, f"{len(messages)} messages came instead of {count}"
    return messages


def by_partition(messages: Iterable[Message]) -> dict[int, list[tuple[int, bytes]]]:
    """Offset and payload of each message, in order of arrival, by partition."""
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for message in messages:
        found[message.partition].append((message.offset, message.payload))
    return dict(found)


def numbered(first: int, stop: int) -> list[tuple[int, bytes]]:
    """The messages of :meth:`TopicContract.fill` at these offsets."""
    return [(offset, b"m%d" % offset) for offset in range(first, stop)]


class TopicOwner(ABC):
    """Operations that the contract leaves to the topic's owner."""

    quiet: ClassVar[float] = 0.02
    """Seconds that a test waits to see that nothing arrives. Too short a time may miss a failure, but never
    causes one."""

    publishes: ClassVar[int] = 40
    """Number of publishes of each of several threads; fewer where each costs a round trip or an fsync."""

    @abstractmethod
    def make_topic(self, partition_count: int) -> Topic:
        """A new, empty topic. The suite closes it; the subclass cleans up the rest."""


class TopicContract(TopicOwner):
    """Every sentence of :class:`~strandline.log.topic.contract.Topic`, as a test.

    A subclass named ``Test...`` defines :meth:`make_topic`; for topics that can be trimmed there is
    :class:`~strandline.testing.topics.ForgettingContract`.
    """

    @pytest.fixture
    def topic(self) -> Iterator[Topic]:
        """A topic of three partitions."""
        topic = self.make_topic(3)
        yield topic
        topic.close()

    def fill(self, topic: Topic, partition: int, count: int) -> None:
        """Publish messages that contain their offsets, after the existing ones, each by itself."""
        first = topic.bounds(partition).next
        for offset, payload in numbered(first, first + count):
            assert topic.publish(partition, payload) == offset

    def fill_at_once(self, topic: Topic, partition: int, count: int) -> None:
        """The same in one call."""
        first = topic.bounds(partition).next
        offsets = topic.publish_all(partition, [payload for _, payload in numbered(first, first + count)])
        assert offsets == list(range(first, first + count))

    def hears_nothing(self, subscription: TopicSubscription) -> bool:
        """Whether nothing arrives for a moment."""
        return subscription.take(self.quiet) == []

    # --- publishing -------------------------------------------------------------------------------------------

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

    # --- following --------------------------------------------------------------------------------------------

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
        assert self.hears_nothing(subscription)

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
        assert self.hears_nothing(subscription)

    def test_a_start_past_the_end_waits_for_it(self, topic: Topic) -> None:
        self.fill(topic, 0, 2)
        subscription, assignment = topic.subscribe([(0, 5), (1, 3)])
        self.fill(topic, 0, 2)
        self.fill_at_once(topic, 1, 2)
        assert self.hears_nothing(subscription)
        self.fill_at_once(topic, 0, 3)
        self.fill(topic, 1, 2)
        assert by_partition(collect(subscription, 3)) == {0: numbered(5, 7), 1: numbered(3, 4)}
        assert assignment.partitions() == [0, 1]
        assert self.hears_nothing(subscription)

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
        assert self.hears_nothing(subscription)

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

    # --- assigning --------------------------------------------------------------------------------------------

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
        assert self.hears_nothing(subscription)

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
        assert self.hears_nothing(subscription)
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
        assert self.hears_nothing(subscription)

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

    # --- closing ----------------------------------------------------------------------------------------------

    def test_closing_wakes_a_waiting_take(self, topic: Topic) -> None:
        self._woken(topic, lambda subscription: subscription.close())

    def test_closing_the_topic_ends_all_subscriptions(self, topic: Topic) -> None:
        other, _ = topic.subscribe([(2, 0)])
        self._woken(topic, lambda _: topic.close())
        assert other.take(FOREVER) == []

    def _woken(self, topic: Topic, close: Callable[[TopicSubscription], None]) -> None:
        subscription, assignment = topic.subscribe([(0, 0), (1, 0)])
        begun = threading.Event()

        def take() -> list[Message]:
            begun.set()
            return subscription.take(FOREVER)

        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(take)
            assert begun.wait(SOON)
            close(subscription)
            assert taken.result(SOON) == []
        assert subscription.take(FOREVER) == []
        assert assignment.partitions() == []

    def test_a_closed_subscription_gives_nothing_at_once_though_there_is_something(self, topic: Topic) -> None:
        self.fill(topic, 0, 3)
        subscription, assignment = topic.subscribe([(0, 0)])
        subscription.close()
        subscription.close()
        assert subscription.take(FOREVER) == []
        assert assignment.partitions() == []
        assignment.remove(0)
        with pytest.raises(StrandlineError):
            assignment.add(1, 0)

    def test_closing_frees_what_a_subscription_holds(self, topic: Topic) -> None:
        def follow() -> weakref.ref[TopicSubscription]:
            subscription, _ = topic.subscribe([(0, 0)])
            collect(subscription, 2)
            subscription.close()
            return weakref.ref(subscription)

        self.fill(topic, 0, 2)
        gone = follow()
        gc.collect()
        assert gone() is None

    def test_a_closed_topic_publishes_nothing_and_closing_twice_is_fine(self) -> None:
        topic = self.make_topic(1)
        topic.publish(0, b"x")
        topic.close()
        topic.close()
        with pytest.raises(StrandlineError):
            topic.publish(0, b"y")
        with pytest.raises(StrandlineError):
            topic.subscribe([(0, 0)])


class ForgettingContract(TopicContract):
    """The same for topics that can be trimmed."""

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

    def test_one_whose_next_message_was_deleted_expires_and_the_others_go_on(self, topic: Topic) -> None:
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
