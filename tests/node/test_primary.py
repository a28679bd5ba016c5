"""The primary: who replicates, how far each is, what is committed, and what may still be resumed."""

from __future__ import annotations

import inspect
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from prometheus_client import REGISTRY

from strandline.errors import (
    CommitTimedOut,
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    StorageError,
)
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync
from strandline.model.cursor import Bounds, Cursor
from strandline.model.retention import Consumed, InvalidReason, MaxAge, MaxBytes, SlotLimits
from strandline.node.lead import bootstrap_snapshots, replicas
from strandline.node.lead.bootstrap_snapshots import MOST_SNAPSHOTS, PIN_SECONDS
from strandline.node.lead.committed_log import CommittedLog
from strandline.node.lead.policies import AckN, FlowLimits, Local, Quorum, Regions
from strandline.node.lead.primary import PrimaryRole
from strandline.node.messages import Caller, NotRequired, Reached, ReplicaProgress, Rewind, TimedOut
from strandline.node.options import NodeOptions
from strandline.node.replicate.log_copy import KIND
from strandline.storage.clock import CLOCK
from tests.node.nodes_by_hand import Cluster, records

ONE = Caller("r1", 1)
TWO = Caller("r2", 1)


def led(tmp_path, policy="local", **options):
    """A node that leads without a lease, and the cluster it is in."""
    cluster = Cluster(tmp_path, policy=policy, leased=False, options=NodeOptions(**options))
    cluster.start("a", create=True, lead=True)
    return cluster, cluster.nodes["a"].primary


@pytest.fixture
def alone(tmp_path):
    cluster, primary = led(tmp_path)
    yield cluster, primary
    cluster.close()


@pytest.fixture
def primary(alone):
    return alone[1]


def at(primary, offset, term=1):
    return Cursor(primary.log.log_id, offset, term)


def fill(primary, count=10):
    for number in range(count):
        primary.append(records(f"{number}".encode()))


def kept(cluster):
    """For which replicas the primary keeps a snapshot."""
    return sorted(path.name for path in (cluster.folder / "a" / "snapshots").glob("*"))


class TestRegistering:
    def test_so_many_can_register_and_one_that_is_known_always_may(self, primary, monkeypatch):
        monkeypatch.setattr(replicas, "MOST_REPLICAS", 2)
        for caller in (ONE, TWO, ONE):
            primary.register(caller)
        for refused in (primary.register, lambda caller: primary.resume(caller, None)):
            with pytest.raises(Overloaded, match=r"2 replicas are registered, .* unregister those"):
                refused(Caller("r3", 1))
        assert [state.name for state in primary.log.slots.list()] == ["r1", "r2"]
        primary.unregister(TWO)
        primary.register(Caller("r3", 1))

    def test_a_new_replica_pins_the_log_where_it_ends_now(self, primary):
        fill(primary)
        registration = primary.register(ONE, region="eu")
        assert registration.position == 10
        assert primary.log.slots.floor() == 10
        fill(primary)
        assert primary.trim(20) == 10

    def test_coming_back_changes_nothing_but_when_it_was_seen(self, alone):
        cluster, primary = alone
        fill(primary)
        primary.register(ONE, region="eu")
        fill(primary)
        primary.acknowledge(ONE, ReplicaProgress(14, 13))
        epoch, before = primary.registry.epoch, primary.registry.replica("r1")
        cluster.clock.advance(3)
        assert primary.register(ONE).position == 13
        after = primary.registry.replica("r1")
        assert primary.registry.epoch == epoch
        assert after == replace(before, last_seen=before.last_seen + 3_000_000)
        assert primary.register(ONE, region="us").topology.members[0].region == "us"
        assert [slot.name for slot in primary.log.slots.list()] == ["r1"]

    def test_unregistering_drops_it_from_the_waiters_and_its_slot(self, primary):
        fill(primary)
        primary.register(ONE)
        primary.register(TWO)
        primary.acknowledge(ONE, ReplicaProgress(10, 10))
        assert primary.commit_watermark(1) == 10
        epoch = primary.registry.epoch
        primary.unregister(ONE, keep_slot=True)
        assert primary.commit_watermark(1) == 0
        primary.unregister(TWO)
        assert [slot.name for slot in primary.log.slots.list()] == ["r1"]
        assert primary.registry.epoch == epoch + 2
        with pytest.raises(NotFound):
            primary.unregister(Caller("nobody", 1))
        assert primary.registry.epoch == epoch + 2

    def test_replicas_are_known_again_after_the_primary_restarted(self, alone):
        cluster, primary = alone
        fill(primary)
        primary.register(ONE, region="eu")
        cluster.kill("a")
        again = cluster.start("a", lead=True).primary
        assert [(member.name, member.region, member.durable) for member in again.topology(ONE).members] == [
            ("r1", "eu", None)
        ]

    def test_silence_is_a_change_of_the_topology_and_so_is_the_next_acknowledgement(self, alone):
        cluster, primary = alone
        primary.register(ONE)
        epoch = primary.registry.epoch
        cluster.clock.advance(4.9)
        primary.tick()
        assert primary.registry.epoch == epoch
        cluster.clock.advance(0.2)
        primary.tick()
        primary.tick()
        assert primary.registry.epoch == epoch + 1
        assert not primary.topology(ONE).members[0].healthy
        primary.acknowledge(ONE, ReplicaProgress(0, 0))
        assert primary.registry.epoch == epoch + 2


