"""Names of the types of single values, as a log records them and a JSON Schema may name them."""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa
import pyarrow.types as pt

PLAIN_TYPES: Final = {
    "bool": pa.bool_(),
    **{f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "date32": pa.date32(),
    "time32[s]": pa.time32("s"),
    "time32[ms]": pa.time32("ms"),
    "time64[us]": pa.time64("us"),
}
"""Types that codecs take and that have no settings of their own, by their names."""
TYPE_NAMES: Final = {kind: name for name, kind in PLAIN_TYPES.items()}

_TIMESTAMP: Final = re.compile(r"timestamp\[(s|ms|us|ns)(?:, ([^\[\]\s,]{1,64}))?\]")
_DECIMAL: Final = re.compile(r"(decimal128|decimal256)\(([0-9]{1,2}), (-?[0-9]{1,2})\)")
_FIXED: Final = re.compile(r"binary\[([0-9]{1,7})\]")


def type_name(kind: pa.DataType) -> str:
    """The name of a type that codecs take for single values.

    >>> type_name(pa.timestamp("ms", "UTC")), type_name(pa.decimal128(12, 2)), type_name(pa.binary(16))
    ('timestamp[ms, UTC]', 'decimal128(12, 2)', 'binary[16]')
    """
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if pt.is_timestamp(kind):
        return f"timestamp[{kind.unit}]" if kind.tz is None else f"timestamp[{kind.unit}, {kind.tz}]"
    if pt.is_decimal(kind):
        return f"decimal{kind.bit_width}({kind.precision}, {kind.scale})"
    return f"binary[{kind.byte_width}]"


def type_named(name: str) -> pa.DataType | None:
    """The type of a name; None for an unknown name. Whether a time zone is known here is not checked.

    ``ValueError`` for more digits than the type has.

    >>> type_named("decimal128(12, 2)"), type_named("money")
    (Decimal128Type(decimal128(12, 2)), None)
    """
    if name in PLAIN_TYPES:
        return PLAIN_TYPES[name]
    if match := _TIMESTAMP.fullmatch(name):
        return pa.timestamp(match[1], match[2])
    if match := _DECIMAL.fullmatch(name):
        kind: pa.DataType = getattr(pa, match[1])(int(match[2]), int(match[3]))
        return kind
    if match := _FIXED.fullmatch(name):
        return pa.binary(int(match[1]))
    return None
