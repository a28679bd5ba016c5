"""Schemas of values, with columns of every type that codecs take, inside each other."""

from __future__ import annotations

import string

import pyarrow as pa
from hypothesis import strategies as st

_LEAVES = st.sampled_from(
    [
        pa.bool_(), pa.int8(), pa.uint64(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary(),
        pa.large_binary(), pa.binary(16), pa.date32(), pa.time32("s"), pa.time32("ms"), pa.time64("us"),
        pa.timestamp("s"), pa.timestamp("ns", "Europe/Oslo"), pa.timestamp("ms", "+02:00"), pa.decimal128(38, 9),
        pa.decimal256(76, 0), pa.decimal128(5, -2),
    ]
)  # fmt: skip
_NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=4)
_TYPES = st.recursive(
    _LEAVES,
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(pa.large_list)
        | inner.map(lambda kind: pa.map_(pa.string(), kind))
        | st.dictionaries(_NAMES, inner, min_size=1, max_size=3).map(lambda fields: pa.struct(list(fields.items())))
    ),
    max_leaves=6,
)


def schemas() -> st.SearchStrategy[pa.Schema]:
    """Schemas of a few fields."""
    return st.dictionaries(_NAMES, _TYPES, min_size=1, max_size=4).map(pa.schema)
