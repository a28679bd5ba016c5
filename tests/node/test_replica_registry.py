"""The registry of replicas: what each event changes, and what it leaves alone."""

from __future__ import annotations

import pytest

from strandline.errors import Diverged, InvalidInput, NotFound
from strandline.model.cursor import SECOND
from strandline.node.lead.policies import AckN, watermark
from strandline.node.lead.replicas import (
    ReplicaProgress,
    ReplicaRegistry,
    acknowledged,
    bootstrapping,
    judge_health,
    register,
    sent_upto,
    unregister,
)

END = 100


@pytest.fixture
def two() -> ReplicaRegistry:
    """Replicas a and b; a has applied 50 and made 40 durable, b has not said anything."""
    registry = register(ReplicaRegistry(), "a", region="eu", now=1)
    registry = register(registry, "b", region=None, now=2)
    return acknowledged(registry, "a", ReplicaProgress(50, 40), end=END, now=3)


def test_registering_again_refreshes_and_changes_nothing_else(two: ReplicaRegistry) -> None:
    again = register(two, "a", region=None, now=9)
    assert again.epoch == two.epoch == 2
    assert len(again.replicas) == 2
    replica = again.replica("a")
    assert (replica.last_seen, replica.connected_at, replica.region) == (9, 1, "eu")
    assert (replica.applied, replica.durable) == (50, 40)
    assert register(two, "a", region="us", now=9).replica("a").region == "us"


def test_unregistering_forgets_a_replica_and_an_unknown_one_is_a_no_op(two: ReplicaRegistry) -> None:
    gone = unregister(two, "a")
    assert set(gone.replicas) == {"b"}
    assert gone.epoch == two.epoch + 1
    assert unregister(gone, "a") is gone


def test_a_replica_needs_a_name() -> None:
    with pytest.raises(InvalidInput):
        register(ReplicaRegistry(), "", region=None, now=0)


def test_positions_and_counts_only_go_forward(two: ReplicaRegistry) -> None:
    later = acknowledged(two, "a", ReplicaProgress(60, 60, apply_errors=2, divergences=1), end=END, now=4)
    earlier = acknowledged(later, "a", ReplicaProgress(55, 50, apply_errors=1), end=END, now=5)
    assert earlier.replica("a").applied == earlier.replica("a").durable == 60
    assert (earlier.replica("a").apply_errors, earlier.replica("a").divergences) == (2, 1)
    assert sent_upto(sent_upto(two, "a", 70), "a", 60).replica("a").sent == 70


def test_a_newcomer_counts_for_nothing_before_its_first_acknowledgement(two: ReplicaRegistry) -> None:
    assert watermark(AckN(1), two.durable_offsets("p", END)) == 40
    assert watermark(AckN(2), two.durable_offsets("p", END)) == 0
    assert two.safe_replay == 0
    both = acknowledged(two, "b", ReplicaProgress(30, 30), end=END, now=4)
    assert watermark(AckN(2), both.durable_offsets("p", END)) == 30
    assert both.safe_replay == 30


def test_the_lag_is_from_the_most_that_was_sent_to_the_least_that_was_applied(two: ReplicaRegistry) -> None:
    both = acknowledged(sent_upto(two, "a", 80), "b", ReplicaProgress(30, 10), end=END, now=4)
    assert both.lag == 50
    assert ReplicaRegistry().lag == 0
    assert ReplicaRegistry().safe_replay is None


def test_an_acknowledgement_of_a_stranger_or_past_the_end_is_an_error(two: ReplicaRegistry) -> None:
    with pytest.raises(NotFound, match="register"):
        acknowledged(two, "c", ReplicaProgress(1, 1), end=END, now=4)
    with pytest.raises(Diverged, match="101"):
        acknowledged(two, "a", ReplicaProgress(101, 50), end=END, now=4)
    with pytest.raises(InvalidInput):
        ReplicaProgress(10, 11)


def test_each_real_change_of_the_topology_raises_its_epoch_once(two: ReplicaRegistry) -> None:
    begun = bootstrapping(two, "a", flag=True)
    assert begun.epoch == two.epoch + 1
    assert bootstrapping(begun, "a", flag=True).epoch == begun.epoch
    assert bootstrapping(begun, "a", flag=False).epoch == begun.epoch + 1


@pytest.mark.parametrize(("poll", "patience"), [(1.0, 5), (2.0, 6), (10.0, 30), (0.01, 5)])
def test_a_replica_is_unhealthy_after_three_silent_polls_and_at_least_five_seconds(
    two: ReplicaRegistry, poll: float, patience: int
) -> None:
    seen = register(two, "b", region=None, now=1000 * SECOND)
    at_first = judge_health(seen, poll_seconds=poll, now=3 + patience * SECOND)
    assert at_first.replica("a").healthy
    assert at_first.epoch == seen.epoch
    silent = judge_health(seen, poll_seconds=poll, now=4 + patience * SECOND)
    assert not silent.replica("a").healthy
    assert silent.replica("b").healthy
    assert silent.epoch == seen.epoch + 1
    assert judge_health(silent, poll_seconds=poll, now=9 + patience * SECOND).epoch == silent.epoch


def test_a_replica_that_acknowledges_again_is_healthy_again(two: ReplicaRegistry) -> None:
    silent = judge_health(two, poll_seconds=1.0, now=1000 * SECOND)
    for back in (
        register(silent, "a", region=None, now=1001 * SECOND),
        acknowledged(silent, "a", ReplicaProgress(50, 50), end=END, now=1001 * SECOND),
    ):
        assert back.replica("a").healthy
        assert back.epoch == silent.epoch + 1
