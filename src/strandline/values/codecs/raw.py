"""The codec of opaque values: one column of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.values.contract import Columns, Decoded, bad_rows, check_values
from strandline.values.schema.evolution import conform_columns

_SCHEMA: Final = pa.schema([pa.field("value", pa.binary())])


@dataclass(frozen=True, slots=True)
class Raw:
    """Values as they are, in one column ``value``: the codec of logs whose values are opaque.

    >>> Raw().decode(pa.array([b"a", None], pa.binary())).columns.to_pylist()
    [{'value': b'a'}, {'value': None}]
    """

    name: ClassVar[str] = "raw"

    @property
    def schema(self) -> pa.Schema:
        """One column, ``value``."""
        return _SCHEMA

    def decode(self, values: pa.Array) -> Decoded:
        """The values themselves; none is bad."""
        return Decoded(
            pa.RecordBatch.from_arrays([check_values(values).cast(pa.binary())], schema=_SCHEMA), bad_rows({})
        )

    def encode(self, columns: Columns) -> pa.Array:
        """The column ``value``; a null one stays null."""
        return conform_columns(columns, _SCHEMA).column(0)

    def encode_one(self, value: Any) -> bytes:
        """Bytes are given as they are, or as the only field of a mapping."""
        if isinstance(value, dict) and set(value) == {"value"}:
            value = value["value"]
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInput(
                f"A raw value must be bytes, not {type(value).__name__}: name a codec, such as sl.values.Json."
            )
        return bytes(value)
