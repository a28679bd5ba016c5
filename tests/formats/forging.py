"""Forged bytes: damaged and sealed again with right checksums."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.compat.v1.batch_format import encode_queue_batch, encode_values
from strandline.errors import CorruptData, UnsupportedVersion
from strandline.formats.arrow.block import Compression, encode_page
from strandline.formats.checksum import crc32c
from strandline.formats.object.batch import BatchInfo, encode_batch
from strandline.formats.object.head import encode_head
from strandline.formats.segment.file import _BLOCK_END as BLOCK_END
from strandline.formats.segment.file import (
    FACTS_KEY,
    SEGMENT_SCHEMA,
    SegmentFacts,
    chunks_of,
    decode_tail,
    encode_block,
    footer_size,
)
from strandline.formats.segment.file import _block_end as block_end
from strandline.formats.segment.records import decode_group
from strandline.formats.segment.writer import SegmentWriter
from strandline.model.head import (
    ChunkRef,
    Cut,
    Entry,
    Head,
    MetadataRange,
    Pin,
    QueueEntry,
    QueueManifest,
    Trimmed,
    WriterId,
    WriterState,
)
from strandline.model.records import record_batch, with_offsets
from strandline.model.stamp import OpId, Stamped
from tests.compat.v1.filled_queues import encode_manifest

WRITER = WriterId(UUID(int=0xABCD))
TAIL, FOOTER, CHECKSUM = 7, struct.calcsize("<QIqq16sQ"), 4


def some_records(count: int = 5, *, first: int = 0) -> pa.RecordBatch:
    return record_batch(
        timestamps=range(first, first + count),
        ops=[number % 3 for number in range(count)],
        keys=[None if number % 4 == 3 else b"key-%d" % number for number in range(count)],
        values=[None if number % 5 == 4 else b"value-%d" % number * 3 for number in range(count)],
        headers=[{"a": b"1", "b": b""} if number % 2 else None for number in range(count)],
    )


def batch_bytes(compression: Compression = Compression.NONE, *batches: pa.RecordBatch) -> bytes:
    batches = batches or (some_records(), some_records(3, first=5))
    rows = sum(batch.num_rows for batch in batches)
    pages = [encode_page(batch, compression) for batch in batches]
    return b"".join(encode_batch(pages, BatchInfo(compression, rows, len(pages), 0, 7, WRITER, 12)))


def reseal_batch(data: bytes) -> bytes:
    """The same bytes with a right checksum and a right block length."""
    if len(data) < FOOTER + CHECKSUM + TAIL:
        return data
    block, footer, tail = (
        data[: -(FOOTER + CHECKSUM + TAIL)],
        data[-(FOOTER + CHECKSUM + TAIL) :][:FOOTER],
        data[-TAIL:],
    )
    footer = struct.pack("<Q", len(block)) + footer[8:]
    return block + footer + struct.pack("<I", crc32c(tail, crc32c(block + footer))) + tail


def reseal_head(data: bytes) -> bytes:
    return data[:-4] + struct.pack("<I", crc32c(data[:-4]))


def some_entry(number: int = 0) -> Entry:
    ranges = (MetadataRange(0, 5, b"meta"), MetadataRange(3, 6, b""))
    location = f"batches/{0:016d}/{number:032x}.batch"
    return Entry(number, location, number * 10, 10, 1234, 1, 9, 77, WRITER, number, ranges if number % 2 else ())


def some_reference(number: int = 0) -> ChunkRef:
    return ChunkRef(0, number * 64, number * 64 + 64, number * 640, number * 640 + 640, 99, 1, 2)


def some_head() -> Stamped[Head]:
    head = Head(
        log_id=UUID(int=7),
        next_offset=1310,
        next_sequence=131,
        floor=3,
        listed=77,
        generation=2,
        min_generation=1,
        swept_generation=1,
        tiered_through=2,
        writers_floor=4,
        membership=5,
        tail=tuple(some_entry(number) for number in range(128, 131)),
        levels=((some_reference(1),), (some_reference(0),)),
        writers={WRITER: WriterState(130, 130, 1300, 10, 77)},
        slots={"billing": None, "new": Pin(12, 4)},
        trim_began=1_700_000_000_000_123,
        trimmed=(Trimmed("batches/x.batch", 10, 20),),
    )
    return Stamped(head, 131, (OpId(UUID(int=1)), OpId(UUID(int=2))))


def some_cut() -> Cut:
    return Cut(3, 900, (some_entry(0), some_entry(1)), ((1, some_reference(0)), (0, some_reference(1))))


def head_bytes() -> bytes:
    return encode_head(some_head())


def queue_batch_bytes(compression: Compression = Compression.NONE, count: int = 40) -> bytes:
    """A batch object of version 1, with values of all lengths."""
    values = [b"value-%d " % number * (number % 7) for number in range(count)]
    return b"".join(encode_queue_batch([encode_values(pa.array(values, pa.binary()))], count, compression))


def some_manifest() -> QueueManifest:
    ranges = (MetadataRange(0, 1_700_000_000_000_000, b"meta"), MetadataRange(3, -5000, b""))
    entries = (
        QueueEntry(5, "ingest/01HX.batch", ranges),
        QueueEntry(6, "ingest/01HY.batch"),
        QueueEntry(7, "", ranges[:1]),
    )
    return QueueManifest(entries, 8, 3)


def manifest_bytes() -> bytes:
    return encode_manifest(some_manifest())


# --- segments --------------------------------------------------------------------------------------------------


def segment_bytes(*counts: int, **options: Any) -> bytes:
    """A segment as its own writer makes it: one batch per count."""
    writer = SegmentWriter(0, **options)
    for number, count in enumerate(counts):
        records = with_offsets([some_records(count, first=writer.next)], writer.next)
        writer.add(records, term=number // 2, listed=1000 + number)
    return b"".join(writer.finish(log_id=UUID(int=7), partition=3, segment=UUID(int=8)).parts)


def forged_segment(table: pa.Table, pairs: Mapping[bytes, bytes] = MappingProxyType({}), **options: Any) -> bytes:
    """A table, with its offsets and listing times, as one row group of a segment that Parquet writes by these options.

    ``pairs`` are texts that its footer has besides.

    All checksums are right.
    """
    sink = pa.BufferOutputStream()
    last = table.num_rows - 1
    facts = SegmentFacts(
        log_id=UUID(int=7),
        partition=3,
        segment=UUID(int=8),
        start=0,
        end=last,
        terms=((0, 0),),
        max_timestamp=0,
    )
    with pq.ParquetWriter(sink, table.schema, write_statistics=False, **options) as writer:
        writer.write_table(table, row_group_size=table.num_rows)
        writer.add_key_value_metadata({FACTS_KEY: facts.encode(), **pairs})
    data = sink.getvalue().to_pybytes()
    footer = data[len(data) - footer_size(data, "it") :]
    return sealed_segment(data[: len(data) - len(footer)], footer, pq.read_metadata(io.BytesIO(data)))


def sealed_segment(before: bytes, footer: bytes, metadata: Any, listed: int = 0) -> bytes:
    """The columns, a block of correct checksums for the columns that ``metadata`` lists, and the footer."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    sums = [
        [crc32c(before[chunk.start : chunk.next]) for chunk in chunks_of(group, [0] * group.num_columns)]
        for group in groups
    ]
    return before + encode_block(sums, [listed] * len(groups), crc32c(before), footer) + footer


