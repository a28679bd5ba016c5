"""Keywords of a JSON Schema: each defines columns, is enforced, is refused by a new log, or is an annotation."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import BadRecord, CorruptData, InvalidInput, SchemaRefused, UnsupportedVersion
from strandline.formats.json.value_versions import ValueVersion, read_versions, version_fields
from strandline.log import read_decoded
from strandline.values.recorded import as_version, check_recorded, codec_of, with_version
from strandline.values.schema.json_schema import constraining_keyword
from strandline.values.schema.schemas import constrained

INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
TEXT: dict[str, Any] = {"type": "string"}
LIST: dict[str, Any] = {"type": "array", "items": TEXT}
MAP: dict[str, Any] = {"type": "object", "additionalProperties": INTEGER}
STRUCT: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "b": TEXT}}
OPTIONAL: dict[str, Any] = {"anyOf": [INTEGER, {"type": "null"}]}

ENFORCED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({**INTEGER, "minimum": 0}, [0, 1], [-1]),
    ({**INTEGER, "minimum": 0.5, "maximum": 9.5}, [1, 9], [0, 10]),
    ({**INTEGER, "exclusiveMinimum": 0, "exclusiveMaximum": 3}, [1, 2], [0, 3]),
    ({**INTEGER, "format": "int8", "maximum": 300}, [127], [128]),
    ({**INTEGER, "format": "uint64", "minimum": 1, "multipleOf": 2}, [2, 2**64 - 2], [0, 2**64 - 1, 2**64]),
    ({**INTEGER, "multipleOf": 5}, [0, 5, -10], [1]),
    ({**INTEGER, "enum": [1, 2]}, [1, 2], [0, 3, True, "1"]),
    ({"const": 7}, [7], [8]),
    ({**NUMBER, "minimum": 0, "maximum": 1}, [0, 0.5, 1], [-0.1, 1.1]),
    ({**NUMBER, "minimum": 0, "exclusiveMinimum": 0}, [0.1], [0, -1]),
    ({**NUMBER, "format": "float", "exclusiveMaximum": 1}, [-3e38, 0.5], [1, -4e38]),
    ({**NUMBER, "multipleOf": 2}, [4, -2.0], [3, 0.5]),
    ({**TEXT, "minLength": 2, "maxLength": 3}, ["äö", "abc"], ["ä", "abcd", "\U0001f600"]),
    ({**TEXT, "pattern": "^[a-z]+$"}, ["abc"], ["", "a1", "abc\n"]),
    ({**TEXT, "enum": ["a", "", "ü"]}, ["a", "", "ü"], ["b"]),
    ({"const": "a", "enum": ["a", "b"]}, ["a"], ["b"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b"]),
    ({**LIST, "minItems": 1, "maxItems": 2}, [["a"], ["a", "b"]], [[], ["a", "b", "c"]]),
    ({"type": "array", "items": {**TEXT, "pattern": "x"}}, [[], ["x", "ax"]], [["x", "y"]]),
    ({**MAP, "minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}, {"a": 1, "b": 2, "c": 3}]),
    ({"type": "object", "additionalProperties": {**INTEGER, "minimum": 1}}, [{"a": 1}], [{"a": 0}]),
    ({**STRUCT, "required": ["a"]}, [{"a": 1}, {"a": 1, "b": None}], [{}, {"a": None}, {"b": "x"}]),
    ({**STRUCT, "properties": {"a": OPTIONAL}, "required": ["a"]}, [{"a": None}, {"a": 1}], [{}]),
    ({**STRUCT, "additionalProperties": False}, [{"a": 1}], [{"a": 1, "c": 1}]),
    ({"$ref": "#/$defs/small"}, [1], [10]),
    ({"anyOf": [{"type": "null"}, {**INTEGER, "minimum": 1}]}, [1, None], [0]),
]  # fmt: skip
"""A schema, values that fulfil it, values that violate it."""

REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((word, {**LIST, word: value}) for word, value in {
        "uniqueItems": True, "contains": {"a": 1}, "minContains": 1, "maxContains": 2, "prefixItems": [{"a": 1}],
        "additionalItems": {"a": 1}, "unevaluatedItems": {"a": 1}, "minItems": -1, "minLength": 1, "enum": [["a"]],
    }.items()),
    *((word, {**STRUCT, word: value}) for word, value in {
        "minProperties": 1, "maxProperties": 2, "patternProperties": {"a": {}}, "propertyNames": {"a": 1},
        "unevaluatedProperties": {"a": 1}, "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {"b": 1}},
        "dependencies": {"a": ["b"]}, "required": ["other"], "additionalProperties": {"type": "string"},
    }.items()),
    *((word, {**TEXT, word: value}) for word, value in {
        "allOf": [{"minimum": 1}], "not": {"const": 1}, "if": {"const": 1}, "then": {"const": 1}, "else": {"const": 1},
        "$dynamicRef": "#a", "$recursiveRef": "#", "minimum": 0, "enum": [1, 2], "minLength": "1",
    }.items()),
    *(("pattern", {**TEXT, "pattern": pattern}) for pattern in ("(?=a)b", r"(a)\1", "(", "a{2000}", r"\u00e9")),
    ("minLength", {**TEXT, "format": "date-time", "minLength": 1}),
    ("pattern", {**TEXT, "contentEncoding": "base64", "pattern": "a"}),
    ("multipleOf", {**NUMBER, "multipleOf": 0.01}),
    ("multipleOf", {**INTEGER, "multipleOf": 0}),
    ("exclusiveMinimum", {**INTEGER, "minimum": 1, "exclusiveMinimum": True}),
    ("minimum", {**INTEGER, "minimum": 2**63}),
    ("maximum", {**INTEGER, "format": "uint64", "maximum": 2**63}),
    ("minimum", {**NUMBER, "minimum": 10**400}),
    ("enum", {**NUMBER, "enum": [1.5]}),
    ("const", {"type": "boolean", "const": True}),
    ("minimum", {**INTEGER, "enum": [1, 2], "minimum": 2}),
    ("minimum", {"$ref": "#/$defs/small", "minimum": 1}),
    ("maximum", {"anyOf": [INTEGER, {"type": "null"}], "maximum": 1}),
    ("properties", {**STRUCT, "anyOf": [{"type": "null"}, TEXT]}),
]  # fmt: skip
"""Keywords that are not enforced, or not for that type."""

ANNOTATIONS: dict[str, Any] = {
    "title": "Id", "description": "x", "default": 1, "examples": [1], "deprecated": True, "readOnly": True,
    "writeOnly": True, "$comment": "x", "$id": "https://x", "$schema": "https://x", "$anchor": "a", "$defs": {},
    "definitions": {}, "format": "email", "contentMediaType": "text/plain", "x-mine": 1, "uniqueItems": False,
    "required": [], "nullable": True, "minLength": 0,
}  # fmt: skip


def values(field: dict[str, Any], **further: Any) -> dict[str, Any]:
    defs = {"small": {**INTEGER, "maximum": 9}}
    return {"type": "object", "properties": {"id": INTEGER, "x": field}, "$defs": defs, **further}


def bad(codec: Any, *rows: Any) -> list[int]:
    encoded = pa.array([json.dumps(row).encode() for row in rows], pa.binary())
    return codec.decode(encoded).bad.column("row").to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("field", "good", "wrong"), ENFORCED, ids=str)
def test_a_constraint_is_enforced_by_decoding_and_by_encoding(
    field: dict[str, Any], good: list[Any], wrong: list[Any]
) -> None:
    codec = codec_of(with_version((), sl.values.Json(values(field)), "x")[0], "x")  # as a log gives it
    rows = [{"id": 1, "x": value} for value in [*good, *wrong]]
    assert bad(codec, *rows) == list(range(len(good), len(rows)))
    assert bad(codec, *(json.loads(codec.encode_one(row)) for row in rows[: len(good)])) == []
    for row in rows[len(good) :]:
        with pytest.raises(InvalidInput, match=r"does not fit the schema"):
            codec.encode_one(row)


def test_a_missing_field_is_named_when_it_is_required() -> None:
    codec = sl.values.Json(values(TEXT, required=["id", "x"]))
    decoded = codec.decode(pa.array([b'{"id":1}', b'{"id":1,"x":null}', None], pa.binary()))
    assert decoded.bad.to_pylist() == [
        {"row": 0, "reason": "Object missing required field `x`."},
        {"row": 1, "reason": "Expected `str`, got `null` - at `$.x`."},
    ]


def test_columns_that_violate_a_constraint_are_not_encoded() -> None:
    codec = sl.values.Json(values({**TEXT, "pattern": "^a"}, required=["id"]))
    good = pa.table({"id": [1, 2], "x": ["a", None]})
    assert codec.encode(good).to_pylist() == [b'{"id":1,"x":"a"}', b'{"id":2,"x":null}']
    for wrong in ({"id": [1, None]}, {"x": ["a", "a"]}, {"id": [1, 2], "x": ["a", "b"]}):
        with pytest.raises(InvalidInput, match=r"The row [01] does not fit the schema"):
            codec.encode(pa.table(wrong))


def test_a_hostile_value_does_not_make_a_pattern_slow() -> None:
    codec = sl.values.Json(values({**TEXT, "pattern": "^(a+)+$"}))
    assert bad(codec, {"x": "a" * 100_000 + "b"}) == [0]  # exponential for a pattern that backtracks


def test_messagepack_enforces_the_same() -> None:
    codec = codec_of(as_version(sl.values.MessagePack(values({**NUMBER, "minimum": 0}, required=["id"]))), "x")
    plain = sl.values.MessagePack(values(NUMBER))
    rows = [{"id": 1, "x": 1.0}, {"x": 1.0}, {"id": 1, "x": -1.0}, {"id": 1, "x": float("nan")}]
    encoded = pa.array([plain.encode_one(row) for row in rows], pa.binary())
    assert codec.decode(encoded).bad.column("row").to_pylist() == [1, 2, 3]


def test_a_change_event_is_held_to_the_constraints_of_the_row_that_it_puts() -> None:
    codec = sl.values.Debezium(sl.values.Json(values({**TEXT, "minLength": 1}, required=["id", "x"])))
    again = codec_of(as_version(codec), "x")
    assert again == codec
    events = [
        {"op": "c", "after": {"id": 1, "x": "a"}}, {"op": "c", "after": {"id": 1}}, {"op": "d", "before": {"id": 1}},
        {"payload": {"op": "u", "after": {"id": 1, "x": ""}}},
    ]  # fmt: skip
    assert bad(again, *events) == [1, 3]  # of a deleted row a source may know the key alone
    with pytest.raises(InvalidInput, match="does not fit"):
        again.encode_one({"id": 1})


@pytest.mark.parametrize(("keyword", "field"), REFUSED, ids=str)
def test_a_new_log_refuses_a_keyword_that_is_not_enforced_and_names_it(keyword: str, field: dict[str, Any]) -> None:
    with pytest.raises(SchemaRefused, match=rf"'{keyword.replace('$', '[$]')}' of the field 'x'"):
        with_version((), sl.values.Json(values(field)), "x")


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_annotations_are_allowed(keyword: str) -> None:
    codec = sl.values.Json(values({**TEXT, keyword: ANNOTATIONS[keyword]}))
    assert with_version((), codec, "x")[0].format == "json"


@pytest.mark.parametrize(
    "make", [sl.values.Avro, sl.values.Arrow, lambda schema: sl.values.Debezium(sl.values.Avro(schema))]
)
def test_a_codec_without_constraints_refuses_all_of_them(make: Any) -> None:
    row = values({**TEXT, "minLength": 1})
    event = {"properties": {"before": row, "after": row, "op": TEXT}}
    schema = row if make in (sl.values.Avro, sl.values.Arrow) else event
    with pytest.raises(SchemaRefused, match=r"'minLength' of the field '(before\.)?x'"):
        with_version((), make({**schema, "$defs": row["$defs"]}), "x")
    closed = {**STRUCT, "additionalProperties": False}
    assert constraining_keyword(closed) == "'additionalProperties' of the value"


def test_equal_constraints_are_one_format_and_travel_with_the_codec() -> None:
    one = sl.values.Json(values({**INTEGER, "exclusiveMinimum": 0, "format": "int32"}, required=["x", "id"]))
    other = sl.values.Json(values({**INTEGER, "minimum": 1, "format": "int32", "title": "X"}, required=["id", "x"]))
    assert one == other != sl.values.Json(values({**INTEGER, "format": "int32"}))
    assert as_version(one).is_same_format(as_version(other))
    assert pickle.loads(pickle.dumps(one)) == one
    assert bad(pickle.loads(pickle.dumps(one)), {"id": 1, "x": 0}) == [0]


def test_a_log_without_constraints_is_recorded_as_ever() -> None:
    version = as_version(sl.values.Json(values(TEXT)))
    assert version.format == "json"
    assert set(json.loads(version.schema)) == {"fields"}


def test_recorded_constraints_that_are_unknown_or_damaged_are_told_apart() -> None:
    version = as_version(sl.values.Json(values({**LIST, "minItems": 1}, required=["id"])))
    [again] = read_versions(json.loads(json.dumps(version_fields([version]))))
    assert again == version
    assert version.format == "json+constraints"  # which a release without constraints does not know
    fields = json.loads(version.schema)["fields"]
    for constraints, error in (
        ({"newer": 1}, UnsupportedVersion),
        ({"properties": {"x": {"newer": 1}}}, UnsupportedVersion),
        ([], CorruptData),
        ({"required": ["y"]}, CorruptData),
        ({"required": [["id"]]}, CorruptData),
        ({"additionalProperties": True}, CorruptData),
        ({"properties": {"y": {}}}, CorruptData),
        ({"properties": {"id": {"items": {}}}}, CorruptData),
        ({"properties": {"id": {"minimum": "0"}}}, CorruptData),
        ({"properties": {"x": {"items": {"pattern": "("}}}}, CorruptData),
    ):
        damaged = ValueVersion.of(1, version.format, {"fields": fields, "constraints": constraints})
        with pytest.raises(error):
            codec_of(damaged, "x")


LOOSER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (values({**INTEGER, "minimum": 1}), values(INTEGER)),
    (values({**INTEGER, "minimum": 1, "maximum": 5}), values({**INTEGER, "minimum": 0, "maximum": 6})),
    (values({**INTEGER, "format": "int8", "maximum": 200}), values({**INTEGER, "format": "int16", "maximum": 200})),
    (values({**NUMBER, "exclusiveMinimum": 0}), values({**NUMBER, "minimum": 0})),
    (values({**INTEGER, "multipleOf": 6}), values({**INTEGER, "multipleOf": 3})),
    (values({**TEXT, "minLength": 2, "maxLength": 3}), values({**TEXT, "minLength": 1, "maxLength": 4})),
    (values({**TEXT, "enum": ["a"]}), values({**TEXT, "enum": ["b", "a"]})),
    (values({**TEXT, "pattern": "a"}), values(TEXT)),
    (values(TEXT, required=["id", "x"]), values(TEXT, required=["x"])),
    (values(INTEGER, required=["x"]), values(OPTIONAL, required=["x"])),
    (values(TEXT, additionalProperties=False), values(TEXT)),
    (values({"type": "array", "items": {**TEXT, "minLength": 2}}), values(LIST)),
    (values({**MAP, "maxProperties": 2}), values({**MAP, "maxProperties": 3})),
]  # fmt: skip


@pytest.mark.parametrize(("strict", "loose"), LOOSER, ids=str)
def test_a_log_takes_looser_constraints_and_refuses_tighter_ones(strict: Any, loose: Any) -> None:
    versions = with_version((), sl.values.Json(strict), "x")
    assert len(with_version(versions, sl.values.Json(loose), "x")) == 2
    if strict["properties"]["x"].get("format") != "int8":
        with pytest.raises(SchemaRefused, match=r"The new JSON Schema has '\w+' of the .* may violate it"):
            with_version(with_version((), sl.values.Json(loose), "x"), sl.values.Json(strict), "x")


def test_a_new_field_may_be_constrained_and_not_required() -> None:
    versions = with_version((), sl.values.Json(values(TEXT, additionalProperties=False)), "x")
    further = {"id": INTEGER, "x": TEXT, "new": {**STRUCT, "required": ["a"]}}
    wider = {"properties": further, "additionalProperties": False}
    assert len(with_version(versions, sl.values.Json(wider), "x")) == 2
    with pytest.raises(SchemaRefused, match="'required' of the value"):
        with_version(versions, sl.values.Json({**wider, "required": ["new"]}), "x")


@pytest.mark.parametrize("kind", ["object", "wal"])
def test_a_log_enforces_its_constraints_at_append_and_at_decode(tmp_path: Path, kind: str) -> None:
    url = f"wal://{tmp_path}/log" if kind == "wal" else f"file://{tmp_path}/log"
    schema = values({**INTEGER, "minimum": 0}, required=["id"])
    with sl.open(url, create=True, value=sl.values.Json(schema)) as log, log.producer() as producer:
        producer.append(value={"id": 1, "x": 2}).result(10)
        for wrong in ({"x": 2}, {"id": 1, "x": -1}):
            with pytest.raises(InvalidInput, match="does not fit the schema"):
                producer.append(value=wrong)
        producer.append(value=b'{"x": 2}').result(10)  # bytes stay bytes: decoding finds them
        rows = pa.Table.from_batches(read_decoded(log, bad="null"))
        assert rows.column("_error").to_pylist() == [None, "Object missing required field `id`."]
        with pytest.raises(BadRecord, match="missing required field `id`"):
            list(read_decoded(log))
    with sl.open(url, value=sl.values.Json(schema)) as again:
        assert again.value == sl.values.Json(schema)


@pytest.mark.parametrize("kind", ["object", "wal"])
def test_a_log_whose_constraints_an_older_version_ignored_still_opens(tmp_path: Path, kind: str) -> None:
    url = f"wal://{tmp_path}/log" if kind == "wal" else f"file://{tmp_path}/log"
    strict, plain = sl.values.Json(values(TEXT, required=["x"])), sl.values.Json(values(TEXT))
    sl.open(url, create=True, value=plain).close()  # an older version recorded the same: types only
    with sl.open(url, create=True, value=strict) as log, log.producer() as producer:
        producer.append(value={"id": 1}).result(10)
        with pytest.raises(SchemaRefused, match=r"'required' of the value, and older values"):
            log.evolve_value(strict)
    events = sl.values.Debezium(plain)
    check_recorded([as_version(events)], sl.values.Debezium(strict), "x")
    with pytest.raises(InvalidInput, match="evolve_value"):
        check_recorded([as_version(strict)], plain, "x")


def test_a_schema_that_tools_generate_is_taken() -> None:
    """As pydantic gives it for a model with optional, literal, nested and bounded fields."""
    schema = {
        "$defs": {"Line": {"properties": {"sku": {**TEXT, "minLength": 1, "title": "Sku"}}, "required": ["sku"],
                           "title": "Line", "type": "object"}},
        "properties": {"id": {**INTEGER, "exclusiveMinimum": 0, "title": "Id"},
                       "state": {"enum": ["new", "paid"], "title": "State", "type": "string"},
                       "kind": {"const": "order", "default": "order", "title": "Kind", "type": "string"},
                       "note": {"anyOf": [{"maxLength": 9, "type": "string"}, {"type": "null"}], "default": None},
                       "lines": {"items": {"$ref": "#/$defs/Line"}, "minItems": 1, "type": "array"}},
        "required": ["id", "state", "lines"], "additionalProperties": False, "title": "Order", "type": "object",
    }  # fmt: skip
    assert constrained(json.dumps(schema)).unenforced is None
    codec = codec_of(with_version((), sl.values.Json(schema), "x")[0], "x")
    good = {"id": 1, "state": "new", "lines": [{"sku": "a"}]}
    wrong = [{**good, "id": 0}, {**good, "kind": "x"}, {**good, "note": "0123456789"}, {**good, "lines": [{}]}, {}]
    assert bad(codec, good, {**good, "note": None}, *wrong) == [2, 3, 4, 5, 6]
