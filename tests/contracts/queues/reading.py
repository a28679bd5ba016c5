"""Contract of reads: batch by batch, by descriptors, with read-ahead."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from strandline.errors import CursorExpired, InvalidInput, OutOfOrderAck, StorageError, TransientStorageError
from strandline.followers.consumer.consumer import Consumer
from strandline.followers.consumer.reader import ConsumedBatch
from strandline.model.records import READ_SCHEMA
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Call, FaultyStore
from tests.contracts.queues.places import QueueFixtures, QueuePlace, first_to_come, values

_SOON = 120.0
"""Real seconds as a generous time limit."""


class _ProducingClock(ManualClock):
    """A clock on which a batch is produced during the ``after``-th sleep."""

    def __init__(self, place: QueuePlace, *, after: int) -> None:
        super().__init__()
        self.sleeps = 0
        self._place, self._after = place, after

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.sleeps += 1
        if self.sleeps == self._after:
            self._place.produce(b"late")


class QueueReadContract(QueueFixtures):
    """Calls that move the read cursor, or must not."""

    # --- next_batch -----------------------------------------------------------------------------------------

    def test_batches_come_in_order_then_none_then_what_is_new(self, five: QueuePlace) -> None:
        consumer = five.open()
        assert values(consumer) == [list(self.zero), [b"1"], [b"2"], [b"3"], [b"4"]]
        assert consumer.next_batch() is None
        five.produce(b"5")
        assert values(consumer) == [[b"5"]]

    def test_an_empty_queue_gives_none(self, place: QueuePlace) -> None:
        consumer = place.open()
        assert consumer.next_batch() is None
        assert consumer.next_descriptors(3) == []
        assert list(consumer.batches()) == []
        place.produce(b"first")
        assert values(consumer) == [[b"first"]]

    def test_next_batch_waits_for_a_batch_that_is_listed_in_time(self, place: QueuePlace) -> None:
        clock = _ProducingClock(place, after=3)
        consumer = place.open(env=Env(clock=clock))
        batch = consumer.next_batch(timeout=60)
        assert batch is not None
        assert batch.values == [b"late"]
        assert clock.sleeps == 3

    def test_next_batch_waits_no_longer_than_its_timeout(self, place: QueuePlace) -> None:
        clock = ManualClock()
        consumer = place.open(env=Env(clock=clock))
        began = clock.monotonic()
        assert consumer.next_batch(timeout=2.5) is None
        assert clock.monotonic() - began == pytest.approx(2.5)

    def test_next_batch_without_a_timeout_waits_until_there_is_a_batch(self, place: QueuePlace) -> None:
        consumer = place.open(env=Env(clock=_ProducingClock(place, after=500)))
        batch = consumer.next_batch(timeout=None)
        assert batch is not None
        assert batch.values == [b"late"]

    @pytest.mark.parametrize("timeout", [-1, float("nan")], ids=["a negative one", "no number"])
    def test_a_timeout_that_is_no_time_is_refused(self, five: QueuePlace, timeout: float) -> None:
        consumer = five.open()
        with pytest.raises(InvalidInput, match="timeout"):
            consumer.next_batch(timeout=timeout)
        assert consumer.next_to_read == 0

    def test_next_batch_waits_in_asyncio_too(self, place: QueuePlace) -> None:
        consumer = place.open()

        async def take() -> tuple[ConsumedBatch | None, ConsumedBatch | None]:
            missed = await consumer.next_batch_async(timeout=0.02)
            waiting = asyncio.create_task(consumer.next_batch_async(timeout=_SOON))
            await asyncio.sleep(0)
            await asyncio.to_thread(place.produce, b"late")
            return missed, await waiting

        missed, batch = asyncio.run(take())
        assert missed is None
        assert batch is not None
        assert batch.values == [b"late"]

    def test_a_consumer_is_iterated_until_nothing_is_left(self, five: QueuePlace) -> None:
        consumer = five.open()
        assert not consumer.is_empty
        assert [batch.sequence for batch in consumer] == [0, 1, 2, 3, 4]
        assert list(consumer) == []
        consumer.ack_through(4)
        assert consumer.next_batch() is None
        assert consumer.is_empty

    def test_reading_may_run_ahead_of_acknowledging(self, five: QueuePlace) -> None:
        consumer = five.open()
        values(consumer)
        assert (consumer.next_to_read, consumer.next_to_ack) == (5, 0)
        consumer.ack(0)
        consumer.close()
        assert first_to_come(five) == 1

    def test_a_batch_carries_entries_records_sequence_location_and_metadata(self, five: QueuePlace) -> None:
        consumer = five.open()
        batch = consumer.next_batch()
        assert isinstance(batch, ConsumedBatch)
        assert batch.values == list(self.zero)
        assert batch.records.schema == READ_SCHEMA
        assert batch.records["value"].to_pylist() == batch.values
        assert (batch.sequence, batch.location) == (0, self.locations(five)[0])
        ((start, ingested, payload),) = [(item.start, item.ingested, item.payload) for item in batch.metadata]
        assert (start, payload) == (0, b"zero")
        assert ingested > 1_600_000_000_000_000  # microseconds

    def test_entries_may_be_empty(self, place: QueuePlace) -> None:
        place.produce(b"", b"x", b"")
        assert values(place.open()) == [[b"", b"x", b""]]

    def test_a_failed_fetch_leaves_the_cursor_where_it_was(self, five: QueuePlace, line: FaultyStore) -> None:
        first, second, *_ = self.locations(five)
        consumer = five.open(line)
        for path in (first, second):
            line.fail_next(path_prefix=path, times=2)
            for _ in range(2):
                with pytest.raises(TransientStorageError):
                    consumer.next_batch()
            assert consumer.next_batch().location == path  # type: ignore[union-attr]

    def test_a_failed_look_leaves_the_cursor_where_it_was(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line)
        with line.down():
            for call in (consumer.next_batch, lambda: consumer.next_descriptors(3), lambda: next(consumer.batches())):
                with pytest.raises(StorageError):
                    call()
        assert consumer.next_to_read == 0
        assert len(values(consumer)) == 5

    def test_an_interrupted_fetch_leaves_the_cursor_where_it_was(self, five: QueuePlace, line: FaultyStore) -> None:
        path = self.locations(five)[0]
        consumer = five.open(line)

        def interrupt(call: Call) -> None:
            if call.path == path and call.stage == "after":
                raise KeyboardInterrupt

        line.hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            consumer.next_batch()
        line.unhook()
        assert consumer.next_batch().sequence == 0  # type: ignore[union-attr]

    # --- descriptors ----------------------------------------------------------------------------------------

    def test_descriptors_are_contiguous_and_the_cursor_moves_at_hand_out(self, five: QueuePlace) -> None:
        consumer = five.open()
        assert [found.sequence for found in consumer.next_descriptors(2)] == [0, 1]
        assert [found.sequence for found in consumer.next_descriptors(1)] == [2]
        assert consumer.next_batch().sequence == 3  # type: ignore[union-attr]
        assert [found.sequence for found in consumer.next_descriptors(9)] == [4]
        assert consumer.next_descriptors(9) == []

    def test_descriptors_that_are_lost_are_handed_out_again_only_to_a_new_consumer(self, five: QueuePlace) -> None:
        consumer = five.open()
        lost = consumer.next_descriptors(5)
        assert consumer.next_batch() is None
        assert five.open().next_descriptors(5) == lost

    def test_handing_out_descriptors_reads_no_data(self, five: QueuePlace, line: FaultyStore) -> None:
        data = set(self.locations(five))
        consumer = five.open(line)
        line.log.clear()
        consumer.next_descriptors(5)
        consumer.descriptors_between(0, 4)
        assert line.log
        assert not data & {row.path for row in line.log}

    def test_handing_out_no_descriptors_does_no_io_at_all(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line)
        line.log.clear()
        with line.down():
            assert consumer.next_descriptors(0) == []
        assert line.log == []
        with pytest.raises(InvalidInput):
            consumer.next_descriptors(-1)

    def test_descriptors_between_two_sequences_can_be_read_again_and_move_nothing(self, five: QueuePlace) -> None:
        consumer = five.open()
        consumer.next_descriptors(2)
        assert [found.sequence for found in consumer.descriptors_between(1, 3)] == [1, 2, 3]
        assert [found.sequence for found in consumer.descriptors_between(0, 0)] == [0]
        assert [found.sequence for found in consumer.descriptors_between(3, 9)] == [3, 4]
        assert consumer.descriptors_between(5, 9) == []
        assert (consumer.next_to_read, consumer.next_to_ack) == (2, 0)
        with pytest.raises(OutOfOrderAck):  # a replay is no delivery
            consumer.ack_through(3)
        for first, last in ((-1, 2), (3, 2)):
            with pytest.raises(InvalidInput):
                consumer.descriptors_between(first, last)

    def test_descriptors_that_are_gone_are_an_error_and_not_left_out(self, five: QueuePlace) -> None:
        five.forget(2)
        consumer = five.open()
        for first in (0, 1):
            with pytest.raises(CursorExpired):
                consumer.descriptors_between(first, 4)
        assert [found.sequence for found in consumer.descriptors_between(2, 4)] == [2, 3, 4]

    # --- fetching -------------------------------------------------------------------------------------------

    def test_equal_descriptors_give_equal_batches(self, five: QueuePlace) -> None:
        consumer = five.open()
        descriptors = consumer.next_descriptors(5)
        again = consumer.descriptors_between(0, 4)
        assert again == descriptors
        handle = consumer.fetch_handle()
        for one, other in zip(descriptors, again, strict=True):
            assert handle.fetch(one) == handle.fetch(other)
        assert handle.fetch(descriptors[0]) != handle.fetch(descriptors[1])

    def test_a_fetch_handle_is_picklable_and_stateless(self, five: QueuePlace) -> None:
        consumer = five.open()
        descriptors, handle = consumer.next_descriptors(5), consumer.fetch_handle()
        if not self.picklable:
            with pytest.raises(InvalidInput, match="memory"):
                pickle.dumps(handle)
            return
        copy, copies = pickle.loads(pickle.dumps((handle, descriptors)))
        assert copies == descriptors
        assert [copy.fetch(found) for found in reversed(copies)] == [handle.fetch(found) for found in descriptors[::-1]]
        consumer.close()
        assert copy.fetch(copies[0]).values == list(self.zero)

    def test_fetching_moves_no_cursor(self, five: QueuePlace) -> None:
        consumer = five.open()
        (first, *_) = consumer.descriptors_between(0, 4)
        consumer.fetch_handle().fetch(first)
        assert (consumer.next_to_read, consumer.next_to_ack) == (0, 0)

    def test_the_owner_goes_on_while_others_fetch(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line)
        (held,) = consumer.next_descriptors(1)
        begun, go_on = threading.Event(), threading.Event()

        def linger(call: Call) -> None:
            if call.path == held.location and call.stage == "before":
                begun.set()
                assert go_on.wait(_SOON)

        line.hook(linger)
        with ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(consumer.fetch_handle().fetch, held)
            assert begun.wait(_SOON)
            assert consumer.next_batch().sequence == 1  # type: ignore[union-attr]
            consumer.ack(0)
            consumer.flush()
            assert not fetching.done()
            go_on.set()
            assert fetching.result(_SOON).values == list(self.zero)

    def test_acknowledging_goes_on_while_the_next_batch_is_fetched(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line)
        consumer.next_batch()
        path = self.locations_seen(consumer)[1]
        begun, go_on = threading.Event(), threading.Event()

        def linger(call: Call) -> None:
            if call.path == path and call.stage == "before":
                begun.set()
                assert go_on.wait(_SOON)

        line.hook(linger)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(consumer.next_batch)
            assert begun.wait(_SOON)
            consumer.ack_through(0)
            go_on.set()
            assert reading.result(_SOON).sequence == 1  # type: ignore[union-attr]
        assert (consumer.next_to_read, consumer.next_to_ack) == (2, 1)

    def locations_seen(self, consumer: Consumer) -> list[str]:
        """The locations of the batches, from this consumer."""
        return [found.location for found in consumer.descriptors_between(0, 4)]

    def test_threads_that_read_at_once_are_given_each_batch_once(self, five: QueuePlace) -> None:
        consumer = five.open()
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: consumer.next_batch(), range(8)))
        assert sorted(batch.sequence for batch in found if batch is not None) == [0, 1, 2, 3, 4]

    # --- the lag gauge --------------------------------------------------------------------------------------

    def test_the_lag_is_the_time_since_ingestion_when_a_batch_is_read_and_at_least_0(self, five: QueuePlace) -> None:
        clock = ManualClock()
        consumer = five.open(env=Env(clock=clock))
        assert consumer.lag is None
        first, second, third, *_ = consumer.descriptors_between(0, 4)
        assert consumer.lag is None
        clock.set_wall(first.metadata[-1].ingested + 2_500_000)
        consumer.next_batch()
        assert consumer.lag == 2.5
        clock.advance(60)
        assert consumer.lag == 2.5
        clock.set_wall(second.metadata[-1].ingested + 1_000_000)
        consumer.fetch_handle().fetch(second)
        assert consumer.lag == 2.5
        clock.set_wall(third.metadata[-1].ingested - 1_000_000)
        assert consumer.next_descriptors(1) == [second]
        consumer.next_batch()
        assert consumer.lag == 0.0

    def test_reading_batches_keeps_the_lag_too(self, five: QueuePlace) -> None:
        clock = ManualClock(now=4_000_000_000_000_000)
        consumer = five.open(env=Env(clock=clock))
        batch = consumer.next_batch()
        assert batch is not None
        assert consumer.lag == (clock.now() - batch.metadata[-1].ingested) / 1e6
        *_, last = consumer.batches()
        assert consumer.lag == (clock.now() - last.metadata[-1].ingested) / 1e6

    # --- reading ahead --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("parallel", [1, 2, 4, 16])
    @pytest.mark.parametrize("ahead", [1, 64 << 20])
    def test_the_iterator_gives_all_in_order(self, five: QueuePlace, parallel: int, ahead: int) -> None:
        consumer = five.open()
        found = list(consumer.batches(parallel=parallel, ahead=ahead))
        assert [batch.values for batch in found] == [list(self.zero), [b"1"], [b"2"], [b"3"], [b"4"]]
        assert [batch.sequence for batch in found] == [0, 1, 2, 3, 4]
        five.produce(b"5")
        assert [batch.values for batch in consumer.batches(parallel=parallel)] == [[b"5"]]

    def test_the_cursor_moves_only_as_the_iterator_gives(self, five: QueuePlace) -> None:
        consumer = five.open()
        reading = consumer.batches(parallel=4)
        assert consumer.next_to_read == 0
        for expected in range(2):
            assert next(reading).sequence == expected
            assert consumer.next_to_read == expected + 1
        reading.close()  # type: ignore[attr-defined]
        assert consumer.next_batch().sequence == 2  # type: ignore[union-attr]

    def test_batches_that_another_call_has_delivered_are_not_delivered_again(self, five: QueuePlace) -> None:
        consumer = five.open()
        reading = consumer.batches(parallel=4)
        assert next(reading).sequence == 0
        assert consumer.next_batch().sequence == 1  # type: ignore[union-attr]
        assert [found.sequence for found in consumer.next_descriptors(1)] == [2]
        assert [batch.sequence for batch in reading] == [3, 4]

    def test_no_more_than_so_many_batches_are_read_ahead(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line)
        data = set(self.locations_seen(consumer))
        for count, _ in enumerate(consumer.batches(parallel=2), 1):
            assert len([row for row in line.log if row.path in data]) <= count + 2

    def test_a_failed_fetch_ends_the_iterator_and_leaves_the_cursor(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line)
        line.fail_next(path_prefix=self.locations_seen(consumer)[2])
        reading = consumer.batches(parallel=4)
        assert [next(reading).sequence for _ in range(2)] == [0, 1]
        with pytest.raises(TransientStorageError):
            next(reading)
        assert consumer.next_to_read == 2
        assert [batch.sequence for batch in consumer.batches()] == [2, 3, 4]

    @pytest.mark.parametrize("options", [{"parallel": 0}, {"ahead": 0}, {"parallel": -1}])
    def test_reading_ahead_without_readers_or_room_is_refused(self, five: QueuePlace, options: dict[str, int]) -> None:
        with pytest.raises(InvalidInput):
            five.open().batches(**options)
