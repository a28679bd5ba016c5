"""Rebuilding a table on Spark's executors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strandline.errors import Unsupported
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Start
from strandline.spark.executor_pool import executors
from strandline.spark.opening import SharedLog, access_options, opened
from strandline.spark.pipelines.pipeline import transforming
from strandline.spark.pipelines.workers import Place, SparkWorkers
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.rebuilding import rebuild_table


@checked
def rebuild(
    spark: Any,
    log: SharedLog | Address,
    sink: MaintainedTable,
    *,
    transform: Any = None,
    start: Start | None = None,
    upto: int | None = None,
    slot: str | None = None,
    verify: bool = True,
    place: Place = "auto",
    options: Mapping[str, str] | None = None,
) -> Cursor:
    """Build all rows of a table again from both tiers of its log, on executors; returns the table's cursor.

    As :func:`strandline.tables.rebuild`: executors write the new rows, and compare them with the log (``verify``), then
    one commit replaces the old rows, from where the table began, or from ``start`` on, up to ``upto``, or the end of
    the log now; ``slot`` is that of its follower. Afterwards :func:`~strandline.spark.follow` continues there.
    Interrupted at any moment it has changed nothing, and can be repeated. ``transform`` is that of
    :func:`~strandline.spark.follow`, of a table that is followed with one: its rows are not compared, since nothing but
    Spark can give them, so that it needs ``verify=False``. Delta and Iceberg; a table in a database is ``Unsupported``:
    ``sl.tables.rebuild`` builds it in one transaction.
    """
    given = access_options(log, {name.lower(): value for name, value in (options or {}).items()})
    with opened(log, given) as source:
        workers, pool = SparkWorkers(spark, place, reruns=True), None if place == "driver" else executors(spark)
        if transform is not None and verify:
            raise Unsupported(
                "Rows of a transform that Spark runs cannot be compared with the log: rebuild the table without the "
                "comparison (verify=False)."
            )
        if transform is not None:
            sink, workers = transforming(spark, source, sink, transform, place, reruns=True)
        return rebuild_table(
            sink, source, start=start, upto=upto, slot=slot, workers=workers, pool=pool, is_verified=verify
        )
