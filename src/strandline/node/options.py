"""How a node runs, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strandline.model.retention import FOREVER, Retention, SlotLimits, default_limits
from strandline.node.lead.flow import NO_FLOW_LIMITS, FlowLimits
from strandline.node.lead.policies import CommitPolicy, Local


@dataclass(frozen=True, slots=True)
class PrimaryOptions:
    """How a primary keeps its log and its replicas."""

    policy: CommitPolicy = field(default_factory=Local)
    limits: SlotLimits | None = None
    """How far replicas may hold back what is pruned before they have to bootstrap again; None for the usual limits."""
    retention: Retention = FOREVER
    flow: FlowLimits = NO_FLOW_LIMITS
    poll_seconds: float = 1.0
    """How often replicas say something even if nothing happens."""

    @property
    def slot_limits(self) -> SlotLimits:
        """The limits that hold: those that were given, or the usual ones of the retention policy."""
        return default_limits(self.retention) if self.limits is None else self.limits


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a node runs, and whom it knows."""

    url: str = ""
    """Where others reach this node."""
    region: str | None = None
    primary: PrimaryOptions = field(default_factory=PrimaryOptions)
    """How it leads when it does; all nodes of a log should say the same."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """The other nodes of the log, and where each is reached."""
    upstream: str | None = None
    """The primary's place, where there is no lease that tells it."""
    automatic: bool = False
    """Whether this node becomes the primary by itself when that is gone: with a lease and a quorum only."""
