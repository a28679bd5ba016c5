"""Tables that follow a log: rows and cursor in one commit, written by any number of workers.

``sl.DeltaSink`` is such a table for ``sl.follow`` and ``sl.spark.follow``; the functions here look after one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.tables.files.upkeep import UpkeepDone as UpkeepDone
    from strandline.tables.maintain.contract import MaintainedTable as MaintainedTable
    from strandline.tables.maintain.contract import TableDescription as TableDescription
    from strandline.tables.maintain.opening import existing as existing
    from strandline.tables.maintain.operations import TableCheck as TableCheck
    from strandline.tables.maintain.operations import describe as describe
    from strandline.tables.maintain.operations import letters as letters
    from strandline.tables.maintain.operations import optimize as optimize
    from strandline.tables.maintain.operations import rebuild as rebuild
    from strandline.tables.maintain.operations import replay_letters as replay_letters
    from strandline.tables.maintain.operations import vacuum as vacuum
    from strandline.tables.maintain.operations import verify as verify
    from strandline.tables.maintain.replay import Replayed as Replayed
    from strandline.tables.routes.cut import cut as cut
    from strandline.tables.routes.route import Route as Route
    from strandline.tables.routes.route import by as by
    from strandline.tables.routes.route import route as route
    from strandline.tables.rows.conditions import where as where
    from strandline.tables.rows.partitions import Layout as Layout
    from strandline.tables.rows.partitions import Upkeep as Upkeep

_get, __dir__, __all__ = lazy(__spec__)


def __getattr__(name: str) -> Any:
    return _get(name)
