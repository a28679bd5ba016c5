"""Contract of acknowledgements: in order, durable, atomic."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strandline.errors import ConsumerClosed, CursorExpired, InvalidInput, OutOfOrderAck, StorageError
from strandline.testing.faulty import Call, FaultyStore
from tests.contracts.queues.places import QueueFixtures, QueuePlace, at_once, first_to_come, values


class AckingContract(QueueFixtures):
    """Calls that move the acknowledged position, or must not."""

    # --- ack ------------------------------------------------------------------------------------------------

    def test_only_the_next_batch_can_be_acknowledged_and_the_error_names_it(self, five: QueuePlace) -> None:
        consumer = five.open()
        values(consumer)
        for expected in range(3):
            for wrong in {-1, 0, 1, 2, 3, 4, 5, 99} - {expected}:
                with pytest.raises(OutOfOrderAck, match=f"the next one is {expected}\\b"):
                    consumer.ack(wrong)
            consumer.ack(expected)

    def test_the_first_expected_is_the_slot_s_position(self, five: QueuePlace) -> None:
        with five.open() as consumer:
            consumer.next_descriptors(3)
            consumer.ack_through(2)
        consumer = five.open()
        consumer.next_batch()
        with pytest.raises(OutOfOrderAck, match="the next one is 3"):
            consumer.ack(0)
        consumer.ack(3)

    def test_a_batch_that_was_not_delivered_cannot_be_acknowledged(self, five: QueuePlace) -> None:
        consumer = five.open()
        with pytest.raises(OutOfOrderAck, match="the next one is 0, and it was not handed out"):
            consumer.ack(0)

    def test_acknowledgements_become_durable_every_so_often(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line, ack_every=3)
        values(consumer)
        line.log.clear()
        consumer.ack(0)
        consumer.ack(1)
        assert line.log == []
        consumer.ack(2)
        assert line.log
        consumer.ack(3)
        assert first_to_come(five) == 3

    def test_a_flush_makes_acknowledgements_durable(self, five: QueuePlace) -> None:
        consumer = five.open()
        values(consumer)
        consumer.ack(0)
        consumer.ack(1)
        consumer.flush()
        consumer.flush()
        assert first_to_come(five) == 2

    @pytest.mark.parametrize("way", ["ack", "ack_through", "flush", "close"])
    @pytest.mark.parametrize("landed", [True, False], ids=["landed", "not landed"])
    def test_a_failed_durable_step_changes_nothing_and_may_be_repeated(
        self, five: QueuePlace, line: FaultyStore, way: str, *, landed: bool
    ) -> None:
        consumer = five.open(line, ack_every=2)
        values(consumer)
        consumer.ack(0)
        step: dict[str, Callable[[], None]] = {
            "ack": lambda: consumer.ack(1),
            "ack_through": lambda: consumer.ack_through(3),
            "flush": consumer.flush,
            "close": consumer.close,
        }
        # The write lands, or not, and then the store is down: the outcome is unknown.
        if landed:
            line.hook(_down_behind_a_write(line))
        else:
            at_once(line, "", line.turn_down, stage="before")
        line.lose_answers(1)
        for _ in range(2):
            with pytest.raises(StorageError):
                step[way]()
            assert (consumer.next_to_ack, consumer.next_to_read) == (1, 5)
        line.unhook()
        line.heal()
        step[way]()
        assert first_to_come(five) == {"ack": 2, "ack_through": 4, "flush": 1, "close": 1}[way]

    @pytest.mark.parametrize("times", [1, 3])
    def test_an_acknowledgement_whose_answer_was_lost_is_done_once(
        self, five: QueuePlace, line: FaultyStore, times: int
    ) -> None:
        consumer = five.open(line)
        values(consumer)
        line.lose_answers(times)
        consumer.ack_through(1)
        line.lose_answers(times)
        consumer.ack(2)
        consumer.flush()
        assert first_to_come(five) == 3

    # --- ack_through ----------------------------------------------------------------------------------------

    def test_acknowledging_through_is_durable_when_it_returns(self, five: QueuePlace) -> None:
        consumer = five.open()
        consumer.next_descriptors(4)
        consumer.ack_through(2)
        assert (consumer.next_to_ack, consumer.next_to_read) == (3, 4)
        assert first_to_come(five) == 3

    def test_acknowledging_through_goes_on_from_what_was_acknowledged_one_by_one(self, five: QueuePlace) -> None:
        consumer = five.open()
        values(consumer)
        consumer.ack(0)
        consumer.ack_through(2)
        consumer.ack(3)
        consumer.flush()
        assert first_to_come(five) == 4

    def test_acknowledging_through_again_is_an_error_that_moves_nothing(self, five: QueuePlace) -> None:
        consumer = five.open()
        values(consumer)
        consumer.ack_through(2)
        for again in (2, 1, 0, -1):
            with pytest.raises(OutOfOrderAck, match="the next one is 3"):
                consumer.ack_through(again)
        assert consumer.next_to_ack == 3
        assert first_to_come(five) == 3

    def test_acknowledging_through_what_was_not_handed_out_is_an_error_that_moves_nothing(
        self, five: QueuePlace
    ) -> None:
        consumer = five.open()
        consumer.next_descriptors(2)
        for ahead in (2, 4, 99):
            with pytest.raises(OutOfOrderAck, match="handed out are 0 through 1"):
                consumer.ack_through(ahead)
        assert consumer.next_to_ack == 0
        assert first_to_come(five) == 0

    def test_acknowledging_through_is_durable_before_it_counts(self, five: QueuePlace, line: FaultyStore) -> None:
        consumer = five.open(line)
        values(consumer)
        seen: list[int] = []
        line.hook(lambda _: seen.append(consumer.next_to_ack))
        consumer.ack_through(3)
        assert set(seen) == {0}
        assert consumer.next_to_ack == 4

    # --- closing --------------------------------------------------------------------------------------------

    def test_closing_flushes_and_a_new_consumer_starts_right_behind(self, five: QueuePlace) -> None:
        with five.open() as consumer:
            values(consumer)
            consumer.ack(0)
            consumer.ack(1)
        assert values(five.open()) == [[b"2"], [b"3"], [b"4"]]

    def test_a_closed_consumer_refuses_and_can_be_closed_again(self, five: QueuePlace) -> None:
        consumer = five.open()
        values(consumer)
        consumer.close()
        consumer.close()
        for call in (
            consumer.next_batch,
            lambda: consumer.next_descriptors(1),
            lambda: consumer.descriptors_between(0, 1),
            consumer.batches,
            lambda: consumer.ack(0),
            lambda: consumer.ack_through(0),
            consumer.flush,
        ):
            with pytest.raises(ConsumerClosed):
                call()
        assert first_to_come(five) == 0

    def test_an_error_within_a_block_is_not_hidden_by_one_of_closing(self, five: QueuePlace, line: FaultyStore) -> None:
        def work() -> None:
            with five.open(line) as consumer:
                values(consumer)
                consumer.ack(0)
                line.turn_down()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work()

    def test_an_error_within_a_block_does_not_undo_acknowledgements(self, five: QueuePlace) -> None:
        def work() -> None:
            with five.open() as consumer:
                values(consumer)
                consumer.ack(0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work()
        assert first_to_come(five) == 1

    # --- last_acked -----------------------------------------------------------------------------------------

    def test_without_last_acked_it_starts_at_the_stored_position(self, five: QueuePlace) -> None:
        with five.open() as consumer:
            consumer.next_descriptors(5)
            consumer.ack_through(1)
        assert values(five.open()) == [[b"2"], [b"3"], [b"4"]]

    def test_without_a_stored_position_it_starts_at_the_first_listed_though_that_has_number_5(
        self, five: QueuePlace
    ) -> None:
        five.forget(5)
        five.produce(b"5")
        five.produce(b"6")
        consumer = five.open()
        batch = consumer.next_batch()
        assert batch is not None
        assert (batch.sequence, batch.values) == (5, [b"5"])
        consumer.ack(5)
        assert values(consumer) == [[b"6"]]

    @pytest.mark.parametrize("last", [0, 2, 4])
    def test_with_last_acked_everything_through_it_is_acknowledged_at_opening(
        self, five: QueuePlace, last: int
    ) -> None:
        consumer = five.open(last_acked=last)
        assert consumer.next_to_ack == consumer.next_to_read == last + 1
        assert first_to_come(five) == last + 1
        assert len(values(five.open())) == 4 - last

    def test_a_last_acked_that_was_acknowledged_before_changes_nothing(self, five: QueuePlace) -> None:
        with five.open() as consumer:
            consumer.next_descriptors(5)
            consumer.ack_through(2)
        consumer = five.open(last_acked=2)
        assert values(consumer) == [[b"3"], [b"4"]]

    def test_a_last_acked_behind_which_batches_are_gone_is_an_error_and_nobody_is_skipped_ahead(
        self, five: QueuePlace
    ) -> None:
        five.forget(3)
        holder = five.open()
        with pytest.raises(CursorExpired):
            five.open(last_acked=1)
        assert values(holder) == [[b"3"], [b"4"]]  # no consumer was fenced
        assert five.open(last_acked=2).next_to_ack == 3

    def test_a_negative_last_acked_is_refused(self, five: QueuePlace) -> None:
        holder = five.open()
        with pytest.raises(InvalidInput, match="last_acked"):
            five.open(last_acked=-1)
        assert len(values(holder)) == 5

    @pytest.mark.parametrize("ack_every", [0, -3])
    def test_options_that_can_never_work_are_refused_before_anything_is_claimed(
        self, five: QueuePlace, ack_every: int
    ) -> None:
        holder = five.open()
        for options in ({"ack_every": ack_every}, {"on_poison": "ignore"}, {"trim_every": 0.0}):
            with pytest.raises(InvalidInput):
                five.open(**options)
        assert len(values(holder)) == 5


def _down_behind_a_write(line: FaultyStore) -> Callable[[Call], None]:
    """Take the store down at the first call after a conditional write, also if its answer was lost."""
    writes: list[int] = []

    def hook(call: Call) -> None:
        if call.name == "put_if" and call.stage == "before":
            writes.append(call.number)
        if writes and call.number > writes[0]:
            line.turn_down()

    return hook
