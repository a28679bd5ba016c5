"""Batch queries: a plan of everything between two offsets, as of planning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from strandline.errors import InvalidInput
from strandline.model.cursor import Limit
from strandline.spark.datasource.decoding import Decoding
from strandline.spark.datasource.opened import OpenedLog, check_reaches, pin, report_skipped, trimmed_while_planned
from strandline.spark.datasource.planning import cursor_at
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
        asked = cursor_at(options.start, at.log, bounds)
        upto = cursor_at(options.end, at.log, bounds).next
        since, skipped = at.admit(asked, bounds)
        if upto > bounds.next:
            raise InvalidInput(f"endingOffset is {upto}, but {options.url} ends at {bounds.next} now: ask for less.")
        if since.next >= upto:
            return []
        with contextlib.ExitStack() as undo, trimmed_while_planned(options.url):
            pin(at.log, since.next, options, undo)  # for the requested time: the end of the query is unknown
            spans = at.log.plan(since, Limit(upto=upto))
            check_reaches(spans, upto, options.url)
            undo.pop_all()
        report_skipped(options.url, asked, skipped)
        return at.pack(spans)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, in an executor."""
        return self._at.fetch(partition)
