"""Codecs of values: whatever the bytes are, there is a row, good or bad, in bounded time and memory."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal
from typing import Any

import pyarrow as pa

import strandline as sl
from strandline.errors import InvalidInput
from strandline.values.proposal import propose
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import Target, Try
from tests.values.messages import order_files

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "big": pa.int32(),
        "share": pa.float32(),
        "note": pa.string(),
        "raw": pa.binary(),
        "hash": pa.binary(3),
        "day": pa.date32(),
        "at": pa.timestamp("us", tz="UTC"),
        "time": pa.time64("us"),
        "price": pa.decimal128(12, 2),
        "lines": pa.list_(pa.struct({"sku": pa.string(), "count": pa.int32()})),
        "tags": pa.map_(pa.string(), pa.decimal128(5, 1)),
    }
)
ROW: dict[str, Any] = {
    "id": 7,
    "share": 1.5,
    "note": "é" * 20,
    "raw": b"\xff" * 30,
    "hash": b"abc",
    "day": dt.date(2024, 2, 29),
    "at": dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.UTC),
    "time": dt.time(1, 2, 3),
    "price": Decimal("1.50"),
    "lines": [{"sku": "a", "count": 1}, {"sku": None, "count": 2}],
    "tags": {"a": Decimal("1.5"), "b": None},
}
MESSAGE: dict[str, Any] = {"id": 7, "note": "x" * 20, "at": ROW["at"], "rank": 3, "first": {"sku": "a", "count": 2}}
PLAIN: dict[str, Any] = {"id": 7, "state": "OPEN", "lines": [{"sku": "a"}], "numbers": [1, 2], "tags": {"a": 1}}
AVRO = sl.values.Avro(registry={1: sl.values.Avro(SCHEMA)._text}, schema_id=1)


def _tried(codec: sl.values.Codec) -> Callable[[], AbstractContextManager[Try]]:
    good = codec.encode_one({}) if codec.name != "arrow" else codec.encode_one({"id": 1})

    def attempt(data: bytes) -> str:
        decoded = codec.decode(pa.array([good, data, None], pa.binary()))
        decoded.columns.validate(full=True)
        assert decoded.columns.num_rows == 3
        rows = decoded.bad.column("row").to_pylist()
        assert rows in ([], [1]), rows
        if rows:
            assert all(column[1].as_py() is None for column in decoded.columns.columns)
            return "bad"
        return "fine"

    return lambda: nullcontext(attempt)


def _target(name: str, codec: sl.values.Codec, *rows: dict[str, Any], is_text: bool = False) -> Target:
    return Target(name, mutated(tuple(map(codec.encode_one, rows)), is_text=is_text), _tried(codec), memory=512 << 20)


def _proposed() -> AbstractContextManager[Try]:
    good = b'{"id": 1}'

    def attempt(data: bytes) -> str:
        try:
            found = propose([good, data, None], "a sample")
        except InvalidInput:  # nothing is left of the fields
            return "refused"
        bad = sl.values.Json(found.text).decode(pa.array([good, data], pa.binary())).bad.num_rows
        assert bad == found.unfit <= 1
        assert all(map(str.isprintable, found.notes))
        return "bad" if bad else "fine"

    return nullcontext(attempt)


JSON = sl.values.Json(SCHEMA)
TARGETS = (
    Target(
        "value-proposal",
        mutated(
            (JSON.encode_one(ROW), b'{"id": 1, "tags": {"10": [1.5, {"a": "2026-01-31T10:00:00Z"}]}}'), is_text=True
        ),
        _proposed,
        memory=512 << 20,
    ),
    _target("value-json", sl.values.Json(SCHEMA), ROW, {"id": 1}, is_text=True),
    _target("value-messagepack", sl.values.MessagePack(SCHEMA), ROW, {"id": 1}),
    _target("value-avro", sl.values.Avro(SCHEMA), ROW, {"id": 1}),
    _target("value-avro-registry", AVRO, ROW, {"id": 1}),
    _target("value-protobuf", sl.values.Protobuf(order_files(), "shop.Order"), MESSAGE, {"id": 1}),
    _target("value-protobuf-plain", sl.values.Protobuf(order_files(), "shop.Plain"), PLAIN, {"id": 1}),
    _target("value-arrow", sl.values.Arrow(SCHEMA), ROW, {"id": 1}),
    _target("value-arrow-any", sl.values.Arrow(), {"a": 1, "b": "text", "c": [1, 2]}),
)
