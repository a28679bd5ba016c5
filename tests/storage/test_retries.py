"""Retries: only what may pass, only what may be repeated, not for ever, and with growing pauses."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from strandline.errors import (
    AlreadyExists,
    Conflict,
    DiskFull,
    InvalidInput,
    NotFound,
    StorageError,
    TransientStorageError,
)
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import ABSENT, Match, ObjectStore
from strandline.storage.retry import Backoff, RetryingStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Faults, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import ObjectStoreContract, content, paths

CALLS = {
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", 0, 1),
    "put": lambda store: store.put("a", b"1"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete("a"),
}


@pytest.fixture
def line() -> FaultyStore:
    place = PlainStore()
    place.put("a", b"1")
    return FaultyStore(place)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(line: FaultyStore, clock: ManualClock) -> RetryingStore:
    return RetryingStore(line, backoff=Backoff(attempts=5), env=Env(clock=clock, chance=SeededChance(1)))


class TestRetryingStoreOnABadLine(ObjectStoreContract):
    """With retries, a store that often fails before a call takes effect meets the contract."""

    picklable = False

    @pytest.fixture
    def store(self) -> ObjectStore:
        bad = Faults(before=0.2, throttled=0.1)
        calm: dict = {"put_if": Faults()}
        line = FaultyStore(PlainStore(), seed=4, faults=bad, per_operation=calm)
        return RetryingStore(line, backoff=Backoff(attempts=50), env=Env(clock=ManualClock()))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_may_be_repeated_is_repeated_until_it_works(
    name: str, store: RetryingStore, line: FaultyStore
) -> None:
    line.fail_next(name, times=4)
    CALLS[name](store)
    assert [row.outcome for row in line.log] == ["before"] * 4 + ["answered"]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_given_up_after_the_bound_with_the_store_s_own_error(
    name: str, store: RetryingStore, line: FaultyStore, clock: ManualClock
) -> None:
    line.throttle_next(name, times=1000)
    with pytest.raises(TransientStorageError, match="SlowDown"):
        CALLS[name](store)
    assert len(line.log) == 5
    assert len(clock.slept) == 4


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "error", [NotFound("gone"), DiskFull("full"), InvalidInput("wrong"), StorageError("refused")], ids=repr
)
def test_permanent_errors_are_not_repeated(
    name: str, error: StorageError, store: RetryingStore, line: FaultyStore, clock: ManualClock
) -> None:
    line.fail_next(name, error=error, times=2)
    with pytest.raises(type(error)):
        CALLS[name](store)
    assert len(line.log) == 1
    assert clock.slept == []


@pytest.mark.parametrize("after", [False, True], ids=["not landed", "landed"])
@pytest.mark.parametrize("when", ["absent", "match"])
def test_a_conditional_write_is_never_repeated(
    store: RetryingStore, line: FaultyStore, clock: ManualClock, when: str, *, after: bool
) -> None:
    condition = ABSENT if when == "absent" else Match(line.get("a").version)
    path = "new" if when == "absent" else "a"
    line.fail_next("put_if", after=after)
    with pytest.raises(TransientStorageError):
        store.put_if(path, b"2", condition)
    assert len(line.named("put_if")) == 1
    assert clock.slept == []
    assert (paths(line, "new") == ["new"] or content(line, "a") == b"2") == after


def test_a_failed_precondition_is_raised_at_once(store: RetryingStore, line: FaultyStore) -> None:
    with pytest.raises(AlreadyExists):
        store.put_if("a", b"2", ABSENT)
    version = store.get("a").version
    store.put("a", b"2")
    with pytest.raises(Conflict):
        store.put_if("a", b"3", Match(version))
    assert len(line.named("put_if")) == 2


def test_a_put_whose_answer_was_lost_is_written_again(store: RetryingStore, line: FaultyStore) -> None:
    line.lose_answers(2)
    store.put("b", [b"one ", b"two"])
    assert content(line, "b") == b"one two"
    assert len(line.named("put")) == 3


def test_pauses_double_up_to_the_ceiling_and_have_jitter(line: FaultyStore, clock: ManualClock) -> None:
    backoff = Backoff(attempts=8, base=0.05, ceiling=0.7)
    store = RetryingStore(line, backoff=backoff, env=Env(clock=clock, chance=SeededChance(1)))
    line.fail_next("get", times=8)
    with pytest.raises(TransientStorageError):
        store.get("a")
    longest = (0.05, 0.1, 0.2, 0.4, 0.7, 0.7, 0.7)
    assert len(clock.slept) == len(longest)
    for pause, most in zip(clock.slept, longest, strict=True):
        assert most / 2 <= pause <= most
    assert len({pause / most for pause, most in zip(clock.slept, longest, strict=True)}) == len(longest)


def test_a_pause_never_overflows_however_often_it_was_tried() -> None:
    assert Backoff(ceiling=2.0).pause(10_000, 1.0) == 2.0
    assert Backoff(base=0.05).pause(0, 0.0) == 0.025


def test_a_listing_that_breaks_off_continues_after_its_last_row() -> None:
    place = PlainStore()
    names = [f"n{number:03}" for number in range(200)]
    for name in names:
        place.put(name, b"")
    broken = 0
    for seed in range(50):
        line = FaultyStore(place, seed=seed, faults=Faults(before=0.1, after=0.6))
        store = RetryingStore(
            line, backoff=Backoff(attempts=40), env=Env(clock=ManualClock(), chance=SeededChance(seed))
        )
        assert paths(store, "n", "n009") == names[10:]
        broken += len(line.log) - 1
    assert broken > 50


def test_a_listing_counts_its_failures_again_after_each_row(line: FaultyStore, clock: ManualClock) -> None:
    # 12 failures in a row would be too many for 5 tries; with progress between them they are not.
    for number in range(12):
        line.put(f"row/{number:02}", b"")

    class OneRowAtATime(FaultyStore):
        def list(self, prefix: str, *, start_after: str = ""):  # type: ignore[no-untyped-def]
            for row in super().list(prefix, start_after=start_after):
                yield row
                raise TransientStorageError("broken off after one row")

    store = RetryingStore(OneRowAtATime(line), backoff=Backoff(attempts=2), env=Env(clock=clock))
    assert len(paths(store, "row/")) == 12


def test_a_pickled_store_keeps_its_patience(tmp_path: Path) -> None:
    store = RetryingStore(LocalStore(str(tmp_path)), backoff=Backoff(attempts=3, base=0.5))
    store.put("a", b"1")
    copy = pickle.loads(pickle.dumps(store))
    assert content(copy, "a") == b"1"
    assert copy._backoff == Backoff(attempts=3, base=0.5)
