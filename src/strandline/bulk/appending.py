"""Appends the rows of files to any log, each row once. The log remembers how many rows of the source it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event as StopEvent
from typing import Any, Final
from uuid import NAMESPACE_URL, UUID, uuid5

import pyarrow as pa

from strandline.bulk.load_files import FilePart, RecordFields, codec_for
from strandline.bulk.load_sources import LoadedFile
from strandline.errors import InvalidInput
from strandline.ingestion.log_sink import LogSink
from strandline.log.object.log import ObjectLog
from strandline.log.object.sources import note_name
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA

_AT_ONCE: Final = 16 << 20
"""Approximate size of one append in bytes."""


@dataclass(slots=True)
class FileAppender:
    """Appends the rows of files to a log, in order. ``stored`` rows of this source are durable in the log.

    Each append is numbered by the position of its first row, so that the log recognises a repeated append. After a
    crash, another appender of the same ``source`` continues behind the last row in the log. It reads the rows before
    that again, and does not compare them.
    """

    log: Any
    source: str
    """The name under which the log remembers the position."""
    files: Sequence[LoadedFile]
    fields: RecordFields
    stored: int = 0
    appended: int = 0
    """Records that this object has appended."""
    has_begun: bool = False
    """Whether the position is known, and rows were read."""

    @property
    def source_id(self) -> UUID:
        """The identity of the source."""
        return uuid5(NAMESPACE_URL, f"strandline-produce:{self.source}")

    def run(self, *, resume: bool, stop: StopEvent, on_progress: Callable[[int], None]) -> bool:
        """Append what the log does not have; False if ``stop`` was set before the end.

        ``on_progress`` gets the number of rows that were read, those that the log had before among them.
        ``InvalidInput`` if the log has rows of the source and ``resume`` is false, if the files have fewer rows
        than the log, and for a row that cannot be a record, with file and row; ``stored`` is right after any error.
        """
        sink = LogSink(self.log)
        found = sink.cursor(self.source_id)
        self.stored = 0 if found is None else found.next
        if self.stored and not resume:
            raise InvalidInput(
                f"{self.log.url} has {self.stored:,} records of {self.source} already, and nothing was appended: "
                "continue behind them with --resume, or append all of it again under another --source NAME."
            )
        self.has_begun = True
        hot = getattr(self.log, "hot", self.log)
        if not self.stored and isinstance(hot, ObjectLog):
            note_name(hot, self.source_id, self.source)
        end = 0
        for first, rows in self._grouped():
            end = first + rows.num_rows
            if stop.is_set():
                return False
            self._append(sink, rows, first, end)
            on_progress(end)
        if end < self.stored:
            raise InvalidInput(
                f"{self.source} has {end:,} rows now, and {self.log.url} has {self.stored:,} of it: it is another "
                "file. Append it under another --source NAME."
            )
        return True

    def _append(self, sink: LogSink, rows: pa.Table, first: int, end: int) -> None:
        if end <= self.stored:
            return
        try:
            sink.apply(rows, since=Cursor(self.source_id, first), upto=Cursor(self.source_id, end))
        finally:  # a part of it may be durable
            self.appended = sink.records
            shown = sink.cursor(self.source_id)
            self.stored = self.stored if shown is None else shown.next

    def _grouped(self) -> Iterator[tuple[int, pa.Table]]:
        """Tables of about ``_AT_ONCE`` bytes, each with the position of its first row; offsets are positions."""
        held, size, first, end = list[pa.RecordBatch](), 0, 0, 0
        for batch in self._records():
            positions = pa.array(range(end, end + batch.num_rows), pa.int64())
            held.append(pa.RecordBatch.from_arrays([positions, *batch.columns], schema=READ_SCHEMA))
            size, end = size + batch.nbytes, end + batch.num_rows
            if size >= _AT_ONCE:
                yield first, pa.Table.from_batches(held)
                held, size, first = [], 0, end
        if held:
            yield first, pa.Table.from_batches(held)

    def _records(self) -> Iterator[pa.RecordBatch]:
        codec = codec_for(self.log)
        for file in self.files:
            yield from FilePart(file).records(self.fields, codec)
