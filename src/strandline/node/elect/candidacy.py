"""Asking the other nodes before becoming the primary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from strandline.errors import NotReady, StrandlineError
from strandline.node.elect.election import log_rank, objection
from strandline.node.lead.policies import CommitPolicy, parse_policy
from strandline.node.messages import Caller, ElectionReport, Upstream
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions

_LOGGER = logging.getLogger(__name__)


@final
class Candidacy:
    """What a node has to know of the others before it leads. Whom it cannot reach it knows nothing of."""

    def __init__(self, node_folder: NodeFolder, options: NodeOptions, reach: Callable[[str], Upstream]) -> None:
        """``reach`` connects to a node by its place."""
        self._node_folder = node_folder
        self._options = options
        self._reach = reach

    def is_behind(self, mine: ElectionReport) -> bool:
        """Whether this node could not lead, or somebody who can be reached has more. Nobody is fenced by asking."""
        if mine.unhealthy is not None or not mine.adopted:
            return True
        return any(log_rank(report) > log_rank(mine) for report in self._ask(term=0))

    def check_newest(self, mine: ElectionReport) -> None:
        """``NotReady`` if somebody has more than a node that led last. Nobody is fenced by asking.

        Replicas take only what the primary's disk has: if one has more, that disk has lost it.
        """
        more = [report for report in self._ask(term=0) if log_rank(report) > log_rank(mine)]
        if more:
            best = max(more, key=log_rank)
            raise NotReady(
                f"{mine.name} led last, and {best.name} has more (everything below {best.durable}, against "
                f"{mine.durable}): the folder of {mine.name} was restored from an older copy, or its disk has lost "
                f"records. Promote {best.name}, and {mine.name} follows it."
            )

    def check(self, mine: ElectionReport, *, force: bool) -> None:
        """``NotReady``, with the reason, if something committed could be missing here.

        When this returns, nobody who answered takes or acknowledges anything of a term below ``mine.term``.
        """
        state = self._node_folder.state
        reports = self._ask(term=mine.term)
        why = objection(mine, reports, self._policy(), primary=state.primary, peers=state.peers, force=force)
        if why is not None:
            raise NotReady(f"{state.name} was not promoted: {why}.")

    def _policy(self) -> CommitPolicy:
        """The policy under which things were committed so far, as far as this node has heard."""
        known = self._node_folder.state
        return parse_policy(known.policy) if known.primary else self._options.commit_policy

    def _ask(self, term: int) -> list[ElectionReport]:
        """What the other nodes say of themselves; those that do not answer are left out."""
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
