"""Failover: nothing that was committed is lost, and who was replaced notices."""

from __future__ import annotations

import shutil
from uuid import UUID

import pytest

from strandline.errors import Fenced, NotReady, TransientStorageError
from strandline.model.cursor import Bounds
from strandline.model.head import WriterId
from strandline.node.messages import Caller, Reached
from tests.node.nodes_by_hand import TERM, Cluster, records


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def trio(cluster):
    cluster.start("a", create=True)
    cluster.start("b")
    cluster.start("c")
    cluster.settled("b", "c")
    return cluster


def test_three_nodes_come_to_one_primary_and_two_followers(trio):
    assert [node.condition for node in trio.nodes.values()] == ["leading", "following", "following"]
    handle = trio.append(b"one", b"two")
    trio.until(handle.done)
    assert handle.result(0).outcome == Reached(2)
    trio.settled("b", "c")
    assert trio.content("a") == trio.content("b") == trio.content("c") == [(0, b"one"), (1, b"two")]


def test_a_promoted_replica_goes_on_from_what_it_has_and_the_old_primary_follows_it(trio):
    trio.append(b"one")
    trio.settled("b", "c")
    trio.kill("a")
    trio.clock.advance(TERM)
    topology = trio.nodes["b"].promote()
    assert (topology.primary, topology.term, topology.term_start) == ("b", 2, 1)
    trio.append(b"two", on="b")
    trio.start("a")
    trio.settled("a", "c", leader="b")
    assert trio.content("a") == trio.content("b") == trio.content("c") == [(0, b"one"), (1, b"two")]


def test_the_returning_primary_sets_aside_what_nobody_else_had(trio):
    trio.append(b"one")
    trio.settled("b", "c")
    trio.cut |= {"a"}
    trio.append(b"only here", b"and here")
    trio.kill("a")
    trio.cut.clear()
    trio.clock.advance(TERM)
    trio.nodes["c"].promote()
    trio.append(b"two", on="c")
    trio.start("a")
    trio.settled("a", "b", leader="c")
    assert trio.content("a") == trio.content("c") == [(0, b"one"), (1, b"two")]
    aside = list((trio.folder / "a" / "quarantine").iterdir())
    assert len(aside) == 1
    assert any(b"only here" in path.read_bytes() for path in aside[0].rglob("*.log"))


def test_promotion_waits_for_the_lease_and_a_living_primary_keeps_it(trio):
    primary = trio.nodes["a"]
    before = trio.clock.sleep

    def renewing(seconds):
        before(seconds)
        primary.step()

    trio.clock.sleep = renewing
    with pytest.raises(NotReady, match=r"held by a .* and renewed: stop that node first"):
        trio.nodes["b"].promote()
    assert primary.is_primary


def test_a_candidate_that_lacks_a_committed_record_is_refused_and_names_the_node_that_has_more(trio):
    trio.kill("c")
    handle = trio.append(b"one")
    trio.until(handle.done)
    trio.settled("b")
    trio.kill("a")
    trio.start("c")
    trio.clock.advance(TERM)
    with pytest.raises(NotReady, match=r"b has more .*: promote b"):
        trio.nodes["c"].promote()
    assert trio.nodes["b"].promote().primary == "b"


def test_with_too_few_answers_no_node_is_promoted_unless_forced(trio):
    trio.append(b"one")
    trio.settled("b", "c")
    trio.kill("a")
    trio.kill("b")
    trio.clock.advance(TERM)
    with pytest.raises(NotReady, match=r"only c answered: a record that quorum.* had committed may be missing"):
        trio.nodes["c"].promote()
    assert trio.nodes["c"].promote(force=True).primary == "c"


def test_the_leadership_ends_when_the_lease_expires_and_nothing_more_is_acknowledged(trio):
    primary = trio.nodes["a"].primary
    handle = primary.submit(records(b"too late"))
    trio.clock.advance(TERM)
    with pytest.raises(Fenced, match="durable here, but may be lost in a failover"):
        handle.result(0)
    with pytest.raises(Fenced, match="nothing was written"):
        primary.append(records(b"never"), timeout=0)
    assert (0, b"too late") in trio.content("a")
    assert len(trio.content("a")) == 1


def test_a_replica_refuses_lower_terms_across_restarts(trio):
    trio.nodes["b"].report(Caller("c", 9))
    trio.kill("b")
    node = trio.start("b")
    assert node.node_folder.state.seen == 9
    trio.kill("a")
    # A primary of a lower term, which does not know better.
    trio.leased = False
    trio.start("a", lead=True)
    for _ in range(5):
        node.step()
        trio.clock.advance(10)
    assert node.condition in ("fenced", "connecting")
    assert not trio.nodes["a"].is_primary, "it learns of the higher term"


