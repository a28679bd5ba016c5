"""Contract of closing a subscription and a topic."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from strandline.errors import StrandlineError
from strandline.log.topic.contract import Message, Topic, TopicSubscription
from tests.contracts.topics.hooks import FOREVER, SOON, TopicOwner, collect


class ClosingContract(TopicOwner):
    """Contract of closing a subscription and a topic."""

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
