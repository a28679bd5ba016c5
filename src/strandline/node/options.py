"""Settings of a node that do not depend on its process: commit policy, retention, flow control, and the other nodes."""

# Annotations are types here, not strings: NodeConfig inherits these fields, and checks their values by them.
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from strandline.model.arguments import Duration
from strandline.model.retention import FOREVER, Retention, SlotLimits, as_retention, default_limits
from strandline.node.lead.policies import NO_FLOW_LIMITS, CommitPolicy, FlowLimits, parse_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Settings of a node for leading and following, without its folder, its lease and its server."""

    policy: str | CommitPolicy = "local"
    """When an append is committed; the same on all nodes of a log."""
    retention: str | Retention = FOREVER
    limits: SlotLimits | None = None
    """How far a replica may lag before its slot is invalidated and it has to bootstrap again.

    By default 64 GiB where age or size bounds the log, and unlimited otherwise; ``SlotLimits()`` is always unlimited.
    """
    flow: FlowLimits = NO_FLOW_LIMITS
    poll_seconds: Duration = 1.0
    """Heartbeat interval in seconds."""
    region: str | None = None
    nodes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The other nodes of the log by name, with the URL of each: they vote before this node leads."""
    upstream: str | None = None
    """The URL of the primary, where there is no lease."""
    automatic: bool = False
    """Whether the node stands for election when the primary is gone; needs a lease and a quorum."""

    @property
    def commit_policy(self) -> CommitPolicy:
        """The commit policy as a value."""
        return parse_policy(self.policy) if isinstance(self.policy, str) else self.policy

    @property
    def retention_policy(self) -> Retention:
        """The retention policy as a value."""
        return as_retention(self.retention)

    @property
    def slot_limits(self) -> SlotLimits:
        """The limits in force: those given, or the default of the retention policy."""
        return default_limits(self.retention_policy) if self.limits is None else self.limits
