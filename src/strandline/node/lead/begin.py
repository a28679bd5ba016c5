"""Begins a leadership: what must be durable before a node leads, and the primary role over its copy of the log."""

from __future__ import annotations

from strandline.errors import NotReady
from strandline.log.wal.log import WalLog
from strandline.model.retention import TIER_SLOT
from strandline.node.elect.node_lease import Leadership
from strandline.node.lead.primary import PrimaryRole
from strandline.node.members.rules import policy_of, taken_over
from strandline.node.node_folder import INCOMING, NodeFolder
from strandline.node.options import NodeOptions
from strandline.node.replicate.replica import ReplicaRole


def begin_leading(
    node_folder: NodeFolder,
    replica: ReplicaRole,
    leadership: Leadership,
    options: NodeOptions,
    *,
    continues: bool,
) -> PrimaryRole:
    """The primary role of a replica in a term; the caller has checked that no committed record is missing here.

    ``continues``: no other node can have led since this node did. ``NotReady`` without a copy of the log, ``Fenced`` if
    the leadership has ended meanwhile.
    """
    state, term, copy = node_folder.state, leadership.term, replica.copy
    if copy is None:
        raise NotReady(f"{state.name} has no copy of the log yet: let it bootstrap from a primary first.")
    replica.disconnect()
    known = state.membership
    membership = None if known is None else taken_over(known, term=term, primary=state.name)
    policy = options.commit_policy if membership is None else policy_of(membership)
    settled = continues and state.settled
    led_since = (continues and state.led_since) or term
    state = node_folder.remember(
        seen=term, adopted=term, led=term, led_since=led_since, committed=replica.watermark.highest, settled=False,
        trouble=None, primary=state.name, policy=str(policy), cold=state.cold or options.cold_address,
        membership=membership,
    )  # fmt: skip
    # Files of an unfinished bootstrap: this node has the log now, and would keep them for as long as it leads.
    node_folder.env.disk.remove_folder(node_folder.path(INCOMING))
    # The last rotation may be unknown here, or a token was removed: what a removed node knows must not sign any more.
    node_folder.tickets.rotate()
    try:
        log = copy.lead(is_new=not continues)
        primary = PrimaryRole(node_folder, copy, leadership, options, settled=settled)
        if state.cold:
            pin_uncopied(log, led_by_another=not continues)
        primary.drop_strangers()  # the last primary may not have come to that
        leadership.check("it does not lead")
    except BaseException:
        copy.reopen()  # as a follower's: that of a primary reports nothing that becomes durable
        raise
    return primary


def pin_uncopied(log: WalLog, *, led_by_another: bool) -> None:
    """Retain everything that is not in the cold tier, before anything is trimmed.

    ``led_by_another``: another node may have led since, and written other segments; the tierer compares them first.
    """
    slots, first = log.slots, log.bounds().first
    if all(slot.name != TIER_SLOT for slot in slots.list()):
        slots.create(TIER_SLOT, first)
    elif led_by_another:
        slots.reset(TIER_SLOT, first)
