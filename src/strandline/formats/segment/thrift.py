"""Parquet's headers, in Thrift's compact protocol: sizes of pages, checked before Parquet's own reader uses them.

A page announces its number of values and its unpacked size; Parquet's reader allocates both at once. Two
encodings expand few bytes: a dictionary is unpacked as often as it is referred to, and values that share
prefixes (``DELTA_BYTE_ARRAY``) are written out one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

_STOP: Final = 0
_TRUE: Final = 1
_FALSE: Final = 2
_BYTE: Final = 3
I32: Final = 5
I64: Final = 6
_NUMBERS: Final = frozenset((4, I32, I64))
_DOUBLE: Final = 7
BINARY: Final = 8
LIST: Final = 9
_LISTS: Final = frozenset((LIST, 10))
STRUCT: Final = 12
_DEEPEST: Final = 16
_LONGEST_NUMBER: Final = 10
_LARGEST_I32: Final = (1 << 31) - 1
_SHORT_LIST: Final = 15

Fields = dict[int, "int | Fields"]
"""The numbers and structures in a structure, by field number."""


class ThriftReader:
    """Reads front to back; ``ValueError`` for invalid bytes."""

    __slots__ = ("_data", "at", "structs")

    def __init__(self, data: memoryview, at: int = 0) -> None:
        """Begin at byte ``at``."""
        self._data = data
        self.at = at
        """The next byte."""
        self.structs = 0
        """Number of structures read so far."""

    def struct(self, depth: int = 0) -> Fields:
        """The numbers in the next structure, and in those within it; all else is skipped.

        Fields must ascend, each once: readers differ in which of two duplicates they use.
        """
        fields: Fields = {}
        for number, kind in self.fields():
            if kind == I32:
                fields[number] = self._i32()
            elif kind == STRUCT and depth < _DEEPEST:
                fields[number] = self.struct(depth + 1)
            else:
                self.skip(kind, depth)
        return fields

    def fields(self) -> Iterator[tuple[int, int]]:
        """The number and the kind of each field of the next structure; the caller reads or skips it."""
        number = 0
        self.structs += 1
        while (head := self._byte()) != _STOP:
            step, kind = head >> 4, head & 15
            before, number = number, number + step if step else self._zigzag()
            if number <= before:
                raise ValueError(f"field {number} comes after {before}")
            yield number, kind

    def binary(self) -> memoryview:
        """The next string or bytes."""
        length, start = self._varint(), self.at
        self._move(length)
        return self._data[start : start + length]

    def list_of(self, kind: int) -> Iterator[None]:
        """Yield once for each item of the next list, whose items must be of this kind; the caller reads them."""
        count, found = self._list_head()
        if found != kind and count:
            raise ValueError(f"a list holds items of type {found} instead of {kind}")
        for _ in range(count):  # each takes at least a byte
            yield

    def _list_head(self) -> tuple[int, int]:
        """The number of items in the next list, and their kind."""
        head = self._byte()
        count = head >> 4
        return self._varint() if count == _SHORT_LIST else count, head & 15

    def _skip_struct(self, depth: int) -> None:
        self.structs += 1
        while (head := self._byte()) != _STOP:
            if not head >> 4:
                self._zigzag()
            self.skip(head & 15, depth)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skip the next value, of this kind, and count all structures in it."""
        if kind in _NUMBERS:
            self._varint()
        elif kind == BINARY:
            self._move(self._varint())
        elif kind in (_TRUE, _FALSE):
            return
        elif kind == STRUCT and depth < _DEEPEST:
            self._skip_struct(depth + 1)
        elif kind in _LISTS and depth < _DEEPEST:
            self._skip_list(depth + 1)
        elif kind in (_BYTE, _DOUBLE):
            self._move(1 if kind == _BYTE else 8)
        else:
            raise ValueError(f"a field is of type {kind}, or too deep")

    def _skip_list(self, depth: int) -> None:
        count, kind = self._list_head()
        if kind in (_TRUE, _FALSE):
            self._move(count)
            return
        for _ in range(count):  # each takes at least a byte
            self.skip(kind, depth)

    def _byte(self) -> int:
        at = self.at
        if at >= len(self._data):
            raise ValueError("it ends within a structure")
        self.at = at + 1
        return self._data[at]

    def _move(self, length: int) -> None:
        if length > len(self._data) - self.at:
            raise ValueError("it ends within a field")
        self.at += length

    def _varint(self) -> int:
        byte = self._byte()
        number, shift = byte & 0x7F, 7
        while byte & 0x80:
            byte = self._byte()
            number |= (byte & 0x7F) << shift
            shift += 7
            if shift > 7 * _LONGEST_NUMBER:
                raise ValueError(f"a number has more than {_LONGEST_NUMBER} bytes")
        return number

    def _zigzag(self) -> int:
        number = self._varint()
        return number >> 1 ^ -(number & 1)

    def _i32(self) -> int:
        number = self._zigzag()
        if not -_LARGEST_I32 - 1 <= number <= _LARGEST_I32:
            raise ValueError(f"{number} does not fit 32 bits")
        return number


