"""How much a node does and holds at a time, as decisions over values."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from strandline.model.errors import InvalidInput, Overloaded
from strandline.node.flight.connections import REQUEST_BYTES, Connections, Watched, judge, parse_peer
from strandline.node.flight.limits import MemoryBudget, ServerLimits, Silence, Turnstile
from strandline.node.flight.remote import RemoteLog
from strandline.node.flight.server import FlightNode
from strandline.node.flight.sockets import Traffic
from strandline.testing.clock import ManualClock
from tests.node.flight_double import Node

LIMITS = ServerLimits()
MIB = 1 << 20


def watched(port: int, **facts: float) -> Watched:
    traffic = Traffic(("10.0.0.1", port), 0, 0, port)
    usual = {"pending": 0, "known": True, "appends": 0, "grace": False, "age": 1.0, "stuck": 0.0, "calls": 1}
    return Watched(traffic, **{**usual, **facts})


def ended(*connections: Watched, silence: Silence = Silence.NONE, **options: bool) -> list[int]:
    return [each.traffic.peer[1] for each, _ in judge(connections, LIMITS, silence, **options)]


class TestWhichConnectionsAreEnded:
    def test_one_that_says_who_it_is_and_sends_little_is_not(self) -> None:
        assert ended(watched(1), watched(2, known=False, pending=1000)) == []

    def test_a_stranger_that_sends_much_or_stays_one(self) -> None:
        much = watched(1, known=False, pending=LIMITS.stranger_bytes + 1)
        late = watched(2, known=False, age=LIMITS.stranger_seconds + 1)
        assert ended(much, late) == [1, 2]

    def test_a_known_one_that_sends_more_than_any_message_has(self) -> None:
        assert ended(watched(1, pending=LIMITS.request_bytes + 1)) == [1]
        assert ended(watched(1, pending=LIMITS.message_bytes, appends=1)) == []
        assert ended(watched(1, pending=LIMITS.message_bytes, grace=True)) == []
        assert ended(watched(1, pending=LIMITS.message_bytes + 17 * MIB, appends=1)) == [1]

    def test_none_that_may_send_the_append_of_a_call_of_which_nothing_was_seen_yet(self) -> None:
        both = watched(1, known=False, pending=LIMITS.message_bytes), watched(2, pending=LIMITS.message_bytes)
        assert ended(*both, is_expecting=True) == []
        assert ended(*both, is_expecting=False) == [1, 2]
        assert ended(watched(1, known=False, pending=LIMITS.message_bytes * 2), is_expecting=True) == [1]

    def test_those_with_most_if_all_together_send_too_much(self) -> None:
        some = [watched(number, pending=LIMITS.receive_bytes // 4 - 9 + number, appends=9) for number in range(6)]
        assert ended(*some) == [5, 4]
        assert ended(*some, watched(7, pending=MIB)) == [7, 5, 4]

    def test_one_that_keeps_a_call_waiting(self) -> None:
        assert ended(watched(1, stuck=LIMITS.idle_seconds + 1), watched(2, stuck=1.0)) == [1]

    def test_the_oldest_strangers_beyond_their_number(self) -> None:
        many = [watched(number, known=False, age=number / 100) for number in range(LIMITS.strangers + 2)]
        assert sorted(ended(*many, watched(999))) == [LIMITS.strangers, LIMITS.strangers + 1]

    def test_strangers_first_if_there_are_too_many(self) -> None:
        known = [watched(number) for number in range(LIMITS.connections)]
        assert ended(*known, watched(9999, known=False)) == [9999]

    def test_those_without_a_call_while_calls_say_nothing_and_all_if_others_are_refused_by_that(self) -> None:
        both = watched(1), watched(2, calls=0)
        assert ended(*both, silence=Silence.SOME) == [2]
        assert ended(*both, silence=Silence.CROWDED) == [1, 2]


class TestCounting:
    def test_what_was_dealt_with_is_not_pending_and_a_long_life_adds_up_to_nothing(self) -> None:
        clock = ManualClock()
        connections = Connections(LIMITS, clock=clock)
        received = sent = 0
        for _ in range(10_000):  # reports of 48 bytes, and answers to them
            connection = connections.of("ipv4:10.0.0.1:7")
            connection.begin(48)
            received, sent = received + 48 + REQUEST_BYTES // 2, sent + 80
            clock.advance(0.5)
            assert connections.judged(lambda seen=(received, sent): [Traffic(("10.0.0.1", 7), *seen, 3)]) == []
            connection.end()

    def test_what_nobody_dealt_with_adds_up(self) -> None:
        clock = ManualClock()
        connections = Connections(LIMITS, clock=clock)
        connections.of("ipv4:10.0.0.1:7").begin(0)
        received = 0
        for _ in range(1000):
            clock.advance(0.02)
            received += 64 << 10
            if connections.judged(lambda seen=received: [Traffic(("10.0.0.1", 7), seen, 0, 3)]):
                break
        assert LIMITS.request_bytes < received < LIMITS.request_bytes + MIB

    def test_the_other_end_has_one_name(self) -> None:
        assert parse_peer("ipv4:127.0.0.1:7") == ("127.0.0.1", 7)
        assert parse_peer("ipv6:%5B::ffff:10.0.0.1%5D:7") == ("10.0.0.1", 7)
        assert parse_peer("ipv6:[::1]:7") == ("::1", 7)


class TestPlaces:
    def test_one_name_cannot_take_those_of_others_before_it_has_said_anything(self) -> None:
        turnstile = Turnstile(LIMITS)
        for _ in range(LIMITS.calls_each):
            turnstile.enter("app", may_be_silent=True)
        with pytest.raises(Overloaded, match="app has 64 calls"):
            turnstile.enter("app", may_be_silent=True)
        turnstile.enter("other", may_be_silent=True)

    def test_some_are_kept_for_replicas_and_administrators(self) -> None:
        turnstile = Turnstile(LIMITS)
        for number in range(LIMITS.ordinary_calls):
            turnstile.enter(f"app-{number}")
        with pytest.raises(Overloaded, match="keeps the rest for replicas"):
            turnstile.enter("app")
        places = [turnstile.enter(f"replica-{number}", is_reserved=True) for number in range(LIMITS.calls_reserved)]
        with pytest.raises(Overloaded, match="busy with 256"):
            turnstile.enter("replica", is_reserved=True)
        turnstile.leave(places[0])
        turnstile.enter("ops", is_reserved=True)

    def test_who_turns_out_to_be_a_client_gives_a_kept_place_back(self) -> None:
        turnstile = Turnstile(ServerLimits(calls=8, calls_reserved=2))
        for number in range(6):
            turnstile.enter(f"app-{number}")
        place = turnstile.enter(None, is_reserved=True)
        with pytest.raises(Overloaded, match="keeps the rest"):
            turnstile.name(place, "app", is_reserved=False)
        turnstile.leave(place)
        assert turnstile.inside == 6
        turnstile.enter("replica", is_reserved=True)

    def test_the_silent_are_noticed(self) -> None:
        clock = ManualClock()
        turnstile = Turnstile(LIMITS, clock=clock)
        places = [turnstile.enter(None, may_be_silent=True) for _ in range(LIMITS.ordinary_calls // 2)]
        with pytest.raises(Overloaded, match="first word"):
            turnstile.enter(None, may_be_silent=True)
        turnstile.enter(None, is_reserved=True)
        assert (turnstile.silence(), turnstile.is_expecting) == (Silence.NONE, True)
        clock.advance(LIMITS.silent_seconds)
        assert turnstile.silence() is Silence.SOME
        clock.advance(LIMITS.silent_seconds)
        assert turnstile.silence() is Silence.CROWDED
        for number, place in enumerate(places):
            turnstile.name(place, f"app-{number}", is_reserved=False)
        assert (turnstile.silence(), turnstile.is_expecting) == (Silence.NONE, False)

    def test_one_replica_has_a_few_feeds(self) -> None:
        turnstile = Turnstile(ServerLimits(feeds_each=1))
        again = turnstile.feeding("a")
        with turnstile.feeding("a"), turnstile.feeding("b"), pytest.raises(Overloaded, match="a has 1 feeds"), again:
            pass
        with turnstile.feeding("a"):
            pass


class TestMemory:
    def test_each_has_a_share_and_all_have_a_limit(self) -> None:
        budget = MemoryBudget("appends", 100, 60)
        with budget.held_by("one") as one, budget.held_by("two") as two:
            one(60)
            with pytest.raises(Overloaded, match="one has 60"):
                one(1)
            two(40)
            with pytest.raises(Overloaded, match="all callers have 100"):
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


@pytest.mark.parametrize("name", ["calls", "memory_bytes", "idle_seconds", "strangers"])
def test_a_limit_that_refuses_everything_is_a_mistake(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        ServerLimits(**{name: 0})


def test_who_behaves_is_never_cut_off_however_much_it_sends(tmp_path) -> None:
    node = Node(tmp_path / "log")
    table = pa.table({"value": pa.array([bytes(MIB)] * 24, pa.binary())})
    with FlightNode(node) as server, ThreadPoolExecutor(4) as pool:

        def append(_: int) -> int:
            with RemoteLog(server.url, timeout=60) as log:
                log.append(table, timeout=60)
                return log.append(table, timeout=60).receipt.count

        assert list(pool.map(append, range(4))) == [24] * 4
        assert server._connections.ended == 0
    node.close()
