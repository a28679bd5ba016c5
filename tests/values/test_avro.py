"""Avro records that the library takes for good ones, and that are not."""

from __future__ import annotations

import io
from typing import Any

import fastavro
import pyarrow as pa
import pytest

import strandline as sl

WRITTEN: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["OPEN", "CLOSED"]}},
        {"name": "last_state", "type": "State"},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 3}},
        {"name": "lines", "type": {"type": "array", "items": {"type": "record", "name": "Line", "fields": [
            {"name": "sku", "type": "string"}, {"name": "share", "type": "float"}]}}},
        {"name": "first", "type": ["null", "shop.Line"]},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "double"}}},
        {"name": "vip", "type": "boolean"},
        {"name": "raw", "type": "bytes"},
    ],
}  # fmt: skip
ROW: dict[str, Any] = {
    "id": -(2**63), "note": "é" * 40, "state": "OPEN", "last_state": "CLOSED", "hash": b"\xff" * 3,
    "lines": [{"sku": "ü" * 30, "share": 0.5}, {"sku": "", "share": 1.5}], "first": {"sku": "ß" * 20, "share": 0.25},
    "tags": {"ä" * 20: [1.5, 2.5], "": []}, "vip": True, "raw": b"\xff" * 40,
}  # fmt: skip
READ = {"type": "record", "name": "Order", "namespace": "shop", "fields": [{"name": "id", "type": "long"}]}


def record() -> bytes:
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, WRITTEN, ROW)
    return sink.getvalue()


def reasons(codec: sl.values.Avro, *values: bytes) -> list[str]:
    return sl_decode(codec, values).bad.column("reason").to_pylist()


def sl_decode(codec: sl.values.Avro, values: tuple[bytes, ...]) -> sl.values.Decoded:
    return codec.decode(pa.array(values, pa.binary()))


def test_a_record_that_ends_within_a_field_that_is_skipped_is_bad() -> None:
    codec = sl.values.Avro(READ, registry={1: WRITTEN, 2: READ}, schema_id=2)
    framed, good = b"\0\0\0\0\x01", record()
    assert sl_decode(codec, (framed + good,)).columns.to_pylist() == [{"id": -(2**63)}]
    cut = [framed + good[:size] for size in range(len(good))]
    assert len(reasons(codec, *cut)) == len(cut)
    assert reasons(codec, framed + good + b"\0") == ["1 bytes follow the record."]


@pytest.mark.parametrize(
    "number", [b"\x80" * 9 + b"\x02", b"\x80" * 9 + b"\x7f", b"\x80" * 10 + b"\0", b"\xff" * 12 + b"\x01"]
)
def test_a_number_of_more_than_64_bits_is_bad(number: bytes) -> None:
    codec = sl.values.Avro(READ)
    assert reasons(codec, number) == ["It has a number of more than 64 bits."]
    longest = sl_decode(codec, (b"\xff" * 9 + b"\x01", b"\xfe" + b"\xff" * 8 + b"\x01")).columns
    assert longest.column("id").to_pylist() == [-(2**63), 2**63 - 1]


def test_a_length_of_more_than_64_bits_is_bad_inside_of_a_record_with_every_type() -> None:
    codec = sl.values.Avro(WRITTEN)
    good = record()
    assert sl_decode(codec, (good,)).columns.to_pylist()[0]["note"] == "é" * 40
    length = bytes([len(ROW["raw"]) * 2])
    assert good.endswith(length + ROW["raw"])
    # The library takes only the lowest bits of such a length, and finds the right one.
    longer = bytes([length[0] | 0x80]) + b"\x80" * 9 + b"\0"
    forged = good.removesuffix(length + ROW["raw"]) + longer + ROW["raw"]
    assert reasons(codec, forged) == ["It has a number of more than 64 bits."]
