"""Batch reads of a tiered log: segments by Spark's Parquet reader, hot records by the data source."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Annotated, Any, Final, cast

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import StructField, StructType

from strandline.errors import InvalidInput, NotFound, NotReady
from strandline.log.read.planning import known_columns
from strandline.model.addresses import Address
from strandline.model.arguments import ANY, checked
from strandline.model.cursor import Cursor, Start
from strandline.model.records import READ_SCHEMA
from strandline.spark.datasource.opened import pin, report_skipped, trimmed_while_planned
from strandline.spark.datasource.planning import TierBoundary, cursor_at, resume_point, scans, spark_path
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.failures import GatewayError, retried
from strandline.spark.opening import SharedLog, access_options, opened
from strandline.spark.options import ReadOptions, parse_options
from strandline.tier.read.cold_reader import ColdPiece
from strandline.tier.read.tiered_log import TieredLog

_LOGGER: Final = logging.getLogger(__name__)

_INSTEAD: Final = {
    "startingoffset": "since=",
    "endingoffset": "upto=",
    **dict.fromkeys(("logformat", "decode", "badrows"), "format('strandline')"),
}
"""Options of the data source that this read does not take, and what does."""

_TRIES: Final = 4
"""How often a read is planned again because segments expired meanwhile."""

_STRICT: Final = {
    # Whatever the session's settings: a missing segment is an error and never fewer records, and stored values
    # are not converted.
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "mergeSchema": "false",
    "datetimeRebaseMode": "CORRECTED",
}


@checked
def read(
    spark: Annotated[SparkSession, ANY],
    log: SharedLog | Address,
    *,
    since: Start | None = None,
    upto: int | None = None,
    columns: Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The records of a log from ``since`` up to the offset ``upto``, each exactly once, in no particular order.

    By default that is everything that is retained, in either tier, as of this call; later actions on the result find
    the same records. Segments are read by Spark's own Parquet reader, which skips the row groups and columns
    that a query does not need; the rest by the data source. The boundary is decided here, once, and segments win
    where both have a record: records that the hot tier trims before the query runs are found in the cold one.

    ``since`` is the start of a new consumer: an offset, a cursor, a time, what is ``"retained"`` (the default),
    the ``"beginning"``, which is ``CursorExpired`` if it was trimmed, or ``"now"``. ``columns`` selects the columns,
    in this order. ``options`` are the data source's: ``partitions``, ``failOnDataLoss``,
    ``hold``, which pins the records, in both tiers, for a time that begins now, and ``storage.*``.

    ``CursorExpired`` if neither tier has the first record; ``Diverged`` for a cursor of another log or past
    its end; ``NotFound`` names a segment that is lost. A segment that a compaction replaces after this returned is
    readable for the grace period of the tierer. If retention or an erasure removes one, the query fails with Spark's
    error that the file does not exist, and never returns less.

    Spark's Parquet reader reads segments in ``file://`` and, by ``s3a``, which the session must be configured for, in
    ``s3://``. Segments in other stores are read by the data source, and a line is logged.
    """
    if not isinstance(spark, SparkSession):
        raise InvalidInput(
            "This read needs a classic Spark session in the driver, not Spark Connect: use "
            "spark.read.format('strandline') there."
        )
    given = access_options(log, {name.lower(): value for name, value in (options or {}).items()})
    for name, word in _INSTEAD.items():
        if name in given:
            raise InvalidInput(f"This read takes no option {name!r}: use {word} instead.")
    names = READ_SCHEMA.names if columns is None else known_columns(columns)
    if not names or len(set(names)) < len(names):
        raise InvalidInput(f"Ask for at least one column, and for each once, not for {names}.")
    given.setdefault("partitions", str(spark.sparkContext.defaultParallelism))
    with opened(log, given) as source:
        wanted = parse_options({**given, "path": source.url})
        given.pop("hold", None)
        tables = _Tables(spark, source.url, given, names)
        lost: str | None = None
        for _ in range(_TRIES):
            with contextlib.ExitStack() as undo:
                plan = retried(lambda undo=undo: _held(source, since, upto, wanted, undo))  # type: ignore[misc]
                for piece in plan.boundary.cold:
                    if piece.path == lost:
                        raise NotFound(
                            f"The segment {piece.store}/{piece.path} is missing (offsets {piece.first} to "
                            f"{piece.next - 1}), and its events record no removal: restore the object, or read from "
                            "after it."
                        )
                found = tables.of(plan.boundary)
                if isinstance(found, DataFrame):
                    undo.pop_all()  # the hold stays, for its time
                    report_skipped(wanted.url, plan.asked, plan.skipped)
                    return found
                lost = found
    raise NotReady(f"Segments of {wanted.url} expired at each of {_TRIES} tries to plan a read; ask again.")


