"""Candidacy: collects the reports of the other nodes before this one leads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from strandline.errors import Fenced, NotReady, StrandlineError
from strandline.model.node import Membership
from strandline.node.elect.election import log_rank, objection, own_objection, own_term
from strandline.node.lead.policies import CommitPolicy, Quorum, parse_policy
from strandline.node.members.rules import (
    addresses,
    check_membership,
    differs,
    is_newer,
    may_lead,
    policies,
    shown,
    urls,
)
from strandline.node.messages import Caller, ElectionReport, Upstream
from strandline.node.node_folder import HIGHEST_TERM, NodeFolder, check_rise
from strandline.node.options import NodeOptions

_LOGGER = logging.getLogger(__name__)


@final
class Candidacy:
    """Checks the reports of the other nodes before this one leads. Unreachable nodes do not vote."""

    def __init__(self, node_folder: NodeFolder, options: NodeOptions, reach: Callable[[str], Upstream]) -> None:
        """``reach`` connects to a node by its URL."""
        self._node_folder = node_folder
        self._options = options
        self._reach = reach
        self._is_refused = False
        """Whether a node did not let this one ask, the last time."""
        if self._known is not None and differs(self._known, options.nodes, options.commit_policy):
            _LOGGER.info(
                "Node %s goes by %s, which was recorded while it ran; its settings differ, and count only for "
                "addresses that are missing there.", node_folder.state.name, shown(self._known),
            )  # fmt: skip

    def check_able(self, mine: ElectionReport) -> None:
        """``NotReady``, with the reason, if this node would not be elected now, or not by itself. Fences nobody.

        An election in vain keeps the last primary from going on, and where few nodes have a copy of the log yet, no
        other may be able to lead.
        """
        self.check_own(mine, force=False)
        reports = self._ask(term=0)
        if self._is_refused and not reports:
            self._refuse("the other nodes do not let it ask: it was removed from the log, or its credentials were")
        for policy in self._policies():
            if not isinstance(policy, Quorum) or (self._known is None and mine.name not in policy.voters):
                self._refuse(f"under {policy} it does not lead by itself")
        # The lease gives a term that is above all that anybody has seen.
        self._check(replace(mine, term=HIGHEST_TERM), reports, force=False)

    def check_unleased(self, mine: ElectionReport) -> None:
        """As :meth:`check_newest`, where no lease says who led last; ``Fenced`` if another node has led since."""
        own = self._node_folder.state
        if own.seen > own.led:
            raise Fenced(
                f"{mine.name} led in term {own.led} and has seen term {own.seen}: another node was promoted. Start "
                "this one as its replica; or, if no other node leads, let it forget that term first ('strandline node "
                "reset-term')."
            )
        self.check_newest(mine)

    def check_newest(self, mine: ElectionReport) -> None:
        """``NotReady`` if another node has more than this one, which led last. Fences nobody.

        Replicas apply only what is durable on the primary: if one has more, the primary's disk lost it.
        """
        more = [report for report in self._ask(term=0) if log_rank(report) > log_rank(mine)]
        known = self._known
        if known is not None and not may_lead(known, mine.name):
            raise NotReady(f"{mine.name} led last, but has no vote in {shown(known)}: promote another node.")
        if more:
            best = max(more, key=log_rank)
            raise NotReady(
                f"{mine.name} led last, but {best.name} has more records (everything below {best.durable}, against "
                f"{mine.durable}): the folder of {mine.name} was restored from an older copy, or its disk has lost "
                f"records. Promote {best.name}; {mine.name} then follows it."
            )

    def check_own(self, mine: ElectionReport, *, force: bool) -> None:
        """``NotReady`` if this node must not lead, regardless of the others. Sends no request, and fences no node."""
        self._refuse(own_objection(mine, force=force) or self._no_vote(force=force))

    def check(self, mine: ElectionReport, *, force: bool) -> None:
        """``NotReady``, with the reason, if a committed record could be missing here.

        When this returns, no node that answered accepts or acknowledges a term below ``mine.term``.
        """
        self._check(mine, self._ask(term=mine.term), force=force)

    def _check(self, mine: ElectionReport, reports: Sequence[ElectionReport], *, force: bool) -> None:
        state, known = self._node_folder.state, self._known  # the newest record of the members that anybody reported
        why = objection(mine, reports, *self._policies(), primary=state.primary, peers=state.peers, force=force)
        if why is None and known is not None and known.term > mine.term:
            why = (
                f"the members of the log were changed in term {known.term}, and it asked in term {mine.term}: try again"
            )
        self._refuse(why or self._no_vote(force=force))

    def _refuse(self, why: str | None) -> None:
        if why is not None:
            raise NotReady(f"{self._node_folder.state.name} was not promoted: {why}.")

    def _no_vote(self, *, force: bool) -> str | None:
        """Why the members' record that is known here does not let this node lead, or None."""
        known, name = self._known, self._node_folder.state.name
        if known is None or may_lead(known, name) or (force and name in urls(known)):
            return None
        return f"it has no vote in {shown(known)}: promote another node"

    @property
    def _known(self) -> Membership | None:
        return self._node_folder.state.membership

    def _policies(self) -> tuple[CommitPolicy, ...]:
        """The recorded policies; or the commit policy of the last known primary, or this node's own."""
        known = self._node_folder.state
        if known.membership is not None:
            return policies(known.membership)
        return (parse_policy(known.policy) if known.primary else self._options.commit_policy,)

    def own_term(self) -> int:
        """The term that this node takes next where no lease gives one."""
        state = self._node_folder.state
        return own_term(state.name, state.seen, self._addresses())

    def _addresses(self) -> dict[str, str]:
        """The nodes of the log with the addresses that are known, by the newest record."""
        return addresses(self._known, self._options.nodes)

    def learn(self) -> None:
        """Ask the others for a newer record of the members: the primary may be none that this node knows."""
        self._ask(term=0)

    def _ask(self, term: int) -> list[ElectionReport]:
        """The reports of the other nodes, without those that did not answer.

        A newer record of the members that one of them has is stored first; the nodes that it adds are asked, too.
        """
        me, reports = self._node_folder.state.name, {}
        asked, self._is_refused = {me}, False
        while left := {name: url for name, url in self._addresses().items() if url and name not in asked}:
            asked |= set(left)
            for name, url in left.items():
                upstream = None
                try:
                    upstream = self._reach(url)
                    reports[name] = self._adopted(upstream.report(Caller(me, term)))
                except StrandlineError as error:
                    self._is_refused |= isinstance(error, Fenced)
                    _LOGGER.info("Node %s got no report from %s: %s", me, name, error)
                finally:
                    if upstream is not None:
                        upstream.close()
        members = self._addresses()
        return [report for name, report in reports.items() if name in members]

    def _adopted(self, report: ElectionReport) -> ElectionReport:
        """The report of a node; its record of the members is stored first, if it is newer."""
        found, own = report.membership, self._node_folder.state
        if is_newer(found, own.membership) and found is not None:
            term = check_rise(own.seen, found.term, report.name)
            # A node has led in that term: this one must not lead or follow in a lower one, whose records are older.
            self._node_folder.remember(seen=term, membership=check_membership(found, term=term))
        return report
