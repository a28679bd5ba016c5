"""When a part is tried again, when it stops, and what the parts say of the process."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline import errors
from strandline.errors import (
    CorruptData,
    DiskFull,
    Diverged,
    Fenced,
    InvalidInput,
    LogFailed,
    NotALog,
    NotReady,
    StrandlineError,
    TransientStorageError,
)
from strandline.serve.config.changes import PartName
from strandline.serve.parts.rounds import RoundPart, Rounds
from strandline.serve.parts.states import PartState, Status, sentence, what_next, why_not_ready
from strandline.serve.parts.supervised import Supervised
from strandline.storage.env import SYSTEM, Env
from strandline.testing import ManualClock

EVERY = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, StrandlineError) and kind is not StrandlineError
]
PART = PartName("tables", "orders")


@given(st.sampled_from(EVERY), st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_what_is_retryable_is_tried_again_within_a_minute(
    kind: type[StrandlineError], failures: int, jitter: float
) -> None:
    pause = what_next(kind("x"), failures, jitter)
    if kind.retryable:
        assert pause is not None
    assert pause is None or 0 < pause <= 60


@pytest.mark.parametrize("kind", [Fenced, Diverged, InvalidInput, errors.CursorExpired, errors.SchemaRefused])
def test_what_somebody_has_to_mend_stops_a_part(kind: type[StrandlineError]) -> None:
    assert what_next(kind("x"), 1, 0.5) is None


@pytest.mark.parametrize("kind", [DiskFull, LogFailed, CorruptData, NotALog, TransientStorageError, OSError, KeyError])
def test_what_may_heal_is_tried_again(kind: type[Exception]) -> None:
    assert what_next(kind("x"), 1, 0.5) is not None


def test_pauses_grow_and_differ_between_parts() -> None:
    pauses = [what_next(OSError("x"), failures, 0.0) or 0 for failures in range(1, 20)]
    assert pauses == sorted(pauses)
    assert what_next(OSError("x"), 5, 0.0) != what_next(OSError("x"), 5, 0.9)
    assert (what_next(NotReady("x"), 50, 1.0) or 0) <= 5, "a log that is being recovered is soon there"


def test_an_error_without_a_sentence_is_shown_as_python_shows_it() -> None:
    assert (sentence(Fenced("taken over")), sentence(KeyError("a"))) == ("taken over", "KeyError('a')")


LOGS = [PartName("logs", "a"), PartName("logs", "b")]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (Status.RUNNING, Status.RUNNING, None),
        (Status.RUNNING, Status.STARTING, "logs.b is starting"),
        (Status.STARTING, Status.STARTING, "logs.a, and 1 more are starting"),
        (Status.RUNNING, Status.FAILING, None),
        (Status.STOPPED, Status.FAILING, "logs.a is stopped: why"),
    ],
)
def test_a_process_is_ready_when_its_logs_are_recovered(first: Status, second: Status, said: str | None) -> None:
    states = [PartState(LOGS[0], first, error="why"), PartState(LOGS[1], second, error="why")]
    assert why_not_ready([*states, PartState(PART, Status.STARTING)]) == said


# --- a part in a thread ----------------------------------------------------------------------------------------


class Work:
    """Work that does as the test says: each attempt takes the next of these errors, or waits to be stopped."""

    def __init__(self, *fails: Exception) -> None:
        self.fails = list(fails)
        self.attempts = 0
        self.is_at_work = threading.Event()

    def run(self, stop: threading.Event, report: Callable[[int | None], None]) -> None:
        self.attempts += 1
        if self.fails:
            raise self.fails.pop(0)
        report(7)
        self.is_at_work.set()
        stop.wait()


def supervised(work: Work, env: Env = SYSTEM) -> Supervised:
    part = Supervised(PART, work.run, env)
    part.start()
    return part


def test_a_part_that_fails_is_tried_again_with_pauses_and_works_then() -> None:
    clock = ManualClock(auto=True)
    work = Work(OSError("a"), OSError("b"), OSError("c"))
    part = supervised(work, Env(clock=clock))
    assert work.is_at_work.wait(60)
    assert (part.state.status, part.state.failures, part.state.error) == (Status.RUNNING, 0, "")
    assert (part.state.position, work.attempts) == (7, 4)
    assert clock.monotonic() >= 0.25 + 0.5 + 1.0
    part.stop()
    assert part.join(60)


def test_a_part_that_retrying_does_not_help_stops_with_its_sentence_until_it_is_resumed() -> None:
    work = Work(Fenced("a newer follower took over"))
    part = supervised(work)
    assert part.join(60)
    assert (part.state.status, part.state.error) == (Status.STOPPED, "a newer follower took over")
    part.resume()
    assert work.is_at_work.wait(60)
    assert part.state.status is Status.RUNNING
    part.stop()
    assert part.join(60)


def test_a_part_pauses_and_resumes() -> None:
    work = Work()
    part = supervised(work)
    assert work.is_at_work.wait(60)
    part.pause()
    assert (part.state.status, work.attempts) == (Status.PAUSED, 1)
    work.is_at_work.clear()
    part.resume()
    assert work.is_at_work.wait(60)
    assert work.attempts == 2
    part.stop()
    assert part.join(60)


def test_of_two_requests_to_resume_a_part_only_one_starts_it() -> None:
    work = Work(Fenced("a newer follower took over"))
    part = supervised(work)
    assert part.join(60)
    with part._changing:
        callers = [threading.Thread(target=part.resume) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(0.05)
    for caller in callers:
        caller.join()
    assert work.is_at_work.wait(60)
    part.stop()
    assert part.join(60)
    assert work.attempts == 2
    assert "strandline-tables.orders" not in [thread.name for thread in threading.enumerate()]


# --- rounds ----------------------------------------------------------------------------------------------------


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    found = Rounds(SYSTEM, threads=2)
    yield found
    found.close()


def test_rounds_of_one_part_never_overlap_and_those_of_others_go_on(rounds: Rounds) -> None:
    at_work, most, count = 0, 0, 0
    enough, other_ran = threading.Event(), threading.Event()
    lock = threading.Lock()

    def one(stop: threading.Event) -> float:
        nonlocal at_work, most, count
        with lock:
            at_work, count = at_work + 1, count + 1
            most = max(most, at_work)
        rounds.due(part, 0.0)  # another one is wanted at once, and a thread is free
        enough.wait(0.1)
        with lock:
            at_work -= 1
        if count >= 5:
            enough.set()
        return 0.0

    def other(stop: threading.Event) -> None:
        other_ran.set()

    part = rounds.add(PartName("trim", "busy"), one, after=3600.0)
    rounds.due(part, 0.0)
    rounds.add(PartName("trim", "other"), other)
    assert other_ran.wait(60)
    assert enough.wait(60)
    assert most == 1
    part.stop()
    assert part.join(60)


def test_a_round_that_fails_is_repeated_and_one_that_is_fenced_is_not(rounds: Rounds) -> None:
    attempts, done = [], threading.Event()

    def fails(stop: threading.Event) -> float | None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("once")
        done.set()
        return None

    def fenced(stop: threading.Event) -> float:
        raise Fenced("another tierer works")

    part, other = rounds.add(PartName("trim", "a"), fails), rounds.add(PartName("cold", "a"), fenced)
    assert done.wait(60)
    while part.state.status is not Status.RUNNING or other.state.status is not Status.STOPPED:
        threading.Event().wait(0.01)
    assert other.state.error == "another tierer works"


def test_a_part_is_closed_once_after_its_last_round(rounds: Rounds) -> None:
    closed: list[RoundPart] = []
    part = rounds.add(PartName("trim", "a"), lambda _: 3600.0, lambda: closed.append(part))
    part.stop()
    part.stop()
    assert part.join(60)
    assert closed == [part]


def test_a_paused_part_has_no_rounds_until_it_is_resumed(rounds: Rounds) -> None:
    count, ran = [], threading.Event()

    def one(stop: threading.Event) -> None:
        count.append(1)
        ran.set()

    part = rounds.add(PartName("trim", "a"), one, after=3600.0)
    part.pause()
    rounds.due(part, 0.0)
    part.resume()
    assert ran.wait(60)
    assert part.state.status in (Status.STARTING, Status.RUNNING)
