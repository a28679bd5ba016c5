"""The numbered writer: one id, one number for each batch, and both after failures of the log."""

import pytest

from strandline.errors import (
    CommitTimedOut,
    Contended,
    CorruptData,
    ExpectationFailed,
    InvalidInput,
    LogClosed,
    NotReady,
    OutcomeUnknown,
    Overloaded,
    TransientStorageError,
    WriterExpired,
)
from strandline.log.memory import MemoryLog
from strandline.log.writers.numbered import InDoubt, NumberedWriter, Refused
from strandline.model.head import Receipt
from strandline.model.records import Op, record_batch
from strandline.storage.clock import CHANCE
from strandline.storage.env import Env
from strandline.storage.retry import Backoff
from strandline.testing.clock import ManualClock

LOST = (TransientStorageError("The line is cut."), OutcomeUnknown("The answer was lost."))
TRIES = 4


class Troubled:
    """A log whose appends raise, one after the other, before or after they have landed."""

    def __init__(self, *troubles):
        self.log = MemoryLog()
        self.troubles = list(troubles)
        self.calls = []

    def append(self, batch, *, writer, number, expect=None):
        self.calls.append((writer, number))
        stage, error = self.troubles.pop(0) if self.troubles else ("never", None)
        if stage == "before":
            raise error
        handle = self.log.append(batch, writer=writer, number=number, expect=expect)
        if stage == "after":
            raise error
        return handle

    def __len__(self):
        return self.log.bounds().next


def batch(count=1):
    return record_batch(timestamps=[0] * count, ops=[int(Op.PUT)] * count, keys=[b"k"] * count, values=[b"v"] * count)


def writer_of(log):
    return NumberedWriter(log, env=Env(clock=ManualClock(), chance=CHANCE), retries=Backoff(attempts=TRIES))


def settled(log, writer):
    """One append that goes well, after which the troubles begin."""
    troubles, log.troubles = log.troubles, []
    assert isinstance(writer.append(batch()), Receipt)
    log.troubles = troubles
    return log.calls[0][0]


@pytest.mark.parametrize("stage", ["before", "after"])
@pytest.mark.parametrize(
    "error", [*LOST, Contended("Others were faster."), NotReady("No leader."), Overloaded("Slow.")]
)
def test_a_failure_that_passes_is_repeated_under_the_same_number_and_doubles_nothing(stage, error):
    log = Troubled(*[(stage, error)] * (TRIES - 1))
    writer = writer_of(log)
    assert writer.append(batch(3)).first == 0
    assert len(set(log.calls)) == 1
    assert writer.append(batch()).first == 3
    assert log.calls[-1] == (log.calls[0][0], 1)


@pytest.mark.parametrize("stage", ["before", "after"])
@pytest.mark.parametrize("error", LOST)
def test_an_outcome_that_stays_unknown_is_raised_and_its_number_is_not_used_again(stage, error):
    log = Troubled(*[(stage, error)] * TRIES)
    writer = writer_of(log)
    first = settled(log, writer)
    assert writer.append(batch()) == InDoubt(error)
    held = len(log)
    assert writer.append(batch()).first == held
    assert log.calls[-1][0] != first
    assert log.calls[-1][1] == 0


def test_a_commit_that_timed_out_is_not_repeated_and_not_taken_for_the_next_batch():
    error = CommitTimedOut("It may still be.")
    log = Troubled(("after", error))
    writer = writer_of(log)
    settled(log, writer)
    assert writer.append(batch()) == InDoubt(error)
    assert len(log.calls) == 2
    assert writer.append(batch()).first == 2
    assert len(log) == 3


@pytest.mark.parametrize("error", [InvalidInput("Too large."), ExpectationFailed("Not there.")])
def test_a_refusal_leaves_the_number_for_the_next_batch(error):
    log = Troubled(("before", error))
    writer = writer_of(log)
    first = settled(log, writer)
    assert writer.append(batch()) == Refused(error)
    assert writer.append(batch()).first == 1
    assert log.calls == [(first, 0), (first, 1), (first, 1)]


@pytest.mark.parametrize("error", [CorruptData("Damaged."), LogClosed("Closed.")])
def test_after_any_other_error_a_new_id_is_taken(error):
    log = Troubled(("before", error))
    writer = writer_of(log)
    first = settled(log, writer)
    assert writer.append(batch()) == Refused(error)
    assert writer.append(batch()).first == 1
    assert log.calls[-1][0] != first


def test_a_log_that_is_contended_at_each_try_has_refused():
    error = Contended("Others were faster.")
    log = Troubled(*[("before", error)] * TRIES)
    assert writer_of(log).append(batch()) == Refused(error)
    assert len(log.calls) == TRIES


def test_an_id_that_the_log_has_forgotten_is_replaced_at_once():
    log = Troubled(("before", WriterExpired("Silent for too long.")))
    writer = writer_of(log)
    first = settled(log, writer)
    assert writer.append(batch()).first == 1
    assert log.calls[-1][0] != first
    assert writer.append(batch()).first == 2
    assert log.calls[-1] == (log.calls[-2][0], 1)


def test_an_id_that_was_forgotten_after_a_lost_answer_leaves_the_batch_in_doubt():
    error = WriterExpired("Silent for too long.")
    log = Troubled(("after", LOST[0]), ("before", error))
    writer = writer_of(log)
    settled(log, writer)
    assert writer.append(batch()) == InDoubt(error)
    assert len(log) == 2


def test_a_failed_expectation_settles_even_a_lost_answer():
    log = Troubled(("before", LOST[0]))
    writer = writer_of(log)
    settled(log, writer)
    assert isinstance(writer.append(batch(), expect=7), Refused)
    assert len(log) == 1


def test_an_interrupted_writer_never_uses_the_number_again():
    log = Troubled(("after", KeyboardInterrupt()))
    writer = writer_of(log)
    settled(log, writer)
    with pytest.raises(KeyboardInterrupt):
        writer.append(batch())
    assert writer.append(batch()).first == 2
    assert len(log) == 3
