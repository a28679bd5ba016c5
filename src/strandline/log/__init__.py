"""Logs: the contract of every log, the rules of slots and retention, and the logs themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.log import topic as topic
    from strandline.log.memory import MemoryLog as MemoryLog
    from strandline.log.object.log import ObjectLog as ObjectLog
    from strandline.log.object.sources import forget_source as forget_source
    from strandline.log.object.sources import sources as sources
    from strandline.log.read.value_format import read_decoded as read_decoded
    from strandline.log.wal.read.reading import WalReader as WalReader
    from strandline.model.cursor import Bounds as Bounds
    from strandline.model.cursor import Limit as Limit
    from strandline.model.head import Receipt as Receipt
    from strandline.model.head import WriterId as WriterId
    from strandline.model.records import READ_SCHEMA as READ_SCHEMA
    from strandline.model.records import RECORD_SCHEMA as RECORD_SCHEMA
    from strandline.model.retention import SlotLimits as SlotLimits

__getattr__, __dir__, __all__ = lazy(__spec__)
