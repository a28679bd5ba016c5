"""Rebuilding a table on Spark's executors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from strandline.model.arguments import anything, checked
from strandline.model.cursor import Cursor, Start
from strandline.spark.executor_pool import executors
from strandline.spark.opening import SharedLog, access_options, opened
from strandline.spark.pipelines.workers import Place, SparkWorkers
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.rebuilding import rebuild_table


@checked
def rebuild(
    spark: Annotated[Any, anything("a SparkSession")],
    log: SharedLog | str,
    sink: Annotated[MaintainedTable, anything("a Delta or Iceberg sink")],
    *,
    start: Start | None = None,
    upto: int | None = None,
    verify: bool = True,
    place: Place = "auto",
    options: Mapping[str, str] | None = None,
) -> Cursor:
    """Build all rows of a table again from both tiers of its log, on executors; returns the table's cursor.

    As :func:`strandline.tables.rebuild`: executors write the new rows, and compare them with the log (``verify``), then
    one commit replaces the old rows, from where the table began, or from ``start`` on, up to ``upto``, or the end of
    the log now. Afterwards :func:`~strandline.spark.follow` continues there. Interrupted at any moment it has
    changed nothing, and can be repeated. Delta and Iceberg; a table in a database is ``Unsupported``:
    ``sl.tables.rebuild`` builds it in one transaction.
    """
    given = access_options(log, {name.lower(): value for name, value in (options or {}).items()})
    with opened(log, given) as source:
        workers, pool = SparkWorkers(spark, place, reruns=True), None if place == "driver" else executors(spark)
        return rebuild_table(sink, source, start=start, upto=upto, workers=workers, pool=pool, is_verified=verify)
