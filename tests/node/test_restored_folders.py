"""Restore drills: a node whose folder is put back from an older copy. Nothing is lost silently."""

from __future__ import annotations

import logging
import shutil

import pytest

from strandline.errors import NotReady
from strandline.node.messages import Caller, Reached
from tests.node.nodes_by_hand import TERM, Cluster

OLD = [b"%d" % number for number in range(10)]
NEW = [b"%d" % number for number in range(10, 20)]


def pair_of(tmp_path, policy="ack_n(1)"):
    cluster = Cluster(tmp_path, policy=policy, names="ab")
    cluster.start("a", create=True)
    cluster.start("b")
    cluster.settled("b")
    return cluster


@pytest.fixture
def pair(tmp_path):
    cluster = pair_of(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def unleased(tmp_path):
    cluster = Cluster(tmp_path, policy="ack_n(1)", names="ab", leased=False)
    cluster.start("a", create=True, lead=True)
    cluster.start("b")
    cluster.settled("b")
    yield cluster
    cluster.close()


def fill(cluster, values, on="a"):
    for value in values:
        handle = cluster.append(value, on=on)
        cluster.until(handle.done)
        assert isinstance(handle.result(0).outcome, Reached)


def copied(cluster, name):
    """Take a copy of a node's folder."""
    shutil.copytree(cluster.folder / name, cluster.folder / f"{name}.copy")


def restored(cluster, name, **options):
    """Put the copy back in the place of the node's folder, and start it."""
    shutil.rmtree(cluster.folder / name)
    shutil.copytree(cluster.folder / f"{name}.copy", cluster.folder / name)
    return cluster.start(name, **options)


def values(cluster, name):
    return [value for _, value in cluster.content(name)]


class TestAReplica:
    def test_with_fewer_records_counts_for_what_it_has_and_catches_up(self, pair, caplog):
        fill(pair, OLD)
        pair.stop("b")
        copied(pair, "b")
        pair.start("b")
        pair.settled("b")
        fill(pair, NEW)
        pair.stop("b")
        primary = pair.nodes["a"].primary
        pair.before["feed"] = lambda _: pair.cut.add("a")  # it registers and resumes, and gets nothing yet
        with caplog.at_level(logging.WARNING):
            restored(pair, "b")
            pair.until(lambda: "a" in pair.cut)
        assert "had acknowledged everything below 20, but resumes at 10" in caplog.text
        assert primary.registry.replica("b").durable <= 10
        assert primary.replicas.slot("b").position <= 10, "what it needs is kept"
        assert primary.committed == 20, "what was committed is committed"
        assert primary.commit_watermark(1) <= 10, "and how many have it now is told as it is"
        pair.before.clear()
        pair.cut.clear()
        pair.settled("b")
        assert values(pair, "b") == OLD + NEW
        assert primary.commit_watermark(1) == 20

    def test_whose_missing_records_are_trimmed_bootstraps(self, pair):
        fill(pair, OLD)
        pair.stop("b")
        copied(pair, "b")
        pair.start("b")
        pair.settled("b")
        fill(pair, NEW)
        pair.until(lambda: pair.nodes["a"].primary.replicas.slot("b").position == 20)
        pair.nodes["a"].primary.trim(15)
        pair.stop("b")
        node = restored(pair, "b")
        pair.settled("b")
        assert (values(pair, "b"), node.node_folder.state.generation) == (NEW[5:], 2)

    def test_from_before_a_rewind_sets_its_tail_aside_again(self, tmp_path):
        trio = Cluster(tmp_path)
        trio.start("a", create=True)
        trio.start("b")
        trio.start("c")
        trio.settled("b", "c")
        fill(trio, OLD)
        trio.cut |= {"a"}
        trio.append(b"only on a")
        trio.kill("a")
        copied(trio, "a")
        trio.cut.clear()
        trio.clock.advance(TERM)
        trio.nodes["b"].promote()
        trio.start("a")
        trio.settled("a", "c", leader="b")
        fill(trio, NEW, on="b")
        trio.settled("a", "c", leader="b")
        trio.stop("a")
        restored(trio, "a")
        trio.settled("a", "c", leader="b")
        assert values(trio, "a") == OLD + NEW
        assert len(list((tmp_path / "a/quarantine").iterdir())) == 1
        trio.close()

    def test_is_not_promoted_by_itself_while_another_node_knows_that_more_was_committed(self, pair):
        fill(pair, OLD)
        pair.stop("b")
        copied(pair, "b")
        pair.start("b")
        pair.settled("b")
        fill(pair, NEW)
        pair.stop("b")
        pair.before["feed"] = lambda _: pair.cut.add("a")
        node = restored(pair, "b")
        pair.until(lambda: "a" in pair.cut)
        pair.kill("a")
        pair.clock.advance(TERM)
        with pytest.raises(NotReady, match="everything below 10, but everything below 20 was committed"):
            node.promote()


class TestAPrimary:
    def older(self, cluster):
        """Fill a primary, take a copy of its folder in between, as a volume's snapshot does, and stop it."""
        fill(cluster, OLD)
        copied(cluster, "a")
        fill(cluster, NEW)
        cluster.stop("a")

    def test_does_not_lead_while_a_replica_answers_that_has_more(self, pair):
        self.older(pair)
        node = restored(pair, "a")
        pair.step(200)
        assert not node.is_primary
        assert "b has more records (everything below 20, against 10)" in node.why_not_leading
        assert "Promote b; a then follows it" in node.why_not_leading
        pair.nodes["b"].promote()
        pair.settled("a", leader="b")
        assert values(pair, "a") == values(pair, "b") == OLD + NEW

    def test_of_an_earlier_term_than_its_last_does_not_lead_either(self, pair):
        fill(pair, OLD)
        pair.stop("a")
        copied(pair, "a")
        pair.start("a")
        pair.settled("b")
        fill(pair, NEW)
        pair.stop("a")
        node = restored(pair, "a")
        pair.step(200)
        assert not node.is_primary
        pair.nodes["b"].promote()
        pair.settled("a", leader="b")
        assert values(pair, "a") == OLD + NEW

    def test_does_not_lead_by_configuration_either(self, unleased):
        self.older(unleased)
        with pytest.raises(NotReady, match="b has more"):
            restored(unleased, "a", lead=True)

    def test_that_no_replica_could_warn_discards_nothing_of_theirs_and_reports_it(self, pair):
        self.older(pair)
        pair.kill("b")
        node = restored(pair, "a")
        pair.until(lambda: node.is_primary)
        pair.append(b"something else")
        replica = pair.start("b")
        pair.until(lambda: replica.condition == "diverged")
        assert "has led alone since term 1" in replica.node_folder.state.trouble.reason
        assert "was restored from an older copy" in replica.node_folder.state.trouble.reason
        assert values(pair, "b") == OLD + NEW
        pair.until(lambda: node.status().divergences == 1)
        # The replica is right: it leads by force, and what the other one has written since is in its quarantine.
        pair.stop("a")
        pair.clock.advance(TERM)
        with pytest.raises(NotReady, match="it is diverged: repair that first, or force it"):
            replica.promote()
        replica.promote(force=True)
        assert replica.node_folder.state.trouble is None
        pair.start("a")
        pair.settled("a", leader="b")
        assert values(pair, "a") == values(pair, "b") == OLD + NEW
        assert len(list((pair.folder / "a/quarantine").iterdir())) == 1

    def test_that_went_on_in_the_same_term_commits_nothing_by_a_replica_of_the_other_history(self, unleased):
        self.older(unleased)
        unleased.kill("b")
        node = restored(unleased, "a", lead=True)
        handles = [unleased.append(b"other %d" % number) for number in range(15)]  # past the end of the replica
        replica = unleased.start("b")
        unleased.until(lambda: replica.condition == "diverged")
        unleased.until(lambda: node.status().divergences == 1)
        assert node.primary.committed <= len(OLD)
        assert not any(handle.done() and isinstance(handle.result(0).outcome, Reached) for handle in handles)
        assert values(unleased, "b") == OLD + NEW
        # The replica is right. Terms do not tell where the two part: the other one takes a new copy.
        unleased.stop("a")
        replica.promote(force=True)
        unleased.names = "ba"  # the first one is whom the others follow
        former = unleased.start("a")
        unleased.until(lambda: former.condition == "diverged")
        former.rebootstrap()
        unleased.settled("a", leader="b")
        assert values(unleased, "a") == OLD + NEW

    def test_restarted_again_and_again_still_knows_which_terms_were_its_own(self, pair):
        self.older(pair)
        pair.kill("b")
        restored(pair, "a")
        for _ in range(3):
            pair.until(lambda: pair.nodes["a"].is_primary)
            pair.stop("a")
            pair.start("a")
        pair.until(lambda: pair.nodes["a"].is_primary)
        assert pair.nodes["a"].primary.term > 3
        replica = pair.start("b")
        pair.until(lambda: replica.condition == "diverged")
        assert values(pair, "b") == OLD + NEW

    def test_of_a_quorum_follows_the_node_that_has_everything_by_itself(self, tmp_path):
        trio = Cluster(tmp_path, automatic=True)
        trio.start("a", create=True)
        trio.until(lambda: trio.nodes["a"].is_primary)
        trio.start("b")
        trio.start("c")
        trio.settled("b", "c")
        fill(trio, OLD)
        trio.stop("a")
        copied(trio, "a")
        trio.until(lambda: any(trio.nodes[name].is_primary for name in "bc"))
        leader = next(name for name in "bc" if trio.nodes[name].is_primary)
        fill(trio, NEW, on=leader)
        restored(trio, "a")
        trio.settled("a", leader=leader)
        assert values(trio, "a") == OLD + NEW
        trio.close()

    def test_that_has_lost_nothing_leads_on_at_once(self, pair):
        fill(pair, OLD)
        pair.stop("a")
        node = pair.start("a")
        pair.until(lambda: node.is_primary, steps=200)
        assert node.report(Caller("", 0)).durable == 10
