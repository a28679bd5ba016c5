"""Extreme values of every type, in every codec, up to the rows of a table: no native code may end the process of them.

A case is some values behind their lengths. All of them are decoded at once, encoded again, used as keys, written to a
data file, bound for SQLite and copied for PostgreSQL.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import pyarrow as pa

import strandline as sl
from strandline.tables.files.data_files import write_file
from strandline.tables.rows.shape import TableShape
from strandline.tables.sql.copy_format import copy_data
from strandline.tables.sql.postgres_types import staged_column
from strandline.tables.sql.sqlite_transaction import _bound
from tests.fuzz.targets import Target, Try
from tests.values.messages import order_files

LEAVES: dict[str, pa.DataType] = {
    "flag": pa.bool_(),
    "tiny": pa.int8(),
    "long": pa.int64(),
    "huge": pa.uint64(),
    "single": pa.float32(),
    "double": pa.float64(),
    "note": pa.string(),
    "raw": pa.binary(),
    "hash": pa.binary(3),
    "day": pa.date32(),
    "s": pa.timestamp("s"),
    "ms": pa.timestamp("ms", "UTC"),
    "us": pa.timestamp("us", "UTC"),
    "ns": pa.timestamp("ns", "Europe/Oslo"),
    "time": pa.time64("us"),
    "small_time": pa.time32("ms"),
    "price": pa.decimal128(12, 2),
    "round_price": pa.decimal128(5, -2),
    "exact": pa.decimal256(60, 30),
}
NO_AVRO = {"tiny", "huge", "s", "ns", "round_price"}
TEXTS = [
    *("1e-9999999", "-1e-9999999", "1e9999999", "0e-9999999", "0E+9999999", "1e-2000000", "1e-999999999999999999"),
    *("1E999999999999999999", "1e-39", "1e-77", "1e38", "1e76", "9" * 5000, "0." + "0" * 5000 + "1", "1." + "0" * 5000),
    *("NaN", "sNaN123456789", "Infinity", "-0", "\uff11\uff12", "0000-01-01", "0001-01-01", "9999-12-31"),
    *("0000-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "9999-12-31T23:59:59.9999999Z"),
    *("1677-09-21T00:12:43.145224191Z", "2262-04-11T23:47:16.854775808Z", "0000-12-31T23:59:59", "9999-12-31T23:59:59"),
    *("24:00:00", "23:59:60", "23:59:59.9999999", "00:00:00", "P1000000000D", "\0", "\U0010ffff" * 40, "", "AA=="),
    *("10000-01-01", "A" * 4),
]  # fmt: skip
BARE = ["1e-9999999", "0e-9999999", "1e9999999", "1e-400", "1e400", "9" * 5000, "-0.0", "true", "null", "1e308"]
NUMBERS: list[Any] = [
    *(0, -1, 127, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 253_402_300_800, -62_135_596_801, 253_402_300_800_000),
    *(2**53, 86_400_000_000, -86_400, float("inf"), float("nan"), 1e308, 5e-324, -0.0, True, None),
]
DEPTHS = [1, 30, 1000, 100_000]


def _fields(names: dict[str, pa.DataType]) -> pa.Schema:
    """Each type as a column, and inside of a list, a map and a struct."""
    return pa.schema(
        [
            *names.items(),
            *((f"{name}_list", pa.list_(kind)) for name, kind in names.items()),
            *((f"{name}_map", pa.map_(pa.string(), kind)) for name, kind in names.items()),
            *((f"{name}_struct", pa.struct({"x": pa.list_(pa.struct({"y": kind}))})) for name, kind in names.items()),
        ]
    )


SCHEMA = _fields(LEAVES)
AVRO_SCHEMA = _fields({name: kind for name, kind in LEAVES.items() if name not in NO_AVRO})


def _wrapped(name: str, value: Any, chance: random.Random) -> dict[str, Any]:
    """A field with the value, or with many of it inside."""
    count = chance.choice([0, 1, 3]) if chance.random() < 0.98 else 20_000
    match chance.randrange(6):
        case 0:
            return {f"{name}_list": [value] * count}
        case 1:
            return {f"{name}_map": {str(number): value for number in range(min(count, 100))}}
        case 2:
            return {f"{name}_struct": {"x": [{"y": value}, None][:count]}}
        case _:
            return {name: value}


def _json(chance: random.Random) -> bytes:
    if chance.random() < 0.05:
        depth = chance.choice(DEPTHS)
        return (
            b'{"unknown":'
            + chance.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"["])
            + b"}"
        )
    name = chance.choice(list(LEAVES))
    if chance.random() < 0.4:
        return b'{"%s":%s}' % (name.encode(), chance.choice(BARE).encode())
    value = chance.choice([*TEXTS, *NUMBERS])
    return msgspec.json.encode(_wrapped(name, value, chance))


def _messagepack(chance: random.Random) -> bytes:
    if chance.random() < 0.05:
        depth = chance.choice(DEPTHS)
        return b"\x81\xa1u" + b"\x91" * depth + b"\xc0"
    stamps = [
        msgspec.msgpack.Ext(-1, struct.pack(">Iq", nanos, seconds))
        for nanos in (0, 999_999_999, 2**32 - 1)
        for seconds in (2**63 - 1, -(2**63), 253_402_300_799, 253_402_300_800, -62_135_596_800)
    ]
    value = chance.choice([*TEXTS, *NUMBERS, 2**64 - 1, b"", b"abc", b"x" * 10_000, *stamps])
    return msgspec.msgpack.encode(_wrapped(chance.choice(list(LEAVES)), value, chance))


def _avro(codec: sl.values.Avro) -> Callable[[random.Random], bytes]:
    by_kind: tuple[tuple[Callable[[Any], bool], list[Any]], ...] = (
        (pa.types.is_boolean, [True]),
        (pa.types.is_date32, [0, 2**31 - 1, -(2**31), 2_932_896, 2_932_897, -719_162, -719_163]),
        (pa.types.is_time32, [0, -1, 2**31 - 1, 86_399_999, 86_400_000]),
        (pa.types.is_temporal, [one for one in NUMBERS if type(one) is int]),
        (pa.types.is_integer, [one for one in NUMBERS if type(one) is int]),
        (pa.types.is_floating, [one for one in NUMBERS if type(one) is float]),
        (pa.types.is_string, TEXTS),
        (pa.types.is_fixed_size_binary, [b"abc"]),
    )
    decimals = [b"", b"\x80", b"\xff" * 32, b"\x7f" + b"\xff" * 31, b"\x80" + b"\0" * 31, b"\x01" * 33, b"x" * 10_000]

    def make(chance: random.Random) -> bytes:
        name = chance.choice([name for name in LEAVES if name not in NO_AVRO])
        values = next((found for is_kind, found in by_kind if is_kind(LEAVES[name])), decimals)
        row = dict.fromkeys(AVRO_SCHEMA.names) | _wrapped(name, chance.choice(values), chance)
        return codec._encode(row)

    return make


def _protobuf(chance: random.Random) -> bytes:
    """A timestamp with any seconds and nanoseconds, in any field and at any depth, or any number."""
    seconds, nanos = (chance.choice([0, 1, 2**63 - 1, 2**63, 2**64 - 1, 253_402_300_800, 2**31, 10**9]) for _ in "ab")
    stamp = b"\x08" + _varint(seconds) + b"\x10" + _varint(nanos)
    at, depth = chance.choice([1, 2, 3, 5, 8, 20, 20, 20, 21, 22]), chance.choice([0, 1, 50, 5000])
    for _ in range(depth):
        stamp = _varint(at << 3 | 2) + _varint(len(stamp)) + stamp
    if chance.random() < 0.3:
        return _varint(at << 3) + _varint(seconds)
    return _varint(at << 3 | 2) + _varint(len(stamp)) + stamp


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _arrow(chance: random.Random) -> bytes:
    name = chance.choice([name for name, kind in LEAVES.items() if name not in ("flag", "hash", "raw", "note")])
    kind = LEAVES[name]
    width = kind.bit_width // 8
    number = chance.choice([0, 1, -1, 2 ** (8 * width - 1) - 1, -(2 ** (8 * width - 1)), 10**15, 253_402_300_800])
    data = (number % (1 << 8 * width)).to_bytes(width, "little")
    array = pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(data)])
    if chance.random() < 0.5:
        name, array = f"{name}_list", pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), array)
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({name: array})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


class _Files:
    """Data files that nobody keeps."""

    def stored(self, rows: pa.Table) -> pa.Table:
        return rows

    def put(self, name: str, data: memoryview) -> str:
        return name

    def read(self, path: str) -> pa.Table:
        raise NotImplementedError

    def remove(self, path: str) -> None:
        raise NotImplementedError


def _tried(codec: sl.values.Codec) -> Callable[[], AbstractContextManager[Try]]:
    keys = tuple(field.name for field in codec.schema if not pa.types.is_nested(field.type))

    def attempt(data: bytes) -> str:
        values = _split(data)
        decoded = codec.decode(pa.array(values, pa.binary()))
        decoded.columns.validate(full=True)
        assert decoded.columns.num_rows == len(values)
        codec.encode(decoded.columns)
        count = len(values)
        records = pa.table(
            {
                "offset": pa.array(range(count), pa.int64()),
                "timestamp": pa.array([0] * count, pa.timestamp("us", "UTC")),
                "op": pa.array([0] * count, pa.int8()),
                "key": pa.array([b"k"] * count, pa.binary()),
                "value": pa.array(values, pa.binary()),
                "headers": pa.nulls(count, pa.map_(pa.string(), pa.binary())),
            }
        )
        plain = TableShape("append", codec, has_plain_types=True) if _fits_files(codec) else TableShape("append", codec)
        rows = plain.rows(records).rows
        if _fits_files(codec):
            write_file(_Files(), "a", rows)
        TableShape("latest", codec, keys).rows(records)
        for column in rows.columns:
            _bound(column)
            if not pa.types.is_fixed_size_binary(column.type):
                b"".join(copy_data(pa.table([staged_column(column)], ["x"])))
        return "bad" if decoded.bad.num_rows else "fine"

    return lambda: nullcontext(attempt)


def _fits_files(codec: sl.values.Codec) -> bool:
    return not {"hash", "exact"} & set(codec.schema.names)


def _split(data: bytes) -> list[bytes]:
    """The values of a case; a shortened case has fewer."""
    values, at = [], 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        values.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return values


def _some(make: Callable[[random.Random], bytes], around: bytes = b"%s") -> Callable[[random.Random], bytes]:
    def several(chance: random.Random) -> bytes:
        values = [around.replace(b"%s", make(chance)) for _ in range(chance.choice([1, 40]))]
        return b"".join(struct.pack("<I", len(value)) + value for value in values)

    return several


def _in_files(schema: pa.Schema) -> pa.Schema:
    """Without the types that no data file takes."""
    return pa.schema(
        [field for field in schema if field.name.split("_")[0] not in ("hash", "exact", "time", "small", "round")]
    )


EVENT = b'{"op":"u","payload":{"op":"c","after":%s}}'
_AVRO = sl.values.Avro(AVRO_SCHEMA)
TARGETS = tuple(
    Target(f"extremes-{name}", _some(make, *around), _tried(codec), memory=1 << 30)
    for name, make, codec, *around in (
        ("json", _json, sl.values.Json(SCHEMA)),
        ("json-files", _json, sl.values.Json(_in_files(SCHEMA))),
        ("debezium", _json, sl.values.Debezium(sl.values.Json(pa.schema(LEAVES))), EVENT),
        ("messagepack", _messagepack, sl.values.MessagePack(SCHEMA)),
        ("avro", _avro(_AVRO), _AVRO),
        ("protobuf", _protobuf, sl.values.Protobuf(order_files(), "shop.Order")),
        ("arrow", _arrow, sl.values.Arrow(SCHEMA)),
    )
)
