"""The hash of keys: its values never change, and its cost is linear in the bytes of the keys."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from strandline.tables.rows.hashing import key_hashes

_64_BITS = (1 << 64) - 1


def expected(key: bytes | None) -> int:
    """The hash of one key, word by word: what tables on disk rely on."""
    key = key or b""
    value = len(key) * 0x9E3779B97F4A7C15 & _64_BITS
    for at in range(0, len(key), 8):
        value = (value ^ int.from_bytes(key[at : at + 8], "little")) * 0xFF51AFD7ED558CCD & _64_BITS
        value ^= value >> 32
    return (value * 0xC4CEB9FE1A85EC53 & _64_BITS) >> 32


SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1000, 4099]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("count", [1, 47, 48, 49, 400])
def test_every_key_has_its_hash_whatever_keys_are_beside_it(kind, count):
    chance = random.Random(count)
    keys = [chance.choice([None, chance.randbytes(chance.choice(SIZES))]) for _ in range(count + 3)]
    hashes = key_hashes(pa.array(keys, kind).slice(3))
    assert hashes.tolist() == [expected(key) for key in keys[3:]]


@pytest.mark.timeout(60)  # a step over all keys for each word of the longest one takes minutes
def test_one_long_key_costs_no_more_beside_many_short_ones():
    keys = [b"order-%d" % number for number in range(20_000)]
    long = bytes(range(256)) * (2 << 12)
    hashes = key_hashes(pa.array([*keys, long, *keys]))
    assert hashes[len(keys)] == expected(long)
    assert hashes[: len(keys)].tolist() == hashes[len(keys) + 1 :].tolist() == [expected(key) for key in keys]
