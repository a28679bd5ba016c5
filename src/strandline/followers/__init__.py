"""Followers of logs: stores, their batching and exports, and the parts for own sinks, stores and watchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.followers.run import Batching as Batching
    from strandline.followers.stores.append_log import AppendLogStore as AppendLogStore
    from strandline.followers.stores.rocks import RocksStore as RocksStore
    from strandline.followers.stores.state import MemoryStore as MemoryStore
    from strandline.followers.stores.state import RuledStore as RuledStore
    from strandline.followers.watch.api import watch_applied_async as watch_applied_async
    from strandline.followers.watch.exports import Exports as Exports
    from strandline.kv.contract import Listed as Listed
    from strandline.model.keyed import Updates as Updates
    from strandline.model.sink import Sink as Sink
    from strandline.model.sink import Store as Store
    from strandline.model.sink import StorePosition as StorePosition
    from strandline.model.sink import remaining as remaining

__getattr__, __dir__, __all__ = lazy(__spec__)
