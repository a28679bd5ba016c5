"""Following a log: the engine, and the sinks that move their cursor only after apply.

The room can be called: ``strandline.follow(log, sink)`` is :func:`strandline.follow.run.follow`. One name serves as
both, because importing any part of the room binds it in the package anyway.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from strandline.follow.run import follow

        return follow(*args, **options)


sys.modules[__name__].__class__ = _Room
