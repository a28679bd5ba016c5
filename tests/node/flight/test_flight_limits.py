"""How much a node does and holds at a time, as decisions over values."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from strandline.errors import InvalidInput, Overloaded
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.server.limits import CallLimiter, MemoryBudget, ServerLimits
from strandline.node.flight.server.server import FlightNode
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.node.flight.flight_double import Node

LIMITS = ServerLimits()
MIB = 1 << 20


class TestPlaces:
    def test_one_caller_cannot_take_the_places_of_others_before_its_first_message(self) -> None:
        limiter = CallLimiter(LIMITS)
        for _ in range(LIMITS.calls_each):
            limiter.enter("app")
        with pytest.raises(Overloaded, match="app has 64 calls"):
            limiter.enter("app")
        limiter.enter("other")

    def test_some_are_kept_for_replicas_and_administrators(self) -> None:
        limiter = CallLimiter(LIMITS)
        for number in range(LIMITS.ordinary_calls):
            limiter.enter(f"app-{number}")
        with pytest.raises(Overloaded, match="reserves the rest for replicas"):
            limiter.enter("app")
        places = [limiter.enter(f"replica-{number}", is_reserved=True) for number in range(LIMITS.calls_reserved)]
        with pytest.raises(Overloaded, match="busy with 256"):
            limiter.enter("replica", is_reserved=True)
        limiter.leave(places[0])
        limiter.enter("ops", is_reserved=True)

    def test_a_caller_that_is_a_client_returns_a_reserved_place(self) -> None:
        limiter = CallLimiter(ServerLimits(calls=8, calls_reserved=2))
        for number in range(6):
            limiter.enter(f"app-{number}")
        place = limiter.enter(None, is_reserved=True)
        with pytest.raises(Overloaded, match="reserves the rest"):
            limiter.name(place, "app", is_reserved=False)
        limiter.leave(place)
        assert limiter.inside == 6
        limiter.enter("replica", is_reserved=True)

    def test_calls_that_say_nothing_are_ended_after_a_while(self) -> None:
        clock = ManualClock()
        limiter = CallLimiter(LIMITS, env=Env(clock=clock))
        ended: list[str] = []
        for name in ("app", "other"):
            place = limiter.enter(name, end=lambda name=name: ended.append(name))
        limiter.name(place, "other", is_reserved=False)
        limiter.end_silent()
        assert ended == []
        clock.advance(LIMITS.silent_seconds)
        limiter.end_silent()
        assert ended == ["app"]

    def test_silent_calls_are_ended_to_make_room_for_new_ones(self) -> None:
        clock = ManualClock()
        limiter = CallLimiter(LIMITS, env=Env(clock=clock))
        ended: list[int] = []
        places = []
        for number in range(LIMITS.ordinary_calls // 2):
            places.append(limiter.enter(None, end=lambda number=number: ended.append(number)))
            clock.advance(0.001)
        with pytest.raises(Overloaded, match="no message yet"):
            limiter.enter(None)
        limiter.leave(limiter.enter(None, is_reserved=True))
        clock.advance(0.5)
        late = [limiter.enter(None) for _ in range(10)]
        assert ended == list(range(10))
        for place in late:
            limiter.name(place, "app", is_reserved=False)
        with pytest.raises(Overloaded, match="given to another"):
            limiter.name(places[0], "late", is_reserved=False)
        for place in places:
            limiter.leave(place)
        assert limiter.inside == 10

    def test_a_silent_call_that_lost_its_place_is_ended_though_the_new_one_is_refused(self) -> None:
        clock = ManualClock()
        limiter = CallLimiter(LIMITS, env=Env(clock=clock))
        ended: list[str] = []
        limiter.enter(None, is_reserved=True, end=lambda: ended.append("silent"))
        clock.advance(0.5)
        for number in range(LIMITS.ordinary_calls):
            limiter.enter(f"app-{number}")
        with pytest.raises(Overloaded, match="reserves the rest"):
            limiter.enter("another")
        assert ended == ["silent"]

    def test_one_replica_has_a_few_feeds(self) -> None:
        limiter = CallLimiter(ServerLimits(feeds_each=1))
        places = [limiter.enter(name, is_reserved=True) for name in ("a", "b", "a")]
        limiter.feed(places[0], "a")
        limiter.feed(places[1], "b")
        with pytest.raises(Overloaded, match="a has 1 feeds"):
            limiter.feed(places[2], "a")
        limiter.leave(places[0])
        limiter.feed(places[2], "a")


class TestMemory:
    def test_each_has_a_share_and_all_have_a_limit(self) -> None:
        budget = MemoryBudget("appends", 100, 60)
        with budget.held_by("one") as one, budget.held_by("two") as two:
            one(60)
            with pytest.raises(Overloaded, match="one holds 60"):
                one(1)
            two(40)
            with pytest.raises(Overloaded, match="all callers hold 100"):
                two(1)
        assert budget.held == 0

    def test_a_reader_waits_until_others_have_read_and_no_longer_than_it_should(self) -> None:
        budget = MemoryBudget("reads", 100, 60)
        with budget.waited_for("one", 60, 1.0):
            with pytest.raises(Overloaded), budget.waited_for("one", 10, 0.01):
                pass
            with budget.waited_for("two", 40, 1.0):
                assert budget.held == 100
        with ThreadPoolExecutor(1) as pool:
            inside = threading.Event()

            def wait() -> int:
                inside.set()
                with budget.waited_for("two", 100, 30.0):
                    return budget.held

            with budget.waited_for("one", 1, 1.0):
                waiting = pool.submit(wait)
                assert inside.wait(30)
            assert waiting.result(30) == 100

    def test_a_batch_that_is_larger_than_the_limit_is_read_alone(self) -> None:
        budget = MemoryBudget("reads", 100, 60)
        with budget.waited_for("one", 1000, 0.01), pytest.raises(Overloaded), budget.waited_for("two", 1, 0.01):
            pass


@pytest.mark.parametrize("name", ["calls", "memory_bytes", "idle_seconds", "connections"])
def test_a_limit_that_refuses_everything_is_a_mistake(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        ServerLimits(**{name: 0})


def test_a_well_behaved_caller_is_never_cut_off_however_much_it_sends(tmp_path) -> None:
    node = Node(tmp_path / "log")
    table = pa.table({"value": pa.array([bytes(MIB)] * 24, pa.binary())})
    with FlightNode(node) as server, ThreadPoolExecutor(4) as pool:

        def append(_: int) -> int:
            with RemoteLog(server.url, timeout=60) as log:
                log.append(table, timeout=60)
                return log.append(table, timeout=60).receipt.count

        assert list(pool.map(append, range(4))) == [24] * 4
    node.close()
