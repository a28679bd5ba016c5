"""Compatibility: queues of version 1 and spools, formats and APIs of other systems and older versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.compat.spool.lsn_log import WriteAheadLog as WriteAheadLog
    from strandline.compat.v1.log import QueueFormat as QueueFormat
    from strandline.compat.v1.log import QueueLog as QueueLog

__getattr__, __dir__, __all__ = lazy(__spec__)