class TestAcknowledging:
    def test_one_from_an_unknown_replica_is_an_error(self, primary):
        with pytest.raises(NotFound, match="'r1': it has to register first"):
            primary.acknowledge(ONE, ReplicaProgress(0, 0))

    def test_one_past_the_end_is_an_error_and_changes_nothing(self, primary):
        fill(primary)
        primary.register(ONE)
        with pytest.raises(Diverged, match="everything below 11, but the log ends at 10"):
            primary.acknowledge(ONE, ReplicaProgress(11, 0))
        assert primary.registry.replica("r1").applied is None

    def test_one_from_an_invalid_slot_counts_for_nothing_and_says_so(self, primary):
        primary.register(ONE)
        fill(primary)
        primary.log.trim(5, beyond_slots=True)
        answer = primary.acknowledge(ONE, ReplicaProgress(10, 10))
        assert "invalidated (wal-removed)" in answer.refused
        assert primary.registry.replica("r1").durable is None
        assert primary.commit_watermark(1) == 0

    def test_one_of_another_term_is_fenced(self, primary):
        primary.register(ONE)
        with pytest.raises(Fenced, match="acknowledges in term 0, but this primary leads in term 1"):
            primary.acknowledge(Caller("r1", 0), ReplicaProgress(0, 0))

    def test_a_caller_that_has_seen_a_higher_term_ends_this_one(self, primary):
        primary.register(ONE)
        with pytest.raises(Fenced, match="r1 has seen term 2"):
            primary.acknowledge(Caller("r1", 2), ReplicaProgress(0, 0))
        with pytest.raises(Fenced):
            primary.append(records(b"no"))

    def test_positions_go_forward_only_and_lag_and_safe_replay_follow(self, primary):
        primary.register(ONE)
        primary.register(TWO)
        fill(primary)
        feed = primary.feed(ONE, at(primary, 0))
        assert [batch.next for batch in feed.take(0)] == list(range(1, 11))
        assert primary.registry.lag == 10
        assert primary.registry.safe_replay == 0
        primary.acknowledge(ONE, ReplicaProgress(8, 7))
        primary.acknowledge(ONE, ReplicaProgress(6, 5))
        primary.acknowledge(TWO, ReplicaProgress(9, 9))
        assert (primary.registry.replica("r1").applied, primary.registry.replica("r1").durable) == (8, 7)
        assert primary.registry.lag == 2
        assert primary.registry.safe_replay == 7


