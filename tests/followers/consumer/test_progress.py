"""The positions of a consumer, by examples and against a simple model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strandline.errors import CorruptData, InvalidInput, OutOfOrderAck
from strandline.followers.consumer.progress import AckProgress, AckStep
from strandline.model.head import QueueEntry
from tests.interrupts import interruptions
from tests.matrix_cases import examples


def entry(sequence: int) -> QueueEntry:
    return QueueEntry(sequence, f"batch-{sequence}")


def handed_out(first: int, count: int, *, ack_every: int = 100) -> AckProgress:
    progress = AckProgress(first, ack_every=ack_every)
    progress.hand_out([entry(first + index) for index in range(count)])
    return progress


def numbers(progress: AckProgress) -> tuple[int, int, int]:
    return progress.durable, progress.acknowledged, progress.read


def acknowledge(progress: AckProgress, sequence: int) -> AckStep:
    step = progress.ack(sequence)
    progress.done(step)
    return step


def test_the_first_to_be_acknowledged_is_where_it_begins() -> None:
    progress = handed_out(5, 3)
    for wrong in (0, 4, 6, 7, 8):
        with pytest.raises(OutOfOrderAck, match="the next one is 5"):
            progress.ack(wrong)
    acknowledge(progress, 5)
    assert numbers(progress) == (5, 6, 8)


def test_a_batch_that_was_not_delivered_cannot_be_acknowledged() -> None:
    progress = AckProgress(5)
    with pytest.raises(OutOfOrderAck, match="the next one is 5, and it was not handed out yet"):
        progress.ack(5)
    progress.hand_out([entry(5)])
    with pytest.raises(OutOfOrderAck, match="handed out are 5 through 5"):
        progress.ack_through(6)
    assert numbers(progress) == (5, 5, 6)


def test_deciding_changes_nothing_until_it_is_done() -> None:
    progress = handed_out(0, 4, ack_every=2)
    acknowledge(progress, 0)
    for decide in (lambda: progress.ack(1), lambda: progress.ack_through(3), progress.flush):
        step = decide()
        assert decide() == step
        assert step.through is not None
        assert numbers(progress) == (0, 1, 4)


def test_every_so_many_acknowledgements_become_durable() -> None:
    progress = handed_out(0, 7, ack_every=3)
    durable = [acknowledge(progress, sequence).through for sequence in range(7)]
    assert durable == [None, None, entry(2), None, None, entry(5), None]
    assert numbers(progress) == (6, 7, 7)


def test_a_flush_restarts_the_count() -> None:
    progress = handed_out(0, 7, ack_every=3)
    acknowledge(progress, 0)
    step = progress.flush()
    assert step == AckStep(1, entry(0))
    progress.done(step)
    assert progress.flush() is None
    assert [acknowledge(progress, sequence).through for sequence in (1, 2, 3)] == [None, None, entry(3)]


def test_acknowledging_through_is_durable_at_once_and_a_repeat_is_an_error() -> None:
    progress = handed_out(0, 5)
    step = progress.ack_through(2)
    assert step == AckStep(3, entry(2))
    progress.done(step)
    for again in (2, 1, 0, -1):
        with pytest.raises(OutOfOrderAck, match="the next one is 3"):
            progress.ack_through(again)
    assert numbers(progress) == (3, 3, 5)


def test_batches_out_of_order_are_not_delivered() -> None:
    progress = handed_out(0, 2)
    for wrong in ([entry(3)], [entry(1)], [entry(2), entry(4)], [entry(2), entry(2)]):
        with pytest.raises(CorruptData, match="is next"):
            progress.hand_out(wrong)
    assert numbers(progress) == (0, 0, 2)


def interrupted(work: Callable[[AckProgress], None]) -> Iterator[AckProgress]:
    """Progress with one batch handed out, after the work was interrupted at each place in turn."""
    last: list[AckProgress] = []

    def again() -> None:
        last[:] = [handed_out(5, 1)]
        work(last[0])

    places = 0
    for _ in interruptions(again, within="strandline.followers.consumer.progress"):
        if last and last[0].read > 5:
            places += 1
            yield last[0]
    assert places > 3


def test_a_batch_whose_delivery_was_interrupted_cannot_be_acknowledged() -> None:
    for progress in interrupted(lambda progress: progress.hand_out([entry(6), entry(7)])):
        delivered = progress.read == 8
        assert delivered or progress.read == 6
        acknowledge(progress, 5)
        if not delivered:
            for call in (progress.ack, progress.ack_through):
                for sequence in (6, 7):
                    with pytest.raises(OutOfOrderAck, match="the next one is 6, and it was not handed out yet"):
                        call(sequence)
            progress.hand_out([entry(6)])  # what is read again need not end where it did
            progress.hand_out([entry(7)])
        progress.done(progress.ack_through(7))
        assert numbers(progress) == (8, 8, 8)
        assert not progress._handed_out


def test_a_batch_whose_setting_aside_was_interrupted_is_set_aside_or_not() -> None:
    for progress in interrupted(lambda progress: progress.set_aside(entry(6))):
        assert progress.acknowledged <= progress.read
        acknowledge(progress, 5)
        if progress.read == 6:
            progress.hand_out([entry(6)])  # it can be read after all
            assert progress.acknowledged == 6
            acknowledge(progress, 6)
        assert progress.acknowledged == 7
        progress.hand_out([entry(7)])
        progress.done(progress.ack_through(7))
        assert numbers(progress) == (8, 8, 8)


def test_a_batch_set_aside_counts_as_acknowledged_in_its_turn() -> None:
    progress = handed_out(0, 2)
    progress.set_aside(entry(2))
    progress.hand_out([entry(3)])
    acknowledge(progress, 0)
    assert progress.acknowledged == 1  # 1 is still to be acknowledged, though 2 is set aside
    acknowledge(progress, 1)
    assert progress.acknowledged == 3
    with pytest.raises(OutOfOrderAck, match="the next one is 3"):
        progress.ack(2)
    acknowledge(progress, 3)
    assert progress.flush() == AckStep(4, entry(3))


def test_a_batch_set_aside_first_or_last_is_acknowledged_with_the_others() -> None:
    progress = AckProgress(7)
    progress.set_aside(entry(7))
    assert numbers(progress) == (7, 8, 8)
    assert progress.flush() == AckStep(8, entry(7))
    progress.hand_out([entry(8)])
    progress.set_aside(entry(9))
    assert progress.ack_through(8) == AckStep(10, entry(9))


def test_a_batch_that_was_handed_out_before_can_be_set_aside() -> None:
    progress = handed_out(0, 3)
    progress.set_aside(entry(1))
    assert numbers(progress) == (0, 0, 3)
    acknowledge(progress, 0)
    assert progress.acknowledged == 2


@pytest.mark.parametrize("wrong", [0, 1, 4, 9])
def test_a_batch_that_is_acknowledged_or_far_ahead_cannot_be_set_aside(wrong: int) -> None:
    progress = handed_out(0, 3)
    progress.done(progress.ack_through(1))
    with pytest.raises(InvalidInput, match="cannot be set aside"):
        progress.set_aside(entry(wrong))
    assert numbers(progress) == (2, 2, 3)


def test_a_batch_set_aside_while_a_step_is_under_way_is_not_forgotten() -> None:
    progress = handed_out(0, 1)
    step = progress.ack_through(0)
    progress.set_aside(entry(1))
    progress.done(step)
    assert numbers(progress) == (1, 2, 2)
    assert progress.flush() == AckStep(2, entry(1))


class ProgressModel(RuleBasedStateMachine):
    """Each batch by itself: handed out, acknowledged, set aside. Durable is a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = AckProgress(3, ack_every=4)
        self.handed_out: list[int] = []
        self.finished: set[int] = set()
        self.durable = 3
        self.step: AckStep | None = None

    def expected(self) -> int:
        return next(sequence for sequence in range(3, 10**6) if sequence not in self.finished)

    def read(self) -> int:
        return 3 + len(self.handed_out)

    @rule(count=st.integers(0, 4))
    def hand_out(self, count: int) -> None:
        fresh = list(range(self.read(), self.read() + count))
        self.progress.hand_out([entry(sequence) for sequence in fresh])
        self.handed_out += fresh

    @rule(back=st.integers(0, 5))
    def set_aside(self, back: int) -> None:
        sequence = self.read() - back
        if sequence < self.expected():
            return
        self.progress.set_aside(entry(sequence))
        if sequence == self.read():
            self.handed_out.append(sequence)
        self.finished.add(sequence)

    @precondition(lambda self: self.step is None)
    @rule(way=st.sampled_from(["ack", "through", "flush"]), ahead=st.integers(-2, 4))
    def decide(self, way: str, ahead: int) -> None:
        sequence = self.expected() + ahead
        if way == "flush":
            self.step = self.progress.flush()
            assert (self.step is None) == (self.expected() == self.durable)
            return
        allowed = sequence == self.expected() if way == "ack" else sequence >= self.expected()
        decide = self.progress.ack if way == "ack" else self.progress.ack_through
        if not allowed or sequence >= self.read():
            with pytest.raises(OutOfOrderAck, match=f"the next one is {self.expected()},"):
                decide(sequence)
            return
        self.step = decide(sequence)
        due = self.step.acknowledged - self.durable >= 4
        assert (self.step.through is not None) == (way == "through" or due)

    @precondition(lambda self: self.step is not None)
    @rule(works=st.booleans())
    def act(self, *, works: bool) -> None:
        assert self.step is not None
        if works:
            self.finished |= set(range(3, self.step.acknowledged))
            if self.step.through is not None:
                assert self.step.through == entry(self.step.acknowledged - 1)
                self.durable = max(self.durable, self.step.acknowledged)
            self.progress.done(self.step)
        self.step = None

    @invariant()
    def agrees(self) -> None:
        assert numbers(self.progress) == (self.durable, self.expected(), self.read())


ProgressModel.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestProgressAgainstAModel = ProgressModel.TestCase
