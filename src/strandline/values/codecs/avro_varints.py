"""Numbers of Avro records that do not fit into 64 bits, which the library cuts off and takes for others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_BITS: Final = 7
_MOST_BITS: Final = 64
_SIZES: Final = {"null": 0, "boolean": 1, "float": 4, "double": 8}
# Rare in good records: so long a number, or as many letters that are no ASCII.
_SUSPECT: Final = re.compile(rb"[\x80-\xff]{9}[\x02-\xff]")


def varint_check(schema: Any) -> Callable[[bytes], None]:
    """The check of a record that the library has read: ``ValueError`` if a number has more than 64 bits.

    ``schema`` is as the library parsed it: each name is a full one.
    """
    named: dict[str, Any] = {}
    _collect(schema, named)

    def check(value: bytes) -> None:
        if _SUSPECT.search(value):
            _Walk(value, named).pass_over(schema)

    return check


def _collect(schema: Any, named: dict[str, Any]) -> None:
    if isinstance(schema, list):
        for branch in schema:
            _collect(branch, named)
    elif isinstance(schema, Mapping):
        if "name" in schema:
            named[schema["name"]] = schema
        for part in (schema.get("type"), schema.get("items"), schema.get("values")):
            _collect(part, named)
        for field in schema.get("fields", ()):
            _collect(field["type"], named)


class _Walk:
    """Goes over the bytes of one record."""

    def __init__(self, data: bytes, named: Mapping[str, Any]) -> None:
        self._data = data
        self._named = named
        self._at = 0

    def pass_over(self, schema: Any) -> None:
        if isinstance(schema, list):
            self.pass_over(schema[self._number()])
            return
        kind = schema["type"] if isinstance(schema, Mapping) else schema
        if not isinstance(kind, str):
            self.pass_over(kind)
        elif kind in _SIZES:
            self._at += _SIZES[kind]
        elif kind in ("int", "long", "enum"):
            self._number()
        elif kind in ("bytes", "string"):
            self._skip(self._number())
        elif kind == "fixed":
            self._skip(schema["size"])
        elif kind in ("record", "error"):
            for field in schema["fields"]:
                self.pass_over(field["type"])
        elif kind in ("array", "map"):
            self._blocks(kind, schema)
        else:
            self.pass_over(self._named[kind])

    def _blocks(self, kind: str, schema: Mapping[str, Any]) -> None:
        while count := self._number():
            if count < 0:
                self._number()  # the bytes of the block
            for _ in range(abs(count)):
                if kind == "map":
                    self._skip(self._number())
                self.pass_over(schema["items" if kind == "array" else "values"])

    def _skip(self, size: int) -> None:
        self._at += size

    def _number(self) -> int:
        number = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 0x7F) << shift
            shift += _BITS
            if number >> _MOST_BITS or shift > _MOST_BITS + _BITS - 1:
                raise ValueError("It has a number of more than 64 bits")
            if byte <= 0x7F:  # noqa: PLR2004 - the last one
                return (number >> 1) ^ -(number & 1)
