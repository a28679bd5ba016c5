"""Election rules: which node may lead, as pure functions over the reports of the nodes."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.node import Peer
from strandline.node.lead.policies import AckN, Among, CommitPolicy, Every, Local, Quorum, Regions
from strandline.node.messages import ElectionReport

_TERMS_EACH: Final = 1 << 16
"""Of this many terms in a row each node takes one: a node that missed 256 promotions still believes the next."""


def own_term(name: str, seen: int, others: Iterable[str] = ()) -> int:
    """The next term above ``seen`` that only this node takes, where no lease assigns terms.

    Its name decides, and not the list of nodes that it happens to hold: two nodes that are promoted at once never share
    a term, and the lower one is fenced. ``InvalidInput`` if one of the ``others`` has a name that would take the same
    terms; names that differ in one or two neighbouring letters never do.

    >>> own_term("node-1", 4), own_term("node-2", 4), own_term("node-1", 9869)
    (5870, 9869, 71406)
    """
    own = _remainder(name)
    if same := [other for other in others if other != name and _remainder(other) == own]:
        raise InvalidInput(
            f"{name} and {same[0]} would take the same terms, by their names: nothing was changed. Add one of the two "
            "under another name, and remove it ('strandline node add', 'strandline node remove'), or use a lease."
        )
    term = seen + 1
    return term + (own - term) % _TERMS_EACH


def _remainder(name: str) -> int:
    return crc_hqx(name.encode(), 0)


def covers(  # noqa: PLR0911 - one for each policy
    policy: CommitPolicy, *, primary: str, peers: Sequence[Peer], heard: Collection[str]
) -> bool:
    """Whether every set of nodes that could commit a record includes one that answered.

    Then the best of them has everything committed. ``primary`` and ``peers`` are the last known primary and its
    replicas; a quorum depends on its voters alone, whichever node led meanwhile.
    """
    match policy:
        case Quorum(voters):
            return len(voters - set(heard)) < policy.majority
        case Every(policies):
            return any(covers(each, primary=primary, peers=peers, heard=heard) for each in policies)
        case Among(Regions(counts), names) if len(counts) > 1:
            alone = (Among(Regions((each,)), names) for each in counts)
            return any(covers(each, primary=primary, peers=peers, heard=heard) for each in alone)
        case Among(inner, names):
            # A member that was never heard of may be a replica, and one of any region.
            known = {peer.name: peer for peer in peers}
            region = inner.counts[0][0] if isinstance(inner, Regions) else None
            those = [known.get(name, Peer(name, region)) for name in names - {primary}]
            return covers(inner, primary=primary, peers=those, heard=heard)
    if primary in heard:
        return True
    match policy:
        case AckN(count):
            return sum(peer.name not in heard for peer in peers) < count
        case Regions(counts):
            missing = [peer.region for peer in peers if peer.name not in heard]
            return any(missing.count(region) < count for region, count in counts)
    return False


def log_rank(report: ElectionReport) -> tuple[int, int]:
    """Orders nodes: the higher one has every record of the other that can be committed."""
    return report.adopted, report.durable


def own_objection(mine: ElectionReport, *, force: bool) -> str | None:
    """Why a node must not lead, regardless of the other nodes, or None. Known before it takes a term."""
    if mine.unhealthy is not None and not force:
        return f"it is {mine.unhealthy}: repair that first, or force it if its copy is the right one"
    if mine.adopted == 0 and not force:
        # No primary has counted this copy, so it may lack committed records.
        return (
            "its copy of the log was never acknowledged to a primary, so it may lack committed records: let it "
            "follow one first, or force it, which loses the records that only other nodes have"
        )
    return None


def objection(  # noqa: PLR0911 - each is a reason of its own
    mine: ElectionReport,
    others: Sequence[ElectionReport],
    *policies: CommitPolicy,
    primary: str,
    peers: Sequence[Peer],
    force: bool,
) -> str | None:
    """Why a node must not lead in ``mine.term``, or None.

    It has a copy of the log. While the policy changes there are two, and what was committed under either
    has to be here: the former primary may have gone on to the second alone. ``force`` ignores nodes that did not
    answer, and accepts a copy that has diverged from the primary's, or that was never acknowledged to one.
    """
    why = own_objection(mine, force=force)
    if why is not None:
        return why
    later = next((report for report in others if report.term > mine.term), None)
    if later is not None:
        return f"{later.name} has seen term {later.term}: another node is becoming the primary"
    better = max((report for report in others if log_rank(report) > log_rank(mine)), key=log_rank, default=None)
    if better is not None:
        return (
            f"{better.name} has more records (up to {better.durable} in term {better.adopted}, against {mine.durable} "
            f"in term {mine.adopted}): promote {better.name}"
        )
    known = max(report.committed for report in (mine, *others))
    if mine.durable < known:
        return (
            f"it has everything below {mine.durable}, but everything below {known} was committed: promote another node"
        )
    # A node that lost its data may have had committed records: it does not count as an answer.
    heard = {report.name for report in (mine, *others) if report.adopted > 0}
    missed = (each for each in policies if not covers(each, primary=primary, peers=peers, heard=heard))
    policy = next(missed, None)
    if force or policy is None:
        return None
    if isinstance(policy, Local):
        return (
            f"the policy is local, and {primary or 'the former primary'} did not answer: records that only it has "
            "would be lost. Force it to accept that"
        )
    return f"only {', '.join(sorted(heard))} answered: a record that {policy} had committed may be missing here"
