"""Candidacy: collects the reports of the other nodes before this one leads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from strandline.errors import Fenced, NotReady, StrandlineError
from strandline.node.elect.election import log_rank, objection, own_objection
from strandline.node.lead.policies import CommitPolicy, Quorum, parse_policy
from strandline.node.members.rules import addresses, check_membership, is_newer, may_lead, policies, shown, urls
from strandline.node.messages import Caller, ElectionReport
from strandline.node.node_folder import NodeFolder, check_rise
from strandline.node.options import NodeOptions
from strandline.node.services import Upstream

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

    def is_behind(self, mine: ElectionReport) -> bool:
        """Whether this node cannot lead, or a reachable node has more records. Fences no node."""
        if mine.unhealthy is not None or not mine.adopted:
            return True
        reports = self._ask(term=0)
        if self._is_refused and not reports:
            return True  # it was removed, and does not know: it would only use up terms
        return any(log_rank(report) > log_rank(mine) for report in reports) or not self._may_take_over()

    def _may_take_over(self) -> bool:
        """Whether this node may lead by itself: a quorum decides, in which it votes."""
        quorum, known, name = self._policies()[0], self._node_folder.state.membership, self._node_folder.state.name
        return isinstance(quorum, Quorum) and (name in quorum.voters if known is None else may_lead(known, name))

    def check_newest(self, mine: ElectionReport) -> None:
        """``NotReady`` if another node has more than this one, which led last. Fences nobody.

        Replicas apply only what is durable on the primary: if one has more, the primary's disk lost it.
        """
        more = [report for report in self._ask(term=0) if log_rank(report) > log_rank(mine)]
        known = self._node_folder.state.membership
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
        why = own_objection(mine, force=force) or self._no_vote(force=force)
        if why is not None:
            raise NotReady(f"{mine.name} was not promoted: {why}.")

    def check(self, mine: ElectionReport, *, force: bool) -> None:
        """``NotReady``, with the reason, if a committed record could be missing here.

        When this returns, no node that answered accepts or acknowledges a term below ``mine.term``.
        """
        reports = self._ask(term=mine.term)
        state = self._node_folder.state  # with the newest record of the members that anybody reported
        why = objection(mine, reports, *self._policies(), primary=state.primary, peers=state.peers, force=force)
        known = state.membership
        if why is None and known is not None and known.term > mine.term:
            why = (
                f"the members of the log were changed in term {known.term}, and it asked in term {mine.term}: try again"
            )
        why = why or self._no_vote(force=force)
        if why is not None:
            raise NotReady(f"{state.name} was not promoted: {why}.")

    def _no_vote(self, *, force: bool) -> str | None:
        """Why the members' record that is known here does not let this node lead, or None."""
        known, name = self._node_folder.state.membership, self._node_folder.state.name
        if known is None or may_lead(known, name) or (force and name in urls(known)):
            return None
        return f"it has no vote in {shown(known)}: promote another node"

    def _policies(self) -> tuple[CommitPolicy, ...]:
        """The recorded policies; or the commit policy of the last known primary, or this node's own."""
        known = self._node_folder.state
        if known.membership is not None:
            return policies(known.membership)
        return (parse_policy(known.policy) if known.primary else self._options.commit_policy,)

    def addresses(self) -> dict[str, str]:
        """The nodes of the log with the addresses that are known, by the newest record."""
        return addresses(self._node_folder.state.membership, self._options.nodes)

    def learn(self) -> None:
        """Ask the others for a newer record of the members: the primary may be none that this node knows."""
        self._ask(term=0)

    def _ask(self, term: int) -> list[ElectionReport]:
        """The reports of the other nodes, without those that did not answer.

        A newer record of the members that one of them has is stored first; the nodes that it adds are asked, too.
        """
        me, reports = self._node_folder.state.name, {}
        asked, self._is_refused = {me}, False
        while left := {name: url for name, url in self.addresses().items() if url and name not in asked}:
            asked |= set(left)
            for name, url in left.items():
                upstream = None
                try:
                    upstream = self._reach(url)
                    report = upstream.report(Caller(me, term))
                    self._adopt(report)
                    reports[name] = report
                except StrandlineError as error:
                    self._is_refused |= isinstance(error, Fenced)
                    _LOGGER.info("Node %s got no report from %s: %s", me, name, error)
                finally:
                    if upstream is not None:
                        upstream.close()
        members = self.addresses()
        return [report for name, report in reports.items() if name in members]

    def _adopt(self, report: ElectionReport) -> None:
        """Store the record of the members that a node reported, if it is newer."""
        found, own = report.membership, self._node_folder.state
        if is_newer(found, own.membership) and found is not None:
            term = check_rise(own.seen, found.term, report.name)
            # A node has led in that term: this one must not lead or follow in a lower one, whose records are older.
            self._node_folder.remember(seen=term, membership=check_membership(found, term=term))
