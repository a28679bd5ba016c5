"""Rebuilding a table on Spark's executors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from strandline.model.arguments import anything, checked
from strandline.model.cursor import Cursor
from strandline.spark.opening import SharedLog, access_options, opened
from strandline.spark.pipelines.workers import Place, SparkWorkers
from strandline.tables.maintain.contract import MaintainedTable


@checked
def rebuild(
    spark: Annotated[Any, anything("a SparkSession")],
    log: SharedLog | str,
    sink: Annotated[MaintainedTable, anything("a Delta or Iceberg sink")],
    *,
    upto: int | None = None,
    place: Place = "auto",
    options: Mapping[str, str] | None = None,
) -> Cursor:
    """Build all rows of a table again from both tiers of its log, on executors; returns the table's cursor.

    The new rows replace the old ones in one commit with the cursor, from where the table began up to ``upto``, or the
    end of the log now; readers see the old rows until then. Afterwards :func:`~strandline.spark.follow` goes on from
    there. Interrupted at any moment it has changed nothing, and can be repeated. Delta and Iceberg; a table in a
    database is ``Unsupported``: ``sl.tables.rebuild`` builds it in one transaction.

    ``CursorExpired`` if the log no longer has the offset at which the table began, ``Conflict`` if another commit
    came in between, ``NotFound`` if there is no table.
    """
    given = access_options(log, {name.lower(): value for name, value in (options or {}).items()})
    with opened(log, given) as source:
        sink.meet(source)
        end = source.end().next if upto is None else upto
        return sink.rebuilt(source, end, SparkWorkers(spark, place, reruns=True))
