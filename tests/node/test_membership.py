"""Members and policies that change while the log runs: on nodes that are stepped by hand, through crashes of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strandline.errors import Fenced, InvalidInput, NotFound, NotReady
from strandline.model.node import Membership
from strandline.node.elect import candidacy
from strandline.node.lead import membership
from strandline.node.lead.membership import PrimaryMembership
from strandline.node.members import rules
from strandline.node.members.rules import (
    AddNode,
    CancelChange,
    RemoveNode,
    SetPolicy,
    begun,
    check_membership,
    members_of,
    shown,
    taken_over,
    urls,
)
from strandline.node.members.steps import MemberChange
from strandline.node.messages import Caller, NotRequired, Reached, ReplicaProgress
from strandline.storage.env import Env
from tests.node.nodes_by_hand import Cluster, records


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, automatic=True)
    yield made
    made.close()


def led(cluster, names="abc", *, policy="quorum(a,b,c)", **more):
    """Nodes of which the first leads, and that know no others."""
    cluster.names, cluster.policy = names, policy
    cluster.start(names[0], create=True, **more)
    cluster.until(lambda: cluster.nodes[names[0]].is_primary)
    for name in names[1:]:
        cluster.start(name)
    cluster.settled(*names[1:], leader=names[0])
    return cluster.nodes[names[0]]


def known(cluster, name="a"):
    return cluster.nodes[name].node_folder.state.membership


def taking_back(cluster, on="a"):
    """The change that takes back what is pending."""
    return CancelChange(*known(cluster, on).version)


class Operator:
    """Somebody who runs a command against one node; while it waits, the nodes go on, and others act."""

    def __init__(self, cluster, *, on="a", meanwhile=()):
        self.cluster, self.on, self.meanwhile = cluster, on, list(meanwhile)
        self.change = MemberChange(self, Env(clock=self), timeout=600.0)

    def monotonic(self):
        return self.cluster.clock.monotonic()

    def sleep(self, seconds):
        self.cluster.step(seconds=seconds)
        if self.meanwhile and self.meanwhile[0]():
            del self.meanwhile[0]

    def change_members(self, what, *, force=False):
        return self.cluster.nodes[self.on].primary.change_members(what, force=force)

    def topology(self):
        return self.cluster.nodes[self.on].primary.topology(Caller("operator"))


def is_done(cluster, *names):
    """Whether these nodes have the same record, and no change is pending."""
    found = [known(cluster, name) for name in names]
    return None not in found and len(set(found)) == 1 and found[0].former is None


def change(cluster, what, *, on="a", **options):
    """Begin a change, once it is possible, and step until it is complete."""
    asked = []

    def begun():
        try:
            asked.append(cluster.nodes[on].primary.change_members(what, **options))
        except NotReady:
            return False
        return True

    cluster.until(begun)
    cluster.until(lambda: known(cluster, on).former is None)
    return known(cluster, on)


def grown(cluster):
    """Four nodes, of which ``d`` was added while the log ran, and votes."""
    led(cluster)
    change(cluster, AddNode("d", "to:d"))
    cluster.start("d")
    cluster.settled("b", "c", "d")
    change(cluster, SetPolicy("quorum(a,b,c,d)"))


class TestAddingANode:
    def test_a_node_that_is_added_follows_and_then_votes(self, cluster):
        grown(cluster)
        assert str(cluster.nodes["a"].primary.membership.policy) == "quorum(a,b,c,d)"
        cluster.kill("b")
        handle = cluster.append(b"one")
        cluster.until(handle.done)
        assert isinstance(handle.result(0.0).outcome, Reached)
        cluster.start("b")
        cluster.until(lambda: is_done(cluster, "a", "b", "c", "d"))

    def test_a_node_that_nobody_has_added_is_told_what_to_do_and_follows_once_it_is_added(self, cluster):
        a = led(cluster)
        change(cluster, SetPolicy("quorum(a,b)"))
        cluster.start("d")
        cluster.step(20)
        with pytest.raises(Fenced, match="strandline node add URL d=NODE_URL"):
            a.primary.register(Caller("d", a.primary.term))
        assert "d" not in a.primary.registry.replicas
        change(cluster, AddNode("d", "to:d"))
        cluster.settled("b", "d")

    def test_a_voter_that_has_not_caught_up_is_refused_since_commits_would_wait_for_it(self, cluster):
        a = led(cluster)
        change(cluster, AddNode("d", "to:d"))
        cluster.append(b"one")
        cluster.step(40)
        cluster.start("d").step()
        cluster.kill("d")
        cluster.until(lambda: "d" in a.primary.registry.replicas)
        cluster.kill("b")
        cluster.until(lambda: not a.primary.registry.replicas["b"].healthy)
        with pytest.raises(NotReady, match="nothing was changed"):
            a.primary.change_members(SetPolicy("quorum(a,b,d)"))

    def test_the_address_of_a_node_is_changed_by_adding_it_again(self, cluster):
        led(cluster)
        found = change(cluster, AddNode("b", "to:B"))
        assert {each.name: each.url for each in found.members.nodes} == {"a": "to:a", "b": "to:B", "c": "to:c"}

    def test_a_primary_without_a_vote_is_given_one(self, cluster):
        led(cluster, "abcd")
        for name in "bc":
            cluster.nodes[name].options = replace(cluster.nodes[name].options, automatic=False)
        cluster.kill("a")
        cluster.clock.advance(20.0)
        cluster.nodes["d"].promote()
        cluster.settled("b", "c", leader="d")
        change(cluster, AddNode("e", "to:e"), on="d")
        cluster.until(lambda: is_done(cluster, "b", "c", "d"))
        change(cluster, SetPolicy("quorum(b,c,d)"), on="d")
        assert str(cluster.nodes["d"].primary.membership.policy) == "quorum(b,c,d)"

    def test_adding_what_is_there_changes_nothing(self, cluster):
        a = led(cluster)
        first = change(cluster, AddNode("d", "to:d"))
        assert a.primary.change_members(AddNode("d", "to:d")) == first

    def test_a_node_that_is_added_takes_over_like_any_other(self, cluster):
        grown(cluster)
        cluster.append(b"one")
        cluster.settled("b", "c", "d")
        cluster.until(lambda: is_done(cluster, "a", "b", "c", "d"))
        for name in "bc":
            cluster.nodes[name].options = replace(cluster.nodes[name].options, automatic=False)
        cluster.kill("a")
        cluster.until(lambda: cluster.nodes["d"].is_primary)
        handle = cluster.append(b"two", on="d") if cluster.settled("b", "c", leader="d") is None else None
        cluster.until(handle.done)


class TestRemovingANode:
    def test_a_removed_node_neither_follows_nor_votes_nor_reads(self, cluster):
        a = led(cluster)
        feed = a.primary.feed(Caller("c", a.primary.term), a.log.end())
        found = change(cluster, RemoveNode("c"))
        assert found.members == members_of({"a": "to:a", "b": "to:b"}, "quorum(a,b)")
        assert "c" not in a.primary.registry.replicas
        assert a.primary.replicas.slot("c") is None
        with pytest.raises(Fenced, match="no node of this log"):
            feed.take(0.0)
        caller = Caller("c", a.primary.term)
        for call in (
            lambda: a.primary.register(caller),
            lambda: a.primary.resume(caller, None),
            lambda: a.primary.feed(caller, a.log.end()),
            lambda: a.primary.handover(caller),
            lambda: a.primary.begin_snapshot(caller, "wal"),
            lambda: a.primary.acknowledge(caller, ReplicaProgress(0, 0)),
        ):
            with pytest.raises(Fenced, match="no node of this log"):
                call()

    def test_a_removed_node_that_returns_with_a_higher_term_disturbs_nobody(self, cluster):
        a = led(cluster)
        change(cluster, RemoveNode("c"))
        cluster.until(lambda: is_done(cluster, "a", "b"))
        term = a.primary.term
        for node in (a, cluster.nodes["b"]):
            with pytest.raises(Fenced, match="no node of this log"):
                node.report(Caller("c", term + 5))
        with pytest.raises(Fenced, match="no node of this log"):
            a.primary.topology(Caller("c", term + 5))
        assert a.is_primary
        assert a.node_folder.state.seen == term

    def test_a_removed_node_does_not_lead_when_the_others_are_gone(self, cluster):
        led(cluster)
        cluster.kill("c")
        change(cluster, RemoveNode("c"))
        cluster.until(lambda: is_done(cluster, "a", "b"))
        cluster.kill("a")
        cluster.nodes["b"].options = replace(cluster.nodes["b"].options, automatic=False)
        cluster.start("c")
        cluster.step(400)
        assert not cluster.nodes["c"].is_primary
        assert cluster.nodes["c"].node_folder.state.seen == 1  # it does not even try, which would use up terms
        with pytest.raises(NotReady, match="was not promoted"):
            cluster.nodes["c"].promote()
        cluster.nodes["b"].promote(force=True)
        assert cluster.nodes["b"].is_primary

    def test_the_primary_is_not_removed(self, cluster):
        a = led(cluster)
        with pytest.raises(InvalidInput, match="promote another node first"):
            a.primary.change_members(RemoveNode("a"))
        with pytest.raises(NotFound, match="no node 'x'"):
            a.primary.change_members(RemoveNode("x"))

    def test_a_node_is_replaced_by_adding_and_removing(self, cluster):
        grown(cluster)
        cluster.kill("c")
        change(cluster, RemoveNode("c"))
        cluster.until(lambda: is_done(cluster, "a", "b", "d"))
        handle = cluster.append(b"one")
        cluster.kill("b")
        cluster.until(handle.done)


class TestChangingThePolicy:
    def test_commits_need_both_policies_until_the_change_is_complete(self, cluster):
        a = led(cluster)
        a.primary.change_members(SetPolicy("ack_n(2)"))
        cluster.kill("c")
        handle = cluster.append(b"one")
        cluster.step(60)
        assert a.primary.registry.replicas["b"].durable == 1
        assert not handle.done()
        assert known(cluster).former is not None
        cluster.start("c")
        cluster.until(handle.done)
        cluster.until(lambda: is_done(cluster, "a", "b", "c"))
        assert str(a.primary.membership.policy) == "ack_n(2)"

    def test_an_append_that_waited_under_the_former_policy_needs_the_new_one_too(self, cluster):
        a = led(cluster, policy="local")
        handle = a.primary.submit(records(b"one"))
        a.primary.change_members(SetPolicy("ack_n(1)"))
        assert a.primary.committed <= 1
        commit = handle.result(0.0)
        assert not isinstance(commit.outcome, NotRequired)

    def test_what_readers_saw_stays_visible_through_each_change(self, cluster):
        a = led(cluster, policy="local")
        shown_before = 0
        for policy in ("ack_n(1)", "quorum(a,b,c)", "local", "ack_n(2)", "quorum(a,b)"):
            cluster.append(b"x")
            assert a.primary.committed >= shown_before
            shown_before = a.primary.committed
            change(cluster, SetPolicy(policy))
            assert a.primary.committed >= shown_before
        cluster.settled("b", "c")
        cluster.until(lambda: a.primary.committed == 5)

    def test_a_second_change_waits_for_the_first(self, cluster):
        a = led(cluster)
        a.primary.change_members(SetPolicy("ack_n(2)"))
        for name in "bc":
            cluster.kill(name)
        with pytest.raises(NotReady, match="Another change is pending"):
            a.primary.change_members(AddNode("d", "to:d"))
        assert a.primary.change_members(taking_back(cluster)).members.policy == "quorum(a,b,c)"
        cluster.step(60)
        assert known(cluster).former is not None  # taking it back needs both, too
        for name in "bc":
            cluster.start(name)
        cluster.until(lambda: is_done(cluster, "a", "b", "c"))
        assert str(a.primary.membership.policy) == "quorum(a,b,c)"
        with pytest.raises(InvalidInput, match="nothing to take back"):
            a.primary.change_members(taking_back(cluster))

    def test_a_change_is_taken_back_once_however_often_that_is_asked_for(self, cluster):
        a = led(cluster)
        asked = a.primary.change_members(SetPolicy("ack_n(2)"))
        for name in "bc":
            cluster.kill(name)
        with pytest.raises(InvalidInput, match="Another change is pending now"):
            a.primary.change_members(CancelChange(asked.term, asked.number - 1))
        back = a.primary.change_members(CancelChange(*asked.version))
        assert back.takes_back == asked.version
        assert a.primary.change_members(CancelChange(*asked.version)) == back  # the answer was lost
        with pytest.raises(NotReady, match="is not complete"):  # Ctrl-C, and the command again
            MemberChange(Operator(cluster), Env(clock=cluster.clock), timeout=0.0).cancel()
        assert known(cluster) == back
        for name in "bc":
            cluster.start(name)
        assert Operator(cluster).change.cancel().members.policy == "quorum(a,b,c)"
        with pytest.raises(InvalidInput, match="nothing to take back"):
            Operator(cluster).change.cancel()

    def test_what_is_being_taken_back_is_taken_back_at_once_by_force(self, cluster):
        a = led(cluster)
        asked = a.primary.change_members(SetPolicy("ack_n(2)"))
        for name in "bc":
            cluster.kill(name)
        a.primary.change_members(CancelChange(*asked.version))
        found = a.primary.change_members(CancelChange(*asked.version), force=True)
        assert (found.members.policy, found.former, found.takes_back) == ("quorum(a,b,c)", None, None)

    @pytest.mark.parametrize(
        ("policy", "why"),
        [
            ("quorum(a,b,x)", "the log does not have"),
            ("quorum(b,c)", "does not name the primary"),
            ("ack_n(3)", "cannot be reached"),
            ("nonsense", "is no commit policy"),
        ],
    )
    def test_a_policy_that_can_never_be_satisfied_is_refused(self, cluster, policy, why):
        a = led(cluster)
        with pytest.raises(InvalidInput, match=why):
            a.primary.change_members(SetPolicy(policy))
        assert known(cluster) is None

    def test_a_majority_that_is_lost_for_good_is_left_out_by_force(self, cluster):
        a = led(cluster)
        for name in "bc":
            cluster.kill(name)
        handle = cluster.append(b"one")
        cluster.until(lambda: not any(each.healthy for each in a.primary.registry.replicas.values()))
        cluster.append(b"two")
        a.primary.tick()
        a.primary.change_members(SetPolicy("local"), force=True)
        assert handle.done()
        assert a.primary.committed == 2


class TestWaitingForAChange:
    def test_it_is_complete_also_if_another_one_began_right_after_it(self, cluster):
        a = led(cluster)

        def begins():
            if known(cluster) is None or known(cluster).former is not None:
                return False
            for name in "bc":
                cluster.kill(name)
            return a.primary.change_members(SetPolicy("ack_n(1)"), force=False)

        found = Operator(cluster, meanwhile=[begins]).change.add("d", "to:d", vote=False)
        assert "d" in urls(found)
        assert found.former is not None  # the other one goes on

    def test_it_is_complete_also_if_others_were_completed_since(self, cluster):
        a = led(cluster)

        def others():
            if known(cluster) is None or known(cluster).former is not None:
                return False
            a.primary.change_members(SetPolicy("ack_n(1)"), force=True)
            return a.primary.change_members(AddNode("e", "to:e"), force=True)

        found = Operator(cluster, meanwhile=[others]).change.add("d", "to:d", vote=False)
        assert set("de") <= set(urls(found))

    def test_one_that_was_taken_back_says_so(self, cluster):
        a = led(cluster)
        for name in "bc":
            cluster.kill(name)
        meanwhile = [lambda: known(cluster) and a.primary.change_members(taking_back(cluster))]
        with pytest.raises(NotReady, match="taken back, or followed by another"):
            Operator(cluster, meanwhile=meanwhile).change.add("d", "to:d", vote=False)

    def test_a_vote_is_added_to_the_voters_of_that_moment(self, cluster):
        a = led(cluster)

        def others():
            return known(cluster).former is None and change(cluster, SetPolicy("quorum(a,b)")) and cluster.start("d")

        found = Operator(cluster, meanwhile=[lambda: known(cluster), others]).change.add("d", "to:d")
        assert found.members.policy == "quorum(a,b,d)"
        assert str(a.primary.membership.policy) == "quorum(a,b,d)"


STEPS = ["record", "spread", "complete", "told"]
"""When the primary of a change is lost: its record is durable there alone, or with another, or it is complete there,
or elsewhere."""


class TestFailover:
    def broken_off(self, cluster, what, step):
        """A change whose primary ``a`` is lost at this step; ``b`` and ``c`` go on."""
        a = led(cluster)
        cluster.append(b"one")
        cluster.settled("b", "c")
        cluster.step(60)
        if step == "record":
            cluster.before["handover"] = lambda _: cluster.kill("a") or (_ for _ in ()).throw(NotReady("gone"))
            a.primary.change_members(what)
            cluster.until(lambda: "a" not in cluster.nodes)
            cluster.before.clear()
            return
        a.primary.change_members(what)
        if step == "spread":
            a.primary.membership.complete = lambda _: False
            cluster.until(lambda: known(cluster, "b") is not None)
        elif step == "complete":
            cluster.until(lambda: known(cluster).former is None)
        else:
            cluster.until(lambda: known(cluster, "b") == known(cluster) and known(cluster).former is None)
        cluster.kill("a")

    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize(
        "what",
        [
            pytest.param(SetPolicy("quorum(a,b)"), marks=pytest.mark.matrix),
            pytest.param(AddNode("d", "to:d"), marks=pytest.mark.matrix),
            RemoveNode("c"),
        ],
        ids=repr,
    )
    def test_the_next_primary_ends_a_change_or_never_heard_of_it(self, cluster, what, step):
        self.broken_off(cluster, what, step)
        cluster.step(250)
        cluster.start("a")
        cluster.until(lambda: [node.is_primary for node in cluster.nodes.values()].count(True) == 1)
        leader = next(name for name, node in cluster.nodes.items() if node.is_primary)
        found = []

        def is_committed():
            try:
                found.append(cluster.append(b"two", on=leader))
            except NotReady:  # one that it needs has not registered yet
                return False
            return True

        cluster.until(is_committed)
        cluster.until(found[0].done)
        cluster.until(lambda: known(cluster, leader) is None or is_done(cluster, "a", "b"))
        assert [value for _, value in cluster.content(leader)] == [b"one", b"two"]

    def test_a_node_that_heard_of_both_policies_but_has_no_record_of_the_change_needs_both(self, cluster):
        """Either would do for two policies that hold all the time; here one may have committed alone."""
        a = led(cluster)
        cluster.kill("c")
        handle = cluster.append(b"one")
        cluster.until(handle.done)
        a.primary.change_members(SetPolicy("quorum(a,c)"))
        cluster.kill("b")
        cluster.before["handover"] = lambda _: cluster.kill("a") or (_ for _ in ()).throw(NotReady("gone"))
        cluster.start("c")
        cluster.until(lambda: "a" not in cluster.nodes)
        cluster.before.clear()
        cluster.kill("c")  # with the watermark that it has heard
        c = cluster.start("c")
        cluster.clock.advance(20.0)
        with pytest.raises(NotReady, match="only c answered"):
            c.promote()

    def test_a_node_that_is_removed_takes_the_change_back_when_it_has_to_lead(self, cluster):
        self.broken_off(cluster, RemoveNode("c"), "spread")
        cluster.until(lambda: known(cluster, "c") is not None or cluster.nodes["b"].is_primary)
        cluster.nodes["b"].options = replace(cluster.nodes["b"].options, automatic=False)
        assert known(cluster, "c") is not None
        cluster.clock.advance(20.0)
        cluster.nodes["c"].promote()
        cluster.start("a")  # it may have ended the change already
        cluster.until(lambda: is_done(cluster, "a", "b", "c"))
        assert known(cluster, "c").members.policy == "quorum(a,b,c)"

    def test_a_removed_primary_that_is_started_again_learns_that_before_it_leads(self, cluster):
        cluster.leased = cluster.automatic = False
        led(cluster, policy="local", lead=True)
        cluster.kill("a")
        cluster.nodes["b"].promote(force=True)
        change(cluster, RemoveNode("a"), on="b")
        with pytest.raises(NotReady, match="a led last, but has no vote in membership 2"):
            cluster.start("a", lead=True)
        assert cluster.nodes["b"].is_primary

    def test_a_candidate_whose_term_is_below_that_of_a_record_does_not_lead_in_it(self, cluster):
        """It could neither change the members nor hand them over."""
        cluster.leased = cluster.automatic = False
        led(cluster, policy="local", lead=True)
        later = Membership(1 << 17, 1, members_of({"a": "to:a", "b": "to:b", "c": "to:c"}, "local"))
        cluster.after["report"] = lambda _, found: replace(found, membership=later)
        b = cluster.nodes["b"]
        with pytest.raises(NotReady, match="changed in term 131072"):
            b.promote()
        b.promote()
        assert b.primary.term > later.term
        assert change(cluster, AddNode("d", "to:d"), on="b").term == b.primary.term

    def test_a_primary_drops_the_slots_of_removed_nodes_that_the_last_one_did_not_come_to(self, cluster):
        a = led(cluster)
        a.primary._members_changed = lambda: None
        change(cluster, RemoveNode("c"))
        cluster.kill("a")
        cluster.nodes["b"].options = replace(cluster.nodes["b"].options, automatic=False)
        a = cluster.start("a")
        cluster.until(lambda: a.is_primary)
        assert set(a.primary.registry.replicas) == {"b"}
        assert a.primary.replicas.slot("c") is None

    def test_a_node_without_a_vote_is_promoted_by_force_when_the_voters_are_lost(self, cluster):
        led(cluster)
        cluster.append(b"one")
        change(cluster, SetPolicy("quorum(a,b)"))
        cluster.settled("b", "c")
        cluster.until(lambda: is_done(cluster, "a", "b", "c"))
        cluster.kill("a")
        cluster.kill("b")
        cluster.clock.advance(20.0)
        c = cluster.nodes["c"]
        with pytest.raises(NotReady, match="was not promoted"):
            c.promote()
        c.promote(force=True)
        change(cluster, SetPolicy("quorum(c)"), on="c", force=True)
        assert cluster.append(b"two", on="c").done()

    def test_a_candidate_with_the_old_list_learns_the_new_one_from_those_that_it_asks(self, cluster):
        led(cluster)
        cluster.kill("c")
        change(cluster, AddNode("d", "to:d"))
        cluster.start("d")
        cluster.settled("b", "d")
        change(cluster, SetPolicy("quorum(a,b,d)"))
        cluster.until(lambda: is_done(cluster, "a", "b", "d"))
        cluster.append(b"one")
        cluster.step(40)
        for name in "abd":
            cluster.kill(name)
        cluster.start("c")
        cluster.start("b")
        cluster.nodes["b"].options = replace(cluster.nodes["b"].options, automatic=False)
        cluster.step(400)
        assert known(cluster, "c") == known(cluster, "b")
        assert not cluster.nodes["c"].is_primary

    @pytest.mark.parametrize("name", ["a", *(pytest.param(name, marks=pytest.mark.matrix) for name in "bc")])
    def test_a_change_outlasts_the_restart_of_each_node(self, cluster, name):
        a = led(cluster)
        a.primary.membership.complete = lambda _: False
        a.primary.change_members(SetPolicy("quorum(a,b)"))
        cluster.until(lambda: known(cluster, "b") is not None and known(cluster, "c") is not None)
        cluster.kill(name)
        cluster.step(20)
        cluster.start(name)
        if name != "a":
            del a.primary.membership.complete
        cluster.until(lambda: is_done(cluster, "a", "b", "c"))
        assert known(cluster).members.policy == "quorum(a,b)"


class TestANewLog:
    """Where few nodes have a copy yet, a term that is used up in vain leaves no node that can lead."""

    def test_a_node_that_would_not_be_elected_leaves_the_last_primary_its_lease(self, cluster):
        led(cluster, "ab", policy="quorum(a,b,c,d,e)")
        cluster.kill("a")
        cluster.step(1000)
        b = cluster.nodes["b"]
        assert "only b answered" in b.why_not_leading
        assert b.node_folder.state.seen == 1
        a = cluster.start("a")
        cluster.until(lambda: a.is_primary)

    def test_a_node_does_not_take_over_from_a_policy_that_is_no_quorum(self, cluster):
        """What it knows of the last primary may be old; a quorum depends on its voters alone."""
        a = led(cluster, policy="quorum(a,b,c)")
        change(cluster, SetPolicy("ack_n(1)"))
        a.primary.membership.complete = lambda _: False
        a.primary.change_members(SetPolicy("quorum(a,b,c)"))
        cluster.until(lambda: known(cluster, "b") == known(cluster, "c") == known(cluster))
        cluster.kill("a")
        cluster.step(600)
        for name in "bc":
            assert "does not lead by itself" in cluster.nodes[name].why_not_leading
            assert cluster.nodes[name].node_folder.state.seen == 1
        cluster.nodes["b"].promote(force=True)
        assert cluster.nodes["b"].is_primary

    def test_no_change_begins_before_as_many_have_a_copy_as_the_policy_asks(self, cluster):
        cluster.policy = "quorum(a,b,c)"
        a = cluster.start("a", create=True)
        cluster.until(lambda: a.is_primary)
        with pytest.raises(NotReady, match="no copies of everything below offset 0, as quorum"):
            a.primary.change_members(AddNode("d", "to:d"))
        assert a.primary.change_members(AddNode("d", "to:d"), force=True).former is None

    def test_a_policy_that_no_replica_can_satisfy_yet_is_changed_by_force_and_the_error_says_so(self, cluster):
        cluster.leased = cluster.automatic = False
        a = led(cluster, "a", policy="ack_n(1)", lead=True)
        for what in (AddNode("d", "to:d"), SetPolicy("ack_n(2)")):
            with pytest.raises(InvalidInput, match=r"reached with 0 replicas.*was changed.*--force"):
                a.primary.change_members(what)
        a.primary.change_members(AddNode("d", "to:d"), force=True)
        cluster.start("d")
        cluster.settled("d")
        handle = cluster.append(b"one")
        cluster.until(handle.done)

    def test_a_record_counts_where_a_copy_has_been_acknowledged_and_not_before(self, cluster):
        cluster.policy = "quorum(a,b,c)"
        a = cluster.start("a", create=True)
        cluster.until(lambda: a.is_primary)
        cluster.start("b")
        cluster.settled("b")
        cluster.kill("b")
        a.primary.change_members(AddNode("d", "to:d"))

        def refuse(_):
            raise NotReady("nothing is acknowledged")

        cluster.before["acknowledge"] = refuse
        cluster.start("c")
        cluster.until(lambda: known(cluster, "c") == known(cluster))
        cluster.step(60)
        assert a.primary.registry.replicas["c"].durable is None
        assert known(cluster).former is not None
        cluster.before.clear()
        cluster.start("b")
        cluster.until(lambda: is_done(cluster, "a", "b"))


class TestForce:
    def test_a_forced_promotion_in_the_middle_of_a_change_goes_on_with_both_policies(self, cluster):
        a = led(cluster)
        a.primary.membership.complete = lambda _: False
        a.primary.change_members(SetPolicy("ack_n(2)"))
        cluster.until(lambda: known(cluster, "b") is not None)
        for name in "ac":
            cluster.kill(name)
        cluster.clock.advance(20.0)
        cluster.nodes["b"].promote(force=True)
        assert known(cluster, "b").former.policy == "quorum(a,b,c)"
        assert known(cluster, "b").term == cluster.nodes["b"].primary.term
        with pytest.raises(NotReady, match="Another change is pending"):
            cluster.nodes["b"].primary.change_members(RemoveNode("a"))
        cluster.nodes["b"].primary.change_members(SetPolicy("local"), force=True)
        handle = cluster.append(b"one", on="b")
        assert isinstance(handle.result(0.0).outcome, NotRequired)
        for name in "ac":
            cluster.start(name)
        cluster.until(lambda: is_done(cluster, "a", "b", "c"))
        assert str(cluster.nodes["b"].primary.membership.policy) == "local"

    def test_a_node_that_was_removed_is_not_promoted_by_force_once_it_knows(self, cluster):
        led(cluster)
        cluster.kill("c")
        change(cluster, RemoveNode("c"))
        cluster.kill("b")
        record = known(cluster)
        cluster.kill("a")
        c = cluster.start("c")
        c.node_folder.remember(membership=record)
        cluster.clock.advance(20.0)
        with pytest.raises(NotReady, match="no vote in membership"):
            c.promote(force=True)

    def test_forgetting_terms_leaves_no_record_that_outlasts_all_later_ones(self, cluster):
        a = led(cluster)
        change(cluster, RemoveNode("c"))
        record = replace(known(cluster), term=1 << 20)
        a.node_folder.remember(membership=record)
        assert a.node_folder.reset_term(1).membership == replace(record, term=1)


class TestHostileRecords:
    def test_a_replica_stores_no_record_that_no_primary_can_have_made(self, cluster):
        led(cluster)
        bad = Membership(1, 1, members_of({"x": ""}, "quorum(x,y)"))
        cluster.after["handover"] = lambda _, found: replace(found, membership=bad)
        cluster.step(60)
        assert known(cluster, "b") is None
        cluster.after["handover"] = lambda _, found: replace(found, membership=replace(bad, term=1 << 40))
        cluster.step(60)
        assert known(cluster, "b") is None
        cluster.after.clear()
        cluster.settled("b", "c")

    def test_a_candidate_uses_no_record_from_a_term_that_no_election_reaches(self, cluster):
        led(cluster)
        good = members_of({"c": "to:c"}, "quorum(c)")
        for bad in (Membership(1 << 40, 1, good), Membership(1, 1 << 60, good), Membership(1, 1, members_of({}, "x"))):
            cluster.after["report"] = lambda _, found, bad=bad: replace(found, membership=bad)
            cluster.nodes["b"]._candidacy.learn()
            assert known(cluster, "b") is None


# --- broken twins ----------------------------------------------------------------------------------------------


def ignores_the_new_policy(patch):
    """Broken: a candidate asks for what the former policy needs alone, while a change is pending."""
    patch.setattr(candidacy, "policies", lambda record: rules.policies(record)[-1:])


def completes_before_the_former_members_know(patch):
    """Broken: a change is complete although no majority of the former members has its record."""
    patch.setattr(membership, "is_spread", lambda *_: True)
    patch.setattr(PrimaryMembership, "_check_caught_up", lambda *_: None)
    patch.setattr(membership, "policy_of", lambda record: rules.policies(record)[0])


def changes_at_once(patch):
    """Broken: the new members are in force without the former ones."""
    patch.setattr(membership, "begun", lambda *given, **options: begun(*given, **options | {"force": True}))


class TestBrokenTwins:
    """``a`` moves the log from the quorum of a, b and c to that of a and d, which are then lost."""

    def moved(self, cluster):
        """Whether a and d have committed a record, and whether the primary that b and c make lacks it."""
        a = led(cluster)
        change(cluster, AddNode("d", "to:d"))
        cluster.start("d")
        cluster.settled("b", "c", "d")
        cluster.step(60)
        cluster.until(lambda: is_done(cluster, "a", "b", "c", "d"))
        # From here on b and c get nothing; before that b may have got the pending record.
        a.primary.change_members(SetPolicy("quorum(a,d)"))
        pending = known(cluster)
        if pending.former is not None:
            cluster.until(lambda: known(cluster, "b") == known(cluster) or known(cluster).former is None)
        for name in "bc":
            cluster.kill(name)
        cluster.step(60)
        handle = cluster.append(b"one")
        cluster.step(60)
        is_committed = handle.done()
        for name in "ad":
            cluster.kill(name)
        cluster.clock.advance(20.0)
        for name in "bc":
            cluster.start(name)
        cluster.step(100)
        try:
            cluster.nodes["b"].promote()
        except NotReady:
            return is_committed, False
        return is_committed, b"one" not in [value for _, value in cluster.content("b")]

    def test_nothing_that_either_policy_has_committed_is_lost(self, cluster):
        assert self.moved(cluster) == (True, False)

    @pytest.mark.parametrize(
        "twin",
        [
            ignores_the_new_policy,
            pytest.param(completes_before_the_former_members_know, marks=pytest.mark.matrix),
            pytest.param(changes_at_once, marks=pytest.mark.matrix),
        ],
    )
    def test_a_broken_twin_loses_what_was_committed(self, cluster, monkeypatch, twin):
        twin(monkeypatch)
        assert self.moved(cluster) == (True, True)

    def test_a_change_waits_for_what_only_the_former_members_have(self, cluster):
        a = led(cluster)
        change(cluster, AddNode("d", "to:d"))
        cluster.start("d")
        cluster.settled("b", "c", "d")
        d = cluster.nodes.pop("d")
        handle = cluster.append(b"one")
        cluster.until(handle.done)
        a.primary._reached = 0  # what was committed at the last tick
        a.primary.change_members(SetPolicy("quorum(a,d)"))
        for name in "bcd":
            a.primary.membership.has(name, known(cluster).version)
        a.primary._complete_change()
        assert known(cluster).former is not None  # the record is there, but d lacks what a and b have committed
        cluster.nodes["d"] = d
        cluster.until(lambda: known(cluster).former is None)

    def test_a_change_that_a_new_primary_took_back_is_not_begun_again_by_taking_that_back(self):
        before, after = members_of({"a": "", "b": ""}, "quorum(a,b)"), members_of({"a": "", "b": ""}, "quorum(a)")
        taken_back = taken_over(Membership(3, 7, after, before), term=5, primary="b")
        assert taken_back == Membership(5, 8, before, after, takes_back=(3, 7))
        assert begun(taken_back, CancelChange(3, 7), term=5, primary="b") is taken_back
        begun_again = taken_over(taken_back, term=6, primary="a")
        assert begun_again == Membership(6, 9, before, after, takes_back=(3, 7))
        assert taken_over(taken_back, term=6, primary="c") == Membership(6, 9, after, before)

    def test_a_new_primary_goes_on_with_a_pending_change_in_its_own_term(self):
        before, after = members_of({"a": "", "b": ""}, "quorum(a,b)"), members_of({"a": ""}, "quorum(a)")
        pending = Membership(3, 7, after, before)
        assert taken_over(pending, term=5, primary="a") == Membership(5, 8, after, before)
        assert taken_over(pending, term=5, primary="b") == Membership(5, 8, before, after, (3, 7))
        done = Membership(3, 7, after)
        assert taken_over(done, term=5, primary="a") == done


class TestRecords:
    GOOD = Membership(3, 7, members_of({"a": "grpc://a:1", "b": ""}, "quorum(a,b)"))

    def test_a_good_record_passes(self):
        assert check_membership(self.GOOD, term=3) is self.GOOD
        assert "before that" in shown(replace(self.GOOD, former=self.GOOD.members))

    @pytest.mark.parametrize(
        "bad",
        [
            replace(GOOD, term=4),
            replace(GOOD, number=0),
            replace(GOOD, number=1 << 60),
            replace(GOOD, members=members_of({}, "local")),
            replace(GOOD, members=members_of({f"n{each}": "" for each in range(300)}, "local")),
            replace(GOOD, members=members_of({"../a": ""}, "local")),
            replace(GOOD, members=members_of({"a": "grpc://" + "a" * 600}, "local")),
            replace(GOOD, members=members_of({"a": "grpc://a b"}, "local")),
            replace(GOOD, members=members_of({"a": ""}, "quorum(a,x)")),
            replace(GOOD, members=members_of({"a": ""}, "ack_n(1)" + " and ack_n(1)" * 2000)),
            replace(GOOD, members=members_of({"a": ""}, "what?")),
            replace(GOOD, former=members_of({"a": ""}, "quorum(a,x)")),
        ],
        ids=lambda each: each.members.policy[:20],
    )
    def test_a_hostile_record_is_refused(self, bad):
        with pytest.raises(InvalidInput):
            check_membership(bad, term=3)
