"""Spark as the engine: a data source that reads logs in parallel, and pipelines that keep tables in step with them.

``spark.read.format("strandline")`` and ``spark.readStream.format("strandline")`` need no import: the data source
registers itself wherever the package is installed. :func:`read` leaves cold data to Spark's own Parquet reader,
:func:`follow` keeps a sink exactly in step, and :func:`local_session` starts a small session on this machine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strandline.model.errors import MissingExtra

if TYPE_CHECKING:
    from strandline.spark.pipeline import Following as Following
    from strandline.spark.pipeline import follow as follow
    from strandline.spark.reading import read as read
    from strandline.spark.session import local_session as local_session
    from strandline.spark.source import StrandlineDataSource as StrandlineDataSource

# Lazy, because executors import this package for the data source alone.
_HOMES = {
    "Following": "strandline.spark.pipeline",
    "StrandlineDataSource": "strandline.spark.source",
    "follow": "strandline.spark.pipeline",
    "local_session": "strandline.spark.session",
    "read": "strandline.spark.reading",
}

__all__ = ["Following", "StrandlineDataSource", "follow", "local_session", "read"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'strandline.spark' has no attribute {name!r}")
    try:
        value = getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "py4j"):
            raise
        raise MissingExtra("Spark needs the extra 'spark': pip install 'strandline[spark]'.") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
