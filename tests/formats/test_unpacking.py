"""Limits of unpacked bytes: checked from the headers, the same for every format."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from strandline.compat.v1.batch_format import decode_queue_batch, encode_queue_batch, encode_values
from strandline.errors import CorruptData, InvalidInput
from strandline.formats.arrow.block import Compression, Parts, encode_page
from strandline.formats.arrow.header import PADDED_LIMIT, unpacked_limit
from strandline.formats.object.batch import BatchInfo, decode_batch, encode_batch
from strandline.formats.wal.frame import Frame, FrameInfo, decode_frame, encode_frame
from strandline.model.records import (
    MAX_BATCH_BYTES,
    MAX_BATCH_RECORDS,
    MAX_RECORD_BYTES,
    RECORD_SCHEMA,
    conform,
    no_headers,
    record_batch,
)
from tests.formats.forging import WRITER

MEBIBYTE = 1 << 20
OLD_PAYLOAD = 256 * MEBIBYTE


def zeros(*values: int) -> pa.RecordBatch:
    """Records whose values are zeros, of these lengths."""
    count = len(values)
    return record_batch(timestamps=[1] * count, ops=[0] * count, keys=[b"k"] * count, values=[*map(bytes, values)])


def empty(count: int) -> pa.RecordBatch:
    """So many records that hold nothing, and take as little as any."""
    none = pa.py_buffer(bytes(4 * (count + 1)))
    nothing = pa.Array.from_buffers(pa.binary(), count, [None, none, pa.py_buffer(b"")])
    times = pa.Array.from_buffers(pa.timestamp("us", "UTC"), count, [None, pa.py_buffer(bytes(8 * count))])
    ops = pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(bytes(count))])
    return pa.RecordBatch.from_arrays([times, ops, nothing, nothing, no_headers(count)], schema=RECORD_SCHEMA)


def stored(compression: Compression, *pages: Parts, count: int) -> bytes:
    return b"".join(encode_batch(pages, BatchInfo(compression, count, len(pages), 0, 0, WRITER, 0)))


def test_a_batch_of_34_kilobytes_does_not_unpack_to_a_gigabyte() -> None:
    page = encode_page(zeros(MAX_RECORD_BYTES), Compression.ZSTD)
    data = stored(Compression.ZSTD, *[page] * 4, count=4)
    assert len(data) < 1 << 17
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match="announce more than"):
        decode_batch(data, "it")
    assert pa.default_memory_pool().max_memory() - before < MAX_BATCH_BYTES


def test_a_frame_of_a_write_ahead_log_does_not_either() -> None:
    page = encode_page(zeros(MAX_RECORD_BYTES), Compression.LZ4)
    info = FrameInfo(1, 1, 4, 0, 0, pages=4, compression=Compression.LZ4)
    frame = memoryview(b"".join(encode_frame(info, [page] * 4)))
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match="announce more than"):
        decode_frame(Frame(info, frame[56:-8], 0, len(frame)), "it")
    assert pa.default_memory_pool().max_memory() - before < MAX_BATCH_BYTES


@pytest.mark.parametrize("compression", Compression)
def test_more_records_than_the_bytes_can_hold_are_not_even_begun(compression: Compression) -> None:
    page = bytearray(b"".join(encode_page(empty(1000), compression)))
    # The number of rows stands in the message and in each of its columns.
    head = 8 + struct.unpack_from("<i", page, 4)[0]
    told = page[:head].replace(struct.pack("<q", 1000), struct.pack("<q", 1 << 31))
    assert told != page[:head]
    forged = told + page[head:]
    with pytest.raises(CorruptData, match="announces 2,147,483,648 records"):
        decode_batch(stored(compression, [bytes(forged)], count=0xFFFFFFFF), "it")


def test_a_queue_batch_of_empty_values_does_not_unpack_to_gigabytes() -> None:
    count = 30_000_000  # 21 bytes each once they are records, and a bit of a byte when they are stored
    data = b"".join(_queue_batch(memoryview(bytes(4 * count)), count, Compression.ZSTD))
    assert len(data) < 1 << 16
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match="announce"):
        decode_queue_batch(data, "it")
    assert pa.default_memory_pool().max_memory() == before


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.ZSTD])
def test_a_queue_batch_that_announces_billions_of_records_is_refused_by_its_footer(compression: Compression) -> None:
    data = b"".join(_queue_batch(memoryview(bytes(1000)), 0xFFFFFFFF, compression))
    with pytest.raises(CorruptData, match="announce 73,014,444,015 unpacked"):
        decode_queue_batch(data, "it")


def _queue_batch(block: memoryview, count: int, compression: Compression) -> Parts:
    """A batch object from a writer without limits."""
    body = pa.Codec("zstd").compress(block) if compression is Compression.ZSTD else block
    return [memoryview(body).cast("B"), struct.pack("<BIH", compression, count, 1)]


def test_a_queue_batch_that_unpacks_to_more_than_a_batch_is_refused_by_its_header() -> None:
    size = PADDED_LIMIT + MEBIBYTE
    data = b"".join(_queue_batch(memoryview(struct.pack("<I", size) + bytes(size)), 1, Compression.ZSTD))
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match="compressed bytes announce"):
        decode_queue_batch(data, "it")
    assert pa.default_memory_pool().max_memory() == before


# --- nothing valid becomes unreadable --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compression", Compression)
def test_the_largest_record_there_may_be_is_read_back(compression: Compression) -> None:
    largest = zeros(MAX_RECORD_BYTES)
    (batch,) = conform(largest, now=0)
    _, (found,) = decode_batch(stored(compression, encode_page(batch, compression), count=1), "it")
    assert found.column("value")[0].as_buffer().size == MAX_RECORD_BYTES


@pytest.mark.slow
def test_as_many_empty_records_as_a_batch_may_hold_are_read_back() -> None:
    count = MAX_BATCH_BYTES // 22
    (batch,) = conform(empty(count), now=0)
    data = stored(Compression.ZSTD, encode_page(batch, Compression.ZSTD), count=count)
    assert len(data) < MEBIBYTE
    assert decode_batch(data, "it")[1][0].num_rows == count
    values = encode_values(batch.column("value"))
    data = b"".join(encode_queue_batch([values], count, Compression.ZSTD))
    assert decode_queue_batch(data, "it").num_rows == count


@pytest.mark.slow
def test_a_payload_of_256_mebibytes_is_read_back() -> None:
    pages = [encode_page(zeros(*[MEBIBYTE - 400] * 32), Compression.NONE)] * 8
    info = FrameInfo(1, 1, 256, 0, 0, pages=8)
    frame = memoryview(b"".join(encode_frame(info, pages)))
    assert len(frame) > OLD_PAYLOAD - MEBIBYTE
    assert sum(batch.num_rows for batch in decode_frame(Frame(info, frame[56:-8], 0, len(frame)), "it").batches) == 256


def test_a_gigabyte_of_earlier_days_is_read_back_if_it_was_stored_in_as_many_bytes_as_that_takes() -> None:
    assert unpacked_limit(1) == unpacked_limit(5 * MEBIBYTE) == PADDED_LIMIT
    assert unpacked_limit(10 * MEBIBYTE) == 640 * MEBIBYTE
    assert unpacked_limit(100 * MEBIBYTE) == unpacked_limit(1 << 40) == 1152 * MEBIBYTE


# --- the door --------------------------------------------------------------------------------------------------


def test_a_batch_of_nulls_is_refused_before_they_become_records() -> None:
    nulls = pa.table({"key": pa.nulls(MAX_BATCH_RECORDS + 1)})
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(InvalidInput, match="over the limit of 16,777,216"):
        conform(nulls, now=0)
    assert pa.default_memory_pool().max_memory() == before


WORD = bytes(MEBIBYTE)
SHARED = [
    pytest.param(
        pa.DictionaryArray.from_arrays(pa.nulls(1000, pa.int8()).fill_null(0), pa.array([WORD], pa.binary())),
        "value",
        id="dictionary",
    ),
    pytest.param(
        pa.Array.from_buffers(
            pa.binary_view(),
            1000,
            [None, pa.py_buffer(struct.pack("<iiii", MEBIBYTE, 0, 0, 0) * 1000), pa.py_buffer(WORD)],
        ),
        "key",
        id="view",
    ),
    pytest.param(
        pa.MapArray.from_arrays(
            pa.array(range(1001), pa.int32()),
            pa.DictionaryArray.from_arrays(
                pa.nulls(1000, pa.int8()).fill_null(0), pa.array([WORD.decode()], pa.string())
            ),
            pa.nulls(1000, pa.binary()),
        ),
        "headers",
        id="names of headers",
    ),
]


@pytest.mark.parametrize(("column", "name"), SHARED)
def test_values_that_rows_share_count_once_for_each_row(column: pa.Array, name: str) -> None:
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(InvalidInput, match="over the limit of 301,989,888"):
        conform(pa.table({name: column}), now=0)
    assert pa.default_memory_pool().max_memory() - before < 64 * MEBIBYTE
    (batch,) = conform(pa.table({name: column}).slice(7, 2), now=0)
    assert batch.schema.equals(RECORD_SCHEMA)
    assert batch.nbytes > 2 * MEBIBYTE


def test_many_pieces_of_one_record_are_stored_as_one_page() -> None:
    rows = pa.Table.from_batches([zeros(1)] * 1000)
    (batch,) = conform(rows, now=0)
    assert batch.num_rows == 1000
    assert len(conform(pa.Table.from_batches([zeros(*[1] * 100)] * 20), now=0)) == 20
