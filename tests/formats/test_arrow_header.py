"""Headers of Arrow messages that take a thousand times their bytes are refused before Arrow reads them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from strandline.errors import CorruptData
from strandline.formats.arrow.block import Compression, decode_block, read_metadata
from strandline.formats.arrow.header import check_header, check_message
from strandline.model.records import READ_SCHEMA, RECORD_SCHEMA
from tests.formats.shared_headers import (
    batch_with_shared_pairs,
    encapsulated,
    nested_columns,
    shared_columns,
    shared_pairs,
)

HOSTILE = {
    "columns": shared_columns(100_000),
    "columns of columns": nested_columns(20),
    "metadata of the message": shared_pairs("message", 1000, 100_000),
    "metadata of the schema": shared_pairs("schema", 1000, 100_000),
    "metadata of a column": shared_pairs("column", 1000, 100_000),
    "metadata of a batch": batch_with_shared_pairs(1000, 100_000),
}


def test_arrow_reads_what_these_headers_are_made_of_while_they_are_small() -> None:
    for header in (shared_columns(3), nested_columns(3), shared_pairs("schema", 3, 5), shared_pairs("message", 3, 5)):
        check_header(memoryview(header))
        assert pa.ipc.read_schema(pa.py_buffer(encapsulated(header))).field(0).name == "x"
    batch = pa.ipc.read_message(encapsulated(batch_with_shared_pairs(3, 5)))
    assert pa.ipc.read_record_batch(batch, pa.schema([("value", pa.binary())])).num_rows == 0


@pytest.mark.parametrize("what", HOSTILE)
def test_a_header_that_shares_what_arrow_copies_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"a header of [0-9,]+ bytes takes more than 4,194,304 in memory"):
        check_header(memoryview(HOSTILE[what]))


def test_a_header_that_is_larger_than_any_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than the limit of 1,048,576"):
        check_header(memoryview(shared_columns(300_000)))


@pytest.mark.parametrize("schema", [RECORD_SCHEMA, READ_SCHEMA])
def test_schemas_with_metadata_of_their_own_are_let_through(schema: pa.Schema) -> None:
    for metadata in ({}, {b"pandas": bytes(500_000)}, {b"%d" % name: b"value" for name in range(1000)}):
        check_message(memoryview(schema.with_metadata(metadata).serialize()))


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff\xff", b"\x00\x10\x00\x00" + bytes(4096)])
def test_bytes_that_do_not_begin_as_a_message_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a message"):
        check_message(memoryview(data))


def test_offsets_that_lead_out_of_a_header_are_refused() -> None:
    for number in (0xFFFFFFFF, 0x7FFFFFFF, 4000):
        header = number.to_bytes(4, "little") + b"\xff" * 4092
        with pytest.raises(ValueError, match=r"outside itself|before the message|lacks a field|takes more"):
            check_header(memoryview(header))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_stored_block_that_shares_what_arrow_copies_is_corrupt(what: str) -> None:
    schema = b"" if what != "metadata of a batch" else bytes(RECORD_SCHEMA.serialize())
    block = memoryview(schema + encapsulated(HOSTILE[what]) + bytes(64))
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptData, match="takes more than 4,194,304"):
        decode_block(block, "the test", Compression.NONE)
    assert pa.total_allocated_bytes() < before + (1 << 20), "other threads may hold a little more"
    if not schema:
        with pytest.raises(CorruptData, match="takes more than 4,194,304"):
            read_metadata(block, "the test")