class TestTelling:
    """Acknowledgements that ask for no answer: they count at once, and the slot follows."""

    def test_it_counts_at_once_and_the_slot_is_there_at_the_next_read(self, primary):
        fill(primary)
        primary.resume(ONE, at(primary, 0, term=0))
        handle = primary.submit(records(b"x"), policy=AckN(1))
        handle._handle.result()
        assert primary.acknowledge_nowait(ONE, ReplicaProgress(11, 11)) is None
        assert handle.done()
        assert primary.log.slots.floor() == 0
        primary.tick()
        assert primary.log.slots.floor() == 11

    def test_an_answered_one_moves_the_slot_itself(self, primary):
        fill(primary)
        primary.resume(ONE, at(primary, 0, term=0))
        primary.acknowledge_nowait(ONE, ReplicaProgress(7, 7))
        assert primary.acknowledge(ONE, ReplicaProgress(7, 7)).refused is None
        assert primary.log.slots.floor() == 7

    def test_a_replica_that_has_acknowledged_is_not_too_far_behind(self, tmp_path):
        cluster, primary = led(tmp_path, limits=SlotLimits(lag_bytes=2000))
        primary.register(ONE)
        for last in range(1, 21):
            primary.append(records(b"x" * 500))
            assert primary.acknowledge_nowait(ONE, ReplicaProgress(last, last)) is None
        primary.tick()
        primary.trim(20)
        assert [slot.invalid for slot in primary.log.slots.list()] == [None]
        assert primary.log.bounds().first == 20
        cluster.close()

    def test_acknowledged_records_can_be_trimmed_at_once(self, primary):
        fill(primary)
        primary.resume(ONE, at(primary, 0, term=0))
        primary.acknowledge_nowait(ONE, ReplicaProgress(7, 7))
        assert primary.trim(10) == 7

    def test_one_from_an_invalid_slot_counts_for_nothing_and_says_so(self, primary):
        fill(primary)
        primary.resume(ONE, at(primary, 0, term=0))
        primary.log.trim(5, beyond_slots=True)
        assert "invalidated (wal-removed)" in primary.acknowledge_nowait(ONE, ReplicaProgress(10, 10))
        assert primary.registry.replica("r1").durable is None

    def test_an_acknowledgement_from_before_a_resume_at_a_lower_offset_moves_nothing(self, primary):
        fill(primary)
        primary.resume(ONE, at(primary, 0, term=0))
        primary.acknowledge_nowait(ONE, ReplicaProgress(8, 8))
        primary.resume(ONE, at(primary, 5))
        primary.tick()
        assert primary.log.slots.floor() <= 5

    def test_nor_does_an_acknowledgement_from_before_a_bootstrap(self, primary):
        fill(primary)
        primary.resume(ONE, at(primary, 0, term=0))
        primary.acknowledge_nowait(ONE, ReplicaProgress(8, 8))
        primary.begin_snapshot(ONE, KIND)
        primary.tick()
        assert primary.log.slots.floor() == 0


