"""Segment writer: records in, buffers of a Parquet file out; memory is bounded by one segment."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strandline.errors import InvalidInput
from strandline.formats.checksum import crc32c
from strandline.formats.segment.batches import BATCHES_KEY, BatchRun, BatchRuns
from strandline.formats.segment.file import (
    FACTS_KEY,
    LARGEST_SEGMENT,
    LISTED,
    SEGMENT_SCHEMA,
    Seal,
    SegmentFacts,
    chunks_of,
    decode_tail,
    encode_block,
    footer_size,
)
from strandline.model.records import READ_SCHEMA, TIMESTAMP

_GROUPS: Final = 64
"""Target number of row groups: reads then fetch about 1 % more offsets, and 3 % more bytes."""
_SMALLEST_GROUP: Final = 32 << 10
_LARGEST_GROUP: Final = 4 << 20
_LARGEST_DECODED: Final = 4 << 20
"""Limit of a group's bytes in memory, however well they compress."""
_SMALL_PIECES: Final = 16


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """A complete segment file: its buffers in order, its seal and its facts."""

    parts: tuple[bytes | memoryview, ...]
    seal: Seal
    facts: SegmentFacts


class SegmentWriter:
    """Encodes the records of one segment, batch by batch. Used by one thread.

    Memory holds the compressed file and one uncompressed row group.
    """

    def __init__(self, start: int, *, expected: int = 256 << 20) -> None:
        """Begin at an offset; ``expected`` is the approximate size of the file."""
        self._start = start
        self.next = start
        """The next expected offset."""
        self._group = min(_LARGEST_GROUP, max(_SMALLEST_GROUP, expected // _GROUPS))
        self._sink = io.BytesIO()
        self._writer = _parquet_writer(self._sink)
        self._ends = [0]
        """Where the row groups begin and end in the sink."""
        self._waiting: list[pa.RecordBatch] = []
        self._times: list[tuple[int, int]] = []
        """Listing time of each buffered batch, and the number of buffered records up to its end."""
        self._rows = self._bytes = self._decoded = 0
        self._batches = BatchRuns()
        self._terms: list[tuple[int, int]] = []
        self._listed: list[int] = []
        self._newest: int | None = None

    @property
    def size(self) -> int:
        """Estimated size of the file if it were finished now."""
        return self._ends[-1] + int(self._bytes * self._ratio)

    @property
    def _ratio(self) -> float:
        return self._ends[-1] / self._decoded if self._decoded else 1.0

    def add(
        self, batches: Sequence[pa.RecordBatch], *, term: int, listed: int, runs: Iterable[BatchRun] | None = None
    ) -> None:
        """Add records of one term with their offsets; ``listed`` is their listing time (microseconds).

        ``runs``: the batches that they belong to, each with its fingerprint; None: unknown.

        ``InvalidInput`` if they do not follow, or their term is older than the one before: nothing was added.
        """
        batches = [batch for batch in batches if batch.num_rows]
        if not batches:
            return
        end = self._check_order(batches)
        before = self._terms[-1][0] if self._terms else -1
        if term < before:
            raise InvalidInput(f"Offset {self.next} has term {term} after term {before}: terms never decrease.")
        listed = max(
            listed, self._listed[-1] if self._listed else listed, self._times[-1][0] if self._times else listed
        )
        if term > before:
            self._flush()  # a group, and so a span, has one term
            self._terms.append((term, self.next))
        for batch in batches:
            self._split(batch, listed)
        self._batches.add([(end - self.next, None)] if runs is None else runs)
        self.next = end

    def _check_order(self, batches: Sequence[pa.RecordBatch]) -> int:
        """The offset after these batches; ``InvalidInput`` if they do not continue the segment."""
        expected = self.next
        for batch in batches:
            if not batch.schema.equals(READ_SCHEMA):
                raise InvalidInput(f"A segment holds the columns {READ_SCHEMA.names}, not {batch.schema.names}.")
            offsets = batch.column(0)
            end = expected + batch.num_rows
            if (offsets[0].as_py(), offsets[-1].as_py()) != (expected, end - 1):
                raise InvalidInput(f"Offset {offsets[0]} cannot follow in a segment that continues at {expected}.")
            expected = end
        return expected

    def _split(self, batch: pa.RecordBatch, listed: int) -> None:
        room = self._room()
        size = batch.nbytes
        if size > room and batch.num_rows > 1:
            half = batch.num_rows // 2
            self._split(batch.slice(0, half), listed)
            self._split(batch.slice(half), listed)
            return
        if self._rows and self._bytes + size > room:
            self._flush()
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._bytes += size
        self._times.append((listed, self._rows))
        if self._bytes >= room:
            self._flush()

    def _room(self) -> int:
        """Uncompressed bytes per group, so that its compressed size is about the target."""
        return max(_SMALLEST_GROUP, min(_LARGEST_DECODED, int(self._group / max(self._ratio, 1e-3))))

    def _flush(self) -> None:
        if not self._rows:
            return
        table = pa.Table.from_batches(self._waiting)
        if len(self._waiting) > _SMALL_PIECES:
            table = table.combine_chunks()  # copying is faster than writing many small pieces
        newest = pc.max(table.column("timestamp")).cast(pa.int64()).as_py()
        self._newest = newest if self._newest is None else max(self._newest, newest)
        table = table.append_column(SEGMENT_SCHEMA.field(LISTED), _listing(self._times))
        self._writer.write_table(table, row_group_size=self._rows)
        self._ends.append(self._sink.tell())
        self._listed.append(self._times[-1][0])
        self._decoded += self._bytes
        self._waiting, self._times, self._rows, self._bytes = [], [], 0, 0

    def finish(self, *, log_id: UUID, partition: int, segment: UUID, fingerprint: int | None = None) -> EncodedSegment:
        """The file; ``fingerprint`` is that of the batch with its last record.

        ``InvalidInput`` if nothing was added, or if it is larger than a segment may be.
        """
        self._flush()
        if self.next == self._start:
            raise InvalidInput(f"A segment cannot be empty: there is nothing from offset {self._start} on.")
        facts = SegmentFacts(
            log_id=log_id,
            partition=partition,
            segment=segment,
            start=self._start,
            end=self.next - 1,
            terms=tuple(self._terms),
            max_timestamp=(self._newest or 0) // 1000,
            fingerprint=fingerprint,
        )
        batches = self._batches.encode()
        self._writer.add_key_value_metadata({FACTS_KEY: facts.encode(), **({BATCHES_KEY: batches} if batches else {})})
        self._writer.close()
        return self._sealed(facts)

    def _sealed(self, facts: SegmentFacts) -> EncodedSegment:
        """The file with the checksum block, which needs the column positions in Parquet's footer."""
        where = "The new segment"
        file = self._sink.getbuffer()
        behind = len(file) - footer_size(file, where)
        footer = bytes(file[behind:])
        parquet = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        groups = [
            chunks_of(parquet.row_group(number), [0] * len(parquet.schema)) for number in range(len(self._listed))
        ]
        sums = [[crc32c(file[chunk.start : chunk.next]) for chunk in chunks] for chunks in groups]
        before = crc32c(file[:behind])
        tail = encode_block(sums, self._listed, before, footer) + footer
        size = behind + len(tail)
        if size > LARGEST_SEGMENT:
            raise InvalidInput(f"A segment of {size:,} bytes does not fit into events: close it below 2 GiB.")
        decode_tail(tail, where)  # an unreadable segment must not be stored
        parts = [file[start:end] for start, end in pairwise((*self._ends, behind))]
        return EncodedSegment((*parts, tail), Seal(size, crc32c(tail, before), len(tail), crc32c(tail)), facts)


def _listing(times: Sequence[tuple[int, int]]) -> pa.Array:
    """The column of listing times, from runs."""
    runs = pa.RunEndEncodedArray.from_arrays(
        pa.array([end for _, end in times], pa.int32()), pa.array([time for time, _ in times], pa.int64())
    )
    return pc.run_end_decode(runs).view(TIMESTAMP)


def _parquet_writer(sink: io.BytesIO) -> Any:
    return pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"),
        SEGMENT_SCHEMA,
        compression="zstd",
        compression_level=1,
        # Keys and values rarely repeat within a group, and a dictionary takes longer to build than compression.
        use_dictionary=["op", LISTED, "headers.key_value.key"],
        column_encoding={"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"},
        write_statistics=["offset", "timestamp", "op", "key", LISTED],
        write_page_index=True,
        data_page_size=_LARGEST_GROUP // 4,
        sorting_columns=[pq.SortingColumn(0)],
    )