def test_a_node_that_restarts_with_nobody_in_between_leads_at_once(trio):
    trio.append(b"one")
    trio.kill("a")
    trio.clock.advance(TERM)
    trio.cut |= {"b", "c"}
    trio.start("a")
    trio.until(lambda: trio.nodes["a"].is_primary)
    assert trio.nodes["a"].primary.term == 2


def test_a_numbered_append_that_is_repeated_on_the_new_primary_is_a_no_op(trio):
    writer = WriterId(UUID(int=5))
    trio.append(b"once", append=(writer, 0))
    trio.settled("b", "c")
    trio.kill("a")
    trio.clock.advance(TERM)
    trio.nodes["b"].promote()
    handle = trio.append(b"once", on="b", append=(writer, 0))
    trio.settled("c", leader="b")
    assert handle.result(0).receipt.first == 0
    assert trio.content("b") == trio.content("c") == [(0, b"once")]


def test_with_a_quorum_a_node_takes_over_by_itself_and_nothing_committed_is_lost(tmp_path):
    cluster = Cluster(tmp_path, automatic=True)
    cluster.start("a", create=True)
    cluster.start("b")
    cluster.start("c")
    cluster.settled("b", "c")
    handle = cluster.append(b"one")
    cluster.until(handle.done)
    cluster.kill("a")
    cluster.until(lambda: any(node.is_primary for node in cluster.nodes.values()))
    leader = next(name for name, node in cluster.nodes.items() if node.is_primary)
    assert (0, b"one") in cluster.content(leader)
    cluster.start("a")
    cluster.settled(*(name for name in "abc" if name != leader), leader=leader)
    cluster.close()


def test_a_new_primary_retains_records_for_replicas_that_have_not_registered_yet(trio):
    for number in range(5):
        trio.append(b"%d" % number)
    trio.settled("b", "c")
    trio.kill("a")
    trio.clock.advance(TERM)
    trio.nodes["b"].promote()
    assert trio.nodes["b"].primary.trim(5) == 0
    trio.settled("c", leader="b")
    assert trio.nodes["b"].primary.trim(5) == 5


def test_a_node_that_led_pins_nothing_for_others_when_it_follows(trio):
    trio.append(b"one")
    trio.settled("b", "c")
    assert len(trio.nodes["a"].copy.log.slots.list()) == 2
    trio.kill("a")
    trio.clock.advance(TERM)
    trio.nodes["b"].promote()
    trio.start("a")
    trio.settled("a", "c", leader="b")
    assert trio.nodes["a"].copy.log.slots.list() == []


def test_replicas_at_the_start_of_a_trimmed_log_go_on_after_a_failover_without_a_bootstrap(trio):
    for number in range(5):
        trio.append(b"%d" % number)
    trio.settled("b", "c")
    trio.step(120)
    for name in "abc":
        trio.nodes[name].copy.log.trim(5)
        assert trio.nodes[name].copy.log.bounds() == Bounds(5, 5)
    trio.kill("a")
    trio.clock.advance(TERM)
    trio.nodes["b"].promote()
    before = trio.nodes["c"].node_folder.state.generation
    trio.settled("c", leader="b")
    assert trio.nodes["c"].node_folder.state.generation == before
    trio.append(b"after", on="b")
    trio.settled("c", leader="b")
    assert trio.content("c") == [(5, b"after")]


def test_two_that_are_promoted_without_a_lease_do_not_both_lead(tmp_path):
    cluster = Cluster(tmp_path, policy="ack_n(1)", leased=False)
    cluster.start("a", create=True, lead=True)
    cluster.start("b")
    cluster.start("c")
    cluster.settled("b", "c")
    cluster.append(b"one")
    cluster.settled("b", "c")
    cluster.kill("a")
    first, second = cluster.nodes["c"], cluster.nodes["b"]  # the second takes the lower term
    asked = []

    def at_once(name):
        if not asked:
            asked.append(name)
            second.promote()

    cluster.before["report"] = at_once
    with pytest.raises(NotReady):
        first.promote()
    assert asked
    assert not first.is_primary
    assert not second.is_primary, "each has heard of the other"
    assert first.promote().term > 1
    assert not second.is_primary
    cluster.close()


def test_one_that_agrees_to_a_higher_term_just_before_it_leads_does_not_lead(tmp_path):
    cluster = Cluster(tmp_path, policy="ack_n(1)", leased=False)
    cluster.start("a", create=True, lead=True)
    cluster.start("b")
    cluster.start("c")
    cluster.settled("b", "c")
    cluster.append(b"one")
    cluster.settled("b", "c")
    cluster.kill("a")
    first, second = cluster.nodes["c"], cluster.nodes["b"]  # the second takes the lower term
    disconnect = second.replica.disconnect

    def asked_meanwhile():  # as its server does in a thread of its own
        disconnect()
        first.promote()

    second.replica.disconnect = asked_meanwhile
    with pytest.raises(Fenced, match="not the primary any more"):
        second.promote()
    assert first.is_primary
    assert not second.is_primary
    cluster.close()


