"""Tables that follow a log: rows and cursor in one commit, written by any number of workers.

``sl.DeltaSink`` is such a table for ``sl.follow`` and ``sl.spark.follow``; the functions here look after one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.tables.maintained import MaintainedTable as MaintainedTable
    from strandline.tables.maintenance import TableCheck as TableCheck
    from strandline.tables.maintenance import TableDescription as TableDescription
    from strandline.tables.maintenance import describe as describe
    from strandline.tables.maintenance import existing as existing
    from strandline.tables.maintenance import optimize as optimize
    from strandline.tables.maintenance import rebuild as rebuild
    from strandline.tables.maintenance import replay_letters as replay_letters
    from strandline.tables.maintenance import vacuum as vacuum
    from strandline.tables.maintenance import verify as verify
    from strandline.tables.replay import Replayed as Replayed

_NAMES = (
    "TableCheck",
    "TableDescription",
    "describe",
    "existing",
    "optimize",
    "rebuild",
    "replay_letters",
    "vacuum",
    "verify",
)
_get, __dir__, __all__ = lazy(
    __name__,
    {
        **dict.fromkeys(_NAMES, "strandline.tables.maintenance"),
        "MaintainedTable": "strandline.tables.maintained",
        "Replayed": "strandline.tables.replay",
    },
)


def __getattr__(name: str) -> Any:
    return _get(name)
