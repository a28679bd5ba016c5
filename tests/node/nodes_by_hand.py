"""Nodes of one log in one process, without threads and without a network: what tests step through by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa

from strandline.errors import TransientStorageError
from strandline.model.records import Op, record_batch
from strandline.node.lead.policies import Quorum, parse_policy
from strandline.node.messages import ReplicationFeed
from strandline.node.node import Node
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions
from strandline.storage.disk import DISK, Disk
from strandline.storage.env import Env
from strandline.storage.lease import Lease
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.plain import PlainStore

TERM = 8.0


def records(*values: bytes) -> pa.RecordBatch:
    """A batch with these values."""
    count = len(values)
    return record_batch(timestamps=[7] * count, ops=[Op.PUT] * count, keys=[b"k"] * count, values=list(values))


@dataclass
class Impatient:
    """A feed that waits for nothing: time passes only when a test says so."""

    feed: ReplicationFeed

    @property
    def heartbeat(self) -> Any:
        """The primary's latest word."""
        return self.feed.heartbeat

    def wait(self, timeout: float) -> int:
        """Nothing is read from a disk to be taken."""
        del timeout
        return 0

    def take(self, timeout: float) -> Any:
        """What has come."""
        del timeout
        return self.feed.take(0.0)

    def close(self) -> None:
        """End it."""
        self.feed.close()


class Link:
    """A connection to a node, which outlives it. ``before`` and ``after`` may raise, or change things."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        cluster = self._cluster

        def call(*args: Any, **options: Any) -> Any:
            if self._name not in cluster.nodes or self._name in cluster.cut:
                raise TransientStorageError(f"{self._name} cannot be reached")
            if method in cluster.before:
                cluster.before[method](self._name)
            node = cluster.nodes[self._name]
            found = getattr(node if method == "report" else node.primary, method)(*args, **options)
            if method == "feed":
                found = Impatient(found)
            if method in cluster.after:
                found = cluster.after[method](self._name, found)
            return found

        return call

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass
class Cluster:
    """Nodes by name; ``step`` lets each of them do the next thing."""

    folder: Path
    policy: str = "quorum(a,b,c)"
    automatic: bool = False
    leased: bool = True
    options: NodeOptions = field(default_factory=NodeOptions)
    clock: ManualClock = field(default_factory=ManualClock)
    store: PlainStore = field(default_factory=PlainStore)
    disk: Disk = DISK
    disks: dict[str, Disk] = field(default_factory=dict)
    """Those of nodes that have one of their own."""
    nodes: dict[str, Node] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    before: dict[str, Callable[[str], None]] = field(default_factory=dict)
    after: dict[str, Callable[[str, Any], Any]] = field(default_factory=dict)
    names: str = "abc"

    def start(self, name: str, **more: Any) -> Node:
        """Start a node, or start it again."""
        policy = parse_policy(self.policy)
        options = replace(
            self.options,
            policy=policy,
            url=f"to:{name}",
            nodes={other: f"to:{other}" for other in self.names},
            automatic=self.automatic and isinstance(policy, Quorum),
        )
        lease = None
        if self.leased:
            lease = Lease(self.store, "lease", f"{name} to:{name}", seconds=TERM, env=Env(clock=self.clock))
        node_folder = NodeFolder.open(
            str(self.folder / name),
            name,
            env=Env(disk=self.disks.get(name, self.disk), clock=self.clock, chance=SeededChance(crc32(name.encode()))),
            background=False,
        )
        connect = lambda url: Link(self, url.removeprefix("to:"))
        upstream = None if self.leased else f"to:{self.names[0]}"
        node = Node(node_folder, options, connect=connect, lease=lease, upstream=upstream, **more)
        self.nodes[name] = node
        return node

    def kill(self, name: str) -> None:
        """End a node as a killed process ends: nothing is said to anybody, the lease is kept."""
        node = self.nodes.pop(name)
        node._lease = None
        node._settle = lambda: None
        node.close()

    def stop(self, name: str) -> None:
        """End a node in order."""
        self.nodes.pop(name).close()

    def step(self, times: int = 1, *, seconds: float = 0.05) -> None:
        """Let each node do the next thing, and some time pass."""
        for _ in range(times):
            for node in list(self.nodes.values()):
                node.step()
            self.clock.advance(seconds)

    def until(self, condition: Callable[[], object], *, steps: int = 2000) -> None:
        """Step until something is so."""
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError({name: node.condition for name, node in self.nodes.items()})

    def settled(self, *followers: str, leader: str = "a") -> None:
        """Step until this one leads, and the others have everything it has."""
        self.until(
            lambda: (
                self.nodes[leader].is_primary
                and all(
                    self.nodes[name].condition == "following"
                    and self.end(name) == self.end(leader)
                    and any(
                        each.durable == self.end(leader)
                        for each in self.nodes[leader].primary.registry.replicas.values()
                        if each.name == name
                    )
                    for name in followers
                )
            )
        )

    def end(self, name: str) -> int:
        """Where a node's copy ends; -1 without one."""
        copy = self.nodes[name].copy
        return -1 if copy is None else copy.log.bounds().next

    def content(self, name: str) -> list[tuple[int, bytes]]:
        """Offsets and values of a node's whole copy, committed or not."""
        log = self.nodes[name].copy.log
        return [
            row
            for batch in log.read()
            for row in zip(batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True)
        ]

    def append(self, *values: bytes, on: str = "a", **options: Any) -> Any:
        """Append on a node, and let its log be durable there; returns the handle."""
        handle = self.nodes[on].primary.submit(records(*values), **options)
        handle._handle.result()
        return handle

    def close(self) -> None:
        """Close all nodes."""
        for name in list(self.nodes):
            self.kill(name)