def test_a_replica_that_is_promoted_while_it_bootstraps_again_keeps_nothing_of_that(trio):
    def lost(name: str) -> None:
        trio.cut |= {name}
        raise TransientStorageError(f"{name} was lost")

    trio.append(*[b"one" * 1000] * 10)
    trio.settled("b", "c")
    trio.before["chunks"] = lost
    trio.nodes["b"].rebootstrap()
    incoming = trio.folder / "b" / "incoming"
    trio.until(incoming.exists)
    trio.kill("a")
    trio.clock.advance(TERM)
    trio.nodes["b"].promote()
    assert not incoming.exists()
    trio.settled("c", leader="b")
    assert len(trio.content("c")) == 10


class TestAReplicaThatHasAcknowledgedNothing:
    """It has a copy of the log, and counts for nothing: its primary was lost between the two."""

    @pytest.fixture
    def lost(self, tmp_path):
        cluster = Cluster(tmp_path, policy="local", leased=False, names="ab")
        cluster.start("a", lead=True, create=True)
        cluster.append(b"one", b"two")
        replica = cluster.start("b")
        cluster.until(lambda: replica.copy is not None)
        assert replica.node_folder.state.adopted == 0
        cluster.kill("a")
        cluster.stop("b")
        cluster.start("b")
        yield cluster
        cluster.close()

    def test_is_not_promoted_and_the_reason_says_what_to_do(self, lost):
        with pytest.raises(NotReady, match=r"never acknowledged to a primary.*let it follow one first, or force it"):
            lost.nodes["b"].promote()

    def test_is_refused_before_it_takes_the_term_that_the_former_primary_goes_on_in(self, tmp_path):
        cluster = Cluster(tmp_path, policy="local", names="ab")
        former = cluster.start("a", create=True)
        cluster.until(lambda: former.condition == "leading")
        cluster.append(b"one", b"two")
        replica = cluster.start("b")
        cluster.until(lambda: replica.copy is not None)
        assert replica.node_folder.state.adopted == 0
        cluster.kill("a")
        cluster.clock.advance(2 * TERM)
        with pytest.raises(NotReady, match="never acknowledged to a primary"):
            replica.promote()
        again = cluster.start("a")
        cluster.until(lambda: again.condition == "leading")
        cluster.settled("b")
        assert [value for _, value in cluster.content("b")] == [b"one", b"two"]
        cluster.close()

    def test_leads_from_what_it_has_if_that_is_forced_and_the_other_one_follows_it(self, lost):
        lost.nodes["b"].promote(force=True)
        lost.append(b"three", on="b")
        assert [value for _, value in lost.content("b")] == [b"one", b"two", b"three"]
        other = lost.start("a")
        other.upstream = "to:b"
        lost.settled("a", leader="b")
        assert lost.content("a") == lost.content("b")

    def test_is_not_even_forced_while_a_node_answers_that_has_more(self, lost):
        lost.start("a", lead=True)
        with pytest.raises(NotReady, match="a has more"):
            lost.nodes["b"].promote(force=True)

    def test_without_a_copy_it_is_never_promoted(self, lost, tmp_path):
        lost.kill("b")
        shutil.rmtree(tmp_path / "b")
        newcomer = lost.start("b")
        with pytest.raises(NotReady, match="b has no copy of the log yet: let it bootstrap"):
            newcomer.promote(force=True)


def trimmed(cluster, leader):
    """Let the primary delete everything that it may, whatever nodes need that are away."""
    primary = cluster.nodes[leader].primary
    for name in list(primary.registry.replicas):
        primary.unregister(Caller(name, primary.term))
    primary.trim(primary.log.bounds().next)
    return primary.log.bounds().first


@pytest.mark.parametrize("count", [2, 20])
def test_the_returning_primary_sets_its_tail_aside_also_if_it_has_to_bootstrap(trio, count):
    trio.append(b"one")
    trio.settled("b", "c")
    trio.cut |= {"a"}
    trio.append(*[b"only here"] * count)
    trio.kill("a")
    trio.cut.clear()
    trio.clock.advance(TERM)
    trio.nodes["c"].promote()
    trio.append(*(b"%d" % number for number in range(9)), on="c")
    trio.settled("b", leader="c")
    assert trimmed(trio, "c") == 10
    trio.start("a")
    trio.settled("a", "b", leader="c")
    [aside] = (trio.folder / "a" / "quarantine").iterdir()
    assert any(b"only here" in path.read_bytes() for path in aside.rglob("*.log"))
