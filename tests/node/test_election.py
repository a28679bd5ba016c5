"""Who may become the primary: only who has everything that can have been committed."""

from __future__ import annotations

import itertools
from uuid import UUID

import pytest

from strandline.errors import Diverged, InvalidInput
from strandline.model.cursor import Bounds, Cursor
from strandline.model.node import Peer
from strandline.node.elect.election import covers, log_rank, objection, own_term
from strandline.node.lead.policies import (
    AckN,
    DurableOffsets,
    Every,
    Local,
    Quorum,
    Regions,
    ReplicaPosition,
    watermark,
)
from strandline.node.messages import ElectionReport, Rewind
from strandline.node.replicate.divergence import agreement, stepped_back

LOG = UUID(int=1)
PEERS = (Peer("r1", "eu"), Peer("r2", "eu"), Peer("r3", "us"), Peer("r4", "us"))
POLICIES = [
    AckN(1),
    AckN(2),
    AckN(4),
    Quorum(frozenset({"p", "r1", "r2"})),
    Quorum(frozenset({"p", "r1", "r2", "r3", "r4"})),
    Regions((("eu", 1),)),
    Regions((("eu", 2), ("us", 1))),
    Every((AckN(3), Regions((("us", 1),)))),
    Local(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_answers_suffice_exactly_if_every_commit_is_on_one_of_them(policy):
    """Against the policies themselves: every set of replicas that satisfies one, and every set that is heard."""
    names = ["p", *(peer.name for peer in PEERS)]
    regions = {peer.name: peer.region for peer in PEERS}

    def commits(having):
        replicas = tuple(ReplicaPosition(name, 1 if name in having else 0, regions[name]) for name in names[1:])
        return watermark(policy, DurableOffsets("p", 1, replicas)) == 1

    committing = [
        {"p", *having}
        for size in range(len(PEERS) + 1)
        for having in itertools.combinations(names[1:], size)
        if commits(having)
    ]
    assert committing
    for size in range(len(names) + 1):
        for heard in itertools.combinations(names, size):
            enough = covers(policy, primary="p", peers=PEERS, heard=set(heard))
            on_one_of_them = all(having & set(heard) for having in committing)
            if isinstance(policy, Quorum):
                # Who led meanwhile is not known, so that the primary's own copy is no more than a voter's.
                assert not enough or on_one_of_them
                assert enough == (len(policy.voters - set(heard)) < policy.majority)
            else:
                assert enough == on_one_of_them


def test_terms_that_nodes_take_by_themselves_are_never_the_same_whatever_lists_they_hold():
    names = [
        *"abcdefgh",
        *(f"node-{number}" for number in range(1, 30)),
        "eu-west-1",
        "us-east-1",
        "primary",
        "replica",
    ]
    terms = {}
    for mine, seen in itertools.product(names, (0, 1, 2, 70_000, 70_001)):
        for others in (names, [mine], names[::3], names[1::2]):
            term = own_term(mine, seen, others)
            assert seen < term <= seen + 65_536
            assert terms.setdefault(term, mine) == mine


def test_a_name_that_takes_the_same_terms_as_another_node_is_refused():
    one, other = "gamma-log-9", "paris-ap-4"
    assert own_term(one, 5) == own_term(other, 5)
    with pytest.raises(InvalidInput, match="would take the same terms"):
        own_term(one, 5, ["b", other])


def report(name, adopted=3, durable=10, *, term=5, committed=0, unhealthy=None):
    return ElectionReport(name, term, adopted, durable, committed, unhealthy)


def judged(mine, *others, policy=None, force=False):
    return objection(
        mine, others, policy or Quorum(frozenset("abc")), primary="a", peers=(Peer("b"), Peer("c")), force=force
    )


def test_the_best_of_a_majority_may_lead():
    assert judged(report("b"), report("c", durable=9)) is None
    assert judged(report("b"), report("c")) is None


def test_a_higher_term_counts_for_more_than_more_records():
    assert log_rank(report("b", 4, 1)) > log_rank(report("c", 3, 100))
    assert "c has more" in judged(report("b", 3, 100), report("c", 4, 1))


def test_one_that_is_behind_the_watermark_may_not_lead_even_if_forced():
    assert "below 11 was committed" in judged(report("b"), report("c", durable=9, committed=11), force=True)


def test_one_that_lost_its_data_counts_for_nothing():
    assert "was never acknowledged" in judged(report("b", adopted=0, durable=0), report("c"))
    assert "c has more" in judged(report("b", adopted=0, durable=0), report("c"), force=True)
    assert "only b answered" in judged(report("b"), report("c", adopted=0, durable=0))


def test_one_in_trouble_may_not_lead():
    assert "it is diverged: repair that first" in judged(report("b", unhealthy="diverged"), report("c"))
    assert judged(report("b", unhealthy="diverged"), report("c"), force=True) is None


def test_a_node_that_has_seen_a_later_term_wins():
    assert "c has seen term 6" in judged(report("b"), report("c", term=6))


def test_local_may_lose_what_only_the_primary_had_and_says_so():
    assert "records that only it has would be lost" in judged(report("b"), report("c"), policy=Local())
    assert judged(report("b"), report("a"), policy=Local()) is None
    assert judged(report("b"), policy=Local(), force=True) is None


class Log:
    """The terms of a log, one for each record."""

    def __init__(self, terms, first=0):
        self.terms = list(terms)
        self.bounds = Bounds(first, len(self.terms))

    def term_at(self, offset):
        return self.terms[offset] if self.bounds.first <= offset < self.bounds.next else None

    def end_of_term(self, term):
        return next(
            (at for at in range(self.bounds.first, self.bounds.next) if self.terms[at] > term), self.bounds.next
        )

    def end(self):
        return Cursor(LOG, self.bounds.next, self.term_at(self.bounds.next - 1) or 0)


def histories(length, terms):
    """Logs whose terms never go down."""
    return itertools.combinations_with_replacement(range(1, terms + 1), length)


def test_two_logs_come_to_where_they_part_whatever_their_terms_are():
    """Every pair of small logs that two nodes can have."""
    tried = 0
    for mine_length, theirs_length in itertools.product(range(6), range(6)):
        for mine, theirs in itertools.product(histories(mine_length, 3), histories(theirs_length, 3)):
            parting = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if parting is not None and any(a == b for a, b in zip(mine[parting:], theirs[parting:], strict=False)):
                continue  # cannot be: one primary writes a term, behind a log that is its own
            same = min(len(mine), len(theirs)) if parting is None else parting
            ours, replica = Log(mine), Log(theirs)
            since, rounds = replica.end(), 0
            while (answer := agreement(since, ours, ours.bounds, term=4)) is not None:
                following = stepped_back(since, answer, replica, replica.bounds)
                assert following is not None
                assert following.next < since.next
                since, rounds = following, rounds + 1
            assert since.next == same
            assert rounds <= 3
            tried += 1
    assert tried > 1000


def test_a_record_of_the_primarys_own_term_that_it_never_wrote_is_divergence():
    with pytest.raises(Diverged, match="does not have"):
        agreement(Cursor(LOG, 3, 4), Log([1, 1]), Bounds(0, 2), term=4)


def test_what_is_retained_nowhere_cannot_be_agreed_upon():
    replica = Log([1, 1, 2, 2], first=2)
    assert stepped_back(replica.end(), Rewind(2, 1), replica, replica.bounds) is None