@dataclass(frozen=True, slots=True)
class _Plan:
    asked: Cursor
    skipped: int
    """Number of records from there on that are no longer retained, and skipped."""
    boundary: TierBoundary


def _held(
    log: SharedLog, since: Start | None, upto: int | None, options: ReadOptions, undo: contextlib.ExitStack
) -> _Plan:
    """A plan, and a hold on its records if one was requested; ``undo`` releases it."""
    plan = _planned(log, since, upto, options)
    begin = plan.boundary.since
    if options.hold is None or begin.next >= plan.boundary.end:
        return plan
    with trimmed_while_planned(options.url):
        pin(log, begin.next, options, undo)
    # Segments that were listed before the hold may be deleted meanwhile. From now on none is.
    return replace(plan, boundary=_planned(log, begin, plan.boundary.end, options).boundary)


def _planned(log: SharedLog, since: Start | None, upto: int | None, options: ReadOptions) -> _Plan:
    bounds = log.bounds()
    asked = cursor_at("retained" if since is None else since, log, bounds)
    end = bounds.next if upto is None else upto
    if end > bounds.next:
        raise InvalidInput(f"upto is {end}, but {options.url} ends at {bounds.next} now: ask for less.")
    begin, skipped = resume_point(asked, log.log_id, bounds, fail_on_data_loss=options.fail_on_data_loss)
    if not isinstance(log, TieredLog) or begin.next >= end:
        return _Plan(asked, skipped, TierBoundary(begin, (), max(begin.next, end)))
    boundary = TierBoundary(begin, tuple(log.pieces(begin.next, end)), end)
    # After the lookup of segments: a record that the hot tier has trimmed by then and that is in none of them was
    # copied since, or expired. A retry finds out, here instead of when the query runs.
    if boundary.cut < end and log.hot.bounds().first > boundary.cut:
        raise NotReady(f"Offset {boundary.cut} of {options.url} moved while a read of it was being planned; ask again.")
    return _Plan(asked, skipped, boundary)


@dataclass(frozen=True, slots=True)
class _Tables:
    """The tables that Spark reads."""

    spark: SparkSession
    url: str
    options: Mapping[str, str] = field(repr=False)
    columns: list[str]

    def of(self, boundary: TierBoundary) -> DataFrame | str:
        """One table of both tiers; or the path of a missing segment."""
        paths = self._readable(boundary.cold)
        if paths is None:
            return self._by_source(boundary.since, boundary.end)
        try:
            parts = [
                self._by_parquet([paths[path] for path in scan.paths], scan.first, scan.next)
                for scan in scans(boundary.cold)
            ]
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            return next(piece.path for piece in boundary.cold if piece.path in str(error))
        if boundary.cut < boundary.end or not parts:
            parts.append(self._by_source(boundary.since.at(boundary.cut), boundary.end))
        return reduce(DataFrame.unionAll, parts)

    def _by_source(self, since: Cursor, end: int) -> DataFrame:
        return (
            self.spark.read.format("strandline")
            .options(**{**self.options, "startingoffset": str(since), "endingoffset": str(since.at(end))})
            .schema(_nullable(self.columns))
            .load(self.url)
        )

    def _by_parquet(self, paths: Sequence[str], first: int | None, end: int | None) -> DataFrame:
        schema = _nullable([*self.columns, *([] if "offset" in self.columns else ["offset"])])
        frame = self.spark.read.schema(schema).options(**_STRICT).parquet(*paths)
        # Spark skips row groups by these, too.
        if first is not None:
            frame = frame.where(sql.col("offset") >= first)
        if end is not None:
            frame = frame.where(sql.col("offset") < end)
        return frame.select(*self.columns)

    def _readable(self, pieces: Sequence[ColdPiece]) -> dict[str, str] | None:
        """Spark's address of each object; None, and a line in the log, if its Parquet reader cannot read there."""
        paths: dict[str, str] = {}
        for piece in pieces:
            path = spark_path(piece.store, piece.path)
            if path is None or (path.startswith("s3a:") and not self._reads_s3()):
                _LOGGER.warning(
                    "%s: segments in %s are read by the data source, because Spark's Parquet reader is not set up for "
                    "that store.",
                    self.url,
                    piece.store,
                )
                return None
            paths[piece.path] = path
        return paths

    def _reads_s3(self) -> bool:
        java = cast("Any", self.spark)
        try:
            java._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass("s3a", java._jsc.hadoopConfiguration())  # noqa: SLF001
        except (GatewayError, PySparkException):
            return False
        return True


def _nullable(columns: Sequence[str]) -> StructType:
    """These columns of a log. Spark makes every column of a Parquet file nullable, so all columns are."""
    return StructType([StructField(name, SPARK_SCHEMA[name].dataType) for name in columns])
