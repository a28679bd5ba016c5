"""Batch queries: a plan of everything between two offsets, as of planning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from strandline.errors import CursorExpired, InvalidInput, NotReady, StrandlineError
from strandline.log.object import ObjectLog
from strandline.model.cursor import Limit
from strandline.spark.datasource.decoding import Decoding
from strandline.spark.datasource.opened import OpenedLog, check_reaches, report_skipped
from strandline.spark.datasource.planning import resolve
from strandline.spark.failures import retried
from strandline.spark.options import ReadOptions
from strandline.spark.task_payload import SameVersion


class LogReader(SameVersion, DataSourceReader):
    """One batch query: everything from the starting to the ending offset, as of planning."""

    def __init__(self, options: ReadOptions, columns: pa.Schema, decoding: Decoding | None = None) -> None:
        """Nothing is opened yet."""
        self._at = OpenedLog(options, columns, decoding)

    def partitions(self) -> list[InputPartition]:  # Spark requires a list
        """The plan of the whole range, distributed over tasks."""
        try:
            return retried(self._plan)
        finally:
            self._at.close()

    def _plan(self) -> list[InputPartition]:
        at, options = self._at, self._at.options
        bounds = at.bounds(options.start)
        asked = resolve(at.located(options.start), at.log.log_id, bounds)
        upto = resolve(at.located(options.end), at.log.log_id, bounds).next
        since, skipped = at.admit(asked, bounds)
        if upto > bounds.next:
            raise InvalidInput(f"endingOffset is {upto}, but {options.url} ends at {bounds.next} now: ask for less.")
        if since.next >= upto:
            return []
        try:
            with self._held(since.next):
                spans = at.log.plan(since, Limit(upto=upto))
                check_reaches(spans, upto, options.url)
        except CursorExpired as error:
            # It was retained a moment ago. On a retry "earliest" is higher, or the offset is refused.
            raise NotReady(f"{options.url} was trimmed while a read of it was being planned; ask again.") from error
        report_skipped(options.url, asked, skipped)
        return at.pack(spans)

    @contextlib.contextmanager
    def _held(self, position: int) -> Iterator[None]:
        """Pin the records to plan, for the requested time; the end of the query is unknown."""
        seconds, plain = self._at.options.hold, self._at.log
        log = self._at.tiered or (plain if isinstance(plain, ObjectLog) else None)
        if seconds is not None and log is None:
            raise InvalidInput(f"{self._at.options.url} has no holds: let a slot pin what is read, or read without.")
        if seconds is None or log is None:
            yield
            return
        hold = log.hold(position, seconds)
        try:
            yield
        except BaseException:
            with contextlib.suppress(StrandlineError):  # it expires by itself
                hold.release()
            raise

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, in an executor."""
        return self._at.fetch(partition)
