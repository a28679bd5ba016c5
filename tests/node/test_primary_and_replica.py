"""Primary and replica as users open them: real sockets, real folders, one process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import CommitTimedOut, Diverged, Fenced, InvalidInput, NotReady, Overloaded
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync
from strandline.node.api import Primary, Replica
from strandline.node.lead.committed_log import CommittedLog
from strandline.node.messages import NotRequired, Reached, TimedOut

WAIT = 120.0


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[Primary]:
    with Primary.open(tmp_path / "a", name="a", poll_seconds=0.2) as primary:
        yield primary


@pytest.fixture
def replica(primary: Primary, tmp_path: Path) -> Iterator[Replica]:
    more = {"name": "b", "region": "eu", "nodes": {"a": primary.url}, "poll_seconds": 0.2}
    with Replica.open(tmp_path / "b", primary.url, **more) as replica:
        assert replica.wait_until(lambda: replica.condition == "following", WAIT)
        yield replica


def values(log: sl.Log) -> list[bytes]:
    return [value for batch in log.read() for value in batch.column("value").to_pylist()]


class TestPrimary:
    def test_an_append_is_durable_when_it_returns_and_there_after_opening_again(self, tmp_path):
        with Primary.open(tmp_path / "a") as primary:
            commit = primary.append_values([b"1", b"2"])
            assert commit.outcome == NotRequired()
            assert (commit.bookmark.next, commit.bookmark.term) == (2, 1)
        with Primary.open(tmp_path / "a") as primary:
            assert values(primary.reading()) == [b"1", b"2"]

    def test_a_submitted_append_has_its_result_later(self, primary):
        handle = primary.submit(pa.table({"value": pa.array([b"1"], pa.binary())}))
        assert handle.result(WAIT).ensure() == sl.log.Receipt(0, 1)

    def test_a_repeated_append_is_found_again_with_its_bookmark(self, primary):
        batch = pa.table({"value": pa.array([b"1"], pa.binary())})
        writer = sl.log.WriterId(primary.reading().log_id)
        first = primary.append(batch, writer=writer, number=0)
        primary.append_values([b"2"])
        again = primary.append(batch, writer=writer, number=0)
        assert values(primary.reading()) == [b"1", b"2"]
        assert again.bookmark.next >= first.bookmark.next

    def test_an_append_waits_for_a_stronger_policy_and_reports_a_timeout(self, primary):
        primary.register_replica("absent")
        commit = primary.append_values([b"1"], policy="ack_n(1)", timeout=0.05)
        assert isinstance(commit.outcome, TimedOut)
        with pytest.raises(CommitTimedOut):
            commit.ensure()

    def test_an_impossible_policy_writes_nothing(self, primary):
        with pytest.raises(InvalidInput):
            primary.append_values([b"1"], policy="ack_n(1)")
        assert primary.committed == 0

    def test_registering_returns_the_slots_position_and_repeating_it_changes_nothing(self, primary):
        primary.append_values([b"1", b"2"])
        assert primary.register_replica("b", "eu") == 2
        before = primary.topology()
        primary.append_values([b"3"])
        assert primary.register_replica("b") == 2
        after = primary.topology()
        assert (after.epoch, [member.region for member in after.members]) == (before.epoch, ["eu"])

    def test_unregistering_drops_the_slot_unless_it_is_kept(self, primary):
        for name in ("b", "c"):
            primary.register_replica(name)
        primary.append_values([b"1", b"2"])
        primary.unregister_replica("c")
        with pytest.raises(sl.errors.NotFound, match=r"no replica 'nobody': nothing was changed\. Registered: b"):
            primary.unregister_replica("nobody")
        primary.unregister_replica("b", keep_slot=True)
        assert primary.topology().members == ()
        assert primary.trim(2) == 0
        primary.unregister_replica("b")
        assert primary.trim(2) == 2

    def test_resuming_is_planned_from_the_replicas_own_position(self, primary):
        commit = primary.append_values([b"1", b"2"])
        assert primary.plan_resume("b", None) == FullRebootstrap(Cause.NEW)
        assert primary.plan_resume("c", commit.bookmark) == PartialResync(commit.bookmark)

    def test_planning_a_resume_changes_neither_the_registry_nor_the_slots(self, primary, replica):
        commit = primary.append_values([b"1", b"2"])
        replica.reading(after=commit.bookmark, timeout=WAIT)
        assert replica.wait_until(lambda: primary.commit_watermark(1) == 2, WAIT)
        role = primary.node.primary
        assert replica.wait_until(lambda: role.replicas.slot("b").position == 2, WAIT)

        def looked_at():
            member = primary.topology().members[0]
            names = [slot.name for slot in role.log.slots.list()]
            return names, role.replicas.slot("b").position, member.durable, member.bootstrapping

        before = looked_at()
        assert primary.plan_resume("b", None) == FullRebootstrap(Cause.NEW)
        assert isinstance(primary.plan_resume("b", role.log.start()), PartialResync)
        assert isinstance(primary.plan_resume("misspelt", None), FullRebootstrap)
        with pytest.raises(Diverged):
            primary.plan_resume("b", commit.bookmark.at(9))
        assert looked_at() == before == (["b"], 2, 2, False)
        assert [member.name for member in primary.topology().members] == ["b"]

    def test_flow_limits_refuse_writers_while_a_replica_is_too_far_behind(self, tmp_path):
        with Primary.open(tmp_path / "a", flow=sl.node.FlowLimits(refuse_at=2)) as primary:
            with Replica.open(tmp_path / "b", primary.url, name="b", poll_seconds=0.2) as replica:
                replica.reading(after=primary.append_values([b"1"]).bookmark, timeout=WAIT)
                assert replica.wait_until(lambda: primary.commit_watermark(1) == 1, WAIT)
            primary.append_values([b"2", b"3"])
            with pytest.raises(Overloaded):
                primary.append_values([b"4"])

    def test_one_that_another_node_has_replaced_does_not_open_as_the_primary(self, primary, replica, tmp_path):
        replica.promote()
        primary.close()
        with pytest.raises(Fenced, match="another node was promoted"):
            Primary.open(tmp_path / "a", name="a")

    def test_with_a_lease_that_another_node_holds_opening_names_the_primary(self, tmp_path):
        lease = {"lease": f"file://{tmp_path}/lease", "lease_seconds": 1.0}
        with Primary.open(tmp_path / "a", name="a", **lease):
            with Replica.open(tmp_path / "b", name="b", **lease) as replica:
                assert replica.wait_until(lambda: replica.condition == "following", WAIT)
            with pytest.raises(NotReady, match="b is a replica of a, which leads"):
                Primary.open(tmp_path / "b", name="b", create=False, timeout=WAIT, **lease)

    def test_one_that_was_put_back_from_an_older_copy_says_how_it_leads_again(self, tmp_path):
        lease = {"lease": f"file://{tmp_path}/lease", "poll_seconds": 0.2}
        Primary.open(tmp_path / "a", name="a", **lease).close()
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        Primary.open(tmp_path / "a", name="a", **lease).close()  # of the next term, which the copy does not know
        with pytest.raises(NotReady, match="led last; find that node, or open this one as a replica and promote it"):
            Primary.open(tmp_path / "copy", name="a", timeout=1, **lease)
        with Replica.open(tmp_path / "copy", name="a", **lease) as again:
            assert again.promote().append_values([b"v"]).outcome == NotRequired()


class TestReplica:
    def test_a_write_is_read_on_the_replica_behind_its_bookmark(self, primary, replica):
        for number in range(20):
            commit = primary.append_values([b"%d" % number])
            assert values(replica.reading(after=commit.bookmark, timeout=WAIT))[-1] == b"%d" % number
        assert replica.position == commit.bookmark
        assert replica.committed == 20

    def test_a_bookmark_that_is_not_there_in_time_is_not_ready(self, primary, replica):
        commit = primary.append_values([b"1"])
        with pytest.raises(NotReady, match="is not here yet"):
            replica.reading(after=commit.bookmark.at(9), timeout=0.05)

    def test_one_that_follows_is_fresh(self, primary, replica):
        assert values(replica.reading(max_staleness=10.0, timeout=WAIT)) == []

    def test_before_its_first_bootstrap_it_has_no_position_and_serves_nothing(self, tmp_path):
        with Replica.open(tmp_path / "b", "grpc://127.0.0.1:9", name="b") as replica:
            assert replica.position is None
            with pytest.raises(NotReady, match="no copy of the log yet"):
                replica.reading()

    def test_it_counts_for_the_policy(self, primary, replica):
        commit = primary.append_values([b"1"], policy="regions(eu=1)", timeout=WAIT)
        assert commit.outcome == Reached(1)
        assert primary.commit_watermark(1) == 1

    def test_promoted_it_goes_on_from_what_it_has_and_appends(self, primary, replica):
        first = primary.append_values([b"1"])
        replica.reading(after=first.bookmark, timeout=WAIT)
        leading = replica.promote()
        second = leading.append_values([b"2"])
        assert second.bookmark.next == 2
        assert second.bookmark.term > first.bookmark.term
        assert values(replica.reading(after=second.bookmark)) == [b"1", b"2"]
        with pytest.raises((Fenced, NotReady)):
            primary.append_values([b"3"])

    def test_an_append_that_is_repeated_on_the_new_primary_has_the_bookmark_of_the_first(self, primary, replica):
        batch = pa.table({"value": pa.array([b"1"], pa.binary())})
        writer = sl.log.WriterId(primary.reading().log_id)
        first = primary.append(batch, writer=writer, number=0)
        replica.reading(after=first.bookmark, timeout=WAIT)
        again = replica.promote().append(batch, writer=writer, number=0)
        assert again.bookmark == first.bookmark
        assert values(replica.reading(after=again.bookmark)) == [b"1"]

    def test_a_bookmark_of_a_record_that_was_lost_is_diverged_on_the_new_primary(self, primary, replica):
        first = primary.append_values([b"1"])
        replica.reading(after=first.bookmark, timeout=WAIT)
        leading = replica.promote()
        leading.append_values([b"2"])
        lost = sl.Cursor(first.bookmark.log_id, 2, first.bookmark.term)
        with pytest.raises(Diverged):
            replica.reading(after=lost)

    def test_it_is_refused_without_the_primary_and_forced_it_leads(self, primary, replica):
        primary.append_values([b"1"], policy="ack_n(1)", timeout=WAIT)
        primary.close()
        with pytest.raises(NotReady, match="Force it to accept that"):
            replica.promote()
        assert replica.promote(force=True).committed == 1

    def test_it_builds_its_copy_again_and_goes_on(self, primary, replica):
        replica.reading(after=primary.append_values([b"1"]).bookmark, timeout=WAIT)
        replica.rebootstrap()
        later = primary.append_values([b"2"])
        assert values(replica.reading(after=later.bookmark, timeout=WAIT)) == [b"1", b"2"]
        assert replica.trouble is None


def test_any_log_follower_follows_what_a_node_has_committed(primary, replica):
    store = sl.followers.MemoryStore()
    commit = primary.append(pa.table({"key": pa.array([b"k"], pa.binary()), "value": pa.array([b"v"], pa.binary())}))
    log = replica.reading(after=commit.bookmark, timeout=WAIT)
    assert sl.follow(log, store, start="beginning", upto="end").next == 1
    assert store.get(b"k") == b"v"


def test_a_bookmark_that_arrives_with_a_new_copy_is_read_there(primary, replica):
    first = primary.append_values([b"1"])
    replica.reading(after=first.bookmark, timeout=WAIT)
    running, role = replica, replica.node.replica
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(role.watermark.readable, after=first.bookmark.at(2), timeout=WAIT)
        assert running.wait_until(lambda: bool(role.watermark._changed._waiters), WAIT)
        before = running.node.node_folder.state.generation
        replica.rebootstrap()
        assert running.wait_until(lambda: running.node.node_folder.state.generation > before, WAIT)
        primary.append_values([b"2"])
        assert values(CommittedLog(lambda: waiting.result(WAIT), lambda: None)) == [b"1", b"2"]


class TestReadingOn:
    """Who reads on and on does not notice what the node is meanwhile."""

    def test_a_log_that_was_opened_on_a_replica_goes_on_when_that_is_promoted(self, primary, replica):
        first = primary.append_values([b"1"])
        log = replica.reading(after=first.bookmark, timeout=WAIT)
        leading = replica.promote()
        leading.append_values([b"2"])
        assert log.wait(first.bookmark, WAIT)
        assert values(log) == [b"1", b"2"]

    def test_a_stream_goes_on_when_the_replica_builds_its_copy_again(self, primary, replica):
        primary.append_values([b"1"])
        with sl.node.RemoteLog(replica.url) as remote:
            stream = remote.read(follow=True)
            assert next(stream).column("value").to_pylist() == [b"1"]
            before = replica.node.node_folder.state.generation
            replica.rebootstrap()
            home = replica.node.node_folder
            assert replica.wait_until(lambda: home.state.generation > before, WAIT)
            primary.append_values([b"2"])
            assert next(stream).column("value").to_pylist() == [b"2"]
            stream.close()


class TestAPrimaryThatIsItsOnlyVoter:
    """Nobody else has to speak: what is durable there is committed."""

    def test_a_primary_that_is_the_only_voter_commits_at_once(self, tmp_path):
        with Primary.open(tmp_path / "a", name="a", policy="quorum(a)") as primary:
            for number in range(3):
                commit = primary.append_values([b"%d" % number], timeout=2.0)
                assert commit.outcome == Reached(number + 1)
            assert primary.committed == 3

    def test_wakes_its_readers_at_once(self, tmp_path):
        with Primary.open(tmp_path / "a", name="a", policy="quorum(a)") as primary:
            log = primary.reading()
            past = log.end()
            with ThreadPoolExecutor(1) as pool:
                woken = pool.submit(log.wait, past, 30.0)
                primary.append_values([b"one"])
                assert woken.result(120.0) is True

    def test_meets_what_a_request_asks_for_besides(self, tmp_path):
        with Primary.open(tmp_path / "a", name="a") as primary:
            commit = primary.append_values([b"one"], policy="quorum(a)", timeout=2.0)
            assert commit.outcome == Reached(1)
