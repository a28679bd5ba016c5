"""Strandline: a durable, replayable change log for Python and Spark.

Append changes to a bucket; tables, caches and replicas follow exactly; kill anything at any moment, throw away the
checkpoint, and they are still right.

>>> import strandline as sl
>>> log = sl.open("memory://doctest-front", create=True)
>>> with log.producer() as producer:
...     producer.append(key=b"k", value=b"v").result(timeout=10)
Receipt(first=0, count=1)
>>> [batch.num_rows for batch in log.read()]
[1]
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strandline import spark as spark
    from strandline.follow.delta import DeltaSink as DeltaSink
    from strandline.follow.exports import Exports as Exports
    from strandline.follow.keyed.log import LogBucket as LogBucket
    from strandline.follow.keyed.memory import MemoryBucket as MemoryBucket
    from strandline.follow.keyed.nats import NatsBucket as NatsBucket
    from strandline.follow.run import Batching as Batching
    from strandline.follow.run import follow as follow
    from strandline.follow.snapshots.artifacts import Artifacts as Artifacts
    from strandline.follow.snapshots.bootstrap import bootstrap as bootstrap
    from strandline.follow.stores.appendlog import AppendLogStore as AppendLogStore
    from strandline.follow.stores.memory import MemoryStore as MemoryStore
    from strandline.follow.stores.rocks import RocksStore as RocksStore
    from strandline.follow.supervise import Supervisor as Supervisor
    from strandline.follow.watch import watch_applied as watch_applied
    from strandline.follow.watch import watch_applied_async as watch_applied_async
    from strandline.log.contract import Log as Log
    from strandline.log.contract import Receipt as Receipt
    from strandline.log.memory import MemoryLog as MemoryLog
    from strandline.log.object import ObjectLog as ObjectLog
    from strandline.log.object import Producer as Producer
    from strandline.log.queue.consumer import Consumer as Consumer
    from strandline.log.v1 import QueueLog as QueueLog
    from strandline.log.wal.face import WriteAheadLog as WriteAheadLog
    from strandline.log.wal.reader import WalReader as WalReader
    from strandline.model import errors as errors
    from strandline.model.cursor import Bounds as Bounds
    from strandline.model.cursor import Cursor as Cursor
    from strandline.model.cursor import Limit as Limit
    from strandline.model.errors import StrandlineError as StrandlineError
    from strandline.model.head import WriterId as WriterId
    from strandline.model.keyed import EVERYTHING as EVERYTHING
    from strandline.model.keyed import Prefix as Prefix
    from strandline.model.keyed import Update as Update
    from strandline.model.records import READ_SCHEMA as READ_SCHEMA
    from strandline.model.records import RECORD_SCHEMA as RECORD_SCHEMA
    from strandline.model.records import Op as Op
    from strandline.model.snapshot import Snapshot as Snapshot
    from strandline.node.face import Primary as Primary
    from strandline.node.face import Replica as Replica
    from strandline.node.flight.remote import RemoteLog as RemoteLog
    from strandline.node.flight.security import ClientSecurity as ClientSecurity
    from strandline.node.flight.security import ServerSecurity as ServerSecurity
    from strandline.node.flow import FlowLimits as FlowLimits
    from strandline.node.policies import parse_policy as parse_policy
    from strandline.node.running import NodeConfig as NodeConfig
    from strandline.node.running import RunningNode as RunningNode
    from strandline.tier.front import attach as attach
    from strandline.tier.front import open_tiered as open  # noqa: A004 - sl.open is the public name
    from strandline.tier.front import tiered as tiered
    from strandline.tier.front import tiering as tiering
    from strandline.tier.manager import MetadataManager as MetadataManager
    from strandline.tier.tiered import TieredLog as TieredLog
    from strandline.tier.tierer import Tierer as Tierer


# Where each public name lives. Importing the package stays cheap, and an extra is needed only when it is used.
_HOMES = {
    "AppendLogStore": "strandline.follow.stores.appendlog",
    "Artifacts": "strandline.follow.snapshots.artifacts",
    "attach": "strandline.tier.front",
    "Batching": "strandline.follow.run",
    "bootstrap": "strandline.follow.snapshots.bootstrap",
    "Bounds": "strandline.model.cursor",
    "ClientSecurity": "strandline.node.flight.security",
    "Consumer": "strandline.log.queue.consumer",
    "Cursor": "strandline.model.cursor",
    "DeltaSink": "strandline.follow.delta",
    "EVERYTHING": "strandline.model.keyed",
    "Exports": "strandline.follow.exports",
    "FlowLimits": "strandline.node.flow",
    "Limit": "strandline.model.cursor",
    "Log": "strandline.log.contract",
    "LogBucket": "strandline.follow.keyed.log",
    "MemoryBucket": "strandline.follow.keyed.memory",
    "MemoryLog": "strandline.log.memory",
    "MemoryStore": "strandline.follow.stores.memory",
    "MetadataManager": "strandline.tier.manager",
    "NatsBucket": "strandline.follow.keyed.nats",
    "NodeConfig": "strandline.node.running",
    "ObjectLog": "strandline.log.object",
    "Op": "strandline.model.records",
    "parse_policy": "strandline.node.policies",
    "Prefix": "strandline.model.keyed",
    "Primary": "strandline.node.face",
    "Producer": "strandline.log.object",
    "QueueLog": "strandline.log.v1",
    "READ_SCHEMA": "strandline.model.records",
    "Receipt": "strandline.log.contract",
    "RECORD_SCHEMA": "strandline.model.records",
    "RemoteLog": "strandline.node.flight.remote",
    "Replica": "strandline.node.face",
    "RocksStore": "strandline.follow.stores.rocks",
    "RunningNode": "strandline.node.running",
    "ServerSecurity": "strandline.node.flight.security",
    "Snapshot": "strandline.model.snapshot",
    "StrandlineError": "strandline.model.errors",
    "Supervisor": "strandline.follow.supervise",
    "tiered": "strandline.tier.front",
    "TieredLog": "strandline.tier.tiered",
    "Tierer": "strandline.tier.tierer",
    "tiering": "strandline.tier.front",
    "Update": "strandline.model.keyed",
    "WalReader": "strandline.log.wal.reader",
    "watch_applied": "strandline.follow.watch",
    "watch_applied_async": "strandline.follow.watch",
    "WriteAheadLog": "strandline.log.wal.face",
    "WriterId": "strandline.model.head",
}
_RENAMED = {"open": ("strandline.tier.front", "open_tiered")}
# The room "follow" can itself be called: that is the function.
_ROOMS = {"errors": "strandline.model.errors", "follow": "strandline.follow", "spark": "strandline.spark"}

__all__ = [
    "EVERYTHING",
    "READ_SCHEMA",
    "RECORD_SCHEMA",
    "AppendLogStore",
    "Artifacts",
    "Batching",
    "Bounds",
    "ClientSecurity",
    "Consumer",
    "Cursor",
    "DeltaSink",
    "Exports",
    "FlowLimits",
    "Limit",
    "Log",
    "LogBucket",
    "MemoryBucket",
    "MemoryLog",
    "MemoryStore",
    "MetadataManager",
    "NatsBucket",
    "NodeConfig",
    "ObjectLog",
    "Op",
    "Prefix",
    "Primary",
    "Producer",
    "QueueLog",
    "Receipt",
    "RemoteLog",
    "Replica",
    "RocksStore",
    "RunningNode",
    "ServerSecurity",
    "Snapshot",
    "StrandlineError",
    "Supervisor",
    "TieredLog",
    "Tierer",
    "Update",
    "WalReader",
    "WriteAheadLog",
    "WriterId",
    "__version__",
    "attach",
    "bootstrap",
    "errors",
    "follow",
    "open",
    "parse_policy",
    "spark",
    "tiered",
    "tiering",
    "watch_applied",
    "watch_applied_async",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("strandline")
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    home, real = _RENAMED.get(name, (_HOMES.get(name), name))
    if home is None:
        raise AttributeError(f"module 'strandline' has no attribute {name!r}")
    value = getattr(import_module(home), real)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
