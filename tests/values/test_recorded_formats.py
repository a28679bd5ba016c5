"""What a log records of its value format: every codec comes back equal, and only permitted changes are taken."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings

import strandline as sl
from strandline.errors import CorruptData, InvalidInput, SchemaRefused, UnsupportedVersion
from strandline.formats.json.value_versions import ValueVersion, read_versions, version_fields
from strandline.values import Codec
from strandline.values.recorded import as_version, check_copied, check_recorded, codec_of, newest, with_version
from tests.values.messages import order_files
from tests.values.schemas import schemas
from tests.values.test_codecs import SCHEMA

IDS = pa.schema({"id": pa.int32()})
AVRO = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}
WITH_NOTE = {**AVRO, "fields": [*AVRO["fields"], {"name": "note", "type": ["null", "string"], "default": None}]}
CODECS: list[Codec] = [
    sl.values.Json(SCHEMA),
    sl.values.MessagePack(SCHEMA),
    sl.values.Arrow(),
    sl.values.Arrow(IDS),
    sl.values.Arrow(IDS, max_columns=7, max_name=9),
    sl.values.Raw(),
    sl.values.Protobuf(order_files(), "shop.Plain"),
    sl.values.Avro(AVRO),
    sl.values.Avro(AVRO, registry={3: AVRO, 4: json.dumps(WITH_NOTE)}, schema_id=3),
    sl.values.Avro(AVRO, registry="https://registry.example:8081", schema_id=1),
    sl.values.Debezium(sl.values.Json(IDS)),
    sl.values.BeforeAfter(sl.values.MessagePack(IDS)),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_every_codec_comes_back_equal_from_plain_json(codec: Codec) -> None:
    stored = json.loads(json.dumps(version_fields([as_version(codec)])))
    [version] = read_versions(stored)
    found = codec_of(version, "the log")
    assert found == codec
    assert found.schema.equals(codec.schema)
    assert as_version(found) == version


@settings(max_examples=60, deadline=None, database=None)
@given(schemas())
def test_every_schema_comes_back_as_it_was(schema: pa.Schema) -> None:
    codec = sl.values.Arrow(schema)
    [version] = read_versions(json.loads(json.dumps(version_fields([as_version(codec)]))))
    assert codec_of(version, "the log").schema.equals(codec.schema, check_metadata=True)


def test_a_codec_without_a_schema_is_not_recorded() -> None:
    with pytest.raises(InvalidInput, match=r"Arrow\(\) names no columns.*give it a schema"):
        with_version((), sl.values.Arrow(), "x")
    old = (as_version(sl.values.Arrow()),)  # as a former release recorded it
    assert with_version(old, sl.values.Arrow(IDS), "x")[-1].number == 2


def test_a_recorded_time_zone_that_this_machine_lacks_is_no_damage() -> None:
    version = ValueVersion.of(1, "json", {"fields": [{"name": "at", "type": "timestamp[us, Mars/Base]"}]})
    with pytest.raises(UnsupportedVersion, match="time zone 'Mars/Base' is not known here"):
        codec_of(version, "the log")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (sl.values.Json(IDS), sl.values.MessagePack(IDS)),
        (sl.values.Json(IDS), sl.values.Json(pa.schema({"name": pa.string()}))),
        (sl.values.Json(pa.schema({"id": pa.int64()})), sl.values.Json(IDS)),
        (sl.values.Json(IDS), sl.values.Debezium(sl.values.Json(IDS))),
    ],
)
def test_a_log_holds_values_of_another_one_only_if_it_can_decode_them(source: Codec, target: Codec) -> None:
    ours, theirs = with_version((), source, "s"), with_version((), target, "t")
    with pytest.raises(SchemaRefused, match=r"^The target cannot decode.*evolve_value"):
        check_copied(ours, theirs, "The target")
    check_copied(ours, (), "The target")
    check_copied((), theirs, "The target")
    check_copied(ours, (*theirs, *ours), "The target")
    wider = sl.values.Json(source.schema.append(pa.field("note", pa.string())))
    check_copied(ours, with_version((), wider, "t"), "The target")


def test_new_fields_and_wider_ones_make_a_new_version_and_the_same_schema_makes_none() -> None:
    first = with_version((), sl.values.Json(IDS), "x")
    assert with_version(first, sl.values.Json(IDS), "x") == first
    wider = sl.values.Json(pa.schema({"id": pa.int64(), "note": pa.string()}))
    both = with_version(first, wider, "x")
    assert [version.number for version in both] == [1, 2]
    assert newest(both, "x") == wider
    assert newest((), "x") is None
    check_recorded(both, sl.values.Json(IDS), "x")  # a program of before the change
    check_recorded(both, None, "x")
    with pytest.raises(InvalidInput, match="evolve_value does"):
        check_recorded(both, sl.values.Json(pa.schema({"other": pa.string()})), "x")
    with pytest.raises(InvalidInput, match="plain bytes"):
        check_recorded((), sl.values.Json(IDS), "x")


def _numbered(number: int, kind: int = descriptor_pb2.FieldDescriptorProto.TYPE_INT32, *, member: str = "A") -> Codec:
    file = descriptor_pb2.FileDescriptorProto(name="n.proto", package="n", syntax="proto3")
    file.enum_type.add(name="E").value.add(name=member, number=0)
    message = file.message_type.add(name="M")
    message.field.add(name="id", number=number, label=1, type=kind)
    message.field.add(name="state", number=9, label=1, type=14, type_name=".n.E")
    inner = message.nested_type.add(name="Inner")
    inner.field.add(name="a", number=1 if number < 5 else 2, label=1, type=5)
    message.field.add(name="inner", number=10, label=1, type=11, type_name=".n.M.Inner")
    return sl.values.Protobuf(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString(), "n.M")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (sl.values.Json(IDS), sl.values.Json(pa.schema({"id": pa.string()})), "'id' is int32 in the table"),
        (sl.values.Json(IDS), sl.values.Json(pa.schema({"id": pa.int16()})), "narrower in the new schema"),
        (
            sl.values.Json(IDS),
            sl.values.Json(pa.schema({"note": pa.string()})),
            "'id' is in the values of x and missing",
        ),
        (sl.values.Json(IDS), sl.values.MessagePack(IDS), "another format"),
        (sl.values.Raw(), sl.values.Json(IDS), "another format"),
        (sl.values.Debezium(sl.values.Json(IDS)), sl.values.BeforeAfter(sl.values.Json(IDS)), "another format"),
        (sl.values.Debezium(sl.values.Json(IDS)), sl.values.Debezium(sl.values.MessagePack(IDS)), "another format"),
        (sl.values.Avro(AVRO), sl.values.Avro(WITH_NOTE), "do not name the schema"),
        (
            sl.values.Avro(AVRO, registry={1: AVRO}),
            sl.values.Avro(WITH_NOTE, registry={2: WITH_NOTE}),
            "schema 1 of older values",
        ),
        (_numbered(1), _numbered(2), "number 1 .varint. in the values and 2"),
        (_numbered(1), _numbered(1, 17), "keep numbers and encodings"),
        (_numbered(1), _numbered(1, member="B"), "lost or renumbered 'A'"),
    ],
)
def test_a_change_that_older_values_do_not_survive_is_refused(old: Codec, new: Codec, reason: str) -> None:
    versions = with_version((), old, "x")
    with pytest.raises(SchemaRefused, match=reason):
        with_version(versions, new, "x")


def test_numbers_of_fields_inside_a_message_are_kept_too() -> None:
    with pytest.raises(SchemaRefused, match=r"'inner\.a' has the number 1"):
        _numbered(7).check_reads(_reordered())  # type: ignore[attr-defined]


def _reordered() -> Codec:
    file = descriptor_pb2.FileDescriptorProto(name="n.proto", package="n", syntax="proto3")
    message = file.message_type.add(name="M")
    inner = message.nested_type.add(name="Inner")
    inner.field.add(name="a", number=1, label=1, type=5)
    message.field.add(name="inner", number=10, label=1, type=11, type_name=".n.M.Inner")
    return sl.values.Protobuf(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString(), "n.M")


def test_a_wider_protobuf_field_is_taken_and_reads_the_older_bytes() -> None:
    old, new = _numbered(1), _numbered(1, descriptor_pb2.FieldDescriptorProto.TYPE_INT64)
    assert len(with_version(with_version((), old, "x"), new, "x")) == 2
    values = pa.array([old.encode_one({"id": -7})], pa.binary())
    assert new.decode(values).columns.column("id").to_pylist() == [-7]


def test_avro_with_a_registry_takes_new_fields_with_defaults_and_reads_the_older_values() -> None:
    old = sl.values.Avro(AVRO, registry={1: AVRO}, schema_id=1)
    new = sl.values.Avro(WITH_NOTE, registry={1: AVRO, 2: WITH_NOTE}, schema_id=2)
    assert len(with_version(with_version((), old, "x"), new, "x")) == 2
    values = pa.array([old.encode_one({"id": 7}), new.encode_one({"id": 8, "note": "n"})], pa.binary())
    assert new.decode(values).columns.to_pylist() == [{"id": 7, "note": None}, {"id": 8, "note": "n"}]
    bare = {**AVRO, "fields": [*AVRO["fields"], {"name": "note", "type": "string"}]}
    with pytest.raises(SchemaRefused, match="'note' has no default"):
        with_version(with_version((), old, "x"), sl.values.Avro(bare, registry={1: AVRO}), "x")


def test_a_codec_of_the_callers_own_is_not_recorded() -> None:
    class Own(sl.values.Raw):
        name = "own"

    class Strange:
        name, schema = "strange", IDS

        def decode(self, values): ...
        def encode(self, columns): ...
        def encode_one(self, value): ...

    with pytest.raises(InvalidInput, match="records only formats of strandline"):
        as_version(Strange())


def test_credentials_in_a_registrys_address_are_not_recorded() -> None:
    codec = sl.values.Avro(AVRO, registry="https://me:secret@registry.example")
    with pytest.raises(InvalidInput) as caught:
        as_version(codec)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("cbor", {}),
        ("json", {"fields": [{"name": "a", "type": "vector(3)"}]}),
        ("debezium", {"format": "x", "schema": {}}),
    ],
)
def test_a_format_of_a_newer_release_says_to_upgrade_or_to_read_bytes(name: str, schema: dict[str, object]) -> None:
    with pytest.raises(UnsupportedVersion, match=r"s3://b/orders .*upgrade strandline, read the values as bytes"):
        codec_of(ValueVersion.of(3, name, schema), "s3://b/orders")


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("json", {}),
        ("json", {"fields": []}),
        ("json", {"fields": [{"type": "int64"}]}),
        ("json", {"fields": [{"name": "a", "type": "int64"}] * 2}),
        ("json", {"fields": [{"name": "a", "type": "decimal128(99, 0)"}]}),
        ("protobuf", {"files": "%%", "message": "m"}),
        ("protobuf", {"files": "", "message": "m"}),
        ("avro", {"schema": 3}),
        ("debezium", {"format": "raw", "schema": {}}),
    ],
)
def test_a_damaged_schema_is_damage(name: str, schema: dict[str, object]) -> None:
    with pytest.raises(CorruptData, match="is damaged"):
        codec_of(ValueVersion.of(1, name, schema), "x")


@pytest.mark.parametrize(
    "values",
    [
        3, {}, [3], [{}], [{"version": 2, "format": "json", "schema": {}}], [{"version": 1, "format": 3, "schema": {}}],
        [{"version": 1, "format": "json", "schema": []}], [{"version": True, "format": "json", "schema": {}}],
    ],
)  # fmt: skip
def test_versions_that_cannot_be_are_damage(values: object) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_versions({"values": values})


@pytest.mark.parametrize(
    "wrap", [sl.values.Json, sl.values.Arrow, lambda schema: sl.values.Debezium(sl.values.Json(schema))]
)
def test_a_log_does_not_record_fields_that_no_reader_decodes(wrap: Any) -> None:
    hidden = wrap(pa.schema({"id": pa.int32(), "_x": pa.int64()}))
    for act in (
        lambda: with_version((), hidden, "x"),
        lambda: with_version(with_version((), wrap(IDS), "x"), hidden, "x"),
    ):
        with pytest.raises(InvalidInput, match="'_x' begins with an underscore"):
            act()
    inside = wrap(pa.schema({"id": pa.struct({"_x": pa.int64()})}))
    assert codec_of(as_version(inside), "x") == inside
