"""Every codec keeps the contract, and what is particular to each."""

from __future__ import annotations

import datetime as dt
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strandline as sl
from strandline.errors import InvalidInput, SchemaRefused, TransientStorageError
from strandline.testing.codecs import CodecContract, row_strategy
from strandline.values import Codec
from tests.matrix_cases import some
from tests.values.messages import order_files
from tests.values.schemas import schemas

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "small": pa.int32(),
        "share": pa.float32(),
        "amount": pa.float64(),
        "vip": pa.bool_(),
        "note": pa.string(),
        "raw": pa.binary(),
        "hash": pa.binary(3),
        "day": pa.date32(),
        "at": pa.timestamp("us", tz="UTC"),
        "local": pa.timestamp("ms"),
        "time": pa.time64("us"),
        "price": pa.decimal128(12, 2),
        "lines": pa.list_(pa.struct({"sku": pa.string(), "count": pa.int32()})),
        "tags": pa.map_(pa.string(), pa.decimal128(5, 1)),
        "inner": pa.struct({"a": pa.list_(pa.int64()), "b": pa.struct({"c": pa.bool_()})}),
    }
)
GOOD: dict[str, Any] = {
    "id": 7,
    "note": "é",
    "at": dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.UTC),
    "price": Decimal("1.50"),
    "lines": [{"sku": "a", "count": 1}],
}


class TestJson(CodecContract):
    def codec(self) -> Codec:
        return sl.values.Json(SCHEMA)

    def bad_values(self) -> Sequence[bytes]:
        return [b"", b"[]", b'{"id":1.5}', b'{"price":"1.001"}', b'{"lines":[{"count":2147483648}]}', b"{}{}"]

    def good_row(self) -> dict[str, Any]:
        return GOOD


class TestMessagePack(CodecContract):
    def codec(self) -> Codec:
        return sl.values.MessagePack(SCHEMA)

    def bad_values(self) -> Sequence[bytes]:
        long_list = b"\x81\xa5lines\xdd\xff\xff\xff\xff"
        return [b"", b"\x90", b"\x81", b"\x81\xa2id\xa11", long_list, b"\x80\x80", b"\x81\xa1x" + b"\x91" * 100_000]

    def good_row(self) -> dict[str, Any]:
        return GOOD


class TestAvro(CodecContract):
    def codec(self) -> Codec:
        return sl.values.Avro(SCHEMA)

    def bad_values(self) -> Sequence[bytes]:
        good = self.codec().encode_one({})
        huge = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"
        return [b"", good[:-1], good + b"\0", huge, b"\x04" + good[1:], good[:5] + b"\x02" + huge + good[6:]]

    def good_row(self) -> dict[str, Any]:
        return GOOD


class TestAvroWithRegistry(TestAvro):
    def codec(self) -> Codec:
        text = sl.values.Avro(SCHEMA)._text
        return sl.values.Avro(registry={9: text}, schema_id=9)

    def bad_values(self) -> Sequence[bytes]:
        good = self.codec().encode_one({})
        return [b"", b"\0", b"\1" + good[1:], good[:1] + b"\0\0\0\x08" + good[5:], good[:-1]]


class TestProtobuf(CodecContract):
    def codec(self) -> Codec:
        return sl.values.Protobuf(order_files(), "shop.Order")

    def bad_values(self) -> Sequence[bytes]:
        return [b"\x08", b"\xff", b"\x3a\x02\xff\xff", b"\x3a\xff\xff\xff\xff\x0f", b"\xb2\x01\x01\x08"]

    def good_row(self) -> dict[str, Any]:
        return {"id": 7, "first": {"sku": "a"}, "at": GOOD["at"], "rank": 0}


class TestProtobufOfPlainFields(CodecContract):
    always_null = False

    def codec(self) -> Codec:
        return sl.values.Protobuf(order_files(), "shop.Plain")

    def bad_values(self) -> Sequence[bytes]:
        return [b"\x08", b"\x1a\x02\x0a\x05"]

    def good_row(self) -> dict[str, Any]:
        return {"id": 7, "state": "OPEN", "lines": [{"sku": "a", "count": 1}], "numbers": [1], "tags": {"a": 1}}

    def test_rows_come_back_as_they_were(self) -> None:
        codec = self.codec()
        row = {**self.good_row(), "tags": [("a", 1)]}
        batch = pa.RecordBatch.from_pylist([row], schema=codec.schema)
        assert codec.decode(codec.encode(batch)).columns.equals(batch)