PLAIN: Final = 0
PLAIN_DICTIONARY: Final = 2
DELTA_BINARY_PACKED: Final = 5
RLE_DICTIONARY: Final = 8

_DICTIONARIES: Final = frozenset((PLAIN_DICTIONARY, RLE_DICTIONARY))

# Page types, and fields of their headers.
_DATA_PAGE: Final = 0
_DICTIONARY_PAGE: Final = 2
_TYPE, _UNPACKED, _STORED, _DATA_HEADER, _DICTIONARY_HEADER = 1, 2, 3, 5, 7
_VALUES, _ENCODING = 1, 2
_SMALLEST_ENTRY: Final = 4
"""Least bytes of a dictionary entry: a number, or the length of a string."""


class Pages(NamedTuple):
    """Totals that the pages of one column of a row group announce."""

    values: int
    unpacked: int
    """Bytes, including those of the dictionary."""
    dictionary: int | None
    """Bytes of the dictionary alone; None if there is none."""
    encodings: frozenset[int]


def read_pages(chunk: memoryview) -> Pages:
    """Read the headers of these bytes, which must be pages only; ``ValueError`` otherwise."""
    values = unpacked = at = 0
    dictionary: int | None = None
    encodings = set()
    while at < len(chunk):
        reader = ThriftReader(chunk, at)
        header = reader.struct()
        size, stored = _natural(header, _UNPACKED), _natural(header, _STORED)
        at = reader.at + stored
        if at > len(chunk):
            raise ValueError("a page is longer than its column")
        unpacked += size
        kind = _natural(header, _TYPE)
        if kind == _DATA_PAGE:
            page = _within(header, _DATA_HEADER)
            values += _natural(page, _VALUES)
            encodings.add(_natural(page, _ENCODING))
        elif kind == _DICTIONARY_PAGE and dictionary is None and not encodings:
            page = _within(header, _DICTIONARY_HEADER)
            if _natural(page, _ENCODING) not in (PLAIN, PLAIN_DICTIONARY):
                raise ValueError("a dictionary has an unknown encoding")
            if _natural(page, _VALUES) * _SMALLEST_ENTRY > size:
                raise ValueError("a dictionary announces more entries than it has room for")
            dictionary = size
        else:
            raise ValueError(f"a page of type {kind} is not allowed there")
    if encodings & _DICTIONARIES and dictionary is None:
        raise ValueError("values refer to a dictionary that is not there")
    return Pages(values, unpacked, dictionary, frozenset(encodings))


def _natural(fields: Fields, number: int) -> int:
    found = fields.get(number)
    if not isinstance(found, int) or found < 0:
        raise ValueError(f"a page has no field {number}")
    return found


def _within(fields: Fields, number: int) -> Fields:
    found: Any = fields.get(number)
    if not isinstance(found, dict):
        raise ValueError(f"a page has no field {number}")  # noqa: TRY004 - the bytes are wrong, not the program
    return found
