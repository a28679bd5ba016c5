"""Typed producing: values with fields are encoded with the log's codec, and values that do not fit append nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strandline as sl
from strandline.errors import InvalidInput, SchemaRefused, TransientStorageError, Unsupported
from strandline.log.produce.typed import encoded_table
from strandline.testing.codecs import row_strategy
from strandline.values import Codec
from tests.matrix_cases import some
from tests.values.messages import order_files
from tests.values.test_codecs import SCHEMA

ORDERS = sl.values.Json(pa.schema({"id": pa.int32(), "note": pa.string()}))


@dataclass
class Order:
    id: int
    note: str | None = None


class Packed(msgspec.Struct):
    id: int


@pytest.fixture
def log() -> sl.log.MemoryLog:
    return sl.log.MemoryLog(value=ORDERS)


def rows(log: Any) -> list[tuple[bytes | None, int, bytes | None]]:
    table = pa.Table.from_batches(log.read(), sl.log.READ_SCHEMA)
    return list(zip(*[table[name].to_pylist() for name in ("key", "op", "value")], strict=True))


def test_mappings_dataclasses_and_structs_are_encoded_and_bytes_stay_bytes(log: sl.log.MemoryLog) -> None:
    with log.producer() as producer:
        for value in ({"id": 1}, Order(2, "é"), Packed(3), b"as it is", None):
            producer.append(key=b"k", value=value)
    assert [value for *_, value in rows(log)] == [
        b'{"id":1,"note":null}',
        '{"id":2,"note":"é"}'.encode(),
        b'{"id":3,"note":null}',
        b"as it is",
        None,
    ]


@pytest.mark.parametrize("url", ["{0}/object", "wal://{0}/wal"])
def test_every_log_that_names_a_codec_takes_typed_values(tmp_path: Path, url: str) -> None:
    with sl.open(url.format(tmp_path), create=True, value=ORDERS) as log:
        with log.producer() as producer:
            producer.append(value={"id": 1}).result()
            producer.append_batch(pa.table({"key": [b"a", b"b"], "id": [2, 3]})).result()
        decoded = ORDERS.decode(pa.array([value for *_, value in rows(log)], pa.binary()))
        assert decoded.columns.column("id").to_pylist() == [1, 2, 3]


def test_a_producer_may_have_a_codec_of_its_own_also_where_the_log_has_none(tmp_path: Path) -> None:
    plain = sl.log.MemoryLog()
    with plain.producer(value=ORDERS) as producer:
        producer.append(value={"id": 7})
        producer.append_batch(pa.table({"id": [8]}))
    assert [value for *_, value in rows(plain)] == [b'{"id":7,"note":null}', b'{"id":8,"note":null}']
    queue = sl.open(f"{tmp_path}/queue", format="queue-v1")
    with queue.producer(value=ORDERS) as producer:
        producer.append(value={"id": 1}).result()
    with queue.producer() as producer, pytest.raises(Unsupported, match="records no value format"):
        producer.append(value={"id": 1})
    with sl.open("grpc://127.0.0.1:1") as node, pytest.raises(Unsupported, match="records no value format"):
        node.producer().append(value={"id": 1})


def test_without_a_codec_the_error_says_where_to_name_one() -> None:
    with sl.log.MemoryLog().producer() as producer:
        with pytest.raises(InvalidInput, match=r"give the producer a codec"):
            producer.append(value={"id": 1})
        with pytest.raises(InvalidInput, match="give the producer a codec"):
            producer.append_batch(pa.table({"id": [1]}))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"id": "x"}, r"at `\$\.id`"),
        ({"id": 1 << 40}, r"\$\.id"),
        ({"ids": 1}, "ids"),
        (object(), "fit"),
        ("text", "encode text first"),
        (3, "encode text first"),
        (bytearray(b"x"), "encode text first"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_appends_nothing(
    log: sl.log.MemoryLog, value: Any, reason: str
) -> None:
    with log.producer() as producer, pytest.raises(InvalidInput, match=reason):
        producer.append(key=b"k", value=value)
    assert log.bounds().next == 0


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"id": [1, 1 << 40, 2]}, "row 1 does not fit: the field 'id' is 1099511627776, and int32 cannot hold that"),
        ({"id": ["a"]}, "field 'id' is string"),
        ({"id": [1], "other": [2]}, "field 'other' is not in the schema"),
        ({"id": [1], "_offset": [0]}, "numbers the records itself"),
        ({"id": [1], "key": [b"a"], "_key": [b"b"]}, "'key' twice"),
        ({"value": [{"id": 1}], "id": [1]}, "struct and a column 'id' beside it"),
        ({"id": [1], "op": [7]}, "Operations are"),
        ({"id": [1], "op": [None]}, "may not hold nulls"),
        ({"id": [1], "op": ["put"]}, "'op' is string, and operations are the numbers 0 to 2"),
        ({"id": [1], "_op": [{"a": 1}]}, "'op' is struct<a: int64>, and operations are"),
        ({"id": pa.array([], pa.int32())}, "at least one record"),
        ({"other": pa.array([], pa.int32())}, "at least one record"),
    ],
)
def test_a_batch_with_a_row_that_does_not_fit_appends_nothing(
    log: sl.log.MemoryLog, columns: dict[str, list[Any]], reason: str
) -> None:
    with log.producer() as producer, pytest.raises(InvalidInput, match=reason):
        producer.append_batch(pa.table(columns))
    assert log.bounds().next == 0


def test_a_row_that_the_encoding_lacks_is_named_in_a_large_batch() -> None:
    codec = sl.values.Json(pa.schema({"share": pa.float64()}))
    log = sl.log.MemoryLog(value=codec)
    shares = [0.5] * 20_000
    shares[12_345] = float("nan")
    with log.producer() as producer, pytest.raises(InvalidInput, match=r"row 12345 .*'share' holds a NaN"):
        producer.append_batch(pa.table({"share": shares}))
    assert log.bounds().next == 0


def test_values_as_a_struct_and_deletes_without_fields_have_null_values(log: sl.log.MemoryLog) -> None:
    with log.producer() as producer:
        producer.append_batch(pa.table({"key": [b"a", b"b"], "value": [{"id": 1}, None], "op": [0, 1]}))
        producer.append_batch(pa.table({"_key": [b"c", b"d", b"e"], "_op": [0, 1, 2], "id": [None, None, 5]}))
        producer.append_batch(pa.table({"key": [b"f"], "value": [b"bytes"]}))
    assert rows(log) == [
        (b"a", 0, b'{"id":1,"note":null}'),
        (b"b", 1, None),
        (b"c", 0, b'{"id":null,"note":null}'),
        (b"d", 1, None),
        (b"e", 2, b'{"id":5,"note":null}'),
        (b"f", 0, b"bytes"),
    ]


def test_fields_with_the_names_of_a_records_columns_are_the_values(tmp_path: Path) -> None:
    codec = sl.values.Json(pa.schema({"key": pa.string(), "value": pa.float64(), "timestamp": pa.int64()}))
    log = sl.log.MemoryLog(value=codec)
    with log.producer() as producer:
        producer.append_batch(pa.table({"key": ["k"], "value": [1.5], "timestamp": [7], "_key": [b"own"]}))
    assert rows(log) == [(b"own", 0, b'{"key":"k","value":1.5,"timestamp":7}')]


TIME = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("schema", "columns", "stored"),
    [
        ({"timestamp": TIME}, {"timestamp": pa.array([0], TIME)}, b'{"timestamp":"1970-01-01T00:00:00.000000Z"}'),
        ({"key": pa.string(), "id": pa.int64()}, {"key": ["a"]}, b'{"key":"a","id":null}'),
        ({"op": pa.int8(), "key": pa.string()}, {"op": [1], "key": ["a"]}, b'{"op":1,"key":"a"}'),
        ({"key": pa.string(), "value": pa.string()}, {"key": ["k"], "value": ["v"]}, b'{"key":"k","value":"v"}'),
        ({"headers": pa.string()}, {"headers": ["h"]}, b'{"headers":"h"}'),
        ({"value": pa.binary()}, {"value": [b"v"], "_key": pa.nulls(1)}, b'{"value":"dg=="}'),
    ],
)
@pytest.mark.parametrize("is_own", [False, True])
def test_fields_that_all_have_names_of_a_records_columns_are_encoded(
    schema: dict[str, pa.DataType], columns: dict[str, Any], stored: bytes, *, is_own: bool
) -> None:
    codec = sl.values.Json(pa.schema(schema))
    log = sl.log.MemoryLog(value=None if is_own else codec)
    with log.producer(value=codec if is_own else None) as producer:
        producer.append_batch(pa.table(columns))
    assert rows(log) == [(None, 0, stored)]


def test_a_batch_of_encoded_values_is_stored_as_it_is_unless_that_is_ambiguous() -> None:
    encoded = pa.table({"key": [b"k"], "op": [1], "value": [b'{"key":"x"}']})
    log = sl.log.MemoryLog(value=sl.values.Json(pa.schema({"key": pa.string(), "op": pa.int8()})))
    with log.producer() as producer:
        producer.append_batch(encoded)
        with pytest.raises(InvalidInput, match="'value' is text, and encoded values are bytes"):
            producer.append_batch(pa.table({"value": ["{}"]}))
    assert rows(log) == [(b"k", 1, b'{"key":"x"}')]
    for kind in (pa.binary(), pa.string()):
        log = sl.log.MemoryLog(value=sl.values.Json(pa.schema({"value": kind})))
        with (
            log.producer() as producer,
            pytest.raises(InvalidInput, match="may be encoded values or"),
        ):
            producer.append_batch(encoded)
        assert log.bounds().next == 0
    for untyped in (sl.log.MemoryLog(), sl.log.MemoryLog(value=sl.values.Raw())):
        with untyped.producer() as producer:
            producer.append_batch(encoded)
            producer.append_batch(pa.table({"value": ["text"]}))
        assert rows(untyped) == [(b"k", 1, b'{"key":"x"}'), (None, 0, b"text")]


def test_a_log_is_asked_for_its_format_once_by_a_producer_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plain = sl.log.MemoryLog()
    monkeypatch.setattr(sl.log.MemoryLog, "value", property(asked.append))
    with plain.producer() as producer:
        for _ in range(3):
            producer.append_batch(pa.table({"key": [b"k"], "value": [b"v"]}))
    assert len(asked) == 1


def test_while_the_store_fails_bytes_are_buffered_and_the_log_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = sl.log.MemoryLog(value=sl.values.Json(pa.schema({"key": pa.string()})))
    with log.producer() as producer:
        with monkeypatch.context() as broken:
            failing = property(lambda _: (_ for _ in ()).throw(TransientStorageError("away")))
            broken.setattr(sl.log.MemoryLog, "value", failing)
            producer.append_batch(pa.table({"key": [b"k"], "value": [b"{}"]}))
            with pytest.raises(TransientStorageError):
                producer.append_batch(pa.table({"key": ["a"]}))
        producer.append_batch(pa.table({"key": ["a"]}))
    assert rows(log) == [(b"k", 0, b"{}"), (None, 0, b'{"key":"a"}')]


def test_a_running_producer_takes_the_fields_of_a_newer_version(log: sl.log.MemoryLog) -> None:
    with log.producer() as producer:
        producer.append(value={"id": 1})
        wider = pa.schema({"id": pa.int64(), "note": pa.string(), "vip": pa.bool_()})
        log.evolve_value(sl.values.Json(wider))
        producer.append(value={"id": 1 << 40, "vip": True})
        producer.append_batch(pa.table({"id": [1 << 41], "vip": [False]}))
        with pytest.raises(InvalidInput, match="unknown field"):
            producer.append(value={"nothing": 1})
    assert [value for *_, value in rows(log)][1:] == [
        b'{"id":1099511627776,"note":null,"vip":true}',
        b'{"id":2199023255552,"note":null,"vip":false}',
    ]


AVRO = sl.values.Avro(pa.schema({"id": pa.int64(), "tags": pa.list_(pa.string())}))


@pytest.mark.parametrize(
    "codec",
    some(
        [
            sl.values.Json(SCHEMA),
            sl.values.MessagePack(SCHEMA),
            sl.values.Arrow(SCHEMA),
            sl.values.Protobuf(order_files(), "shop.Order"),
            AVRO,
        ],
        3,
    ),
    ids=lambda codec: codec.name,
)
def test_what_is_produced_in_columns_is_what_is_decoded(codec: Codec) -> None:
    @settings(max_examples=15, deadline=None, database=None)
    @given(st.lists(row_strategy(codec.schema), min_size=1, max_size=5))
    def check(found: list[dict[str, Any]]) -> None:
        batch = pa.Table.from_pylist(found, schema=codec.schema)
        keyed = batch.append_column("_key", pa.array([b"k"] * len(found), pa.binary()))
        values = encoded_table(keyed, codec)["value"].combine_chunks()
        decoded = codec.decode(values)
        assert decoded.bad.num_rows == 0
        assert decoded.columns.to_pylist() == batch.to_pylist()

    check()


def test_a_schema_mismatch_of_a_whole_column_is_a_schema_refused(log: sl.log.MemoryLog) -> None:
    with log.producer() as producer, pytest.raises(SchemaRefused, match="cast it, or change the schema"):
        producer.append_batch(pa.table({"id": [1.5]}))


def test_dictionaries_and_wider_numbers_are_taken_also_inside_of_structs_lists_and_maps() -> None:
    inner = pa.struct({"n": pa.int16(), "t": pa.string()})
    schema = pa.schema(
        {"one": inner, "many": pa.list_(inner), "named": pa.map_(pa.string(), pa.int8()), "tag": pa.string()}
    )
    log = sl.log.MemoryLog(value=sl.values.Json(schema))
    tags = pa.array(["x", "y", None]).dictionary_encode()
    structs = pa.StructArray.from_arrays([pa.array([1, 2, 3], pa.int64()), tags], ["n", "t"])
    many = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3], pa.int32()), structs)
    named = pa.array([[("a", 1)], None, [("b", 127)]], pa.map_(pa.string(), pa.int64()))
    with log.producer() as producer:
        producer.append_batch(pa.table({"one": structs, "many": many, "named": named, "tag": tags}))
    found = pa.Table.from_batches(sl.log.read_decoded(log)).select(schema.names).to_pylist()
    assert found == pa.table({"one": structs, "many": many, "named": named, "tag": tags}).to_pylist()


def test_a_number_inside_of_a_struct_that_does_not_fit_is_named_with_its_row() -> None:
    log = sl.log.MemoryLog(value=sl.values.Json(pa.schema({"one": pa.struct({"n": pa.int16()})})))
    with log.producer() as producer, pytest.raises(InvalidInput, match=r"row 1 does not fit: the field 'one' .*40000"):
        producer.append_batch(pa.table({"one": pa.array([{"n": 1}, {"n": 40_000}])}))
    assert log.bounds().next == 0
