"""Nodes: a primary and its replicas over Arrow Flight, with commit policies, elections and bootstrap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.node.api import Primary as Primary
    from strandline.node.api import Replica as Replica
    from strandline.node.flight.client.remote_log import RemoteLog as RemoteLog
    from strandline.node.flight.security import ClientSecurity as ClientSecurity
    from strandline.node.flight.security import ServerSecurity as ServerSecurity
    from strandline.node.lead.policies import FlowLimits as FlowLimits
    from strandline.node.lead.policies import parse_policy as parse_policy
    from strandline.node.options import TierSettings as TierSettings
    from strandline.node.running import NodeConfig as NodeConfig
    from strandline.node.running import RunningNode as RunningNode

__getattr__, __dir__, __all__ = lazy(__spec__)
