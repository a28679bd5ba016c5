"""Followers of logs: their batching and exports, and the parts for own sinks, stores and watchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.followers.run import Batching as Batching
    from strandline.followers.stores.state import RuledStore as RuledStore
    from strandline.followers.watch.exports import Exports as Exports
    from strandline.kv.contract import Listed as Listed
    from strandline.model.keyed import Updates as Updates
    from strandline.model.sink import StorePosition as StorePosition
    from strandline.model.sink import remaining as remaining

__getattr__, __dir__, __all__ = lazy(__spec__)
