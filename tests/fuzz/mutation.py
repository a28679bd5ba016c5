"""How good bytes become hostile: drawn from a seed, and the same for every target."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WORDS = [0, 1, 2, 3, 4, 7, 8, 12, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
LONGS = [*WORDS, 1 << 32, 1 << 40, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 2, (1 << 64) - 8]

JSON_PIECES = [
    b"null", b"true", b"-1", b"1e999", b"Infinity", b"NaN", b"1.5", b"[]", b"{}", b'""', b'"x"', b"[[[[", b"9" * 5000,
    b'"\\ud800"', b"[" * 3000, b'{"reason": 1}', b"-0", b"\xff", b"\x00", b'"' + b"f" * 32 + b'"', b"9" * 30, b"1e300",
    b'"../../x"', b'"/"', b"[[1,2]]", b'{"a":[]}',
]  # fmt: skip

JSON_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 7, 10**30, 1 << 63, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), float("inf"),
    float("nan"), 1.5, 1e300, [], {}, "", "x", "..", "../x", "/", "a/b", "\0", "\ud800", "f" * 32, "1" * 5000, [[]],
    [[1, 2]], [None], {"a": 1}, "é" * 300, "00000000-0000-0000-0000-000000000007", "put", "forever", "latest",
]  # fmt: skip

Reseal = Callable[[bytes], bytes]


def unchanged(data: bytes) -> bytes:
    """For bytes that no checksum protects."""
    return data


def damage(data: bytearray, chance: random.Random, other: bytes, *, is_text: bool = False) -> None:
    """Change some bytes, in one of the ways in which they go bad or are made bad."""
    at = chance.randrange(len(data)) if data else 0
    match chance.randrange(10):
        case 0 | 1 if data:
            data[at] ^= 1 << chance.randrange(8)
        case 2 if data:
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        case 3:
            at -= at % 4
            data[at : at + 4] = struct.pack("<I", chance.choice(WORDS))
        case 4:
            at -= at % chance.choice([1, 4, 8])
            data[at : at + 8] = struct.pack("<Q", chance.choice(LONGS))
        case 5:
            del data[at : at + chance.choice([1, 4, 8, 64, len(data)])]
        case 6:
            data[at:at] = chance.randbytes(chance.choice([1, 4, 8, 64]))
        case 7 if other:
            start = chance.randrange(len(other))
            data[at : at + 16] = other[start : start + 16]
        case 8 if data:
            end = min(len(data), at + chance.choice([8, 64, 512]))
            data[at:at] = data[at:end] * chance.choice([1, 2, 50])
        case _ if is_text:
            data[at : at + chance.choice([0, 1, 4])] = chance.choice(JSON_PIECES)
        case _:
            data += chance.randbytes(chance.choice([1, 8]))


def json_damage(data: bytes, chance: random.Random) -> bytes:
    """The same object with other values in it, or without some: still JSON, and mostly not what it should be."""
    root = [json.loads(data)]
    for _ in range(times(chance)):
        places = list(_places(root))
        holder, key = chance.choice(places)
        if chance.random() < 0.15 and holder is not root:
            del holder[key]
        elif chance.random() < 0.15:
            other, name = chance.choice(places)
            holder[key] = copy.deepcopy(other[name])
        else:
            holder[key] = copy.deepcopy(chance.choice(JSON_VALUES))
    return json.dumps(root[0]).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where values are within a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def in_place(data: bytearray, chance: random.Random) -> None:
    """The same without moving any byte."""
    at = chance.randrange(len(data))
    match chance.randrange(4):
        case 0 | 1:
            data[at] ^= 1 << chance.randrange(8)
        case 2:
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        case _:
            width = chance.choice([1, 2, 4, 8])
            at = min(at, max(0, len(data) - width))
            value = chance.choice(LONGS) % (1 << 8 * width)
            data[at : at + width] = value.to_bytes(width, chance.choice(["little", "big"]))[: len(data) - at]


def times(chance: random.Random) -> int:
    """How often something is damaged."""
    return chance.choice([1, 1, 1, 2, 3, 8])


def mutated(
    seeds: Sequence[bytes], reseal: Reseal = unchanged, *, kept: int = 0, is_text: bool = False
) -> Callable[[random.Random], bytes]:
    """Bytes that were good once, sealed again nearly always, so that the damage is met behind the checksum.

    The last ``kept`` bytes are mostly left alone: where they are damaged, that is noticed too early.
    """

    def make(chance: random.Random) -> bytes:
        data, end = bytearray(chance.choice(seeds)), b""
        if kept and chance.random() < 0.9:
            data, end = data[:-kept], bytes(data[-kept:])
        if is_text and chance.random() < 0.7:
            data = bytearray(json_damage(bytes(data), chance))
        else:
            for _ in range(times(chance)):
                damage(data, chance, chance.choice(seeds), is_text=is_text)
        data += end
        made = reseal(bytes(data)) if chance.random() < 0.95 else bytes(data)
        return made if chance.random() < 0.99 else made[: chance.randrange(len(made) + 1)]

    return make
