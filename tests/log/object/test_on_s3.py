"""The log contract and the fault suites of the log, on a real S3 server over the wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strandline.log.contract import Log
from strandline.log.object import open_log
from strandline.storage.env import Env
from strandline.storage.objects.remote import ObstoreStore
from strandline.storage.objects.store import ObjectStore
from strandline.storage.retry import RetryingStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.stores import together
from tests.contracts.logs import append, content, writer_named
from tests.log.object import test_lost_answers
from tests.log.object.histories import UNHEARD, play
from tests.log.object.test_lost_answers import TestSlots, line, ours, theirs
from tests.log.test_contract import ObjectLogContract
from tests.matrix_cases import sampled
from tests.proxy import FaultyProxy, Weather, answer, reset
from tests.servers import S3Server

__all__ = ["TestSlots", "line", "ours", "theirs"]

HISTORIES = 40

STORM = {
    reset(): 0.04,
    reset(landed=True): 0.08,
    answer(503, "SlowDown"): 0.04,
    answer(500, "InternalError", landed=True): 0.06,
    answer(409, "ConditionalRequestConflict"): 0.04,
}


@pytest.mark.matrix
class TestObjectLogOnS3(ObjectLogContract):
    appends = 12

    @pytest.fixture
    def log(self, s3_url: str, s3_server: S3Server) -> Log:
        return open_log(s3_url, create=True, options=s3_server.options)


@pytest.mark.matrix
class TestAppend(test_lost_answers.TestAppend):
    pass


@pytest.mark.matrix
class TestCreation(test_lost_answers.TestCreation):
    pass


@pytest.fixture
def place(s3_place: Callable[[], ObjectStore]) -> ObjectStore:
    """The store of the log in the tests of lost answers, which are imported unchanged."""
    return s3_place()


@pytest.fixture(autouse=True)
def _no_other_places(s3_place: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.log.object.test_lost_answers.PlainStore", s3_place)


def played(s3_place: Callable[[], ObjectStore], seeds: range) -> None:
    histories = [play(seed, place=s3_place()) for seed in seeds]
    for trouble in ("lost", "late", "conflicts", "deaths"):
        assert sum(getattr(history, trouble) for history in histories) > 0, trouble
    assert sum(len(history.acknowledged) for history in histories) > 2 * len(seeds)


@pytest.mark.parametrize("every", sampled(4))
def test_no_history_of_racing_failing_and_dying_writers_and_holders_loses_or_doubles_anything(
    s3_place: Callable[[], ObjectStore], every: int
) -> None:
    played(s3_place, range(0, HISTORIES, every))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_for_many_more_histories(s3_place: Callable[[], ObjectStore]) -> None:
    played(s3_place, range(HISTORIES, 20 * HISTORIES))


def test_batches_of_many_writers_in_a_storm_are_each_listed_once_and_in_order(
    s3_server: S3Server, s3_url: str, s3_proxy: FaultyProxy
) -> None:
    writers, batches = 3, 12
    log = open_log(s3_url, create=True, options=s3_server.options)
    s3_proxy.weather = Weather(STORM, seed=7)

    def work(writer: int) -> None:
        bad_line = ObstoreStore(s3_url, s3_server.options_through(s3_proxy.endpoint))
        log, number = None, 0
        for _ in range(1000):
            if number == batches:
                return
            try:
                if log is None:
                    store = RetryingStore(bad_line, env=Env(clock=ManualClock(), chance=SeededChance(writer)))
                    log = open_log(store, env=Env(clock=ManualClock(), chance=SeededChance(writer)))
                append(log, f"{writer}/{number}".encode(), writer=writer_named(writer), number=number)
            except UNHEARD:
                continue
            number += 1
        pytest.fail("a writer got nowhere")

    together(*[lambda writer=writer: work(writer) for writer in range(writers)])
    values = [value.decode() for _, value in content(log)]
    assert sorted(values) == sorted(f"{writer}/{number}" for writer in range(writers) for number in range(batches))
    for writer in range(writers):
        mine = [int(value.split("/")[1]) for value in values if value.startswith(f"{writer}/")]
        assert mine == list(range(batches))
    lost = (reset(landed=True), answer(500, "InternalError", landed=True))
    assert sum(seen.method == "PUT" and seen.fault in lost for seen in s3_proxy.seen) > 5
