"""Waiting for commits, flow control, the leadership, and what a node remembers."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from strandline.errors import CorruptData, Fenced, InvalidInput
from strandline.formats.node.state import decode_node, encode_node
from strandline.model.node import Heartbeat, NodeState, Peer, Trouble
from strandline.node.elect.node_lease import Leadership
from strandline.node.flight.wire.streams import SOON, TURN, next_turn
from strandline.node.lead.commit_watermark import Commits
from strandline.node.lead.policies import AckN, FlowLimits, flow_delay
from strandline.node.node_folder import NodeFolder
from strandline.storage.env import Env
from strandline.storage.lease import Lease
from strandline.testing.clock import ManualClock
from strandline.testing.plain import PlainStore
from strandline.testing.simdisk import SimulatedDisk

ONE, TWO = AckN(1), AckN(2)


class TestCommits:
    def test_each_waiter_is_woken_when_its_own_policy_has_reached_its_offset(self):
        marks = {ONE: 0, TWO: 0}
        commits = Commits(lambda policy: marks[policy], lambda: 100)
        waiters = [commits.add(ONE, 5), commits.add(TWO, 5), commits.add(ONE, 7), commits.add(ONE, 3)]
        marks[ONE] = 6
        commits.moved()
        assert [waiter.done for waiter in waiters] == [True, False, False, True]
        marks[TWO] = 5
        commits.moved()
        assert [waiter.done for waiter in waiters] == [True, True, False, True]

    def test_one_that_comes_too_late_to_be_woken_is_done_at_once(self):
        commits = Commits(lambda _: 5, lambda: 100)
        waiter = commits.add(ONE, 5)
        assert waiter.done
        waiter.wait(120)

    def test_what_is_not_even_durable_here_is_not_computed(self):
        computed = []
        commits = Commits(lambda policy: computed.append(policy) or 0, lambda: 4)
        waiter = commits.add(ONE, 5)
        assert not computed
        assert not waiter.done

    def test_an_append_with_a_new_policy_may_come_while_the_leadership_ends(self):
        commits = Commits(lambda _: 0, lambda: 100)
        commits.add(ONE, 5)
        late = []
        thread = threading.Thread(target=lambda: late.append(commits.add(TWO, 5)))

        class Interrupted(dict):
            def values(self):
                for each in super().values():
                    if not thread.is_alive() and not late:
                        thread.start()
                        thread.join(0.2)
                    yield each

        commits._queues = Interrupted(commits._queues)
        commits.give_up()
        thread.join(120)
        late[0].wait(120)
        assert not late[0].done

    def test_a_watermark_never_goes_back(self):
        mark = [5]
        commits = Commits(lambda _: mark[0], lambda: 100)
        commits.raise_to(ONE, 3)
        assert commits.reached(ONE) == 5
        mark[0] = 2
        assert commits.reached(ONE) == 5

    def test_no_waiter_is_forgotten_while_others_come_and_go(self):
        mark = [0]
        commits = Commits(lambda _: mark[0], lambda: 100)
        missed = []

        def wait(number):
            waiter = commits.add(ONE, number)
            waiter.wait(120)
            commits.remove(waiter)
            if not waiter.done:
                missed.append(number)

        threads = [threading.Thread(target=wait, args=(number % 50 + 1,)) for number in range(200)]
        for thread in threads:
            thread.start()
        for upto in range(51):
            mark[0] = upto
            commits.moved()
        for thread in threads:
            thread.join(120)
        assert not missed

    def test_giving_up_wakes_everybody(self):
        commits = Commits(lambda _: 0, lambda: 100)
        waiters = [commits.add(ONE, 1), commits.add(TWO, 2)]
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(waiter.wait, 10_000) for waiter in waiters]
            commits.give_up()
            for each in waiting:
                each.result(120)
        assert not any(waiter.done for waiter in waiters)

    def test_a_waiter_waits_until_it_is_woken_or_removed(self):
        mark = [0]
        commits = Commits(lambda _: mark[0], lambda: 100)
        assert not commits.is_awaited
        woken, removed = commits.add(ONE, 1), commits.add(TWO, 2)
        assert commits.is_awaited
        mark[0] = 1
        commits.moved()
        assert woken.done
        assert commits.is_awaited
        commits.remove(removed)
        assert not commits.is_awaited


class TestFlow:
    def test_without_limits_flow_control_admits_any_lag(self):
        assert flow_delay(1 << 40, FlowLimits()) == 0.0

    def test_the_further_behind_the_longer_the_wait_up_to_a_refusal(self):
        limits = FlowLimits(slow_at=10, refuse_at=20, longest=1.0)
        waits = [flow_delay(lag, limits) for lag in range(20)]
        assert waits == sorted(waits)
        assert waits[10] == 0
        assert 0 < waits[11] < waits[19] < 1
        assert flow_delay(20, limits) is None

    def test_without_a_refusal_the_wait_is_bounded(self):
        assert flow_delay(10**9, FlowLimits(slow_at=10, longest=0.5)) == 0.5

    def test_limits_that_make_no_sense_are_refused(self):
        for options in ({"slow_at": -1}, {"slow_at": 10, "refuse_at": 5}, {"longest": -1.0}):
            with pytest.raises(InvalidInput):
                FlowLimits(**options)


class TestGate:
    def test_it_closes_with_the_lease_and_stays_closed(self):
        clock = ManualClock()
        lease = Lease(PlainStore(), "lease", "a", seconds=10, env=Env(clock=clock))
        lease.try_acquire()
        leadership = Leadership(lease.epoch, lease)
        leadership.check("nothing was written")
        clock.advance(10)
        with pytest.raises(Fenced, match="lease of term 1 has run out"):
            leadership.check("nothing was written")

    def test_another_holding_of_the_same_lease_is_another_term(self):
        clock = ManualClock()
        lease = Lease(PlainStore(), "lease", "a", seconds=10, env=Env(clock=clock))
        lease.try_acquire()
        leadership = Leadership(lease.epoch, lease)
        lease.release()
        lease.try_acquire()
        assert not leadership.is_held

    def test_a_call_gets_the_first_reason_of_closing(self):
        leadership = Leadership(3)
        leadership.end("b leads")
        leadership.end("it was closed")
        with pytest.raises(Fenced, match=r"\(b leads\): nothing was written"):
            leadership.check("nothing was written")


STATE = NodeState(
    "b", 3, 9, 8, 7, 123, "a", "ack_n(1)", (Peer("b", "eu"), Peer("c")), Trouble("diverged", "because", 17)
)


class TestRemembering:
    def test_what_is_written_is_read_back(self):
        assert decode_node(encode_node(STATE), "node.json") == STATE
        assert decode_node(encode_node(NodeState("x")), "node.json") == NodeState("x")

    def test_any_damage_is_an_error_and_never_a_node_that_has_seen_nothing(self):
        data = encode_node(STATE)
        for at in range(len(data)):
            for spoilt in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
                try:
                    found = decode_node(spoilt, "node.json")
                except CorruptData:
                    continue
                assert found == STATE  # white space

    def test_terms_never_go_down(self):
        home = NodeFolder.open("/n", "b", env=Env(disk=SimulatedDisk()))
        home.remember(seen=5, adopted=4)
        home.remember(seen=3, adopted=2)
        assert (home.state.seen, home.state.adopted) == (5, 4)

    def test_one_process_at_a_time_and_one_name(self, tmp_path):
        with NodeFolder.open(str(tmp_path), "b") as home:
            home.remember(seen=1)
            with pytest.raises(Fenced, match="running already"):
                NodeFolder.open(str(tmp_path), "b")
        with pytest.raises(InvalidInput, match="folder of node 'b', not of 'c'"):
            NodeFolder.open(str(tmp_path), "c")

    def test_copies_that_are_not_in_use_are_removed(self, tmp_path):
        with NodeFolder.open(str(tmp_path), "b") as home:
            home.remember(generation=2)
            for number in (1, 2, 3):
                (tmp_path / f"data-0000000{number}").mkdir()
        with NodeFolder.open(str(tmp_path), "b") as home:
            assert sorted(path.name for path in tmp_path.glob("data-*")) == ["data-00000002"]
            assert home.next_generation() == 3


class TestTurns:
    """How long a stream to a replica waits before it looks whether there is something to tell."""

    BEHIND, EVEN = Heartbeat(1, 0, 9, 8, 1), Heartbeat(1, 0, 9, 9, 1)

    def test_a_replica_that_knows_all_is_left_alone(self):
        for told in (None, self.EVEN):
            assert next_turn(SOON, told, is_news=True) == next_turn(TURN, told, is_news=False) == TURN

    def test_a_feed_that_waits_for_a_commit_sends_it_soon_and_polls_less_and_less(self):
        turns = [next_turn(TURN, self.BEHIND, is_news=True)]
        while turns[-1] < TURN:
            turns.append(next_turn(turns[-1], self.BEHIND, is_news=False))
        assert turns[0] == SOON
        assert all(after == min(2 * before, TURN) for before, after in itertools.pairwise(turns))
        assert next_turn(TURN, self.BEHIND, is_news=False) == TURN
