"""The whole contract suite of queues."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strandline.errors import Fenced
from strandline.followers.consumer.consumer import Consumer
from strandline.log.queue.contract import Fetcher, Queue
from strandline.model.head import Descriptor
from strandline.testing.faulty import FaultyStore
from tests.contracts.queues.acknowledging import AckingContract
from tests.contracts.queues.places import QueuePlace, at_once, first_to_come, values
from tests.contracts.queues.reading import QueueReadContract
from tests.contracts.queues.undecodable import PoisonContract


class QueueContract(QueueReadContract, AckingContract, PoisonContract):
    """Every sentence about the queue API, as a test.

    A subclass named ``Test...`` defines the fixture ``place``, an empty queue.
    """

    # --- opening and fencing --------------------------------------------------------------------------------

    def test_it_satisfies_the_protocols(self, five: QueuePlace) -> None:
        queue = five.queue()
        assert isinstance(queue, Queue)
        assert isinstance(queue.fetcher(), Fetcher)
        queue.claim("somebody", None)
        assert all(isinstance(found, Descriptor) for found in queue.peek(0).descriptors)

    @pytest.mark.parametrize(
        "call",
        [
            lambda consumer: consumer.next_batch(),
            lambda consumer: consumer.next_descriptors(1),
            lambda consumer: consumer.descriptors_between(0, 1),
            lambda consumer: next(consumer.batches()),
            lambda consumer: consumer.ack(1),
            lambda consumer: consumer.ack_through(1),
            lambda consumer: consumer.flush(),
            lambda consumer: consumer.close(),
        ],
        ids=["next_batch", "next_descriptors", "between", "batches", "durable ack", "ack_through", "flush", "close"],
    )
    def test_a_fenced_consumer_gets_fenced_and_changes_nothing(
        self, five: QueuePlace, call: Callable[[Consumer], object]
    ) -> None:
        old = five.open(ack_every=2)
        assert [old.next_batch().sequence for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
        old.ack(0)
        new = five.open()
        for _ in range(2):
            with pytest.raises(Fenced):
                call(old)
        assert (old.next_to_read, old.next_to_ack) == (2, 1)
        assert values(new) == [list(self.zero), [b"1"], [b"2"], [b"3"], [b"4"]]
        new.ack(0)
        new.flush()
        assert first_to_come(five) == 1

    def test_a_fenced_consumer_that_has_nothing_to_flush_gets_fenced_from_flush(self, five: QueuePlace) -> None:
        old = five.open()
        five.open()
        with pytest.raises(Fenced):
            old.flush()

    def test_a_fenced_consumer_that_has_nothing_to_flush_can_be_closed(self, five: QueuePlace) -> None:
        old = five.open()
        five.open()
        old.close()

    def test_batches_that_a_fenced_consumer_was_given_can_still_be_fetched(self, five: QueuePlace) -> None:
        old = five.open()
        held, handle = old.next_descriptors(2), old.fetch_handle()
        new = five.open()
        assert [old.fetch_handle().fetch(descriptor).values for descriptor in held] == [list(self.zero), [b"1"]]
        assert [handle.fetch(descriptor) for descriptor in held] == [new.next_batch(), new.next_batch()]

    def test_a_consumer_that_was_fenced_may_open_anew(self, five: QueuePlace) -> None:
        old, new = five.open(), five.open()
        new.next_batch()
        new.ack_through(0)
        again = five.open()
        assert again.next_batch().values == [b"1"]  # type: ignore[union-attr]
        for fenced in (old, new):
            with pytest.raises(Fenced):
                fenced.next_batch()

    # --- gauges ---------------------------------------------------------------------------------------------

    def test_the_length_is_what_was_listed_and_not_acknowledged_at_the_last_access(
        self, five: QueuePlace, line: FaultyStore
    ) -> None:
        consumer = five.open(line)
        consumer.next_batch()
        assert len(consumer) == 5
        consumer.ack(0)
        assert len(consumer) == 5
        five.produce(b"5")
        with line.down():
            assert len(consumer) == 5
        consumer.next_batch()
        assert len(consumer) == 6
        consumer.ack_through(1)
        assert len(consumer) == 4
        assert bool(consumer)

    def test_the_conflict_rate_is_a_percentage_of_conditional_writes(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line)
        values(consumer)
        consumer.ack_through(0)
        assert consumer.conflict_rate == 0.0
        at_once(line, "", five.open, stage="before")
        with pytest.raises(Fenced):
            consumer.ack_through(1)
        assert 0.0 <= consumer.conflict_rate <= 100.0
        assert self.lossy or 0.0 < consumer.conflict_rate < 100.0  # a write whose answer was lost counts as neither
