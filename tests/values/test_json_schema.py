"""Keywords of a JSON Schema: each defines columns, is refused by a new log, or is an annotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import SchemaRefused
from strandline.values.recorded import as_version, with_version
from strandline.values.schema.json_schema import unenforced_keyword

CONSTRAINTS: dict[str, Any] = {
    "enum": [1, 2], "const": 1, "multipleOf": 2, "minimum": 0, "maximum": 0, "exclusiveMinimum": 0,
    "exclusiveMaximum": 9, "minLength": 1, "maxLength": 0, "pattern": "^a", "minItems": 1, "maxItems": 9,
    "uniqueItems": True, "contains": {"a": 1}, "minContains": 1, "maxContains": 2, "prefixItems": [{"a": 1}],
    "additionalItems": {"a": 1}, "required": ["x"],
    "unevaluatedItems": {"a": 1}, "minProperties": 1, "maxProperties": 2, "patternProperties": {"a": {}},
    "propertyNames": {"a": 1}, "unevaluatedProperties": {"a": 1}, "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"b": 1}}, "dependencies": {"a": ["b"]}, "allOf": [{"minimum": 1}], "not": {"const": 1},
    "if": {"const": 1}, "then": {"const": 1}, "else": {"const": 1}, "$dynamicRef": "#a", "$recursiveRef": "#",
}  # fmt: skip
ANNOTATIONS: dict[str, Any] = {
    "title": "Id", "description": "x", "default": 1, "examples": [1], "deprecated": True, "readOnly": True,
    "writeOnly": True, "$comment": "x", "$id": "https://x", "$schema": "https://x", "$anchor": "a", "$defs": {},
    "definitions": {}, "format": "email", "contentMediaType": "text/plain", "x-mine": 1, "uniqueItems": False,
    "required": [], "nullable": True,
}  # fmt: skip


def orders(**further: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"id": {"type": "integer"}, "line": {"type": "object", **further}}}


def line(**further: Any) -> dict[str, Any]:
    return orders(properties={"sku": {"type": "string", **further}})


@pytest.mark.parametrize("keyword", CONSTRAINTS)
def test_a_new_log_refuses_a_keyword_that_nothing_enforces_and_names_it(keyword: str) -> None:
    codec = sl.Json(line(**{keyword: CONSTRAINTS[keyword]}))
    with pytest.raises(SchemaRefused, match=rf"'{keyword.replace('$', '[$]')}' of the field 'line.sku'"):
        with_version((), codec, "x")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (orders(properties={"a": {"type": "string"}}, additionalProperties=False), "additionalProperties"),
        (orders(properties={"a": {"type": "string"}}, additionalProperties={"type": "string"}), "additionalProperties"),
        (orders(properties={"a": {"type": "string"}}, anyOf=[{"type": "null"}, {"type": "string"}]), "properties"),
        ({**line(), "required": ["id"]}, "required"),
        ({**orders(**{"$ref": "#/$defs/line"}), "$defs": {"line": {"type": "string", "minLength": 1}}}, "minLength"),
        (orders(anyOf=[{"type": "null"}, {"type": "integer", "minimum": 1}]), "minimum"),
        ({"properties": {"a": {"type": "array", "items": {"type": "integer", "maximum": 1}}}}, "maximum"),
        ({"properties": {"a": {"type": "object", "additionalProperties": {"type": "number", "const": 1}}}}, "const"),
    ],
)  # fmt: skip
def test_a_keyword_is_found_wherever_it_is(schema: dict[str, Any], keyword: str) -> None:
    assert (unenforced_keyword(schema) or "").startswith(f"'{keyword}' of the ")


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_annotations_are_allowed(keyword: str) -> None:
    schema = line(**{keyword: ANNOTATIONS[keyword]})
    assert with_version((), sl.Json(schema), "x")[0].format == "json"


@pytest.mark.parametrize("make", [sl.Json, sl.MessagePack, sl.Avro, sl.Arrow, lambda s: sl.values.Debezium(sl.Json(s))])
def test_every_codec_of_a_json_schema_knows_what_it_does_not_enforce(make: Any) -> None:
    with pytest.raises(SchemaRefused, match=r"'minLength' of the field 'line\.sku'"):
        with_version((), make(line(minLength=1)), "x")


@pytest.mark.parametrize("kind", ["object", "wal"])
def test_a_log_that_was_created_with_such_a_schema_still_opens(tmp_path: Path, kind: str) -> None:
    url = f"wal://{tmp_path}/log" if kind == "wal" else f"file://{tmp_path}/log"
    strict, plain = sl.Json(line(minLength=1)), sl.Json(line())
    with pytest.raises(SchemaRefused, match="'minLength'"):
        sl.open(url, create=True, value=strict)
    sl.open(url, create=True, value=plain).close()  # an older version recorded the same: types only
    assert as_version(strict).is_same_format(as_version(plain))
    with sl.open(url, create=True, value=strict) as log:
        log.evolve_value(strict)
        with log.producer() as producer:
            producer.append(value={"id": 1}).result(10)