class TestResuming:
    def test_at_its_own_position_whatever_its_slot_says(self, primary):
        fill(primary)
        primary.register(ONE)
        for position in (4, 10, 7):
            assert primary.resume(ONE, at(primary, position)) == PartialResync(at(primary, position))
            assert primary.log.slots.floor() == min(position, primary.log.slots.floor())

    def test_a_slot_that_had_advanced_pins_the_requested_records_again(self, primary):
        fill(primary)
        primary.register(ONE)
        primary.resume(ONE, at(primary, 3))
        assert primary.log.slots.floor() == 3
        assert primary.trim(10) == 3

    def test_one_first_seen_by_its_pull_is_pinned_where_it_asks(self, primary):
        fill(primary)
        assert primary.resume(ONE, at(primary, 6)) == PartialResync(at(primary, 6))
        assert primary.log.slots.floor() == 6

    def test_one_first_seen_below_what_is_retained_has_to_bootstrap(self, primary):
        fill(primary)
        primary.trim(5)
        assert primary.resume(ONE, at(primary, 4)) == FullRebootstrap(Cause.WAL_REMOVED)

    def test_one_without_a_position_is_new_even_if_its_slot_exists(self, primary):
        fill(primary)
        primary.register(ONE)
        assert primary.resume(ONE, None) == FullRebootstrap(Cause.NEW)

    @pytest.mark.parametrize(
        ("limits", "seconds", "cause"),
        [
            (SlotLimits(lag_bytes=1), 0, Cause.HORIZON),
            (SlotLimits(idle_seconds=60), 61, Cause.IDLE_TIMEOUT),
        ],
    )
    def test_a_slot_that_broke_a_limit_answers_so_until_a_bootstrap(self, tmp_path, limits, seconds, cause):
        cluster, primary = led(tmp_path, limits=limits)
        fill(primary)
        primary.register(ONE)
        fill(primary)
        cluster.clock.advance(seconds)
        primary.tick()
        for _ in range(2):
            assert primary.resume(ONE, at(primary, 20)) == FullRebootstrap(cause)
        assert primary.register(ONE).position is None
        offer = primary.begin_snapshot(ONE, KIND)
        assert primary.resume(ONE, at(primary, 20)) == FullRebootstrap(cause)
        primary.end_snapshot(ONE, at(primary, 20))
        assert primary.resume(ONE, at(primary, 20)) == PartialResync(at(primary, 20))
        assert offer.manifest
        cluster.close()

    def test_only_partial_resyncs_count_as_such(self, primary):
        def count():
            return REGISTRY.get_sample_value("strandline_partial_resyncs_total")

        fill(primary)
        before = count()
        primary.resume(ONE, None)
        assert count() == before
        primary.resume(ONE, at(primary, 1))
        assert count() == before + 1

    def test_a_cursor_of_another_log_diverged(self, primary):
        with pytest.raises(Diverged):
            primary.resume(ONE, Cursor(UUID(int=1), 0))

    def test_a_position_past_the_end_in_this_very_term_diverged(self, primary):
        fill(primary)
        with pytest.raises(Diverged, match="does not have"):
            primary.resume(ONE, at(primary, 11))

    def test_a_position_of_an_earlier_term_that_is_not_here_has_to_go_back(self, alone):
        cluster, primary = alone
        fill(primary, 3)
        cluster.nodes["a"].node_folder.remember(seen=2)
        cluster.nodes["a"]._step_down(primary, "it is elected again")
        cluster.nodes["a"]._lead(3, continues=False)
        later = cluster.nodes["a"].primary
        fill(later, 2)
        caller = Caller("r1", 3)
        assert later.resume(caller, at(later, 5, term=2)) == Rewind(3, 1)
        assert later.resume(caller, at(later, 3, term=1)) == PartialResync(at(later, 3, term=1))
        assert later.resume(caller, at(later, 9, term=1)) == Rewind(3, 1)

    def test_a_slot_that_was_put_back_and_not_claimed_is_claimed_by_the_next_report(self, primary, monkeypatch):
        fill(primary)
        primary.register(ONE)
        with monkeypatch.context() as failing:
            failing.setattr(primary.log.slots, "claim", lambda *_, **__: (_ for _ in ()).throw(StorageError("no")))
            with pytest.raises(StorageError):
                primary.resume(ONE, at(primary, 3))
        assert primary.resume(ONE, at(primary, 3)) == PartialResync(at(primary, 3))
        assert primary.acknowledge(ONE, ReplicaProgress(5, 5)).refused is None
        assert primary.log.slots.floor() == 5


class TestKeeping:
    def test_trimming_what_was_archived_stops_at_the_floor_and_says_where(self, primary):
        primary.register(ONE)
        fill(primary)
        primary.acknowledge(ONE, ReplicaProgress(6, 4))
        assert primary.trim(9) == 4
        assert primary.log.bounds() == Bounds(4, 10)

    def test_a_limit_is_enforced_before_a_trim(self, tmp_path):
        cluster, primary = led(tmp_path, limits=SlotLimits(lag_bytes=1))
        primary.register(ONE)
        fill(primary)
        assert primary.trim(9) == 9
        assert [slot.invalid.reason for slot in primary.log.slots.list()] == [InvalidReason.HORIZON]
        cluster.close()

    @pytest.mark.parametrize("retention", [MaxBytes(1000), MaxAge(1)])
    def test_one_that_never_comes_holds_nothing_back_for_ever_where_retention_is_bounded(
        self, tmp_path, monkeypatch, retention
    ):
        monkeypatch.setattr("strandline.model.retention.DEFAULT_LAG", 4000)
        cluster, primary = led(tmp_path, retention=retention)
        primary.register(ONE)
        fill(primary, 100)
        cluster.clock.advance(5)
        primary.tick()
        assert primary.replicas.slot("r1").invalid.reason is InvalidReason.HORIZON
        assert primary.log.bounds().first > 0
        cluster.close()

    def test_the_usual_limits_are_those_of_any_slot_unless_others_are_given(self):
        assert NodeOptions(retention=MaxAge(1)).slot_limits == SlotLimits(lag_bytes=64 << 30)
        assert NodeOptions().slot_limits == SlotLimits()
        assert NodeOptions(retention=MaxAge(1), limits=SlotLimits()).slot_limits == SlotLimits()

    def test_the_sweep_forgets_what_everybody_has(self, tmp_path):
        cluster, primary = led(tmp_path, retention=Consumed())
        primary.register(ONE)
        fill(primary)
        primary.acknowledge(ONE, ReplicaProgress(7, 7))
        primary.tick()
        assert primary.log.bounds().first == 7
        cluster.close()


