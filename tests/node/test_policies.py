"""Commit policies: when they are satisfied, when they never can be, and what a request may ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import InvalidInput
from strandline.node.lead.policies import (
    AckN,
    CommitPolicy,
    DurableOffsets,
    Every,
    Local,
    Quorum,
    Regions,
    ReplicaPosition,
    check_possible,
    is_met_alone,
    nth_highest,
    parse_policy,
    strengthened,
    watermark,
)

VOTERS = frozenset({"p", "a", "b"})


def regions(counts: dict[str, int]) -> Regions:
    """The policy that asks for these numbers of replicas."""
    return Regions(tuple(sorted(counts.items())))


def position(durable: int, **replicas: int | None) -> DurableOffsets:
    """The primary p, and replicas; those that begin with e are in Europe, the others in America."""
    found = (ReplicaPosition(name, at, "eu" if name.startswith("e") else "us") for name, at in replicas.items())
    return DurableOffsets("p", durable, tuple(found))


@pytest.mark.parametrize(
    ("policy", "reached"),
    [
        (Local(), 100),
        (AckN(1), 90),
        (AckN(2), 70),
        (AckN(3), 40),
        (AckN(4), 0),  # one has acknowledged nothing yet
        (Quorum(VOTERS), 90),
        (Quorum(frozenset({"p", "a", "b", "e1"})), 70),
        (Quorum(frozenset({"a", "b", "new"})), 70),
        (Quorum(frozenset({"p"})), 100),
        (regions({"eu": 1}), 40),
        (regions({"us": 2}), 70),
        (regions({"eu": 1, "us": 1}), 40),
        (regions({"asia": 1}), 0),
        (Every((AckN(1), regions({"eu": 1}))), 40),
    ],
)
def test_a_policy_is_satisfied_up_to_its_watermark(policy: CommitPolicy, reached: int) -> None:
    assert watermark(policy, position(100, a=90, b=70, e1=40, new=None)) == reached


def test_a_replica_ahead_of_the_primary_s_durable_end_does_not_move_the_watermark_past_it() -> None:
    for policy in (AckN(1), Quorum(VOTERS), regions({"us": 1})):
        assert watermark(policy, position(10, a=50, b=50)) == 10


def test_the_nth_highest_is_what_so_many_have_reached() -> None:
    assert [nth_highest([5, 9, 7], count) for count in (1, 2, 3, 4)] == [9, 7, 5, 0]


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (AckN(4), "3 replicas"),
        (Quorum(frozenset({"x", "y", "a"})), "add p to the voters"),
        (regions({"eu": 2}), "region 'eu'"),
        (regions({"asia": 1}), "region 'asia'"),
        (Every((AckN(1), AckN(4))), "3 replicas"),
    ],
)
def test_a_policy_that_can_never_be_reached_is_refused_before_anything_is_written(
    policy: CommitPolicy, text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        check_possible(policy, position(0, a=None, b=None, e1=None))


@pytest.mark.parametrize("policy", [Local(), AckN(3), Quorum(VOTERS), regions({"eu": 1, "us": 2})])
def test_a_policy_that_may_yet_be_reached_is_not_refused(policy: CommitPolicy) -> None:
    check_possible(policy, position(0, a=None, b=None, e1=None))


POLICIES = st.one_of(
    st.just(Local()),
    st.builds(AckN, st.integers(1, 4)),
    st.builds(Quorum, st.frozensets(st.sampled_from(["p", "a", "b", "e1"]), min_size=1)),
    st.builds(regions, st.dictionaries(st.sampled_from(["eu", "us"]), st.integers(1, 2), min_size=1)),
)
POSITIONS = st.one_of(st.none(), st.integers(0, 20))


@given(POLICIES, POLICIES, st.integers(0, 20), POSITIONS, POSITIONS, POSITIONS)
def test_a_request_may_strengthen_the_policy_and_never_weaken_it(
    policy: CommitPolicy, asked: CommitPolicy, durable: int, a: int | None, b: int | None, e1: int | None
) -> None:
    now = position(durable, a=a, b=b, e1=e1)
    both = watermark(strengthened(policy, asked), now)
    assert both == min(watermark(policy, now), watermark(asked, now))


@given(POLICIES, st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_watermark_never_goes_back_while_positions_go_forward(
    policy: CommitPolicy, durable: int, a: int, b: int, more: int
) -> None:
    before = watermark(policy, position(durable, a=a, b=b, e1=None))
    assert watermark(policy, position(durable + more, a=a + more, b=b, e1=more)) >= before


@pytest.mark.parametrize("text", ["local", "ack_n(2)", "quorum(a,b,p)", "regions(eu=1,us=2)"])
def test_a_policy_is_read_as_it_is_written(text: str) -> None:
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "LOCAL",
        "local(1)",
        "ack_n",
        "ack_n()",
        "ack_n(0)",
        "ack_n(-1)",
        "ack_n(two)",
        "ack_n(1,2)",
        "quorum",
        "quorum()",
        "regions",
        "regions()",
        "all",
        "regions(eu=0)",
        "regions(eu=x)",
        "regions(eu=1,eu=2)",
    ],
)
def test_an_unknown_policy_is_an_error_of_configuration(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_policy(text)


@pytest.mark.parametrize(
    ("policy", "alone"),
    [
        ("local", True),
        ("quorum(p)", True),
        ("quorum(p) and local", True),
        ("quorum(a)", False),
        ("quorum(p,a)", False),
        ("ack_n(1)", False),
        ("quorum(p) and ack_n(1)", False),
        ("regions(eu=1)", False),
    ],
)
def test_a_policy_is_met_by_the_primary_alone_if_it_is_the_only_one_that_counts(policy: str, alone: bool) -> None:
    assert is_met_alone(parse_policy(policy), "p") is alone
    if alone:
        assert watermark(parse_policy(policy), position(7, a=3)) == 7
