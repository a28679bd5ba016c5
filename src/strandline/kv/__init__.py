"""Key-value stores that can be watched: on a log, in NATS JetStream, or in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.kv.contract import KeyValue as KeyValue
    from strandline.kv.contract import Watcher as Watcher
    from strandline.kv.log import LogKeyValue as LogKeyValue
    from strandline.kv.memory import MemoryKeyValue as MemoryKeyValue
    from strandline.kv.nats.bucket import NatsKeyValue as NatsKeyValue
    from strandline.model.keyed import EVERYTHING as EVERYTHING
    from strandline.model.keyed import Prefix as Prefix
    from strandline.model.keyed import Update as Update

__getattr__, __dir__, __all__ = lazy(__spec__)