def tail_size(data: bytes | memoryview, where: str) -> int:
    """Size of the tail of a segment, from its last bytes; if it exceeds ``data``, more bytes are needed."""
    footer = footer_size(data, where)
    if len(data) < footer + BLOCK_END.size:
        return footer + BLOCK_END.size
    groups, leaves, *_ = block_end(memoryview(data)[: len(data) - footer], where)
    return footer + BLOCK_END.size + 4 * groups * leaves + 8 * groups


def reseal_tail(data: bytes) -> bytes:
    """The same bytes with a right checksum of the tail, if there is one."""
    try:
        footer = footer_size(data, "it")
        size = tail_size(data, "it")
    except (CorruptData, UnsupportedVersion):
        return data
    if size > len(data):
        return data
    end = len(data) - footer
    checksum = crc32c(
        data[end:],
        crc32c(data[end - 21 : end - 9] + bytes(4) + data[end - 5 : end], crc32c(data[len(data) - size : end - 21])),
    )
    return data[: end - 9] + struct.pack("<I", checksum) + data[end - 5 :]


def read_segment(data: bytes, columns: Sequence[str] = SEGMENT_SCHEMA.names) -> pa.Table:
    """Everything in a segment, as its own reader gives it."""
    size = tail_size(data, "it")
    if size > len(data):
        raise CorruptData("it is shorter than its tail")
    tail, _ = decode_tail(data[len(data) - size :], "it", before=len(data) - size)
    batches = []
    for number in range(len(tail)):
        pieces = [(piece, data[piece.start : piece.next]) for piece in tail.ranges(number, columns)]
        batches += decode_group(tail, number, columns, pieces)
    return pa.Table.from_batches(batches)
