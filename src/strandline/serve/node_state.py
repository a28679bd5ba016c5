"""A replicated log and its nodes as fields of JSON: who leads, in which term, under which policy, and the replicas."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from strandline.errors import Fenced, InvalidInput, NotReady
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.messages import NodeSlot, NodeStatus, SlotKind, Topology
from strandline.serve.log_state import slot_fields


def topology_fields(seen: Topology) -> dict[str, Any]:
    """The replicas of a log, as its primary sees them."""
    found = {**asdict(seen), "log_id": str(seen.log_id)}
    for member in found["members"]:
        member["lag"] = None if member["applied"] is None else max(0, seen.durable - member["applied"])
    return found


def members_with_slots(seen: Topology, slots: dict[str, NodeSlot], now: int) -> dict[str, Any]:
    """The same, each replica with its slot."""
    found = topology_fields(seen)
    for member in found["members"]:
        member["slot"] = slot_fields(slots[member["name"]], now) if member["name"] in slots else None
    return found


def status_fields(seen: NodeStatus) -> dict[str, Any]:
    """One node: its role, its position, and what stopped it."""
    return {**asdict(seen), "position": None if seen.position is None else str(seen.position)}


def replica_slots(node: RemoteLog) -> dict[str, NodeSlot]:
    """The slots of the replicas of a primary; none for a node of an earlier build, or one that does not lead."""
    try:
        found = node.slot_lags().slots
    except (InvalidInput, NotReady, Fenced):
        return {}
    return {each.lag.state.name: each for each in found if each.kind is SlotKind.REPLICA}
