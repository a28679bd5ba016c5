"""Copying to the cold tier beside plain Parquet, and how little of a segment is read for a hundredth of it."""

from __future__ import annotations

import io
import random
import time
from statistics import median
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Result
from strandline.formats.segment.writer import EncodedSegment, SegmentWriter
from strandline.model.cursor import Limit
from strandline.model.records import READ_SCHEMA, TIMESTAMP, no_headers
from strandline.model.segments import SegmentId, SegmentMetadata, TopicPartition
from strandline.testing.plain import PlainStore
from strandline.tier.copy.segment_files import forget_tails, plan_segment, segment_path, verify_segment

_BYTES = 128 << 20
_ROUNDS = 5
_BATCH = 4 << 20
_TEXT = b'{"order": %07d, "customer": %05d, "city": "%s", "amount": %d.%02d, "state": "%s"}'
_CITIES = (b"Lisbon", b"Porto", b"Oslo", b"Bergen", b"Turin", b"Genoa", b"Cork", b"Ghent")
_STATES = (b"new", b"paid", b"packed", b"sent")
_SEGMENT = SegmentId(TopicPartition("bench", UUID(int=1), 0), UUID(int=2))


def _values(count: int, size: int, *, text: bool) -> pa.Array:
    dice = random.Random(7)
    if text:

        def row() -> bytes:
            numbers = dice.randrange(10**7), dice.randrange(10**5)
            amount = dice.randrange(1000), dice.randrange(100)
            return _TEXT % (*numbers, dice.choice(_CITIES), *amount, dice.choice(_STATES))

        data = b"".join((b",".join(row() for _ in range(1 + size // 80)) + b" " * size)[:size] for _ in range(count))
    else:
        data = dice.randbytes(count * size)
    ends = pa.arange(0, (count + 1) * size, size).cast(pa.int32())
    return pa.Array.from_buffers(pa.binary(), count, [None, ends.buffers()[1], pa.py_buffer(data)])


def _records(size: int, *, text: bool) -> pa.RecordBatch:
    count = _BYTES // size
    dice = random.Random(8)
    columns = [
        pa.arange(0, count),
        pa.arange(0, count).view(TIMESTAMP),
        pa.repeat(pa.scalar(0, pa.int8()), count),
        pa.array([b"key-%07d" % dice.randrange(10**6) for _ in range(count)], pa.binary()),
        _values(count, size, text=text),
        no_headers(count),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)


def _copy(records: pa.RecordBatch, store: PlainStore) -> tuple[EncodedSegment, SegmentMetadata]:
    """All that copying takes but the line to the store: encode, put, read back and compare."""
    writer = SegmentWriter(0, expected=records.nbytes)
    step = max(1, records.num_rows * _BATCH // records.nbytes)
    for first in range(0, records.num_rows, step):
        writer.add([records.slice(first, step)], term=1, listed=first)
    encoded = writer.finish(log_id=UUID(int=1), partition=0, segment=_SEGMENT.id)
    store.put(segment_path(_SEGMENT, 0), encoded.parts)
    segment = SegmentMetadata(
        segment=_SEGMENT,
        start=0,
        end=records.num_rows - 1,
        broker=0,
        max_timestamp=encoded.facts.max_timestamp,
        event_timestamp=0,
        terms=encoded.facts.terms,
        size=encoded.seal.size,
        custom_metadata=encoded.seal.encode(),
    )
    verify_segment(store, segment)
    return encoded, segment


def _plain(records: pa.RecordBatch) -> int:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_batches([records]), file, compression="zstd")
    return file.tell()


class _Counting(PlainStore):
    read = 0

    def get_range(self, path: str, start: int, length: int) -> memoryview:
        self.read += length
        return super().get_range(path, start, length)


def _share_read(records: pa.RecordBatch, segment: SegmentMetadata, store: _Counting) -> float:
    """The largest share of the bytes that a hundredth of the offsets took, over some places."""
    part = records.num_rows // 100
    shares = []
    for place in range(0, 100, 7):
        forget_tails()
        store.read = 0
        first = min(place * part, records.num_rows - part)
        for span in plan_segment(store, segment, first, Limit(upto=first + part)):
            span.fetch()
        shares.append(store.read / segment.size)
    return 100 * max(shares)


def run() -> list[Result]:
    results = []
    for size, name in ((100, "100-byte"), (1 << 10, "1-KiB")):
        for text in (False, True):
            kind = f"{name} {'text' if text else 'random'}"
            records = _records(size, text=text)
            ours, theirs = [], []
            # One core each: what other threads of Arrow do counts, too.
            for _ in range(_ROUNDS):
                began = time.process_time()
                _, segment = _copy(records, store := _Counting())
                ours.append(time.process_time() - began)
                began = time.process_time()
                plain = _plain(records)
                theirs.append(time.process_time() - began)
            speed, other = (records.nbytes / median(side) / 1e6 for side in (ours, theirs))
            results += [
                Result(f"cold: copy, {kind}", speed, "MB/s per core", ">= 120", f"write_table {other:.0f}"),
                Result(f"cold: size, {kind}", segment.size / plain, "of write_table"),
                Result(f"cold: read 1 %, {kind}", _share_read(records, segment, store), "% of bytes", "<= 10"),
            ]
    return results