class TestCommitting:
    def test_the_policy_local_waits_for_no_replica(self, primary):
        commit = primary.append(records(b"x"))
        assert commit.outcome == NotRequired()
        assert commit.ensure().first == 0
        assert primary.committed == 1

    def test_ack_n_counts_replicas_that_have_acknowledged(self, primary):
        primary.register(ONE)
        primary.register(TWO)
        handle = primary.submit(records(b"x"), policy=AckN(1))
        commit = handle.result(0.0)
        assert commit.outcome == TimedOut(0, "ack_n(1)", 0.0)
        with pytest.raises(
            CommitTimedOut, match=r"durable on the primary, but ack_n\(1\) was not satisfied within 0 s"
        ):
            commit.ensure()
        primary.acknowledge(ONE, ReplicaProgress(1, 0))
        assert not handle.done(), "applied is not durable"
        primary.acknowledge(TWO, ReplicaProgress(1, 1))
        assert handle.result(0.0).outcome == Reached(1)

    def test_the_timeout_is_five_seconds_by_default(self):
        assert inspect.signature(PrimaryRole.append).parameters["timeout"].default == 5.0

    def test_an_impossible_policy_fails_before_anything_is_written(self, primary):
        primary.register(ONE)
        for policy in (AckN(2), Quorum(frozenset({"x", "y"})), Regions((("eu", 1),))):
            with pytest.raises(InvalidInput):
                primary.append(records(b"x"), policy=policy)
        with pytest.raises(NotReady, match="only 1 of them have registered yet: nothing was written"):
            primary.append(records(b"x"), policy=Quorum(frozenset({"a", "x", "y"})))
        assert primary.log.bounds() == Bounds(0, 0)

    def test_a_request_may_ask_for_more_and_not_for_less(self, tmp_path):
        cluster, primary = led(tmp_path, policy="ack_n(1)")
        primary.register(ONE)
        primary.register(TWO)
        handle = primary.submit(records(b"x"), policy=Local())
        stronger = primary.submit(records(b"y"), policy=AckN(2))
        handle._handle.result()
        stronger._handle.result()
        assert not handle.done()
        primary.acknowledge(ONE, ReplicaProgress(2, 2))
        assert handle.done()
        assert not stronger.done()
        primary.acknowledge(TWO, ReplicaProgress(2, 2))
        assert stronger.done()
        cluster.close()

    def test_readers_see_up_to_the_watermark_and_replicas_to_the_durable_end(self, tmp_path):
        cluster, primary = led(tmp_path, policy="ack_n(1)")
        primary.register(ONE)
        primary.submit(records(b"x"))._handle.result()
        reading = CommittedLog(primary.watermark.readable, lambda: None)
        assert reading.bounds() == Bounds(0, 0)
        assert reading.plan(reading.start()) == []
        assert reading.plan(at(primary, 1)) == [], "it was further elsewhere, and waits"
        assert len(primary.feed(ONE, at(primary, 0)).take(0)) == 1
        primary.acknowledge(ONE, ReplicaProgress(1, 1))
        assert reading.wait(reading.start(), 0)
        assert [batch.num_rows for batch in reading.read()] == [1]
        cluster.close()

    def test_a_time_is_looked_for_among_committed_records_only(self, tmp_path):
        cluster, primary = led(tmp_path, policy="ack_n(1)")
        primary.register(ONE)
        primary.submit(records(b"x"))._handle.result()
        reading = CommittedLog(primary.watermark.readable, lambda: None)
        later = datetime.now(UTC) + timedelta(days=365)
        assert reading.position_of(later) == 0, "nothing is committed"
        primary.acknowledge(ONE, ReplicaProgress(1, 1))
        assert reading.position_of(later) == 1
        assert reading.position_of(datetime(2000, 1, 1, tzinfo=UTC)) == 0
        cluster.close()

    def test_a_replica_without_what_was_before_the_term_counts_for_nothing(self, alone):
        cluster, primary = alone
        primary.register(ONE)
        fill(primary, 3)
        cluster.nodes["a"].node_folder.remember(seen=2)
        cluster.nodes["a"]._step_down(primary, "it is elected again")
        cluster.nodes["a"]._lead(3, continues=False)
        later = cluster.nodes["a"].primary
        caller = Caller("r1", 3)
        later.register(caller)
        later.acknowledge(caller, ReplicaProgress(2, 2))
        assert later.commit_watermark(1) == 0
        later.acknowledge(caller, ReplicaProgress(3, 3))
        assert later.commit_watermark(1) == 3

    def test_waits_for_a_commit_end_when_this_node_leads_no_more(self, primary):
        primary.register(ONE)
        handle = primary.submit(records(b"x"), policy=AckN(1))
        handle._handle.result()
        primary.step_down("somebody else leads")
        assert handle.done()
        began = CLOCK.monotonic()
        with pytest.raises(Fenced, match="may be lost in a failover"):
            handle.result(120.0)
        assert not primary.watermark._wait_committed(5, 120.0)
        assert CLOCK.monotonic() - began < 120.0, "what is done does not block"

    def test_trims_nothing_when_this_node_leads_no_more_or_steps_down_meanwhile(self, primary, monkeypatch):
        fill(primary, 3)
        move_slots = primary.replicas.move_slots

        def steps_down() -> None:  # as the control thread does
            primary.step_down("somebody else leads")
            primary.log.close()
            move_slots()

        monkeypatch.setattr(primary.replicas, "move_slots", steps_down)
        for _ in range(2):
            with pytest.raises(Fenced, match="nothing was deleted"):
                primary.trim(2)
        assert primary.log.bounds() == Bounds(0, 3)

    def test_a_slot_that_is_changed_while_this_node_steps_down_is_worth_another_try(self, primary):
        fill(primary, 3)
        slots = primary.slots
        slots.create("billing", 0)
        primary.log.close()
        for change in (lambda: slots.create("other", 0), lambda: slots.claim("billing", "x"), slots.flush):
            with pytest.raises(NotReady, match="not the primary any more"):
                change()


