"""Begins a leadership: what must be durable before a node leads, and the primary role over its copy of the log."""

from __future__ import annotations

from collections.abc import Mapping

from strandline.log.wal.log import WalLog
from strandline.log.wal.snapshot import KIND
from strandline.node.lead.bootstrap_snapshots import Export
from strandline.node.lead.leadership import Leadership
from strandline.node.lead.primary import PrimaryRole
from strandline.node.members.rules import policy_of, taken_over
from strandline.node.node_folder import INCOMING, NodeFolder
from strandline.node.options import NodeOptions
from strandline.node.replicate.log_copy import LogCopy, export_log


def begin_leading(
    node_folder: NodeFolder,
    copy: LogCopy,
    leadership: Leadership,
    options: NodeOptions,
    *,
    committed: int,
    continues: bool,
) -> PrimaryRole:
    """The primary role of a node in a term; the caller has checked that no committed record is missing here.

    ``committed`` is the highest watermark that the node knows of. ``continues``: no other node can have led since this
    node did. ``Fenced`` if the leadership has ended meanwhile.
    """
    state, term = node_folder.state, leadership.term
    known = state.membership
    membership = None if known is None else taken_over(known, term=term, primary=state.name)
    policy = options.commit_policy if membership is None else policy_of(membership)
    settled = continues and state.settled
    led_since = (continues and state.led_since) or term
    state = node_folder.remember(
        seen=term, adopted=term, led=term, led_since=led_since, committed=committed, settled=False, trouble=None,
        primary=state.name, policy=str(policy), cold=state.cold or options.cold_address, membership=membership,
    )  # fmt: skip
    # Files of an unfinished bootstrap: this node has the log now, and would keep them for as long as it leads.
    node_folder.disk.remove_folder(node_folder.path(INCOMING))
    # The last rotation may be unknown here, or a token was removed: what a removed node knows must not sign any more.
    node_folder.tickets.rotate()
    log = copy.lead(is_new=not continues)
    primary = PrimaryRole(node_folder, log, leadership, options, exports=_exports(log, node_folder), settled=settled)
    if state.cold:
        primary.pin_uncopied(led_by_another=not continues)
    primary.drop_strangers()  # the last primary may not have come to that
    leadership.check("it does not lead")
    return primary


def _exports(log: WalLog, node_folder: NodeFolder) -> Mapping[str, Export]:
    return {KIND: lambda folder: export_log(log, folder, node_folder=node_folder)}
