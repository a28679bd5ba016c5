"""Shown is kept: what a node once let its readers see stays readable over restarts, or the answer is ``NotReady``."""

from __future__ import annotations

import threading

import pytest

import strandline as sl
from strandline.errors import CorruptData, NotReady, StorageError
from strandline.followers.stores.state import MemoryStore
from strandline.formats.json.checked import decode_checked, encode_checked
from strandline.formats.node.state import KIND, VERSION, decode_node, encode_node
from strandline.kv.log import LogKeyValue
from strandline.model.node import NodeState
from strandline.model.records import Op
from strandline.node.api import Primary, Replica
from strandline.node.lead.committed_log import CommittedLog
from strandline.node.messages import Reached
from tests.node.nodes_by_hand import TERM, Cluster, records

WAIT = 120.0


@pytest.fixture
def pair(tmp_path):
    cluster = Cluster(tmp_path, policy="ack_n(1)", leased=False, names="ab")
    cluster.start("a", create=True, lead=True)
    cluster.start("b")
    cluster.settled("b")
    yield cluster
    cluster.close()


@pytest.fixture
def trio(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.start("a", create=True)
    cluster.start("b")
    cluster.start("c")
    cluster.settled("b", "c")
    yield cluster
    cluster.close()


def committed(cluster, *values, on="a"):
    """Append, let it be committed, and let every node that runs show it."""
    handle = cluster.append(*values, on=on)
    cluster.until(handle.done)
    assert isinstance(handle.result(0).outcome, Reached)
    cluster.until(lambda: {shown(cluster, name) for name in cluster.nodes} == {handle._upto()})


def shown(cluster, name):
    """Where the log ends for readers of a node; None while it does not say."""
    try:
        return cluster.nodes[name].reading().bounds().next
    except NotReady:
        return None


class TestAReplica:
    def test_that_was_closed_shows_what_it_showed_while_its_primary_is_away(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.stop("b")
        pair.stop("a")
        pair.start("b")
        assert shown(pair, "b") == 3

    def test_that_was_killed_shows_nothing_until_a_primary_sends_the_watermark(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.kill("b")
        pair.cut |= {"a"}
        node = pair.start("b")
        pair.step(20)
        with pytest.raises(NotReady, match=r"does not know yet how much .* or ask another node"):
            node.reading()
        assert node.status().committed is None
        pair.cut.clear()
        pair.until(lambda: shown(pair, "b") == 3)
        assert node.status().committed == 3

    def test_that_was_killed_and_then_closed_before_it_had_heard_from_a_primary_shows_nothing_either(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.kill("b")
        pair.cut |= {"a"}
        pair.start("b")
        pair.step(20)
        pair.stop("b")
        pair.start("b")
        assert shown(pair, "b") is None, "closing it in order does not tell what it had shown before"
        pair.cut.clear()
        pair.until(lambda: shown(pair, "b") == 3)

    def test_that_was_killed_when_all_it_has_was_written_down_as_committed_shows_it_at_once(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.step(200)
        pair.kill("b")
        pair.cut |= {"a"}
        pair.start("b")
        assert shown(pair, "b") == 3

    def test_that_was_closed_opened_and_killed_again_and_again_still_shows_it(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.cut |= {"a"}
        handle = pair.append(b"only on a")
        pair.stop("b")
        for _ in range(3):
            pair.start("b")
            pair.step(5)
            assert shown(pair, "b") == 3
            pair.kill("b")
        assert not handle.done()

    def test_that_shows_more_after_a_restart_notes_first_that_it_may_have(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.stop("b")
        pair.start("b")
        committed(pair, b"4")
        pair.kill("b")
        pair.cut |= {"a"}
        pair.start("b")
        assert shown(pair, "b") is None, "three would be less than it has shown"

    def test_does_not_trust_the_watermark_of_a_primary_that_does_not_know_it_yet(self, trio):
        committed(trio, b"1", b"2", b"3")
        for name in "abc":
            trio.kill(name)
        trio.cut |= {"c"}
        trio.start("a")
        trio.until(lambda: trio.nodes["a"].is_primary)
        assert shown(trio, "a") is None
        trio.start("b")
        trio.until(lambda: shown(trio, "b") is not None)
        assert shown(trio, "a") == shown(trio, "b") == 3

    def test_that_builds_its_copy_again_never_shows_less(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.nodes["b"].replica.rebootstrap()
        for _ in range(100):
            pair.step()
            assert shown(pair, "b") == 3

    def test_whose_disk_refuses_the_note_does_not_know_it_later(self, pair, monkeypatch):
        committed(pair, b"1", b"2", b"3")
        home = pair.nodes["b"].node_folder

        def refuse(**_changes):
            raise StorageError("The disk is full.")

        monkeypatch.setattr(home, "remember", refuse)
        pair.stop("b")
        pair.cut |= {"a"}
        pair.start("b")
        assert shown(pair, "b") is None

    def test_that_was_closed_lets_a_full_watch_remove_no_key_while_its_primary_is_away(self, pair):
        committed(pair, b"1", b"2", b"3")
        store = MemoryStore()
        sl.follow(pair.nodes["b"].reading(), store, upto="end")
        pair.stop("b")
        pair.stop("a")
        pair.start("b")
        kv, halt, applied = LogKeyValue(pair.nodes["b"].reading()), threading.Event(), []

        def apply(updates):
            applied.extend((update.op, update.key, update.value) for update in updates)
            halt.set()

        sl.watch_applied(kv, apply, resume=None, store=store, reader=kv, stop=halt)
        assert applied == [(Op.PUT, b"k", b"3")]
        assert store.get(b"k") == b"3"

    def test_that_was_killed_gives_no_watch_an_empty_key_value_store(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.kill("b")
        pair.cut |= {"a"}
        # As a reader that was opened while the node still knew its watermark.
        kv = LogKeyValue(CommittedLog(pair.start("b")._role.watermark.readable, lambda: None))
        for look in (kv.keys, kv.listing, kv.watch):
            with pytest.raises(NotReady):
                look()


class TestAPrimary:
    def test_that_was_closed_shows_alone_what_its_policy_had_reached(self, pair):
        committed(pair, *[b"%d" % number for number in range(20)])
        pair.stop("b")
        pair.append(b"not committed")
        pair.stop("a")
        pair.start("a", lead=True)
        assert shown(pair, "a") == 20

    def test_that_was_killed_shows_nothing_until_a_replica_has_acknowledged(self, pair):
        committed(pair, *[b"%d" % number for number in range(20)])
        pair.kill("b")
        pair.kill("a")
        primary = pair.start("a", lead=True)
        pair.step(20)
        with pytest.raises(NotReady, match=r"everything below offset 20.* ack_n\(1\)"):
            primary.reading()
        pair.start("b")
        pair.until(lambda: shown(pair, "a") == 20)

    def test_that_was_killed_and_then_closed_before_a_replica_was_there_shows_nothing_either(self, pair):
        committed(pair, *[b"%d" % number for number in range(20)])
        pair.kill("b")
        pair.kill("a")
        pair.start("a", lead=True)
        pair.step(20)
        pair.stop("a")
        pair.start("a", lead=True)
        assert shown(pair, "a") is None, "closing it in order does not tell what it had shown before"
        pair.start("b")
        pair.until(lambda: shown(pair, "a") == 20)

    def test_that_was_killed_with_a_tail_that_nobody_has_shows_no_less_when_that_is_committed(self, pair):
        committed(pair, b"1", b"2", b"3")
        pair.cut |= {"a"}
        pair.append(b"4")
        pair.kill("a")
        pair.cut.clear()
        pair.start("a", lead=True)
        seen = []
        pair.until(lambda: seen.append(shown(pair, "a")) or seen[-1] == 4)
        assert set(seen) <= {None, 4}

    def test_of_a_quorum_that_is_back_alone_shows_nothing_before_a_majority_is_there(self, trio):
        committed(trio, *[b"%d" % number for number in range(20)])
        for name in "abc":
            trio.kill(name)
        trio.clock.advance(TERM)
        trio.start("a")
        trio.until(lambda: trio.nodes["a"].is_primary)
        trio.step(20)
        assert shown(trio, "a") is None
        trio.start("c")
        trio.until(lambda: shown(trio, "a") == 20)

    def test_of_a_quorum_that_was_closed_shows_alone_what_its_policy_had_reached(self, trio):
        committed(trio, *[b"%d" % number for number in range(14)])
        trio.kill("c")
        committed(trio, *[b"%d" % number for number in range(14, 20)])
        trio.kill("b")
        trio.append(b"not committed")
        trio.stop("a")
        trio.start("a")
        trio.until(lambda: trio.nodes["a"].is_primary)
        assert shown(trio, "a") == 20

    def test_that_takes_over_shows_nothing_less_than_the_one_before_had_acknowledged(self, trio):
        committed(trio, b"1")
        trio.nodes["b"].replica._commit = trio.nodes["c"].replica._commit = lambda _: None  # their word comes late
        handle = trio.append(b"2")
        trio.until(handle.done)
        trio.kill("a")
        trio.clock.advance(TERM)
        trio.nodes["b"].promote()
        seen = []
        trio.until(lambda: seen.append(shown(trio, "b")) or seen[-1] == 2)
        assert set(seen) <= {None, 2}

    def test_that_steps_down_goes_on_to_show_what_it_showed(self, trio):
        committed(trio, b"1", b"2")
        node = trio.nodes["a"]
        node.primary.step_down("a test says so")
        trio.cut |= {"b", "c"}
        trio.step()
        assert not node.is_primary
        assert shown(trio, "a") == 2

    def test_with_the_policy_local_shows_what_it_has_at_once(self, tmp_path):
        cluster = Cluster(tmp_path, policy="local", leased=False, names="a")
        cluster.start("a", create=True, lead=True)
        cluster.append(b"1", b"2")
        cluster.kill("a")
        cluster.start("a", lead=True)
        assert shown(cluster, "a") == 2
        cluster.close()

    def test_that_gets_a_stronger_policy_after_a_kill_waits_for_it(self, tmp_path):
        cluster = Cluster(tmp_path, policy="local", leased=False, names="ab")
        cluster.start("a", create=True, lead=True)
        cluster.append(b"1", b"2")
        cluster.kill("a")
        cluster.policy = "ack_n(1)"
        cluster.start("a", lead=True)
        assert shown(cluster, "a") is None
        cluster.start("b")
        cluster.until(lambda: shown(cluster, "a") == 2)
        cluster.close()


class TestOverSockets:
    def test_a_new_store_that_follows_a_restarted_replica_to_its_end_gets_everything(self, tmp_path):
        more = {"policy": "ack_n(1)", "poll_seconds": 0.1}
        primary = Primary.open(tmp_path / "a", name="a", **more)
        with primary, Replica.open(tmp_path / "b", primary.url, name="b", **more) as replica:
            replica.wait_until(lambda: replica.condition == "following", WAIT)
            commit = primary.append(records(b"1", b"2", b"3"), timeout=WAIT)
            assert commit.outcome == Reached(3)
            replica.reading(after=commit.bookmark, timeout=WAIT)
        replica = Replica.open(tmp_path / "b", primary.url, name="b", **more)
        with replica, sl.followers.AppendLogStore.open(tmp_path / "store") as store:
            assert sl.follow(replica.reading(), store, upto="end").next == 3
        with Primary.open(tmp_path / "a", name="a", **more) as primary:
            assert primary.reading().bounds().next == 3
            assert primary.committed == 3


class TestTheState:
    def test_of_an_earlier_version_says_nothing_of_what_was_shown(self):
        fields = decode_checked(encode_node(NodeState("a", committed=3, settled=True)), KIND, VERSION)
        del fields["settled"]
        assert decode_node(encode_checked(KIND, VERSION, fields), "node.json") == NodeState("a", committed=3)

    def test_that_is_neither_true_nor_false_is_damage(self):
        fields = decode_checked(encode_node(NodeState("a", settled=True)), KIND, VERSION)
        with pytest.raises(CorruptData, match=r"Expected `bool`, got `int` - at `\$.settled`"):
            decode_node(encode_checked(KIND, VERSION, {**fields, "settled": 1}), "node.json")