class TestArrow(CodecContract):
    def codec(self) -> Codec:
        return sl.values.Arrow(SCHEMA)

    def bad_values(self) -> Sequence[bytes]:
        good = self.codec().encode_one(GOOD)
        two = pa.BufferOutputStream()
        with pa.ipc.new_stream(two, SCHEMA) as writer:
            writer.write_batch(pa.RecordBatch.from_pylist([{}, {}], schema=SCHEMA))
        other = sl.values.Arrow().encode_one({"id": "text"})
        return [b"", good[: len(good) // 2], good + b"x", bytes(two.getvalue()), other]

    def good_row(self) -> dict[str, Any]:
        return GOOD


def test_values_of_several_schemas_are_one_batch_of_all_their_columns() -> None:
    codec = sl.values.Arrow()
    rows = [{"a": 1}, {"b": "x"}, {"a": 2, "b": "y"}]
    decoded = codec.decode(pa.array([*map(codec.encode_one, rows), codec.encode_one({"a": "text"})], pa.binary()))
    assert decoded.columns.to_pylist() == [{"a": None, "b": None} | row for row in (*rows, {})]
    assert decoded.bad.column("row").to_pylist() == [3]


OLD = '{"type":"record","name":"O","fields":[{"name":"id","type":"int"},{"name":"gone","type":"string"}]}'
NEW = '{"type":"record","name":"O","fields":[{"name":"id","type":"long"},{"name":"new","type":"string","default":"-"}]}'


def test_records_of_an_older_schema_are_resolved_to_the_readers() -> None:
    registry = {1: OLD, 2: NEW}
    old = sl.values.Avro(registry=registry, schema_id=1).encode_one({"id": 1, "gone": "g"})
    new = sl.values.Avro(registry=registry, schema_id=2)
    decoded = new.decode(pa.array([old, new.encode_one({"id": 2, "new": "n"})], pa.binary()))
    assert decoded.bad.num_rows == 0
    assert decoded.columns.to_pylist() == [{"id": 1, "new": "-"}, {"id": 2, "new": "n"}]


def _record(kind: Any) -> dict[str, Any]:
    return {"type": "record", "name": "O", "fields": [{"name": "id", "type": kind}]}


LONGS = _record("long")["fields"]
UNREADABLE: dict[str, tuple[Any, bytes, str]] = {
    "another unit": (_record({"type": "long", "logicalType": "timestamp-millis"}), b"\x02", "timestamp-millis"),
    "no time at all": (_record("long"), b"\x02", "a plain number"),
    "recursive": (_record("long") | {"fields": [*LONGS, {"name": "x", "type": ["null", "O"]}]}, b"\x02\0", "recursive"),
    "items without bytes": (
        _record("long") | {"fields": [*LONGS, {"name": "x", "type": {"type": "array", "items": "null"}}]},
        b"\x02\x04\0",
        "without bytes",
    ),
    "not valid": (_record("no such type"), b"\x02", "no such type"),
    "no schema": (5, b"\x02", "not valid"),
}


@pytest.mark.parametrize(("written", "record", "says"), UNREADABLE.values(), ids=UNREADABLE)
def test_records_of_a_schema_that_cannot_be_read_are_bad(written: Any, record: bytes, says: str) -> None:
    own = _record({"type": "long", "logicalType": "timestamp-micros"})
    if says in ("recursive", "without bytes"):
        own = _record("long")
    codec = sl.values.Avro(own, registry={1: json.dumps(written)})
    decoded = codec.decode(pa.array([b"\0\0\0\0\1" + record, None], pa.binary()))
    assert decoded.bad.column("row").to_pylist() == [0]
    assert says in decoded.bad.column("reason")[0].as_py()


def test_encoding_for_a_registry_needs_the_id() -> None:
    with pytest.raises(InvalidInput, match="schema_id"):
        sl.values.Avro(NEW, registry={2: NEW}).encode_one({"id": 1, "new": "n"})
    with pytest.raises(InvalidInput, match="needs a schema"):
        sl.values.Avro()


def test_null_in_a_field_that_may_not_be_null_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot be encoded as avro"):
        sl.values.Avro(NEW).encode_one({"id": 1})


class _Registry(http.server.BaseHTTPRequestHandler):
    asked: list[str]
    status: int

    def do_GET(self) -> None:
        self.asked.append(self.path)
        found = self.status == 200 and self.path == "/schemas/ids/2"
        body = json.dumps({"schema": NEW} if found else {"error_code": 40403}).encode()
        self.send_response(200 if found else self.status if self.status != 200 else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[tuple[str, type[_Registry]]]:
    handler = type("Handler", (_Registry,), {"asked": [], "status": 200})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


def test_a_registry_is_asked_for_each_schema_once(registry: tuple[str, type[_Registry]]) -> None:
    url, handler = registry
    codec = sl.values.Avro(registry=url, schema_id=2)
    good = codec.encode_one({"id": 1, "new": "n"})
    unknown = b"\0\0\0\0\x07\x02"
    for _ in range(2):
        decoded = codec.decode(pa.array([good, unknown, good, unknown], pa.binary()))
        assert decoded.bad.column("row").to_pylist() == [1, 3]
    assert handler.asked == ["/schemas/ids/2", "/schemas/ids/7"]


def test_a_registry_that_does_not_answer_makes_no_bad_rows(registry: tuple[str, type[_Registry]]) -> None:
    url, handler = registry
    codec = sl.values.Avro(NEW, registry=url, schema_id=2)
    good = pa.array([codec.encode_one({"id": 1, "new": "n"})], pa.binary())
    handler.status = 503
    with pytest.raises(TransientStorageError, match="HTTP status 503"):
        codec.decode(good)
    handler.status = 200
    assert codec.decode(good).columns.to_pylist() == [{"id": 1, "new": "n"}]


def test_a_generated_class_is_a_descriptor() -> None:
    codec = sl.values.Protobuf(Timestamp)
    assert codec.schema.equals(pa.schema({"seconds": pa.int64(), "nanos": pa.int32()}))
    assert codec.encode_one({"seconds": 5}) == Timestamp(seconds=5).SerializeToString()


def test_an_enum_value_of_a_newer_writer_is_its_number() -> None:
    codec = sl.values.Protobuf(order_files(), "shop.Plain")
    decoded = codec.decode(pa.array([b"\x10\x01", b"\x10\x63"], pa.binary()))
    assert decoded.columns.column("state").to_pylist() == ["OPEN", "99"]
    assert codec.encode_one({"state": "99"}) == b"\x10\x63"


def test_a_timestamp_out_of_range_is_bad() -> None:
    codec = sl.values.Protobuf(order_files(), "shop.Order")
    far = b"\xa2\x01\x0a\x08" + b"\xff" * 8 + b"\x7f"
    assert codec.decode(pa.array([far], pa.binary())).bad.column("row").to_pylist() == [0]


@pytest.mark.parametrize(("files", "message"), [(order_files(), "shop.Endless"), (order_files(), "x"), (b"\xff", "x")])
def test_what_has_no_columns_is_refused(files: bytes, message: str) -> None:
    with pytest.raises(SchemaRefused):
        sl.values.Protobuf(files, message)


def test_numbers_that_json_lacks_are_kept_by_messagepack() -> None:
    codec = sl.values.MessagePack(pa.schema({"f": pa.float32(), "g": pa.float64()}))
    batch = pa.record_batch({"f": pa.array([float("inf")], pa.float32()), "g": pa.array([float("-inf")])})
    assert codec.decode(codec.encode(batch)).columns.equals(batch)
    wide = sl.values.MessagePack(pa.schema({"f": pa.float64()})).encode_one({"f": 1e300})
    assert codec.decode(pa.array([wide], pa.binary())).bad.num_rows == 1


@pytest.mark.parametrize("make", some([sl.values.Json, sl.values.MessagePack], 1))
def test_rows_of_every_schema_come_back_as_they_were(make: Callable[[pa.Schema], Codec]) -> None:
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(schemas().flatmap(lambda schema: st.tuples(st.just(schema), st.lists(row_strategy(schema), max_size=3))))
    def check(case: tuple[pa.Schema, list[dict[str, Any]]]) -> None:
        codec = make(case[0])
        batch = pa.RecordBatch.from_pylist(case[1], schema=codec.schema)
        decoded = codec.decode(codec.encode(batch))
        assert decoded.bad.num_rows == 0
        assert decoded.columns.equals(batch)

    check()


@pytest.mark.parametrize("make", [sl.values.Json, sl.values.MessagePack, sl.values.Avro, sl.values.Arrow])
@pytest.mark.parametrize("wrap", [lambda kind: kind, pa.list_], ids=["plain", "list"])
def test_dates_are_of_the_years_1_to_9999(make: Any, wrap: Any) -> None:
    kind = wrap(pa.date32())
    codec = make(pa.schema({"day": kind}))

    def column(days: int) -> pa.Table:
        dates = pa.array([days, None], pa.int32()).cast(pa.date32())
        return pa.table({"day": dates if kind == pa.date32() else pa.ListArray.from_arrays([0, 1, 2], dates)})

    for days in (-719_162, 2_932_896):  # the first and the last day
        decoded = codec.decode(codec.encode(column(days)))
        assert decoded.bad.num_rows == 0
        assert decoded.columns.column("day").to_pylist() == column(days)["day"].to_pylist()
    for days in (-719_163, 2_932_897, 10**8, -(2**31)):
        with pytest.raises(InvalidInput, match="outside of the years 1 to 9999"):
            codec.encode(column(days))
