"""Headers of Arrow messages whose tables and texts are shared: small as bytes, and huge once Arrow has read them."""

from __future__ import annotations

import struct
from array import array
from typing import Final

_SIZES: Final = {"q": 8, "I": 4, "h": 2, "B": 1}
_SCHEMA, _RECORD_BATCH = 1, 3
_NULL, _STRUCT = 1, 13


class _Flatbuffer:
    """A flatbuffer written front to back; what it points at is named, and found when all of it is there."""

    def __init__(self) -> None:
        self._data = bytearray(4)
        self._names: dict[str, int] = {}
        self._runs = [(0, 1, "message")]

    def table(self, name: str, **fields: str | tuple[str, int]) -> None:
        """A table with fields ``f0``, ``f1``, …, each a pair of kind and number, or the name of what it points at."""
        places = {int(field[1:]): value for field, value in fields.items()}
        count = max(places, default=-1) + 1
        directory = self._aligned(8)
        self._data += bytes(4 + 2 * count)
        start = self._aligned(8)
        self._data += struct.pack("<i", start - directory)
        for index, value in places.items():
            kind, number = ("I", 0) if isinstance(value, str) else value
            at = self._aligned(_SIZES[kind])
            self._data += struct.pack("<" + kind, number)
            if isinstance(value, str):
                self._runs.append((at, 1, value))
            struct.pack_into("<H", self._data, directory + 4 + 2 * index, at - start)
        struct.pack_into("<HH", self._data, directory, 4 + 2 * count, len(self._data) - start)
        self._names[name] = start

    def vector(self, name: str, count: int, what: str) -> None:
        """A vector that names one table ``count`` times."""
        self._names[name] = self._aligned(4)
        self._data += struct.pack("<I", count)
        self._runs.append((len(self._data), count, what))
        self._data += bytes(4 * count)

    def structs(self, name: str, count: int) -> None:
        """A vector of pairs of long zeros."""
        self._aligned(8)
        self._data += bytes(4)
        self._names[name] = len(self._data)
        self._data += struct.pack("<I", count) + bytes(16 * count)

    def text(self, name: str, size: int) -> None:
        self._names[name] = self._aligned(4)
        self._data += struct.pack("<I", size) + b"x" * size + b"\0"

    def finished(self) -> bytes:
        for at, count, name in self._runs:
            distance = self._names[name] - at
            offsets = array("I", range(distance, distance - 4 * count, -4))
            self._data[at : at + 4 * count] = offsets.tobytes()
        self._aligned(8)
        return bytes(self._data)

    def _aligned(self, size: int) -> int:
        self._data += bytes(-len(self._data) % size)
        return len(self._data)


def shared_columns(count: int) -> bytes:
    """A schema that names one column ``count`` times."""
    made = _schema(pairs="none")
    made.vector("columns", count, "column")
    made.table("column", f0="name", f1=("B", 1), f2=("B", _NULL), f3="kind", f5="children")
    return _finish(made)


def nested_columns(depth: int) -> bytes:
    """A schema of a column whose columns are twice the same, and theirs too, and so on."""
    made = _schema(pairs="none")
    made.vector("columns", 1, "column 0")
    for level in range(depth):
        made.table(f"column {level}", f0="name", f1=("B", 1), f2=("B", _STRUCT), f3="kind", f5=f"children {level}")
        made.vector(f"children {level}", 2, f"column {level + 1}")
    made.table(f"column {depth}", f0="name", f1=("B", 1), f2=("B", _NULL), f3="kind", f5="children")
    return _finish(made)


def shared_pairs(where: str, count: int, size: int) -> bytes:
    """A schema whose metadata is one pair of texts ``count`` times: of the message, the schema or the column."""
    made = _schema(pairs=where)
    made.vector("columns", 1, "column")
    more = {"f6": "pairs"} if where == "column" else {}
    made.table("column", f0="name", f1=("B", 1), f2=("B", _NULL), f3="kind", f5="children", **more)
    return _finish(made, count, size)


def batch_with_shared_pairs(count: int, size: int) -> bytes:
    """A record batch without records, of one column of bytes, whose message repeats one pair of texts."""
    made = _Flatbuffer()
    made.table("message", f0=("h", 4), f1=("B", _RECORD_BATCH), f2="batch", f3=("q", 0), f4="pairs")
    made.table("batch", f0=("q", 0), f1="nodes", f2="buffers")
    made.structs("nodes", 1)
    made.structs("buffers", 3)
    return _finish(made, count, size)


def encapsulated(header: bytes) -> bytes:
    """A header as a message without a body."""
    return struct.pack("<II", 0xFFFFFFFF, len(header)) + header


def _schema(*, pairs: str) -> _Flatbuffer:
    made = _Flatbuffer()
    more = {"f4": "pairs"} if pairs == "message" else {}
    made.table("message", f0=("h", 4), f1=("B", _SCHEMA), f2="schema", f3=("q", 0), **more)
    more = {"f2": "pairs"} if pairs == "schema" else {}
    made.table("schema", f0=("h", 0), f1="columns", **more)
    return made


def _finish(made: _Flatbuffer, count: int = 0, size: int = 0) -> bytes:
    made.vector("children", 0, "kind")
    made.vector("pairs", count, "pair")
    made.table("pair", f0="text", f1="text")
    made.table("kind")
    made.text("text", size)
    made.text("name", 1)
    return made.finished()
