"""Spark: a data source that reads logs in parallel, and pipelines that follow logs into tables.

``spark.read.format("strandline")`` and ``spark.readStream.format("strandline")`` need no import: the data source
registers itself wherever the package is installed. :func:`read` leaves cold data to Spark's own Parquet reader,
:func:`follow` keeps a sink exactly in step with a log, :func:`register` gives a Delta table a name, :func:`listen`
reports lag and rates of streams, and :func:`local_session` starts a small local session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strandline.errors import MissingExtra
from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.spark.datasource.reading import read as read
    from strandline.spark.datasource.source import StrandlineDataSource as StrandlineDataSource
    from strandline.spark.executor_pool import executors as executors
    from strandline.spark.listener import listen as listen
    from strandline.spark.pipelines.following import Following as Following
    from strandline.spark.pipelines.pipeline import follow as follow
    from strandline.spark.pipelines.pipeline import rebuild as rebuild
    from strandline.spark.pipelines.progress import PipelineProgress as PipelineProgress
    from strandline.spark.pipelines.registration import register as register
    from strandline.spark.query_start import start as start
    from strandline.spark.session import local_session as local_session

# Lazy, because executors import this package for the data source alone.
_get, __dir__, __all__ = lazy(__spec__)


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "py4j"):
            raise
        raise MissingExtra("Spark needs the extra 'spark': pip install 'strandline[spark]'.") from error
