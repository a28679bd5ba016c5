"""Segments that unpack to far more than they have bytes, all checksums right: refused by the headers of their pages."""

from __future__ import annotations

import base64
import random
import struct
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strandline.errors import CorruptData
from strandline.formats.arrow.header import PADDED_LIMIT
from strandline.formats.segment.file import SEGMENT_SCHEMA, footer_size
from strandline.model.records import TIMESTAMP
from tests.formats.forging import forged_segment, read_segment, reseal_tail, segment_bytes
from tests.formats.shared_headers import encapsulated, shared_pairs

MEBIBYTE = 1 << 20


def numbers(count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(bytes(count * kind.bit_width // 8))])


def table(count: int, **columns: pa.Array) -> pa.Table:
    """So many records that hold nothing but these columns."""
    given: dict[str, Any] = {
        "offset": pa.arange(0, count),
        "timestamp": numbers(count, TIMESTAMP),
        "op": numbers(count, pa.int8()),
        "listed": numbers(count, TIMESTAMP),
        **columns,
    }
    return pa.table(
        [given.get(field.name, pa.nulls(count, field.type)) for field in SEGMENT_SCHEMA], schema=SEGMENT_SCHEMA
    )


def refused(data: bytes, why: str, *, room: int = 64 * MEBIBYTE) -> None:
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match=why):
        read_segment(data)
    assert pa.default_memory_pool().max_memory() - before < room


def test_what_the_writer_writes_and_what_others_could_is_read() -> None:
    assert read_segment(segment_bytes(100, 50)).num_rows == 150
    forged = forged_segment(table(100, key=pa.array([b"k"] * 100)), compression="zstd", use_dictionary=["op"])
    assert read_segment(forged)["key"].to_pylist() == [b"k"] * 100


@pytest.mark.matrix
def test_a_group_of_millions_of_rows_that_take_no_room_is_refused() -> None:
    data = forged_segment(
        table(3_000_000), compression="zstd", column_encoding={"offset": "DELTA_BINARY_PACKED"}, use_dictionary=["op"]
    )
    assert len(data) < 1 << 17
    refused(data, "unpacked, more than")


@pytest.mark.matrix
def test_a_value_that_unpacks_to_more_than_a_batch_is_refused() -> None:
    words = pa.array([bytes(MEBIBYTE)] * 330, pa.binary())
    data = forged_segment(table(330, value=words), compression="zstd", use_dictionary=False)
    assert len(data) < 1 << 17
    assert words.nbytes < PADDED_LIMIT + 16 * MEBIBYTE
    refused(data, "unpacked, more than")


@pytest.mark.parametrize("name", ["key", "value"])
def test_keys_and_values_share_no_dictionary_and_no_prefixes(name: str) -> None:
    few = pa.array([bytes(1000)] * 1000, pa.binary())
    data = forged_segment(table(1000, **{name: few}), compression="zstd", use_dictionary=[name])
    refused(data, f"{name} has an encoding that segments do not use")
    data = forged_segment(
        table(1000, **{name: few}),
        compression="zstd",
        use_dictionary=False,
        column_encoding={name: "DELTA_BYTE_ARRAY"},
    )
    refused(data, f"{name} has an encoding that segments do not use")


def headers(name: str, count: int) -> pa.Array:
    """Records with one header each, all of the same name."""
    names = pa.DictionaryArray.from_arrays(numbers(count, pa.int32()), pa.array([name]))
    return pa.MapArray.from_arrays(pa.arange(0, count + 1).cast(pa.int32()), names, pa.nulls(count, pa.binary()))


def shared_names(name: str, count: int) -> bytes:
    wanted = table(count)
    place = wanted.column_names.index("headers")
    wanted = wanted.set_column(place, "headers", headers(name, count))
    return forged_segment(wanted, compression="zstd", use_dictionary=["headers.key_value.key"], store_schema=False)


def test_a_name_that_a_million_headers_share_is_not_written_out_a_million_times() -> None:
    data = shared_names("x" * MEBIBYTE, 1000)
    assert len(data) < 1 << 17
    refused(data, "unpacked, more than")


def test_names_that_many_headers_share_are_read_as_long_as_they_are_not_too_much() -> None:
    dice = random.Random(1)
    # One long name, and many uses of a short one: all of them long would be 30 times too much.
    names = ["x" * MEBIBYTE, *(dice.choice("ab") for _ in range(9999))]
    count = len(names)
    held = pa.MapArray.from_arrays(
        pa.arange(0, count + 1).cast(pa.int32()), pa.array(names), pa.array([b"v"] * count, pa.binary())
    )
    data = forged_segment(
        table(count, headers=held),
        compression="zstd",
        use_dictionary=["headers.key_value.key"],
        dictionary_pagesize_limit=1 << 22,
    )
    found = read_segment(data)["headers"].to_pylist()
    assert [name for ((name, _),) in found] == names


def test_an_arrow_schema_in_the_footer_that_takes_a_hundred_times_its_bytes_is_refused() -> None:
    header = base64.b64encode(encapsulated(shared_pairs("schema", 100, 100_000)))
    data = forged_segment(table(10), {b"ARROW:schema": header}, store_schema=False)
    assert len(data) < 1 << 20
    refused(data, "its footer cannot be read", room=4 * MEBIBYTE)


@pytest.mark.matrix
def test_a_footer_with_more_structures_than_groups_is_refused() -> None:
    wide = pa.table({f"column {number}": [1] for number in range(5000)})
    sink = pa.BufferOutputStream()
    pq.write_table(wide, sink)
    data = sink.getvalue().to_pybytes()
    good = segment_bytes(5)
    footer = data[len(data) - footer_size(data, "it") :]
    forged = reseal_tail(good[: len(good) - footer_size(good, "it")] + footer)
    refused(forged, "footer cannot be read")


def test_a_header_s_name_that_is_no_text_is_found_before_anybody_looks_at_it() -> None:
    names = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe")]
    )
    headers = pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), names, pa.array([b"v"]))
    data = forged_segment(table(1, headers=headers), compression="zstd", use_dictionary=["op"])
    refused(data, "Invalid UTF8")
