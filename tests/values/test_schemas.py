"""Schemas in every notation, and their changes."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

import strandline as sl
from strandline.errors import SchemaRefused
from strandline.values import as_schema, conform_columns, evolve


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Part:
    name: str
    weight: float | None = None


@dataclasses.dataclass
class Thing:
    id: int
    price: Annotated[Decimal, pa.decimal128(12, 2)]
    small: Annotated[int, pa.int16()]
    at: dt.datetime
    day: dt.date
    color: Color
    size: Literal["s", "m"]
    parts: list[Part]
    names: tuple[str, ...]
    tags: dict[str, bool]
    blob: bytes


class Struct(msgspec.Struct, rename="camel"):
    thing_id: int
    part: Part | None = None


def test_a_dataclass_is_a_schema() -> None:
    part = pa.struct({"name": pa.string(), "weight": pa.float64()})
    assert as_schema(Thing).equals(
        pa.schema(
            {
                "id": pa.int64(),
                "price": pa.decimal128(12, 2),
                "small": pa.int16(),
                "at": pa.timestamp("us", tz="UTC"),
                "day": pa.date32(),
                "color": pa.string(),
                "size": pa.string(),
                "parts": pa.list_(part),
                "names": pa.list_(pa.string()),
                "tags": pa.map_(pa.string(), pa.bool_()),
                "blob": pa.binary(),
            }
        )
    )


def test_a_struct_is_a_schema_under_the_names_that_it_is_encoded_with() -> None:
    part = pa.struct({"name": pa.string(), "weight": pa.float64()})
    assert as_schema(Struct).equals(pa.schema({"thingId": pa.int64(), "part": part}))


def test_an_arrow_schema_becomes_nullable_throughout() -> None:
    inner = pa.struct([pa.field("a", pa.int8(), nullable=False)])
    strict = pa.schema(
        [pa.field("l", pa.list_(pa.field("x", inner, nullable=False)), nullable=False, metadata={"a": "b"})]
    )
    assert as_schema(strict).equals(pa.schema({"l": pa.list_(pa.struct({"a": pa.int8()}))}), check_metadata=True)


JSON_SCHEMA = {
    "$defs": {"part": {"type": "object", "properties": {"name": {"type": "string"}}}},
    "properties": {
        "id": {"type": "integer"},
        "small": {"type": ["integer", "null"], "format": "int16"},
        "at": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
        "blob": {"type": "string", "contentEncoding": "base64"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
        "tags": {"type": "object", "additionalProperties": {"type": "number"}},
        "state": {"enum": ["open", "closed", None]},
    },
}


@pytest.mark.parametrize("given", [JSON_SCHEMA, json.dumps(JSON_SCHEMA), json.dumps(JSON_SCHEMA).encode()])
def test_a_json_schema_is_a_schema(given: Any) -> None:
    assert as_schema(given).equals(
        pa.schema(
            {
                "id": pa.int64(),
                "small": pa.int16(),
                "at": pa.timestamp("us", tz="UTC"),
                "blob": pa.binary(),
                "parts": pa.list_(pa.struct({"name": pa.string()})),
                "tags": pa.map_(pa.string(), pa.float64()),
                "state": pa.string(),
            }
        )
    )


AVRO = {
    "type": "record",
    "name": "Thing",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}], "default": None},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "part", "type": {"type": "record", "name": "Part", "fields": [{"name": "n", "type": "int"}]}},
        {"name": "more", "type": {"type": "array", "items": "shop.Part"}},
        {"name": "tags", "type": {"type": "map", "values": "boolean"}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 4}},
        {"name": "color", "type": {"type": "enum", "name": "Color", "symbols": ["RED"]}},
        {"name": "again", "type": "Color"},
    ],
}


def test_an_avro_schema_is_a_schema() -> None:
    part = pa.struct({"n": pa.int32()})
    assert as_schema(json.dumps(AVRO)).equals(
        pa.schema(
            {
                "id": pa.int64(),
                "at": pa.timestamp("ms", tz="UTC"),
                "price": pa.decimal128(9, 2),
                "part": part,
                "more": pa.list_(part),
                "tags": pa.map_(pa.string(), pa.bool_()),
                "hash": pa.binary(4),
                "color": pa.string(),
                "again": pa.string(),
            }
        )
    )


@dataclasses.dataclass
class Endless:
    next: Endless | None


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (pa.schema([]), "at least one field"),
    "a number": (5, "must be a pyarrow.Schema"),
    "no JSON": ("{", "not JSON"),
    "a type without values": (pa.schema({"a": pa.struct({"b": pa.dictionary(pa.int8(), pa.string())})}), "'a.b'"),
    "a map by number": (pa.schema({"m": pa.map_(pa.int8(), pa.int8())}), "'m'"),
    "twice the same name": (pa.schema([("Id", pa.int8()), ("id", pa.int8())]), "'id'"),
    "a decimal of any size": (dataclasses.make_dataclass("D", [("x", Decimal)]), "'x' is a Decimal"),
    "a union": (dataclasses.make_dataclass("U", [("x", int | str)]), "'x'"),
    "an endless class": (Endless, "levels deep"),
    "JSON Schema of several types": ({"properties": {"a": {"type": ["string", "integer"]}}}, "'a' has several"),
    "JSON Schema of an array": ({"type": "array", "items": {"type": "string"}}, "must be of type object"),
    "JSON Schema without end": ({"properties": {"a": {"$ref": "#"}}}, "recursive"),
    "JSON Schema that refers to nothing": ({"properties": {"a": {"$ref": "#/x"}}}, "'a' refers to"),
    "Avro union": ({"type": "record", "name": "R", "fields": [{"name": "a", "type": ["int", "string"]}]}, "'a'"),
    "Avro without end": ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "R"}]}, "recursive"),
    "Avro unknown": ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "X"}]}, "'a' is of the type 'X'"),
}


@pytest.mark.parametrize(("given", "says"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_columns_is_refused_by_the_name_of_the_field(given: Any, says: str) -> None:
    with pytest.raises(SchemaRefused) as refused:
        as_schema(given)
    assert says in str(refused.value)


OLD = pa.schema(
    {
        "i": pa.int32(),
        "f": pa.float32(),
        "s": pa.struct({"a": pa.int8(), "b": pa.string()}),
        "l": pa.list_(pa.struct({"a": pa.int8()})),
        "m": pa.map_(pa.string(), pa.int16()),
        "gone": pa.string(),
    }
)
NEW = pa.schema(
    {
        "m": pa.map_(pa.string(), pa.int64()),
        "l": pa.list_(pa.struct({"z": pa.bool_(), "a": pa.int16()})),
        "s": pa.struct({"c": pa.date32(), "b": pa.string(), "a": pa.int8()}),
        "f": pa.float64(),
        "i": pa.int64(),
        "extra": pa.string(),
    }
)


def test_new_fields_are_added_and_numbers_widen_inside_structs_lists_and_maps_alike() -> None:
    evolution = evolve(OLD, NEW)
    assert sorted(field.name for field in evolution.added) == ["extra", "l[].z", "s.c"]
    assert sorted(f"{field.name} {field.type}" for field in evolution.widened) == [
        "f double", "i int64", "l[].a int16", "m{} int64",
    ]  # fmt: skip
    assert evolution.schema.names == ["i", "f", "s", "l", "m", "gone", "extra"]
    assert not evolve(evolution.schema, NEW)
    assert not evolve(evolution.schema, OLD)


def test_rows_of_the_old_and_of_the_new_schema_fit_the_evolved_one() -> None:
    schema = evolve(OLD, NEW).schema
    old = pa.RecordBatch.from_pylist(
        [{}, {"i": 1, "s": {"a": 1}, "l": [{"a": 2}, None], "m": [("k", 3)], "gone": "g"}, {"l": [], "m": []}], OLD
    )
    new = pa.RecordBatch.from_pylist([{"i": 2**40, "l": [{"z": True, "a": 300}], "extra": "e"}], NEW)
    for part in (old, old.slice(1), old.slice(1, 1), old.slice(3)):
        fitted = conform_columns(part, schema)
        fitted.validate(full=True)
        assert fitted.schema.equals(schema)
        assert [
            {name: row[name] for name in ("i", "gone", "m")} for row in fitted.to_pylist()
        ] == [{name: row[name] for name in ("i", "gone", "m")} for row in part.to_pylist()]  # fmt: skip
    assert conform_columns(old, schema).column("l").to_pylist()[1] == [{"a": 2, "z": None}, None]
    assert conform_columns(pa.Table.from_batches([new]), schema).to_pylist() == [
        {"i": 2**40, "f": None, "s": None, "l": [{"a": 300, "z": True}], "m": None, "gone": None, "extra": "e"}
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int64(), pa.float64()),
        (pa.int64(), pa.string()),
        (pa.int64(), pa.uint64()),
        (pa.uint64(), pa.int64()),
        (pa.decimal128(9, 2), pa.decimal128(10, 2)),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.int8(), pa.list_(pa.int8())),
        (pa.string(), pa.binary()),
    ],
)
def test_any_other_change_is_refused_with_the_field_and_both_types(old: pa.DataType, new: pa.DataType) -> None:
    with pytest.raises(SchemaRefused, match=r"'a\.x'") as refused:
        evolve(pa.schema({"a": pa.struct({"x": old})}), pa.schema({"a": pa.struct({"x": new})}))
    assert str(old) in str(refused.value)
    assert str(new) in str(refused.value)
    with pytest.raises(SchemaRefused, match="'x'"):
        conform_columns(pa.RecordBatch.from_arrays([pa.nulls(1, new)], ["x"]), pa.schema({"x": old}))


def test_names_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(SchemaRefused, match="'ID' differs from 'id'"):
        evolve(pa.schema({"id": pa.int8()}), pa.schema({"id": pa.int8(), "ID": pa.int8()}))


def test_a_required_column_may_not_go_missing() -> None:
    table = pa.schema([pa.field("id", pa.int8(), nullable=False)])
    with pytest.raises(SchemaRefused, match=r"'id' \(int8\) may not be null"):
        evolve(table, pa.schema({"x": pa.int8()}))


def test_raw_values_are_one_column_of_bytes() -> None:
    codec = sl.values.Raw()
    batch = codec.decode(pa.array([b"a", None], pa.large_binary())).columns
    assert batch.to_pylist() == [{"value": b"a"}, {"value": None}]
    assert codec.encode(batch).to_pylist() == [b"a", None]
    assert codec.encode_one(b"x") == codec.encode_one({"value": b"x"}) == b"x"
    assert codec.decode(pa.nulls(2)).columns.column("value").null_count == 2
    assert codec == sl.values.Raw()


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us", "Mars/Base"), pa.list_(pa.struct({"at": pa.timestamp("s", "CEST")}))]
)
def test_a_time_zone_that_nobody_knows_is_refused_at_the_door(kind):
    with pytest.raises(SchemaRefused, match="which is not known here"):
        as_schema(pa.schema({"when": kind}))
    assert as_schema(pa.schema({"when": pa.timestamp("us", "+05:30")})).field(0).type.tz == "+05:30"


def doubling_avro(times: int) -> Any:
    """Each type has two fields of the one before: a line doubles the fields."""
    named: list[Any] = [
        {"name": "f", "type": {"type": "record", "name": "A0", "fields": [{"name": "x", "type": "int"}]}}
    ]
    for at in range(times):
        fields = [{"name": name, "type": f"A{at}"} for name in "xy"]
        named.append({"name": f"f{at}", "type": {"type": "record", "name": f"A{at + 1}", "fields": fields}})
    return {"type": "record", "name": "R", "fields": named}


def doubling_json(times: int) -> Any:
    kinds: dict[str, Any] = {"A0": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    for at in range(times):
        kinds[f"A{at + 1}"] = {"type": "object", "properties": {name: {"$ref": f"#/$defs/A{at}"} for name in "xy"}}
    return {"type": "object", "properties": {"f": {"$ref": f"#/$defs/A{times}"}}, "$defs": kinds}


def doubling_protobuf(times: int) -> bytes:
    files = descriptor_pb2.FileDescriptorSet()
    file = files.file.add(name="a.proto", package="p", syntax="proto3")
    for at in range(times + 1):
        message = file.message_type.add(name=f"A{times - at}")
        for number, name in enumerate("xy", start=1):
            kind = {"type": 3} if at == 0 else {"type": 11, "type_name": f".p.A{times - at + 1}"}
            message.field.add(name=name, number=number, label=1, **kind)
    return bytes(files.SerializeToString())


@pytest.mark.parametrize(
    "codec",
    [
        lambda times: sl.values.Avro(doubling_avro(times)),
        lambda times: sl.values.Json(doubling_json(times)),
        lambda times: sl.values.Protobuf(doubling_protobuf(times), "p.A0"),
    ],
    ids=["avro", "json", "protobuf"],
)
def test_a_few_lines_that_make_thousands_of_fields_are_refused(codec: Any) -> None:
    assert len(codec(2).schema)
    with pytest.raises(SchemaRefused, match="more than 10,000 fields"):
        codec(24)