class TestFlow:
    def test_writers_are_slowed_and_then_refused_while_a_replica_is_behind(self, tmp_path):
        cluster, primary = led(tmp_path, flow=FlowLimits(slow_at=2, refuse_at=6, longest=1.0))
        primary.register(ONE)
        primary.acknowledge(ONE, ReplicaProgress(0, 0))
        began = cluster.clock.monotonic()
        fill(primary, 2)
        assert cluster.clock.monotonic() == began
        fill(primary, 4)
        assert 0.5 < cluster.clock.monotonic() - began < 4
        with pytest.raises(Overloaded, match="6 records behind"):
            primary.append(records(b"x"))
        assert primary.log.bounds().next == 6
        primary.acknowledge(ONE, ReplicaProgress(6, 6))
        primary.append(records(b"x"))
        cluster.close()

    def test_flow_control_is_off_by_default(self, primary):
        primary.register(ONE)
        primary.acknowledge(ONE, ReplicaProgress(0, 0))
        fill(primary, 50)
        assert primary.log.bounds().next == 50


class TestSnapshots:
    def test_a_snapshot_is_pinned_until_the_bootstrap_is_over(self, primary):
        fill(primary)
        primary.register(ONE)
        primary.log.slots.invalidate("r1", InvalidReason.IDLE_TIMEOUT)
        primary.begin_snapshot(ONE, KIND)
        fill(primary)
        assert primary.trim(20) == 10
        primary.end_snapshot(ONE, at(primary, 10))
        assert primary.trim(20) == 10
        primary.acknowledge(ONE, ReplicaProgress(20, 20))
        assert primary.trim(20) == 20

    def test_asking_again_gives_the_same_one_even_after_a_restart(self, alone):
        cluster, primary = alone
        fill(primary)
        primary.register(ONE)
        offer = primary.begin_snapshot(ONE, KIND)
        fill(primary)
        assert primary.begin_snapshot(ONE, KIND) == offer
        cluster.kill("a")
        again = cluster.start("a", lead=True).primary
        again.register(ONE)
        assert again.begin_snapshot(ONE, KIND) == offer

    def test_one_that_nobody_brings_over_goes_with_its_pin_after_a_while_and_is_taken_anew(self, alone):
        cluster, primary = alone
        fill(primary)
        primary.register(ONE)
        primary.log.slots.invalidate("r1", InvalidReason.IDLE_TIMEOUT)
        offer = primary.begin_snapshot(ONE, KIND)
        fill(primary)
        cluster.clock.advance(PIN_SECONDS - 1)
        list(primary.chunks(ONE, offer.name, "log.json", 0))
        cluster.clock.advance(PIN_SECONDS - 1)
        primary.tick()
        assert (primary.log.slots.floor(), kept(cluster)) == (10, ["r1"]), "it was asked for meanwhile"
        cluster.clock.advance(2)
        primary.tick()
        primary.tick()
        assert (primary.log.slots.floor(), kept(cluster)) == (None, [])
        with pytest.raises(NotFound, match="begin another"):
            list(primary.chunks(ONE, offer.name, "log.json", 0))
        assert primary.begin_snapshot(ONE, KIND) != offer
        assert primary.log.slots.floor() == 20

    def test_one_that_is_left_by_a_primary_that_was_killed_goes_too(self, alone):
        cluster, primary = alone
        fill(primary)
        primary.register(ONE)
        primary.begin_snapshot(ONE, KIND)
        cluster.kill("a")
        again = cluster.start("a", lead=True).primary
        cluster.clock.advance(PIN_SECONDS + 1)
        again.tick()
        again.tick()
        assert ([state.name for state in again.log.slots.list()], kept(cluster)) == (["r1"], [])

    def test_one_that_takes_long_to_be_sealed_keeps_its_pin(self, alone, monkeypatch):
        cluster, primary = alone
        fill(primary)
        primary.register(ONE)
        seal = bootstrap_snapshots.export_log

        def slow(*arguments, **options):
            for _ in range(4):
                cluster.clock.advance(PIN_SECONDS / 2)
                primary.tick()
            return seal(*arguments, **options)

        monkeypatch.setattr(bootstrap_snapshots, "export_log", slow)
        offer = primary.begin_snapshot(ONE, KIND)
        assert primary.begin_snapshot(ONE, KIND) == offer

    def test_the_number_of_snapshots_is_limited_and_the_next_replica_is_refused(self, alone):
        cluster, primary = alone
        fill(primary)
        many = [Caller(f"r{number}", 1) for number in range(MOST_SNAPSHOTS + 1)]
        for caller in many:
            primary.register(caller)
        for caller in many[:-1]:
            primary.begin_snapshot(caller, KIND)
        with pytest.raises(Overloaded, match="8 replicas are bootstrapping"):
            primary.begin_snapshot(many[-1], KIND)
        assert len(kept(cluster)) == MOST_SNAPSHOTS
        primary.begin_snapshot(many[0], KIND)
        primary.end_snapshot(many[0], at(primary, 10))
        primary.begin_snapshot(many[-1], KIND)

    def test_no_other_file_can_be_asked_for(self, primary):
        fill(primary)
        primary.register(ONE)
        offer = primary.begin_snapshot(ONE, KIND)
        for path in ("../MANIFEST.json", "/etc/passwd", "nothing", ""):
            with pytest.raises(NotFound):
                list(primary.chunks(ONE, offer.name, path, 0))
        with pytest.raises(NotFound, match="begin another"):
            list(primary.chunks(ONE, "other", "log.json", 0))
        with pytest.raises(InvalidInput, match="no snapshots of kind 'table'"):
            primary.begin_snapshot(ONE, "table")

    def test_a_replica_that_bootstraps_counts_for_nothing_and_the_topology_says_so(self, primary):
        fill(primary)
        primary.register(ONE)
        primary.acknowledge(ONE, ReplicaProgress(10, 10))
        epoch = primary.registry.epoch
        primary.begin_snapshot(ONE, KIND)
        member = primary.topology(ONE).members[0]
        assert (member.bootstrapping, member.durable) == (True, None)
        assert primary.registry.epoch == epoch + 1
        primary.end_snapshot(ONE, at(primary, 10))
        assert not primary.topology(ONE).members[0].bootstrapping
        assert primary.registry.epoch == epoch + 2
