"""Candidacy: collects the reports of the other nodes before this one leads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from strandline.errors import NotReady, StrandlineError
from strandline.node.elect.election import log_rank, objection, own_objection
from strandline.node.lead.policies import CommitPolicy, parse_policy
from strandline.node.messages import Caller, ElectionReport
from strandline.node.node_folder import NodeFolder
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

    def is_behind(self, mine: ElectionReport) -> bool:
        """Whether this node cannot lead, or a reachable node has more records. Fences no node."""
        if mine.unhealthy is not None or not mine.adopted:
            return True
        return any(log_rank(report) > log_rank(mine) for report in self._ask(term=0))

    def check_newest(self, mine: ElectionReport) -> None:
        """``NotReady`` if another node has more than this one, which led last. Fences nobody.

        Replicas apply only what is durable on the primary: if one has more, the primary's disk lost it.
        """
        more = [report for report in self._ask(term=0) if log_rank(report) > log_rank(mine)]
        if more:
            best = max(more, key=log_rank)
            raise NotReady(
                f"{mine.name} led last, but {best.name} has more records (everything below {best.durable}, against "
                f"{mine.durable}): the folder of {mine.name} was restored from an older copy, or its disk has lost "
                f"records. Promote {best.name}; {mine.name} then follows it."
            )

    def check_own(self, mine: ElectionReport, *, force: bool) -> None:
        """``NotReady`` if this node must not lead, regardless of the others. Sends no request, and fences no node."""
        why = own_objection(mine, force=force)
        if why is not None:
            raise NotReady(f"{mine.name} was not promoted: {why}.")

    def check(self, mine: ElectionReport, *, force: bool) -> None:
        """``NotReady``, with the reason, if a committed record could be missing here.

        When this returns, no node that answered accepts or acknowledges a term below ``mine.term``.
        """
        state = self._node_folder.state
        reports = self._ask(term=mine.term)
        why = objection(mine, reports, self._policy(), primary=state.primary, peers=state.peers, force=force)
        if why is not None:
            raise NotReady(f"{state.name} was not promoted: {why}.")

    def _policy(self) -> CommitPolicy:
        """The commit policy of the last known primary, or this node's own."""
        known = self._node_folder.state
        return parse_policy(known.policy) if known.primary else self._options.commit_policy

    def _ask(self, term: int) -> list[ElectionReport]:
        """The reports of the other nodes, without those that did not answer."""
        me = self._node_folder.state.name
        reports = []
        for name, url in self._options.nodes.items():
            if name == me:
                continue
            upstream = None
            try:
                upstream = self._reach(url)
                reports.append(upstream.report(Caller(me, term)))
            except StrandlineError as error:
                _LOGGER.info("Node %s got no report from %s: %s", me, name, error)
            finally:
                if upstream is not None:
                    upstream.close()
        return reports
