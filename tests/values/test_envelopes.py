"""Change events: key, operation and typed value, out of every shape of an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import SchemaRefused
from strandline.testing.codecs import CodecContract
from strandline.values import Codec

ROW = pa.schema({"id": pa.int64(), "tags": pa.list_(pa.string())})
PUT, DELETE = sl.Op.PUT, sl.Op.DELETE


class TestDebezium(CodecContract):
    def codec(self) -> Codec:
        return sl.values.Debezium(sl.values.Json(ROW))

    def bad_values(self) -> Sequence[bytes]:
        return [b"", b"{}", b'{"op":"t"}', b'{"op":"c"}', b'{"op":"c","after":{"id":"x"}}', b'{"payload":{"op":"u"}}']

    def good_row(self) -> dict[str, Any]:
        return {"id": 7}


class TestBeforeAfter(CodecContract):
    def codec(self) -> Codec:
        return sl.values.BeforeAfter(sl.values.MessagePack(ROW))

    def bad_values(self) -> Sequence[bytes]:
        return [b"", b"\x80", b"\x81\xa5after\x01"]

    def good_row(self) -> dict[str, Any]:
        return {"id": 7}


@pytest.mark.parametrize("wrap", [b"%s", b'{"schema":{"type":"struct"},"payload":%s}'])
def test_every_event_of_debezium_gives_its_operation_and_its_row(wrap: bytes) -> None:
    events = [
        b'{"op":"c","before":null,"after":{"id":1,"tags":["a"]},"source":{"lsn":5},"ts_ms":1}',
        b'{"op":"r","after":{"id":2}}',
        b'{"op":"u","before":{"id":2},"after":{"id":3}}',
        b'{"op":"d","before":{"id":4,"tags":[]},"after":null}',
        b'{"op":"d"}',
    ]
    values = pa.array([*(wrap % event for event in events), None], pa.binary())
    decoded = sl.values.Debezium(sl.values.Json(ROW)).decode(values)
    assert decoded.bad.num_rows == 0
    assert decoded.op.to_pylist() == [PUT, PUT, PUT, DELETE, DELETE, DELETE]
    assert decoded.op.type == pa.int8()
    assert decoded.columns.to_pylist() == [
        {"id": 1, "tags": ["a"]},
        {"id": 2, "tags": None},
        {"id": 3, "tags": None},
        {"id": 4, "tags": []},
        {"id": None, "tags": None},
        {"id": None, "tags": None},
    ]


def test_a_bad_event_has_neither_row_nor_operation() -> None:
    events = [b'{"op":"c","after":{"id":1}}', b'{"op":"m","after":{"id":2}}', b'{"op":"d","before":{"id":3}}']
    decoded = sl.values.Debezium(sl.values.Json(ROW)).decode(pa.array(events, pa.binary()))
    assert decoded.bad.column("row").to_pylist() == [1]
    assert decoded.op.to_pylist() == [PUT, None, DELETE]
    assert decoded.columns.column("id").to_pylist() == [1, None, 3]


def test_an_avro_codec_of_whole_events_is_taken_as_it_is() -> None:
    row = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}]}
    event = {
        "type": "record",
        "name": "Envelope",
        "fields": [
            {"name": "before", "type": ["null", row]},
            {"name": "after", "type": ["null", "Row"]},
            {"name": "op", "type": "string"},
        ],
    }
    events = sl.values.Avro(event)
    values = [
        events.encode_one({"op": "c", "after": {"id": 1}}),
        events.encode_one({"op": "d", "before": {"id": 1}}),
    ]
    decoded = sl.values.Debezium(events).decode(pa.array(values, pa.binary()))
    assert (decoded.op.to_pylist(), decoded.columns.to_pylist()) == ([PUT, DELETE], [{"id": 1}, {"id": 1}])


def test_before_without_after_is_a_delete() -> None:
    events = [b'{"before":{"id":1},"after":{"id":2}}', b'{"before":{"id":3}}', b'{"after":{"id":4}}', None]
    decoded = sl.values.BeforeAfter(sl.values.Json(ROW)).decode(pa.array(events, pa.binary()))
    assert decoded.op.to_pylist() == [PUT, DELETE, PUT, DELETE]
    assert decoded.columns.column("id").to_pylist() == [2, 3, 4, None]


def test_a_codec_that_has_no_events_is_refused() -> None:
    with pytest.raises(SchemaRefused, match="Debezium takes a codec of rows"):
        sl.values.Debezium(sl.values.Raw())
