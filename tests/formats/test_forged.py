"""Bytes forged with knowledge of the decoder; what chance forges is in `tests/fuzz`."""

from __future__ import annotations

import json
import struct
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import CorruptData
from strandline.formats.arrow.block import Compression
from strandline.formats.arrow.header import find_field, read_number, target_of
from strandline.formats.object.batch import decode_batch
from strandline.formats.object.head import decode_head
from strandline.formats.object.identity import LogIdentity, SlotCodec, decode_identity, encode_identity
from strandline.model.records import RECORD_SCHEMA, record_batch
from strandline.model.retention import SlotState
from strandline.model.stamp import Stamped
from tests.formats.forging import batch_bytes, head_bytes, reseal_batch, reseal_head


def test_a_buffer_of_negative_length_does_not_pay_for_a_bomb() -> None:
    # Arrow looks at no validity buffer of a column without nulls, so that its length can be anything: negative, it
    # would make room in the budget for another buffer that announces a terabyte.
    records = record_batch(timestamps=[1] * 500, ops=[0] * 500, keys=[b"k"] * 500, values=[bytes(100)] * 500)
    data = bytearray(batch_bytes(Compression.ZSTD, records))
    block = len(RECORD_SCHEMA.serialize())
    metadata_length = read_number(memoryview(data), block + 4, "I")
    start = block + 8
    table = memoryview(bytes(data[start : start + metadata_length]))
    batch = target_of(table, find_field(table, read_number(table, 0, "I"), 2))
    vector = start + target_of(table, find_field(table, batch, 2)) + 4
    body = start + metadata_length
    count = read_number(table, vector - start - 4, "I")
    buffers = [struct.unpack_from("<qq", data, vector + 16 * index) for index in range(count)]
    assert buffers[0][1] == 0, "the validity of the timestamps is not stored"
    bomb, last = buffers[1][0], buffers[-1][0] + buffers[-1][1] - 8
    struct.pack_into("<q", data, body + last, -1)
    struct.pack_into("<qq", data, vector, last, -(1 << 62))
    struct.pack_into("<q", data, body + bomb, 1 << 40)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match="not within its message"):
        decode_batch(reseal_batch(bytes(data)), "it")
    assert pa.default_memory_pool().max_memory() - before < 64 << 20


@pytest.mark.parametrize("compression", list(Compression), ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("column", ["key", "value"])
def test_a_value_that_ends_past_its_bytes_is_found_before_it_is_read(column: str, compression: Compression) -> None:
    good = record_batch(timestamps=[1, 2], ops=[0, 0], keys=[b"a", b"b"], values=[b"a", b"b"])
    # The column as a whole ends where it should, so that only a look at every offset finds it.
    offsets = pa.py_buffer(b"".join(end.to_bytes(4, "little") for end in (0, 1000, 3)))
    lying = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"abc")])
    arrays = [lying if field.name == column else good.column(field.name) for field in RECORD_SCHEMA]
    data = batch_bytes(compression, pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA))
    with pytest.raises(CorruptData, match="offset for slot 1 out of bounds"):
        decode_batch(data, "it")


def test_there_was_never_a_version_0_of_the_head() -> None:
    data = head_bytes()
    with pytest.raises(CorruptData, match="no format version 0"):
        decode_head(reseal_head(data[:4] + b"\x00\x00" + data[6:]), "it")


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999", "1.5", "true", '"1"', "null", "-1", "[]"])
@pytest.mark.parametrize("name", ["version", "min_reader"])
def test_a_version_that_is_no_number_is_damage(name: str, value: str) -> None:
    fields = json.loads(encode_identity(LogIdentity(UUID(int=7))))
    text = json.dumps({**fields, name: "HERE"}).replace('"HERE"', value)
    with pytest.raises(CorruptData, match="it is damaged"):
        decode_identity(text.encode(), "it")


@pytest.mark.parametrize("value", ["Infinity", "NaN", "1e999", "1.5", "true", '"1"', "null", "[]"])
@pytest.mark.parametrize("name", ["position", "epoch", "last_seen", "revision"])
def test_a_slot_s_number_that_is_none_is_damage(name: str, value: str) -> None:
    fields = json.loads(SlotCodec("s").encode(Stamped(SlotState("s", 1, None, 0, 5), 1)))
    text = json.dumps({**fields, name: "HERE"}).replace('"HERE"', value)
    with pytest.raises(CorruptData, match="it is damaged"):
        SlotCodec("s").decode(text.encode(), "it")
