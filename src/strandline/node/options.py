"""Settings of a node that do not depend on its process: commit policy, retention, flow control, and the other nodes."""

# Annotations are types here, not strings: NodeConfig inherits these fields, and checks their values by them.
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from strandline.model.arguments import Duration, checked, whole
from strandline.model.retention import FOREVER, Retention, SlotLimits, as_retention, default_limits
from strandline.node.lead.policies import NO_FLOW_LIMITS, CommitPolicy, FlowLimits, parse_policy
from strandline.tier.attachment import PARTITIONS
from strandline.tier.copy.tierer import LINGER, TARGET_BYTES


class Option(NamedTuple):
    """In the type of a setting: how ``strandline node run`` describes it as an option, and calls its value."""

    help: str
    value: str | None = None


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Settings of the tierer of a primary."""

    retention: str | Retention = FOREVER
    """How long segments are kept; consumers' slots pin them."""
    target: Annotated[int, whole(1, 1 << 30)] = TARGET_BYTES
    """Bytes of a segment."""
    linger: float = LINGER
    """Seconds after which a smaller segment is copied."""
    pause: Duration = 10.0
    """Seconds between two rounds."""
    events: str | None = None
    """The topic of segment events: the address of a topic of logs, by default ``events`` in the store, or
    ``kafka://host:port/topic``. Fixed once the cold tier is attached."""
    partitions: Annotated[int, whole(1, 10_000)] = PARTITIONS
    """Partitions of that topic; fixed, too."""
    options: Mapping[str, str] | None = field(default=None, repr=False)
    """Settings of the object store, by obstore's names."""
    events_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Settings of the Kafka client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Settings of a node for leading and following, without its folder, its lease and its server."""

    policy: Annotated[
        str | CommitPolicy,
        Option("When an append counts: local, ack_n(2), quorum(a,b,c) or regions(eu=1,us=1).", "POLICY"),
    ] = "local"
    retention: Annotated[str | Retention, Option("forever, consumed, age:7d or bytes:100GiB.", "POLICY")] = FOREVER
    limits: SlotLimits | None = None
    """How far a replica may lag before its slot is invalidated and it has to bootstrap again.

    By default 64 GiB where age or size bounds the log, and unlimited otherwise; ``SlotLimits()`` is always unlimited.
    """
    flow: FlowLimits = NO_FLOW_LIMITS
    poll_seconds: Duration = 1.0
    """Heartbeat interval in seconds."""
    region: Annotated[str | None, Option("The region it runs in.", "NAME")] = None
    url: Annotated[str | None, Option("Where the other nodes reach it, if not where it listens.", "URL")] = None
    nodes: Annotated[
        Mapping[str, str],
        Option(
            "Another node of the log, at its own --url. Give all: they are asked before this one takes over, and only "
            "they get its token. 'strandline node add' and 'node remove' change them later.",
            "NAME=URL",
        ),
    ] = field(default_factory=lambda: MappingProxyType({}))
    cold: Annotated[
        str | None,
        Option(
            "The store of the log's cold tier, such as s3://bucket/orders: whichever node leads copies the log there, "
            "and all nodes read it. The log keeps it; the other nodes learn it from the primary.",
            "URL",
        ),
    ] = None
    tiering: TierSettings = field(default_factory=TierSettings)
    content_type: Annotated[
        str | None, Option("The media type of the values, which a new log records for good.", "TYPE")
    ] = None
    automatic: Annotated[bool, Option("Take over when the primary is gone; needs a lease and a quorum.")] = False

    @property
    def cold_address(self) -> str:
        """The address of the cold tier as it is stored; empty for none."""
        return (self.cold or "").rstrip("/")

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
